"""What a device runs in a step, by hand."""

from dataclasses import replace

import pytest

from jaxopt_llm import config as configuration
from jaxopt_llm.config import TrainConfig
from jaxopt_llm.execution.schedules import PipelineConfig
from jaxopt_llm.parallel.mesh import MeshConfig
from jaxopt_llm.search.passes import Passes
from jaxopt_llm.search.resting import resting
from jaxopt_llm.search.roofline import Cluster
from jaxopt_llm.search.workload import workload

RECIPE = configuration.load("10b.py")  # 36 layers


def on_stages(pipeline: PipelineConfig, stages: int = 4, microbatches: int = 8) -> TrainConfig:
    training = replace(RECIPE.training, accumulation=microbatches)
    return replace(RECIPE, mesh=MeshConfig(pipeline=stages, tensor=2), training=training, pipeline=pipeline)


@pytest.mark.parametrize(
    ("pipeline", "layers", "ticks", "waiting", "idle"),
    [
        (PipelineConfig(), 9, 8 + 3, 2 * 4 - 1, 3 / 11),
        (PipelineConfig("gpipe"), 9, 8 + 3, 8, 3 / 11),
        (PipelineConfig("interleaved", 3), 3, 3 * 8 + 3, (3 + 1) * 4 - 1, 3 / 27),
        (PipelineConfig(split=(12, 8, 8, 8)), 12, 8 + 3, 2 * 4 - 1, 1 - 36 / (4 * 12) * 8 / 11),
    ],
    ids=["1f1b", "gpipe", "interleaved", "split"],
)
def test_a_stages_passes_are_those_of_the_table(
    pipeline: PipelineConfig, layers: int, ticks: int, waiting: int, idle: float
) -> None:
    found = Passes.of(on_stages(pipeline))
    assert (found.layers, found.chunks, found.waiting) == (layers, pipeline.virtual_stages, waiting)
    assert (found.forward, found.again, found.backward, found.loss) == (ticks, ticks, ticks, 8)
    assert found.idle == pytest.approx(idle)


def test_on_one_stage_a_schedule_changes_nothing() -> None:
    alone = replace(RECIPE, training=replace(RECIPE.training, accumulation=4))
    found = Passes.of(replace(alone, pipeline=PipelineConfig("interleaved", 5, (1, 2))))
    assert found == Passes.of(alone) == Passes((("global", 36),), 1, 4, 0, 4, 4, 0, False, 0.0)


def test_what_rests_and_is_computed_follows_the_fullest_run() -> None:
    even, lopsided = (on_stages(PipelineConfig(split=split)) for split in ((9, 9, 9, 9), (12, 8, 8, 8)))
    (rests, more), cluster = [resting(each) for each in (even, lopsided)], Cluster("h100", 1, 8)
    assert rests is not None and more is not None
    assert more.layers.weights == pytest.approx(12 / 9 * rests.layers.weights)
    assert more.outer == rests.outer  # whose rows the stages divide
    work, longer = workload(even, rests, cluster), workload(lopsided, more, cluster)
    assert longer.repeated_flops == pytest.approx(12 / 9 * work.repeated_flops)
