"""Which layers a stage holds."""

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm import tree
from jaxopt_llm.execution import stacks
from jaxopt_llm.execution.schedules import PipelineConfig
from jaxopt_llm.execution.stage import microbatch_of
from jaxopt_llm.execution.stages import EVEN, problems, rest_on_stages, split, waste
from jaxopt_llm.model import param
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import Segment, layout, make_parts

pytestmark = pytest.mark.core


def dense(layers: int) -> tuple[Segment, ...]:
    return layout(ModelConfig(layers=layers))


def blocks_by_run(segments: tuple[Segment, ...], stages: int, pipeline: PipelineConfig = EVEN) -> list[list[int]]:
    """Numbers of the blocks of each run, in the order in which a microbatch passes through the runs."""
    places = split(segments, stages, pipeline)
    return [
        [
            int(block)
            for segment, held in zip(segments, places, strict=True)
            for repeat in held[chunk, stage]
            if repeat >= 0
            for block in segment.per_layer["index"][repeat]
        ]
        for chunk in range(places[0].shape[0])
        for stage in range(stages)
    ]


@pytest.mark.parametrize("layers, stages", [(8, 4), (7, 4), (5, 4), (4, 4), (61, 8), (126, 16)])
def test_layers_are_split_evenly_and_in_order(layers: int, stages: int) -> None:
    held = blocks_by_run(dense(layers), stages)
    assert list(itertools.chain(*held)) == list(range(layers))
    assert {len(each) for each in held} <= {layers // stages, -(-layers // stages)}
    (places,) = split(dense(layers), stages)
    assert places.shape == (1, stages, -(-layers // stages))


def test_two_segments_follow_each_other_over_the_stages() -> None:
    segments = layout(toy.CONFIG)  # two periods of two blocks, then one block
    assert blocks_by_run(segments, 2) == [[0, 1], [2, 3, 4]]
    assert blocks_by_run(segments, 3) == [[0, 1], [2, 3], [4]]
    np.testing.assert_array_equal(split(segments, 2)[1], [[[-1], [0]]])


@pytest.mark.parametrize("last", [1, 2, 9])
def test_every_stage_has_a_period(last: int) -> None:
    """Also where one segment outweighs the others."""
    kinds = ("global",) * 20
    segments = (Segment(kinds, 1, {"index": np.arange(20)[None]}, (False,) * 20), *dense(last))
    for stages in range(1, last + 2):
        assert all(blocks_by_run(segments, stages))


def test_places_without_a_layer_hold_zeros_and_do_not_count() -> None:
    parts = make_parts(toy.CONFIG)
    staged = rest_on_stages(parts, 2).specs
    assert param.count(staged) == param.count(parts.specs)

    def initial_query(specs: tree.Tree) -> jax.Array:
        attention = {"query": specs["segment_1"]["block_0"]["attention"]["query"]}
        values = param.initialize({"segment_1": {"block_0": {"attention": attention}}}, 0)
        return values["segment_1"]["block_0"]["attention"]["query"]

    query = initial_query(staged)
    assert query.shape[:3] == (1, 2, 1)
    assert not query[0, 0].any()
    np.testing.assert_array_equal(query[0, 1], initial_query(parts.specs))


INTERLEAVED = PipelineConfig("interleaved", 2)


def test_interleaved_runs_follow_each_other_around_the_stages() -> None:
    assert blocks_by_run(dense(8), 2, INTERLEAVED) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert split(dense(8), 2, INTERLEAVED)[0].shape == (2, 2, 2)
    held = blocks_by_run(dense(61), 8, PipelineConfig("interleaved", 4))  # some a layer shorter than others
    assert list(itertools.chain(*held)) == list(range(61)) and {len(each) for each in held} == {1, 2}


def test_a_split_is_kept_to_the_layer() -> None:
    for given in ((1, 4, 2, 1), (5, 1, 1, 1), (2, 2, 2, 2)):
        assert [*map(len, blocks_by_run(dense(8), 2, PipelineConfig("interleaved", 2, given)))] == [*given]
    segments = layout(toy.CONFIG)  # two periods of two blocks, then one block
    for given in ((4, 1), (2, 3)):
        assert [*map(len, blocks_by_run(segments, 2, PipelineConfig(split=given)))] == [*given]


def test_whatever_is_not_refused_can_be_split() -> None:
    accepted = set()
    for layers, stages, virtual in itertools.product((1, 6, 7, 8, 61), (2, 3, 4), (1, 2, 3, 4)):
        pipeline = PipelineConfig("interleaved" if virtual > 1 else "1f1b", virtual)
        if not problems(dense(layers), stages, pipeline):
            held = blocks_by_run(dense(layers), stages, pipeline)
            assert all(held) and list(itertools.chain(*held)) == list(range(layers))
            accepted.add((layers, stages, virtual))
    assert {(8, 4, 2), (7, 4, 1), (7, 2, 2), (8, 2, 4), (61, 4, 4)} <= accepted
    assert not {(1, 2, 1), (6, 4, 2), (7, 2, 3), (7, 3, 3)} & accepted


def test_on_one_stage_a_pipelines_settings_are_without_effect() -> None:
    """So that what was saved by several goes on on one."""
    pipeline = PipelineConfig("interleaved", 5, (3, 2))
    assert not problems(dense(8), 1, pipeline)
    assert blocks_by_run(dense(8), 1, pipeline) == [list(range(8))]


@pytest.mark.parametrize(
    ("layers", "stages", "microbatches", "pipeline", "said"),
    [
        (8, 4, 8, EVEN, "1f1b, 27% of a step is idle with training.accumulation=8 for mesh.pipeline=4: less with more"),
        (8, 4, 8, PipelineConfig("gpipe"), "gpipe, 27% of a step is idle"),
        (8, 4, 8, INTERLEAVED, "interleaved, 16% of a step is idle"),
        (8, 4, 7, INTERLEAVED, "interleaved, 22% of a step is idle"),  # a turn is of 3 microbatches, where 4 fit
        (126, 16, 2, EVEN, "1f1b, 88% of a step is idle"),
    ],
)
def test_what_is_idle_is_said(layers: int, stages: int, microbatches: int, pipeline: PipelineConfig, said: str) -> None:
    assert waste(dense(layers), stages, microbatches, pipeline).startswith(said)


def test_padding_is_counted_in_layers() -> None:
    assert waste(layout(toy.CONFIG), 2, 2, EVEN).endswith(": less with more; 1 of 6 layer slots are padding")
    assert waste(dense(126), 16, 2, EVEN).endswith("; 2 of 128 layer slots are padding")


@pytest.mark.parametrize("live", [True, False])
def test_a_place_without_a_layer_has_padding_alone(live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As what goes to experts sees it."""
    model = replace(toy.UNIFORM, experts=4, expert_width=8)
    parts, packed = make_parts(model), toy.packed(2, 12)
    context = parts.make_context(packed, toy.placement())
    seen: list[Context] = []

    def run_period(*of: Any, **settings: Any) -> Any:
        seen.extend(each for each in of if isinstance(each, Context))
        return of[5], None, parts.zero_auxiliary()

    monkeypatch.setattr(stacks, "run_period", run_period)
    stack: Any = None
    carry = jnp.zeros((2, 12, model.width)), parts.zero_auxiliary(), None
    stacks._period(
        parts, stack, context, stacks.RematConfig(), None, (True,), carry, ({}, {}, {}, jnp.bool(live), None)
    )
    np.testing.assert_array_equal(seen[0].real, (packed.segment_ids != 0) & live)


def test_a_stage_that_waits_runs_padding_alone() -> None:
    """Which goes to no expert: of any other microbatch tokens that are all alike would be sent."""
    batch = toy.microbatches(toy.packed(4, 12), 2)
    for index in range(2):
        np.testing.assert_array_equal(microbatch_of(batch, jnp.int32(index)).segment_ids, batch.segment_ids[index])
    assert not np.any(microbatch_of(batch, jnp.int32(-1)).segment_ids)
