"""How measurements end: exit codes, what a process complained of, bars that were or were not reached, and files."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jaxopt_llm.core.files import replace_durably

Case = TypeVar("Case")
Rows = list[dict[str, Any]]

NOT_MEASURED = 6  # exit code: nothing failed, and what was asked for has not all been measured; it is named


@dataclass(frozen=True)
class Verdict:
    """A claim or a bar, whether it holds, and by which figures."""

    said: str
    holds: bool
    found: str

    def line(self, holds: str = "PASS", fails: str = "FAIL") -> str:
        return f"{holds if self.holds else fails}  {self.said}\n         {self.found}"


def cause(complaints: str) -> str:
    """Of what a process wrote to standard error, the line that names the last exception, or the last line.

    An exception's text may go on for pages (XLA lists buffers), and JAX adds notes behind it.
    """
    lines = complaints.strip().splitlines()
    named = [line for line in lines if re.match(r"error: |[\w.]*(Error|Exception)\b", line)]
    return (named or lines or ["no reason given"])[-1]


def compared(
    cases: Iterable[Case],
    compare: Callable[[Case], Rows],
    line: Callable[[dict[str, Any]], str],
    head: str,
    report: dict[str, Any],
    file: Path | None,
) -> Iterator[tuple[Case, Rows]]:
    """Each case and its rows, which are printed below the head, added to the report's, and saved before the next case,
    so that what is known stays known."""
    said = [head]
    print(head, flush=True)
    report["rows"] = []
    for case in cases:
        rows = compare(case)
        lines = list(map(line, rows))
        print("\n".join(lines), flush=True)
        said += lines
        report["rows"] += rows
        save(file, report, "\n".join(said))
        yield case, rows


def save(file: Path | None, report: dict[str, Any], said: str) -> None:
    """The report to the file, and what was said beside it as .txt."""
    if file:
        replace_durably(file, json.dumps(report, indent=2) + "\n")
        file.with_suffix(".txt").write_text(said + "\n")
