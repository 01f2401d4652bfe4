"""Attention: one function over several implementations.

An implementation is a pair of functions without a derivative of their own. They pass the log of each query's softmax
sum from one to the other, and take it as it is, so that the keys may also be given in parts (ring.py).

Letters: B batch, S queries, T keys, H heads, G key-value heads, K head size.
"""

import functools
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxopt_llm.kernels import attention_pallas, attention_triton, attention_xla
from jaxopt_llm.kernels.spans import Form, Spans, of_documents

SAVED = "attention"  # the name under which jax.checkpoint knows result and log-sum-exp: saved, no forward runs again


class Implementation(Protocol):
    def forward(
        self, form: Form, q: jax.Array, k: jax.Array, v: jax.Array, spans: Spans
    ) -> tuple[jax.Array, jax.Array]:
        """The result [B, S, H, K], in q's dtype, and the log of the softmax's sum, float32 [B, H, S].

        A query that sees nothing gives 0 and infinity.
        """
        ...

    def backward(
        self,
        form: Form,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        spans: Spans,
        log_sum: jax.Array,
        mean: jax.Array,
        gradient: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Gradients of q, k and v, in their dtypes.

        log_sum: over all keys, of which these may be a part; mean: of the weights' gradients under the softmax, float32
        [B, H, S]; gradient: of the result.
        """
        ...


# Kernels, each of which says by `problems(head_dim, dtype, capability)` what it does not support.
KERNELS: dict[str, Any] = {"pallas": attention_pallas, "triton": attention_triton}
IMPLEMENTATIONS: dict[str, Implementation] = {"xla": attention_xla, **KERNELS}


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """Softmax attention with grouped queries, softmax in float32.

    q: [B, S, H, K]; k, v: [B, S, G, K], G dividing H; query head h reads key-value head h // (H / G).
    segment_ids: int [B, S], runs of equals; a query sees the keys of its own segment. None: a row is one segment.
    causal: only those up to itself; window: only the last so many of these.
    scale: multiplies the scores, 1 / sqrt(K) by default.
    softcap: then bounds them, as softcap × tanh(score / softcap), before what is not visible is masked.
    Returns [B, S, H, K] in q's dtype, 0 for a query that sees nothing.

    Raises ValueError for a window without the causal order, and for an implementation that there is not.
    """
    if window is not None and not causal:
        raise ValueError(f"window={window} with causal=False: a window ends at its query")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}: choose one of {', '.join(IMPLEMENTATIONS)}")
    if segment_ids is None:
        segment_ids = jnp.zeros(q.shape[:2], jnp.int32)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    before, after = None if window is None else window - 1, 0 if causal else None
    spans = of_documents(segment_ids, causal).within(window)
    return attend(IMPLEMENTATIONS[implementation], Form(scale, softcap, before, after), q, k, v, spans)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
    implementation: Implementation, form: Form, q: jax.Array, k: jax.Array, v: jax.Array, spans: Spans
) -> jax.Array:
    """`attention` of the keys that `spans` says, k and v [B, T, G, K]."""
    return implementation.forward(form, q, k, v, spans)[0]


def _forward(
    implementation: Implementation, form: Form, q: jax.Array, k: jax.Array, v: jax.Array, spans: Spans
) -> tuple[jax.Array, Any]:
    out, log_sum = checkpoint_name(implementation.forward(form, q, k, v, spans), SAVED)
    return out, (q, k, v, spans, out, log_sum)


def _backward(implementation: Implementation, form: Form, residuals: Any, gradient: jax.Array) -> Any:
    q, k, v, spans, out, log_sum = residuals
    mean = jnp.einsum("BSHK,BSHK->BHS", gradient, out, preferred_element_type=jnp.float32)
    return *implementation.backward(form, q, k, v, spans, log_sum, mean, gradient), None


attend.defvjp(_forward, _backward)
