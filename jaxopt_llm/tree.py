"""Pytrees of parameters: paths, and splitting a tree in two and joining it again.

A parameter tree is nested dicts (and leaf classes) whose leaves are arrays, `jax.ShapeDtypeStruct`s or `ParamSpec`s;
`None` stands where a leaf belongs to the other half of a partition.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax

Tree = Any
Leaf = Any


def path_string(path: tuple[Any, ...]) -> str:
    """The name of a leaf: its keys joined by slashes, as in `segment_0/block_1/mlp/gate`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def map_with_path(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Applies `function(path, leaf, ...)`, with the path as a string."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: function(path_string(path), *leaves), tree, *rest)


def leaves_with_path(tree: Tree) -> list[tuple[str, Leaf]]:
    return [(path_string(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def first_match(path: str, patterns: Sequence[str]) -> str | None:
    """The first of the patterns that fits a path: globs, as in `*/mlp/*`, whose `*` crosses slashes."""
    return next((pattern for pattern in patterns if fnmatchcase(path, pattern)), None)


def partition(tree: Tree, select: Callable[[str], bool]) -> tuple[Tree, Tree]:
    """Splits a tree into (leaves whose path is selected, all others); each has `None` where the other has a leaf."""
    selected = map_with_path(lambda path, leaf: leaf if select(path) else None, tree)
    rest = map_with_path(lambda path, leaf: None if select(path) else leaf, tree)
    return selected, rest


def merge(first: Tree, second: Tree) -> Tree:
    """Joins the two halves of a `partition`."""
    return jax.tree.map(lambda a, b: b if a is None else a, first, second, is_leaf=lambda leaf: leaf is None)


def restrict(tree: Tree, like: Tree) -> Tree:
    """A whole tree with `None` wherever `like`, one half of a partition, has it."""
    return jax.tree.map(lambda a, b: None if b is None else a, tree, like, is_leaf=lambda leaf: leaf is None)
