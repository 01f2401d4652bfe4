"""Training step of the decoder: its loss over tokens, its dropout and the metrics of its routers.

With `optimizer.in_backward`, the step calls `in_backward.loss_and_update` instead of the executor: it updates each
period during the backward and cannot discard the update.
"""

from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp

from jaxopt_llm.execution.executor import Executor
from jaxopt_llm.execution.in_backward import loss_and_update
from jaxopt_llm.model import param
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.linear import leaves, outliers
from jaxopt_llm.model.linear.leaves import ScaledWeight
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.model.moe import experts
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import LOCAL_GROUPS
from jaxopt_llm.training import update
from jaxopt_llm.training.guard import judge_step
from jaxopt_llm.training.hyperparameters import Hyperparameters
from jaxopt_llm.training.state import StateSpecs, TrainState
from jaxopt_llm.training.step import (
    Advance,
    BindOptimizers,
    Differentiate,
    Differentiated,
    Metrics,
    Outcome,
    StepSettings,
    update_after_backward,
)
from jaxopt_llm.training.update import Scalars, SectionOptimizers, Updatable


def make_decoder_advance(
    model: Model,
    executor: Executor,
    placement: Placement,
    bind: BindOptimizers,
    specs: StateSpecs,
    settings: StepSettings,
) -> Advance:
    """Return the loss, the backward and the update of a model of tokens, for `make_step_function`.

    Batch fields: [M, B, S], M microbatches. Further metrics are those of `_make_metrics`.
    """
    if settings.in_backward:
        advance = update_in_backward(model, bind, specs, placement, settings)
    else:
        differentiate = differentiate_decoder(model, executor, placement, specs.largest)
        advance = update_after_backward(differentiate, bind, specs, placement, settings)
    if settings.dropout_seed is None:
        return advance
    return _with_noise(advance, settings.dropout_seed, placement)


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


def _invert_tokens(batch: Batch) -> jax.Array:
    """Return 1 / tokens that count, float32. A batch without any has loss 0 and gradient 0, not NaN."""
    return 1.0 / jnp.maximum(jnp.sum(batch.loss_mask), 1).astype(jnp.float32)


def _make_metrics(statistics: dict[str, jax.Array]) -> Metrics:
    """Return the metrics of the routers, or the number of outlier columns that were left; never both."""
    return dict(statistics if outliers.LEFT in statistics else experts.router_metrics(statistics))


def differentiate_decoder(
    model: Model, executor: Executor, placement: Placement, largest_specs: Params | None
) -> Differentiate:
    """Return the function that computes the gradients of the mean loss over tokens.

    largest_specs: specs of `TrainState.largest`.
    """
    if largest_specs is not None:
        model = model.with_specs(leaves.map_scaled(ScaledWeight, largest_specs, model.specs))

    def differentiate(state: TrainState, batch: Batch, scale: jax.Array | float) -> Differentiated:
        per_token = _invert_tokens(batch)
        # `trainable` is the compute copy where there is one, and the masters otherwise.
        trainable, frozen, largest = state.trainable, state.frozen, state.largest
        if largest is not None:
            trainable = leaves.map_scaled(lambda weight, _: ScaledWeight(weight, None), largest, trainable)
            frozen = leaves.map_scaled(lambda _, magnitude: ScaledWeight(None, magnitude), largest, frozen)
        loss, _, auxiliary, gradients = executor.loss_and_gradients(
            model, trainable, frozen, batch, scale * per_token, placement
        )
        if largest is not None:
            gradients = leaves.map_scaled(lambda gradient, _: gradient.array, largest, gradients)
        metrics = _make_metrics(auxiliary.statistics)
        return Differentiated(loss * per_token, gradients, scale, metrics, state.variables)

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

        per_token = _invert_tokens(batch)
        sections = update.split_sections(state.updatable)
        loss, squares, auxiliary, sections = loss_and_update(
            model, sections, state.frozen, batch, per_token, placement, read_params, update_period
        )
        loss, norm, overflow = loss * per_token, jnp.sqrt(squares), jnp.bool(False)
        _, guard = judge_step(state.guard, loss, norm, overflow)
        metrics = _make_metrics(auxiliary.statistics)
        return Outcome(loss, norm, overflow, guard, update.join_sections(sections), metrics, state.variables)

    return advance
