"""Steps of a model of 8 or 16 layers, compiled for GPUs: what tests read of their programs.

Bytes per layer are the difference between programs of 16 and of 8 layers: what is outside the stacks cancels.
"""

import functools
import re
from dataclasses import dataclass, replace
from typing import Any

import toy

from jaxopt_llm.compiler import buffers, hlo, topology
from jaxopt_llm.compiler.hlo import Collective
from jaxopt_llm.compiler.topology import gpu_topology
from jaxopt_llm.config import (
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    PipelineConfig,
    PrecisionConfig,
    RematConfig,
    ScheduleConfig,
    ShardingConfig,
    TrainingConfig,
)
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.execution.stage_layout import EVEN
from jaxopt_llm.model import param
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.offload import NO_OFFLOAD
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step.program import Program

DEVICES = 8
# Rows of a microbatch; so few queries are attended to in one part, which halves the time to compile.
ROWS, SEQUENCE, WIDTH, VOCABULARY = 8, 128, 1024, 7_680
HEADS = 8
LOSS_CHUNK = 64  # tokens: fewer than any device has
RANK = 16  # of adapters, where there are any
SHARE = (DEVICES - 1) / DEVICES  # of an array, sent by each device of a ring that gathers or scatters it


@dataclass(frozen=True)
class Compiled:
    program: Program
    memory: hlo.Memory
    collectives: tuple[Collective, ...]
    text: str
    alive: int | None  # bytes of the temporaries that are alive at the peak, without what lies unused between them

    def wire_bytes(self, *axes: str) -> float:
        """Sent by each device in one step, over these axes or, by default, over any."""
        wanted = [each for each in self.collectives if not axes or each.axes == axes]
        return sum(each.wire_bytes * each.times for each in wanted)


@functools.cache
def compiled(
    layers: int,
    mesh: MeshConfig,
    stage: int,
    remat: str | tuple[str, ...] = "full",
    accumulation: int = 1,
    reduce: str = "float32",
    tied: bool = True,
    adapters_over: str | None = None,
    sequence_parallel: bool = False,
    switches: tuple[tuple[str, Any], ...] = (),
    offload: OffloadConfig = NO_OFFLOAD,
    remat_offload: tuple[str, ...] = (),
    state_dtype: str = "float32",
    in_backward: bool = False,
    matmul: str = "compute_dtype",
    outlier_threshold: float = 0.0,
    exempt: int = 0,
    pipelined: PipelineConfig = EVEN,
    attention: str = "xla",
    context_exchange: str = "ring",
    expert_exchange: str = "auto",
    sharded: tuple[tuple[str, Any], ...] = (),
    shape: tuple[int, int] = (ROWS, SEQUENCE),
    unroll: str = "none",
    listed: bool = False,
) -> Compiled:
    """Compile a step. switches, sharded: further settings of the model and of its sharding. listed: whether the
    temporaries are listed, of which `alive` is the sum."""
    model = ModelConfig(
        width=WIDTH,
        layers=layers,
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=128,
        mlp_width=4096,
        vocabulary_size=VOCABULARY,
        tied_head=tied,
    )
    model = replace_fields(model, dict(switches))
    precision = PrecisionConfig(
        compute_dtype="float16" if reduce == "float16" else "bfloat16",
        reduce_dtype=reduce,
        matmul=matmul,
        outlier_threshold=outlier_threshold,
        compute_dtype_layers=exempt,
    )
    placement = Placement(
        make_mesh(mesh, gpu_topology("h200", gpus_per_host=mesh.devices)),
        replace(ShardingConfig(stage, sequence_parallel, context_exchange, expert_exchange), **dict(sharded)),
        precision,
        offload,
    )
    lora = LoraConfig()
    if adapters_over:
        lora = LoraConfig(rank=RANK, base=adapters_over, double_quantisation=adapters_over == "nf4")
    training = TrainingConfig(
        batch_size=shape[0] * accumulation,
        sequence_length=shape[1],
        accumulation=accumulation,
        loss_chunk=LOSS_CHUNK,
        attention=attention,
        unroll=unroll,
    )
    optimizer = OptimizerConfig(
        state_dtype=state_dtype, in_backward=in_backward, clip_norm=0 if in_backward else OptimizerConfig.clip_norm
    )
    policy = RematConfig(remat, offload=remat_offload)
    of = (model, training, optimizer, ScheduleConfig(), policy, lora, placement)
    program = toy.make_program(*of, pipelined=pipelined)
    # Matmuls as cuBLAS calls, not Triton fusions: it compiles in half the time and moves the same bytes.
    options = {} if matmul == "fp8" else {"xla_gpu_enable_triton_gemm": False}  # with fp8 the step says so itself
    lowered = topology.lower_without_gpu(program.step, program.state, program.batch)
    if listed:
        peak = buffers.find_peak(lowered, lambda it, dump: topology.compile_without_gpu(it, options | dump))
        executable, alive = peak.compiled, sum(each.bytes for each in peak.temporaries)
    else:
        executable, alive = topology.compile_without_gpu(lowered, options), None
    text = executable.as_text()
    return Compiled(program, hlo.read_memory(executable), hlo.list_collectives(text, placement.mesh), text, alive)


def layer_parameters() -> int:
    specs = compiled(8, MeshConfig(fsdp=8), 3).program.specs.masters
    return param.count_parameters(param.period_specs(specs["segment_0"]))


def per_layer(measure, *arguments, **settings) -> float:
    deep, shallow = (measure(compiled(layers, *arguments, **settings)) for layers in (16, 8))
    return (deep - shallow) / 8


FSDP = MeshConfig(fsdp=DEVICES)


def assert_read_from_the_last(text: str) -> None:
    """What a backward slices out of host memory: either a kernel's, which is told where, or a copy that counts down.
    XLA of jax 0.10.2 would count up (openxla/xla#46231)."""
    computations = [each for each in text.split("\n\n") if "S(5)} parameter(0)" in each and "transpose(jvp" in each]
    strides = re.findall(r'byte_stride":"(-?)\d+"', "".join(computations))
    assert computations and all(sign == "-" for sign in strides)
