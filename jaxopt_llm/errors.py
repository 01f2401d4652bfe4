"""Errors that end a command with one line and an exit code, never a traceback."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn


class CommandError(Exception):
    """Ends a command: its message, one line, says what happened, where and how to mend it."""

    exit_code: int
    label = "error: "


class InputError(CommandError):
    """The user's configuration or input is wrong."""

    exit_code = 2


class TrainingDiverged(CommandError):
    """The loss is no longer finite, or too many steps in a row were skipped."""

    exit_code = 3


class CheckpointError(CommandError):
    """A checkpoint is missing, unreadable or does not fit the model."""

    exit_code = 4


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
    except CommandError as error:
        print(error.label + " ".join(str(error).split()), file=sys.stderr)
        code = error.exit_code
    except BrokenPipeError:
        code = 128 + signal.SIGPIPE  # as a program that it ends: who read the output has had enough
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        code = InputError.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 128 + signal.SIGINT
    try:
        sys.stdout.flush()
    except OSError:  # else the interpreter's own flush would fail, and change the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
