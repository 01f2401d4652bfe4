"""Errors that end a command with one line and an exit code, never a traceback."""

import sys
from collections.abc import Callable
from typing import NoReturn


class InputError(Exception):
    """The user's configuration or input is wrong: says what, where and how to mend it."""

    exit_code = 2


class TrainingDiverged(InputError):
    """The loss or the gradient is no longer finite."""

    exit_code = 3


class CheckpointError(InputError):
    """A checkpoint is missing, unreadable or does not fit the model."""

    exit_code = 4


def run(main: Callable[[], int]) -> NoReturn:
    """Runs a command and exits with its code; an InputError becomes one line on standard error."""
    try:
        code = main()
    except InputError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
