"""Outcomes of measurements: exit codes, causes of errors, verdicts on bars, and result files."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jaxopt_llm.core.files import replace_durably

Case = TypeVar("Case")
Rows = list[dict[str, Any]]

NOT_MEASURED = 6  # exit code: nothing failed, but something was not measured; its name is printed


@dataclass(frozen=True)
class Verdict:
    """Verdict on a claim or a bar: the text, whether it holds, and the figures."""

    said: str
    holds: bool
    found: str

    def line(self, holds: str = "PASS", fails: str = "FAIL") -> str:
        return f"{holds if self.holds else fails}  {self.said}\n         {self.found}"


def cause(complaints: str) -> str:
    """Return the line of standard error that names the last exception, or else the last line.

    The text of an exception may be pages long (XLA lists buffers), and JAX adds notes after it.
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
    """Compare each case; yield it with its rows.

    The rows are printed below the head, added to the report, and saved before the next case, so that an interrupted run
    keeps them.
    """
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
    """Write the report to the file, and the printed text next to it as .txt."""
    if file:
        replace_durably(file, json.dumps(report, indent=2) + "\n")
        file.with_suffix(".txt").write_text(said + "\n")
