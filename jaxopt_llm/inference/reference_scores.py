"""Scores of a reference model: its log-probability of each document of a prepared corpus (`pieces.ReferenceScores`)."""

import functools
import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.native import integrity
from jaxopt_llm.checkpoint.run_weights import is_run_directory
from jaxopt_llm.compiler.kernel_choice import choose_attention
from jaxopt_llm.compiler.xla_options import compiler_options
from jaxopt_llm.config import BATCH_AXES, Config, DataConfig, MeshConfig, RematConfig
from jaxopt_llm.core import hub
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.rows.loader import read_in_order
from jaxopt_llm.data.rows.packing import PackedRows
from jaxopt_llm.data.tokens.pieces import IndexedPiece, join_all
from jaxopt_llm.data.tokens.prepared import ScoreWriter
from jaxopt_llm.data.tokens.tokenizer import Tokenizer, load_tokenizer
from jaxopt_llm.execution import scan
from jaxopt_llm.inference import models
from jaxopt_llm.inference.models import LoadedModel
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.self_attention import describe_call
from jaxopt_llm.parallel.mesh import make_mesh, visible_devices
from jaxopt_llm.run.directory import read_base_digest, read_tokenizer_digest

FLAG = "--reference "  # before the name of a model in messages
TOKENS_PER_DEVICE = 2**13  # at once
LENGTH_MULTIPLE = 128  # of rows


@dataclass(frozen=True)
class Reference:
    """A model that scores documents.

    Attributes:
        name: absolute path or hub id.
        sha256: digest of its weights.
        step: checkpoint of a run; None for a folder.
    """

    name: str
    sha256: str
    step: int | None

    def to_plan(self) -> dict[str, str]:
        """Return the entry of the plan of a prepared corpus."""
        return {"model": self.name, "model_sha256": self.sha256}


def open_reference(name: str, data: DataConfig, tokenizer: Tokenizer) -> Reference:
    """Find a model and the digest of its weights, without loading them.

    Args:
        name: a run directory, or the folder or hub id of a Hugging Face model.
        data: settings of the corpus.
        tokenizer: the tokenizer of the corpus.

    Raises:
        InputError: there is no such model, or it has another tokenizer.
        CheckpointError: the run has no usable checkpoint.
    """
    absolute, directory = hub.absolute_name(name), hub.find_folder(name, FLAG)
    pretrained.check_predicts_tokens(models.open_config(directory).model, f"{FLAG}{name}")
    if is_run_directory(directory):
        same = read_tokenizer_digest(directory) == tokenizer.sha256
        step: int = models.use_checkpoint(directory, None, lambda _, step: step)
        files = (directory / "checkpoints" / str(step) / integrity.MANIFEST).read_bytes()
        identity = hashlib.sha256(files + (read_base_digest(directory) or "").encode()).hexdigest()
        reference = Reference(absolute, identity, step)
    else:
        same = load_tokenizer(replace(data, tokenizer=str(directory))).sha256 == tokenizer.sha256
        reference = Reference(absolute, huggingface.open_model_folder(directory).sha256, None)
    if not same:
        raise InputError(
            f"{FLAG}{name}: it has another tokenizer, BOS or EOS than --tokenizer {data.tokenizer}: prepare the corpus "
            "with the tokenizer of that model, or name a model with this tokenizer"
        )
    return reference


def score_corpus(
    reference: Reference, data: DataConfig, writer: ScoreWriter, advance: Callable[[int], None]
) -> dict[str, Any]:
    """Write the scores that a corpus lacks, on all devices. Return what its manifest says of them.

    Args:
        data: settings of the corpus.
        advance: receives numbers of tokens that have been scored, first of those that were before.

    Raises:
        InputError, CheckpointError: the model cannot be loaded.
    """
    path = Path(reference.name)
    config = models.open_config(path)
    length, limit = choose_length(writer.longest, find_context(config))
    advance(sum(writer.tokens[: len(writer)]))
    if len(writer) == len(writer.tokens):
        return writer.summarise(limit)
    # Not the implementation that a run used, because this may be another machine.
    call = describe_call(config.model, config.precision.compute_dtype, length, None, parts=1)
    attention = choose_attention(visible_devices()[0], "auto", call)
    if attention.reason:
        print(f"attention: {attention}", file=sys.stderr)
    source = use_all_devices(models.load_model(path, data, attention=attention.name, step=reference.step))
    score = Scorer(source, length)
    while len(writer) < len(writer.tokens):
        writer.append(score(writer.open_next(), advance))
    return writer.summarise(limit)


def find_context(config: Config) -> int:
    """Return the number of tokens that a model was trained for."""
    if config.model.positions == "learned":
        return config.model.max_positions
    source = pretrained.find_source_folder(config)
    return (source and huggingface.read_context(source)) or config.training.sequence_length


def choose_length(longest: int, context: int) -> tuple[int, int]:
    """Return the length of the rows, and the limit of `ReferenceScores`. longest: tokens of the longest document."""
    needed = max(longest - 1, models.MAX_ROW_TOKENS)  # the last token of a document is only a target
    length = min(context, needed + -needed % LENGTH_MULTIPLE)
    return length, length if longest - 1 > length else 0


def use_all_devices(source: LoadedModel) -> LoadedModel:
    """Return a model that rests on one device with a copy on each of the others, which read other rows."""
    devices = visible_devices()
    if source.placement.mesh.size == len(devices):
        return source
    placement = replace(source.placement, mesh=make_mesh(MeshConfig(data=len(devices)), devices))
    return replace(source, params=jax.device_put(source.params, placement.replicated), placement=placement)


class Scorer:
    """Function from documents to their scores. One program serves all calls."""

    def __init__(self, source: LoadedModel, length: int) -> None:
        """Take over a model. length: tokens of a row; longer documents get no score, NaN."""
        self._source, self._length, placement = source, length, source.placement
        self._sharding = placement.activation(None, "batch", "sequence")
        self._rows = placement.size(*BATCH_AXES) * max(TOKENS_PER_DEVICE // length, 1)
        self._log_probabilities = jax.jit(
            functools.partial(
                scan.read_tokens,
                source.model.log_probabilities,
                source.model,
                placement=placement,
                remat=RematConfig("none"),
            ),
            out_shardings=placement.replicated,
            compiler_options=compiler_options(placement.mesh),
        )

    def __call__(self, piece: IndexedPiece, advance: Callable[[int], None]) -> NDArray[np.float32]:
        """Return the sum of the log-probabilities of the tokens of each document that the loss counts, [documents].

        advance: receives numbers of tokens as they are read; together they are those of the piece.
        """
        assert piece.mask is not None
        ends = piece.ends[:]
        starts = np.append(0, ends[:-1])
        before = np.append(0, np.cumsum(piece.mask[:]))  # tokens that count before each position
        counts = before[ends] - before[starts + 1]  # nothing predicts the first token of a document
        is_long = ends - starts - 1 > self._length
        scores = np.where(is_long, np.nan, 0.0)
        left = piece.size
        if not np.any(counts[~is_long]):
            advance(left)
            return scores.astype(np.float32)
        size = self._source.config.model.vocabulary_size
        rows = PackedRows(join_all([piece]), self._length, size, piece.name, "drop")
        for at, batch in enumerate(read_in_order(rows, self._rows)):
            found = self._compute(batch)
            for row in range(min(self._rows, len(rows) - at * self._rows)):
                firsts, _ = rows.find_ranges(at * self._rows + row)
                counted = batch.loss_mask[row]
                documents = batch.segment_ids[row][counted] - 1
                sums = np.bincount(documents, found[row][counted].astype(np.float64), firsts.size)
                scores[ends.searchsorted(firsts, side="right")] = sums
            read = int(np.count_nonzero(batch.segment_ids))
            advance(read)
            left -= read
        advance(left)
        return scores.astype(np.float32)

    def _compute(self, batch: Batch) -> NDArray[np.float32]:
        """Return the log-probabilities of the targets of a batch, [B, S]."""
        placed = jax.device_put(jax.tree.map(lambda field: field[None], batch), self._sharding)
        return np.asarray(self._log_probabilities(self._source.params, placed))[0]
