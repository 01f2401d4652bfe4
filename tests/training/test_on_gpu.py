"""The step on a real GPU: what it takes of its memory, and that it learns."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
import toy
from jax.sharding import SingleDeviceSharding

from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.parallel import hlo
from jaxopt_llm.parallel.mesh import MeshConfig, make_mesh
from jaxopt_llm.parallel.precision import PrecisionConfig
from jaxopt_llm.parallel.sharding import Placement, ShardingConfig
from jaxopt_llm.training import state as training_state
from jaxopt_llm.training.lora import LoraConfig
from jaxopt_llm.training.optimizer import OptimizerConfig
from jaxopt_llm.training.program import Program, make_program
from jaxopt_llm.training.schedule import ScheduleConfig
from jaxopt_llm.training.state import TrainState
from jaxopt_llm.training.step import TrainingConfig

pytestmark = pytest.mark.gpu

ROWS, LENGTH = 8, 512
# Large enough that what the runtime takes for itself is small beside it.
MODEL = ModelConfig(width=512, layers=4, heads=8, kv_heads=4, head_dim=64, mlp_width=1536, vocabulary_size=8192)


def placement(device: jax.Device) -> Placement:
    return Placement(make_mesh(MeshConfig(), [device]), ShardingConfig(), PrecisionConfig(compute_dtype="bfloat16"))


@functools.cache
def compiled(device: jax.Device) -> tuple[Program, Any]:
    """The program and its step's executable."""
    training, optimizer = TrainingConfig(batch_size=ROWS, sequence_length=LENGTH), OptimizerConfig(learning_rate=1e-3)
    program = make_program(
        MODEL, training, optimizer, ScheduleConfig(1, 100), RematConfig("full"), LoraConfig(), placement(device)
    )
    return program, program.step.lower(program.state, program.batch).compile()


def start(device: jax.Device) -> tuple[Any, TrainState, Batch]:
    """The executable and its two arguments."""
    program, step = compiled(device)
    state = training_state.initialize(program.specs, program.optimizers, 0, placement(device))
    return step, state, jax.device_put(toy.microbatches(toy.packed(ROWS, LENGTH), 1), program.rows)


def memory(device: jax.Device) -> dict[str, int]:
    """What the device's allocator has counted, in bytes."""
    counts = device.memory_stats()
    if counts is None:
        pytest.skip(f"JAX counts no memory of a {device.platform}")
    return counts


def test_the_measured_peak_is_the_planned_one(gpu: jax.Device) -> None:
    planned = hlo.memory(compiled(gpu)[1]).peak
    before = memory(gpu)
    step, state, batch = start(gpu)
    jax.block_until_ready(step(state, batch))
    assert before["peak_bytes_in_use"] < planned, "a test before this one took more: run it alone"
    assert memory(gpu)["peak_bytes_in_use"] - before["bytes_in_use"] == pytest.approx(planned, rel=0.1)


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
    on_gpu, on_cpu = (hlo.dot_flops(compiled(device)[1].as_text()) for device in (gpu, jax.devices("cpu")[0]))
    assert on_gpu == pytest.approx(on_cpu, rel=0.02)


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
