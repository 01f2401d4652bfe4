"""Compare all implementations of grouped matmul: TFLOP/s of the product and of both gradients.

    python benchmarks/grouped_matmul.py [--groups 8 128] [--loads even skewed] [--tokens 16384] [--width 4096]
                                        [--inner 14336] [--dtype bfloat16] [--only NAME ...] [--runs 5] [--json FILE]
                                        [--write-table [FILE]]
    python benchmarks/grouped_matmul.py --tune [--groups 8 128] [--loads even]

Runs on the first device. Rows [tokens, width], sorted by group, are multiplied by matrices [groups, width, inner]; `dx`
is the gradient of the rows, `dw` that of the matrices, `all` the three legs together. With even loads every row draws
its group uniformly; with skewed loads it draws group n with a probability proportional to 1 / n. The xla implementation
is JAX's ragged_dot. `dense` multiplies all rows by one matrix with the same FLOPs, which is the upper limit for a
grouped product. FLOPs are 2 × tokens × width × inner per leg; additional work of an implementation is not counted. The
implementations run in alternation; figures are medians. Distance is that of the worst of the three results from
float32, over the rows and the matrix of the largest group, relative to the norm.

--write-table writes the seconds of the Pallas kernel with even loads into the table of rates that `plan` reads,
jaxopt_llm/planning/search/grouped_matmul_measured.json, or into FILE. They replace older figures of the same calls.

--tune tries the blocks of the Pallas kernel one by one for each leg and prints the fastest first. On a CPU the sizes
are tiny and kernels run in the interpreter of Pallas, so the figures mean nothing.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention import ON_CPU, distance, first_line
from outcomes import compared, save

from jaxopt_llm.core import errors
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.files import replace_durably
from jaxopt_llm.kernels import grouped_matmul_pallas
from jaxopt_llm.kernels.grouped_matmul import XlaProducts
from jaxopt_llm.kernels.grouped_matmul_pallas import BLOCKS, Blocks
from jaxopt_llm.planning.search import grouped_rate

LEGS = ("forward", "dx", "dw")
SECONDS = 0.1  # calls in a row per measurement take this long: one short call would also measure the host
MOST_CALLS = 10
SHARED_MEMORY = 232_448  # bytes per block on an H100
TOKENS, WIDTH, INNER, GROUPS = (256, 64, 96, [4]) if ON_CPU else (16_384, 4096, 14_336, [8, 128])

Operands = dict[str, jax.Array]  # x, one (matrix), w, dy, sizes
Leg = Callable[[Operands], jax.Array]


@dataclass(frozen=True)
class Case:
    tokens: int
    width: int
    inner: int
    groups: int
    load: str  # "even" or "skewed"
    dtype: str

    @property
    def flops(self) -> float:
        """FLOPs of one leg."""
        return 2 * self.tokens * self.width * self.inner

    def sizes(self) -> np.ndarray:
        weights = 1 / (np.arange(self.groups) + 1) if self.load == "skewed" else np.ones(self.groups)
        drawn = np.random.default_rng(0).multinomial(self.tokens, weights / weights.sum())
        return drawn.astype(np.int32)

    def operands(self) -> Operands:
        def draw(seed: int, *shape: int) -> jax.Array:
            return jax.random.normal(jax.random.key(seed), shape, self.dtype)

        one = draw(1, self.width, self.inner)
        return {
            "x": draw(0, self.tokens, self.width),
            "one": one,
            # One matrix with another scale in each group: random matrices for all groups would not fit into memory.
            "w": one * draw(2, self.groups, 1, 1),
            "dy": draw(3, self.tokens, self.inner),
            "sizes": jnp.asarray(self.sizes()),
        }

    def expected(self, of: Operands) -> list[jax.Array]:
        """Return the results of the three legs for the largest group, in float32."""
        group, rows = self.largest()
        with jax.default_matmul_precision("highest"):
            x, w, dy = (each.astype(jnp.float32) for each in (of["x"][rows], of["w"][group], of["dy"][rows]))
            return [x @ w, dy @ w.T, x.T @ dy]

    def largest(self) -> tuple[int, slice]:
        """Return the index and the rows of the largest group."""
        sizes = self.sizes()
        group = int(sizes.argmax())
        begin = int(sizes[:group].sum())
        return group, slice(begin, begin + int(sizes[group]))


def own(implementation: Any, **settings: Any) -> dict[str, Leg]:
    def forward(of: Operands) -> jax.Array:
        return implementation.forward(of["x"], of["w"], of["sizes"], of["x"].dtype, **settings)

    def dx(of: Operands) -> jax.Array:
        return implementation.forward(of["dy"], of["w"], of["sizes"], of["x"].dtype, transposed=True, **settings)

    def dw(of: Operands) -> jax.Array:
        return implementation.weight_gradient(of["x"], of["dy"], of["sizes"], of["x"].dtype, **settings)

    return {"forward": forward, "dx": dx, "dw": dw}


DENSE: dict[str, Leg] = {
    "forward": lambda of: of["x"] @ of["one"],
    "dx": lambda of: of["dy"] @ of["one"].T,
    "dw": lambda of: of["x"].T @ of["dy"],
}
WAYS = {"xla": own(XlaProducts()), "pallas": own(grouped_matmul_pallas, interpret=ON_CPU), "dense": DENSE}


def seconds(run: Callable[[], Any]) -> float:
    """Return the seconds of one call of a function that has run before."""

    def over(calls: int) -> float:
        clock = time.perf_counter()
        for _ in range(calls):
            last = run()
        jax.block_until_ready(last)
        return (time.perf_counter() - clock) / calls

    return over(min(max(round(SECONDS / over(1)), 1), MOST_CALLS))


def far(case: Case, legs: Mapping[str, Callable[[], Any]], expected: list[jax.Array] | None) -> float | None:
    """Run the legs and return the distance of their results; None if nothing is expected."""
    group, rows = case.largest()
    found = []
    for leg, run in legs.items():
        out = jax.block_until_ready(run())
        if expected:
            found.append(out[group] if leg == "dw" else out[rows])
    return distance(found, expected) if expected else None


def compare(case: Case, only: list[str], runs: int) -> list[dict[str, Any]]:
    of, prepared, rows = case.operands(), {}, []
    expected = case.expected(of)
    for name, legs in WAYS.items():
        if only and name not in only:
            continue
        row: dict[str, Any] = {"name": name, **dataclasses.asdict(case)}
        rows.append(row)
        compiled = {leg: functools.partial(jax.jit(function), of) for leg, function in legs.items()}
        try:
            row["distance"] = far(case, compiled, None if name == "dense" else expected)
        except jax.errors.JaxRuntimeError as error:  # masked copies of all rows for each group may not fit into memory
            row["unavailable"] = first_line(error)
            continue
        prepared[name] = compiled
    del expected
    times: dict[str, dict[str, list[float]]] = {name: {leg: [] for leg in LEGS} for name in prepared}
    for _ in range(runs):
        for name, leg in itertools.product(prepared, LEGS):
            times[name][leg].append(seconds(prepared[name][leg]))
    for row in rows:
        if row["name"] in times:
            taken = {leg: statistics.median(each) for leg, each in times[row["name"]].items()}
            row["seconds"] = taken
            row["tflops"] = {leg: case.flops / each / 1e12 for leg, each in taken.items()}
            row["tflops"]["all"] = len(LEGS) * case.flops / sum(taken.values()) / 1e12
    return rows


def line(row: dict[str, Any]) -> str:
    which = f"{row['groups']:>6} {row['load']:>7}  {row['name']:<7}"
    if "unavailable" in row:
        return f"{which} {row['unavailable']}"
    figures = " ".join(f"{row['tflops'][leg]:9.1f}" for leg in (*LEGS, "all"))
    return f"{which} {figures}" + ("" if row["distance"] is None else f" {row['distance']:9.1e}")


HEAD = f"{'groups':>6} {'load':>7}  {'':<7} " + " ".join(f"{leg:>9}" for leg in (*LEGS, "all", "distance"))


def write_table(report: Mapping[str, Any], file: Path) -> None:
    """Write the even loads of a report into the table. They replace rows of the same calls."""
    names = [each.name for each in dataclasses.fields(grouped_rate.Measurement)]
    measured = [
        grouped_rate.Measurement(**{name: value for name, value in (report | row).items() if name in names})
        for row in report["rows"]
        if (row["name"], row["load"]) == ("pallas", "even") and "seconds" in row
    ]
    known = {each.key: each for each in (grouped_rate.read_table(file) if file.exists() else [])}
    known |= {each.key: each for each in measured}
    lines = [json.dumps(dataclasses.asdict(known[key])) for key in sorted(known)]
    replace_durably(file, "[\n" + ",\n".join(lines) + "\n]\n")


def choices(itemsize: int) -> list[Blocks]:
    """Return the blocks whose loads fit into shared memory and whose sums fit into registers and are not too few."""
    every = itertools.product((64, 128, 256), (64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4, 5))
    return [
        each
        for each in itertools.starmap(Blocks, every)
        if (each.rows + each.columns) * each.depth * each.stages * itemsize <= SHARED_MEMORY
        and 32 <= each.rows * each.columns // (each.warps * 32) <= 128
    ]


def tune(case: Case, runs: int) -> dict[str, list[dict[str, Any]]]:
    """Return the blocks of each leg with their TFLOP/s: fastest first, last those that do not compile."""
    of = case.operands()
    itemsize = of["x"].dtype.itemsize
    found: dict[str, list[dict[str, Any]]] = {}
    for leg in LEGS:
        rows = found[leg] = []
        for blocks in choices(itemsize)[: 2 if ON_CPU else None]:
            row: dict[str, Any] = dataclasses.asdict(blocks)
            rows.append(row)
            try:
                way = own(grouped_matmul_pallas, blocks=blocks, interpret=ON_CPU)[leg]
                run = functools.partial(jax.jit(way), of)
                jax.block_until_ready(run())
                row["tflops"] = case.flops / statistics.median(seconds(run) for _ in range(runs)) / 1e12
            except jax.errors.JaxRuntimeError as error:  # not enough shared memory or registers
                row["unavailable"] = first_line(error)
        rows.sort(key=lambda row: -row.get("tflops", 0))
        print(f"{leg}, {case.groups} groups, {case.load}; by default {BLOCKS[itemsize]}")
        for row in rows[:6]:
            print(f"  {row}", flush=True)
    return found


def main() -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=GROUPS)
    parser.add_argument("--loads", nargs="+", default=["even", "skewed"], choices=["even", "skewed"])
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"rows of all groups (default: {TOKENS})")
    parser.add_argument("--width", type=int, default=WIDTH, help=f"width of a row (default: {WIDTH})")
    parser.add_argument("--inner", type=int, default=INNER, help=f"width of a row of the product (default: {INNER})")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--only", nargs="+", default=[], choices=list(WAYS), help="measure only these implementations")
    parser.add_argument("--runs", type=int, default=5, help="measurements of each implementation (default: 5)")
    parser.add_argument("--tune", action="store_true", help="try the blocks of the Pallas kernel instead")
    parser.add_argument(
        "--write-table",
        type=Path,
        nargs="?",
        const=grouped_rate.TABLE,
        metavar="FILE",
        help="write the seconds of the Pallas kernel into the table of rates that `plan` reads, or into FILE",
    )
    parser.add_argument("--json", type=Path, help="file for the figures; the table is written next to it as .txt")
    asked = parser.parse_args()
    if asked.write_table and (ON_CPU or asked.tune):
        raise InputError("--write-table: run it on the GPU that the table is for, without --tune")
    cases = [
        Case(asked.tokens, asked.width, asked.inner, groups, load, asked.dtype)
        for groups, load in itertools.product(asked.groups, asked.loads)
    ]
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
    if asked.tune:
        report["blocks"] = [{**dataclasses.asdict(case), **tune(case, asked.runs)} for case in cases]
        save(asked.json, report, json.dumps(report, indent=2))
        return 0
    shape = f"{asked.tokens} × {asked.width} × {asked.inner}"
    head = f"{report['device']}, jax {jax.__version__}, {asked.dtype}, {shape}; TFLOP/s\n{HEAD}"
    one = functools.partial(compare, only=asked.only, runs=asked.runs)
    for _ in compared(cases, one, line, head, report, asked.json):
        if asked.write_table:
            write_table(report, asked.write_table)
    return 0


if __name__ == "__main__":
    errors.run_command(main)
