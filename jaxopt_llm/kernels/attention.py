"""Attention: one function over several implementations.

An implementation is a pair of functions without a derivative of their own. They pass the log of each query's softmax
sum from one to the other, and take it as it is, so that the keys may also be given in parts (ring.py).

Letters: B batch, S queries, T keys, H heads, G key-value heads, K head size, V that of values, which is K but for what
attends to latents (padded.py).
"""

import functools
import logging
import math
import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxopt_llm.kernels import attention_cudnn, attention_pallas, attention_triton, attention_xla
from jaxopt_llm.kernels.attention_auto import Choice, fastest
from jaxopt_llm.kernels.spans import Form, Spans, of_documents

SAVED = "attention"  # the name under which jax.checkpoint knows result and log-sum-exp: saved, no forward runs again


class Implementation(Protocol):
    def forward(
        self, form: Form, q: jax.Array, k: jax.Array, v: jax.Array, spans: Spans
    ) -> tuple[jax.Array, jax.Array]:
        """The result [B, S, H, V], in q's dtype, and the log of the softmax's sum, float32 [B, H, S].

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


def capability_of(device: Any) -> tuple[int, int] | None:
    """The compute capability; None of what is no GPU."""
    if device.platform != "gpu":
        return None
    major, minor = map(int, device.compute_capability.split("."))
    return major, minor


def unsupported(
    head_dim: int, dtype: Any, capability: tuple[int, int] | None, kernels: Mapping[str, Any] = KERNELS
) -> dict[str, list[str]]:
    """Of xla and of each kernel, what of a call it does not support, in words. capability: None without a GPU."""
    return {"xla": []} | {
        name: ["a kernel for GPUs"] if capability is None else kernel.problems(head_dim, dtype, capability)
        for name, kernel in kernels.items()
    }


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Softmax attention with grouped queries, softmax in float32.

    q: [B, S, H, K]; k: [B, T, G, K]; v: [B, T, G, V]; one dtype, G dividing H; query head h reads key-value head
    h // (H / G). Values of another size than K are for xla alone.
    segment_ids: int [B, T] of the keys, runs of equals; a query sees those of its own segment. None: one is a row.
    causal: only those up to itself; window: only the last so many of these.
    positions: int [B, S], the row of k where each query has its own key, as of a chunk of a prompt or a token after a
    cache; one that is no row of k sees nothing. None: query s has key s, and T is S wherever that matters. They count
    over the whole row: not the positions of packed documents, which begin anew with each.
    scale: multiplies the scores, 1 / sqrt(K) by default.
    softcap: then bounds them, as softcap × tanh(score / softcap), before what is not visible is masked.
    implementation: one of IMPLEMENTATIONS; "cudnn", on GPUs, without segment_ids, positions or softcap; or "auto", the
    fastest of all that support the call on JAX's default device, by what was measured of its kind (see
    attention_auto.py), and logged once.
    Returns [B, S, H, V] in q's dtype, 0 for a query that sees nothing.

    Raises ValueError for shapes, dtypes and numbers that do not go together, for a window without the causal order, and
    for an implementation that there is not or that does not support the call.
    """
    _check(q, k, v, causal=causal, window=window, segment_ids=segment_ids, positions=positions)
    for name, given in (("scale", scale), ("softcap", softcap)):
        if given is not None and not 0 < given < math.inf:
            raise ValueError(f"{name}={given}: must be finite and above 0, or None")
    implementation = _implementation(implementation, q, k, v, segment_ids, positions, softcap)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if implementation == "cudnn":
        return attention_cudnn.attention(q, k, v, causal=causal, window=window, scale=scale)
    if segment_ids is None:
        segment_ids = jnp.zeros(k.shape[:2], jnp.int32)
    spans = of_documents(segment_ids, causal).within(window)
    if positions is None and q.shape[1] == k.shape[1]:
        before, after = None if window is None else window - 1, 0 if causal else None
        return attend(IMPLEMENTATIONS[implementation], Form(scale, softcap, before, after), q, k, v, spans)
    # Without positions all see the same.
    spans = spans.of_rows(jnp.zeros(q.shape[:2], jnp.int32) if positions is None else positions)
    return attend(IMPLEMENTATIONS[implementation], Form(scale, softcap), q, k, v, spans)


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    window: int | None,
    segment_ids: jax.Array | None,
    positions: jax.Array | None,
) -> None:
    """Raises ValueError for what no implementation could make sense of."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} {x.shape}: must be [batch, sequence, heads, head size]")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype}, q {q.dtype}: must be of one dtype")
    (batch, queries, heads, size), (_, keys, groups, _) = q.shape, k.shape
    if (k.shape[0], k.shape[3]) != (batch, size):
        raise ValueError(f"k {k.shape}: must have the batch, {batch}, and the head size, {size}, of q {q.shape}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v {v.shape}: must have the batch, the keys and the heads of k {k.shape}")
    if heads % groups:
        raise ValueError(f"q {q.shape}: its {heads} heads must be a multiple of the {groups} of k and v")
    if window is not None and not causal:
        raise ValueError(f"window={window} with causal=False: a window ends at its query")
    if window is not None and window < 1:
        raise ValueError(f"window={window}: must be at least 1, the query's own key, or None")
    for name, ids, shape in (("segment_ids", segment_ids, (batch, keys)), ("positions", positions, (batch, queries))):
        if ids is not None and (ids.shape != shape or not jnp.issubdtype(ids.dtype, jnp.integer)):
            raise ValueError(f"{name} {ids.dtype}{list(ids.shape)}: must be integers {list(shape)}")
    if positions is None and queries != keys and (causal or segment_ids is not None):
        raise ValueError(
            f"{queries} queries and {keys} keys: positions, int [{batch}, {queries}], must say which row of k is each "
            "query's own; without them these must be as many, or causal=False and segment_ids=None"
        )


def _implementation(
    asked: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    positions: jax.Array | None,
    softcap: float | None,
) -> str:
    """The name of what computes the call."""
    head_dim, capability = q.shape[-1], capability_of(_device())
    problems = unsupported(head_dim, q.dtype, capability, {**KERNELS, "cudnn": attention_cudnn})
    if v.shape[-1] != head_dim:
        for name in (*KERNELS, "cudnn"):
            problems[name].append(
                f"v has heads of {v.shape[-1]}, q and k of {head_dim}: {name} takes one size, xla any"
            )
    if segment_ids is not None:
        problems["cudnn"].append("segment_ids: cudnn knows no documents, all others do")
    if positions is not None:
        problems["cudnn"].append("positions: cudnn knows none, all others do")
    if softcap is not None:
        problems["cudnn"].append(f"softcap={softcap}: cudnn has none, all others have")
    if asked == "auto":
        choice = fastest(head_dim, q.dtype, k.shape[1], capability, problems)
        if not choice.measured:
            warnings.warn(f"attention: {choice}", stacklevel=3)  # once for each place that calls
        elif choice.reason:
            _log_once(choice)
        return choice.name
    if asked not in problems:
        raise ValueError(f"implementation={asked!r}: choose one of auto, {', '.join(problems)}")
    if problems[asked]:
        others = [name for name, found in problems.items() if not found]
        raise ValueError(
            f"implementation={asked!r}: {'; '.join(problems[asked])}; what supports this call: {', '.join(others)}"
        )
    return asked


@functools.cache
def _log_once(choice: Choice) -> None:
    logging.getLogger(__name__).info("attention: %s", choice)


def _device() -> Any:
    """That for which JAX compiles unless told otherwise."""
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    return default if isinstance(default, jax.Device) else jax.devices(default)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
    implementation: Implementation, form: Form, q: jax.Array, k: jax.Array, v: jax.Array, spans: Spans
) -> jax.Array:
    """`attention` of the keys that `spans` says, k [B, T, G, K] and v [B, T, G, V]."""
    return implementation.forward(form, q, k, v, spans)[0]


def _forward(
    implementation: Implementation, form: Form, q: jax.Array, k: jax.Array, v: jax.Array, spans: Spans
) -> tuple[jax.Array, Any]:
    out, log_sum = checkpoint_name(implementation.forward(form, q, k, v, spans), SAVED)
    return out, (q, k, v, spans, out, log_sum)


def _backward(implementation: Implementation, form: Form, residuals: Any, gradient: jax.Array) -> Any:
    q, k, v, spans, out, log_sum = residuals
    mean = jnp.einsum("BSHV,BSHV->BHS", gradient, out, preferred_element_type=jnp.float32)
    return *implementation.backward(form, q, k, v, spans, log_sum, mean, gradient), None


attend.defvjp(_forward, _backward)
