"""Arrays that a compiled program holds at its peak."""

import jax
import jax.numpy as jnp
import pytest

from jaxopt_llm.compiler.buffers import find_peak

pytestmark = pytest.mark.core

SIDE = 512


def test_temporaries_at_the_peak_are_listed() -> None:
    """Check that temporaries that are alive only before or after the peak are not listed."""

    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("large"):
            large = jnp.sort(x[:, None] * x[None]).sum(0)
        with jax.named_scope("small"):
            return jnp.cumsum(large)

    lowered = jax.jit(step).lower(jax.ShapeDtypeStruct((SIDE,), "float32"))
    temporaries = find_peak(lowered, lambda program, options: program.compile(compiler_options=options)).temporaries
    largest = max(temporaries, key=lambda each: each.bytes)
    assert (largest.bytes, largest.dtype, largest.shape) == (4 * SIDE**2, "f32", (SIDE, SIDE))
    assert "large" in largest.source
