"""Log-probabilities of packed documents and requests, against the logits of each alone."""

import itertools
from dataclasses import replace
from pathlib import Path

import folders
import jax
import numpy as np
import pytest

from jaxopt_llm import load_pretrained
from jaxopt_llm.data.tokens.pieces import IndexedPiece
from jaxopt_llm.inference import models
from jaxopt_llm.run.log_probabilities import DocumentReader, Request, choose_row_length

pytestmark = pytest.mark.core
LENGTH = 150  # rows of requests have 128 tokens or 150
SHORT = 24  # rows of documents


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.folder_with_tokenizer(tmp_path_factory.mktemp("models") / "model")


def make_reader(source: models.LoadedModel, batch_tokens: int) -> DocumentReader:
    size = source.config.model.vocabulary_size
    return DocumentReader(source.model, source.placement, size, batch_tokens)


@pytest.fixture(scope="module")
def requests(folder: Path) -> tuple[list[Request], list[tuple[float, bool]]]:
    """Requests of all lengths, and their log-likelihoods by a softmax in float64.

    The last token of two of three is the likeliest. All are rows of their own: later tokens change no logits.
    """
    random = np.random.default_rng(0)
    sizes = [2, LENGTH + 1, 128, 129, 130, *random.integers(2, LENGTH + 1, 25).tolist()]
    tokens = random.integers(0, 250, (len(sizes), LENGTH + 1)).astype(np.int32)
    logits = np.asarray(load_pretrained(folder).logits(tokens), np.float64)
    for row in range(len(sizes)):
        if row % 3 == 2:
            continue
        tokens[row, sizes[row] - 1] = logits[row, sizes[row] - 2].argmax()
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    requests, expected = [], []
    for row, size in enumerate(sizes):
        count = 1 if row % 3 == 0 else int(random.integers(1, size))
        inputs, targets = range(size - 1 - count, size - 1), tokens[row, size - count : size]
        found = log_probabilities[row, inputs]
        requests.append(Request(tokens[row, :size].tolist(), count))
        expected.append((found[range(count), targets].sum(), bool((found.argmax(axis=-1) == targets).all())))
    assert 9 < sum(is_greedy for _, is_greedy in expected) < len(expected)
    return requests, expected


@pytest.mark.parametrize(("batch_tokens", "devices", "tensor"), [(1, 1, 1), (500, 4, 2)])
def test_packed_requests_have_the_log_likelihoods_of_each_alone(
    batch_tokens: int,
    devices: int,
    tensor: int,
    folder: Path,
    requests: tuple[list[Request], list[tuple[float, bool]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "choose_devices", lambda *_: jax.devices()[:devices])
    given, expected = requests
    source, read = models.load_model(folder, tensor=tensor), list[int]()
    reader = make_reader(source, batch_tokens)
    found = reader.read_requests(source.params, given, LENGTH, read.append)
    np.testing.assert_allclose([each.value for each in found], [value for value, _ in expected], rtol=1e-5)
    assert [each.is_greedy for each in found] == [is_greedy for _, is_greedy in expected]
    assert sum(read) == sum(len(each.tokens) for each in given) and len(read) > 2
    again = reader.read_requests(
        source.params, [*given[5:], Request([1], 0)], LENGTH
    )  # other rows, and nothing to predict
    np.testing.assert_allclose([each[0] for each in again[:-1]], [each[0] for each in found[5:]], rtol=1e-6)
    assert again[-1] == (0.0, True)
    assert reader._compute._cache_size() == 2  # a program for each length of rows


def test_rows_are_as_long_as_powers_of_two() -> None:
    sizes = (1, 128, 129, 256, 257, 999)
    assert [choose_row_length(size, 1000) for size in sizes] == [128, 128, 256, 256, 512, 1000]
    assert choose_row_length(5, 32) == 32


@pytest.fixture(scope="module")
def documents() -> IndexedPiece:
    """Return documents of which some exceed a row, and the loss counts nothing of others."""
    random = np.random.default_rng(0)
    lengths = np.append([SHORT + 1, SHORT + 2, 1, 2], random.integers(2, SHORT + 5, 40))
    ends = np.cumsum(lengths)
    mask = random.random(ends[-1]) < np.repeat(random.choice([0, 0.5, 1], lengths.size), lengths)
    ids = random.integers(0, 256, ends[-1]).astype("<u2")
    return IndexedPiece("documents", ids, ends, np.zeros(ends.size, np.uint64), mask=mask)


@pytest.fixture(scope="module")
def expected(folder: Path, documents: IndexedPiece) -> list[float]:
    """Return the sum of each document by its own logits. What follows a document in its row has no effect on them."""
    assert documents.mask is not None
    ends, sums = documents.ends, []
    bounds = list(itertools.pairwise([0, *ends.tolist()]))
    ids = np.stack([np.resize(documents.tokens[first:last], SHORT + 5) for first, last in bounds]).astype(np.int32)
    logits = load_pretrained(folder).logits(ids)
    found = np.asarray(jax.nn.log_softmax(logits), np.float64)
    for row, (first, last) in enumerate(bounds):
        predicted = found[row, np.arange(last - first - 1), ids[row, 1 : last - first]]
        sums.append(float(predicted @ documents.mask[first + 1 : last]) if last - first <= SHORT + 1 else np.nan)
    return sums


@pytest.mark.parametrize("devices", [1, 8])
def test_packed_documents_have_the_log_probabilities_of_each_alone(
    devices: int, folder: Path, documents: IndexedPiece, expected: list[float]
) -> None:
    source = models.load_model(folder)
    if devices > 1:
        source = models.use_all_devices(source)
    assert source.placement.mesh.size == devices
    reader, read = make_reader(source, 2 * SHORT * devices), list[int]()
    found, _ = reader.read(source.params, documents, SHORT, read.append)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert np.isnan(found).sum() > 3 and np.sum(found == 0) > 3 and np.sum(found < -10) > 10
    assert sum(read) == documents.size and len(read) > 1
    ends = documents.ends[:4]  # the last ones have nothing that counts
    assert documents.mask is not None
    few = replace(documents, tokens=documents.tokens[:60], ends=ends, mask=np.zeros(60, bool))
    assert np.isnan(reader.read(source.params, few, SHORT, read.append)[0]).tolist() == [False, True, False, False]
