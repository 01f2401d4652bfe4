"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): a layer with a state of fixed size in place of keys and values.

The state of a head is a matrix that maps keys to values. Each token lets it decay, replaces a share of what it holds
for the token's key by the token's value, and reads it with the token's query. A short causal convolution precedes
queries, keys and values. Over a sequence, the tokens of a chunk are computed together by matrix products, and only the
state passes from chunk to chunk (Yang et al. 2024, arXiv:2406.06484). Everything is computed in float32, by XLA.

A document of a packed row begins with an empty state, and its convolution reads no token of another document.

Letters: B batch, S sequence, D width, G heads of queries and keys, R heads of values that share one, H = G · R, K head
size of queries and keys, V head size of values, W taps of the convolution, C tokens of a chunk, N chunks.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxopt_llm.config import ModelConfig
from jaxopt_llm.core.intermediate import Intermediate, Role
from jaxopt_llm.model.cache import RecurrentState
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.layers import Function, project, project_all, recomputed
from jaxopt_llm.model.linear import weights
from jaxopt_llm.model.linear.weights import Weight
from jaxopt_llm.model.param import ParamSpec, constant, normal
from jaxopt_llm.parallel.activations import all_gather_sequence, reduce_scatter_sequence
from jaxopt_llm.parallel.placement import Placement, constrain, mark

CHUNK = 64  # tokens that are computed together; more of them cost more products, and fewer more steps
GROUP = 4  # chunks whose intermediates are in memory at the same time
NORM_EPSILON = 1e-6  # of the norms of queries and keys: fixed as in the published code
PRODUCTS = {
    **dict.fromkeys(("query", "key"), "BSD,DGK->BSGK"),
    "value": "BSD,DGRV->BSGRV",
    **dict.fromkeys(("beta", "decay"), "BSD,DGR->BSGR"),
    "gate": "BSD,DGRV->BSGRV",
}
# Name and role of what each product makes. Those of attention have the same names, so that a remat policy has both.
INTERMEDIATES: dict[str, tuple[str, Role]] = {name: (name, "projection") for name in PRODUCTS}
INTERMEDIATES["gate"] = ("attention_gate", "product")
MIXED = Intermediate("attention", "attention", "batch", "sequence", "heads", None, "head_dim")
CONVOLVED = ("query", "key", "value")
LARGEST_RATE = 16.0  # of the decays at initialisation, which are uniform


def log_uniform(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
    """Return the logs of uniform values."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.01, LARGEST_RATE))


def gated_delta_specs(config: ModelConfig, residual_scale: float) -> dict[str, ParamSpec]:
    width, delta = (config.width, "embed"), config.delta
    keys, sharing = (delta.key_heads, "heads"), (delta.value_heads // delta.key_heads, None)
    heads: dict[str, tuple[tuple[int, str | None], ...]]
    heads = dict.fromkeys(("query", "key"), (keys, (delta.key_head_dim, "head_dim")))
    heads |= dict.fromkeys(("value", "gate"), (keys, sharing, (delta.value_head_dim, "head_dim")))
    heads |= dict.fromkeys(("beta", "decay"), (keys, sharing))
    values = (delta.value_heads, "heads")

    def make(*dims: tuple[int, str | None], **others: Any) -> ParamSpec:
        return ParamSpec(tuple(size for size, _ in dims), tuple(axis for _, axis in dims), **others)

    return {
        **{name: make(width, *dims, contracting=(0,), init=normal()) for name, dims in heads.items()},
        **{
            f"{name}_kernel": make(*heads[name], (delta.kernel, "taps"), init=normal(delta.kernel**-0.5))
            for name in CONVOLVED
        },
        "decay_offset": make(values, init=constant(1.0), exact=True),
        "decay_rate": make(values, init=log_uniform, exact=True),
        "output": make(*heads["value"], width, contracting=(0, 1, 2), init=normal(residual_scale)),
    }


def make_state(config: ModelConfig, batch: int, dtype: Any, placement: Placement) -> RecurrentState:
    """Return the state of a layer before any token, for generation."""
    delta = config.delta

    def zeros(heads: int, *sizes: int, dtype: Any = dtype) -> jax.Array:
        return placement.constrain(jnp.zeros((batch, heads, *sizes), dtype), "batch", "heads", None, "head_dim")

    state = zeros(delta.value_heads, delta.key_head_dim, delta.value_head_dim, dtype=jnp.float32)
    keys = zeros(delta.key_heads, delta.kernel - 1, delta.key_head_dim)
    return RecurrentState(state, (keys, keys, zeros(delta.value_heads, delta.kernel - 1, delta.value_head_dim)))


def gated_delta(
    params: dict[str, Weight],
    x: jax.Array,
    context: Context,
    *,
    norm: Function,
    output_norm: Function,
    cache: RecurrentState | None,
) -> tuple[jax.Array, RecurrentState | None]:
    """Mix the tokens of x [B, S, D], normed. Return the output, and the state after the last token of each row.

    norm: of x. output_norm: of each head of the result, before its gate.
    cache: the state before the token at `context.cache_index`. Tokens from `context.lengths` on are padding.
    """
    placement = context.placement

    @recomputed
    def project_in(x: jax.Array) -> tuple[jax.Array, ...]:
        x = all_gather_sequence(norm(x), placement)
        x = mark(x, "attention_input", "input", "batch", "sequence", "embed")
        found = project_all(x, params, PRODUCTS, placement)
        return tuple(
            constrain(placement, x, *INTERMEDIATES[name], "batch", "sequence", "heads", *[None] * (x.ndim - 3))
            for name, x in zip(PRODUCTS, found, strict=True)
        )

    @recomputed
    def project_out(out: jax.Array, gate: jax.Array) -> jax.Array:
        out = (output_norm(out) * jax.nn.silu(gate.astype(jnp.float32))).astype(out.dtype)
        return project("BSGRV,GRVD->BSD", out, params, "output", placement)

    *projected, gate = project_in(x)
    names = (*(f"{name}_kernel" for name in CONVOLVED), "decay_offset", "decay_rate")
    learned = [weights.materialise(params[name], jnp.dtype(jnp.float32)) for name in names]
    age = context.key_ranges.last - context.key_ranges.first
    if cache is None:
        out = mix(age, *projected, *learned)
    else:
        out, cache = _continue(context, age, cache, projected, learned)
    out = reduce_scatter_sequence(project_out(placement.constrain(out, *MIXED.axes), gate), placement)
    return mark(out, "attention_output", "product", "batch", "residual_sequence", "embed"), cache


# ---- Over a sequence. Its backward keeps the projections alone, and computes everything else again.


@jax.custom_vjp
def mix(age: jax.Array, *operands: jax.Array) -> jax.Array:
    """Return the result of the heads, [B, S, G, R, V], in the dtype of the projections.

    age: int32 [B, S], the number of tokens before each token in its document.
    operands: the projections [B, S, ...] in the order of PRODUCTS, without the gate; the kernels [..., W]; and the
        offset and the log of the rate of the decays, [H].
    """
    return _mix(age, *operands)


@jax.named_scope("gated_delta")
def _mix(age: jax.Array, *operands: jax.Array) -> jax.Array:
    query, value = operands[0], operands[2]
    state = jnp.zeros((len(age), *value.shape[2:4], query.shape[-1], value.shape[-1]), jnp.float32)
    out, _ = _run_groups(age, jnp.full(age.shape[:1], age.shape[1]), state, None, operands)
    return checkpoint_name(out, MIXED)


def _forward(age: jax.Array, *operands: jax.Array) -> tuple[jax.Array, Any]:
    return _mix(age, *operands), (age, operands)


def _backward(saved: Any, gradient: jax.Array) -> tuple[Any, ...]:
    # Without the barrier, XLA would keep what the forward computed, where no loop is between the two.
    age, operands = saved
    operands, gradient = jax.lax.optimization_barrier((operands, gradient))
    return None, *jax.vjp(functools.partial(_mix, age), *operands)[1](gradient)


mix.defvjp(_forward, _backward)


# ---- With a state.


def _continue(
    context: Context, age: jax.Array, cache: RecurrentState, projected: list[jax.Array], learned: list[jax.Array]
) -> tuple[jax.Array, RecurrentState]:
    """Return the result of the heads, [B, S, G, R, V], and the state after the tokens of this call.

    A token of age 0 is the first of its row: it reads nothing of the state that the row had.
    """
    assert context.cache_index is not None and context.lengths is not None
    count = jnp.clip(context.lengths[:, -1] - context.cache_index, 0, age.shape[1])
    state, heads = cache.state, projected[2].shape[2:4]
    tails = [
        jnp.swapaxes(tail, 1, 2).reshape(*tail.shape[::2], *x.shape[2:])
        for tail, x in zip(cache.tails, projected, strict=False)
    ]
    operands = (*projected, *learned)
    out, after = _run_groups(age, count, state.reshape(len(state), *heads, *state.shape[2:]), tails, operands)

    def take_last(stored: jax.Array, tail: jax.Array, new: jax.Array) -> jax.Array:
        both = jnp.concatenate([tail, new.astype(tail.dtype)], axis=1)  # [B, W - 1 + S, ...]
        take = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=tail.shape[1])
        last = jax.vmap(take)(both, count)
        return jnp.swapaxes(last.reshape(*last.shape[:2], *stored.shape[1::2]), 1, 2)

    return out, RecurrentState(after.reshape(state.shape), tuple(map(take_last, cache.tails, tails, projected)))


# ---- Arithmetic, in float32.


def _run_groups(
    age: jax.Array,
    count: jax.Array,
    state: jax.Array,
    tails: Sequence[jax.Array] | None,
    operands: Sequence[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Return the result of the heads, [B, S, G, R, V], and the state after the tokens, [B, G, R, K, V].

    age, operands: as of `mix`. count: int32 [B], tokens that are no padding.
    tails: queries, keys and values of the W - 1 tokens before, [B, W - 1, ...]; None: there are none.
    """
    *projected, beta, decay = operands[:5]
    (batch, length), learned = age.shape, operands[5:]
    chunk = min(CHUNK, length)
    chunks = min(GROUP, -(-length // chunk))
    size, padding = chunks * chunk, -length % (chunks * chunk)
    before = learned[0].shape[-1] - 1

    def divide(x: jax.Array) -> jax.Array:  # [B, S, ...] -> [groups, B, tokens of a group, ...]
        x = jnp.pad(x, ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(batch, -1, size, *x.shape[2:]), 1, 0)

    def list_earlier(index: int, x: jax.Array) -> jax.Array:  # -> [groups, B, W - 1, ...], the tokens before a group
        x = jnp.pad(x, ((0, 0), (before, padding), *[(0, 0)] * (x.ndim - 2)))
        x = x if tails is None else jax.lax.dynamic_update_slice_in_dim(x, tails[index].astype(x.dtype), 0, axis=1)
        if length + padding == size:
            return x[None, :, :before]
        return jnp.moveaxis(x[:, :-before].reshape(batch, -1, size, *x.shape[2:])[:, :, :before], 1, 0)

    is_token = jnp.arange(length) < count[:, None]
    further = age[:, -1:] + 1 + jnp.arange(padding, dtype=age.dtype)
    ages = jnp.moveaxis(jnp.concatenate([age, further], axis=1).reshape(batch, -1, size), 1, 0)
    earlier = tuple(list_earlier(index, x) for index, x in enumerate(projected))
    inputs = ages, divide(is_token), earlier, tuple(map(divide, projected)), divide(beta), divide(decay)
    # A group is computed again in the backward, so that only its inputs and its state wait for it.
    run = jax.checkpoint(functools.partial(_run_group, chunk, learned), prevent_cse=False)
    state, out = jax.lax.scan(run, state, inputs)
    return jnp.moveaxis(out, 0, 1).reshape(batch, length + padding, *out.shape[3:])[:, :length], state


def _run_group(
    chunk: int, learned: Sequence[jax.Array], state: jax.Array, inputs: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    """Run consecutive chunks. Return the state after them, and the result of the heads in the projections' dtype.

    inputs: of `_run_groups`, for the tokens of a group.
    """
    age, is_token, earlier, projected, beta, decay = inputs
    *kernels, offset, rate = learned

    def to_chunks(x: jax.Array) -> jax.Array:  # [B, tokens, G, ...] -> [N, B, G, C, ...]
        x = x.reshape(len(x), -1, chunk, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 3, 2)

    query, key, value = (to_chunks(_convolve(age, *each)) for each in zip(earlier, projected, kernels, strict=True))
    query, key = (x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + NORM_EPSILON) for x in (query, key))
    offset, rate = (x.reshape(decay.shape[2:]) for x in (offset, rate))
    shares, logs = (
        jnp.where(is_token[..., None, None], x, 0.0)  # padding leaves the state as it is
        for x in (
            jax.nn.sigmoid(beta.astype(jnp.float32)),
            -jnp.exp(rate) * jax.nn.softplus(decay.astype(jnp.float32) + offset),
        )
    )
    by_head = (value, to_chunks(shares), to_chunks(logs))
    ages = jnp.moveaxis(age.reshape(len(age), -1, chunk), 1, 0)  # [N, B, C]
    state, out = _run_chunks(
        ages, state, query * query.shape[-1] ** -0.5, key, *(jnp.moveaxis(x, 4, 3) for x in by_head)
    )
    out = jnp.moveaxis(out, (1, 4), (0, 2))  # [N, B, G, R, C, V] -> [B, N, C, G, R, V]
    return state, out.reshape(len(age), -1, *out.shape[3:]).astype(beta.dtype)


def _convolve(age: jax.Array, earlier: jax.Array, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return SiLU of a causal convolution of each value of x [B, S, ...] with its own kernel [..., W].

    earlier: [B, W - 1, ...], what is before x.
    """
    length, taps = x.shape[1], kernel.shape[-1]
    x, out = jnp.concatenate([earlier, x], axis=1).astype(jnp.float32), jnp.zeros((), jnp.float32)
    for tap in range(taps):
        is_seen = (age >= taps - 1 - tap).reshape(*age.shape, *[1] * (x.ndim - 2))
        out = out + jnp.where(is_seen, x[:, tap : tap + length], 0.0) * kernel[..., tap]
    return jax.nn.silu(out)


def _run_chunks(
    age: jax.Array,
    state: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    shares: jax.Array,
    logs: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the state [B, G, R, K, V] after N chunks, and the result of the heads, [N, B, G, R, C, V].

    age: [N, B, C]. query, key: [N, B, G, C, K]. value: [N, B, G, R, C, V].
    shares, logs: [N, B, G, R, C], the share of what the state holds for its key that a token replaces, and the log of
        the decay before.
    """
    index, total = jnp.arange(age.shape[-1]), jnp.cumsum(logs, axis=-1)
    first = index - age  # in the chunk, of the token's document
    is_same = (first[..., :, None] == first[..., None, :]) & (index[:, None] >= index)
    between = total[..., :, None] - total[..., None, :]
    kept = jnp.exp(jnp.where(is_same[:, :, None, None], between, -jnp.inf))  # what is left at a token of an earlier one
    entered = jnp.exp(total) * (first < 0)[:, :, None, None]  # and of the state before the chunk
    # What a token adds to the state depends on what earlier tokens of the chunk add: a triangular system.
    alike, scores = (jnp.einsum("NBGCK,NBGcK->NBGCc", x, key)[:, :, :, None] * kept for x in (key, query))
    solved = _invert(jnp.where(index[:, None] > index, alike * shares[..., None], 0.0)) * shares[..., None, :]
    added = jnp.einsum("NBGRCc,NBGRcV->NBGRCV", solved, value)
    replaced = jnp.einsum("NBGRCc,NBGcK->NBGRCK", solved * entered[..., None, :], key)
    read, leaving = (x[:, :, :, None] * each[..., None] for x, each in ((query, entered), (key, kept[..., -1, :])))

    def run_chunk(state: jax.Array, each: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        added, replaced, scores, read, leaving, left = each
        added = added - jnp.einsum("...CK,...KV->...CV", replaced, state)
        out = jnp.einsum("...CK,...KV->...CV", read, state) + jnp.einsum("...Cc,...cV->...CV", scores, added)
        return left * state + jnp.einsum("...CK,...CV->...KV", leaving, added), out

    return jax.lax.scan(run_chunk, state, (added, replaced, scores, read, leaving, entered[..., -1, None, None]))


@jax.custom_vjp
def _invert(lower: jax.Array) -> jax.Array:
    """Return the inverse of 1 + lower, [..., C, C], where `lower` is strictly lower triangular.

    It doubles the blocks on the diagonal that are inverted. A series of powers of `lower` would cancel out large terms
    where keys are alike.
    """
    size = lower.shape[-1]
    block = jnp.arange(size)

    def take_beside(level: int) -> jax.Array:  # below an odd block's left neighbour
        row = block[:, None] >> level
        return jnp.where((row % 2 == 1) & (row == (block >> level) + 1), lower, 0.0)

    inverse = jnp.eye(size, dtype=lower.dtype) - take_beside(0)
    for level in range(1, math.ceil(math.log2(size))):
        inverse = inverse - _multiply(_multiply(inverse, take_beside(level)), inverse)
    return inverse


def _multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    # In all bits of float32, also where GPUs would round the operands: errors add up over the tokens of a chunk.
    return jnp.einsum("...ij,...jk->...ik", a, b, precision=jax.lax.Precision.HIGHEST)


def _invert_backward(inverse: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-_multiply(_multiply(transposed, gradient), transposed),)


def _invert_forward(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = _invert(lower)
    return inverse, inverse


_invert.defvjp(_invert_forward, _invert_backward)
