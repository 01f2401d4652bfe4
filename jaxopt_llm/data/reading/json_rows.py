"""Rows of JSON files: one value per line, or one array."""

import io
import json
import math
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, NoReturn

from jaxopt_llm.config.data import UNPAIRED
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading import files
from jaxopt_llm.data.reading.files import File, is_compressed
from jaxopt_llm.data.reading.rows import NoColumn, Part, Row, RowEncoder
from jaxopt_llm.data.reading.skipped import Malformed, Position

# First rows of a file. At least one of them must have the text column, and the first JSON object among them tells the
# form of the conversations.
_FIRST_ROWS = 100
_MAX_ARRAY = 2**32  # characters
_BLOCK = 2**18  # bytes read at once in the search for the first one that is no whitespace
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_WHITESPACE = re.compile(r"[ \t\n\r]*")
_FIRST_BYTES = 256
_ARRAY_OF_OBJECTS = re.compile(rb"\s*\[\s*\{")


def holds_lines(file: File) -> bool:
    """Return whether a JSON file has one value per line, instead of one array.

    A *.jsonl file that starts with an array of objects is read as an array, too.

    Raises:
        InputError: it is neither.
    """
    with files.open_stream(file) as source:
        if file.format == "jsonl":  # read for each part: a few bytes
            start = source.read(_FIRST_BYTES).removeprefix(_BYTE_ORDER_MARK)
            return _ARRAY_OF_OBJECTS.match(start) is None
        start = source.read(_BLOCK).removeprefix(_BYTE_ORDER_MARK)
        while start.isspace():
            start = source.read(_BLOCK)
        start = start.lstrip()
        if start.startswith(b"["):  # perhaps a single line of many gigabytes
            return False
        line = start.split(b"\n")[0] if b"\n" in start else start + source.readline(files.MAX_DOCUMENT_BYTES + 1)
    if line and not isinstance(_parse(line), dict):
        remedy = "write [{...}, {...}] or one {...} per line"
        raise InputError(f"{file}: neither a JSON array nor one JSON object per line; {remedy}")
    return True


def read_json_rows(part: Part, encoder: RowEncoder) -> Iterator[Row]:
    """Yield the rows of a part. Raises InputError if an array is damaged, or if no row has the text column."""
    config = encoder.config
    form = _detect_form(part.file, encoder)
    rows = lacking = 0
    where = Position(part.file)
    for where, value in _read_values(part):
        rows += 1
        try:
            yield where, encoder.encode(value, form)
        except NoColumn as error:
            lacking += 1
            if config.malformed == "error" or (rows == lacking == _FIRST_ROWS and not part.first):
                raise InputError(f"{where}: {error}") from error
            yield where, error
        except Malformed as error:
            yield where, error
    if rows and rows == lacking and not part.first:
        raise InputError(f"{where}: no column {config.text_field!r} in any row so far; name it with --data.text_field")


def _detect_form(file: File, encoder: RowEncoder) -> str:
    """Return the form of a file's rows: that which `data.content` names, or that of the first JSON object."""
    if encoder.config.content not in ("chat", UNPAIRED):
        return encoder.config.content
    rows = 0
    for where, value in islice(_read_values(Part(file, 0, file.path.stat().st_size)), _FIRST_ROWS):
        if isinstance(value, dict):
            return encoder.detect_form(value, where)
        rows += 1
    if rows < _FIRST_ROWS:
        return "messages"  # no row is a JSON object, so every form rejects all rows
    raise InputError(f"{file}: no JSON object in the first {_FIRST_ROWS} rows; repair it, or set --data.format")


def _read_values(part: Part) -> Iterator[tuple[Position, Any]]:
    """Yield the position and the value of each row of a part: Malformed if it is not valid JSON."""
    return _read_lines(part) if holds_lines(part.file) else _read_array(part.file)


def _read_lines(part: Part) -> Iterator[tuple[Position, Any]]:
    at, stop = part.first, math.inf if is_compressed(part.file) else part.last
    with files.open_stream(part.file) as source:
        if at:
            source.seek(at - 1)
            # Skip the rest of a line that starts in an earlier part, or only its newline; at most up to the part's end.
            at += len(source.readline(part.last - at + 1)) - 1
        while at < stop and (line := source.readline(files.MAX_DOCUMENT_BYTES + 1)):
            where = Position(part.file, "byte", at)
            at += len(files.check_size(where, line))
            if not line.isspace():
                yield where, _parse(line)


def _parse(line: bytes) -> Any:
    """Return the value of a JSON line, or Malformed if it is not valid JSON. Keeps bytes that are not UTF-8."""
    try:
        return json_files.parse(line.removeprefix(_BYTE_ORDER_MARK).decode(errors="surrogateescape"))
    except json.JSONDecodeError as error:
        return Malformed("not valid JSON", f"{error.msg}, column {error.colno}")
    except ValueError as error:
        return Malformed("not valid JSON", str(error))


def _read_array(file: File) -> Iterator[tuple[Position, Any]]:
    """Yield the position and the value of each item of a JSON array, whose text is held in memory."""
    with (
        files.open_stream(file) as source,
        io.TextIOWrapper(source, "utf-8-sig", errors="surrogateescape", newline="\n") as stream,
    ):
        text = stream.read(_MAX_ARRAY + 1)
    if len(text) > _MAX_ARRAY:
        problem = f"the array has more than {_MAX_ARRAY:,} characters and must fit in memory"
        raise InputError(f"{file}: {problem}; write one JSON object per line without brackets")

    def skip_space(at: int) -> int:
        space = _WHITESPACE.match(text, at)
        return at if space is None else space.end()

    def fail(problem: str, line: int | None = None) -> NoReturn:
        """Raise InputError. Unlike in JSON lines, the rows after the problem cannot be found."""
        where = text.count("\n", 0, at) + 1 if line is None else line
        remedy = "repair the array, or write one JSON object per line without brackets"
        raise InputError(f"{file}, line {where}: {problem}, so the rest cannot be read; {remedy}")

    row, mark = 0, ","
    at = skip_space(skip_space(0) + 1)  # after the bracket
    if text.startswith("]", at):
        at, mark = at + 1, "]"
    while mark == ",":
        at, row = skip_space(at), row + 1
        try:
            value, at = json_files.parse_prefix(text, at)
        except json.JSONDecodeError as error:
            fail(f"not valid JSON: {error.msg}", error.lineno)
        except ValueError as error:
            fail(str(error))
        yield Position(file, "row", row), value
        at = skip_space(at)
        mark = text[at : at + 1]
        if mark not in (",", "]"):
            fail("a comma or the end of the array is missing")
        at += 1
    at = skip_space(at)
    if at < len(text):
        fail("text follows the end of the array")
