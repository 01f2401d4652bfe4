"""Choice of `remat.policy auto`: the loss as it is written where a step fits into the memory, otherwise `full`.

It is open only if the loss has a loop over layers that it does not rematerialise.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import jax

from jaxopt_llm.config import fields
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.engine.program import EngineProgram, Job, make_engine_program
from jaxopt_llm.planning.run_programs import count_usable_bytes
from jaxopt_llm.planning.search.ranking import FREE
from jaxopt_llm.planning.units import GIB

T = TypeVar("T")


@dataclass(frozen=True)
class Fitting(Generic[T]):
    """A program, what compiling its step returned, and the choice in words; "" if nothing was open."""

    program: EngineProgram
    compiled: T
    chosen: str


def compile_fitting(
    job: Job,
    program: EngineProgram,
    limit: int,
    compile: Callable[[EngineProgram], T],
    count_peak: Callable[[T], int],
    agree: Callable[[bool], bool] = lambda fits: fits,
) -> Fitting[T]:
    """Compile the step of a job with the policy that `auto` chooses.

    Args:
        program: of the job, with the loss as it is written.
        limit: bytes of a device that XLA may use.
        compile: compiles the step of a program.
        count_peak: returns the bytes of a device that the result of `compile` needs.
        agree: returns whether a step fits all processes.
    """
    compiled = compile(program)
    if not is_open(program, job):
        return Fitting(program, compiled, "")
    usable = int((1 - FREE) * limit)
    peak = count_peak(compiled)
    needed = f"needs {peak / GIB:.2f} of {usable / GIB:.2f} GiB per device"
    if agree(peak <= usable):
        return Fitting(program, compiled, f"remat.policy none, which {needed}")
    config = fields.replace_fields(job.config, {"remat.policy": "full"})
    full = make_engine_program(replace(job, config=config), program.placement.mesh)
    return Fitting(full, compile(full), f"remat.policy full, because none {needed}")


def is_open(program: EngineProgram, job: Job) -> bool:
    """Return whether `remat.policy` is open."""
    return job.config.remat.policy == AUTO and program.model.keeps_layers


def find_limit(device: jax.Device) -> int | None:
    """Return the bytes of a GPU that XLA may use. None for a CPU: there the loss is taken as it is written."""
    return None if device.platform == "cpu" else count_usable_bytes(device)
