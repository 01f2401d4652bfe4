"""JAX's two primitives for cuDNN's fused attention: the only file that knows their private names and arguments.

JAX's public function has no derivative that reads the log-sum-exp of a forward, and builds the offsets of packed
sequences in a way that is wrong for grouped queries in jax 0.10.2. So this file binds the primitives below that
function and builds the offsets itself. The primitives have no rule for `vmap` or for a mesh: call them per device.

Letters: B batch, S queries, T keys, H heads, G key-value heads, K head size, M maximum number of segments in a row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as private

from jaxopt_llm.core.errors import InputError

# "fmhaSoftmax" and "fmhaSoftmaxBackward" in compiled programs
FORWARD, BACKWARD = private._dot_product_attention_fwd_p, private._dot_product_attention_bwd_p
LAYOUT = private.AttentionLayout.BTNH.value
_NO_DROPOUT = {"seed": 0, "dropout_rate": 0.0}
_NO_BIAS = (False, False)  # neither a bias nor its gradient
_INT32_VALUES = 2**31


class Segments(NamedTuple):
    """Segments of all rows of a batch, in order, without gaps; int32.

    starts: first row of each segment in the batch as one sequence of B·S rows, [B·M]. An unused entry is B·S.
    lengths: rows of each segment, [B·M]. An unused entry is 0.
    """

    starts: jax.Array
    lengths: jax.Array


class Lengths(NamedTuple):
    """Numbers of the first queries and of the first keys of each row that take part; int32 [B] each."""

    queries: jax.Array
    keys: jax.Array


class Mask(NamedTuple):
    """Visible keys of a call.

    causal: a query sees no key after its own.
    window: number of the last keys that a query sees; None for all keys.
    segments: a query sees the keys of its own segment only; None for rows of one segment.
    lengths: rows and keys behind them are padding; None for whole rows, or with segments.
    """

    causal: bool
    window: int | None
    segments: Segments | None = None
    lengths: Lengths | None = None


def forward(scale: float, mask: Mask, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the output [B, S, H, K] and the log of the softmax sums, float32.

    The logs are [B, H, S], or with segments [B·M, H, S], by the index of each query in its segment.
    What lies behind the end of a segment, or behind the length of a row, is undefined.
    """
    out, log_sums = FORWARD.bind(*_operands(mask, q, k, v), is_training=True, **_options(scale, mask))
    return out, log_sums


def backward(
    scale: float,
    mask: Mask,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_sums: jax.Array,
    out: jax.Array,
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of q, k and v.

    log_sums: as `forward` returns them, or those over more keys. With the output and its gradient over more keys, the
    result is the part of the gradients that comes from these keys.
    """
    d_q, d_k, d_v = BACKWARD.bind(*_operands(mask, q, k, v), log_sums, out, gradient, **_options(scale, mask))
    return d_q, d_k, d_v


def _options(scale: float, mask: Mask) -> dict[str, object]:
    kinds = private.MaskType
    if mask.segments is None and mask.lengths is None:
        kind = kinds.CAUSAL if mask.causal else kinds.NO_MASK
    else:
        kind = kinds.PADDING_CAUSAL if mask.causal else kinds.PADDING
    return {
        "scale": scale,
        "variadic_args": _NO_BIAS,
        "mask_type": kind,
        "layout": LAYOUT,
        "sliding_window_length": mask.window,
        **_NO_DROPOUT,
    }


def _operands(mask: Mask, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """Return q, k, v, the bias, lengths and offsets of queries and keys, and the tables of pages; unused ones empty."""
    unused = jnp.zeros(0, q.dtype)
    if mask.lengths is not None:
        return q, k, v, unused, *mask.lengths, *[unused] * 4
    if mask.segments is None:
        return (q, k, v, *[unused] * 7)
    batch, lengths = q.shape[0], mask.segments.lengths.reshape(q.shape[0], -1)
    # cuDNN reads B·M + 1 offsets, in elements of the array. JAX takes [B, M + 1] and ignores the rest.
    ends = jnp.full(batch, batch * q.shape[1], jnp.int32)
    offsets = jnp.concatenate([mask.segments.starts, ends]).reshape(batch, -1)
    for x in (q, k):
        if x.size >= _INT32_VALUES:
            raise InputError(
                f"training.attention=cudnn: queries or keys {x.shape} of a device have {x.size:,} elements, but "
                "offsets of packed documents are int32; set a larger --training.accumulation"
            )
    return q, k, v, unused, lengths, lengths, *(offsets * (x.shape[2] * x.shape[3]) for x in (q, k)), unused, unused
