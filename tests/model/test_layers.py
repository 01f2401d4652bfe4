"""Arrays that norms, MLPs and attention keep for the backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import toy

from jaxopt_llm.config import ModelConfig, RopeConfig
from jaxopt_llm.config.model import GATED
from jaxopt_llm.kernels.attention_types import make_document_ranges
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.layers import (
    ACTIVATION_PARAMETERS,
    ACTIVATIONS,
    activation_specs,
    gelu,
    mlp,
    mlp_specs,
    norm,
    norm_specs,
    recomputed_apart,
    xielu,
)
from jaxopt_llm.model.rotary import Rotary
from jaxopt_llm.model.self_attention import AttentionOptions, attention_specs, self_attention
from jaxopt_llm.parallel.gathering import attach_shardings, make_perturbations

pytestmark = pytest.mark.core

ROWS, WIDTH, MLP_WIDTH = (2, 3), 4, 5
POSITIONS = jnp.broadcast_to(jnp.arange(3), ROWS)
CONTEXT = Context(POSITIONS, make_document_ranges(jnp.zeros_like(POSITIONS)), toy.placement())


def count_residuals(layer, specs, width: int) -> int:  # type: ignore[no-untyped-def]
    """Count the arrays [2, 3, width] that the backward of a layer holds."""
    placement = toy.placement()

    def run(x: jax.Array, perturbations: dict) -> jax.Array:
        return layer(attach_shardings(specs, toy.params(specs), perturbations, placement, keep_gathered=False), x)

    _, backward = jax.vjp(run, jnp.ones((*ROWS, WIDTH)), make_perturbations(specs, placement))
    return sum(np.shape(leaf) == (*ROWS, width) for leaf in jax.tree.leaves(backward))


@pytest.mark.parametrize("kind, projections", [(kind, 1 + (kind in GATED)) for kind in ACTIVATIONS])
@pytest.mark.parametrize("biased", [False, True])
def test_an_mlp_keeps_only_its_input_and_projections(kind: str, projections: int, biased: bool) -> None:
    specs = mlp_specs(WIDTH, MLP_WIDTH, 1.0, has_gate=projections == 2, biased=biased) | activation_specs(kind)

    def layer(params: dict, x: jax.Array) -> jax.Array:
        return mlp(params, x, CONTEXT, norm=jnp.tanh, kind=kind)

    assert count_residuals(layer, specs, MLP_WIDTH) == projections
    assert count_residuals(layer, specs, WIDTH) == 1


@pytest.mark.parametrize("kind", GATED)
def test_a_gated_activation_matches_the_reference(kind: str) -> None:
    """Also above the limits of those that cut their operands, and near them."""
    random = np.random.default_rng(0)
    gate, up = (np.append(random.uniform(-12, 12, 200), [6.99, 7.01, -6.99, -7.01]) for _ in range(2))
    activated, slope = reference.GATED[kind](gate)
    factor, factor_slope = reference.OF_UP[kind](up) if kind in reference.OF_UP else (up, 1.0)
    narrow = (jnp.asarray(each, jnp.float32) for each in (gate, up[::-1]))
    factor, factor_slope = factor[::-1], np.broadcast_to(factor_slope, up.shape)[::-1]
    y, backward = jax.vjp(ACTIVATIONS[kind], *narrow)
    expected = activated * factor, slope * factor, activated * factor_slope
    for found, right in zip((y, *backward(jnp.ones_like(y))), expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_recomputing_an_activation_apart_changes_no_bit(kind: str) -> None:
    """Of the result and of the gradients, in 16 bits, with values whose squares overflow and the smallest ones."""
    function = ACTIVATIONS[kind]
    values = jnp.concatenate([jnp.linspace(-8, 8, 33), jnp.array([0.0, -0.0, 1e-38, 1e-30, 1e30, jnp.inf])])
    arrays = [values.astype(jnp.bfloat16), values[::-1].astype(jnp.bfloat16)][: 1 + (kind in GATED)]
    arrays += [jnp.full(1, value, jnp.bfloat16) for value in ACTIVATION_PARAMETERS.get(kind, {}).values()]
    (y, backward), (expected, plain) = (jax.vjp(each, *arrays) for each in (recomputed_apart(function), function))
    for found, right in zip((y, *backward(y + 1)), (expected, *plain(y + 1)), strict=True):
        np.testing.assert_array_equal(found.astype(jnp.float32), right.astype(jnp.float32))


@pytest.mark.parametrize("biases", ["none", "all"])
def test_attention_keeps_its_input_but_not_the_normed_input(biases: str) -> None:
    config = ModelConfig(width=WIDTH, heads=2, kv_heads=1, head_dim=6, biases=biases)  # type: ignore[arg-type]
    rotary = Rotary(RopeConfig(theta=1.0), 6)
    options = AttentionOptions(rotary, window=None, scale=1.0, softcap=None, implementation="xla")

    def layer(params: dict, x: jax.Array) -> jax.Array:
        norms = {"attention_norm": jnp.tanh} | dict.fromkeys(("query_norm", "key_norm", "value_norm"), lambda x: x)
        return self_attention(params, x, CONTEXT, norms=norms, options=options, cache=None)[0]

    assert count_residuals(layer, attention_specs(config, 1.0), WIDTH) == 1


@pytest.mark.parametrize("kind", ["rms", "layer", "layer_no_bias"])
def test_a_norm_keeps_only_its_input(kind: str) -> None:
    specs = norm_specs(kind, False, (WIDTH,), ("embed",))  # type: ignore[arg-type]
    assert (
        count_residuals(lambda params, x: norm(params, x, kind=kind, epsilon=1e-5, zero_centered=False), specs, WIDTH)
        == 1
    )


def test_gelu_has_a_finite_gradient_over_all_of_float16() -> None:
    far = jnp.float16([-60000, -300, 0, 300, 60000])
    np.testing.assert_array_equal(jax.vmap(jax.grad(gelu))(far), [0, 0, 0.5, 1, 1])


def test_xielu_has_a_finite_gradient_where_its_exponential_is_infinite() -> None:
    """At 0, where both branches meet, the slope is beta."""
    zero = jnp.zeros(1)
    slopes = jax.vmap(lambda x: jax.grad(lambda x: xielu(x, zero, zero)[0])(x))(jnp.float32([-1e4, 0, 1e4]))
    expected = [0.5 - (0.5 + np.log(2)), 0.5, 0.5 + 2e4 * np.log(2)]
    np.testing.assert_allclose(slopes, expected, rtol=1e-6)
