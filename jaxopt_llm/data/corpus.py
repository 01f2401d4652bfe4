"""All that a run reads: its sources opened, and each split into training and held-out."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from jaxopt_llm.data.config import DataConfig
from jaxopt_llm.data.find import File, find_all
from jaxopt_llm.data.indexed import megatron_piece, numpy_piece
from jaxopt_llm.data.prepared import prepared_piece
from jaxopt_llm.data.source import parts, standard_library
from jaxopt_llm.data.template import Reader, reader
from jaxopt_llm.data.tokenizer import Tokenizer
from jaxopt_llm.data.tokens import (
    IndexedPiece,
    Piece,
    TokenStream,
    fingerprint,
    join,
    join_whole,
    split,
    tokenize,
)
from jaxopt_llm.errors import InputError


@dataclass(frozen=True, eq=False)
class Source:
    """One of data.paths, or all of them where they have no weights. `weight`: its share of the rows, relative."""

    name: str
    weight: float
    training: TokenStream


@dataclass(frozen=True, eq=False)
class Corpus:
    """`held_out` joins the sources. `sha256` covers every token and its place among the documents, whichever way
    they are split, but only samples of files that another program has tokenised: a run stores it, and compares it on
    resume. `skipped`: documents left out, by reason."""

    sources: tuple[Source, ...]
    held_out: TokenStream
    sha256: str
    skipped: Counter[str]

    @property
    def name(self) -> str:
        return ", ".join(source.name for source in self.sources)

    def __str__(self) -> str:
        streams = [*(source.training for source in self.sources), self.held_out]
        documents = sum(stream.documents or 0 for stream in streams)
        known = all(stream.documents is not None for stream in streams)
        return (
            f"{f'{documents:,} documents, ' if known else ''}{sum(s.size for s in streams):,} tokens, "
            f"of which {self.held_out.size:,} held out{_reasons(self.skipped)}"
        )


def open_corpus(config: DataConfig, tokenizer: Tokenizer) -> Corpus:
    """Tokenises what is text, into memory, and maps what is tokens.

    Raises:
        InputError: what `find_files` and the readers raise, or a source with fewer than two documents.
    """
    skipped: Counter[str] = Counter()
    opened: list[tuple[str, list[Piece], str]] = []
    if config.paths:
        with reader(config, tokenizer) as read:
            for pattern, files in zip(config.paths, find_all(config), strict=True):
                found = [_open(file, read, config, tokenizer, skipped) for file in files]
                pieces = list(chain.from_iterable(pieces for pieces, _ in found))
                opened.append((pattern, pieces, "\n".join(digest for _, digest in found)))
    else:
        library = [tokenize(each.name, [each], tokenizer) for each in standard_library()]
        opened.append(("Python's standard library", [*library], _sha256(library)))
    if not config.weights:  # one corpus, of which an epoch reads every token once
        names, lists, digests = zip(*opened, strict=True)
        opened = [(", ".join(names), list(chain.from_iterable(lists)), "\n".join(digests))]
    weights = config.weights or (1.0,)
    sources, pieces, held_out = [], [], []
    for (name, of_source, _), weight in zip(opened, weights, strict=True):
        training, evaluation = split(of_source, config.held_out)
        trained = join(of_source, training)
        if not trained.size or trained.size == sum(piece.size for piece in of_source):
            raise InputError(
                f"data.paths {name}: {1 if trained.size else 0} documents{_reasons(skipped)}; training and evaluation "
                "need one each (a text file is one document, unless data.separator divides it)"
            )
        if weight:
            sources.append(Source(name, weight, trained))
            pieces += of_source
            held_out += evaluation
    identity = hashlib.sha256("\n".join(digest for _, _, digest in opened).encode()).hexdigest()
    return Corpus(tuple(sources), join(pieces, held_out), identity, skipped)


def open_whole(config: DataConfig, tokenizer: Tokenizer) -> tuple[TokenStream, Counter[str]]:
    """Every document of data.paths, none held out and no path weighted, and how many were left out, by reason."""
    skipped: Counter[str] = Counter()
    files = chain.from_iterable(find_all(config))
    with reader(config, tokenizer) as read:
        pieces = list(chain.from_iterable(_open(file, read, config, tokenizer, skipped)[0] for file in files))
    return join_whole(pieces), skipped


def _open(
    file: File, read: Reader, config: DataConfig, tokenizer: Tokenizer, skipped: Counter[str]
) -> tuple[Sequence[Piece], str]:
    """The pieces of a file, and what its contents hash to."""
    if file.format == "prepared":
        piece, digest = prepared_piece(file.name, file.path, tokenizer)
        return [piece], digest
    if file.format == "megatron":
        pair = (file.path, file.path.with_suffix(".bin"))
        return [megatron_piece(file.name, file.path)], "".join(map(fingerprint, pair))
    if file.format == "numpy":
        return [numpy_piece(file.name, file.path, tokenizer.end)], f"{fingerprint(file.path)} by stretches"
    pieces = [tokenize(file.name, read(part, skipped), tokenizer) for part in parts(file, config)]
    return pieces, _sha256(pieces)


def _reasons(skipped: Counter[str]) -> str:
    return "".join(f"; {count:,} {why}" for why, count in sorted(skipped.items()))


def _sha256(pieces: Sequence[IndexedPiece]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        # The sizes keep a token from moving between one array and the next unseen.
        mask = [] if piece.mask is None else [piece.mask[:]]
        for each in (np.array([piece.size, piece.documents]), piece.tokens[:], piece.ends[:], piece.keys[:], *mask):
            digest.update(np.ascontiguousarray(each).data)
    return digest.hexdigest()
