"""Rate of the grouped matmuls of experts (kernels/grouped_matmul_pallas.py), from measurements on GPUs.

A group takes a time for each of its rows, and a time that does not depend on them: partly filled tiles, and for `dw`
the write of a matrix. So the time of a FLOP is linear in 1 / rows of a group, and two measurements give both times.
Rates are shares of the peak, so that they serve other chips, too.

The table is grouped_matmul_measured.json. `benchmarks/grouped_matmul.py --write-table` writes it on a GPU.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxopt_llm.compiler.chips import Chip, chip_of
from jaxopt_llm.compiler.hlo import Leg
from jaxopt_llm.core import json_files

TABLE = Path(__file__).with_name("grouped_matmul_measured.json")
LEGS: tuple[Leg, ...] = ("forward", "dx", "dw")
NEAR = 2  # largest ratio of the elements of two matrices where one stands for the other


@dataclass(frozen=True)
class Measurement:
    """Seconds of each leg of a grouped matmul whose rows draw their group uniformly."""

    device: str  # name of the GPU
    jax: str  # version
    dtype: str
    tokens: int  # rows of all groups
    width: int
    inner: int
    groups: int
    seconds: Mapping[Leg, float]

    @property
    def key(self) -> tuple[str, str, int, int, int, int]:
        return self.device, self.dtype, self.width, self.inner, self.tokens, self.groups

    @property
    def rows(self) -> float:
        """Mean rows of a group."""
        return self.tokens / self.groups

    def seconds_at_peak(self) -> float:
        """Return the time of one leg at the peak of the GPU."""
        chip = chip_of(self.device)
        assert chip is not None, f"{self.device} is not in compiler/chips.py"
        return 2 * self.tokens * self.width * self.inner / chip.peak_flops[self.dtype]


@dataclass(frozen=True)
class Groups:
    """Groups of a grouped matmul.

    Attributes:
        rows: mean rows of a group that are filled.
        width, inner: sizes of a group's matrix, in any order.
        dtype: of the operands.
    """

    rows: float
    width: int
    inner: int
    dtype: str = "bfloat16"


@functools.cache
def read_table(file: Path = TABLE) -> Sequence[Measurement]:
    return [Measurement(**row) for row in json_files.read(file, "install the package again")]


def find_efficiency(chip: Chip, leg: Leg, groups: Groups, table: Sequence[Measurement] | None = None) -> float:
    """Return the share of the chip's peak that a grouped matmul attains.

    With more rows in a group than measured it stays that of the most rows, because nothing faster has been measured.
    With fewer, the line through the two nearest measurements goes on.

    Args:
        table: the package's table by default.
    """
    # Time relative to that at the peak, by 1 / rows of a group.
    points = {
        1 / each.rows: each.seconds[leg] / each.seconds_at_peak()
        for each in _find_nearest(chip, groups, read_table() if table is None else table)
    }
    # A group without rows takes no time: of fewer rows than groups, each is a group of its own.
    wanted, known = 1 / max(groups.rows, 1.0), sorted(points)
    if wanted <= known[0] or len(known) == 1:
        return 1 / points[known[0]]
    below, above = next((pair for pair in itertools.pairwise(known) if wanted <= pair[1]), known[-2:])
    slope = max((points[above] - points[below]) / (above - below), 0.0)  # never faster with fewer rows
    return 1 / (points[below] + slope * (wanted - below))


def describe_rates(chip: Chip, groups: Groups, table: Sequence[Measurement] | None = None) -> str:
    """Return a line on the rates of a model's experts: where they come from, and what has not been measured."""
    table = read_table() if table is None else table
    nearest = _find_nearest(chip, groups, table)
    of, rows = nearest[0], sorted(each.rows for each in nearest)
    here = {
        "this GPU": of.device != chip.name,
        f"groups of {groups.rows:,.0f} rows": not rows[0] <= groups.rows <= rows[-1],
        groups.dtype: of.dtype != groups.dtype,
        f"matrices of {groups.width} × {groups.inner}": _distance(of, groups) > math.log(NEAR),
    }
    forward, *backward = (f"{100 * find_efficiency(chip, leg, groups, table):.3g}%" for leg in LEGS)
    unmeasured = ", ".join(name for name, is_far in here.items() if is_far)
    return (
        f"grouped matmuls {forward} of the peak forward and {' and '.join(backward)} backward, as measured on "
        f"{of.device} with groups of {' and '.join(f'{each:,.0f}' for each in rows)} rows and matrices of "
        f"{of.width} × {of.inner}" + (f"; not measured: {unmeasured}" if unmeasured else "")
    )


def _find_nearest(chip: Chip, groups: Groups, table: Sequence[Measurement]) -> Sequence[Measurement]:
    """Return the measurements of one GPU, one dtype and one matrix: of this chip and this dtype if there are any."""

    def order(each: Measurement) -> tuple[bool, bool, float]:
        return each.device != chip.name, each.dtype != groups.dtype, _distance(each, groups)

    def find_series(each: Measurement) -> tuple[str, str, int, int]:
        return each.device, each.dtype, each.width, each.inner

    nearest = min(table, key=order)
    return [each for each in table if find_series(each) == find_series(nearest)]


def _distance(measured: Measurement, groups: Groups) -> float:
    """Return the distance of the matrices' numbers of elements, on a log scale."""
    return abs(math.log(measured.width * measured.inner / (groups.width * groups.inner)))
