"""Log-probabilities of the documents of a prepared corpus by a reference model (`pieces.ReferenceLogProbabilities`)."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.native import integrity
from jaxopt_llm.checkpoint.run_weights import is_run_directory
from jaxopt_llm.config import BATCH_AXES, Config, DataConfig
from jaxopt_llm.core import hub
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens.prepared import LogProbabilityWriter
from jaxopt_llm.data.tokens.tokenizer import Tokenizer, load_tokenizer
from jaxopt_llm.inference import models
from jaxopt_llm.inference.log_probabilities import DocumentReader
from jaxopt_llm.run.directory import read_base_digest, read_tokenizer_digest

FLAG = "--reference "  # before the name of a model in messages
TOKENS_PER_DEVICE = 2**13  # at once
LENGTH_MULTIPLE = 128  # of rows


@dataclass(frozen=True)
class Reference:
    """A model that objectives compare with.

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


def complete_corpus(
    reference: Reference, data: DataConfig, writer: LogProbabilityWriter, advance: Callable[[int], None]
) -> dict[str, Any]:
    """Write the log-probabilities that a corpus lacks, on all devices. Return what its manifest says of them.

    Args:
        data: settings of the corpus.
        advance: receives numbers of tokens that have been read, first of those that were before.

    Raises:
        InputError, CheckpointError: the model cannot be loaded.
    """
    path = Path(reference.name)
    config = models.open_config(path)
    length, limit = choose_length(writer.longest, find_context(config))
    advance(sum(writer.tokens[: len(writer)]))
    if len(writer) == len(writer.tokens):
        return writer.summarise(limit)
    attention = models.choose_local_attention(config, length)
    source = models.use_all_devices(models.load_model(path, data, attention=attention, step=reference.step))
    batch_tokens = TOKENS_PER_DEVICE * source.placement.size(*BATCH_AXES)
    size = source.config.model.vocabulary_size
    reader = DocumentReader(source.model, source.placement, size, batch_tokens)
    while len(writer) < len(writer.tokens):
        writer.append(reader.read(source.params, writer.open_next(), length, advance)[0].astype(np.float32))
    return writer.summarise(limit)


def find_context(config: Config) -> int:
    """Return the number of tokens that a model was trained for."""
    if config.model.positions == "learned":
        return config.model.max_positions
    source = pretrained.find_source_folder(config)
    return (source and huggingface.read_context(source)) or config.training.sequence_length


def choose_length(longest: int, context: int) -> tuple[int, int]:
    """Return the length of the rows, and the limit of `ReferenceLogProbabilities`.

    longest: tokens of the longest document.
    """
    needed = max(longest - 1, models.MAX_ROW_TOKENS)  # the last token of a document is only a target
    length = min(context, needed + -needed % LENGTH_MULTIPLE)
    return length, length if longest - 1 > length else 0
