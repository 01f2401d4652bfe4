"""The objective over groups of answers against its formulas, answer by answer in NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.config import GrpoConfig
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.objectives import split_loss, weigh_tokens
from jaxopt_llm.model.objectives.grpo import Grpo

BOUNDS = {"epsilon": 0.2, "epsilon_high": 0.28, "max_ratio": 1.7}
MOST = 9  # tokens of an answer
WAYS = [
    GrpoConfig(normalisation=normalisation, level=level, beta=beta, **BOUNDS)  # type: ignore[arg-type]
    for normalisation, level, beta in itertools.product(
        ("token", "sequence", "constant"), ("token", "sequence"), (0.0, 0.3)
    )
]


def rollouts(rows: int = 4, length: int = 40) -> tuple[Batch, np.ndarray]:
    """Return rows of answers with their prompts, and log-probabilities of the targets, float32."""
    batch, random = toy.pairs(rows, length), np.random.default_rng(1)
    found = -random.exponential(1.0, batch.tokens.shape).astype(np.float32)
    near = [found + random.normal(0, 0.4, found.shape).astype(np.float32) for _ in range(2)]
    advantages = random.normal(0, 1, (rows, int(batch.segment_ids.max()) + 1)).astype(np.float32)
    labels = np.take_along_axis(advantages, batch.segment_ids, axis=1)
    return batch.replace(sampled=near[0], reference=near[1], labels=labels), found


def formula(settings: GrpoConfig, batch: Batch, found: np.ndarray) -> tuple[float, np.ndarray, dict[str, float]]:
    """Return the mean loss, its derivative by each log-probability, and the metrics, in float64."""
    gradient, losses, sizes = np.zeros(found.shape), [], []
    metrics: dict[str, list[np.ndarray]] = {"clipped": [], "kl": [], "sampler_kl": [], "entropy": []}
    for row, segment in ((r, s) for r in range(found.shape[0]) for s in range(1, batch.segment_ids[r].max() + 1)):
        places = (batch.segment_ids[row] == segment) & batch.loss_mask[row]
        p, q, r = (np.float64(each[row][places]) for each in (found, batch.sampled, batch.reference))
        advantage, n = float(batch.labels[row][places][0]), int(places.sum())
        of_sequence = settings.level == "sequence"
        ratio = np.full(n, np.exp(np.mean(p - q))) if of_sequence else np.exp(p - q)
        free = np.minimum(ratio, settings.max_ratio) * advantage
        bounded = np.clip(ratio, 1 - settings.epsilon, 1 + settings.epsilon_high) * advantage
        moves = (free <= bounded) & (ratio < settings.max_ratio)  # where the gain follows the ratio
        kl = np.exp(r - p) - (r - p) - 1
        each = -np.minimum(free, bounded) + settings.beta * kl
        slope = -advantage * ratio * moves
        slope = (np.full(n, slope.mean()) if of_sequence else slope) + settings.beta * (1 - np.exp(r - p))
        weight = {"token": 1.0, "sequence": 1 / n, "constant": 1 / MOST}[settings.normalisation]
        losses.append(weight * each.sum())
        gradient[row][places] = weight * slope
        of_tokens = bounded < free, kl, np.exp(p - q) - 1 - (p - q), -p
        for name, values in zip(metrics, of_tokens, strict=True):
            metrics[name] += [*values] if settings.normalisation == "token" else [values.mean()]
        sizes.append(n)
    count = sum(sizes) if settings.normalisation == "token" else len(sizes)
    return sum(losses) / count, gradient / count, {name: float(np.mean(each)) for name, each in metrics.items()}


@pytest.mark.parametrize("settings", WAYS, ids=lambda each: f"{each.normalisation}-{each.level}-{each.beta}")
def test_loss_and_weights_are_the_formula_and_its_derivative(settings: GrpoConfig) -> None:
    batch, found = rollouts()
    objective = Grpo(settings, MOST)
    assert objective.needs_reference == (settings.beta > 0)
    given = batch if settings.beta else batch.replace(reference=None)
    weights, reported = weigh_tokens(objective.sum_losses, jnp.asarray(found), given)
    count = int(objective.count(batch))
    loss, metrics = split_loss(objective, reported / count)
    expected, gradient, named = formula(settings, batch, found)
    assert float(loss) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(-np.asarray(weights) / count, gradient, rtol=1e-5, atol=1e-7)
    assert 0.05 < named["clipped"] < 0.9
    if not settings.beta:
        del named["kl"]
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(named, rel=1e-5)


def test_answers_of_the_model_itself_have_the_gradient_of_the_policy() -> None:
    """Without a difference from the sampler the weight of a token is the advantage of its answer."""
    batch, found = rollouts()
    weights, reported = weigh_tokens(
        Grpo(GrpoConfig(), MOST).sum_losses, jnp.asarray(found), batch.replace(sampled=found)
    )
    np.testing.assert_allclose(weights, np.where(batch.loss_mask, batch.labels, 0), rtol=1e-6)
    named = dict(zip(("loss", "clipped", "kl", "sampler_kl"), np.asarray(reported), strict=False))
    assert named["clipped"] == named["sampler_kl"] == 0


def test_rows_and_padding_change_nothing() -> None:
    batch, found = rollouts(1, 60)
    objective = Grpo(GrpoConfig(level="sequence", normalisation="sequence"), MOST)
    whole = float(weigh_tokens(objective.sum_losses, jnp.asarray(found), batch)[1][0])
    alone = 0.0
    for segment in range(1, int(objective.count(batch)) + 1):
        inside = batch.segment_ids == segment
        only = jax.tree.map(lambda field, inside=inside: np.where(inside, field, 0), batch)
        alone += float(weigh_tokens(objective.sum_losses, jnp.asarray(found), only)[1][0])
    assert whole == pytest.approx(alone, rel=1e-5)
