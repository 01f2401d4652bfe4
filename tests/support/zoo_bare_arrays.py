"""Models with arrays that are attributes of NNX modules without a variable: a schedule of noise, a mask."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from plain_training import Case
from zoo_images import CLASSES, CLIPPED, MASKED, WIDTH, images


class Schedule(nnx.Module):
    """Diffusion of vectors; the noise schedule is an array of the module (Ho et al. 2020)."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.signal = jnp.cumprod(1 - jnp.linspace(0.02, 0.4, 8))
        self.embed = nnx.Embed(8, WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(16, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 16, rngs=rngs)
        self.rngs = rngs


def diffuse(model: Schedule, batch: Any) -> jax.Array:
    x = batch["image"].reshape(batch["image"].shape[0], -1)
    time = jax.random.randint(model.rngs.time(), x.shape[:1], 0, 8)
    noise, signal = jax.random.normal(model.rngs.noise(), x.shape), model.signal[time][:, None]
    noisy = jnp.sqrt(signal) * x + jnp.sqrt(1 - signal) * noise
    return jnp.mean((model.down(nnx.gelu(model.up(noisy) + model.embed(time))) - noise) ** 2)


class Masked(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        mask = jnp.broadcast_to((jnp.arange(9) < 4).reshape(3, 3, 1, 1), (3, 3, 1, WIDTH)).astype(jnp.float32)
        self.conv = nnx.Conv(1, WIDTH, (3, 3), mask=mask, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.conv(x)))


def predict_pixels(model: Masked, batch: Any) -> jax.Array:
    level = jnp.clip(jnp.round(2 * batch["image"] + 4), 0, CLASSES - 1).astype(jnp.int32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), level[..., 0]))


CASES = {
    "schedule": Case(lambda: Schedule(nnx.Rngs(0)), diffuse, images(4), CLIPPED),
    "masked": Case(lambda: Masked(nnx.Rngs(0)), predict_pixels, images(4), MASKED),
}
