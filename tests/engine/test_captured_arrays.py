"""A loss that closes over arrays that change is refused, and so are parameters in float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxopt_llm
from jaxopt_llm.config import Config
from jaxopt_llm.core.errors import InputError

ROWS, WIDTH = 16, 8
BATCH = {"x": np.random.RandomState(0).randn(ROWS, WIDTH).astype(np.float32)}
Teacher = Callable[[Any], Any]


def make_linear() -> nnx.Linear:
    return nnx.Linear(WIDTH, 4, rngs=nnx.Rngs(0))


def make_tree() -> dict[str, jax.Array]:
    return {"kernel": jnp.ones((WIDTH, 4))}


def run_tree(parameters: Any, x: jax.Array) -> jax.Array:
    return x @ parameters["kernel"]


def make_engine(loss: Callable[[Any, Any], jax.Array], model: Any = make_linear) -> jaxopt_llm.Engine:
    config = Config(mesh={"fsdp": 8}, precision={"compute_dtype": "float32"})
    return jaxopt_llm.initialize(model, loss, BATCH, config, optax.sgd(0.1))


def distill(teacher: Teacher) -> Callable[[Any, Any], jax.Array]:
    return lambda model, batch: jnp.mean((model(batch["x"]) - teacher(batch["x"])) ** 2)


def module_of_an_engine() -> Teacher:
    teacher: Teacher = make_engine(lambda model, batch: jnp.mean(model(batch["x"]))).model()
    return teacher


def tree_of_an_engine() -> Teacher:
    parameters = make_engine(lambda model, batch: jnp.mean(run_tree(model, batch["x"])), make_tree).model()
    return lambda x: run_tree(parameters, x)


def state_of_an_engine() -> Teacher:
    engine = make_engine(lambda model, batch: jnp.mean(model(batch["x"])))
    kernel = engine.state.masters["non_layer"]["kernel"]
    return lambda x: (x @ kernel) + 0 * len(engine.parameters)


def engine_itself() -> Teacher:
    engine = make_engine(lambda model, batch: jnp.mean(model(batch["x"])))
    engine.step(BATCH)
    return lambda x: engine.model()(x)


@pytest.mark.parametrize(
    ("make_teacher", "message"),
    [
        (module_of_an_engine, r"arrays of an engine's model \(float32\[8, 4\], float32\[4\]\)"),
        (tree_of_an_engine, r"arrays of an engine's model \(float32\[8, 4\]\)"),
        (state_of_an_engine, r"arrays of an engine's model \(float32\[8, 4\]\)"),
        (engine_itself, "arrays of an engine's model"),
    ],
)
def test_a_loss_that_closes_over_arrays_that_change_is_refused(make_teacher: Any, message: str) -> None:
    teacher = make_teacher()
    with pytest.raises(InputError, match=f"a function closes over {message}"):
        make_engine(distill(teacher))


def test_constants_are_not_refused() -> None:
    """A frozen teacher that no engine trains, and a table."""
    teacher, table = make_linear(), jnp.arange(4.0)
    loss = distill(lambda x: teacher(x) + table)
    expected = loss(make_linear(), {"x": jnp.asarray(BATCH["x"])})
    np.testing.assert_allclose(make_engine(loss).step(BATCH)["loss"], expected, rtol=1e-5)


def test_parameters_in_float64_are_refused() -> None:
    with jax.enable_x64(True), pytest.raises(InputError, match="the parameter kernel is float64, and parameters are"):
        make_engine(
            lambda model, batch: jnp.mean(run_tree(model, batch["x"])),
            lambda: {"kernel": jnp.ones((WIDTH, 4), jnp.float64)},
        )
