"""A configuration and a placement, made into everything that a run compiles."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxopt_llm.execution import pipeline, scan
from jaxopt_llm.execution.executor import Executor
from jaxopt_llm.execution.schedules import PipelineConfig
from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.execution.stages import EVEN, rest_on_stages
from jaxopt_llm.kernels.attention_auto import FALLBACK, Choice
from jaxopt_llm.model.attention import kernel_head_dim
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.decoder import Params, Parts, make_parts
from jaxopt_llm.parallel import xla_options
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.parallel.topology import check_exchanges, check_multiplies, choose_attention, choose_expert_products
from jaxopt_llm.parallel.xla_options import OURS, XlaConfig, compiler_options
from jaxopt_llm.training import state as training_state
from jaxopt_llm.training import update
from jaxopt_llm.training.lora import LoraConfig, adapt
from jaxopt_llm.training.optimizer import OptimizerConfig, make_optimizer
from jaxopt_llm.training.schedule import ScheduleConfig, make_schedule
from jaxopt_llm.training.state import StateSpecs, TrainState
from jaxopt_llm.training.step import TrainingConfig, make_step
from jaxopt_llm.training.update import Optimizers


@dataclass(frozen=True)
class Program:
    """step: jitted (state, batch) -> (state, metrics), compiled for `state` and `batch`, the abstract arguments.
    kept: state -> what a checkpoint holds of it. attention: what `training.attention` has come to."""

    parts: Parts
    attention: Choice
    executor: Executor
    specs: StateSpecs
    optimizers: Optimizers
    step: Any
    kept: Callable[[TrainState], dict[str, Params]]
    state: TrainState
    batch: Batch
    rows: NamedSharding


def make_program(
    model: ModelConfig,
    training: TrainingConfig,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    remat: RematConfig,
    lora: LoraConfig,
    placement: Placement,
    seed: int = 0,
    keep_frozen: bool = True,
    pipelined: PipelineConfig = EVEN,
    xla: XlaConfig = OURS,
) -> Program:
    """seed: of what dropout drops. keep_frozen: see StateSpecs.

    Allocates nothing: the placement's devices may be those of a topology that is only compiled for, or none, of
    which a program is only reckoned with.

    Raises InputError where devices cannot multiply as `precision.matmul` says, attend as `training.attention` does, or
    send as `sharding.expert_exchange` does, or their compiler does not take the options of `xla`.
    """
    attention = Choice(FALLBACK if training.attention == "auto" else training.attention)
    products = "xla"
    if isinstance(placement.mesh, Mesh):
        device = placement.mesh.devices.flat[0]
        check_multiplies(device, placement.precision.matmul)
        check_exchanges(device, placement.sharding.expert_exchange)
        keys = training.sequence_length // placement.key_parts
        attention = choose_attention(
            device, training.attention, kernel_head_dim(model), placement.precision.compute_dtype, keys
        )
        products = choose_expert_products(device, training.expert_products, placement.precision.compute_dtype)
        xla_options.check(xla, placement.mesh)
    parts = make_parts(model, training.loss_chunk, training.z_loss, attention=attention.name, expert_products=products)
    stages = placement.size("pipeline")
    if stages > 1:
        parts = rest_on_stages(parts, stages, pipelined)
    executor = pipeline.make_executor(remat, pipelined) if stages > 1 else scan.make_executor(remat)
    parts, trainable, frozen = adapt(parts, lora, placement.precision, training.trainable)
    learning_rate = make_schedule(optimizer.learning_rate, schedule)
    optimizers = update.make_optimizers(functools.partial(make_optimizer, optimizer, learning_rate), trainable)
    specs = training_state.state_specs(trainable, frozen, optimizers, placement.precision, keep_frozen)
    options = compiler_options(placement.mesh, training.accumulation, placement.precision.matmul, xla)
    rows = placement.activation(None, "batch", "sequence")
    shape = (training.accumulation, training.batch_size // training.accumulation, training.sequence_length)
    ids, mask = (jax.ShapeDtypeStruct(shape, dtype, sharding=rows) for dtype in (jnp.int32, jnp.bool))
    return Program(
        parts=parts,
        attention=attention,
        executor=executor,
        specs=specs,
        optimizers=optimizers,
        step=make_step(
            parts,
            specs,
            optimizers,
            learning_rate,
            optimizer.clip_norm,
            training.skip_outliers,
            executor,
            placement,
            optimizer.in_backward,
            dropout_seed=seed if lora.dropout else None,
            options=options,
        ),
        kept=training_state.kept(specs, placement),
        state=training_state.abstract(specs, placement),
        batch=Batch(tokens=ids, targets=ids, loss_mask=mask, segment_ids=ids, positions=ids),
        rows=rows,
    )
