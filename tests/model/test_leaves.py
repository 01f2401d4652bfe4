"""Leaf classes: their specs, their values, and that they compute what the weight that they stand for would."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm import tree
from jaxopt_llm.model import leaves, param, tables, weights
from jaxopt_llm.model.leaves import CODED, LoraWeight, coded_specs, int8_specs, lora_specs, nf4_specs
from jaxopt_llm.model.param import ParamSpec, normal

pytestmark = pytest.mark.core

RANK, ALPHA = 3, 6.0
BASES = ("float", "int8", "nf4", "nf4 double")
QUERY = ParamSpec((32, 4, 6), ("embed", "heads", "head_dim"), (0,), normal())
OUTPUT = ParamSpec((4, 6, 32), ("heads", "head_dim", "embed"), (0, 1), normal())
TABLE = ParamSpec((16, 32), ("vocabulary", "embed"), (1,), normal())
PRODUCTS = {"query": ("BSD,DHK->BSHK", QUERY), "output": ("BSHK,HKD->BSD", OUTPUT), "table": ("BSD,VD->BSV", TABLE)}
BARE = {"outer": {"table": TABLE}, "segment_0": {"query": QUERY.stack(3), "output": OUTPUT.stack(3)}}


def wrapped(spec: ParamSpec, base: str = "float", dora: bool = False) -> LoraWeight:
    of = spec if base == "float" else coded_specs(spec, base.split()[0], double="double" in base)  # type: ignore[arg-type]
    return replace(lora_specs(spec, RANK, ALPHA / RANK, dora), base=of)


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
def test_specs_keep_the_names_of_what_they_factor(spec: ParamSpec, a: Any, b: Any, scales: Any) -> None:
    def dims(spec: ParamSpec) -> list[tuple[int, str | None]]:
        return list(zip(spec.shape, spec.axes, strict=True))

    adapted, coded = lora_specs(spec, RANK, ALPHA / RANK), int8_specs(spec)
    assert dims(adapted.lora_a) == [*a, (RANK, None)] and dims(adapted.lora_b) == [*b, (RANK, None)]
    assert adapted.lora_a.fan_in == spec.fan_in and adapted.lora_b.fan_in == RANK
    assert adapted.base == spec and adapted.scale == ALPHA / RANK
    assert coded.codes == replace(spec, dtype=np.dtype(np.int8)) and dims(coded.scales) == scales


@pytest.mark.parametrize("spec", [QUERY, OUTPUT, TABLE], ids=PRODUCTS)
def test_a_stack_is_wrapped_as_its_layers_are(spec: ParamSpec) -> None:
    def told(specs: tree.Tree) -> list[Any]:
        return [(each.shape, each.axes, each.contracting, each.dtype) for each in jax.tree.leaves(specs)]

    assert told(param.layer_specs(wrapped(spec.stack(5), "int8"))) == told(wrapped(spec, "int8"))


def test_bare_specs_are_what_was_wrapped_and_count_only_adapters_beside_them() -> None:
    for base in BASES:
        specs = jax.tree.map(lambda spec, base=base: wrapped(spec, base), BARE)
        assert leaves.bare(specs) == BARE
        adapters = RANK * (16 + 32 + 3 * 2 * (32 + 4 * 6))
        assert leaves.count(specs) == param.count(BARE) + adapters


def test_4_bits_rest_in_half_a_byte_and_a_scale_a_block() -> None:
    """Along the width, which `tensor` never splits; the names of the axes stay, by which ZeRO and `tensor` divide."""
    wide = replace(OUTPUT, shape=(4, 6, 256)).stack(5)
    for double, resting in ((False, 4.5), (True, 4 + 8 / 64 + 32 / 256)):
        coded = nf4_specs(wide, double)
        assert all(spec.axes == wide.axes and spec.layers == wide.layers for spec in jax.tree.leaves(coded))
        held = 8 * sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in jax.tree.leaves(coded))
        assert held / param.count(wide) == resting and coded.codes.shape == (5, 4, 6, 128)


# ---- Values.


def test_a_base_has_the_values_that_it_has_without_adapters() -> None:
    expected = param.initialize(BARE, seed=3)
    adapted = leaves.initialize(jax.tree.map(wrapped, BARE), seed=3)
    found = jax.tree.map(lambda leaf: leaf.base, adapted, is_leaf=lambda leaf: isinstance(leaf, LoraWeight))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    coded = leaves.initialize(jax.tree.map(lambda spec: wrapped(spec, "int8"), BARE), seed=3)
    quantised = leaves.quantise(expected["segment_0"]["output"], int8_specs(BARE["segment_0"]["output"]))
    jax.tree.map(np.testing.assert_array_equal, coded["segment_0"]["output"].base, quantised)
    jax.tree.map(
        np.testing.assert_array_equal, coded["segment_0"]["query"].lora_a, adapted["segment_0"]["query"].lora_a
    )


def test_adapters_start_with_a_random_and_b_zero() -> None:
    specs = {name: wrapped(ParamSpec((256, 64), ("embed", "mlp"), (0,), normal()).stack(2)) for name in ("up", "gate")}
    values = leaves.initialize(specs, seed=0)
    assert np.std(values["up"].lora_a) == pytest.approx(256**-0.5, rel=0.1)
    assert not np.any(values["up"].lora_b)
    draws = [*values["up"].lora_a, *values["gate"].lora_a]
    assert len({np.asarray(draw).tobytes() for draw in draws}) == 4


def test_a_code_is_off_by_at_most_a_254th_of_its_channels_largest_value() -> None:
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
    """(values, taps, place), both factors random."""
    specs = {"weight": spec}
    values = leaves.initialize(specs, seed=0)["weight"]
    random = np.random.default_rng(0)
    values = replace(values, lora_b=random.normal(size=spec.lora_b.shape).astype(np.float32))
    if spec.magnitude is not None:
        values = replace(values, magnitude=random.uniform(0.5, 2, spec.magnitude.shape).astype(np.float32))
    placement = toy.placement()
    taps = placement.taps(tree.partition(specs, leaves.is_adapter)[0])["weight"]
    return values, taps, lambda taps: placement.place(spec, values, taps, keep)


def dense(weight: LoraWeight, a: jax.Array, b: jax.Array, contracting: tuple[int, ...]) -> jax.Array:
    """The weight that a pair stands for, written out."""
    base = weight.base
    if isinstance(base, CODED):
        base = leaves.dequantise(base)
    product = jnp.tensordot(a, b, (-1, -1))
    return base + ALPHA / RANK * jnp.moveaxis(product, range(len(contracting)), contracting)


def to_magnitude(weight: jax.Array, magnitude: jax.Array, contracting: tuple[int, ...]) -> jax.Array:
    """The weight, each output channel of this length; the one that it had is a constant."""
    length = jax.lax.stop_gradient(jnp.sqrt(jnp.sum(weight**2, axis=contracting, keepdims=True)))
    return weight / length * jnp.expand_dims(magnitude, contracting)


def assert_near(found: Any, expected: Any) -> None:
    def check(a: jax.Array, b: jax.Array) -> None:
        assert np.linalg.norm(a - b) <= 5e-6 * np.linalg.norm(b)

    jax.tree.map(check, found, expected)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("base, keep", [("float", True), ("int8", True), ("nf4", False), ("nf4 double", True)])
def test_a_product_is_that_of_the_weight_written_out(product: str, base: str, keep: bool) -> None:
    subscripts, spec = PRODUCTS[product]
    values, taps, place = placed(wrapped(spec, base), keep)
    sizes = dict(zip(subscripts.split(",")[1].split("->")[0], spec.shape, strict=True)) | {"B": 2, "S": 5}
    x = np.random.default_rng(1).normal(size=[sizes[axis] for axis in subscripts.split(",")[0]]).astype(np.float32)

    def through(x: jax.Array, taps: LoraWeight) -> jax.Array:
        return weights.einsum(subscripts, x, place(taps))

    def whole(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, x, dense(values, a, b, spec.contracting))

    y, pull = jax.vjp(through, x, taps)
    expected, expected_pull = jax.vjp(whole, x, values.lora_a, values.lora_b)
    wide = dense(values, values.lora_a, values.lora_b, spec.contracting)
    assert_near(y, np.einsum(subscripts, x.astype(np.float64), wide))
    dx, dtaps = pull(jnp.cos(y))
    assert len(jax.tree.leaves(dtaps)) == 2
    assert_near((dx, dtaps.lora_a, dtaps.lora_b), expected_pull(jnp.cos(expected)))


@pytest.mark.parametrize("product", ["query", "output"])
@pytest.mark.parametrize("base", ["float", "nf4"])
def test_a_product_with_magnitudes_is_that_of_the_weight_written_out(product: str, base: str) -> None:
    subscripts, spec = PRODUCTS[product]
    values, taps, place = placed(wrapped(spec, base, dora=True), keep=True)
    sizes = dict(zip(subscripts.split(",")[1].split("->")[0], spec.shape, strict=True)) | {"B": 2, "S": 5}
    x = np.random.default_rng(1).normal(size=[sizes[axis] for axis in subscripts.split(",")[0]]).astype(np.float32)

    def through(x: jax.Array, taps: LoraWeight) -> jax.Array:
        return weights.einsum(subscripts, x, place(taps))

    def whole(x: jax.Array, a: jax.Array, b: jax.Array, magnitude: jax.Array) -> jax.Array:
        return jnp.einsum(
            subscripts, x, to_magnitude(dense(values, a, b, spec.contracting), magnitude, spec.contracting)
        )

    y, pull = jax.vjp(through, x, taps)
    expected, expected_pull = jax.vjp(whole, x, values.lora_a, values.lora_b, values.magnitude)
    assert_near(y, expected)
    dx, dtaps = pull(jnp.cos(y))
    assert_near((dx, dtaps.lora_a, dtaps.lora_b, dtaps.magnitude), expected_pull(jnp.cos(expected)))


def test_with_fresh_magnitudes_a_weight_is_its_base() -> None:
    for base in BASES:
        spec = wrapped(QUERY, base, dora=True)
        values = leaves.initialize({"weight": spec}, seed=0)["weight"]
        x = np.ones((1, 2, 32), np.float32)
        found, bare = (
            weights.einsum("BSD,DHK->BSHK", x, toy.placement().place(s, v, jax.tree.map(lambda _: None, s), True))
            for s, v in ((spec, values), (spec.base, values.base))
        )
        assert_near(found, bare)


def test_a_channel_of_zeros_stays_one() -> None:
    spec = wrapped(QUERY, dora=True)
    values = leaves.initialize({"weight": spec}, seed=0)["weight"]
    empty = values.base.at[:, 1, 2].set(0)
    values = replace(values, base=empty, magnitude=leaves.lengths(empty, spec.base.contracting))
    place = toy.placement().place(spec, values, jax.tree.map(lambda _: None, spec), True)
    y = weights.einsum("BSD,DHK->BSHK", np.ones((1, 2, 32), np.float32), place)
    assert np.isfinite(y).all() and not np.any(y[:, :, 1, 2])


@pytest.mark.parametrize("shape", [(2, 7), (9,)], ids=str)
def test_a_tied_table_is_looked_up_and_multiplied_as_if_written_out(shape: tuple[int, ...]) -> None:
    values, taps, place = placed(wrapped(TABLE), keep=True)
    ids = np.random.default_rng(1).integers(0, TABLE.shape[0], shape)

    def through(taps: LoraWeight) -> tuple[jax.Array, jax.Array]:
        rows = tables.take(place(taps), ids, toy.placement())
        return rows, weights.einsum("BD,VD->BV", rows.reshape(-1, TABLE.shape[1]), place(taps))

    def whole(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        table = dense(values, a, b, TABLE.contracting)
        return table[ids], jnp.einsum("BD,VD->BV", table[ids].reshape(-1, TABLE.shape[1]), table)

    found, pull = jax.vjp(through, taps)
    expected, expected_pull = jax.vjp(whole, values.lora_a, values.lora_b)
    assert_near(found, expected)
    (dtaps,) = pull(jax.tree.map(jnp.cos, found))
    assert_near((dtaps.lora_a, dtaps.lora_b), expected_pull(jax.tree.map(jnp.cos, expected)))
