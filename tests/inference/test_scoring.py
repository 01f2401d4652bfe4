"""Log-likelihoods of packed requests, against the logits of each request alone."""

from pathlib import Path

import folders
import jax
import numpy as np
import pytest

from jaxopt_llm import load_pretrained
from jaxopt_llm.inference import models
from jaxopt_llm.inference.scoring import Request, Scorer, choose_row_length

pytestmark = pytest.mark.core
LENGTH = 150  # rows have 128 tokens or 150


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.folder_with_tokenizer(tmp_path_factory.mktemp("scoring") / "model")


@pytest.fixture(scope="module")
def scored(folder: Path) -> tuple[list[Request], list[tuple[float, bool]]]:
    """Requests of all lengths, and their scores by a softmax in float64.

    The last token of every third one is the likeliest. All are rows of their own: later tokens change no logits.
    """
    random = np.random.default_rng(0)
    sizes = [2, LENGTH + 1, 128, 129, 130, *random.integers(2, LENGTH + 1, 25).tolist()]
    tokens = random.integers(0, 250, (len(sizes), LENGTH + 1)).astype(np.int32)
    logits = np.asarray(load_pretrained(folder).logits(tokens), np.float64)
    for row in range(0, len(sizes), 3):
        tokens[row, sizes[row] - 1] = logits[row, sizes[row] - 2].argmax()
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    requests, scores = [], []
    for row, size in enumerate(sizes):
        count = 1 if row % 3 == 0 else int(random.integers(1, size))
        inputs, targets = range(size - 1 - count, size - 1), tokens[row, size - count : size]
        found = log_probabilities[row, inputs]
        requests.append(Request(tokens[row, :size].tolist(), count))
        scores.append((found[range(count), targets].sum(), bool((found.argmax(axis=-1) == targets).all())))
    assert 9 < sum(is_greedy for _, is_greedy in scores) < len(scores)
    return requests, scores


@pytest.mark.parametrize(("batch_tokens", "devices", "tensor"), [(1, 1, 1), (500, 4, 2)])
def test_packed_requests_have_the_scores_of_each_alone(
    batch_tokens: int,
    devices: int,
    tensor: int,
    folder: Path,
    scored: tuple[list[Request], list[tuple[float, bool]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "choose_devices", lambda *_: jax.devices()[:devices])
    requests, expected = scored
    scorer, advanced = Scorer(models.load_model(folder, tensor=tensor), LENGTH, batch_tokens), list[int]()
    found = scorer(requests, advanced.append)
    np.testing.assert_allclose([score.log_likelihood for score in found], [value for value, _ in expected], rtol=1e-5)
    assert [score.is_greedy for score in found] == [is_greedy for _, is_greedy in expected]
    assert sum(advanced) == len(requests) and len(advanced) > 2
    again = scorer([*requests[5:], Request([1], 0)])  # other rows and other batches, and nothing to score
    np.testing.assert_allclose([score[0] for score in again[:-1]], [score[0] for score in found[5:]], rtol=1e-6)
    assert again[-1] == (0.0, True)
    assert scorer._compute._cache_size() == 2  # a program for each length of rows


def test_rows_are_as_long_as_powers_of_two() -> None:
    sizes = (1, 128, 129, 256, 257, 999)
    assert [choose_row_length(size, 1000) for size in sizes] == [128, 128, 256, 256, 512, 1000]
    assert choose_row_length(5, 32) == 32
