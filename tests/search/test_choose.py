"""The search with a compiler that believes the arithmetic, or is told otherwise."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import pytest
from commands import ROOT

from jaxopt_llm import config as configuration
from jaxopt_llm import plan as planning
from jaxopt_llm.config import TrainConfig
from jaxopt_llm.errors import InputError
from jaxopt_llm.kernels.attention_auto import Choice
from jaxopt_llm.parallel.mesh import MeshConfig
from jaxopt_llm.parallel.sharding import ShardingConfig
from jaxopt_llm.plan import Memory, Plan
from jaxopt_llm.search import choose, explain, report
from jaxopt_llm.search.choose import DOZEN, MEMORY_SLACK, TIME_SLACK, Search, estimate, estimate_all, search
from jaxopt_llm.search.remedies import remedies
from jaxopt_llm.search.resting import Resting, resting
from jaxopt_llm.search.roofline import Cluster

RECIPE = dataclasses.replace(configuration.load("10b.py"), mesh=MeshConfig(fsdp=4))
CLUSTER = Cluster("h200", 1, 4)
LIMIT = int(0.92 * CLUSTER.chip.memory_bytes)


@functools.cache
def all_of(config: TrainConfig, cluster: Cluster, allowed: tuple[str, ...]) -> tuple[choose.Candidate, ...]:
    return estimate_all(config, cluster, allowed)


@pytest.fixture(autouse=True)
def estimates_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "estimate_all", all_of)


def rests_of(config: TrainConfig) -> Resting:
    found = resting(config)
    assert found is not None
    return found


def as_estimated(config: TrainConfig, more: float = 1.0, limit: int = LIMIT) -> Plan:
    """The plan of a setting whose compiled figures are the arithmetic's. more: times as much memory."""
    found = estimate(config, CLUSTER, rests_of(config))
    sizes = (found.footprint.parameters, found.footprint.gradients, found.footprint.optimizer)
    return Plan(
        largest=(),
        advice=(),
        gpu=CLUSTER.chip.name,
        hosts=CLUSTER.hosts,
        gpus_per_host=CLUSTER.gpus_per_host,
        jax="",
        parameters=10,
        attention=Choice("xla"),
        exchange="",
        active_parameters=10,
        compile_seconds=0.0,
        memory=Memory(*map(round, sizes), round(found.footprint.peak * more - sum(sizes)), 0, 0),
        host_bytes=0,
        pcie_bytes=round(found.work.pcie_bytes),
        pcie_seconds=0.0,
        limit=limit,
        collectives=found.work.sent,  # type: ignore[arg-type]
        flops=round(found.work.flops + found.work.attention_flops),
        flops_seconds=0.0,
        model_flops=found.work.flops,
        repeated_flops=found.work.repeated_flops,
        idle=found.work.idle,
    )


def run(
    compile_for: Callable[[TrainConfig], Plan] = as_estimated, recipe: TrainConfig = RECIPE, limit: int = LIMIT
) -> tuple[Search, list[TrainConfig]]:
    compiled: list[TrainConfig] = []

    def remember(configs: Sequence[TrainConfig]) -> list[Plan]:
        compiled.extend(configs)
        return [compile_for(config) for config in configs]

    return search(recipe, CLUSTER, limit, (), remember), compiled


def test_the_fastest_that_fits_wins_and_the_recipe_is_compared() -> None:
    found, compiled = run()
    assert found.winner is not None and compiled[0] == RECIPE
    near = found.limit * (1 + MEMORY_SLACK)
    fastest = next(each for each in found.candidates if each.footprint.peak <= near)
    assert found.winner.time.total == pytest.approx(fastest.time.total)
    times = [choice.time.total for choice in found.choices if choice.fits]
    assert times == sorted(times)
    of_recipe = next(choice for choice in found.choices if choice.config == RECIPE)
    assert found.winner.time.total < of_recipe.time.total


def test_it_stops_where_the_next_cannot_win() -> None:
    found, compiled = run()
    assert found.winner is not None
    left = [each for each in found.candidates if each.config not in compiled and found.may_fit(each)]
    assert len(compiled) == DOZEN or left[0].time.total * (1 - TIME_SLACK) > found.winner.time.total
    _, compiled = run(lambda config: dataclasses.replace(as_estimated(config), flops=0))
    assert compiled == [RECIPE], "nothing is faster than a recipe without products"


def test_what_does_not_fit_as_compiled_is_passed_over_with_all_that_need_more() -> None:
    def fsdp_needs_more(config: TrainConfig) -> Plan:
        return as_estimated(config, 3.0 if config.mesh == MeshConfig(fsdp=4) else 1.0)

    found, compiled = run(fsdp_needs_more)
    assert found.winner is not None and found.winner.config.mesh != MeshConfig(fsdp=4)
    assert [choice.fits for choice in found.choices] == sorted((choice.fits for choice in found.choices), reverse=True)
    tried: dict[ShardingConfig, list[float]] = {}
    for config in compiled[1:]:
        if config.mesh == MeshConfig(fsdp=4):
            peak = estimate(config, CLUSTER, rests_of(config)).footprint.peak
            tried.setdefault(config.sharding, []).append(peak)
    assert tried
    for peaks in tried.values():
        assert peaks == sorted(set(peaks), reverse=True), "what needs as much as one that did not fit was compiled"


def test_where_nothing_fits_the_least_is_compiled_and_the_next_steps_are_said() -> None:
    small = int(LIMIT / 6.5)
    found, compiled = run(functools.partial(as_estimated, limit=small), limit=small)
    assert found.winner is None
    least = min(found.candidates, key=lambda each: each.footprint.peak)
    assert compiled == [RECIPE, least.config]
    steps = remedies(found, (), 0.92)
    assert [step.split(":")[0] for step in steps] == ["adapters alone", "--gpu b200", "--hosts 2"]
    assert "--lora.rank 16" in steps[0]
    nearly = dataclasses.replace(found, limit=int(0.99 * least.footprint.peak))
    kernels, narrower, *_ = remedies(nearly, (), 0.92)
    assert kernels.startswith("--allow training.attention: ") and "--training.attention pallas" in kernels
    # The least has its moments on the host. With jax 0.11 the table's are on the GPU, too, and less of them in 8 bits.
    early = jax.__version_info__ >= (0, 11)
    field, value = ("optimizer.state_dtype", "int8") if early else ("precision.reduce_dtype", "bfloat16")
    assert narrower.startswith(f"--allow {field}: ") and f"--{field} {value}" in narrower


def test_a_recipe_for_other_gpus_is_not_among_the_candidates() -> None:
    one_gpu = dataclasses.replace(RECIPE, mesh=MeshConfig())
    assert one_gpu not in {each.config for each in estimate_all(one_gpu, CLUSTER, (), lean=True)}
    assert RECIPE in {each.config for each in estimate_all(RECIPE, CLUSTER, (), lean=True)}


def test_no_legal_mesh_is_an_error() -> None:
    model = dataclasses.replace(RECIPE.model, layers=1, heads=5, kv_heads=5)
    training = dataclasses.replace(RECIPE.training, batch_size=3)
    odd = dataclasses.replace(RECIPE, model=model, training=training, mesh=MeshConfig())
    with pytest.raises(InputError, match=r"no mesh of 1 × 4 GPUs is legal .* mesh.pipeline=4"):
        search(odd, CLUSTER, LIMIT, (), lambda configs: [])


def test_moments_whose_blocks_would_straddle_devices_are_left_out() -> None:
    """A block of the 16 last values of a matrix cannot be split by `tensor`."""
    tiny = configuration.load(str(ROOT / "benchmarks" / "recipes" / "tiny.py"))
    found = estimate_all(tiny, Cluster("h200", 1, 2), ("optimizer.state_dtype",), lean=True)
    dtypes: dict[MeshConfig, set[str]] = {}
    for each in found:
        dtypes.setdefault(each.config.mesh, set()).add(each.config.optimizer.state_dtype)
    both = {"float32", "bfloat16"}
    assert dtypes == {
        MeshConfig(fsdp=2): {*both, "int8"},
        MeshConfig(pipeline=2): {*both, "int8"},
        MeshConfig(tensor=2): both,
    }


def test_kernels_that_the_gpus_do_not_have_are_left_out() -> None:
    def kernels(gpu: str) -> set[str]:
        found = estimate_all(RECIPE, Cluster(gpu, 1, 4), ("training.attention",), lean=True)
        return {each.config.training.attention for each in found}

    assert "triton" not in kernels("a100") >= {RECIPE.training.attention, "pallas"}
    narrow = dataclasses.replace(RECIPE, model=dataclasses.replace(RECIPE.model, head_dim=96))
    found = estimate_all(narrow, CLUSTER, ("training.attention",), lean=True)
    assert {each.config.training.attention for each in found} == {RECIPE.training.attention}


def test_a_row_longer_than_a_gpu_holds_is_divided() -> None:
    """Of 131,072 tokens, a single one: neither rows nor heads are enough to divide it by."""
    training = dataclasses.replace(RECIPE.training, batch_size=1, sequence_length=131_072, attention="pallas")
    model = dataclasses.replace(RECIPE.model, heads=35, kv_heads=5)
    found = estimate_all(dataclasses.replace(RECIPE, model=model, training=training, mesh=MeshConfig()), CLUSTER, ())
    best = next(each for each in found if each.footprint.peak < LIMIT)
    assert best.config.mesh == MeshConfig(context=4)
    assert "context 4, ZeRO-" in report.words(best.config, RECIPE)


def test_the_tree_names_every_mesh_and_why_it_was_left() -> None:
    found, _ = run(limit=LIMIT // 2)
    said = explain.tree(found)
    assert "  > fsdp 4* (" in said
    assert "  - data 4 (" in said and "does not fit, " in said
    for line in ("sharding", "accumulation", "remat", "optimizer state"):
        assert f"\n{line}" in said.replace("  ", "")


def test_flags_lead_back_to_the_setting() -> None:
    found, _ = run()
    by_name = next(choice.config for choice in found.choices if not isinstance(choice.config.remat.policy, str))
    given = report.flags(by_name, RECIPE).split()
    assert configuration.override(RECIPE, given, "plan") == by_name


def test_json_agrees_with_a_plans() -> None:
    found, _ = run()
    told = report.to_json(found, 1.0, lambda plan: planning.to_json(plan))
    assert told["settings"] == len(found.candidates) >= told["fit_by_arithmetic"]
    first = told["ranked"][0]
    assert first["step_seconds"] == pytest.approx(sum(first["time"].values()))
    assert first["plan"] == planning.to_json(found.winner.plan)  # type: ignore[union-attr,arg-type]
