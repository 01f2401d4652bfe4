"""Division of a batch: of its rows over microbatches and devices, and of its arrays without rows over the devices.

The rows of a batch are the first dimension of its arrays. Scalars and the arrays that `initialize(replicated=...)`
names have none: every microbatch and every device gets them whole. A batch in which the first dimensions of the other
arrays differ, such as a graph with its nodes and its edges, has no rows at all: it is one piece, which cannot be split
into microbatches. Where arrays rest on the devices changes no result, because the loss sees whole arrays.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.parallel.mesh import LocalRows
from jaxopt_llm.parallel.placement import Placement


@struct.dataclass
class Microbatches:
    """A batch as the step takes it: three parts of a partition, with None in place of what is in another part.

    Attributes:
        rows: arrays [M, B, ...] of M microbatches with B rows.
        pieces: arrays of a batch in one piece, whose first dimension is divided over the devices.
        whole: arrays that every device has whole.
    """

    rows: Any
    pieces: Any
    whole: Any

    @property
    def count(self) -> int:
        """M, the number of microbatches."""
        arrays = jax.tree.leaves(self.rows)
        return int(arrays[0].shape[0]) if arrays else 1

    def divide(self, placement: Placement) -> "Microbatches":
        """Divide the arrays over the devices, within a program.

        Those whose dimension the devices do not divide rest as copies: only within a program can the last device have
        fewer rows.
        """
        axes = placement.batch_axes

        def constrain(part: Any, *dims: Any) -> Any:
            sharding = NamedSharding(placement.mesh, PartitionSpec(*dims))
            return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), part)

        return replace(self, rows=constrain(self.rows, None, axes), pieces=constrain(self.pieces, axes))

    def take_first(self) -> Any:
        """Return the first microbatch: arrays [B, ...], and those without rows."""
        return self.join(jax.tree.map(lambda x: x[0], self.rows))

    def join(self, rows: Any) -> Any:
        """Return a microbatch: these rows, [B, ...], and the arrays without rows."""
        return tree.merge(rows, tree.merge(self.pieces, self.whole))


def has_rows(path: str, leaf: Any, replicated: Sequence[str]) -> bool:
    """Return whether the first dimension of an array may be rows."""
    return bool(jnp.shape(leaf)) and not tree.first_match(path, replicated)


def find_rows(batch: Any, replicated: Sequence[str] = ()) -> int | None:
    """Return the number of rows of a batch; None if it has none.

    Args:
        replicated: patterns of the paths of arrays without rows.
    """
    sizes = {*list_first_dimensions(batch, replicated).values()}
    return sizes.pop() if len(sizes) == 1 else None


def count_rows(batch: Any, replicated: Sequence[str] = ()) -> int:
    """Return the number of rows of a batch; 1 for a batch in one piece."""
    return find_rows(batch, replicated) or 1


def with_rows(example: Any, rows: int, replicated: Sequence[str] = ()) -> Any:
    """Return a batch with another number of rows, as ShapeDtypeStructs."""

    def resize(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
        shape = jnp.shape(leaf)
        kept = (rows, *shape[1:]) if has_rows(path, leaf, replicated) else shape
        return jax.ShapeDtypeStruct(kept, leaf.dtype)

    return tree.map_with_path(resize, example)


def list_have_rows(example: Any, replicated: Sequence[str]) -> list[bool]:
    """Return for each array of an example whether its first dimension may be rows."""
    return [has_rows(path, leaf, replicated) for path, leaf in tree.leaves_with_path(example)]


def check_arrays(examples: Sequence[Any], replicated: Sequence[str]) -> None:
    """Raise InputError if an example has something else than arrays, or a pattern matches none of any example."""
    paths: dict[str, None] = {}
    for example in examples:
        leaves = tree.leaves_with_path(example)
        paths |= dict.fromkeys(path for path, _ in leaves)
        for path, leaf in leaves or [("", None)]:
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise InputError(f"example: {path or 'it'} is no array; give arrays or jax.ShapeDtypeStructs")
            if getattr(leaf.dtype, "kind", None) in {*"OSUMm"}:
                raise InputError(f"example: {path or 'it'} is {leaf.dtype}, which are no numbers; leave it out")
    for pattern in replicated:
        if not any(tree.first_match(path, (pattern,)) for path in paths):
            raise InputError(f"replicated: {pattern} matches no array of the example ({', '.join(paths)})")


def check_division(example: Any, replicated: Sequence[str], microbatches: int, placement: Placement) -> None:
    """Raise InputError if an example cannot be divided over microbatches, or its rows not evenly over the devices."""
    axes, size = placement.batch_axes, find_rows(example, replicated)
    parts = {"training.accumulation": microbatches} | {f"mesh.{axis}": placement.size(axis) for axis in axes}
    over = " × ".join(f"{name}={value}" for name, value in parts.items() if value > 1)
    step = math.prod(parts.values())
    if size is not None and size % step:
        nearest = [size // step * step, (size // step + 1) * step]
        raise InputError(
            f"example: {size} rows are not divisible by {over} (nearest that are: "
            f"{' and '.join(str(each) for each in nearest if each)})"
        )
    if size is None and microbatches > 1:
        firsts = list_first_dimensions(example, replicated).items()
        found = ", ".join(f"{path}: {first}" for path, first in firsts) or "none"
        raise InputError(
            f"example: its arrays have different numbers of rows, the first dimension ({found}), so it cannot be split "
            f"into training.accumulation={microbatches} microbatches; name those without rows in "
            "initialize(replicated=...), or set training.accumulation=1"
        )


def list_first_dimensions(batch: Any, replicated: Sequence[str]) -> dict[str, int]:
    """Return the first dimension of each array that may have rows, by path."""
    leaves = tree.leaves_with_path(batch)
    return {path: int(leaf.shape[0]) for path, leaf in leaves if has_rows(path, leaf, replicated)}


def split_batch(
    batch: Any, replicated: Sequence[str], microbatches: int, placement: Placement, in_one_piece: bool = False
) -> Microbatches:
    """Return a batch as ShapeDtypeStructs with shardings.

    Args:
        microbatches: M.
        in_one_piece: whether the first dimensions of its arrays are no rows, even if they happen to be equal.

    Raises:
        InputError: M does not divide the number of rows.
    """
    firsts, size = list_first_dimensions(batch, replicated), find_rows(batch, replicated)
    if not in_one_piece and size is not None and size % microbatches:
        raise InputError(
            f"batch: {size} rows are not divisible by training.accumulation={microbatches}; leave a smaller last batch "
            "out, or fill it up with rows that the loss counts as 0"
        )
    axes, parts = placement.batch_axes, placement.size(*placement.batch_axes)

    def place(leaf: Any, shape: tuple[int, ...], dim: int | None) -> jax.ShapeDtypeStruct:
        divides = dim is not None and shape[dim] % parts == 0
        spec = PartitionSpec(*(None,) * (dim or 0), axes) if divides and axes else PartitionSpec()
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(placement.mesh, spec))

    def place_rows(leaf: Any) -> jax.ShapeDtypeStruct:
        return place(leaf, (microbatches, leaf.shape[0] // microbatches, *leaf.shape[1:]), 1)

    divided, whole = tree.partition(batch, lambda path: path in firsts)
    nothing = jax.tree.map(lambda leaf: None, batch)
    return Microbatches(
        rows=nothing if in_one_piece else jax.tree.map(place_rows, divided),
        pieces=jax.tree.map(lambda leaf: place(leaf, tuple(leaf.shape), 0), divided) if in_one_piece else nothing,
        whole=jax.tree.map(lambda leaf: place(leaf, tuple(jnp.shape(leaf)), None), whole),
    )


class BatchPlaces:
    """The places of a batch's arrays on the devices.

    Attributes:
        target: the batch as ShapeDtypeStructs with shardings.
    """

    def __init__(self, target: Microbatches) -> None:
        self.target = target

    @functools.cached_property
    def local_rows(self) -> LocalRows | None:
        """The rows that this process reads; None for a batch in one piece."""
        arrays = jax.tree.leaves(self.target.rows)
        return LocalRows(arrays[0].shape[:2], arrays[0].sharding) if arrays else None

    @functools.cached_property
    def _targets(self) -> tuple[list[Any], Any]:
        """The arrays of `target`, those with rows first, and its structure."""
        return jax.tree.flatten(self.target)

    @functools.cached_property
    def _with_rows(self) -> int:
        """Number of arrays with rows."""
        return len(jax.tree.leaves(self.target.rows))

    @functools.cached_property
    def _order(self) -> list[int]:
        """Indices of the arrays of `target` among those of a batch."""
        indices = itertools.count()
        numbered = jax.tree.map(lambda leaf: next(indices), self.target.join(self.target.rows))
        parts = self.target.rows, self.target.pieces, self.target.whole
        return jax.tree.leaves([tree.restrict(numbered, part) for part in parts])

    @functools.cached_property
    def _is_local(self) -> bool:
        """True if this process has all the devices."""
        return all(target.sharding.is_fully_addressable for target in jax.tree.leaves(self.target))

    def put(self, batch: Any, lazily: bool = False) -> Microbatches:
        """Return a batch on the devices.

        Args:
            batch: its arrays, those with rows with the rows of this process only.
            lazily: leave the arrays on the host, if this process has all the devices. A compiled function with the
                shardings of `target` moves its arguments in less time than any other function of JAX does.
        """
        given, (targets, structure) = jax.tree.leaves(batch), self._targets
        stays = lazily and self._is_local

        def put_array(position: int, target: jax.ShapeDtypeStruct) -> Any:
            x = given[self._order[position]].astype(target.dtype, copy=False)
            if stays:
                return x.reshape(target.shape)
            if position < self._with_rows and self.local_rows is not None:
                return self.local_rows.make_global(x)
            return jax.make_array_from_callback(x.shape, target.sharding, lambda index: x[index])

        return jax.tree.unflatten(structure, [put_array(*each) for each in enumerate(targets)])
