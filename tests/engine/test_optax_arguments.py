"""Optax transformations that need more than gradients and parameters train by the engine as they do by optax alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jaxopt_llm
from jaxopt_llm.config import Config
from jaxopt_llm.core.errors import InputError

STEPS = 6
PLATEAU = optax.chain(optax.sgd(0.3), contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0, rtol=0.2))
SPIKES = (2,)  # steps whose loss is infinite


def loss(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    hidden = jnp.tanh(batch["x"].astype(params["up"].dtype) @ params["up"])
    errors = (hidden @ params["down"]).astype(jnp.float32) - batch["y"]
    return jnp.sum(errors**2 * batch["scale"][:, None]), jnp.float32(errors.size)


def make_parameters() -> dict[str, jax.Array]:
    up, down = jax.random.split(jax.random.key(0))
    return {"up": jax.random.normal(up, (8, 16)) / 3, "down": jax.random.normal(down, (16, 8)) / 4}


def make_batch(step: int, spikes: bool) -> dict[str, np.ndarray]:
    x = np.random.default_rng(step % 2).normal(size=(16, 8)).astype(np.float32)
    scale = np.full(16, np.inf if spikes and step in SPIKES else 1.0, np.float32)
    return {"x": x, "y": np.sin(3 * x), "scale": scale}


def train_plainly(optimizer: Any, spikes: bool) -> tuple[list[float], dict[str, jax.Array]]:
    """Train with optax on one device. A step whose loss is not finite changes nothing."""
    params = make_parameters()
    state, losses = optimizer.init(params), []

    def mean(params: Any, batch: Any) -> jax.Array:
        total, count = loss(params, batch)
        return total / count

    for step in range(STEPS):
        value, gradients = jax.value_and_grad(mean)(params, make_batch(step, spikes))
        losses.append(float(value))
        if np.isfinite(losses[-1]):
            updates, state = optimizer.update(gradients, state, params, value=value, grad=gradients)
            params = optax.apply_updates(params, updates)
    return losses, params


@pytest.mark.parametrize("setting", ["plain", "accumulation", "skipped"])
@pytest.mark.parametrize(
    "optimizer",
    [
        PLATEAU,
        contrib.momo(0.1),
        contrib.momo_adam(0.05),
        optax.polyak_sgd(max_learning_rate=3.0),
        optax.lbfgs(0.01, memory_size=2, linesearch=None),
    ],
    ids=["plateau", "momo", "momo_adam", "polyak", "lbfgs"],
)
def test_it_gets_the_loss(optimizer: Any, setting: str) -> None:
    spikes = setting == "skipped"
    config = Config(
        mesh={"fsdp": 8},  # type: ignore[arg-type]
        precision={"compute_dtype": "float32"},  # type: ignore[arg-type]
        training={"accumulation": 2 if setting == "accumulation" else 1},  # type: ignore[arg-type]
    )
    losses, params = train_plainly(optimizer, spikes)
    engine = jaxopt_llm.initialize(make_parameters, loss, make_batch(0, False), config, optimizer)
    metrics = [engine.step(make_batch(step, spikes)) for step in range(STEPS)]
    np.testing.assert_allclose([each["loss"] for each in metrics], losses, rtol=1e-5)
    assert metrics[-1]["skipped"] == (len(SPIKES) if spikes else 0)
    for name, array in engine.model().items():
        np.testing.assert_allclose(array, params[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_the_loss_is_not_scaled() -> None:
    """With a loss scale the transformation gets the loss itself, and with gradients in float16 the same steps."""
    config = Config(precision={"compute_dtype": "float16"})  # type: ignore[arg-type]
    losses, _ = train_plainly(optax.polyak_sgd(max_learning_rate=3.0), spikes=False)
    optimizer = optax.polyak_sgd(max_learning_rate=3.0)
    engine = jaxopt_llm.initialize(make_parameters, loss, make_batch(0, False), config, optimizer)
    metrics = [engine.step(make_batch(step, False)) for step in range(STEPS)]
    np.testing.assert_allclose([each["loss"] for each in metrics], losses, rtol=1e-2)


@pytest.mark.parametrize(
    ("optimizer", "missing"),
    [
        (optax.lbfgs(), "value_fn"),
        (optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)), "value_fn"),
        (contrib.sophia(1e-3), "obj_fn"),
    ],
    ids=["lbfgs", "backtracking", "sophia"],
)
def test_what_needs_a_function_is_refused(optimizer: Any, missing: str) -> None:
    with pytest.raises(InputError, match=rf"optimizer: its update fails \(.*{missing}.*\); an engine passes"):
        jaxopt_llm.initialize(make_parameters, loss, make_batch(0, False), optimizer=optimizer)
