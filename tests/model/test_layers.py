"""What the small layers keep for the backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.model.layers import rms_norm, swiglu, swiglu_specs
from jaxopt_llm.model.param import ParamSpec

pytestmark = pytest.mark.core

ROWS, WIDTH, MLP_WIDTH = (2, 3), 4, 5


def kept(layer, specs, width: int) -> int:  # type: ignore[no-untyped-def]
    """Arrays [2, 3, width] that the backward of a layer holds."""
    placement = toy.placement()

    def run(x: jax.Array, taps: dict) -> jax.Array:
        return layer(placement.place(specs, toy.params(specs), taps, keep=False), x)

    _, backward = jax.vjp(run, jnp.ones((*ROWS, WIDTH)), placement.taps(specs))
    return sum(np.shape(leaf) == (*ROWS, width) for leaf in jax.tree.leaves(backward))


def test_swiglu_keeps_gate_and_up() -> None:
    assert kept(swiglu, swiglu_specs(WIDTH, MLP_WIDTH, 1.0), MLP_WIDTH) == 2


def test_a_norm_keeps_its_input() -> None:
    scale = {"scale": ParamSpec((WIDTH,), ("embed",))}
    assert kept(lambda params, x: rms_norm(x, params["scale"], 1e-5), scale, WIDTH) == 1
