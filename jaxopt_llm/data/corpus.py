"""Corpus of a run: its sources, each split into training and held-out documents."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data import tokens
from jaxopt_llm.data.find import File, find_corpus_files
from jaxopt_llm.data.indexed import open_megatron, open_numpy
from jaxopt_llm.data.prepared import open_prepared
from jaxopt_llm.data.skipped import Skipped
from jaxopt_llm.data.source import read_standard_library, split_into_parts
from jaxopt_llm.data.template import Reader, open_reader
from jaxopt_llm.data.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Source:
    """One of data.paths, or all of them together if there are no weights.

    Attributes:
        weight: share of the rows, relative to the sum of all weights.
        training: the training documents.
    """

    name: str
    weight: float
    training: tokens.TokenStream


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training sources and held-out documents of a run.

    Attributes:
        sources: the sources of training documents.
        held_out: held-out documents of all sources.
        sha256: hash of every token and of its position in the documents; independent of the split. It covers only
            samples of files that another program tokenized. A run stores it and compares it on resume.
        skipped: skipped documents by reason.
    """

    sources: tuple[Source, ...]
    held_out: tokens.TokenStream
    sha256: str
    skipped: Skipped

    @property
    def name(self) -> str:
        return ", ".join(source.name for source in self.sources)

    def __str__(self) -> str:
        streams = [*(source.training for source in self.sources), self.held_out]
        documents = sum(stream.documents or 0 for stream in streams)
        known = all(stream.documents is not None for stream in streams)
        return (
            f"{f'{documents:,} documents, ' if known else ''}{sum(s.size for s in streams):,} tokens, "
            f"of which {self.held_out.size:,} held out{_format_reasons(self.skipped)}"
        )


def open_corpus(config: DataConfig, tokenizer: Tokenizer) -> Corpus:
    """Open the corpus of `data.paths`: tokenize text into memory, and memory-map token files.

    Raises:
        InputError: `find_files` or a reader raises it, or a source has fewer than two documents.
    """
    skipped = Skipped()
    opened: list[tuple[str, list[tokens.Piece], str]] = []
    if config.paths:
        with open_reader(config, tokenizer) as read:
            for pattern, files in zip(config.paths, find_corpus_files(config), strict=True):
                found = [_open_file(file, read, config, tokenizer, skipped) for file in files]
                pieces = list(chain.from_iterable(pieces for pieces, _ in found))
                opened.append((pattern, pieces, "\n".join(digest for _, digest in found)))
    else:
        library = [tokens.tokenize(str(document.name), [document], tokenizer) for document in read_standard_library()]
        opened.append(("Python's standard library", [*library], _sha256(library)))
    if not config.weights:  # one source, so that an epoch reads every token once
        names, lists, digests = zip(*opened, strict=True)
        opened = [(", ".join(names), list(chain.from_iterable(lists)), "\n".join(digests))]
    weights = config.weights or (1.0,)
    sources, pieces, held_out = [], [], []
    for (name, of_source, _), weight in zip(opened, weights, strict=True):
        training, evaluation = tokens.split_held_out(of_source, config.held_out)
        stream = tokens.join_ranges(of_source, training)
        if not stream.size or stream.size == sum(piece.size for piece in of_source):
            raise InputError(
                f"data.paths {name}: {1 if stream.size else 0} documents{_format_reasons(skipped)}; training and "
                "evaluation need at least one each: add documents (a text file is one document, unless "
                "data.separator divides it)"
            )
        if weight:
            sources.append(Source(name, weight, stream))
            pieces += of_source
            held_out += evaluation
    identity = hashlib.sha256("\n".join(digest for _, _, digest in opened).encode()).hexdigest()
    return Corpus(tuple(sources), tokens.join_ranges(pieces, held_out), identity, skipped)


def open_all_documents(config: DataConfig, tokenizer: Tokenizer) -> tuple[tokens.TokenStream, Skipped]:
    """Open every document of data.paths, without held-out split and weights.

    Returns the documents, and the skipped documents by reason.
    """
    skipped = Skipped()
    files = chain.from_iterable(find_corpus_files(config))
    with open_reader(config, tokenizer) as read:
        pieces = list(chain.from_iterable(_open_file(file, read, config, tokenizer, skipped)[0] for file in files))
    return tokens.join_all(pieces), skipped


def _open_file(
    file: File, read: Reader, config: DataConfig, tokenizer: Tokenizer, skipped: Skipped
) -> tuple[Sequence[tokens.Piece], str]:
    """Return the pieces of a file and the hash of its contents."""
    if file.format == "prepared":
        piece, digest = open_prepared(file.name, file.path, tokenizer)
        return [piece], digest
    if file.format == "megatron":
        pair = (file.path, file.path.with_suffix(".bin"))
        return [open_megatron(file.name, file.path)], "".join(map(tokens.fingerprint_file, pair))
    if file.format == "numpy":
        return [open_numpy(file.name, file.path, tokenizer.eos)], f"{tokens.fingerprint_file(file.path)} by stretches"
    pieces = [tokens.tokenize(file.name, read(part, skipped), tokenizer) for part in split_into_parts(file, config)]
    return pieces, _sha256(pieces)


def _format_reasons(skipped: Skipped) -> str:
    return "".join(f"; {reason}" for reason in skipped.describe())


def _sha256(pieces: Sequence[tokens.IndexedPiece]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        # The sizes are hashed too, so that bytes cannot move from one array to the next without changing the hash.
        mask = [] if piece.mask is None else [piece.mask[:]]
        for array in (np.array([piece.size, piece.documents]), piece.tokens[:], piece.ends[:], piece.keys[:], *mask):
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
