"""Choice of the settings that a configuration leaves open: the order of the candidates, and the first that fits."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest

from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.config import Config, cli, fields
from jaxopt_llm.core.errors import OutOfMemory
from jaxopt_llm.planning import breakdown, settings_choice
from jaxopt_llm.planning.free_memory import GIB, leave_free
from jaxopt_llm.planning.search.roofline import Cluster
from jaxopt_llm.planning.search.workload import predict_footprint
from jaxopt_llm.planning.settings_choice import (
    Candidate,
    choose_settings,
    keep_settings,
    list_candidates,
    list_choices,
    list_settings,
)
from jaxopt_llm.planning.step_plan import Plan, make_plan

pytestmark = pytest.mark.core

ONE, EIGHT = Cluster("h200", 1, 1), Cluster("h100", 1, 8)
LARGE = 10_000 * GIB
RECIPE = cli.load_recipe("llama3_8b.py")
ALONE: dict[str, Any] = {"mesh.fsdp": 1, "training.batch_size": 1}


def with_settings(config: Config = RECIPE, **values: Any) -> Config:
    return fields.replace_fields(config, {name.replace("__", "."): value for name, value in values.items()})


def candidates(config: Config, cluster: Cluster = EIGHT, limit: int = LARGE, **on: bool) -> list[dict[str, Any]]:
    return [list_settings(each.config) for each in list_candidates(config, cluster, limit, **on)[0]]


def test_every_setting_of_the_choice_is_open_by_default() -> None:
    assert list_settings(Config()) == dict.fromkeys(settings_choice.CHOSEN, "auto")
    assert list_choices(Config(), Config()) == {}  # nothing is chosen


def test_the_exchange_of_experts_is_chosen_before_the_candidates() -> None:
    """A model without an exchange keeps `auto`, which is then no choice."""
    mixtral = cli.load_recipe("mixtral_8x7b.py")
    assert {each["sharding.expert_exchange"] for each in candidates(mixtral)} == {"all_to_all"}
    gathers = fields.replace_fields(mixtral, {"sharding.expert_exchange": "gather"})
    assert {each["sharding.expert_exchange"] for each in candidates(gathers)} == {"gather"}
    (dense, *_), _ = list_candidates(RECIPE, EIGHT, LARGE)
    assert "sharding.expert_exchange" not in list_choices(RECIPE, dense.config)


def test_the_policy_that_computes_least_again_comes_first() -> None:
    found = candidates(RECIPE)
    assert [each["remat.policy"] for each in found] == ["none", *settings_choice.POLICIES, "full"]
    assert [each["xla.own_remat"] for each in found] == ["off"] * 9 + ["on"]


@pytest.mark.parametrize(("changes", "cluster"), [(ALONE, ONE), ({}, EIGHT)], ids=["one GPU", "eight GPUs"])
def test_layers_are_unrolled_in_a_long_run(changes: dict[str, Any], cluster: Cluster) -> None:
    config = fields.replace_fields(RECIPE, changes)
    found = [(each["remat.policy"], each["training.unroll"]) for each in candidates(config, cluster)]
    assert found[:3] == [("none", "all"), ("none", "none"), (settings_choice.POLICIES[1], "none")]
    assert all(unroll == "none" for _, unroll in found[1:])
    short = with_settings(config, training__steps=100)  # 2 minutes: compiling would take most of what it saves
    assert all(each["training.unroll"] == "none" for each in candidates(short, cluster))
    by_epochs = with_settings(config, training__steps=0, training__epochs=1.0)
    assert candidates(by_epochs, cluster)[0]["training.unroll"] == "all"


def test_a_pipeline_and_experts_on_several_gpus_keep_their_loops() -> None:
    on_stages = with_settings(mesh__fsdp=1, mesh__pipeline=8, training__accumulation=8)
    for config in (on_stages, cli.load_recipe("mixtral_8x7b.py")):
        assert all(each["training.unroll"] == "none" for each in candidates(config))


@pytest.mark.slow
def test_unrolled_layers_on_several_gpus_hide_their_collectives_in_the_predicted_memory() -> None:
    """Check why they may be chosen: on one GPU there is nothing to schedule."""
    shape = {"model.layers": 8, "data.documents_per_row": 1, "remat.policy": "none", "training.loss_chunk": 2048}
    config = fields.replace_fields(RECIPE, shape)
    loop, unrolled = (make_plan(with_settings(config, training__unroll=each), "h200", 1, 8) for each in ("none", "all"))
    chosen = with_settings(config, training__unroll="all", training__attention="cudnn", **{"xla__own_remat": "off"})
    assert loop.memory.peak < unrolled.memory.peak < predict_footprint(chosen).peak

    def exposed(plan: Plan) -> float:
        return sum(each.seconds for each in plan.speed.breakdown if each.hidden_seconds)

    def stacked(plan: Plan) -> int:
        return sum(each.bytes for each in plan.speed.breakdown if each.name == breakdown.STACKS)

    assert exposed(unrolled) < 1.2 * exposed(loop)
    assert stacked(unrolled) < 0.02 * stacked(loop)
    assert unrolled.flops == loop.flops


def test_arithmetic_leaves_out_what_cannot_fit() -> None:
    limit = 40 * GIB
    found, line = list_candidates(RECIPE, EIGHT, limit)
    assert found[0].config.remat.policy == "save_attention"
    assert [each.limit for each in found] == [leave_free(limit), limit, limit]
    assert [each.config.remat.policy for each in list_candidates(RECIPE, EIGHT, GIB)[0]] == ["full", "full"]
    assert "more than 38.00 GiB per device: remat.policy none " in line and line.count("remat.policy") == 7
    assert list_candidates(RECIPE, EIGHT, LARGE)[1] == ""


def test_values_of_the_user_stay() -> None:
    ours = with_settings(
        remat__policy="save_qkv", training__loss_chunk=512, training__unroll="none", xla__own_remat="on"
    )
    assert candidates(ours) == [list_settings(ours)]
    assert {each["remat.policy"] for each in candidates(with_settings(training__unroll="all"), ONE)} == {"none"}


@pytest.mark.parametrize(
    "values",
    [{"remat__every": 4}, {"remat__offload": ("block_input",)}, {"optimizer__in_backward": True}],
    ids=str,
)
def test_memory_that_the_user_saves_is_not_given_away(values: dict[str, Any]) -> None:
    assert {each["remat.policy"] for each in candidates(with_settings(**values))} == {"full"}


def test_chunks_of_the_loss_do_not_raise_the_peak() -> None:
    chunks = {each["training.loss_chunk"] for each in candidates(RECIPE)}
    assert chunks == {8192}
    wide = with_settings(model__vocabulary_size=2_000_000, remat__policy="full")
    assert candidates(wide)[0]["training.loss_chunk"] == 1024


def test_cpus_have_one_candidate() -> None:
    (found,) = candidates(RECIPE, on_gpu=False)
    assert found["remat.policy"] == "none" and found["training.loss_chunk"] == 1024
    (small,) = candidates(RECIPE, limit=40 * GIB, on_gpu=False)
    assert small["remat.policy"] == "save_attention"


def numbered(limits: tuple[int, ...], predicted: tuple[float, ...]) -> list[Candidate]:
    """Return candidates of different policies; the last two have the same one, and a larger limit."""
    policies = ["none", *settings_choice.POLICIES[1:]]
    policies[len(limits) - 1] = policies[len(limits) - 2]
    return [
        Candidate(with_settings(training__steps=index + 1, remat__policy=policy), limit, size)
        for index, (policy, limit, size) in enumerate(zip(policies, limits, predicted, strict=False))
    ]


def choose(
    limits: tuple[int, ...], peaks: tuple[int | None, ...], predicted: tuple[float, ...] = (), **options: Any
) -> tuple[int, list[int]]:
    """Return the number of the candidate that was chosen, and the numbers of those that were compiled.

    peaks: of the candidates; None if there is no memory to compile one.
    predicted: by arithmetic; by default as compiled.
    """
    compiled: list[int] = []
    lines: list[str] = []

    def compile(config: Config) -> int:
        compiled.append(config.training.steps)
        if peaks[compiled[-1] - 1] is None:
            raise OutOfMemory("out of memory compiling", ())
        return compiled[-1]

    choice = choose_settings(
        numbered(limits, predicted or tuple(peak or 1 for peak in peaks)),
        compile,
        lambda step: cast(int, peaks[step - 1]),
        say=lines.append,
        **options,
    )
    assert choice.compiled == choice.config.training.steps and tuple(lines) == choice.refused
    assert len(lines) == choice.compiled - 1, "each faster one has its reason"
    return choice.compiled, compiled


def test_the_first_that_fits_is_taken() -> None:
    assert choose((10, 12, 12), (10, 9, 8)) == (1, [1])
    assert choose((10, 12, 12), (11, 9, 8)) == (2, [1, 2])
    assert choose((10, 12, 12), (11, 13, 99)) == (3, [1, 2, 3]), "the last one is taken, and refused later"


def test_a_candidate_that_cannot_be_compiled_does_not_fit() -> None:
    assert choose((10, 12, 12), (None, 9, 8)) == (2, [1, 2])
    with pytest.raises(OutOfMemory):
        choose((10, 12), (None, None))


def test_what_was_compiled_corrects_the_arithmetic_of_the_others() -> None:
    """The first needs twice what was predicted, so the second would not fit; the third would."""
    peaks, predicted = (20, 11, 9, 8, 8), (10.0, 6.0, 4.5, 4.0, 4.0)
    assert choose((10, 10, 10, 12, 12), peaks, predicted) == (3, [1, 3])
    # Layers in a loop need less than unrolled ones, of which the arithmetic may know less.
    given = numbered((10, 10, 12, 12), (9.0, 9.0, 5.0, 5.0))
    unrolled = dataclasses.replace(given[0], config=with_settings(given[0].config, training__unroll="all"))
    peaks = (20, 9, 5, 5)
    found = choose_settings([unrolled, *given[1:]], lambda config: config.training.steps, lambda step: peaks[step - 1])
    assert found.compiled == 2


def test_few_that_do_not_fit_are_compiled_and_never_by_the_clock() -> None:
    limits, peaks = (*(10,) * 6, 12, 12), (*(11,) * 5, 9, 9, 9)
    assert settings_choice.MAX_REFUSED == 4
    assert choose(limits, peaks, (10,) * 8) == (7, [1, 7]), "by the corrected arithmetic none of the others fits"
    assert choose(limits, (*(None,) * 5, 9, 9, 9)) == (7, [1, 2, 3, 4, 7])
    source = Path(settings_choice.__file__).read_text()
    assert "import time" not in source, "the choice would depend on how fast this machine compiles"


def test_all_processes_decide_together() -> None:
    largest = iter([11, 12])
    assert choose((10, 12, 12), (1, 99, 1), agree=lambda mine: next(largest)) == (2, [1, 2])


def test_policies_that_are_the_same_for_a_model_are_compiled_once() -> None:
    """GPT-3 has no gate, and as many heads of keys as of queries."""
    loops = with_settings(cli.load_recipe("gpt3_175b.py"), training__unroll="none")
    found = [each["remat.policy"] for each in candidates(loops, Cluster("h100", 12, 8))]
    assert found == [
        "none",
        ("query", "key", "value", "attention", "mlp_up"),
        ("query", "key", "attention", "mlp_up"),
        ("attention", "mlp_up"),
        "save_qkv",
        "save_attention",
        *("full", "full"),
    ]


def test_unrolled_layers_keep_what_a_loop_computes_again() -> None:
    config = with_settings(
        fields.replace_fields(RECIPE, ALONE),
        remat__policy="none",
        training__attention="cudnn",
        training__loss_chunk=1024,
    )
    loop, unrolled = (
        predict_footprint(with_settings(config, training__unroll=unroll)).activations for unroll in ("none", "all")
    )
    model = config.model
    kept = model.mlp_width + 2 * model.width  # the product of gate and up, and the two norms
    assert unrolled - loop == 2 * model.layers * config.training.sequence_length * kept


def test_unrolled_layers_keep_no_norms_that_tensor_would_reduce() -> None:
    config = with_settings(remat__policy="none", training__attention="cudnn", mesh__fsdp=2, mesh__tensor=4)
    loop, unrolled = (
        predict_footprint(with_settings(config, training__unroll=unroll)).activations for unroll in ("none", "all")
    )
    tokens = config.training.batch_size // 2 * config.training.sequence_length
    assert unrolled - loop == 2 * config.model.layers * tokens * config.model.mlp_width / 4


def test_a_run_that_continues_keeps_its_choice() -> None:
    started = with_settings(
        remat__policy="full", training__unroll="none", training__loss_chunk=2048, xla__own_remat="off"
    )
    assert list_settings(keep_settings(RECIPE, started)) == list_settings(started)
    asked = with_settings(remat__policy="none")
    assert keep_settings(asked, started).remat.policy == "none"


def test_a_plan_uses_the_choice() -> None:
    config = dataclasses.replace(Config(), mesh=dataclasses.replace(Config().mesh, fsdp=8))
    plan = make_plan(config, "h100", 1, 8)
    assert plan.chosen == {
        "remat.policy": "none",
        "training.unroll": "none",
        "training.loss_chunk": 1024,
        "xla.own_remat": "off",
    }
    assert plan.memory.peak < CHIPS["h100"].memory_bytes
    given = make_plan(with_settings(config, remat__policy="full"), "h100", 1, 8)
    assert "remat.policy" not in given.chosen and given.flops > plan.flops
