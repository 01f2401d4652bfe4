"""Program of an engine: a user's model, its optimizer and its step, made from a configuration and a mesh."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxopt_llm.compiler import kernel_choice, xla_options
from jaxopt_llm.config import Config, OptimizerConfig, fields
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.config.training import ALL_LINEAR
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.metric import replace_zero
from jaxopt_llm.engine.checks import check_update
from jaxopt_llm.engine.frontends import Frontend, Loss, LossParts
from jaxopt_llm.engine.microbatches import Microbatches, check_division, list_have_rows, split_batch
from jaxopt_llm.engine.user_model import (
    AttentionSelector,
    LossTrace,
    Rules,
    UserModel,
    list_variable_specs,
    make_selector,
    make_user_model,
    nest_variables,
    run_abstractly,
)
from jaxopt_llm.execution.executor import add_gradients, constrain_gradients
from jaxopt_llm.execution.partitioning import correct_partitioning
from jaxopt_llm.execution.weight_uses import LOOKUP, PRODUCT
from jaxopt_llm.kernels.attention import CHECKPOINT_NAME
from jaxopt_llm.model.linear import quantised
from jaxopt_llm.model.linear.leaves import is_wrapped
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel import zero
from jaxopt_llm.parallel.codes import find_row_sum
from jaxopt_llm.parallel.gathering import make_perturbations
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.planning.free_memory import GIB, count_usable_bytes, leave_free
from jaxopt_llm.run.messages import describe_exact_matrices
from jaxopt_llm.step import lora, moments, optimizer
from jaxopt_llm.step.program import ModelParts, StepProgram, make_share, make_step_program, take_share
from jaxopt_llm.step.state import StateSpecs, TrainState
from jaxopt_llm.step.step import (
    Advance,
    BindOptimizers,
    Differentiate,
    Differentiated,
    StepSettings,
    update_after_backward,
)
from jaxopt_llm.step.update import WholeOptimizer

# --- Loss and gradients over the microbatches of a step
#
# The loss sees a whole microbatch, as on one device, so that what couples its rows (BatchNorm, a contrastive loss, the
# draw of a dropout mask) is the same on every mesh. XLA divides the computation by the rows of the batch. Gradients are
# summed over the devices in each microbatch.


Carry = tuple[Params, Params]  # variables, gradients


def differentiate_user_model(model: UserModel, placement: Placement) -> Differentiate:
    """Return the function that computes the gradients of the mean loss over the microbatches of a batch."""

    def differentiate(state: TrainState, batch: Microbatches, scale: jax.Array | float) -> Differentiated:
        params, batch = tree.merge(state.trainable, state.frozen), batch.divide(placement)
        trained = tree.restrict(model.specs, state.trainable)

        @functools.partial(correct_partitioning, placement=placement)
        def one_microbatch(variables: Params, microbatch: Any) -> tuple[Params, LossParts, Params]:
            def objective(perturbations: Params) -> tuple[jax.Array, tuple[LossParts, Params]]:
                parts, after = model.evaluate(params, perturbations, variables, microbatch, placement)
                # The mean, because the gradients of a sum over thousands of tokens leave the range of float16.
                count = jax.lax.stop_gradient(replace_zero(parts.count))
                return scale * parts.total / count, (parts, after)

            gradients, (parts, after) = jax.grad(objective, has_aux=True)(make_perturbations(trained, placement))
            return after, parts, gradients

        def accumulate(carry: Carry, rows: Any) -> tuple[Carry, LossParts]:
            variables, gradients = carry
            variables, parts, more = one_microbatch(variables, batch.join(rows))
            count = replace_zero(parts.count)
            more = jax.tree.map(lambda gradient: count * gradient.astype(jnp.float32), more)
            return (variables, add_gradients(gradients, more, trained, placement)), parts

        first = batch.take_first()
        if batch.count == 1:
            variables, parts, gradients = one_microbatch(state.variables, first)
            divisor = scale
        else:
            shapes = jax.eval_shape(one_microbatch, state.variables, first)[2]
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
            begin = state.variables, constrain_gradients(zeros, trained, placement)
            (variables, gradients), each = jax.lax.scan(accumulate, begin, batch.rows)
            parts = each.join()
            divisor = scale * replace_zero(parts.count)
        written = None
        if model.written:
            assign = correct_partitioning(model.compute_written, placement)
            written = assign(tree.merge(state.masters, state.frozen), state.variables, first)
        return Differentiated(parts.mean(), gradients, divisor, parts.metrics, variables, written)

    return differentiate


def compute_loss(model: UserModel, state: TrainState, batch: Microbatches, placement: Placement) -> LossParts:
    """Return the parts of the loss of a batch. Each microbatch begins with the variables of the state."""
    params, batch = tree.merge(state.trainable, state.frozen), batch.divide(placement)
    nothing = jax.tree.map(lambda spec: None, model.specs)

    @functools.partial(correct_partitioning, placement=placement)
    def one_microbatch(microbatch: Any) -> LossParts:
        return model.evaluate(params, nothing, state.variables, microbatch, placement)[0]

    if batch.count == 1:
        return one_microbatch(batch.take_first())
    each: LossParts = jax.lax.map(lambda rows: one_microbatch(batch.join(rows)), batch.rows)
    return each.join()


# --- Programs


# Policies that rematerialise layers -> the checkpoint names of the results that they keep.
SAVED: dict[Any, tuple[str, ...]] = {"full": (), "save_attention": (CHECKPOINT_NAME,)}


Optimizer: TypeAlias = optax.GradientTransformation | OptimizerConfig


@dataclass(frozen=True)
class GivenLoss:
    """A loss as the user gives it.

    loss_name: "" if the engine has one loss.
    optimizer: None for `config.optimizer`.
    trains: patterns of the parameters that it trains, of those that `config.training.trainable` selects.
    """

    loss_name: str
    loss: Loss
    evaluation_loss: Loss
    example: Any
    optimizer: Optimizer | None
    trains: tuple[str, ...]

    @property
    def transformation(self) -> optax.GradientTransformation | None:
        """The optax transformation; None for an OptimizerConfig."""
        return None if isinstance(self.optimizer, OptimizerConfig) else self.optimizer


@dataclass(frozen=True)
class Job(GivenLoss):
    """Model, loss, data and settings of a training, independently of the devices.

    rules: names of dimensions -> mesh axis.
    replicated: patterns of the paths of the batch's arrays without rows.
    in_one_piece: whether the batches have no rows at all; see microbatches.py.
    loss_over: what the user says of the loss of microbatches; see `initialize`.
    others: the jobs of the engine's other losses, which have no `others`.
    """

    config: Config
    frontend: Frontend
    rules: Rules
    replicated: tuple[str, ...] = ()
    in_one_piece: bool = False
    loss_over: Literal["rows", "batch"] | None = None
    others: tuple["Job", ...] = ()

    @property
    def losses(self) -> list["Job"]:
        """The jobs of all losses of the engine, this one first."""
        every = (self, *self.others)
        return [
            replace(job, others=tuple(replace(each, others=()) for each in every if each is not job)) for job in every
        ]

    @property
    def have_rows(self) -> list[bool]:
        """Flags of the arrays of a batch: True if the first dimension counts rows."""
        return list_have_rows(self.example, self.replicated)

    def check_division(self, placement: Placement) -> None:
        """Raise InputError if the example cannot be divided; see microbatches.check_division."""
        check_division(self.example, self.replicated, self.config.training.accumulation, placement)

    def split(self, microbatches: int, placement: Placement) -> Microbatches:
        """Return the example as the step takes it, as ShapeDtypeStructs; see `split_batch`."""
        return split_batch(self.example, self.replicated, microbatches, placement, self.in_one_piece)


@dataclass(frozen=True)
class EngineProgram(StepProgram):
    """Program of a job on one placement; see StepProgram.

    evaluation: jitted (state, batch) -> sums of loss, count and metrics.
    """

    model: UserModel
    placement: Placement
    evaluation: Any


def make_placement(config: Config, mesh: Any) -> Placement:
    """Return the placement of an engine on a mesh."""
    return Placement(mesh, config.sharding, config.precision, config.offload, reduces_microbatches=True)


def make_engine_program(job: Job, mesh: Any) -> EngineProgram:
    """Make the program on a mesh, which may be one of devices that do not exist.

    Raises:
        InputError: the batch, the rules or the loss do not fit.
    """
    config = job.config
    if isinstance(mesh, Mesh):
        kernel_choice.check_matmul(mesh.devices.flat[0], config.precision.matmul)
        xla_options.check_options(config.xla, mesh)
    placement = make_placement(config, mesh)
    batch = job.split(config.training.accumulation, placement)
    attention = make_selector(placement, config.training.attention)
    traces = [_trace_other(each, placement, attention) for each in job.others]
    plain = make_user_model(
        *(job.frontend, job.loss, _drop_shardings(batch), job.rules, placement, attention), others=traces
    )
    _check_effects(plain, config)
    plain = replace(plain, saved=SAVED.get(config.remat.policy))
    model, trained, frozen = adapt_user_model(plain, config)
    shares = _divide_among_losses(job, model, trained)
    _check_specs(job, plain.specs, shares[job.loss_name], placement)
    _check_assigned(job, model, shares, placement)
    exact = _describe_exact_sums(model, shares[job.loss_name], placement)
    model = replace(model, oddities=(*model.oddities, *exact))
    parts = ModelParts(
        trained=shares[job.loss_name],
        frozen=tree.merge(frozen, tree.exclude(trained, shares[job.loss_name])),
        make_advance=functools.partial(_make_advance, model, placement),
        batch=batch,
        recomputed="layers" if model.recomputes else "nothing",
        variables=nest_variables(job.frontend, list_variable_specs(job.frontend)),
        loss=job.loss_name,
        others={
            each.loss_name: make_share(each.config, shares[each.loss_name], _make_whole_optimizer(each, model))
            for each in job.others
        },
    )
    whole = _make_whole_optimizer(job, model)
    made = make_step_program(config, placement, parts, whole)
    if whole is not None:
        own = take_share(made.state, job.loss_name, shares[job.loss_name]) if job.loss_name else made.state
        check_update(whole, own)
    measured = replace(model, frontend=job.frontend.for_evaluation(), loss=job.evaluation_loss)
    evaluated = functools.partial(compute_loss, measured, placement=placement.for_evaluation())
    evaluation = jax.jit(
        evaluated,
        out_shardings=placement.replicated,
        compiler_options=xla_options.compiler_options(mesh, user=config.xla),
    )
    return EngineProgram(**vars(made), model=model, placement=placement, evaluation=evaluation)


def _make_advance(
    model: UserModel, placement: Placement, bind: BindOptimizers, specs: StateSpecs, settings: StepSettings
) -> Advance:
    differentiate = differentiate_user_model(model, placement)
    return update_after_backward(differentiate, bind, specs, placement, settings)


def _check_effects(model: UserModel, config: Config) -> None:
    """Raise InputError if a setting has no effect: one of the attention, or one of the layers."""
    if config.training.attention != "auto" and not model.attention.choices:
        raise InputError(
            f"config: training.attention={config.training.attention} has no effect, because the loss does not call "
            "jaxopt_llm.attention; call it in the model, or leave the setting out"
        )
    if config.remat.policy == "save_attention" and not model.attention.choices:
        raise InputError(
            "config: remat.policy=save_attention keeps what jaxopt_llm.attention computes, and the loss does not call "
            "it; call it in the model, or set remat.policy=full"
        )
    if config.remat.policy in SAVED and not model.has_layers:
        raise InputError(
            f"config: remat.policy={config.remat.policy} has no effect, because the loss has neither a loop over "
            "stacked layers nor equal layers in a list; put nnx.remat or jax.checkpoint around what is to be computed "
            "again"
        )
    settings = {
        f"precision.matmul={config.precision.matmul}": config.precision.quantises,
        "offload.parameters=True": config.offload.parameters,
    }
    found = [name for name, is_set in settings.items() if is_set]
    if found and {*model.sections} == {"non_layer"}:
        verb = "has" if len(found) == 1 else "have"
        raise InputError(
            f"config: {', '.join(found)} {verb} no effect, because the loss has no loop over stacked layers; make one "
            "with nnx.scan, nn.scan or lax.scan, or leave it out"
        )


def _check_specs(job: Job, specs: Params, trained: Params, placement: Placement) -> None:
    """Raise InputError if settings of the products or of the optimizer do not fit the parameters.

    specs: of all parameters, without adapters. trained: of those that are trained, with adapters.
    """
    config = job.config
    found = quantised.problems(config.precision.matmul, specs, placement)
    if job.transformation is None:
        found += optimizer.group_problems(config.optimizer, trained)
        found += moments.problems(config.optimizer.state_dtype, trained, placement)
    if found:
        raise InputError(f"config: {'; '.join(found)}")


def _check_assigned(job: Job, model: UserModel, shares: Mapping[str, Params], placement: Placement) -> None:
    """Raise InputError if the loss assigns to a parameter whose values it does not have, or that has an adapter.

    shares: specs of the parameters that each loss trains, by its name.
    """
    specs, own = dict(tree.leaves_with_path(model.specs, is_wrapped)), _list_paths(shares[job.loss_name])
    others = {path for share in shares.values() for path in _list_paths(share)} - own
    for index in sorted(model.written):
        path, name = model.paths[index], model.frontend.parameters[index].path
        if is_wrapped(specs[path]):
            raise InputError(
                f"loss: it assigns to the parameter {name}, which has an adapter; leave it out of lora.targets"
            )
        if path in others and zero.has_compute_copy(placement):
            raise InputError(
                f"loss: {job.loss_name} assigns to the parameter {name}, which another loss trains; with two losses "
                "this works with sharding.zero_stage=0 or 3 only"
            )


def _list_paths(specs: Params) -> set[str]:
    return {path for path, _ in tree.leaves_with_path(specs, is_wrapped)}


def _trace_other(job: Job, placement: Placement, attention: AttentionSelector) -> LossTrace:
    """Run the loss of another job of the engine abstractly."""
    batch = _drop_shardings(job.split(job.config.training.accumulation, placement))
    return run_abstractly(job.frontend, job.loss, batch, placement, attention)


def _drop_shardings(batch: Microbatches) -> Any:
    """Return a microbatch as ShapeDtypeStructs."""
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch.rows)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch.join(rows))


def _divide_among_losses(job: Job, model: UserModel, trained: Params) -> dict[str, Params]:
    """Return the specs of the parameters that each loss trains, by its name.

    Raises:
        InputError: a loss trains nothing, or a parameter is trained by no loss.
    """
    if not job.loss_name:
        return {"": trained}
    paths = [path for path, _ in tree.leaves_with_path(trained)]
    shares, left = {}, {*paths}
    for each in job.losses:
        selected = {*_matches(paths, _add_sections(model, each.trains))}
        share, _ = tree.partition(trained, selected.__contains__)
        if not selected:
            raise InputError(
                f"trains: {', '.join(each.trains)} of the loss {each.loss_name} matches no trained parameter; give "
                f"patterns of paths, as in trains={{'{each.loss_name}': 'encoder/*'}} (examples: "
                f"{', '.join(sorted(paths)[:3])})"
            )
        if job.config.training.ema_decay and (both := selected - left):
            raise InputError(
                f"training.ema_decay: two losses train {min(both)}, and its average would have two numbers of steps; "
                "give each parameter to one loss, or set training.ema_decay=0"
            )
        shares[each.loss_name] = share
        left -= selected
    if left:
        raise InputError(
            f"trains: no loss trains {min(left)}; add it to the parameters of a loss in initialize(trains=...), or "
            "leave it out of training.trainable"
        )
    return shares


def _describe_exact_sums(model: UserModel, trained: Params, placement: Placement) -> Iterator[str]:
    """Yield what moves exactly in spite of the settings of codes."""
    yield from describe_exact_matrices(trained, placement)
    by_path = dict(tree.leaves_with_path(trained))
    coded = {path for path, spec in by_path.items() if find_row_sum(spec, placement)}
    others = [
        path
        for path, uses in zip(model.paths, model.uses, strict=True)
        if path in coded and any(use.kind not in (PRODUCT, LOOKUP) for use in uses)
    ]
    if others:
        yield (
            f"the gradients of {len(others)} parameters are summed exactly (first: {others[0]}): only those of matrix "
            "products and of lookups are sent as codes"
        )


def _make_whole_optimizer(job: Job, model: UserModel) -> WholeOptimizer | None:
    """Return the optimizer of the user; None: the configuration names it."""
    if job.transformation is None:
        return None

    def to_tree(sections: Any) -> Any:
        return model.frontend.as_tree(model.flatten(sections))

    def from_tree(parameters: Any) -> Any:
        by_path = dict(tree.leaves_with_path(parameters, is_wrapped))
        return model.nest([by_path.get(info.path) for info in model.frontend.parameters])

    return WholeOptimizer(job.transformation, to_tree, from_tree)


def adapt_user_model(model: UserModel, config: Config) -> tuple[UserModel, Params, Params]:
    """Divide the parameters into trained and frozen ones, and add adapters if `lora.rank` is set.

    A pattern matches the path of a parameter with or without its section. `all-linear` are the matrices that only
    products read and whose sides are at least the rank.

    Returns the model, and the specs of its trained and of its frozen parameters; see `lora.adapt_model`.

    Raises:
        InputError: a pattern selects nothing, or a parameter that cannot have an adapter.
    """
    products, settings = model.products, config.lora
    trainable, targets = (_add_sections(model, each) for each in (config.training.trainable, settings.targets))

    def is_product(path: str, spec: ParamSpec) -> bool:
        return path in products

    if settings.rank and ALL_LINEAR in targets:
        listed = tuple(target for target in targets if target != ALL_LINEAR)
        wide = [path for path, spec in tree.leaves_with_path(model.specs) if _has_rank(spec, settings.rank)]
        excluded = {*_matches(model.paths, (*listed, *trainable))}
        targets = (*listed, *(path for path in wide if path in products and path not in excluded))
    others = [path for path in _matches(model.paths, targets) if path not in products]
    if settings.rank and others:
        raise InputError(
            f"lora.targets: {others[0]} is read by something else than matrix products over the same dimensions, "
            "and an adapter is only multiplied by one of its sides; leave it out"
        )
    settings = replace(settings, targets=targets)
    if found := lora.problems(model.specs, settings, trainable, is_product):
        raise InputError("; ".join(found))
    return lora.adapt_model(model, settings, config.precision, trainable, is_product)


def _has_rank(spec: ParamSpec, rank: int) -> bool:
    """Return whether both sides of a matrix are at least this large."""
    layer = spec.unstack()
    return bool(layer.contracting) and min(layer.fan_in, math.prod(layer.shape) // layer.fan_in) >= rank


def _add_sections(model: UserModel, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return patterns of whole paths. One that matches no whole path may match paths without their section."""
    found: list[str] = []
    for pattern in patterns:
        whole = [f"{section}/{pattern}" for section in model.specs]
        without = [each for each in whole if _matches(model.paths, (each,))]
        found += [pattern] if _matches(model.paths, (pattern,)) or not without else without
    return tuple(found)


def _matches(paths: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [path for path in paths if tree.first_match(path, patterns)]


# --- Choice of `remat.policy auto`: the first policy with which a step fits into the memory
#
# The policies are `none`, the loss as it is written; `save_attention`, for a loss that calls `jaxopt_llm.attention`;
# and `full`. The choice is open only if the loss has a loop over layers, or equal layers in a list, that it does not
# rematerialise.


T = TypeVar("T")


@dataclass(frozen=True)
class Fitting(Generic[T]):
    """A program, what compiling its step returned, and the choice in words; "" if nothing was open."""

    program: EngineProgram
    compiled: T
    chosen: str


def compile_fitting(
    job: Job,
    program: EngineProgram,
    limit: int,
    compile: Callable[[EngineProgram], T],
    count_peak: Callable[[T], int],
    agree: Callable[[bool], bool] = lambda fits: fits,
) -> Fitting[T]:
    """Compile the step of a job with the policy that `auto` chooses.

    Args:
        program: of the job, with the loss as it is written.
        limit: bytes of a device that XLA may use.
        compile: compiles the step of a program.
        count_peak: returns the bytes of a device that the result of `compile` needs.
        agree: returns whether a step fits all processes.
    """
    compiled = compile(program)
    if not is_open(program, job):
        return Fitting(program, compiled, "")
    usable, policy, refused = leave_free(limit), "none", ""
    for larger in ("save_attention", "full") if program.model.attention.choices else ("full",):
        peak = count_peak(compiled)
        needed = f"needs {peak / GIB:.2f} of {usable / GIB:.2f} GiB per device"
        if agree(peak <= usable):
            return Fitting(program, compiled, f"remat.policy {policy}, which {needed}{refused}")
        refused = f", because {policy} {needed}"
        policy, config = larger, fields.replace_fields(job.config, {"remat.policy": larger})
        program = make_engine_program(replace(job, config=config), program.placement.mesh)
        compiled = compile(program)
    return Fitting(program, compiled, f"remat.policy {policy}{refused}")


def is_open(program: EngineProgram, job: Job) -> bool:
    """Return whether `remat.policy` is open."""
    return job.config.remat.policy == AUTO and program.model.keeps_layers


def find_limit(device: jax.Device) -> int | None:
    """Return the bytes of a GPU that XLA may use. None for a CPU: there the loss is taken as it is written."""
    return None if device.platform == "cpu" else count_usable_bytes(device)
