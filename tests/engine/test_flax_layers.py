"""The layers of Flax NNX and of Linen, each in a small model, train by the engine as by optax on one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from plain_training import ROWS, Case, list_arrays, train_plainly
from zoo_images import MOMENTUM

import jaxopt_llm
from jaxopt_llm.config import Config

STEPS, LENGTH, WIDTH = 2, 4, 8


class Wrapped(nnx.Module):
    """Two linear layers around a layer."""

    def __init__(self, make: Callable[[nnx.Rngs], Any]) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.layer = nnx.Linear(3, WIDTH, rngs=rngs), make(rngs)
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.layer(jnp.tanh(self.first(x))))


class Lookup(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(5, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.embed(jnp.argmax(x, -1) % 5)


class LinenWrapped(linen.Module):
    make: Callable[[], Any]

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(1)(self.make()(jnp.tanh(linen.Dense(WIDTH)(x))))


class LinenLookup(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + linen.Embed(5, WIDTH)(jnp.argmax(x, -1) % 5)


NNX: dict[str, Callable[[nnx.Rngs], Any]] = {
    "conv": lambda rngs: nnx.Conv(WIDTH, WIDTH, (3,), rngs=rngs),
    "conv_transpose": lambda rngs: nnx.ConvTranspose(WIDTH, WIDTH, (2,), rngs=rngs),
    "group_norm": lambda rngs: nnx.GroupNorm(WIDTH, num_groups=2, rngs=rngs),
    "instance_norm": lambda rngs: nnx.InstanceNorm(WIDTH, rngs=rngs),
    "attention": lambda rngs: nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs),
    "lstm": lambda rngs: nnx.RNN(nnx.LSTMCell(WIDTH, WIDTH, rngs=rngs)),
    "optimised_lstm": lambda rngs: nnx.RNN(nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs)),
    "gru": lambda rngs: nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)),
    "embed": Lookup,
    "einsum": lambda rngs: nnx.Einsum("btd,de->bte", (WIDTH, WIDTH), (WIDTH,), rngs=rngs),
    "linear_general": lambda rngs: nnx.LinearGeneral(WIDTH, (WIDTH,), rngs=rngs),
    "batch_norm": lambda rngs: nnx.BatchNorm(WIDTH, rngs=rngs),
    "dropout": lambda rngs: nnx.Dropout(0.5, rngs=rngs),
    "prelu": lambda rngs: nnx.PReLU(),
    "weight_norm": lambda rngs: nnx.WeightNorm(nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs),
    "spectral_norm": lambda rngs: nnx.SpectralNorm(nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs),
}
LINEN: dict[str, Callable[[], Any]] = {
    "conv": lambda: linen.Conv(WIDTH, (3,)),
    "conv_transpose": lambda: linen.ConvTranspose(WIDTH, (2,)),
    "group_norm": lambda: linen.GroupNorm(num_groups=2),
    "attention": lambda: linen.MultiHeadDotProductAttention(2),
    "lstm": lambda: linen.RNN(linen.LSTMCell(WIDTH)),
    "gru": lambda: linen.RNN(linen.GRUCell(WIDTH)),
    "embed": LinenLookup,
    "einsum": lambda: linen.Einsum((WIDTH, WIDTH), "btd,de->bte"),
    "batch_norm": lambda: linen.BatchNorm(use_running_average=False),
    "dropout": lambda: linen.Dropout(0.5, deterministic=False),
    "weight_norm": lambda: linen.WeightNorm(linen.Dense(WIDTH)),
    "spectral_norm": lambda: UpdatedSpectralNorm(),
}


class UpdatedSpectralNorm(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.SpectralNorm(linen.Dense(WIDTH))(x, update_stats=True)


def regress(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"])[..., 0] - batch["y"]) ** 2)


def make_batch(random: np.random.RandomState) -> dict[str, np.ndarray]:
    shape = ROWS, LENGTH
    return {"x": random.randn(*shape, 3).astype(np.float32), "y": random.randn(*shape).astype(np.float32)}


@pytest.mark.parametrize("name", [*(f"nnx/{name}" for name in NNX), *(f"linen/{name}" for name in LINEN)])
def test_a_layer_trains_as_in_plain_flax(name: str) -> None:
    kind, layer = name.split("/")
    model: Any = LinenWrapped(LINEN[layer]) if kind == "linen" else lambda: Wrapped(NNX[layer])
    case = Case(model, regress, make_batch, MOMENTUM)
    expected = train_plainly(case, 1, STEPS)
    config = Config(mesh={"fsdp": 8}, precision={"compute_dtype": "float32"})  # type: ignore[arg-type]
    engine = jaxopt_llm.initialize(model, regress, case.batches(1)[0], config, MOMENTUM)
    losses = [engine.step(batch)["loss"] for batch in case.batches(STEPS)]
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
    arrays = list_arrays(engine.model())
    assert arrays.keys() == expected.arrays.keys()
    for path, array in arrays.items():
        np.testing.assert_allclose(array, expected.arrays[path], rtol=1e-5, atol=1e-5, err_msg=path)
