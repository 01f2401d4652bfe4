"""Products of rows that are sorted by group with their group's matrix: experts' layers, in which a group is an expert's
tokens.

An implementation is two functions without a derivative of their own. Nothing of theirs grows with tokens × experts, but
for what XLA makes of `xla` (see grouped_matmul_xla.py).

Letters: T rows, E groups, D and F sizes of a row before and after.
"""

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxopt_llm.kernels import grouped_matmul_pallas, grouped_matmul_xla


class Implementation(Protocol):
    """Rows behind the last group are read by neither function, and may hold anything. Sums are in float32."""

    def forward(
        self, x: jax.Array, w: jax.Array, sizes: jax.Array, dtype: Any, *, transposed: bool = False
    ) -> jax.Array:
        """[T, F] in `dtype`: each row of x [T, D] times its group's matrix of w [E, D, F]; 0 behind the last group.

        transposed: x is [T, F], each matrix is taken transposed, as it lies, and the result is [T, D]: what makes a
        result's gradient one of x.
        """
        ...

    def weight_gradient(self, x: jax.Array, dy: jax.Array, sizes: jax.Array, dtype: Any) -> jax.Array:
        """[E, D, F] in `dtype`: the sum of x [T, D] × dy [T, F] over a group's rows; 0 of a group without any."""
        ...


# Kernels, each of which says by `problems(dtype, capability)` what it does not support.
KERNELS: dict[str, Any] = {"pallas": grouped_matmul_pallas}
IMPLEMENTATIONS: dict[str, Implementation] = {"xla": grouped_matmul_xla, **KERNELS}


def grouped_matmul(
    x: jax.Array, w: jax.Array, sizes: jax.Array, *, implementation: str = "xla", dtype: Any = None
) -> jax.Array:
    """Each row of x times the matrix of the group that it is in.

    x: [T, D], sorted by group; w: [E, D, F], in x's dtype.
    sizes: int32 [E], the rows of each group, in order; 0 for any, at most T in all. Rows behind the last group give 0,
    and their gradient is 0, whatever they hold.
    dtype: of the result, x's by default; sums are in float32 in any case.
    Returns [T, F].

    Raises ValueError for shapes or dtypes that do not go together, for an implementation that there is not, and for a
    dtype that it does not support.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}: choose one of {', '.join(IMPLEMENTATIONS)}")
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1] or sizes.shape != w.shape[:1]:
        raise ValueError(
            f"x {x.shape}, w {w.shape} and sizes {sizes.shape}: give x [T, D], w [E, D, F] and sizes [E], "
            "the rows of each group"
        )
    if x.dtype != w.dtype or sizes.dtype != jnp.int32:
        raise ValueError(f"x {x.dtype}, w {w.dtype}, sizes {sizes.dtype}: give x and w in one dtype and sizes in int32")
    if implementation in KERNELS and (found := KERNELS[implementation].problems(x.dtype)):
        raise ValueError(f"implementation={implementation!r}: {'; '.join(found)}")
    return multiply(IMPLEMENTATIONS[implementation], jnp.dtype(dtype or x.dtype), x, w, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def multiply(
    implementation: Implementation, dtype: jnp.dtype, x: jax.Array, w: jax.Array, sizes: jax.Array
) -> jax.Array:
    """`grouped_matmul` by this one."""
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


multiply.defvjp(_forward, _backward)
