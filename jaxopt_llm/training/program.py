"""Program of a run: its model, executor, optimizers and step, made from a configuration and a placement."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxopt_llm.compiler import kernel_choice, xla_options
from jaxopt_llm.config import Config
from jaxopt_llm.execution import pipeline, scan
from jaxopt_llm.execution.executor import Executor
from jaxopt_llm.execution.remat import saved_intermediates
from jaxopt_llm.execution.stage_layout import stack_by_stage
from jaxopt_llm.kernels.attention_auto import FALLBACK, AttentionChoice
from jaxopt_llm.kernels.attention_cudnn import DOCUMENTS_PER_ROW
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.model.self_attention import count_segments, describe_call
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.sequence import count_key_parts
from jaxopt_llm.parallel.zero import has_compute_copy
from jaxopt_llm.training import saved_state
from jaxopt_llm.training.decoder_step import make_decoder_advance
from jaxopt_llm.training.local_steps import has_groups, inside_group, place_groups
from jaxopt_llm.training.lora import adapt_model
from jaxopt_llm.training.state import TrainState
from jaxopt_llm.training.step_program import ModelParts, StepProgram, make_step_program


@dataclass(frozen=True)
class Program(StepProgram):
    """Program of a decoder; see StepProgram. compile.py compiles the step.

    Attributes:
        attention: the implementation that `training.attention` resolved to, and the reason.
        to_checkpoint: state -> its checkpoint trees.
        batch_sharding: sharding of the batch fields [M, B, S].
    """

    model: Model
    attention: AttentionChoice
    executor: Executor
    to_checkpoint: Callable[[TrainState], dict[str, Params]]
    batch_sharding: NamedSharding


def make_program(config: Config, placement: Placement, keep_frozen: bool = True) -> Program:
    """Make the program of a configuration on a placement.

    It allocates nothing. The placement's devices may be a topology without hardware, for compilation only, or an
    abstract mesh, for estimates of memory and time only.

    Args:
        keep_frozen: see StateSpecs.

    Raises:
        InputError: the devices do not support `precision.matmul`, `training.attention` or `sharding.expert_exchange`,
            or their compiler does not know the options of `xla`.
    """
    placement = place_groups(config, placement)
    training, stages = config.training, placement.size("pipeline")
    model, attention = _make_model(config, placement)
    if stages > 1:
        model = stack_by_stage(model, stages, config.pipeline)
    if stages > 1:
        executor = pipeline.make_executor(config.remat, config.pipeline)
    else:
        executor = scan.make_executor(config.remat, unrolled=training.unroll == "all")
    model, trainable, frozen = adapt_model(model, config.lora, placement.precision, training.trainable)
    batch_sharding = placement.activation(None, "batch", "sequence")
    shape = (training.accumulation, training.batch_size // training.accumulation, training.sequence_length)
    ids, mask = (jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding) for dtype in (jnp.int32, jnp.bool))
    parts = ModelParts(
        trained=trainable,
        frozen=frozen,
        make_advance=functools.partial(make_decoder_advance, model, executor, inside_group(placement)),
        batch=Batch(tokens=ids, targets=ids, loss_mask=mask, segment_ids=ids, positions=ids),
        recomputes_layers=not saved_intermediates(config.remat),
        keeps_largest=_keeps_largest(config, placement),
    )
    made = make_step_program(config, placement, parts, keep_frozen=keep_frozen)
    return Program(
        **vars(made),
        model=model,
        attention=attention,
        executor=executor,
        to_checkpoint=saved_state.make_checkpoint_converter(made.specs, placement),
        batch_sharding=batch_sharding,
    )


def _keeps_largest(config: Config, placement: Placement) -> bool:
    """Return whether the update finds the largest magnitudes of the masters from which the model rounds to fp8.

    A compute copy has other values than the masters. In the backward, and in steps of groups of devices, each period
    finds its own.
    """
    special = has_compute_copy(placement) or config.optimizer.in_backward or has_groups(config)
    return placement.precision.matmul == "fp8" and not special


def _make_model(config: Config, placement: Placement) -> tuple[Model, AttentionChoice]:
    """Make the model with the kernels that its devices support. Return it and the choice of the attention."""
    training = config.training
    attention = AttentionChoice(FALLBACK if training.attention == "auto" else training.attention)
    products, documents = "xla", config.data.documents_per_row or DOCUMENTS_PER_ROW
    if isinstance(placement.mesh, Mesh):
        device = placement.mesh.devices.flat[0]
        kernel_choice.check_matmul(device, placement.precision.matmul)
        kernel_choice.check_expert_exchange(device, placement.sharding.expert_exchange)
        dtype, parts = placement.precision.compute_dtype, count_key_parts(placement)
        call = describe_call(config.model, dtype, training.sequence_length, documents, parts)
        attention = kernel_choice.choose_attention(device, training.attention, call)
        if attention.name == "cudnn" and attention.reason and not config.data.documents_per_row:
            # For `plan`, which reads no data. A run has resolved the limit before (training/attention_choice.py).
            condition = f"if a limit of {documents} documents in a row turns few tokens into padding"
            attention = replace(attention, reason=f"{attention.reason}; {condition}")
        products = kernel_choice.choose_grouped_matmul(device, training.grouped_matmul, dtype)
        xla_options.check_options(config.xla, placement.mesh)
    return Decoder(
        config.model,
        training.logit_tokens,
        training.z_loss,
        attention=attention.name,
        grouped_matmul=products,
        max_segments=count_segments(documents) if attention.name == "cudnn" else None,
        counts_outliers=placement.precision.outlier_threshold > 0,
    ), attention
