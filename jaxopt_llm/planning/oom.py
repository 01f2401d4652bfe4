"""Explanation of out-of-memory errors.

It tells what ran out and by how much, what the program holds, and which settings would save most.
"""

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.errors import JaxRuntimeError

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.compiler import hlo
from jaxopt_llm.compiler.buffers import find_peak
from jaxopt_llm.config import Config
from jaxopt_llm.core.errors import InputError, OutOfMemory
from jaxopt_llm.kernels.attention import get_compute_capability
from jaxopt_llm.parallel.offload import HOST, count_resting_bytes
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.planning.advice import advise, format_advice
from jaxopt_llm.planning.free_memory import GIB
from jaxopt_llm.planning.memory import KnownShapes, find_largest, format_kinds, format_largest, sum_by_kind
from jaxopt_llm.planning.search.attention_cost import resolve_attention
from jaxopt_llm.planning.search.workload import describe_cluster
from jaxopt_llm.step.program import Program
from jaxopt_llm.step.state import TrainState

EXHAUSTED = "RESOURCE_EXHAUSTED"  # prefix of XLA's error
DEFAULT_LACKING = GIB  # bytes that are assumed to be lacking if XLA's error does not say how many
# Two forms of XLA's error: for a single buffer, and for all buffers of a program.
_REQUESTED = re.compile(r"to allocate (?:request for )?([\d.]+) ?(bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

STEP = "the step"  # name of the training step
# Programs by their names in a sentence.
Programs = Mapping[str, tuple[jax.stages.Lowered, jax.stages.Compiled]]


@dataclass(frozen=True)
class OomExplainer:
    """Explanation of a run's out-of-memory errors.

    Attributes:
        state: abstract state of the run.
        list_shapes: returns the shapes that identify temporaries of its step.
        advise: (bytes of a device that are lacking, whether there is a checkpoint to resume from) -> lines with
            settings that save memory.
    """

    state: TrainState
    list_shapes: Callable[[], KnownShapes]
    advise: Callable[[int, bool], Sequence[str]]
    checkpoints: Checkpoints

    def check_fits(self, programs: Programs, copies_state: bool = False) -> None:
        """Check before anything is allocated that every program fits.

        Simulated devices share the host's memory, and the system would hand it out until it kills the process. A GPU
        would fail in the middle of the first step.

        Args:
            copies_state: whether a copy of the state is made beside the step (replicas.copies_state).

        Raises:
            OutOfMemory: a program needs more device memory than there is.
            InputError: a program needs more host memory than there is, because of offloading.
        """
        needs = {name: hlo.read_memory(compiled) for name, (_, compiled) in programs.items()}
        peaks, on_hosts = ({name: getattr(each, kind) for name, each in needs.items()} for kind in ("peak", "host"))
        if copies_state:
            peaks[STEP] += count_resting_bytes(self.state)
            on_hosts[STEP] += count_resting_bytes(self.state, HOST)
        name = max(peaks, key=lambda name: peaks[name])
        peak, on_host = peaks[name], max(on_hosts.values())
        devices, host_memory = jax.local_device_count(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if jax.default_backend() == "cpu":
            needed, limit = (on_host + peak) * devices, host_memory
            where = "on the simulated devices together, but this host has only"
            lacking = -(-(needed - limit) // devices)
        elif on_host * devices > host_memory:
            raise InputError(
                f"{name} needs {on_host * devices / GIB:,.1f} GiB of host memory for --offload.* and --remat.offload, "
                f"but this host has only {host_memory / GIB:,.1f} GiB; offload less"
            )
        else:
            needed, limit = peak, _memory_stats().get("bytes_limit", peak)
            where = "per device, but XLA may use only"
            lacking = needed - limit
        if lacking > 0:
            copy = ", with a copy of the state for run.check_replicas," if copies_state and name == STEP else ""
            message = f"{name}{copy} needs {needed / GIB:,.1f} GiB {where} {limit / GIB:,.1f} GiB"
            message += f": {(needed - limit) / GIB:,.1f} GiB too much"
            raise self._make_error(message, lacking, programs[name][0])

    def explain_oom(
        self, describe_action: Callable[[], str], lower_step: Callable[[], jax.stages.Lowered]
    ) -> contextlib.AbstractContextManager[None]:
        """Replace XLA's out-of-memory error by OutOfMemory with an explanation.

        Args:
            describe_action: returns what was being done, for example "compiling"; called only after a failure.
            lower_step: returns the lowered training step; called only after a failure.
        """

        def explain(error: str) -> OutOfMemory:
            lacking = _parse_requested(error) or DEFAULT_LACKING
            return self._make_error(_describe_error(error, describe_action()), lacking, lower_step())

        return _replace_error(explain)

    def _make_error(self, message: str, lacking: int, lowered: jax.stages.Lowered) -> OutOfMemory:
        newest = self.checkpoints.latest_saved_step()
        if newest is not None:
            message += f"; the run can resume from checkpoint {newest} in {self.checkpoints.directory}"
        advice = self.advise(lacking, newest is not None)
        return OutOfMemory(message, (*self._list_memory(lowered), *advice))

    def _list_memory(self, lowered: jax.stages.Lowered) -> list[str]:
        """Return the lines of the tables of memory by kind and of the largest arrays."""
        try:
            found = find_peak(lowered, _compile_without_autotuning)
        except (JaxRuntimeError, ValueError) as error:  # no room on the GPU for the program, or XLA dumped nothing
            return [f"the arrays in memory cannot be listed: {' '.join(str(error).split())[:200]}"]
        known = self.list_shapes()
        memory = sum_by_kind(self.state, known, found.memory, found.temporaries)
        return [*format_kinds(memory), *format_largest(find_largest(self.state, known, found.temporaries))]


def make_explainer(config: Config, program: Program, placement: Placement, checkpoints: Checkpoints) -> OomExplainer:
    """Return the explainer of a decoder's run, whose advice is predicted by arithmetic."""

    def list_advice(lacking: int, resumes: bool) -> Sequence[str]:
        resolved = resolve_attention(config, get_compute_capability(jax.devices()[0]))
        simulated = jax.default_backend() == "cpu"
        return format_advice(advise(resolved, describe_cluster(config.mesh.devices), lacking, resumes, simulated))

    list_shapes = functools.partial(KnownShapes.from_program, program, config, placement)
    return OomExplainer(program.state, list_shapes, list_advice, checkpoints)


def explain_oom(action: str, remedy: str) -> contextlib.AbstractContextManager[None]:
    """Replace XLA's out-of-memory error by a one-line OutOfMemory with a remedy.

    For commands that only use weights; `train` uses OomExplainer.

    Args:
        action: what is being done, for example "evaluating".
        remedy: what to change.
    """
    return _replace_error(lambda error: OutOfMemory(f"{_describe_error(error, action)}: {remedy}", ()))


@contextlib.contextmanager
def _replace_error(explain: Callable[[str], OutOfMemory]) -> Iterator[None]:
    """Replace XLA's out-of-memory error by what `explain` makes of its text."""
    try:
        yield
    except JaxRuntimeError as error:
        if EXHAUSTED not in str(error):
            raise
        raise explain(str(error)) from error


def _describe_error(error: str, action: str) -> str:
    """Return XLA's error as a sentence."""
    requested, statistics = _parse_requested(error), _memory_stats()
    message = f"out of memory {action}: XLA could not allocate "
    message += f"{requested / GIB:,.2f} GiB more" if requested else "more memory"
    if statistics:
        used, limit = (statistics[name] / GIB for name in ("bytes_in_use", "bytes_limit"))
        message += f", with {used:,.1f} of {limit:,.1f} GiB in use"
    return message


def _compile_without_autotuning(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> jax.stages.Compiled:
    """Compile without autotuning, which would run kernels on a GPU that is full and takes most of the time."""
    all_options: dict[str, Any] = {**options, "xla_gpu_autotune_level": 0}
    return lowered.compile(compiler_options=all_options)


def _memory_stats() -> Mapping[str, int]:
    """Return statistics of the first device's memory; empty if the device has no memory of its own."""
    return jax.local_devices()[0].memory_stats() or {}


def _parse_requested(message: str) -> int | None:
    """Return the bytes of the allocation that failed, or None if XLA's error does not say."""
    found = _REQUESTED.search(message)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None
