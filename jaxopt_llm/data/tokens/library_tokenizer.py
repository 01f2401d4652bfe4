"""A tokenizer of the library `tokenizers`, put together from its files as transformers 5 does it."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens.tokenizer_folder import Assembly

ENCODING = ("normalizer", "pre_tokenizer")
SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")  # clean_up_tokenization_spaces

Ids = NDArray[np.int32]
T = TypeVar("T")


class Refused(Exception):
    """Error of the library for the content of the files, with its message."""


class LibraryTokenizer:
    """Tokenizer of a tokenizer.json, put together as transformers does it. Any thread may call it.

    Attributes:
        vocabulary: id of each token.
        special_tokens: tokens that do not stand for text.
        named_tokens: special tokens by their names in transformers: bos_token, eos_token, ...
        added_tokens: ids and descriptions of all added tokens.
        prefix: ids that transformers adds before a text.
        suffix: ids that transformers adds after a text.
        replaced: parts of the file that were replaced.
    """

    def __init__(self, name: str, parts: Sequence[bytes], assembly: Assembly) -> None:
        """Load a tokenizer.

        Args:
            name: what the user calls it, for messages.
            parts: see `TokenizerFiles`.
            assembly: what is built from them.

        Raises:
            Refused: the library does not accept the content.
        """
        self._name = name
        with _quiet_panics():
            _call(lambda: self._load(parts, assembly))

    def _load(self, parts: Sequence[bytes], assembly: Assembly) -> None:
        self._library, in_file, self.replaced = _build(parts, assembly)
        named = _add_tokens(self._library, assembly, in_file)
        self.named_tokens = {name: str(token) for name, token in named.items() if token is not None}
        library = self._library
        library.no_truncation()
        library.no_padding()
        self.vocabulary: dict[str, int] = library.get_vocab(with_added_tokens=True)
        prefix, suffix = self._find_ends(assembly.adds_ends)
        self.prefix, self.suffix = tuple(prefix), tuple(suffix)
        library.post_processor = None  # it does not change the ids, but can change token offsets
        library.encode_special_tokens = assembly.splits_special
        self._cleans_up = assembly.cleans_up and not isinstance(library.model, BPE)
        added = library.get_added_tokens_decoder()
        self.special_tokens = [token.content for token in added.values() if token.special]
        self.added_tokens = [(index, repr(token)) for index, token in sorted(added.items())]

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids [N] of each text."""

        def encode() -> list[Ids]:
            encoded = self._library.encode_batch_fast(texts, add_special_tokens=False)
            return [np.array(each.ids, np.int32) for each in encoded]

        return self._ask(encode)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[Ids, NDArray[np.int64]]]:
        """Return the ids [N] of each text, and the index of the first character of each token, [N]."""

        def encode() -> list[tuple[Ids, NDArray[np.int64]]]:
            encoded = self._library.encode_batch(texts, add_special_tokens=False)
            starts = ([first for first, _ in each.offsets] for each in encoded)
            return [
                (np.array(each.ids, np.int32), np.array(own, np.int64))
                for each, own in zip(encoded, starts, strict=True)
            ]

        return self._ask(encode)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without special tokens."""
        text = str(self._ask(lambda: self._library.decode([int(i) for i in ids], skip_special_tokens=True)))
        for spaced in SPACED if self._cleans_up else ():
            text = text.replace(spaced, spaced.strip() if spaced != " ' " else "'")
        return text

    def _ask(self, compute: Callable[[], T]) -> T:
        try:
            return _call(compute)
        except Refused as error:
            problem = f"the tokenizer failed ({error})"
            raise InputError(f"{self._name}: {problem}; download its files again, or name another one") from error

    def _find_ends(self, adds_ends: tuple[bool, bool] | None) -> tuple[list[int], list[int]]:
        """Return the ids that transformers adds before and after a text."""
        if adds_ends is not None:
            (adds_bos, adds_eos), named = adds_ends, self.named_tokens
            bos, eos = ([self.vocabulary[named[name]]] if name in named else [] for name in ("bos_token", "eos_token"))
            return bos * adds_bos, eos * adds_eos
        processor, self._library.post_processor = self._library.post_processor, None
        if processor is None:
            return [], []
        for probe in ("a", "0", *self._library.get_vocab(with_added_tokens=False)):
            if text := self._library.encode(probe).ids:
                break
        self._library.post_processor = processor
        whole = self._library.encode(probe)
        own = [index for index, added in enumerate(whole.special_tokens_mask) if not added]
        if whole.ids[own[0] : own[-1] + 1] != text:
            raise ValueError("its post-processor does more than to add tokens before and after a text")
        return whole.ids[: own[0]], whole.ids[own[-1] + 1 :]


def _build(parts: Sequence[bytes], assembly: Assembly) -> tuple[Tokenizer, list[tuple[int, AddedToken]], list[str]]:
    """Return the tokenizer, the added tokens of its file if the assembly does not list them, and the replaced parts."""
    pipeline, lists = assembly.pipeline, assembly.listed is not None
    if pipeline is None and lists:
        return Tokenizer.from_buffer(parts[0]), [], []
    if len(parts) == 1:
        content = json_files.parse(parts[0])
        vocabulary, merges = content["model"]["vocab"], content["model"].get("merges")
        merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges or []]
    else:
        content, vocabulary = {}, json_files.parse(parts[0])
        lines = parts[1].decode().removesuffix("\n").split("\n")
        merges = [tuple(line.removesuffix("\r").split(" ")) for line in lines if not line.startswith("#version")]
    in_file = [] if lists else [(token.pop("id"), AddedToken(**token)) for token in content.get("added_tokens") or []]
    if pipeline is None:
        return Tokenizer.from_buffer(parts[0]), in_file, []
    if not isinstance(vocabulary, dict) or (content and "merges" not in content["model"]):
        raise ValueError("its class in transformers needs a BPE with merges")
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    kept = {key: content.get(key) for key in ("post_processor", "truncation", "padding")}
    shell = {"version": "1.0", "added_tokens": [], **kept, **pipeline, "model": empty}
    library = Tokenizer.from_str(json.dumps(shell))
    own = Tokenizer.from_str(json.dumps({**shell, **{part: content.get(part) for part in ENCODING}}))
    replaced = [part for part in ENCODING if content and _state(own, part) != _state(library, part)]
    library.model = BPE(vocabulary, merges, dropout=None, **pipeline["model"])
    return library, in_file, replaced


def _state(library: Tokenizer, part: str) -> bytes | None:
    value = getattr(library, part)
    return None if value is None else value.__getstate__()


def _add_tokens(
    library: Tokenizer, assembly: Assembly, in_file: Sequence[tuple[int, AddedToken]]
) -> dict[str, str | AddedToken | None]:
    """Add the tokens that the files next to tokenizer.json name. Returns the special tokens by name.

    It follows `from_pretrained` and `TokenizersBackend.__init__` of transformers 5 step by step, because the ids of new
    tokens depend on their order.
    """
    given = assembly.more if assembly.listed is None else assembly.listed
    numbered = [*((index, make_token(token)) for index, token in given), *in_file]
    by_text = {str(token): token for _, token in numbered}
    named = {name: None if token is None else make_token(token) for name, token in assembly.named.items()}
    for name in assembly.standard:
        if named.get(name) is not None:
            named[name] = by_text.get(str(named[name]), named[name])
    if library.padding is not None:
        named.setdefault("pad_token", library.padding["pad_token"])
    named = {name: named.get(name) for name in [*assembly.standard, *named]}
    extra = [make_token(token) for token in assembly.extra]
    special = [*(token for token in named.values() if token is not None), *extra]

    tokens = [token for _, token in sorted(dict(numbered).items(), key=lambda item: item[0])]
    known = {*(token.content for token in library.get_added_tokens_decoder().values()), *map(str, tokens)}
    for token in special:
        if str(token) not in known and token not in tokens:
            tokens.append(token)
    names = {str(token) for token in named.values() if token}
    for index, token in enumerate(tokens):
        if isinstance(token, str):
            tokens[index] = AddedToken(token, special=True)
        elif not token.special and str(token) in names:
            token.special = True
    library.add_tokens(tokens)
    if assembly.adds_again:
        library.add_tokens([AddedToken(text, special=True) for text in dict.fromkeys(map(str, special))])
    if assembly.marks_again:
        library.add_special_tokens(special)
    return named


def make_token(token: str | dict[str, Any]) -> str | AddedToken:
    return token if isinstance(token, str) else AddedToken(**token)


def _call(compute: Callable[[], T]) -> T:
    """Return what the library computes. Raises Refused for an error, or a panic, of the library."""
    try:
        return compute()
    except Exception as error:
        raise _refuse(error) from error
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":  # a panic of the library is no Exception
            raise
        raise _refuse(error) from error


def _refuse(error: BaseException) -> Refused:
    return Refused(" ".join(f"{type(error).__name__}: {error}".split()))


@contextmanager
def _quiet_panics() -> Iterator[None]:
    """Hide what a panic of the library writes to standard error: a backtrace in front of the error."""
    try:
        kept = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    if sys.stderr is not None:
        sys.stderr.flush()
    try:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), 2)
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
