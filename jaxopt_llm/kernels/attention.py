"""Attention: one function over several implementations.

An implementation is a pair of functions, forward and backward, without automatic differentiation. The forward returns
the log of each query's softmax sum, and the backward takes it as an argument. The keys may therefore be given in parts
(ring.py).

Letters: B batch, S queries, T keys, H heads, G key-value heads, K head size, V head size of the values. V is K unless
attention reads latents (attention_wrappers.py).
"""

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxopt_llm.core.errors import refuse
from jaxopt_llm.core.intermediate import Intermediate
from jaxopt_llm.kernels import attention_cudnn, attention_pallas, attention_triton, attention_xla
from jaxopt_llm.kernels.attention_auto import AttentionCall, AttentionChoice, choose_fastest
from jaxopt_llm.kernels.attention_types import (
    AttentionParameters,
    AttentionResiduals,
    KeyRanges,
    attention_scope,
    make_document_ranges,
)

# Name of the output and of the log-sum-exp for jax.checkpoint: a policy that saves it runs no forward again.
CHECKPOINT_NAME = Intermediate("attention", "attention", "batch", "sequence", "heads", "head_dim")
LOG_SUM_NAME = Intermediate("attention", "attention", "batch", "heads", "sequence")
SCOPE = "attention"  # the named scope of every implementation in compiled programs and profiles


class Implementation(Protocol):
    """Forward and backward of attention.

    reads_out: the backward reads `out` of AttentionResiduals; otherwise it reads `delta`.
    """

    @property
    def reads_out(self) -> bool: ...

    def forward(
        self, parameters: AttentionParameters, q: jax.Array, k: jax.Array, v: jax.Array, key_ranges: KeyRanges
    ) -> tuple[jax.Array, jax.Array]:
        """Return the output [B, S, H, V], in q's dtype, and the log of the softmax sum, float32 [B, H, S].

        For a query that sees no key these are 0 and infinity.
        """
        ...

    def backward(
        self, parameters: AttentionParameters, residuals: AttentionResiduals, gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the gradients of q, k and v, in their dtypes. gradient: of the output, [B, S, H, V]."""
        ...


class Kernel(Implementation, Protocol):
    """Implementation for the arrays of one device.

    skips_keys: a block of queries reads only the keys between the first and the last that it sees; a ring then gives it
        the whole part of another device (ring.py).
    """

    @property
    def skips_keys(self) -> bool: ...


# Each kernel module has `problems(head_dim, dtype, capability)`, which lists what the kernel does not support.
KERNELS: dict[str, Any] = {"pallas": attention_pallas, "triton": attention_triton, "cudnn": attention_cudnn}
IMPLEMENTATIONS: dict[str, Kernel] = {"xla": attention_xla, **KERNELS}


@dataclass(frozen=True)
class AttentionRequest:
    """A call of `attention`, as the selection of its implementation sees it.

    requested: the argument `implementation`. rows, heads, kv_heads: B, H and G. value_dim: V.
    """

    requested: str
    call: AttentionCall
    rows: int
    heads: int
    kv_heads: int
    value_dim: int


# The function that selects the implementation of each `attention` that is traced in this context, as a program that
# divides arrays over devices does; None selects for one device. JAX's caches have the value in their keys, so that no
# jitted function remembers the implementation of another program.
SELECT: Any = jax.make_user_context(None)
Select = Callable[[AttentionRequest], Implementation]


def get_compute_capability(device: Any) -> tuple[int, int] | None:
    """Return the compute capability of a GPU, and None for other devices."""
    if device.platform != "gpu":
        return None
    major, minor = map(int, device.compute_capability.split("."))
    return major, minor


def find_unsupported(call: AttentionCall, capability: tuple[int, int] | None) -> dict[str, list[str]]:
    """List, for xla and each kernel, the properties of a call that it does not support, as texts for a message.

    capability: compute capability of the GPU; None without a GPU.
    """
    if capability is None:
        return {"xla": []} | {name: ["it runs on GPUs only"] for name in KERNELS}
    found = {name: kernel.problems(call.head_dim, call.dtype, capability) for name, kernel in KERNELS.items()}
    found["cudnn"] += attention_cudnn.call_problems(call, capability)
    return {"xla": []} | found


def select_for_ring(device: Any, q: jax.Array, v: jax.Array) -> Kernel:
    """Return the implementation for one query over a ring of keys: a kernel, where it supports the device and the call.

    Its time is that of reading the keys; XLA writes and reads the scores, too, five times 16 or 32 bits.
    """
    capability = get_compute_capability(device)
    return attention_pallas if capability and attention_pallas.supports_ring(q, v, capability) else attention_xla


def exclude_sizes(head_dim: int, value_dim: int) -> dict[str, str]:
    """Return, for each kernel, why it does not support the head size of the values; nothing if it is the same."""
    if value_dim == head_dim:
        return {}
    sizes = f"v has head size {value_dim}, q and k have {head_dim}"
    return {name: f"{sizes}: {name} requires one size, xla supports any" for name in KERNELS}


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
    max_segments: int | None = None,
) -> jax.Array:
    """Compute softmax attention with grouped queries (GQA); the softmax is in float32.

    It has no dropout, and only the masks that the arguments describe. In a loss under `jaxopt_llm.initialize`, each
    device calls the implementation with its own rows and heads.

    Letters: B batch, S queries, T keys, H heads, G key-value heads, K head size, V head size of the values.

    Args:
        q: [B, S, H, K], in the dtype of k and v. Query head h reads key-value head h // (H / G).
        k: [B, T, G, K]; G divides H.
        v: [B, T, G, V]. Only xla supports V other than K.
        causal: each query sees the keys up to its own only.
        window: with causal, each query sees only the last `window` of these keys.
        segment_ids: int [B, T], the segments of the keys; a segment is a range of equal numbers. A query sees the keys
            of its own segment. None: each row is one segment.
        positions: int [B, S], the row of k that holds each query's own key, for a chunk of a prompt or a token after a
            cache. A query whose position is not a row of k sees nothing. None: query s has key s, and T must be S if
            the call is causal or has segment_ids. Positions count over the whole row: they are not the positions
            within packed documents, which restart at each document.
        scale: factor of the scores; 1 / sqrt(K) by default.
        softcap: bounds the scaled scores, as softcap × tanh(score / softcap), before invisible keys are masked.
        implementation: "xla", "cudnn", "pallas" or "triton"; or "auto": under `initialize` that of
            `training.attention`, elsewhere the fastest that supports the call on JAX's default device. The choice on a
            GPU is logged once.
        max_segments: maximum number of segments in a row of segment_ids, which cudnn requires. With more, the
            gradients are NaN.

    Returns:
        The output [B, S, H, V] in q's dtype; 0 for a query that sees nothing.

    Raises:
        ValueError: shapes, dtypes or numbers do not match, or the implementation does not support the call.
        InputError: the same under `initialize`, if the implementation does not support the call or the devices.
    """
    _check_numbers(implementation, causal, window, scale=scale, softcap=softcap)
    _check_arrays(q, k, v, causal, segment_ids, positions)
    segments = 1 if segment_ids is None else max_segments
    call = AttentionCall(q.shape[-1], q.dtype, k.shape[1], segments, window, softcap, positions=positions is not None)
    selected = select_implementation(implementation, call, q, k, v)
    parameters = AttentionParameters(1 / math.sqrt(q.shape[-1]) if scale is None else scale, softcap, segments=segments)
    if positions is None and q.shape[1] == k.shape[1]:
        parameters = replace(parameters, keys_before=window and window - 1, keys_after=0 if causal else None)
    with attention_scope(window, causal=causal):
        return attend(selected, parameters, q, k, v, _make_ranges(q, k, causal, window, segment_ids, positions))


def _make_ranges(
    q: jax.Array,
    k: jax.Array,
    causal: bool,
    window: int | None,
    segment_ids: jax.Array | None,
    positions: jax.Array | None,
) -> KeyRanges:
    """Return the keys that each query sees."""
    ids = jnp.zeros(k.shape[:2], jnp.int32) if segment_ids is None else segment_ids
    ranges = make_document_ranges(ids, causal).limit_to_window(window)
    if positions is None and q.shape[1] == k.shape[1]:
        return ranges
    # Without positions, and with other numbers of queries and keys, all queries see the same keys.
    return ranges.take_queries(jnp.zeros(q.shape[:2], jnp.int32) if positions is None else positions)


def select_implementation(
    requested: str, call: AttentionCall, q: jax.Array, k: jax.Array, v: jax.Array
) -> Implementation:
    """Return the implementation of a call in the program that is traced, or on the default device."""
    select: Select = SELECT.value or _select_for_default_device
    return select(AttentionRequest(requested, call, q.shape[0], q.shape[2], k.shape[2], v.shape[-1]))


def _check_numbers(implementation: str, causal: bool, window: int | None, **factors: float | None) -> None:
    """Raise ValueError for an implementation or a number that has no meaning. factors: the numbers above 0."""
    if implementation not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"implementation={implementation!r}: choose one of auto, {', '.join(IMPLEMENTATIONS)}")
    if window is not None and not causal:
        raise ValueError(f"window={window} with causal=False: a window ends at the query's own key; set causal=True")
    if window is not None and window < 1:
        raise ValueError(f"window={window}: give at least 1, the query's own key, or None")
    for name, value in factors.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}={value}: give a finite number above 0, or None")


def _check_arrays(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    causal: bool,
    segment_ids: jax.Array | None,
    positions: jax.Array | None,
) -> None:
    """Raise ValueError for arrays whose shapes or dtypes no implementation supports."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        with refuse(f"{name} has shape {x.shape}: give [batch, sequence, heads, head_dim]"):
            chex.assert_rank(x, 4)
        with refuse(f"{name} is {x.dtype} and q is {q.dtype}: give q, k and v in one dtype"):
            chex.assert_type(x, q.dtype)
    (batch, queries, heads, size), (_, keys, groups, _) = q.shape, k.shape
    with refuse(f"k has shape {k.shape}: give it the batch size {batch} and the head size {size} of q {q.shape}"):
        chex.assert_shape(k, (batch, None, None, size))
    with refuse(f"v has shape {v.shape}: give it the batch size, the keys and the heads of k {k.shape}"):
        chex.assert_shape(v, (*k.shape[:3], None))
    if heads % groups:
        raise ValueError(f"q {q.shape} has {heads} heads: give a multiple of the {groups} heads of k and v")
    for name, ids, shape in (("segment_ids", segment_ids, (batch, keys)), ("positions", positions, (batch, queries))):
        if ids is not None:
            with refuse(f"{name} is {ids.dtype}{list(ids.shape)}: give integers {list(shape)}"):
                chex.assert_shape(ids, shape)
                chex.assert_type(ids, int)
    if positions is None and queries != keys and (causal or segment_ids is not None):
        raise ValueError(
            f"{queries} queries and {keys} keys: give positions, int [{batch}, {queries}], the row of k of each "
            "query's own key; without positions, give as many queries as keys, or causal=False and segment_ids=None"
        )


def _select_for_default_device(request: AttentionRequest) -> Implementation:
    requested, call, capability = request.requested, request.call, get_compute_capability(_get_default_device())
    problems = find_unsupported(call, capability)
    for name, reason in exclude_sizes(call.head_dim, request.value_dim).items():
        problems[name].append(reason)
    if requested == "auto":
        choice = choose_fastest(call, capability, problems)
        if choice.reason:
            _log_once(choice)
        return IMPLEMENTATIONS[choice.name]
    if problems[requested]:
        others = [name for name, found in problems.items() if not found]
        raise ValueError(
            f"implementation={requested!r}: {'; '.join(problems[requested])}; "
            f"choose one that supports this call: {', '.join(others)}"
        )
    return IMPLEMENTATIONS[requested]


@functools.cache
def _log_once(choice: AttentionChoice) -> None:
    logging.getLogger(__name__).info("attention: %s", choice)


def _get_default_device() -> Any:
    """Return the device for which JAX compiles by default."""
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    return default if isinstance(default, jax.Device) else jax.devices(default)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
    implementation: Implementation,
    parameters: AttentionParameters,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    key_ranges: KeyRanges,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend to the keys k [B, T, G, K] and the values v [B, T, G, V] in `key_ranges`; see `attention`.

    sinks: float32 [H], the score of a further key of each query head, whose value is 0 and which every query sees. It
        is added to what the implementation returns, so that all of them support it; None: no such key.
    """
    return _forward(implementation, parameters, q, k, v, key_ranges, sinks)[0]


@jax.named_scope(SCOPE)
def _forward(implementation: Implementation, parameters: AttentionParameters, *operands: Any) -> tuple[jax.Array, Any]:
    *arrays, sinks = operands
    out, log_sum = implementation.forward(parameters, *arrays)
    if sinks is not None:
        out, log_sum = _add_sinks(out, log_sum, sinks)
    out, log_sum = checkpoint_name(out, CHECKPOINT_NAME), checkpoint_name(log_sum, LOG_SUM_NAME)
    return out, (*operands, out, log_sum)


def _add_sinks(out: jax.Array, log_sum: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the output [B, S, H, V] and the log of the softmax sum [B, H, S] with the sinks among the keys.

    A query that sees no key keeps 0 and infinity.
    """
    by_query = sinks[:, None]
    share = jnp.swapaxes(jax.nn.sigmoid(log_sum - by_query), 1, 2)[..., None]  # of the keys in the new softmax
    return (out * share).astype(out.dtype), jnp.logaddexp(log_sum, by_query)


@jax.named_scope(SCOPE)
def _backward(implementation: Implementation, parameters: AttentionParameters, saved: Any, gradient: jax.Array) -> Any:
    # The implementation gets the output and the sum with the sinks: its softmax weights, exp(score - log_sum), and
    # delta, the mean of their gradients, are then right. The sinks have no part in either, because their value is 0.
    q, k, v, key_ranges, sinks, out, log_sum = saved
    d_sinks, residuals = None, AttentionResiduals(q, k, v, key_ranges, log_sum, out=out)
    if sinks is not None or not implementation.reads_out:
        delta = jnp.einsum("BSHV,BSHV->BHS", gradient, out, preferred_element_type=jnp.float32)
        if sinks is not None:
            d_sinks = -jnp.sum(jnp.exp(sinks[:, None] - log_sum) * delta, axis=(0, 2))
        if not implementation.reads_out:
            residuals = residuals._replace(delta=delta, out=None)
    return *implementation.backward(parameters, residuals, gradient), None, d_sinks


attend.defvjp(_forward, _backward)
