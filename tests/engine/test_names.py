"""No name of a user's parameter has a meaning: adapters, moments and matrices are known by their types."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from marks import slow
from plain_training import ROWS, Batch, Case, list_arrays, train_plainly

import jaxopt_llm
from jaxopt_llm.config import Config
from jaxopt_llm.core import tree
from jaxopt_llm.engine.frontends import nest

WIDTH = 32
PLAIN = ("first", "gain", "last", "mix")
NAMES = {
    "adapters": ("lora_a", "magnitude", "lora_b", "base/mlp/router"),
    "moments": ("nu/w", "scales", "mu/w", "w"),
    "sections": ("segment_0/codes", "non_layer/count", "trace", "segment_1"),
}
OPTIMIZER = {"learning_rate": 1e-2, "epsilon": 1e-3, "weight_decay": 0.1, "clip_norm": 0.0}


def make_batch(random: np.random.RandomState) -> Batch:
    x = random.randn(ROWS, WIDTH).astype(np.float32)
    return {"x": x, "y": np.abs(x).mean(1)}


def make_parameters(names: tuple[str, ...]) -> Any:
    random = np.random.RandomState(0)
    shapes = (WIDTH, WIDTH), (WIDTH,), (WIDTH, WIDTH), (2, WIDTH)
    return nest(names, [jnp.asarray(random.randn(*shape) / 6, jnp.float32) for shape in shapes])


def loss(names: tuple[str, ...], parameters: Any, batch: Any) -> jax.Array:
    by_path = dict(tree.leaves_with_path(parameters))
    first, gain, last, mix = (by_path[name] for name in names)
    found = jnp.tanh(batch["x"] @ first * (1 + gain)) * mix.sum(0) @ last
    return jnp.mean((found.sum(1) - batch["y"]) ** 2)


@functools.cache
def train(names: tuple[str, ...], state_dtype: str) -> tuple[list[float], list[np.ndarray]]:
    """Return the losses, and the trained parameters in the order of their names."""
    config = Config(
        mesh={"fsdp": 4, "data": 2},
        precision={"compute_dtype": "float32"},
        optimizer=OPTIMIZER | {"state_dtype": state_dtype},
        schedule={"warmup_steps": 0},
    )
    batches = [make_batch(np.random.RandomState(step)) for step in range(3)]
    engine = jaxopt_llm.initialize(lambda: make_parameters(names), functools.partial(loss, names), batches[0], config)
    losses = [float(engine.step(batch)["loss"]) for batch in batches]
    arrays = list_arrays(engine.model())
    return losses, [arrays[name] for name in names]


@pytest.mark.parametrize(
    ("name", "state_dtype"),
    [("adapters", "float32"), ("moments", "int8"), *slow(("moments", "bfloat16"), ("sections", "int8"))],
)
def test_training_does_not_depend_on_names(name: str, state_dtype: str) -> None:
    expected, found = train(PLAIN, state_dtype), train(NAMES[name], state_dtype)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    for array, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-6)


class Adapted(nnx.Module):
    """Flax's own layer with an adapter, and a parameter named as a part of ours."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs)
        self.first.lora.lora_b[...] = jax.random.normal(rngs.params(), (2, WIDTH))
        self.magnitude = nnx.Param(jnp.full(WIDTH, 0.5))
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.first(x)) * self.magnitude[...])[:, 0]


ADAPTED = Case(
    lambda: Adapted(nnx.Rngs(0)),
    lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2),
    make_batch,
    optax.sgd(0.05, momentum=0.9),
)


def make_engine(**sections: Any) -> jaxopt_llm.Engine:
    config = Config(**{"mesh": {"fsdp": 8}, "precision": {"compute_dtype": "float32"}} | sections)
    return jaxopt_llm.initialize(ADAPTED.model, ADAPTED.loss, ADAPTED.batches(1)[0], config, ADAPTED.optimizer)


@pytest.mark.parametrize("restores", [False, *slow(True)])
def test_flax_adapters_train_as_in_optax(restores: bool, tmp_path: Path) -> None:
    engine, expected = make_engine(), train_plainly(ADAPTED, accumulation=1)
    losses = [engine.step(batch)["loss"] for batch in ADAPTED.batches()]
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5, atol=1e-5)
    if restores:
        engine.save(tmp_path)
        engine = make_engine()
        engine.restore(tmp_path)
    arrays = list_arrays(engine.model())
    assert arrays.keys() == expected.arrays.keys()
    for path, array in arrays.items():
        np.testing.assert_allclose(array, expected.arrays[path], rtol=1e-5, atol=1e-5, err_msg=path)


def test_only_what_lora_selects_trains() -> None:
    engine = make_engine(lora={"rank": 1, "targets": ("last/kernel",), "dora": True})
    assert [path for path, _ in tree.leaves_with_path(engine.state.masters)] == [
        f"non_layer/last/kernel/{name}" for name in ("lora_a", "lora_b", "magnitude")
    ]
    initial, arrays = list_arrays(ADAPTED.model()), list_arrays(engine.model())
    for path, array in arrays.items():
        np.testing.assert_allclose(array, initial[path], rtol=1e-6, err_msg=path)
