"""One training step: loss and gradients from an executor, the clip, the update or none where it would do harm."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from jaxopt_llm.execution.executor import Executor
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Parts
from jaxopt_llm.parallel.mesh import compiler_options
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.training import guard, update
from jaxopt_llm.training import state as training_state
from jaxopt_llm.training.state import StateSpecs, TrainState
from jaxopt_llm.training.update import Optimizers


@dataclass(frozen=True)
class TrainingConfig:
    steps: int = 1000
    """optimizer steps of the whole run"""
    batch_size: int = 32
    """sequences per step, over all devices and microbatches"""
    sequence_length: int = 256
    """tokens per sequence"""
    accumulation: int = 1
    """microbatches per step: each holds batch_size / accumulation sequences"""
    skip_outliers: float = 0.0
    """skip a step whose gradient norm is above this many times the median of those of the last 128 steps that were not
    skipped; 0: skip only what is not finite, which is always skipped"""
    skip_limit: int = 10
    """skipped steps in a row that end the run, with exit code 3"""

    def problems(self) -> list[str]:
        found = [
            f"training.{name}={getattr(self, name)}: must be at least 1"
            for name in ("steps", "batch_size", "sequence_length", "accumulation", "skip_limit")
            if getattr(self, name) < 1
        ]
        if self.skip_outliers and not self.skip_outliers > 1:
            found.append(f"training.skip_outliers={self.skip_outliers}: must be above 1, or 0 for none")
        return found


Metrics = dict[str, jax.Array]
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def make_step(
    parts: Parts,
    specs: StateSpecs,
    optimizers: Optimizers,
    schedule: optax.Schedule,
    clip_norm: float,
    skip_outliers: float,
    executor: Executor,
    placement: Placement,
    microbatches: int = 1,
) -> Step:
    """The jitted step; it consumes the state it is given. Batch fields: [M, B, S], M microbatches.

    Metrics, float32 but for the counts: loss and grad_norm (neither need be finite), learning_rate, and how many steps
    were skipped, this one included: `skipped` in all, `skipped_in_a_row` up to here.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        tokens = jnp.sum(batch.loss_mask)
        # An all-masked batch has loss 0 and gradient 0, not NaN.
        cotangent = 1.0 / jnp.maximum(tokens, 1).astype(jnp.float32)
        loss, _, _, gradients = executor.loss_and_gradients(
            parts, state.trainable, state.frozen, batch, cotangent, placement
        )
        loss, norm = loss * cotangent, update.global_norm(gradients)
        good, remembered = guard.judge(state.guard, loss, norm, skip_outliers)
        scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30))
        masters, moments, compute = update.apply(
            optimizers, specs.masters, (state.masters, state.moments, state.compute), gradients, scale, good, placement
        )
        new_state = TrainState(
            step=state.step + 1,
            masters=masters,
            moments=moments,
            compute=compute,
            frozen=state.frozen,
            guard=remembered,
        )
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": jnp.asarray(schedule(state.guard["updates"]), jnp.float32),
            "skipped": new_state.step - remembered["updates"],
            "skipped_in_a_row": remembered["skipped_in_a_row"],
        }
        return new_state, metrics

    resting = training_state.shardings(specs, placement)
    rows = placement.activation(None, "batch", "sequence")
    return jax.jit(
        step,
        in_shardings=(resting, rows),
        out_shardings=(resting, placement.replicated),
        donate_argnums=0,
        compiler_options=compiler_options(placement.mesh, microbatches),
    )
