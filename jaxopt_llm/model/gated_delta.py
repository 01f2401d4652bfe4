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
GROUP = 2  # chunks whose intermediates are in memory at the same time
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
    first = context.key_ranges.first
    if cache is None:
        out = mix(first, *projected, *learned)
    else:
        out, cache = _continue(context, cache, projected, learned)
    out = reduce_scatter_sequence(project_out(placement.constrain(out, *MIXED.axes), gate), placement)
    return mark(out, "attention_output", "product", "batch", "residual_sequence", "embed"), cache


# ---- Over a sequence. Its backward keeps the projections alone, and computes everything else again.


@jax.custom_vjp
def mix(first: jax.Array, *operands: jax.Array) -> jax.Array:
    """Return the result of the heads, [B, S, G, R, V], in the dtype of the projections.

    first: int32 [B, S], the row in which the document of each token begins.
    operands: the projections [B, S, ...] and the weights that `_prepare` takes.
    """
    return _mix(first, *operands)


@jax.named_scope("gated_delta")
def _mix(first: jax.Array, *operands: jax.Array) -> jax.Array:
    rows = jnp.arange(first.shape[1], dtype=jnp.int32)
    out, _ = _run_chunks(first, None, *_prepare(rows, first, None, *operands))
    return checkpoint_name(out.astype(operands[0].dtype), MIXED)


def _forward(first: jax.Array, *operands: jax.Array) -> tuple[jax.Array, Any]:
    return _mix(first, *operands), (first, operands)


def _backward(saved: Any, gradient: jax.Array) -> tuple[Any, ...]:
    # Without the barrier, XLA would keep what the forward computed, where no loop is between the two.
    first, operands = saved
    operands, gradient = jax.lax.optimization_barrier((operands, gradient))
    return None, *jax.vjp(functools.partial(_mix, first), *operands)[1](gradient)


mix.defvjp(_forward, _backward)


# ---- With a state.


def _continue(
    context: Context, cache: RecurrentState, projected: list[jax.Array], learned: list[jax.Array]
) -> tuple[jax.Array, RecurrentState]:
    """Return the result of the heads, [B, S, G, R, V], and the state after the tokens of this call."""
    begin, length = context.cache_index, projected[0].shape[1]
    assert begin is not None and context.lengths is not None
    rows, first = begin[:, None] + jnp.arange(length, dtype=jnp.int32), context.key_ranges.first
    tails = tuple(
        jnp.swapaxes(tail, 1, 2).reshape(*tail.shape[::2], *x.shape[2:]) for tail, x in zip(cache.tails, projected)
    )
    *heads, beta, decay = _prepare(rows, first, tails, *projected, *learned)
    is_token = (rows < context.lengths)[..., None, None]
    beta, decay = (jnp.where(is_token, x, 0.0) for x in (beta, decay))  # padding leaves the state as it is
    shape = (cache.state.shape[0], *beta.shape[2:], *cache.state.shape[2:])
    state = jnp.where((begin == 0)[:, None, None, None], 0.0, cache.state).reshape(shape)
    out, state = _run_chunks(first, state, *heads, beta, decay)
    count = jnp.clip(context.lengths[:, -1] - begin, 0, length)

    def take_last(stored: jax.Array, tail: jax.Array, new: jax.Array) -> jax.Array:
        both = jnp.concatenate([tail, new.astype(tail.dtype)], axis=1)  # [B, W - 1 + S, ...]
        take = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=tail.shape[1])
        last = jax.vmap(take)(both, count)
        return jnp.swapaxes(last.reshape(*last.shape[:2], *stored.shape[1::2]), 1, 2)

    taken = tuple(map(take_last, cache.tails, tails, projected))
    return out.astype(projected[0].dtype), RecurrentState(state.reshape(cache.state.shape), taken)


# ---- Arithmetic, in float32.


def _prepare(
    rows: jax.Array, first: jax.Array, tails: tuple[jax.Array, ...] | None, *operands: jax.Array
) -> tuple[jax.Array, ...]:
    """Return queries, keys and values after the convolution, the shares that tokens replace, and the logs of decays.

    rows: int32 [S] or [B, S], the row of each token. first: int32 [B, S], the row in which its document begins.
    tails: the projections before the first row, [B, W - 1, ...]; None: there are none.
    operands: the projections in the order of PRODUCTS, without the gate; the kernels [..., W]; and the offset and the
        log of the rate of the decays, [H].
    """
    *projected, beta, decay = operands[:5]
    *kernels, offset, rate = operands[5:]
    before = tails or [jnp.zeros((len(x), kernel.shape[-1] - 1, *x.shape[2:])) for x, kernel in zip(projected, kernels)]
    convolved = [_convolve(*each, rows, first) for each in zip(before, projected, kernels, strict=True)]
    query, key = (x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + NORM_EPSILON) for x in convolved[:2])
    offset, rate = (x.reshape(decay.shape[2:]) for x in (offset, rate))
    decays = -jnp.exp(rate) * jax.nn.softplus(decay.astype(jnp.float32) + offset)
    return query * query.shape[-1] ** -0.5, key, convolved[2], jax.nn.sigmoid(beta.astype(jnp.float32)), decays


def _convolve(tail: jax.Array, x: jax.Array, kernel: jax.Array, rows: jax.Array, first: jax.Array) -> jax.Array:
    """Return SiLU of a causal convolution of each value of x [B, S, ...] with its own kernel [..., W]."""
    length, taps = x.shape[1], kernel.shape[-1]
    x = jnp.concatenate([tail, x.astype(tail.dtype)], axis=1)
    out = jnp.zeros((), jnp.float32)
    for tap in range(taps):
        is_seen = rows - (taps - 1 - tap) >= first
        seen = x[:, tap : tap + length].astype(jnp.float32)
        out = out + jnp.where(is_seen.reshape(*is_seen.shape, *[1] * (x.ndim - 2)), seen, 0.0) * kernel[..., tap]
    return jax.nn.silu(out)


def _run_chunks(first: jax.Array, state: jax.Array | None, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the result of the heads, [B, S, G, R, V], and the state after all tokens, [B, G, R, K, V].

    arrays: what `_prepare` returns.
    """
    query, _, value, *_ = arrays
    batch, length, *heads = value.shape
    chunk = min(CHUNK, length)
    group = min(GROUP, -(-length // chunk))
    padding = -length % (group * chunk)
    if state is None:
        state = jnp.zeros((batch, *heads[:2], query.shape[-1], heads[2]), jnp.float32)

    def divide(x: jax.Array, mode: str = "constant") -> jax.Array:  # -> [groups, N, B, G, C, ...]
        x = jnp.pad(x, ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)), mode=mode)
        x = x.reshape(batch, -1, group, chunk, *x.shape[2:])
        return jnp.moveaxis(x, (0, 4), (2, 3)) if x.ndim > 4 else jnp.moveaxis(x, 0, 2)

    before = jnp.pad(first, ((0, 0), (1, 0)), mode="edge")[:, :-1]  # of the token before; the state is of the first's
    documents = divide(first, "edge"), divide(before, "edge")[..., 0]
    # A group is computed again in the backward, so that only its inputs and its state wait for it.
    run = jax.checkpoint(_run_group, prevent_cse=False)
    state, out = jax.lax.scan(run, state, (*documents, *map(divide, arrays)))
    out = jnp.moveaxis(out, (2, 5), (0, 3)).reshape(batch, -1, *heads)
    return out[:, :length], state


def _run_group(state: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Run consecutive chunks. Return the state [B, G, R, K, V] after them, and the result [N, B, G, R, C, V].

    inputs: the first row of each token's document [N, B, C], and of the document of the token before each chunk [N, B];
        queries and keys [N, B, G, C, K], values [N, B, G, C, R, V], shares and logs of decays [N, B, G, C, R].
    """
    first, before, query, key, *others = inputs
    value, shares, decays = (jnp.moveaxis(x, 4, 3) for x in others)  # [N, B, G, R, C, ...]
    chunk, total = first.shape[-1], jnp.cumsum(decays, axis=-1)
    is_same = (first[..., :, None] == first[..., None, :]) & jnp.tri(chunk, dtype=jnp.bool)
    between = total[..., :, None] - total[..., None, :]
    kept = jnp.exp(jnp.where(is_same[:, :, None, None], between, -jnp.inf))  # what is left at a token of an earlier one
    entered = jnp.exp(total) * (first == before[..., None])[:, :, None, None]  # and of the state before the chunk
    # What a token adds to the state depends on what earlier tokens of the chunk add: a triangular system.
    alike, scores = (jnp.einsum("NBGCK,NBGcK->NBGCc", x, key)[:, :, :, None] * kept for x in (key, query))
    system = jnp.where(jnp.tri(chunk, k=-1, dtype=jnp.bool), alike * shares[..., None], 0.0)
    solved = _invert(system) * shares[..., None, :]
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
    inverse, index = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape), jnp.arange(size)
    for level in range(math.ceil(math.log2(size))):
        block = index >> level
        is_beside = (block[:, None] % 2 == 1) & (block[:, None] == block + 1)  # below an odd block's left neighbour
        beside = jnp.where(is_beside, lower, 0.0)
        inverse = inverse - _multiply(_multiply(inverse, beside), inverse)
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
