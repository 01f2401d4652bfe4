"""python -m jaxopt_llm.plan --config FILE [--gpu CHIP --hosts N --gpus-per-host N] [--json] [--section.field VALUE ...]
python -m jaxopt_llm.plan --search [--explain] [--write FILE] [--allow FIELD ...] --config FILE ...

Compiles a recipe's step for GPUs that need not be there, and says what each would hold and move. With --search it finds
the fastest settings of the recipe's model and batch that fit them: mesh, ZeRO stage, rematerialisation, offload,
accumulation.
"""

import argparse
import collections
import dataclasses
import functools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxopt_llm import config as configuration
from jaxopt_llm import errors
from jaxopt_llm.advice import Advice, advice_lines, advise
from jaxopt_llm.config import TrainConfig
from jaxopt_llm.errors import InputError
from jaxopt_llm.kernels.attention_auto import Choice
from jaxopt_llm.model import exchange, flops, leaves
from jaxopt_llm.parallel import hlo, links, topology
from jaxopt_llm.parallel.buffers import compile_and_list
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.runtime import MEMORY_FRACTION
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.parallel.topology import CHIPS, Chip
from jaxopt_llm.search import choose, explain, recipe, report
from jaxopt_llm.search.attention import settled
from jaxopt_llm.search.passes import Passes
from jaxopt_llm.search.remedies import remedies
from jaxopt_llm.search.resting import resting
from jaxopt_llm.search.roofline import Cluster
from jaxopt_llm.search.walk import ALLOWED
from jaxopt_llm.search.workload import workload
from jaxopt_llm.training.activations import Activations
from jaxopt_llm.training.memory import (
    GIB,
    Held,
    Known,
    Memory,
    by_kind,
    kind_lines,
    largest,
    largest_lines,
)
from jaxopt_llm.training.program import make_program
from jaxopt_llm.validation import validate

PROGRAM = "python -m jaxopt_llm.plan"
AT_ONCE = 8  # programs that a search compiles side by side, at most: each takes a core and 1 to 2 GB


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same mesh axes.

    bytes: sent by each GPU in a step, on a ring. seconds: that by the rate of the slowest link, without latency; what
        overlaps with computation is not taken off. overlapped: the share of the bytes whose collectives have other work
        scheduled between their start and their end.
    """

    axes: tuple[str, ...]
    link: str  # "nvlink", or "network" where the axes cross hosts
    kind: str
    dtypes: tuple[str, ...]
    times: int
    bytes: int
    seconds: float
    overlapped: float


@dataclass(frozen=True)
class Plan:
    gpu: str
    hosts: int
    gpus_per_host: int
    jax: str
    parameters: int
    active_parameters: int  # that a token meets
    attention: Choice
    exchange: str  # of experts' tokens; "" where there is none
    compile_seconds: float
    memory: Memory
    largest: tuple[Held, ...]  # arrays, of those alive at the peak
    advice: tuple[Advice, ...]  # what would save most; none where it fits
    host_bytes: int  # of host memory for each GPU
    pcie_bytes: int  # between each GPU and its host in a step
    pcie_seconds: float  # by the link's rate, reads and writes one after the other
    limit: int  # bytes of a GPU that XLA may use
    collectives: tuple[Traffic, ...]
    flops: int  # of each GPU's matmuls in a step, as compiled; those of attention's kernels by arithmetic
    flops_seconds: float  # at the chip's peak
    model_flops: float  # of each GPU in a step, that the model needs: nothing recomputed, causal attention
    repeated_flops: float  # of each GPU in a step, by arithmetic: of forwards that had been run before
    idle: float  # the share of the stages' time without a microbatch, or with a place for a layer that holds none

    @property
    def spare(self) -> int:
        """Negative where it does not fit."""
        return self.limit - self.memory.peak


def make_plan(config: TrainConfig, gpu: str, hosts: int, gpus_per_host: int) -> Plan:
    """Raises InputError for a mesh of another size, an unknown GPU, and where JAX cannot compile for GPUs."""
    devices = topology.gpu_topology(gpu, hosts, gpus_per_host)
    if len(devices) != config.mesh.devices:
        raise InputError(
            f"--hosts {hosts} × --gpus-per-host {gpus_per_host} are {len(devices)} GPUs, the mesh has "
            f"{config.mesh.devices} (--mesh.* of the recipe): change one of the two"
        )
    chip = CHIPS[gpu]
    mesh = make_mesh(config.mesh, devices)
    placement = Placement(mesh, config.sharding, config.precision, config.offload)
    program = make_program(
        config.model,
        config.training,
        config.optimizer,
        config.schedule,
        config.remat,
        config.lora,
        placement,
        pipelined=config.pipeline,
        xla=config.xla,
    )
    lowered = topology.lower(program.step, program.state, program.batch)
    clock = time.perf_counter()
    compiled, temporaries = compile_and_list(lowered)
    compile_seconds = time.perf_counter() - clock
    text, memory = str(compiled.as_text()), hlo.memory(compiled)
    tokens = config.training.batch_size * config.training.sequence_length
    needed = flops.per_token(config.model, program.specs.masters, program.specs.frozen, config.training.sequence_length)
    computed = hlo.dot_flops_by_dtype(text)
    rests = resting(config)
    assert rests is not None, "what `validate` refuses"
    on_chip = settled(config, chip.compute_capability)
    work = workload(on_chip, rests, Cluster(gpu, hosts, gpus_per_host))
    over_pcie = hlo.host_traffic(text)
    activations = Activations(config.model, config.training, placement)
    known = Known.of(program, activations, config.remat, Passes.of(config).waiting)
    held, limit = by_kind(program, known, memory, temporaries), int(chip.memory_bytes * float(MEMORY_FRACTION))
    return Plan(
        gpu=chip.name,
        hosts=hosts,
        gpus_per_host=gpus_per_host,
        jax=jax.__version__,
        parameters=leaves.count(program.parts.specs),
        active_parameters=flops.active(config.model, program.parts.specs),
        attention=program.attention,
        exchange=exchange.said(config.model, placement),
        compile_seconds=compile_seconds,
        memory=held,
        largest=largest(program, known, temporaries),
        advice=advise(on_chip, held.peak - limit) if held.peak > limit else (),
        host_bytes=memory.host,
        pcie_bytes=over_pcie,
        pcie_seconds=over_pcie / chip.pcie_bytes_per_second,
        limit=limit,
        collectives=tuple(_traffic(hlo.collectives(text, mesh), mesh, chip, gpus_per_host)),
        flops=sum(computed.values()),
        flops_seconds=topology.seconds_at_peak(chip, computed),
        model_flops=needed.causal * tokens / len(devices),
        repeated_flops=work.repeated_flops,
        idle=work.idle,
    )


# ---- What is moved.


def _traffic(collectives: Sequence[hlo.Collective], mesh: Mesh, chip: Chip, gpus_per_host: int) -> Iterator[Traffic]:
    groups = collections.defaultdict(list)
    for each in collectives:
        groups[each.axes, each.kind, each.dtypes].append(each)
    for (axes, kind, dtypes), alike in groups.items():
        link, rate = links.link(axes, kind, mesh, chip, gpus_per_host)
        sent = sum(each.wire_bytes * each.times for each in alike)
        overlapped = sum(each.wire_bytes * each.times for each in alike if each.asynchronous)
        yield Traffic(
            axes=axes,
            link=link,
            kind=kind,
            dtypes=dtypes,
            times=sum(each.times for each in alike),
            bytes=sent,
            seconds=sent / rate,
            overlapped=overlapped / sent if sent else 0.0,
        )


# ---- What is said.


def show(plan: Plan) -> str:
    lines = [
        f"{flops.in_words(plan.parameters, plan.active_parameters)} on {plan.hosts} × {plan.gpus_per_host} {plan.gpu}; "
        f"compiled in {plan.compile_seconds:.1f} s with jax {plan.jax}",
        f"attention: {plan.attention}",
        *([f"experts' tokens: {plan.exchange}"] if plan.exchange else []),
        "",
        *kind_lines(plan.memory),
        f"  {'XLA may use':18} {plan.limit / GIB:9.2f}   {float(MEMORY_FRACTION):.0%} of the GPU's",
        f"  {'fits, spare' if plan.spare >= 0 else 'DOES NOT FIT, lacks':18} {abs(plan.spare) / GIB:8.2f}",
        *_host_lines(plan),
        *((*largest_lines(plan.largest), *advice_lines(plan.advice)) if plan.spare < 0 else ()),
        "",
        f"{'collectives of a step':44} {'times':>7} {'GiB sent':>9} {'ms':>9} {'overlapped':>10}",
    ]
    for each in sorted(plan.collectives, key=lambda each: -each.seconds):
        what = f"{' × '.join(each.axes)} ({each.link}): {each.kind} {' '.join(each.dtypes)}"
        lines.append(
            f"  {what:42} {each.times:7,} {each.bytes / GIB:9.3f} {each.seconds * 1e3:9.2f} {each.overlapped:10.0%}"
        )
    seconds = sum(each.seconds for each in plan.collectives)
    lines += [
        f"  {'all':42} {'':7} {sum(each.bytes for each in plan.collectives) / GIB:9.3f} {seconds * 1e3:9.2f}",
        "",
        f"matmuls of each GPU: {plan.flops / 1e12:,.1f} TFLOP, {plan.flops_seconds * 1e3:,.1f} ms at the chip's peak; "
        f"the model needs {plan.model_flops / 1e12:,.1f} (nothing recomputed, causal attention)",
        f"  of them, by arithmetic, {plan.repeated_flops / 1e12:,.1f} TFLOP run a forward again",
        *([f"  and {plan.idle:.1%} of a stage's ticks and places for layers do no work"] if plan.idle else []),
    ]
    return "\n".join(lines)


def _host_lines(plan: Plan) -> list[str]:
    if not plan.host_bytes:
        return []
    moved = f"{plan.pcie_bytes / GIB:.2f} GiB over PCIe a step, {plan.pcie_seconds * 1e3:,.0f} ms at its rate"
    return [f"  {'host, for each GPU':18} {plan.host_bytes / GIB:9.2f}   {moved}"]


def to_json(plan: Plan) -> str:
    """With what follows from the fields: memory.peak, spare, fits."""
    told = dataclasses.asdict(plan)
    told["memory"]["peak"] = plan.memory.peak
    return json.dumps(told | {"spare": plan.spare, "fits": plan.spare >= 0}, indent=2)


def main() -> int:
    parser = errors.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--gpu", default="h200", choices=sorted(CHIPS), help="to compile for (default: h200)")
    add("--hosts", type=int, default=1, metavar="N", help="machines (default: 1)")
    add("--gpus-per-host", type=int, default=8, metavar="N", help="of each machine (default: 8)")
    add("--json", action="store_true", help="print JSON: bytes, seconds and FLOPs, of each GPU")
    add("--search", action="store_true", help="find the fastest settings that fit these GPUs, for the recipe's batch")
    add("--explain", action="store_true", help="with --search: show what else was tried, and why it was left")
    add("--write", type=Path, metavar="FILE", help="with --search: save the fastest as a recipe, a new file")
    add(
        "--allow", nargs="+", default=[], choices=sorted(ALLOWED), metavar="FIELD",
        help=f"with --search: what it may also narrow, of {', '.join(sorted(ALLOWED))}",
    )  # fmt: skip
    own, arguments = parser.parse_known_args()
    for option in ("explain", "write", "allow"):
        if getattr(own, option) and not own.search:
            raise InputError(f"--{option} goes with --search")
    config = configuration.parse(arguments, PROGRAM)
    validate(config)
    _without_gpu()
    if own.search and config.model.latent_rank:
        raise InputError(
            "--search does not know models with latent attention yet, and "
            f"model.latent_rank={config.model.latent_rank}: leave it out, and compare settings by plans of each"
        )
    if own.search:
        return _search(config, own)
    plan = make_plan(config, own.gpu, own.hosts, own.gpus_per_host)
    print(to_json(plan) if own.json else show(plan))
    return 0


def _without_gpu() -> None:
    jax.config.update("jax_platforms", "cpu")  # where there are GPUs, too: none is touched
    jax.config.update("jax_enable_compilation_cache", False)  # what comes out of it dumps no buffers


def _search(config: TrainConfig, own: argparse.Namespace) -> int:
    if own.write:
        _refuse(own.write)
    cluster, allowed = Cluster(own.gpu, own.hosts, own.gpus_per_host), tuple(dict.fromkeys(own.allow))
    topology.gpu_topology(own.gpu, own.hosts, own.gpus_per_host)  # what is missing is said before anything is searched
    limit = int(cluster.chip.memory_bytes * float(MEMORY_FRACTION))
    clock, at_once = time.perf_counter(), min(os.cpu_count() or 1, AT_ONCE)
    plan_of = functools.partial(make_plan, gpu=own.gpu, hosts=own.hosts, gpus_per_host=own.gpus_per_host)
    with ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn"), _without_gpu) as processes:

        def compile_all(settings: Sequence[TrainConfig]) -> Iterable[Plan]:
            for each in settings:
                print(f"compiling {report.words(each, config)}", file=sys.stderr, flush=True)
            return (map if len(settings) == 1 else processes.map)(plan_of, settings)

        found = choose.search(config, cluster, limit, allowed, compile_all, at_once)
    seconds = time.perf_counter() - clock
    steps = [] if found.winner else remedies(found, allowed, float(MEMORY_FRACTION))
    if own.json:
        told = report.to_json(found, seconds, lambda plan: json.loads(to_json(plan)))
        told |= {"next_steps": steps} | ({"tree": explain.tree(found).splitlines()} if own.explain else {})
        print(json.dumps(told, indent=2))
    else:
        print(report.show(found, seconds), *(["", explain.tree(found)] if own.explain else []), sep="\n")
    if found.winner is None:
        least = min(-choice.plan.spare for choice in found.choices)
        raise InputError(
            f"nothing fits: of what was compiled the least lacks {least / GIB:.1f} GiB of each GPU. Cheapest next "
            f"step: {'; or '.join(steps)}"
        )
    if own.write:
        with own.write.open("x") as file:
            file.write(recipe.source(found.winner.config, _docstring(own, found, found.winner)))
    return 0


def _refuse(file: Path) -> None:
    """Raises InputError for what no recipe can be written to: before the search, which takes minutes."""
    if file.exists():
        raise InputError(f"--write {file}: exists, and is not overwritten: name a new file")
    if not file.parent.is_dir():
        raise InputError(f"--write {file}: no such folder as {file.parent}")
    if file.suffix != ".py":
        raise InputError(f"--write {file}: a recipe is Python: name it {file.with_suffix('.py')}")


def _docstring(own: argparse.Namespace, found: choose.Search, winner: choose.Choice) -> str:
    plan = winner.plan
    assert isinstance(plan, Plan)
    gpus = f"--gpu {own.gpu} --hosts {own.hosts} --gpus-per-host {own.gpus_per_host}"
    sent = sum(each.bytes for each in plan.collectives)
    parameters = flops.in_words(plan.parameters, plan.active_parameters)
    return f"""{parameters} on {plan.hosts} × {plan.gpus_per_host} {plan.gpu}: the fastest of
{len(found.candidates):,} settings by the roofline of docs/plan.md, {winner.time.total:.2f} s a step.

    python -m jaxopt_llm.train --config {own.write.name} --data.paths prepared --data.tokenizer tokenizer.json

{report.words(winner.config, found.recipe)}. As compiled,

    python -m jaxopt_llm.plan --config {own.write.name} {gpus}

{plan.memory.peak / GIB:.1f} GiB at the peak and {sent / GIB:.1f} GiB sent, of each GPU in a step.
"""


if __name__ == "__main__":
    errors.run(main)
