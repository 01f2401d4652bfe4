"""JSON from files and from other processes: the only place that parses it.

Whatever the text is, the parser raises a ValueError with one line: no RecursionError, and no value that other code
cannot walk, hash or write again.
"""

import itertools
import json
import math
from pathlib import Path
from typing import Any, NoReturn

from jaxopt_llm.core.errors import CommandError, InputError, describe_error
from jaxopt_llm.core.files import read_file

MAX_BYTES = 2**27  # of a file that is read as a whole; values take up to 20 times the memory of their text
MAX_DEPTH = 100  # of lists and objects within each other

_DECODER = json.JSONDecoder()


def parse(text: str | bytes) -> Any:
    """Return the value of a JSON text. Repeated keys and numbers that are not finite are accepted, as by `json`.

    Raises:
        ValueError: the text is not JSON, is not UTF-8, or is nested more than MAX_DEPTH deep.
    """
    return _parse(text)


def parse_settings(text: str | bytes) -> Any:
    """Return the value of a JSON text that describes something.

    Raises:
        ValueError: as in `parse`; also for a key that appears twice in an object, for a number that is not finite, and
            for half of a surrogate pair, which is no text.
    """
    text = _decode(text)
    value = _parse(text, object_pairs_hook=_build_object, parse_constant=_refuse_number, parse_float=_parse_float)
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()  # a UnicodeEncodeError is a ValueError
    return value


def parse_object(text: str | bytes) -> dict[str, Any] | None:
    """Return the object that a JSON text is; None for any other text, such as a line that was cut."""
    try:
        value = parse(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def parse_prefix(text: str, at: int) -> tuple[Any, int]:
    """Return the value that begins at an index of a text, and the index of its end. Raises ValueError as `parse`."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except RecursionError:
        raise _too_deep() from None
    _check_depth(value, text[at:end])
    return value, end


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file of at most MAX_BYTES. Raises InputError, ValueError or OSError."""
    return read_file(path, MAX_BYTES)


def read(path: Path, remedy: str, error: type[CommandError] = InputError) -> Any:
    """Read a file with settings: see `parse_settings`.

    Args:
        path: the file.
        remedy: how to fix a file that is not valid JSON.
        error: raised if the file cannot be read or parsed; its message names the path.
    """
    try:
        return parse_settings(read_bytes(path))
    except FileNotFoundError as problem:
        raise error(f"there is no file {path}") from problem
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror or problem}); {remedy}") from problem
    except ValueError as problem:
        raise error(f"{path}: invalid JSON ({describe_error(problem)}); {remedy}") from problem


def read_object(path: Path, remedy: str, error: type[CommandError] = InputError) -> dict[str, Any]:
    """Read a JSON object: see `read`."""
    value = read(path, remedy, error)
    if not isinstance(value, dict):
        raise error(f"{path}: the JSON is not an object; {remedy}")
    return value


def _parse(text: str | bytes, **hooks: Any) -> Any:
    text = _decode(text)
    try:
        value = json.loads(text, **hooks)
    except RecursionError:
        raise _too_deep() from None
    _check_depth(value, text)
    return value


def _decode(text: str | bytes) -> str:
    return text if isinstance(text, str) else text.decode("utf-8-sig")


def _check_depth(value: Any, text: str) -> None:
    """Raise ValueError for a value that other code could not walk. The parser itself allows almost 1000 levels."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    level = [value]
    for _ in range(MAX_DEPTH):
        children = itertools.chain.from_iterable(each.values() if isinstance(each, dict) else each for each in level)
        level = [child for child in children if isinstance(child, (dict, list))]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"nested more than {MAX_DEPTH} deep")


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} appears twice in one object")
    return result


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a finite number")


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        _refuse_number(text)
    return number
