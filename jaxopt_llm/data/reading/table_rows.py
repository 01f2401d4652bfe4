"""Rows of tables: Parquet, Arrow and CSV files."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError, one_line
from jaxopt_llm.core.files import check_is_regular
from jaxopt_llm.data.reading import files
from jaxopt_llm.data.reading.files import File
from jaxopt_llm.data.reading.rows import Encoded, Part, Row, RowEncoder, describe_missing_column
from jaxopt_llm.data.reading.skipped import Malformed, Position

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
    with _open_arrow(part.file) as (reader, is_stream):
        form, used = _choose_columns(reader.schema.names, part.file, encoder)
        all_batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
        yield from _read_batches(part, _select_columns(all_batches, used, form, encoder), form, encoder)


def read_schema(file: File) -> Any:
    """Return the schema of a Parquet or Arrow file, in the terms of Arrow."""
    if file.format == "parquet":
        return open_parquet(file).schema_arrow
    with _open_arrow(file) as (reader, _):
        return reader.schema


@contextmanager
def _open_arrow(file: File) -> Iterator[tuple[Any, bool]]:
    """Open an Arrow file. Yield a reader, and whether it is that of a stream."""
    import pyarrow

    check_is_regular(file.path)
    try:
        with pyarrow.memory_map(str(file.path)) as source:
            is_stream = source.read(len(_ARROW_MAGIC)) != _ARROW_MAGIC
            source.seek(0)
            yield (pyarrow.ipc.open_stream if is_stream else pyarrow.ipc.open_file)(source), is_stream
    except _damages() as error:
        raise InputError(f"{file}: not a readable Arrow file ({one_line(error)}); restore it") from error


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
    try:
        rows = batch.to_pylist(maps_as_pydicts="strict")  # a map, such as Spark writes, is an object
    except (KeyError, ValueError) as error:  # a key of a map, or a field of a struct, twice
        raise pyarrow.ArrowInvalid(error.args[0]) from error
    for row in rows:
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
