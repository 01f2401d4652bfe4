"""Errors that end a command with one line and an exit code, never a traceback."""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn


class CommandError(Exception):
    """Ends a command: its message, one line, says what happened, where and how to mend it."""

    exit_code: int
    label = "error: "


class InputError(CommandError):
    """The user's configuration or input is wrong."""

    exit_code = 2


class OutOfMemory(InputError):
    """The configuration needs more memory than there is. details: lines that follow the message's own."""

    def __init__(self, message: str, details: Sequence[str]) -> None:
        super().__init__(message)
        self.details = tuple(details)


class TrainingDiverged(CommandError):
    """The loss is no longer finite, too many steps in a row were skipped, or the loss scale fell below its floor."""

    exit_code = 3


class CheckpointError(CommandError):
    """A checkpoint is missing, unreadable or does not fit the model."""

    exit_code = 4


class ProcessLost(CommandError):
    """Another process of the job has died or does not answer. The same command continues from the last checkpoint."""

    exit_code = 5

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; run again to continue from the last checkpoint")


class Preempted(CommandError):
    """A signal stopped the run. No error: what it did is saved, and the same command continues it."""

    exit_code = 75
    label = ""

    def __init__(self, step: int) -> None:
        super().__init__(f"preempted at step {step}; run again to continue")


class ArgumentParser(argparse.ArgumentParser):
    """Whose errors end a command as its other errors do."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def run(main: Callable[[], int]) -> NoReturn:
    """Runs a command and exits with its code; what the user can mend becomes one line on standard error."""
    try:
        code = main()
    except (CommandError, OSError, KeyboardInterrupt) as error:
        code = report(error)
    try:
        sys.stdout.flush()
    except OSError:  # else the interpreter's own flush would fail, and change the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def report(error: BaseException) -> int:
    """Tells an error: what the user can mend as one line, what is a fault of this program with its traceback. Returns
    the exit code."""
    if isinstance(error, CommandError):
        details = error.details if isinstance(error, OutOfMemory) else ()
        print("\n".join((error.label + line(error), *details)), file=sys.stderr, flush=True)
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE  # as a program that it ends: who read the output has had enough
    if isinstance(error, OSError):
        print(f"error: {line(error)}", file=sys.stderr, flush=True)
        return InputError.exit_code
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT
    traceback.print_exception(error)
    return 1


def line(error: BaseException) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split())
