"""Tests of the update of a state in host memory, part by part."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from marks import slow

import jaxopt_llm
from jaxopt_llm.config import Config
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.jaxpr import inline_calls
from jaxopt_llm.step.update import group_results

pytestmark = pytest.mark.core

BATCH = {"x": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)}


def loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((model(batch["x"]) - 1.0) ** 2)


def train(optimizer: optax.GradientTransformation, offload: bool, stage: int = 3) -> tuple[list[float], Any]:
    config = Config(
        mesh={"fsdp": 8},  # type: ignore[arg-type]
        sharding={"zero_stage": stage},  # type: ignore[arg-type]
        offload={"optimizer": offload},  # type: ignore[arg-type]
        precision={"compute_dtype": "float32"},  # type: ignore[arg-type]
    )
    make = lambda: nnx.Sequential(*(nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(3)))  # noqa: E731
    engine = jaxopt_llm.initialize(make, loss, BATCH, config, optimizer)
    losses = [float(engine.step(BATCH)["loss"]) for _ in range(3)]
    return losses, engine.state


@pytest.mark.parametrize("stage", [3, *slow(1)])
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
        optax.lamb(1e-2),
        optax.contrib.muon(1e-2),
    ],
    ids=["clip and adamw", "lamb", "muon"],
)
def test_parts_give_what_the_whole_gives(optimizer: optax.GradientTransformation, stage: int) -> None:
    whole, parts = (train(optimizer, offload, stage) for offload in (False, True))
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-6)
    for one, other in zip(jax.tree.leaves(parts[1].moments), jax.tree.leaves(whole[1].moments), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-7)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(parts[1].moments) if leaf.ndim}
    assert kinds == {"pinned_host"}


def test_a_norm_over_all_steps_is_refused() -> None:
    with pytest.raises(InputError, match="computes something over the whole optimizer state"):
        train(optax.chain(optax.adamw(1e-2), optax.clip_by_global_norm(0.1)), offload=True)


def test_a_single_parameter_is_one_part() -> None:
    config = Config(mesh={"fsdp": 8}, sharding={"zero_stage": 1}, offload={"optimizer": True})  # type: ignore[arg-type]

    def square(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((batch["x"].astype(jnp.bfloat16) @ params["w"]).astype(jnp.float32) ** 2)

    engine = jaxopt_llm.initialize(lambda: {"w": jnp.ones((8, 8))}, square, BATCH, config, optax.adamw(1e-2))
    losses = [float(engine.step(BATCH)["loss"]) for _ in range(2)]
    assert losses[1] < losses[0]


def test_groups_are_joined_by_the_arguments_that_they_share() -> None:
    def function(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> tuple[jax.Array, ...]:
        return a + 1, b * d, jax.jit(lambda b, c: b + c)(b, c), d

    closed = inline_calls(jax.make_jaxpr(function)(*(jnp.zeros(2) for _ in range(4))))
    assert group_results(closed.jaxpr, [0, 1, 2]) == [[3], [0], [1, 2]]
