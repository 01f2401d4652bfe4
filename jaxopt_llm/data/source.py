"""Documents in text, JSONL and Parquet files."""

import codecs
import io
import json
import math
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data import conversation
from jaxopt_llm.data.conversation import Malformed
from jaxopt_llm.data.find import File, is_compressed

PART_BYTES = 2**22  # size of the parts of a file that can be divided
MAX_DOCUMENT_BYTES = 2**30  # memory holds several copies of a document
# First rows of a JSONL file. At least one of them must have the text column, and the first JSON object among them tells
# the form of the conversations.
_FIRST_ROWS = 100
_BLOCK = 2**18  # bytes read at once in the search for documents

# Installed packages, tests, and pydoc's help text, a generated file that would dominate a held-out split.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"})
# Files that the build or the administrator writes: they differ between machines with the same Python.
_LOCAL_FOLDER_PREFIX = "config-"
_LOCAL_FILE_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Part:
    """Part of the documents of a file.

    It contains the documents that start in bytes [first, last) of a JSONL file or of a text file with a separator, or
    row groups [first, last) of a Parquet file. A file that can only be read from its start is one part.
    """

    file: File
    first: int
    last: int


@dataclass(frozen=True)
class Document:
    """Text of one document.

    Attributes:
        name: file and position, for messages.
        content: the text, UTF-8.
        key: its hash decides whether the document is held out. It is the content or the name.
        spans: in a conversation, the ranges [begin, end) of characters that the loss counts; None for other documents.
    """

    name: str
    content: bytes
    key: bytes
    spans: tuple[tuple[int, int], ...] | None = None


Row = tuple[str, bytes | Malformed]  # position in the file, and content


def split_into_parts(file: File, config: DataConfig) -> list[Part]:
    """Split a file into parts that can be read and tokenized independently. They depend only on the file."""
    if file.format == "parquet":
        return [Part(file, group, group + 1) for group in range(_open_parquet(file).num_row_groups)]
    size = file.path.stat().st_size
    if is_compressed(file) or not (file.format == "jsonl" or config.separator):
        return [Part(file, 0, size)]
    return [Part(file, first, min(first + PART_BYTES, size)) for first in range(0, size, PART_BYTES)]


def read_documents(part: Part, config: DataConfig, skipped: Counter[str]) -> Iterator[Document]:
    """Yield the documents of a part as non-empty UTF-8, and count skipped documents in `skipped` by reason.

    The content of a conversation is JSON, as `normalize_conversation` returns it.

    Raises:
        InputError: a document is malformed and data.malformed is `error`, the text column is missing, or the file is
            damaged.
    """
    read_rows = {"text": _read_text_rows, "jsonl": _read_jsonl_rows, "parquet": _read_parquet_rows}[part.file.format]
    if part.file.format == "text" and config.content != "text":
        needed = f"data.content={config.content} requires JSONL or Parquet files"
        raise InputError(f"{part.file.path}: {needed}; convert the file, or set data.content=text")
    try:
        for where, content in read_rows(part, config):
            if isinstance(content, Malformed):
                reject(f"{where}: {content}", config)
                skipped["truncated or without text" if config.content == "text" else "not a conversation"] += 1
                continue
            if problem := _find_utf8_error(content):
                reject(f"{where}: not UTF-8 ({problem} of the text)", config)
                skipped["not UTF-8" if config.malformed == "skip" else "not UTF-8, replaced"] += 1
                if config.malformed == "skip":
                    continue
                content = content.decode(errors="replace").encode()
            if content:
                yield Document(where, content, content)
            else:
                skipped["empty"] += 1
    except (OSError, EOFError) as error:
        raise InputError(f"{part.file.path}: cannot be read ({error}); check that it is complete") from error


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


def reject(problem: str, config: DataConfig) -> None:
    """Raise InputError for a malformed document if `data.malformed` is `error`."""
    if config.malformed == "error":
        raise InputError(f"{problem}; repair the document, or set data.malformed to skip or replace")


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


def _open_stream(file: File) -> BinaryIO:
    if not is_compressed(file):
        return file.path.open("rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(file.path), compression="detect"))


def _read_text_rows(part: Part, config: DataConfig) -> Iterator[Row]:
    name = part.file.name
    with _open_stream(part.file) as stream:
        if not config.separator:
            fits = not is_compressed(part.file) and part.last <= MAX_DOCUMENT_BYTES
            yield name, _check_size(name, stream.read(-1 if fits else MAX_DOCUMENT_BYTES + 1))
            return
        separator = config.separator.encode()
        is_last_part = is_compressed(part.file) or part.last == part.file.path.stat().st_size
        last = math.inf if is_last_part else part.last  # an empty document may start at the end of the file
        for start, document in _split_text(stream, part.first, last, separator, name):
            yield f"{name}, byte {start}", document


def _split_text(stream: BinaryIO, first: int, last: float, separator: bytes, name: str) -> Iterator[tuple[int, bytes]]:
    """Yield the start and content of the documents that start in bytes [first, last).

    The documents are the same as if the complete file had been split at once.
    """
    at = _find_safe_start(stream, first - len(separator), separator) if first else 0
    if first:
        stream.seek(at)
    rest, searched = bytearray(), 0  # bytes from `at`, and how many of them are known to hold no separator
    for block in iter(lambda: stream.read(_BLOCK), b""):
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
        if len(rest) > MAX_DOCUMENT_BYTES:
            _check_size(f"{name}, byte {at}", rest)
    if first <= at:
        yield at, bytes(rest)


def _find_safe_start(stream: BinaryIO, at: int, separator: bytes) -> int:
    """Return the last byte up to `at` that is certainly not inside a separator.

    Occurrences of a separator can overlap, for example two newlines in a sequence of three, and then the first one
    counts. So only an occurrence without another one just before it is certainly a separator.
    """
    while at > 0:
        first = max(at - len(separator) + 1, 0)
        stream.seek(first)
        found = stream.read(at - first + len(separator) - 1).rfind(separator)
        if found < 0:
            return at
        at = first + found
    return 0


def _check_size(where: str, document: bytes | bytearray) -> bytes:
    if len(document) > MAX_DOCUMENT_BYTES:
        problem = f"a document is larger than {MAX_DOCUMENT_BYTES / 2**30:g} GiB and must fit in memory"
        raise InputError(f"{where}: {problem}; split it (a text file: with data.separator)")
    return bytes(document)


def _read_jsonl_rows(part: Part, config: DataConfig) -> Iterator[Row]:
    at, stop = part.first, math.inf if is_compressed(part.file) else part.last
    form = "text" if config.content == "text" else _detect_form(part.file, config)
    rows = lacking = 0
    where = ""
    with _open_stream(part.file) as stream:
        if at:
            stream.seek(at - 1)
            # Skip the rest of a line that starts in an earlier part, or only its newline; at most up to the part's end.
            at += len(stream.readline(part.last - at + 1)) - 1
        while at < stop and (line := stream.readline(MAX_DOCUMENT_BYTES + 1)):
            where = f"{part.file.name}, byte {at}"
            at += len(_check_size(where, line))
            if line.isspace():
                continue
            rows += 1
            try:
                content = _extract_text(line, config) if form == "text" else _normalize(_parse_json(line), form)
                yield where, _encode_utf8(content)
            except _NoColumn as error:
                lacking += 1
                if config.malformed == "error" or (rows == lacking == _FIRST_ROWS and not part.first):
                    raise InputError(f"{where}: {error}") from error
                yield where, error
            except Malformed as error:
                yield where, error
    if rows and rows == lacking and not part.first:
        raise InputError(f"{where}: no column {config.text_field!r} in any row so far; name it with data.text_field")


class _NoColumn(Malformed):
    pass


def _parse_json(line: bytes) -> Any:
    """Return the value of a JSON line, or None if it is not valid JSON. Keeps bytes that are not UTF-8."""
    try:
        return json.loads(line.removeprefix(b"\xef\xbb\xbf").decode(errors="surrogateescape"))
    except (ValueError, RecursionError):
        return None


def _extract_text(line: bytes, config: DataConfig) -> str:
    row = _parse_json(line)
    if isinstance(row, dict) and config.text_field not in row:
        raise _NoColumn(_describe_missing_column(sorted(row), config))
    text = row[config.text_field] if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise Malformed(f"truncated, or no text in column {config.text_field!r}")
    return text


def _describe_missing_column(columns: list[str], config: DataConfig) -> str:
    chat = ", or read conversations with data.content=chat" if conversation.matching_forms(columns) else ""
    return f"no column {config.text_field!r} among {columns}; name the text column with data.text_field{chat}"


def _encode_utf8(text: str) -> bytes:
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can contain
        return text.encode(errors="surrogatepass")


def _normalize(row: Any, form: str) -> str:
    try:
        return conversation.normalize_conversation(row, form)
    except RecursionError:
        raise Malformed("its lists are nested too deeply") from None


def _detect_form(file: File, config: DataConfig) -> str:
    """Return the form of a JSONL file's conversations: the form that `data.content` names, or that of the first row."""
    if config.content != "chat":
        return config.content
    with _open_stream(file) as stream:
        for index in range(_FIRST_ROWS):
            row = _parse_json(line := stream.readline(MAX_DOCUMENT_BYTES + 1))
            if isinstance(row, dict):
                return conversation.detect_form(row, f"{file.name}, line {index + 1}")
            if not line:
                return "messages"  # no row is a JSON object, so every form rejects all rows
    raise InputError(f"{file.path}: no JSON object in the first {_FIRST_ROWS} lines; repair it, or set data.format")


def _open_parquet(file: File) -> Any:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(file.path)
    except pyarrow.ArrowException as error:
        raise InputError(f"{file.path}: not a readable Parquet file ({error}); restore it") from error


def _read_parquet_rows(part: Part, config: DataConfig) -> Iterator[Row]:
    import pyarrow

    table = _open_parquet(part.file)
    names, name = table.schema_arrow.names, config.text_field
    if config.content != "text":
        yield from _read_parquet_conversations(part, config, table, names)
        return
    if name not in names:
        raise InputError(f"{part.file.path}: {_describe_missing_column(names, config)}")
    try:
        batches = table.iter_batches(1024, row_groups=range(part.first, part.last), columns=[name])
        columns = (batch.column(0).cast(pyarrow.large_binary()) for batch in batches)
        for row, content in enumerate(content for column in columns for content in column.to_pylist()):
            missing = Malformed(f"truncated, or no text in column {name!r}")
            yield f"{part.file.name}, row {row} of row group {part.first}", missing if content is None else content
    except pyarrow.ArrowException as error:
        problem = f"column {name!r} cannot be read as text ({error})"
        raise InputError(f"{part.file.path}: {problem}; name another column with data.text_field") from error


def _read_parquet_conversations(part: Part, config: DataConfig, table: Any, names: list[str]) -> Iterator[Row]:
    import pyarrow

    form = conversation.detect_form(names, str(part.file.path)) if config.content == "chat" else config.content
    columns = [name for name in names if name in conversation.FORMS[form] | conversation.OPTIONAL_COLUMNS]
    try:
        batches = table.iter_batches(1024, row_groups=range(part.first, part.last), columns=columns)
        for index, row in enumerate(row for batch in batches for row in batch.to_pylist()):
            where = f"{part.file.name}, row {index} of row group {part.first}"
            try:
                yield where, _encode_utf8(_normalize(row, form))
            except Malformed as error:
                yield where, error
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise InputError(f"{part.file.path}: the conversations cannot be read ({error}); repair the file") from error
