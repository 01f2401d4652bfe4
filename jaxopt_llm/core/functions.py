"""Functions of the user that settings name, each as FILE:FUNCTION."""

import runpy
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxopt_llm.core.errors import InputError, describe_error


def load_functions(names: Sequence[str]) -> list[Callable[..., Any]]:
    """Return the functions with these names. A file runs once.

    Raises:
        InputError: there is no such file or function.
    """
    found, modules = [], dict[str, Mapping[str, Any]]()
    for each in names:
        file, _, name = each.rpartition(":")
        if not Path(file).is_file():
            raise InputError(f"{each}: no such file")
        if file not in modules:
            modules[file] = runpy.run_path(file)
        function = modules[file].get(name)
        if not callable(function):
            raise InputError(f"{each}: the file defines no function {name}")
        found.append(function)
    return found


def describe_failure(error: BaseException) -> str:
    """Return an error of a user's function in one line, with the place where it was raised."""
    if isinstance(error, InputError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}, line {frames[-1].lineno}: {type(error).__name__}: {describe_error(error)}"
