"""Decoder with the scan executor against the float64 reference: loss, gradients, logits, generation with a cache."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import toy

from jaxopt_llm.compiler import hlo
from jaxopt_llm.config import ModelConfig, RematConfig
from jaxopt_llm.core import tree
from jaxopt_llm.execution import scan
from jaxopt_llm.kernels.attention_types import KeyRanges, make_document_ranges
from jaxopt_llm.model import param
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.decoder_specs import list_segments
from jaxopt_llm.model.model import AUXILIARY_LOSS, OBJECTIVE, Model, Params, Sums

pytestmark = pytest.mark.core

PLACEMENT = toy.placement()
BATCH = toy.packed(rows=4, length=16)
TOKENS = int(np.sum(BATCH.loss_mask))
ROW_POSITIONS = np.broadcast_to(np.arange(16), (4, 16))  # for rows of one document each

jit = functools.partial(jax.jit, compiler_options=toy.QUICK_COMPILE)


def config(tied: bool) -> ModelConfig:
    return dataclasses.replace(toy.CONFIG, tied_head=tied)


@functools.cache
def make_model(tied: bool) -> Model:
    return Decoder(config(tied))


@functools.cache
def params(tied: bool) -> Params:
    return toy.params(make_model(tied).specs)


# ---- Loss and gradients.


@functools.cache
def expected_loss_and_gradients(tied: bool) -> tuple[float, Params]:
    return toy.reference_mean(config(tied), params(tied), BATCH)


@functools.cache
def compile_gradients(tied: bool, policy: str, count: int, is_frozen: Any = lambda path: False) -> jax.stages.Compiled:
    def loss_and_gradients(trainable: Params, frozen: Params, batch: toy.Batch) -> Any:
        remat = RematConfig(policy)  # type: ignore[arg-type]
        return scan.loss_and_gradients(
            make_model(tied), trainable, frozen, batch, 1 / jnp.float32(TOKENS), PLACEMENT, remat
        )

    frozen, trainable = tree.partition(params(tied), is_frozen)
    return jit(loss_and_gradients).lower(trainable, frozen, toy.microbatches(BATCH, count)).compile()


def assert_near(actual: tree.Tree, expected: tree.Tree) -> None:
    def check(path: str, actual: jax.Array, expected: np.ndarray) -> None:
        assert np.linalg.norm(actual - expected) <= 5e-6 * np.linalg.norm(expected), path

    tree.map_with_path(check, actual, expected)


@pytest.mark.parametrize(
    "tied, policy, count", [(True, "none", 1), (True, "full", 2), (False, "none", 2), (False, "full", 1)]
)
def test_loss_and_gradients_match_the_reference(tied: bool, policy: str, count: int) -> None:
    batch = toy.microbatches(BATCH, count)
    # Microbatches with equal numbers of counted tokens would not detect a mean of their means.
    assert len(set(np.sum(batch.loss_mask, axis=(1, 2)))) == count
    nothing = jax.tree.map(lambda leaf: None, params(tied))
    sums, gradients = compile_gradients(tied, policy, count)(params(tied), nothing, batch)
    expected_loss, expected_gradients = expected_loss_and_gradients(tied)
    assert sums[OBJECTIVE] / TOKENS == pytest.approx(expected_loss, rel=1e-6)
    assert_near(gradients, expected_gradients)


def is_mlp(path: str) -> bool:
    return "mlp/" in path


def test_frozen_parameters_get_no_gradient_and_change_no_other() -> None:
    frozen, trainable = tree.partition(params(tied=True), is_mlp)
    program = compile_gradients(True, "none", 1, is_mlp)
    gradients = program(trainable, frozen, toy.microbatches(BATCH, 1))[-1]
    _, expected = tree.partition(expected_loss_and_gradients(tied=True)[1], is_mlp)
    assert jax.tree.structure(gradients) == jax.tree.structure(trainable)
    assert_near(gradients, expected)
    # The gradients of frozen leaves are not computed: each of their values would cost one multiply-add per token.
    saved = hlo.count_dot_flops(compile_gradients(True, "none", 1).as_text()) - hlo.count_dot_flops(program.as_text())
    assert saved == 2 * BATCH.tokens.size * sum(leaf.size for leaf in jax.tree.leaves(frozen))


# ---- Initial values.


@pytest.mark.parametrize("layers", [2, 18])
def test_initial_residual_outputs_are_small(layers: int) -> None:
    """Two matrices per layer add to the residual stream, scaled so that its variance does not grow with depth."""
    model = dataclasses.replace(toy.UNIFORM, width=64, layers=layers)
    block = Decoder(model).specs["segment_0"]["block_0"]
    specs = {"output": block["attention"]["output"], "down": block["mlp"]["down"]}
    drawn = param.initialize(specs, seed=0)
    outputs = (drawn["output"], model.heads * model.head_dim), (drawn["down"], model.mlp_width)
    for values, fan_in in outputs:
        assert np.std(values) == pytest.approx((2 * layers * fan_in) ** -0.5, rel=0.1)


# ---- Logits.


forward = jit(functools.partial(scan.forward, make_model(tied=False)))


def logits(tokens: np.ndarray, segment_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    context = Context(positions, make_document_ranges(segment_ids), PLACEMENT)
    return np.asarray(forward(params(tied=False), tokens, context, None)[0])


def real(logits: np.ndarray) -> np.ndarray:
    return logits[..., : toy.CONFIG.vocabulary_size]


def test_logits_match_the_reference() -> None:
    where = BATCH.segment_ids, BATCH.positions
    expected = reference.logits(params(tied=False), toy.reference_config(config(tied=False)), BATCH.tokens, *where)
    np.testing.assert_allclose(real(logits(BATCH.tokens, *where)), expected, rtol=1e-5, atol=1e-5)


def test_a_document_does_not_change_the_logits_of_another() -> None:
    changed = np.zeros(BATCH.tokens.shape, bool)
    changed[2] = BATCH.segment_ids[2] == 3  # one of five documents
    tokens = np.where(changed, (BATCH.tokens + 1) % toy.CONFIG.vocabulary_size, BATCH.tokens)
    before, after = (logits(ids, BATCH.segment_ids, BATCH.positions) for ids in (BATCH.tokens, tokens))
    np.testing.assert_array_equal((before != after).any(axis=-1), changed)


# ---- Generation.


def test_cached_logits_match_uncached_logits() -> None:
    tokens, ones = BATCH.tokens, np.ones_like(BATCH.tokens)
    caches = scan.make_caches(make_model(tied=False), *tokens.shape, jnp.float32, PLACEMENT)
    pieces = []
    for first, end in [(0, 7), (7, 10), *((row, row + 1) for row in range(10, 16))]:
        positions = ROW_POSITIONS[:, first:end]
        context = Context(
            positions,
            KeyRanges(jnp.zeros_like(positions), positions),
            PLACEMENT,
            cache_index=jnp.full(len(tokens), first),
        )
        piece, caches = forward(toy.by_layer(params(tied=False)), tokens[:, first:end], context, caches)
        pieces.append(piece)
    np.testing.assert_allclose(
        np.concatenate(pieces, axis=1), logits(tokens, ones, ROW_POSITIONS), rtol=1e-5, atol=1e-5
    )


# ---- Layout.


def test_segments_repeat_the_pattern_and_the_remainder_is_a_second_segment() -> None:
    def kinds(layers: int) -> list[tuple[tuple[str, ...], int]]:
        segments = list_segments(dataclasses.replace(toy.CONFIG, layers=layers))
        return [(segment.kinds, segment.repeats) for segment in segments]

    assert kinds(5) == [(("sliding", "global"), 2), (("sliding",), 1)]
    assert kinds(4) == [(("sliding", "global"), 2)]
    assert kinds(1) == [(("sliding",), 1)]


def test_every_block_gets_its_layer_index() -> None:
    class Counting(Decoder):
        def embed(self, non_layer: Params, tokens: jax.Array, context: Context) -> jax.Array:
            return jnp.zeros(tokens.shape, jnp.int32)

        def block(self, kind: str, params: Params, x: jax.Array, context: Context, layer: Any, cache: Any) -> Any:
            return x * 10 + layer["index"], cache, self.zero_auxiliary()

        def logits(self, non_layer: Params, x: jax.Array, context: Context) -> jax.Array:
            return x

    counting = Counting(config(tied=False))
    context = Context(BATCH.positions, make_document_ranges(BATCH.segment_ids), PLACEMENT)
    digits, _ = jax.jit(lambda: scan.forward(counting, params(tied=False), BATCH.tokens, context))()
    np.testing.assert_array_equal(digits, np.full(BATCH.tokens.shape, 1234))  # layers 0, 1, 2, 3, 4


@pytest.mark.slow
def test_auxiliary_losses_are_differentiated_and_statistics_summed() -> None:
    """A loss added by the last block has the same gradients as the same loss added in the head."""

    def penalty(x: jax.Array) -> jax.Array:
        return 0.1 * jnp.sum(x.astype(jnp.float32) ** 2)

    class InBlock(Decoder):
        def zero_auxiliary(self) -> Sums:
            return {AUXILIARY_LOSS: jnp.zeros(()), "blocks": jnp.zeros(())}

        def block(self, kind: Any, params: Params, x: jax.Array, context: Context, layer: Any, cache: Any) -> Any:
            x, cache, _ = super().block(kind, params, x, context, layer, cache)
            is_last = layer["index"] == toy.CONFIG.layers - 1
            return x, cache, {AUXILIARY_LOSS: jnp.where(is_last, penalty(x), 0.0), "blocks": jnp.ones(())}

    class InHead(Decoder):
        def loss(self, non_layer: Params, x: jax.Array, batch: Any, context: Context, loss_weight: jax.Array) -> Any:
            objective, loss = super().loss(non_layer, x, batch, context, loss_weight)
            return objective + loss_weight * penalty(x), loss + penalty(x)

    def compute(model: Model) -> Any:
        batch = toy.microbatches(BATCH, 2)
        weights, nothing = tree.partition(params(tied=False), lambda path: True)
        return jax.jit(
            lambda: scan.loss_and_gradients(
                model, weights, nothing, batch, jnp.float32(0.5), PLACEMENT, RematConfig("full")
            )
        )()

    sums, gradients = compute(InBlock(config(tied=False)))
    in_head, expected = compute(InHead(config(tied=False)))
    assert sums[AUXILIARY_LOSS] > 0
    np.testing.assert_allclose(sums[OBJECTIVE] + sums[AUXILIARY_LOSS], in_head[OBJECTIVE], rtol=1e-6)
    assert sums["blocks"] == 2 * toy.CONFIG.layers
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradients, expected)
