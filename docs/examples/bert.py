"""A masked language model on the help texts that Python carries: a dataset of rows, and a loss as (sum, count).

Run it with `python bert.py`. The model predicts the bytes that are hidden from it. The two microbatches of a step have
different numbers of them, so the loss returns a sum and a count. `fit` shuffles the list of rows.
"""

from pydoc_data.topics import topics

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxopt_llm

LENGTH, WIDTH, LAYERS, MASK, ROWS = 64, 96, 2, 256, 64


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.mlp = nnx.Sequential(nnx.Linear(WIDTH, 384, rngs=rngs), nnx.gelu, nnx.Linear(384, WIDTH, rngs=rngs))

    def __call__(self, x):
        x += self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Bert(nnx.Module):
    def __init__(self, rngs):
        self.bytes = nnx.Embed(257, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks, self.norm = nnx.vmap(Block)(rngs.split(LAYERS)), nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.bytes(tokens) + self.positions(jnp.arange(LENGTH))
        layers = nnx.scan(nnx.remat(lambda x, block: block(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.bytes.attend(self.norm(layers(x, self.blocks)))  # the table is also the head


def loss(model, batch):
    logits = model(jnp.where(batch["hidden"], MASK, batch["text"])).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["text"])
    return (losses * batch["hidden"]).sum(), batch["hidden"].sum()


def main(steps=400, directory="runs/bert"):
    text = np.frombuffer("".join(topics.values()).encode()[: 2**18], np.uint8).astype(np.int32).reshape(-1, LENGTH)
    hidden = np.random.default_rng(0).random(text.shape) < 0.15
    held_out = {"text": text[:ROWS], "hidden": hidden[:ROWS]}
    rows = [{"text": row, "hidden": mask} for row, mask in zip(text[ROWS:], hidden[ROWS:], strict=True)]
    config = jaxopt_llm.Config(training=dict(accumulation=2))
    engine = jaxopt_llm.initialize(lambda: Bert(nnx.Rngs(0)), loss, held_out, config, optimizer=optax.adamw(2e-3))
    return jaxopt_llm.fit(engine, rows, steps, directory, [held_out]).evaluate([held_out])


if __name__ == "__main__":
    print("held out:", main())
