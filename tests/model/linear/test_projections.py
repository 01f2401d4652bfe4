"""Products of one input with several adapted weights, compared with the same products one by one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from compiled_steps import Compiled, per_layer

from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.config import MeshConfig
from jaxopt_llm.core import tree
from jaxopt_llm.model import param
from jaxopt_llm.model.linear import leaves, projections, weights
from jaxopt_llm.model.linear.leaves import LoraWeight, lora_specs, quantised_specs
from jaxopt_llm.model.param import ParamSpec, normal
from jaxopt_llm.parallel.gathering import attach_shardings, make_perturbations
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.planning import breakdown

pytestmark = pytest.mark.core

BATCH, LENGTH, WIDTH = 4, 24, 32
RANKS = {"query": 3, "key": 5, "value": 2}


def matrix(*sizes: int) -> ParamSpec:
    return ParamSpec(sizes, ("embed", "heads", "head_dim"), (0,), normal())


# The forward joins the input with x · A, or adds (`narrow`). The backward joins the gradients of all three results
# (`wide` does not), and with `narrow` also these with their product with B.
SHAPES = {
    "narrow": {"query": matrix(WIDTH, 2, 4), "key": matrix(WIDTH, 2, 2), "value": matrix(WIDTH, 2, 2)},
    "grouped": {"query": matrix(WIDTH, 4, 8), "key": matrix(WIDTH, 2, 8), "value": matrix(WIDTH, 2, 8)},
    "wide": {name: matrix(WIDTH, 4, 16) for name in RANKS},
}
X = np.random.default_rng(0).normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)
Adapt = Callable[[str, ParamSpec], Any]
PRODUCT = "BSD,DHK->BSHK"


def adapt(name: str, spec: ParamSpec) -> LoraWeight:
    return lora_specs(spec, RANKS[name], scale=0.5 + RANKS[name])


def compute(multiply: Any, shape: str, adapt: Adapt, placement: Placement, noise: bool = False) -> Any:
    """Return the results and the gradients of the input and of the adapters."""
    specs = {name: adapt(name, spec) for name, spec in SHAPES[shape].items()}
    random = np.random.default_rng(1)
    adapters = leaves.adapter_paths(specs)
    values = tree.map_with_path(
        lambda path, leaf: random.normal(scale=0.1, size=leaf.shape).astype(leaf.dtype) if path in adapters else leaf,
        leaves.initialize(specs, seed=0),
    )
    trained, frozen = tree.partition(specs, adapters.__contains__)
    missing = jax.tree.map(lambda _: None, frozen)
    perturbations = tree.merge(make_perturbations(trained, placement), missing)

    def run(x: jax.Array, values: Any, perturbations: Any) -> list[jax.Array]:
        placed = attach_shardings(specs, values, perturbations, placement, keep_gathered=False)
        if noise:
            bits = jnp.arange(BATCH * LENGTH, dtype=jnp.uint32).reshape(BATCH, LENGTH)
            placed = {name: replace(leaf, noise=bits * (len(name) + 1), dropout=0.3) for name, leaf in placed.items()}
        return multiply([PRODUCT] * len(placed), x, [*placed.values()])

    @jax.jit
    def all_of_it(x: jax.Array, values: Any, perturbations: Any) -> Any:
        ys, pull = jax.vjp(lambda x, zeros: run(x, values, zeros), x, perturbations)
        return ys, pull([jnp.cos(y) for y in ys])

    with jax.default_matmul_precision("highest"):
        return all_of_it(X, values, perturbations)


def one_by_one(subscripts: list[str], x: jax.Array, matrices: list[Any]) -> list[jax.Array]:
    return [weights.einsum(each, x, matrix) for each, matrix in zip(subscripts, matrices, strict=True)]


def assert_equal(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    everything = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(expected)))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) + 1e-7 * everything


PLACEMENTS = {"one": {}, "data": {"data": 2}, "fsdp": {"fsdp": 4, "zero_stage": 3}, "tensor": {"tensor": 2}}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("devices", PLACEMENTS)
def test_shared_products_equal_those_of_each_weight(shape: str, devices: str) -> None:
    placement = toy.placement(**PLACEMENTS[devices])
    found, expected = (compute(multiply, shape, adapt, placement) for multiply in (projections.einsum_all, one_by_one))
    assert_equal(found, expected)


def one_plain(name: str, spec: ParamSpec) -> Any:
    return spec if name == "key" else adapt(name, spec)


def with_magnitudes(name: str, spec: ParamSpec) -> Any:
    return lora_specs(spec, RANKS[name], scale=0.5, dora=True)


def over_int8(name: str, spec: ParamSpec) -> Any:
    return replace(adapt(name, spec), base=quantised_specs(spec, "int8", double=False))


@pytest.mark.parametrize("adapt", [one_plain, with_magnitudes, over_int8], ids=lambda each: each.__name__)
def test_shared_products_of_other_weights(adapt: Adapt) -> None:
    found, expected = (
        compute(multiply, "grouped", adapt, toy.placement()) for multiply in (projections.einsum_all, one_by_one)
    )
    assert_equal(found, expected)


def test_adapters_with_dropout_keep_inputs_of_their_own() -> None:
    found, expected = (
        compute(multiply, "grouped", adapt, toy.placement(), noise=True)
        for multiply in (projections.einsum_all, one_by_one)
    )
    assert_equal(found, expected)


def count_products(shape: str, **settings: Any) -> int:
    """Count the products of the forward."""
    placement = toy.placement(**settings)
    specs = {name: adapt(name, spec) for name, spec in SHAPES[shape].items()}
    arrays = param.initialize(specs, seed=0)
    placed = attach_shardings(specs, arrays, jax.tree.map(lambda _: None, specs), placement, keep_gathered=False)
    run = jax.make_jaxpr(lambda x: projections.einsum_all([PRODUCT] * 3, x, [*placed.values()]))
    return str(run(X)).count("dot_general")


def test_divided_weights_share_the_product_with_a() -> None:
    assert count_products("grouped", fsdp=4, zero_stage=3) == 3 + 1 + 3
    assert count_products("grouped", tensor=2) == 3 + 1 + 3


def launches(step: Compiled) -> int:
    return {part.name: part.runs for part in breakdown.break_down_step(step.text, (), CHIPS["h200"])}[breakdown.MATMULS]


def test_matmuls_of_a_layer_with_adapters() -> None:
    """q, k and v take 7 products, gate and up 10, the output 6, and down 7; XLA merges some of these.

    Weight by weight a layer launches 39 matmuls with jax 0.10.2, and 50 with jax 0.11.2; with only A shared 36 and 47.
    """
    settings: dict[str, Any] = {"adapters_over": "float", "switches": (("kv_heads", 2),)}
    assert per_layer(launches, MeshConfig(), 3, "none", **settings) <= 7 + 10 + 6 + 7
