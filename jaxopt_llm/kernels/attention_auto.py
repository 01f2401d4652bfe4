"""Choice of the implementation of attention for "auto": by a table of measurements, and without one by an order.

The table is attention_measured.json. `benchmarks/attention.py --write-table` writes it on a GPU. Its key is the compute
capability, which is known for a GPU in the machine and for a GPU that is only a compilation target. Nothing is timed
here, so all processes of a job, and `plan` before the job, make the same choice.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxopt_llm.core import json_files

TABLE = Path(__file__).with_name("attention_measured.json")
FALLBACK = "xla"  # has no limits and needs no GPU
# Order without a measurement, by the major number of the compute capability. cuDNN attains 65% of the peak on H100
# (Shah et al. 2024, arXiv:2407.08608), more than the method of our kernels. On A100 it attains 0.82 of the throughput
# of FlashAttention-2, our method (huggingface/transformers#48163).
ORDER = {9: ("cudnn", "triton", "pallas"), 10: ("cudnn", "triton", "pallas")}
OTHER_ORDER = ("pallas", "cudnn")
MEASURE = "on such a GPU, `benchmarks/attention.py --write-table` of a checkout measures it"


@dataclass(frozen=True)
class AttentionCall:
    """Properties of a call that decide which implementations support it, and which is the fastest.

    Attributes:
        head_dim: head size of queries and keys.
        dtype: of queries, keys and values.
        keys: number of keys.
        segments: maximum number of segments in a row, padding included; None if any number is possible.
        window: size of the sliding window; None without one.
        softcap: bound of the scores; None or 0 without one.
        parts: number of parts in which a ring brings the keys; `keys` is the number of keys in one part.
        positions: the queries have no key each, but positions.
    """

    head_dim: int
    dtype: Any
    keys: int
    segments: int | None = None
    window: int | None = None
    softcap: float | None = None
    parts: int = 1
    positions: bool = False


@dataclass(frozen=True)
class Measurement:
    """Seconds of forward plus backward of a causal call with `length` queries and keys, by implementation."""

    capability: str  # compute capability, as in "9.0"
    dtype: str
    head_dim: int
    length: int
    documents: int  # in each row; with more than one, a query sees only the keys of its document
    device: str  # name of the GPU
    jax: str  # version
    seconds: Mapping[str, float]

    @property
    def key(self) -> tuple[str, str, int, int, int]:
        return self.capability, self.dtype, self.head_dim, self.length, self.documents


@dataclass(frozen=True)
class AttentionChoice:
    """Name of an implementation, and the reason for it: empty if it was requested or there is no GPU.

    warning: how an implementation failed that would have been chosen before it; empty if none did.
    """

    name: str
    reason: str = ""
    warning: str = ""

    def __str__(self) -> str:
        return f"{self.name}, {self.reason}" if self.reason else self.name


def choose_fastest(
    call: AttentionCall,
    capability: tuple[int, int] | None,
    unsupported: Mapping[str, Sequence[str]],
    table: Sequence[Measurement] | None = None,
) -> AttentionChoice:
    """Choose the fastest implementation that supports the call.

    The measurement with the nearest length, on a log scale, decides; if there is one, a measurement of packed documents
    for a call with packed documents, and of whole rows for another. Without a measurement, the order for the compute
    capability decides.

    Args:
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
    head_dim, dtype, version = call.head_dim, jnp.dtype(call.dtype).name, f"{capability[0]}.{capability[1]}"
    rows = read_table(TABLE) if table is None else table
    matching = [row for row in rows if (row.capability, row.dtype, row.head_dim) == (version, dtype, head_dim)]
    alike = [row for row in matching if (row.documents > 1) == (call.segments != 1)] or matching
    nearest = min(alike, key=lambda row: (abs(math.log(row.length / call.keys)), row.length), default=None)
    if nearest is not None:
        seconds = {name: time for name, time in nearest.seconds.items() if name in unsupported}
        documents = f", {nearest.documents} documents in a row," if nearest.documents > 1 else ""
        reason = (
            f"the fastest at head_dim {head_dim} in {dtype} over {nearest.length} tokens{documents} on {nearest.device}"
        )
        if choice := _take_first(sorted(seconds, key=seconds.__getitem__), reason, unsupported):
            return choice
    reason = (
        f"by the order for compute capability {version}, as there is no measurement of head_dim {head_dim} in {dtype}; "
        f"{MEASURE}"
    )
    order = [name for name in (*ORDER.get(capability[0], OTHER_ORDER), FALLBACK) if name in unsupported]
    choice = _take_first(order, reason, unsupported)
    assert choice is not None, "the fallback supports every call"
    return choice


def _take_first(names: Sequence[str], reason: str, unsupported: Mapping[str, Sequence[str]]) -> AttentionChoice | None:
    """Return the first implementation that supports the call. The reason names those before it."""
    skipped: list[str] = []
    for name in names:
        if not unsupported[name]:
            return AttentionChoice(name, reason + "".join(f"; except {each}" for each in skipped))
        skipped.append(f"{name} ({'; '.join(unsupported[name])})")
    return None


def read_table(file: Path) -> list[Measurement]:
    return [Measurement(**row) for row in json_files.read(file, "install the package again")]
