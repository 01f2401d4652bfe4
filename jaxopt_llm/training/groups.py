"""Groups of parameters: a number for each, by first-match path patterns such as "*/attention/*=0.5"."""

import math
from collections.abc import Sequence

import jax

from jaxopt_llm import tree


def number(groups: Sequence[str], path: str) -> float:
    """That of the first group whose pattern fits the path."""
    return next(value for pattern, value in map(_parse, groups) if tree.first_match(path, (pattern,)))


def _parse(group: str) -> tuple[str, float]:
    pattern, _, value = group.rpartition("=")
    if not pattern:
        raise ValueError
    return pattern, float(value)


def syntax_problems(name: str, groups: Sequence[str]) -> list[str]:
    """name: of the field, dotted."""

    def is_wrong(group: str) -> bool:
        try:
            value = _parse(group)[1]
        except ValueError:
            return True
        return not (math.isfinite(value) and value >= 0)

    return [
        f"{name}: {group}: must be PATTERN=NUMBER with a number of at least 0, as in */mlp/*=0.5"
        for group in groups
        if is_wrong(group)
    ]


def problems(name: str, groups: Sequence[str], specs: tree.Tree) -> list[str]:
    """Parameters that no pattern fits, and patterns that decide none. specs: of what is trained."""
    patterns = [_parse(group)[0] for group in groups]
    paths = jax.tree.leaves(tree.map_with_path(lambda path, spec: path, specs))
    first = {path: tree.first_match(path, patterns) for path in paths}
    found = [f"no pattern fits {path}; end with *=1" for path, pattern in first.items() if pattern is None][:1]
    for place, pattern in enumerate(patterns):
        if pattern in first.values() and pattern not in patterns[:place]:
            continue
        fits = any(tree.first_match(path, (pattern,)) for path in paths)
        found.append(
            f"{pattern} comes after patterns that fit all that it fits" if fits else f"{pattern} fits no parameter"
        )
    shown = f" (trained are {paths[0]} and {len(paths) - 1} more)" if paths else ""
    return [f"{name}: {'; '.join(found)}{shown}"] if found else []
