"""Out of memory, explained: what ran out and by how much, what is held, and which settings would save most."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.errors import JaxRuntimeError

from jaxopt_llm.advice import advice_lines, advise
from jaxopt_llm.checkpoint.native import Checkpoints
from jaxopt_llm.config import TrainConfig
from jaxopt_llm.errors import InputError, OutOfMemory
from jaxopt_llm.kernels.attention import capability_of
from jaxopt_llm.parallel import hlo
from jaxopt_llm.parallel.buffers import compile_and_list
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.search.attention import settled
from jaxopt_llm.search.passes import Passes
from jaxopt_llm.training.activations import Activations
from jaxopt_llm.training.memory import GIB, Known, by_kind, kind_lines, largest, largest_lines
from jaxopt_llm.training.program import Program

EXHAUSTED = "RESOURCE_EXHAUSTED"  # how XLA's error begins
UNTOLD = GIB  # how much is taken to be lacking where XLA does not say
# Of a program's buffers, and of a single one's, in XLA's two ways to say it.
_REQUESTED = re.compile(r"to allocate (?:request for )?([\d.]+) ?(bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

Programs = Mapping[str, tuple[jax.stages.Lowered, jax.stages.Compiled]]  # by their names in a sentence


@dataclass(frozen=True)
class Explainer:
    """Of one run."""

    config: TrainConfig
    program: Program
    placement: Placement
    checkpoints: Checkpoints

    def check(self, programs: Programs) -> None:
        """Raises OutOfMemory where one of them needs more than there is, before anything is allocated: simulated
        devices share the host's memory, which the system would give out until it kills the process, and a GPU's fails
        in the middle of the first step."""
        needs = {name: hlo.memory(compiled) for name, (_, compiled) in programs.items()}
        name = max(needs, key=lambda name: needs[name].peak)
        peak, on_host = needs[name].peak, max(each.host for each in needs.values())
        devices, has = jax.local_device_count(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if jax.default_backend() == "cpu":
            together, where, limit = (on_host + peak) * devices, "on the simulated devices together, this host has", has
            lacking = -(-(together - has) // devices)
        elif on_host * devices > has:
            raise InputError(
                f"{name} needs {on_host * devices / GIB:,.1f} GiB of host memory for what --offload.* and "
                f"--remat.offload put there, this host has {has / GIB:,.1f} GiB; offload less"
            )
        else:
            together, where, limit = peak, "per device, XLA may use", _statistics().get("bytes_limit", peak)
            lacking = peak - limit
        if lacking > 0:
            message = f"{name} needs {together / GIB:,.1f} GiB {where} {limit / GIB:,.1f} GiB"
            message += f": {(together - limit) / GIB:,.1f} GiB too much"
            raise self._error(message, lacking, programs[name][0])

    @contextlib.contextmanager
    def during(self, what: Callable[[], str], step: jax.stages.Lowered) -> Iterator[None]:
        """Raises OutOfMemory in place of XLA's own error.

        what: was done, as in "compiling"; asked for when it fails.
        """
        try:
            yield
        except JaxRuntimeError as error:
            if EXHAUSTED not in str(error):
                raise
            raise self._error(_told(str(error), what()), _requested(str(error)) or UNTOLD, step) from error

    def _error(self, message: str, lacking: int, lowered: jax.stages.Lowered) -> OutOfMemory:
        newest = self.checkpoints.newest()
        if newest is not None:
            message += f"; the run can go on from checkpoint {newest} in {self.checkpoints.directory}"
        simulated = jax.default_backend() == "cpu"
        known = settled(self.config, capability_of(jax.devices()[0]))
        advice = advise(known, lacking, newest is not None, simulated)
        return OutOfMemory(message, (*self._held(lowered), *advice_lines(advice)))

    def _held(self, lowered: jax.stages.Lowered) -> list[str]:
        try:
            compiled, temporaries = compile_and_list(lowered, _compile_without_trials)
        except (JaxRuntimeError, ValueError) as error:  # the GPU has no room for the program, or XLA dumped nothing
            return [f"what it holds cannot be listed: {' '.join(str(error).split())[:200]}"]
        activations = Activations(self.config.model, self.config.training, self.placement)
        known = Known.of(self.program, activations, self.config.remat, Passes.of(self.config).waiting)
        memory = by_kind(self.program, known, hlo.memory(compiled), temporaries)
        return [*kind_lines(memory), *largest_lines(largest(self.program, known, temporaries))]


@contextlib.contextmanager
def remedied(what: str, remedy: str) -> Iterator[None]:
    """`Explainer.during` for a command that only uses weights: one line, with what to change."""
    try:
        yield
    except JaxRuntimeError as error:
        if EXHAUSTED not in str(error):
            raise
        raise OutOfMemory(f"{_told(str(error), what)}: {remedy}", ()) from error


def _told(error: str, what: str) -> str:
    """XLA's error in a sentence."""
    requested, statistics = _requested(error), _statistics()
    message = f"out of memory {what}: XLA could not allocate "
    message += f"{requested / GIB:,.2f} GiB more" if requested else "what it asked for"
    if statistics:
        used, limit = (statistics[name] / GIB for name in ("bytes_in_use", "bytes_limit"))
        message += f", with {used:,.1f} of {limit:,.1f} GiB in use"
    return message


def _compile_without_trials(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> jax.stages.Compiled:
    """Autotuning would run kernels on a GPU that is full, and takes most of the time."""
    untried: dict[str, Any] = {**options, "xla_gpu_autotune_level": 0}
    return lowered.compile(compiler_options=untried)


def _statistics() -> Mapping[str, int]:
    """Of the first device's memory; nothing where it has none of its own."""
    return jax.local_devices()[0].memory_stats() or {}


def _requested(message: str) -> int | None:
    """Bytes that an allocation wanted, where XLA's error says so."""
    found = _REQUESTED.search(message)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None
