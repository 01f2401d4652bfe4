"""Corpus of a run: its sources, each split into training and held-out documents."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from jaxopt_llm.config import DataConfig, EvaluationConfig
from jaxopt_llm.config.data import PREFERENCE, UNPAIRED, Pairs
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.pulse import UNWATCHED, Pulse
from jaxopt_llm.data.reading.files import File, find_corpus_files, find_files, locate, name_url
from jaxopt_llm.data.reading.skipped import Skipped
from jaxopt_llm.data.reading.source import FORMATS, read_standard_library, split_into_parts
from jaxopt_llm.data.tokens.indexed import open_megatron, open_numpy
from jaxopt_llm.data.tokens.pieces import (
    IndexedPiece,
    Piece,
    TokenStream,
    fingerprint_file,
    join_all,
    join_ranges,
    split_held_out,
    tokenize,
)
from jaxopt_llm.data.tokens.prepared import check_learned_turns, open_prepared, read_shard_records
from jaxopt_llm.data.tokens.template import Reader, make_reader
from jaxopt_llm.data.tokens.tokenizer import Tokenizer

# Kinds of pairs, for messages.
HELD = {PREFERENCE: "pairs of a chosen and a rejected answer", UNPAIRED: "answers that are judged one by one"}


@dataclass(frozen=True, eq=False)
class Source:
    """One of data.paths, or all of them together if there are no weights.

    Attributes:
        weight: share of the rows, relative to the sum of all weights.
        training: the training documents.
    """

    name: str
    weight: float
    training: TokenStream


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training sources and held-out documents of a run.

    Attributes:
        sources: the sources of training documents.
        held_out: held-out documents of all sources; None if every document is trained on.
        sha256: hash of every token and of its position in the documents; independent of the split. It covers only
            samples of files that another program tokenized. A run stores it and compares it on resume.
        skipped: skipped documents by reason, and fields that nothing reads.
        files: paths or URLs of the files; none for Python's standard library.
    """

    sources: tuple[Source, ...]
    held_out: TokenStream | None
    sha256: str
    skipped: Skipped
    files: frozenset[str]

    @property
    def name(self) -> str:
        return ", ".join(source.name for source in self.sources)

    @property
    def pairs(self) -> Pairs:
        """Kind of the pairs that the documents are; see `Piece`."""
        return self.sources[0].training.pairs

    def __str__(self) -> str:
        held_out = [] if self.held_out is None else [self.held_out]
        streams = [*(source.training for source in self.sources), *held_out]
        documents = sum(stream.documents or 0 for stream in streams)
        known = all(stream.documents is not None for stream in streams)
        share = f", of which {self.held_out.size:,} held out" if self.held_out else ""
        return (
            f"{f'{documents:,} documents, ' if known else ''}{sum(s.size for s in streams):,} tokens{share}"
            f"{_format_reasons(self.skipped)}"
        )


def open_corpus(config: DataConfig, tokenizer: Tokenizer, holds_out: bool = True, pulse: Pulse = UNWATCHED) -> Corpus:
    """Open the corpus of `data.paths`: tokenize text into memory, and open token files.

    Args:
        holds_out: whether `data.held_out` of the documents are held out. Otherwise every document is trained on.
        pulse: notes the progress of downloads and of the tokenizer.

    Raises:
        InputError: `find_files` or a reader raises it, or a source has too few documents: two, or one if none is held
            out. Or some sources hold pairs of documents of a kind, and others do not.
    """
    skipped = Skipped()
    opened: list[tuple[str, list[Piece], str]] = []
    files_by_path = find_corpus_files(config, pulse=pulse)
    if config.paths:
        read = make_reader(config, tokenizer)
        for pattern, files in zip(config.paths, files_by_path, strict=True):
            found = [_open_file(file, read, config, tokenizer, skipped, pulse) for file in files]
            pieces = list(chain.from_iterable(pieces for pieces, _ in found))
            opened.append((pattern, pieces, "\n".join(digest for _, digest in found)))
        skipped.check_columns(config)
        skipped.check_texts(any(piece.mask is not None for _, pieces, _ in opened for piece in pieces))
        _check_same_kind(chain.from_iterable(pieces for _, pieces, _ in opened), "data.paths")
    else:
        library = [tokenize(str(document.name), [document], tokenizer) for document in read_standard_library()]
        opened.append(("Python's standard library", [*library], _sha256(library)))
    if not config.weights:  # one source, so that an epoch reads every token once
        names, lists, digests = zip(*opened, strict=True)
        opened = [(", ".join(names), list(chain.from_iterable(lists)), "\n".join(digests))]
    weights = config.weights or (1.0,)
    sources, pieces, held_out = [], [], []
    for (name, of_source, _), weight in zip(opened, weights, strict=True):
        if not any(piece.size for piece in of_source):
            raise InputError(f"data.paths {name}: 0 documents{_format_reasons(skipped)}; add documents")
        stream = join_all(of_source)
        if holds_out:
            training, evaluation = split_held_out(of_source, config.held_out)
            stream = join_ranges(of_source, training)
            if not stream.size or stream.size == sum(piece.size for piece in of_source):
                count = "1 document" if sum(each.groups for each in of_source) == 1 else "no two different documents"
                raise InputError(
                    f"data.paths {name}: {count}{_format_reasons(skipped)}; training and evaluation need at least "
                    "one each: add documents (a text file is one document, unless --data.separator divides it), or "
                    "name validation data with --evaluation.paths"
                )
        if weight:
            sources.append(Source(name, weight, stream))
            pieces += of_source
            held_out += evaluation if holds_out else []
    identity = hashlib.sha256("\n".join(digest for _, _, digest in opened).encode()).hexdigest()
    split = join_ranges(pieces, held_out) if holds_out else None
    return Corpus(tuple(sources), split, identity, skipped, frozenset(map(locate, chain.from_iterable(files_by_path))))


def open_all_documents(config: DataConfig, tokenizer: Tokenizer) -> tuple[TokenStream, Skipped]:
    """Open every document of data.paths, without held-out split and weights.

    Returns the documents, and the skipped documents by reason.
    """
    files = chain.from_iterable(find_corpus_files(config))
    stream, _, skipped = _open_files(files, config, tokenizer, UNWATCHED, "data.paths")
    skipped.check_texts(stream.holds("mask"))
    return stream, skipped


@dataclass(frozen=True, eq=False)
class ValidationSet:
    """Documents of one of `evaluation.paths`.

    Attributes:
        sha256: hash of the contents; see `Corpus`.
        skipped: see `Corpus`.
        files: paths or URLs of the files.
    """

    name: str
    documents: TokenStream
    sha256: str
    skipped: Skipped
    files: frozenset[str]

    def __str__(self) -> str:
        return f"{self.documents}{_format_reasons(self.skipped)}"


def open_validation_sets(
    evaluation: EvaluationConfig, data: DataConfig, tokenizer: Tokenizer, pulse: Pulse = UNWATCHED
) -> tuple[ValidationSet, ...]:
    """Open the validation sets of `evaluation.paths`, which are read as `data` describes.

    pulse: see `open_corpus`.

    Raises:
        InputError: `find_files` or a reader raises it, or a set has no documents.
    """
    sets = []
    for name, path in evaluation.named_paths():
        files = find_files(path, data, "evaluation.paths", pulse)
        stream, digest, skipped = _open_files(files, data, tokenizer, pulse, f"evaluation.paths {path}")
        if not stream.size:
            reasons = _format_reasons(skipped)
            raise InputError(f"evaluation.paths {path}: 0 documents{reasons}; add documents, or leave the path out")
        sets.append(ValidationSet(name, stream, digest, skipped, frozenset(map(locate, files))))
    return tuple(sets)


def _open_files(
    files: Iterable[File], config: DataConfig, tokenizer: Tokenizer, pulse: Pulse, name: str
) -> tuple[TokenStream, str, Skipped]:
    """Return all documents of files, the hash of their contents, and the skipped documents by reason.

    name: name of the files, for messages.
    """
    skipped = Skipped()
    read = make_reader(config, tokenizer)
    opened = [_open_file(file, read, config, tokenizer, skipped, pulse) for file in files]
    digest = hashlib.sha256("\n".join(digest for _, digest in opened).encode()).hexdigest()
    pieces = list(chain.from_iterable(pieces for pieces, _ in opened))
    _check_same_kind(pieces, name)
    return join_all(pieces), digest, skipped


def _check_same_kind(pieces: Iterable[Piece], name: str) -> None:
    """Raise InputError if pieces differ in the kind of their pairs, or in whether they have labels. name: of all."""
    pieces = list(pieces)
    by_kind = {piece.pairs: piece for piece in pieces if piece.size}
    if len(by_kind) > 1:
        kind = max(by_kind)
        (other, *_) = (piece.name for each, piece in by_kind.items() if each != kind)
        problem = f"{by_kind[kind].name} holds {HELD[kind]}, and {other} does not"
        raise InputError(f"{name}: {problem}; name only one of the two kinds")
    by_label = {piece.labels is not None: piece for piece in pieces if piece.size}
    if len(by_label) == 2:
        problem = f"{by_label[True].name} has labels, and {by_label[False].name} has none"
        raise InputError(f"{name}: {problem}; name only one of the two kinds")


def _open_file(
    file: File, read: Reader, config: DataConfig, tokenizer: Tokenizer, skipped: Skipped, pulse: Pulse
) -> tuple[Sequence[Piece], str]:
    """Return the pieces of a file and the hash of its contents."""
    pulse.beat()
    if file.format not in FORMATS:
        with name_url(file):
            opened = _open_token_file(file, tokenizer, skipped)
        if file.format == "prepared":
            check_learned_turns(file.path, config)
        return opened
    parts = split_into_parts(file, config)
    pieces = [tokenize(file.name, read(part, skipped), tokenizer, pulse) for part in parts]
    return pieces, _sha256(pieces)


def _open_token_file(file: File, tokenizer: Tokenizer, skipped: Skipped) -> tuple[Sequence[Piece], str]:
    """Return the pieces of a file that is already tokenized, and a hash of its contents.

    Of what `prepare` counted, conversations whose turns have no end are counted again: a model learns from them now.
    """
    if file.format == "prepared":
        piece, digest = open_prepared(file.name, file.path, tokenizer)
        skipped.read["endless"] += sum(record.get("endless", 0) for record in read_shard_records(file.path))
        return [piece], digest
    if file.format == "megatron":
        pair = (file.path, file.path.with_suffix(".bin"))
        return [open_megatron(file.name, file.path)], "".join(map(fingerprint_file, pair))
    return [open_numpy(file.name, file.path, tokenizer.eos)], f"{fingerprint_file(file.path)} by stretches"


def _format_reasons(skipped: Skipped) -> str:
    return "".join(f"; {reason}" for reason in skipped.describe())


def _sha256(pieces: Sequence[IndexedPiece]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        # The sizes are hashed too, so that bytes cannot move from one array to the next without changing the hash.
        others = [each[:] for each in (piece.mask, piece.labels) if each is not None]
        for array in (np.array([piece.size, piece.documents]), piece.tokens[:], piece.ends[:], piece.keys[:], *others):
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
