"""Fused head and loss, in chunks, against the loss of whole logits that JAX differentiates."""

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import toy

from jaxopt_llm.config import LoraConfig, RematConfig
from jaxopt_llm.core import tree
from jaxopt_llm.execution import scan
from jaxopt_llm.execution.segments import no_perturbations
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.decoder_specs import pad_vocabulary_size
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.parallel.gathering import attach_shardings, make_perturbations
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step.lora import adapt_model

BATCH = toy.packed(rows=4, length=16)
Z_LOSS = 0.01
CONFIG = replace(toy.CONFIG, logit_softcap=4.0)
HEADS = {"full": LoraConfig(), "lora": LoraConfig(rank=4, targets=("non_layer/*/table",)), "frozen": LoraConfig(rank=4)}
X = np.random.default_rng(0).normal(size=(4, 16, CONFIG.width)).astype(np.float32)


def model_and_params(placement: Placement, head: str, chunk: int = 7) -> tuple[Model, Params, Params]:
    """Return the model, and its parameters outside the segments: trained ones and frozen ones."""
    model, trained, frozen = adapt_model(Decoder(CONFIG, chunk, Z_LOSS), HEADS[head], placement.precision)
    values = toy.params(tree.merge(trained, frozen))["non_layer"]
    return model, tree.restrict(values, trained["non_layer"]), tree.restrict(values, frozen["non_layer"])


def unfused_objective(model: Model, non_layer: Params, x: jax.Array, context: Any, loss_weight: float) -> jax.Array:
    logits = model.logits(non_layer, x, context)[..., : CONFIG.vocabulary_size]
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    label = jnp.take_along_axis(logits, BATCH.targets[..., None], axis=-1)[..., 0]
    return loss_weight * jnp.sum(jnp.where(BATCH.loss_mask, log_sum - label + Z_LOSS * log_sum**2, 0.0))


@functools.cache
def gradients(placement: Placement, head: str, loss_weight: float, in_chunks: bool) -> tuple[Any, Any]:
    """Return the objective, and its gradients by x and by the trained parameters outside the segments, in float64."""
    model, trained, frozen = model_and_params(placement, head)
    specs, values = model.specs["non_layer"], tree.merge(trained, frozen)

    def objective(perturbations: Params, x: jax.Array) -> jax.Array:
        context = model.make_context(BATCH, placement)
        non_layer = attach_shardings(
            specs,
            values,
            tree.merge(perturbations, no_perturbations(tree.restrict(specs, frozen))),
            placement,
            keep_gathered=True,
        )
        if in_chunks:
            return model.loss(non_layer, x, BATCH, context, jnp.float32(loss_weight))[0]
        return unfused_objective(model, non_layer, x, context, loss_weight)

    perturbations = make_perturbations(tree.restrict(specs, trained), placement)
    run = jax.jit(jax.value_and_grad(objective, argnums=(0, 1)), compiler_options=toy.QUICK_COMPILE)
    value, found = run(perturbations, jnp.asarray(X, placement.precision.compute_dtype))
    return float(value), jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), found)


@pytest.mark.core
@pytest.mark.parametrize("axes", [{}, {"fsdp": 2, "tensor": 4}])
@pytest.mark.parametrize("head", HEADS)
def test_loss_and_gradients_match_the_unfused_loss(head: str, axes: dict[str, int]) -> None:
    value, found = gradients(toy.placement(3, **axes), head, 0.25, in_chunks=True)
    expected_value, expected = gradients(toy.placement(), head, 0.25, in_chunks=False)
    assert value == pytest.approx(expected_value, rel=1e-6)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) + 1e-12


@pytest.mark.parametrize("dtype, share", [("bfloat16", 1e-2), ("float16", 1.5e-3)])
def test_16_bits_stay_within_rounding(dtype: str, share: float) -> None:
    placement = toy.placement(3, compute_dtype=dtype, fsdp=2, tensor=2)
    value, found = gradients(placement, "full", 0.25, in_chunks=True)
    expected_value, expected = gradients(toy.placement(), "full", 0.25, in_chunks=False)
    assert value == pytest.approx(expected_value, rel=share)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert toy.distance(a, b) < share


def test_float16_loses_no_small_gradient_under_a_loss_scale() -> None:
    """Gradients are computed with the scale: with 1 / 2**20 alone most would underflow, before any later scaling."""
    placement, small = toy.placement(compute_dtype="float16"), 2.0**-20
    _, lost = gradients(placement, "full", small, in_chunks=True)
    _, found = gradients(placement, "full", 2**16 * small, in_chunks=True)
    _, expected = gradients(toy.placement(), "full", 2**16 * small, in_chunks=False)
    assert toy.distance(lost, jax.tree.map(lambda gradient: gradient / 2**16, expected)) > 0.1
    assert toy.distance(found, expected) < 2e-3


def test_the_objective_can_be_scaled_again() -> None:
    model, trained, _ = model_and_params(toy.placement(), "full")

    def gradient(outside: float, loss_weight: float) -> jax.Array:
        def objective(x: jax.Array) -> jax.Array:
            non_layer = attach_shardings(
                model.specs["non_layer"], trained, no_perturbations(trained), toy.placement(), keep_gathered=True
            )
            context = model.make_context(BATCH, toy.placement())
            value, loss = model.loss(non_layer, x, BATCH, context, jnp.float32(loss_weight))
            return outside * value + 100 * loss  # the reported loss has no gradient

        return jax.jit(jax.grad(objective), compiler_options=toy.QUICK_COMPILE)(X)

    np.testing.assert_allclose(gradient(3.0, 0.25), gradient(1.0, 0.75), rtol=1e-5, atol=1e-7)


def test_the_reported_loss_excludes_z_loss() -> None:
    def losses(z_loss: float) -> tuple[float, float]:
        model, placement = Decoder(CONFIG, 7, z_loss), toy.placement()
        values = toy.params(model.specs)["non_layer"]
        non_layer = attach_shardings(
            model.specs["non_layer"], values, no_perturbations(values), placement, keep_gathered=True
        )
        context = model.make_context(BATCH, placement)
        return jax.jit(lambda x: model.loss(non_layer, x, BATCH, context, jnp.float32(1)))(X)

    (penalised, loss), (plain_objective, plain_loss) = losses(Z_LOSS), losses(0.0)
    assert loss == plain_loss == plain_objective
    assert penalised > 1.01 * loss


def test_held_out_loss_never_holds_the_logits_of_a_microbatch() -> None:
    model, placement, tokens = Decoder(CONFIG, 8), toy.placement(), BATCH.tokens.size
    params = toy.params(model.specs)
    loss = functools.partial(scan.loss, model, placement=placement, remat=RematConfig("none"))
    text = jax.jit(loss).lower(params, toy.microbatches(BATCH, 1)).compile().as_text()
    columns = pad_vocabulary_size(CONFIG.vocabulary_size)
    logits = [
        array.shape for array in programs.list_array_shapes(str(text)) if columns in array.shape and 8 in array.shape
    ]
    assert logits
    assert max(math.prod(shape) for shape in logits) < tokens * columns
