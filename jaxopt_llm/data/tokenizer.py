"""Text to token ids and back."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.data.config import DataConfig
from jaxopt_llm.errors import InputError

# Names of delimiters by family, most specific first: Llama 2, Mistral and Gemma, Llama 3, OLMo, Phi, Qwen, GPT-2.
_BEGINNINGS = ("<|begin_of_text|>", "<bos>", "<s>")
_ENDS = ("<|end_of_text|>", "<eos>", "</s>", "<|endoftext|>")


class Tokenizer(Protocol):
    """beginning, end: ids put around each document; `beginning` is None where the tokenizer's family has none.
    special: tokens that stand for no text. vocabulary_size: one more than the largest id. sha256: what its ids depend
    on, the delimiters included."""

    @property
    def vocabulary_size(self) -> int: ...
    @property
    def beginning(self) -> int | None: ...
    @property
    def end(self) -> int: ...
    @property
    def special(self) -> Sequence[str]: ...
    @property
    def sha256(self) -> str: ...

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.integer]]:
        """Returns ids [N] of each text, without delimiters. Raises UnicodeDecodeError where one must be UTF-8."""

    def encode_placed(self, texts: Sequence[bytes]) -> list[tuple[NDArray[np.integer], NDArray[np.int64]]]:
        """The same, each with the character [N] at which each of its tokens begins."""

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids [N] without special tokens; malformed UTF-8 becomes U+FFFD."""


class ByteTokenizer:
    """One token per byte of UTF-8: ids 0 to 255 are the bytes, the two above delimit documents."""

    beginning = 256
    end = 257
    special = ()
    vocabulary_size = 258
    sha256 = hashlib.sha256(b"bytes").hexdigest()

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.integer]]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def encode_placed(self, texts: Sequence[bytes]) -> list[tuple[NDArray[np.integer], NDArray[np.int64]]]:
        # Of a character every byte but the first is 10xxxxxx.
        return [(ids, np.cumsum((ids & 0xC0) != 0x80) - 1) for ids in self.encode(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        """Raises ValueError for a negative id."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class JsonTokenizer:
    """A Hugging Face tokenizer.json. Special tokens spelt out in a text become the tokens, as in its own library.

    Args:
        path: of the file, or of a folder that holds one.
        beginning: the token before each document; empty: as tokenizer_config.json beside the file says, else by the
            names that the known families use.
        end: likewise the token after it.

    Raises:
        InputError: no such file, no tokenizer, or no such token.
    """

    def __init__(self, path: Path, beginning: str = "", end: str = "") -> None:
        from tokenizers import Tokenizer as Library  # here: a run on bytes needs none of it

        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = file.read_bytes()
            self._library = Library.from_buffer(content)
        except Exception as error:  # the library raises nothing narrower
            raise InputError(f"data.tokenizer={path}: neither bytes nor a readable tokenizer.json ({error})") from error
        self._library.no_truncation()
        self._library.no_padding()
        self._library.post_processor = None  # no ids depend on it, but where a token begins would
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise InputError(f"data.tokenizer={path}: it has no tokens")
        self.vocabulary_size = max(vocabulary.values()) + 1  # ids may have gaps
        self.special = special = [
            str(token.content) for token in self._library.get_added_tokens_decoder().values() if token.special
        ]
        declared = _declared(file.with_name("tokenizer_config.json"))

        def delimiter(setting: str, name: str, key: str, known: tuple[str, ...]) -> int | None:
            if name and name not in vocabulary:
                raise InputError(f"data.{setting}={name}: {file} has no such token; its special ones: {special}")
            chosen = (name, declared.get(key), *(each for each in known if each in special))
            return next((vocabulary[each] for each in chosen if each in vocabulary), None)

        found = delimiter("end", end, "eos_token", _ENDS)
        if found is None:
            raise InputError(
                f"data.tokenizer={path} does not say which token ends a document; name one of its special tokens "
                f"with --data.end: {special}"
            )
        self.end: int = found
        first = delimiter("beginning", beginning, "bos_token", _BEGINNINGS)
        # GPT-2 declares one token for both, which its documents are separated by, once.
        self.beginning = None if first == self.end and not beginning else first
        self.sha256 = hashlib.sha256(content + f"\0{self.beginning}\0{self.end}".encode()).hexdigest()

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.integer]]:
        strings = [text.decode() for text in texts]
        encoded = self._library.encode_batch_fast(strings, add_special_tokens=False)
        return [np.array(each.ids, np.int32) for each in encoded]

    def encode_placed(self, texts: Sequence[bytes]) -> list[tuple[NDArray[np.integer], NDArray[np.int64]]]:
        encoded = self._library.encode_batch([text.decode() for text in texts], add_special_tokens=False)
        begins = [np.array(each.offsets, np.int64).reshape(-1, 2)[:, 0] for each in encoded]
        return [(np.array(each.ids, np.int32), begin) for each, begin in zip(encoded, begins, strict=True)]

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._library.decode([int(i) for i in ids], skip_special_tokens=True)
        return text


def load_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer that a configuration names. Raises InputError where it cannot be had."""
    if config.tokenizer != "bytes":
        return JsonTokenizer(Path(config.tokenizer), config.beginning, config.end)
    if config.beginning or config.end:
        raise InputError(
            "data.beginning and data.end name tokens of a tokenizer.json; bytes have delimiters of their own"
        )
    return ByteTokenizer()


def _declared(path: Path) -> dict[str, Any]:
    """bos_token and eos_token of a tokenizer_config.json: a name, or the description of a token."""
    settings = read_object(path)
    tokens = {key: settings.get(key) for key in ("bos_token", "eos_token")}
    return {key: token.get("content") if isinstance(token, dict) else token for key, token in tokens.items()}


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file that comes with a tokenizer; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: no JSON ({error}); mend or remove it") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: no JSON object; mend or remove it")
    return found
