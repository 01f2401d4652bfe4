"""Command `train`: training of a model.

python -m jaxopt_llm.train --config FILE [--section.field VALUE ...] [--print-config]

FILE is a recipe: a configuration of the decoder of this package, or a model of its own with its loss and data.
"""

import sys

from jaxopt_llm.core import stop_signals

if __name__ == "__main__":
    stop_signals.end_at_signals()  # before the imports, which a signal does not wait for

from jaxopt_llm.config import Config, MeshConfig, cli, fields
from jaxopt_llm.core import errors

COMMAND = errors.program_name("train")
if __name__ == "__main__":
    # The imports below take seconds, because they import JAX. The help does not need it.
    if cli.asks_for_help(sys.argv[1:]):
        errors.run_command(lambda: cli.print_help(sys.argv[1:], COMMAND))
    stop_signals.listen()

import contextlib
import functools
import os
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.compiler.chips import chip_of
from jaxopt_llm.config.cli import Recipe
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.core.errors import Preempted
from jaxopt_llm.core.files import lock_directory
from jaxopt_llm.data.tokens.prepared import Verification, find_prepared
from jaxopt_llm.distributed import launchers, process_group, runtime
from jaxopt_llm.distributed.process_group import SINGLE_PROCESS, Processes, check_same_programs
from jaxopt_llm.distributed.watchdog import Watchdog
from jaxopt_llm.execution import mtp
from jaxopt_llm.inference import flags
from jaxopt_llm.observe.preemption import Preemption
from jaxopt_llm.parallel.mesh import visible_devices
from jaxopt_llm.planning.device_mesh import Devices, fill_mesh
from jaxopt_llm.planning.exchanges import FIELD as EXCHANGE
from jaxopt_llm.planning.exchanges import resolve_context_exchange
from jaxopt_llm.planning.free_memory import count_usable_bytes
from jaxopt_llm.planning.memory import write_memory
from jaxopt_llm.planning.oom import STEP, make_explainer
from jaxopt_llm.planning.search.workload import describe_cluster
from jaxopt_llm.planning.settings_choice import compile_fitting
from jaxopt_llm.run.answer_server import check_server
from jaxopt_llm.run.directory import find_changes, read_started
from jaxopt_llm.run.initial_weights import open_initial_weights
from jaxopt_llm.run.loop import train_workload
from jaxopt_llm.run.messages import list_next_commands, print_report
from jaxopt_llm.run.records import open_records
from jaxopt_llm.run.replicas import copies_state
from jaxopt_llm.run.rewards import check_rewards
from jaxopt_llm.run.setup import check_inputs, prepare_run
from jaxopt_llm.run.workload import DecoderWorkload
from jaxopt_llm.step.validation import validate

PRINT_CONFIG = "--print-config"  # print the checked configuration and stop


def train(requested: Config, signals: Preemption, processes: Processes = SINGLE_PROCESS) -> None:
    """Train from the last checkpoint of the run directory, or from the start, to `training.steps`.

    Raises:
        Preempted: a signal to any process asked for a stop before the last step. It is raised after the current step
            and its checkpoint; a skipped step has no checkpoint.
    """
    requested, directory = _resolve_exchange(requested, processes.first), Path(requested.run.directory)
    harness = flags.import_harness() if requested.evaluation.tasks else None
    tasks = harness.Tasks(harness.Options.of_run(requested)) if harness else None
    with (
        Watchdog(requested, processes) as watchdog,
        lock_directory(directory) if processes.first else contextlib.nullcontext(),
        contextlib.ExitStack() as stack,
    ):
        setup = prepare_run(requested, processes)
        config: Config = setup.config  # the requested one, with epochs as steps
        measure_tasks = {"measure_tasks": harness.RunTasks(setup, tasks)} if harness else {}
        corpus = setup.data.corpus.sha256
        files = setup.data.corpus.files.union(*(each.files for each in setup.data.sets))
        verification = Verification(find_prepared(files), (processes.index, processes.count))
        shown = [*mtp.name_losses(config.model.mtp_layers), *(["rewards/mean"] if config.rollouts.rewards else [])]
        records = stack.enter_context(open_records(config, processes, watchdog, setup.program.state, shown, corpus))
        stack.enter_context(verification)
        progress, checkpoints, start = records.progress, records.checkpoints, records.start
        if records.end:
            _say_finished(directory, records.end, config, progress.say)
            return
        initial = open_initial_weights(config, setup.program, start, progress.say, processes)
        print_report(setup, progress.say)

        processes.main.enter("compile", start)
        clock = time.perf_counter()
        setup, lowered, programs = compile_fitting(setup, checkpoints, progress.say)
        progress.say(f"compiled in {time.perf_counter() - clock:.1f} s; {programs}")
        check_same_programs(processes, lambda: lowered.step, setup.program.step.hyperparameters)
        explainer = make_explainer(setup.config, setup.program, setup.placement, checkpoints)
        pairs = {
            STEP: (lowered.step, programs.step),
            "an evaluation": (lowered.held_out, programs.held_out),
            "an outer step": (lowered.outer_step, programs.outer_step),
        }
        explainer.check_fits(
            {name: pair for name, pair in pairs.items() if pair[0] is not None},
            copies_state(config.run.check_replicas, setup.program.state),
        )
        if processes.first:
            write_memory(directory / "memory.json", setup.program.state, programs.step)
        explain_oom = functools.partial(explainer.explain_oom, lower_step=lambda: lowered.step)
        workload = DecoderWorkload(setup, programs, initial, verification, explain_oom, **measure_tasks)
        train_workload(workload, records, signals)
        if processes.first:
            for line in list_next_commands(setup.config):
                progress.say(line)


def _say_finished(directory: Path, end: str, config: Config, say: Callable[[str], None]) -> None:
    """Say why a run has ended, and which requested changes have no effect."""
    say(end)
    started = read_started(directory)
    changes = fields.list_changes(started.config, config) if started else []
    # The start of the run replaced each `auto` by a value, and `auto` asks for nothing else.
    if changes := [name for name in changes if fields.get_field(config, name) != AUTO]:
        say(f"no step is left to train, so these changes have no effect: {', '.join(changes)}")


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != PRINT_CONFIG]
    recipe = cli.parse_recipe(arguments, COMMAND)
    if recipe.has_model:
        return _train_own_model(recipe)
    config = pretrained.resolve_pretrained(recipe.config)
    validate(config)
    if PRINT_CONFIG in sys.argv[1:]:
        print(fields.to_json(config))
        return 0
    job = launchers.find_job(config.distributed, os.environ)
    check_inputs(config, first=job.index == 0)
    if job.index == 0:
        check_rewards(config)
        check_server(config)
    runtime.configure_mesh(config.mesh, job, cache=not config.run.deterministic)
    with (
        process_group.join_job(job, config.distributed, fields.shared_fields(config)) as processes,
        Preemption() as signals,
        _name_command(processes),
    ):
        train(_take_devices(config, recipe.flags, processes), signals, processes)
    return 0


def _take_devices(config: Config, flags: frozenset[str], processes: Processes) -> Config:
    """Return the configuration with the mesh of the visible devices in place of `auto`, and print it."""
    found = visible_devices()
    usable = processes.channel("mesh").exchange(str(count_usable_bytes(found[0])))[0]  # all need the same mesh
    filled, line = fill_mesh(config, Devices(len(found), processes.count, int(usable)), flags)
    if processes.first and line:
        print(line, flush=True)
    return filled


def _resolve_exchange(config: Config, first: bool) -> Config:
    """Return the configuration with the exchange of attention that `auto` means, and print it.

    A run that continues on the same devices keeps its exchange. GPUs without figures (compiler/chips.py) take a ring.

    first: whether this is the first process.
    """
    device, started = visible_devices()[0], read_started(Path(config.run.directory))
    keeps = started is not None and not find_changes(started, config, device)
    resolved = resolve_context_exchange(
        config,
        describe_cluster(config.mesh.devices) if chip_of(device.device_kind) else None,
        started.config.sharding.context_exchange if started and keeps else AUTO,
    )
    if first and resolved != config:
        print(f"chosen: {EXCHANGE} {resolved.sharding.context_exchange}", flush=True)
    return resolved


@contextlib.contextmanager
def _name_command(processes: Processes) -> Iterator[None]:
    """Print the command that continues the run if a signal stops it. The command of a job is its launcher's."""
    try:
        yield
    except Preempted:
        if processes.count == 1:
            with contextlib.suppress(OSError):
                print(f"to continue: {COMMAND} {shlex.join(sys.argv[1:])}", flush=True)
        raise


def _train_own_model(recipe: Recipe) -> int:
    from jaxopt_llm.engine.fit import check_recipe, train_recipe  # takes a second to import

    config = recipe.config
    check_recipe(recipe)
    if PRINT_CONFIG in sys.argv[1:]:
        print(fields.to_json(config))
        return 0
    job = launchers.find_job(config.distributed, os.environ)
    if config.mesh != MeshConfig() or job.processes > 1:
        runtime.check_no_device(f"--config {recipe.path}")
    runtime.configure_mesh(config.mesh, job, cache=True)
    with (
        process_group.join_job(job, config.distributed, fields.shared_fields(config)) as processes,
        _name_command(processes),
    ):
        train_recipe(recipe, processes)
    return 0


if __name__ == "__main__":
    errors.run_command(main)
