"""Weights and gradients of an engine that move as blocks of codes, and its optimizer over replicas, against optax."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_equality
from flax import nnx
from marks import slow

import jaxopt_llm
from jaxopt_llm import Config
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine.checks import EngineWarning
from jaxopt_llm.parallel import codes

ROWS, LENGTH, VOCABULARY, WIDTH, STEPS = 16, 8, 256, 64, 12
FSDP, HYBRID = {"fsdp": 8}, {"data": 2, "fsdp": 4}
CODES = {"fsdp_gradients": "int8", "data_gradients": "int8", "int8_gathers": ("data", "fsdp")}


class Model(nnx.Module):
    """A table, matrices of two layers in a loop, and a head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        initial = nnx.initializers.lecun_normal()
        self.up = nnx.Param(initial(rngs.params(), (2, WIDTH, 4 * WIDTH)))
        self.down = nnx.Param(initial(rngs.params(), (2, 4 * WIDTH, WIDTH)))
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            up, down = weights
            return x + jnp.einsum("bsh,hd->bsd", jax.nn.gelu(jnp.einsum("bsd,dh->bsh", x, up)), down), None

        x, _ = jax.lax.scan(layer, self.table(ids), (self.up[...], self.down[...]))
        return self.head(x)


def loss(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["ids"]), batch["next"]).mean()


def make_batch() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, LENGTH), np.int32)
    return {"ids": ids, "next": (7 * ids + 3) % VOCABULARY}


def make_model() -> Model:
    return Model(nnx.Rngs(0))


def leaves(model: Model) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


OPTIMIZER = optax.sgd(1.0, 0.9)  # whose first step is the gradient


@functools.cache
def train_plain() -> tuple[list[float], list[np.ndarray]]:
    """Losses on one device, and the gradients of the first step."""
    model = make_model()
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    gradients = leaves(nnx.grad(loss)(model, make_batch()))

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
        value, gradients = nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, gradients)
        return value

    return [float(step(model, optimizer, make_batch())) for _ in range(STEPS)], gradients


def start(mesh: dict[str, int], sharding: dict[str, Any], **sections: Any) -> jaxopt_llm.Engine:
    precision = {"compute_dtype": "float32"}
    config = Config(mesh=mesh, sharding=sharding, precision=precision, **sections)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error", EngineWarning)  # every matrix moves as codes
        return jaxopt_llm.initialize(make_model, loss, make_batch(), config, OPTIMIZER)


def measure_distance(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    squares = [[np.sum(np.square(each)) for each in leaves] for leaves in (found, expected)]
    difference = sum(np.sum(np.square(a - b)) for a, b in zip(found, expected, strict=True))
    return float(np.sqrt(difference / sum(squares[1])))


@pytest.mark.parametrize(
    ("mesh", "sharding", "accumulation", "least", "most"),
    [
        (FSDP, {"fsdp_gradients": "int8"}, 1, 1e-3, 0.01),
        (HYBRID, {**CODES, "optimizer_over_data": True}, 2, 1e-3, 0.03),
        (HYBRID, {"optimizer_over_data": True}, 1, 0, 1e-5),
        *slow(
            (FSDP, {"fsdp_gradients": "int4"}, 1, 0.03, 0.12),
            (FSDP, {"int8_gathers": ("fsdp",)}, 1, 1e-3, 0.03),
            (HYBRID, {"data_gradients": "int4"}, 1, 0.03, 0.12),
            (HYBRID, {"fsdp_gradients": "int8", "data_gradients": "int8", "zero_stage": 2}, 1, 1e-3, 0.02),
            ({"data": 8}, {"data_gradients": "int8", "zero_stage": 0}, 1, 1e-3, 0.02),
            ({"data": 8}, {"data_gradients": "int8", "zero_stage": 1, "optimizer_over_data": True}, 1, 1e-3, 0.01),
        ),
    ],
)
def test_gradients_differ_by_the_rounding_of_blocks_and_training_converges(
    mesh: dict[str, int], sharding: dict[str, Any], accumulation: int, least: float, most: float
) -> None:
    losses, gradients = train_plain()
    engine = start(mesh, sharding, training={"accumulation": accumulation})
    before, trained = leaves(make_model()), [float(engine.step(make_batch())["loss"])]
    found = [a - b for a, b in zip(before, leaves(engine.model()), strict=True)]
    assert least <= measure_distance(found, gradients) < most
    trained += [float(engine.step(make_batch())["loss"]) for _ in range(STEPS - 1)]
    assert trained == pytest.approx(losses, rel=0.05 if least else 1e-5)
    assert trained[-1] < trained[0] / 3


# Models that use their weights in different ways: convolutions, scans, lookups, a tied table, bare functions.
PARTS = ("encoder", "functions", "graph", "lm1b", "mamba", "resnet", "scanned_remat", "unet", "vqvae")


@pytest.mark.parametrize("name", ["mlp", *slow(*PARTS)])
def test_the_parts_of_gradients_add_up_to_those_of_optax(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of one exact value in place of codes, training is that of optax on one device."""

    def move(array: jax.Array, before: Any, after: Any, values: int, bits: int) -> jax.Array:
        array = jax.lax.with_sharding_constraint(array.astype(jnp.float32), before)
        return jax.lax.with_sharding_constraint(array, after)

    monkeypatch.setattr(codes, "move_blocks", move)
    monkeypatch.setattr(codes, "find_block_size", lambda shape, *shardings: 1)
    has_rules = bool(test_equality.CASES[name].rules)
    setting = test_equality.Setting(name, 3, test_equality.TENSOR if has_rules else HYBRID, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EngineWarning)
        test_equality.assert_equal_to_optax(setting, sharding={**CODES, "optimizer_over_data": True})


@pytest.mark.parametrize(
    ("mesh", "sharding", "message"),
    [
        (FSDP, {"data_gradients": "int8"}, "sharding.data_gradients=int8 has no effect, because mesh.data=1"),
        (FSDP, {"optimizer_over_data": True}, "sharding.optimizer_over_data=True has no effect, because mesh.data=1"),
        ({"data": 8}, {"fsdp_gradients": "int4"}, "sharding.fsdp_gradients=int4 has no effect, because no gradient is"),
        (HYBRID, {"int8_gathers": ("data",)}, "has no effect, because no weight is gathered over these axes"),
    ],
)
def test_a_setting_without_effect_is_named(mesh: dict[str, int], sharding: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        start(mesh, sharding)
    assert message in str(raised.value)


class Convolution(nnx.Module):
    """A matrix whose last dimension has no whole blocks, and a kernel."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Conv(8, 64, (3,), rngs=rngs)
        self.narrow, self.wide = nnx.Linear(64, 24, rngs=rngs), nnx.Linear(24, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.wide(self.narrow(self.kernel(x)))


def test_what_moves_exactly_in_spite_of_the_settings_is_named() -> None:
    def square(model: Convolution, batch: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(model(batch)))

    batch = jax.ShapeDtypeStruct((16, 10, 8), jnp.float32)
    config = Config(mesh=FSDP, sharding={"fsdp_gradients": "int8"}, precision={"compute_dtype": "float32"})  # type: ignore[arg-type]
    with pytest.warns(EngineWarning) as found:
        jaxopt_llm.initialize(lambda: Convolution(nnx.Rngs(0)), square, batch, config)
    first, second = (str(each.message) for each in found)
    assert first.startswith("sharding.fsdp_gradients: 1 matrices move exactly (first: non_layer/narrow/kernel)")
    assert second.startswith("the gradients of 1 parameters are summed exactly (first: non_layer/kernel/kernel)")
