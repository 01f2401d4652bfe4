"""Held-out loss."""

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.compiler.xla_options import NO_USER_OPTIONS, compiler_options
from jaxopt_llm.config import XlaConfig
from jaxopt_llm.core import tree
from jaxopt_llm.execution.executor import Executor
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.model import Model
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step.state import TrainState


def make_held_out_loss(model: Model, executor: Executor, placement: Placement, xla: XlaConfig = NO_USER_OPTIONS) -> Any:
    """Return a jitted (state, batch) -> (sum of the loss in nats, number of tokens where `loss_mask` is True).

    Batch fields: [M, B, S].
    """
    placement = placement.for_evaluation()

    def sums(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
        params = tree.merge(state.trainable, state.frozen)
        return executor.loss(model, params, batch, placement)[0], jnp.sum(batch.loss_mask)

    options = compiler_options(placement.mesh, user=xla)
    return jax.jit(sums, out_shardings=placement.replicated, compiler_options=options)


@dataclass(frozen=True)
class LossSum:
    """Sum of the loss in nats over the tokens where `loss_mask` is True, and their number."""

    loss: float = 0.0
    tokens: int = 0

    def __add__(self, other: "LossSum") -> "LossSum":
        return LossSum(self.loss + other.loss, self.tokens + other.tokens)

    @property
    def mean(self) -> float:
        return self.loss / self.tokens


def evaluate(
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
    loss, tokens = 0.0, 0
    for batch in batches:
        with wait():
            batch_loss, batch_tokens = held_out_loss(state, batch)
            loss, tokens = loss + float(batch_loss), tokens + int(batch_tokens)
    return LossSum(loss, tokens)
