"""Program of an engine: a user's model, its optimizer and its step, made from a configuration and a mesh."""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxopt_llm.compiler import kernel_choice, xla_options
from jaxopt_llm.config import BATCH_AXES, Config
from jaxopt_llm.config.training import ALL_LINEAR
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine.attention import make_selector
from jaxopt_llm.engine.checks import check_update
from jaxopt_llm.engine.frontends import Frontend, Loss
from jaxopt_llm.engine.gradients import compute_loss, differentiate_user_model
from jaxopt_llm.engine.user_model import Rules, UserModel, make_user_model, nest_variables
from jaxopt_llm.kernels.attention import CHECKPOINT_NAME
from jaxopt_llm.model.linear import quantised
from jaxopt_llm.model.linear.leaves import is_wrapped
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.training import lora, moments, optimizer
from jaxopt_llm.training.state import StateSpecs
from jaxopt_llm.training.step import Advance, BindOptimizers, StepSettings, update_after_backward
from jaxopt_llm.training.step_program import ModelParts, StepProgram, make_step_program
from jaxopt_llm.training.update import WholeOptimizer

# Policies that rematerialise layers -> the checkpoint names of the results that they keep.
SAVED: dict[Any, tuple[str, ...]] = {"full": (), "save_attention": (CHECKPOINT_NAME,)}


@dataclass(frozen=True)
class Job:
    """Model, loss, data and settings of a training, independently of the devices.

    transformation: the user's optimizer; None for `config.optimizer`.
    rules: names of dimensions -> mesh axis.
    """

    config: Config
    frontend: Frontend
    loss: Loss
    evaluation_loss: Loss
    example: Any
    transformation: optax.GradientTransformation | None
    rules: Rules


@dataclass(frozen=True)
class EngineProgram(StepProgram):
    """Program of a job on one placement; see StepProgram.

    evaluation: jitted (state, batch) -> sums of loss, count and metrics.
    """

    model: UserModel
    placement: Placement
    evaluation: Any


def make_engine_program(job: Job, mesh: Any) -> EngineProgram:
    """Make the program on a mesh, which may be one of devices that do not exist.

    Raises:
        InputError: the batch, the rules or the loss do not fit.
    """
    config = job.config
    if isinstance(mesh, Mesh):
        kernel_choice.check_matmul(mesh.devices.flat[0], config.precision.matmul)
        xla_options.check_options(config.xla, mesh)
    placement = Placement(mesh, config.sharding, config.precision, config.offload, reduces_microbatches=True)
    batch = split_microbatches(job.example, config.training.accumulation, placement)
    microbatch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    attention = make_selector(placement, config.training.attention)
    plain = make_user_model(job.frontend, job.loss, microbatch, job.rules, placement, attention)
    _check_effects(plain, config)
    plain = replace(plain, saved=SAVED.get(config.remat.policy))
    model, trained, frozen = adapt_user_model(plain, config)
    _check_specs(job, plain.specs, trained, placement)
    parts = ModelParts(
        trained=trained,
        frozen=frozen,
        make_advance=functools.partial(_make_advance, model, placement),
        batch=batch,
        recomputes_layers=model.recomputes,
        variables=_make_variable_specs(job.frontend),
    )
    whole = None if job.transformation is None else _make_whole_optimizer(job.transformation, model)
    made = make_step_program(config, placement, parts, whole)
    if whole is not None:
        check_update(whole, made.state)
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


def _make_whole_optimizer(transformation: optax.GradientTransformation, model: UserModel) -> WholeOptimizer:
    def to_tree(sections: Any) -> Any:
        return model.frontend.as_tree(model.flatten(sections))

    def from_tree(parameters: Any) -> Any:
        by_path = dict(tree.leaves_with_path(parameters, is_wrapped))
        return model.nest([by_path.get(info.path) for info in model.frontend.parameters])

    return WholeOptimizer(transformation, to_tree, from_tree)


def _make_variable_specs(frontend: Frontend) -> Params:
    infos = frontend.variables
    specs = [ParamSpec(info.shape, (None,) * len(info.shape), dtype=np.dtype(info.dtype)) for info in infos]
    return nest_variables(frontend, specs)


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
            f"lora.targets: {others[0]} is read by something else than matrix products, and an adapter is only "
            "multiplied; leave it out"
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
