"""Command `outer_server`: the server at which groups that are jobs of their own average what they have learnt.

python -m jaxopt_llm.outer_server --listen HOST:PORT --directory DIR --groups N [--wait SECONDS] [--token-file FILE]
    [--new-settings]
"""

from jaxopt_llm.core import stop_signals

if __name__ == "__main__":
    stop_signals.end_at_signals()  # before the imports, which a signal does not wait for

import argparse
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from jaxopt_llm.config.addresses import find_problem, parse_address
from jaxopt_llm.core import errors
from jaxopt_llm.core.flag_types import positive, seconds

PROGRAM = errors.program_name("outer_server")


def main() -> int:
    options = make_parser().parse_args()
    if why := find_problem(options.listen):
        raise errors.InputError(f"--listen {options.listen}: {why}")
    _check_directory(options.directory)
    from jaxopt_llm.checkpoint.native.lock import lock_directory
    from jaxopt_llm.outer.server import OuterServer, open_listener
    from jaxopt_llm.outer.token import read_token

    token, new_settings = read_token(options.token_file, "--token-file"), options.new_settings
    with (
        lock_directory(options.directory, "--directory"),
        open_listener(parse_address(options.listen)) as listener,
        OuterServer(
            listener, options.directory, options.groups, options.wait, token, new_settings=new_settings
        ) as server,
    ):
        groups = "1 group" if options.groups == 1 else f"{options.groups} groups"
        print(f"listens at {options.listen} for {groups}", file=sys.stderr, flush=True)
        server.serve(_listen_to_signals())
    print("stopped; the same command goes on from the last round", file=sys.stderr, flush=True)
    return stop_signals.EXIT_CODE


def _check_directory(directory: Path) -> None:
    """Check that a directory can be that of a server.

    Raises:
        InputError: it is a file, or that of a run.
    """
    if directory.is_file():
        raise errors.InputError(f"--directory {directory} is a file; give a directory, which may be new")
    if (directory / "config.json").exists() and (directory / "checkpoints").exists():
        raise errors.InputError(f"--directory {directory} holds a run; give the outer server a directory of its own")


def _listen_to_signals() -> Callable[[], bool]:
    """Return a function that says whether a signal has asked for a stop."""
    stopped = threading.Event()
    for each in stop_signals.SIGNALS:
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, lambda *_: stopped.set())
    return stopped.is_set


def make_parser() -> argparse.ArgumentParser:
    parser = errors.ArgumentParser(
        prog=PROGRAM,
        description="Average what groups of a training have learnt, each of which is a job of its own with "
        "groups.server and training.local_steps. The outer masters are kept in the directory, from which the command "
        "continues. It needs no accelerator, and runs until a signal ends it.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--listen", required=True, metavar="HOST:PORT", help="address at which the groups reach it")
    add("--directory", type=Path, required=True, metavar="DIR", help="directory of the masters and of rounds.jsonl")
    add("--groups", type=positive, required=True, metavar="N", help="number of groups: their groups.count")
    add(
        "--wait",
        type=seconds,
        default=300.0,
        metavar="SECONDS",
        help="time that a round waits for the other groups after the first has contributed (default: 300)",
    )
    add("--token-file", default="", metavar="FILE", help="file with a secret: groups.token_file of the groups")
    add(
        "--new-settings",
        action="store_true",
        help="change settings of all groups: those of the first group that joins count, in place of those that are "
        "kept beside the masters",
    )
    return parser


if __name__ == "__main__":
    errors.run_command(main)
