"""Queries of an engine, which change nothing: the gradients of its loss, and any function of its model."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.compiler import xla_options
from jaxopt_llm.core import tree
from jaxopt_llm.engine.batches import read_array
from jaxopt_llm.engine.gradients import differentiate_user_model
from jaxopt_llm.engine.microbatches import Microbatches
from jaxopt_llm.engine.program import EngineProgram, Job
from jaxopt_llm.execution.partitioning import correct_partitioning
from jaxopt_llm.model.linear.leaves import LoraWeight
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step.program import take_share
from jaxopt_llm.step.state import TrainState, state_shardings
from jaxopt_llm.step.update import has_shares


def jit_gradients(job: Job, program: EngineProgram) -> Any:
    """Return the jitted (state, batch) -> gradients of the mean loss, float32, placed as the masters."""
    differentiate = differentiate_user_model(program.model, program.placement)
    masters = state_shardings(program.specs, program.placement).masters
    share = program.optimizers[job.loss_name] if has_shares(program.optimizers) else None

    def compute_gradients(state: TrainState, batch: Microbatches) -> Params:
        if share is not None:
            state = take_share(state, job.loss_name, share.trained)
        found = differentiate(state, batch, state.loss_scale.get("scale", 1.0))
        gradients: Params = jax.tree.map(lambda x: x.astype(jnp.float32) / found.divisor, found.gradients)
        return gradients

    if share is not None:
        masters = tree.restrict(masters, share.trained)
    on_device = jax.tree.map(lambda sharding: sharding.with_memory_kind("device"), masters)
    return jax.jit(compute_gradients, out_shardings=on_device, compiler_options=_compiler_options(job, program))


def rebuild_gradients(program: EngineProgram, gradients: Params) -> Any:
    """Return gradients as the user's kind of tree; see Engine.gradients."""

    def rebuild(gradient: Any) -> Any:
        return dict(tree.leaves_with_path(gradient)) if isinstance(gradient, LoraWeight) else gradient

    return program.model.frontend.rebuild_parameters([rebuild(each) for each in program.model.flatten(gradients)])


def jit_prediction(job: Job, program: EngineProgram, reference: Any, out_sharding: NamedSharding | None) -> Any:
    """Return the jitted (state, batch) -> what a function (model, batch) returns in evaluation mode.

    Args:
        reference: weak one to the function, which its compiled programs must not keep alive.
        out_sharding: of its results; None leaves it to XLA.
    """
    model = replace(program.model, frontend=job.frontend.for_evaluation())
    nothing = jax.tree.map(lambda spec: None, model.specs)
    placement = program.placement.for_evaluation()

    @functools.partial(correct_partitioning, placement=placement)
    def predict(state: TrainState, batch: Any) -> Any:
        params = tree.merge(state.trainable, state.frozen)
        return model.run(reference(), params, nothing, state.variables, batch, placement)[0]

    return jax.jit(predict, out_shardings=out_sharding, compiler_options=_compiler_options(job, program))


def _compiler_options(job: Job, program: EngineProgram) -> Any:
    return xla_options.compiler_options(program.placement.mesh, user=job.config.xla)


def place_rows(batch: Any, placement: Placement) -> Any:
    """Return a whole batch on the devices.

    The devices divide the rows of an array, its first dimension, if their number allows it. Otherwise each holds all.
    """
    axes = placement.batch_axes

    def place(leaf: Any) -> jax.Array:
        array = read_array(leaf)
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
        divides = axes and array.ndim and array.shape[0] % placement.size(*axes) == 0
        sharding = NamedSharding(placement.mesh, PartitionSpec(axes) if divides else PartitionSpec())
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(place, batch)
