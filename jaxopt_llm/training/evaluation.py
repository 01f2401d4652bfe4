"""Held-out loss."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxopt_llm import tree
from jaxopt_llm.execution.executor import Executor
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Parts
from jaxopt_llm.parallel.mesh import compiler_options
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.training.state import TrainState


@dataclass(frozen=True)
class EvaluationConfig:
    every: int = 200
    """steps between two measurements of the held-out loss; one is made after the last step in any case"""
    batches: int = 16
    """held-out batches that one measurement reads, each of training.batch_size sequences"""


def make_evaluate(parts: Parts, executor: Executor, placement: Placement) -> Callable[[TrainState, list[Batch]], float]:
    """evaluate(state, batches on the devices, fields [M, B, S]) -> mean loss per real token, in nats."""

    def sums(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
        params = tree.merge(state.trainable, state.frozen)
        return executor.loss(parts, params, batch, placement)[0], jnp.sum(batch.loss_mask)

    compiled = jax.jit(sums, out_shardings=placement.replicated, compiler_options=compiler_options(placement.mesh, 1))

    def evaluate(state: TrainState, batches: list[Batch]) -> float:
        totals = [compiled(state, batch) for batch in batches]
        return sum(float(loss) for loss, _ in totals) / sum(int(tokens) for _, tokens in totals)

    return evaluate
