"""Pytrees of parameters: leaf paths, and functions to partition and merge a tree.

A parameter tree is nested dicts (and leaf classes) whose leaves are arrays, `jax.ShapeDtypeStruct`s or `ParamSpec`s.
`None` marks a leaf that belongs to the other half of a partition.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax

Tree = Any
Leaf = Any


def path_string(path: tuple[Any, ...]) -> str:
    """Return the keys of a leaf joined by slashes, such as `segment_0/block_1/mlp/gate`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def map_with_path(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply `function(path, leaf, ...)` to every leaf; `path` is a string from `path_string`."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: function(path_string(path), *leaves), tree, *rest)


def leaves_with_path(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Leaf]]:
    return [(path_string(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf)]


def first_match(path: str, patterns: Sequence[str]) -> str | None:
    """Return the first pattern that matches a path, or None.

    Patterns are globs such as `*/mlp/*`, in which `*` also matches slashes, or words such as `mlp`, a part of the path
    between slashes.
    """
    parts = path.split("/")
    return next((pattern for pattern in patterns if pattern in parts or fnmatchcase(path, pattern)), None)


def partition(tree: Tree, select: Callable[[str], bool]) -> tuple[Tree, Tree]:
    """Split a tree into (leaves whose path is selected, all others); each has `None` where the other has a leaf."""
    selected = map_with_path(lambda path, leaf: leaf if select(path) else None, tree)
    rest = map_with_path(lambda path, leaf: None if select(path) else leaf, tree)
    return selected, rest


def merge(first: Tree, second: Tree) -> Tree:
    """Join the two halves of a `partition`."""
    return jax.tree.map(lambda a, b: b if a is None else a, first, second, is_leaf=lambda leaf: leaf is None)


def restrict(tree: Tree, like: Tree) -> Tree:
    """Return a whole tree with `None` wherever `like`, one half of a partition, has `None`."""
    return jax.tree.map(lambda a, b: None if b is None else a, tree, like, is_leaf=lambda leaf: leaf is None)


def exclude(tree: Tree, like: Tree) -> Tree:
    """Return a whole tree with `None` wherever `like`, one half of a partition, has a leaf: the other half."""
    return jax.tree.map(lambda a, b: a if b is None else None, tree, like, is_leaf=lambda leaf: leaf is None)
