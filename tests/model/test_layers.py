"""What the small layers keep for the backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.model.attention import attention_specs, self_attention
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.layers import rms_norm, swiglu, swiglu_specs
from jaxopt_llm.model.param import ParamSpec

pytestmark = pytest.mark.core

ROWS, WIDTH, MLP_WIDTH = (2, 3), 4, 5
POSITIONS = jnp.broadcast_to(jnp.arange(3), ROWS)


def kept(layer, specs, width: int) -> int:  # type: ignore[no-untyped-def]
    """Arrays [2, 3, width] that the backward of a layer holds."""
    placement = toy.placement()

    def run(x: jax.Array, taps: dict) -> jax.Array:
        return layer(placement.place(specs, toy.params(specs), taps, keep=False), x)

    _, backward = jax.vjp(run, jnp.ones((*ROWS, WIDTH)), placement.taps(specs))
    return sum(np.shape(leaf) == (*ROWS, width) for leaf in jax.tree.leaves(backward))


def test_swiglu_keeps_its_input_gate_and_up() -> None:
    specs = swiglu_specs(WIDTH, MLP_WIDTH, 1.0)
    assert kept(lambda params, x: swiglu(params, jnp.tanh, x), specs, MLP_WIDTH) == 2
    assert kept(lambda params, x: swiglu(params, jnp.tanh, x), specs, WIDTH) == 1


def test_attention_keeps_its_input_and_not_the_norm_of_it() -> None:
    context = Context(positions=POSITIONS, segment_ids=jnp.ones_like(POSITIONS), placement=toy.placement())

    def layer(params: dict, x: jax.Array) -> jax.Array:
        return self_attention(params, jnp.tanh, x, context, rope_theta=1e4, window=None, cache=None)[0]

    assert kept(layer, attention_specs(WIDTH, 2, 1, 6, 1.0), WIDTH) == 1


def test_a_norm_keeps_its_input() -> None:
    scale = {"scale": ParamSpec((WIDTH,), ("embed",))}
    assert kept(lambda params, x: rms_norm(x, params["scale"], 1e-5), scale, WIDTH) == 1
