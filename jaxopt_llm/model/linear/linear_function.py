"""Functions that are linear in a weight, such as lookups of any shape; `__init__.py` explains the design."""

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxopt_llm.model.linear.weights import GRADIENT
from jaxopt_llm.parallel.gathering import PlacedWeight, gather_array, reduce_gradient


def apply_linear(function: Callable[..., jax.Array], weight: PlacedWeight, *others: jax.Array) -> jax.Array:
    """Apply a function that is linear in a weight and has no derivative by the other arguments, such as a lookup.

    Its gradient is formed in float32.

    function: (array of the weight's shape and of any dtype, *others) -> array of that dtype.
    """
    resting, perturbation = replace(weight, perturbation=None), weight.perturbation
    return _apply_linear(function, jax.typeof(weight.array).shape, resting, perturbation, others)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _apply_linear(function, shape, weight, perturbation, others):
    return function(gather_array(weight), *others)


def _apply_linear_forward(function, shape, weight, perturbation, others):
    return function(gather_array(weight), *others), (replace(weight, array=None), others)


def _apply_linear_backward(function, shape, residuals, dy):
    weight, others = residuals
    if not weight.shardings.trainable:
        return None, None, None
    # In float32: a frequent token's row sums over thousands of positions.
    with jax.named_scope(GRADIENT):
        argument = jax.ShapeDtypeStruct(shape, jnp.float32)
        transpose = jax.linear_transpose(lambda array: function(array, *others), argument)
        (gradient,) = transpose(dy.astype(jnp.float32))
    # Constrained to whole rows first: with divided rows XLA gathers every device's positions instead of reducing rows.
    gradient = jax.lax.with_sharding_constraint(gradient, weight.shardings.gathered)
    return None, reduce_gradient(gradient, weight.shardings), None


_apply_linear.defvjp(_apply_linear_forward, _apply_linear_backward)
