"""ParamSpec: what a parameter is, before any array exists.

A model is a pytree of these. Initial values, shardings, checkpoint targets, counts and masks are all read off it.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm import tree

# The logical axes of a stack, always leading and never split by ZeRO. Most stacks have the last alone; a pipeline's
# rest by stage, and the last is then the slot within the stage. Loops run over the last.
STACK_AXES = ("virtual", "stages", "layers")

FLOAT32 = np.dtype(np.float32)
Initializer = Callable[[jax.Array, tuple[int, ...], int], jax.Array]  # (key, shape, fan-in) -> float32 array


def normal(scale: float = 1.0) -> Initializer:
    """Normal values of standard deviation scale / sqrt(fan-in), so that a product keeps its input's variance."""

    def initialize(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
        return jax.random.normal(key, shape, jnp.float32) * (scale / math.sqrt(fan_in))

    return initialize


def ones(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
    return jnp.ones(shape, jnp.float32)


def zeros(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


@dataclass(frozen=True)
class ParamSpec:
    """One parameter.

    shape, dtype: of the array at rest.
    axes:         a logical name per dimension; parallel/sharding.py's table maps names to mesh axes.
    contracting:  the dimensions that a product sums over; their sizes multiply to the fan-in.
    init:         (key, shape, fan-in) -> float32 values, for one layer where the parameter is a stack.
    exact:        whether it is in float32 throughout, compute copies, frozen ones and reductions among it.
    layers:       of a stack, nested by its leading axes: the number of the layer at each place, -1 where there is none.
    sign_rate:    of what no loss teaches: a step takes this times the sign of its gradient off it, whatever the
                  optimizer, and the gradient is no part of the norm. None of all else.
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
        """How many of the axes are a stack's."""
        return 0 if self.layers is None else np.ndim(self.layers)

    @property
    def numbered(self) -> tuple[int, ...]:
        """The dimension that numbers matrices, of which each token meets some: experts; none of what is one matrix."""
        return tuple(dim for dim, axis in enumerate(self.axes) if axis == "experts")

    @property
    def fan_in(self) -> int:
        return math.prod(self.shape[dim] for dim in self.contracting)

    def stack(self, layers: int | np.ndarray) -> "ParamSpec":
        """The spec of such parameters on new leading axes: so many layers, or those of these numbers."""
        numbers = np.arange(layers) if isinstance(layers, int) else layers
        return replace(
            self,
            shape=(*numbers.shape, *self.shape),
            axes=(*STACK_AXES[-numbers.ndim :], *self.axes),
            contracting=tuple(dim + numbers.ndim for dim in self.contracting),
            layers=_nested(numbers),
        )

    def layer(self) -> "ParamSpec":
        """The spec of one layer of a stack: the inverse of `stack`."""
        return replace(self.without(self.leading), layers=None)

    def stage(self) -> "ParamSpec":
        """The spec of what one stage of a pipeline holds of a stack: its slots chunk after chunk, whichever layers
        these are."""
        return self.layer().stack(self.shape[0] * self.shape[2])

    def without(self, leading: int) -> "ParamSpec":
        """The spec of what is along so many leading dimensions."""
        dims = tuple(dim - leading for dim in self.contracting)
        return replace(self, shape=self.shape[leading:], axes=self.axes[leading:], contracting=dims)


def _nested(numbers: np.ndarray) -> tuple[Any, ...]:
    return tuple(int(each) if numbers.ndim == 1 else _nested(each) for each in numbers)


def count(specs: tree.Tree) -> int:
    """Values of all layers; places of a stack that hold none do not count."""
    return sum(depth(spec) * math.prod(spec.shape[spec.leading :]) for spec in jax.tree.leaves(specs))


def depth(spec: ParamSpec) -> int:
    """The layers of a stack; 1 for what is none."""
    return 1 if spec.layers is None else int(np.sum(np.asarray(spec.layers) >= 0))


def layers(specs: tree.Tree) -> np.ndarray | None:
    """The numbers of a segment's layers, int [R] or [V, stages, slots]; None for parameters outside the stacks, and for
    a group without leaves."""
    (numbers,) = {spec.layers for spec in jax.tree.leaves(specs)} or {None}
    return None if numbers is None else np.asarray(numbers)


def layer_specs(specs: tree.Tree) -> tree.Tree:
    return jax.tree.map(ParamSpec.layer, specs)


def learned(specs: tree.Tree, leaves: tree.Tree) -> tree.Tree:
    """The leaves with None for those that no loss teaches."""
    return jax.tree.map(lambda spec, leaf: leaf if spec.sign_rate is None else None, specs, leaves)


def initialize(specs: tree.Tree, seed: int) -> tree.Tree:
    """Initial values. A leaf depends on (seed, its path, its layer) alone: not on the mesh, nor on other leaves."""
    root = jax.random.key(seed)

    def leaf(path: str, spec: ParamSpec) -> jax.Array:
        digest = hashlib.sha256(path.encode()).digest()
        key = jax.random.fold_in(root, int.from_bytes(digest[:4], "little"))
        if spec.layers is None:
            return spec.init(key, spec.shape, spec.fan_in).astype(spec.dtype)
        one = spec.layer()

        def layer(number: jax.Array) -> jax.Array:
            value = one.init(jax.random.fold_in(key, jnp.maximum(number, 0)), one.shape, one.fan_in)
            return jnp.where(number < 0, 0.0, value)

        each = layer
        for _ in range(spec.leading):
            each = jax.vmap(each)
        return each(jnp.asarray(spec.layers)).astype(spec.dtype)

    return tree.map_with_path(leaf, specs)
