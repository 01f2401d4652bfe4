"""One training step: loss and gradients from an executor, the clip, the update or none where it would do harm. Or, with
the optimizer in the backward, all of it from an executor that takes the update with it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from jaxopt_llm.execution.executor import Executor
from jaxopt_llm.execution.gradients import sum_of_squares
from jaxopt_llm.execution.in_backward import loss_and_update
from jaxopt_llm.model import experts, param
from jaxopt_llm.model.auxiliary import Auxiliary
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Params, Parts
from jaxopt_llm.parallel import offload
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.parallel.xla_options import Options
from jaxopt_llm.training import guard, loss_scale, update
from jaxopt_llm.training import state as training_state
from jaxopt_llm.training.guard import Guard
from jaxopt_llm.training.state import StateSpecs, TrainState
from jaxopt_llm.training.update import Optimizers, State


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
    loss_chunk: int = 1024
    """tokens of each device whose logits exist at a time; 0: those of the whole microbatch"""
    attention: Literal["auto", "xla", "pallas", "triton"] = "auto"
    """what computes attention: XLA's own operations, on any device; our flash-attention kernel in Pallas, for GPUs from
    Ampere on; that in Triton, for Hopper and Blackwell; or of those that support the model and the GPU, the one that
    was measured to be the fastest there, xla where nothing was. What reads a cache is computed by xla"""
    expert_products: Literal["auto", "xla", "pallas"] = "auto"
    """what multiplies rows with their expert's matrices: XLA's own operation, which on GPUs multiplies each with those
    of all experts; our kernel in Pallas, for GPUs from Ampere on; auto: the kernel on such GPUs, else xla"""
    z_loss: float = 0.0
    """times log(Z)² of each token, Z being the softmax's sum, is minimised beside the loss: keeps logits from drifting,
    at 1e-4 or so (Chowdhery et al. 2022). The loss in the metrics is without it"""
    skip_outliers: float = 0.0
    """skip a step whose gradient norm is above this many times the median of those of the last 128 steps that were not
    skipped; 0: skip only what is not finite, which is always skipped"""
    trainable: tuple[str, ...] = ()
    """globs of the paths of the parameters that are trained, as in */scale, where * also fits slashes; the others rest
    in precision.compute_dtype. None given: all, or with lora.rank the adapters alone, beside which these are trained"""
    skip_limit: int = 10
    """skipped steps in a row that end the run, with exit code 3; overflows under loss scaling are not counted"""

    def problems(self) -> list[str]:
        found = [
            f"training.{name}={getattr(self, name)}: must be at least 1"
            for name in ("steps", "batch_size", "sequence_length", "accumulation", "skip_limit")
            if getattr(self, name) < 1
        ]
        found += [
            f"training.{name}={getattr(self, name)}: must be at least 0"
            for name in ("loss_chunk", "z_loss")
            if getattr(self, name) < 0
        ]
        if self.skip_outliers and not self.skip_outliers > 1:
            found.append(f"training.skip_outliers={self.skip_outliers}: must be above 1, or 0 for none")
        return found


Metrics = dict[str, jax.Array]
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
# Loss, gradient norm, whether the step is an overflow of the loss scale's, what is remembered of it, the new state, and
# the auxiliary sums.
Advance = tuple[jax.Array, jax.Array, jax.Array, Guard, State, Auxiliary]


def make_step(
    parts: Parts,
    specs: StateSpecs,
    optimizers: Optimizers,
    schedule: optax.Schedule,
    clip_norm: float,
    skip_outliers: float,
    executor: Executor,
    placement: Placement,
    in_backward: bool = False,
    dropout_seed: int | None = None,
    options: Options | None = None,
) -> Step:
    """The jitted step; it consumes the state it is given. Batch fields: [M, B, S], M microbatches.

    clip_norm: 0 for none.
    in_backward: whether layers are updated during the backward, by an executor of its own. There is one microbatch
        then, no clip and no loss scale, and a step that is not finite is taken all the same, though counted as skipped.
    dropout_seed: what dropout drops in a step follows from it, and the step's number; None: there is no dropout.
    options: of XLA's compiler.

    Metrics, float32 but for the counts: loss and grad_norm (neither need be finite), learning_rate, and how many steps
    were skipped, this one included: `skipped` in all, `skipped_in_a_row` up to here, without overflows; `overflow`,
    bool, whether this one was for the loss scale's sake, and, where there is one, the `loss_scale` of the next; what
    experts.seen says of routers.
    """
    precision = placement.precision

    def after_backward(state: TrainState, batch: Batch, cotangent: jax.Array) -> Advance:
        scale = state.loss_scale.get("scale", 1.0)
        loss, _, auxiliary, gradients = executor.loss_and_gradients(
            parts, state.trainable, state.frozen, batch, scale * cotangent, placement
        )
        # The gradients are divided by the scale as they are clipped: here it would make a second copy of them.
        loss, norm = loss * cotangent, jnp.sqrt(sum_of_squares(gradients, specs.masters)) / scale
        overflow = precision.scales_loss & ~jnp.isfinite(norm)
        good, remembered = guard.judge(state.guard, loss, norm, overflow, skip_outliers)
        clip = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30)) if clip_norm else jnp.float32(1)
        updated = update.apply(optimizers, specs.masters, state.updatable, gradients, clip / scale, good, placement)
        return loss, norm, overflow, remembered, updated, auxiliary

    def during_backward(state: TrainState, batch: Batch, cotangent: jax.Array) -> Advance:
        def read(section: State) -> Params:
            masters, _, compute = section
            return masters if compute is None else compute

        def of_layer(section: str, own: State, gradients: Params) -> State:
            layer_specs = param.layer_specs(specs.masters[section])
            return update.update_layer(optimizers[section], layer_specs, placement, own, gradients)

        sections = update.by_section(state.updatable)
        loss, squares, auxiliary, sections = loss_and_update(
            parts, sections, state.frozen, batch, cotangent, placement, read, of_layer
        )
        loss, norm, overflow = loss * cotangent, jnp.sqrt(squares), jnp.bool(False)
        _, remembered = guard.judge(state.guard, loss, norm, overflow, outliers=0.0)
        return loss, norm, overflow, remembered, update.of_all(sections), auxiliary

    advance = during_backward if in_backward else after_backward

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        if dropout_seed is not None:
            key = jax.random.fold_in(jax.random.key(dropout_seed), state.step)
            noise = jax.random.bits(key, batch.tokens.shape, jnp.uint32)
            batch = replace(batch, noise=jax.lax.with_sharding_constraint(noise, rows))
        tokens = jnp.sum(batch.loss_mask)
        # An all-masked batch has loss 0 and gradient 0, not NaN.
        cotangent = 1.0 / jnp.maximum(tokens, 1).astype(jnp.float32)
        loss, norm, overflow, remembered, (masters, moments, compute), auxiliary = advance(state, batch, cotangent)
        new_state = TrainState(
            step=state.step + 1,
            masters=masters,
            moments=moments,
            compute=compute,
            frozen=offload.store(state.frozen, state.frozen),
            guard=remembered,
            loss_scale=loss_scale.adjust(state.loss_scale, overflow, precision.loss_scale_growth_interval),
        )
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": jnp.asarray(schedule(state.guard["updates"]), jnp.float32),
            "skipped": new_state.step - remembered["updates"],
            "skipped_in_a_row": remembered["skipped_in_a_row"],
            "overflow": overflow,
            **experts.seen(auxiliary.statistics),
        }
        if precision.scales_loss:
            metrics["loss_scale"] = new_state.loss_scale["scale"]
        return new_state, metrics

    resting = training_state.shardings(specs, placement)
    rows = placement.activation(None, "batch", "sequence")
    return jax.jit(
        step,
        in_shardings=(resting, rows),
        out_shardings=(resting, placement.replicated),
        donate_argnums=0,
        compiler_options=options,
    )
