"""Models of sequences in Flax NNX, small, with the structure of well-known ones, and their losses."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from plain_training import ROWS, Batch, Case
from zoo_images import CLIPPED, HEADS, LAMB, MASKED, MOMENTUM, PLAIN_SETTINGS, RULES, SETTINGS, WIDTH, named

VOCABULARY, LENGTH, LAYERS = 32, 6, 3


def tokens(*names: str) -> Callable[[np.random.RandomState], Batch]:
    def batch(random: np.random.RandomState) -> Batch:
        return {name: random.randint(1, VOCABULARY, (ROWS, LENGTH)) for name in names}

    return batch


def sum_losses(logits: jax.Array, labels: jax.Array, mask: Any = 1.0) -> tuple[jax.Array, jax.Array]:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses * mask), jnp.sum(jnp.broadcast_to(mask, losses.shape))


def predict_next(model: Any, batch: Any) -> Any:
    return sum_losses(model(batch["tokens"])[:, :-1], batch["tokens"][:, 1:])


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, kernel_init=named("mlp", "embed"), rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.down(nnx.relu(self.up(x))))


class Block(nnx.Module):
    """Block of flax/examples/lm1b_nnx and wmt: attention, attention to the other sequence if there is one, and MLP."""

    def __init__(self, rngs: nnx.Rngs, crosses: bool = False) -> None:
        def attention() -> nnx.MultiHeadAttention:
            init = named("embed", "heads")
            return nnx.MultiHeadAttention(2, WIDTH, kernel_init=init, use_bias=False, decode=False, rngs=rngs)

        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(3 if crosses else 2)])
        self.attention, self.mlp = attention(), Mlp(rngs)
        self.cross = attention() if crosses else None

    def __call__(self, x: jax.Array, mask: Any = None, encoded: Any = None) -> jax.Array:
        x = x + self.attention(self.norms[0](x), mask=mask)
        if self.cross is not None:
            x = x + self.cross(self.norms[2](x), encoded)
        return x + self.mlp(self.norms[1](x))


class Listed(nnx.Module):
    """Decoder of flax/examples/lm1b_nnx, with its blocks in a list."""

    def __init__(self, rngs: nnx.Rngs, remat: bool) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.norm, self.head = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)
        self.remat = remat

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + jnp.sin(jnp.arange(LENGTH)[:, None] / jnp.arange(1, WIDTH + 1))
        for block in self.blocks:
            x = (nnx.remat(Block.__call__) if self.remat else Block.__call__)(block, x, nnx.make_causal_mask(tokens))
        return self.head(self.norm(x))


def stack(make: Callable[[nnx.Rngs], Any], rngs: nnx.Rngs, layers: int) -> Any:
    metadata = {nnx.PARTITION_NAME: "layers"}
    return nnx.split_rngs(splits=layers)(nnx.vmap(make, transform_metadata=metadata))(rngs)


class Scanned(nnx.Module):
    """The same blocks as a stack, under nnx.scan."""

    def __init__(self, rngs: nnx.Rngs, remat: bool) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = stack(Block, rngs, LAYERS)
        self.norm, self.head = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)
        self.remat = remat

    def __call__(self, tokens: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(tokens)

        def layer(x: jax.Array, block: Block) -> jax.Array:
            return block(x, mask)

        layer = nnx.remat(layer) if self.remat else layer
        x = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(self.embed(tokens), self.blocks)
        return self.head(self.norm(x))


class Nested(nnx.Module):
    """A stack of two groups, each with a norm and a stack of three blocks."""

    class Group(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.blocks, self.norm = stack(Mlp, rngs, LAYERS), nnx.RMSNorm(WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            @nnx.remat
            def layer(x: jax.Array, block: Mlp) -> jax.Array:
                return x + block(x)

            return self.norm(layer(x, self.blocks))

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.groups = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs), stack(self.Group, rngs, 2)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        scan = nnx.scan(lambda x, group: group(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.embed.attend(scan(self.embed(tokens), self.groups))


class Translator(nnx.Module):
    """Encoder and decoder of flax/examples/wmt, with one embedding for both and for the logits."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, embedding_init=named("vocabulary", "embed"), rngs=rngs)
        self.encoder = nnx.List([Block(rngs)])
        self.decoder = nnx.List([Block(rngs, crosses=True)])
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        x, y = self.embed(source), self.embed(target)
        for block in self.encoder:
            x = block(x)
        for block in self.decoder:
            y = block(y, nnx.make_causal_mask(target), self.norms[0](x))
        return self.embed.attend(self.norms[1](y))


def translate(model: Translator, batch: Any) -> Any:
    return sum_losses(model(batch["source"], batch["target"])[:, :-1], batch["target"][:, 1:])


class Bert(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.positions = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs), nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs)])
        self.transform, self.norm = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(VOCABULARY))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions(jnp.arange(LENGTH))
        for block in self.blocks:
            x = block(x, (tokens > 2)[:, None, None])
        return self.embed.attend(self.norm(nnx.gelu(self.transform(x)))) + self.bias[...]


def predict_masked(model: Bert, batch: Any) -> Any:
    """The microbatches have different numbers of masked positions."""
    masked = batch["draw"] < 8
    logits = model(jnp.where(masked, 0, batch["tokens"]))
    right = jnp.sum(masked * (jnp.argmax(logits, -1) == batch["tokens"])) / jnp.sum(masked)
    return sum_losses(logits, batch["tokens"], masked), {"accuracy": right}


class MambaBlock(nnx.Module):
    """A selective state space, by a scan over time or by an associative one."""

    def __init__(self, rngs: nnx.Rngs, associative: bool) -> None:
        inner, states = 2 * WIDTH, 4
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * inner, use_bias=False, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(inner, WIDTH, use_bias=False, kernel_init=named("mlp", "embed"), rngs=rngs)
        self.select = nnx.Linear(inner, 2 * states + 1, rngs=rngs)
        self.log_a = nnx.Param(jnp.log(jnp.tile(jnp.arange(1.0, states + 1), (inner, 1))))
        self.skip = nnx.Param(jnp.ones(inner))
        self.states, self.associative = states, associative

    def __call__(self, x: jax.Array) -> jax.Array:
        u, gate = jnp.split(self.up(self.norm(x)), 2, axis=-1)
        u = nnx.silu(u)
        b, c, step = jnp.split(self.select(u), (self.states, 2 * self.states), axis=-1)
        step = nnx.softplus(step)[..., None]
        decay = jnp.exp(-step * jnp.exp(self.log_a[...]))
        inputs = step * b[:, :, None] * u[..., None]  # [rows, time, inner, states]
        if self.associative:
            combine = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])  # noqa: E731
            states = jax.lax.associative_scan(combine, (decay, inputs), axis=1)[1]
        else:

            def advance(state: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
                state = now[0] * state + now[1]
                return state, state

            swapped = jax.tree.map(lambda each: jnp.swapaxes(each, 0, 1), (decay, inputs))
            states = jnp.swapaxes(jax.lax.scan(advance, jnp.zeros_like(inputs[:, 0]), swapped)[1], 0, 1)
        y = jnp.einsum("btis,bts->bti", states, c) + self.skip[...] * u
        return x + self.down(y * nnx.silu(gate))


class Mamba(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([MambaBlock(rngs, associative) for associative in (False, True)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


class GemmaBlock(nnx.Module):
    """Block of flax/examples/gemma: norms before and after, grouped heads by einsum, a cap of scores, a gated MLP."""

    def __init__(self, rngs: nnx.Rngs, window: int) -> None:
        def weight(*shape: int, names: tuple[str, ...]) -> nnx.Param[jax.Array]:
            return nnx.Param(nnx.with_partitioning(nnx.initializers.normal(0.2), names)(rngs.params(), shape))

        self.queries = weight(4, WIDTH, 4, names=("heads", "embed", "head"))
        self.keys_values = weight(2, 2, WIDTH, 4, names=("pair", "heads", "embed", "head"))
        self.out = weight(4, 4, WIDTH, names=("heads", "head", "embed"))
        self.gate = weight(2, WIDTH, 2 * WIDTH, names=("pair", "embed", "mlp"))
        self.down = weight(2 * WIDTH, WIDTH, names=("mlp", "embed"))
        self.scales = nnx.List([nnx.Param(jnp.zeros(WIDTH)) for _ in range(4)])
        self.window = window

    def norm(self, x: jax.Array, index: int) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * (1 + self.scales[index][...])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(x, 0)
        queries = jnp.einsum("btd,ndh->btnh", y, self.queries[...]).reshape(*y.shape[:2], 2, 2, 4)
        keys, values = jnp.einsum("bsd,ckdh->cbskh", y, self.keys_values[...])
        scores = 5 * jnp.tanh(jnp.einsum("btkgh,bskh->bkgts", queries, keys) / 2 / 5)
        distance = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)
        scores = jnp.where((distance >= 0) & (distance < self.window), scores, -1e30)
        mixed = jnp.einsum("bkgts,bskh->btkgh", nnx.softmax(scores), values).reshape(*y.shape[:2], 4, 4)
        x = x + self.norm(jnp.einsum("btnh,nhd->btd", mixed, self.out[...]), 1)
        gate, up = jnp.dot(self.norm(x, 2), self.gate[0]), jnp.dot(self.norm(x, 2), self.gate[1])
        return x + self.norm((nnx.gelu(gate) * up) @ self.down[...], 3)


class Gemma(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, embedding_init=named("vocabulary", "embed"), rngs=rngs)
        self.blocks = nnx.List([GemmaBlock(rngs, window) for window in (2, LENGTH)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) * jnp.sqrt(WIDTH)
        for block in self.blocks:
            x = nnx.remat(GemmaBlock.__call__)(block, x)
        return 5 * jnp.tanh(self.embed.attend(x) / 5)


TOKENS = tokens("tokens")
TABLE_RULES = HEADS | {"vocabulary": "tensor"}
CASES = {
    "lm1b": Case(lambda: Listed(nnx.Rngs(0), remat=False), predict_next, TOKENS, MASKED, HEADS),
    "lm1b_remat": Case(lambda: Listed(nnx.Rngs(0), remat=True), predict_next, TOKENS, SETTINGS, HEADS, PLAIN_SETTINGS),
    "scanned": Case(lambda: Scanned(nnx.Rngs(0), remat=False), predict_next, TOKENS, LAMB, HEADS),
    "scanned_remat": Case(
        lambda: Scanned(nnx.Rngs(0), remat=True), predict_next, TOKENS, SETTINGS, HEADS, PLAIN_SETTINGS
    ),
    "nested": Case(lambda: Nested(nnx.Rngs(0)), predict_next, TOKENS, CLIPPED, RULES),
    "wmt": Case(lambda: Translator(nnx.Rngs(0)), translate, tokens("source", "target"), CLIPPED, TABLE_RULES),
    "bert": Case(lambda: Bert(nnx.Rngs(0)), predict_masked, tokens("tokens", "draw"), CLIPPED, HEADS),
    "mamba": Case(lambda: Mamba(nnx.Rngs(0)), predict_next, TOKENS, MOMENTUM, RULES),
    "gemma": Case(
        lambda: Gemma(nnx.Rngs(0)), predict_next, TOKENS, CLIPPED, TABLE_RULES | {"pair": None, "head": None}
    ),
}
