"""Held-out loss."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm import tree
from jaxopt_llm.execution.executor import Executor
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Parts
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.parallel.xla_options import OURS, XlaConfig, compiler_options
from jaxopt_llm.training.state import TrainState


@dataclass(frozen=True)
class EvaluationConfig:
    every: int = 200
    """steps between two measurements of the held-out loss; one is made after the last step in any case"""
    batches: int = 16
    """held-out batches that one measurement reads, each of training.batch_size sequences"""


def make_held_out(parts: Parts, executor: Executor, placement: Placement, xla: XlaConfig = OURS) -> Any:
    """Jitted (state, batch), fields [M, B, S] -> the sums of loss, in nats, and of real tokens."""
    placement = placement.for_evaluation()

    def sums(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
        params = tree.merge(state.trainable, state.frozen)
        return executor.loss(parts, params, batch, placement)[0], jnp.sum(batch.loss_mask)

    options = compiler_options(placement.mesh, own=xla)
    return jax.jit(sums, out_shardings=placement.replicated, compiler_options=options)


def evaluate(held_out: Any, state: TrainState, batches: Iterable[Batch]) -> float:
    """Mean loss per real token, in nats. held_out: what `make_held_out` gives, compiled or not. One batch at a time is
    on the devices."""
    loss, tokens = 0.0, 0
    for batch in batches:
        of_batch = held_out(state, batch)
        loss, tokens = loss + float(of_batch[0]), tokens + int(of_batch[1])
    return loss / tokens
