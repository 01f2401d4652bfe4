"""What a model says of a prepared corpus, for objectives that compare with it.

A reference gives log-probabilities of documents (`pieces.StoredLogProbabilities`), and a teacher those of the tokens
that it finds most likely.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.native import integrity
from jaxopt_llm.checkpoint.run_weights import is_run_directory
from jaxopt_llm.config import BATCH_AXES, Config, DataConfig
from jaxopt_llm.core import hub
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens.pieces import IndexedPiece
from jaxopt_llm.data.tokens.scored import LogProbabilityWriter, TeacherWriter
from jaxopt_llm.data.tokens.tokenizer import Tokenizer, load_tokenizer
from jaxopt_llm.inference import models
from jaxopt_llm.model.model import Params
from jaxopt_llm.run.directory import read_base_digest, read_tokenizer_digest
from jaxopt_llm.run.log_probabilities import DocumentReader

TOKENS_PER_DEVICE = 2**13  # at once
BLOCK_TOKENS = 2**19  # of documents of which a teacher is asked before anything is written
LENGTH_MULTIPLE = 128  # of rows


@dataclass(frozen=True)
class Reference:
    """A model that objectives compare with: a reference or a teacher.

    Attributes:
        name: absolute path or hub id.
        sha256: digest of its weights.
        step: checkpoint of a run; None for a folder.
        vocabulary_size: number of its tokens.
    """

    name: str
    sha256: str
    step: int | None
    vocabulary_size: int

    def to_plan(self) -> dict[str, Any]:
        """Return the entry of the plan of a prepared corpus."""
        return {"model": self.name, "model_sha256": self.sha256}


def open_reference(name: str, flag: str, data: DataConfig, tokenizer: Tokenizer) -> Reference:
    """Find a model and the digest of its weights, without loading them.

    Args:
        name: a run directory, or the folder or hub id of a Hugging Face model.
        flag: what named it, for messages.
        data: settings of the corpus.
        tokenizer: the tokenizer of the corpus.

    Raises:
        InputError: there is no such model, or it has another tokenizer.
        CheckpointError: the run has no usable checkpoint.
    """
    absolute, directory = hub.absolute_name(name), hub.find_folder(name, f"{flag} ")
    model = models.open_config(directory).model
    pretrained.check_predicts_tokens(model, f"{flag} {name}")
    if is_run_directory(directory):
        same = read_tokenizer_digest(directory) == tokenizer.sha256
        step: int = models.use_checkpoint(directory, None, lambda _, step: step)
        files = (directory / "checkpoints" / str(step) / integrity.MANIFEST).read_bytes()
        identity = hashlib.sha256(files + (read_base_digest(directory) or "").encode()).hexdigest()
        reference = Reference(absolute, identity, step, model.vocabulary_size)
    else:
        same = load_tokenizer(replace(data, tokenizer=str(directory))).sha256 == tokenizer.sha256
        reference = Reference(absolute, huggingface.open_model_folder(directory).sha256, None, model.vocabulary_size)
    if not same:
        raise InputError(
            f"{flag} {name}: it has another tokenizer, BOS or EOS than --tokenizer {data.tokenizer}: prepare the "
            "corpus with the tokenizer of that model, or name a model with this tokenizer"
        )
    return reference


def complete_corpus(
    reference: Reference,
    data: DataConfig,
    writer: LogProbabilityWriter | TeacherWriter,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Write what a corpus lacks of a model's log-probabilities, on all devices. Return the entry of its manifest.

    A teacher reads a document that is longer than its context in parts of that length.

    Args:
        data: settings of the corpus.
        writer: of the log-probabilities of a reference, or of the most likely tokens of a teacher.
        advance: receives numbers of tokens that have been read, first of those that were before.

    Raises:
        InputError, CheckpointError: the model cannot be loaded.
    """
    length, limit = choose_length(writer.longest, find_context(models.open_config(Path(reference.name))))
    advance(sum(writer.tokens[: len(writer)]))
    if len(writer) < len(writer.tokens):
        count = writer.dtype["ids"].shape[0] if isinstance(writer, TeacherWriter) else 0
        reader, params = _load_reader(reference, data, length, count)
        while len(writer) < len(writer.tokens):
            shard, counts = writer.open_next(), list[NDArray[np.int64]]()
            if isinstance(writer, LogProbabilityWriter):
                writer.append(reader.read(params, shard, length, advance)[0].astype(np.float32))
                continue
            for documents in divide_shard(shard):
                counts.append(count_targets(documents))
                writer.append(_read_most_likely(reader, params, divide_long(documents, length), length, writer.dtype))
                advance(documents.size)
            writer.complete(np.concatenate(counts))
    return writer.summarise(limit=limit)


def _load_reader(
    reference: Reference, data: DataConfig, length: int, most_likely: int = 0
) -> tuple[DocumentReader, Params]:
    """Load a model onto all devices. Return a reader of rows of this length, and the parameters.

    most_likely: number of tokens that are read in the place of each; 0: the targets are read.
    """
    path = Path(reference.name)
    attention = models.choose_local_attention(models.open_config(path), length)
    source = models.use_all_devices(models.load_model(path, data, attention=attention, step=reference.step))
    batch_tokens = TOKENS_PER_DEVICE * source.placement.size(*BATCH_AXES)
    read = functools.partial(source.model.read_most_likely, count=most_likely) if most_likely else None
    size = source.config.model.vocabulary_size
    return DocumentReader(source.model, source.placement, size, batch_tokens, read), source.params


def divide_shard(shard: IndexedPiece) -> Iterator[IndexedPiece]:
    """Yield the documents of a shard, in memory, some whole ones at a time."""
    ends, first = shard.ends[:], 0
    while first < ends.size:
        begin = int(ends[first - 1]) if first else 0
        last = max(int(ends.searchsorted(begin + BLOCK_TOKENS, side="right")), first + 1)
        end = int(ends[last - 1])
        mask = np.ones(end - begin, bool) if shard.mask is None else np.asarray(shard.mask[begin:end])
        keys = np.zeros(last - first, np.uint64)
        yield IndexedPiece(shard.name, np.asarray(shard.tokens[begin:end]), ends[first:last] - begin, keys, mask=mask)
        first = last


def divide_long(documents: IndexedPiece, length: int) -> IndexedPiece:
    """Return documents with at most `length` targets: parts of them, each from the last target of the part before."""
    ends = documents.ends[:]
    starts = np.append(0, ends[:-1])
    counts = -(-np.maximum(ends - starts - 1, 0) // length)  # of the parts of each document
    parts = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.repeat(starts, counts) + parts * length
    sizes = np.minimum(begins + length + 1, np.repeat(ends, counts)) - begins
    places = np.repeat(begins - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
    assert documents.mask is not None
    keys = np.zeros(sizes.size, np.uint64)
    return IndexedPiece(documents.name, documents.tokens[places], np.cumsum(sizes), keys, mask=documents.mask[places])


def count_targets(documents: IndexedPiece) -> NDArray[np.int64]:
    """Return the number of tokens of each document that the loss counts, int64 [documents]."""
    ends = documents.ends[:]
    before = np.append(0, np.cumsum(_find_targets(documents)))
    return np.diff(before[ends], prepend=0)


def _find_targets(documents: IndexedPiece) -> NDArray[np.bool_]:
    """Return whether the loss counts each token as a target, bool [tokens]."""
    assert documents.mask is not None
    ends, targets = documents.ends[:], np.array(documents.mask[:])
    starts = np.append(0, ends[:-1])
    targets[starts[starts < ends]] = False  # nothing predicts the first token of a document
    return targets


def _read_most_likely(
    reader: DocumentReader, params: Params, documents: IndexedPiece, length: int, dtype: np.dtype[np.void]
) -> NDArray[np.void]:
    """Return what a teacher says of each target of documents, in order: records of this dtype."""
    targets = _find_targets(documents)
    order, values = np.cumsum(targets) - 1, np.zeros(np.count_nonzero(targets), dtype)
    if not values.size:
        return values
    for firsts, row, (ids, found) in reader.read_rows(params, reader.pack(documents, length)):
        counted = row.loss_mask
        places = order[firsts[row.segment_ids[counted] - 1] + row.positions[counted] + 1]
        values["ids"][places] = ids[counted]
        with np.errstate(over="ignore"):  # what is below the range of float16 becomes -inf
            values["log_probabilities"][places] = found[counted]
    return values


def find_context(config: Config) -> int:
    """Return the number of tokens that a model was trained for."""
    if config.model.positions == "learned":
        return config.model.max_positions
    source = pretrained.find_source_folder(config)
    return (source and huggingface.read_context(source)) or config.training.sequence_length


def choose_length(longest: int, context: int) -> tuple[int, int]:
    """Return the length of the rows, and the limit of `StoredLogProbabilities`.

    longest: tokens of the longest document.
    """
    needed = max(longest - 1, models.MAX_ROW_TOKENS)  # the last token of a document is only a target
    length = min(context, needed + -needed % LENGTH_MULTIPLE)
    return length, length if longest - 1 > length else 0
