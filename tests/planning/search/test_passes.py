"""Passes of a device in a step, compared with figures by hand."""

from dataclasses import replace

import pytest

from jaxopt_llm.config import Config, LoraConfig, MeshConfig, PipelineConfig, cli
from jaxopt_llm.config.training import Objective
from jaxopt_llm.planning.search.passes import Passes
from jaxopt_llm.planning.search.roofline import Cluster
from jaxopt_llm.planning.search.state_sizes import compute_state_sizes
from jaxopt_llm.planning.search.workload import estimate_work

RECIPE = cli.load_recipe("10b.py")  # 36 layers


def on_stages(pipeline: PipelineConfig, stages: int = 4, microbatches: int = 8) -> Config:
    training = replace(RECIPE.training, accumulation=microbatches)
    return replace(RECIPE, mesh=MeshConfig(pipeline=stages, tensor=2), training=training, pipeline=pipeline)


@pytest.mark.parametrize(
    ("pipeline", "layers", "ticks", "waiting", "idle"),
    [
        (PipelineConfig(), 9, 8 + 3, 2 * 4 - 1, 3 / 11),
        (PipelineConfig("gpipe"), 9, 8 + 3, 8 + 1, 3 / 11),  # one in which idle stages write
        (PipelineConfig("interleaved", 3, residuals="store"), 3, 3 * 8 + 3, (3 + 1) * 4 - 1, 3 / 27),
        (PipelineConfig(split=(12, 8, 8, 8)), 12, 8 + 3, 2 * 4 - 1, 1 - 36 / (4 * 12) * 8 / 11),
    ],
    ids=["1f1b", "gpipe", "interleaved", "split"],
)
def test_passes_of_a_stage_match_its_schedule_table(
    pipeline: PipelineConfig, layers: int, ticks: int, waiting: int, idle: float
) -> None:
    found = Passes.from_config(on_stages(pipeline))
    stores = pipeline.residuals == "store"
    assert (found.layers, found.chunks) == (layers, pipeline.virtual_stages)
    assert (found.waiting_chunks, found.waiting_streams) == ((waiting, 0) if stores else (0, waiting))
    assert found.paired == (pipeline.schedule != "gpipe")
    assert found.repeated_forwards == (0 if stores else ticks)
    assert (found.first_forwards, found.backwards, found.microbatches) == (ticks, ticks, 8)
    assert found.idle == pytest.approx(idle)


def test_outputs_of_stored_chunks_wait_where_the_loss_comes_later() -> None:
    found = Passes.from_config(on_stages(PipelineConfig("gpipe", residuals="store")))
    assert found.waiting_chunks == found.waiting_streams == 8 + 1


def test_a_schedule_has_no_effect_on_one_stage() -> None:
    alone = replace(RECIPE, training=replace(RECIPE.training, accumulation=4))
    found = Passes.from_config(replace(alone, pipeline=PipelineConfig("interleaved", 5, (1, 2))))
    assert found == Passes.from_config(alone) == Passes((("global", 36),), 1, 4, 0, 4, 4, 0, 0, False, False, True, 0.0)


@pytest.mark.parametrize("stages", [1, 4])
def test_a_reference_that_the_step_runs_is_counted(stages: int) -> None:
    """All weights are compared with log-probabilities of the corpus, which cost nothing."""
    config, rank = on_stages(PipelineConfig(residuals="store"), stages), LoraConfig(rank=8)
    plain = Passes.from_config(config)
    cases = {
        "dpo": (rank, plain.first_forwards),
        "ipo": (LoraConfig(), 0),
        "hinge": (replace(rank, pretrained="runs/sft"), 0),
        "cpo": (rank, 0),
    }
    for objective, (lora, forwards) in cases.items():
        training = replace(config.training, objective=objective)
        found = Passes.from_config(replace(config, training=training, lora=lora))
        assert found == replace(plain, repeated_forwards=plain.repeated_forwards + forwards), objective


def test_log_probabilities_of_the_corpus_cost_no_operations() -> None:
    def count(objective: Objective, rank: int) -> float:
        training = replace(RECIPE.training, objective=objective)
        config = replace(RECIPE, mesh=MeshConfig(fsdp=8), training=training, lora=LoraConfig(rank=rank))
        state = compute_state_sizes(config)
        assert state is not None
        return estimate_work(config, state, Cluster("h100", 1, 8)).flops

    assert count("dpo", 0) == count("cpo", 0)
    assert count("dpo", 8) > 1.2 * count("cpo", 8)


def test_state_and_work_follow_the_largest_chunk() -> None:
    even, lopsided = (on_stages(PipelineConfig(split=split)) for split in ((9, 9, 9, 9), (12, 8, 8, 8)))
    (rests, more), cluster = [compute_state_sizes(each) for each in (even, lopsided)], Cluster("h100", 1, 8)
    assert rests is not None and more is not None
    assert more.layers.weights == pytest.approx(12 / 9 * rests.layers.weights)
    assert more.non_layer == rests.non_layer  # all stages divide its rows
    work, longer = estimate_work(even, rests, cluster), estimate_work(lopsided, more, cluster)
    assert longer.repeated_flops == pytest.approx(12 / 9 * work.repeated_flops)
