"""Corpora of tests: documents, the command `prepare` in this process, and the documents of an opened corpus."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.config import DataConfig
from jaxopt_llm.data.reading import source
from jaxopt_llm.data.reading.files import find_files
from jaxopt_llm.data.reading.storage import PLAN
from jaxopt_llm.data.tokens import prepared
from jaxopt_llm.data.tokens.corpus import Corpus, open_corpus
from jaxopt_llm.data.tokens.pieces import TokenStream
from jaxopt_llm.data.tokens.scored import LogProbabilityWriter, TeacherWriter
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer


def some_documents() -> list[str]:
    """Return the first parts, of different lengths, of standard library files, and texts with unusual characters."""
    whole = [
        document.content.decode() for document in source.read_standard_library() if document.name.startswith("email/")
    ]
    cut = [text[: 37 * i**2] for i, text in enumerate(whole, 1)]
    return [*cut, "a\r\nb\r", "naïve ∂L/∂w 🙂\0", "\n", "x"]


def prepare(
    folder: Path, of: Path, config: DataConfig, reference: str = "", limit: int = 0, teacher: str = "", top_k: int = 3
) -> Path:
    """Prepare a corpus as the command does, in this process.

    reference, limit: of `StoredLogProbabilities`, of which each document has another one; "": none.
    teacher, top_k: of `StoredLogProbabilities`, which are those of `some_taught`; "": none.
    """
    folder.mkdir()
    files, tokenizer = find_files(str(of), config), load_tokenizer(config)
    looked = prepared.inspect_files(files, config, lambda: None)
    model = {"reference": {"model": reference, "model_sha256": reference * 2}} if reference else None
    if teacher:
        model = {"teacher": {"model": teacher, "model_sha256": teacher * 2, "top_k": top_k}}
    plan = prepared.make_plan(files, [fingerprint for fingerprint, _ in looked], config, tokenizer, model)
    shards = prepared.group_into_shards(files, [parts for _, parts in looked])
    prepared.write_json(folder / PLAN, plan)
    for number, shard in enumerate(shards):
        prepared.write_shard(folder, number, shard, config, tokenizer)
    merger = prepared.ShardMerger(folder, prepared.describe_arrays(config, plan["dtype"]))
    merger.merge_ready()
    written = None
    if reference:
        writer, document = LogProbabilityWriter(folder, plan["dtype"]), 0
        while len(writer) < len(writer.tokens):
            count = writer.open_next().groups
            writer.append(some_log_probabilities(document + count)[document:])
            document += count
        written = {"reference": writer.summarise(limit=limit)}
    if teacher:
        writer = TeacherWriter(folder, plan["dtype"], top_k, tokenizer.vocabulary_size)
        while len(writer) < len(writer.tokens):
            teach(writer)
        written = {"teacher": writer.summarise(limit=limit)}
    merger.finish(plan, written)
    return folder


def teach(writer: TeacherWriter) -> None:
    """Write what `some_taught` says of the next shard, in two parts."""
    piece, counts = writer.open_next(), []
    for begin, end in itertools.pairwise([0, *piece.ends[:].tolist()]):
        tokens, mask = piece.tokens[begin:end], None if piece.mask is None else piece.mask[begin:end]
        taught = some_taught(tokens, mask, writer.dtype)
        counts.append(len(taught))
        writer.append(taught[:1])
        writer.append(taught[1:])
    writer.complete(np.array(counts))


def some_taught(tokens: NDArray[Any], mask: NDArray[np.bool_] | None, dtype: Any) -> NDArray[np.void]:
    """Return records that say what a token of a document is, and its place in the document, as an id and a number."""
    (places,) = np.nonzero(np.ones(tokens.size, bool) if mask is None else mask)
    places = places[places > 0]
    found = np.zeros(places.size, dtype)
    found["ids"][:, 0], found["log_probabilities"][:, -1] = tokens[places], -places
    return found


def some_log_probabilities(documents: int) -> NDArray[np.float32]:
    return np.float32(-0.25) * np.arange(1, documents + 1, dtype=np.float32)


def documents_of(stream: TokenStream) -> list[list[int]]:
    whole = stream.read(0, stream.size).tolist()
    bounds = [*stream.document_starts(0, stream.size).tolist(), stream.size]
    return [whole[i:j] for i, j in itertools.pairwise(bounds)]


def read(path: Path, config: DataConfig) -> Corpus:
    return open_corpus(replace(config, paths=(str(path),)), load_tokenizer(config))


def splits(corpus: Corpus) -> tuple[list[list[int]], list[list[int]]]:
    return documents_of(corpus.sources[0].training), documents_of(corpus.held_out)
