"""Objectives over pairs against their papers' formulas, document by document in NumPy."""

import contextlib
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.config import PreferenceConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.model.objectives import split_loss, weigh_tokens
from jaxopt_llm.model.objectives.preference import REPORTED, Preference, make_preference

SETTINGS = PreferenceConfig(beta=0.3, label_smoothing=0.1, margin=0.4, nll_weight=0.7)
NAMES = ("dpo", "ipo", "hinge", "cpo", "simpo", "orpo")


def log_sigmoid(x: float) -> float:
    return float(-np.logaddexp(0, -x))


def formula(name: str, chosen: np.ndarray, rejected: np.ndarray, reference: tuple[float, float]) -> float:
    """The loss of a pair, given the log-probabilities of its answers' tokens and the reference's sums."""
    beta, smoothing, margin, nll = SETTINGS.beta, SETTINGS.label_smoothing, SETTINGS.margin, SETTINGS.nll_weight
    gain, means = chosen.sum() - reference[0], (chosen.mean(), rejected.mean())
    gains = gain, rejected.sum() - reference[1]

    def smoothed(h: float) -> float:
        return -(1 - smoothing) * log_sigmoid(h) - smoothing * log_sigmoid(-h)

    def log_odds(mean: float) -> float:
        return float(np.log(np.exp(mean) / (1 - np.exp(mean))))

    losses = {
        "dpo": lambda: smoothed(beta * (gains[0] - gains[1])),
        "ipo": lambda: (gains[0] / chosen.size - gains[1] / rejected.size - 1 / (2 * beta)) ** 2,
        "hinge": lambda: max(0.0, 1 - beta * (gains[0] - gains[1])),
        "cpo": lambda: smoothed(beta * (chosen.sum() - rejected.sum())),
        "simpo": lambda: smoothed(beta * (means[0] - means[1]) - margin),
        "orpo": lambda: beta * smoothed(log_odds(means[0]) - log_odds(means[1])) - means[0],
    }
    return float(losses[name]() - nll * means[0])


@pytest.mark.parametrize("name", NAMES)
def test_an_objective_is_its_formula(name: str) -> None:
    batch, values = toy.pairs(4, 40), np.random.default_rng(1)
    found = -values.exponential(1.0, batch.tokens.shape)
    objective, losses, rewards, logs = Preference(name, SETTINGS), [], [], []
    for row in range(4):
        for pair in range(int(batch.segment_ids[row].max()) // 2):
            answers = [(batch.segment_ids[row] == 2 * pair + 1 + side) & batch.loss_mask[row] for side in (0, 1)]
            reference = [float(batch.reference[row][answer].sum()) for answer in answers]
            reference = reference if objective.needs_reference else [0.0, 0.0]
            losses.append(formula(name, *(found[row][answer] for answer in answers), reference))
            logs.append([found[row][answer].sum() for answer in answers])
            gains = [found[row][answer].sum() - of for answer, of in zip(answers, reference, strict=True)]
            means = [found[row][answer].mean() for answer in answers]
            rewards.append([SETTINGS.beta * each for each in (means if name in ("simpo", "orpo") else gains)])
    assert int(objective.count(batch)) == len(losses) > 4
    _, reported = weigh_tokens(objective.sum_losses, jnp.asarray(found, jnp.float32), batch)
    assert len(reported) == len(REPORTED)
    assert float(reported[0]) == pytest.approx(sum(losses), rel=1e-5)
    _, metrics = split_loss(objective, reported / len(losses))
    sides = np.asarray(rewards)
    means = {"rewards/margin": sides[:, 0] - sides[:, 1], "rewards/accuracy": sides[:, 0] > sides[:, 1]}
    for place, side in enumerate(("chosen", "rejected")):
        means |= {f"rewards/{side}": sides[:, place], f"log_probabilities/{side}": np.asarray(logs)[:, place]}
    expected = {name: float(np.mean(values)) for name, values in means.items()}
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_derivative(name: str) -> None:
    """The sum of the weighted cross-entropy has the objective's gradient."""
    batch, values = toy.pairs(2, 40), np.random.default_rng(1)
    found = jnp.asarray(-values.exponential(1.0, batch.tokens.shape), jnp.float32)
    objective, direction = Preference(name, SETTINGS), jnp.asarray(values.normal(size=found.shape), jnp.float32)
    weights, _ = weigh_tokens(objective.sum_losses, found, batch)
    assert not np.any(np.asarray(weights)[~np.asarray(batch.loss_mask)])
    step = 1e-2
    after, before = (
        weigh_tokens(objective.sum_losses, found + sign * step * direction, batch)[1][0] for sign in (1, -1)
    )
    assert float(-jnp.sum(weights * direction)) == pytest.approx(float(after - before) / (2 * step), rel=2e-3)


def test_a_function_may_be_infinite_where_no_pair_ends(tmp_path: Path) -> None:
    """apo_zero of docs/preferences.md, with a term that is infinite for an answer without tokens."""
    text = (Path(__file__).parents[2] / "docs/preferences.md").read_text()
    file = tmp_path / "losses.py"
    file.write_text(re.search(r"```python\n(# losses.py.*?)```", text, re.DOTALL)[1])  # type: ignore[index]
    with file.open("a") as added:
        added.write("def divided(chosen, rejected):\n    losses, more = apo_zero(chosen, rejected)\n")
        added.write("    return losses + chosen.gain / rejected.tokens, more\n")
    batch = toy.pairs(2, 40)
    found = jnp.asarray(-np.random.default_rng(1).exponential(1.0, batch.tokens.shape), jnp.float32)
    objective = make_preference("dpo", replace(PreferenceConfig(), function=f"{file}:divided"))
    weights, reported = weigh_tokens(objective.sum_losses, found, batch)
    total, ups = 0.0, 0.0
    for row in range(2):
        for pair in range(int(batch.segment_ids[row].max()) // 2):
            answers = [(batch.segment_ids[row] == 2 * pair + 1 + side) & batch.loss_mask[row] for side in (0, 1)]
            gains = [(found[row] - batch.reference[row])[each].sum() for each in answers]
            up, down = (1 / (1 + np.exp(-0.1 * gain)) for gain in gains)
            total, ups = total + 1 - up + down + gains[0] / answers[1].sum(), ups + up
    assert float(reported[0]) == pytest.approx(float(total), rel=1e-5)
    pairs = int(objective.count(batch))
    assert float(split_loss(objective, reported / pairs)[1]["preference/up"]) == pytest.approx(
        float(ups) / pairs, rel=1e-5
    )
    assert np.isfinite(weights).all() and np.abs(weights).max() > 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return chosen.gain", "must return the loss of a pair, "),
        ("return chosen.gain * jax.numpy.ones(2), {}", r"the loss is float32\[2\]"),
        ("return chosen.gain, {1: chosen.gain}", "1 is float32"),
        ("return chosen.score, {}", "losses.py, line 3: AttributeError: 'Answer' object has no attribute 'score'"),
        ("return chosen.gain +, {}", "losses.py, line 3: SyntaxError"),
        ("import absent", "ModuleNotFoundError"),
        ("return -chosen.gain, {}", ""),
    ],
)
def test_a_function_must_return_numbers(body: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(f"import jax\ndef lose(chosen, rejected):\n    {body}\n")
    settings = replace(PreferenceConfig(), function=f"{tmp_path / 'losses.py'}:lose")
    with contextlib.nullcontext() if not message else pytest.raises(InputError, match=message):
        make_preference("dpo", settings)


def test_padding_and_other_documents_change_nothing() -> None:
    batch = toy.pairs(1, 60)
    found = jnp.asarray(-np.random.default_rng(1).exponential(1.0, batch.tokens.shape), jnp.float32)
    pairs = int(Preference("dpo", SETTINGS).count(batch))
    assert pairs > 1
    whole = weigh_tokens(Preference("dpo", SETTINGS).sum_losses, found, batch)[1][0]
    alone = 0.0
    for pair in range(pairs):
        inside = (batch.segment_ids + 1) // 2 == pair + 1
        only = jax.tree.map(lambda field, inside=inside: jnp.where(inside, field, 0), batch)
        renumbered = jnp.where(inside, batch.segment_ids - 2 * pair, 0)
        alone += float(
            weigh_tokens(Preference("dpo", SETTINGS).sum_losses, found, only.replace(segment_ids=renumbered))[1][0]
        )
    assert float(whole) == pytest.approx(alone, rel=1e-5)
