"""What ZeRO and tensor parallelism promise, read off programs compiled for eight H200s.

Bytes per layer are the difference between programs of 16 and of 8 layers: what is outside the stacks cancels.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.model import param
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.parallel import hlo
from jaxopt_llm.parallel.hlo import Collective
from jaxopt_llm.parallel.mesh import MeshConfig, make_mesh
from jaxopt_llm.parallel.precision import PrecisionConfig
from jaxopt_llm.parallel.sharding import Placement, ShardingConfig
from jaxopt_llm.parallel.topology import gpu_topology
from jaxopt_llm.training.lora import LoraConfig
from jaxopt_llm.training.optimizer import OptimizerConfig
from jaxopt_llm.training.program import Program, make_program
from jaxopt_llm.training.schedule import ScheduleConfig
from jaxopt_llm.training.step import TrainingConfig

DEVICES = 8
# Rows of a microbatch; so few queries are attended to in one part, which halves the time to compile.
ROWS, SEQUENCE, WIDTH, VOCABULARY = 8, 128, 1024, 7_680
RANK = 16  # of adapters, where there are any
SHARE = (DEVICES - 1) / DEVICES  # of an array, sent by each device of a ring that gathers or scatters it

pytestmark = pytest.mark.core


@dataclass(frozen=True)
class Compiled:
    program: Program
    memory: hlo.Memory
    collectives: tuple[Collective, ...]
    text: str

    def wire_bytes(self, *axes: str) -> float:
        """Sent by each device in one step, over these axes or, by default, over any."""
        wanted = [each for each in self.collectives if not axes or each.axes == axes]
        return sum(each.wire_bytes * each.times for each in wanted)


@functools.cache
def compiled(
    layers: int,
    mesh: MeshConfig,
    stage: int,
    remat: str = "full",
    accumulation: int = 1,
    reduce: str = "float32",
    tied: bool = True,
    adapters_over: str | None = None,
    sequence_parallel: bool = False,
    switches: tuple[tuple[str, Any], ...] = (),
) -> Compiled:
    model = ModelConfig(
        width=WIDTH,
        layers=layers,
        heads=8,
        kv_heads=8,
        head_dim=128,
        mlp_width=4096,
        vocabulary_size=VOCABULARY,
        tied_head=tied,
    )
    model = replace(model, **dict(switches))
    precision = PrecisionConfig(reduce_dtype=reduce)
    placement = Placement(make_mesh(mesh, gpu_topology("h200")), ShardingConfig(stage, sequence_parallel), precision)
    lora = LoraConfig(rank=RANK, base=adapters_over) if adapters_over else LoraConfig()
    training = TrainingConfig(batch_size=ROWS * accumulation, sequence_length=SEQUENCE, accumulation=accumulation)
    program = make_program(model, training, OptimizerConfig(), ScheduleConfig(), RematConfig(remat), lora, placement)
    # Matmuls as cuBLAS calls, not Triton fusions: it compiles in half the time and moves the same bytes.
    options = {"xla_gpu_enable_triton_gemm": False}
    executable = program.step.lower(program.state, program.batch).compile(compiler_options=options)
    text = executable.as_text()
    return Compiled(program, hlo.memory(executable), hlo.collectives(text, placement.mesh), text)


def layer_parameters() -> int:
    specs = compiled(8, MeshConfig(fsdp=8), 3).program.specs.masters
    return param.count(param.layer_specs(specs["segment_0"]))


def per_layer(measure, *arguments, **settings) -> float:
    deep, shallow = (measure(compiled(layers, *arguments, **settings)) for layers in (16, 8))
    return (deep - shallow) / 8


FSDP = MeshConfig(fsdp=DEVICES)
TENSOR = MeshConfig(tensor=DEVICES)


@pytest.mark.parametrize(("stage", "per_parameter"), [(0, 12), (1, 2 + 12 / 8), (2, 2 + 12 / 8), (3, 12 / 8)])
def test_resting_bytes(stage: int, per_parameter: float) -> None:
    step = compiled(8, FSDP, stage)
    assert step.memory.arguments == pytest.approx(param.count(step.program.specs.masters) * per_parameter, rel=0.02)
    batch = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(step.program.batch)) / DEVICES
    assert step.memory.aliased >= step.memory.arguments - batch - 4096, "the state is not updated in place"


GRADIENT = {"float32": 4, "bfloat16": 2}


@pytest.mark.parametrize(
    ("stage", "accumulation", "reduce"),
    [
        *((stage, 1, "float32") for stage in (0, 1, 2, 3)),
        (3, 3, "float32"),
        (1, 1, "bfloat16"),
        *(
            pytest.param(*more, marks=pytest.mark.slow)
            for more in ((1, 3, "float32"), (2, 3, "float32"), (3, 1, "bfloat16"))
        ),
    ],
)
def test_bytes_moved(stage: int, accumulation: int, reduce: str) -> None:
    moved = per_layer(Compiled.wire_bytes, FSDP, stage, accumulation=accumulation, reduce=reduce)
    gradient, gather = GRADIENT[reduce] * SHARE, 2 * SHARE  # bytes per parameter of one reduce-scatter, one gather
    expected = {
        0: 2 * gradient,
        1: gradient + gather,
        2: accumulation * gradient + gather,
        3: accumulation * (gradient + 2 * gather),
    }[stage]
    assert moved == pytest.approx(expected * layer_parameters(), rel=0.02)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_stage_3_holds_one_layer_at_a_time(remat: str) -> None:
    step = compiled(8, FSDP, 3, remat)
    one_layer, one_table = 2 * layer_parameters(), 2 * VOCABULARY * WIDTH
    gathers = [each for each in step.collectives if each.kind == "all-gather"]
    assert {dtype for each in gathers for dtype in each.dtypes} == {"bf16"}
    assert max(each.array_bytes for each in gathers) <= max(one_layer, one_table) + 2 * WIDTH
    stacks = {spec.shape for spec in jax.tree.leaves(step.program.specs.masters["segment_0"]) if len(spec.shape) > 2}
    assert not stacks & {each.shape for each in hlo.array_shapes(step.text)}, "a gathered stack is kept"


@pytest.mark.parametrize(
    ("stage", "accumulation", "reduce", "per_parameter"),
    [
        (0, 1, "float32", 4 + 1),  # the largest leaf, a quarter of the layer, beside its sum over devices
        (1, 1, "float32", 4 + 4 / 8),
        (1, 1, "bfloat16", 2 + 4 / 8),
        (2, 1, "float32", 4 / 8),
        (2, 3, "float32", 4 / 8 + 4 / 8),
        (3, 1, "float32", 4 / 8),
        (3, 3, "float32", 4 / 8 + 4 / 8),
    ],
)
def test_peak_per_layer(stage: int, accumulation: int, reduce: str, per_parameter: float) -> None:
    """A layer more costs its block's input, and its gradient: whole up to stage 1, a shard from stage 2 on, beside the
    sum of those of the microbatches before; and nothing gathered."""
    peak = per_layer(lambda step: step.memory.temporaries, FSDP, stage, accumulation=accumulation, reduce=reduce)
    block_input = ROWS // DEVICES * SEQUENCE * WIDTH * 2
    assert peak <= 1.1 * (block_input + per_parameter * layer_parameters())


@pytest.mark.parametrize(
    ("stage", "tied"),
    [(2, True), (3, False), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((2, False), (3, True)))],
)
def test_tables_are_reduced_once_a_microbatch(stage: int, tied: bool) -> None:
    """Outside the stacks: each table is reduced once, tied or not, and gathered for each of its uses in stage 3."""
    table, tables = VOCABULARY * WIDTH, 1 if tied else 2

    def of_tables(kind: str) -> float:
        """All but what eight layers add to it."""

        def total(step: Compiled) -> int:
            return sum(each.array_bytes * each.times for each in step.collectives if each.kind == kind)

        return total(compiled(8, FSDP, stage, tied=tied)) - 8 * per_layer(total, FSDP, stage, tied=tied)

    moved = {kind: of_tables(kind) for kind in ("reduce-scatter", "all-gather", "all-reduce")}
    gathers = 2 if stage == 3 else tables
    assert moved["reduce-scatter"] == pytest.approx(4 * table * tables, rel=0.02)
    assert moved["all-gather"] == pytest.approx(2 * table * gathers, rel=0.02)
    assert moved["all-reduce"] < 1e-3 * table


@pytest.mark.parametrize(("remat", "reductions"), [("none", 4), ("full", 5)])
def test_tensor_parallelism_reduces_as_megatron_does(remat: str, reductions: int) -> None:
    """Shoeybi et al. 2019 (arXiv:1909.08053): two all-reduces forward, two backward. Recomputation repeats the
    attention's; the MLP's is the block's output, which no backward needs."""
    activation = ROWS * SEQUENCE * WIDTH * 2

    def count(step: Compiled) -> int:
        found = [each for each in step.collectives if each.axes == ("tensor",) and each.array_bytes == activation]
        assert {each.kind for each in found} == {"all-reduce"}
        assert {dtype for each in found for dtype in each.dtypes} == {"bf16"}
        return sum(each.times for each in found)

    assert per_layer(count, TENSOR, 0, remat) == reductions
    moved = per_layer(Compiled.wire_bytes, TENSOR, 0, remat)
    assert moved == pytest.approx(reductions * 2 * SHARE * activation, rel=0.02), "something else is moved"


@pytest.mark.parametrize("mesh", [TENSOR, MeshConfig(fsdp=4, tensor=2)])
def test_split_vocabulary_is_never_whole(mesh: MeshConfig) -> None:
    step = compiled(8, mesh, 3 if mesh.fsdp > 1 else 0)
    logits = ROWS // mesh.fsdp * SEQUENCE * VOCABULARY  # elements, of one device's rows
    whole = [each for each in hlo.array_shapes(step.text) if VOCABULARY in each.shape]
    assert all(math.prod(each.shape) < logits for each in whole)
    part = VOCABULARY // mesh.tensor
    assert any(
        math.prod(each.shape) == logits // mesh.tensor and part in each.shape for each in hlo.array_shapes(step.text)
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_program_does_not_grow_with_depth(stage: int) -> None:
    deep, shallow = (hlo.instruction_count(compiled(layers, FSDP, stage).text) for layers in (16, 8))
    assert deep <= 1.01 * shallow  # XLA may copy a buffer or two more


def test_hybrid_sharding_reduces_between_replicas_once_a_step() -> None:
    """Inside a node a reduce-scatter for every microbatch, between nodes one all-reduce of the shard."""
    mesh = MeshConfig(data=2, fsdp=4)
    between = per_layer(lambda step: step.wire_bytes("data"), mesh, 3, accumulation=3)
    inside = per_layer(lambda step: step.wire_bytes("fsdp"), mesh, 3, accumulation=3)
    assert per_layer(Compiled.wire_bytes, mesh, 3, accumulation=3) == pytest.approx(between + inside)
    assert between == pytest.approx(2 * 1 / 2 * 4 * layer_parameters() / 4, rel=0.02)
    assert inside == pytest.approx(3 * 3 / 4 * (4 + 2 * 2) * layer_parameters(), rel=0.02)


# ---- Adapters over a frozen base.

BASES = ("float", "int8")


def adapter_parameters() -> int:
    """Of one layer: every matrix's sides times the rank."""
    return RANK * (4 * (WIDTH + 8 * 128) + 3 * (WIDTH + 4096))


def base_bytes(base: str) -> tuple[int, int]:
    """Of one layer, and outside the stacks: bf16, or a byte per code and four per channel; norms and table in bf16."""
    matrices, channels = layer_parameters() - 2 * WIDTH, 4 * 1024 + 2 * 4096 + WIDTH
    layer = 2 * matrices if base == "float" else matrices + 4 * channels
    return layer + 2 * 2 * WIDTH, 2 * (VOCABULARY * WIDTH + WIDTH)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resting_bytes_of_adapters_over_a_frozen_base(stage: int, base: str) -> None:
    """The base rests once, without masters or moments, divided in stage 3; adapters rest as any parameter does."""
    step = compiled(8, FSDP, stage, adapters_over=base)
    assert param.count(step.program.specs.masters) == 8 * adapter_parameters()
    layer, outer = base_bytes(base)
    per_adapter = {0: 12, 1: 2 + 12 / 8, 2: 2 + 12 / 8, 3: 12 / 8}[stage]
    expected = (8 * layer + outer) / (8 if stage == 3 else 1) + 8 * adapter_parameters() * per_adapter
    assert step.memory.arguments == pytest.approx(expected, rel=0.002)
    batch = 5 * ROWS * SEQUENCE * 4 / DEVICES
    assert step.memory.aliased >= step.memory.arguments - batch - 4096, "the state is not updated in place"


@pytest.mark.parametrize("stage, base", [(0, "float"), (1, "float"), (2, "float"), (3, "float"), (3, "int8")])
def test_only_adapters_have_gradients_to_move(stage: int, base: str) -> None:
    moved = per_layer(Compiled.wire_bytes, FSDP, stage, adapters_over=base)
    gradient, gather = 4 * SHARE * adapter_parameters(), 2 * SHARE * adapter_parameters()
    expected = {
        0: 2 * gradient,
        1: gradient + gather,
        2: gradient + gather,
        3: gradient + 2 * gather + 2 * SHARE * base_bytes(base)[0],
    }[stage]
    assert moved == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_an_int8_base_is_gathered_as_codes_a_layer_at_a_time(remat: str) -> None:
    step = compiled(8, FSDP, 3, remat, adapters_over="int8")
    inside = [each for each in step.collectives if each.kind == "all-gather" and each.times > 1]
    codes = sum(each.array_bytes for each in inside if "s8" in each.dtypes)
    # With them come scales and adapters, of which a recomputed product reads its own a third time.
    assert 2 * (layer_parameters() - 2 * WIDTH) <= codes <= 2 * base_bytes("int8")[0] + 6 * adapter_parameters()
    # What else is gathered is smaller than any matrix: scales, norms, adapters.
    assert sum(each.array_bytes for each in inside if "s8" not in each.dtypes) < WIDTH * WIDTH
    stacks = {spec.shape for spec in jax.tree.leaves(step.program.specs.frozen) if spec.dtype == np.int8}
    assert not stacks & {each.shape for each in hlo.array_shapes(step.text)}, "a gathered stack is kept"
    # Nor does widening the codes cost more than 16 bits from the start (jax 0.11.2: 1.7% more).
    assert step.memory.temporaries <= 1.05 * compiled(8, FSDP, 3, remat, adapters_over="float").memory.temporaries


@pytest.mark.parametrize(
    ("stage", "per_adapter"),
    [
        # Small leaves are summed over devices as one: each is there summed, transposed, in the message and out of it.
        (0, 4 * 4),
        (3, 4 / 8),
    ],
)
def test_a_layer_more_costs_its_input_and_its_adapters_gradients(stage: int, per_adapter: float) -> None:
    peak = per_layer(lambda step: step.memory.temporaries, FSDP, stage, adapters_over="float")
    block_input = ROWS // DEVICES * SEQUENCE * WIDTH * 2
    assert peak <= 1.1 * (block_input + per_adapter * adapter_parameters())
