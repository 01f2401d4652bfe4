"""Where parameters and activations live: the tables, ZeRO's overlay, and the sum over gradient groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxopt_llm.errors import InputError
from jaxopt_llm.model.param import ParamSpec

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
        pytest.param(ParamSpec((6, 24), ("embed", "mlp")), (None, ("tensor", "fsdp")), id="the first that divides"),
        pytest.param(ParamSpec((4, 16), ("mlp", "embed")), ("tensor", "fsdp"), id="first does not divide by both"),
    ],
)
def test_storage_goes_to_the_first_dimension_that_divides(spec: ParamSpec, expected: tuple[str | None, ...]) -> None:
    placement = toy.placement(zero_stage=3, fsdp=4, tensor=2)
    assert dims(placement.masters(spec)) == expected
    assert dims(placement.masters(spec.stack(8))) == (None, *expected)


def test_storage_is_divided_by_fsdp_context_and_expert_together() -> None:
    placement = toy.placement(zero_stage=3, fsdp=2, expert=2, context=2)
    assert dims(placement.masters(UP)) == (("fsdp", "context", "expert"), None)
    # All of them or none: 12 divides by two of the three.
    assert dims(placement.masters(ParamSpec((12,), ("embed",)))) == (None,)


def test_what_does_not_divide_is_whole_and_reported_and_its_stack_is_not_split_instead() -> None:
    specs = {"odd": ParamSpec((6,), ("embed",)).stack(4), "even": SCALE.stack(4)}
    placement = toy.placement(zero_stage=3, fsdp=4)
    assert dims(placement.masters(specs["odd"])) == (None, None)
    assert placement.undivided(specs) == ["odd"]
    assert toy.placement(zero_stage=0, fsdp=4).undivided(specs) == []
    assert toy.placement(zero_stage=3, data=4).undivided(specs) == []


STAGES = {0: "", 1: "masters", 2: "masters gradients", 3: "masters gradients parameters"}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_divides_what_it_says(stage: int) -> None:
    placement = toy.placement(zero_stage=stage, fsdp=4, tensor=2)
    for name in ("masters", "gradients", "parameters"):
        expected = ("fsdp" if name in STAGES[stage] else None, "tensor")
        assert dims(getattr(placement, name)(UP)) == expected, name
    assert placement.compute_copy == (stage in (1, 2))
    weight = placement.place(UP, jnp.zeros(UP.shape), None, keep=False)
    assert dims(weight.shardings.resting) == dims(placement.parameters(UP))
    assert dims(weight.shardings.gathered) == (None, "tensor")
    assert dims(weight.shardings.gradient) == dims(placement.gradients(UP))


# ---- What the tables refuse, and what they replicate.


@pytest.mark.parametrize("kv_heads, tensor, expected", [(2, 2, "tensor"), (2, 4, None), (1, 8, None)])
def test_fewer_key_value_heads_than_tensor_are_replicated(kv_heads: int, tensor: int, expected: str | None) -> None:
    spec = ParamSpec((16, kv_heads, 4), KEY.axes)
    placement = toy.placement(tensor=tensor)
    assert dims(placement.parameters(spec)) == (None, expected, None)


def test_two_dimensions_on_one_mesh_axis_are_an_error() -> None:
    square = ParamSpec((16, 16), ("mlp", "heads"))
    with pytest.raises(InputError, match="same mesh axis"):
        toy.placement(tensor=2).parameters(square)
    assert dims(toy.placement(fsdp=2).parameters(square)) == (None, None)


# ---- Activations.


def test_activations_are_split_over_the_batch_axes_in_use() -> None:
    placement = toy.placement(data=2, fsdp=2, tensor=2)
    assert dims(placement.activation("residual_sequence")) == (None,)
    assert dims(placement.activation("batch", "sequence", "embed")) == (("data", "fsdp"), None, None)
    assert dims(placement.activation(None, "batch", "sequence", "mlp")) == (None, ("data", "fsdp"), None, "tensor")
    assert dims(toy.placement(fsdp=2, expert=2).activation("batch")) == (("fsdp", "expert"),)


def test_sequence_parallelism_splits_the_residual_stream_alone() -> None:
    placement = toy.placement(fsdp=2, tensor=2, sequence_parallel=True)
    assert dims(placement.activation("batch", "residual_sequence", "embed")) == ("fsdp", "tensor", None)
    assert dims(placement.activation("batch", "sequence", "heads")) == ("fsdp", None, "tensor")


@pytest.mark.parametrize("stage, left", [(0, None), (1, None), (2, "fsdp"), (3, "fsdp")])
def test_inside_a_gradient_group_activations_are_not_split_over_groups(stage: int, left: str | None) -> None:
    placement = toy.placement(zero_stage=stage, data=2, fsdp=2, tensor=2)
    assert placement.gradient_groups == (("data",) if left else ("data", "fsdp"))
    assert dims(placement.group().activation("batch", "heads")) == (left, "tensor")


# ---- The sum over gradient groups.


@pytest.mark.parametrize("stage", [0, 1])
def test_groups_are_summed_and_divided_as_the_masters_are(stage: int) -> None:
    placement = toy.placement(zero_stage=stage, data=2, fsdp=4)
    specs = {"up": UP, "odd": ParamSpec((6,), ("embed",))}
    random = np.random.default_rng(0)
    gradients = {name: random.normal(size=(8, *spec.shape)).astype(np.float32) for name, spec in specs.items()}
    held = jax.device_put(gradients, NamedSharding(placement.mesh, P(placement.gradient_groups)))
    summed = jax.jit(lambda gradients: jax.tree.map(placement.reduce_groups, specs, gradients))(held)
    for name, spec in specs.items():
        np.testing.assert_allclose(summed[name], gradients[name].sum(axis=0), rtol=1e-6, atol=1e-6)
        assert summed[name].sharding.is_equivalent_to(placement.masters(spec), len(spec.shape)), name
