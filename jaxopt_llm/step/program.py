"""Program of a training step: its model, executor, optimizers and step, made from a configuration and a placement.

`make_step_program` serves any model: the decoder and the models of users differ in how they compute gradients
(`MakeAdvance`). `make_program` makes the program of a decoder.

With several losses over one state, each trains its own parameters with its own optimizer. The step of a loss is the
ordinary step of a model in which all other parameters are frozen. It sees its share of the state: its own masters,
moments, guard and loss scale, and the other masters among the frozen parameters. All losses read and change the same
variables, and all count the same steps. Two losses may train the same parameter; each then has its own moments of it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from jaxopt_llm.checkpoint.pretrained import make_teacher_config
from jaxopt_llm.compiler import kernel_choice, xla_options
from jaxopt_llm.compiler.chips import Chip, chip_of
from jaxopt_llm.config import Config, fields
from jaxopt_llm.config.data import UNPAIRED
from jaxopt_llm.config.training import GRPO, KTO
from jaxopt_llm.core import tree
from jaxopt_llm.data.tokens.prepared import TOP_K
from jaxopt_llm.execution import pipeline, scan
from jaxopt_llm.execution.executor import Executor
from jaxopt_llm.execution.segments import name_recomputed
from jaxopt_llm.execution.stage_layout import stack_by_stage
from jaxopt_llm.kernels.attention import find_unsupported, get_compute_capability
from jaxopt_llm.kernels.attention_auto import FALLBACK, AttentionCall, AttentionChoice
from jaxopt_llm.kernels.attention_cudnn import DOCUMENTS_PER_ROW
from jaxopt_llm.kernels.cross_entropy import Classifier
from jaxopt_llm.kernels.divergence import Divergence
from jaxopt_llm.model import flops
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.decoder_specs import pad_vocabulary_size
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.model.objectives import NextToken, Objective
from jaxopt_llm.model.objectives.distillation import Distillation
from jaxopt_llm.model.objectives.grpo import Grpo
from jaxopt_llm.model.objectives.judged import Judged
from jaxopt_llm.model.objectives.preference import make_preference
from jaxopt_llm.model.objectives.scores import Classify, Reward
from jaxopt_llm.model.self_attention import count_segments, describe_call
from jaxopt_llm.parallel import offload
from jaxopt_llm.parallel.activations import count_key_parts
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import has_compute_copy
from jaxopt_llm.step import state as training_state
from jaxopt_llm.step import update
from jaxopt_llm.step.hyperparameters import Hyperparameters, make_schedule, read_hyperparameters
from jaxopt_llm.step.local_steps import (
    LocalStep,
    has_groups,
    inside_group,
    jit_outer_step,
    make_group_specs,
    place_groups,
)
from jaxopt_llm.step.lora import adapt_model, freeze_model
from jaxopt_llm.step.optimizer import is_elementwise, make_optimizer
from jaxopt_llm.step.state import StateSpecs, TrainState
from jaxopt_llm.step.step import (
    Advance,
    BindOptimizers,
    BoundStep,
    Metrics,
    ModelStep,
    Step,
    StepSettings,
    jit_step,
    make_decoder_advance,
)
from jaxopt_llm.step.teacher import Teacher
from jaxopt_llm.step.update import LossOptimizer, Optimizers, Share, Shares, WholeOptimizer

MakeAdvance = Callable[[BindOptimizers, StateSpecs, StepSettings], Advance]


@dataclass(frozen=True)
class ModelParts:
    """A model as its training step sees it.

    Attributes:
        trained, frozen: specs of its parameters.
        variables: specs of its variables that are not parameters.
        make_advance: makes the loss, the backward and the update.
        batch: its batch as ShapeDtypeStructs with shardings.
        recomputed: what the backward computes again of each layer.
        loss: name of the loss, if there are several.
        others: the shares of the other losses, by name. `trained` are then the parameters of this loss, and `frozen`
            all other parameters. See the docstring of this module.
        keeps_largest: whether the state holds the largest magnitudes of the trained matrices (TrainState).
        teacher: specs of the teacher's parameters, if there is one.
    """

    trained: Params
    frozen: Params
    make_advance: MakeAdvance
    batch: Any
    recomputed: xla_options.Recomputed
    variables: Params = field(default_factory=dict)
    loss: str = ""
    others: Shares = field(default_factory=dict)
    keeps_largest: bool = False
    teacher: Params | None = None


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

    With local steps, `parts.make_advance` makes the step of one group (local_steps.inside_group).

    Args:
        whole: an optimizer of the user, in place of `config.optimizer`, `config.schedule` and the clip.
        keep_frozen: see StateSpecs.
    """
    training, hyperparameters = config.training, None if whole is not None else read_hyperparameters(config)
    bind = functools.partial(_bind_optimizers, config, parts.trained, whole)
    optimizers: Optimizers = bind(hyperparameters)

    def make_specs(trained: Params, frozen: Params, optimizers: Optimizers) -> StateSpecs:
        specs = training_state.make_state_specs(
            trained, frozen, optimizers, placement.precision, keep_frozen, averages=training.ema_decay > 0
        )
        largest = leaves.largest_specs(trained) if parts.keeps_largest else None
        return replace(specs, variables=parts.variables, largest=largest, teacher=parts.teacher)

    specs = make_specs(parts.trained, parts.frozen, optimizers)
    advance = parts.make_advance(bind, specs, _make_settings(config, whole is None))
    batch_sharding = jax.tree.map(lambda x: x.sharding, parts.batch)
    options = xla_options.compiler_options(
        placement.mesh,
        training.accumulation,
        placement.precision.matmul,
        config.xla,
        recomputed=parts.recomputed,
        adapters=config.lora.rank > 0,
    )
    bind_schedule = functools.partial(_bind_schedule, config)
    step, outer_step = ModelStep(advance, bind_schedule, inside_group(placement)).step, None
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
    """Return the optimizer of the user, or the optimizers of the configuration with these numbers."""
    if whole is not None:
        return whole
    assert values is not None
    schedule = make_schedule(config.schedule.kind, values.schedule, config.schedule.warmup_kind)
    make = functools.partial(make_optimizer, config.optimizer, schedule, numbers=values.optimizer)
    return update.make_optimizers(make, trained)


def take_share(state: TrainState, name: str, trained: Params) -> TrainState:
    """Return the state as the step of the loss `name` sees it.

    Args:
        trained: specs of the parameters that the loss trains, with None for all others.
    """

    def take(half: tree.Tree) -> tree.Tree:
        return None if half is None else tree.restrict(half, trained)

    return replace(
        state,
        masters=take(state.masters),
        moments=state.moments[name],
        compute=take(state.compute),
        frozen=tree.merge(tree.exclude(state.trainable, trained), state.frozen),
        guard=state.guard[name],
        loss_scale=state.loss_scale[name],
        average=take(state.average),
    )


def put_share(state: TrainState, name: str, share: TrainState) -> TrainState:
    """Return a state with the share of the loss `name` after its step. What is not in the share stays as it is.

    The loss may have assigned to parameters that it does not train. They are among the frozen parameters of its share.
    """
    state = offload.store_like(state, state)

    def put(new: tree.Tree, old: tree.Tree) -> tree.Tree:
        return None if old is None else tree.merge(new, old)

    others = state.masters if state.compute is not None else tree.merge(share.frozen, share.masters)
    return replace(
        state,
        step=share.step,
        masters=put(share.masters, tree.restrict(others, state.masters)),
        frozen=tree.restrict(tree.merge(share.frozen, share.masters), state.frozen),
        moments=state.moments | {name: share.moments},
        compute=put(share.compute, state.compute),
        guard=state.guard | {name: share.guard},
        loss_scale=state.loss_scale | {name: share.loss_scale},
        variables=share.variables,
        average=put(share.average, state.average),
    )


@dataclass(frozen=True, eq=False)
class ShareStep:
    """The step of one of several losses, as a step of the whole state.

    inner: of its share.
    """

    inner: Step
    name: str
    trained: Params

    def step(
        self, state: TrainState, batch: Any, hyperparameters: Hyperparameters | None
    ) -> tuple[TrainState, Metrics]:
        # Compiled programs are named after this method: `step`, as with one loss.
        share, metrics = self.inner(take_share(state, self.name, self.trained), batch, hyperparameters)
        new = put_share(state, self.name, share)
        updates: jax.Array = sum(guard["updates"] for guard in new.guard.values())
        return new, metrics | {"skipped": new.step - updates}


@dataclass(frozen=True)
class Program(StepProgram):
    """Program of a decoder; see StepProgram. compile.py compiles the step.

    Attributes:
        attention: the implementation that `training.attention` resolved to, and the reason.
        to_checkpoint: state -> its checkpoint trees.
        batch_sharding: sharding of the batch fields [M, B, S].
        teacher: the model that it learns from, if any.
    """

    model: Model
    attention: AttentionChoice
    executor: Executor
    to_checkpoint: Callable[[TrainState], dict[str, Params]]
    batch_sharding: NamedSharding
    teacher: Teacher | None


@dataclass(frozen=True)
class StoredTeacher:
    """Sizes of the log-probabilities of a teacher in the data. The defaults are for `plan`, which reads no data.

    top_k: number of tokens in each place. vocabulary_size: of the teacher; None: that of the student.
    """

    top_k: int = TOP_K
    vocabulary_size: int | None = None


def make_program(
    config: Config,
    placement: Placement,
    keep_frozen: bool = True,
    stored: StoredTeacher | None = None,
) -> Program:
    """Make the program of a configuration on a placement.

    It allocates nothing. The placement's devices may be a topology without hardware, for compilation only, or an
    abstract mesh, for estimates of memory and time only.

    Args:
        keep_frozen: see StateSpecs.
        stored: what the data hold of a teacher; None: what `StoredTeacher` expects. Read with `distill` alone, without
            `distillation.teacher`.

    Raises:
        InputError: the devices do not support `precision.matmul`, `training.attention` or `sharding.expert_exchange`,
            or their compiler does not know the options of `xla`.
    """
    placement = place_groups(config, placement)
    training = config.training
    teacher = make_teacher(config, placement) if config.runs_teacher else None
    stored = (stored or StoredTeacher()) if training.distills and teacher is None else None
    model, attention = _make_model(config, placement, _make_objective(config, teacher, stored))
    model, executor = _lay_out(model, config, placement)
    model, trainable, frozen = adapt_model(model, config.lora, placement.precision, training.trainable)
    batch_sharding = placement.activation(None, "batch", "sequence")
    shape = (training.accumulation, training.batch_size // training.accumulation, training.sequence_length)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding)
    mask = jax.ShapeDtypeStruct(shape, jnp.bool, sharding=batch_sharding)
    reads_reference = training.has_reference and not config.runs_reference
    number = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=batch_sharding)
    rewards = training.objective == GRPO
    has_labels = rewards or training.pairs == UNPAIRED or (training.reads_scores and config.data.label_field)
    reference, labels = number if reads_reference else None, number if has_labels else None
    sampled = number if rewards else None
    parts = ModelParts(
        trained=trainable,
        frozen=frozen,
        make_advance=functools.partial(make_decoder_advance, model, executor, inside_group(placement), teacher=teacher),
        batch=Batch(ids, ids, mask, ids, ids, reference, labels, sampled, **_describe_stored(stored, ids)),
        recomputed=name_recomputed(config.remat),
        keeps_largest=_keeps_largest(config, placement),
        teacher=None if teacher is None else teacher.model.specs,
    )
    made = make_step_program(config, placement, parts, keep_frozen=keep_frozen)
    return Program(
        **vars(made),
        model=model,
        attention=attention,
        executor=executor,
        to_checkpoint=training_state.make_checkpoint_converter(made.specs, placement),
        batch_sharding=batch_sharding,
        teacher=teacher,
    )


def _describe_stored(stored: StoredTeacher | None, tokens: jax.ShapeDtypeStruct) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the fields of a batch that hold what data say of a teacher. tokens: of the batch."""
    if stored is None:
        return {}
    ids, found = (*tokens.shape, stored.top_k), (*tokens.shape, stored.top_k + 1)
    return {
        "teacher_ids": jax.ShapeDtypeStruct(ids, jnp.int32, sharding=tokens.sharding),
        "teacher_log_probabilities": jax.ShapeDtypeStruct(found, jnp.float16, sharding=tokens.sharding),
    }


def make_teacher(config: Config, placement: Placement) -> Teacher:
    """Make the teacher of a configuration. It allocates nothing."""
    own, rows = make_teacher_config(config), pad_vocabulary_size(config.model.vocabulary_size)
    if isinstance(placement.mesh, Mesh):
        own = fields.replace_fields(own, {"training.attention": _choose_attention(own, placement)})
    model, executor = _lay_out(_make_model(own, placement, NextToken())[0], own, placement)
    return Teacher(freeze_model(model, own.lora, placement.precision)[0], executor, rows)


def _choose_attention(config: Config, placement: Placement) -> str:
    """Return the attention of a teacher: that of the student, or another one if the teacher's sizes need it."""
    call, device = describe_attention(config, placement), placement.mesh.devices.flat[0]
    requested = config.training.attention
    unsupported = find_unsupported(call, get_compute_capability(device))
    if requested != "auto" and not unsupported[requested]:
        return requested
    # The limit of documents in a row, which cuDNN needs, belongs to the student's choice.
    limited = {} if requested == "auto" else {"cudnn": "the rows have no limit of documents"}
    return kernel_choice.choose_attention(device, "auto", call, limited).name


def describe_attention(config: Config, placement: Placement | None = None) -> AttentionCall:
    """Return the properties of a configuration's attention. placement: None for that of the configuration."""
    documents = config.data.documents_per_row or DOCUMENTS_PER_ROW
    ring = config.mesh.context if config.sharding.has_ring else 1
    parts = count_key_parts(placement) if placement else ring
    dtype, length = config.precision.compute_dtype, config.training.sequence_length
    return describe_call(config.model, dtype, length, documents, parts)


def _lay_out(model: Decoder, config: Config, placement: Placement) -> tuple[Decoder, Executor]:
    """Return the model as it lies on the stages, if there are stages, and its executor."""
    stages = placement.size("pipeline")
    if stages == 1:
        return model, scan.make_executor(config.remat, unrolled=config.training.unroll == "all")
    specs = stack_by_stage(model, stages, config.pipeline).specs
    return model.with_specs(specs), pipeline.make_executor(config.remat, config.pipeline)


def _keeps_largest(config: Config, placement: Placement) -> bool:
    """Return whether the update finds the largest magnitudes of the masters from which the model rounds to fp8.

    A compute copy has other values than the masters. Updates in the backward, steps of groups of devices and stages of
    a pipeline find the magnitudes of each period themselves: on stages, perturbations have the structure of plain
    weights.
    """
    special = has_compute_copy(placement) or config.optimizer.in_backward or has_groups(config)
    return placement.precision.matmul == "fp8" and not special and placement.size("pipeline") == 1


def _make_model(config: Config, placement: Placement, objective: Objective) -> tuple[Decoder, AttentionChoice]:
    """Make the model with the kernels that its devices support. Return it and the choice of the attention."""
    training = config.training
    attention = AttentionChoice(FALLBACK if training.attention == "auto" else training.attention)
    products, documents = "xla", config.data.documents_per_row or DOCUMENTS_PER_ROW
    if isinstance(placement.mesh, Mesh):
        device = placement.mesh.devices.flat[0]
        kernel_choice.check_matmul(device, placement.precision.matmul)
        call = describe_attention(config, placement)
        attention = kernel_choice.choose_attention(device, training.attention, call)
        if attention.name == "cudnn" and attention.reason and not config.data.documents_per_row:
            # For `plan`, which reads no data. A run has resolved the limit before (run/attention_choice.py).
            condition = f"if a limit of {documents} documents in a row turns few tokens into padding"
            attention = replace(attention, reason=f"{attention.reason}; {condition}")
        products = kernel_choice.choose_grouped_matmul(
            device, training.grouped_matmul, placement.precision.compute_dtype
        )
        xla_options.check_options(config.xla, placement.mesh)
    return Decoder(
        config.model,
        training.logit_tokens,
        training.z_loss,
        training.mtp_weight,
        attention=attention.name,
        grouped_matmul=products,
        max_segments=count_segments(documents) if attention.name == "cudnn" else None,
        objective=objective,
    ), attention


def _make_objective(config: Config, teacher: Teacher | None, stored: StoredTeacher | None) -> Objective:
    name, settings, of = config.training.objective, config.distillation, None
    if teacher is not None:
        of = teacher.model.make_classifier()
    elif stored is not None:
        of = Classifier(stored.vocabulary_size or config.model.vocabulary_size, softcap=0.0, z_loss=0.0, chunk=0)
    if of is not None:
        return Distillation(Divergence(settings.beta, settings.temperature, settings.next_token_weight, of))
    if name == GRPO:
        return Grpo(config.grpo, config.rollouts.max_new_tokens)
    if name == "reward":
        return Reward(config.preference)
    if name == "classify":
        return Classify(config.model.scores)
    if name == KTO:
        return Judged(config.preference)
    return make_preference(name, config.preference) if config.training.pairs else NextToken()


def utilisation_per_token(config: Config, program: Program, placement: Placement) -> dict[str, float]:
    """Return the MFU at a throughput of one token per second, by the name of its convention.

    It is the time that the operations of one token take on all devices, each operation at the peak of its dtype. The
    result is empty if the peak of the device is not known.
    """
    chip = chip_of(jax.devices()[0].device_kind)
    return compute_utilisation(config, program, placement, chip) if chip else {}


def compute_utilisation(config: Config, program: Program, placement: Placement, chip: Chip) -> dict[str, float]:
    """Return the same for devices that are this chip."""
    precision = config.precision
    specs = program.specs.masters, program.specs.frozen
    needed = flops.count_per_token(config.model, *specs, config.training.sequence_length)
    narrow = flops.count_quantised_per_token(config.model, *specs, precision)
    peak = chip.peak_flops[precision.compute_dtype]
    narrow_peak = chip.peak_flops[flops.CODE_PRODUCTS[precision.matmul].dtype] if narrow else peak

    def seconds(operations: float) -> float:
        return ((operations - narrow) / peak + narrow / narrow_peak) / placement.mesh.size

    return {"mfu": seconds(needed.causal), "mfu_full_attention": seconds(needed.full)}
