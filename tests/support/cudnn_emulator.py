"""JAX's primitives of cuDNN's attention on the CPU, in float64, by the contract of the call.

The contract is that of XLA's call and of cuDNN's ragged tensors: lengths and offsets of all segments of the batch, one
after the other, with offsets in elements from the begin of the array; one more offset than segments; unused entries of
length 0 at the end. Segment n attends within itself, top-left causal. Its softmax statistics are row n of [B·M, H, S].
With lengths and no offsets, row n attends with its first queries to its first keys.
The backward computes with the statistics, the output and its gradient that it is given, which may be those over more
keys. Memory that cuDNN does not write is NaN here.
"""

from typing import Any

import jax
import numpy as np
import pytest
import reference

from jaxopt_llm.kernels import cudnn_primitives

Array = np.ndarray


def emulate(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the primitives by an emulation. Return a list to which every call appends its direction."""
    calls: list[str] = []
    monkeypatch.setattr(cudnn_primitives, "FORWARD", _Primitive(calls, "forward"))
    monkeypatch.setattr(cudnn_primitives, "BACKWARD", _Primitive(calls, "backward"))
    return calls


class _Primitive:
    def __init__(self, calls: list[str], direction: str) -> None:
        self._calls, self._direction = calls, direction

    def bind(self, *operands: jax.Array, **options: Any) -> list[jax.Array]:
        self._calls.append(self._direction)
        real = getattr(cudnn_primitives.private, f"_dot_product_attention_{self._direction[:1]}wd_p")
        results, _ = real.abstract_eval(*map(jax.typeof, operands), **options)  # also checks the names of the options
        shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in results]
        run = _forward if self._direction == "forward" else _backward

        def compute(*arrays: Array) -> list[Array]:
            found = run([np.asarray(array) for array in arrays], options)
            return [array.astype(shape.dtype) for array, shape in zip(found, shapes, strict=True)]

        return jax.pure_callback(compute, shapes, *operands)


def _forward(operands: list[Array], options: dict[str, Any]) -> list[Array]:
    q, k, v = (x.astype(np.float64) for x in operands[:3])
    segments = list(_segments(operands, options))
    out, statistics = np.full(q.shape, np.nan), np.full(_statistics_shape(operands), np.nan)
    for index, rows, keys in segments:
        part_q, part_k, part_v = _part(q, rows), _part(k, keys), _part(v, keys)
        mask, scale = _visible(part_q, part_k, options), options["scale"]
        _part(out, rows)[:] = reference.attend(part_q[None], part_k[None], part_v[None], mask[None], scale)[0][0]
        heads = np.repeat(part_k, q.shape[2] // k.shape[2], axis=1)
        scores = np.where(mask, np.einsum("shk,thk->hst", part_q, heads) * scale, -np.inf)
        statistics[index, :, : len(part_q)] = np.logaddexp.reduce(scores, axis=-1)
    return [out, statistics]


def _backward(operands: list[Array], options: dict[str, Any]) -> list[Array]:
    q, k, v = (x.astype(np.float64) for x in operands[:3])
    given, out, gradient = (x.astype(np.float64) for x in operands[10:])
    assert given.shape == _statistics_shape(operands) and np.isfinite(given).all()  # also behind the ends of segments
    results, copies = [np.full(x.shape, np.nan) for x in (q, k, v)], q.shape[2] // k.shape[2]
    for index, rows, keys in _segments(operands, options):
        part_q, d_out, delta = _part(q, rows), _part(gradient, rows), (_part(gradient, rows) * _part(out, rows)).sum(-1)
        part_k, part_v = (np.repeat(_part(x, keys), copies, axis=1) for x in (k, v))
        scores = np.einsum("shk,thk->hst", part_q, part_k) * options["scale"] - given[index, :, : len(part_q), None]
        weights = np.where(_visible(part_q, part_k, options), np.exp(scores), 0)
        d_scores = weights * (np.einsum("shk,thk->hst", d_out, part_v) - delta.T[..., None]) * options["scale"]
        gradients = (
            np.einsum("hst,thk->shk", d_scores, part_k),
            *(
                np.einsum("hst,shk->thk", *of).reshape(len(part_k), -1, copies, k.shape[3]).sum(2)
                for of in ((d_scores, part_q), (weights, d_out))
            ),
        )
        for result, part, of in zip(results, (rows, keys, keys), gradients, strict=True):
            _part(result, part)[:] = of
    return results


def _statistics_shape(operands: list[Array]) -> tuple[int, int, int]:
    batch, rows, heads, _ = operands[0].shape
    offsets = operands[6]
    return batch * (offsets.shape[1] - 1 if offsets.ndim == 2 else 1), heads, rows


def _segments(operands: list[Array], options: dict[str, Any]) -> Any:
    """Yield the index of each segment, and its rows of queries and of keys in the sequence of all rows."""
    q, k = operands[:2]
    assert options["layout"] == cudnn_primitives.private.AttentionLayout.BTNH.value
    if not options["mask_type"].name.startswith("PADDING"):
        assert all(not x.size for x in operands[3:10])
        for index in range(q.shape[0]):
            yield index, *(slice(index * x.shape[1], (index + 1) * x.shape[1]) for x in (q, k))
        return
    if not operands[6].size:
        assert all(operands[i].dtype == np.int32 and operands[i].shape == q.shape[:1] for i in (4, 5))
        for index, lengths in enumerate(zip(*operands[4:6], strict=True)):
            assert all(0 < length <= x.shape[1] for x, length in zip((q, k), lengths, strict=True))
            yield (
                index,
                *(slice(index * x.shape[1], index * x.shape[1] + n) for x, n in zip((q, k), lengths, strict=True)),
            )
        return
    lengths, offsets = ([operands[i].reshape(-1) for i in pair] for pair in ((4, 5), (6, 7)))
    assert all(x.dtype == np.int32 for x in (*lengths, *offsets))
    used = np.count_nonzero(lengths[0])
    for index in range(lengths[0].size):
        assert (lengths[0][index] > 0) == (index < used), "unused entries are at the end"
        rows = []
        for x, length, offset in zip((q, k), lengths, offsets, strict=True):
            stride = x.shape[2] * x.shape[3]
            assert offset[index] % stride == 0 and offset[index + 1] >= offset[index]
            rows.append(slice(offset[index] // stride, offset[index] // stride + length[index]))
        if index < used:
            yield index, *rows


def _part(x: Array, rows: slice) -> Array:
    """Return rows of an array [B, S, ...] as a view [rows, ...]."""
    return x.reshape(-1, *x.shape[2:])[rows]


def _visible(q: Array, k: Array, options: dict[str, Any]) -> Array:
    distance = np.arange(len(q))[:, None] - np.arange(len(k))
    visible = distance >= 0 if options["mask_type"].name.endswith("CAUSAL") else np.ones(distance.shape, bool)
    window = options["sliding_window_length"]
    return visible if window is None else visible & (distance < window)
