"""Rows of data files: their content as text or as a conversation."""

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxopt_llm.config import DataConfig
from jaxopt_llm.data import conversation
from jaxopt_llm.data.find import File
from jaxopt_llm.data.skipped import Malformed, Position

_names = reprlib.Repr()
_names.maxlist, _names.maxstring = 40, 60  # a file without a header has its first texts as column names


@dataclass(frozen=True)
class Part:
    """Part of the documents of a file.

    It contains the documents that start in bytes [first, last) of a JSONL file or of a text file with a separator, or
    row groups [first, last) of a Parquet file. A file that can only be read from its start is one part.

    Attributes:
        row: number of rows before the part; only known for a Parquet file.
    """

    file: File
    first: int
    last: int
    row: int = 0


Row = tuple[Position, bytes | Malformed]


class NoColumn(Malformed):
    pass


def encode_row(row: Any, form: str, config: DataConfig) -> bytes:
    """Return the content of a row: the text of its column, or the conversation as JSON.

    form: form of the conversation, or `text`. Raises Malformed if the row is not valid.
    """
    if isinstance(row, Malformed):
        raise row
    if not isinstance(row, dict):
        raise Malformed("not a JSON object")
    if form != "text":
        return encode_utf8(conversation.normalize_conversation(row, form))
    if config.text_field not in row:
        raise NoColumn(f"without the column {config.text_field!r}", describe_missing_column(sorted(row), config))
    return encode_text(row[config.text_field], config)


def encode_text(text: Any, config: DataConfig) -> bytes:
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        raise Malformed(f"without text in column {config.text_field!r}", f"it holds {kind}")
    return encode_utf8(text)


def encode_utf8(text: str) -> bytes:
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can contain
        return text.encode(errors="surrogatepass")


def describe_missing_column(columns: Iterable[str], config: DataConfig) -> str:
    names = list(columns)
    chat = ", or read conversations with --data.content chat" if conversation.matching_forms(names) else ""
    found = f"no column {config.text_field!r} among {_names.repr(names)}"
    return f"{found}; name the text column with --data.text_field{chat}"
