"""Models in Flax NNX that call `jaxopt_llm.attention`, small, and their losses."""

import functools
from typing import Any

import jax
import numpy as np
from flax import nnx
from plain_training import ROWS, Batch, Case
from zoo_images import CLIPPED, WIDTH, named
from zoo_sequences import LENGTH, TOKENS, VOCABULARY, predict_next, stack, sum_losses

import jaxopt_llm

SIZE, LAYERS, SEGMENTS = 4, 3, 3


@functools.partial(jax.jit, static_argnames=("causal", "window", "max_segments"))
def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: Any, **options: Any) -> jax.Array:
    """Attend as a library would: in a function of the module that is jitted once for all models."""
    return jaxopt_llm.attention(q, k, v, segment_ids=ids, **options)


class Block(nnx.Module):
    """Attention with half as many key-value heads as heads."""

    def __init__(self, rngs: nnx.Rngs, heads: int = 4, **options: Any) -> None:
        def linear(inputs: int, outputs: int, *names: str) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=named(*names), rngs=rngs)

        self.heads, self.options = heads, options
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.query = linear(WIDTH, heads * SIZE, "embed", "heads")
        self.key, self.value = (linear(WIDTH, heads // 2 * SIZE, "embed", "kv_heads") for _ in range(2))
        self.out = linear(heads * SIZE, WIDTH, "heads", "embed")

    def __call__(self, x: jax.Array, ids: Any = None) -> jax.Array:
        y = self.norm(x)
        q, k, v = (
            layer(y).reshape(*x.shape[:2], heads, SIZE)
            for layer, heads in ((self.query, self.heads), (self.key, self.heads // 2), (self.value, self.heads // 2))
        )
        return x + self.out(attend(q, k, v, ids, **self.options).reshape(*x.shape[:2], -1))


class Packed(nnx.Module):
    """A decoder of packed documents, its blocks as a rematerialised loop."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        make = functools.partial(Block, causal=True, window=4, max_segments=SEGMENTS)
        self.embed, self.blocks = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs), stack(make, rngs, LAYERS)

    def __call__(self, tokens: jax.Array, ids: jax.Array) -> jax.Array:
        layer = nnx.remat(lambda x, block: block(x, ids))
        scan = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.embed.attend(scan(self.embed(tokens), self.blocks))


class Listed(nnx.Module):
    """An encoder with its blocks in a list."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, causal=False) for _ in range(2)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


def documents(random: np.random.RandomState) -> Batch:
    ids = np.sort(random.randint(0, SEGMENTS, (ROWS, LENGTH)), axis=1)
    return TOKENS(random) | {"ids": ids}


def predict_packed(model: Packed, batch: Any) -> Any:
    same = batch["ids"][:, 1:] == batch["ids"][:, :-1]
    return sum_losses(model(batch["tokens"], batch["ids"])[:, :-1], batch["tokens"][:, 1:], same)


RULES: dict[str, str | None] = {"embed": None, "heads": "tensor", "kv_heads": "tensor"}
CASES = {
    "packed": Case(lambda: Packed(nnx.Rngs(0)), predict_packed, documents, CLIPPED, RULES),
    "encoder": Case(lambda: Listed(nnx.Rngs(0)), predict_next, TOKENS, CLIPPED, RULES),
}
