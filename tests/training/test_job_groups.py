"""Groups that are jobs of their own, in threads with an outer server, against DiLoCo in NumPy."""

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
import toy

from jaxopt_llm.config import (
    Config,
    GroupsConfig,
    MeshConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
    TrainingConfig,
)
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.distributed.process_group import SINGLE_PROCESS
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.model import Params
from jaxopt_llm.outer.server import OuterServer, open_listener
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.training import job_groups
from jaxopt_llm.training import program as training_program
from jaxopt_llm.training.guard import judge_step
from jaxopt_llm.training.job_groups import JobGroup, find_format
from jaxopt_llm.training.local_steps import sharding_within
from jaxopt_llm.training.program import Program
from jaxopt_llm.training.schedule_position import advance_position
from jaxopt_llm.training.setup import resolve_length
from jaxopt_llm.training.state import TrainState, initialize_state

MODEL = replace(toy.UNIFORM, width=64, heads=2, kv_heads=2, head_dim=32, mlp_width=128)
GROUPS, ROWS, LENGTH, LOCAL, STEPS = 2, 4, 16, 3, 7


def make_config(server: str, mesh: MeshConfig, **settings: Any) -> Config:
    config = Config(
        model=MODEL,
        training=TrainingConfig(batch_size=ROWS, sequence_length=LENGTH, local_steps=LOCAL, steps=STEPS),
        # An epsilon under which rounding noise of a zero gradient does not become a full step.
        optimizer=OptimizerConfig(
            learning_rate=1e-2, epsilon=1e-3, clip_norm=0.5, outer_learning_rate=0.7, outer_momentum=0.9
        ),
        schedule=ScheduleConfig(1, 10),
        precision=PrecisionConfig(compute_dtype="float32"),
        mesh=mesh,
        groups=GroupsConfig(server=(server,), count=GROUPS),
    )
    return replace_fields(config, settings)


def place(config: Config) -> tuple[Program, Placement]:
    return place_once(replace(config, groups=GroupsConfig(("-:1",))))


@functools.cache
def place_once(config: Config) -> tuple[Program, Placement]:
    mesh = make_mesh(config.mesh, jax.devices("cpu")[: config.mesh.devices])
    placement = Placement(mesh, sharding_within(config), config.precision)
    return training_program.make_program(config, placement), placement


def read_batch(group: int, step: int, accumulation: int = 1) -> Batch:
    rows = jax.tree.map(lambda x: np.split(x, GROUPS)[group], toy.packed(GROUPS * ROWS, LENGTH, step))
    return toy.microbatches(rows, accumulation)


def to_host(leaves: Params) -> Params:
    return jax.tree.map(np.array, leaves)


class Group:
    """A group, as a run would train it."""

    def __init__(self, config: Config, index: int) -> None:
        self.config = replace_fields(config, {"groups.index": index})
        self.program, placement = place(self.config)
        setup: Any = SimpleNamespace(
            config=self.config,
            processes=SINGLE_PROCESS,
            program=self.program,
            placement=placement,
            data=SimpleNamespace(corpus=SimpleNamespace(sha256="corpus")),
            directory="runs/group",
        )
        self.said: list[str] = []
        self.state: TrainState = initialize_state(self.program.specs, self.program.optimizers, 0, placement)
        self.group, self.at = JobGroup(setup, self.said.append, lambda: False), 0

    def join(self) -> None:
        self.state, self.at = self.group.join(self.state, self.at)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            self.at += 1
            batch = read_batch(self.config.groups.index, self.at, self.config.training.accumulation)
            self.state, metrics = self.program.step(self.state, jax.device_put(batch, self.program.batch_sharding))
            losses.append(float(metrics["loss"]))
            self.state, ahead = self.group.after_step(self.state, self.at)
            self.at = self.at if ahead is None else ahead
        return losses


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    listener, ended = open_listener(("127.0.0.1", 0)), threading.Event()

    def run() -> None:
        with listener, OuterServer(listener, tmp_path, GROUPS, 60.0, b"") as running:
            running.serve(ended.is_set)

    thread = threading.Thread(target=run)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    ended.set()
    thread.join()


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


@functools.cache
def train_by_hand(delay: int, steps: int = STEPS) -> tuple[list[Params], list[list[float]]]:
    """Train each group on one device, with outer steps in NumPy. Return the masters and the losses of each group."""
    config = make_config("-:1", MeshConfig())
    program, placement = place(config)
    outer = config.optimizer
    states = [initialize_state(program.specs, program.optimizers, 0, placement) for _ in range(GROUPS)]
    masters = to_host(states[0].masters)
    momentum, snapshots, due = jax.tree.map(np.zeros_like, masters), [masters] * GROUPS, -1
    losses: list[list[float]] = [[] for _ in range(GROUPS)]
    for step in range(1, steps + 1):
        for group, state in enumerate(states):
            batch = jax.device_put(read_batch(group, step), program.batch_sharding)
            states[group], metrics = program.step(state, batch)
            losses[group].append(float(metrics["loss"]))
        if step % LOCAL == 0:
            snapshots, due = [to_host(state.masters) for state in states], min(step + delay, steps)
            changes = [jax.tree.map(np.subtract, masters, each) for each in snapshots]
            change = jax.tree.map(lambda *each: np.mean(each, axis=0), *changes)
            momentum = jax.tree.map(lambda m, c: outer.outer_momentum * m + c, momentum, change)
            masters = jax.tree.map(
                lambda x, c, m: x - outer.outer_learning_rate * (c + outer.outer_momentum * m),
                *(masters, change, momentum),
            )
        if step == due:
            for group, state in enumerate(states):
                own = jax.tree.map(
                    lambda x, new, old: x + (new - old), to_host(state.masters), masters, snapshots[group]
                )
                states[group] = replace(
                    state, masters=jax.device_put(own, jax.tree.map(lambda x: x.sharding, state.masters))
                )
    return [to_host(state.masters) for state in states], losses


def assert_close(one: Params, other: Params, tolerance: float) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance), one, other)


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        pytest.param(MeshConfig(), {}, marks=pytest.mark.core),
        (MeshConfig(), {"groups.delay": 1}),
        (MeshConfig(data=2, fsdp=2), {"groups.delay": 2}),
        (MeshConfig(fsdp=2), {"sharding.zero_stage": 2}),
        pytest.param(MeshConfig(data=2), {"sharding.optimizer_over_data": True}, marks=pytest.mark.slow),
        pytest.param(MeshConfig(pipeline=2, tensor=2), {"training.accumulation": 2}, marks=pytest.mark.slow),
    ],
)
def test_groups_train_as_by_hand(mesh: MeshConfig, settings: dict[str, Any], server: str) -> None:
    """On every mesh: masters rest in pieces, in copies, and with a compute copy."""
    config = make_config(server, mesh, **settings)
    groups = [Group(config, index) for index in range(GROUPS)]
    together([group.join for group in groups])
    losses = together([functools.partial(group.train, STEPS) for group in groups])
    masters, expected = train_by_hand(config.groups.delay)
    np.testing.assert_allclose(losses, expected, rtol=2e-4)
    for group, by_hand in zip(groups, masters, strict=True):
        if mesh.pipeline == 1:  # a pipeline stacks layers by stage
            assert_close(to_host(group.state.masters), by_hand, 2e-3)


@pytest.mark.parametrize(
    "setting", [{"sharding.data_gradients": "int4"}, {"precision.reduce_dtype": "bfloat16"}], ids=("int4", "bfloat16")
)
def test_after_an_outer_step_all_groups_have_the_same_bits(server: str, setting: dict[str, str]) -> None:
    config = make_config(server, MeshConfig(), **setting)
    groups = [Group(config, index) for index in range(GROUPS)]
    together([group.join for group in groups])
    together([functools.partial(group.train, LOCAL) for group in groups])
    first, second = (to_host(group.state.masters) for group in groups)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    exact = train_by_hand(0, LOCAL)[0][0]
    assert_close(first, exact, 0.02)
    assert any(np.abs(a - b).max() > 1e-5 for a, b in zip(*map(jax.tree.leaves, (first, exact)), strict=True))


def test_a_group_that_comes_back_goes_on_where_the_others_are(server: str) -> None:
    config = make_config(server, MeshConfig())
    stays, goes = (Group(config, index) for index in range(GROUPS))
    together([stays.join, goes.join])
    with goes.group:
        pass  # it ends
    stays.train(LOCAL)
    again = Group(config, 1)
    again.join()
    assert again.at == LOCAL and int(again.state.step) == LOCAL
    assert "takes the outer masters of step 3" in again.said[0]
    jax.tree.map(np.testing.assert_array_equal, to_host(again.state.masters), to_host(stays.state.masters))
    # Its learning rate is that of the step, and no step of it is an outlier of a history that is empty.
    losses = together([functools.partial(each.train, LOCAL) for each in (stays, again)])
    assert np.isfinite(losses).all() and int(again.state.guard["updates"]) == 2 * LOCAL
    jax.tree.map(np.testing.assert_array_equal, to_host(again.state.masters), to_host(stays.state.masters))


def test_a_group_whose_server_is_gone_trains_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxopt_llm.outer.client.CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(job_groups, "REMIND_ROUNDS", 2)
    group = Group(make_config("127.0.0.1:9", MeshConfig()), 0)
    with group.group:
        group.join()
        assert len(group.train(2 * LOCAL)) == 2 * LOCAL
    *lines, last = group.said
    assert [line.split()[:2] for line in lines] == [["step", "0"], ["step", str(2 * LOCAL)]]
    assert all("no answer of groups.server 127.0.0.1:9 (" in line and "trains by itself" in line for line in lines)
    assert last.startswith("runs/group: the run ends without an outer step: no answer of groups.server 127.0.0.1:9 (")


def test_a_group_that_has_had_an_answer_does_not_end_without_an_outer_step(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxopt_llm.outer.client.CONNECT_SECONDS", 0.1)
    groups = [Group(make_config(server, MeshConfig()), index) for index in range(GROUPS)]
    together([group.join for group in groups])
    together([functools.partial(group.train, LOCAL) for group in groups])
    with groups[0].group as group:
        groups[0].group._client._address = ("127.0.0.1", 9)  # type: ignore[union-attr]
        group._client._close()  # type: ignore[union-attr]
        groups[0].train(LOCAL)
    assert "no answer of groups.server" in groups[0].said[-1]
    assert not any("without an outer step" in line for line in groups[0].said)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"training.local_steps": 1}, "groups.server needs rounds of several steps: set --training.local-steps above"),
        ({"groups.delay": LOCAL}, "groups.delay=3 must be below training.local_steps=3: set a smaller --groups.delay"),
        ({"groups.index": 2}, "groups.index=2 must be below groups.count=2: groups are numbered from 0"),
        ({"groups.server": ("here",)}, "groups.server: here: must be host:port"),
        pytest.param({"groups.server": ("a" * 64 + ":7000",)}, ":7000: must be host:port", id="long host"),
        ({"groups.server": ("here:70000",)}, "groups.server: here:70000: the port must be 1 to 65535"),
        ({"training.ema_decay": 0.9}, "groups.server does not support training.ema_decay=0.9: set --training.ema-dec"),
        ({"offload.optimizer": True}, "groups.server does not support offload.optimizer=True: set --offload.optimizer"),
        ({"training.on_spike": "rollback"}, "groups.server does not support training.on_spike=rollback: set --train"),
        ({"training.steps": 2}, "training.local_steps=3 exceeds training.steps=2, so no outer step follows: set"),
    ],
)
def test_what_groups_do_not_support_is_refused(settings: dict[str, Any], says: str) -> None:
    (problem,) = make_config("host:1", MeshConfig(), **settings).problems()
    assert says in problem


def test_data_gradients_are_the_format_between_groups_only() -> None:
    config = make_config("host:1", MeshConfig(data=2), **{"sharding.data_gradients": "int4"})
    assert sharding_within(config).data_gradients == "exact"
    assert find_format(config) == "int4"
    config = replace_fields(config, {"sharding.data_gradients": "exact"})
    formats = [
        find_format(replace_fields(config, {"precision.reduce_dtype": each})) for each in ("float32", "bfloat16")
    ]
    assert formats == ["exact", "bfloat16"]
    of_program = replace_fields(config, {"groups.server": (), "sharding.data_gradients": "int4"})
    assert sharding_within(of_program).data_gradients == "int4"


def test_an_epoch_is_one_of_all_groups_together() -> None:
    config = make_config("host:1", MeshConfig(), **{"training.steps": 0, "training.epochs": 3.0})
    assert resolve_length(config, rows=80).training.steps == 3 * 80 // (GROUPS * ROWS)
    assert resolve_length(replace_fields(config, {"groups.server": ()}), rows=80).training.steps == 3 * 80 // ROWS


def test_no_step_after_a_jump_is_an_outlier_of_an_empty_history() -> None:
    config = make_config("-:1", MeshConfig())
    program, placement = place(config)
    state = advance_position(initialize_state(program.specs, program.optimizers, 0, placement), 500)
    assert (int(state.step), int(state.guard["updates"])) == (500, 500)
    positions = [leaf.count for leaf in jax.tree.leaves(state.moments, is_leaf=is_position) if is_position(leaf)]
    assert positions and all((np.asarray(each) == 500).all() for each in positions)
    good, guard = judge_step(state.guard, np.float32(5), np.float32(3), np.bool_(False), outliers=10, spikes=1.5)
    assert good and int(guard["updates"]) == 501


def is_position(leaf: Any) -> bool:
    return isinstance(leaf, optax.ScaleByScheduleState)
