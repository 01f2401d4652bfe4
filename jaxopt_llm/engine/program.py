"""Program of an engine: a user's model, its optimizer and its step, made from a configuration and a mesh."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.compiler import xla_options
from jaxopt_llm.config import BATCH_AXES, Config, OptimizerConfig
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine.frontends import Frontend, Loss
from jaxopt_llm.engine.gradients import compute_loss, differentiate_user_model
from jaxopt_llm.engine.user_model import Rules, UserModel, make_user_model, nest_variables
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.training import state as training_state
from jaxopt_llm.training import update
from jaxopt_llm.training.optimizer import is_elementwise, make_optimizer
from jaxopt_llm.training.schedule import make_schedule
from jaxopt_llm.training.state import StateSpecs, TrainState
from jaxopt_llm.training.step import StepSettings, make_step, update_after_backward
from jaxopt_llm.training.update import Optimizers, WholeOptimizer


@dataclass(frozen=True)
class Job:
    """What a user trains, independently of the devices.

    optimizer: an optax transformation, or settings of ours.
    rules: names of dimensions -> mesh axis.
    """

    config: Config
    frontend: Frontend
    loss: Loss
    evaluation_loss: Loss
    example: Any
    optimizer: optax.GradientTransformation | OptimizerConfig
    rules: Rules


@dataclass(frozen=True)
class EngineProgram:
    """Program of a job on one placement; nothing is compiled.

    Attributes:
        step: jitted (state, batch) -> (state, metrics).
        evaluation: jitted (state, batch) -> sums of loss, count and metrics.
        state, batch: abstract arguments of `step`.
    """

    model: UserModel
    placement: Placement
    specs: StateSpecs
    optimizers: Optimizers
    step: Any
    evaluation: Any
    state: TrainState
    batch: Any


def make_engine_program(job: Job, mesh: Any) -> EngineProgram:
    """Make the program on a mesh, which may be one of devices that do not exist.

    Raises:
        InputError: the batch, the rules or the loss do not fit.
    """
    config = job.config
    placement = Placement(mesh, config.sharding, config.precision, config.offload, reduces_microbatches=True)
    batch = split_microbatches(job.example, config.training.accumulation, placement)
    microbatch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    model = make_user_model(job.frontend, job.loss, microbatch, job.rules, placement)
    optimizers, learning_rate, settings = _make_optimizers(job, model)
    specs = _make_state_specs(model, optimizers, placement)
    options = xla_options.compiler_options(
        mesh, config.training.accumulation, placement.precision.matmul, config.xla, recomputes_layers=model.recomputes
    )
    advance = update_after_backward(differentiate_user_model(model, placement), optimizers, specs, placement, settings)
    measured = replace(model, frontend=job.frontend.for_evaluation(), loss=job.evaluation_loss)
    evaluated = functools.partial(compute_loss, measured, placement=placement.for_evaluation())
    return EngineProgram(
        model=model,
        placement=placement,
        specs=specs,
        optimizers=optimizers,
        step=make_step(advance, specs, learning_rate, placement, jax.tree.map(lambda x: x.sharding, batch), options),
        evaluation=jax.jit(evaluated, out_shardings=placement.replicated),
        state=training_state.abstract_state(specs, placement),
        batch=batch,
    )


def _make_optimizers(job: Job, model: UserModel) -> tuple[Optimizers, optax.Schedule | None, StepSettings]:
    """Return the optimizers, the schedule of the learning rate if it is ours, and the settings of the step."""
    training, optimizer = job.config.training, job.optimizer
    if not isinstance(optimizer, OptimizerConfig):
        return _make_whole_optimizer(optimizer, model), None, StepSettings(skip_outliers=training.skip_outliers)
    learning_rate = make_schedule(optimizer.learning_rate, job.config.schedule, training.steps)
    make = functools.partial(make_optimizer, optimizer, learning_rate)
    settings = StepSettings(
        clip_norm=optimizer.clip_norm,
        skip_outliers=training.skip_outliers,
        elementwise=is_elementwise(optimizer),
    )
    return update.make_optimizers(make, model.specs), learning_rate, settings


def _make_whole_optimizer(transformation: optax.GradientTransformation, model: UserModel) -> WholeOptimizer:
    def to_tree(sections: Any) -> Any:
        return model.frontend.as_tree(model.flatten(sections))

    def from_tree(parameters: Any) -> Any:
        by_path = dict(tree.leaves_with_path(parameters))
        return model.nest([by_path[info.path] for info in model.frontend.parameters])

    return WholeOptimizer(transformation, to_tree, from_tree)


def _make_state_specs(model: UserModel, optimizers: Optimizers, placement: Placement) -> StateSpecs:
    frozen = jax.tree.map(lambda spec: None, model.specs)
    specs = training_state.make_state_specs(model.specs, frozen, optimizers, placement.precision)
    infos = model.frontend.variables
    variables = [ParamSpec(info.shape, (None,) * len(info.shape), dtype=np.dtype(info.dtype)) for info in infos]
    return replace(specs, variables=nest_variables(model.frontend, variables))


def split_microbatches(example: Any, microbatches: int, placement: Placement) -> Any:
    """Return a batch of such arrays as ShapeDtypeStructs [M, B, ...], with shardings.

    Raises:
        InputError: the arrays have different numbers of rows, or the rows do not divide by the mesh.
    """
    rows = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(example)}
    if len(rows) != 1 or () in rows:
        found = ", ".join(str(size[0]) if size else "none" for size in sorted(rows))
        raise InputError(
            f"example: its arrays have different numbers of rows, the first dimension ({found}); every array of a "
            "batch needs the same number"
        )
    ((size,),) = rows
    axes = tuple(axis for axis in BATCH_AXES if placement.size(axis) > 1)
    if size % (microbatches * placement.size(*axes)):
        parts = {"training.accumulation": microbatches} | {f"mesh.{axis}": placement.size(axis) for axis in axes}
        over = " × ".join(f"{name}={value}" for name, value in parts.items() if value > 1)
        step = math.prod(parts.values())
        nearest = [size // step * step, (size // step + 1) * step]
        raise InputError(
            f"example: {size} rows are not divisible by {over} (nearest that are: "
            f"{' and '.join(str(each) for each in nearest if each)})"
        )

    def split(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = (microbatches, size // microbatches, *jnp.shape(leaf)[1:])
        sharding = NamedSharding(placement.mesh, PartitionSpec(None, axes or None))
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=sharding)

    return jax.tree.map(split, example)
