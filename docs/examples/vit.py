"""A vision transformer that names the direction of noisy gratings: `nnx.scan` over layers, `nnx.remat`, and `fit`.

Run it with `python vit.py`; XLA_FLAGS=--xla_force_host_platform_device_count=8 makes eight devices of a CPU.
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxopt_llm

SIZE, PATCH, WIDTH, LAYERS, CLASSES, ROWS = 16, (4, 4), 64, 3, 8, 64
Y, X = np.mgrid[:SIZE, :SIZE]


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.mlp = nnx.Sequential(nnx.Linear(WIDTH, 256, rngs=rngs), nnx.gelu, nnx.Linear(256, WIDTH, rngs=rngs))

    def __call__(self, x):
        x += self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nnx.Module):
    def __init__(self, rngs):
        self.patches, self.head = nnx.Conv(1, WIDTH, PATCH, PATCH, rngs=rngs), nnx.Linear(WIDTH, CLASSES, rngs=rngs)
        self.positions = nnx.Param(0.02 * rngs.normal((SIZE**2 // np.prod(PATCH), WIDTH)))
        self.blocks = nnx.vmap(Block)(rngs.split(LAYERS))  # each parameter is [LAYERS, ...]

    def __call__(self, images):
        x = self.patches(images).reshape(len(images), -1, WIDTH) + self.positions
        layers = nnx.scan(nnx.remat(lambda x, block: block(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(layers(x, self.blocks).mean(1))


def loss(model, batch):
    logits = model(batch["image"].astype(jnp.bfloat16)).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}


def make_batch(step):
    random = np.random.default_rng(step)
    label, phase = random.integers(CLASSES, size=(ROWS, 1, 1)), random.uniform(0, 6, (ROWS, 1, 1))
    wave = np.sin(np.cos(label * np.pi / CLASSES) * Y + np.sin(label * np.pi / CLASSES) * X + phase)
    return {"image": np.float32(wave + random.normal(size=wave.shape))[..., None], "label": np.int32(label.ravel())}


def main(steps=150, directory="runs/vit"):
    engine = jaxopt_llm.initialize(lambda: ViT(nnx.Rngs(0)), loss, make_batch(0), optimizer=optax.adamw(1e-3))
    held_out = [make_batch(10**6 + index) for index in range(4)]
    return jaxopt_llm.fit(engine, make_batch, steps, directory, held_out).evaluate(held_out)


if __name__ == "__main__":
    print("held out:", main())
