"""Command `plan`: memory, traffic and speed of a training step, and a search for the fastest settings.

python -m jaxopt_llm.plan --config FILE [--gpu CHIP --hosts N --gpus-per-host N] [--json]
                          [--section.field VALUE ...]
python -m jaxopt_llm.plan --search [--explain] [--write FILE] [--allow FIELD ...] --config FILE ...

Compile the training step of a recipe for GPUs that this machine need not have, and print the memory and the traffic of
each GPU, the speed of the run, and where a step spends its time. With --search, find the fastest settings for the
recipe's model and batch that fit these GPUs: mesh, ZeRO stage, rematerialisation, offload and gradient accumulation.
"""

import argparse
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from jaxopt_llm.compiler.chips import CHIPS, LinkRates
from jaxopt_llm.config import cli
from jaxopt_llm.config.fields import SEARCHED
from jaxopt_llm.core import errors, json_files

PROGRAM = errors.program_name("plan")
DEFAULT_GPU = "h200"
# Options by the names that users of other programs try.
OTHER_NAMES = {
    "--nodes": "--hosts", "--num-nodes": "--hosts", "--nnodes": "--hosts",
    "--gpus": "--gpus-per-host", "--num-gpus": "--gpus-per-host", "--gpus-per-node": "--gpus-per-host",
}  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    parser = errors.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--gpu", type=str.lower, choices=sorted(CHIPS), help=f"GPU to compile for (default: {DEFAULT_GPU})")
    hosts, gpus = "those that the mesh needs; with --search 1", "8, or as few as the mesh needs; with --search 8"
    add("--hosts", type=int, metavar="N", help=f"number of machines (default: {hosts})")
    add("--gpus-per-host", type=int, metavar="N", help=f"GPUs of each machine (default: {gpus})")
    add(
        "--network", type=float, metavar="GBPS",
        help="network of each host, in Gb/s, which its GPUs share (default: the usual one of a server with such GPUs)",
    )  # fmt: skip
    add("--nvlink", type=float, metavar="GB/S", help="NVLink of each GPU in one direction (default: the GPU's)")
    add("--pcie", type=float, metavar="GB/S", help="PCIe of each GPU in one direction (default: the GPU's)")
    add("--rows", type=int, metavar="N", help="for a recipe with a model of its own: rows of a batch over all GPUs")
    add("--json", action="store_true", help="print JSON: bytes, seconds and FLOPs of each GPU")
    add("--search", action="store_true", help="find the fastest settings that fit these GPUs, for the recipe's batch")
    add("--explain", action="store_true", help="with --search: show the other settings, and why they were rejected")
    add("--write", type=Path, metavar="FILE", help="with --search: save the fastest settings as a recipe, a new file")
    add(
        "--allow", nargs="+", default=[], choices=sorted(SEARCHED), metavar="FIELD",
        help=f"with --search: fields that it may also change to narrower values: {', '.join(sorted(SEARCHED))}",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    cli.answer_help(make_parser(), sys.argv[1:])  # the imports below take seconds, because they import JAX

import jax

from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.compiler import topology
from jaxopt_llm.config import Config, MeshConfig, PipelineConfig, fields
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.config.unread import describe_newly_unread, describe_unread
from jaxopt_llm.core.errors import DoesNotFit, InputError
from jaxopt_llm.kernels.attention_auto import AttentionChoice
from jaxopt_llm.model import flops
from jaxopt_llm.observe.progress import CompileLine
from jaxopt_llm.planning import links
from jaxopt_llm.planning.advice import format_advice
from jaxopt_llm.planning.device_mesh import Devices, divides_over, fill_mesh
from jaxopt_llm.planning.exchanges import resolve_context_exchange
from jaxopt_llm.planning.free_memory import GIB, count_chip_bytes
from jaxopt_llm.planning.memory import format_largest
from jaxopt_llm.planning.search import ranking, report
from jaxopt_llm.planning.search.recipe import drop_unread, format_recipe
from jaxopt_llm.planning.search.report import find_remedies
from jaxopt_llm.planning.search.roofline import Cluster
from jaxopt_llm.planning.settings_choice import format_choices, list_candidates
from jaxopt_llm.planning.step_plan import (
    GPUS_PER_HOST,
    Plan,
    format_checkpoints,
    format_speed,
    make_plan,
    resolve_reference,
)
from jaxopt_llm.step.validation import validate

MAX_COMPILES = 8  # programs that a search compiles at the same time, at most: each takes a core and 1 to 2 GB


# --- Output


def format_plan(plan: Plan) -> str:
    """Return a plan as a table."""
    lines = [
        f"{_make_heading(plan)}; compiled in {plan.compile_seconds:.1f} s with jax {plan.jax}",
        f"attention: {_format_attention(plan.attention)}",
        *([f"experts' tokens: {plan.exchange}"] if plan.exchange else []),
        *(f"refused: {line}" for line in plan.refused),
        *([f"chosen: {format_choices(plan.chosen)}"] if plan.chosen else []),
        "",
        *plan.format_memory(),
        *([_format_host_memory(plan)] if plan.host_bytes else []),
        *([_format_rollouts(plan)] if plan.rollout_bytes else []),
        *((*format_largest(plan.largest), *format_advice(plan.advice)) if plan.spare < 0 else ()),
        "",
        *links.format_traffic(plan.collectives),
        "",
        f"matmuls of each GPU: {plan.flops / 1e12:,.4g} TFLOP, {plan.flops_seconds * 1e3:,.4g} ms at the chip's peak; "
        f"the model needs {plan.model_flops / 1e12:,.4g} (no recomputation, causal attention)",
        f"  of these, about {plan.repeated_flops / 1e12:,.4g} TFLOP recompute forwards",
        *([f"  and {plan.idle:.1%} of the ticks and layer slots of a stage do no work"] if plan.idle else []),
        "",
        *format_checkpoints(plan.checkpoints),
        "",
        *format_speed(plan.speed, fits=plan.spare >= 0),
    ]
    return "\n".join(lines)


def _make_heading(plan: Plan) -> str:
    parameters = flops.describe_parameters(plan.parameters, plan.active_parameters)
    return f"{parameters} on {plan.hosts} × {plan.gpus_per_host} {plan.gpu}"


def _format_attention(choice: AttentionChoice) -> str:
    """Return an implementation of attention, with the reason for it up to its first detail."""
    short = choice.reason.partition("; ")[0].partition(" (")[0]
    return str(choice) if short == choice.reason else f"{choice.name}, {short} (--json has the whole reason)"


def _format_host_memory(plan: Plan) -> str:
    traffic = (
        f"{plan.pcie_bytes / GIB:.2f} GiB over {plan.host_link} a step, {plan.pcie_seconds * 1e3:,.0f} ms at its rate"
    )
    return f"  {'host, for each GPU':18} {plan.host_bytes / GIB:9.2f}   {traffic}"


def _format_rollouts(plan: Plan) -> str:
    return f"  {'cache of rollouts':18} {plan.rollout_bytes / GIB:9.2f}   GiB beside the state, between steps"


def to_json(plan: Plan) -> str:
    """Return the fields of a plan and of its speed as JSON, with memory.peak, spare and fits added."""
    values = dataclasses.asdict(plan)
    values |= values.pop("speed")
    values["memory"]["peak"] = plan.memory.peak
    values["network_seconds"] = plan.network_seconds
    return json.dumps(values | {"spare": plan.spare, "fits": plan.spare >= 0}, indent=2)


def main() -> int:
    options, arguments = make_parser().parse_known_args()
    for name in ("explain", "write", "allow"):
        if getattr(options, name) and not options.search:
            raise InputError(f"--{name} requires --search")
    for flag in (argument.partition("=")[0].replace("_", "-") for argument in arguments):
        if flag in OTHER_NAMES:
            raise InputError(f"{flag}: no such option; did you mean {OTHER_NAMES[flag]}?")
    recipe = cli.parse_recipe(arguments, PROGRAM)
    if recipe.has_model:
        return _plan_own_model(recipe, options)
    if options.rows is not None:
        raise InputError("--rows: this recipe has --training.batch-size")
    config = pretrained.resolve_pretrained(recipe.config)
    if options.search:
        config = _without_illegal_mesh(config)
    validate(config)
    _choose_gpu(options)
    _choose_hosts(options, config)
    prepare_jax()
    config = resolve_reference(_fill_mesh(config, options, recipe.flags))
    if options.search:
        return _search(config, options)
    for line in describe_unread(config):
        print(f"warning: {line}", file=sys.stderr)
    rates = _read_rates(options)
    plan = make_plan(config, options.gpu, options.hosts, options.gpus_per_host, rates)
    for line in describe_newly_unread(fields.replace_fields(config, plan.chosen), config):
        print(f"warning: {line}", file=sys.stderr)
    print(to_json(plan) if options.json else format_plan(plan))
    _check_fits(plan.spare, "; use settings from the table of those that save most, or find others with --search")
    return 0


def _check_fits(spare: int, remedy: str = "") -> None:
    """Raise DoesNotFit if the step needs more memory than there is. spare: bytes of a GPU that stay free."""
    if spare < 0:
        raise DoesNotFit(f"the step does not fit: each GPU lacks {-spare / GIB:.2f} GiB{remedy}")


def _plan_own_model(recipe: cli.Recipe, options: argparse.Namespace) -> int:
    from jaxopt_llm.engine.fit import make_engine  # takes a second to import

    for name in ("network", "nvlink", "pcie", "write"):
        if getattr(options, name):
            raise InputError(f"--{name}: only for recipes of the decoder, and {recipe.path} has a model of its own")
    _choose_gpu(options)
    prepare_jax()
    gpus = options.gpus_per_host or GPUS_PER_HOST
    wanted = gpus if recipe.config.mesh.fsdp == AUTO else recipe.config.mesh.devices
    count = wanted if options.hosts is None else options.hosts * gpus
    engine = make_engine(recipe)
    if options.search:
        found = engine.search(options.gpu, (options.hosts or 1) * gpus, gpus, options.rows, allow=options.allow)
        _print_search(found.result, found.seconds, [], options, _list_own_values)
        if found.config is None:
            raise DoesNotFit(
                f"nothing fits: the smallest of the compiled settings lacks {-found.plan.spare / GIB:.2f} GiB of each "
                "GPU; take more GPUs (--hosts), GPUs with more memory (--gpu), or fewer rows (--rows)"
            )
        return 0
    plan = engine.plan(options.gpu, count, gpus, options.rows)
    print(json.dumps(_list_own_values(plan), indent=2) if options.json else plan)
    _check_fits(plan.spare)
    return 0


def _list_own_values(plan: Any) -> dict[str, Any]:
    """Return the plan of a model of the recipe's own as JSON values."""
    return dataclasses.asdict(plan) | {"spare": plan.spare, "fits": plan.spare >= 0}


def _without_illegal_mesh(config: Config) -> Config:
    """Return a recipe whose mesh, pipeline and accumulation a search can replace: all 1 if they are not legal."""
    try:
        validate(config)
    except InputError:
        training = dataclasses.replace(config.training, accumulation=1)
        return dataclasses.replace(config, mesh=MeshConfig(), pipeline=PipelineConfig(), training=training)
    return config


def _read_rates(options: argparse.Namespace) -> LinkRates:
    """Return the rates of links that the command line gives."""
    given = {name: getattr(options, name) for name in ("network", "nvlink", "pcie")}
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"--{name} {value:g}: must be a finite number above 0")
    if options.pcie is not None and CHIPS[options.gpu].host_link != "PCIe":
        raise InputError(f"--pcie has no effect: {options.gpu} is linked to its host by {CHIPS[options.gpu].host_link}")
    if options.nvlink is not None and options.gpus_per_host == 1:
        raise InputError("--nvlink has no effect on one GPU: give --gpus-per-host")
    if options.network is not None and options.hosts == 1:
        raise InputError("--network has no effect on one host: give --hosts")
    return LinkRates(**given)


def _choose_gpu(options: argparse.Namespace) -> None:
    """Set the GPU if the command line leaves it out, and say so."""
    if options.gpu is None:
        options.gpu = DEFAULT_GPU
        if not options.json:
            print(f"planned for {CHIPS[DEFAULT_GPU].name}, because --gpu is not given", flush=True)


def _choose_hosts(options: argparse.Namespace, config: Config) -> None:
    """Set the numbers of hosts and of their GPUs that the command line leaves out."""
    hosts, gpus = options.hosts, options.gpus_per_host
    if options.search:  # it tries other meshes
        options.hosts, options.gpus_per_host = (
            (1 if hosts is None else hosts),
            (GPUS_PER_HOST if gpus is None else gpus),
        )
        return
    if gpus is None:
        whole = config.mesh.fsdp == AUTO and hosts is not None
        options.gpus_per_host = GPUS_PER_HOST if whole else min(GPUS_PER_HOST, config.mesh.devices)
    if hosts is None:
        options.hosts = max(config.mesh.devices // max(options.gpus_per_host, 1), 1)


def _fill_mesh(config: Config, options: argparse.Namespace, flags: frozenset[str]) -> Config:
    """Return the configuration with the planned GPUs in place of `auto`, and print what became of them."""
    hosts, count = options.hosts, options.hosts * options.gpus_per_host
    if config.mesh.fsdp != AUTO or (options.search and not divides_over(config, hosts)):
        return config
    devices = Devices(count, hosts, count_chip_bytes(CHIPS[options.gpu]))
    if options.search:  # it tries all meshes, and this one for comparison
        return fill_mesh(config, devices)[0]
    filled, line = fill_mesh(config, devices, flags)
    if filled.mesh.devices < count:  # what divides no batch stays idle
        options.gpus_per_host = filled.mesh.devices // hosts
    if count == 1:
        line = "1 device; a run takes all that it sees: --gpus-per-host N plans N"
    if line and not options.json:
        print(line, flush=True)
    return filled


def prepare_jax() -> None:
    """Configure JAX to compile for GPUs without using one."""
    jax.config.update("jax_platforms", "cpu")  # also if there are GPUs: planning does not use them
    jax.config.update("jax_enable_compilation_cache", False)  # a cached program dumps no buffers
    # XLA warns that it compiles without a GPU. It reads this when JAX first looks for devices.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":  # JAX sets 1; another value is the user's
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"


def _search(config: Config, options: argparse.Namespace) -> int:
    if options.write:
        _check_new_recipe(options.write)
    place = options.gpu, options.hosts, options.gpus_per_host
    topology.gpu_topology(*place)  # raises an error now, before the search
    cluster, allowed = Cluster(*place, _read_rates(options)), tuple(dict.fromkeys(options.allow))
    limit = count_chip_bytes(cluster.chip)
    config = _with_choices(config, cluster, limit)
    clock, compiles = time.perf_counter(), min(os.cpu_count() or 1, MAX_COMPILES, ranking.MAX_COMPILED)
    plan_config = functools.partial(_plan_on, cluster)
    spawn, line = multiprocessing.get_context("spawn"), CompileLine(ranking.MAX_COMPILED)
    with ProcessPoolExecutor(compiles, spawn, prepare_jax) as processes, line:
        if compiles > 1:
            for _ in range(compiles):
                processes.submit(prepare_jax)  # the processes start and import JAX while this one estimates

        def compile_all(candidates: Sequence[Config]) -> Iterator[Plan]:
            line.announce([report.describe_setting(candidate, config) for candidate in candidates])
            for plan in (processes.map if compiles > 1 else map)(plan_config, candidates):
                line.advance()
                yield plan

        found = ranking.search_settings(config, cluster, limit, allowed, compile_all, compiles)
    steps = [] if found.winner else find_remedies(found, allowed)
    _print_search(found, time.perf_counter() - clock, steps, options)
    if found.winner is None:
        lacking = min(-candidate.plan.spare for candidate in found.compiled) / GIB
        problem = f"nothing fits: the smallest of the compiled settings lacks {lacking:.1f} GiB of each GPU"
        raise DoesNotFit(f"{problem}. Cheapest next step: {'; or '.join(steps)}")
    if options.write:
        with options.write.open("x") as file:
            file.write(format_recipe(drop_unread(found.winner.config), _make_docstring(options, found, found.winner)))
    return 0


def _plan_on(cluster: Cluster, config: Config) -> Plan:
    return make_plan(config, cluster.gpu, cluster.hosts, cluster.gpus_per_host, cluster.links)


def _with_choices(config: Config, cluster: Cluster, limit: int) -> Config:
    """Return the recipe with what `auto` means by arithmetic: the search tries all policies and exchanges."""
    if config.mesh.devices == cluster.devices:
        config = resolve_context_exchange(config, cluster)
    (likely, *_), _ = list_candidates(config, cluster, limit)
    return dataclasses.replace(config, remat=likely.config.remat)


def _print_search(
    result: ranking.SearchResult,
    seconds: float,
    steps: list[str],
    options: argparse.Namespace,
    list_values: Callable[[Any], Any] = lambda plan: json_files.parse(to_json(plan)),
) -> None:
    tree = report.format_tree(result) if options.explain else ""
    if options.json:
        values = report.to_json(result, seconds, list_values) | ({"tree": tree.splitlines()} if tree else {})
        print(json.dumps(values | {"next_steps": steps}, indent=2))
        return
    print(report.format_table(result, seconds), *(["", tree] if tree else []), sep="\n")


def _check_new_recipe(file: Path) -> None:
    """Raise InputError if a recipe cannot be written to this file, before the search, which takes minutes."""
    if file.exists():
        raise InputError(f"--write {file}: exists and is not overwritten; give a new file")
    if not file.parent.is_dir():
        raise InputError(f"--write {file}: the folder {file.parent} does not exist; create it first")
    if file.suffix != ".py":
        raise InputError(f"--write {file}: a recipe is a Python file; write to {file.with_suffix('.py')}")


def _make_docstring(options: argparse.Namespace, found: ranking.SearchResult, winner: ranking.CompiledCandidate) -> str:
    plan = winner.plan
    assert isinstance(plan, Plan)
    gpus = f"--gpu {options.gpu} --hosts {options.hosts} --gpus-per-host {options.gpus_per_host}"
    rates = {name: getattr(options, name) for name in ("network", "nvlink", "pcie")}
    gpus += "".join(f" --{name} {value:g}" for name, value in rates.items() if value is not None)
    sent = sum(traffic.bytes for traffic in plan.collectives)
    parameters = flops.describe_parameters(plan.parameters, plan.active_parameters)
    data = "" if winner.config.draws else " --data.paths prepared --data.tokenizer tokenizer.json"
    return f"""{parameters} on {plan.hosts} × {plan.gpus_per_host} {plan.gpu}: the fastest of
{len(found.candidates):,} settings by the roofline of docs/plan.md, {winner.time.total:.2f} s a step.

    python -m jaxopt_llm.train --config {options.write.name}{data}

{report.describe_setting(winner.config, found.recipe)}. Memory and traffic of each GPU in a step, by

    python -m jaxopt_llm.plan --config {options.write.name} {gpus}

are {plan.memory.peak / GIB:.1f} GiB at the peak and {sent / GIB:.1f} GiB sent.
"""


if __name__ == "__main__":
    errors.run_command(main)
