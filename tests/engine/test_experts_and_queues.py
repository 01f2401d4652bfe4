"""What an engine divides besides its parameters: the rows of `lax.ragged_dot`, and large variables."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from plain_training import ROWS, Batch, Case, list_arrays, train_plainly

import jaxopt_llm
from jaxopt_llm.config import Config
from jaxopt_llm.engine.engine import Engine

pytestmark = pytest.mark.core

EXPERTS, WIDTH, INNER, TOKENS = 8, 128, 256, 4096
BOTH, FSDP, TENSOR = {"data": 2, "fsdp": 4}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}


# --- experts


def make_experts() -> dict[str, jax.Array]:
    shapes = {"router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, INNER), "down": (EXPERTS, INNER, WIDTH)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {name: 0.1 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def make_named_experts() -> dict[str, Any]:
    names = {"router": (None, None), "up": (None, None, "inner"), "down": (None, "inner", None)}
    return {name: linen.Partitioned(array, names[name]) for name, array in make_experts().items()}


def experts_loss(params: Any, batch: Any) -> jax.Array:
    """Send each token to its two best experts: sort, multiply, and add to the tokens."""
    x = batch["x"].astype(params["up"].dtype)
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS)
    inner = jax.nn.relu(jax.lax.ragged_dot(x[order // 2], params["up"], sizes))
    rows = jax.lax.ragged_dot(inner, params["down"], sizes) * weights.reshape(-1)[order][:, None]
    mixed = jnp.zeros_like(x).at[order // 2].add(rows)
    return jnp.mean((mixed - batch["x"]).astype(jnp.float32) ** 2)


def count_flops(mesh: dict[str, int]) -> int:
    batch = {"x": jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32)}
    rules = {"inner": "tensor" if "tensor" in mesh else None}
    engine = jaxopt_llm.initialize(make_named_experts, experts_loss, batch, Config(mesh=mesh), rules=rules)
    return engine.plan("h200").flops


@pytest.mark.slow
def test_the_flops_of_experts_fall_with_the_number_of_devices() -> None:
    one = count_flops({"fsdp": 1})
    assert [count_flops(mesh) for mesh in (FSDP, TENSOR)] == pytest.approx([one / 8] * 2, rel=0.02)


@pytest.mark.parametrize("mesh", [FSDP, TENSOR], ids=["fsdp", "tensor"])
def test_experts_train_as_on_one_device(mesh: dict[str, int]) -> None:
    def batch(random: np.random.RandomState) -> Batch:
        return {"x": random.randn(ROWS, WIDTH).astype(np.float32)}

    expected = train_plainly(Case(make_experts, experts_loss, batch, optax.sgd(10.0)), 1, 2)
    case = Case(make_named_experts, experts_loss, batch, optax.sgd(10.0), {"inner": "tensor"})
    assert_equal(train(case, mesh, 1), expected.losses, expected.arrays)


# --- variables


class Statistic(nnx.Variable[jax.Array]):
    pass


CODES, SIZE = 512, 64  # 128 KiB
RATE = 0.1


def quantise(h: jax.Array, codebook: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the nearest code of each row, and the codebook moved towards the rows (van den Oord et al. 2017)."""
    nearest = jnp.argmin(jnp.sum(codebook**2, 1) - 2 * h @ codebook.T, axis=1)
    chosen = jax.nn.one_hot(nearest, CODES)
    means = (chosen.T @ h) / jnp.maximum(chosen.sum(0), 1)[:, None]
    moved = jnp.where(chosen.sum(0)[:, None] > 0, (1 - RATE) * codebook + RATE * means, codebook)
    return codebook[nearest], moved


def codes() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (CODES, SIZE))


class Quantiser(nnx.Module):
    """A codebook that follows the rows, a queue of earlier rows, and an average of the kernel."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encode, self.decode = (nnx.Linear(SIZE, SIZE, rngs=rngs) for _ in range(2))
        self.codebook, self.queue = Statistic(codes()), Statistic(codes()[::-1])
        self.mean = nnx.BatchStat(jnp.zeros(SIZE))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = self.encode(x)
        fixed = jax.lax.stop_gradient(h)
        code, self.codebook[...] = quantise(fixed, self.codebook[...])
        similar = jax.nn.logsumexp(h @ self.queue[...].T, axis=1)
        self.queue[...] = jnp.concatenate([fixed, self.queue[...][: -len(x)]])
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * fixed.mean(0)
        return self.decode(h + code - fixed), similar


class LinenQuantiser(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = linen.Dense(SIZE)(x)
        fixed = jax.lax.stop_gradient(h)
        codebook = self.variable("statistics", "codebook", codes)
        code, moved = quantise(fixed, codebook.value)
        if not self.is_initializing():
            codebook.value = moved
        return linen.Dense(SIZE)(h + code - fixed), jnp.mean(h, axis=1)


def quantiser_loss(model: Any, batch: Any) -> jax.Array:
    decoded, similar = model(batch["x"])
    return jnp.mean((decoded - batch["x"]) ** 2) + jnp.mean(similar)


def rows(random: np.random.RandomState) -> Batch:
    return {"x": random.randn(ROWS, SIZE).astype(np.float32)}


MODELS: dict[str, Any] = {"nnx": lambda: Quantiser(nnx.Rngs(0)), "linen": LinenQuantiser()}


def make_engine(case: Case, mesh: dict[str, int], accumulation: int, stage: int = 3) -> Engine:
    config = Config(
        mesh=mesh,
        sharding={"zero_stage": stage},
        precision={"compute_dtype": "float32"},
        training={"accumulation": accumulation},
    )
    rules = case.rules if "tensor" in mesh else {name: None for name in case.rules}
    return jaxopt_llm.initialize(case.model, case.loss, case.batches(1)[0], config, case.optimizer, rules)


def train(case: Case, mesh: dict[str, int], accumulation: int) -> tuple[list[float], dict[str, np.ndarray]]:
    engine = make_engine(case, mesh, accumulation)
    losses = [float(engine.step(batch)["loss"]) for batch in case.batches(2)]
    return losses, list_arrays(engine.model())


def assert_equal(
    found: tuple[list[float], dict[str, np.ndarray]], losses: list[float], arrays: dict[str, np.ndarray]
) -> None:
    np.testing.assert_allclose(found[0], losses, rtol=1e-5)
    assert found[1].keys() == arrays.keys()
    for path, array in found[1].items():
        np.testing.assert_allclose(array, arrays[path], rtol=1e-5, atol=1e-5, err_msg=path)


@pytest.mark.parametrize(("name", "mesh", "accumulation"), [("nnx", FSDP, 1), ("nnx", BOTH, 3), ("linen", FSDP, 3)])
def test_divided_variables_change_as_on_one_device(name: str, mesh: dict[str, int], accumulation: int) -> None:
    case = Case(MODELS[name], quantiser_loss, rows, optax.sgd(0.1))
    expected = train_plainly(case, accumulation, 2)
    assert_equal(train(case, mesh, accumulation), expected.losses, expected.arrays)


def count_resting(engine: Engine) -> dict[str, int]:
    """Return the bytes of each variable on one device."""
    leaves = jax.tree.leaves_with_path(engine.state.variables)
    return {jax.tree_util.keystr(path, simple=True): leaf.addressable_shards[0].data.nbytes for path, leaf in leaves}


def test_large_variables_rest_divided() -> None:
    case, whole = Case(MODELS["nnx"], quantiser_loss, rows, optax.sgd(0.1)), 4 * CODES * SIZE
    engine = make_engine(case, FSDP, 1)
    before = count_resting(engine)
    assert before == {"codebook": whole // 8, "queue": whole // 8, "mean": 4 * SIZE}
    engine.step(case.batches(1)[0])
    assert count_resting(engine) == before
    linen_case = Case(MODELS["linen"], quantiser_loss, rows, optax.sgd(0.1))
    assert whole // 8 in count_resting(make_engine(linen_case, FSDP, 3)).values()
    assert count_resting(make_engine(case, FSDP, 1, stage=2))["queue"] == whole


def test_a_checkpoint_of_divided_variables_continues_on_another_mesh(tmp_path: Path) -> None:
    case = Case(MODELS["nnx"], quantiser_loss, rows, optax.sgd(0.1))
    first, second = make_engine(case, FSDP, 1), make_engine(case, {"data": 8}, 1)
    one, two = case.batches(2)
    first.step(one)
    first.save(tmp_path)
    second.restore(tmp_path)
    assert float(second.step(two)["loss"]) == pytest.approx(float(first.step(two)["loss"]), rel=1e-5)
