"""Typed random keys, which a state stores as their uint32 data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class TypedKeys:
    """Implementations of the random keys among arrays; None for an array that is no key."""

    implementations: tuple[str | None, ...]

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> "TypedKeys":
        return cls(tuple(_key_implementation(leaf) for leaf in leaves))

    def unwrap(self, leaves: Sequence[Any]) -> list[jax.Array]:
        return [
            leaf if name is None else jax.random.key_data(leaf)
            for name, leaf in zip(self.implementations, leaves, strict=True)
        ]

    def wrap(self, leaves: Sequence[Any]) -> list[jax.Array]:
        return [
            leaf if name is None else jax.random.wrap_key_data(leaf, impl=name)
            for name, leaf in zip(self.implementations, leaves, strict=True)
        ]


def _key_implementation(leaf: Any) -> str | None:
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return None
    found: list[str] = []
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), jax.ShapeDtypeStruct((), leaf.dtype))
    return found[0]
