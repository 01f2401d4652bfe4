"""Tokenizers: text to token ids and back."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core import hub, json_files
from jaxopt_llm.core.errors import InputError, describe_error
from jaxopt_llm.core.files import check_is_no_pointer, read_file
from jaxopt_llm.data.bounded_tokenizer import BoundedTokenizer, Refused

# BOS and EOS names by model family, most specific first: Llama 2, Mistral and Gemma, Llama 3, OLMo, Phi, Qwen, GPT-2.
_BOS_NAMES = ("<|begin_of_text|>", "<bos>", "<s>")
_EOS_NAMES = ("<|end_of_text|>", "<eos>", "</s>", "<|endoftext|>")
MAX_TOKENIZER_BYTES = 2**28  # published ones have at most 35 MB


class Tokenizer(Protocol):
    """Protocol of a tokenizer.

    Attributes:
        vocabulary_size: the largest id plus 1.
        bos: id before each document; None if the tokenizer's family has no BOS token.
        eos: id after each document.
        special_tokens: tokens that do not stand for text.
        vocabulary: id of each token; empty if the tokens have no names.
        sha256: hash of everything that the ids depend on, including BOS and EOS.
    """

    vocabulary_size: int
    bos: int | None
    eos: int
    special_tokens: Sequence[str]
    vocabulary: Mapping[str, int]
    sha256: str

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.integer]]:
        """Return the ids [N] of each text, without BOS and EOS.

        Raises UnicodeDecodeError if the tokenizer requires UTF-8 and a text is not valid UTF-8.
        """

    def encode_with_offsets(self, texts: Sequence[bytes]) -> list[tuple[NDArray[np.integer], NDArray[np.int64]]]:
        """Return the ids [N] of each text, and the index of the first character of each token, [N]."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids [N], without special tokens. Invalid UTF-8 becomes U+FFFD."""


class ByteTokenizer:
    """Tokenizer with one token per byte of UTF-8: ids 0 to 255 are the bytes, 256 is BOS, 257 is EOS."""

    bos: int | None = 256
    eos = 257
    special_tokens: Sequence[str] = ()
    vocabulary: Mapping[str, int] = MappingProxyType({})
    vocabulary_size = 258
    sha256 = hashlib.sha256(b"bytes").hexdigest()

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.integer]]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def encode_with_offsets(self, texts: Sequence[bytes]) -> list[tuple[NDArray[np.integer], NDArray[np.int64]]]:
        # In UTF-8 every byte of a character except the first has the form 10xxxxxx.
        return [(ids, np.cumsum((ids & 0xC0) != 0x80) - 1) for ids in self.encode(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids [N]. Raises ValueError for a negative id."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class JsonTokenizer:
    """Tokenizer of a Hugging Face tokenizer.json.

    The library runs in a process of its own, which a file can end without ending this one.

    A special token that is spelled out in a text becomes that token, as in the `tokenizers` library.

    Args:
        path: the file, or a folder that holds it.
        bos: token before each document. If empty, tokenizer_config.json next to the file names it; otherwise the
            names that the known model families use are tried.
        eos: token after each document; found in the same way if empty.

    Raises:
        InputError: the file does not exist, is not a tokenizer, or does not have such a token.
    """

    def __init__(self, path: Path, bos: str = "", eos: str = "") -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            check_is_no_pointer(file)
            content = read_file(file, MAX_TOKENIZER_BYTES)
            self._library = BoundedTokenizer(f"data.tokenizer={path}", content)
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
        declared = declared_tokens(read_json_object(file.with_name("tokenizer_config.json")))

        def find_id(setting: str, name: str, key: str, known: tuple[str, ...]) -> int | None:
            if name and name not in vocabulary:
                choices = f"one of its tokens, for example a special token: {self.special_tokens}"
                raise InputError(f"data.{setting}={name}: {file} has no such token; choose {choices}")
            names = (name, declared.get(key), *(token for token in known if token in self.special_tokens))
            return next((vocabulary[token] for token in names if token in vocabulary), None)

        eos_id = find_id("eos", eos, "eos_token", _EOS_NAMES)
        if eos_id is None:
            raise InputError(
                f"data.tokenizer={path}: the tokenizer does not declare an EOS token; declare it as eos_token in "
                f"tokenizer_config.json, or set --data.eos to one of its special tokens: {self.special_tokens}"
            )
        self.eos: int = eos_id
        bos_id = find_id("bos", bos, "bos_token", _BOS_NAMES)
        # GPT-2 declares one token as both BOS and EOS. It separates documents, so it is written once, as EOS.
        self.bos = None if bos_id == self.eos and not bos else bos_id
        self.sha256 = hashlib.sha256(content + f"\0{self.bos}\0{self.eos}".encode()).hexdigest()

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.integer]]:
        for text in texts:
            text.decode()  # raises UnicodeDecodeError
        return [*self._library.encode(texts)]

    def encode_with_offsets(self, texts: Sequence[bytes]) -> list[tuple[NDArray[np.integer], NDArray[np.int64]]]:
        for text in texts:
            text.decode()
        return [*self._library.encode_with_offsets(texts)]

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


def declared_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Return the texts of bos_token, eos_token, ... of a tokenizer_config.json, which may give a token as a dict."""
    tokens = {key: token for key, token in settings.items() if key.endswith("_token")}
    texts = {key: token.get("content") if isinstance(token, dict) else token for key, token in tokens.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file next to a tokenizer, or an empty dict if there is no such file."""
    if not path.is_file():
        return {}
    return json_files.read_object(path, "repair or remove the file")
