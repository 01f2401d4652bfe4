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

LAYERS = "layers"  # the logical axis of a stack: always leading, never split by ZeRO

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
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    contracting: tuple[int, ...] = ()
    init: Initializer = ones
    dtype: Any = FLOAT32

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    @property
    def stacked(self) -> bool:
        return bool(self.axes) and self.axes[0] == LAYERS

    @property
    def fan_in(self) -> int:
        return math.prod(self.shape[dim] for dim in self.contracting)

    def stack(self, repeats: int) -> "ParamSpec":
        """The spec of `repeats` such parameters on a new leading axis."""
        dims = tuple(dim + 1 for dim in self.contracting)
        return replace(self, shape=(repeats, *self.shape), axes=(LAYERS, *self.axes), contracting=dims)

    def layer(self) -> "ParamSpec":
        """The spec of one layer of a stack: the inverse of `stack`."""
        dims = tuple(dim - 1 for dim in self.contracting)
        return replace(self, shape=self.shape[1:], axes=self.axes[1:], contracting=dims)


def count(specs: tree.Tree) -> int:
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs))


def repeats(specs: tree.Tree) -> int | None:
    """The layers of a segment's stack; None for parameters outside the stacks, and for a group without leaves."""
    leading = {spec.shape[0] if spec.stacked else None for spec in jax.tree.leaves(specs)} or {None}
    (layers,) = leading
    return layers


def layer_specs(specs: tree.Tree) -> tree.Tree:
    return jax.tree.map(ParamSpec.layer, specs)


def initialize(specs: tree.Tree, seed: int) -> tree.Tree:
    """Initial values. A leaf depends on (seed, its path, its layer) alone: not on the mesh, nor on other leaves."""
    root = jax.random.key(seed)

    def leaf(path: str, spec: ParamSpec) -> jax.Array:
        digest = hashlib.sha256(path.encode()).digest()
        key = jax.random.fold_in(root, int.from_bytes(digest[:4], "little"))
        if not spec.stacked:
            return spec.init(key, spec.shape, spec.fan_in).astype(spec.dtype)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(spec.shape[0]))
        layer = spec.layer()
        return jax.vmap(lambda layer_key: layer.init(layer_key, layer.shape, layer.fan_in))(keys).astype(spec.dtype)

    return tree.map_with_path(leaf, specs)
