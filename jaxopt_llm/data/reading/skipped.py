"""Positions of rows in files, and counts of what is not read as it stands: skipped rows, fields, divided rows."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading.files import File, find_line

_MAX_FIELDS = 1000  # whose rows are counted by name
_SHOWN_FIELDS = 12
WAYS = ("texts", "endless", "joined", "turned", "divided", "parts")  # see `Skipped.read`


@dataclass(frozen=True)
class Position:
    """Position of a row in a file, for messages.

    Attributes:
        unit: what `number` counts: bytes from 0, or lines or rows from 1; empty for a whole file.
    """

    file: File
    unit: Literal["", "byte", "line", "row"] = ""
    number: int = 0

    def __str__(self) -> str:
        """Return the path and the line or row. To find the line of a byte, this reads the file up to the byte."""
        if self.unit == "byte":
            return f"{self.file}, line {find_line(self.file, self.number)}"
        return f"{self.file}, {self.unit} {self.number}" if self.unit else str(self.file)


class Malformed(Exception):
    """Exception for a row that does not hold a valid text or conversation.

    Attributes:
        reason: phrase that also describes several such rows: "3 not valid JSON". The rows are counted by it.
        detail: more about this row, or empty.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason


class Skipped:
    """Numbers of skipped rows by reason, and of rows with a field that nothing reads.

    Attributes:
        counts: number of skipped rows by reason.
        examples: position of the first malformed row of each reason. Rows that are not malformed have no example.
        unread: number of rows by the name of a field that nothing reads, such as `id`, or `mood of a message`.
        read: number of rows that are read in another way than most, by the way:
            texts: as text, although data.content is chat.
            endless: a conversation in which no special token ends a learned turn.
            joined, turned: a prompt and answers that are texts: joined as they are, or turns of the chat template.
            divided: a conversation that has several documents; parts: number of these documents.
        columns: the columns of the rows. They are only known if data.columns is set.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, Position] = {}
        self.unread: Counter[str] = Counter()
        self.read: Counter[str] = Counter()
        self.first_text: Position | None = None
        self.columns: set[str] = set()

    def add(self, reason: str, example: object = None) -> None:
        self.counts[reason] += 1
        if isinstance(example, Position):
            self.examples.setdefault(reason, example)

    def add_text(self, position: Position) -> None:
        self.read["texts"] += 1
        self.first_text = self.first_text or position

    def check_texts(self, has_conversations: bool) -> None:
        """Raise InputError if there are only texts, although data.content is chat. Call it after all rows are read."""
        if self.read["texts"] and not has_conversations:
            problem = "the fields match no form of conversations, and no other file has one"
            remedy = "name the columns of a form with --data.columns FIELD=COLUMN"
            raise InputError(f"{self.first_text}: {problem}; {remedy}, or read them as text with --data.content text")

    def add_texts(self, are_joined: bool) -> None:
        """Count a row with a prompt and answers that are texts."""
        self.read["joined" if are_joined else "turned"] += 1

    def add_divided(self, parts: int) -> None:
        """Count a conversation that has this number of documents, if there are several."""
        if parts > 1:
            self.read.update(divided=1, parts=parts)

    def add_unread(self, field: str, rows: int = 1) -> None:
        if rows:
            # Names may be data, such as ids. So there is a bound.
            known = field in self.unread or len(self.unread) < _MAX_FIELDS
            self.unread[field if known else "other fields"] += rows

    def describe(self) -> list[str]:
        """Return the number, the reason and the example of each reason, as text."""
        examples = {reason: f" (first: {position})" for reason, position in self.examples.items()}
        return [f"{count:,} {reason}{examples.get(reason, '')}" for reason, count in sorted(self.counts.items())]

    def describe_notes(self) -> list[str]:
        """Return lines about the rows that are read: fields, texts, and conversations of several documents."""
        notes = [self.describe_unread()]
        for count, treatment in (
            (self.read["joined"], "which are joined without a chat template"),
            (
                self.read["turned"],
                "which are turns of the chat template; data.chat_template=none joins them as they are",
            ),
        ):
            rows = f"{count:,} row{'s have' if count > 1 else ' has'}"
            notes += [f"prompts and answers: {rows} texts, {treatment}"] if count else []
        if texts := self.read["texts"]:
            have = f"{texts:,} row{'s have' if texts > 1 else ' has'}"
            notes.append(
                f"texts: {have} no form of conversations, and all tokens are learned (first: {self.first_text})"
            )
        if divided := self.read["divided"]:
            have = "conversations have" if divided > 1 else "conversation has"
            notes.append(
                f"chat template: it changes earlier turns when more turns follow, so {divided:,} {have} "
                f"{self.read['parts']:,} documents, each of which ends with a learned turn as it was served"
            )
        return [note for note in notes if note]

    def describe_endless(self, config: DataConfig) -> str:
        """Return a warning about learned turns without an end, which names the template; empty if there are none."""
        if not (endless := self.read["endless"]):
            return ""
        name = "chat_template" if config.names_template else "tokenizer"
        rows = f"{endless:,} conversation{'s' * (endless != 1)}"
        return (
            f"data.{name}={getattr(config, name)}: the chat template writes no special token at the end of a learned "
            f"turn of {rows}, so a model does not learn where to stop; write one in a copy of the template, and name "
            "the copy as the chat template"
        )

    def describe_unread(self) -> str:
        """Return the fields that nothing reads, with the number of rows that have them; empty if there is none."""
        found = [f"{field} ({count:,} row{'s' * (count != 1)})" for field, count in self.unread.most_common()]
        more = f", and {len(found) - _SHOWN_FIELDS} more" if len(found) > _SHOWN_FIELDS else ""
        return f"fields not read: {', '.join(found[:_SHOWN_FIELDS])}{more}" if found else ""

    def check_columns(self, config: DataConfig) -> None:
        """Raise InputError if no row has a column that data.columns names. Call it after all rows are read."""
        missing = [column for column in config.column_names().values() if column and column not in self.columns]
        if missing and self.columns:
            found = ", ".join(sorted(self.columns)[:40])
            problem = f"no row has the column {missing[0]!r}"
            raise InputError(f"data.columns={' '.join(config.columns)}: {problem}; the columns are {found}")

    def to_record(self, files: Sequence[File]) -> dict[str, Any]:
        """Return the counts, examples and fields as a JSON object that names files by their index."""
        record: dict[str, Any] = {"skipped": dict(sorted(self.counts.items()))}
        if self.examples:
            found = sorted(self.examples.items())
            record["examples"] = {why: [files.index(at.file), at.unit, at.number] for why, at in found}
        if self.unread:
            record["unread"] = dict(sorted(self.unread.items()))
        if at := self.first_text:
            record["first_text"] = [files.index(at.file), at.unit, at.number]
        record |= +self.read
        if self.columns:
            record["columns"] = sorted(self.columns)
        return record

    def add_record(self, record: Mapping[str, Any], files: Sequence[File]) -> None:
        """Add what `to_record` returned for the same files."""
        self.counts.update(record["skipped"])
        for reason, (index, unit, number) in record.get("examples", {}).items():
            self.examples.setdefault(reason, Position(files[index], unit, number))
        for field, count in record.get("unread", {}).items():
            self.add_unread(field, count)
        self.read.update({way: record.get(way, 0) for way in WAYS})
        if "first_text" in record:
            index, unit, number = record["first_text"]
            self.first_text = self.first_text or Position(files[index], unit, number)
        self.columns.update(record.get("columns", ()))
