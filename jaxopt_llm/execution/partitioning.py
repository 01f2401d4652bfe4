"""Equations that XLA's partitioner divides wrongly, or not at all, in a form that it divides well.

A user's loss and its gradient are one jaxpr after differentiation. XLA's partitioner, which is the same for CPUs and
GPUs, divides each of its equations. For these ones it has a wrong rule or none:

- A convolution with batch groups is the gradient of the kernel of a grouped convolution. If a mesh axis holds copies of
  the images, XLA adds up the copies, too. Each device convolves its own part instead.
- `scatter-mul` can be wrong if an axis divides what it multiplies. Each device computes all of it.
- A padding that is negative at an edge and positive inside aborts the compiler. It becomes two.
- `ragged_dot` is not divided if its rows come from a sort: each device would multiply all rows. Each device multiplies
  its own part of the rows instead, by the matrices of their groups.

The equations are found wherever they are: within loops, branches, and functions with gradients of their own.
tests/engine/test_primitives.py compares all kinds of operations with one device.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import PartitionSpec

from jaxopt_llm.core.jaxpr import bind_equation, list_inner, run_jaxpr, trace_like, typeof
from jaxopt_llm.parallel.placement import Placement

Rule = Callable[[JaxprEqn, Sequence[jax.Array], Placement], list[jax.Array]]
# Within these each device already works on its own part.
PER_DEVICE = ("shard_map", "pallas_call")


def correct_partitioning(function: Callable[..., Any], placement: Placement) -> Callable[..., Any]:
    """Return a function that computes the same, without equations that XLA would divide wrongly.

    It has no derivative: apply it to a function that computes the gradients.
    """

    def corrected(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = _run(closed.jaxpr, closed.consts, jax.tree.leaves(arguments), placement)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return corrected if placement.mesh.size > 1 else function


def _run(jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any], placement: Placement) -> list[Any]:
    def apply(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
        if rule := RULES.get(eqn.primitive.name):
            return rule(eqn, inputs, placement)
        if _contains_rule(eqn):
            params = {name: _correct_inner(value, placement) for name, value in eqn.params.items()}
            eqn = eqn.replace(params=params)
        return bind_equation(eqn, inputs)

    return run_jaxpr(jaxpr, constants, arguments, apply)


def _correct_inner(value: Any, placement: Placement) -> Any:
    """Return a parameter of an equation with its jaxprs corrected."""
    if isinstance(value, ClosedJaxpr):
        return trace_like(value.jaxpr, lambda *arguments: _run(value.jaxpr, value.consts, arguments, placement))
    if isinstance(value, Jaxpr):
        closed = trace_like(value, lambda *arguments: _run(value, (), arguments, placement))
        assert not closed.consts, "no rule adds a constant"
        return closed.jaxpr
    if isinstance(value, tuple | list):
        items = [_correct_inner(each, placement) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _contains_rule(eqn: JaxprEqn) -> bool:
    """Return whether an equation has one with a rule inside."""
    if eqn.primitive.name in PER_DEVICE:
        return False
    return any(
        each.primitive.name in RULES or _contains_rule(each) for inner, _ in list_inner(eqn) for each in inner.eqns
    )


# --- convolutions


def _convolve(eqn: JaxprEqn, inputs: Sequence[jax.Array], placement: Placement) -> list[jax.Array]:
    """Convolve on each device: a part of the sum over features, which are the rows of a gradient, and of the groups."""
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["batch_group_count"]
    if groups == 1:
        return bind_equation(eqn, inputs)
    (rows, features), (filters, terms), (_, channels) = (
        spec[:2] for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    )
    batch = placement.batch_axes
    summed = batch if inputs[0].shape[features] % placement.size(*batch) == 0 else ()
    divided = _divide(groups, tuple(axis for axis in (*batch, "tensor") if axis not in summed), placement)
    local = _on_device(eqn, batch_group_count=groups // placement.size(*divided))

    def convolve(left: jax.Array, right: jax.Array) -> jax.Array:
        (part,) = bind_equation(local, [left, right])
        return jax.lax.psum(part, summed) if summed else part

    ranks = inputs[0].ndim
    left, right = _spec(ranks, {rows: divided, features: summed}), _spec(ranks, {filters: divided, terms: summed})
    return [placement.shard_map(convolve, (left, right), _spec(ranks, {channels: divided}))(*inputs)]


# --- ragged products


def _multiply_ragged(eqn: JaxprEqn, inputs: Sequence[jax.Array], placement: Placement) -> list[jax.Array]:
    """Multiply a part of the rows on each device. `tensor` divides the columns of the matrices.

    The rows of a device are consecutive, so that its groups are the parts of the groups within them.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (summed, batch) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    left, right, sizes = inputs
    axes = placement.batch_axes
    if any(batch) or sizes.ndim != 1 or not axes:
        return bind_equation(eqn, inputs)
    sums_rows = ragged in summed[0]
    row_dim = summed[1][tuple(summed[0]).index(ragged)] if sums_rows else None
    columns = [dim for dim in range(right.ndim) if dim not in (*summed[1], *numbers.rhs_group_dimensions)]
    divided = _divide(right.shape[columns[-1]], ("tensor",), placement) if columns else ()
    length, parts = left.shape[ragged], placement.size(*axes)
    padded = -(-length // parts) * parts
    left = _pad(left, ragged, padded)
    right = right if row_dim is None else _pad(right, row_dim, padded)

    def multiply(left: jax.Array, right: jax.Array, sizes: jax.Array) -> jax.Array:
        rows = padded // parts
        first = jax.lax.axis_index(axes) * rows
        ends = jnp.clip(jnp.cumsum(sizes) - first, 0, rows)
        own = jnp.diff(ends, prepend=jnp.zeros((), ends.dtype)).astype(sizes.dtype)
        (part,) = bind_equation(_on_device(eqn), [left, right, own])
        return jax.lax.psum(part, axes) if sums_rows else part

    right_dims = {} if row_dim is None else {row_dim: axes}
    right_dims |= {columns[-1]: divided} if columns else {}
    rank = typeof(eqn.outvars[0]).ndim
    result_dims = {rank - 1: divided} if columns else {}
    kept = [dim for dim in range(left.ndim) if dim not in summed[0]]
    result_dims |= {} if sums_rows else {kept.index(ragged): axes}
    specs = _spec(left.ndim, {ragged: axes}), _spec(right.ndim, right_dims), PartitionSpec()
    result = placement.shard_map(multiply, specs, _spec(rank, result_dims))(left, right, sizes)
    return [result if sums_rows else jax.lax.slice_in_dim(result, 0, length, axis=kept.index(ragged))]


def _pad(x: jax.Array, dim: int, size: int) -> jax.Array:
    """Add zeros after a dimension, up to a size."""
    edges = [(0, size - x.shape[dim] if each == dim else 0) for each in range(x.ndim)]
    return jnp.pad(x, edges) if size > x.shape[dim] else x


# --- paddings and scatters


def _pad_then_cut(eqn: JaxprEqn, inputs: Sequence[jax.Array], placement: Placement) -> list[jax.Array]:
    config = eqn.params["padding_config"]
    if not any(inner and min(low, high) < 0 for low, high, inner in config):
        return bind_equation(eqn, inputs)
    x, fill = inputs
    wide = jax.lax.pad(x, fill, [(max(low, 0), max(high, 0), inner) for low, high, inner in config])
    return [jax.lax.pad(wide, fill, [(min(low, 0), min(high, 0), 0) for low, high, _ in config])]


def _scatter_whole(eqn: JaxprEqn, inputs: Sequence[jax.Array], placement: Placement) -> list[jax.Array]:
    (result,) = bind_equation(eqn, [placement.replicate(each) for each in inputs])
    return [placement.replicate(result)]


# --- shardings


def _divide(size: int, axes: Sequence[str], placement: Placement) -> tuple[str, ...]:
    """Return the mesh axes that together divide a size."""
    chosen: tuple[str, ...] = ()
    for axis in axes:
        if placement.size(axis) > 1 and size % placement.size(*chosen, axis) == 0:
            chosen += (axis,)
    return chosen


def _on_device(eqn: JaxprEqn, **changed: Any) -> JaxprEqn:
    """Return an equation as it is within a region that is manual over the mesh, with changed parameters."""
    automatic = {"out_sharding": None} if "out_sharding" in eqn.params else {}
    return eqn.replace(params=eqn.params | automatic | changed)


def _spec(rank: int, dims: Mapping[int, tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(dims.get(dim) or None for dim in range(rank)))


RULES: dict[str, Rule] = {  # by the name of the primitive
    "conv_general_dilated": _convolve,
    "ragged_dot_general": _multiply_ragged,
    "scatter-mul": _scatter_whole,
    "pad": _pad_then_cut,
}
