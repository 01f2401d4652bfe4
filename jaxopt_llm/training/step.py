"""One training step: loss, gradients, gradient clipping and the optimizer update.

The update is always computed. If the loss or the gradient norm is not finite, or the norm is an outlier, it is
discarded (see guard.py, and the `jnp.where` in update.py). With `optimizer.in_backward`, the step calls
`in_backward.loss_and_update` instead of the executor: it updates each period during the backward and cannot discard the
update.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import optax

from jaxopt_llm.config.run import Options
from jaxopt_llm.execution.executor import Executor
from jaxopt_llm.execution.gradients import sum_of_squares
from jaxopt_llm.execution.in_backward import loss_and_update
from jaxopt_llm.model import param
from jaxopt_llm.model.auxiliary import Auxiliary
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.model.moe import experts
from jaxopt_llm.parallel import offload
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.training import update
from jaxopt_llm.training.guard import Guard, judge_step
from jaxopt_llm.training.loss_scale import adjust_loss_scale
from jaxopt_llm.training.state import StateSpecs, TrainState, state_shardings
from jaxopt_llm.training.update import Optimizers, Updatable

Metrics = dict[str, jax.Array]
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


@dataclass(frozen=True)
class StepSettings:
    """Settings of a training step.

    Attributes:
        clip_norm: largest global gradient norm; 0 for no clip.
        skip_outliers: see guard.judge_step; 0 for no limit.
        elementwise: whether the optimizers are elementwise (optimizer.is_elementwise).
        in_backward: update each period during the backward (execution/in_backward.py). Then there is one microbatch, no
            clip and no loss scale. A step that is not finite still updates the parameters, but counts as skipped.
        dropout_seed: seed of dropout, whose mask is a function of the seed and the step; None for no dropout.
        compiler_options: options of the XLA compiler.
    """

    clip_norm: float = 0.0
    skip_outliers: float = 0.0
    elementwise: bool = False
    in_backward: bool = False
    dropout_seed: int | None = None
    compiler_options: Options | None = None


def make_step(
    model: Model,
    specs: StateSpecs,
    optimizers: Optimizers,
    schedule: optax.Schedule,
    executor: Executor,
    placement: Placement,
    settings: StepSettings,
) -> Step:
    """Return the jitted step, (state, batch) -> (state, metrics). It donates the state that it receives.

    Batch fields: [M, B, S], M microbatches. Metrics are float32 scalars, except for the counts and `overflow`:

    - `loss`, `grad_norm`: may be infinite or NaN.
    - `learning_rate`: rate of this step.
    - `skipped`: number of skipped steps so far, this one included.
    - `skipped_in_a_row`: number of consecutive skipped steps up to this one, without overflows.
    - `overflow`: bool; the loss scale made the gradients of this step overflow.
    - `loss_scale`: loss scale of the next step, if the precision has one.
    - the metrics of experts.router_metrics.
    """
    parts = _Step(model, specs, optimizers, schedule, executor, placement, settings)
    state_sharding = state_shardings(specs, placement)
    return jax.jit(
        parts.step,
        in_shardings=(state_sharding, parts.batch_sharding),
        out_shardings=(state_sharding, placement.replicated),
        donate_argnums=0,
        compiler_options=settings.compiler_options,
    )


@dataclass(frozen=True)
class _Outcome:
    """Result of the loss, the backward and the update of a step. overflow: bool; guard: after the step."""

    loss: jax.Array
    norm: jax.Array
    overflow: jax.Array
    guard: Guard
    updated: Updatable
    auxiliary: Auxiliary


@dataclass(frozen=True, eq=False)
class _Step:
    model: Model
    specs: StateSpecs
    optimizers: Optimizers
    schedule: optax.Schedule
    executor: Executor
    placement: Placement
    settings: StepSettings

    @property
    def batch_sharding(self) -> jax.sharding.NamedSharding:
        """Sharding of the batch fields [M, B, S]."""
        return self.placement.activation(None, "batch", "sequence")

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        # Compiled programs are named after this method: jit_step.
        precision, dropout_seed = self.placement.precision, self.settings.dropout_seed
        if dropout_seed is not None:
            key = jax.random.fold_in(jax.random.key(dropout_seed), state.step)
            noise = jax.random.bits(key, batch.tokens.shape, jnp.uint32)
            batch = replace(batch, noise=jax.lax.with_sharding_constraint(noise, self.batch_sharding))
        tokens = jnp.sum(batch.loss_mask)
        # An all-masked batch has loss 0 and gradient 0, not NaN.
        per_token = 1.0 / jnp.maximum(tokens, 1).astype(jnp.float32)
        advance = self._advance_in_backward if self.settings.in_backward else self._advance_after_backward
        outcome = advance(state, batch, per_token)
        new_state = TrainState(
            state.step + 1,
            *outcome.updated,
            frozen=offload.store_like(state.frozen, state.frozen),
            guard=outcome.guard,
            loss_scale=adjust_loss_scale(state.loss_scale, outcome.overflow, precision.loss_scale_growth_interval),
        )
        metrics = {
            "loss": outcome.loss,
            "grad_norm": outcome.norm,
            "learning_rate": jnp.asarray(self.schedule(state.guard["updates"]), jnp.float32),
            "skipped": new_state.step - outcome.guard["updates"],
            "skipped_in_a_row": outcome.guard["skipped_in_a_row"],
            "overflow": outcome.overflow,
            **experts.router_metrics(outcome.auxiliary.statistics),
        }
        if precision.scales_loss:
            metrics["loss_scale"] = new_state.loss_scale["scale"]
        return new_state, metrics

    def _advance_after_backward(self, state: TrainState, batch: Batch, per_token: jax.Array) -> _Outcome:
        """Compute all gradients, then update all periods."""
        specs, placement, clip_norm = self.specs.masters, self.placement, self.settings.clip_norm
        scale = state.loss_scale.get("scale", 1.0)
        # `trainable` is the compute copy where there is one, and the masters otherwise.
        loss, _, auxiliary, gradients = self.executor.loss_and_gradients(
            self.model, state.trainable, state.frozen, batch, scale * per_token, placement
        )
        # The update divides the gradients by the scale together with the clip: to divide here would make a second copy.
        loss, norm = loss * per_token, jnp.sqrt(sum_of_squares(gradients, specs)) / scale
        overflow = placement.precision.scales_loss & ~jnp.isfinite(norm)
        good, guard = judge_step(state.guard, loss, norm, overflow, self.settings.skip_outliers)
        clip = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30)) if clip_norm else jnp.float32(1)
        updated = update.apply_gradients(
            *(self.optimizers, specs, state.updatable, gradients, clip / scale, good, placement),
            elementwise=self.settings.elementwise,
        )
        return _Outcome(loss, norm, overflow, guard, updated, auxiliary)

    def _advance_in_backward(self, state: TrainState, batch: Batch, per_token: jax.Array) -> _Outcome:
        """Update each period during the backward."""

        def read_params(section_state: Updatable) -> Params:
            masters, _, compute = section_state
            return masters if compute is None else compute

        def update_period(section: str, period_state: Updatable, gradients: Params) -> Updatable:
            specs = param.period_specs(self.specs.masters[section])
            return update.update_period(self.optimizers[section], specs, self.placement, period_state, gradients)

        sections = update.split_sections(state.updatable)
        loss, squares, auxiliary, sections = loss_and_update(
            self.model, sections, state.frozen, batch, per_token, self.placement, read_params, update_period
        )
        loss, norm, overflow = loss * per_token, jnp.sqrt(squares), jnp.bool(False)
        _, guard = judge_step(state.guard, loss, norm, overflow, outliers=0.0)
        return _Outcome(loss, norm, overflow, guard, update.join_sections(sections), auxiliary)
