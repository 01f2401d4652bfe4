"""Attention by NVIDIA's cuDNN: one fused kernel forward and one backward, on GPUs from Ampere on.

cuDNN takes the mask as constants: a causal order and a window of it. Packed documents are given by their offsets and
lengths, at most `AttentionParameters.segments` in a row (Hopper and later). A row that is one segment needs neither:
the causal order hides the padding at its end. A part of a ring is a causal call or rectangles (ring.py): of rows of one
segment, cuDNN gets these without a mask; of packed documents, with the number of the first queries and of the last keys
that belong to the same document.

Letters: B batch, S queries, T keys, H heads, G key-value heads, K head size, M maximum number of segments in a row.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.kernels import cudnn_primitives
from jaxopt_llm.kernels.attention_auto import AttentionCall
from jaxopt_llm.kernels.attention_types import AttentionParameters, AttentionResiduals, KeyRanges
from jaxopt_llm.kernels.cudnn_primitives import Lengths, Mask, Segments
from jaxopt_llm.kernels.support import fold_batches

AMPERE, HOPPER = (8, 0), (9, 0)
# Documents in a row at most, if nothing else is set: each costs memory in the backward (see `count_workspace`).
DOCUMENTS_PER_ROW = 16
reads_out = True
skips_keys = False


def problems(head_dim: int, dtype: Any, capability: tuple[int, int]) -> list[str]:
    """List the properties of a call that are not supported; see also `call_problems`.

    capability: compute capability of the GPU.
    """
    found = []
    limit = 256 if capability >= HOPPER else 128
    if head_dim % 8 or head_dim > limit:
        found.append(f"head_dim={head_dim}: cudnn supports multiples of 8 up to {limit} here, xla supports any")
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        found.append(f"dtype={jnp.dtype(dtype).name}: cudnn supports bfloat16 or float16, xla supports any")
    if capability < AMPERE:
        found.append(f"capability={capability}: cudnn requires {AMPERE} (Ampere) or later, xla supports any")
    return found


def call_problems(call: AttentionCall, capability: tuple[int, int]) -> list[str]:
    """List the properties of a call's mask and scores that are not supported. capability: see `problems`."""
    found = []
    if call.softcap:
        found.append(f"softcap={call.softcap:g}: cudnn has none, all others do")
    if call.positions:
        found.append("positions: cudnn requires a query for each key, all others support them")
    if call.parts > 1 and call.window:
        found.append(
            f"window={call.window} in a ring: cudnn has no mask for a part of a window's keys, all others support it"
        )
    if call.segments is None:
        found.append("any number of documents in a row: cudnn requires a limit, all others support any number")
    elif call.segments > 1 and AMPERE <= capability < HOPPER:
        found.append(f"packed documents: cudnn requires {HOPPER} (Hopper) or later, all others support them")
    if call.segments != 1 and call.window == 1:
        found.append("window=1: cudnn requires at least 2 with packed documents, all others support it")
    return found


def count_workspace(batch: float, length: int, heads: float, head_dim: int) -> int:
    """Return the bytes of GPU memory that one call of cuDNN's backward works in.

    cuDNN asks for them when it builds the kernel on a GPU. It holds the gradients of the queries in float32, the
    gradients of keys and values in 16 bits for each query head, and a float32 for each query. Measured with cuDNN 9.19
    on an H200, with grouped queries: the formula lacks 5 to 36 KB.

    Args:
        batch: rows of the call; each segment of packed documents counts as a row of full length.
    """
    return int(batch * length * heads * (4 * head_dim + 2 * 2 * head_dim + 4))


def forward(
    parameters: AttentionParameters, q: jax.Array, k: jax.Array, v: jax.Array, key_ranges: KeyRanges
) -> tuple[jax.Array, jax.Array]:
    """See attention.Implementation. The bounds in `parameters` and the first rows of the key ranges are the mask."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        if _has_lengths(parameters):
            return _attend_to_last_keys(parameters.scale, q, k, v, first)
        mask = _make_mask(parameters, first)
        out, log_sums = cudnn_primitives.forward(parameters.scale, mask, q, k, v)
        return out, log_sums if mask.segments is None else _gather(log_sums, first, mask.segments)

    out, log_sum = fold_batches(run)(q, k, v, key_ranges.first)
    return out, log_sum


def backward(
    parameters: AttentionParameters, residuals: AttentionResiduals, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See attention.Implementation."""

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        q, k, v, first, log_sum, out, gradient = arrays
        if _has_lengths(parameters):
            return _pull_from_last_keys(parameters.scale, *arrays)
        mask = _make_mask(parameters, first)
        log_sums = log_sum if mask.segments is None else _expand(log_sum, mask.segments)
        return cudnn_primitives.backward(parameters.scale, mask, q, k, v, log_sums, out, gradient)

    q, k, v, (first, _), log_sum, *_ = residuals
    d_q, d_k, d_v = fold_batches(run)(q, k, v, first, log_sum, residuals.out, gradient.astype(q.dtype))
    return d_q, d_k, d_v


def _has_lengths(parameters: AttentionParameters) -> bool:
    """Return whether the call is a rectangle of packed documents."""
    return parameters.rectangles and parameters.segments != 1


def _attend_to_last_keys(
    scale: float, q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the output and the logs of the softmax sums of rectangles."""
    out, log_sum = cudnn_primitives.forward(scale, _count_visible(first, k.shape[1]), q, _flip(k), _flip(v))
    seen = first < k.shape[1]  # what cuDNN writes for the other queries is undefined
    return jnp.where(seen[..., None, None], out, 0), jnp.where(seen[:, None], log_sum, jnp.inf)


def _pull_from_last_keys(
    scale: float,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    first: jax.Array,
    log_sum: jax.Array,
    out: jax.Array,
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of q, k and v of rectangles."""
    rows, mask = jnp.arange(k.shape[1], dtype=first.dtype), _count_visible(first, k.shape[1])
    d_q, *d_kv = cudnn_primitives.backward(scale, mask, q, _flip(k), _flip(v), log_sum, out, gradient)
    seen = (first < k.shape[1])[..., None, None]
    read = (first[:, :1] <= rows)[..., None, None]  # by the first query, with which all others agree that see a key
    d_k, d_v = (jnp.where(read, _flip(x), 0) for x in d_kv)
    return jnp.where(seen, d_q, 0), d_k, d_v


def _count_visible(first: jax.Array, keys: int) -> Mask:
    """Return the mask of rectangles whose keys are in reverse order, so that the visible ones are the first.

    No length is 0: it is not known what cuDNN does with such a row. The caller ignores the result.
    """
    queries = jnp.sum(first < keys, axis=1, dtype=jnp.int32)
    return Mask(False, None, lengths=Lengths(jnp.maximum(queries, 1), keys - jnp.clip(first[:, 0], 0, keys - 1)))


def _flip(x: jax.Array) -> jax.Array:
    """Reverse the order of the keys, [B, T, G, K]."""
    return jnp.flip(x, axis=1)


def _make_mask(parameters: AttentionParameters, first: jax.Array) -> Mask:
    assert parameters.segments is not None, "the caller checks call_problems"
    assert parameters.keys_after in (0, None) and not parameters.softcap
    window = None if parameters.keys_before is None else parameters.keys_before + 1
    segments = None if parameters.segments == 1 else find_segments(first, parameters.segments)
    return Mask(parameters.keys_after == 0, window, segments)


def find_segments(first: jax.Array, most: int) -> Segments:
    """Return the segments of a batch. first: first visible row of each query, [B, S]; most: M."""
    batch, rows = first.shape
    (starts,) = jnp.nonzero(_begins(first), size=batch * most, fill_value=batch * rows)
    starts = starts.astype(jnp.int32)
    lengths = jnp.diff(starts, append=jnp.int32(batch * rows))
    return Segments(starts, jnp.minimum(lengths, rows))  # longer ones only if there are too many segments


def _begins(first: jax.Array) -> jax.Array:
    """Return which of the B·S rows begin a segment.

    Such a query sees no row before its own. With a window of at least 2, every other query does.
    """
    return (first == jnp.arange(first.shape[1], dtype=first.dtype)).reshape(-1)


def _gather(log_sums: jax.Array, first: jax.Array, segments: Segments) -> jax.Array:
    """Convert the logs of the softmax sums from [B·M, H, S] to [B, H, S].

    All become NaN if the batch has more than B·M segments: a wrong mask must not train in silence.
    """
    batch, rows = first.shape
    segment = jnp.cumsum(_begins(first), dtype=jnp.int32) - 1
    index = jnp.arange(batch * rows, dtype=jnp.int32) - segments.starts[segment]
    by_row = log_sums[segment, :, index]  # [B·S, H]
    by_row = jnp.where(segment[-1] < segments.starts.size, by_row, jnp.nan)
    return by_row.reshape(batch, rows, -1).swapaxes(1, 2)


def _expand(log_sum: jax.Array, segments: Segments) -> jax.Array:
    """Convert the logs of the softmax sums from [B, H, S] to [B·M, H, S], with 0 behind the ends of segments."""
    batch, heads, rows = log_sum.shape
    index = jnp.arange(rows, dtype=jnp.int32)
    row = jnp.minimum(segments.starts[:, None] + index, batch * rows - 1)  # [B·M, S]
    by_head = log_sum.swapaxes(0, 1).reshape(heads, -1)[:, row]
    return jnp.where(index < segments.lengths[:, None], by_head, 0.0).swapaxes(0, 1)
