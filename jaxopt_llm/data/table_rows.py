"""Rows of tables: Parquet and CSV files."""

import csv
import io
from collections.abc import Iterator
from typing import Any

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError, one_line
from jaxopt_llm.core.files import check_is_regular
from jaxopt_llm.data import conversation, stream
from jaxopt_llm.data.find import File
from jaxopt_llm.data.rows import Part, Row, describe_missing_column, encode_row, encode_text
from jaxopt_llm.data.skipped import Malformed, Position


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


def read_parquet_rows(part: Part, config: DataConfig) -> Iterator[Row]:
    import pyarrow

    table = open_parquet(part.file)
    names, name = table.schema_arrow.names, config.text_field
    if config.content != "text":
        yield from _read_parquet_conversations(part, config, table, names)
        return
    if name not in names:
        raise InputError(f"{part.file}: {describe_missing_column(names, config)}")
    try:
        batches = table.iter_batches(1024, row_groups=range(part.first, part.last), columns=[name])
        columns = (batch.column(0).cast(pyarrow.large_binary()) for batch in batches)
        contents = (content for column in columns for content in column.to_pylist())
        for row, content in enumerate(contents, part.row + 1):
            missing = Malformed(f"without text in column {name!r}", "it holds null")
            yield Position(part.file, "row", row), missing if content is None else content
    except _damages() as error:
        problem = f"column {name!r} cannot be read as text ({one_line(error)})"
        raise InputError(f"{part.file}: {problem}; name another column with --data.text_field") from error


def _read_parquet_conversations(part: Part, config: DataConfig, table: Any, names: list[str]) -> Iterator[Row]:
    form = _find_form(names, part.file, config)
    columns = [name for name in names if name in conversation.columns(form)]
    try:
        batches = table.iter_batches(1024, row_groups=range(part.first, part.last), columns=columns)
        for index, row in enumerate((row for batch in batches for row in batch.to_pylist()), part.row + 1):
            where = Position(part.file, "row", index)
            try:
                yield where, encode_row(row, form, config)
            except Malformed as error:
                yield where, error
    except _damages() as error:
        problem = f"the conversations cannot be read ({one_line(error)})"
        raise InputError(f"{part.file}: {problem}; repair the file") from error


def read_csv_rows(part: Part, config: DataConfig) -> Iterator[Row]:
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
    form = "text" if config.content == "text" else _find_form(header, part.file, config)
    if form == "text" and config.text_field not in header:
        raise InputError(f"{part.file}: {describe_missing_column(header, config)}; the first row is the header")
    used = {config.text_field} if form == "text" else conversation.columns(form)
    if repeated := [name for name in used if header.count(name) > 1]:
        raise InputError(f"{part.file}, line 1: several columns are named {repeated[0]!r}; rename all but one")
    for where, row in rows:
        try:
            if isinstance(row, Malformed):
                raise row
            if len(row) != len(header):
                detail = f"{len(row)} instead of {len(header)}"
                raise Malformed("with a number of fields that differs from the header's", detail)
            values = dict(zip(header, row, strict=True))
            if form == "text":
                yield where, encode_text(values[config.text_field], config)
            else:  # CSV has no null: an empty field of an optional column counts as absent
                absent = {name for name, value in values.items() if not value and name not in conversation.FORMS[form]}
                yield where, encode_row({n: v for n, v in values.items() if n in used - absent}, form, config)
        except Malformed as error:
            yield where, error


def _find_form(columns: list[str], file: File, config: DataConfig) -> str:
    return conversation.detect_form(columns, file) if config.content == "chat" else config.content


def _read_csv(file: File) -> Iterator[tuple[Position, list[str] | Malformed]]:
    """Yield the position and the fields of each row that is not blank. Keeps bytes that are not UTF-8.

    Raises InputError if a quoted field does not end: it would hide the rest of the file.
    """
    csv.field_size_limit(stream.MAX_DOCUMENT_BYTES)  # of this process; the default rejects texts of 128 KiB
    with (
        stream.open_stream(file) as source,
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
    for line in iter(lambda: text.readline(stream.MAX_DOCUMENT_BYTES + 1), ""):
        if len(line) > stream.MAX_DOCUMENT_BYTES:
            stream.reject_size(file)
        yield line
