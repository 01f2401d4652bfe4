"""Paths of leaves, and partition and merge of trees."""

import jax
import numpy as np

from jaxopt_llm.core import tree
from jaxopt_llm.model.param import ParamSpec

PARAMS = {"non_layer": {"table": np.arange(3)}, "segment_0": {"block_0": {"gate": np.ones(2), "down": np.zeros(2)}}}


def is_mlp(path: str) -> bool:
    return path in ("segment_0/block_0/gate", "segment_0/block_0/down")


def test_a_path_is_the_keys_joined_by_slashes() -> None:
    paths = tree.map_with_path(lambda path, leaf: path, PARAMS)
    assert paths == {
        "non_layer": {"table": "non_layer/table"},
        "segment_0": {"block_0": {"gate": "segment_0/block_0/gate", "down": "segment_0/block_0/down"}},
    }


def test_a_path_does_not_depend_on_the_leaf() -> None:
    specs = jax.tree.map(lambda leaf: ParamSpec(leaf.shape, ("embed",)), PARAMS)
    paths = [tree.map_with_path(lambda path, leaf, *rest: path, *trees) for trees in ((PARAMS,), (specs, PARAMS))]
    assert paths[0] == paths[1]


def test_a_partition_has_every_leaf_in_exactly_one_half() -> None:
    selected, rest = tree.partition(PARAMS, is_mlp)
    assert selected == {"non_layer": {"table": None}, "segment_0": PARAMS["segment_0"]}
    assert rest == {"non_layer": PARAMS["non_layer"], "segment_0": {"block_0": {"gate": None, "down": None}}}


def test_a_pattern_is_a_glob_or_a_part_of_the_path() -> None:
    path = "segment_0/block_0/attention/query"
    found = [tree.first_match(path, (each,)) for each in ("query", "block_0", "*/query", "segment_0/*", path)]
    assert None not in found
    assert tree.first_match(path, ("quer", "attention/query", "block", "*/quer")) is None
    assert tree.first_match(path, ("key", "query", "*")) == "query"


def test_merge_joins_the_halves_in_either_order() -> None:
    selected, rest = tree.partition(PARAMS, is_mlp)
    assert tree.merge(selected, rest) == PARAMS
    assert tree.merge(rest, selected) == PARAMS


def test_restrict_selects_the_same_half_of_another_tree() -> None:
    specs = jax.tree.map(lambda leaf: ParamSpec(leaf.shape, ("embed",)), PARAMS)
    for half, half_of_specs in zip(tree.partition(PARAMS, is_mlp), tree.partition(specs, is_mlp), strict=True):
        assert tree.restrict(specs, like=half) == half_of_specs


def test_the_first_matching_pattern_wins_and_a_star_matches_slashes() -> None:
    path = "segment_0/block_1/mlp/gate"
    assert tree.first_match(path, ["*/mlp/down", "*/mlp/*", "*"]) == "*/mlp/*"
    assert tree.first_match(path, ["mlp/*", "*/MLP/*"]) is None
