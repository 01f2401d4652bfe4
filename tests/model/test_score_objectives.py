"""Objectives over scores against their formulas, document by document in NumPy."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.config import PreferenceConfig
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.objectives import Objective, split_loss
from jaxopt_llm.model.objectives.scores import Classify, Reward

pytestmark = pytest.mark.core

CLASSES, ROWS = 3, 4


@dataclass(frozen=True)
class Scored:
    """A head that gives these scores, [B, S, N]."""

    found: Any

    def scores(self) -> Any:
        return self.found


def documents_of(batch: Batch, values: np.ndarray) -> list[np.ndarray]:
    """Return the values at the last token of each document."""
    return [
        values[row][np.flatnonzero(batch.segment_ids[row] == document)[-1]]
        for row in range(ROWS)
        for document in range(1, int(batch.segment_ids[row].max()) + 1)
    ]


def make_batch(labels: str) -> Batch:
    """Return rows of pairs of documents, each document with a label: a class, a number, or nothing."""
    batch, random = toy.pairs(ROWS, 40), np.random.default_rng(3)
    most = int(batch.segment_ids.max()) + 1
    if not labels:
        return batch
    drawn = random.integers(0, CLASSES, (ROWS, most)) if labels == "classes" else random.normal(size=(ROWS, most))
    return replace(batch, labels=np.take_along_axis(drawn, batch.segment_ids, axis=1).astype(np.float32))


def log_sigmoid(x: float) -> float:
    return float(-np.logaddexp(0, -x))


def formula(name: str, batch: Batch, scores: np.ndarray, settings: PreferenceConfig) -> tuple[float, dict[str, float]]:
    """Return the mean loss and the metrics, in float64."""
    found = np.array(documents_of(batch, scores))
    labels = None if batch.labels is None else np.array(documents_of(batch, batch.labels))
    if name == "classes":
        assert labels is not None
        shares = np.log(np.exp(found).sum(axis=-1))
        losses = shares - found[np.arange(len(found)), labels.astype(int)]
        return float(np.mean(losses)), {"accuracy": float(np.mean(found.argmax(axis=-1) == labels))}
    if name == "numbers":
        return float(np.mean((found[:, 0] - labels) ** 2)), {}
    chosen, rejected = found[::2, 0], found[1::2, 0]
    margins = np.full(len(chosen), settings.margin) if labels is None else labels[1::2]
    losses = [-log_sigmoid(c - r - m) for c, r, m in zip(chosen, rejected, margins, strict=True)]
    losses += settings.center_weight * (chosen + rejected) ** 2
    of_sides = {"rewards/chosen": np.mean(chosen), "rewards/rejected": np.mean(rejected)}
    compared = {"rewards/margin": np.mean(chosen - rejected), "rewards/accuracy": np.mean(chosen > rejected)}
    return float(np.mean(losses)), {name: float(value) for name, value in (of_sides | compared).items()}


@pytest.mark.parametrize(
    ("name", "labels", "settings"),
    [
        ("reward", "", PreferenceConfig(margin=0.4, center_weight=0.2)),
        ("reward", "numbers", PreferenceConfig(margin=9.0)),
        ("classes", "classes", PreferenceConfig()),
        ("numbers", "numbers", PreferenceConfig()),
    ],
    ids=["margin of all", "margins of pairs", "classes", "numbers"],
)
def test_an_objective_is_its_formula_and_the_gradient_its_derivative(
    name: str, labels: str, settings: PreferenceConfig
) -> None:
    batch, random = make_batch(labels), np.random.default_rng(1)
    objective: Objective = Reward(settings) if name == "reward" else Classify(CLASSES if name == "classes" else 1)
    size = CLASSES if name == "classes" else 1
    scores, direction = random.normal(size=(2, ROWS, 40, size))
    weight = 0.25

    def compute(given: Any) -> Any:
        return objective.compute(Scored(given), batch, jnp.float32(weight))  # type: ignore[arg-type]

    (minimised, sums), gradient = jax.value_and_grad(compute, has_aux=True)(jnp.asarray(scores, jnp.float32))
    count = int(objective.count(batch))
    expected, metrics = formula(name, batch, scores, settings)
    loss, found = split_loss(objective, sums / count)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert float(minimised) == pytest.approx(weight * count * expected, rel=1e-5)
    assert {each: float(value) for each, value in found.items()} == pytest.approx(metrics, rel=1e-5)
    step = 1e-5
    after, before = (formula(name, batch, scores + sign * step * direction, settings)[0] for sign in (1, -1))
    assert float(np.sum(gradient * direction)) == pytest.approx(
        weight * count * (after - before) / (2 * step), rel=1e-4
    )
