"""Write the table of docs/claims.md from benchmarks/results/claims.json, the result of benchmarks/claims.py.

    .venv/bin/python scripts/claims_page.py          write the table
    .venv/bin/python scripts/claims_page.py --check  exit with 1 if it is out of date

The rest of the page is written by hand.
"""

import json
import sys
from collections.abc import Iterator

from pages import ROOT, write_or_check

PAGE, RESULT = ROOT / "docs" / "claims.md", ROOT / "benchmarks" / "results" / "claims.json"
BEGIN, END = "<!-- table of scripts/claims_page.py -->", "<!-- end of the table -->"


def make_rows() -> Iterator[str]:
    """Yield the lines of the table."""
    result = json.loads(RESULT.read_text())
    yield from (f"With jax {result['jax']}:", "")
    yield from ("| claim | verdict | what was found | setting | by itself |", "|---|---|---|---|---|")
    for row in result["rows"]:
        says, command = f"{row['says']}; {row['source']}", f"`python benchmarks/claims.py --only {row['case']}`"
        yield f"| {says} | **{row['verdict']}** | {row['found']} | {row['setting']} | {command} |"


def main() -> int:
    before, found, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert found and end, "the page has lost the comments around the table"
    return write_or_check(PAGE, "\n".join([f"{before}{BEGIN}", "", *make_rows(), "", f"{END}{after}"]))


if __name__ == "__main__":
    sys.exit(main())
