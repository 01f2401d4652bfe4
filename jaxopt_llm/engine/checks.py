"""Checks of an engine's configuration, and of what its loss does with the model, before anything is allocated."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr
from jax.extend.core.primitives import dot_general_p

from jaxopt_llm.config import Config, MeshConfig, OptimizerConfig, TrainingConfig
from jaxopt_llm.config.fields import FIELDS, get_field, wrong_types
from jaxopt_llm.config.unread import find_unread as unread_by_mesh
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.jaxpr import list_constants, list_equations, typeof
from jaxopt_llm.engine.frontends import ArrayInfo, Frontend
from jaxopt_llm.execution.weight_uses import PRODUCT, Use, asks_for_precision, depends_on
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step.state import TrainState
from jaxopt_llm.step.update import WholeOptimizer

# The settings that an engine reads, as globs. All others are of the decoder, its data and its commands.
READ = (
    *("run.*", "training.steps", "training.accumulation", "training.skip_*", "training.ema_decay"),
    *("training.on_spike", "training.spike_factor", "training.trainable", "training.batch_size", "training.attention"),
    *("optimizer.*", "schedule.*", "precision.*"),
    *("lora.rank", "lora.alpha", "lora.targets", "lora.base", "lora.double_quantisation", "lora.rslora", "lora.dora"),
    *("mesh.data", "mesh.fsdp", "mesh.tensor", "remat.policy", "offload.*", "xla.*"),
    *("sharding.zero_stage", "sharding.optimizer_over_data", "sharding.int8_gathers"),
    *("sharding.data_gradients", "sharding.fsdp_gradients"),
    *(
        "checkpoint.*",
        "evaluation.every",
        "evaluation.patience",
        "logging.*",
        "profile.*",
        "distributed.*",
        "watchdog.*",
    ),
)
NOT_READ = (*("optimizer.in_backward", "optimizer.outer_*", "precision.compute_dtype_layers", "run.deterministic"),)
POLICIES = ("auto", "none", "save_attention", "full")
CONSTANT_BYTES = 2**20  # larger constants of a loss are worth a warning


class EngineWarning(UserWarning):
    """Something that an engine does not refuse, but that its user probably did not intend."""


def find_unread(config: Config) -> list[str]:
    """Return the settings with another value than the default that an engine does not read."""
    default = Config()
    return [
        name
        for name in FIELDS
        if (not tree.first_match(name, READ) or tree.first_match(name, NOT_READ))
        and get_field(config, name) != get_field(default, name)
    ]


def check_config(config: Config, rows: int) -> None:
    """Raise an InputError that names all settings that are wrong, or that an engine does not read.

    Args:
        rows: rows of the example.
    """
    unread = find_unread(config)
    found = wrong_types(config) or config.problems()
    found += [
        f"{name}={get_field(config, name)} has no effect, because {reason}; leave it out"
        for name, reason in unread_by_mesh(config).items()
        if name.startswith("sharding.") and name not in unread
    ]
    if unread:
        found.append(f"an engine does not read {', '.join(unread)}, which only the decoder does: leave it out")
    if config.remat.policy not in POLICIES:
        found.append(f"remat.policy={config.remat.policy}: for an engine it must be one of {', '.join(POLICIES)}")
    if config.training.batch_size not in (TrainingConfig.batch_size, rows):
        found.append(f"training.batch_size={config.training.batch_size}, but the example has {rows} rows")
    if found:
        raise InputError(f"config: {'; '.join(found)}")


def check_devices(devices: Sequence[jax.Device], mesh: MeshConfig, processes: int) -> None:
    """Raise InputError if these are not the devices of a mesh, or if a process of the job has none of them."""
    if len({*devices}) != len(devices):
        raise InputError("devices: one is named twice; name each once")
    if len(devices) != mesh.devices:
        sizes = " × ".join(f"mesh.{axis}={size}" for axis, size in mesh.sizes.items() if size > 1) or "the mesh"
        raise InputError(f"devices: there are {len(devices)}, and {sizes} needs {mesh.devices}; change one of them")
    if (found := len({device.process_index for device in devices})) != processes:
        raise InputError(
            f"devices: they are those of {found} of {processes} processes; take as many from each, or run one process"
        )


def check_optimizer(optimizer: Any) -> None:
    """Raise InputError if this is no optimizer."""
    if isinstance(optimizer, OptimizerConfig):
        return
    if isinstance(optimizer, nnx.Optimizer):
        raise InputError("optimizer: give the optax transformation itself instead of nnx.Optimizer")
    if isinstance(optimizer, type) or not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise InputError(
            f"optimizer: {getattr(optimizer, '__name__', type(optimizer).__name__)} is no optax transformation; give "
            "one, such as optax.adamw(1e-3), or an OptimizerConfig"
        )


def check_update(optimizer: WholeOptimizer, state: TrainState) -> None:
    """Raise InputError if an optax transformation cannot compute its update from what an engine passes to it.

    Args:
        state: as ShapeDtypeStructs.
    """
    masters, moments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), [state.masters, state.moments]
    )
    try:
        jax.eval_shape(optimizer.compute, masters, masters, moments, jax.ShapeDtypeStruct((), jnp.float32))
    except (TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"optimizer: its update fails ({reason}); an engine passes the gradients, the state, the parameters, value "
            "(the mean loss) and grad; give a transformation that needs no more, such as optax.lbfgs(linesearch=None)"
        ) from error


def find_hidden_settings(config: Config) -> list[str]:
    """Return the settings with another value than the default that an optax transformation replaces."""
    default = Config()
    names = [name for name in FIELDS if name.startswith(("optimizer.", "schedule."))]
    return [name for name in names if get_field(config, name) != get_field(default, name)]


def check_parameters(parameters: Sequence[ArrayInfo]) -> None:
    """Raise InputError if there is no parameter, or one that cannot be trained in float32."""
    if not parameters:
        raise InputError("model: it has no parameters; nothing could be trained")
    for info in parameters:
        if not jnp.issubdtype(info.dtype, jnp.floating):
            raise InputError(
                f"model: the parameter {info.path} is {np.dtype(info.dtype).name}, and only real floating-point "
                "numbers are trained; keep it in a variable of another type than nnx.Param, or in the batch"
            )
        if np.dtype(info.dtype) == np.float64:
            raise InputError(
                f"model: the parameter {info.path} is float64, and parameters are trained in float32; make it in "
                "float32, as by param_dtype=jnp.float32, or leave out jax_enable_x64"
            )


def check_rules(parameters: Sequence[ArrayInfo], rules: Mapping[str, str | None], placement: Placement) -> list[str]:
    """Return warnings of names that no rule mentions.

    Raises:
        InputError: a rule has no effect or cannot be followed.
    """
    names = {name for info in parameters for name in info.axes or () if name}
    tensor = placement.size("tensor")
    for name, axis in rules.items():
        if axis not in ("tensor", None):
            raise InputError(
                f"rules: {name} -> {axis}: a rule names the mesh axis tensor, or None; ZeRO divides the storage over "
                "fsdp by itself"
            )
        if name not in names:
            known = f"the model names {', '.join(sorted(names))}" if names else "the model names no dimension"
            raise InputError(f"rules: no parameter has a dimension {name}; {known}")
    for info in parameters:
        split = [dim for dim, name in enumerate(info.axes or ()) if name and rules.get(name) == "tensor"]
        if len(split) > 1:
            raise InputError(f"rules: two dimensions of {info.path} go to tensor; give tensor to one of them")
        if split and info.shape[split[0]] % tensor:
            dimension, size = (info.axes or ())[split[0]], info.shape[split[0]]
            raise InputError(f"rules: {dimension} of {info.path} is {size}, which mesh.tensor={tensor} does not divide")
    if tensor > 1 and not any(rules.values()):
        raise InputError(f"mesh.tensor={tensor} divides nothing without a rule: set rules, or mesh.tensor=1")
    unruled = sorted(names - {*rules}) if tensor > 1 else []
    if not unruled:
        return []
    return [f"no rule mentions the dimensions {', '.join(unruled)}: every device along mesh.tensor holds them whole"]


def find_unread_parameters(frontend: Frontend, uses: Sequence[Sequence[Use]]) -> Iterator[str]:
    """Yield a warning about the parameters without uses, if there are any."""
    unread = [info.path for info, found in zip(frontend.parameters, uses, strict=True) if not found]
    if unread:
        more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
        yield f"the loss does not read the parameters {', '.join(unread[:3])}{more}: they get no gradient"


def find_oddities(
    frontend: Frontend, closed: ClosedJaxpr, uses: Sequence[Sequence[Use]], compute_dtype: str
) -> Iterator[str]:
    """Yield what a loss does that its user probably did not intend.

    Args:
        closed: its jaxpr.
        uses: how it reads each parameter.
    """
    if dropped := sorted(frontend.dropped):
        yield f"the loss creates the variables {', '.join(dropped)}, which are no part of the model: they are dropped"
    if changed := sorted(frontend.changed):
        yield (
            f"the loss changes the attributes {', '.join(changed)} of the model, which are no variables: it does so "
            "once, when it is traced, and the change is lost; keep what changes in an nnx.Variable"
        )
    constants = [each for each in list_constants(closed) if getattr(each, "nbytes", 0) >= CONSTANT_BYTES]
    if constants:
        shapes = ", ".join(f"{each.dtype}{list(each.shape)}" for each in constants[:3])
        yield (
            f"the loss reads arrays that are neither in the model nor in the batch ({shapes}): every device holds "
            "them, and they are not trained; use the model that the loss receives"
        )
    if depends_on(closed, len(frontend.parameters) + 1, len(frontend.parameters)):  # the results after the parameters
        yield (
            "the count that the loss returns depends on the parameters, and it has no gradient: it only weighs the "
            "microbatches; return the mean itself if it has to be differentiated"
        )
    if compute_dtype != "float32":
        yield from _find_wide_products(closed, uses, compute_dtype)


def _find_wide_products(closed: ClosedJaxpr, uses: Sequence[Sequence[Use]], compute_dtype: str) -> Iterator[str]:
    products = [use for found in uses for use in found if use.kind == PRODUCT and not use.exact]
    promoted = sum(use.dtype == "float32" for use in products)
    wide = sum(
        eqn.primitive is dot_general_p and all(typeof(atom).dtype == jnp.float32 for atom in eqn.invars)
        for eqn in list_equations(closed.jaxpr)
        if not asks_for_precision(eqn)
    )
    remedy = (
        f"a float32 array promotes what it meets: cast it in the loss, as in x.astype(jnp.{compute_dtype}), and give "
        f"layers with a dtype of their own, such as nnx.Embed, dtype=jnp.{compute_dtype}"
    )
    if promoted:
        yield (
            f"{promoted} of {len(products)} products with parameters meet float32 arrays although "
            f"precision.compute_dtype is {compute_dtype}; they are computed in {compute_dtype} all the same, but the "
            f"arrays take twice the memory; {remedy}"
        )
    if wide > promoted:
        yield (
            f"{wide - promoted} products without parameters are computed in float32 although precision.compute_dtype "
            f"is {compute_dtype}; {remedy}"
        )


# --- Arrays that a loss closes over although they change: arrays of another engine
#
# JAX reads such an array once, when the loss is traced. The compiled step then keeps this value, whatever that engine
# does.


# The arrays that engines returned to their users, by identity; and each engine, with a function that lists its arrays.
_returned: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()
_engines: weakref.WeakKeyDictionary[Any, Callable[[Any], list[Any]]] = weakref.WeakKeyDictionary()


def register_engine(engine: Any, list_arrays: Callable[[Any], list[Any]]) -> None:
    """Remember an engine. list_arrays: returns the arrays of its state."""
    _engines[engine] = list_arrays


def register_returned(arrays: Iterable[jax.Array]) -> None:
    """Remember arrays that an engine returns to its user as its model."""
    _returned.update((id(array), array) for array in arrays if isinstance(array, jax.Array))


def check_captured(closed: ClosedJaxpr) -> None:
    """Raise InputError if a loss closes over arrays of an engine.

    Args:
        closed: the jaxpr of the loss.
    """
    arrays = [each for each in list_constants(closed) if isinstance(each, jax.Array)]
    of_engines = {id(array) for engine, list_arrays in _engines.items() for array in list_arrays(engine)}
    if found := [each for each in arrays if id(each) in of_engines or _returned.get(id(each)) is each]:
        raise InputError(
            f"a function closes over arrays of an engine's model ({_describe(found)}), which it would read only "
            "once, when it is traced; put both models into one engine, pass the arrays in the batch, or copy them with "
            "jax.device_get if they are constants"
        )


def _describe(arrays: list[jax.Array]) -> str:
    more = f" and {len(arrays) - 3} more" if len(arrays) > 3 else ""
    return ", ".join(f"{each.dtype}{list(each.shape)}" for each in arrays[:3]) + more
