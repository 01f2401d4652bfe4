"""Forms in which a state stores arrays that JAX cannot save, or pass to a compiled program, as they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Types of fewer than 8 bits -> the types of 8 bits that hold their values. A compiled program refuses arguments of the
# former: it expects a packed layout, which JAX does not give them.
WIDE = {
    np.dtype(narrow): np.dtype(wide)
    for narrow, wide in {
        jnp.int2: jnp.int8,
        jnp.int4: jnp.int8,
        jnp.uint2: jnp.uint8,
        jnp.uint4: jnp.uint8,
        jnp.float4_e2m1fn: jnp.float8_e4m3fn,
    }.items()
}


@dataclass(frozen=True)
class StoredForms:
    """Forms in which a state stores some arrays: random keys as uint32 data, and numbers of 2 or 4 bits in 8 bits.

    forms: the implementation of a random key, a type of `WIDE`, or None for an array that is stored as it is.
    """

    forms: tuple[str | np.dtype[Any] | None, ...]

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> "StoredForms":
        return cls(tuple(map(_find_form, leaves)))

    def store(self, leaves: Sequence[Any]) -> list[jax.Array]:
        return [_store(*pair) for pair in zip(self.forms, leaves, strict=True)]

    def read(self, leaves: Sequence[Any]) -> list[jax.Array]:
        return [_read(*pair) for pair in zip(self.forms, leaves, strict=True)]


def _find_form(leaf: Any) -> str | np.dtype[Any] | None:
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf.dtype if leaf.dtype in WIDE else None
    found: list[str] = []
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), jax.ShapeDtypeStruct((), leaf.dtype))
    return found[0]


def _store(form: str | np.dtype[Any] | None, leaf: Any) -> jax.Array:
    if isinstance(form, str):
        return jax.random.key_data(leaf)
    return leaf if form is None else leaf.astype(WIDE[form])


def _read(form: str | np.dtype[Any] | None, leaf: Any) -> jax.Array:
    if isinstance(form, str):
        return jax.random.wrap_key_data(leaf, impl=form)
    return leaf if form is None else leaf.astype(form)
