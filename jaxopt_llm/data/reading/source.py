"""Documents of text, JSON, CSV, Parquet and Arrow files."""

import codecs
import math
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from jaxopt_llm.config import DataConfig
from jaxopt_llm.config.data import PREFERENCE, UNPAIRED, Pairs
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading import files
from jaxopt_llm.data.reading.conversation import SIDES
from jaxopt_llm.data.reading.files import File, is_compressed
from jaxopt_llm.data.reading.json_rows import holds_lines, read_json_rows
from jaxopt_llm.data.reading.rows import Encoded, Part, Row, RowEncoder
from jaxopt_llm.data.reading.skipped import Malformed, Position, Skipped
from jaxopt_llm.data.reading.table_rows import open_parquet, read_arrow_rows, read_csv_rows, read_parquet_rows

# --- Text files


_BLOCK = 2**18  # bytes read, or decoded, at once


def read_text_rows(part: Part, encoder: RowEncoder) -> Iterator[Row]:
    config = encoder.config
    with files.open_stream(part.file) as source:
        if not config.separator:
            fits = not is_compressed(part.file) and part.last <= files.MAX_DOCUMENT_BYTES
            content = source.read(-1 if fits else files.MAX_DOCUMENT_BYTES + 1)
            yield Position(part.file), Encoded(files.check_size(part.file, content))
            return
        separator = config.separator.encode()
        is_last_part = is_compressed(part.file) or part.last == part.file.path.stat().st_size
        last = math.inf if is_last_part else part.last  # an empty document may start at the end of the file
        for start, document in _split_text(source, part.first, last, separator, part.file):
            yield Position(part.file, "byte", start), Encoded(document)


def _split_text(source: BinaryIO, first: int, last: float, separator: bytes, file: File) -> Iterator[tuple[int, bytes]]:
    """Yield the start and content of the documents that start in bytes [first, last).

    The documents are the same as if the complete file had been split at once.
    """
    at = _find_safe_start(source, first - len(separator), separator) if first else 0
    if first:
        source.seek(at)
    rest, searched = bytearray(), 0  # bytes from `at`, and how many of them are known to hold no separator
    for block in iter(lambda: source.read(_BLOCK), b""):
        rest += block
        done = 0
        while (end := rest.find(separator, searched)) >= 0:
            if first <= at + done:
                yield at + done, bytes(rest[done:end])
            searched = done = end + len(separator)
            if at + done >= last:
                return
        if at + done < first and at + len(rest) - len(separator) >= last:
            return  # one document covers the whole part
        del rest[:done]
        at, searched = at + done, max(len(rest) - len(separator) + 1, 0)
        if len(rest) > files.MAX_DOCUMENT_BYTES:
            files.reject_size(Position(file, "byte", at))
    if first <= at:
        yield at, bytes(rest)


def _find_safe_start(source: BinaryIO, at: int, separator: bytes) -> int:
    """Return the last byte up to `at` that is certainly not inside a separator.

    Occurrences of a separator can overlap, for example two newlines in a sequence of three, and then the first one
    counts. So only an occurrence without another one just before it is certainly a separator.
    """
    while at > 0:
        first = max(at - len(separator) + 1, 0)
        source.seek(first)
        found = source.read(at - first + len(separator) - 1).rfind(separator)
        if found < 0:
            return at
        at = first + found
    return 0


# --- All formats


PART_BYTES = 2**22  # size of the parts of a file that can be divided
READERS = {
    "text": read_text_rows,
    "jsonl": read_json_rows,
    "json": read_json_rows,
    "csv": read_csv_rows,
    "parquet": read_parquet_rows,
    "arrow": read_arrow_rows,
}
FORMATS = tuple(READERS)  # of files whose documents are not yet tokenized

# Installed packages, tests, and pydoc's help text, a generated file that would dominate a held-out split.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"})
# Files that the build or the administrator writes: they differ between machines with the same Python.
_LOCAL_FOLDER_PREFIX = "config-"
_LOCAL_FILE_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Document:
    """Text of one document.

    Attributes:
        name: file and position, for messages. Its text may be expensive: see `Position`.
        content: the text, UTF-8.
        key: its hash decides whether the document is held out. It is the content or the name.
        spans: in a conversation, the ranges [begin, end) of characters that the loss counts, () before it is rendered;
            None for other documents.
        side: side of a document of a pair, empty for others: `chosen`, then `rejected`; or `desirable` or
            `undesirable`, then `mismatched`.
        label: its label (`DataConfig.has_labels`); None without labels.
        row: the row of a prompt as JSON, for functions that reward answers; None for other documents.
        is_joined: whether a conversation was written without a template, so that it gets the tokenizer's BOS and EOS.
    """

    name: str | Position
    content: bytes
    key: bytes
    spans: tuple[tuple[int, int], ...] | None = None
    side: str = ""
    label: float | None = None
    row: bytes | None = None
    is_joined: bool = False

    @property
    def prompt(self) -> str:
        """Text of a rendered conversation up to the first range that the loss counts."""
        assert self.spans
        return self.content.decode()[: self.spans[0][0]]

    @property
    def pairs(self) -> Pairs:
        """Kind of the pair that the document belongs to."""
        return "" if not self.side else PREFERENCE if self.side in SIDES else UNPAIRED


def split_into_parts(file: File, config: DataConfig) -> list[Part]:
    """Split a file into parts that can be read and tokenized independently. They depend only on the file."""
    if file.format == "parquet":
        return _split_parquet(file)
    size = file.path.stat().st_size
    by_lines = file.format in ("jsonl", "json") and not is_compressed(file) and holds_lines(file)
    if not (by_lines or (file.format == "text" and config.separator and not is_compressed(file))):
        return [Part(file, 0, size)]
    return [Part(file, first, min(first + PART_BYTES, size)) for first in range(0, size, PART_BYTES)]


def _split_parquet(file: File) -> list[Part]:
    metadata, parts, row = open_parquet(file).metadata, [], 0
    for group in range(metadata.num_row_groups):
        parts.append(Part(file, group, group + 1, row))
        row += metadata.row_group(group).num_rows
    return parts


def read_documents(part: Part, config: DataConfig, skipped: Skipped, template: str | None = "") -> Iterator[Document]:
    """Yield the documents of a part as non-empty UTF-8, and add what is not read to `skipped`.

    The content of a conversation is JSON, as `normalize_conversation` returns it.

    Args:
        part: the part of a file.
        config: the settings.
        skipped: counts skipped documents, and fields that nothing reads.
        template: source of the chat template, which reads fields of conversations; None: see `RowEncoder`.

    Raises:
        InputError: a document is malformed and data.malformed is `error`, the text column is missing, or the file is
            damaged.
    """
    if part.file.format == "text" and config.content != "text":
        needed = f"data.content={config.content} requires JSONL, JSON, CSV, Parquet or Arrow files"
        raise InputError(f"{part.file}: {needed}; convert the file, or set --data.content text")
    if part.file.format == "text" and config.label_field:
        needed = f"data.label_field={config.label_field} requires JSONL, JSON, CSV, Parquet or Arrow files"
        raise InputError(f"{part.file}: {needed}; convert the file")
    try:
        for where, row in READERS[part.file.format](part, RowEncoder(config, skipped, template)):
            if isinstance(row, Malformed):
                reject(where, row, config)
                skipped.add(row.reason, where)
                continue
            content, label, is_conversation = row
            if problem := _find_utf8_error(content):
                reject(where, f"not UTF-8 ({problem} of the text)", config)
                skipped.add("not UTF-8" if config.malformed == "skip" else "not UTF-8, replaced", where)
                if config.malformed == "skip":
                    continue
                content = content.decode(errors="replace").encode()
            if content:
                if config.content == "chat" and not is_conversation:
                    skipped.add_text(where)
                yield Document(where, content, content, () if is_conversation else None, label=label)
            else:
                skipped.add("empty")
    except (OSError, EOFError) as error:
        raise InputError(f"{part.file}: cannot be read ({error}); check that it is complete") from error


def read_standard_library() -> list[Document]:
    """Return the source files of Python's standard library, about 11 MB of text that needs no download.

    These are the `.py` files of the running interpreter, sorted by name, without installed packages, tests, generated
    files and empty files. The text depends on the Python version. The held-out split depends only on the relative
    paths, so two versions hold out the same files.

    Raises:
        InputError: the interpreter comes without source files (some embedded builds).
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        # Modified in place, so that os.walk does not descend: site-packages can be 100 times as large as the library.
        subfolders[:] = [s for s in subfolders if s not in _SKIPPED_FOLDERS and not s.startswith(_LOCAL_FOLDER_PREFIX)]
        paths += [Path(folder, n) for n in names if n.endswith(".py") and not n.startswith(_LOCAL_FILE_PREFIXES)]
    named = sorted((path.relative_to(root).as_posix(), path) for path in paths)
    documents = [Document(name, path.read_bytes(), name.encode()) for name, path in named]
    documents = [document for document in documents if document.content]
    if not documents:
        raise InputError(f"no .py files of the standard library under {root}: use a Python that includes its sources")
    return documents


def reject(where: str | Position, problem: object, config: DataConfig) -> None:
    """Raise InputError for a malformed document if `data.malformed` is `error`."""
    if config.malformed == "error":
        raise InputError(f"{where}: {problem}; repair the document, or set --data.malformed to skip or replace")


def _find_utf8_error(content: bytes) -> str | None:
    """Return the problem and the byte of the first invalid UTF-8, or None.

    Decodes one block at a time, because all of the text can take four times the memory of its bytes.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(content), _BLOCK):
        pending = len(decoder.getstate()[0])  # first bytes of a character, which the previous block ends with
        try:
            decoder.decode(content[start : start + _BLOCK], final=start + _BLOCK >= len(content))
        except UnicodeDecodeError as error:
            return f"{error.reason} at byte {start - pending + error.start}"
    return None
