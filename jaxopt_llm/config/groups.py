"""Syntax of parameter groups in settings: each is PATTERN=NUMBER, such as "*/attention/*=0.5"."""

import math
from collections.abc import Sequence


def parse_group(group: str) -> tuple[str, float]:
    """Return the pattern and the number of a group. Raise ValueError for any other text."""
    pattern, _, value = group.rpartition("=")
    if not pattern:
        raise ValueError
    return pattern, float(value)


def syntax_problems(name: str, groups: Sequence[str]) -> list[str]:
    """List the syntax errors of some groups. name: dotted name of the setting, for the messages."""

    def is_wrong(group: str) -> bool:
        try:
            return not 0 <= parse_group(group)[1] < math.inf
        except ValueError:
            return True

    form = "must be PATTERN=NUMBER with a number of at least 0, as in */mlp/*=0.5"
    return [f"{name}: {group}: {form}" for group in groups if is_wrong(group)]
