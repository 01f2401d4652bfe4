"""Command `supervise`: a program that continues a run, started again after faults.

python -m jaxopt_llm.supervise [--restarts N] [--backoff SECONDS] -- train --config FILE --run.directory DIR ...
"""

from jaxopt_llm.core import stop_signals

if __name__ == "__main__":
    stop_signals.end_at_signals()  # until the supervisor has its own handlers

import argparse
import os
import shutil
import sys
from pathlib import Path

from jaxopt_llm.config import DistributedConfig
from jaxopt_llm.core import errors
from jaxopt_llm.core.errors import InputError, positive, seconds, whole
from jaxopt_llm.distributed import launchers
from jaxopt_llm.supervision.faults import RestartBudget, newest_checkpoint
from jaxopt_llm.supervision.leader import Limits
from jaxopt_llm.supervision.supervisor import supervise
from jaxopt_llm.supervision.task import Task, find_setting

PROGRAM = errors.program_name("supervise")


def main() -> int:
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, words = make_parser().parse_args(arguments[:split]), tuple(arguments[split + 1 :])
    if not words:
        raise InputError(f"supervise: no program is given; try: {PROGRAM} -- train --config FILE --run.directory DIR")
    if words[0] != "train" and shutil.which(words[0]) is None:
        raise InputError(f"supervise: there is no program {words[0]}; give train, or a program such as python")
    directory = options.run_directory or find_setting(words, "run.directory")
    if not directory:
        raise InputError("supervise: the run directory is unknown; give --run.directory after --, or --run-directory")
    job = launchers.find_job(_find_distributed(words), os.environ)
    limits = Limits(options.hosts or job.processes, options.min_hosts, options.elastic)
    if not limits.least <= limits.hosts <= job.processes:
        raise InputError(
            f"supervise: the job has {job.processes} host(s), which cannot be --hosts {limits.hosts} of at least "
            f"--min-hosts {limits.least}; correct the numbers"
        )
    budget = RestartBudget(options.restarts, options.backoff, newest_checkpoint(Path(directory)))
    return supervise(Task(words, Path(directory), job), limits, budget)


def _find_distributed(words: tuple[str, ...]) -> DistributedConfig:
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
    add("--restarts", type=whole, default=10, metavar="N", help="restarts without a new checkpoint (default: 10)")
    add(
        "--backoff",
        type=seconds,
        default=1.0,
        metavar="SECONDS",
        help="pause before the first restart, doubled up to 60 s until there is a new checkpoint (default: 1)",
    )
    add(
        "--elastic",
        type=seconds,
        metavar="SECONDS",
        help="of several hosts: leave out those that do not come back within this time (default: wait for all)",
    )
    add("--min-hosts", type=positive, default=1, metavar="N", help="with --elastic: never train on fewer (default: 1)")
    add(
        "--hosts",
        type=positive,
        metavar="N",
        help="hosts that the mesh is for, if the job has more: the others wait as spares (default: all)",
    )
    add("--run-directory", metavar="DIR", help="run directory, if the program has no --run.directory")
    return parser


if __name__ == "__main__":
    errors.run_command(main)
