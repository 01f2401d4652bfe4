"""The implementation of attention that a call takes unless it names one: the fastest by a table of measurements.

The table is attention_measured.json, which benchmarks/attention.py --write-table writes on a GPU. Its key is what is
known both of a GPU and of one that is only compiled for: the compute capability. Nothing is timed here, so that all
processes of a job, and `plan` before it, come to the same.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

TABLE = Path(__file__).with_name("attention_measured.json")
FALLBACK = "xla"  # has no limits, and needs no GPU
MEASURE = "`python benchmarks/attention.py --write-table` on such a GPU measures it"


@dataclass(frozen=True)
class Measured:
    """A causal call of `length` queries and keys: seconds of forward and backward together, by implementation."""

    capability: str  # compute capability, as in "9.0"
    dtype: str
    head_dim: int
    length: int
    device: str  # on which it was
    jax: str  # the version
    seconds: Mapping[str, float]

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.capability, self.dtype, self.head_dim, self.length


@dataclass(frozen=True)
class Choice:
    """An implementation, and why it is that one: nothing where it was asked for, or where there is no GPU."""

    name: str
    reason: str = ""
    measured: bool = True

    def __str__(self) -> str:
        return f"{self.name}, {self.reason}" if self.reason else self.name


def fastest(
    head_dim: int,
    dtype: Any,
    keys: int,
    capability: tuple[int, int] | None,
    unsupported: Mapping[str, Sequence[str]],
    table: Sequence[Measured] | None = None,
) -> Choice:
    """Of the implementations that support the call, the fastest at the measured length that is nearest on a log scale.

    keys: how many a query's call has; capability: the GPU's compute capability, None where there is none.
    unsupported: of every implementation that the caller could take, what of the call it does not support.
    table: the package's by default.
    """
    if capability is None:
        return Choice(FALLBACK)
    others = {name: problems for name, problems in unsupported.items() if name != FALLBACK}
    if all(others.values()):
        why = "; ".join(problem for problems in others.values() for problem in problems)
        return Choice(FALLBACK, f"the only one that supports this call ({why})")
    dtype, version = jnp.dtype(dtype).name, f"{capability[0]}.{capability[1]}"
    rows = read(TABLE) if table is None else table
    alike = [row for row in rows if (row.capability, row.dtype, row.head_dim) == (version, dtype, head_dim)]
    nearest = min(alike, key=lambda row: (abs(math.log(row.length / keys)), row.length), default=None)
    seconds = {name: each for name, each in nearest.seconds.items() if name in unsupported} if nearest else {}
    missed: list[str] = []
    for name in sorted(seconds, key=seconds.__getitem__):
        if not unsupported[name]:
            assert nearest is not None
            reason = f"the fastest at head_dim {head_dim} in {dtype} over {nearest.length} tokens on {nearest.device}"
            return Choice(name, reason + "".join(f"; but for {each}" for each in missed))
        missed.append(f"{name} ({'; '.join(unsupported[name])})")
    reason = f"as nothing was measured of head_dim {head_dim} in {dtype} on compute capability {version}: {MEASURE}"
    return Choice(FALLBACK, reason, measured=False)


def read(file: Path) -> list[Measured]:
    return [Measured(**row) for row in json.loads(file.read_text())]
