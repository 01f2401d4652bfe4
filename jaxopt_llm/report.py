"""Command `report`: the curves and events of one or several runs as a page.

python -m jaxopt_llm.report RUN_DIR [RUN_DIR ...] [--output FILE]
"""

import argparse
import importlib
import sys
from pathlib import Path

from jaxopt_llm.core import errors
from jaxopt_llm.core.errors import InputError, describe_install
from jaxopt_llm.core.files import replace_durably

PROGRAM = errors.program_name("report")


def main() -> int:
    options = make_parser().parse_args(sys.argv[1:])
    output: Path = options.output
    if not output.parent.is_dir() or output.is_dir():
        problem = f"{output.parent} does not exist" if not output.parent.is_dir() else "it is a directory"
        raise InputError(f"--output {output}: {problem}; name a file in a directory that exists")
    plotly = _load_plotly()
    from jaxopt_llm.observe.report import page, run_files  # imported here, so that --help does not wait for them

    runs = run_files.read_runs(options.runs)
    if output.exists() and not page.is_report(output):
        raise InputError(f"--output {output}: it exists and is not a report; name another file")
    replace_durably(output, page.render_page(runs, plotly))
    names = ", ".join(run.name for run in runs)
    print(f"{output} ({output.stat().st_size / 1e6:.1f} MB) shows {names}; open it in a browser")
    return 0


def _load_plotly() -> str:
    """Return the source of Plotly's JavaScript library. Raise InputError if the package is missing."""
    try:
        source: str = importlib.import_module("plotly.offline").get_plotlyjs()
    except ImportError as error:
        raise InputError(f"report requires plotly ({error}); run: {describe_install('report')}") from error
    return source


def make_parser() -> argparse.ArgumentParser:
    parser = errors.ArgumentParser(
        prog=PROGRAM,
        description="Write one HTML page that compares runs: loss, held-out loss, gradient norm, speed, wait for data, "
        "memory, events, settings, results of tasks and sample answers. It opens from disk and loads nothing from the "
        "network.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN_DIR", help="directory of a training run, finished or not")
    add("--output", type=Path, default=Path("report.html"), metavar="FILE", help="page to write (default: report.html)")
    return parser


if __name__ == "__main__":
    errors.run_command(main)
