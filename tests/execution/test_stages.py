"""Which layers a stage holds."""

import itertools

import numpy as np
import pytest
import toy

from jaxopt_llm.execution.stages import rest_on_stages, split
from jaxopt_llm.model import param
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.decoder import Segment, layout, make_parts

pytestmark = pytest.mark.core


def dense(layers: int) -> tuple[Segment, ...]:
    return layout(ModelConfig(layers=layers))


def blocks_by_stage(segments: tuple[Segment, ...], stages: int) -> list[list[int]]:
    """Numbers of the blocks that each stage runs, in the order in which it runs them."""
    places = split(segments, stages)
    return [
        [
            int(block)
            for segment, held in zip(segments, places, strict=True)
            for repeat in held[0, stage]
            if repeat >= 0
            for block in segment.per_layer["index"][repeat]
        ]
        for stage in range(stages)
    ]


@pytest.mark.parametrize("layers, stages", [(8, 4), (7, 4), (5, 4), (4, 4), (61, 8), (126, 16)])
def test_layers_are_split_evenly_and_in_order(layers: int, stages: int) -> None:
    held = blocks_by_stage(dense(layers), stages)
    assert list(itertools.chain(*held)) == list(range(layers))
    assert {len(each) for each in held} <= {layers // stages, -(-layers // stages)}
    (places,) = split(dense(layers), stages)
    assert places.shape == (1, stages, -(-layers // stages))


def test_two_segments_follow_each_other_over_the_stages() -> None:
    segments = layout(toy.CONFIG)  # two periods of two blocks, then one block
    assert blocks_by_stage(segments, 2) == [[0, 1], [2, 3, 4]]
    assert blocks_by_stage(segments, 3) == [[0, 1], [2, 3], [4]]
    np.testing.assert_array_equal(split(segments, 2)[1], [[[-1], [0]]])


@pytest.mark.parametrize("last", [1, 2, 9])
def test_every_stage_has_a_period(last: int) -> None:
    """Also where one segment outweighs the others."""
    kinds = ("global",) * 20
    segments = (Segment(kinds, 1, {"index": np.arange(20)[None]}), *dense(last))
    for stages in range(1, last + 2):
        assert all(blocks_by_stage(segments, stages))


def test_places_without_a_layer_hold_zeros_and_do_not_count() -> None:
    parts = make_parts(toy.CONFIG)
    staged = rest_on_stages(parts, 2).specs
    assert param.count(staged) == param.count(parts.specs)
    query = param.initialize(staged, 0)["segment_1"]["block_0"]["attention"]["query"]
    assert query.shape[:3] == (1, 2, 1)
    assert not query[0, 0].any()
    expected = param.initialize(parts.specs, 0)["segment_1"]["block_0"]["attention"]["query"]
    np.testing.assert_array_equal(query[0, 1], expected)
