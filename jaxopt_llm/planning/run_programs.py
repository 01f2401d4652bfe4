"""Programs of a run, compiled with the settings that the configuration leaves open."""

from collections.abc import Callable

import jax

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.compiler import hlo
from jaxopt_llm.compiler.chips import chip_of
from jaxopt_llm.config import Config, fields
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.config.unread import describe_newly_unread
from jaxopt_llm.planning.free_memory import count_usable_bytes
from jaxopt_llm.planning.oom import make_explainer
from jaxopt_llm.planning.search.workload import STAND_IN, describe_cluster
from jaxopt_llm.planning.settings_choice import (
    choose_settings,
    format_choices,
    keep_settings,
    list_candidates,
    list_choices,
    list_settings,
)
from jaxopt_llm.run.compile import Executables, compile_program, lower_programs
from jaxopt_llm.run.directory import Started, find_changes
from jaxopt_llm.run.replicas import count_copied_bytes
from jaxopt_llm.run.setup import Setup

# Settings that decide which candidates fit, in addition to the devices and the mesh, and that a resume may change.
DECIDING = (
    *("training.batch_size", "training.accumulation", "training.sequence_length", "training.attention"),
    *("remat.every", "remat.offload", "offload.optimizer", "offload.parameters", "optimizer.in_backward"),
    *("optimizer.name", "optimizer.state_dtype", "precision.compute_dtype", "precision.reduce_dtype"),
    *("precision.matmul", "precision.outlier_threshold", "sharding.zero_stage", "sharding.sequence_parallel"),
    *("sharding.optimizer_over_data", "sharding.int8_gathers", "sharding.data_gradients", "sharding.fsdp_gradients"),
    *(
        "sharding.expert_room",
        "sharding.context_exchange",
        "pipeline.schedule",
        "pipeline.virtual_stages",
        "pipeline.split",
        "lora.rank",
        "data.documents_per_row",
        "xla.options",
    ),
)

Compiled = tuple[Setup, Executables, Executables]  # the setup, and its programs lowered and compiled


def compile_fitting(setup: Setup, checkpoints: Checkpoints, say: Callable[[str], None]) -> Compiled:
    """Resolve the settings of `settings_choice.CHOSEN`, and compile the programs with them.

    A run that continues keeps its choice, unless something changed that decides it. Otherwise all processes compile the
    same candidates until one fits every process.

    Raises:
        OutOfMemory: the memory of a device does not suffice for compiling.
    """

    def compile_step(config: Config) -> tuple[Setup, Executables, jax.stages.Compiled]:
        candidate = setup.with_config(config)
        lowered = lower_programs(candidate)
        explainer = make_explainer(config, candidate.program, candidate.placement, checkpoints)
        with explainer.explain_oom(lambda: "compiling", lambda: lowered.step):
            return candidate, lowered, compile_program(candidate, lowered.step)

    started, device = setup.started, setup.placement.mesh.devices.flat[0]
    changes = find_deciding_changes(started, setup.config, device) if started else ""
    config = keep_settings(setup.config, started.config) if started and not changes else setup.config
    channel = setup.processes.channel("settings")
    copied = count_copied_bytes(setup.config.run.check_replicas, setup.program.state)
    limit = int(channel.exchange(str(count_usable_bytes(device)))[0])  # all processes need the same candidates
    limit = max(limit - copied, 0)
    where = describe_cluster(config.mesh.devices), limit, device.platform == "gpu"
    if device.platform == "gpu" and not chip_of(device.device_kind):
        say(f"{device.device_kind} has no figures in compiler/chips.py: `auto` is estimated with those of {STAND_IN}")
    candidates, left_out = list_candidates(config, *where)
    if left_out:
        say(left_out)
    choice = choose_settings(
        candidates,
        compile_step,
        count_peak=lambda compiled: hlo.read_memory(compiled[2]).peak,
        agree=lambda peak: max(map(int, channel.exchange(str(peak)))),
        say=say,
    )
    if chosen := list_choices(setup.config, choice.config):
        reason = f"; chosen anew because {changes}" if changes else ""
        say(f"chosen: {format_choices(chosen)}{reason}")
    for line in describe_newly_unread(choice.config, setup.config):
        say(line)
    candidate, lowered, step = choice.compiled
    held_out = lowered.held_out and compile_program(candidate, lowered.held_out)
    outer_step = lowered.outer_step and compile_program(candidate, lowered.outer_step)
    return candidate, lowered, Executables(step, held_out, outer_step)


def find_deciding_changes(started: Started, config: Config, device: jax.Device) -> str:
    """Return what changed since the start of a run, of all that decides the choice of settings; "" if nothing did."""
    given = [name for name, value in list_settings(config).items() if value != AUTO]
    changed = [
        name for name in (*DECIDING, *given) if fields.get_field(started.config, name) != fields.get_field(config, name)
    ]
    return find_changes(started, config, device) or (f"{', '.join(changed)} changed" if changed else "")
