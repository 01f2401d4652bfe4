"""Which arrays a compiled program holds at its peak."""

import jax
import jax.numpy as jnp
import pytest

from jaxopt_llm.parallel.buffers import compile_and_list

pytestmark = pytest.mark.core

SIDE = 512


def test_what_is_alive_at_the_peak_is_listed() -> None:
    """Not what is alive before and after it."""

    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("large"):
            large = jnp.sort(x[:, None] * x[None]).sum(0)
        with jax.named_scope("small"):
            return jnp.cumsum(large)

    lowered = jax.jit(step).lower(jax.ShapeDtypeStruct((SIDE,), "float32"))
    _, found = compile_and_list(lowered, lambda program, options: program.compile(compiler_options=options))
    most = max(found, key=lambda each: each.bytes)
    assert (most.bytes, most.dtype, most.shape) == (4 * SIDE**2, "f32", (SIDE, SIDE))
    assert "large" in most.source
