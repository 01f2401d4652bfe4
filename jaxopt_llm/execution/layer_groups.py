"""Loops over a segment's periods for which one plain `lax.scan` is not enough.

These are groups of periods that the backward recomputes together (`remat.every`), and spans of periods whose products
have different precisions (`precision.compute_dtype_layers`). segments.py has the plain scan.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm.core import tree
from jaxopt_llm.execution.remat import checkpoint
from jaxopt_llm.model.model import Params

Carry = Any
Scanned = Any  # leaves [R, ...], one entry for each period
ScanBody = Callable[[Carry, Scanned], tuple[Carry, None]]  # the body of a `lax.scan` over periods


def scan_groups(scan_body: ScanBody, group_size: int, carry: Carry, scanned: Scanned) -> Carry:
    """Scan over groups of periods; the backward recomputes the periods of a group together.

    scanned: has the rows of the weights, not the weights. As an operand of the loop over a group, weights would be
        copied.
    """
    groups = jax.tree.map(lambda x: x.reshape(-1, group_size, *x.shape[1:]), scanned)
    return jax.lax.scan(checkpoint(functools.partial(jax.lax.scan, scan_body)), carry, groups)[0]


@dataclass(frozen=True)
class PrecisionSpan:
    """Periods of a segment from `start` to `stop` (exclusive) whose products have the same precisions.

    quantised: for each block of the period, whether its products are computed as `precision.matmul` says; otherwise in
        the compute dtype.
    """

    start: int
    stop: int
    quantised: tuple[bool, ...]


def find_precision_spans(layer_index: np.ndarray, exempt: int, layers: int) -> list[PrecisionSpan]:
    """Return the spans of a segment in their order.

    layer_index: the index in the model of each block, [R, period]. exempt: this number of layers at either end of the
        model's `layers` computes all products in the compute dtype.
    """
    quantised = (layer_index >= exempt) & (layer_index < layers - exempt)
    starts = [0, *(1 + np.flatnonzero(np.any(quantised[1:] != quantised[:-1], axis=1)))]
    return [
        PrecisionSpan(int(start), int(stop), tuple(map(bool, quantised[start])))
        for start, stop in zip(starts, [*starts[1:], len(quantised)], strict=True)
    ]


def scan_spans(
    make_scan_body: Callable[[tuple[bool, ...]], ScanBody],
    spans: Sequence[PrecisionSpan],
    carry: Carry,
    perturbations: Params,
    others: tuple[Any, ...],
) -> Carry:
    """Scan over the periods of each span, one loop after the other.

    make_scan_body: quantised -> the scan body of a span, which takes (row, perturbations, *others) of a period. The
        loops carry the perturbations from one to the next.
    """
    scanned = (jnp.arange(spans[-1].stop), *others)
    for span in spans:
        scan_body = make_scan_body(span.quantised)

        def pick_and_run(carry: Any, period: Any, scan_body: ScanBody = scan_body) -> tuple[Any, None]:
            carry, perturbations = carry
            row, *others = period
            perturbations, picked = _pick_period(perturbations, row)
            carry, _ = scan_body(carry, (row, picked, *others))
            return (carry, perturbations), None

        part = jax.tree.map(lambda x, span=span: x[span.start : span.stop], scanned)
        (carry, perturbations), _ = jax.lax.scan(pick_and_run, (carry, perturbations), part)
    return carry


@jax.custom_vjp
def _pick_period(stacked: Params, row: jax.Array) -> tuple[Params, Params]:
    """Return the stacked leaves to go on with, and one period of them, which may be picked once.

    It is for perturbations, whose cotangents are the gradients: the gradient of each period is written to its row of
    one array. For slices of an array, autodiff would make whole arrays and add them up.
    """
    return stacked, select_period(stacked, row)


def _pick_period_backward(row: jax.Array, cotangents: tuple[Params, Params]) -> tuple[Params, None]:
    write = functools.partial(jax.lax.dynamic_update_index_in_dim, index=row, axis=0)
    return jax.tree.map(write, *cotangents), None


_pick_period.defvjp(lambda stacked, row: (_pick_period(stacked, row), row), _pick_period_backward)


def select_period(stacked: tree.Tree, row: jax.Array) -> tree.Tree:
    """Return the leaves of one period of stacked leaves [R, ...]."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, row, keepdims=False), stacked)
