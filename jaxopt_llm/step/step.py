"""One training step: loss, gradients, gradient clipping and the optimizer update.

`update_after_backward` takes the gradients of any model. `differentiate_decoder` computes the gradients of the decoder,
whose step also has dropout and the metrics of routers.

The update is always computed. If the loss or the gradient norm is not finite, or the norm is an outlier, the update is
discarded (see guard.py, and the `jnp.where` in update.py).

With `optimizer.in_backward`, the step calls `in_backward.loss_and_update` instead of the executor: it updates each
period during the backward and cannot discard the update.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from jaxopt_llm.config.run import Options
from jaxopt_llm.core import tree
from jaxopt_llm.execution import mtp
from jaxopt_llm.execution.executor import Executor, sum_of_squares
from jaxopt_llm.execution.in_backward import loss_and_update
from jaxopt_llm.model import param
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.linear.leaves import ScaledWeight, is_wrapped
from jaxopt_llm.model.model import OBJECTIVE, Model, Params, Sums
from jaxopt_llm.model.moe import experts
from jaxopt_llm.model.objectives import split_loss
from jaxopt_llm.parallel import offload
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import LOCAL_GROUPS
from jaxopt_llm.step import update
from jaxopt_llm.step.guard import Guard, adjust_loss_scale, judge_step
from jaxopt_llm.step.hyperparameters import Hyperparameters, make_rate_metrics, place_hyperparameters
from jaxopt_llm.step.reference import add_reference
from jaxopt_llm.step.state import StateSpecs, TrainState, state_shardings
from jaxopt_llm.step.teacher import Teacher, remove_table
from jaxopt_llm.step.update import LossOptimizer, Scalars, SectionOptimizers, Updatable

Metrics = dict[str, Any]  # arrays on the device, or `Metric`s of them
# The metrics of every step. All others are the model's.
OF_STEP = ("loss", "grad_norm", "skipped", "skipped_in_a_row", "overflow", "learning_rate", "loss_scale")
# (state, batch, hyperparameters) -> (state, metrics). With an optimizer of the user there are no hyperparameters.
Step = Callable[[TrainState, Any, Hyperparameters | None], tuple[TrainState, Metrics]]


@dataclass(frozen=True)
class StepSettings:
    """Settings of a training step.

    Attributes:
        clip_norm: largest global gradient norm; 0 for no clip.
        skip_outliers, spike_factor: limits of the norm and of the loss, see guard.judge_step; 0 for none.
        ema_decay: decay of the average of the parameters (update.py); 0 for no average.
        elementwise: whether the optimizers are elementwise (optimizer.is_elementwise).
        gradients_by_period: whether the backward makes the gradients of a stack period by period, without a loop.
        in_backward: update each period during the backward (execution/in_backward.py). Then there is one microbatch, no
            clip and no loss scale. A step that is not finite still updates the parameters, but counts as skipped.
        dropout_seed: seed of the decoder's dropout, whose mask is a function of the seed and the step; None for no
            dropout.
    """

    clip_norm: float = 0.0
    skip_outliers: float = 0.0
    spike_factor: float = 0.0
    ema_decay: float = 0.0
    elementwise: bool = False
    gradients_by_period: bool = False
    in_backward: bool = False
    dropout_seed: int | None = None

    def new_weight(self, guard: Guard) -> jax.Array | float:
        """Return the weight of the new parameters in their average; 0 without an average."""
        return update.new_weight(self.ema_decay, guard["updates"]) if self.ema_decay else 0.0


@dataclass(frozen=True)
class Differentiated:
    """Loss and gradients of a batch.

    Attributes:
        loss: mean loss, float32.
        gradients: gradients of `divisor` × the mean loss.
        divisor: float32 scalar. The update divides by it together with the clip: to divide here would make a second
            copy of the gradients.
        metrics: further metrics of the step.
        variables: the model's variables that are not parameters, after the batch.
        written: the values that the loss assigns to parameters, with None for those to which it assigns nothing; None
            if it assigns to none. The update starts from them.
    """

    loss: jax.Array
    gradients: Params
    divisor: jax.Array | float
    metrics: Metrics
    variables: Params
    written: Params | None = None


@dataclass(frozen=True)
class Outcome:
    """Result of the loss, the backward and the update of a step.

    overflow: bool. guard: after the step. metrics, variables: see Differentiated. frozen: the frozen parameters after
    the step; None if they stay as they are.
    """

    loss: jax.Array
    norm: jax.Array
    overflow: jax.Array
    guard: Guard
    updated: Updatable
    metrics: Metrics
    variables: Params
    frozen: Params | None = None


Differentiate = Callable[[TrainState, Any, jax.Array | float], Differentiated]  # (state, batch, loss scale)
Advance = Callable[[TrainState, Any, Hyperparameters | None], Outcome]  # (state, batch, hyperparameters)
BindOptimizers = Callable[[Hyperparameters | None], LossOptimizer]
BindSchedule = Callable[[Hyperparameters | None], optax.Schedule | None]


def is_of_step(name: str) -> bool:
    """Return whether a metric is one of every step, or one of several such as `learning_rate/head`."""
    return name in OF_STEP or name.startswith("learning_rate/")


def jit_step(
    step: Step,
    specs: StateSpecs,
    placement: Placement,
    batch_sharding: tree.Tree,
    compiler_options: Options | None = None,
) -> Any:
    """Return the step jitted for a state of these specs. It donates the state that it receives.

    Args:
        batch_sharding: of the batch's fields, or one for all of them.
    """
    state_sharding = state_shardings(specs, placement)
    return jax.jit(
        step,
        in_shardings=(state_sharding, batch_sharding, placement.replicated),
        out_shardings=(state_sharding, placement.replicated),
        donate_argnums=0,
        compiler_options=compiler_options,
    )


@dataclass(frozen=True, eq=False)
class BoundStep:
    """Jitted step with its hyperparameters: (state, batch) -> (state, metrics).

    jitted: from `jit_step`. hyperparameters: on the host.
    """

    jitted: Any
    hyperparameters: Hyperparameters | None
    placement: Placement

    @functools.cached_property
    def placed(self) -> Hyperparameters | None:
        """The hyperparameters on the devices. A step that `lower` returned takes them as its third argument."""
        return place_hyperparameters(self.hyperparameters, self.placement.replicated)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        new: tuple[TrainState, Metrics] = self.jitted(state, batch, self.placed)
        return new

    def lower(self, state: TrainState, batch: Any) -> jax.stages.Lowered:
        """Return the step lowered for a state and a batch, which may be abstract."""
        lowered: jax.stages.Lowered = self.jitted.lower(state, batch, self.hyperparameters)
        return lowered


@dataclass(frozen=True, eq=False)
class ModelStep:
    """The step of any model, not jitted: its method `step`.

    Attributes:
        advance: computes the loss, the backward and the update.
        bind_schedule: see BindSchedule.
        placement: with local steps, the placement of one group.
    """

    advance: Advance
    bind_schedule: BindSchedule
    placement: Placement

    def step(
        self, state: TrainState, batch: Any, hyperparameters: Hyperparameters | None
    ) -> tuple[TrainState, Metrics]:
        """Return the state after a step, and its metrics.

        Metrics are float32 scalars, except for the counts and `overflow`. Metrics of the model may be `Metric`s:

        - `loss`, `grad_norm`: may be infinite or NaN.
        - `learning_rate`: rate of this step, if there is a schedule, or if the user's optimizer has it in its state;
          with several of these, `learning_rate/` and the label of each (hyperparameters.py).
        - `skipped`: number of skipped steps so far, this one included.
        - `skipped_in_a_row`: number of consecutive skipped steps up to this one, without overflows.
        - `overflow`: bool; the loss scale made the gradients of this step overflow.
        - `loss_scale`: loss scale of the next step, if the precision has one.
        - the metrics of the model.
        """
        # Compiled programs are named after this method: jit_step.
        precision, schedule = self.placement.precision, self.bind_schedule(hyperparameters)
        outcome = self.advance(state, batch, hyperparameters)
        new_state = TrainState(
            state.step + 1,
            **outcome.updated._asdict(),
            frozen=offload.store_like(state.frozen if outcome.frozen is None else outcome.frozen, state.frozen),
            guard=outcome.guard,
            loss_scale=adjust_loss_scale(state.loss_scale, outcome.overflow, precision.loss_scale_growth_interval),
            variables=outcome.variables,
            teacher=offload.store_like(state.teacher, state.teacher),
        )
        metrics = {
            "loss": outcome.loss,
            "grad_norm": outcome.norm,
            "skipped": new_state.step - outcome.guard["updates"],
            "skipped_in_a_row": outcome.guard["skipped_in_a_row"],
            "overflow": outcome.overflow,
            **outcome.metrics,
        }
        if schedule is not None:
            metrics["learning_rate"] = jnp.asarray(schedule(state.guard["updates"]), jnp.float32)
        else:
            metrics |= make_rate_metrics(outcome.updated.moments[update.WHOLE])
        if precision.scales_loss:
            metrics["loss_scale"] = new_state.loss_scale["scale"]
        return new_state, metrics


def update_after_backward(
    differentiate: Differentiate,
    bind: BindOptimizers,
    specs: StateSpecs,
    placement: Placement,
    settings: StepSettings,
) -> Advance:
    """Return the function that computes all gradients, and then updates all parameters."""
    clip_norm = settings.clip_norm

    def advance(state: TrainState, batch: Any, hyperparameters: Hyperparameters | None) -> Outcome:
        backward = differentiate(state, batch, state.loss_scale.get("scale", 1.0))
        squares = sum_of_squares(backward.gradients, specs.masters, settings.gradients_by_period)
        norm = jnp.sqrt(squares) / backward.divisor
        overflow = placement.precision.scales_loss & ~jnp.isfinite(norm)
        good, guard = judge_step(
            state.guard, backward.loss, norm, overflow, settings.skip_outliers, settings.spike_factor
        )
        clip = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30)) if clip_norm else jnp.float32(1)
        scalars = Scalars(clip / backward.divisor, good, settings.new_weight(state.guard), backward.loss)
        if backward.written is not None:
            state = _assign(state, backward.written, good)
        updated = update.apply_gradients(
            bind(hyperparameters),
            specs.masters,
            state.updatable,
            backward.gradients,
            scalars,
            placement,
            elementwise=settings.elementwise,
        )
        # A step that is skipped changes no variables either.
        variables = jax.tree.map(lambda new, old: jnp.where(good, new, old), backward.variables, state.variables)
        return Outcome(backward.loss, norm, overflow, guard, updated, backward.metrics, variables, state.frozen)

    return advance


def _assign(state: TrainState, written: Params, good: jax.Array) -> TrainState:
    """Return the state with the values that the loss assigns to parameters, unless the step is skipped."""

    def assign(old: jax.Array | None, new: jax.Array | None) -> jax.Array | None:
        if old is None or new is None:
            return old
        on_device = offload.fetch_to_device(old)
        return offload.store_like(jnp.where(good, new.astype(old.dtype), on_device), old)

    def assign_to(half: Params) -> Params:
        return jax.tree.map(assign, half, written, is_leaf=lambda leaf: leaf is None or is_wrapped(leaf))

    return replace(state, masters=assign_to(state.masters), frozen=assign_to(state.frozen))


def make_decoder_advance(
    model: Model,
    executor: Executor,
    placement: Placement,
    bind: BindOptimizers,
    specs: StateSpecs,
    settings: StepSettings,
    teacher: Teacher | None = None,
) -> Advance:
    """Return the loss, the backward and the update of a model of tokens, for a `ModelStep`.

    teacher: None unless the model's objective needs one.

    Batch fields: [M, B, S], M microbatches. `_make_metrics` makes further metrics.
    """
    if settings.in_backward:
        advance = update_in_backward(model, bind, specs, placement, settings)
    else:
        differentiate = differentiate_decoder(model, executor, placement, specs.largest, teacher)
        advance = update_after_backward(differentiate, bind, specs, placement, settings)
    if model.objective.needs_reference:
        advance = _with_reference(advance, model, executor, placement)
    if settings.dropout_seed is None:
        return advance
    return _with_noise(advance, settings.dropout_seed, placement)


def _with_reference(advance: Advance, model: Model, executor: Executor, placement: Placement) -> Advance:
    """Add the log-probabilities of the reference model to the batch."""

    def advance_with_reference(state: TrainState, batch: Batch, hyperparameters: Hyperparameters | None) -> Outcome:
        params = tree.merge(state.trainable, state.frozen)
        return advance(state, add_reference(model, executor, params, batch, placement), hyperparameters)

    return advance_with_reference


def _with_noise(advance: Advance, seed: int, placement: Placement) -> Advance:
    """Add random bits of the seed and the step to the batch, and with local steps of the group."""
    batch_sharding = placement.activation(None, "batch", "sequence")

    def advance_with_noise(state: TrainState, batch: Batch, hyperparameters: Hyperparameters | None) -> Outcome:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        if placement.independent:
            key = jax.random.fold_in(key, jax.lax.axis_index(LOCAL_GROUPS))
        noise = jax.random.bits(key, batch.tokens.shape, jnp.uint32)
        noisy = replace(batch, noise=jax.lax.with_sharding_constraint(noise, batch_sharding))
        return advance(state, noisy, hyperparameters)

    return advance_with_noise


def _invert_count(model: Model, batch: Batch) -> jax.Array:
    """Return 1 / tokens or pairs that count, float32. A batch without any has loss 0 and gradient 0, not NaN."""
    return 1.0 / jnp.maximum(model.objective.count(batch), 1).astype(jnp.float32)


def _make_metrics(model: Model, sums: Sums, weight: jax.Array) -> tuple[jax.Array, Metrics]:
    """Return the loss, and the metrics of the objective, of MTP modules and of routers. weight: 1 / units."""
    loss, metrics = split_loss(model.objective, sums[OBJECTIVE] * weight)
    return loss, metrics | mtp.make_metrics(sums) | experts.router_metrics(sums)


def differentiate_decoder(
    model: Model, executor: Executor, placement: Placement, largest_specs: Params | None, teacher: Teacher | None
) -> Differentiate:
    """Return the function that computes the gradients of the mean loss over tokens or pairs.

    largest_specs: specs of `TrainState.largest`. teacher: see `make_decoder_advance`.
    """
    if largest_specs is not None:
        model = model.with_specs(leaves.map_scaled(ScaledWeight, largest_specs, model.specs))
    if teacher is not None:
        model = teacher.extend(model)

    def differentiate(state: TrainState, batch: Batch, scale: jax.Array | float) -> Differentiated:
        weight = _invert_count(model, batch)
        # `trainable` is the compute copy where there is one, and the masters otherwise.
        trainable, frozen, largest = state.trainable, state.frozen, state.largest
        if largest is not None:
            trainable = leaves.map_scaled(lambda weight, _: ScaledWeight(weight, None), largest, trainable)
            frozen = leaves.map_scaled(lambda _, magnitude: ScaledWeight(None, magnitude), largest, frozen)
        if teacher is not None:
            assert state.teacher is not None
            batch = teacher.add_inputs(state.teacher, batch, placement)
            trainable, frozen = teacher.extend_trainable(trainable), teacher.extend_frozen(frozen, state.teacher)
        sums, gradients = executor.loss_and_gradients(model, trainable, frozen, batch, scale * weight, placement)
        if teacher is not None:
            gradients = remove_table(gradients)
        if largest is not None:
            gradients = leaves.map_scaled(lambda gradient, _: gradient.array, largest, gradients)
        loss, metrics = _make_metrics(model, sums, weight)
        return Differentiated(loss, gradients, scale, metrics, state.variables)

    return differentiate


def update_in_backward(
    model: Model, bind: BindOptimizers, specs: StateSpecs, placement: Placement, settings: StepSettings
) -> Advance:
    """Return the function that updates each period during the backward."""

    def read_params(section_state: Updatable) -> Params:
        return section_state.masters if section_state.compute is None else section_state.compute

    def advance(state: TrainState, batch: Batch, hyperparameters: Hyperparameters | None) -> Outcome:
        scalars = Scalars(weight=settings.new_weight(state.guard))
        optimizers = cast(SectionOptimizers, bind(hyperparameters))

        def update_period(section: str, period_state: Updatable, gradients: Params) -> Updatable:
            period_specs = param.period_specs(specs.masters[section])
            return update.update_period(optimizers[section], period_specs, placement, period_state, gradients, scalars)

        weight = _invert_count(model, batch)
        sections = update.split_sections(state.updatable)
        sums, squares, sections = loss_and_update(
            model, sections, state.frozen, batch, weight, placement, read_params, update_period
        )
        (loss, metrics), norm, overflow = _make_metrics(model, sums, weight), jnp.sqrt(squares), jnp.bool(False)
        _, guard = judge_step(state.guard, loss, norm, overflow)
        return Outcome(loss, norm, overflow, guard, update.join_sections(sections), metrics, state.variables)

    return advance
