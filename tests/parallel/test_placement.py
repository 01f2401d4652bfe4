"""Shardings of parameters and activations: the tables, ZeRO's overlay, and the sum over gradient groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.gathering import attach_shardings, reduce_groups
from jaxopt_llm.parallel.zero import (
    find_undivided,
    gradient_group_axes,
    gradient_sharding,
    has_compute_copy,
    inside_gradient_group,
    master_sharding,
    parameter_sharding,
)

pytestmark = pytest.mark.core

UP = ParamSpec((16, 24), ("embed", "mlp"), (0,))
DOWN = ParamSpec((24, 16), ("mlp", "embed"), (0,))
TABLE = ParamSpec((128, 16), ("vocabulary", "embed"), (1,))
SCALE = ParamSpec((16,), ("embed",))
KEY = ParamSpec((16, 2, 4), ("embed", "kv_heads", "head_dim"), (0,))


def dims(sharding: NamedSharding) -> tuple[str | tuple[str, ...] | None, ...]:
    return tuple(sharding.spec)


# ---- ZeRO's overlay.


@pytest.mark.parametrize(
    "spec, expected",
    [
        (UP, ("fsdp", "tensor")),
        (DOWN, (("tensor", "fsdp"), None)),
        (TABLE, (("tensor", "fsdp"), None)),
        (SCALE, ("fsdp",)),
        (KEY, ("fsdp", "tensor", None)),
        pytest.param(
            ParamSpec((6, 24), ("embed", "mlp")), (None, ("tensor", "fsdp")), id="the first dimension that divides"
        ),
        pytest.param(
            ParamSpec((4, 16), ("mlp", "embed")), ("tensor", "fsdp"), id="the first does not divide by both axes"
        ),
    ],
)
def test_storage_goes_to_the_first_dimension_that_divides(spec: ParamSpec, expected: tuple[str | None, ...]) -> None:
    placement = toy.placement(zero_stage=3, fsdp=4, tensor=2)
    assert dims(master_sharding(spec, placement)) == expected
    assert dims(master_sharding(spec.stack(8), placement)) == (None, *expected)


def test_storage_is_divided_by_fsdp_context_and_expert_together() -> None:
    placement = toy.placement(zero_stage=3, fsdp=2, expert=2, context=2)
    assert dims(master_sharding(UP, placement)) == (("fsdp", "context", "expert"), None)
    # All three axes or none: 12 divides by two of them.
    assert dims(master_sharding(ParamSpec((12,), ("embed",)), placement)) == (None,)


def test_a_parameter_that_does_not_divide_is_whole_and_reported_and_its_layers_are_not_split_instead() -> None:
    specs = {"odd": ParamSpec((6,), ("embed",)).stack(4), "even": SCALE.stack(4)}
    placement = toy.placement(zero_stage=3, fsdp=4)
    assert dims(master_sharding(specs["odd"], placement)) == (None, None)
    assert find_undivided(specs, placement) == ["odd"]
    assert find_undivided(specs, toy.placement(zero_stage=0, fsdp=4)) == []
    assert find_undivided(specs, toy.placement(zero_stage=3, data=4)) == []


DIVIDED_BY_STAGE = {0: [], 1: ["masters"], 2: ["masters", "gradients"], 3: ["masters", "gradients", "parameters"]}
SHARDINGS = {"masters": master_sharding, "gradients": gradient_sharding, "parameters": parameter_sharding}


@pytest.mark.parametrize("stage", DIVIDED_BY_STAGE)
def test_each_zero_stage_divides_its_kinds_of_arrays(stage: int) -> None:
    placement = toy.placement(zero_stage=stage, fsdp=4, tensor=2)
    for name, sharding in SHARDINGS.items():
        expected = ("fsdp" if name in DIVIDED_BY_STAGE[stage] else None, "tensor")
        assert dims(sharding(UP, placement)) == expected, name
    assert has_compute_copy(placement) == (stage in (1, 2))
    weight = attach_shardings(UP, jnp.zeros(UP.shape), None, placement, keep_gathered=False)
    assert dims(weight.shardings.resting) == dims(parameter_sharding(UP, placement))
    assert dims(weight.shardings.gathered) == (None, "tensor")
    assert dims(weight.shardings.gradient) == dims(gradient_sharding(UP, placement))


# ---- Arrays that the tables refuse or replicate.


@pytest.mark.parametrize("kv_heads, tensor, expected", [(2, 2, "tensor"), (2, 4, None), (1, 8, None)])
def test_fewer_key_value_heads_than_tensor_are_replicated(kv_heads: int, tensor: int, expected: str | None) -> None:
    spec = ParamSpec((16, kv_heads, 4), KEY.axes)
    placement = toy.placement(tensor=tensor)
    assert dims(parameter_sharding(spec, placement)) == (None, expected, None)


def test_two_dimensions_on_one_mesh_axis_are_an_error() -> None:
    square = ParamSpec((16, 16), ("mlp", "heads"))
    with pytest.raises(InputError, match="one mesh axis"):
        parameter_sharding(square, toy.placement(tensor=2))
    assert dims(parameter_sharding(square, toy.placement(fsdp=2))) == (None, None)


# ---- Activations.


def test_activations_are_split_over_the_batch_axes_in_use() -> None:
    placement = toy.placement(data=2, fsdp=2, tensor=2)
    assert dims(placement.activation("residual_sequence")) == (None,)
    assert dims(placement.activation("batch", "sequence", "embed")) == (("data", "fsdp"), None, None)
    assert dims(placement.activation(None, "batch", "sequence", "mlp")) == (None, ("data", "fsdp"), None, "tensor")
    assert dims(toy.placement(fsdp=2, expert=2).activation("batch")) == (("fsdp", "expert"),)


def test_sequence_parallelism_splits_only_the_residual_stream() -> None:
    placement = toy.placement(fsdp=2, tensor=2, sequence_parallel=True)
    assert dims(placement.activation("batch", "residual_sequence", "embed")) == ("fsdp", "tensor", None)
    assert dims(placement.activation("batch", "sequence", "heads")) == ("fsdp", None, "tensor")


@pytest.mark.parametrize("stage, left", [(0, None), (1, None), (2, "fsdp"), (3, "fsdp")])
def test_inside_a_gradient_group_activations_are_not_split_over_groups(stage: int, left: str | None) -> None:
    placement = toy.placement(zero_stage=stage, data=2, fsdp=2, tensor=2)
    assert gradient_group_axes(placement) == (("data",) if left else ("data", "fsdp"))
    assert dims(inside_gradient_group(placement).activation("batch", "heads")) == (left, "tensor")


# ---- The sum over gradient groups.


@pytest.mark.parametrize("stage", [0, 1])
def test_groups_are_summed_and_divided_as_the_masters_are(stage: int) -> None:
    placement = toy.placement(zero_stage=stage, data=2, fsdp=4)
    specs = {"up": UP, "odd": ParamSpec((6,), ("embed",))}
    random = np.random.default_rng(0)
    gradients = {name: random.normal(size=(8, *spec.shape)).astype(np.float32) for name, spec in specs.items()}
    placed = jax.device_put(gradients, NamedSharding(placement.mesh, P(gradient_group_axes(placement))))
    summed = jax.jit(lambda gradients: reduce_groups(specs, gradients, placement))(placed)
    for name, spec in specs.items():
        np.testing.assert_allclose(summed[name], gradients[name].sum(axis=0), rtol=1e-6, atol=1e-6)
        assert summed[name].sharding.is_equivalent_to(master_sharding(spec, placement), len(spec.shape)), name
