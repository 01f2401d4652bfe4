"""Programs of a run, compiled with the settings that the configuration leaves open."""

import os
from collections.abc import Callable

import jax

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.config import Config
from jaxopt_llm.planning.oom import OomExplainer
from jaxopt_llm.planning.prediction import describe_cluster
from jaxopt_llm.planning.settings_choice import (
    Candidate,
    choose_settings,
    format_choices,
    keep_settings,
    list_candidates,
    list_choices,
)
from jaxopt_llm.training.compile import Executables, compile_programs, lower_programs
from jaxopt_llm.training.setup import Setup
from jaxopt_llm.training.started import find_changes

CPU_SHARE = 0.5  # of the host's memory, which CPU devices share with everything else

Compiled = tuple[Setup, Executables, Executables]  # the setup, and its programs lowered and compiled


def compile_fitting(setup: Setup, checkpoints: Checkpoints, say: Callable[[str], None]) -> Compiled:
    """Resolve the settings of `settings_choice.CHOSEN`, and compile the programs with them.

    A run that continues on the same devices keeps its choice. Otherwise all processes compile the same candidates, and
    process 0 decides which fits.

    Raises:
        OutOfMemory: the memory of a device does not suffice for compiling.
    """

    def compile_with(config: Config) -> Compiled:
        candidate = setup.with_config(config)
        lowered = lower_programs(candidate)
        explainer = OomExplainer(config, candidate.program, candidate.placement, checkpoints)
        with explainer.explain_oom(lambda: "compiling", lowered.step):
            return candidate, lowered, compile_programs(candidate, lowered)

    if not list_choices(setup.config, setup.config):
        return compile_with(setup.config)
    started, device = setup.started, setup.placement.mesh.devices.flat[0]
    changes = find_changes(started, setup.config, device) if started else ""
    config = keep_settings(setup.config, started.config) if started and not changes else setup.config
    channel = setup.processes.channel("settings")
    limit = int(channel.exchange(str(count_usable_bytes(device)))[0])  # all processes need the same candidates
    choice = choose_settings(
        list_run_candidates(config, device, limit),
        compile_with,
        count_peak=lambda compiled: compiled[2].peak,
        agree=lambda verdict: channel.exchange(verdict)[0],
    )
    for line in choice.rejected:
        say(line)
    reason = f"; chosen anew because {changes}" if changes else ""
    say(f"chosen: {format_choices(list_choices(setup.config, choice.config))}{reason}")
    return choice.compiled


def list_run_candidates(config: Config, device: jax.Device, limit: int) -> list[Candidate]:
    """Return the candidates for the devices of this run, of which `device` is one.

    Args:
        limit: bytes of a device that a step may use.
    """
    return list_candidates(config, describe_cluster(), limit, device.platform == "gpu")


def count_usable_bytes(device: jax.Device) -> int:
    """Return the bytes of a device that a step may use."""
    if device.platform == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(CPU_SHARE * memory) // jax.local_device_count()
    return int(jax.local_devices()[0].memory_stats()["bytes_limit"])
