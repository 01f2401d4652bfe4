"""Grouped matmul: rows sorted by group, each multiplied by the matrix of its group.

In an MoE layer, a group is the tokens of one expert.

An implementation is two functions without automatic differentiation. Their memory and FLOPs do not grow with tokens ×
experts, except for the code that XLA generates for `xla` (see `XlaProducts`).

Letters: T rows, E groups, D and F sizes of a row before and after.
"""

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxopt_llm.kernels import grouped_matmul_pallas


class Implementation(Protocol):
    """Grouped matmul and the gradient of its weights.

    No function reads the rows after the last group; they may hold any values. Sums are in float32.
    """

    def forward(
        self, x: jax.Array, w: jax.Array, sizes: jax.Array, dtype: Any, *, transposed: bool = False
    ) -> jax.Array:
        """Multiply each row of x [T, D] by its group's matrix of w [E, D, F]: [T, F] in `dtype`.

        Rows after the last group give 0.

        transposed: multiply x [T, F] by the transposed matrices, without a copy of them. The result is [T, D]. This
        turns the gradient of the output into the gradient of x.
        """
        ...

    def weight_gradient(self, x: jax.Array, dy: jax.Array, sizes: jax.Array, dtype: Any) -> jax.Array:
        """Return the sum of x [T, D] × dy [T, F] over each group's rows: [E, D, F] in `dtype`; 0 for an empty group."""
        ...


class XlaProducts:
    """Grouped matmul in XLA's own operation: for any device, and as a reference for the kernels.

    XLA has no kernel for it on CPUs and GPUs. It copies the rows for each group, masks each copy to the group's own
    rows, and multiplies the copies by all matrices. The result is right, but it costs E times the FLOPs and the bytes.
    It is for tests, small models, and devices without another implementation.
    """

    @staticmethod
    def forward(x: jax.Array, w: jax.Array, sizes: jax.Array, dtype: Any, *, transposed: bool = False) -> jax.Array:
        """See Implementation."""

        @jax.custom_batching.sequential_vmap  # JAX cannot batch x without w
        def product(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
            out = lax.ragged_dot_general(x, w, sizes, numbers, preferred_element_type=dtype)
            return _within_groups(out, sizes)

        numbers = lax.RaggedDotDimensionNumbers((((1,), (2 if transposed else 1,)), ((), ())), (0,), (0,))
        return product(x, w, sizes)

    @staticmethod
    def weight_gradient(x: jax.Array, dy: jax.Array, sizes: jax.Array, dtype: Any) -> jax.Array:
        """See Implementation."""
        numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
        x, dy = _within_groups(x, sizes), _within_groups(dy, sizes)
        return lax.ragged_dot_general(x, dy, sizes, numbers, preferred_element_type=dtype)


class OneByOne(XlaProducts):
    """One group after the other, with `w` in any dtype: only one matrix is cast at a time.

    It is for a layer that fills the memory. Like XLA's operation, it costs E times the FLOPs. Bfloat16 is given as its
    bits, uint16: XLA for CPUs casts all matrices of bfloat16 before the loop.
    """

    @staticmethod
    def forward(x: jax.Array, w: jax.Array, sizes: jax.Array, dtype: Any, *, transposed: bool = False) -> jax.Array:
        """See Implementation."""
        ends, rows = jnp.cumsum(sizes), jnp.arange(x.shape[0])

        def add_group(group: jax.Array, out: jax.Array) -> jax.Array:
            matrix = lax.dynamic_index_in_dim(w, group, keepdims=False)
            if matrix.dtype == jnp.uint16:
                matrix = lax.bitcast_convert_type(matrix, jnp.bfloat16)
            matrix = (matrix.T if transposed else matrix).astype(x.dtype)
            y = jnp.dot(x, matrix, preferred_element_type=out.dtype)
            inside = (rows >= ends[group] - sizes[group]) & (rows < ends[group])
            return out + jnp.where(inside[:, None], y, jnp.zeros_like(y))

        out = jnp.zeros((x.shape[0], w.shape[1 if transposed else 2]), jnp.float32)
        return lax.fori_loop(0, w.shape[0], add_group, out).astype(dtype)


def _within_groups(rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """Set the rows after the last group to 0; XLA does not define them."""
    inside = jnp.arange(rows.shape[0]) < jnp.sum(sizes)
    return jnp.where(inside[:, None], rows, jnp.zeros_like(rows))


# Each kernel module has `problems(dtype, capability)`, which lists what the kernel does not support.
KERNELS: dict[str, Any] = {"pallas": grouped_matmul_pallas}
IMPLEMENTATIONS: dict[str, Implementation] = {"xla": XlaProducts(), **KERNELS}
ONE_BY_ONE = "one_by_one"  # of the decoder, beside these


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def multiply_groups(
    implementation: Implementation, dtype: jnp.dtype, x: jax.Array, w: jax.Array, sizes: jax.Array
) -> jax.Array:
    """Multiply each row of x by the matrix of its group.

    Args:
        dtype: of the result. Sums are always in float32.
        x: [T, D], sorted by group.
        w: [E, D, F], in x's dtype.
        sizes: int32 [E], the number of rows of each group, in order. Groups may be empty; the sum is at most T. Rows
            after the last group give 0, and their gradient is 0, whatever values they hold.

    Returns:
        [T, F].
    """
    return implementation.forward(x, w, sizes, dtype)


def _forward(
    implementation: Implementation, dtype: jnp.dtype, x: jax.Array, w: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, Any]:
    return implementation.forward(x, w, sizes, dtype), (x, w, sizes)


def _backward(implementation: Implementation, dtype: jnp.dtype, residuals: Any, dy: jax.Array) -> Any:
    x, w, sizes = residuals
    dy = dy.astype(x.dtype)
    dx = implementation.forward(dy, w, sizes, x.dtype, transposed=True)
    return dx, implementation.weight_gradient(x, dy, sizes, w.dtype), None


multiply_groups.defvjp(_forward, _backward)
