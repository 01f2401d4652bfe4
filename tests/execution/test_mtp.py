"""Multi-token prediction: against the reference, and its look ahead within documents."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import toy

from jaxopt_llm.config import ModelConfig, RematConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core import tree
from jaxopt_llm.execution import mtp, scan
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import OBJECTIVE

WEIGHT = 0.3
DENSE = replace(toy.UNIFORM, layers=2, mtp_layers=2, pattern=("sliding", "global"), tied_head=False, logit_scale=0.7)
EXPERTS = replace_fields(
    toy.UNIFORM,
    {
        "layers": 2,
        "mtp_layers": 1,
        "embedding_scale": 4.0,
        "moe.experts": 4,
        "moe.expert_width": 8,
        "moe.shared_expert_width": 8,
        "moe.dense_layers": 1,
        "moe.router": "sigmoid",
        "moe.router_bias": True,
        "moe.balance_loss": 0.1,
    },
)


def one_document(rows: int, length: int) -> Batch:
    """Return a batch whose rows are one document each, and have padding at the end."""
    random = np.random.default_rng(3)
    tokens = random.integers(toy.CONFIG.vocabulary_size, size=(rows, length + 1), dtype=np.int32)
    counts = np.tile(np.arange(length) < length - 3, (rows, 1))
    positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    ids = np.where(np.arange(length) < length - 2, 1, 0)[None].repeat(rows, 0).astype(np.int32)
    return Batch(tokens[:, :-1], tokens[:, 1:], counts, ids, positions)


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("batch", [toy.packed(4, 16), one_document(4, 16)], ids=["packed", "whole"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_loss_and_gradients_equal_the_reference(config: ModelConfig, batch: Batch, accumulation: int) -> None:
    model, placement = Decoder(config, loss_chunk=7, mtp_weight=WEIGHT), toy.placement()
    params = toy.params(model.specs)
    values = (batch.tokens, batch.targets, batch.loss_mask, batch.segment_ids, batch.positions)
    of = replace(toy.reference_config(config), mtp_weight=WEIGHT)
    expected, gradients = reference.losses_and_gradients(params, of, *values)

    executor = scan.make_executor(RematConfig("full"))
    run = jax.jit(lambda *of: executor.loss_and_gradients(model, *of, jnp.float32(1), placement))
    sums, found = run(params, jax.tree.map(lambda _: None, params), toy.microbatches(batch, accumulation))
    losses = [sums[OBJECTIVE], *sums[mtp.LOSSES]]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    tree.map_with_path(
        lambda path, a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), err_msg=path), found, gradients
    )


def test_gradients_of_the_reference_match_finite_differences() -> None:
    """Of the objective: the loss of the model and the weighted losses of the modules, which share its tables."""
    batch, config = toy.packed(2, 12), replace(DENSE, width=8, mlp_width=6)
    of = replace(toy.reference_config(config), mtp_weight=WEIGHT)
    params = jax.tree.map(lambda leaf: leaf.astype(np.float64), toy.params(Decoder(config).specs))
    values = (batch.tokens, batch.targets, batch.loss_mask, batch.segment_ids, batch.positions)

    def objective() -> float:
        first, *others = reference.losses_and_gradients(params, of, *values)[0]
        return first + WEIGHT * np.mean(others)

    gradients, random, step = reference.losses_and_gradients(params, of, *values)[1], np.random.default_rng(2), 1e-6
    for (path, leaf), gradient in zip(tree.leaves_with_path(params), jax.tree.leaves(gradients), strict=True):
        original, sums = leaf.copy(), []
        direction = np.abs(random.normal(size=leaf.shape)) * np.where(gradient < 0, -1, 1)
        for sign in (1, -1):
            leaf[...] = original + sign * step * direction
            sums.append(objective())
        leaf[...] = original
        slope = (sums[0] - sums[1]) / (2 * step)
        np.testing.assert_allclose(slope, np.sum(gradient * direction), rtol=1e-6, err_msg=path)


def test_look_ahead_stays_within_documents() -> None:
    """A row of two documents and padding, whose last token is a target of the row only."""
    batch = Batch(
        tokens=jnp.asarray([[10, 11, 12, 20, 21, 22, 23]]),
        targets=jnp.asarray([[11, 12, 20, 21, 22, 23, 24]]),
        loss_mask=jnp.asarray([[True, True, False, True, False, True, True]]),
        segment_ids=jnp.asarray([[1, 1, 1, 2, 2, 2, 2]]),
        positions=jnp.asarray([[0, 1, 2, 0, 1, 2, 3]]),
    )
    first, second = mtp.look_ahead(batch, 1), mtp.look_ahead(batch, 2)
    assert first.tokens.tolist() == [[11, 12, 20, 21, 22, 23, 24]]
    assert first.targets.tolist() == [[12, 20, 21, 22, 23, 24, 0]]
    # 20 is in another document than 11; 22 does not count; after 24 the row ends.
    assert first.loss_mask.tolist() == [[True, False, False, False, True, True, False]]
    assert second.tokens.tolist() == [[12, 20, 21, 22, 23, 24, 0]]
    assert second.loss_mask.tolist() == [[False, False, False, True, True, False, False]]


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_documents_of_a_row_compute_as_documents_alone(config: ModelConfig) -> None:
    model, batch = Decoder(replace_fields(config, {"moe.balance_loss": 0.0}), mtp_weight=WEIGHT), toy.packed(4, 16)
    params, executor = toy.params(model.specs), scan.make_executor(RematConfig("none"))
    nothing = jax.tree.map(lambda _: None, params)
    run = jax.jit(lambda batch: executor.loss_and_gradients(model, params, nothing, batch, 1.0, toy.placement()))
    sums, gradients = run(toy.microbatches(batch, 1))
    expected, expected_gradients = run(toy.microbatches(toy.one_document_per_row(batch), 1))
    assert float(sums[OBJECTIVE]) == pytest.approx(float(expected[OBJECTIVE]), rel=1e-6)
    for name in mtp.STATISTICS:
        np.testing.assert_allclose(sums[name], expected[name], rtol=1e-6)
    tree.map_with_path(
        lambda path, a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), err_msg=path),
        gradients,
        expected_gradients,
    )


def test_evaluation_reports_the_main_loss_only() -> None:
    model, batch = Decoder(DENSE, mtp_weight=WEIGHT), toy.microbatches(toy.packed(2, 16), 1)
    params, bare = toy.params(model.specs), Decoder(replace(DENSE, mtp_layers=0))
    found = scan.loss(model, params, batch, toy.placement(), RematConfig("none"))
    layers = {name: part for name, part in params.items() if not name.startswith("mtp_")}
    expected = scan.loss(bare, layers, batch, toy.placement(), RematConfig("none"))
    assert found[OBJECTIVE] == expected[OBJECTIVE]
    assert mtp.make_metrics(found) == {}
