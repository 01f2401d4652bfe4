"""Parameter groups: one number per parameter, from the first matching path pattern, such as "*/attention/*=0.5"."""

from collections.abc import Sequence

from jaxopt_llm.config.training import parse_group
from jaxopt_llm.core import tree


def find_group_value(groups: Sequence[str], path: str) -> float:
    """Return the number of the first group whose pattern matches the path."""
    return next(value for pattern, value in map(parse_group, groups) if tree.first_match(path, (pattern,)))


def problems(name: str, groups: Sequence[str], specs: tree.Tree) -> list[str]:
    """Find parameters that no pattern matches, and patterns without effect.

    Args:
        name: field of the groups, for the message.
        specs: specs of the trained parameters.
    """
    patterns = [parse_group(group)[0] for group in groups]
    paths = [path for path, _ in tree.leaves_with_path(specs)]
    first = {path: tree.first_match(path, patterns) for path in paths}
    found = [f"no pattern matches {path}; end with *=1" for path, pattern in first.items() if pattern is None][:1]
    for index, pattern in enumerate(patterns):
        if pattern in first.values() and pattern not in patterns[:index]:
            continue
        matches = any(tree.first_match(path, (pattern,)) for path in paths)
        found.append(
            f"{pattern} has no effect, because earlier patterns match all its parameters; move it forward or remove it"
            if matches
            else f"{pattern} matches no parameter; correct or remove it"
        )
    trained = f" (trained: {paths[0]} and {len(paths) - 1} more)" if paths else ""
    return [f"{name}: {'; '.join(found)}{trained}"] if found else []
