"""The decoder under the scan executor against the float64 reference: loss, gradients, logits, cached generation."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import toy

from jaxopt_llm import tree
from jaxopt_llm.execution import scan
from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.kernels.spans import Spans, of_documents
from jaxopt_llm.model import param
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import Auxiliary, Params, Parts, layout, make_parts
from jaxopt_llm.parallel import hlo

pytestmark = pytest.mark.core

PLACEMENT = toy.placement()
BATCH = toy.packed(rows=4, length=16)
TOKENS = int(np.sum(BATCH.loss_mask))
ROW_POSITIONS = np.broadcast_to(np.arange(16), (4, 16))  # of rows that are one document each

jit = functools.partial(jax.jit, compiler_options=toy.QUICK_COMPILE)


def config(tied: bool) -> ModelConfig:
    return dataclasses.replace(toy.CONFIG, tied_head=tied)


@functools.cache
def parts(tied: bool) -> Parts:
    return make_parts(config(tied))


@functools.cache
def params(tied: bool) -> Params:
    return toy.params(parts(tied).specs)


# ---- Loss and gradients.


@functools.cache
def expected_loss_and_gradients(tied: bool) -> tuple[float, Params]:
    return toy.reference_mean(config(tied), params(tied), BATCH)


@functools.cache
def compile_gradients(tied: bool, policy: str, count: int, is_frozen: Any = lambda path: False) -> jax.stages.Compiled:
    def loss_and_gradients(trainable: Params, frozen: Params, batch: toy.Batch) -> Any:
        remat = RematConfig(policy)  # type: ignore[arg-type]
        return scan.loss_and_gradients(parts(tied), trainable, frozen, batch, 1 / jnp.float32(TOKENS), PLACEMENT, remat)

    frozen, trainable = tree.partition(params(tied), is_frozen)
    return jit(loss_and_gradients).lower(trainable, frozen, toy.microbatches(BATCH, count)).compile()


def assert_near(actual: tree.Tree, expected: tree.Tree) -> None:
    def check(path: str, actual: jax.Array, expected: np.ndarray) -> None:
        assert np.linalg.norm(actual - expected) <= 5e-6 * np.linalg.norm(expected), path

    tree.map_with_path(check, actual, expected)


@pytest.mark.parametrize(
    "tied, policy, count", [(True, "none", 1), (True, "full", 2), (False, "none", 2), (False, "full", 1)]
)
def test_loss_and_gradients_are_the_references(tied: bool, policy: str, count: int) -> None:
    batch = toy.microbatches(BATCH, count)
    # Microbatches with equally many real tokens would hide a mean of their means.
    assert len(set(np.sum(batch.loss_mask, axis=(1, 2)))) == count
    nothing = jax.tree.map(lambda leaf: None, params(tied))
    loss, tokens, _, gradients = compile_gradients(tied, policy, count)(params(tied), nothing, batch)
    expected_loss, expected_gradients = expected_loss_and_gradients(tied)
    assert tokens == TOKENS
    assert loss / TOKENS == pytest.approx(expected_loss, rel=1e-6)
    assert_near(gradients, expected_gradients)


def is_mlp(path: str) -> bool:
    return "mlp/" in path


def test_a_frozen_half_gets_no_gradient_and_changes_no_other() -> None:
    frozen, trainable = tree.partition(params(tied=True), is_mlp)
    program = compile_gradients(True, "none", 1, is_mlp)
    gradients = program(trainable, frozen, toy.microbatches(BATCH, 1))[-1]
    _, expected = tree.partition(expected_loss_and_gradients(tied=True)[1], is_mlp)
    assert jax.tree.structure(gradients) == jax.tree.structure(trainable)
    assert_near(gradients, expected)
    # A gradient of the frozen leaves is not even formed: each of their values costs one multiply-add per token.
    saved = hlo.dot_flops(compile_gradients(True, "none", 1).as_text()) - hlo.dot_flops(program.as_text())
    assert saved == 2 * BATCH.tokens.size * sum(leaf.size for leaf in jax.tree.leaves(frozen))


# ---- Initial values.


@pytest.mark.parametrize("layers", [2, 18])
def test_what_joins_the_residual_stream_begins_small(layers: int) -> None:
    """Two matrices of each layer add to it: by the root of their number, its variance does not grow with depth."""
    model = dataclasses.replace(toy.UNIFORM, width=64, layers=layers)
    block = make_parts(model).specs["segment_0"]["block_0"]
    specs = {"output": block["attention"]["output"], "down": block["mlp"]["down"]}
    drawn = param.initialize(specs, seed=0)
    outputs = (drawn["output"], model.heads * model.head_dim), (drawn["down"], model.mlp_width)
    for values, fan_in in outputs:
        assert np.std(values) == pytest.approx((2 * layers * fan_in) ** -0.5, rel=0.1)


# ---- Logits.


forward = jit(functools.partial(scan.forward, parts(tied=False)))


def logits(tokens: np.ndarray, segment_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    context = Context(positions, of_documents(segment_ids), PLACEMENT)
    return np.asarray(forward(params(tied=False), tokens, context, None)[0])


def real(logits: np.ndarray) -> np.ndarray:
    return logits[..., : toy.CONFIG.vocabulary_size]


def test_logits_are_the_references() -> None:
    where = BATCH.segment_ids, BATCH.positions
    expected = reference.logits(params(tied=False), toy.reference_config(config(tied=False)), BATCH.tokens, *where)
    np.testing.assert_allclose(real(logits(BATCH.tokens, *where)), expected, rtol=1e-5, atol=1e-5)


def test_a_document_does_not_change_the_logits_of_another() -> None:
    changed = np.zeros(BATCH.tokens.shape, bool)
    changed[2] = BATCH.segment_ids[2] == 3  # of five documents
    tokens = np.where(changed, (BATCH.tokens + 1) % toy.CONFIG.vocabulary_size, BATCH.tokens)
    before, after = (logits(each, BATCH.segment_ids, BATCH.positions) for each in (BATCH.tokens, tokens))
    np.testing.assert_array_equal((before != after).any(axis=-1), changed)


# ---- Generation.


def test_cached_logits_are_the_uncached() -> None:
    tokens, ones = BATCH.tokens, np.ones_like(BATCH.tokens)
    caches = scan.make_caches(parts(tied=False), *tokens.shape, jnp.float32, PLACEMENT)
    pieces = []
    for first, end in [(0, 7), (7, 10), *((at, at + 1) for at in range(10, 16))]:
        positions = ROW_POSITIONS[:, first:end]
        context = Context(
            positions, Spans(jnp.zeros_like(positions), positions), PLACEMENT, cache_index=jnp.int32(first)
        )
        piece, caches = forward(params(tied=False), tokens[:, first:end], context, caches)
        pieces.append(piece)
    np.testing.assert_allclose(
        np.concatenate(pieces, axis=1), logits(tokens, ones, ROW_POSITIONS), rtol=1e-5, atol=1e-5
    )


# ---- Layout.


def test_layout_repeats_the_pattern_and_leaves_the_rest_to_a_second_segment() -> None:
    def kinds(layers: int) -> list[tuple[tuple[str, ...], int]]:
        segments = layout(dataclasses.replace(toy.CONFIG, layers=layers))
        return [(segment.kinds, segment.repeats) for segment in segments]

    assert kinds(5) == [(("sliding", "global"), 2), (("sliding",), 1)]
    assert kinds(4) == [(("sliding", "global"), 2)]
    assert kinds(1) == [(("sliding",), 1)]


def test_every_block_is_told_its_number_in_order() -> None:
    def append_digit(kind: str, weights: Params, x: jax.Array, context: Context, layer: Any, cache: Any) -> Any:
        return x * 10 + layer["index"], cache, parts(tied=False).zero_auxiliary()

    counting = dataclasses.replace(
        parts(tied=False),
        embed=lambda outer, tokens, context: jnp.zeros(tokens.shape, jnp.int32),
        block=append_digit,
        logits=lambda outer, x, context: x,
    )
    context = Context(BATCH.positions, of_documents(BATCH.segment_ids), PLACEMENT)
    digits, _ = jax.jit(lambda: scan.forward(counting, params(tied=False), BATCH.tokens, context))()
    np.testing.assert_array_equal(digits, np.full(BATCH.tokens.shape, 1234))  # 0, 1, 2, 3, 4


def test_auxiliary_losses_are_differentiated_and_statistics_summed() -> None:
    """A loss that the last block adds is worth what the same loss in the head is."""
    plain = parts(tied=False)

    def penalty(x: jax.Array) -> jax.Array:
        return 0.1 * jnp.sum(x.astype(jnp.float32) ** 2)

    def none() -> Auxiliary:
        return Auxiliary(loss=jnp.zeros(()), statistics={"blocks": jnp.zeros(())})

    def block(kind: str, weights: Params, x: jax.Array, context: Context, layer: Any, cache: Any) -> Any:
        x, cache, _ = plain.block(kind, weights, x, context, layer, cache)
        is_last = layer["index"] == toy.CONFIG.layers - 1
        return x, cache, Auxiliary(jnp.where(is_last, penalty(x), 0.0), {"blocks": jnp.ones(())})

    def head_loss(outer: Params, x: jax.Array, batch: Any, context: Context, cotangent: jax.Array) -> Any:
        objective, loss = plain.head_loss(outer, x, batch, context, cotangent)
        return objective + cotangent * penalty(x), loss + penalty(x)

    def compute(these: Parts) -> Any:
        batch = toy.microbatches(BATCH, 2)
        weights, nothing = tree.partition(params(tied=False), lambda path: True)
        return jax.jit(
            lambda: scan.loss_and_gradients(
                these, weights, nothing, batch, jnp.float32(0.5), PLACEMENT, RematConfig("full")
            )
        )()

    loss, _, auxiliary, gradients = compute(dataclasses.replace(plain, block=block, zero_auxiliary=none))
    in_head, _, _, expected = compute(dataclasses.replace(plain, head_loss=head_loss))
    assert auxiliary.loss > 0
    np.testing.assert_allclose(loss + auxiliary.loss, in_head, rtol=1e-6)
    assert auxiliary.statistics["blocks"] == 2 * toy.CONFIG.layers
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradients, expected)
