"""Tokenizers: text to token ids and back."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken
from tokenizers.models import BPE

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core import hub, json_files
from jaxopt_llm.core.errors import InputError, describe_error
from jaxopt_llm.data.tokens.tokenizer_folder import (
    BACKEND,
    GENERIC_CLASS,
    MODEL_FILES,
    VOCABULARY,
    Assembly,
    TokenizerFiles,
    read_tokenizer_files,
)
from jaxopt_llm.data.tokens.tokenizer_folder import read_json_object as read_json_object

# --- Assembly of a tokenizer of the library `tokenizers` from its files, as transformers 5 does it


ENCODING = ("normalizer", "pre_tokenizer")
SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")  # clean_up_tokenization_spaces

T = TypeVar("T")


class Refused(Exception):
    """Error of the library for the content of the files, with its message."""


def _build(
    parts: Sequence[bytes], assembly: Assembly
) -> tuple[tokenizers.Tokenizer, list[tuple[int, AddedToken]], list[str]]:
    """Return the tokenizer, the added tokens of its file if the assembly does not list them, and the replaced parts."""
    pipeline, lists = assembly.pipeline, assembly.listed is not None
    if pipeline is None and lists:
        return tokenizers.Tokenizer.from_buffer(parts[0]), [], []
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
        return tokenizers.Tokenizer.from_buffer(parts[0]), in_file, []
    if not isinstance(vocabulary, dict) or (content and "merges" not in content["model"]):
        raise ValueError("its class in transformers needs a BPE with merges")
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    kept = {key: content.get(key) for key in ("post_processor", "truncation", "padding")}
    shell = {"version": "1.0", "added_tokens": [], **kept, **pipeline, "model": empty}
    library = tokenizers.Tokenizer.from_str(json.dumps(shell))
    own = tokenizers.Tokenizer.from_str(json.dumps({**shell, **{part: content.get(part) for part in ENCODING}}))
    replaced = [part for part in ENCODING if content and _state(own, part) != _state(library, part)]
    library.model = BPE(vocabulary, merges, dropout=None, **pipeline["model"])
    return library, in_file, replaced


def _state(library: tokenizers.Tokenizer, part: str) -> bytes | None:
    value = getattr(library, part)
    return None if value is None else value.__getstate__()


def _add_tokens(
    library: tokenizers.Tokenizer, assembly: Assembly, in_file: Sequence[tuple[int, AddedToken]]
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


# --- Tokenizers of runs


# EOS of a tokenizer.json without other files, most specific first: Llama 3, Gemma, Llama 2 and Mistral, GPT-2.
_EOS_NAMES = ("<|end_of_text|>", "<eos>", "</s>", "<|endoftext|>")


class Tokenizer(Protocol):
    """Protocol of a tokenizer.

    Attributes:
        vocabulary_size: the largest id plus 1.
        prefix: ids before each document: the BOS token, if transformers adds one.
        suffix: ids after each document, of which the last is EOS.
        bos: the first id of `prefix`, or None.
        eos: the last id of `suffix`.
        eos_ids: ids that end generated text: EOS, and others if the tokenizer declares several.
        special_tokens: tokens that do not stand for text.
        named_tokens: special tokens by their names in transformers: bos_token, eos_token, ...
        vocabulary: id of each token; empty if the tokens have no names.
        sha256: hash of everything that the ids depend on, including `prefix` and `suffix`.
        class_name: the tokenizer_class with which transformers reads its files in the same way.
        note: what its files do not show about the ids, or an empty text.
    """

    vocabulary_size: int
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    bos: int | None
    eos: int
    eos_ids: Sequence[int]
    special_tokens: Sequence[str]
    named_tokens: Mapping[str, str]
    vocabulary: Mapping[str, int]
    sha256: str
    class_name: str
    note: str

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.integer]]:
        """Return the ids [N] of each text, without `prefix` and `suffix`.

        Raises UnicodeDecodeError if the tokenizer requires UTF-8 and a text is not valid UTF-8.
        """

    def encode_with_offsets(self, texts: Sequence[bytes]) -> list[tuple[NDArray[np.integer], NDArray[np.int64]]]:
        """Return the ids [N] of each text, and the index of the first character of each token, [N]."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids [N], without special tokens. Invalid UTF-8 becomes U+FFFD."""


class ByteTokenizer:
    """Tokenizer with one token per byte of UTF-8: ids 0 to 255 are the bytes, 256 is BOS, 257 is EOS."""

    prefix: tuple[int, ...] = (256,)
    suffix: tuple[int, ...] = (257,)
    bos: int | None = 256
    eos = 257
    eos_ids: Sequence[int] = (257,)
    special_tokens: Sequence[str] = ()
    named_tokens: Mapping[str, str] = MappingProxyType({})
    vocabulary: Mapping[str, int] = MappingProxyType({})
    vocabulary_size = 258
    sha256 = hashlib.sha256(b"bytes").hexdigest()
    class_name = GENERIC_CLASS
    note = ""

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.integer]]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def encode_with_offsets(self, texts: Sequence[bytes]) -> list[tuple[NDArray[np.integer], NDArray[np.int64]]]:
        # In UTF-8 every byte of a character except the first has the form 10xxxxxx.
        return [(ids, np.cumsum((ids & 0xC0) != 0x80) - 1) for ids in self.encode(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids [N]. Raises ValueError for a negative id."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class JsonTokenizer:
    """Tokenizer of a Hugging Face folder: a tokenizer.json and the files next to it, read as transformers 5 reads them.

    A special token that is spelled out in a text becomes that token, as in transformers. Any thread may call it.

    Args:
        path: the tokenizer.json, or the folder that holds it.
        bos: token before each document; if empty, the tokens that transformers adds.
        eos: token after each document; if empty, the one that the folder declares.

    Raises:
        InputError: the file does not exist, is not a tokenizer, or does not have such a token.
    """

    def __init__(self, path: Path, bos: str = "", eos: str = "") -> None:
        file = path / VOCABULARY if path.is_dir() else path
        self._name = f"data.tokenizer={path}"
        try:
            files = read_tokenizer_files(file, self._name)
            with _quiet_panics():
                prefix, suffix = _call(lambda: self._load(files, file))
        except (OSError, ValueError, Refused) as error:
            remedy = "name a tokenizer.json, or a folder that holds one, with --data.tokenizer"
            problem = f"not a readable tokenizer.json ({describe_error(error)})"
            raise InputError(f"{self._name}: {problem}; {remedy}") from error
        if not self.vocabulary:
            raise InputError(f"{self._name}: the vocabulary is empty; name another tokenizer")
        self.vocabulary_size = max(self.vocabulary.values()) + 1  # ids may have gaps
        for setting, token in {"bos": bos, "eos": eos}.items():
            if token and token not in self.vocabulary:
                choices = f"one of its tokens, for example a special token: {self.special_tokens}"
                raise InputError(f"data.{setting}={token}: {file} has no such token; choose {choices}")
        self.eos_ids: Sequence[int] = [self.vocabulary[eos]] if eos else self._find_eos_ids(files, path)
        self.eos: int = self.eos_ids[0]
        self.prefix: tuple[int, ...] = (self.vocabulary[bos],) if bos else tuple(prefix)
        self.bos = self.prefix[0] if self.prefix else None
        ends = () if eos else tuple(suffix)
        self.suffix: tuple[int, ...] = ends if ends[-1:] == (self.eos,) else (*ends, self.eos)
        self.class_name = GENERIC_CLASS if files.chosen == BACKEND else files.chosen
        added = self._library.get_added_tokens_decoder()
        described = [(index, repr(token)) for index, token in sorted(added.items())]
        pipeline, splits = files.assembly.pipeline, files.assembly.splits_special
        facts = (pipeline, splits, described, self.prefix, self.suffix, *map(len, files.parts))
        self.sha256 = hashlib.sha256(b"".join([*files.parts, json.dumps(facts).encode()])).hexdigest()

    def _load(self, files: TokenizerFiles, file: Path) -> tuple[list[int], list[int]]:
        """Put the tokenizer together. Return the ids that transformers adds before and after a text."""
        assembly = files.assembly
        self._library, in_file, replaced = _build(files.parts, assembly)
        parts = " and ".join(replaced)
        self.note = parts and f"{files.chosen} of transformers 5 replaces the {parts} of {file.name}"
        library, named = self._library, _add_tokens(self._library, assembly, in_file)
        self.named_tokens: Mapping[str, str] = {name: str(token) for name, token in named.items() if token is not None}
        library.no_truncation()
        library.no_padding()
        self.vocabulary: Mapping[str, int] = library.get_vocab(with_added_tokens=True)
        ends = self._find_ends(assembly.adds_ends)
        library.post_processor = None  # it does not change the ids, but can change token offsets
        library.encode_special_tokens = assembly.splits_special
        self._cleans_up = assembly.cleans_up and not isinstance(library.model, BPE)
        added = library.get_added_tokens_decoder().values()
        self.special_tokens: Sequence[str] = [token.content for token in added if token.special]
        return ends

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

    def _find_eos_ids(self, files: TokenizerFiles, path: Path) -> list[int]:
        """Return the ids of eos_token. If there is none: eos_token_id of the model's files, or a common name."""
        vocabulary = self.vocabulary
        if declared := [vocabulary[token] for token in files.eos_tokens if token in vocabulary]:
            return declared
        if configured := read_eos_ids(path if path.is_dir() else path.parent, self.vocabulary_size):
            return configured
        if known := [vocabulary[token] for token in _EOS_NAMES if token in self.special_tokens]:
            return known[:1]
        raise InputError(
            f"{self._name}: the tokenizer does not declare an EOS token; declare it as eos_token in "
            f"tokenizer_config.json, or set --data.eos to one of its special tokens: {self.special_tokens}"
        )

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.integer]]:
        decoded = [text.decode() for text in texts]

        def encode() -> list[NDArray[np.integer]]:
            encoded = self._library.encode_batch_fast(decoded, add_special_tokens=False)
            return [np.array(each.ids, np.int32) for each in encoded]  # fails for an id beyond 32 bits

        return self._ask(encode)

    def encode_with_offsets(self, texts: Sequence[bytes]) -> list[tuple[NDArray[np.integer], NDArray[np.int64]]]:
        decoded = [text.decode() for text in texts]

        def encode() -> list[tuple[NDArray[np.integer], NDArray[np.int64]]]:
            encoded = self._library.encode_batch(decoded, add_special_tokens=False)
            starts = ([first for first, _ in each.offsets] for each in encoded)
            pairs = zip(encoded, starts, strict=True)
            return [(np.array(each.ids, np.int32), np.array(own, np.int64)) for each, own in pairs]

        return self._ask(encode)

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._ask(lambda: self._library.decode([int(i) for i in ids], skip_special_tokens=True))
        for spaced in SPACED if self._cleans_up else ():
            text = text.replace(spaced, spaced.strip() if spaced != " ' " else "'")
        return text

    def _ask(self, compute: Callable[[], T]) -> T:
        try:
            return _call(compute)
        except Refused as error:
            problem = f"the tokenizer failed ({error})"
            raise InputError(f"{self._name}: {problem}; download its files again, or name another one") from error


def find_tokenizer_folder(config: DataConfig) -> Path | None:
    """Return the folder with the files of the tokenizer, or None for the tokenizer of bytes."""
    if config.uses_bytes:
        return None
    path = hub.find_folder(config.tokenizer, "data.tokenizer=", weights=False)
    return path if path.is_dir() else path.parent


def load_tokenizer(config: DataConfig) -> Tokenizer:
    """Load the tokenizer that `data.tokenizer` names. Raises InputError if it cannot be loaded."""
    if not config.uses_bytes:
        path = hub.find_folder(config.tokenizer, "data.tokenizer=", weights=False)
        return JsonTokenizer(path, config.bos, config.eos)
    if config.bos or config.eos:
        raise InputError("data.bos and data.eos do not apply to data.tokenizer=bytes, which has its own: remove them")
    return ByteTokenizer()


def read_eos_ids(folder: Path, vocabulary_size: int) -> list[int]:
    """Return eos_token_id of generation_config.json in a folder or, if that has none, of config.json.

    Raises InputError if a file names an invalid id.
    """
    for file in (folder / name for name in MODEL_FILES):
        value = read_json_object(file).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if any(type(i) is not int or not 0 <= i < vocabulary_size for i in ids):
            most = f"the tokenizer's vocabulary size {vocabulary_size}"
            raise InputError(f"{file}: eos_token_id={value!r}: must be a token id or a list of them, below {most}")
        return ids
    return []
