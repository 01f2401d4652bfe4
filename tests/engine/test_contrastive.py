"""A loss over the whole batch: two views of each image against all others, with a queue (He et al. 2020).

For `tests/engine`, where `loss_over` exists: with accumulation it is refused, and on every mesh it is plain optax's.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from plain_training import Case, list_arrays, train_plainly
from zoo_images import CLIPPED, RULES, WIDTH, images, named

import jaxopt_llm
from jaxopt_llm.config import Config
from jaxopt_llm.core.errors import InputError

QUEUE = 64


class Queue(nnx.Variable[Any]):
    """Codes of earlier batches, the newest first."""


class Contrast(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(16, 2 * WIDTH, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, kernel_init=named("mlp", "embed"), rngs=rngs)
        self.queue, self.rngs = Queue(jax.random.normal(rngs.queue(), (QUEUE, WIDTH))), rngs

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.down(nnx.relu(self.up(x.reshape(x.shape[0], -1))))
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def contrast_views(model: Contrast, batch: Any) -> Any:
    x, rows = batch["image"], batch["image"].shape[0]
    views = [x + 0.3 * jax.random.normal(model.rngs.view(), x.shape) for _ in range(2)]
    codes = model(jnp.concatenate(views))
    others = jnp.concatenate([codes, model.queue[...]])
    logits = jnp.where(jnp.arange(others.shape[0]) == jnp.arange(2 * rows)[:, None], -1e9, codes @ others.T / 0.2)
    partner = (jnp.arange(2 * rows) + rows) % (2 * rows)
    model.queue[...] = jnp.concatenate([jax.lax.stop_gradient(codes[:rows]), model.queue[...]])[:QUEUE]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, partner)
    return jnp.mean(losses), {"accuracy": jnp.mean(jnp.argmax(logits, axis=-1) == partner)}


CASE = Case(lambda: Contrast(nnx.Rngs(0, queue=1, view=2)), contrast_views, images(4), CLIPPED, RULES)


def make_engine(mesh: dict[str, int], accumulation: int = 1) -> Any:
    config = Config(mesh=mesh, precision={"compute_dtype": "float32"}, training={"accumulation": accumulation})
    return jaxopt_llm.initialize(
        CASE.model, CASE.loss, CASE.batches(1)[0], config, CASE.optimizer, CASE.rules, loss_over="batch"
    )


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_training_over_the_batch_is_that_of_optax(mesh: dict[str, int]) -> None:
    expected, engine = train_plainly(CASE, 1), make_engine(mesh)
    losses = [float(engine.step(batch)["loss"]) for batch in CASE.batches()]
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
    for path, array in list_arrays(engine.model()).items():
        np.testing.assert_allclose(array, expected.arrays[path], rtol=1e-5, atol=1e-5, err_msg=path)


def test_microbatches_are_refused() -> None:
    with pytest.raises(InputError, match="the loss of the batch is not that of its"):
        make_engine({"fsdp": 8}, accumulation=3)
