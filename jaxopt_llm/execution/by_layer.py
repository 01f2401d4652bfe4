"""Parameters by layer, as they rest for generation and evaluation.

In training, parameters of the same kind in all layers are one stack [R, ...]. By layer, a segment is a tuple with the
parameters of each of its R periods, and each parameter is an array of its own. A program then reads every weight where
it rests.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxopt_llm.core import tree
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel import offload


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a stack, in the place of the stack in a tree."""

    arrays: tuple[Any, ...]


@struct.dataclass
class StackRow:
    """A row of a stack that another owner keeps, such as the state of a run: the program selects it, without a copy."""

    stack: jax.Array
    row: int = struct.field(pytree_node=False)


def share_stack(stack: jax.Array) -> Rows:
    """Return the rows of a stack that stays whole."""
    return Rows(tuple(StackRow(stack, row) for row in range(stack.shape[0])))


def read_rows(period: Params) -> Params:
    """Return the parameters of a period as arrays, within a program."""

    def read(leaf: Any) -> Any:
        return leaf.stack[leaf.row] if isinstance(leaf, StackRow) else leaf

    return jax.tree.map(read, period, is_leaf=lambda leaf: isinstance(leaf, StackRow))


def split_layers(params: Params) -> Params:
    """Return stacked parameters by layer. The stacks are deleted one by one, so that only one is there twice.

    Stacks may have been split before, into Rows.
    """

    def split(stack: jax.Array | Rows) -> Rows:
        if isinstance(stack, Rows):
            return stack
        rows = split_stack(stack)
        stack.delete()
        return rows

    return gather_periods(
        {name: part if name == "non_layer" else jax.tree.map(split, part) for name, part in params.items()}
    )


def split_stack(stack: jax.Array, dtype: DTypeLike | None = None) -> Rows:
    """Return the rows of a stack, each divided over devices like the stack, in the same memory.

    dtype: of the rows; by default the stack's.
    """
    sharding = stack.sharding
    assert isinstance(sharding, NamedSharding)
    mesh, spec = sharding.mesh, PartitionSpec(*sharding.spec[1:])
    read = _make_reader(NamedSharding(mesh, spec), np.dtype(dtype or stack.dtype))
    resting = NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)

    def select(row: int) -> jax.Array:
        array = jax.device_put(read(stack, jnp.int32(row)), resting)
        # The devices may be too small for all rows on their way to the host.
        return jax.block_until_ready(array) if sharding.memory_kind == offload.HOST else array

    return Rows(tuple(map(select, range(stack.shape[0]))))


@functools.cache
def _make_reader(sharding: NamedSharding, dtype: np.dtype[Any]) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def read(stack: jax.Array, row: jax.Array) -> jax.Array:
        array: jax.Array = offload.fetch_to_device(select_period(stack, row))
        return array.astype(dtype)

    return jax.jit(read, out_shardings=sharding)


def gather_periods(params: Params) -> Params:
    """Return the parameters by layer, given segments whose leaves are Rows."""

    def by_period(segment: tree.Tree) -> tuple[tree.Tree, ...]:
        leaves, structure = jax.tree.flatten(segment)
        periods = zip(*(rows.arrays for rows in leaves), strict=True)
        return tuple(jax.tree.unflatten(structure, period) for period in periods)

    return {name: part if name == "non_layer" else by_period(part) for name, part in params.items()}


def gather_rows(params: Params) -> Params:
    """Return segments whose leaves are Rows, given the parameters by layer: the inverse of `gather_periods`."""

    def by_parameter(periods: tuple[tree.Tree, ...]) -> tree.Tree:
        return jax.tree.map(lambda *arrays: Rows(arrays), *periods)

    return {name: part if name == "non_layer" else by_parameter(part) for name, part in params.items()}


def select_period(stacked: tree.Tree, row: jax.Array) -> tree.Tree:
    """Return the leaves of one period of stacked leaves [R, ...]."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, row, keepdims=False), stacked)
