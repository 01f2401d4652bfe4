"""Functions of the user that settings name, each as FILE:FUNCTION."""

import ast
import hashlib
import runpy
import sysconfig
import tokenize
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxopt_llm.core.errors import InputError, describe_error

# Beginnings of the names of files that are not the user's.
OTHERS = (str(Path(__file__).parents[1]), sysconfig.get_path("purelib"), "<frozen ")


def load_functions(names: Sequence[str]) -> list[Callable[..., Any]]:
    """Return the functions with these names. A file runs once.

    Raises:
        InputError: there is no such file or function.
    """
    found, modules = [], dict[str, Mapping[str, Any]]()
    for each in names:
        file, _, name = each.rpartition(":")
        if not Path(file).is_file():
            raise InputError(f"{each}: no such file {file}; the form is FILE:FUNCTION")
        if file not in modules:
            try:
                modules[file] = runpy.run_path(file)
            except Exception as error:  # files of the user raise anything
                raise InputError(f"{each}: {describe_failure(error)}") from error
        function = modules[file].get(name)
        if not callable(function):
            raise InputError(f"{each}: the file defines no function {name}")
        found.append(function)
    return found


def hash_sources(names: Sequence[str]) -> str:
    """Return a hash of functions and of the files that define them.

    The path, comments, and the function get_config do not change it: a recipe may hold its settings, which are compared
    by themselves, and functions. What the file imports is not read.

    Raises:
        InputError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for each in names:
        file, _, name = each.rpartition(":")
        try:
            with tokenize.open(file) as opened:
                body = ast.parse(opened.read(), file).body
        except (OSError, ValueError) as error:
            raise InputError(f"{each}: {describe_error(error)}") from error
        except SyntaxError as error:
            raise InputError(f"{each}: {describe_failure(error)}") from error
        kept = [node for node in body if not (isinstance(node, ast.FunctionDef) and node.name == "get_config")]
        digest.update(repr((name, [ast.unparse(node) for node in kept])).encode())
    return digest.hexdigest()


def describe_failure(error: BaseException) -> str:
    """Return an error of a user's function or file in one line, with the last place in files of the user's."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(OTHERS)]
    place = f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else ""  # none: of the call itself
    return f"{place}{type(error).__name__}: {describe_error(error)}"
