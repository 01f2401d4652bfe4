"""Optimizer state divided over replicas, and weights and gradients that move as blocks of codes, against one device."""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import toy
from marks import slow

from jaxopt_llm.config import (
    LoraConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OffloadConfig,
    OptimizerConfig,
    PrecisionConfig,
    RematConfig,
    ScheduleConfig,
    ShardingConfig,
    TrainingConfig,
)
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel.gathering import find_exact_matrices
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.run.messages import describe_exact_matrices
from jaxopt_llm.step import state as training_state

# With whole blocks on each of eight devices.
MODEL = replace(toy.UNIFORM, width=64, heads=2, kv_heads=2, head_dim=32, mlp_width=128)
ROWS, LENGTH = 24, 16
WITH_EXPERTS = replace(MODEL, moe=MoEConfig(experts=4, experts_per_token=2, expert_width=64))
HYBRID = MeshConfig(data=2, fsdp=4)


class Result(NamedTuple):
    """Losses of two steps on one batch, gradients of the first, masters after both, and bytes of the first device."""

    losses: tuple[float, float]
    gradients: Params
    masters: Params
    resting: dict[str, int]


@functools.cache
def run(
    mesh: MeshConfig,
    sharding: ShardingConfig,
    accumulation: int = 1,
    rank: int = 0,
    in_backward: bool = False,
    model: ModelConfig = MODEL,
    targets: tuple[str, ...] = LoraConfig.targets,
) -> Result:
    placement = Placement(
        make_mesh(mesh, jax.devices("cpu")[: mesh.devices]),
        sharding,
        PrecisionConfig(compute_dtype="float32"),
        OffloadConfig(),
    )
    training = TrainingConfig(batch_size=ROWS, sequence_length=LENGTH, accumulation=accumulation)
    optimizer = OptimizerConfig(learning_rate=1e-2, epsilon=1e-3, clip_norm=0.0, in_backward=in_backward)
    parts = (
        model,
        training,
        optimizer,
        ScheduleConfig(1, 10),
        RematConfig("full"),
        LoraConfig(rank=rank, targets=targets),
    )
    program = toy.make_program(*parts, placement)
    state = training_state.initialize_state(program.specs, program.optimizers, 0, placement)
    resting = {
        name: sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(getattr(state, name)))
        for name in ("masters", "moments", "compute")
    }
    batch = jax.device_put(toy.microbatches(toy.packed(ROWS, LENGTH), accumulation), program.batch_sharding)
    state, first = program.step(state, batch)
    # Adam's first moment after one step from zero is (1 - beta1) × the gradient.
    moments = {name: part[0].mu for name, part in program.to_checkpoint(state)["moments"].items()}
    gradients = jax.tree.map(np.asarray, moments)
    state, second = program.step(state, batch)
    losses = float(first["loss"]), float(second["loss"])
    return Result(losses, gradients, jax.tree.map(np.asarray, program.to_checkpoint(state)["masters"]), resting)


# A format of codes, and the least and the largest distance of gradients that it rounds.
INT8, INT4 = ("int8", 1e-3, 0.01), ("int4", 0.03, 0.12)


def run_alone(**settings: Any) -> Result:
    return run(MeshConfig(), ShardingConfig(), **settings)


@pytest.mark.parametrize(
    ("mesh", "stage", "settings"),
    [
        pytest.param(HYBRID, 3, {}, marks=pytest.mark.core),
        *((HYBRID, 3, {"accumulation": 3}), (HYBRID, 3, {"rank": 4}), (HYBRID, 3, {"in_backward": True})),
        *slow(
            *((HYBRID, stage, {"accumulation": 3}) for stage in (0, 2)),
            (MeshConfig(data=2, fsdp=2, tensor=2), 3, {}),
            (MeshConfig(data=4, context=2), 2, {}),
            (MeshConfig(pipeline=2, data=2, fsdp=2), 3, {"accumulation": 2}),
        ),
    ],
)
def test_the_optimizer_over_data_computes_the_same(mesh: MeshConfig, stage: Any, settings: dict[str, Any]) -> None:
    expected = run_alone(**settings)
    found = run(mesh, ShardingConfig(stage, optimizer_over_data=True), **settings)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert toy.distance(found.gradients, expected.gradients) < 1e-5
    assert toy.distance(found.masters, expected.masters) < 1e-5


@pytest.mark.parametrize("stage", [3, *slow(0, 2)])
def test_masters_and_moments_rest_divided_over_replicas(stage: Any) -> None:
    """The compute copy is divided as the stage says: over fsdp in stage 3, and not at all below."""
    whole, divided = run_alone().resting, run(HYBRID, ShardingConfig(stage, optimizer_over_data=True)).resting
    ways = 8 if stage else 2
    assert divided["masters"] == pytest.approx(whole["masters"] / ways, rel=0.02)
    assert divided["moments"] == pytest.approx(whole["moments"] / ways, rel=0.02)
    assert divided["compute"] == pytest.approx(whole["masters"] / (4 if stage == 3 else 1), rel=0.02)


@pytest.mark.parametrize(
    ("format", "least", "most", "stage", "over_data", "settings"),
    [
        pytest.param(*INT8, 3, True, {}, marks=pytest.mark.core),
        (*INT8, 3, False, {}),
        (*INT8, 3, True, {"in_backward": True}),
        (*INT4, 3, True, {}),
        *slow(
            (*INT4, 3, True, {"mesh": MeshConfig(data=2, fsdp=2, tensor=2)}),
            (*INT8, 3, True, {"mesh": MeshConfig(pipeline=2, data=2, fsdp=2), "accumulation": 2}),
            (*INT8, 1, False, {"accumulation": 3}),
            (*INT4, 2, True, {"accumulation": 3}),
            (*INT8, 3, True, {"accumulation": 3}),
            (*INT8, 0, False, {}),
        ),
    ],
)
def test_gradients_over_data_as_codes(
    format: Any, least: float, most: float, stage: Any, over_data: bool, settings: dict[str, Any]
) -> None:
    """They differ by the rounding of their blocks, and by no more: 1/254 or 1/14 of the largest value of a block."""
    sharding = ShardingConfig(stage, optimizer_over_data=over_data, data_gradients=format)
    mesh = settings.get("mesh", HYBRID)
    settings = {name: value for name, value in settings.items() if name != "mesh"}
    found, expected = run(mesh, sharding, **settings), run_alone(**settings)
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=1e-6)
    assert least < toy.distance(found.gradients, expected.gradients) < most


@pytest.mark.parametrize(
    ("format", "least", "most", "stage", "settings"),
    [
        pytest.param(*INT8, 3, {}, marks=pytest.mark.core),
        (*INT4, 3, {}),
        *slow(
            (*INT8, 2, {"accumulation": 3}),
            (*INT4, 3, {"accumulation": 3}),
            (*INT8, 3, {"in_backward": True}),
            (*INT8, 3, {"rank": 32}),
            (*INT4, 3, {"rank": 32, "targets": ("non_layer/*",)}),
            (*INT8, 3, {"mesh": MeshConfig(fsdp=2, expert=2, context=2)}),
            (*INT8, 3, {"mesh": MeshConfig(pipeline=2, tensor=2, fsdp=2), "accumulation": 2}),
            (*INT4, 3, {"mesh": MeshConfig(data=2, fsdp=2, expert=2), "model": WITH_EXPERTS}),
        ),
    ],
)
def test_gradients_over_fsdp_as_codes(
    format: Any, least: float, most: float, stage: Any, settings: dict[str, Any]
) -> None:
    settings = dict(settings)
    mesh = settings.pop("mesh", HYBRID)
    found, expected = run(mesh, ShardingConfig(stage, fsdp_gradients=format), **settings), run_alone(**settings)
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=1e-6)
    assert least < toy.distance(found.gradients, expected.gradients) < most


@pytest.mark.parametrize(
    ("stage", "axes", "over_data", "accumulation"),
    [
        pytest.param(3, ("fsdp",), False, 1, marks=pytest.mark.core),
        (3, ("data",), True, 1),
        *slow(
            (2, ("data", "fsdp"), True, 1),
            (3, ("data", "fsdp"), True, 3),
            (0, ("data",), True, 1),
        ),
    ],
)
def test_weights_gathered_as_codes(stage: Any, axes: Any, over_data: bool, accumulation: int) -> None:
    """The model computes with rounded weights. The masters, which the gradients then update, stay exact."""
    sharding = ShardingConfig(stage, optimizer_over_data=over_data, int8_gathers=axes)
    found, expected = run(HYBRID, sharding, accumulation), run_alone(accumulation=accumulation)
    assert 1e-7 < abs(found.losses[0] / expected.losses[0] - 1) < 1e-3
    assert 1e-3 < toy.distance(found.gradients, expected.gradients) < 0.03
    assert toy.distance(found.masters, expected.masters) < 3e-3


@pytest.mark.parametrize("accumulation", [1, *slow(3)])
def test_adapters_move_exactly_and_the_weights_beside_them_as_codes(accumulation: int) -> None:
    """Adapters of a rank without whole blocks, and their gradients, are not rounded.

    The products beside them are those of rounded weights.
    """
    expected = run_alone(rank=4, accumulation=accumulation)
    exact = run(HYBRID, ShardingConfig(3, data_gradients="int8"), accumulation, rank=4)
    assert exact.losses == pytest.approx(expected.losses, rel=1e-6)
    assert toy.distance(exact.gradients, expected.gradients) < 1e-5
    found = run(HYBRID, ShardingConfig(3, int8_gathers=("fsdp",), data_gradients="int8"), accumulation, rank=4)
    assert 1e-7 < abs(found.losses[0] / expected.losses[0] - 1) < 1e-3
    assert toy.distance(found.gradients, expected.gradients) < 0.03


@pytest.mark.parametrize(("format", "least", "most"), [INT8, *slow(INT4)])
def test_adapters_with_whole_blocks_send_codes(format: Any, least: float, most: float) -> None:
    """The last dimension of an adapter is its rank."""
    found, expected = run(HYBRID, ShardingConfig(3, data_gradients=format), rank=32), run_alone(rank=32)
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=1e-6)
    assert least < toy.distance(found.gradients, expected.gradients) < most


@pytest.mark.slow
def test_weights_are_gathered_as_codes_over_context() -> None:
    sharding = ShardingConfig(3, int8_gathers=("context",))
    found, expected = run(MeshConfig(data=4, context=2), sharding), run_alone()
    assert 1e-7 < abs(found.losses[0] / expected.losses[0] - 1) < 1e-3
    assert 1e-3 < toy.distance(found.gradients, expected.gradients) < 0.03


def test_matrices_that_move_exactly_are_named() -> None:
    """The gate and up projections have 48 values in their last dimension, which no block divides."""
    sharding = ShardingConfig(3, int8_gathers=("fsdp",), data_gradients="int8")
    mesh = make_mesh(HYBRID, jax.devices("cpu")[: HYBRID.devices])
    placement = Placement(mesh, sharding, PrecisionConfig())

    def find(width: int, placement: Placement) -> set[str]:
        found = find_exact_matrices(param_specs(replace(MODEL, mlp_width=width)), placement)
        return {path.rsplit("/", 2)[-1] for path in found}

    assert find(128, placement) == set()
    assert find(48, placement) == {"up", "gate"}
    assert find(48, replace(placement, sharding=ShardingConfig(3, fsdp_gradients="int4"))) == {"up", "gate"}
    assert find(48, replace(placement, sharding=ShardingConfig(3))) == set()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"fsdp_gradients": "int8"}, "sharding.fsdp_gradients"),
        ({"int8_gathers": ("fsdp",), "data_gradients": "int8"}, "sharding.int8_gathers, sharding.data_gradients"),
    ],
)
def test_the_line_of_exact_matrices_names_the_settings_that_are_given(settings: dict[str, Any], named: str) -> None:
    mesh = make_mesh(HYBRID, jax.devices("cpu")[: HYBRID.devices])
    placement = Placement(mesh, ShardingConfig(3, **settings), PrecisionConfig())
    (line,) = describe_exact_matrices(param_specs(replace(MODEL, mlp_width=48)), placement)
    assert line.startswith(f"{named}: 2 matrices move exactly (first: ")
    assert not list(describe_exact_matrices(param_specs(MODEL), placement))


def test_an_axis_that_gathers_no_weight_changes_nothing() -> None:
    """Only the named axes send codes: over data there is nothing to gather."""
    found, expected = (run(HYBRID, ShardingConfig(3, int8_gathers=axes)) for axes in (("data",), ()))
    assert found.losses == expected.losses
