"""Programs of a run, compiled with the settings that the configuration leaves open."""

import os
from collections.abc import Callable

import jax

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.compiler import hlo
from jaxopt_llm.compiler.chips import chip_of
from jaxopt_llm.config import Config, fields
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.distributed.runtime import MEMORY_FRACTION
from jaxopt_llm.planning.oom import make_explainer
from jaxopt_llm.planning.prediction import describe_cluster
from jaxopt_llm.planning.settings_choice import (
    Candidate,
    Verdict,
    choose_settings,
    find_common_verdict,
    format_choices,
    keep_settings,
    list_candidates,
    list_choices,
    list_settings,
)
from jaxopt_llm.training.compile import Executables, compile_program, lower_programs
from jaxopt_llm.training.setup import Setup
from jaxopt_llm.training.started import Started, find_changes

# Settings that decide which candidates fit, in addition to the devices and the mesh, and that a resume may change.
DECIDING = (
    *("training.batch_size", "training.accumulation", "training.sequence_length", "training.attention"),
    *("remat.every", "remat.offload", "offload.optimizer", "offload.parameters", "optimizer.in_backward"),
    *("optimizer.name", "optimizer.state_dtype", "precision.compute_dtype", "precision.reduce_dtype"),
    *("precision.matmul", "sharding.zero_stage", "sharding.sequence_parallel", "pipeline.schedule", "lora.rank"),
    *("data.documents_per_row", "xla.options"),
)
CPU_SHARE = 0.5  # of the host's memory, which CPU devices share with everything else

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
        with explainer.explain_oom(lambda: "compiling", lowered.step):
            return candidate, lowered, compile_program(candidate, lowered.step)

    started, device = setup.started, setup.placement.mesh.devices.flat[0]
    changes = find_deciding_changes(started, setup.config, device) if started else ""
    config = keep_settings(setup.config, started.config) if started and not changes else setup.config
    channel = setup.processes.channel("settings")
    limit = int(channel.exchange(str(count_usable_bytes(device)))[0])  # all processes need the same candidates
    choice = choose_settings(
        list_run_candidates(config, device, limit),
        compile_step,
        count_peak=lambda compiled: hlo.read_memory(compiled[2]).peak,
        agree=lambda verdict: find_common_verdict([*map(Verdict, channel.exchange(verdict.value))]),
        say=say,
    )
    if chosen := list_choices(setup.config, choice.config):
        reason = f"; chosen anew because {changes}" if changes else ""
        say(f"chosen: {format_choices(chosen)}{reason}")
    candidate, lowered, step = choice.compiled
    return candidate, lowered, Executables(step, compile_program(candidate, lowered.held_out))


def find_deciding_changes(started: Started, config: Config, device: jax.Device) -> str:
    """Return what changed since the start of a run, of all that decides the choice of settings; "" if nothing did."""
    given = [name for name, value in list_settings(config).items() if value != AUTO]
    changed = [
        name for name in (*DECIDING, *given) if fields.get_field(started.config, name) != fields.get_field(config, name)
    ]
    return find_changes(started, config, device) or (f"{', '.join(changed)} changed" if changed else "")


def list_run_candidates(config: Config, device: jax.Device, limit: int) -> list[Candidate]:
    """Return the candidates for the devices of this run, of which `device` is one.

    Args:
        limit: bytes of a device that a step may use.
    """
    return list_candidates(config, describe_cluster(), limit, device.platform == "gpu")


def count_usable_bytes(device: jax.Device) -> int:
    """Return the bytes of a device that a step may use; 0 if nothing is known, which means to save memory."""
    if device.platform == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(CPU_SHARE * memory) // jax.local_device_count()
    # Not every allocator that XLA_PYTHON_CLIENT_ALLOCATOR can name has statistics.
    if limit := (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"):
        return int(limit)
    chip = chip_of(device.device_kind)
    return int(float(MEMORY_FRACTION) * chip.memory_bytes) if chip else 0
