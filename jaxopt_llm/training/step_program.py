"""Program of a training step for any model: its state, its optimizers and the step itself.

The decoder and the models of users differ in how they compute gradients (`MakeAdvance`); the rest is made here.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import optax

from jaxopt_llm.compiler import xla_options
from jaxopt_llm.config import Config
from jaxopt_llm.core import tree
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.training import state as training_state
from jaxopt_llm.training import update
from jaxopt_llm.training.hyperparameters import Hyperparameters, read_hyperparameters
from jaxopt_llm.training.local_steps import LocalStep, has_groups, inside_group, jit_outer_step, make_group_specs
from jaxopt_llm.training.optimizer import is_elementwise, make_optimizer
from jaxopt_llm.training.schedule import make_schedule
from jaxopt_llm.training.shares import ShareStep
from jaxopt_llm.training.state import StateSpecs, TrainState
from jaxopt_llm.training.step import Advance, BindOptimizers, BoundStep, StepSettings, jit_step, make_step_function
from jaxopt_llm.training.update import LossOptimizer, Optimizers, Share, Shares, WholeOptimizer

MakeAdvance = Callable[[BindOptimizers, StateSpecs, StepSettings], Advance]


@dataclass(frozen=True)
class ModelParts:
    """A model as its training step sees it.

    Attributes:
        trained, frozen: specs of its parameters.
        variables: specs of its variables that are not parameters.
        make_advance: makes the loss, the backward and the update.
        batch: its batch as ShapeDtypeStructs with shardings.
        recomputes_layers: whether the backward computes each layer again.
        loss: name of the loss, if there are several.
        others: what the other losses train, by name; `trained` are then the parameters of this loss, and `frozen` all
            others. See shares.py.
        keeps_largest: whether the state holds the largest magnitudes of the trained matrices (TrainState).
    """

    trained: Params
    frozen: Params
    make_advance: MakeAdvance
    batch: Any
    recomputes_layers: bool
    variables: Params = field(default_factory=dict)
    loss: str = ""
    others: Shares = field(default_factory=dict)
    keeps_largest: bool = False


@dataclass(frozen=True)
class StepProgram:
    """Program of a training step on one placement. Nothing is compiled.

    Attributes:
        specs: specs of the state.
        optimizers: with the hyperparameters of the configuration.
        outer_step: jitted state -> state, which follows every `training.local_steps` steps; None without local steps.
        state, batch: abstract arguments of `step`.
    """

    specs: StateSpecs
    optimizers: Optimizers
    step: BoundStep
    outer_step: Any
    state: TrainState
    batch: Any


def make_step_program(
    config: Config,
    placement: Placement,
    parts: ModelParts,
    whole: WholeOptimizer | None = None,
    keep_frozen: bool = True,
) -> StepProgram:
    """Make the program of a model's training step. It allocates nothing.

    With local steps, `parts.make_advance` is that of one group (local_steps.inside_group).

    Args:
        whole: an optimizer of the user, in place of `config.optimizer`, `config.schedule` and the clip.
        keep_frozen: see StateSpecs.
    """
    training, hyperparameters = config.training, None if whole is not None else read_hyperparameters(config)
    bind = functools.partial(_bind_optimizers, config, parts.trained, whole)
    optimizers: Optimizers = bind(hyperparameters)

    def make_specs(trained: Params, frozen: Params, optimizers: Optimizers) -> StateSpecs:
        specs = training_state.make_state_specs(
            *(trained, frozen, optimizers, placement.precision, keep_frozen), averages=training.ema_decay > 0
        )
        largest = leaves.largest_specs(trained) if parts.keeps_largest else None
        return replace(specs, variables=parts.variables, largest=largest)

    specs = make_specs(parts.trained, parts.frozen, optimizers)
    advance = parts.make_advance(bind, specs, _make_settings(config, whole is None))
    batch_sharding = jax.tree.map(lambda x: x.sharding, parts.batch)
    options = xla_options.compiler_options(
        placement.mesh,
        training.accumulation,
        placement.precision.matmul,
        config.xla,
        recomputes_layers=parts.recomputes_layers,
        adapters=config.lora.rank > 0,
    )
    bind_schedule = functools.partial(_bind_schedule, config)
    step, outer_step = make_step_function(advance, bind_schedule, inside_group(placement)), None
    if parts.loss:
        step = ShareStep(step, parts.loss, parts.trained).step
        shares = {parts.loss: Share(parts.trained, bind(hyperparameters)), **parts.others}
        optimizers = {name: shares[name] for name in sorted(shares)}
        trained = functools.reduce(tree.merge, [share.trained for share in optimizers.values()])
        specs = make_specs(trained, tree.exclude(parts.frozen, trained), optimizers)
    if has_groups(config):
        specs = make_group_specs(specs, placement.size("data"))
        step = LocalStep(step, placement).step
        outer_step = jit_outer_step(config, specs, placement)
    bound = BoundStep(jit_step(step, specs, placement, batch_sharding, options), hyperparameters, placement)
    state = training_state.abstract_state(specs, placement)
    return StepProgram(specs, optimizers, bound, outer_step, state, parts.batch)


def make_share(config: Config, trained: Params, whole: WholeOptimizer | None) -> Share:
    """Return what one of several losses trains. whole: see `make_step_program`."""
    numbers = None if whole is not None else read_hyperparameters(config)
    return Share(trained, _bind_optimizers(config, trained, whole, numbers))


def _make_settings(config: Config, own_optimizer: bool) -> StepSettings:
    """Return the settings of the step. own_optimizer: whether `config.optimizer` decides the update."""
    training = config.training
    settings = StepSettings(
        skip_outliers=training.skip_outliers,
        spike_factor=training.spike_limit,
        ema_decay=training.ema_decay,
        gradients_by_period=training.unroll == "all",
        in_backward=config.optimizer.in_backward,
        dropout_seed=config.run.seed if config.lora.dropout else None,
    )
    if not own_optimizer:
        return settings
    return replace(settings, clip_norm=config.optimizer.clip_norm, elementwise=is_elementwise(config.optimizer))


def _bind_schedule(config: Config, values: Hyperparameters | None) -> optax.Schedule | None:
    """Return the schedule with these numbers; None without numbers."""
    return values and make_schedule(config.schedule.kind, values.schedule, config.schedule.warmup_kind)


def _bind_optimizers(
    config: Config, trained: Params, whole: WholeOptimizer | None, values: Hyperparameters | None
) -> LossOptimizer:
    """Return the optimizer of the user, or those of the configuration with these numbers."""
    if whole is not None:
        return whole
    assert values is not None
    schedule = make_schedule(config.schedule.kind, values.schedule, config.schedule.warmup_kind)
    make = functools.partial(make_optimizer, config.optimizer, schedule, numbers=values.optimizer)
    return update.make_optimizers(make, trained)
