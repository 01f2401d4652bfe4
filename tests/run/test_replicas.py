"""Tests of the check for silent corruption: flipped bits are found, on the device that holds them, and nothing else."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import PartitionSpec
from test_loop import tiny

from jaxopt_llm import train as command
from jaxopt_llm.config import (
    Config,
    LoraConfig,
    MeshConfig,
    OffloadConfig,
    OptimizerConfig,
    RematConfig,
    ScheduleConfig,
    TrainingConfig,
)
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import StateCorrupted
from jaxopt_llm.observe.preemption import Preemption
from jaxopt_llm.run import replicas, workload
from jaxopt_llm.step import step
from jaxopt_llm.step.state import TrainState, initialize_state

TRIALS = 20


@functools.cache
def make_program(zero_stage: int = 0, **axes: int) -> tuple[Any, Any]:
    placement = toy.placement(zero_stage, **axes)
    training = TrainingConfig(batch_size=8, sequence_length=8)
    sections = OptimizerConfig(), ScheduleConfig(warmup_steps=0), RematConfig(), LoraConfig()
    return toy.make_program(toy.UNIFORM, training, *sections, placement), placement


def make_state(zero_stage: int = 0, **axes: int) -> TrainState:
    program, placement = make_program(zero_stage, **axes)
    return initialize_state(program.specs, program.optimizers, 0, placement)


def flip(leaf: jax.Array, device: int, element: int, bit: int) -> jax.Array:
    """Return the array with one bit flipped in the part of one device."""
    parts = []
    for shard in leaf.addressable_shards:
        values = np.array(shard.data)
        if shard.device.id == device:
            words = values.reshape(-1).view(f"u{values.dtype.itemsize}")
            words[element % words.size] ^= words.dtype.type(1 << (bit % (8 * values.dtype.itemsize)))
        parts.append(jax.device_put(values, shard.device))
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)


def flip_in_state(state: TrainState, names: tuple[str, ...], random: np.random.Generator) -> tuple[TrainState, int]:
    """Flip a random bit of a random leaf of the named trees on a random device. Return the state and the device."""
    paths = [path for path, _ in tree.leaves_with_path(state) if path.split("/")[0] in names]
    chosen, device = random.choice(paths), int(random.integers(jax.device_count()))
    element, bit = int(random.integers(2**20)), int(random.integers(32))

    def change(path: str, leaf: jax.Array) -> jax.Array:
        return flip(leaf, device, element, bit) if path == chosen else leaf

    return tree.map_with_path(change, state), device


def find(state: TrainState) -> dict[str, list[int]]:
    found = replicas.find_differences(state, replicas.compute_sums(state))
    return {path: devices.tolist() for path, devices in found.items()}


@pytest.mark.parametrize("names", [("masters",), ("moments",)])
def test_a_flipped_bit_is_found_on_its_device(names: tuple[str, ...]) -> None:
    random, state = np.random.default_rng(0), make_state(data=8)
    assert not find(state)
    for _ in range(TRIALS):
        changed, device = flip_in_state(state, names, random)
        assert [*find(changed).values()] == [[device]]


def test_of_two_copies_both_devices_are_named() -> None:
    """The state is divided over `fsdp`, and copied over `data`."""
    state = make_state(3, data=2, fsdp=4)
    assert replicas.has_replicas(state) and not find(state)
    changed, device = flip_in_state(state, ("masters",), np.random.default_rng(1))
    (found,) = find(changed).values()
    assert device in found and len(found) in (2, 8)  # a norm's scale has a copy on every device
    if len(found) == 2:
        assert found[1] - found[0] == 4


def test_a_state_without_copies_is_known() -> None:
    assert not replicas.has_replicas(make_state(3, fsdp=8))
    assert not replicas.has_replicas(make_state(1, fsdp=8))  # the compute copy has copies, the masters do not


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int32", "bool", "float8_e4m3fn", "int4"])
def test_a_sum_changes_with_every_bit_and_with_the_order(dtype: str) -> None:
    values = jnp.asarray(np.random.default_rng(0).integers(0, 2, (3, 5)), dtype)
    sums = {int(replicas.sum_bits(values))}
    for index in range(15):
        changed = values.reshape(-1).at[index].set(1 - values.reshape(-1)[index]).reshape(3, 5)
        sums.add(int(replicas.sum_bits(changed)))
    assert len(sums) == 16
    swapped = jnp.asarray([[1, 0], [0, 1]], dtype)
    assert replicas.sum_bits(swapped) != replicas.sum_bits(swapped[::-1])


@functools.cache
def make_faults() -> tuple[np.ndarray, ...]:
    """Return the device and the bit of each trial. The lowest bits are left out: rounding hides them."""
    random = np.random.default_rng(0)
    return tuple(random.integers(low, high, TRIALS) for low, high in ((0, 8), (8, 31)))


def make_damaging_program(damage: Any, zero_stage: int, **axes: int) -> Any:
    """Return a program whose step t changes a gradient, by `damage(gradient, t)`: another leaf for each t."""

    def update(differentiate: Any, *rest: Any) -> Any:
        def differentiate_wrongly(state: TrainState, *rest: Any) -> Any:
            found = differentiate(state, *rest)
            gradients, structure = jax.tree.flatten(found.gradients)
            wrong = [
                jnp.where(state.step % len(gradients) == index, damage(gradient, state.step), gradient)
                for index, gradient in enumerate(gradients)
            ]
            return dataclasses.replace(found, gradients=jax.tree.unflatten(structure, wrong))

        return original(differentiate_wrongly, *rest)

    original = step.update_after_backward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "update_after_backward", update)
        return make_program.__wrapped__(zero_stage, **axes)[0]


def flip_largest(gradient: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the gradient with flipped bits in its largest element.

    Most gradients of the embedding are 0, and with one bit flipped they are too small to change anything.
    """
    words = jax.lax.bitcast_convert_type(gradient, jnp.uint32).reshape(-1)
    largest = jnp.argmax(jnp.abs(gradient.reshape(-1)))
    words = words.at[largest].set(words[largest] ^ mask)
    return jax.lax.bitcast_convert_type(words, jnp.float32).reshape(gradient.shape)


def copy_state(state: TrainState) -> TrainState:
    """Return a copy that a step may donate."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding, may_alias=False), state)


def make_batch(program: Any) -> Any:
    return jax.device_put(toy.microbatches(toy.packed(8, 8), 1), program.batch_sharding)


def test_a_bit_flipped_in_a_gradient_on_one_device_is_found_after_its_step() -> None:
    """In step t a bit is flipped after the sum over the devices, as trial t says."""
    devices, bits = map(jnp.asarray, make_faults())
    placement = toy.placement(0, data=8)

    def damage_on_device(gradient: jax.Array, trial: jax.Array) -> jax.Array:
        bit = jnp.uint32(1) << bits[trial].astype("uint32")
        return flip_largest(gradient, jnp.where(jax.lax.axis_index("data") == devices[trial], bit, 0))

    damage = placement.shard_map(damage_on_device, (PartitionSpec(), PartitionSpec()), PartitionSpec())
    program = make_damaging_program(damage, 0, data=8)
    for trial in range(TRIALS):
        state = make_state(data=8)
        new, _ = program.step(dataclasses.replace(state, step=state.step + trial), make_batch(program))
        found = find(new)
        assert found and all(each == [int(devices[trial])] for each in found.values()), trial


def test_of_two_runs_one_with_a_flipped_gradient_is_found_where_nothing_is_copied() -> None:
    """Check each trial at step 2 of a check every 2 steps: its first run is wrong, or its second one."""
    _, bits = make_faults()
    masks = jnp.asarray(1 << bits, jnp.uint32)
    right, _ = make_program(3, fsdp=8)
    wrong = make_damaging_program(lambda gradient, trial: flip_largest(gradient, masks[trial]), 3, fsdp=8)
    batch, reports, start = make_batch(right), [], make_state(3, fsdp=8)
    check = replicas.ReplicaCheck(2, lambda *report: reports.append(report))
    for trial in range(TRIALS):
        state = copy_state(start)
        state = dataclasses.replace(state, step=state.step + trial)
        runs = iter([right.step, wrong.step] if trial % 2 else [wrong.step, right.step])

        def run_next(*arguments: Any, runs: Any = runs) -> Any:
            return next(runs)(*arguments)

        with pytest.raises(StateCorrupted, match="step 2: .*two runs of this step differ"):
            check.step(2, run_next, state, batch)
    assert [step for step, *_ in reports] == [2] * TRIALS
    check.step(2, right.step, start, batch)


EVERY = 3


def test_a_bit_flipped_in_the_state_is_found_at_the_next_check() -> None:
    """In trial t a bit of the largest element of a leaf is flipped after step t % EVERY, of a parameter or a moment.

    Steps between the flip and the check compute with it.
    """
    program, _ = make_program(data=8)
    batch, (devices, bits), start = make_batch(program), make_faults(), make_state(data=8)
    for trial, (device, bit) in enumerate(zip(devices.tolist(), bits.tolist(), strict=True)):
        reports: list[tuple[int, str, list[int]]] = []
        check = replicas.ReplicaCheck(EVERY, lambda *report, to=reports: to.append(report))
        state, step = copy_state(start), 0
        with pytest.raises(StateCorrupted):
            for step in range(1, 2 * EVERY + 1):
                state, _ = check.step(step, program.step, state, batch)
                if step == 1 + trial % EVERY:
                    state = flip_leaf(state, ("masters", "moments")[trial % 2], trial // 2, device, bit)
        found = EVERY if 1 + trial % EVERY < EVERY else 2 * EVERY
        assert step == found, trial
        ((reported, detail, _),) = reports
        assert reported == found and detail.startswith(f"device {device} of process 0: copies"), trial


def flip_leaf(state: TrainState, name: str, number: int, device: int, bit: int) -> TrainState:
    """Flip a bit of the largest element of a leaf of a tree on a device."""
    paths = [path for path, _ in tree.leaves_with_path(state) if path.split("/")[0] == name]

    def change(path: str, leaf: jax.Array) -> jax.Array:
        if path != paths[number % len(paths)]:
            return leaf
        return flip(leaf, device, int(np.argmax(np.abs(np.asarray(leaf)))), bit)

    return tree.map_with_path(change, state)


def make_config(directory: Path, mesh: MeshConfig, every: int) -> Config:
    directory.parent.mkdir(exist_ok=True)
    config = tiny(directory)
    return dataclasses.replace(
        config,
        mesh=mesh,
        run=dataclasses.replace(config.run, check_replicas=every),
        checkpoint=dataclasses.replace(config.checkpoint, every=2),
    )


def run(config: Config) -> list[tuple[int, str, str]]:
    """Train, and return the events but for checkpoints, which are complete some time after their step."""
    with Preemption() as preemption:
        command.train(config, preemption)
    return read_events(config)


def read_events(config: Config) -> list[tuple[int, str, str]]:
    lines = (Path(config.run.directory) / "events.jsonl").read_text().splitlines()
    events = [(each["step"], each["event"], each.get("detail", "")) for each in map(json.loads, lines)]
    return [event for event in events if event[1] != "checkpoint"]


def read_losses(config: Config) -> list[float]:
    lines = (Path(config.run.directory) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def plant(monkeypatch: pytest.MonkeyPatch, at: int) -> list[int]:
    """Flip a bit of a parameter after the `at`-th call of the step. Return the list that will name its device."""
    original, calls, flipped = workload.DecoderWorkload.step, [], []

    def step(self: Any, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        state, metrics = original(self, state, batch)
        calls.append(at)
        if len(calls) == at:
            state, device = flip_in_state(state, ("masters",), np.random.default_rng(at))
            flipped.append(device)
        return state, metrics

    monkeypatch.setattr(workload.DecoderWorkload, "step", step)
    return flipped


def test_a_run_discards_a_corrupted_step_and_continues_from_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks are rare: it is the checkpoint of step 4, due after the fault in step 3, that is not written."""
    config = make_config(tmp_path / "run", MeshConfig(data=8), 100)
    with monkeypatch.context() as patch:
        flipped = plant(patch, 3)
        with pytest.raises(StateCorrupted, match=r"step 4: device \d of process 0: copies of the same values differ"):
            run(config)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]
    (step, event, detail), fault = read_events(config)[-2:]
    assert (step, event, fault[:2]) == (4, "corruption", (4, "fault"))
    assert detail.startswith(f"device {flipped[0]} of process 0: ")
    assert run(config)[-2:] == [(2, "resume", ""), (5, "end", "")]


@pytest.mark.slow
def test_without_copies_a_step_runs_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without a fault is not disturbed, and its losses do not change."""
    configs = [make_config(tmp_path / name / "run", MeshConfig(fsdp=8), every) for name, every in (("a", 0), ("b", 2))]
    assert all(run(config)[-1][1] == "end" for config in configs)
    assert read_losses(configs[0]) == read_losses(configs[1])
    config = make_config(tmp_path / "c" / "run", MeshConfig(fsdp=8), 2)
    plant(monkeypatch, 3)  # the second run of step 2
    with pytest.raises(StateCorrupted, match="step 2: .*two runs of this step differ"):
        run(config)


def test_a_state_without_replicas_is_copied_for_its_check() -> None:
    divided, replicated = (make_program(3, **axes)[0].state for axes in ({"fsdp": 8}, {"data": 2, "fsdp": 4}))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(make_state(3, fsdp=8)))
    assert replicas.count_copied_bytes(2, divided) == held > 0
    assert replicas.count_copied_bytes(0, divided) == replicas.count_copied_bytes(2, replicated) == 0


@pytest.mark.parametrize(("stage", "axes", "copies"), [(3, {"data": 2, "fsdp": 4}, False), (1, {"fsdp": 8}, True)])
def test_a_state_in_host_memory_is_judged_like_any_other(stage: int, axes: dict[str, int], copies: bool) -> None:
    """An abstract state in host memory has shardings over an abstract mesh."""
    placement = dataclasses.replace(toy.placement(stage, **axes), offload=OffloadConfig(optimizer=True))
    training = TrainingConfig(batch_size=8, sequence_length=8)
    sections = OptimizerConfig(), ScheduleConfig(warmup_steps=0), RematConfig(), LoraConfig()
    program = toy.make_program(toy.UNIFORM, training, *sections, placement)
    assert replicas.copies_state(2, program.state) is copies
