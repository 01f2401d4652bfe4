"""Plan of a training step: its memory, traffic, FLOPs and speed, read off the program compiled for given GPUs.

It also has the size of a checkpoint, the time between two, and the speed of a run.
"""

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxopt_llm.compiler import hlo, topology
from jaxopt_llm.compiler.buffers import Peak, find_peak
from jaxopt_llm.compiler.chips import USUAL_LINKS, Chip, LinkRates, seconds_at_peak
from jaxopt_llm.config import Config, MeshConfig, ShardingConfig, fields
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens.prepared import read_stored
from jaxopt_llm.distributed.runtime import MEMORY_FRACTION
from jaxopt_llm.execution import scan
from jaxopt_llm.execution.decode import MAX_ROWS
from jaxopt_llm.kernels.attention_auto import AttentionChoice
from jaxopt_llm.model import flops
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.moe import exchange
from jaxopt_llm.parallel.mesh import make_abstract_mesh, make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.planning import links
from jaxopt_llm.planning.advice import Advice, advise
from jaxopt_llm.planning.breakdown import HOST_COPIES, KERNELS, Part, break_down_step, format_breakdown
from jaxopt_llm.planning.exchanges import FIELD, resolve_context_exchange
from jaxopt_llm.planning.free_memory import GIB, choose_unit, count_chip_bytes, format_bytes
from jaxopt_llm.planning.memory import KnownShapes, LiveArray, Memory, find_largest, format_kinds, sum_by_kind
from jaxopt_llm.planning.search import roofline
from jaxopt_llm.planning.search.attention_cost import resolve_attention
from jaxopt_llm.planning.search.grouped_rate import describe_rates
from jaxopt_llm.planning.search.report import format_flags
from jaxopt_llm.planning.search.roofline import Cluster
from jaxopt_llm.planning.search.workload import predict_work
from jaxopt_llm.planning.settings_choice import (
    Choice,
    choose_settings,
    list_candidates,
    list_choices,
)
from jaxopt_llm.run.directory import stores_frozen_weights
from jaxopt_llm.step.program import Program, StepProgram, StoredTeacher, compute_utilisation, make_program
from jaxopt_llm.step.state import StateSpecs, checkpoint_specs

# Smallest and largest ratio of the measured time of a step to the planned one, over the steps in
# benchmarks/results/nvidia-h200-steps.json.
MEASURED_RATIOS = (1.03, 1.10)


@dataclass(frozen=True)
class Speed:
    """Speed of a run by arithmetic; nothing is measured.

    Attributes:
        step_seconds: sum of the breakdown.
        tokens_per_second: of all GPUs together, with padding.
        mfu: model FLOPs per second divided by the chip's peak, with causal attention, as `train` reports it.
        days: time of all steps of the run, without evaluations and checkpoints; None if epochs determine the steps.
        steps: steps of the run; 0 if epochs determine them.
        search_step_seconds: the same step by the arithmetic with which `--search` ranks settings.
        assumptions: rates, and what the estimate leaves out.
    """

    step_seconds: float
    tokens_per_second: float
    mfu: float
    days: float | None
    steps: int
    search_step_seconds: float
    assumptions: tuple[str, ...]
    breakdown: tuple[Part, ...]


def compute_speed(
    config: Config, chip: Chip, breakdown: tuple[Part, ...], mfu_per_token: float, work: roofline.Work
) -> Speed:
    """Return the speed of a run.

    Args:
        mfu_per_token: MFU at one token per second.
        work: the step's work as `--search` counts it, with the compiled FLOPs and transfers.
    """
    training = config.training
    attention = resolve_attention(config, chip.compute_capability).training.attention
    seconds = sum(part.seconds for part in breakdown)
    tokens_per_second = training.batch_size * training.sequence_length / seconds
    by_search = roofline.compute_step_time(work, chip, config.precision.compute_dtype).total
    return Speed(
        step_seconds=seconds,
        tokens_per_second=tokens_per_second,
        mfu=mfu_per_token * tokens_per_second,
        days=training.steps * seconds / 86_400 if training.steps else None,
        steps=training.steps,
        search_step_seconds=by_search,
        assumptions=list_assumptions(chip, attention, breakdown, work),
        breakdown=breakdown,
    )


def list_assumptions(chip: Chip, attention: str, breakdown: Sequence[Part], work: roofline.Work) -> tuple[str, ...]:
    """Return the rates that the step's time assumes, and what it leaves out. The last line is what it leaves out.

    attention: its implementation.
    """
    links = dict.fromkeys(each.link for each in work.transfers)
    rates = {"network": chip.network_bytes_per_second, chip.peer_link: chip.peer_bytes_per_second}
    used = [f"{link} {_percent(roofline.LINK_EFFICIENCY[link])} of {rates[link] / 1e9:,.4g} GB/s" for link in links]
    if any(part.name.startswith(HOST_COPIES) for part in breakdown):
        rate = f"{chip.host_bytes_per_second / 1e9:,.4g} GB/s"
        used.append(f"{chip.host_link} to the host {_percent(roofline.PCIE_EFFICIENCY)} of {rate}")
    memory = f"memory {_percent(roofline.MEMORY_EFFICIENCY)} of {chip.memory_bytes_per_second / 1e12:.4g} TB/s"
    matmuls = f"matmuls {_percent(roofline.MATMUL_EFFICIENCY)} of the chip's peak"
    if attention in roofline.KERNEL_EFFICIENCY:
        directions = (roofline.kernel_efficiency(chip, attention, each) for each in ("forward", "backward"))
        matmuls += f" ({attention} {' and '.join(map(_percent, directions))})"
    launches = sum(part.runs for part in breakdown if part.name in KERNELS)
    left_out = [f"launches of {launches:,} kernels", "latency of transfers", _describe_clocks(links)]
    return (
        f"assumed: {', '.join([matmuls, memory, *used])}",
        *([describe_rates(chip, work.grouped.groups)] if work.grouped else []),
        f"left out: {', '.join([*left_out, 'reading of data', 'evaluations', 'checkpoints'])}",
    )


def _describe_clocks(links: Collection[str]) -> str:
    """Return what the time leaves out of the speed of kernels, with what was measured of it."""
    least, most = MEASURED_RATIOS
    clocks = f"clocks that fall under load (steps of one H200 took {least:.2f} to {most:.2f} times as long as planned)"
    return f"{clocks}, multiprocessors that collectives take from kernels (not measured)" if links else clocks


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def format_speed(speed: Speed, fits: bool = True) -> list[str]:
    """Return the lines of the speed, its assumptions and the breakdown."""
    if speed.days is None:
        length = "the number of steps follows from training.epochs and the data"
    else:
        days = f"{speed.days:,.1f} days" if speed.days >= 1 else f"{24 * speed.days:,.2f} hours"
        tokens = speed.tokens_per_second * speed.step_seconds * speed.steps
        length = f"{days} for {speed.steps:,} steps ({tokens / 1e9:,.4g}B tokens)"
    return [
        f"speed{'' if fits else ' if it fitted'}, by a roofline of the compiled program (not measured)",
        f"  {speed.step_seconds:,.4g} s a step, {speed.tokens_per_second:,.0f} tokens/s, MFU {speed.mfu:.1%}, {length}",
        *(f"  {line}" for line in speed.assumptions),
        f"  --search, which counts memory traffic by arithmetic, estimates {speed.search_step_seconds:,.4g} s",
        "",
        *format_breakdown(speed.breakdown),
    ]


LONG_SECONDS = 2 * 3600  # work that a crash may lose, at most, before a shorter interval is advised
ADVISED_SECONDS = 1800


@dataclass(frozen=True)
class CheckpointPlan:
    """Checkpoints of a run.

    Attributes:
        every: steps between two checkpoints, at most the steps of the run.
        seconds: time between two checkpoints, which is the most that a crash can lose.
        bytes: size of a checkpoint, before compression.
        frozen_bytes: the part of it that is frozen parameters; 0 if they stay in a pretrained folder.
        advice: settings for an interval of about ADVISED_SECONDS; empty unless the interval exceeds LONG_SECONDS.
    """

    every: int
    seconds: float
    bytes: int
    frozen_bytes: int
    advice: dict[str, Any]


def plan_checkpoints(config: Config, specs: StateSpecs, step_seconds: float) -> CheckpointPlan:
    """Return size and interval of the checkpoints of a run whose step takes `step_seconds`."""
    every = min(config.checkpoint.every, config.training.steps or config.checkpoint.every)
    sizes = {name: _count_bytes(tree) for name, tree in checkpoint_specs(specs).items()}
    seconds = every * step_seconds
    return CheckpointPlan(
        every=every,
        seconds=seconds,
        bytes=sum(sizes.values()),
        frozen_bytes=sizes.get("frozen", 0),
        advice=_advise_interval(config, step_seconds) if seconds > LONG_SECONDS else {},
    )


def _count_bytes(tree: Any) -> int:
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(tree))


def _advise_interval(config: Config, step_seconds: float) -> dict[str, Any]:
    """Return settings with a round number of steps between checkpoints, and other intervals that divide it."""
    every = max(int(float(f"{ADVISED_SECONDS / step_seconds:.1g}")), 1)
    settings = {"checkpoint.every": every}
    if config.checkpoint.keep_every % every:
        settings["checkpoint.keep_every"] = every * math.ceil(config.checkpoint.keep_every / every)
    if config.checkpoint.keep_best and every % max(config.evaluation.every, 1):
        settings["evaluation.every"] = every
    return settings


def format_checkpoints(plan: CheckpointPlan) -> list[str]:
    """Return the lines on size and interval, and the advice."""
    size = format_bytes(plan.bytes)
    lines = [f"checkpoints: one every {plan.every:,} steps ({format_duration(plan.seconds)}), {size} each"]
    if plan.frozen_bytes:
        frozen = format_bytes(plan.frozen_bytes)
        lines.append(f"  {frozen} of it are frozen parameters; with a folder as --model.pretrained they are not saved")
    if plan.advice:
        flags = format_flags(plan.advice)
        duration = format_duration(plan.seconds * plan.advice["checkpoint.every"] / plan.every)
        lines.append(f"  a crash would lose up to {format_duration(plan.seconds)}; save every {duration} with {flags}")
    return lines


def format_duration(seconds: float) -> str:
    """Return a duration in the unit that fits: seconds, minutes, hours or days."""
    for unit, name in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:,.2g} seconds"


GPUS_PER_HOST = 8


@dataclass(frozen=True)
class StepFigures:
    """Figures of each GPU, read off the compiled step of any model.

    Attributes:
        largest: largest arrays that are alive at the peak.
        limit: bytes of a GPU that XLA may use.
        host_bytes: host memory per GPU.
        flops: FLOPs of the matmuls and convolutions in a step, as compiled; those in attention kernels are calculated.
        flops_seconds: their time at the peak rate of the chip.
    """

    gpu: str
    hosts: int
    gpus_per_host: int
    jax: str
    parameters: int
    compile_seconds: float
    memory: Memory
    largest: tuple[LiveArray, ...]
    limit: int
    host_bytes: int
    collectives: tuple[links.Traffic, ...]
    flops: int
    flops_seconds: float

    @property
    def spare(self) -> int:
        """Bytes of a GPU that stay free; negative if the step does not fit."""
        return self.limit - self.memory.peak

    def format_memory(self) -> list[str]:
        """Return the lines of the table of memory."""
        unit = choose_unit(self.memory.peak)[1]
        digits = 2 if unit == GIB else 1  # a GPU has many MiB
        fits = "fits, spare" if self.spare >= 0 else "DOES NOT FIT, lacks"
        return [
            *format_kinds(self.memory),
            f"  {'XLA may use':18} {self.limit / unit:9,.{digits}f}   {float(MEMORY_FRACTION):.0%} of the GPU's",
            f"  {fits:18} {abs(self.spare) / unit:8,.{digits}f}",
        ]


def read_figures(
    program: StepProgram, cluster: Cluster, peak: Peak, known: KnownShapes, flops: Mapping[str, int]
) -> dict[str, Any]:
    """Return the fields of `StepFigures` that a compiled step alone determines. flops: of each GPU, by dtype."""
    return {
        "gpu": cluster.chip.name,
        "hosts": cluster.hosts,
        "gpus_per_host": cluster.gpus_per_host,
        "jax": jax.__version__,
        "memory": sum_by_kind(program.state, known, peak.memory, peak.temporaries),
        "largest": find_largest(program.state, known, peak.temporaries),
        "limit": count_chip_bytes(cluster.chip),
        "host_bytes": peak.memory.host,
        "flops": sum(flops.values()),
        "flops_seconds": seconds_at_peak(cluster.chip, flops),
    }


@dataclass(frozen=True)
class Plan(StepFigures):
    """Memory, traffic and FLOPs of the compiled training step of a configuration; see also StepFigures."""

    active_parameters: int  # parameters that a token uses
    attention: AttentionChoice
    exchange: str  # exchange of the experts' tokens; "" if there is none
    chosen: dict[str, Any]  # values of the settings that the configuration leaves open
    refused: tuple[str, ...]  # faster values of these settings, and why each was not chosen
    advice: tuple[Advice, ...]  # changes that save most memory; empty if the step fits
    pcie_bytes: int  # bytes between each GPU and its host in a step
    host_link: str  # name of the link to the host
    pcie_seconds: float  # pcie_bytes at the rate of the link, reads after writes
    model_flops: float  # FLOPs per GPU and step that the model needs: no recomputation, causal attention
    repeated_flops: float  # FLOPs per GPU and step of recomputed forwards, calculated
    speed: Speed
    checkpoints: CheckpointPlan
    idle: float  # share of the stages' time without a microbatch, or in a slot for a layer that holds none
    rollout_bytes: int = 0  # cache of a GPU for the answers that the model draws, between steps

    @property
    def network_seconds(self) -> float:
        """Time of a step in which it waits for the network between hosts."""
        return sum(part.seconds for part in self.speed.breakdown if part.name.endswith("(network)"))


def make_plan(config: Config, gpu: str, hosts: int, gpus_per_host: int, rates: LinkRates = USUAL_LINKS) -> Plan:
    """Compile the training step and measure its memory, traffic and FLOPs.

    Args:
        rates: rates of links that differ from the usual ones.

    Raises:
        InputError: the mesh has another size than the GPUs, the GPU is unknown, or JAX cannot compile for GPUs.
    """
    cluster = Cluster(gpu, hosts, gpus_per_host, rates)
    mesh = make_mesh(config.mesh, _describe_gpus(config, gpu, hosts, gpus_per_host))
    requested, config = config, resolve_context_exchange(config, cluster)
    clock = time.perf_counter()
    choice = _choose_and_compile(config, cluster, Placement(mesh, config.sharding, config.precision, config.offload))
    seconds = time.perf_counter() - clock
    chosen = {FIELD: config.sharding.context_exchange} if config != requested else {}
    return _describe_step(choice, cluster, mesh, chosen | list_choices(config, choice.config), seconds)


def resolve_reference(config: Config) -> Config:
    """Return the configuration with `preference.reference` stored, if `auto` means that for the prepared corpora.

    A plan reads nothing else of the data.
    """
    if not config.training.has_reference or config.preference.reference != AUTO:
        return config
    found = [has_reference for has_reference, _ in read_stored(config.data.paths)]
    resolved: Config = fields.replace_fields(config, {"preference.reference": "stored"})
    return resolved if found and all(found) else config


def _find_teacher(config: Config) -> StoredTeacher | None:
    """Return the sizes of what the corpora hold of a teacher; None: the objective reads none, or they hold none."""
    if not config.training.distills or config.runs_teacher:
        return None
    return next((StoredTeacher(*sizes) for _, sizes in read_stored(config.data.paths) if sizes), None)


def count_rollout_bytes(config: Config) -> int:
    """Return the bytes of a GPU's part of the cache of a sampler whose rows are all as long as a row of the batch.

    All axes but `mesh.tensor` divide the answers. `mesh.tensor` divides the heads, if it divides their number. There is
    none, 0 bytes, if the run draws no answers, or a server draws them.
    """
    if not config.draws or config.rollouts.server:
        return 0
    model, drawn, tensor, devices = config.model, config.rollouts, config.mesh.tensor, config.mesh.devices
    one = Placement(make_abstract_mesh(MeshConfig(fsdp=1)), ShardingConfig(), config.precision)
    rows = -(-min(drawn.prompts * drawn.group_size, MAX_ROWS) // (devices // tensor))  # of a GPU
    slots, dtype = config.training.sequence_length + 1, config.precision.compute_dtype
    caches = jax.eval_shape(lambda: scan.make_caches(Decoder(model), rows, slots, dtype, one))
    divides = not model.mla.kv_rank and model.kv_heads % tensor == 0
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches)) // (tensor if divides else 1)


def _describe_step(
    choice: Choice[tuple[Program, Peak]],
    cluster: Cluster,
    mesh: jax.sharding.Mesh,
    chosen: dict[str, Any],
    compile_seconds: float,
) -> Plan:
    """Return the plan of a compiled step.

    Args:
        chosen: the values that replace `auto`.
    """
    config, (program, peak), chip = choice.config, choice.compiled, cluster.chip
    placement = Placement(mesh, config.sharding, config.precision, config.offload)
    text = str(peak.compiled.as_text())
    outer = _list_outer_collectives(program, mesh)
    collectives = _sum_traffic(hlo.list_collectives(text, mesh), outer, config, mesh, cluster)
    computed = hlo.count_dot_flops_by_dtype(text)
    resolved = resolve_attention(config, chip.compute_capability)
    pcie_bytes = hlo.count_host_bytes(text)
    work = roofline.use_compiled_figures(
        predict_work(resolved, cluster), sum(computed.values()), collectives, pcie_bytes
    )
    known = KnownShapes.from_program(program, config, placement)
    figures = read_figures(program, cluster, peak, known, computed)
    lacking = figures["memory"].peak - figures["limit"]
    mfu_per_token = compute_utilisation(config, program, placement, chip)["mfu"]
    speed = compute_speed(config, chip, break_down_step(text, collectives, chip), mfu_per_token, work)
    return Plan(
        **figures,
        parameters=leaves.count_parameters(program.model.specs),
        active_parameters=flops.count_active_parameters(config.model, program.model.specs),
        attention=program.attention,
        chosen=chosen,
        refused=choice.refused,
        exchange=exchange.describe_exchange(config.model.moe, placement),
        compile_seconds=compile_seconds,
        advice=advise(resolved, cluster, lacking) if lacking > 0 else (),
        rollout_bytes=count_rollout_bytes(resolved),
        pcie_bytes=pcie_bytes,
        host_link=chip.host_link,
        pcie_seconds=pcie_bytes / chip.host_bytes_per_second,
        collectives=collectives,
        model_flops=_count_model_flops(config, program) / mesh.size,
        repeated_flops=work.repeated_flops,
        speed=speed,
        checkpoints=plan_checkpoints(config, program.specs, speed.step_seconds),
        idle=work.idle,
    )


def _choose_and_compile(config: Config, cluster: Cluster, placement: Placement) -> Choice[tuple[Program, Peak]]:
    """Compile the step with the settings that a run on these GPUs would choose."""

    def compile_step(config: Config) -> tuple[Program, Peak]:
        on = replace(placement, sharding=config.sharding)
        program = make_program(config, on, stores_frozen_weights(config), _find_teacher(config))
        return program, find_peak(topology.lower_without_gpu(program.step, program.state, program.batch))

    candidates, left_out = list_candidates(config, cluster, count_chip_bytes(cluster.chip))
    choice = choose_settings(candidates, compile_step, count_peak=lambda compiled: compiled[1].memory.peak)
    return replace(choice, refused=(*filter(None, [left_out]), *choice.refused))


def _count_model_flops(config: Config, program: Program) -> float:
    """Count the FLOPs of all GPUs in a step that the model needs."""
    length, specs = config.training.sequence_length, program.specs
    needed = flops.count_per_token(config.model, specs.masters, specs.frozen, length)
    return needed.causal * config.training.batch_size * length


def _list_outer_collectives(program: Program, mesh: jax.sharding.Mesh) -> tuple[hlo.Collective, ...]:
    """Compile the outer step of a program with local steps, and return its collectives; none without."""
    if program.outer_step is None:
        return ()
    lowered = topology.lower_without_gpu(program.outer_step, program.state)
    return tuple(hlo.list_collectives(str(topology.compile_without_gpu(lowered).as_text()), mesh))


def _sum_traffic(
    of_step: Sequence[hlo.Collective],
    of_outer_step: Sequence[hlo.Collective],
    config: Config,
    mesh: jax.sharding.Mesh,
    cluster: Cluster,
) -> tuple[links.Traffic, ...]:
    """Return the traffic of a step, with its share of the traffic of an outer step."""
    inner, outer = (
        links.sum_traffic(each, mesh, cluster.chip, cluster.gpus_per_host) for each in (of_step, of_outer_step)
    )
    return (*inner, *links.spread_over_steps(outer, config.training.local_steps))


def _describe_gpus(config: Config, gpu: str, hosts: int, gpus_per_host: int) -> Sequence[jax.Device]:
    """Return the GPUs to compile for. Raise InputError if the mesh has another size."""
    devices = topology.gpu_topology(gpu, hosts, gpus_per_host)
    if len(devices) != config.mesh.devices:
        needed = config.mesh.devices
        gpus = next(number for number in (gpus_per_host, *range(GPUS_PER_HOST, 0, -1)) if needed % number == 0)
        raise InputError(
            f"--hosts {hosts} × --gpus-per-host {gpus_per_host} are {len(devices)} GPUs, but the mesh has {needed}: "
            f"give --hosts {needed // gpus} --gpus-per-host {gpus}, or change --mesh.*"
        )
    return devices
