"""Tests of initial parameters from a folder, with several placements and with adapters."""

import functools
from dataclasses import replace
from typing import Any

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.compiler import hlo, topology
from jaxopt_llm.compiler.topology import gpu_topology
from jaxopt_llm.config import (
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    PrecisionConfig,
    RematConfig,
    ScheduleConfig,
    ShardingConfig,
    TrainingConfig,
)
from jaxopt_llm.core import tree
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.linear.leaves import LoraWeight
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel import offload
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import has_compute_copy
from jaxopt_llm.run import initial_weights
from jaxopt_llm.step import state as training_state
from jaxopt_llm.step.program import Program
from jaxopt_llm.step.state import TrainState

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> huggingface.ModelFolder:
    return huggingface.open_model_folder(folders.folder(tmp_path_factory.mktemp("model") / "folder"))


# One kind of block, which compiles faster, and an empty slot in a pipeline.
UNIFORM = replace(folders.CONFIG, layers=3, pattern=("global",))


@pytest.fixture(scope="module")
def uniform(tmp_path_factory: pytest.TempPathFactory) -> huggingface.ModelFolder:
    return huggingface.open_model_folder(folders.folder(tmp_path_factory.mktemp("uniform") / "folder", UNIFORM))


def begin(folder: huggingface.ModelFolder, placement: Placement, lora: LoraConfig) -> tuple[Program, TrainState]:
    """Return a program, and its state with the parameters of the folder."""
    training = TrainingConfig(batch_size=8, sequence_length=16, accumulation=2)
    program = toy.make_program(
        folder.config, training, OptimizerConfig(), ScheduleConfig(1, 10), RematConfig(), lora, placement
    )
    given = initial_weights.read_parameters(folder, program.specs, placement)
    return program, training_state.initialize_state(program.specs, program.optimizers, 0, placement, given)


def assert_equal(found: Any, expected: Any) -> None:
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(np.asarray(one), np.asarray(other)), found, expected)


def assert_rests(program: Program, state: TrainState, placement: Placement) -> None:
    resting = training_state.state_shardings(program.specs, placement)
    jax.tree.map(lambda leaf, sharding: np.testing.assert_equal(leaf.sharding, sharding), state, resting)


@pytest.mark.parametrize(
    ("offloaded", "axes"),
    [
        (False, {"zero_stage": 3, "fsdp": 2, "tensor": 2}),
        (True, {"zero_stage": 2, "compute_dtype": "bfloat16", "data": 2, "fsdp": 2}),
        (False, {"zero_stage": 1, "compute_dtype": "bfloat16", "pipeline": 2, "fsdp": 2}),
    ],
    ids=["stage 3", "stage 2 on the host", "stage 1 in a pipeline"],
)
def test_training_begins_from_the_folder(
    offloaded: bool, axes: dict[str, Any], folder: huggingface.ModelFolder
) -> None:
    placement = replace(toy.placement(**axes), offload=OffloadConfig(optimizer=offloaded, parameters=offloaded))
    program, state = begin(folder, placement, LoraConfig())
    expected = folders.params()
    if placement.size("pipeline") > 1:
        expected = toy.on_stages(program.model.specs, expected)
    assert_equal(state.masters, expected)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.moments))
    if has_compute_copy(placement):
        assert_equal(state.compute, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), expected))
    assert_rests(program, state, placement)


ADAPTED: dict[str, tuple[LoraConfig, dict[str, Any]]] = {
    "float": (LoraConfig(rank=2), {"zero_stage": 3, "fsdp": 2, "tensor": 2}),
    "int8": (LoraConfig(rank=2, base="int8"), {"zero_stage": 3, "fsdp": 2, "tensor": 2}),
    "nf4": (LoraConfig(rank=2, base="nf4", double_quantisation=True, dora=True), {"pipeline": 2, "tensor": 2}),
    "DoRA": (LoraConfig(rank=2, dora=True), {"fsdp": 2}),
}


@pytest.mark.parametrize(
    ("base", "offloaded"),
    [
        pytest.param("float", False, marks=pytest.mark.slow),
        pytest.param("DoRA", True, marks=pytest.mark.slow),
        ("int8", False),
        ("nf4", True),
    ],
)
def test_adapters_begin_over_the_folders_weights(base: str, offloaded: bool, uniform: huggingface.ModelFolder) -> None:
    lora, axes = ADAPTED[base]
    placement = replace(toy.placement(compute_dtype="bfloat16", **axes), offload=OffloadConfig(parameters=offloaded))
    program, state = begin(uniform, placement, lora)
    specs = program.model.specs
    weights = folders.params(UNIFORM)
    if placement.size("pipeline") > 1:
        weights = toy.on_stages(leaves.unwrap_specs(specs), weights)
    wrapped = jax.jit(lambda arrays: leaves.wrap_arrays(specs, arrays, seed=0))(weights)
    trained, frozen = tree.partition(wrapped, leaves.adapter_paths(specs).__contains__)
    assert_equal(state.frozen, frozen)
    # Magnitudes are sums over devices, which differ in their last bits from sums on one device.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), state.masters, trained)
    assert_rests(program, state, placement)


class Shapes:
    """Stand-in for a folder, which returns shapes without values."""

    def lacks(self, path: str) -> bool:
        return False

    def dtype(self, path: str) -> np.dtype:
        return jnp.dtype(jnp.bfloat16)

    def read(self, path: str, spec: ParamSpec, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_a_gpu_holds_a_layer_beside_what_rests_and_draws_nothing_that_is_given(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = LoraConfig(rank=8, base=base, double_quantisation=base == "nf4", dora=True, targets=("*/mlp/down",))
    model = ModelConfig(width=512, layers=6, heads=4, kv_heads=4, head_dim=128, mlp_width=2048)
    placement = Placement(make_mesh(MeshConfig(), gpu_topology("h100", 1, 1)), ShardingConfig(), PrecisionConfig())
    training = TrainingConfig(batch_size=1, sequence_length=64, accumulation=1)
    program = toy.make_program(
        model, training, OptimizerConfig(), ScheduleConfig(1, 10), RematConfig(), lora, placement
    )
    memories: list[hlo.Memory] = []
    jit = jax.jit

    def compiled(function: Any, **settings: Any) -> Any:
        """Replace jax.jit: compile programs for the GPU, but never run them."""

        def call(*arguments: Any) -> Any:
            lowered = jit(function, **settings).lower(*arguments)
            executable = topology.compile_without_gpu(lowered)
            memories.append(hlo.read_memory(executable))
            results = zip(jax.tree.leaves(lowered.out_info), jax.tree.leaves(executable.output_shardings), strict=True)
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x, sharding in results]
            return jax.tree.unflatten(jax.tree.structure(lowered.out_info), shapes)

        return call

    monkeypatch.setattr(jax, "jit", compiled)
    monkeypatch.setattr(initial_weights, "_zeros", functools.partial(Shapes().read, ""))
    given = initial_weights.read_parameters(Shapes(), program.specs, placement)  # type: ignore[arg-type]
    coded = jax.tree.leaves(program.specs.frozen, is_leaf=leaves.is_wrapped)
    matrices = sum(isinstance(each, leaves.QuantisedWeight | LoraWeight) for each in coded)
    assert len(memories) == model.layers * matrices
    matrix = model.width * model.mlp_width
    for each in memories:
        assert each.aliased == pytest.approx(each.outputs, abs=1000)
        assert each.arguments - each.aliased < 2.01 * matrix  # a layer in the 16 bits of the folder
        assert each.temporaries < 10 * matrix  # the layer in float32 twice, for its magnitude, and its codes
    memories.clear()
    state = training_state.initialize_state(program.specs, program.optimizers, 0, placement, given)
    drawn = offload.count_resting_bytes(state) - offload.count_resting_bytes(given)
    assert sum(each.peak for each in memories) < 1.05 * drawn < 2 * matrix
