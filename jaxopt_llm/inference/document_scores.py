"""Scores of documents by a reward model or a classifier, and how they agree with labels or preferences."""

import json
from pathlib import Path

import jax
import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.core.files import replace_durably
from jaxopt_llm.data.rows.packing import PackedRows
from jaxopt_llm.inference.models import LoadedModel
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.model import Params
from jaxopt_llm.run.log_probabilities import DocumentReader


def read_scores(source: LoadedModel, rows: PackedRows, batch_size: int) -> NDArray[np.float32]:
    """Return the scores of each document, float32 [documents, N]; NaN for those that rows do not hold.

    Args:
        source: a model with scores.
        rows: made with `scored`.
        batch_size: rows at once; devices divide them.
    """
    model = source.model

    def read(non_layer: Params, x: jax.Array, batch: Batch, context: Context) -> jax.Array:
        return model.logits(non_layer, x, context)  # of a model with scores: [B, S, N]

    size = source.config.model.vocabulary_size
    reader = DocumentReader(model, source.placement, size, batch_size * rows.sequence_length, read)
    starts = rows.stream.document_starts(0, rows.stream.size)
    scores = np.full((starts.size, source.config.model.scores), np.nan, np.float32)
    for firsts, row, found in reader.read_rows(source.params, rows):
        ids = row.segment_ids
        is_last = np.flatnonzero((ids > 0) & (ids != np.append(ids[1:], 0)))
        scores[starts.searchsorted(firsts)] = found[is_last]
    return scores


def describe_scores(scores: NDArray[np.float32], rows: PackedRows) -> str:
    """Return how the scores of documents, [documents, N], agree with their labels or with what is preferred."""
    is_read = ~np.isnan(scores[:, 0])
    if rows.pairs:
        chosen, rejected = (scores[side::2, 0][is_read[::2]] for side in (0, 1))
        share, margin = np.mean(chosen > rejected), np.mean(chosen - rejected)
        return f"the chosen answer of {share:.1%} of {chosen.size:,} pairs has the larger score, margin {margin:.4f}"
    count = np.count_nonzero(is_read)
    if not rows.stream.holds("labels"):
        return f"{count:,} documents, mean scores {', '.join(f'{mean:.4f}' for mean in scores[is_read].mean(axis=0))}"
    starts = rows.stream.document_starts(0, rows.stream.size)[is_read]
    labels = np.array([rows.stream.read_label(start) for start in starts.tolist()])
    read = scores[is_read].astype(np.float64)
    if read.shape[1] == 1:
        return f"mean squared error {np.mean(np.square(read[:, 0] - labels)):.4f} of {count:,} documents"
    normaliser = np.log(np.sum(np.exp(read - read.max(axis=1, keepdims=True)), axis=1)) + read.max(axis=1)
    losses = normaliser - read[np.arange(count), labels.astype(np.int64)]
    share = np.mean(read.argmax(axis=1) == labels)
    return f"{share:.1%} of {count:,} documents have the right class, loss {np.mean(losses):.4f}"


def write_scores(scores: NDArray[np.float32], file: Path) -> None:
    """Write a line of JSON for each document, in order: its scores, or null if it was dropped. Of a pair, two lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"scores": each.tolist() if np.isfinite(each).all() else None}) + "\n" for each in scores]
    replace_durably(file, "".join(lines))
