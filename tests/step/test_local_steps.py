"""Local steps and outer steps, against single devices and arithmetic in NumPy."""

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import toy
from marks import slow

from jaxopt_llm.config import (
    Config,
    LoraConfig,
    MeshConfig,
    OffloadConfig,
    OptimizerConfig,
    PrecisionConfig,
    RematConfig,
    ScheduleConfig,
    TrainingConfig,
)
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core import tree
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel import offload
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step import local_steps
from jaxopt_llm.step import program as training_program
from jaxopt_llm.step.program import Program
from jaxopt_llm.step.state import GROUP_FIELDS, TrainState, checkpoint_specs, initialize_state

MODEL = replace(toy.UNIFORM, width=64, heads=2, kv_heads=2, head_dim=32, mlp_width=128)
EXPERTS = replace_fields(MODEL, {"moe.experts": 4, "moe.expert_width": 32})
ROWS, LENGTH, LOCAL, STEPS = 24, 16, 3, 7


def make_config(mesh: MeshConfig, **settings: Any) -> Config:
    config = Config(
        model=MODEL,
        training=TrainingConfig(batch_size=ROWS, sequence_length=LENGTH, local_steps=LOCAL),
        # An epsilon under which rounding noise of a zero gradient does not become a full step; a clip that always acts.
        optimizer=OptimizerConfig(
            learning_rate=1e-2, epsilon=1e-3, clip_norm=0.5, outer_learning_rate=0.7, outer_momentum=0.9
        ),
        schedule=ScheduleConfig(1, 10),
        precision=PrecisionConfig(compute_dtype="float32"),
        remat=RematConfig("full"),
        mesh=mesh,
    )
    return replace_fields(config, settings)


def place(config: Config) -> tuple[Program, Placement]:
    mesh = make_mesh(config.mesh, jax.devices("cpu")[: config.mesh.devices])
    placement = Placement(mesh, config.sharding, config.precision)
    return training_program.make_program(config, placement), placement


def begin(config: Config) -> tuple[Program, Placement, TrainState]:
    program, placement = place(config)
    state = local_steps.initialize_groups(program.specs, program.optimizers, 0, placement)
    return program, placement, state


def read_batch(config: Config, step: int) -> Batch:
    return toy.microbatches(toy.packed(ROWS, LENGTH, step), config.training.accumulation)


def train(config: Config, steps: int = STEPS) -> tuple[TrainState, list[float]]:
    program, _, state = begin(config)
    losses = []
    for step in range(1, steps + 1):
        batch = jax.device_put(read_batch(config, step), program.batch_sharding)
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
        if local_steps.ends_round(config, step):
            state = program.outer_step(state)
    return state, losses


def to_host(leaves: Params) -> Params:
    return jax.tree.map(np.array, leaves)


@functools.cache
def train_by_hand(groups: int, **settings: Any) -> tuple[Params, list[Params], list[float]]:
    """Train each group on one device, and average in NumPy. Return the masters, those of the groups, and the losses."""
    config = make_config(MeshConfig(), **{"training.local_steps": 1, "training.batch_size": ROWS // groups, **settings})
    program, _ = place(config)
    outer = make_config(MeshConfig()).optimizer
    states = [begin(config)[2] for _ in range(groups)]
    masters = to_host(states[0].masters)
    momentum, losses = jax.tree.map(np.zeros_like, masters), []
    for step in range(1, STEPS + 1):
        batch, of_step = read_batch(config, step), []
        for group, state in enumerate(states):
            # Within each microbatch the rows of a group are consecutive.
            own = jax.tree.map(lambda x, group=group: np.split(x, groups, axis=1)[group], batch)
            states[group], metrics = program.step(state, jax.device_put(own, program.batch_sharding))
            of_step.append(float(metrics["loss"]))
        losses.append(float(np.mean(of_step)))
        if step % LOCAL == 0:
            parts = [jax.tree.map(np.subtract, masters, to_host(state.masters)) for state in states]
            change = jax.tree.map(lambda *each: np.mean(each, axis=0), *parts)
            momentum = jax.tree.map(lambda m, c: outer.outer_momentum * m + c, momentum, change)
            masters = jax.tree.map(
                lambda x, c, m: x - outer.outer_learning_rate * (c + outer.outer_momentum * m),
                *(masters, change, momentum),
            )
            states = [replace(state, masters=jax.device_put(masters, jax.devices("cpu")[0])) for state in states]
    return masters, [to_host(state.masters) for state in states], losses


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        pytest.param(MeshConfig(data=2, fsdp=4), {}, marks=pytest.mark.core),
        (MeshConfig(data=3), {"training.accumulation": 2}),
        *slow(
            (MeshConfig(data=2, fsdp=2, tensor=2), {"sharding.zero_stage": 0}),
            (MeshConfig(data=2, context=2), {"sharding.context_exchange": "all_to_all"}),
            (MeshConfig(data=2, fsdp=2, expert=2), {"model": EXPERTS, "sharding.expert_exchange": "gather"}),
            (MeshConfig(data=2, fsdp=2), {"lora": LoraConfig(rank=4)}),
        ),
    ],
)
def test_groups_train_by_themselves_and_are_averaged(mesh: MeshConfig, settings: dict[str, Any]) -> None:
    kept = {name: value for name, value in settings.items() if not name.startswith("sharding")}
    masters, groups, losses = train_by_hand(mesh.data, **kept)
    state, found = train(make_config(mesh, **settings))
    assert found == pytest.approx(losses, rel=1e-5)
    assert toy.distance(state.masters, masters) < 1e-5
    for group, expected in enumerate(groups):
        own = jax.tree.map(lambda x, group=group: x[group], state.groups["masters"])
        assert toy.distance(own, expected) < 1e-5
    assert toy.distance(groups[0], groups[1]) > 1e-4, "the groups do not differ between outer steps"


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"sharding.data_gradients": "int8"}, 0.01),
        ({"sharding.data_gradients": "int4"}, 0.2),
        ({"precision.reduce_dtype": "bfloat16"}, 0.01),
    ],
    ids=["int8", "int4", "bfloat16"],
)
def test_changes_in_fewer_bits(settings: dict[str, Any], most: float) -> None:
    """The first outer step differs by the rounding of the changes; all groups continue from the same masters.

    In bfloat16, the gradients within a group are rounded, too.
    """
    mesh = MeshConfig(data=2, fsdp=4)
    exact, coded = (train(make_config(mesh, **each), LOCAL)[0] for each in ({}, settings))
    start = begin(make_config(mesh))[2]
    moved, expected = (
        jax.tree.map(np.subtract, to_host(each.masters), to_host(start.masters)) for each in (coded, exact)
    )
    assert 1e-4 < toy.distance(moved, expected) < most
    for leaf, of_groups in zip(jax.tree.leaves(coded.masters), jax.tree.leaves(coded.groups["masters"]), strict=True):
        np.testing.assert_array_equal(np.asarray(of_groups), np.broadcast_to(np.asarray(leaf), of_groups.shape))


@pytest.mark.slow
def test_a_group_gathers_its_weights_as_codes() -> None:
    """`plan --search --allow` proposes both settings together."""
    mesh = MeshConfig(data=2, fsdp=4)
    exact, coded = (train(make_config(mesh, **{"sharding.int8_gathers": axes}), 1)[1][0] for axes in ((), ("fsdp",)))
    assert 1e-7 < abs(coded / exact - 1) < 1e-3


def test_state_of_groups_is_divided_over_them() -> None:
    """A device has the state of its own group, and a part of the outer momentum."""
    _, _, state = begin(make_config(MeshConfig(data=2, fsdp=4)))

    def share(leaves: tree.Tree) -> float:
        arrays = [leaf for leaf in jax.tree.leaves(leaves) if leaf.ndim > 2]
        return sum(x.addressable_shards[0].data.size for x in arrays) / sum(x.size for x in arrays)

    assert share(state.groups["masters"]) == share(state.groups["moments"]) == 1 / 8
    assert share(state.moments) == 1 / 8
    assert share(state.masters) == 1 / 4


def test_a_step_that_one_group_skips_is_a_step_of_the_others() -> None:
    """The gradients of group 1 overflow: it keeps its masters, and halves its own loss scale."""
    precision = PrecisionConfig(compute_dtype="float16")
    config = make_config(MeshConfig(data=2), **{"precision": precision})
    program, _, state = begin(config)
    scales = jax.device_put(np.array([1024, 2.0**100], np.float32), state.groups["loss_scale"]["scale"].sharding)
    groups = state.groups | {"loss_scale": state.groups["loss_scale"] | {"scale": scales}}
    before = to_host(state.groups["masters"])
    batch = jax.device_put(read_batch(config, 1), program.batch_sharding)
    state, metrics = program.step(replace(state, groups=groups), batch)

    def moved(group: int) -> bool:
        pairs = zip(*map(jax.tree.leaves, (state.groups["masters"], before)), strict=True)
        return any(np.any(np.asarray(new)[group] != old[group]) for new, old in pairs)

    assert moved(0) and not moved(1)
    assert np.asarray(state.groups["guard"]["updates"]).tolist() == [1, 0]
    assert np.asarray(state.groups["loss_scale"]["scale"]).tolist() == [1024, 2.0**99]
    assert (int(metrics["skipped"]), bool(metrics["overflow"]), float(metrics["loss_scale"])) == (1, False, 1024)
    assert int(metrics["skipped_in_a_row"]) == 0


@pytest.mark.slow
def test_dropout_of_adapters_differs_between_groups() -> None:
    """Two groups that get the same rows have other losses only because of their masks."""
    lora = LoraConfig(rank=4, dropout=0.5)
    config = make_config(MeshConfig(data=2), **{"lora": lora})
    program, _, state = begin(config)
    batch = jax.tree.map(lambda x: np.concatenate([x[:, : ROWS // 2]] * 2, axis=1), read_batch(config, 1))
    for _ in range(2):  # B is zero before the first step
        state, _ = program.step(state, jax.device_put(batch, program.batch_sharding))
    pairs = [np.asarray(leaf) for leaf in jax.tree.leaves(state.groups["masters"])]
    assert any(np.any(leaf[0] != leaf[1]) for leaf in pairs)


def test_groups_begin_with_the_whole_state_of_a_run_without_them() -> None:
    config = make_config(MeshConfig(data=2, fsdp=2))
    program, placement = place(config)
    one = initialize_state(program.specs.one_group, program.optimizers, 0, placement)
    one = replace(
        one, **{name: jax.tree.map(lambda leaf: leaf + 3, getattr(one, name)) for name in ("moments", "guard")}
    )
    expected = {name: to_host(getattr(one, name)) for name in GROUP_FIELDS}
    state = local_steps.begin_groups(one, program.specs, placement)
    for group in range(2):
        found = jax.tree.map(lambda x, group=group: np.array(x[group]), state.groups)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(fsdp=2), MeshConfig(pipeline=2)])
def test_merged_groups_have_the_mean_of_the_masters_and_the_rest_of_group_0(mesh: MeshConfig) -> None:
    """Also the counts of steps and the guard, on which the schedule and the skipped steps depend."""
    state, _ = train(make_config(MeshConfig(data=2)))
    groups = to_host(state.groups)
    program, placement = place(make_config(mesh, **{"training.local_steps": 1}))
    specs = checkpoint_specs(program.specs)
    abstract = local_steps.abstract_groups(local_steps.repeat_specs(specs, 2), 2, placement)
    read = jax.tree.map(lambda leaf, target: jax.device_put(leaf, target.sharding), groups, abstract)
    merged = to_host(local_steps.merge_groups(read, specs, placement))
    expected = {name: jax.tree.map(lambda leaf: leaf[0], groups[name]) for name in GROUP_FIELDS if name in specs}
    expected["masters"] = jax.tree.map(lambda leaf: leaf.mean(axis=0), groups["masters"])
    jax.tree.map(np.testing.assert_array_equal, merged, expected)
    assert any(np.any(leaf[0] != leaf[1]) for leaf in jax.tree.leaves(groups["moments"]))


@pytest.mark.parametrize("mesh", [MeshConfig(pipeline=2), MeshConfig(fsdp=4), MeshConfig(pipeline=2, data=2)])
@pytest.mark.parametrize("stage", [0, 3])
def test_all_devices_divide_the_groups_that_a_run_merges(mesh: MeshConfig, stage: int) -> None:
    program, placement = place(make_config(mesh, **{"training.local_steps": 1, "sharding.zero_stage": stage}))
    placement = replace(placement, offload=OffloadConfig(optimizer=True))
    specs = local_steps.repeat_specs(checkpoint_specs(program.specs), 4)
    leaves = jax.tree.leaves(local_steps.abstract_groups(specs, 4, placement))
    whole = sum(math.prod(leaf.shape) for leaf in leaves)
    of_device = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    assert of_device == pytest.approx(whole / mesh.devices, rel=0.01)
    assert {leaf.sharding.memory_kind for leaf in leaves} == {offload.HOST}
