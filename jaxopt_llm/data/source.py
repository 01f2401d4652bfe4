"""The documents in files of text."""

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

from jaxopt_llm.data import conversation
from jaxopt_llm.data.config import DataConfig
from jaxopt_llm.data.conversation import Malformed
from jaxopt_llm.data.find import File, compressed
from jaxopt_llm.errors import InputError

PART_BYTES = 2**22  # of a file that can be divided: what is read and tokenised in one go
MOST_BYTES = 2**30  # of one document, which is held in memory whole, several times over
_FIRST_ROWS = 100  # of a JSONL file, of which one must have the column, and the first tells a conversation's form
_BLOCK = 2**18  # bytes read at once where documents are looked for

# Installed packages, tests, and pydoc's help text: one generated file that would outweigh the rest of a held-out split.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"})
# Written by the build or the administrator: these differ between two machines with the same Python.
_LOCAL_FOLDER_PREFIX = "config-"
_LOCAL_FILE_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Part:
    """Some documents of a file: those that begin in bytes [first, last) of JSONL or of text with a separator, row
    groups [first, last) of Parquet, the whole of what can only be read from its beginning."""

    file: File
    first: int
    last: int


@dataclass(frozen=True)
class Document:
    """One text. `name` says where it is; `key` decides whether it is held out: its content, or its name. `spans`: of a
    conversation, the characters [begin, end) that are learnt."""

    name: str
    content: bytes
    key: bytes
    spans: tuple[tuple[int, int], ...] | None = None


Row = tuple[str, bytes | Malformed]  # where it is, and what it holds


def parts(file: File, config: DataConfig) -> list[Part]:
    """A text file in pieces that can be read, and tokenised, on their own: they depend on the file alone."""
    if file.format == "parquet":
        return [Part(file, group, group + 1) for group in range(_parquet(file).num_row_groups)]
    size = file.path.stat().st_size
    if compressed(file) or not (file.format == "jsonl" or config.separator):
        return [Part(file, 0, size)]
    return [Part(file, first, min(first + PART_BYTES, size)) for first in range(0, size, PART_BYTES)]


def read(part: Part, config: DataConfig, skipped: Counter[str]) -> Iterator[Document]:
    """The documents of a part, as UTF-8 and never empty; counts what it skips, by reason. A conversation is JSON, as
    `conversation` makes it.

    Raises:
        InputError: a malformed document where data.malformed says so; no column of that name; a damaged file.
    """
    rows = {"text": _text_rows, "jsonl": _jsonl_rows, "parquet": _parquet_rows}[part.file.format]
    if part.file.format == "text" and config.content != "text":
        raise InputError(f"{part.file.path}: data.content {config.content} is read from JSONL and Parquet alone")
    try:
        for where, content in rows(part, config):
            if isinstance(content, Malformed):
                refuse(f"{where}: {content}", config)
                skipped["cut, or without a text" if config.content == "text" else "no conversation"] += 1
                continue
            wrong = _not_utf8(content)
            if wrong:
                refuse(f"{where}: not UTF-8 ({wrong} of the text)", config)
                skipped["not UTF-8" if config.malformed == "skip" else "not UTF-8, replaced"] += 1
                if config.malformed == "skip":
                    continue
                content = content.decode(errors="replace").encode()
            if content:
                yield Document(where, content, content)
            else:
                skipped["empty"] += 1
    except (OSError, EOFError) as error:
        raise InputError(f"{part.file.path}: it cannot be read ({error}); is it whole?") from error


def standard_library() -> list[Document]:
    """Python's standard library, about 11 MB of source code that every interpreter carries: nothing is downloaded.

    Takes the `.py` files of the running interpreter, without installed packages, tests, generated files and empty
    ones, sorted by name. The text belongs to the Python version. Whether one is held out depends on its relative
    path alone, so that two versions hold out the same files.

    Raises:
        InputError: the interpreter carries no source files (some embedded builds).
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        # In place, so that os.walk does not descend: site-packages can be a hundred times the library.
        subfolders[:] = [s for s in subfolders if s not in _SKIPPED_FOLDERS and not s.startswith(_LOCAL_FOLDER_PREFIX)]
        paths += [Path(folder, n) for n in names if n.endswith(".py") and not n.startswith(_LOCAL_FILE_PREFIXES)]
    named = sorted((path.relative_to(root).as_posix(), path) for path in paths)
    documents = [Document(name, path.read_bytes(), name.encode()) for name, path in named]
    documents = [document for document in documents if document.content]
    if not documents:
        raise InputError(f"no .py files of the standard library under {root}: use a Python that carries its sources")
    return documents


def refuse(what: str, config: DataConfig) -> None:
    """Raises InputError, unless malformed documents are to be skipped."""
    if config.malformed == "error":
        raise InputError(f"{what}; mend it, or choose data.malformed skip or replace")


def _not_utf8(content: bytes) -> str | None:
    """What is wrong, and at which byte. Decodes a block at a time: the whole can be four times its bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(content), _BLOCK):
        kept = len(decoder.getstate()[0])  # the beginning of a character that the block before cut
        try:
            decoder.decode(content[at : at + _BLOCK], final=at + _BLOCK >= len(content))
        except UnicodeDecodeError as error:
            return f"{error.reason} at byte {at - kept + error.start}"
    return None


def _open(file: File) -> BinaryIO:
    if not compressed(file):
        return file.path.open("rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(file.path), compression="detect"))


def _text_rows(part: Part, config: DataConfig) -> Iterator[Row]:
    name = part.file.name
    with _open(part.file) as stream:
        if not config.separator:
            whole = not compressed(part.file) and part.last <= MOST_BYTES
            yield name, _checked(name, stream.read(-1 if whole else MOST_BYTES + 1))
            return
        separator = config.separator.encode()
        ends = compressed(part.file) or part.last == part.file.path.stat().st_size
        last = math.inf if ends else part.last  # a document may begin where the file ends, and is empty
        for at, document in _divided(stream, part.first, last, separator, name):
            yield f"{name}, byte {at}", document


def _divided(stream: BinaryIO, first: int, last: float, separator: bytes, name: str) -> Iterator[tuple[int, bytes]]:
    """The documents that begin in bytes [first, last), and where: as if the file had been divided whole."""
    at = _free(stream, first - len(separator), separator) if first else 0
    if first:
        stream.seek(at)
    rest, seen = bytearray(), 0  # from `at` on, and how much of it holds no separator
    for block in iter(lambda: stream.read(_BLOCK), b""):
        rest += block
        done = 0
        while (end := rest.find(separator, seen)) >= 0:
            if first <= at + done:
                yield at + done, bytes(rest[done:end])
            seen = done = end + len(separator)
            if at + done >= last:
                return
        if at + done < first and at + len(rest) - len(separator) >= last:
            return  # in the middle of a document that runs across the whole part
        del rest[:done]
        at, seen = at + done, max(len(rest) - len(separator) + 1, 0)
        if len(rest) > MOST_BYTES:
            _checked(f"{name}, byte {at}", rest)
    if first <= at:
        yield at, bytes(rest)


def _free(stream: BinaryIO, at: int, separator: bytes) -> int:
    """The last byte up to `at` that certainly is inside no separator: where they overlap, as two newlines do in
    three, the first counts, so only one with no other just before it is sure to be one."""
    while at > 0:
        first = max(at - len(separator) + 1, 0)
        stream.seek(first)
        found = stream.read(at - first + len(separator) - 1).rfind(separator)
        if found < 0:
            return at
        at = first + found
    return 0


def _checked(where: str, document: bytes | bytearray) -> bytes:
    if len(document) > MOST_BYTES:
        raise InputError(
            f"{where}: a document of more than {MOST_BYTES / 2**30:g} GiB, which would not fit in memory as tokens; "
            "divide it, a text file with data.separator"
        )
    return bytes(document)


def _jsonl_rows(part: Part, config: DataConfig) -> Iterator[Row]:
    at, stop = part.first, math.inf if compressed(part.file) else part.last
    form = "text" if config.content == "text" else _form(part.file, config)
    rows = lacking = 0
    where = ""
    with _open(part.file) as stream:
        if at:
            stream.seek(at - 1)
            # The rest of a line that began before, or the newline alone; no further than the part goes.
            at += len(stream.readline(part.last - at + 1)) - 1
        while at < stop and (line := stream.readline(MOST_BYTES + 1)):
            where = f"{part.file.name}, byte {at}"
            at += len(_checked(where, line))
            if line.isspace():
                continue
            rows += 1
            try:
                yield where, _utf8(_text_of(line, config) if form == "text" else _conversation(_json(line), form))
            except _NoColumn as error:
                lacking += 1
                if config.malformed == "error" or (rows == lacking == _FIRST_ROWS and not part.first):
                    raise InputError(f"{where}: {error}") from error
                yield where, error
            except Malformed as error:
                yield where, error
    if rows and rows == lacking and not part.first:
        raise InputError(f"{where}: no row before it has a column {config.text_field!r} (data.text_field), either")


class _NoColumn(Malformed):
    pass


def _json(line: bytes) -> Any:
    """What a JSON line holds, with bytes that are no UTF-8 kept; None where it is none."""
    try:
        return json.loads(line.removeprefix(b"\xef\xbb\xbf").decode(errors="surrogateescape"))
    except (ValueError, RecursionError):
        return None


def _text_of(line: bytes, config: DataConfig) -> str:
    row = _json(line)
    if isinstance(row, dict) and config.text_field not in row:
        hint = "" if not conversation.forms(row) else "; conversations are read with data.content chat"
        raise _NoColumn(f"no column {config.text_field!r} (data.text_field) among {sorted(row)}{hint}")
    text = row[config.text_field] if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise Malformed(f"cut, or no text in {config.text_field!r}")
    return text


def _utf8(text: str) -> bytes:
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # half of a pair, which JSON can spell out
        return text.encode(errors="surrogatepass")


def _conversation(row: Any, form: str) -> str:
    try:
        return conversation.conversation(row, form)
    except RecursionError:
        raise Malformed("lists within lists, too deep to be read") from None


def _form(file: File, config: DataConfig) -> str:
    """The form of a JSONL file's conversations: as the setting says, or as its first row has it."""
    if config.content != "chat":
        return config.content
    with _open(file) as stream:
        for number in range(_FIRST_ROWS):
            row = _json(line := stream.readline(MOST_BYTES + 1))
            if isinstance(row, dict):
                return conversation.form_of(row, f"{file.name}, line {number + 1}")
            if not line:
                return "messages"  # whatever the rows are, they are none of these
    raise InputError(f"{file.path}: none of its first {_FIRST_ROWS} lines is a JSON object")


def _parquet(file: File) -> Any:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(file.path)
    except pyarrow.ArrowException as error:
        raise InputError(f"{file.path}: no readable Parquet file ({error})") from error


def _parquet_rows(part: Part, config: DataConfig) -> Iterator[Row]:
    import pyarrow

    table = _parquet(part.file)
    names = table.schema_arrow.names
    if config.content != "text":
        yield from _parquet_conversations(part, config, table, names)
        return
    if config.text_field not in names:
        hint = "" if not conversation.forms(names) else "; conversations are read with data.content chat"
        raise InputError(
            f"{part.file.path}: no column {config.text_field!r} (data.text_field); it has {', '.join(names)}{hint}"
        )
    try:
        batches = table.iter_batches(1024, row_groups=range(part.first, part.last), columns=[config.text_field])
        for row, content in enumerate(
            each for batch in batches for each in batch.column(0).cast(pyarrow.large_binary()).to_pylist()
        ):
            missing = Malformed(f"cut, or no text in {config.text_field!r}")
            yield f"{part.file.name}, row {row} of row group {part.first}", missing if content is None else content
    except pyarrow.ArrowException as error:
        raise InputError(f"{part.file.path}: column {config.text_field!r} cannot be read as text ({error})") from error


def _parquet_conversations(part: Part, config: DataConfig, table: Any, names: list[str]) -> Iterator[Row]:
    import pyarrow

    form = conversation.form_of(names, str(part.file.path)) if config.content == "chat" else config.content
    columns = [name for name in names if name in conversation.FORMS[form] | conversation.BESIDE]
    try:
        batches = table.iter_batches(1024, row_groups=range(part.first, part.last), columns=columns)
        for number, row in enumerate(row for batch in batches for row in batch.to_pylist()):
            where = f"{part.file.name}, row {number} of row group {part.first}"
            try:
                yield where, _utf8(_conversation(row, form))
            except Malformed as error:
                yield where, error
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise InputError(f"{part.file.path}: its conversations cannot be read ({error})") from error
