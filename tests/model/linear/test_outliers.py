"""Outlier columns of int8 products (`precision.outlier_threshold`) against LLM.int8() in numpy."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.config import (
    LoraConfig,
    Matmul,
    OptimizerConfig,
    PrecisionConfig,
    RematConfig,
    ScheduleConfig,
    TrainingConfig,
)
from jaxopt_llm.core import tree
from jaxopt_llm.execution import executor
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.linear import outliers, quantised, weights
from jaxopt_llm.model.linear.leaves import Int8Weight, dequantise, int8_specs, quantise
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.gathering import PlacedWeight, attach_shardings, make_perturbations
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import inside_gradient_group, parameter_sharding
from jaxopt_llm.step import state as training_state

pytestmark = pytest.mark.core

THRESHOLD = 6.0  # of the paper


def split_product(x: np.ndarray, w: np.ndarray, rounds_rows: bool = False) -> np.ndarray:
    """Compute x · w as the paper does, in float64. x: [T, D], w: [D, F].

    rounds_rows: whether the rows of w that meet outliers are int8 codes, too.
    """
    is_outlier = np.abs(x).max(0) > THRESHOLD
    x_scales = np.abs(np.where(is_outlier, 0, x)).max(1, keepdims=True) / 127
    w_scales = np.abs(w).max(0, keepdims=True) / 127
    codes = np.round(np.where(is_outlier, 0, x) / x_scales), np.round(w / w_scales)
    rows = (codes[1] * w_scales if rounds_rows else w)[is_outlier]
    return (codes[0] @ codes[1]) * x_scales * w_scales + x[:, is_outlier] @ rows


def with_outliers(*shape: int, count: int = 6, factor: float = 60.0, seed: int = 0) -> np.ndarray:
    """Return normal values with some larger columns."""
    random = np.random.default_rng(seed)
    x = random.normal(size=shape).astype(np.float32)
    x[..., random.choice(shape[-1], count, replace=False)] *= factor
    return x


def distance(found: Any, expected: np.ndarray, norm_of: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(norm_of))


@pytest.mark.parametrize(("factor", "plain_error"), [(60.0, 0.239), (20.0, 0.080)])
def test_other_columns_keep_their_precision_beside_outliers(factor: float, plain_error: float) -> None:
    """Errors are relative to the norm of the product of the other columns."""
    x, w = with_outliers(256, 4096, factor=factor), with_outliers(4096, 1024, count=0, seed=1)
    largest = np.abs(x).max(0) > THRESHOLD  # normal values stay below
    regular = x[:, ~largest].astype(np.float64) @ w[~largest]
    codes, exact = quantised.to_integers(jnp.asarray(w), 0, 127), x.astype(np.float64) @ w
    inputs = outliers.split_outliers(jnp.asarray(x), "TD", "D", 1, THRESHOLD)
    added = outliers.multiply("TD,DF->TF", inputs, outliers.select_rows(jnp.asarray(w), "DF", inputs), False)
    multiply = functools.partial(quantised.einsum, "TD,DF->TF", compute_dtype="float32", dtype=jnp.float32)
    found = multiply(inputs.regular, codes, added=added)
    assert distance(found, exact, regular) == pytest.approx(0.0122, rel=0.02)
    assert toy.distance(found, split_product(x, w)) < 3e-5  # some values lie half way between two codes
    plain = multiply(quantised.to_integers(jnp.asarray(x), 1, 127), codes)
    assert distance(plain, exact, regular) == pytest.approx(plain_error, rel=0.05)


PRODUCTS = {
    "BSD,DHK->BSHK": ParamSpec((64, 2, 32), ("embed", "heads", "head_dim"), (0,)),
    "BSHK,HKD->BSD": ParamSpec((2, 32, 48), ("heads", "head_dim", "embed"), (0, 1)),
    # Letters as of latent attention and of users' models, also with a square weight.
    "BSR,RHN->BSHN": ParamSpec((64, 2, 64), ("latent", "heads", "head_dim"), (0,)),
    "ABC,CD->ABD": ParamSpec((64, 64), ("embed", "mlp"), (0,)),
}


@functools.cache
def run_product(subscripts: str, base: str, placement: Placement) -> tuple[np.ndarray, ...]:
    """Return x, w, dy, and the results of einsum and of its backward: y, dx and, if the weight is no base, dw."""
    spec = PRODUCTS[subscripts]
    left, right, result = weights.split_subscripts(subscripts)
    sizes = dict(zip(left, (4, 8), strict=False)) | dict(zip(right, spec.shape, strict=True))
    x = with_outliers(4 * 8, 64, count=3).reshape([sizes[axis] for axis in left])
    dy, w = (with_outliers(*shape, count=0, seed=1) for shape in ([sizes[axis] for axis in result], spec.shape))
    precision = replace(placement.precision, outlier_threshold=THRESHOLD)
    placement = replace(placement, precision=precision)
    attach = functools.partial(attach_shardings, placement=placement, keep_gathered=True, matmul="int8")

    def run(x: jax.Array, w: Any, dy: jax.Array) -> Any:
        x, dy = (placement.constrain(each, *("batch", "sequence", *(None,) * (each.ndim - 2))) for each in (x, dy))

        def multiply(x: jax.Array, perturbation: jax.Array | None) -> jax.Array:
            specs, none = (int8_specs(spec), Int8Weight(None, None)) if base == "int8" else (spec, None)
            placed = attach(specs, w, perturbation if base == "float" else none)
            return weights.einsum(subscripts, x, placed)

        y, pull = jax.vjp(multiply, x, make_perturbations(spec, placement))
        return y, *pull(dy)

    resting = jax.device_put(w, parameter_sharding(spec, placement))
    given = quantise(resting, int8_specs(spec)) if base == "int8" else resting
    return tuple(map(np.asarray, (x, w, dy, *jax.jit(run)(x, given, dy))))


@pytest.mark.parametrize("base", ["float", "int8"])
@pytest.mark.parametrize("subscripts", PRODUCTS)
def test_products_are_those_of_the_paper_and_gradients_those_of_the_rounded_operands(
    subscripts: str, base: str
) -> None:
    x, w, dy, y, dx, dw = run_product(subscripts, base, toy.placement())
    rows, columns = x.reshape(32, 64).astype(np.float64), w.reshape(64, -1).astype(np.float64)
    expected = split_product(rows, columns, rounds_rows=base == "int8")
    assert toy.distance(y.reshape(expected.shape), expected) < 1e-6
    scales = np.abs(columns).max(0, keepdims=True) / 127
    cotangent = dy.reshape(32, -1).astype(np.float64)
    assert toy.distance(dx.reshape(32, 64), cotangent @ (np.round(columns / scales) * scales).T) < 1e-6
    if base == "float":
        rounded = split_product(rows, np.eye(64))  # codes of the identity are exact
        assert toy.distance(dw.reshape(64, -1), rounded.T @ cotangent) < 1e-6
    else:
        assert not dw.any()


@pytest.mark.parametrize("base", ["float", "int8"])
@pytest.mark.parametrize("subscripts", PRODUCTS)
def test_products_are_the_same_on_many_devices(subscripts: str, base: str) -> None:
    alone = run_product(subscripts, base, toy.placement())
    divided = run_product(subscripts, base, toy.placement(3, fsdp=2, tensor=2))
    for found, expected in zip(divided, alone, strict=True):
        assert toy.distance(found, expected) < 2e-6 if expected.any() else not found.any()


@pytest.mark.parametrize("groups", [{"data": 2, "fsdp": 2}, {"fsdp": 4}])
def test_gradient_groups_have_the_same_outliers(groups: dict[str, int]) -> None:
    """ZeRO stages 0 and 1 run each group of rows by itself; the outlier columns are those of all rows."""
    spec = ParamSpec((64, 32), ("embed", "mlp"), (0,))
    x, w = with_outliers(4, 2, 64, count=0, factor=1.0), jnp.asarray(with_outliers(64, 32, count=0, seed=1))
    x[1, 0, 7] = 90.0  # in one row only
    ids = jnp.arange(8, dtype=jnp.int32).reshape(1, 4, 2)
    batch = Batch(tokens=ids, targets=ids, loss_mask=ids, segment_ids=ids, positions=ids)

    def differentiate(placement: Placement) -> np.ndarray:
        placement = replace(placement, precision=replace(placement.precision, outlier_threshold=THRESHOLD))
        inside = inside_gradient_group(placement)

        def one_group(batch: Batch) -> Any:
            rows = jnp.asarray(x).reshape(8, 64)[batch.tokens[0]]  # [B, S, D]

            def loss(perturbations: Any) -> jax.Array:
                given = perturbations["non_layer"]
                placed = attach_shardings(spec, w, given, inside, keep_gathered=True, matmul="int8")
                return jnp.sum(jnp.square(weights.einsum("BSD,DF->BSF", rows, placed)))

            value, found = jax.value_and_grad(loss)({"non_layer": make_perturbations(spec, inside)})
            return {"loss": value}, found

        run = jax.jit(lambda batch: executor.sum_over_groups(one_group, batch, {"non_layer": spec}, placement)[1])
        return np.asarray(run(batch)["non_layer"])

    assert toy.distance(differentiate(toy.placement(0, **groups)), differentiate(toy.placement())) < 1e-6


def test_a_product_along_the_scales_of_a_base_uses_its_values() -> None:
    """A weight that a model also multiplies transposed has scales along what that product sums over."""
    spec, placement = ParamSpec((64, 32), ("embed", "mlp"), (0,)), toy.placement()
    w, x = with_outliers(64, 32, count=0, seed=1), with_outliers(8, 4, 32, count=0, seed=2)
    base = quantise(jnp.asarray(w), int8_specs(spec))
    placed = attach_shardings(
        int8_specs(spec), base, Int8Weight(None, None), placement, keep_gathered=False, matmul="int8"
    )
    exact = np.einsum("BSF,DF->BSD", x, np.asarray(dequantise(base)))
    assert toy.distance(weights.einsum("BSF,DF->BSD", jnp.asarray(x), placed), exact) < 0.02


def test_only_the_largest_columns_are_split_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outliers, "COLUMNS", 2)
    x = jnp.asarray([[1.0, -70.0, 0.5, 7.0], [2.0, 0.1, 9.0, 3.0]])
    inputs = outliers.split_outliers(x, "TD", "D", 1, THRESHOLD)
    assert inputs.columns.tolist() == [[1, 2]]
    assert inputs.regular.codes[:, 1:3].tolist() == [[0, 0], [0, 0]]
    np.testing.assert_allclose(outliers.dequantise(inputs, "float32"), x, atol=7 / 127 / 2 + 1e-6)
    fewer = outliers.split_outliers(x, "TD", "D", 1, threshold=50.0)
    assert fewer.columns.tolist() == [[1, -1]] and fewer.outliers[:, 0, 1].tolist() == [0, 0]


def test_adapters_are_multiplied_in_compute_dtype() -> None:
    spec = ParamSpec((64, 32), ("embed", "mlp"), (0,))
    arrays = {"w": jnp.zeros(spec.shape), "lora_a": jnp.zeros(spec.shape)}
    placed = attach_shardings(
        *({"w": spec, "lora_a": spec}, arrays, {"w": None, "lora_a": None}, toy.placement()),
        keep_gathered=False,
        matmul="int8",
        in_compute_dtype={"lora_a"},
    )
    found = {name: weight.shardings.matmul for name, weight in placed.items() if isinstance(weight, PlacedWeight)}
    assert found == {"w": "int8", "lora_a": "compute_dtype"}


def plant_outliers(masters: Any) -> Any:
    """Let 3 columns of each block's normalised inputs be 60 times as large, in a model that computes the same."""

    dims = {"query": 3, "key": 3, "value": 3, "gate": 2, "up": 2}  # of a layer; the width comes first

    def scale(path: str, array: jax.Array) -> jax.Array:
        factors = np.where(np.isin(np.arange(64), (5, 20, 40)), np.float32(60), np.float32(1))
        name = path.rsplit("/", 1)[-1]
        if path.endswith("norm/scale"):
            return array * factors
        return array / factors.reshape(-1, *(1,) * (dims[name] - 1)) if name in dims else array

    blocks = {name: tree.map_with_path(scale, part) for name, part in masters.items() if name != "non_layer"}
    return masters | blocks


def test_a_model_with_outliers_trains_as_in_compute_dtype() -> None:
    config = replace(toy.UNIFORM, width=64, mlp_width=64)
    training, schedule = TrainingConfig(batch_size=4, sequence_length=32), ScheduleConfig(1, 100)
    sections = training, OptimizerConfig(learning_rate=1e-3), schedule, RematConfig("none"), LoraConfig()

    def train(matmul: Matmul, threshold: float = 0.0) -> np.ndarray:
        precision = PrecisionConfig(compute_dtype="float32", matmul=matmul, outlier_threshold=threshold)
        placement = replace(toy.placement(), precision=precision)
        program = toy.make_program(config, *sections, placement)
        state = training_state.initialize_state(program.specs, program.optimizers, 0, placement)
        state, losses = replace(state, masters=plant_outliers(state.masters)), []
        for seed in range(12):
            state, metrics = program.step(state, toy.microbatches(toy.packed(4, 32, seed), 1))
            losses.append(float(metrics["loss"]))
        return np.asarray(losses)

    exact = train("compute_dtype")
    split, plain = (np.abs(train("int8", threshold) / exact - 1) for threshold in (THRESHOLD, 0.0))
    assert split.max() < 5e-3 and plain.mean() > 4 * split.mean()
