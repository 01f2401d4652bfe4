"""Positions of rows in files, and counts of skipped rows by reason."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxopt_llm.data.find import File
from jaxopt_llm.data.stream import find_line


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
    """Numbers of skipped rows by reason.

    Attributes:
        examples: position of the first malformed row of each reason. Rows that are not malformed have no example.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, Position] = {}

    def add(self, reason: str, example: object = None) -> None:
        self.counts[reason] += 1
        if isinstance(example, Position):
            self.examples.setdefault(reason, example)

    def describe(self) -> list[str]:
        """Return the number, the reason and the example of each reason, as text."""
        examples = {reason: f" (first: {position})" for reason, position in self.examples.items()}
        return [f"{count:,} {reason}{examples.get(reason, '')}" for reason, count in sorted(self.counts.items())]

    def to_record(self, files: Sequence[File]) -> dict[str, Any]:
        """Return the counts and examples as a JSON object that names files by their index."""
        record: dict[str, Any] = {"skipped": dict(sorted(self.counts.items()))}
        if self.examples:
            found = sorted(self.examples.items())
            record["examples"] = {why: [files.index(at.file), at.unit, at.number] for why, at in found}
        return record

    def add_record(self, record: Mapping[str, Any], files: Sequence[File]) -> None:
        """Add what `to_record` returned for the same files."""
        self.counts.update(record["skipped"])
        for reason, (index, unit, number) in record.get("examples", {}).items():
            self.examples.setdefault(reason, Position(files[index], unit, number))
