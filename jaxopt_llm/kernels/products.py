"""Matmuls of bfloat16 operands, on one CPU device in the form for which XLA has fast kernels.

On a CPU, XLA multiplies bfloat16 operands with the processor's own instructions (AVX512-BF16, AMX) only if

- the result is float32 (jax 0.10.2; 0.11.2 has kernels for a bfloat16 result as well), and
- the left operand is stored with the dimension that is summed last, which the gradient of a weight, a sum over rows,
  is not.

Otherwise it widens both operands to float32 first and multiplies those. Here products ask for a float32 result and
round it themselves, and sums over rows store their left operand transposed.

The form depends on the platform, never on the processor, so a program is the same on all CPUs. GPUs get plain matmuls,
which cuBLAS rounds by itself, and so do several CPU devices: sums between them would move float32, and XLA's
partitioner (jax 0.10.2) gathers an array whose layout is constrained.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, Mesh


def runs_on_one_cpu(mesh: Mesh | AbstractMesh) -> bool:
    """Return whether programs over the mesh run on one CPU device. An abstract mesh has no platform."""
    return isinstance(mesh, Mesh) and mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"


def einsum(subscripts: str, x: jax.Array, y: jax.Array, dtype: Any, on_one_cpu: bool) -> jax.Array:
    """Compute `jnp.einsum(subscripts, x, y)` with result `dtype`, accumulated in float32."""
    if _are_bfloat16(x, y, on_one_cpu):
        return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32).astype(dtype)
    return jnp.einsum(subscripts, x, y, preferred_element_type=dtype)


def sum_over_rows(x: jax.Array, y: jax.Array, dtype: Any, on_one_cpu: bool) -> jax.Array:
    """Compute xᵀ · y with result `dtype`: the sum over rows R. x: [R, I]; y: [R, O] -> [I, O]."""
    if _are_bfloat16(x, y, on_one_cpu):
        # A transposition alone would be merged into the matmul, and so would one behind an optimization barrier.
        x = with_layout_constraint(x.T, Layout(major_to_minor=(0, 1)))
        return einsum("IR,RO->IO", x, y, dtype, on_one_cpu)
    return jnp.einsum("RI,RO->IO", x, y, preferred_element_type=dtype)


def _are_bfloat16(x: jax.Array, y: jax.Array, on_one_cpu: bool) -> bool:
    return on_one_cpu and x.dtype == y.dtype == jnp.bfloat16
