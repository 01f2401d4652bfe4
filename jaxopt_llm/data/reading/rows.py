"""Rows of data files: their content as text or as a conversation."""

import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxopt_llm.config import DataConfig
from jaxopt_llm.config.data import FORMS, PREFERENCE, PROMPT, UNPAIRED
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading import conversation
from jaxopt_llm.data.reading.conversation import FieldCounter, known_fields
from jaxopt_llm.data.reading.files import File
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
    """Content of a row: a text, or as JSON a conversation or a prompt with the other columns of its row.

    label: of the document; None if the row has none.
    """

    content: bytes
    label: float | None = None
    is_conversation: bool = False


Row = tuple[Position, Encoded | Malformed]


class NoColumn(Malformed):
    pass


class RowEncoder:
    """Encoder of rows: to the text of their column, or to a conversation as JSON.

    Args:
        config: the settings.
        skipped: counts the fields that nothing reads.
        template: source of the chat template, which conversations of messages need; None: there is none.
    """

    def __init__(self, config: DataConfig, skipped: Skipped, template: str | None = "") -> None:
        self.config = config
        self._skipped = skipped
        self._counter = FieldCounter(skipped, template)
        columns = config.column_names()
        self._fields: dict[str, str | None] = dict.fromkeys(columns)  # of columns whose field has another name, or none
        self._fields |= {column: field for field, column in columns.items() if column}

    def detect_form(self, columns: Iterable[str], where: object) -> str:
        """Return `text`, or the form of conversations that has these columns."""
        names = list(columns)
        if self.config.content == UNPAIRED and FORMS[PREFERENCE] <= {*map(self._field, names)}:
            return PREFERENCE
        if self.config.content != "chat":
            return self.config.content
        named_fields = [field for field in map(self._field, names) if field]
        if self.config.text_field in names and not conversation.matching_forms(named_fields):
            return "text"
        try:
            return conversation.detect_form(named_fields, where)
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
        if form == PROMPT:
            return self._field(column) is not None
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
            if form == PROMPT:
                return Encoded(encode_utf8(conversation.normalize_prompt(named)))
            only_last = self.config.learn_turns == "last"
            normalized = conversation.normalize_conversation(named, form, self._counter, only_last)
            label = float(conversation.read_judgement(named["label"])) if form == UNPAIRED else label
            return Encoded(encode_utf8(normalized), label, is_conversation=True)
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
        value, names = row.get(field), self.config.label_names
        if isinstance(value, str):  # the name of a class, or a number of a CSV file
            number = names.index(value) if value in names else parse_label(value)
            if number is None and names and value:
                remedy = f"it is {value!r}; the classes are {', '.join(names)}"
                raise Malformed(f"with a label in column {field!r} that is none of the classes", remedy)
            if number is None:
                hint = "name the classes with --data.label-names" if value else "it is empty"
                raise Malformed(f"with a label that is not a number in column {field!r}", hint)
            value = number
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


def parse_label(text: str) -> float | None:
    """Return the number that a text is; None if it is none."""
    try:
        return float(text)
    except ValueError:
        return None


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
