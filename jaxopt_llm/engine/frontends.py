"""Front-ends: a user's model and loss, in Flax NNX, in Linen or as plain functions, as functions of lists of arrays.

A front-end traces the user's code and knows no placement. What it names:

parameters: the arrays that the loss is differentiated with respect to: `nnx.Param`s, Linen's collection "params", or
    every leaf of a plain pytree.
variables: all other arrays of the model, which the loss may change: running means of BatchNorm, keys and counts of
    random numbers, caches, and arrays that are attributes without a variable. How they are stored: see `StoredForms`.
"""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx, struct, traverse_util
from jax.extend.core import Jaxpr
from jax.interpreters import partial_eval

from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.metric import Max, Mean, Sum, join_metrics, replace_zero
from jaxopt_llm.execution.weight_uses import drop_callbacks
from jaxopt_llm.observe.meter import OF_RECORD
from jaxopt_llm.step.step import is_of_step

# --- Stored forms of arrays that JAX cannot save, or pass to a compiled program, as they are


# Types of fewer than 8 bits -> the types of 8 bits that hold their values. A compiled program refuses arguments of the
# former: it expects a packed layout, which JAX does not give them.
WIDE = {
    np.dtype(narrow): np.dtype(wide)
    for narrow, wide in {
        jnp.int2: jnp.int8,
        jnp.int4: jnp.int8,
        jnp.uint2: jnp.uint8,
        jnp.uint4: jnp.uint8,
        jnp.float4_e2m1fn: jnp.float8_e4m3fn,
    }.items()
}


@dataclass(frozen=True)
class StoredForms:
    """Forms in which a state stores some arrays: random keys as uint32 data, and numbers of 2 or 4 bits in 8 bits.

    forms: the implementation of a random key, a type of `WIDE`, or None for an array that is stored as it is.
    """

    forms: tuple[str | np.dtype[Any] | None, ...]

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> "StoredForms":
        return cls(tuple(map(_find_form, leaves)))

    def store(self, leaves: Sequence[Any]) -> list[jax.Array]:
        return [_store(*pair) for pair in zip(self.forms, leaves, strict=True)]

    def read(self, leaves: Sequence[Any]) -> list[jax.Array]:
        return [_read(*pair) for pair in zip(self.forms, leaves, strict=True)]


def _find_form(leaf: Any) -> str | np.dtype[Any] | None:
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf.dtype if leaf.dtype in WIDE else None
    found: list[str] = []
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), jax.ShapeDtypeStruct((), leaf.dtype))
    return found[0]


def _store(form: str | np.dtype[Any] | None, leaf: Any) -> jax.Array:
    if isinstance(form, str):
        return jax.random.key_data(leaf)
    return leaf if form is None else leaf.astype(WIDE[form])


def _read(form: str | np.dtype[Any] | None, leaf: Any) -> jax.Array:
    if isinstance(form, str):
        return jax.random.wrap_key_data(leaf, impl=form)
    return leaf if form is None else leaf.astype(form)


Loss = Callable[[Any, Any], Any]  # (model, batch) -> see `normalise_loss`
RNG = "rng_count"  # the variable that makes a Linen model draw other random numbers at every call


@dataclass(frozen=True)
class ArrayInfo:
    """An array of a model before it exists.

    path: its keys, joined by slashes. axes: the names of its dimensions that the user gave, or None.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...] | None = None


@struct.dataclass
class LossParts:
    """Parts of what a loss returned. The mean loss is `total` by `count`.

    metrics: `Metric`s, and plain scalars, each a mean over what `count` counts.
    """

    total: Any
    count: Any
    metrics: dict[str, Any]

    def join(self) -> "LossParts":
        """Return the parts of several batches together, from each batch's parts, [N, ...]."""
        return LossParts(self.total.sum(axis=0), self.count.sum(axis=0), join_metrics(self.metrics, self.count))

    def mean(self) -> Any:
        """Return the mean loss; 0 if nothing counts."""
        return self.total / replace_zero(self.count)


class Frontend(Protocol):
    """A user's model as functions of lists of arrays, in the order of `parameters` and `variables`.

    dropped: paths of the variables that calls created, such as those of `sow`, and that are no part of the model.
    changed: paths of the attributes that calls changed, and that are no variables.
    """

    parameters: list[ArrayInfo]
    variables: list[ArrayInfo]
    dropped: set[str]
    changed: set[str]

    def make(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the initial parameters and variables. It is traced, so that each device makes its own shards."""

    def call(
        self, loss: Loss, parameters: Sequence[Any], variables: Sequence[Any], batch: Any
    ) -> tuple[Any, list[jax.Array], list[jax.Array]]:
        """Return what the loss returned, and the parameters and the variables after it."""

    def for_evaluation(self) -> "Frontend":
        """Return the front-end of the model in evaluation mode, where the framework has one."""
        return self

    def rebuild(self, parameters: Sequence[Any], variables: Sequence[Any]) -> Any:
        """Return the user's own kind of object with these arrays."""

    def rebuild_parameters(self, parameters: Sequence[Any]) -> Any:
        """Return the parameters alone, as the user's framework differentiates by them. None stands for no value."""

    def as_tree(self, parameters: Sequence[Any]) -> Any:
        """Return the parameters as the pytree that an optax transformation gets: nested dicts, or the plain pytree."""
        return nest([info.path for info in self.parameters], parameters)


def make_frontend(model: Any, loss: Loss, example: Any, seed: int) -> Frontend:
    """Return the front-end of a model.

    Args:
        model: function that returns an NNX module or a pytree of arrays, or a Linen module.
        example: batch as ShapeDtypeStructs, or with arrays.

    Raises:
        InputError: the model is none of these.
    """
    if isinstance(model, linen.Module):
        return LinenFrontend(model, loss, example, seed)
    if isinstance(model, nnx.Module) or not callable(model):
        raise InputError(
            f"model: {type(model).__name__} already holds its arrays on one device; give a function that makes it, "
            "such as lambda: MyModel(rngs=nnx.Rngs(0)), or a Linen module"
        )
    if isinstance(model, type) and _needs_arguments(model):
        raise InputError(
            f"model: the class {model.__name__} needs arguments; give a function that makes the model, such as "
            f"lambda: {model.__name__}(rngs=nnx.Rngs(0))"
        )
    made = _trace(model)
    return NnxFrontend(model, made) if isinstance(made, _Traced) else FunctionFrontend(model, made)


@struct.dataclass
class _Traced:
    """An NNX module apart: its structure, and its arrays as ShapeDtypeStructs."""

    graph: Any
    parameters: Any
    variables: Any


def _trace(factory: Callable[[], Any]) -> Any:
    """Return what a function makes with ShapeDtypeStructs for arrays; an NNX module as `_Traced`."""

    def make() -> Any:
        made = _construct(factory)
        if isinstance(made, nnx.Module):
            return _Traced(*nnx.split(made, nnx.Param, ...))
        _check_arrays(made)
        return made

    return jax.eval_shape(make)


def _check_arrays(made: Any) -> None:
    """Raise InputError if a model is no pytree of arrays, such as a Linen module or a module of torch."""
    for leaf in jax.tree.leaves(made):
        if not hasattr(leaf, "shape") and not isinstance(leaf, int | float | complex):
            kind = type(leaf).__name__
            remedy = f"the module itself, as {kind}(...)" if isinstance(leaf, linen.Module) else "one of them"
            raise InputError(
                f"model: its function returns {kind}, which is no NNX module and no pytree of arrays; give {remedy}"
            )


def _construct(factory: Callable[[], Any]) -> Any:
    """Return what a function makes. Arrays that are attributes of an NNX module belong to its state."""
    with nnx.use_eager_sharding(False):
        made = factory()
    for _, node in nnx.iter_graph(made) if isinstance(made, nnx.Module) else ():
        if isinstance(node, nnx.Pytree):
            for name, value in list(vars(node).items()):
                if isinstance(value, jax.Array):  # while it is traced, Flax takes such an array for static
                    setattr(node, name, nnx.data(value))
    return made


def _needs_arguments(kind: type) -> bool:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    _, *parameters = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
    return any(each.default is each.empty and each.kind in named for each in parameters)


def normalise_loss(output: Any) -> LossParts:
    """Return the parts of what a loss returned: mean, (sum, count), or one of them with a dict of metrics.

    Raises:
        InputError: it is none of these.
    """
    metrics: dict[str, Any] = {}
    value = output
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        value, metrics = value
    if unnamed := [name for name in metrics if not isinstance(name, str)]:
        raise InputError(f"loss: a metric is named {unnamed[0]!r}; give it a name that is text")
    if taken := [name for name in metrics if is_of_step(name) or name in (*OF_RECORD, "eval_loss")]:
        raise InputError(
            f"loss: a metric is named {taken[0]}, which is the name of a field of every record; give it another name"
        )
    total, count = value if isinstance(value, tuple) and len(value) == 2 else (value, jnp.float32(1))
    total, count = _to_scalar("the loss", total), _to_scalar("its count", count)
    if not jnp.issubdtype(total.dtype, jnp.floating):
        raise InputError(f"loss: it is {total.dtype}, which has no gradient; return a float")
    total, count = total.astype(jnp.float32), count.astype(jnp.float32)
    return LossParts(total, count, {name: _normalise_metric(name, each, count) for name, each in metrics.items()})


def _normalise_metric(name: str, metric: Any, count: jax.Array) -> Any:
    """Return a metric in float32: a `Metric`, or a plain scalar.

    Args:
        count: count of the loss.
    """

    def scalar(value: Any) -> jax.Array:
        return _to_scalar(f"metric {name}", value).astype(jnp.float32)

    def where_counted(mean: jax.Array, count: jax.Array) -> jax.Array:
        return jnp.where(count == 0, 0.0, mean)  # of nothing, a mean is 0/0, and NaN times a count of 0 is NaN

    if isinstance(metric, Sum | Max):
        return type(metric)(scalar(metric.value))
    if isinstance(metric, tuple) and len(metric) == 2:
        total, own = map(scalar, metric)
        return Mean(where_counted(total / own, own), own)
    return where_counted(scalar(metric), count)


def _to_scalar(name: str, value: Any) -> jax.Array:
    if not isinstance(value, int | float) and getattr(value, "shape", None) != ():
        found = f"shape {list(value.shape)}" if hasattr(value, "shape") else f"type {type(value).__name__}"
        raise InputError(
            f"loss: {name} is not a scalar, it has {found}; return the mean loss, or (sum, count), or one of them and "
            "a dict of metrics, each of which is a scalar, (sum, count), jaxopt_llm.Sum(x) or jaxopt_llm.Max(x)"
        )
    array = jnp.asarray(value)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise InputError(f"loss: {name} is complex; return its real part or its absolute value")
    return array


def _describe(paths: Sequence[str], leaves: Sequence[Any], axes: Sequence[Any] | None = None) -> list[ArrayInfo]:
    names = [None] * len(paths) if axes is None else axes
    data = jax.eval_shape(StoredForms.of(leaves).store, list(leaves))
    return [
        ArrayInfo(path, tuple(leaf.shape), leaf.dtype, each)
        for path, leaf, each in zip(paths, data, names, strict=True)
    ]


def nest(paths: Sequence[str], leaves: Sequence[Any]) -> dict[str, Any]:
    """Return nested dicts of leaves by their paths.

    Raises:
        InputError: two leaves have one path, or a path begins another one.
    """
    by_keys = {tuple(path.split("/")): leaf for path, leaf in zip(paths, leaves, strict=True)}
    for one, other in itertools.pairwise(sorted(tuple(path.split("/")) for path in paths)):
        if other[: len(one)] == one:
            raise InputError(
                f"model: another array has the path {'/'.join(other)}, or a part of it; rename one of the keys"
            )
    nested: dict[str, Any] = traverse_util.unflatten_dict(by_keys)
    return nested


# --- Flax NNX


class NnxFrontend(Frontend):
    """A model of Flax NNX."""

    def __init__(self, factory: Callable[[], nnx.Module], traced: _Traced) -> None:
        self._factory, self._graph = factory, traced.graph
        self.dropped: set[str] = set()
        self.changed: set[str] = set()
        self._parameter_keys, parameter_variables = _flatten_state(traced.parameters)
        self._variable_keys, variable_variables = _flatten_state(traced.variables)
        _check_values([*self._parameter_keys, *self._variable_keys], [*parameter_variables, *variable_variables])
        self._parameter_types = parameter_variables
        self._variable_types = variable_variables
        values = [_get_value(each) for each in variable_variables]
        self._forms = StoredForms.of(values)
        self.parameters = _describe(
            _join_keys(self._parameter_keys),
            [each.get_value() for each in parameter_variables],
            [each.get_metadata().get("out_sharding") for each in parameter_variables],
        )
        self.variables = _describe(_join_keys(self._variable_keys), values)

    def make(self) -> tuple[list[jax.Array], list[jax.Array]]:
        return self._read(_construct(self._factory))

    def for_evaluation(self) -> "NnxFrontend":
        """Return the front-end of the model after `model.eval()`: no dropout, and BatchNorm by its running means."""

        def make() -> nnx.Module:
            model = self._factory()
            model.eval()
            return model

        return NnxFrontend(make, _trace(make))

    def call(
        self, loss: Loss, parameters: Sequence[Any], variables: Sequence[Any], batch: Any
    ) -> tuple[Any, list[jax.Array], list[jax.Array]]:
        model = self.rebuild(parameters, variables)
        before = _list_attributes(model)
        with nnx.use_eager_sharding(False):
            output = loss(model, batch)
        known = {*_join_keys(self._variable_keys)}
        after = _list_attributes(model)
        self.changed |= {path for path, value in after.items() if before.get(path) != value and path not in known}
        return output, *self._read(model)

    def rebuild(self, parameters: Sequence[Any], variables: Sequence[Any]) -> nnx.Module:
        pairs = [
            *zip(self._parameter_keys, self._parameter_types, parameters, strict=True),
            *zip(self._variable_keys, self._variable_types, self._forms.read(variables), strict=True),
        ]
        with nnx.use_eager_sharding(False):
            state = nnx.from_flat_state(
                (keys, kind.replace(value) if isinstance(kind, nnx.Variable) else value) for keys, kind, value in pairs
            )
            return nnx.merge(self._graph, state)

    def rebuild_parameters(self, parameters: Sequence[Any]) -> nnx.State:
        pairs = zip(self._parameter_keys, self._parameter_types, parameters, strict=True)
        with nnx.use_eager_sharding(False):
            return nnx.from_flat_state((keys, kind.replace(value)) for keys, kind, value in pairs if value is not None)

    def _read(self, model: nnx.Module) -> tuple[list[jax.Array], list[jax.Array]]:
        split: Any = nnx.split(model, nnx.Param, ...)
        _, parameters, variables = split
        known = [dict(zip(*_flatten_state(state), strict=True)) for state in (parameters, variables)]
        for found, keys in zip(known, (self._parameter_keys, self._variable_keys), strict=True):
            if lost := {*keys} - found.keys():
                raise InputError(f"loss: it removes {_join_keys([*lost])[0]} from the model; leave all arrays in place")
            self.dropped |= {*_join_keys([*(found.keys() - {*keys})])}
        parameter_values = [known[0][keys].get_value() for keys in self._parameter_keys]
        variable_values = [_get_value(known[1][keys]) for keys in self._variable_keys]
        return parameter_values, self._forms.store(variable_values)


def _get_value(leaf: Any) -> Any:
    """Return the array of a leaf of a state: that of a variable, or an attribute that is an array itself."""
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _flatten_state(state: nnx.State) -> tuple[list[tuple[Any, ...]], list[Any]]:
    """Return the keys of each variable of a state, and the variables; attributes that are arrays are among them."""
    pairs = list(nnx.to_flat_state(state))
    return [keys for keys, _ in pairs], [variable for _, variable in pairs]


def _check_values(keys: Sequence[tuple[Any, ...]], variables: Sequence[Any]) -> None:
    for each, variable in zip(keys, variables, strict=True):
        value = _get_value(variable)
        if not hasattr(value, "dtype"):
            raise InputError(
                f"model: {_join_keys([each])[0]} holds {type(value).__name__}, and a variable holds one array; give "
                f"each array a {type(variable).__name__} of its own"
            )


def _list_attributes(model: nnx.Module) -> dict[str, Any]:
    """Return a fingerprint of each attribute that is neither a variable nor a module, by its path."""
    found = {}
    for keys, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Module):
            for name, value in vars(node).items():
                if not isinstance(value, nnx.Variable | nnx.Module) and not name.startswith("_pytree__"):
                    found["/".join(map(str, (*keys, name)))] = _identify(value)
    return found


def _identify(value: Any) -> Any:
    """Return something that differs if a value is another object, or if a container has other items."""
    if isinstance(value, bool | int | float | str):
        return value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    return id(value) if isinstance(value, jax.Array) or not inner else [_identify(each) for each in inner]


def _join_keys(keys: Sequence[tuple[Any, ...]]) -> list[str]:
    return ["/".join(map(str, each)) for each in keys]


# --- Flax Linen


class LinenFrontend(Frontend):
    """A model of Flax Linen. The loss calls it as a bound module: `loss(model, batch)` calls `model(batch["x"])`."""

    def __init__(self, module: linen.Module, loss: Loss, example: Any, seed: int) -> None:
        self._module, self._loss, self._seed = module, loss, seed
        self.dropped: set[str] = set()
        self.changed: set[str] = set()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), example)
        with _record_sown() as self._sown:
            traced, abstract = jax.make_jaxpr(self._initialize, return_shape=True)(shapes)
        self._example = _keep_used(example, drop_callbacks(traced).jaxpr)
        parameters = abstract.pop("params", {})
        self._parameter_tree, self._variable_tree = jax.tree.structure(parameters), jax.tree.structure(abstract)
        self._forms = StoredForms.of(jax.tree.leaves(abstract))
        names = _box_names(parameters)
        self.parameters = _describe(_unboxed_paths(parameters), jax.tree.leaves(parameters), names)
        count = ArrayInfo(RNG, (), jnp.dtype(jnp.uint32))
        self.variables = [*_describe(_unboxed_paths(abstract), jax.tree.leaves(abstract)), count]

    def _initialize(self, example: Any) -> dict[str, Any]:
        """Return the collections of variables, without those that only `sow` writes: they last for one call."""
        made = self._module.init(jax.random.key(self._seed), example, method=self._loss)
        return {name: each for name, each in made.items() if name not in self._sown}

    def make(self) -> tuple[list[jax.Array], list[jax.Array]]:
        variables = self._initialize(jax.tree.map(_to_array, self._example))
        parameters = jax.tree.leaves(variables.pop("params", {}))
        return parameters, [*self._forms.store(jax.tree.leaves(variables)), jnp.uint32(0)]

    def call(
        self, loss: Loss, parameters: Sequence[Any], variables: Sequence[Any], batch: Any
    ) -> tuple[Any, list[jax.Array], list[jax.Array]]:
        *others, count = variables
        collections = self.rebuild(parameters, variables)
        key = jax.random.fold_in(jax.random.key(self._seed), count)
        kept = [name for name in collections if name != "params"]
        mutable = [*kept, *self._sown]
        output, changed = self._module.apply(collections, batch, method=loss, mutable=mutable, rngs={"params": key})
        known = {name: dict(changed).get(name, collections[name]) for name in kept}
        leaves = self._forms.store(jax.tree.leaves(known)) if known else list(others)
        return output, list(parameters), [*leaves, count + jnp.uint32(1)]

    def rebuild(self, parameters: Sequence[Any], variables: Sequence[Any]) -> dict[str, Any]:
        others = jax.tree.unflatten(self._variable_tree, self._forms.read(variables[:-1]))
        return {"params": self.rebuild_parameters(parameters), **others}

    def rebuild_parameters(self, parameters: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self._parameter_tree, parameters)


@contextlib.contextmanager
def _record_sown() -> Iterator[set[str]]:
    """Collect the names of the collections that `sow` writes to. Linen has no hook for it."""
    found: set[str] = set()
    sow = linen.Module.sow

    def record(module: linen.Module, collection: str, *args: Any, **options: Any) -> Any:
        wrote = sow(module, collection, *args, **options)
        found.update([collection] if wrote else [])
        return wrote

    linen.Module.sow = record  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        linen.Module.sow = sow  # type: ignore[method-assign]


def _keep_used(example: Any, initialization: Jaxpr) -> Any:
    """Return the shapes of the example, with the arrays on which the initial values depend.

    Args:
        initialization: of the arrays of the example.

    Raises:
        InputError: the initial values depend on an array that is given only by its shape.
    """
    _, used = partial_eval.dce_jaxpr(initialization, [True] * len(initialization.outvars))
    kept = []
    for (path, leaf), is_used in zip(tree.leaves_with_path(example), used, strict=True):
        if is_used and isinstance(leaf, jax.ShapeDtypeStruct):
            raise InputError(
                f"example: the initial values of the model depend on {path or 'it'}, of which only the shape is given; "
                "give an example with arrays"
            )
        kept.append(leaf if is_used else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.tree.unflatten(jax.tree.structure(example), kept)


def _to_array(leaf: Any) -> jax.Array:
    """Return an array of the example, zeros if only its shape is known."""
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    return jnp.zeros(leaf.shape, dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf, dtype)


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, linen.meta.AxisMetadata)


def _box_names(variables: Any) -> list[tuple[str | None, ...] | None]:
    boxes = jax.tree.leaves(variables, is_leaf=_is_box)
    return [tuple(box.names) if hasattr(box, "names") else None for box in boxes]


def unbox(variables: Any) -> Any:
    """Return a pytree with each array in place of its box of axis names."""
    return jax.tree.map(lambda leaf: jax.tree.leaves(leaf)[0], variables, is_leaf=_is_box)


def _unboxed_paths(variables: Any) -> list[str]:
    """Return the paths of the arrays, without what a box of axis names adds."""
    return [path for path, _ in tree.leaves_with_path(variables, _is_box)]


# --- Plain functions


class FunctionFrontend(Frontend):
    """A pytree of arrays and a function of it, which gets them without the boxes of axis names that some have."""

    def __init__(self, factory: Callable[[], Any], abstract: Any) -> None:
        self._factory, self._tree = factory, jax.tree.structure(unbox(abstract))
        self.dropped: set[str] = set()
        self.changed: set[str] = set()
        self.parameters = _describe(_unboxed_paths(abstract), jax.tree.leaves(abstract), _box_names(abstract))
        self.variables: list[ArrayInfo] = []

    def make(self) -> tuple[list[jax.Array], list[jax.Array]]:
        return jax.tree.leaves(self._factory()), []

    def call(
        self, loss: Loss, parameters: Sequence[Any], variables: Sequence[Any], batch: Any
    ) -> tuple[Any, list[jax.Array], list[jax.Array]]:
        return loss(self.rebuild(parameters, variables), batch), list(parameters), []

    def rebuild(self, parameters: Sequence[Any], variables: Sequence[Any]) -> Any:
        return self.rebuild_parameters(parameters)

    def rebuild_parameters(self, parameters: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self._tree, parameters)

    def as_tree(self, parameters: Sequence[Any]) -> Any:
        return self.rebuild_parameters(parameters)
