"""ParamSpec: description of a parameter before any array exists.

A model is a pytree of ParamSpecs. Initial values, shardings, checkpoint targets, counts and masks are derived from it.
"""

import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm.core import tree
from jaxopt_llm.parallel.axes import LOOPED_AXES

FLOAT32 = np.dtype(np.float32)
Initializer = Callable[[jax.Array, tuple[int, ...], int], jax.Array]  # (key, shape, fan-in) -> float32 array


@functools.cache  # specs with the same initializer compare as equal
def normal(scale: float = 1.0) -> Initializer:
    """Return a normal initializer with deviation scale / sqrt(fan-in), so that a matmul keeps its input's variance."""

    def initialize(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
        return jax.random.normal(key, shape, jnp.float32) * (scale / math.sqrt(fan_in))

    return initialize


def ones(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
    return jnp.ones(shape, jnp.float32)


def zeros(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


@functools.cache
def constant(value: float) -> Initializer:
    """Return an initializer that gives every element this value."""
    return lambda key, shape, fan_in: jnp.full(shape, value, jnp.float32)


@dataclass(frozen=True)
class ParamSpec:
    """Shape, dtype, axes and initial values of one parameter.

    shape, dtype: of the array at rest.
    axes:         a logical name per dimension; the tables of parallel/axes.py map names to mesh axes.
    contracting:  the dimensions that a matmul sums over; their sizes multiply to the fan-in.
    init:         (key, shape, fan-in) -> float32 values; for one layer if the parameter is a stack.
    exact:        whether it is float32 everywhere, including compute copies, frozen parameters and reductions.
    layers:       of a stack, nested by its leading axes: for each row of the stack ("layer"), the index of the period
                  in its segment, -1 for an empty row; None for a parameter outside the segments.
    sign_rate:    of a parameter that is not learned from the loss: a step subtracts sign_rate × sign(gradient), with
                  any optimizer, and the gradient does not count in the gradient norm. None for all others.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    contracting: tuple[int, ...] = ()
    init: Initializer = ones
    dtype: Any = FLOAT32
    exact: bool = False
    layers: tuple[Any, ...] | None = None
    sign_rate: float | None = None

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    @property
    def leading(self) -> int:
        """Number of leading axes that are a stack's (LOOPED_AXES)."""
        return 0 if self.layers is None else np.ndim(self.layers)

    @property
    def expert_dims(self) -> tuple[int, ...]:
        """Dimension of the experts (each token uses only some of them); empty for other parameters."""
        return tuple(dim for dim, axis in enumerate(self.axes) if axis == "experts")

    @property
    def is_multiplied(self) -> bool:
        """True for a weight of matrix products. An exact one, a router, is a matrix without contracting dimensions."""
        return bool(self.contracting) or (self.exact and len(self.shape) - self.leading > 1)

    @property
    def fan_in(self) -> int:
        return math.prod(self.shape[dim] for dim in self.contracting)

    def stack(self, layers: int | np.ndarray) -> "ParamSpec":
        """Return the spec of a stack of such parameters. layers: number of periods, or an array of their indices."""
        indices = np.arange(layers) if isinstance(layers, int) else layers
        return replace(
            self,
            shape=(*indices.shape, *self.shape),
            axes=(*LOOPED_AXES[-indices.ndim :], *self.axes),
            contracting=tuple(dim + indices.ndim for dim in self.contracting),
            layers=_to_nested_tuple(indices),
        )

    def unstack(self) -> "ParamSpec":
        """Return the spec of one period of a stack: the inverse of `stack`."""
        return replace(self.drop_leading(self.leading), layers=None)

    def drop_leading(self, count: int) -> "ParamSpec":
        """Return the spec without the first `count` dimensions."""
        dims = tuple(dim - count for dim in self.contracting)
        return replace(self, shape=self.shape[count:], axes=self.axes[count:], contracting=dims)


def _to_nested_tuple(indices: np.ndarray) -> tuple[Any, ...]:
    return tuple(int(item) if indices.ndim == 1 else _to_nested_tuple(item) for item in indices)


def count_parameters(specs: tree.Tree) -> int:
    """Count the values of all layers; empty places of a stack do not count."""
    return sum(count_layers(spec) * math.prod(spec.shape[spec.leading :]) for spec in jax.tree.leaves(specs))


def count_layers(spec: ParamSpec) -> int:
    """Return the number of layers that have this parameter, one for each period; 1 outside the segments."""
    return 1 if spec.layers is None else int(np.sum(np.asarray(spec.layers) >= 0))


def layer_indices(specs: tree.Tree) -> np.ndarray | None:
    """Return the period indices of a segment, int [repeats] or [virtual, stages, slots].

    None for parameters outside the segments, and for a tree without leaves.
    """
    (indices,) = {spec.layers for spec in jax.tree.leaves(specs)} or {None}
    return None if indices is None else np.asarray(indices)


def period_specs(specs: tree.Tree) -> tree.Tree:
    """Return the specs of one period of a segment, without the dimensions of the stack; others are not stacked."""
    return jax.tree.map(ParamSpec.unstack, specs)


def select_learned(specs: tree.Tree, leaves: tree.Tree) -> tree.Tree:
    """Replace the leaves that are not learned from the loss (`sign_rate`) by None."""
    return jax.tree.map(lambda spec, leaf: leaf if spec.sign_rate is None else None, specs, leaves)


def initialize(specs: tree.Tree, seed: int) -> tree.Tree:
    """Return initial values.

    A leaf depends only on the seed, its path and its period: not on the mesh, nor on other leaves.
    """
    root = jax.random.key(seed)

    def leaf(path: str, spec: ParamSpec) -> jax.Array:
        # "outer" was the name of "non_layer". It stays in the key, so that a seed gives the same values as before.
        digest = hashlib.sha256(path.replace("non_layer/", "outer/").encode()).digest()
        key = jax.random.fold_in(root, int.from_bytes(digest[:4], "little"))
        if spec.layers is None:
            return spec.init(key, spec.shape, spec.fan_in).astype(spec.dtype)
        one = spec.unstack()

        def initialize_layer(index: jax.Array) -> jax.Array:
            value = one.init(jax.random.fold_in(key, jnp.maximum(index, 0)), one.shape, one.fan_in)
            return jnp.where(index < 0, 0.0, value)

        initialize_stack = initialize_layer
        for _ in range(spec.leading):
            initialize_stack = jax.vmap(initialize_stack)
        return initialize_stack(jnp.asarray(spec.layers)).astype(spec.dtype)

    return tree.map_with_path(leaf, specs)
