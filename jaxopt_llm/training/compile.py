"""Lowering and compilation of the two programs of a run: the training step and the held-out loss."""

from dataclasses import dataclass
from typing import Any

import jax

from jaxopt_llm.compiler import hlo
from jaxopt_llm.distributed.runtime import repeatable_options
from jaxopt_llm.training.evaluation import make_held_out_loss
from jaxopt_llm.training.setup import Setup


@dataclass(frozen=True)
class Executables:
    """Step and held-out loss of a run, lowered or compiled from its `Program`.

    Attributes:
        step: (state, batch) -> (state, metrics).
        held_out: (state, batch) -> (sum of the loss, number of tokens where `loss_mask` is True).
    """

    step: Any
    held_out: Any

    @property
    def peak(self) -> int:
        """Bytes of each device that the compiled programs need."""
        return max(memory.peak for memory in self._read_memory())

    def __str__(self) -> str:
        """Return a description of the memory that the programs need, on each device and on the host."""
        host = max(memory.host for memory in self._read_memory())
        host_memory = f" and {host / 2**30:.2f} GiB of host memory" if host else ""
        return f"{self.peak / 2**30:.2f} GiB per device{host_memory} while it runs"

    def _read_memory(self) -> list[hlo.Memory]:
        return [hlo.read_memory(program) for program in (self.step, self.held_out)]


def lower_programs(setup: Setup) -> Executables:
    """Lower both programs for the state and the batch of the run."""
    program = setup.program
    held_out = make_held_out_loss(program.model, program.executor, setup.placement, setup.config.xla)
    return Executables(*(each.lower(program.state, program.batch) for each in (program.step, held_out)))


def compile_programs(setup: Setup, lowered: Executables) -> Executables:
    """Compile both programs. With `run.deterministic` on GPUs, they return the same bits every time."""
    repeats = setup.config.run.deterministic and jax.default_backend() == "gpu"

    def compile(program: jax.stages.Lowered) -> jax.stages.Compiled:
        options = repeatable_options(program, setup.directory, setup.processes.first) if repeats else None
        return program.compile(compiler_options=options)

    return Executables(compile(lowered.step), compile(lowered.held_out))
