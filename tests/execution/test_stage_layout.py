"""The layers that each pipeline stage holds."""

import itertools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.config import ModelConfig, PipelineConfig, RematConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core import tree
from jaxopt_llm.execution.pipeline_stage import select_microbatch
from jaxopt_llm.execution.segments import PeriodRunner
from jaxopt_llm.execution.stage_layout import EVEN, describe_waste, split_periods, split_problems, stack_by_stage
from jaxopt_llm.model import param
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.decoder_specs import list_segments
from jaxopt_llm.model.model import Segment

pytestmark = pytest.mark.core


def dense(layers: int) -> tuple[Segment, ...]:
    return list_segments(ModelConfig(layers=layers))


def blocks_by_chunk(segments: tuple[Segment, ...], stages: int, pipeline: PipelineConfig = EVEN) -> list[list[int]]:
    """Return the layer indices of each chunk, in the order in which a microbatch passes through the chunks."""
    slots = split_periods(segments, stages, pipeline)
    return [
        [
            int(layer)
            for segment, periods in zip(segments, slots, strict=True)
            for period in periods[chunk, stage]
            if period >= 0
            for layer in segment.per_layer["index"][period]
        ]
        for chunk in range(slots[0].shape[0])
        for stage in range(stages)
    ]


@pytest.mark.parametrize("layers, stages", [(8, 4), (7, 4), (5, 4), (4, 4), (61, 8), (126, 16)])
def test_layers_are_split_evenly_and_in_order(layers: int, stages: int) -> None:
    chunks = blocks_by_chunk(dense(layers), stages)
    assert list(itertools.chain(*chunks)) == list(range(layers))
    assert {len(each) for each in chunks} <= {layers // stages, -(-layers // stages)}
    (slots,) = split_periods(dense(layers), stages)
    assert slots.shape == (1, stages, -(-layers // stages))


def test_two_segments_follow_each_other_over_the_stages() -> None:
    segments = list_segments(toy.CONFIG)  # two periods of two blocks, then one block
    assert blocks_by_chunk(segments, 2) == [[0, 1], [2, 3, 4]]
    assert blocks_by_chunk(segments, 3) == [[0, 1], [2, 3], [4]]
    np.testing.assert_array_equal(split_periods(segments, 2)[1], [[[-1], [0]]])


def segment(layers: int, repeats: int) -> Segment:
    kinds = ("global",) * layers
    return Segment(kinds, repeats, {"index": np.arange(repeats * layers).reshape(repeats, layers)}, (False,) * layers)


@pytest.mark.parametrize(
    ("stages", "virtual", "slots"), [(16, 1, (1, 5)), (8, 1, (3, 8)), (8, 2, (1, 5)), (16, 2, (1, 2)), (8, 3, (1, 3))]
)
def test_chunks_have_few_slots_for_rare_layers(stages: int, virtual: int, slots: tuple[int, int]) -> None:
    """Of DeepSeek-V3: three dense layers before 58 with experts. As equal as possible, 16 stages have 3 + 4 slots."""
    pipeline = PipelineConfig("interleaved" if virtual > 1 else "1f1b", virtual)
    found = split_periods((segment(1, 3), segment(1, 58)), stages, pipeline)
    assert tuple(each.shape[-1] for each in found) == slots


@pytest.mark.parametrize("seed", range(20))
def test_a_split_keeps_every_period_and_its_place(seed: int) -> None:
    random = np.random.default_rng(seed)
    layout = tuple(segment(*map(int, random.integers(1, (4, 20)))) for _ in range(random.integers(2, 5)))
    periods = [(index, period) for index, each in enumerate(layout) for period in range(each.repeats)]
    stages = int(random.integers(2, 1 + len(periods)))
    found = split_periods(layout, stages)
    by_stage = [
        [(index, int(period)) for index, places in enumerate(found) for period in places[0, stage] if period >= 0]
        for stage in range(stages)
    ]
    assert list(itertools.chain(*by_stage)) == periods
    assert all(by_stage)


@pytest.mark.parametrize("last", [1, 2, 9])
def test_every_stage_has_a_period(last: int) -> None:
    """Even if one segment has many more layers than the others."""
    kinds = ("global",) * 20
    segments = (Segment(kinds, 1, {"index": np.arange(20)[None]}, (False,) * 20), *dense(last))
    for stages in range(1, last + 2):
        assert all(blocks_by_chunk(segments, stages))


def test_empty_slots_hold_zeros_and_do_not_count() -> None:
    model = Decoder(toy.CONFIG)
    staged = stack_by_stage(model, 2).specs
    assert param.count_parameters(staged) == param.count_parameters(model.specs)

    def initial_query(specs: tree.Tree) -> jax.Array:
        attention = {"query": specs["segment_1"]["block_0"]["attention"]["query"]}
        values = param.initialize({"segment_1": {"block_0": {"attention": attention}}}, 0)
        return values["segment_1"]["block_0"]["attention"]["query"]

    query = initial_query(staged)
    assert query.shape[:3] == (1, 2, 1)
    assert not query[0, 0].any()
    np.testing.assert_array_equal(query[0, 1], initial_query(model.specs))


INTERLEAVED = PipelineConfig("interleaved", 2)


def test_interleaved_chunks_follow_each_other_around_the_stages() -> None:
    assert blocks_by_chunk(dense(8), 2, INTERLEAVED) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert split_periods(dense(8), 2, INTERLEAVED)[0].shape == (2, 2, 2)
    chunks = blocks_by_chunk(dense(61), 8, PipelineConfig("interleaved", 4))  # some are one layer shorter
    assert list(itertools.chain(*chunks)) == list(range(61)) and {len(each) for each in chunks} == {1, 2}


def test_an_explicit_split_is_followed_exactly() -> None:
    for given in ((1, 4, 2, 1), (5, 1, 1, 1), (2, 2, 2, 2)):
        assert [*map(len, blocks_by_chunk(dense(8), 2, PipelineConfig("interleaved", 2, given)))] == [*given]
    segments = list_segments(toy.CONFIG)  # two periods of two blocks, then one block
    for given in ((4, 1), (2, 3)):
        assert [*map(len, blocks_by_chunk(segments, 2, PipelineConfig(split=given)))] == [*given]


def test_every_accepted_split_works() -> None:
    accepted = set()
    for layers, stages, virtual in itertools.product((1, 6, 7, 8, 61), (2, 3, 4), (1, 2, 3, 4)):
        pipeline = PipelineConfig("interleaved" if virtual > 1 else "1f1b", virtual)
        if not split_problems(dense(layers), stages, pipeline):
            chunks = blocks_by_chunk(dense(layers), stages, pipeline)
            assert all(chunks) and list(itertools.chain(*chunks)) == list(range(layers))
            accepted.add((layers, stages, virtual))
    assert {(8, 4, 2), (7, 4, 1), (7, 2, 2), (8, 2, 4), (61, 4, 4)} <= accepted
    assert not {(1, 2, 1), (6, 4, 2), (7, 2, 3), (7, 3, 3)} & accepted


def test_on_one_stage_the_pipeline_settings_have_no_effect() -> None:
    """A checkpoint of several stages can resume on one."""
    pipeline = PipelineConfig("interleaved", 5, (3, 2))
    assert not split_problems(dense(8), 1, pipeline)
    assert blocks_by_chunk(dense(8), 1, pipeline) == [list(range(8))]


@pytest.mark.parametrize(
    ("layers", "stages", "microbatches", "pipeline", "message"),
    [
        (
            8,
            4,
            8,
            EVEN,
            "1f1b, 27% of a step is idle with training.accumulation=8 and mesh.pipeline=4; raise --training.accum",
        ),
        (8, 4, 8, PipelineConfig("gpipe"), "gpipe, 27% of a step is idle"),
        (8, 4, 8, INTERLEAVED, "interleaved, 16% of a step is idle"),
        (8, 4, 7, INTERLEAVED, "interleaved, 22% of a step is idle"),  # the last round has 3 microbatches of 4
        (126, 16, 2, EVEN, "1f1b, 88% of a step is idle"),
    ],
)
def test_the_idle_share_is_reported(
    layers: int, stages: int, microbatches: int, pipeline: PipelineConfig, message: str
) -> None:
    assert describe_waste(dense(layers), stages, microbatches, pipeline).startswith(message)


def test_more_microbatches_are_proposed_only_where_they_gain() -> None:
    assert describe_waste(dense(8), 4, 27, EVEN) == (
        "1f1b, 10% of a step is idle with training.accumulation=27 and mesh.pipeline=4"
    )
    assert describe_waste(dense(8), 4, 26, EVEN).endswith("; raise --training.accumulation to reduce it")


def test_padding_is_counted_in_layers() -> None:
    assert describe_waste(list_segments(toy.CONFIG), 2, 2, EVEN).endswith(
        " to reduce it; 1 of 6 layer slots are padding"
    )
    assert describe_waste(dense(126), 16, 2, EVEN).endswith("; 2 of 128 layer slots are padding")


@pytest.mark.parametrize("occupied", [True, False])
def test_in_an_empty_slot_every_token_is_padding(occupied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no token goes to an expert."""
    config = replace_fields(toy.UNIFORM, {"moe.experts": 4, "moe.expert_width": 8})
    model, packed = Decoder(config), toy.packed(2, 12)
    context = model.make_context(packed, toy.placement())
    runner = PeriodRunner(model, cast(Any, None), context, RematConfig(), checkpoints=True, is_apart=True)
    masks = []

    def run(runner: PeriodRunner, weights: Any, perturbations: Any, per_layer: Any, x: Any) -> Any:
        masks.append(runner.context.token_mask)
        return x, None, model.zero_auxiliary()

    monkeypatch.setattr(PeriodRunner, "run", run)
    carry = jnp.zeros((2, 12, config.width)), model.zero_auxiliary()
    runner.scan_body(carry, ({}, {}, {}, jnp.bool(occupied)))
    np.testing.assert_array_equal(masks[0], (packed.segment_ids != 0) & occupied)


def test_a_stage_without_work_runs_only_padding() -> None:
    """Padding goes to no expert. In any other microbatch, tokens that are all alike would go to the same one."""
    batch = toy.microbatches(toy.packed(4, 12), 2)
    for index in range(2):
        np.testing.assert_array_equal(select_microbatch(batch, jnp.int32(index)).segment_ids, batch.segment_ids[index])
    assert not np.any(select_microbatch(batch, jnp.int32(-1)).segment_ids)
