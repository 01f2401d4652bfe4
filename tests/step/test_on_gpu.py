"""Tests of the step on a real GPU: its memory use, and that it learns."""

import functools
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import toy
from jax.sharding import SingleDeviceSharding

from jaxopt_llm.checkpoint.native import integrity
from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.compiler import hlo
from jaxopt_llm.config import (
    CheckpointConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RematConfig,
    ScheduleConfig,
    ShardingConfig,
    TrainingConfig,
)
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.parallel import offload
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step import state as training_state
from jaxopt_llm.step.program import Program
from jaxopt_llm.step.state import TrainState

pytestmark = pytest.mark.gpu

ROWS, LENGTH = 8, 512
# Large compared with the memory that the runtime needs itself.
MODEL = ModelConfig(width=512, layers=4, heads=8, kv_heads=4, head_dim=64, mlp_width=1536, vocabulary_size=8192)


def placement(device: jax.Device) -> Placement:
    return Placement(make_mesh(MeshConfig(), [device]), ShardingConfig(), PrecisionConfig(compute_dtype="bfloat16"))


@functools.cache
def compiled(device: jax.Device) -> tuple[Program, Any]:
    """Return the program and the executable of its step."""
    training, optimizer = TrainingConfig(batch_size=ROWS, sequence_length=LENGTH), OptimizerConfig(learning_rate=1e-3)
    program = toy.make_program(
        MODEL, training, optimizer, ScheduleConfig(1, 100), RematConfig("full"), LoraConfig(), placement(device)
    )
    return program, program.step.lower(program.state, program.batch).compile()


def start(device: jax.Device) -> tuple[Any, TrainState, Batch]:
    """Return the step, which is compiled, and its two arguments."""
    program, executable = compiled(device)
    state = training_state.initialize_state(program.specs, program.optimizers, 0, placement(device))

    def step(state: TrainState, batch: Batch) -> Any:
        return executable(state, batch, program.step.placed)

    return step, state, jax.device_put(toy.microbatches(toy.packed(ROWS, LENGTH), 1), program.batch_sharding)


def memory(device: jax.Device) -> dict[str, int]:
    """Return the counters of the device's allocator, in bytes."""
    counts = device.memory_stats()
    if counts is None:
        pytest.skip(f"JAX does not count the memory of a {device.platform} device")
    return counts


# XLA's allocator does not split a free block that is at most this much larger than the request.
UNSPLIT = 128 * 2**20


def test_the_measured_peak_is_the_planned_one(gpu: jax.Device) -> None:
    planned = hlo.read_memory(compiled(gpu)[1]).peak
    before = memory(gpu)
    step, state, batch = start(gpu)
    jax.block_until_ready(step(state, batch))
    assert before["peak_bytes_in_use"] < planned, "an earlier test used more memory; run this test alone"
    assert planned <= memory(gpu)["peak_bytes_in_use"] - before["bytes_in_use"] < planned + UNSPLIT


def test_steps_happen_in_place(gpu: jax.Device) -> None:
    step, state, batch = start(gpu)
    first, (state, _) = state, step(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    jax.block_until_ready(state)
    after_one = memory(gpu)["bytes_in_use"]
    for _ in range(3):
        state, _ = step(state, batch)
    jax.block_until_ready(state)
    assert memory(gpu)["bytes_in_use"] <= after_one + 4096  # a step's metrics


def test_twenty_steps_lower_the_loss(gpu: jax.Device) -> None:
    step, state, batch = start(gpu)
    losses = []
    for _ in range(20):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] - 2


def test_the_gpus_program_has_the_matmuls_of_the_cpus(gpu: jax.Device) -> None:
    on_gpu, on_cpu = (hlo.count_dot_flops(compiled(device)[1].as_text()) for device in (gpu, jax.devices("cpu")[0]))
    assert on_gpu == pytest.approx(on_cpu, rel=0.02)


def test_steps_go_on_while_their_state_in_host_memory_is_saved(
    gpu: jax.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, sync_and_hash = threading.Event(), integrity.sync_and_hash
    monkeypatch.setattr(integrity, "sync_and_hash", lambda *arguments: (gate.wait(60), sync_and_hash(*arguments))[1])
    on_host = SingleDeviceSharding(gpu, memory_kind=offload.HOST)
    on_device = on_host.with_memory_kind("device")

    def add_one(x: jax.Array) -> jax.Array:
        return jax.device_put(jax.device_put(x, jax.memory.Space.Device) + 1, jax.memory.Space.Host)

    step = jax.jit(add_one, donate_argnums=0, out_shardings=on_host)
    x = jax.device_put(jax.device_put(np.arange(2**22, dtype=np.float32), on_device), on_host)
    with Checkpoints(tmp_path, CheckpointConfig(keep=9)) as checkpoints:
        for index in range(2):
            checkpoints.save(index, {"moments": {"x": x}}, {})
            x = step(x)
        jax.block_until_ready(x)
        gate.set()
    abstract = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_host)
    with Checkpoints(tmp_path) as checkpoints:
        for index in range(2):
            saved = checkpoints.restore(index, moments={"x": abstract})["moments"]["x"]
            np.testing.assert_array_equal(saved, np.arange(2**22) + np.float32(index))


def test_an_array_goes_to_the_hosts_memory_and_back(gpu: jax.Device) -> None:
    on_device = SingleDeviceSharding(gpu)
    values = np.arange(2**24, dtype=np.float32)
    x = jax.block_until_ready(jax.device_put(values, on_device))
    on_host = jax.block_until_ready(jax.device_put(x, on_device.with_memory_kind("pinned_host")))
    assert on_host.sharding.memory_kind == "pinned_host"
    double = jax.jit(lambda x: 2 * jax.device_put(x, jax.memory.Space.Device), out_shardings=on_device)
    np.testing.assert_array_equal(double(on_host), 2 * values)
    np.testing.assert_array_equal(jax.device_put(on_host, on_device), values)
    with_both = memory(gpu)["bytes_in_use"]
    x.delete()
    assert with_both - memory(gpu)["bytes_in_use"] == values.nbytes
