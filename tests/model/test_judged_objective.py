"""The objective over judged answers against its paper's formulas, document by document in NumPy."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.config import PreferenceConfig
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.objectives import split_loss, weigh_tokens
from jaxopt_llm.model.objectives.judged import Judged, estimate_divergence
from jaxopt_llm.parallel.zero import GROUP_AXIS

SETTINGS = PreferenceConfig(beta=0.3, desirable_weight=1.3, undesirable_weight=0.7)
ROWS = 4


def make_batch() -> Batch:
    """Return rows of judged documents, each before a mismatched one."""
    batch = toy.pairs(ROWS, 40)
    return replace(batch, labels=((batch.segment_ids + 1) // 2 % 3 == 1).astype(np.float32))


def draw(batch: Batch, shift: float) -> np.ndarray:
    """Return log-probabilities whose sums are about `shift` times the length above those of the reference."""
    noise = np.random.default_rng(1).normal(shift, 0.5, batch.tokens.shape)
    return (batch.reference + noise).astype(np.float32)


def gains_of(batch: Batch, found: np.ndarray) -> tuple[list[float], list[float], list[bool]]:
    """Return the gains over the reference of judged and of mismatched documents, and whether an answer is desirable."""
    gains: tuple[list[float], list[float]] = ([], [])
    labels = []
    for row in range(len(batch.tokens)):
        for document in range(1, int(batch.segment_ids[row].max()) + 1):
            inside = batch.segment_ids[row] == document
            counted = inside & batch.loss_mask[row]
            gains[(document + 1) % 2].append(float((found - batch.reference)[row][counted].sum()))
            labels += [bool(batch.labels[row][inside][0])] * (document % 2)
    return *gains, labels


def sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


@pytest.mark.parametrize("shift", [0.2, -0.2])
def test_the_objective_is_its_formula(shift: float) -> None:
    batch = make_batch()
    found, objective, beta = draw(batch, shift), Judged(SETTINGS), SETTINGS.beta
    gains, mismatched, labels = gains_of(batch, found)
    divergence = max(0.0, float(np.mean(mismatched)))
    assert (divergence > 0) == (shift > 0)
    losses = [
        1.3 * (1 - sigmoid(beta * (gain - divergence)))
        if desirable
        else 0.7 * (1 - sigmoid(beta * (divergence - gain)))
        for gain, desirable in zip(gains, labels, strict=True)
    ]
    assert int(objective.count(batch)) == len(losses) > 8 and 2 < sum(labels) < len(labels) - 2
    estimated = estimate_divergence(jnp.asarray(found), batch, in_gradient_group=False)
    assert float(estimated) == pytest.approx(divergence, rel=1e-5, abs=1e-6)
    _, sums = weigh_tokens(objective.sum_losses, jnp.asarray(found), batch, estimated)
    loss, metrics = split_loss(objective, sums / len(losses))
    assert float(loss) == pytest.approx(np.mean(losses), rel=1e-5)
    assert float(metrics["kl"]) == pytest.approx(divergence, rel=1e-5, abs=1e-6)
    rewards = [
        beta * np.mean([g for g, each in zip(gains, labels, strict=True) if each == kind]) for kind in (True, False)
    ]
    named = [float(metrics[f"rewards/{name}"]) for name in ("chosen", "rejected", "margin")]
    assert named == pytest.approx([*rewards, rewards[0] - rewards[1]], rel=1e-4)
    logs, _, _ = gains_of(replace(batch, reference=np.zeros_like(batch.reference)), found)
    for name, kind in (("chosen", True), ("rejected", False)):
        mean = np.mean([each for each, label in zip(logs, labels, strict=True) if label == kind])
        assert float(metrics[f"log_probabilities/{name}"]) == pytest.approx(mean, rel=1e-4)


def test_weights_are_the_derivative_with_the_divergence_held() -> None:
    """Mismatched documents and prompts have no weight, as in TRL, where no gradient goes through the divergence."""
    batch, values = make_batch(), np.random.default_rng(2)
    found, objective = jnp.asarray(draw(batch, 0.2)), Judged(SETTINGS)
    divergence = estimate_divergence(found, batch, in_gradient_group=False)
    weights, _ = weigh_tokens(objective.sum_losses, found, batch, divergence)
    learned = batch.loss_mask & (batch.segment_ids % 2 == 1)
    assert np.all((np.asarray(weights) != 0) == learned)
    direction, step = jnp.asarray(values.normal(size=found.shape), jnp.float32), 1e-2
    after, before = (
        weigh_tokens(objective.sum_losses, found + sign * step * direction, batch, divergence)[1][0] for sign in (1, -1)
    )
    assert float(-jnp.sum(weights * direction)) == pytest.approx(float(after - before) / (2 * step), rel=2e-3)


def test_packed_rows_have_the_loss_of_single_pairs() -> None:
    batch, objective = make_batch(), Judged(SETTINGS)
    found = draw(batch, 0.2)
    with_values = replace(batch, teacher=found)
    rows = []
    for row in range(ROWS):
        for pair in range(int(batch.segment_ids[row].max()) // 2):
            (slots,) = np.nonzero((batch.segment_ids[row] + 1) // 2 == pair + 1)
            kept = jax.tree.map(lambda field, row=row, slots=slots: field[row, slots], with_values)
            kept = replace(kept, segment_ids=kept.segment_ids - 2 * pair)
            rows.append(jax.tree.map(lambda field: np.pad(field, (0, 40 - len(field))), kept))
    single = jax.tree.map(lambda *fields: np.stack(fields), *rows)

    def total(batch: Batch, found: np.ndarray) -> np.ndarray:
        divergence = estimate_divergence(jnp.asarray(found), batch, in_gradient_group=False)
        return np.asarray(weigh_tokens(objective.sum_losses, jnp.asarray(found), batch, divergence)[1])

    np.testing.assert_allclose(total(single, single.teacher), total(batch, found), rtol=1e-5)


def test_gradient_groups_have_one_divergence() -> None:
    batch = make_batch()
    found = jnp.asarray(draw(batch, 0.2))
    whole = estimate_divergence(found, batch, in_gradient_group=False)
    split = jax.tree.map(lambda field: jnp.reshape(field, (2, ROWS // 2, -1)), (found, batch))
    of_groups = jax.vmap(functools.partial(estimate_divergence, in_gradient_group=True), axis_name=GROUP_AXIS)(*split)
    np.testing.assert_allclose(of_groups, [float(whole)] * 2, rtol=1e-5)


def test_a_kind_without_answers_has_metrics_of_zero() -> None:
    batch, objective = make_batch(), Judged(SETTINGS)
    desirable = replace(batch, labels=np.ones_like(batch.labels))
    found = jnp.asarray(draw(batch, 0.2))
    _, sums = weigh_tokens(objective.sum_losses, found, desirable, jnp.float32(0))
    metrics = objective.name_metrics(sums / objective.count(desirable))
    assert float(metrics["rewards/rejected"]) == float(metrics["log_probabilities/rejected"]) == 0
    assert float(metrics["rewards/chosen"]) > 0
    empty = jax.tree.map(jnp.zeros_like, batch)
    assert float(estimate_divergence(found, empty, in_gradient_group=False)) == 0
