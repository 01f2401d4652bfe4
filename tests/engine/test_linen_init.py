"""Linen models whose initial values depend on the data, and models that `sow` values for the loss."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jaxopt_llm
from jaxopt_llm.config import Config
from jaxopt_llm.core.errors import InputError

ROWS, STEPS = 16, 3
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
Batch = dict[str, np.ndarray]


def make_batches() -> list[Batch]:
    return [{"x": 3 * np.random.RandomState(step).randn(ROWS, 8).astype(np.float32) + 1} for step in range(STEPS)]


def make_config(**sections: Any) -> Config:
    return Config(**{"mesh": {"fsdp": 8}, "precision": {"compute_dtype": "float32"}} | sections)


class Normalised(nn.Module):
    """A layer whose outputs on the first batch have mean 0 and variance 1 (Kingma and Dhariwal 2018).

    The running mean begins with that of the first batch.
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(8)(x)
        shift = self.param("shift", lambda _: -jnp.mean(x, axis=0))
        scale = self.param("scale", lambda _: 1 / jnp.std(x, axis=0))
        mean = self.variable("means", "mean", lambda: jnp.mean(x, axis=0))
        mean.value = 0.9 * mean.value + 0.1 * jnp.mean(x, axis=0)
        return (x + shift) * scale + 0.1 * mean.value


class Routed(nn.Module):
    """Two experts, whose balance is sown: as a tuple, as a sum over layers, and where no one reads it."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            gate = nn.softmax(nn.Dense(2)(x))
            self.sow("losses", "balance", jnp.var(jnp.mean(gate, axis=0)))
            self.sow("sums", "gate", jnp.mean(gate[:, 0]), init_fn=lambda: 0.0, reduce_fn=jnp.add)
            self.sow("intermediates", "gate", gate)
            x = gate[:, :1] * nn.Dense(8)(x) + gate[:, 1:] * jnp.tanh(nn.Dense(8)(x))
        return x


def square(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - 1) ** 2)


def square_with_balance(model: Any, batch: Any) -> Any:
    loss = square(model, batch)
    sown = [*jax.tree.leaves(model.variables["losses"]), model.variables["sums"]["gate"]]
    return loss + 0.1 * sum(sown), {"gate": sown[-1]}


def train_plainly(module: nn.Module, loss: Any, kept: list[str]) -> tuple[list[float], Any]:
    """Train on one device. kept: collections that are passed from step to step."""
    batches = make_batches()
    variables = module.init(jax.random.key(0), batches[0], method=loss)
    params, others = variables["params"], {name: variables[name] for name in kept}
    state, mutable = OPTIMIZER.init(params), [name for name in variables if name != "params"]

    def compute(params: Any, others: Any, batch: Batch) -> Any:
        output, changed = module.apply({"params": params, **others}, batch, method=loss, mutable=mutable)
        return output[0] if isinstance(output, tuple) else output, {name: changed[name] for name in kept}

    losses = []
    for batch in batches:
        (value, others), gradients = jax.value_and_grad(compute, has_aux=True)(params, others, batch)
        updates, state = OPTIMIZER.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses, {"params": params, **others}


@pytest.mark.parametrize(
    ("module", "loss", "kept"), [(Normalised(), square, ["means"]), (Routed(), square_with_balance, [])]
)
def test_training_is_that_of_linen(module: nn.Module, loss: Any, kept: list[str]) -> None:
    expected, variables = train_plainly(module, loss, kept)
    engine = jaxopt_llm.initialize(module, loss, make_batches()[0], make_config(), OPTIMIZER)
    losses = [float(engine.step(batch)["loss"]) for batch in make_batches()]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5),
        dict(engine.model()),
        variables,
    )


def test_what_is_sown_lasts_for_one_call() -> None:
    """`evaluate` and microbatches begin without it, too."""
    batch = make_batches()[0]
    whole = jaxopt_llm.initialize(Routed(), square_with_balance, batch, make_config(), OPTIMIZER)
    parts = jaxopt_llm.initialize(
        Routed(), square_with_balance, batch, make_config(training={"accumulation": 2}), OPTIMIZER
    )
    assert 0 < whole.evaluate([batch])["gate"] < 2
    assert whole.evaluate([batch]) == whole.evaluate([batch])
    # A mean over rows, so that it is the same over two halves.
    np.testing.assert_allclose(parts.step(batch)["gate"], whole.step(batch)["gate"], rtol=1e-5)


def test_values_from_the_data_need_the_data() -> None:
    shapes = {"x": jax.ShapeDtypeStruct((ROWS, 8), jnp.float32)}
    with pytest.raises(InputError, match="example: the initial values of the model depend on x, .* give an example"):
        jaxopt_llm.initialize(Normalised(), square, shapes, make_config(), OPTIMIZER)
    jaxopt_llm.initialize(Routed(), square_with_balance, shapes, make_config(), OPTIMIZER)
