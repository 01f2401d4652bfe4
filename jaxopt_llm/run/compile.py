"""Compiled programs of a run: the training step, the outer step and the held-out loss."""

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxopt_llm.compiler import hlo
from jaxopt_llm.compiler.xla_options import NO_USER_OPTIONS, compiler_options
from jaxopt_llm.config import XlaConfig
from jaxopt_llm.config.training import GRPO
from jaxopt_llm.core import tree
from jaxopt_llm.distributed.runtime import repeatable_options
from jaxopt_llm.execution.executor import Executor
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.model import OBJECTIVE, Model
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.run.setup import Setup
from jaxopt_llm.step.reference import add_reference
from jaxopt_llm.step.state import TrainState
from jaxopt_llm.step.teacher import Teacher


def make_held_out_loss(
    model: Model,
    executor: Executor,
    placement: Placement,
    xla: XlaConfig = NO_USER_OPTIONS,
    teacher: Teacher | None = None,
) -> Any:
    """Return a jitted (state, batch) -> (sum of the loss, number of tokens or other units in it).

    The sum is what `Objective.compute` reports: of the next token in nats.

    Batch fields: [M, B, S].
    """
    placement, extended = placement.for_evaluation(), teacher.extend(model) if teacher else model

    def sums(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
        params = tree.merge(state.trainable, state.frozen)
        batch = add_reference(model, executor, params, batch, placement)
        if teacher is not None:
            assert state.teacher is not None
            batch = teacher.add_inputs(state.teacher, batch, placement)
            params = teacher.extend_frozen(params, state.teacher)
        return executor.loss(extended, params, batch, placement)[OBJECTIVE], model.objective.count(batch)

    options = compiler_options(placement.mesh, user=xla)
    return jax.jit(sums, out_shardings=placement.replicated, compiler_options=options)


@dataclass(frozen=True)
class LossSum:
    """Sum of a loss over tokens or pairs, and their number; see `make_held_out_loss`."""

    loss: Any = 0.0  # a number, or an array
    tokens: int = 0

    def __add__(self, other: "LossSum") -> "LossSum":
        return LossSum(self.loss + other.loss, self.tokens + other.tokens)

    @property
    def mean(self) -> Any:
        return self.loss / self.tokens


def measure_loss(
    held_out_loss: Any,
    state: TrainState,
    batches: Iterable[Batch],
    wait: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> LossSum:
    """Return the loss over batches. The devices hold one batch at a time.

    Args:
        held_out_loss: the function from `make_held_out_loss`, compiled or not.
        wait: returns a context in which the thread waits for the devices.
    """
    total = LossSum()
    for batch in batches:
        with wait():
            loss, tokens = held_out_loss(state, batch)
            total += LossSum(np.asarray(loss, np.float64), int(tokens))
    return total


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
    if setup.config.evaluation.every and setup.config.training.objective != GRPO:
        loss = make_held_out_loss(program.model, program.executor, setup.placement, setup.config.xla, program.teacher)
        held_out = loss.lower(program.state, program.batch)
    return Executables(step, held_out, program.outer_step and program.outer_step.lower(program.state))


def compile_program(setup: Setup, program: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile one of the programs. With `run.deterministic` on GPUs, it returns the same bits every time."""
    repeats = setup.config.run.deterministic and jax.default_backend() == "gpu"
    options = repeatable_options(program, setup.directory, setup.processes.first) if repeats else None
    return program.compile(compiler_options=options)
