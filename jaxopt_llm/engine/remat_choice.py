"""Choice of `remat.policy auto`: the first policy with which a step fits into the memory.

The policies are `none`, the loss as it is written; `save_attention`, for a loss that calls `jaxopt_llm.attention`; and
`full`. The choice is open only if the loss has a loop over layers, or equal layers in a list, that it does not
rematerialise.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import jax

from jaxopt_llm.config import fields
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.engine.program import EngineProgram, Job, make_engine_program
from jaxopt_llm.planning.free_memory import count_usable_bytes, leave_free
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
    usable, policy, refused = leave_free(limit), "none", ""
    for larger in ("save_attention", "full") if program.model.attention.choices else ("full",):
        peak = count_peak(compiled)
        needed = f"needs {peak / GIB:.2f} of {usable / GIB:.2f} GiB per device"
        if agree(peak <= usable):
            return Fitting(program, compiled, f"remat.policy {policy}, which {needed}{refused}")
        refused = f", because {policy} {needed}"
        policy, config = larger, fields.replace_fields(job.config, {"remat.policy": larger})
        program = make_engine_program(replace(job, config=config), program.placement.mesh)
        compiled = compile(program)
    return Fitting(program, compiled, f"remat.policy {policy}{refused}")


def is_open(program: EngineProgram, job: Job) -> bool:
    """Return whether `remat.policy` is open."""
    return job.config.remat.policy == AUTO and program.model.keeps_layers


def find_limit(device: jax.Device) -> int | None:
    """Return the bytes of a GPU that XLA may use. None for a CPU: there the loss is taken as it is written."""
    return None if device.platform == "cpu" else count_usable_bytes(device)
