"""Tokenizers: text to token ids and back."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core import hub
from jaxopt_llm.core.errors import InputError, describe_error
from jaxopt_llm.data.tokens.library_tokenizer import LibraryTokenizer, Refused
from jaxopt_llm.data.tokens.tokenizer_classes import BACKEND, GENERIC_CLASS
from jaxopt_llm.data.tokens.tokenizer_folder import MODEL_FILES, VOCABULARY, TokenizerFiles, read_tokenizer_files
from jaxopt_llm.data.tokens.tokenizer_folder import read_json_object as read_json_object

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

    A special token that is spelled out in a text becomes that token, as in transformers.

    Args:
        path: the tokenizer.json, or the folder that holds it.
        bos: token before each document; if empty, the tokens that transformers adds.
        eos: token after each document; if empty, the one that the folder declares.

    Raises:
        InputError: the file does not exist, is not a tokenizer, or does not have such a token.
    """

    def __init__(self, path: Path, bos: str = "", eos: str = "") -> None:
        file = path / VOCABULARY if path.is_dir() else path
        try:
            files = read_tokenizer_files(file, f"data.tokenizer={path}")
            self._library = LibraryTokenizer(f"data.tokenizer={path}", files.parts, files.assembly)
        except (OSError, ValueError, Refused) as error:
            remedy = "name a tokenizer.json, or a folder that holds one, with --data.tokenizer"
            raise InputError(
                f"data.tokenizer={path}: not a readable tokenizer.json ({describe_error(error)}); {remedy}"
            ) from error
        vocabulary = self._library.vocabulary
        self.vocabulary: Mapping[str, int] = vocabulary
        if not vocabulary:
            raise InputError(f"data.tokenizer={path}: the vocabulary is empty; name another tokenizer")
        self.vocabulary_size = max(vocabulary.values()) + 1  # ids may have gaps
        self.special_tokens: Sequence[str] = self._library.special_tokens
        self.named_tokens: Mapping[str, str] = self._library.named_tokens
        for setting, token in {"bos": bos, "eos": eos}.items():
            if token and token not in vocabulary:
                choices = f"one of its tokens, for example a special token: {self.special_tokens}"
                raise InputError(f"data.{setting}={token}: {file} has no such token; choose {choices}")
        self.eos_ids: Sequence[int] = [vocabulary[eos]] if eos else self._find_eos_ids(files, path)
        self.eos: int = self.eos_ids[0]
        self.prefix: tuple[int, ...] = (vocabulary[bos],) if bos else self._library.prefix
        self.bos = self.prefix[0] if self.prefix else None
        suffix = () if eos else self._library.suffix
        self.suffix: tuple[int, ...] = suffix if suffix[-1:] == (self.eos,) else (*suffix, self.eos)
        self.class_name = GENERIC_CLASS if files.chosen == BACKEND else files.chosen
        replaced = " and ".join(self._library.replaced)
        self.note = replaced and f"{files.chosen} of transformers 5 replaces the {replaced} of {file.name}"
        assembly, added = files.assembly, self._library.added_tokens
        told = (assembly.pipeline, assembly.splits_special, added, self.prefix, self.suffix, *map(len, files.parts))
        self.sha256 = hashlib.sha256(b"".join([*files.parts, json.dumps(told).encode()])).hexdigest()

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
            f"data.tokenizer={path}: the tokenizer does not declare an EOS token; declare it as eos_token in "
            f"tokenizer_config.json, or set --data.eos to one of its special tokens: {self.special_tokens}"
        )

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.integer]]:
        return [*self._library.encode([text.decode() for text in texts])]

    def encode_with_offsets(self, texts: Sequence[bytes]) -> list[tuple[NDArray[np.integer], NDArray[np.int64]]]:
        return [*self._library.encode_with_offsets([text.decode() for text in texts])]

    def decode(self, ids: Iterable[int]) -> str:
        return self._library.decode(ids)


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
