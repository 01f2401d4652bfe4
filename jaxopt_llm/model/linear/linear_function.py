"""Functions that are linear in a weight, such as lookups of any shape; `__init__.py` explains the design."""

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxopt_llm.model.linear.weights import GRADIENT
from jaxopt_llm.parallel.gathering import PlacedWeight, gather_array, reduce_gradient


def apply_linear(
    function: Callable[..., jax.Array], weight: PlacedWeight, *others: jax.Array, by_rows: bool = False
) -> jax.Array:
    """Apply a function that is linear in a weight and has no derivative by the other arguments, such as a lookup.

    Its gradient is formed in float32.

    function: (array of the weight's shape and of any dtype, *others) -> array of that dtype.
    by_rows: whether the first dimension of the result and of the other arguments are rows, each of them on its own.
    """
    resting, perturbation = replace(weight, perturbation=None), weight.perturbation
    return _apply_linear(function, jax.typeof(weight.array).shape, by_rows, resting, perturbation, others)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _apply_linear(function, shape, by_rows, weight, perturbation, others):
    return function(gather_array(weight), *others)


def _apply_linear_forward(function, shape, by_rows, weight, perturbation, others):
    return function(gather_array(weight), *others), (replace(weight, array=None), others)


def _apply_linear_backward(function, shape, by_rows, residuals, dy):
    weight, others = residuals
    if not weight.shardings.trainable:
        return None, None, None
    rows = weight.shardings.row_sum

    @jax.named_scope(GRADIENT)
    def form_gradient(dy, *others):
        # In float32: a frequent token's row sums over thousands of positions.
        argument = jax.ShapeDtypeStruct(shape, jnp.float32)
        transpose = jax.linear_transpose(lambda array: function(array, *others), argument)
        return transpose(dy.astype(jnp.float32))[0]

    if rows and by_rows and all(rows.splits(len(each)) for each in (dy, *others)):
        gradient = rows.add(jax.vmap(form_gradient)(*map(rows.split, (dy, *others))))
        return None, gradient.astype(weight.shardings.reduce_dtype), None
    # Constrained to whole rows first: with divided rows XLA gathers every device's positions instead of reducing rows.
    gradient = jax.lax.with_sharding_constraint(form_gradient(dy, *others), weight.shardings.gathered)
    return None, reduce_gradient(gradient, weight.shardings), None


_apply_linear.defvjp(_apply_linear_forward, _apply_linear_backward)
