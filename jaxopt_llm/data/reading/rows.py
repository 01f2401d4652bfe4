"""Rows of data files: their content as text or as a conversation.

Rows of JSON files: one value per line, or one array.

Rows of tables: Parquet, Arrow and CSV files.
"""

import csv
import io
import json
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, NoReturn

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError, one_line
from jaxopt_llm.core.files import check_is_regular
from jaxopt_llm.data.reading import conversation, files
from jaxopt_llm.data.reading.conversation import FieldCounter, known_fields
from jaxopt_llm.data.reading.files import File, is_compressed
from jaxopt_llm.data.reading.skipped import Malformed, Position, Skipped

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


class Encoded(NamedTuple):
    """Content of a row: a text, or a conversation as JSON. label: that of `data.label_field`; None without one."""

    content: bytes
    label: float | None = None


Row = tuple[Position, Encoded | Malformed]


class NoColumn(Malformed):
    pass


class RowEncoder:
    """Encoder of rows: to the text of their column, or to a conversation as JSON.

    Args:
        config: the settings.
        skipped: counts the fields that nothing reads.
        template: source of the chat template, if there is one.
    """

    def __init__(self, config: DataConfig, skipped: Skipped, template: str = "") -> None:
        self.config = config
        self._skipped = skipped
        self._counter = FieldCounter(skipped, template)
        columns = config.column_names()
        self._fields: dict[str, str | None] = dict.fromkeys(columns)  # of columns whose field has another name, or none
        self._fields |= {column: field for field, column in columns.items() if column}

    def detect_form(self, columns: Iterable[str], where: object) -> str:
        """Return `text`, or the form of conversations that has these columns."""
        if self.config.content != "chat":
            return self.config.content
        names = list(columns)
        try:
            return conversation.detect_form([field for field in map(self._field, names) if field], where)
        except InputError as error:
            named = (column for column in self.config.column_names().values() if column)
            if missing := next((column for column in named if column not in names), ""):
                found = ", ".join(sorted(names)[:40])
                raise InputError(f"data.columns: no column {missing!r} among {found}; {error}") from error
            raise

    def is_used(self, column: str, form: str) -> bool:
        """Return whether a column is used, or can make a row malformed."""
        if column == self.config.label_field:
            return bool(column)
        if form == "text":
            return column == self.config.text_field
        return self._field(column) in known_fields(form)

    def note_columns(self, rows_by_column: Mapping[str, int], form: str) -> None:
        """Note the columns of rows, and count those that are not used by their number of rows."""
        if self.config.columns:
            self._skipped.columns |= rows_by_column.keys()
        for column, rows in rows_by_column.items():
            if not self.is_used(column, form):
                self._skipped.add_unread(column, rows)

    def encode(self, row: Any, form: str, counts_columns: bool = True) -> Encoded:
        """Return the content of a row: the text of its column, or the conversation as JSON, with its label.

        Args:
            row: the row.
            form: form of the conversation, or `text`.
            counts_columns: whether the columns of this row are noted, instead of those of the file.

        Raises:
            Malformed: the row is not valid.
        """
        if isinstance(row, Malformed):
            raise row
        if not isinstance(row, dict):
            raise Malformed("not a JSON object")
        if counts_columns:
            self.note_columns({column: 1 for column, value in row.items() if value not in (None, "")}, form)
        label = self.read_label(row)
        if form != "text":
            read = {column: value for column, value in row.items() if column != self.config.label_field or not column}
            named = {field: value for column, value in read.items() if (field := self._field(column))}
            return Encoded(encode_utf8(conversation.normalize_conversation(named, form, self._counter)), label)
        if self.config.text_field not in row:
            description = describe_missing_column(sorted(row), self.config)
            raise NoColumn(f"without the column {self.config.text_field!r}", description)
        return Encoded(self.encode_text(row[self.config.text_field]), label)

    def read_label(self, row: Mapping[str, Any]) -> float | None:
        """Return the label of a row, a number; None if `data.label_field` names no column.

        Raises:
            Malformed: the row has no label, or it is not a number.
        """
        if not (field := self.config.label_field):
            return None
        value = row.get(field)
        if isinstance(value, str):  # of a CSV file
            try:
                value = float(value)
            except ValueError:
                hint = "number the classes from 0" if value else "it is empty"
                raise Malformed(f"with a label that is not a number in column {field!r}", hint) from None
        if value is None:
            remedy = "another column can be named with --data.label-field"
            raise Malformed(f"without a label in column {field!r}", remedy)
        if not isinstance(value, bool | int | float) or not math.isfinite(value):
            raise Malformed(f"with a label that is not a number in column {field!r}", f"it is {_names.repr(value)}")
        return float(value)

    def encode_text(self, text: Any) -> bytes:
        if not isinstance(text, str):
            kind = "null" if text is None else type(text).__name__
            raise Malformed(f"without text in column {self.config.text_field!r}", f"it holds {kind}")
        return encode_utf8(text)

    def _field(self, column: str) -> str | None:
        """Return the field that a column holds, or None if data.columns says that it is not read."""
        return self._fields.get(column, column)


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
    """Return the form of a file's conversations: that which `data.content` names, or that of the first JSON object."""
    if encoder.config.content != "chat":
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


_ARROW_MAGIC = b"ARROW1"  # of an Arrow file with an index; a stream starts without it


def open_parquet(file: File) -> Any:
    from pyarrow.parquet import ParquetFile

    check_is_regular(file.path)
    try:
        table = ParquetFile(file.path)
        _ = table.schema_arrow.names  # converts the schema, which may fail
        return table
    except _damages() as error:
        raise InputError(f"{file}: not a readable Parquet file ({one_line(error)}); restore it") from error


def _damages() -> tuple[type[BaseException], ...]:
    """Return the exceptions of a damaged file: Thrift's are an OSError, and names and texts may be no UTF-8."""
    import pyarrow

    return (pyarrow.ArrowException, OSError, UnicodeDecodeError)


def read_parquet_rows(part: Part, encoder: RowEncoder) -> Iterator[Row]:
    table = open_parquet(part.file)
    form, used = _choose_columns(table.schema_arrow.names, part.file, encoder)
    groups = range(part.first, part.last)
    metadata = [table.metadata.row_group(group) for group in groups]
    encoder.note_columns(
        {name: sum(_count_values(each, name) for each in metadata) for name in table.schema_arrow.names}, form
    )
    batches = table.iter_batches(1024, row_groups=groups, columns=used)
    yield from _read_batches(part, batches, form, encoder)


def _count_values(group: Any, name: str) -> int:
    """Return the number of values of a column in a row group. Nulls of a nested column count as values."""
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema == name and column.statistics is not None and column.statistics.has_null_count:
            return int(group.num_rows - column.statistics.null_count)
    return int(group.num_rows)


def read_arrow_rows(part: Part, encoder: RowEncoder) -> Iterator[Row]:
    """Yield the rows of an Arrow file: a stream, as `datasets` writes it, or a file with an index (Feather)."""
    import pyarrow

    check_is_regular(part.file.path)
    try:
        with pyarrow.memory_map(str(part.file.path)) as source:
            is_stream = source.read(len(_ARROW_MAGIC)) != _ARROW_MAGIC
            source.seek(0)
            reader = (pyarrow.ipc.open_stream if is_stream else pyarrow.ipc.open_file)(source)
            form, used = _choose_columns(reader.schema.names, part.file, encoder)
            all_batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
            yield from _read_batches(part, _select_columns(all_batches, used, form, encoder), form, encoder)
    except _damages() as error:
        raise InputError(f"{part.file}: not a readable Arrow file ({one_line(error)}); restore it") from error


def _select_columns(batches: Iterable[Any], used: list[str], form: str, encoder: RowEncoder) -> Iterator[Any]:
    """Yield the columns that are used, at most 1024 rows at a time, and count the values of the others."""
    for batch in batches:
        counts = zip(batch.schema.names, batch.columns, strict=True)
        encoder.note_columns({name: len(column) - column.null_count for name, column in counts}, form)
        for first in range(0, batch.num_rows, 1024):
            yield batch.select(used).slice(first, 1024)


def _choose_columns(names: list[str], file: File, encoder: RowEncoder, hint: str = "") -> tuple[str, list[str]]:
    """Return the form of a table's rows and the columns that are read.

    Raises:
        InputError: the text column is missing, with a hint, or a column that is read exists twice.
    """
    form = encoder.detect_form(names, file)
    if form == "text" and encoder.config.text_field not in names:
        raise InputError(f"{file}: {describe_missing_column(names, encoder.config)}{hint}")
    used = [name for name in names if encoder.is_used(name, form)]
    if repeated := [name for name in used if names.count(name) > 1]:
        raise InputError(f"{file}: several columns are named {repeated[0]!r}; rename all but one")
    return form, used


def _read_batches(part: Part, batches: Iterable[Any], form: str, encoder: RowEncoder) -> Iterator[Row]:
    """Yield the rows of batches of an Arrow table, which has only the columns that are used."""
    row = part.row
    read = _read_texts if form == "text" and not encoder.config.label_field else _read_rows
    try:
        for batch in batches:
            for content in read(batch, form, encoder):
                row += 1
                yield Position(part.file, "row", row), content
    except _damages() as error:
        if form == "text":
            problem = f"column {encoder.config.text_field!r} cannot be read as text ({one_line(error)})"
            raise InputError(f"{part.file}: {problem}; name another column with --data.text_field") from error
        problem = f"the conversations cannot be read ({one_line(error)})"
        raise InputError(f"{part.file}: {problem}; repair the file") from error


def _read_texts(batch: Any, form: str, encoder: RowEncoder) -> Iterator[Encoded | Malformed]:
    import pyarrow

    missing = Malformed(f"without text in column {encoder.config.text_field!r}", "it holds null")
    for content in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
        yield missing if content is None else Encoded(content)


def _read_rows(batch: Any, form: str, encoder: RowEncoder) -> Iterator[Encoded | Malformed]:
    import pyarrow

    decode = _json_decoder(pyarrow.struct(batch.schema))
    for row in batch.to_pylist():
        try:
            row = _without_nulls(row)
            yield encoder.encode(decode(row) if decode else row, form, counts_columns=False)
        except Malformed as error:
            yield error


def _without_nulls(value: Any) -> Any:
    """Return a value of a table without the nulls in its structs, which stand for absent fields, in all depths.

    A null in JSON text was written on purpose, and stays.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _json_decoder(kind: Any) -> Callable[[Any], Any] | None:
    """Return a function that parses JSON text within a value of an Arrow type, or None if the type has none.

    `datasets` stores values as JSON text if their types differ between rows, such as the arguments of tool calls.
    """
    from pyarrow import JsonType, types

    if isinstance(kind, JsonType):
        return _parse_json
    if types.is_struct(kind):
        decoders = {field.name: decode for field in kind if (decode := _json_decoder(field.type))}
        return _decode_fields(decoders) if decoders else None
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    decode = _json_decoder(kind.value_type) if is_list else None
    return (lambda value: None if value is None else list(map(decode, value))) if decode else None


def _decode_fields(decoders: dict[str, Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def decode(value: Any) -> Any:
        return value and {name: decoders[name](each) if name in decoders else each for name, each in value.items()}

    return decode


def _parse_json(text: str | None) -> Any:
    try:
        return None if text is None else json_files.parse(text)
    except ValueError as error:
        raise Malformed("with a JSON value that cannot be parsed", str(error)) from None


def read_csv_rows(part: Part, encoder: RowEncoder) -> Iterator[Row]:
    """Yield the rows of a CSV file, whose first row names the columns.

    Raises:
        InputError: the header lacks a column, or a quoted field does not end.
    """
    rows = _read_csv(part.file)
    _, header = next(rows, (None, None))
    if header is None:
        return
    if isinstance(header, Malformed):
        raise InputError(f"{part.file}, line 1: {header}; repair the header")
    form, _ = _choose_columns(header, part.file, encoder, "; the first row is the header")
    for where, row in rows:
        try:
            if isinstance(row, Malformed):
                raise row
            if len(row) != len(header):
                detail = f"{len(row)} instead of {len(header)}"
                raise Malformed("with a number of fields that differs from the header's", detail)
            yield where, encoder.encode(dict(zip(header, row, strict=True)), form)
        except Malformed as error:
            yield where, error


def _read_csv(file: File) -> Iterator[tuple[Position, list[str] | Malformed]]:
    """Yield the position and the fields of each row that is not blank. Keeps bytes that are not UTF-8.

    Raises InputError if a quoted field does not end: it would hide the rest of the file.
    """
    csv.field_size_limit(files.MAX_DOCUMENT_BYTES)  # of this process; the default rejects texts of 128 KiB
    with (
        files.open_stream(file) as source,
        io.TextIOWrapper(source, "utf-8-sig", errors="surrogateescape", newline="") as text,
    ):
        reader = csv.reader(_read_bounded_lines(text, file), strict=True)
        while True:
            where = Position(file, "line", reader.line_num + 1)
            try:
                if fields := next(reader):
                    yield where, fields
            except StopIteration:
                return
            except csv.Error as error:
                if "expected after" not in str(error):
                    problem = f"the row cannot be read ({error}), perhaps because a quoted field does not end"
                    raise InputError(f"{where}: {problem}; close the quote") from error
                yield where, Malformed("not valid CSV", f"{error}, in line {reader.line_num}")


def _read_bounded_lines(text: io.TextIOWrapper, file: File) -> Iterator[str]:
    for line in iter(lambda: text.readline(files.MAX_DOCUMENT_BYTES + 1), ""):
        if len(line) > files.MAX_DOCUMENT_BYTES:
            files.reject_size(file)
        yield line
