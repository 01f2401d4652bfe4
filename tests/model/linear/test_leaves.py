"""Leaf classes: specs, values, and products compared with those of the dense weight."""

import math
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.core import tree
from jaxopt_llm.model import param
from jaxopt_llm.model.linear import leaves, vocabulary, weights
from jaxopt_llm.model.linear.leaves import (
    LoraWeight,
    QuantisedWeight,
    int8_specs,
    lora_specs,
    nf4_specs,
    quantised_specs,
)
from jaxopt_llm.model.param import ParamSpec, normal
from jaxopt_llm.parallel.gathering import attach_shardings, make_perturbations

pytestmark = pytest.mark.core

RANK, ALPHA = 3, 6.0
BASES = ("float", "int8", "nf4", "nf4 double")
QUERY = ParamSpec((32, 4, 6), ("embed", "heads", "head_dim"), (0,), normal())
OUTPUT = ParamSpec((4, 6, 32), ("heads", "head_dim", "embed"), (0, 1), normal())
TABLE = ParamSpec((16, 32), ("vocabulary", "embed"), (1,), normal())
PRODUCTS = {"query": ("BSD,DHK->BSHK", QUERY), "output": ("BSHK,HKD->BSD", OUTPUT), "table": ("BSD,VD->BSV", TABLE)}
BARE = {"non_layer": {"table": TABLE}, "segment_0": {"query": QUERY.stack(3), "output": OUTPUT.stack(3)}}


def wrapped(spec: ParamSpec, base: str = "float", dora: bool = False) -> LoraWeight:
    base_spec = spec if base == "float" else quantised_specs(spec, base.split()[0], double="double" in base)  # type: ignore[arg-type]
    return replace(lora_specs(spec, RANK, ALPHA / RANK, dora), base=base_spec)


# ---- Specs.


@pytest.mark.parametrize(
    "spec, a, b, scales",
    [
        (QUERY, [(32, "embed")], [(4, "heads"), (6, "head_dim")], [(1, None), (4, "heads"), (6, "head_dim")]),
        (OUTPUT, [(4, "heads"), (6, "head_dim")], [(32, "embed")], [(1, None), (1, None), (32, "embed")]),
        (TABLE, [(32, "embed")], [(16, "vocabulary")], [(16, "vocabulary"), (1, None)]),
    ],
    ids=PRODUCTS,
)
def test_adapter_and_scale_specs_keep_the_axes_of_the_weight(spec: ParamSpec, a: Any, b: Any, scales: Any) -> None:
    def dims(spec: ParamSpec) -> list[tuple[int, str | None]]:
        return list(zip(spec.shape, spec.axes, strict=True))

    adapted, coded = lora_specs(spec, RANK, ALPHA / RANK), int8_specs(spec)
    assert dims(adapted.lora_a) == [*a, (RANK, None)] and dims(adapted.lora_b) == [*b, (RANK, None)]
    assert adapted.lora_a.fan_in == spec.fan_in and adapted.lora_b.fan_in == RANK
    assert adapted.base == spec and adapted.scale == ALPHA / RANK
    assert coded.codes == replace(spec, dtype=np.dtype(np.int8)) and dims(coded.scales) == scales


@pytest.mark.parametrize("spec", [QUERY, OUTPUT, TABLE], ids=PRODUCTS)
def test_the_specs_of_a_wrapped_stack_are_those_of_its_wrapped_layers(spec: ParamSpec) -> None:
    def describe(specs: tree.Tree) -> list[Any]:
        return [(spec.shape, spec.axes, spec.contracting, spec.dtype) for spec in jax.tree.leaves(specs)]

    assert describe(param.period_specs(wrapped(spec.stack(5), "int8"))) == describe(wrapped(spec, "int8"))


def test_unwrap_specs_inverts_wrapping_and_only_adapters_add_parameters() -> None:
    for base in BASES:
        specs = jax.tree.map(lambda spec, base=base: wrapped(spec, base), BARE)
        assert leaves.unwrap_specs(specs) == BARE
        adapters = RANK * (16 + 32 + 3 * 2 * (32 + 4 * 6))
        assert leaves.count_parameters(specs) == param.count_parameters(BARE) + adapters


def test_nf4_rests_in_half_a_byte_per_value_and_one_scale_per_block() -> None:
    """Blocks lie along the width, which `tensor` never splits. The axes, by which ZeRO and `tensor` divide, stay."""
    wide = replace(OUTPUT, shape=(4, 6, 256)).stack(5)
    for double, bits_per_value in ((False, 4.5), (True, 4 + 8 / 64 + 32 / 256)):
        coded = nf4_specs(wide, double)
        assert all(spec.axes == wide.axes and spec.layers == wide.layers for spec in jax.tree.leaves(coded))
        bits = 8 * sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in jax.tree.leaves(coded))
        assert bits / param.count_parameters(wide) == bits_per_value and coded.codes.shape == (5, 4, 6, 128)


# ---- Values.


def test_a_base_has_the_same_initial_values_without_adapters() -> None:
    expected = param.initialize(BARE, seed=3)
    adapted = leaves.initialize(jax.tree.map(wrapped, BARE), seed=3)
    found = jax.tree.map(lambda leaf: leaf.base, adapted, is_leaf=lambda leaf: isinstance(leaf, LoraWeight))
    chex.assert_trees_all_equal(found, expected)
    coded = leaves.initialize(jax.tree.map(lambda spec: wrapped(spec, "int8"), BARE), seed=3)
    quantised = leaves.quantise(expected["segment_0"]["output"], int8_specs(BARE["segment_0"]["output"]))
    chex.assert_trees_all_equal(coded["segment_0"]["output"].base, quantised)
    jax.tree.map(
        np.testing.assert_array_equal, coded["segment_0"]["query"].lora_a, adapted["segment_0"]["query"].lora_a
    )


def test_adapters_start_with_random_a_and_zero_b() -> None:
    specs = {name: wrapped(ParamSpec((256, 64), ("embed", "mlp"), (0,), normal()).stack(2)) for name in ("up", "gate")}
    values = leaves.initialize(specs, seed=0)
    assert np.std(values["up"].lora_a) == pytest.approx(256**-0.5, rel=0.1)
    assert not np.any(values["up"].lora_b)
    draws = [*values["up"].lora_a, *values["gate"].lora_a]
    assert len({np.asarray(draw).tobytes() for draw in draws}) == 4


def test_int8_error_is_at_most_a_254th_of_the_largest_value_of_the_channel() -> None:
    random = np.random.default_rng(0)
    array = (random.normal(size=(3, 4, 6, 8)) * random.uniform(1e-3, 1e3, (3, 1, 1, 8))).astype(np.float32)
    array[1, :, :, 5] = 0  # a channel without a scale
    with jax.debug_nans(True):
        coded = leaves.quantise(array, int8_specs(OUTPUT.stack(3)))
    assert coded.codes.dtype == jnp.int8 and coded.scales.shape == (3, 1, 1, 8)
    largest = np.abs(array).max(axis=(1, 2), keepdims=True)
    error = np.abs(leaves.dequantise(coded) - array)
    assert np.all(error <= largest / 254 * (1 + 1e-5))
    assert np.abs(coded.codes).max() == 127


# ---- Computation.


def placed(spec: LoraWeight, keep: bool) -> tuple[LoraWeight, LoraWeight, Any]:
    """Return (values, perturbations, place), with random values for both factors."""
    specs = {"weight": spec}
    values = leaves.initialize(specs, seed=0)["weight"]
    random = np.random.default_rng(0)
    values = replace(values, lora_b=random.normal(size=spec.lora_b.shape).astype(np.float32))
    if spec.magnitude is not None:
        values = replace(values, magnitude=random.uniform(0.5, 2, spec.magnitude.shape).astype(np.float32))
    placement = toy.placement()
    perturbations = make_perturbations(leaves.select_adapters(specs), placement)["weight"]
    return (
        values,
        perturbations,
        lambda perturbations: attach_shardings(spec, values, perturbations, placement, keep_gathered=keep),
    )


def dense(weight: LoraWeight, a: jax.Array, b: jax.Array, contracting: tuple[int, ...]) -> jax.Array:
    """Return base + scale × A·B as one array."""
    base = weight.base
    if isinstance(base, QuantisedWeight):
        base = leaves.dequantise(base)
    product = jnp.tensordot(a, b, (-1, -1))
    return base + ALPHA / RANK * jnp.moveaxis(product, range(len(contracting)), contracting)


def to_magnitude(weight: jax.Array, magnitude: jax.Array, contracting: tuple[int, ...]) -> jax.Array:
    """Scale each output channel of the weight to this norm. The norm that it had is a constant."""
    norms = jax.lax.stop_gradient(jnp.sqrt(jnp.sum(weight**2, axis=contracting, keepdims=True)))
    return weight / norms * jnp.expand_dims(magnitude, contracting)


def assert_near(found: Any, expected: Any) -> None:
    def check(a: jax.Array, b: jax.Array) -> None:
        assert np.linalg.norm(a - b) <= 5e-6 * np.linalg.norm(b)

    jax.tree.map(check, found, expected)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("base, keep", [("float", True), ("int8", True), ("nf4", False), ("nf4 double", True)])
def test_a_product_matches_the_dense_weight(product: str, base: str, keep: bool) -> None:
    subscripts, spec = PRODUCTS[product]
    values, perturbations, place = placed(wrapped(spec, base), keep)
    sizes = dict(zip(subscripts.split(",")[1].split("->")[0], spec.shape, strict=True)) | {"B": 2, "S": 5}
    x = np.random.default_rng(1).normal(size=[sizes[axis] for axis in subscripts.split(",")[0]]).astype(np.float32)

    def through(x: jax.Array, perturbations: LoraWeight) -> jax.Array:
        return weights.einsum(subscripts, x, place(perturbations))

    def whole(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, x, dense(values, a, b, spec.contracting))

    y, pull = jax.vjp(through, x, perturbations)
    expected, expected_pull = jax.vjp(whole, x, values.lora_a, values.lora_b)
    wide = dense(values, values.lora_a, values.lora_b, spec.contracting)
    assert_near(y, np.einsum(subscripts, x.astype(np.float64), wide))
    dx, d_perturbations = pull(jnp.cos(y))
    assert len(jax.tree.leaves(d_perturbations)) == 2
    assert_near((dx, d_perturbations.lora_a, d_perturbations.lora_b), expected_pull(jnp.cos(expected)))


@pytest.mark.parametrize("product", ["query", "output"])
@pytest.mark.parametrize("base", ["float", "nf4"])
def test_a_product_with_magnitudes_matches_the_dense_weight(product: str, base: str) -> None:
    subscripts, spec = PRODUCTS[product]
    values, perturbations, place = placed(wrapped(spec, base, dora=True), keep=True)
    sizes = dict(zip(subscripts.split(",")[1].split("->")[0], spec.shape, strict=True)) | {"B": 2, "S": 5}
    x = np.random.default_rng(1).normal(size=[sizes[axis] for axis in subscripts.split(",")[0]]).astype(np.float32)

    def through(x: jax.Array, perturbations: LoraWeight) -> jax.Array:
        return weights.einsum(subscripts, x, place(perturbations))

    def whole(x: jax.Array, a: jax.Array, b: jax.Array, magnitude: jax.Array) -> jax.Array:
        return jnp.einsum(
            subscripts, x, to_magnitude(dense(values, a, b, spec.contracting), magnitude, spec.contracting)
        )

    y, pull = jax.vjp(through, x, perturbations)
    expected, expected_pull = jax.vjp(whole, x, values.lora_a, values.lora_b, values.magnitude)
    assert_near(y, expected)
    dx, d_perturbations = pull(jnp.cos(y))
    assert_near(
        (dx, d_perturbations.lora_a, d_perturbations.lora_b, d_perturbations.magnitude),
        expected_pull(jnp.cos(expected)),
    )


def place_frozen(spec: Any, values: Any) -> Any:
    return attach_shardings(spec, values, jax.tree.map(lambda _: None, spec), toy.placement(), keep_gathered=True)


def test_initial_magnitudes_leave_the_base_unchanged() -> None:
    for base in BASES:
        spec = wrapped(QUERY, base, dora=True)
        values = leaves.initialize({"weight": spec}, seed=0)["weight"]
        x = np.ones((1, 2, 32), np.float32)
        found, bare = (
            weights.einsum("BSD,DHK->BSHK", x, place_frozen(s, v))
            for s, v in ((spec, values), (spec.base, values.base))
        )
        assert_near(found, bare)


def test_a_channel_of_zeros_stays_one() -> None:
    spec = wrapped(QUERY, dora=True)
    values = leaves.initialize({"weight": spec}, seed=0)["weight"]
    empty = values.base.at[:, 1, 2].set(0)
    values = replace(values, base=empty, magnitude=leaves.channel_norms(empty, spec.base.contracting))
    y = weights.einsum("BSD,DHK->BSHK", np.ones((1, 2, 32), np.float32), place_frozen(spec, values))
    assert np.isfinite(y).all() and not np.any(y[:, :, 1, 2])


@pytest.mark.parametrize("shape", [(2, 7), (9,)], ids=str)
def test_a_tied_table_with_an_adapter_matches_the_dense_table(shape: tuple[int, ...]) -> None:
    values, perturbations, place = placed(wrapped(TABLE), keep=True)
    ids = np.random.default_rng(1).integers(0, TABLE.shape[0], shape)

    def through(perturbations: LoraWeight) -> tuple[jax.Array, jax.Array]:
        rows = vocabulary.look_up(place(perturbations), ids, toy.placement())
        return rows, weights.einsum("BD,VD->BV", rows.reshape(-1, TABLE.shape[1]), place(perturbations))

    def whole(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        table = dense(values, a, b, TABLE.contracting)
        return table[ids], jnp.einsum("BD,VD->BV", table[ids].reshape(-1, TABLE.shape[1]), table)

    found, pull = jax.vjp(through, perturbations)
    expected, expected_pull = jax.vjp(whole, values.lora_a, values.lora_b)
    assert_near(found, expected)
    (d_perturbations,) = pull(jax.tree.map(jnp.cos, found))
    assert_near((d_perturbations.lora_a, d_perturbations.lora_b), expected_pull(jax.tree.map(jnp.cos, expected)))
