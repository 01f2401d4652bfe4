"""Errors that end a command with a one-line message and an exit code, and the parts that messages share."""

import argparse
import contextlib
import difflib
import errno
import math
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from jaxopt_llm.core import stop_signals

MAX_MESSAGE = 5000  # characters
_HOLDER = Path(__file__).parent.parent.parent  # of this package: the clone, or site-packages
UNFORESEEN = 1  # exit code after an error that is a bug, with its traceback
IO_ERROR = 74  # exit code after an error of a disk or a network, which may pass by itself
_TRANSIENT = {
    getattr(errno, name)
    for name in (
        *("EIO", "ENOSPC", "EROFS", "EDQUOT", "ESTALE", "ENOLCK", "EREMOTEIO", "EAGAIN", "EBUSY", "ENFILE", "EMFILE"),
        *("ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH", "ENOTCONN", "ESHUTDOWN"),
    )
    if hasattr(errno, name)  # each system has its own
}


class CommandError(Exception):
    """Base class of the errors that end a command.

    The message is one line. It says what happened, where, and how to fix it.
    """

    exit_code: int
    label = "error: "


class InputError(CommandError):
    """Error in the user's configuration or input."""

    exit_code = 2


class OutOfMemory(InputError):
    """Error for a configuration that needs more memory than is available.

    details: lines that are printed below the message.
    """

    def __init__(self, message: str, details: Sequence[str]) -> None:
        super().__init__(message)
        self.details = tuple(details)


class TrainingDiverged(CommandError):
    """Error for a run that diverged.

    The loss is not finite, too many steps in a row were skipped, or the loss scale fell below its minimum.
    """

    exit_code = 3


class CheckpointError(CommandError):
    """Error for a checkpoint that is missing, unreadable or does not match the model."""

    exit_code = 4


class StorageFailed(CheckpointError):
    """Error for a disk that failed under a run, for example because it is full or has become read-only.

    This may pass by itself. The same command then continues from the last checkpoint.
    """

    exit_code = IO_ERROR


class ServerFailed(InputError):
    """Error for a server of another program that does not answer.

    This may pass by itself. The same command then continues from the last checkpoint.
    """

    exit_code = IO_ERROR


class ProcessLost(CommandError):
    """Error for a job in which another process died or does not answer.

    The same command continues from the last checkpoint.

    step: step of the last checkpoint; 0 if the run has none, None if this process has not looked for one yet.
    """

    exit_code = 5

    def __init__(self, reason: str, step: int | None) -> None:
        if step == 0:
            remedy = "there is no checkpoint yet: run again to start at step 0"
        else:
            remedy = "run again to continue from the last checkpoint" + ", if there is one" * (step is None)
        super().__init__(f"{reason}; {remedy}")


class ProcessMissing(CommandError):
    """Error for a job in which, at the start, another process did not connect in time or could not be reached.

    A restart may help: the process may be late, or its network may be cut off.
    """

    exit_code = ProcessLost.exit_code


class DoesNotFit(CommandError):
    """Result of a plan whose step needs more memory than the GPUs have.

    It has its own exit code, so that a script can tell it from bad input.
    """

    exit_code = 6


class StateCorrupted(CommandError):
    """Error for a training state that a device has computed or stored wrongly.

    The same command continues from the last checkpoint, which is older than the fault.
    """

    exit_code = 9


class Preempted(CommandError):
    """End of a run that a signal stopped.

    This is not a failure: the run has saved its state, and the same command continues it.
    """

    exit_code = stop_signals.EXIT_CODE
    label = ""

    def __init__(self, step: int) -> None:
        super().__init__(f"preempted at step {step}; run again to continue")


_prefix = "python -m jaxopt_llm."


def set_program_prefix(prefix: str) -> None:
    """Set the text before the name of a command in its help. Call it before the command's module is imported."""
    global _prefix
    _prefix = prefix


def program_name(command: str) -> str:
    """Return how the user starts a command: as a module or as `jaxopt-llm COMMAND`, which is spelt with dashes."""
    return _prefix + (command if _prefix.endswith(".") else command.replace("_", "-"))


@contextlib.contextmanager
def own_flags(flags: Mapping[str, str]) -> Iterator[None]:
    """Name the flags of a command in errors that name settings, such as `data.text_field` or `--data.text_field`.

    flags: flags by setting. Other settings keep their names.
    """
    try:
        yield
    except CommandError as error:
        error.args = (_name_flags(str(error), flags), *error.args[1:])
        raise


def _name_flags(message: str, flags: Mapping[str, str]) -> str:
    def find_flag(found: re.Match[str]) -> str:
        flag = flags.get(found[1].replace("-", "_"))
        return found[0] if flag is None else flag + (" " if found[2] else "")

    # Not within a path. "=" separates a setting from its value.
    return re.sub(r"(?<![\w./-])(?:--)?([a-z]+\.[a-z][a-z_-]*)(=?)", find_flag, message)


class ArgumentParser(argparse.ArgumentParser):
    """Argument parser that raises InputError instead of printing its usage and exiting.

    The message proposes the flag whose spelling is nearest to an unknown one.
    """

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: --([\w-]+)", message)
        near = difflib.get_close_matches(unknown[1], list_flags(self), n=1) if unknown else []
        raise InputError(f"{message}; did you mean --{near[0]}?" if near else message)


def list_flags(parser: argparse.ArgumentParser) -> list[str]:
    """Return the flags of a parser and of its subcommands, without dashes before them."""
    found = [flag.lstrip("-") for flag in parser._option_string_actions if flag.startswith("--")]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [flag for subcommand in action.choices.values() for flag in list_flags(subcommand)]
    return found


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command and exit with its exit code. Print errors that the user can fix as one line on standard error."""
    try:
        code = main()
    except (CommandError, OSError, KeyboardInterrupt) as error:
        code = report_error(error)
    try:
        sys.stdout.flush()
    except OSError:  # without this, the flush at interpreter exit would fail too and change the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def report_error(error: BaseException) -> int:
    """Print an error on standard error and return the exit code.

    An error that the user can fix becomes one line. A bug of this program keeps its traceback.
    """
    if isinstance(error, CommandError):
        details = error.details if isinstance(error, OutOfMemory) else ()
        print("\n".join((error.label + one_line(error), *details)), file=sys.stderr, flush=True)
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE  # the code of a program that SIGPIPE ends: the reader of the output has closed it
    if isinstance(error, OSError):
        print(f"error: {describe_error(error)}", file=sys.stderr, flush=True)
        return IO_ERROR if may_pass(error) else InputError.exit_code
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT
    traceback.print_exception(error)
    return UNFORESEEN


def may_pass(error: OSError) -> bool:
    """Return whether an error is one of a disk or a network, which may pass by itself."""
    return isinstance(error, (TimeoutError, ConnectionError)) or error.errno in _TRANSIENT


@contextlib.contextmanager
def refuse(message: str, error: type[Exception] = ValueError) -> Iterator[None]:
    """Raise this error in place of a failed assertion of chex, whose text names no remedy."""
    try:
        yield
    except AssertionError as failed:
        raise error(message) from failed


def describe_error(error: BaseException) -> str:
    """Return the message of an error on one line. The number of an error of a file system is left out."""
    if not isinstance(error, OSError) or error.strerror is None:
        return one_line(error)
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"there is no file {error.filename}"
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line. Names from a damaged file may be long, so it is cut in the middle."""
    line = " ".join(str(error).split())
    half = MAX_MESSAGE // 2
    return line if len(line) <= MAX_MESSAGE else f"{line[:half]} ... {line[-half:]}"


def describe_install(extra: str) -> str:
    """Return the command that adds an extra to the installed package.

    The package is in no registry. pip finds the packages of an extra in the metadata of a wheel that is installed. A
    clone is named by its path, because Python may find it without an installation.
    """
    if not (_HOLDER / "pyproject.toml").is_file():
        return f"pip install 'jaxopt_llm[{extra}]'"
    clone = "." if Path.cwd() == _HOLDER else _HOLDER
    return f"pip install -e '{clone}[{extra}]'"


# --- types of flags, for argparse: each one returns a value or says what the flag must be


def whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: must be 0 or a larger whole number")
    return int(text)


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or a larger whole number")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of seconds, 0 or larger")
    return value
