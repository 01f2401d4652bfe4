"""Batches of an engine from what users have: functions, datasets of rows or of batches, and iterables."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine.microbatches import count_rows, find_rows, has_rows, list_first_dimensions, list_have_rows

_LEAF = jax.tree.structure(0)


def read_arrays(example: Any) -> Any:
    """Return a pytree with NumPy arrays in place of the arrays of other packages, such as tensors of torch."""
    return jax.tree.map(lambda leaf: read_array(leaf) if _is_foreign(leaf) else leaf, example)


def _is_foreign(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and not isinstance(getattr(leaf, "dtype", None), np.dtype)


def read_array(leaf: Any) -> np.ndarray:
    """Return an array, a tensor of another package, a number or a list of numbers as a NumPy array."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise InputError(
            "batch: a typed random key is no array of numbers; pass jax.random.key_data(key), and wrap it in the loss"
        )
    if _is_foreign(leaf) and "bfloat16" in str(leaf.dtype):
        leaf = jnp.from_dlpack(leaf)  # torch itself makes no NumPy array of it
    return np.asarray(leaf)


def fit_to_example(batch: Any, example: Any, name: str = "batch") -> Any:
    """Return the arrays of a batch in the pytree of the example, as NumPy arrays of its dtypes.

    A mapping may be of another type than the example's, and may have further keys, which are left out. A list may be a
    tuple. Lists of numbers become arrays. Dimensions may have other sizes than in the example.

    Raises:
        InputError: an array is missing, or has another number of dimensions or another kind of dtype; or a part of the
            pytree differs.
    """
    flattened: Any = [jax.tree.flatten(each) for each in (batch, example)]
    (leaves, structure), (targets, wanted) = flattened
    if structure == wanted and all(map(_fits, leaves, targets)):
        return batch
    fitted = [_fit_array(*each, name) for each in _pair_leaves(batch, example, name)]
    return jax.tree.unflatten(wanted, fitted)


def _fits(leaf: Any, target: Any) -> bool:
    """Return whether a leaf is what `_fit_array` returns."""
    return type(leaf) is np.ndarray and leaf.dtype == target.dtype and leaf.ndim == len(target.shape)


def _fit_array(path: str, leaf: Any, target: Any, name: str) -> np.ndarray:
    try:
        array, wanted = read_array(leaf), np.dtype(target.dtype)
    except (ValueError, TypeError, RuntimeError) as error:  # a ragged list, or a tensor of torch with a gradient
        raise InputError(f"{name}: {path or 'the array'} cannot be read as an array: {error}") from error
    if array.ndim != len(target.shape) or not np.can_cast(array.dtype, wanted, "same_kind"):
        found = "None" if leaf is None else describe_array(array)
        raise InputError(f"{name}: {path or 'the array'} is {found}, and the example has {describe_array(target)}")
    return array.astype(wanted, copy=False)


def _pair_leaves(batch: Any, example: Any, name: str, parent: str = "") -> list[tuple[str, Any, Any]]:
    """Return the path of each leaf of the example, what a batch has there, and the leaf.

    Raises:
        InputError: a part of the example is missing in the batch, or is of another kind there.
    """
    nodes, structure = _open_node(example)
    if structure == _LEAF:
        return [(parent, batch, example)]
    prefix = f"{parent}/" if parent else ""
    if isinstance(example, Mapping):
        keys = [key.key for (key,), _ in nodes]
        if missing := [key for key in keys if not isinstance(batch, Mapping) or key not in batch]:
            raise InputError(f"{name}: {prefix}{missing[0]} is missing, which the example has")
        parts = [batch[key] for key in keys]
    elif isinstance(example, list | tuple) and isinstance(batch, list | tuple):
        if len(example) != len(batch):
            where = parent or "it"
            raise InputError(f"{name}: {where} has {len(batch)} parts, and the example has {len(example)}")
        parts = list(batch)
    else:
        given, found = _open_node(batch)
        if found != structure:
            where = parent or "it"
            raise InputError(
                f"{name}: {where} is {_describe_node(batch)}, and the example has {_describe_node(example)}"
            )
        parts = [part for _, part in given]
    return [
        pair
        for (key, node), part in zip(nodes, parts, strict=True)
        for pair in _pair_leaves(part, node, name, prefix + tree.path_string(key))
    ]


def _open_node(node: Any) -> tuple[list[tuple[tuple[Any, ...], Any]], Any]:
    """Return the children of a node of a pytree with their keys, and its structure with the children as leaves."""
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda each: each is not node)


def _describe_node(node: Any) -> str:
    """Return the type of a node, with its static fields if it has any."""
    return str(_open_node(node)[1]).removeprefix("PyTreeDef(").removesuffix(")") if node is not None else "None"


@dataclass(frozen=True)
class BatchRows:
    """The rows of a batch that this process reads.

    example: a whole batch, as arrays or ShapeDtypeStructs.
    local: indices of this process's rows, in their order. A batch in one piece has one row.
    replicated: patterns of the paths of arrays without rows.
    """

    example: Any
    local: Sequence[int]
    replicated: tuple[str, ...] = ()

    @functools.cached_property
    def rows(self) -> int | None:
        """Rows of the example; None for batches in one piece."""
        return find_rows(self.example, self.replicated)

    @property
    def shares(self) -> bool:
        """True if other processes read other rows."""
        return len(self.local) != (self.rows or 1)

    @functools.cached_property
    def _have_rows(self) -> list[bool]:
        return list_have_rows(self.example, self.replicated)

    def take(self, batch: Any, name: str = "batch") -> Any:
        """Return this process's rows of a batch as NumPy arrays of the example's dtypes.

        Args:
            batch: a whole batch, or this process's rows of one.

        Raises:
            InputError: its arrays do not fit those of the example.
        """
        fitted = fit_to_example(batch, self.example, name)
        if self.rows is None:
            return fitted
        arrays = jax.tree.leaves(fitted)
        given, *others = {x.shape[0] for x, has in zip(arrays, self._have_rows, strict=True) if has}
        if others or not given:
            firsts = list_first_dimensions(fitted, self.replicated)
            found = ", ".join(f"{path}: {first}" for path, first in firsts.items())
            raise InputError(f"{name}: its arrays have no common number of rows, the first dimension ({found})")
        if not self.shares or given == len(self.local):
            return fitted
        if given != self.rows:
            raise InputError(
                f"{name}: it has {given} rows; in a job of several processes each gives as many as the example has, "
                f"{self.rows}, or its own, {len(self.local)}"
            )
        local = np.asarray(self.local)
        return tree.map_with_path(
            lambda path, leaf: leaf[local] if has_rows(path, leaf, self.replicated) else leaf, fitted
        )


@dataclass(frozen=True)
class LossRows:
    """The rows that this process reads of batches of several losses. Such a batch is (name of the loss, batch)."""

    by_loss: Mapping[str, BatchRows]

    def take(self, batch: Any, name: str = "batch") -> tuple[str, Any]:
        """Return the name of the loss, and this process's rows; see `BatchRows.take`."""
        if not isinstance(batch, tuple | list) or len(batch) != 2 or batch[0] not in self.by_loss:
            raise InputError(
                f"{name}: with several losses it is (name of a loss, batch); the losses are {', '.join(self.by_loss)}"
            )
        loss, inner = batch
        return loss, self.by_loss[loss].take(inner, name)


def describe_array(array: Any) -> str:
    """Return dtype and shape of an array, such as float32[8,16]."""
    return f"{np.dtype(array.dtype)}[{','.join(map(str, array.shape))}]"


class Batches:
    """Batches by step, as read_ahead reads them."""

    current_source = "the data of fit"  # for messages

    def __init__(self, batch_at: Callable[[int], Any], rows: BatchRows | LossRows) -> None:
        self._batch_at, self._rows = batch_at, rows

    def batch_at(self, step: int, cancelled: Callable[[], bool] = lambda: False) -> Any:
        """Return this process's rows of the batch of a step, the first is 0."""
        return self._rows.take(self._batch_at(step), f"batch {step} of the data (the first is 0)")


def make_batches(data: Any, rows: BatchRows | LossRows, seed: int) -> Batches:
    """Return batches that fit the example.

    A run that continues reads of a function and of a dataset with an index only what it needs.

    Args:
        data: see `fit`.
        seed: seed of the shuffles.

    Raises:
        InputError: it is none of these, or its arrays do not fit the example.
    """
    if isinstance(data, Mapping):
        raise InputError("data: this is one batch; give a function of the step, a dataset, or an iterable of batches")
    if _has_index(data):
        return Batches(_index_dataset(data, rows, seed), rows)
    if callable(data):
        if not takes_rows(data):
            return Batches(data, rows)
        if isinstance(rows, LossRows):
            raise InputError("data: with several losses the function takes the step alone: data(step) -> (loss, batch)")
        return Batches(functools.partial(_call_with_rows, data, rows.local), rows)
    if isinstance(data, Iterable):
        return Batches(_Sequence(data), rows)
    raise InputError(_refuse(data))


def read_example(data: Any, rows: int) -> Any:
    """Return the first batch of data, or its shapes.

    Args:
        data: see `fit`. A dataset with an index is one of rows; columns that are not numbers are left out.
        rows: rows of a batch, for data that is read by rows.

    Raises:
        InputError: the data is empty, or gives its first batch only once.
    """
    if _has_index(data):
        if not len(data):
            raise InputError("data: the dataset is empty")
        first = data[0]
        kept = {key: read_array(value) for key, value in first.items()} if isinstance(first, Mapping) else first
        if isinstance(first, Mapping):
            kept = {key: value for key, value in kept.items() if value.dtype.kind in "biuf"}
        arrays = jax.tree.map(read_array, kept)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape), leaf.dtype), arrays)
    if callable(data):
        return data(0, np.arange(rows)) if takes_rows(data) else data(0)
    if isinstance(data, Iterator):
        raise InputError("data: it can be read only once, so define an example, a batch or its shapes, as well")
    if not isinstance(data, Iterable):
        raise InputError(_refuse(data))
    return next(iter(data))


def _refuse(data: Any) -> str:
    return (
        f"data: {type(data).__name__} is neither a function of the step, nor a dataset with len and an index, nor an "
        "iterable of batches"
    )


def _has_index(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def takes_rows(function: Callable[..., Any]) -> bool:
    """Return whether a function of data takes (step, rows), and not only the step."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a function of an extension module, which describes no parameters
        return False
    if by_name := [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty]:
        raise InputError(f"data: the function takes {by_name[0]} by name only; make it data(step) or data(step, rows)")
    return sum(each.kind in kinds and each.default is each.empty for each in parameters) == 2


def _call_with_rows(function: Callable[[int, np.ndarray], Any], rows: Sequence[int], step: int) -> Any:
    return function(step, np.asarray(rows))


def _index_dataset(data: Any, batch_rows: BatchRows | LossRows, seed: int) -> Callable[[int], Any]:
    if not len(data):
        raise InputError("data: the dataset is empty")
    if isinstance(batch_rows, LossRows):
        batch_rows.take(data[0], "batch 0 of the data")
        return lambda step: data[step % len(data)]
    example = batch_rows.example
    row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), example)
    try:
        batch_rows.take(data[0])
    except InputError:
        fit_to_example(data[0], row, "row 0 of the data (it is not a batch either)")
    else:
        return lambda step: data[step % len(data)]
    without = [path for path, leaf in tree.leaves_with_path(example) if not has_rows(path, leaf, batch_rows.replicated)]
    if without or find_rows(example, batch_rows.replicated) is None:
        raise InputError("data: a dataset of rows needs an example in which every array has rows; give batches")
    rows = count_rows(example)
    source = data if isinstance(data, grain.MapDataset) else grain.MapDataset.source(data)
    shuffled = source.seed(seed).shuffle().repeat()

    def batch_at(step: int) -> Any:
        indices = [step * rows + index for index in batch_rows.local]
        read = [fit_to_example(shuffled[index], row, f"row {index}") for index in indices]
        return tree.map_with_path(_stack, *read)

    return batch_at


def _stack(path: str, *rows: np.ndarray) -> np.ndarray:
    if shapes := {row.shape for row in rows} - {rows[0].shape}:
        raise InputError(
            f"data: rows of {path or 'the array'} have different shapes, {list(rows[0].shape)} and "
            f"{list(shapes.pop())}; fill them up to one length, or give batches"
        )
    return np.stack(rows)


class _Sequence:
    """Batches of an iterable by step. It is iterated again when it ends, and when an earlier step is asked for."""

    def __init__(self, data: Iterable[Any]) -> None:
        self._data, self._next = data, 0
        self._iterator: Iterator[Any] = iter(())

    def __call__(self, step: int) -> Any:
        if step < self._next or not self._next:
            if inspect.isgenerator(self._data) and inspect.getgeneratorstate(self._data) != inspect.GEN_CREATED:
                raise InputError("data: the generator has been read before; give a new one, or a function of the step")
            self._iterator, self._next = self._endless(), 0
        batch = next(itertools.islice(self._iterator, step - self._next, None))
        self._next = step + 1
        return batch

    def _endless(self) -> Iterator[Any]:
        while True:
            count = 0
            for batch in self._data:
                count += 1
                yield batch
            if not count:
                raise InputError("data: the iterable has no batch left; give one that can be iterated again")
