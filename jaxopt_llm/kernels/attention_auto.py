"""Choice of the implementation of attention for "auto": the fastest one by a table of measurements.

The table is attention_measured.json. `benchmarks/attention.py --write-table` writes it on a GPU. Its key is the compute
capability, which is known for a GPU in the machine and for a GPU that is only a compilation target. Nothing is timed
here, so all processes of a job, and `plan` before the job, make the same choice.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

TABLE = Path(__file__).with_name("attention_measured.json")
FALLBACK = "xla"  # has no limits and needs no GPU
MEASURE = "run `python benchmarks/attention.py --write-table` on such a GPU to measure it"


@dataclass(frozen=True)
class Measurement:
    """Seconds of forward plus backward of a causal call with `length` queries and keys, by implementation."""

    capability: str  # compute capability, as in "9.0"
    dtype: str
    head_dim: int
    length: int
    device: str  # name of the GPU
    jax: str  # version
    seconds: Mapping[str, float]

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.capability, self.dtype, self.head_dim, self.length


@dataclass(frozen=True)
class AttentionChoice:
    """Name of an implementation, and the reason for it: empty if it was requested or there is no GPU."""

    name: str
    reason: str = ""
    measured: bool = True

    def __str__(self) -> str:
        return f"{self.name}, {self.reason}" if self.reason else self.name


def choose_fastest(
    head_dim: int,
    dtype: Any,
    keys: int,
    capability: tuple[int, int] | None,
    unsupported: Mapping[str, Sequence[str]],
    table: Sequence[Measurement] | None = None,
) -> AttentionChoice:
    """Choose the fastest implementation that supports the call, by the measurement with the nearest length.

    The nearest length is the nearest on a log scale.

    Args:
        head_dim: Head size of queries and keys.
        dtype: Of queries, keys and values.
        keys: Number of keys of the call.
        capability: Compute capability of the GPU; None without a GPU.
        unsupported: For each implementation that the caller can use, the properties of the call that it does not
            support.
        table: Measurements; the package's table by default.
    """
    if capability is None:
        return AttentionChoice(FALLBACK)
    others = {name: problems for name, problems in unsupported.items() if name != FALLBACK}
    if all(others.values()):
        problems = "; ".join(problem for found in others.values() for problem in found)
        return AttentionChoice(FALLBACK, f"the only implementation that supports this call ({problems})")
    dtype, version = jnp.dtype(dtype).name, f"{capability[0]}.{capability[1]}"
    rows = read_table(TABLE) if table is None else table
    matching = [row for row in rows if (row.capability, row.dtype, row.head_dim) == (version, dtype, head_dim)]
    nearest = min(matching, key=lambda row: (abs(math.log(row.length / keys)), row.length), default=None)
    seconds = {name: time for name, time in nearest.seconds.items() if name in unsupported} if nearest else {}
    skipped: list[str] = []
    for name in sorted(seconds, key=seconds.__getitem__):
        if not unsupported[name]:
            assert nearest is not None
            reason = f"the fastest at head_dim {head_dim} in {dtype} over {nearest.length} tokens on {nearest.device}"
            return AttentionChoice(name, reason + "".join(f"; except {each}" for each in skipped))
        skipped.append(f"{name} ({'; '.join(unsupported[name])})")
    reason = f"as there is no measurement of head_dim {head_dim} in {dtype} on compute capability {version}; {MEASURE}"
    return AttentionChoice(FALLBACK, reason, measured=False)


def read_table(file: Path) -> list[Measurement]:
    return [Measurement(**row) for row in json.loads(file.read_text())]
