"""Grouped matmul with an array that JAX differentiates, as one equation that an engine finds in the jaxpr of a loss.

`weights.grouped_matmul` calls it for a forward that knows no placement of its weights (LanguageModel). An engine
evaluates the equation with the weight as it rests instead (execution/placed_evaluation.py).

Letters: N devices, R rows of a device, E groups, D and F sizes of a row before and after.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from jaxopt_llm.kernels.grouped_matmul import Implementation
from jaxopt_llm.parallel.placement import Placement

GROUPS, CONTRACTING = (0,), (1,)  # dimensions of the matrices [E, D, F]
grouped_matmul_p = Primitive("grouped_matmul")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def multiply(
    kernel: Implementation, placement: Placement, transposed: bool, rows: jax.Array, w: jax.Array, sizes: jax.Array
) -> jax.Array:
    """Multiply the rows [N, R, D] of each device by the matrices w [E, D, F] of their groups: [N, R, F].

    sizes: int32 [N, E]. transposed: from [N, R, F] to [N, R, D].
    """
    result: jax.Array = grouped_matmul_p.bind(rows, w, sizes, kernel=kernel, placement=placement, transposed=transposed)
    return result


def _backward(kernel: Implementation, placement: Placement, transposed: bool, residuals: Any, dy: jax.Array) -> Any:
    rows, w, sizes = residuals
    dy = dy.astype(rows.dtype)
    d_rows = multiply(kernel, placement, not transposed, dy, w, sizes)

    def on_device(rows: jax.Array, dy: jax.Array, sizes: jax.Array) -> jax.Array:
        x, y = (dy, rows) if transposed else (rows, dy)
        return kernel.weight_gradient(x[0], y[0], sizes[0], jnp.float32)[None]

    local = PartitionSpec(placement.device_axes)
    parts = placement.shard_map(on_device, (local, local, local), local)(rows, dy, sizes)
    return d_rows, jnp.sum(parts, axis=0).astype(w.dtype), None


multiply.defvjp(
    lambda kernel, placement, transposed, rows, w, sizes: (
        multiply(kernel, placement, transposed, rows, w, sizes),
        (rows, w, sizes),
    ),
    _backward,
)


def find_grouped_matmul(eqn: JaxprEqn) -> JaxprEqn | None:
    """Return the equation of a grouped matmul within one that calls `multiply`; None for any other equation."""
    if eqn.primitive.name != "custom_vjp_call":
        return None
    inner = eqn.params["call_jaxpr"].eqns
    return inner[0] if len(inner) == 1 and inner[0].primitive is grouped_matmul_p else None


def _compute(
    rows: jax.Array, w: jax.Array, sizes: jax.Array, *, kernel: Implementation, placement: Placement, transposed: bool
) -> jax.Array:
    def on_device(rows: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return kernel.forward(rows[0], w, sizes[0], rows.dtype, transposed=transposed)[None]

    local = PartitionSpec(placement.device_axes)
    return placement.shard_map(on_device, (local, PartitionSpec(), local), local)(rows, w, sizes)


grouped_matmul_p.def_impl(_compute)
grouped_matmul_p.def_abstract_eval(
    lambda rows, w, sizes, **settings: rows.update(shape=(*rows.shape[:2], w.shape[1 if settings["transposed"] else 2]))
)
mlir.register_lowering(grouped_matmul_p, mlir.lower_fun(_compute, multiple_results=False))
