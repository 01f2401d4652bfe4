"""Plan of an engine's step on GPUs that need not exist: memory, collectives and time, read off the compiled program."""

import math
import time
from collections import Counter
from dataclasses import dataclass, replace

from jaxopt_llm.compiler import hlo, topology
from jaxopt_llm.compiler.buffers import Peak, find_peak
from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.compiler.hlo import count_convolution_flops
from jaxopt_llm.config import RematConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine.microbatches import count_rows, with_rows
from jaxopt_llm.engine.program import EngineProgram, Job, compile_fitting, make_engine_program
from jaxopt_llm.kernels.attention_auto import AttentionChoice
from jaxopt_llm.model import param
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.planning import links
from jaxopt_llm.planning.breakdown import Part, break_down_step, format_breakdown
from jaxopt_llm.planning.free_memory import GIB, count_chip_bytes
from jaxopt_llm.planning.memory import KnownShapes, format_largest
from jaxopt_llm.planning.search.roofline import Cluster
from jaxopt_llm.planning.step_plan import StepFigures, read_figures


@dataclass(frozen=True)
class EnginePlan(StepFigures):
    """Memory, collectives and time of each GPU in a step. `print(plan)` shows them as a table.

    Attributes:
        limit: bytes of a GPU that XLA may use.
        host_bytes: host memory per GPU.
        flops: FLOPs of the matmuls and convolutions of each GPU in a step, as compiled.
        rows: rows of a batch, over all GPUs.
        breakdown: parts of a step's time by a roofline; nothing is measured.
        attention: the implementations of `jaxopt_llm.attention` in the loss.
        chosen: the choice of `remat.policy auto`; "" if it was not open.
    """

    rows: int
    breakdown: tuple[Part, ...]
    attention: tuple[AttentionChoice, ...]
    chosen: str

    @property
    def step_seconds(self) -> float:
        return sum(part.seconds for part in self.breakdown)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.parameters:,} parameters on {self.hosts} × {self.gpus_per_host} {self.gpu}; "
                f"compiled in {self.compile_seconds:.1f} s with jax {self.jax}",
                *(f"attention: {choice}" for choice in self.attention),
                *([f"chosen: {self.chosen}"] if self.chosen else []),
                "",
                *self.format_memory(),
                *([f"  {'host, for each GPU':18} {self.host_bytes / GIB:9.2f} GiB"] if self.host_bytes else []),
                *(format_largest(self.largest) if self.spare < 0 else []),
                "",
                *links.format_traffic(self.collectives),
                "",
                f"matmuls and convolutions of each GPU: {self.flops / 1e12:,.4g} TFLOP, "
                f"{self.flops_seconds * 1e3:,.4g} ms at the chip's peak",
                f"speed, by a roofline of the compiled program (not measured): {self.step_seconds:,.4g} s a step, "
                f"{self.rows / self.step_seconds:,.4g} rows/s",
                "",
                *format_breakdown(self.breakdown),
            ]
        )


def plan_engine(job: Job, gpu: str, gpus: int | None, gpus_per_host: int, rows: int | None) -> EnginePlan:
    """Compile the step for given GPUs and measure it; see Engine.plan."""
    job = _resize(job, gpus, rows)
    return plan_job(job, find_cluster(gpu, job.config.mesh.devices, gpus_per_host))


def find_cluster(gpu: str, gpus: int, gpus_per_host: int) -> Cluster:
    """Return the hosts that have these GPUs.

    Raises:
        InputError: the GPU is unknown, or the hosts would not be whole.
    """
    gpu, gpus_per_host = gpu.lower(), min(gpus_per_host, gpus)
    if gpu not in CHIPS:
        raise InputError(f"plan: gpu={gpu} is unknown; choose one of {', '.join(sorted(CHIPS))}")
    if gpus < 1:
        raise InputError(f"plan: gpus={gpus}: must be at least 1")
    if gpus_per_host < 1 or gpus % gpus_per_host:
        raise InputError(f"plan: {gpus} GPUs are not a whole number of hosts with {gpus_per_host}; set gpus_per_host")
    return Cluster(gpu, gpus // gpus_per_host, gpus_per_host)


def plan_job(job: Job, cluster: Cluster) -> EnginePlan:
    """Compile the step of a job, whose mesh has as many devices as the cluster, and measure it."""
    chip, gpus_per_host = cluster.chip, cluster.gpus_per_host
    mesh = make_mesh(job.config.mesh, topology.gpu_topology(cluster.gpu, cluster.hosts, gpus_per_host))
    clock = time.perf_counter()
    limit = count_chip_bytes(chip)
    written = make_engine_program(job, mesh)
    fitting = compile_fitting(job, written, limit, _compile_step, count_peak=lambda peak: peak.memory.peak)
    program, peak = fitting.program, fitting.compiled
    seconds = time.perf_counter() - clock
    text = str(peak.compiled.as_text())
    known = KnownShapes.from_specs(program.specs, program.placement, RematConfig("none"))
    collectives = tuple(links.sum_traffic(hlo.list_collectives(text, mesh), mesh, chip, gpus_per_host))
    flops = Counter(hlo.count_dot_flops_by_dtype(text)) + Counter(count_convolution_flops(text))
    return EnginePlan(
        **read_figures(program, cluster, peak, known, flops),
        parameters=param.count_parameters(program.model.specs),
        rows=count_rows(job.example, job.replicated),
        compile_seconds=seconds,
        collectives=collectives,
        breakdown=break_down_step(text, collectives, chip),
        attention=tuple(dict.fromkeys(program.model.attention.choices.values())),
        chosen=fitting.chosen,
    )


def _compile_step(program: EngineProgram) -> Peak:
    return find_peak(topology.lower_without_gpu(program.step, program.state, program.batch))


def _resize(job: Job, gpus: int | None, rows: int | None) -> Job:
    """Return the job on another number of GPUs, which `fsdp` divides, and with another number of rows."""
    mesh = job.config.mesh
    if gpus is not None:
        others = replace(mesh, fsdp=1).devices
        if gpus % others:
            raise InputError(f"plan: {gpus} GPUs are not divisible by the other axes of the mesh, {others}")
        job = replace(job, config=replace(job.config, mesh=replace(mesh, fsdp=gpus // others)))
    job = change_rows(job, rows)
    if job.in_one_piece:
        return job
    rows = count_rows(job.example, job.replicated)
    mesh, accumulation = job.config.mesh, job.config.training.accumulation
    parts = accumulation * mesh.batch_shards
    if rows % parts:
        raise InputError(
            f"plan: a batch of {rows} rows is not divisible by training.accumulation={accumulation} × "
            f"{parts // accumulation} GPUs along data and fsdp; give a number of rows that is, such as "
            f"rows={math.ceil(rows / parts) * parts} (--rows)"
        )
    return job


def change_rows(job: Job, rows: int | None) -> Job:
    """Return the job with batches of another number of rows; None keeps it."""
    if rows is None:
        return job
    if rows < 1:
        raise InputError(f"plan: rows={rows}: must be at least 1")
    if job.in_one_piece:
        raise InputError(f"plan: rows={rows}, but the arrays of the example have no common rows; leave it out")
    training = replace(job.config.training, batch_size=rows)
    example = with_rows(job.example, rows, job.replicated)
    return replace(job, example=example, config=replace(job.config, training=training))
