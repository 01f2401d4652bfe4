"""Initial parameters of an engine from the user's arrays. Each device's shard is read by itself."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxopt_llm.checkpoint.huggingface.model_folder import build_leaf, copy_finite
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine.frontends import ArrayInfo
from jaxopt_llm.engine.program import EngineProgram
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.run.initial_weights import read_leaf
from jaxopt_llm.step.state import state_shardings

# By path: what has a shape, and returns a part as an array when it is indexed; None keeps the initial values.
Weights = Mapping[str, Any] | Callable[[str], Any]


def check_weights(weights: Weights, parameters: Sequence[ArrayInfo]) -> None:
    """Raise InputError if a mapping lacks parameters, has others, or has one of another shape.

    What a function returns is checked when it is read: to call it may already read the array.
    """
    if callable(weights):
        return
    if not isinstance(weights, Mapping):
        raise InputError(f"weights: {type(weights).__name__} is neither a mapping by path nor a function of a path")
    paths = [info.path for info in parameters]
    unknown = list(_list_unknown(weights, paths))
    missing = [path for path in paths if not _has(weights, path)]
    if unknown:
        raise InputError(
            f"weights: {', '.join(unknown[:3])}: there is no such parameter; the paths are those of engine.parameters, "
            f"such as {(missing or paths)[0]}"
        )
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InputError(
            f"weights: {', '.join(missing[:3])}{more} missing; give None for a parameter that keeps its initial values"
        )
    for info in parameters:
        if (source := _find(weights, info.path)) is not None:
            _check_shape(info.path, source, info.shape)


def read_weights(weights: Weights, program: EngineProgram) -> Params:
    """Return the parameters of a state that have weights, where they rest, and None for the others.

    One parameter is read after the other, and a stack that is quantised layer by layer.

    Raises:
        InputError: an array has another shape, or values that are no finite floating-point numbers.
    """
    specs, shardings = program.specs, state_shardings(program.specs, program.placement)
    names = dict(zip(program.model.paths, (info.path for info in program.model.frontend.parameters), strict=True))

    def read(path: tuple[Any, ...], spec: tree.Leaf, sharding: tree.Leaf) -> tree.Leaf:
        name = names[tree.path_string(path)]
        source = weights(name) if callable(weights) else _find(weights, name)
        if source is None:
            return None
        _check_shape(name, source, leaves.unwrap_specs(spec).shape)
        return read_leaf(_Source(name, source), name, spec, sharding, program.placement)

    given: Params = jax.tree_util.tree_map_with_path(
        read,
        tree.merge(specs.masters, specs.frozen),
        tree.merge(shardings.masters, shardings.frozen),
        is_leaf=leaves.is_wrapped,
    )
    return given


@dataclass(frozen=True)
class _Source:
    """The array of one parameter, as run/initial_weights.py reads it."""

    name: str
    array: Any

    def dtype(self, path: str) -> np.dtype:
        return np.dtype(getattr(self.array, "dtype", np.float32))

    def read(self, path: str, spec: ParamSpec, sharding: NamedSharding) -> jax.Array:
        return build_leaf(spec, sharding, self._fill)

    def _fill(self, out: np.ndarray, layer: int | None, index: tuple[slice, ...]) -> None:
        part = np.asarray(self.array[index if layer is None else (layer, *index)])
        if not jnp.issubdtype(part.dtype, jnp.floating):
            raise InputError(f"weights: {self.name} is {part.dtype}; give real floating-point numbers")
        copy_finite(part, out, f"weights: {self.name}")


def _list_unknown(weights: Mapping[str, Any], paths: Sequence[str], prefix: str = "") -> Iterator[str]:
    """Yield the entries of a mapping, and of those nested in it, that belong to no parameter."""
    for name, value in weights.items():
        path = f"{prefix}{name}"
        if path not in paths:
            inside = any(each.startswith(f"{path}/") for each in paths)
            if inside and isinstance(value, Mapping):
                yield from _list_unknown(value, paths, f"{path}/")
            elif not inside or value is not None:
                yield path


def _has(weights: Mapping[str, Any], path: str) -> bool:
    try:
        _find(weights, path)
    except KeyError:
        return False
    return True


def _find(weights: Mapping[str, Any], path: str) -> Any:
    """Return the entry of a path, in a mapping by whole paths or in nested ones. Raise KeyError if there is none."""
    if path in weights:
        return weights[path]
    first, _, rest = path.partition("/")
    key: Any = int(first) if first.isdigit() and first not in weights else first  # items of an nnx.List
    inner = weights[key]
    if inner is None:
        return None
    if not rest or not isinstance(inner, Mapping):
        raise KeyError(path)
    return _find(inner, rest)


def _check_shape(path: str, source: Any, shape: tuple[int, ...]) -> None:
    # A slice of safetensors has a method.
    if not hasattr(source, "get_shape") and not hasattr(source, "shape"):
        raise InputError(f"weights: {path} is {type(source).__name__}, which has no shape; give an array")
    found = tuple(source.get_shape() if hasattr(source, "get_shape") else source.shape)
    if found != shape:
        raise InputError(f"weights: {path} is {list(found)}, and the parameter is {list(shape)}")
