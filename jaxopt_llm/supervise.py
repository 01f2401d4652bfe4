"""Command `supervise`: a program that continues a run, started again after faults.

python -m jaxopt_llm.supervise [--restarts N] [--backoff SECONDS] -- train --config FILE --run.directory DIR ...
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxopt_llm.config import DistributedConfig
from jaxopt_llm.core import errors
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.distributed import launchers
from jaxopt_llm.supervision.journal import newest_checkpoint
from jaxopt_llm.supervision.policy import Patience
from jaxopt_llm.supervision.supervisor import Supervisor

PROGRAM = errors.program_name("supervise")


def main() -> int:
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, words = make_parser().parse_args(arguments[:split]), arguments[split + 1 :]
    if not words:
        raise InputError(f"supervise: no program is given; try: {PROGRAM} -- train --config FILE --run.directory DIR")
    directory = options.run_directory or find_setting(words, "run.directory")
    if not directory:
        raise InputError("supervise: the run directory is unknown; give --run.directory after --, or --run-directory")
    job = launchers.find_job(_find_distributed(words), os.environ)
    patience = Patience(options.restarts, options.backoff, newest_checkpoint(Path(directory)))
    return Supervisor(make_command(words), Path(directory), job.index, patience).run()


def make_command(words: Sequence[str]) -> list[str]:
    """Return the program and its arguments: the command `train`, or any program.

    Raises:
        InputError: there is no such program.
    """
    if words[0] == "train":
        return [sys.executable, "-m", "jaxopt_llm", *words]
    if shutil.which(words[0]) is None:
        raise InputError(f"supervise: there is no program {words[0]}; give train, or a program such as python")
    return list(words)


def find_setting(words: Sequence[str], name: str) -> str | None:
    """Return the last value of the flag --name, which is written with dashes or underscores; None: it is not given."""
    found = None
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag.replace("-", "_") == f"--{name}".replace("-", "_"):
            found = value if equals else next(iter(words[index + 1 :]), None)
    return found


def _find_distributed(words: Sequence[str]) -> DistributedConfig:
    """Return the settings of the job in the arguments of the program."""
    numbers = ("processes", "process_id", "timeout_seconds")
    given = {name: find_setting(words, f"distributed.{name}") for name in ("coordinator", *numbers)}
    try:
        values = {name: int(text) if name in numbers else text for name, text in given.items() if text is not None}
    except ValueError as error:
        raise InputError(f"a flag --distributed.* is not a number ({error}); correct it") from error
    return DistributedConfig(**values)  # type: ignore[arg-type]


def make_parser() -> argparse.ArgumentParser:
    parser = errors.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [options] -- train ARGUMENTS, or -- PROGRAM ARGUMENTS",
        description="Run a program that continues a run from its last checkpoint: train, or a script that ends by "
        "jaxopt_llm.run_job. After a fault it is started again. Exit codes 0, 2, 3 and 4 are final. A signal that asks "
        "the supervisor to stop is passed on, and it ends with the code of its program. Faults are written to "
        "faults.jsonl in the run directory.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--restarts", type=_whole, default=10, metavar="N", help="restarts without a new checkpoint (default: 10)")
    add(
        "--backoff",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="pause before the first restart, doubled up to 60 s until there is a new checkpoint (default: 1)",
    )
    add("--run-directory", metavar="DIR", help="run directory, if the program has no --run.directory")
    return parser


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: must be 0 or a larger whole number")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a number of seconds, 0 or larger")
    return seconds


if __name__ == "__main__":
    errors.run_command(main)
