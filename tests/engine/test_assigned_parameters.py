"""A loss that assigns to parameters, as WeightNorm and SpectralNorm of Flax NNX do, trains as in plain NNX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from plain_training import ROWS, Case, list_arrays, train_plainly

import jaxopt_llm
from jaxopt_llm.config import Config
from jaxopt_llm.core.errors import InputError

WIDTH, STEPS = 16, 4
ADAMW = optax.adamw(1e-2, weight_decay=0.1)  # the decay is of the assigned values


class Network(nnx.Module):
    """A layer with a normalised weight in front of a plain one."""

    def __init__(self, kind: type[nnx.Module] = nnx.WeightNorm) -> None:
        rngs = nnx.Rngs(0)
        named = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "hidden"))
        inner = nnx.Linear(WIDTH, WIDTH, kernel_init=named, rngs=rngs)
        self.first, self.last = kind(inner, rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)  # type: ignore[call-arg]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.first(x)))


def regress(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"])[..., 0] - batch["y"]) ** 2)


def make_batch(random: np.random.RandomState) -> dict[str, np.ndarray]:
    return {"x": random.randn(ROWS, WIDTH).astype(np.float32), "y": random.randn(ROWS).astype(np.float32)}


def make_config(stage: int = 3, mesh: dict[str, int] | None = None, **more: Any) -> Config:
    dtype = {"compute_dtype": more.pop("dtype", "float32")}
    return Config(mesh=mesh or {"fsdp": 8}, sharding={"zero_stage": stage}, precision=dtype, **more)  # type: ignore[arg-type]


def assert_equal(arrays: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert arrays.keys() == expected.keys()
    for path, array in arrays.items():
        np.testing.assert_allclose(array, expected[path], rtol=1e-5, atol=1e-5, err_msg=path)


@pytest.mark.parametrize(
    ("stage", "mesh", "accumulation", "offload"),
    [
        (0, {"data": 8}, 1, False),
        (1, {"data": 2, "fsdp": 2}, 2, False),
        (2, {"fsdp": 8}, 3, False),
        (3, {"fsdp": 4, "tensor": 2}, 2, False),
        (3, {"fsdp": 8}, 1, True),
    ],
)
def test_weight_norm_equals_plain_nnx(stage: int, mesh: dict[str, int], accumulation: int, offload: bool) -> None:
    case = Case(Network, regress, make_batch, ADAMW)
    expected = train_plainly(case, accumulation, STEPS)
    config = make_config(stage, mesh, training={"accumulation": accumulation}, offload={"optimizer": offload})
    rules = {"hidden": "tensor"} if "tensor" in mesh else {}
    engine = jaxopt_llm.initialize(Network, regress, case.batches(1)[0], config, ADAMW, rules=rules)
    losses = [engine.step(batch)["loss"] for batch in case.batches(STEPS)]
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
    assert_equal(list_arrays(engine.model()), expected.arrays)


def test_assigned_values_are_computed_in_float32() -> None:
    """In bfloat16 a step would cost the float32 parameters their low bits."""
    batch = make_batch(np.random.RandomState(0))
    engine = jaxopt_llm.initialize(Network, regress, batch, make_config(dtype="bfloat16"), optax.sgd(0.0))
    before = np.asarray(engine.model().first.layer_instance.kernel[...])
    engine.step(batch)
    after = np.asarray(engine.model().first.layer_instance.kernel[...])
    np.testing.assert_allclose(after, before / np.linalg.norm(before, axis=0), rtol=1e-6)


def test_a_frozen_parameter_is_assigned_to() -> None:
    batch = make_batch(np.random.RandomState(0))
    config = make_config(training={"trainable": ("last/*",)})
    engine = jaxopt_llm.initialize(Network, regress, batch, config, ADAMW)
    before = np.asarray(engine.model().first.layer_instance.kernel[...])
    engine.step(batch)
    after = np.asarray(engine.model().first.layer_instance.kernel[...])
    np.testing.assert_allclose(after, before / np.linalg.norm(before, axis=0), rtol=1e-6)


def test_a_loss_that_prints_assigns(capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> None:
    """What it assigns does not depend on the batch that it prints, and the step prints it once."""

    def print_and_regress(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        jax.debug.print("first of the batch: {}", batch["x"].sum())
        scores = jax.jit(lambda y: (jax.debug.print("score {}", y[0]), y)[1])(model(batch["x"])[..., 0])
        return jnp.sum((scores - batch["y"]) ** 2), jnp.float32(ROWS)

    case = Case(Network, regress, make_batch, ADAMW)
    engine = jaxopt_llm.initialize(Network, print_and_regress, case.batches(1)[0], make_config(), ADAMW)
    assert not recwarn.list  # the count depends on nothing that is printed
    for batch in case.batches(STEPS):
        engine.step(batch)
    assert_equal(list_arrays(engine.model()), train_plainly(case, 1, STEPS).arrays)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("first of the batch") == STEPS


def test_a_skipped_step_assigns_nothing() -> None:
    batch = make_batch(np.random.RandomState(0))
    engine = jaxopt_llm.initialize(Network, regress, batch, make_config(), ADAMW)
    before = list_arrays(jax.tree.map(jnp.copy, engine.model()))
    metrics = engine.step(batch | {"y": batch["y"] * np.float32(np.nan)})
    assert metrics["skipped"] == 1
    for path, array in list_arrays(engine.model()).items():
        np.testing.assert_array_equal(array, before[path], err_msg=path)


# --- Two losses


class Gan(nnx.Module):
    def __init__(self) -> None:
        self.generator, self.critic = nnx.Linear(4, WIDTH, rngs=nnx.Rngs(1)), Network(nnx.SpectralNorm)


def judge(model: Gan, batch: Any) -> jax.Array:
    real, fake = model.critic(batch["x"]), model.critic(model.generator(batch["z"]))
    return jnp.mean(jax.nn.softplus(-real) + jax.nn.softplus(fake))


def deceive(model: Gan, batch: Any) -> jax.Array:
    return jnp.mean(jax.nn.softplus(-model.critic(model.generator(batch["z"]))))


LOSSES = {"critic": judge, "generator": deceive}
ORDER = ("critic", "generator", "critic", "generator", "generator", "critic")


def make_pair(step: int) -> dict[str, np.ndarray]:
    random = np.random.RandomState(step)
    return {"x": random.randn(ROWS, WIDTH).astype(np.float32), "z": random.randn(ROWS, 4).astype(np.float32)}


@functools.cache
def train_gan_plainly() -> dict[str, np.ndarray]:
    """Train by `nnx.Optimizer`. The loss of the generator assigns to the kernel of the critic, too."""
    with nnx.use_eager_sharding(False):
        model = Gan()
    optimizers = {name: nnx.Optimizer(getattr(model, name), ADAMW, wrt=nnx.Param) for name in LOSSES}
    for step, name in enumerate(ORDER):
        of_network = nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains(name)))
        gradients = nnx.grad(LOSSES[name], argnums=of_network)(model, make_pair(step))
        optimizers[name].update(getattr(model, name), gradients[name])
    return list_arrays(model)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_assigns_to_a_parameter_that_another_trains(stage: int) -> None:
    optimizers = dict.fromkeys(LOSSES, ADAMW)
    engine = jaxopt_llm.initialize(Gan, LOSSES, make_pair(0), make_config(stage), optimizers)
    for step, name in enumerate(ORDER):
        engine.step(make_pair(step), loss=name)
    assert_equal(list_arrays(engine.model()), train_gan_plainly())


@pytest.mark.parametrize("stage", [2, 3])
def test_losses_assign_to_a_parameter_that_none_trains(stage: int) -> None:
    training = {"trainable": ("generator/*", "critic/last/*")}
    config, optimizers = make_config(stage, training=training), dict.fromkeys(LOSSES, ADAMW)
    engine = jaxopt_llm.initialize(Gan, LOSSES, make_pair(0), config, optimizers)
    before = np.asarray(engine.model().critic.first.layer_instance.kernel[...])
    engine.step(make_pair(0), loss="generator")
    after = np.asarray(engine.model().critic.first.layer_instance.kernel[...])
    ratio = after / before
    np.testing.assert_allclose(ratio, ratio[0, 0], rtol=1e-5)  # it is divided by its largest singular value
    assert abs(ratio[0, 0] - 1) > 1e-3


class Scaled(nnx.Module):
    """A layer whose kernel is assigned to after its product, which alone reads it."""

    def __init__(self) -> None:
        self.layer, self.scale = nnx.Linear(WIDTH, 1, rngs=nnx.Rngs(0)), nnx.Param(jnp.ones((WIDTH, 1)))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.layer(x)
        self.layer.kernel[...] = self.scale[...] * 0.5
        return y


def test_a_parameter_with_an_adapter_is_not_assigned_to() -> None:
    batch = make_batch(np.random.RandomState(0))
    config = make_config(lora={"rank": 1, "targets": ("layer/kernel",)})
    with pytest.raises(InputError, match="assigns to the parameter layer/kernel, which has an adapter; leave it out"):
        jaxopt_llm.initialize(Scaled, regress, batch, config, ADAMW)


def test_a_loss_does_not_assign_to_the_copy_that_another_trains() -> None:
    """With a compute copy the loss of the generator does not have the float32 values of the critic."""
    with pytest.raises(InputError, match="generator assigns to the parameter critic/first/layer_instance/kernel"):
        jaxopt_llm.initialize(Gan, LOSSES, make_pair(0), make_config(2), dict.fromkeys(LOSSES, ADAMW))
