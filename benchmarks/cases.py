"""Command line of the benchmarks that compile named cases: one row of a table, and of a JSON file, for each."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxopt_llm.core import errors

Row = Mapping[str, Any]  # with the name of its case as `case`


def run_cases(
    description: str | None,
    cases: Mapping[str, Callable[[], Row]],
    header: str,
    format_row: Callable[[Row], str],
    save: Callable[[Path, Sequence[Row]], None],
) -> int:
    """Print the rows of the cases that the command line names, and save them with those that the file has.

    A file has rows of one version of JAX, which it names.

    Args:
        cases: functions that return a row, by name, in the order of the file.
        save: writes the rows to a file.
    """
    parser = errors.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(cases)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help="cases to compile")
    parser.add_argument("--json", type=Path, help="file for the figures; the table is written next to it as .txt")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    rows = _read_rows(options.json, replaced=set(options.only) == set(names)) if options.json else {}
    print(header, flush=True)
    for name, make_row in cases.items():
        if name in options.only:
            rows[name] = make_row()
            print(format_row(rows[name]), flush=True)
            if options.json:  # after each case, so that an interrupted run keeps its rows
                save(options.json, [rows[each] for each in names if each in rows])
    return 0


def _read_rows(file: Path, replaced: bool) -> dict[str, Row]:
    """Return the rows of a file by case; none if it does not exist.

    replaced: whether all cases are computed again. Only then may the rows be of another version of JAX.
    """
    if not file.exists():
        return {}
    report = json.loads(file.read_text())
    if report["jax"] == jax.__version__:
        return {row["case"]: row for row in report["rows"]}
    if not replaced:
        raise errors.InputError(
            f"--json {file}: its rows are of jax {report['jax']}, and this is jax {jax.__version__}: leave out --only, "
            "or name another file"
        )
    return {}
