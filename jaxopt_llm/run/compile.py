"""Lowering and compilation of the two programs of a run: the training step and the held-out loss."""

from dataclasses import dataclass
from typing import Any

import jax

from jaxopt_llm.compiler import hlo
from jaxopt_llm.distributed.runtime import repeatable_options
from jaxopt_llm.run.setup import Setup
from jaxopt_llm.step.evaluation import make_held_out_loss


@dataclass(frozen=True)
class Executables:
    """Step and held-out loss of a run, lowered or compiled from its `Program`.

    Attributes:
        step: (state, batch, hyperparameters) -> (state, metrics).
        outer_step: state -> state (local_steps.py); None without local steps.
        held_out: (state, batch) -> (sum of the loss, number of tokens where `loss_mask` is True); None if the run
            evaluates nothing.
    """

    step: Any
    held_out: Any
    outer_step: Any = None

    def __str__(self) -> str:
        """Return a description of the memory that the programs need, on each device and on the host."""
        programs = (self.step, self.held_out, self.outer_step)
        memories = [hlo.read_memory(program) for program in programs if program is not None]
        peak, host = max(memory.peak for memory in memories), max(memory.host for memory in memories)
        host_memory = f" and {host / 2**30:.2f} GiB of host memory" if host else ""
        return f"{peak / 2**30:.2f} GiB per device{host_memory} while it runs"


def lower_programs(setup: Setup) -> Executables:
    """Lower the programs for the state and the batch of the run."""
    program, held_out = setup.program, None
    step = program.step.lower(program.state, program.batch)
    if setup.config.evaluation.every:
        loss = make_held_out_loss(program.model, program.executor, setup.placement, setup.config.xla)
        held_out = loss.lower(program.state, program.batch)
    return Executables(step, held_out, program.outer_step and program.outer_step.lower(program.state))


def compile_program(setup: Setup, program: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile one of the programs. With `run.deterministic` on GPUs, it returns the same bits every time."""
    repeats = setup.config.run.deterministic and jax.default_backend() == "gpu"
    options = repeatable_options(program, setup.directory, setup.processes.first) if repeats else None
    return program.compile(compiler_options=options)
