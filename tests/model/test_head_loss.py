"""The loss in chunks beside the plain one, of whole logits and differentiated by JAX."""

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm import tree
from jaxopt_llm.execution import scan
from jaxopt_llm.execution.stacks import RematConfig, no_taps
from jaxopt_llm.model.decoder import Params, Parts, make_parts, padded_vocabulary
from jaxopt_llm.parallel import hlo
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.training.lora import LoraConfig, adapt

BATCH = toy.packed(rows=4, length=16)
Z_LOSS = 0.01
CONFIG = replace(toy.CONFIG, logit_softcap=4.0)
HEADS = {"full": LoraConfig(), "lora": LoraConfig(rank=4, targets=("outer/*/table",)), "frozen": LoraConfig(rank=4)}
X = np.random.default_rng(0).normal(size=(4, 16, CONFIG.width)).astype(np.float32)


def parts_and_params(placement: Placement, head: str, chunk: int = 7) -> tuple[Parts, Params, Params]:
    """The parts, and what lies outside the stacks: trained, and frozen."""
    parts, trained, frozen = adapt(make_parts(CONFIG, chunk, Z_LOSS), HEADS[head], placement.precision)
    values = toy.params(tree.merge(trained, frozen))["outer"]
    return parts, tree.restrict(values, trained["outer"]), tree.restrict(values, frozen["outer"])


def plain(parts: Parts, outer: Params, x: jax.Array, context: Any, cotangent: float) -> jax.Array:
    logits = parts.logits(outer, x, context)[..., : CONFIG.vocabulary_size]
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    label = jnp.take_along_axis(logits, BATCH.targets[..., None], axis=-1)[..., 0]
    return cotangent * jnp.sum(jnp.where(BATCH.loss_mask, log_sum - label + Z_LOSS * log_sum**2, 0.0))


@functools.cache
def gradients(placement: Placement, head: str, cotangent: float, in_chunks: bool) -> tuple[Any, Any]:
    """The objective, and its gradients by x and by what is trained outside the stacks, in float64."""
    parts, trained, frozen = parts_and_params(placement, head)
    specs, values = parts.specs["outer"], tree.merge(trained, frozen)

    def objective(taps: Params, x: jax.Array) -> jax.Array:
        context = parts.make_context(BATCH, placement)
        outer = placement.place(specs, values, tree.merge(taps, no_taps(tree.restrict(specs, frozen))), keep=True)
        if in_chunks:
            return parts.head_loss(outer, x, BATCH, context, jnp.float32(cotangent))[0]
        return plain(parts, outer, x, context, cotangent)

    taps = placement.taps(tree.restrict(specs, trained))
    run = jax.jit(jax.value_and_grad(objective, argnums=(0, 1)), compiler_options=toy.QUICK_COMPILE)
    value, found = run(taps, jnp.asarray(X, placement.precision.compute_dtype))
    return float(value), jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), found)


@pytest.mark.core
@pytest.mark.parametrize("axes", [{}, {"fsdp": 2, "tensor": 4}])
@pytest.mark.parametrize("head", HEADS)
def test_loss_and_gradients_are_the_plain_ones(head: str, axes: dict[str, int]) -> None:
    value, found = gradients(toy.placement(3, **axes), head, 0.25, in_chunks=True)
    expected_value, expected = gradients(toy.placement(), head, 0.25, in_chunks=False)
    assert value == pytest.approx(expected_value, rel=1e-6)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) + 1e-12


@pytest.mark.parametrize("dtype, share", [("bfloat16", 1e-2), ("float16", 1.5e-3)])
def test_sixteen_bits_stay_within_rounding(dtype: str, share: float) -> None:
    placement = toy.placement(3, compute_dtype=dtype, fsdp=2, tensor=2)
    value, found = gradients(placement, "full", 0.25, in_chunks=True)
    expected_value, expected = gradients(toy.placement(), "full", 0.25, in_chunks=False)
    assert value == pytest.approx(expected_value, rel=share)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert toy.distance(a, b) < share


def test_float16_loses_no_small_gradient_under_a_loss_scale() -> None:
    """They are formed under the scale: from 1 / 2**20, most would be 0, and stay so when scaled afterwards."""
    placement, few = toy.placement(compute_dtype="float16"), 2.0**-20
    _, lost = gradients(placement, "full", few, in_chunks=True)
    _, found = gradients(placement, "full", 2**16 * few, in_chunks=True)
    _, expected = gradients(toy.placement(), "full", 2**16 * few, in_chunks=False)
    assert toy.distance(lost, jax.tree.map(lambda each: each / 2**16, expected)) > 0.1
    assert toy.distance(found, expected) < 2e-3


def test_the_objective_can_be_weighted_again() -> None:
    parts, trained, _ = parts_and_params(toy.placement(), "full")

    def gradient(outside: float, cotangent: float) -> jax.Array:
        def objective(x: jax.Array) -> jax.Array:
            outer = toy.placement().place(parts.specs["outer"], trained, no_taps(trained), keep=True)
            context = parts.make_context(BATCH, toy.placement())
            value, loss = parts.head_loss(outer, x, BATCH, context, jnp.float32(cotangent))
            return outside * value + 100 * loss  # a measurement: it has no gradient

        return jax.jit(jax.grad(objective), compiler_options=toy.QUICK_COMPILE)(X)

    np.testing.assert_allclose(gradient(3.0, 0.25), gradient(1.0, 0.75), rtol=1e-5, atol=1e-7)


def test_the_loss_is_without_z_loss() -> None:
    def losses(z_loss: float) -> tuple[float, float]:
        parts, placement = make_parts(CONFIG, 7, z_loss), toy.placement()
        values = toy.params(parts.specs)["outer"]
        outer = placement.place(parts.specs["outer"], values, no_taps(values), keep=True)
        context = parts.make_context(BATCH, placement)
        return jax.jit(lambda x: parts.head_loss(outer, x, BATCH, context, jnp.float32(1)))(X)

    (penalised, loss), (plain_objective, plain_loss) = losses(Z_LOSS), losses(0.0)
    assert loss == plain_loss == plain_objective
    assert penalised > 1.01 * loss


def test_held_out_loss_has_no_logits_of_a_whole_microbatch() -> None:
    parts, placement, tokens = make_parts(CONFIG, 8), toy.placement(), BATCH.tokens.size
    params = toy.params(parts.specs)
    loss = functools.partial(scan.loss, parts, placement=placement, remat=RematConfig("none"))
    text = jax.jit(loss).lower(params, toy.microbatches(BATCH, 1)).compile().as_text()
    columns = padded_vocabulary(CONFIG.vocabulary_size)
    logits = [each.shape for each in hlo.array_shapes(str(text)) if columns in each.shape and 8 in each.shape]
    assert logits
    assert max(math.prod(shape) for shape in logits) < tokens * columns
