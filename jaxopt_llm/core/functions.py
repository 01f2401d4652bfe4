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
    """Return a hash of the sources of functions, each with what it uses of its file.

    Another path, and statements of the file that no function uses, do not change it: a recipe may hold both functions
    and settings. What the file imports is not read.

    Raises:
        InputError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for each in names:
        file, _, name = each.rpartition(":")
        try:
            with tokenize.open(file) as opened:
                source = opened.read()
            used = _find_used(ast.parse(source, file), name)
        except (OSError, ValueError) as error:
            raise InputError(f"{each}: {describe_error(error)}") from error
        except SyntaxError as error:
            raise InputError(f"{each}: {describe_failure(error)}") from error
        parts = [part for node in used for part in (*getattr(node, "decorator_list", []), node)]
        digest.update(repr((name, [ast.get_source_segment(source, part) for part in parts])).encode())
    return digest.hexdigest()


_DEFINITIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef


def _find_used(file: ast.Module, name: str) -> list[ast.stmt]:
    """Return the statements of a file that a function may use: definitions, imports, and what changes their values."""
    mentions = {node: [part for part in ast.walk(node) if isinstance(part, ast.Name)] for node in file.body}
    defines, touches, decorators = (dict[ast.stmt, set[str]]() for _ in range(3))
    for node, parts in mentions.items():
        if isinstance(node, _DEFINITIONS):
            defines[node] = touches[node] = {node.name}
            above = (part for each in node.decorator_list for part in ast.walk(each))
            decorators[node] = {part.id for part in above if isinstance(part, ast.Name)}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defines[node] = touches[node] = {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        else:  # such as TABLE = {}, TABLE["a"] = 1 or TABLE.update(a=1)
            defines[node] = {part.id for part in parts if isinstance(part.ctx, ast.Store)}
            touches[node] = {part.id for part in parts}
    others = [node for node in file.body if not isinstance(node, (*_DEFINITIONS, ast.Import, ast.ImportFrom))]
    variables = set[str]().union(*map(defines.__getitem__, others))
    for node, called in decorators.items():  # such as @register, which puts a function into TABLE
        bodies = [part.id for other in decorators if defines[other] & called for part in mentions[other]]
        touches[node] = touches[node] | ({*bodies, *called} & variables)
    known, names, used = set[str]().union(*defines.values()), {name, "*"}, set[ast.stmt]()
    while new := {node for node in file.body if touches[node] & names} - used:
        used |= new
        names |= {part.id for node in new for part in mentions[node]} & known
    return [node for node in file.body if node in used]


def describe_failure(error: BaseException) -> str:
    """Return an error of a user's function or file in one line, with the last place in files of the user's."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(OTHERS)]
    place = f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else ""  # none: of the call itself
    return f"{place}{type(error).__name__}: {describe_error(error)}"
