"""What `plan` says, against the compiler's own figures and the formulas."""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from commands import ROOT, command, start

from jaxopt_llm import config as configuration
from jaxopt_llm import plan as planning
from jaxopt_llm.config import TrainConfig
from jaxopt_llm.errors import InputError
from jaxopt_llm.execution.schedules import PipelineConfig
from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.parallel.mesh import MeshConfig
from jaxopt_llm.parallel.sharding import ShardingConfig
from jaxopt_llm.parallel.topology import CHIPS
from jaxopt_llm.plan import Plan, make_plan
from jaxopt_llm.search import choose
from jaxopt_llm.search.choose import estimate
from jaxopt_llm.search.resting import resting
from jaxopt_llm.search.roofline import Cluster
from jaxopt_llm.training.step import TrainingConfig
from jaxopt_llm.validation import validate

TINY = ROOT / "benchmarks" / "recipes" / "tiny.py"
CONFIG = TrainConfig(
    model=ModelConfig(width=1024, layers=8, heads=8, kv_heads=8, head_dim=128, mlp_width=4096, vocabulary_size=7_680),
    training=TrainingConfig(batch_size=8, sequence_length=128),
    mesh=MeshConfig(fsdp=8),
)


def with_rows(count: int) -> TrainConfig:
    """So many on each GPU."""
    return dataclasses.replace(CONFIG, training=dataclasses.replace(CONFIG.training, batch_size=8 * count))


@pytest.fixture(scope="module")
def plans() -> dict[int, Plan]:
    """With one row on each GPU, and with 16."""
    return {count: make_plan(with_rows(count), "h200", 1, 8) for count in (1, 16)}


def test_attention_is_chosen_as_by_the_run(plans: dict[int, Plan]) -> None:
    """Of the table that is measured on GPUs, of which tests have none."""
    (line,) = (each for each in planning.show(plans[1]).splitlines() if each.startswith("attention: "))
    assert line.startswith("attention: xla, as nothing was measured of head_dim 128 in bfloat16")
    assert json.loads(planning.to_json(plans[1]))["attention"]["name"] == "xla"


def test_memory_by_kind(plans: dict[int, Plan]) -> None:
    few, many = plans[1].memory, plans[16].memory
    assert few.parameters == pytest.approx(4 / 8 * plans[1].parameters, rel=1e-3)
    assert few.optimizer == pytest.approx(8 / 8 * plans[1].parameters, rel=1e-3)
    stacks = plans[1].parameters - 7_680 * 1024
    # Of every layer its part; beside those, at most one layer's and the table's, whole.
    assert 4 / 8 * stacks <= few.gradients <= 1.01 * (4 / 8 * stacks + 4 * (stacks / 8 + 7_680 * 1024))
    for memory in (few, many):
        assert memory.gathered_weights > 0 or memory.gradients > 4 / 8 * stacks
        assert memory.other < 0.06 * memory.peak
    # Each layer's input is kept: 2 bytes for every position and dimension.
    assert many.activations - few.activations > 15 * 128 * 1024 * 2 * 8
    assert (many.parameters, many.optimizer) == (few.parameters, few.optimizer)


@pytest.mark.parametrize("rows", [1, 16])
def test_the_searchs_arithmetic_agrees_with_the_compiler(plans: dict[int, Plan], rows: int) -> None:
    said, config = plans[rows], with_rows(rows)
    rests = resting(config)
    assert rests is not None
    found = estimate(config, Cluster("h200", 1, 8), rests)
    memory, work = found.footprint, found.work
    assert memory.parameters + memory.optimizer == said.memory.parameters + said.memory.optimizer
    assert work.flops + work.attention_flops == pytest.approx(said.flops, rel=0.01)
    sent = sum(each.bytes for each in said.collectives)
    assert sum(each.bytes for each in work.sent) == pytest.approx(sent, rel=0.02)
    assert memory.peak == pytest.approx(said.memory.peak, rel=0.1)


LONG = TrainingConfig(batch_size=1, sequence_length=32_768, attention="pallas")
OVER_SEQUENCES: dict[str, dict[str, Any]] = {
    "ring": {"mesh": MeshConfig(context=8)},
    "with fsdp": {
        "mesh": MeshConfig(fsdp=2, context=4),
        "training": dataclasses.replace(LONG, batch_size=4),
        "remat": RematConfig("save_attention"),
    },
    "two, replicated": {
        "mesh": MeshConfig(data=2, fsdp=2, context=2),
        "training": dataclasses.replace(LONG, batch_size=8, accumulation=2),
        "sharding": ShardingConfig(2),
    },
    "with tensor": {"mesh": MeshConfig(context=4, tensor=2), "sharding": ShardingConfig(sequence_parallel=True)},
    "all_to_all": {"mesh": MeshConfig(context=8), "sharding": ShardingConfig(context_exchange="all_to_all")},
    "xla": {"mesh": MeshConfig(context=8), "training": dataclasses.replace(LONG, attention="xla")},
    "on stages": {
        "mesh": MeshConfig(pipeline=2, context=4),
        "training": dataclasses.replace(LONG, batch_size=4, accumulation=4),
    },
    "whole gradients": {
        "mesh": MeshConfig(fsdp=2, context=4),
        "training": dataclasses.replace(LONG, batch_size=2),
        "sharding": ShardingConfig(1),
    },
    "a row each": {"mesh": MeshConfig(fsdp=8), "training": dataclasses.replace(LONG, batch_size=8)},
    "a row each, xla": {
        "mesh": MeshConfig(fsdp=8),
        "training": dataclasses.replace(LONG, batch_size=8, attention="xla"),
    },
}
QUICK = ("ring", "all_to_all")


def over_sequences(case: str) -> TrainConfig:
    model = dataclasses.replace(CONFIG.model, kv_heads=4)
    return dataclasses.replace(CONFIG, **{"model": model, "training": LONG, **OVER_SEQUENCES[case]})


@functools.cache
def plan_over_sequences(case: str) -> Plan:
    validate(over_sequences(case))
    return make_plan(over_sequences(case), "h200", 1, 8)


@pytest.mark.parametrize(
    "case", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in OVER_SEQUENCES]
)
def test_the_searchs_arithmetic_agrees_with_the_compiler_on_long_sequences(case: str) -> None:
    config, said = over_sequences(case), plan_over_sequences(case)
    rests = resting(config)
    assert rests is not None
    found = estimate(config, Cluster("h200", 1, 8), rests)
    assert found.footprint.peak == pytest.approx(said.memory.peak, rel=0.15)
    assert found.work.flops + found.work.attention_flops == pytest.approx(said.flops, rel=0.01)

    def exchanged(sent: Iterable[Any]) -> float:
        kinds = ("collective-permute", "all-to-all")
        return sum(each.bytes for each in sent if each.kind in kinds and each.axes == ("context",))

    # Versions of XLA differ in which gradients they round before sending.
    assert exchanged(found.work.sent) == pytest.approx(exchanged(said.collectives), rel=0.15)
    sent = sum(each.bytes for each in said.collectives)
    assert sum(each.bytes for each in found.work.sent) == pytest.approx(sent, rel=0.1)


def test_a_kernels_products_are_counted() -> None:
    """Those that run: twice a forward of two products, and a backward of three and of four."""
    said = plan_over_sequences("ring")
    attention = 8 * 8 * 2 * 2 * 128 * (32_768 + 1) / 2 * 32_768 / 8  # layers, heads, products, of each GPU
    products = said.model_flops - 3 * attention
    assert said.flops == pytest.approx(5.5 * attention + products * 4 / 3, rel=0.05)
    assert said.flops_seconds == pytest.approx(said.flops / CHIPS["h200"].peak_flops["bfloat16"], rel=0.01)


ON_STAGES = {
    "interleaved": {
        "mesh": MeshConfig(pipeline=4, tensor=2),
        "sharding": ShardingConfig(sequence_parallel=True),
        "pipeline": PipelineConfig("interleaved", 2),
    },
    "1f1b": {"mesh": MeshConfig(pipeline=4, tensor=2), "remat": RematConfig("none")},
    "gpipe": {"mesh": MeshConfig(pipeline=4, fsdp=2), "pipeline": PipelineConfig("gpipe")},
}


@pytest.mark.parametrize(
    "case", ["1f1b", *(pytest.param(each, marks=pytest.mark.slow) for each in ("interleaved", "gpipe"))]
)
def test_the_searchs_arithmetic_agrees_with_the_compiler_in_a_pipeline(case: str) -> None:
    """To the FLOP, whatever is not run in every tick."""
    training = dataclasses.replace(CONFIG.training, batch_size=32, sequence_length=1024, accumulation=8)
    model = dataclasses.replace(CONFIG.model, layers=16)  # in chunks of two: a loop over one XLA unrolls
    config = dataclasses.replace(CONFIG, model=model, training=training, **ON_STAGES[case])
    said, rests = make_plan(config, "h200", 1, 8), resting(config)
    assert rests is not None
    found = estimate(config, Cluster("h200", 1, 8), rests)
    assert found.work.flops + found.work.attention_flops == pytest.approx(said.flops, rel=1e-3)
    sent = sum(each.bytes for each in said.collectives)
    assert sum(each.bytes for each in found.work.sent) == pytest.approx(sent, rel=0.02)
    assert found.footprint.peak == pytest.approx(said.memory.peak, rel=0.1)
    assert 0 < said.idle == found.work.idle and said.model_flops < said.flops - said.repeated_flops


WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "fsdp and expert": {},
    "kept whole": {"remat": RematConfig("none")},
    "fsdp alone": {"mesh": MeshConfig(fsdp=8), "remat": RematConfig("dots")},
    "expert alone": {"mesh": MeshConfig(expert=8), "remat": RematConfig("save_qkv")},
    "more experts": {"experts": 32, "experts_per_token": 4, "expert_width": 512},
    "by choices": {"sharding": ShardingConfig(expert_exchange="all_to_all")},
    "by choices, kept whole": {
        "sharding": ShardingConfig(expert_exchange="all_to_all"),
        "experts": 32,
        "experts_per_token": 4,
        "expert_width": 512,
        "remat": RematConfig("none"),
    },
    "with tensor": {"mesh": MeshConfig(fsdp=2, expert=2, tensor=2)},
    "along the sequence": {
        "mesh": MeshConfig(fsdp=2, expert=2, tensor=2),
        "sharding": ShardingConfig(sequence_parallel=True),
    },
    "with context": {
        "mesh": MeshConfig(expert=4, context=2),
        "training": TrainingConfig(batch_size=8, sequence_length=4096),
    },
    "whole gradients": {"sharding": ShardingConfig(1)},
    "replicas": {"mesh": MeshConfig(data=2, expert=4)},
    "replicas, divided gradients": {"mesh": MeshConfig(data=2, expert=4), "sharding": ShardingConfig(2)},
    "microbatches": {"training": TrainingConfig(batch_size=128, sequence_length=128, accumulation=4)},
    "on stages": {
        "mesh": MeshConfig(pipeline=2, expert=4),
        "training": TrainingConfig(batch_size=128, sequence_length=128, accumulation=4),
    },
    "beside MLPs": {"shared_expert_width": 1024, "dense_layers": 2, "mlp_width": 4096},
}


@pytest.mark.parametrize(
    "case",
    [each if each == "fsdp and expert" else pytest.param(each, marks=pytest.mark.slow) for each in WITH_EXPERTS],
)
def test_the_searchs_arithmetic_agrees_with_the_compiler_on_experts(case: str) -> None:
    """To the FLOP: a layer that is run again is run again once."""
    settings = {"mesh": MeshConfig(fsdp=2, expert=4)} | WITH_EXPERTS[case]
    sections = {name: value for name, value in settings.items() if hasattr(CONFIG, name)}
    switches = {"experts": 8, "experts_per_token": 2, "expert_width": 2048}
    switches |= {name: value for name, value in settings.items() if name not in sections}
    training = dataclasses.replace(CONFIG.training, batch_size=128)
    model = dataclasses.replace(CONFIG.model, **switches)
    config = dataclasses.replace(CONFIG, **{"model": model, "training": training, **sections})
    validate(config)
    said, rests = make_plan(config, "h200", 1, 8), resting(config)
    assert rests is not None
    found = estimate(config, Cluster("h200", 1, 8), rests)
    memory = found.footprint
    # But for a few numbers of the update, which may be there at the peak.
    assert memory.parameters + memory.optimizer == pytest.approx(said.memory.parameters + said.memory.optimizer, abs=64)
    assert found.work.flops + found.work.attention_flops == pytest.approx(said.flops, rel=1e-3)
    assert memory.peak == pytest.approx(said.memory.peak, rel=0.1)
    sent = sum(each.bytes for each in said.collectives)
    assert sum(each.bytes for each in found.work.sent) == pytest.approx(
        sent, rel=0.02 if config.mesh.context == 1 else 0.05
    )

    def tokens(sent: Iterable[Any]) -> float:
        """What goes over `expert` alone, storage that it alone divides among it."""
        return sum(each.bytes for each in sent if each.axes == ("expert",))

    assert tokens(found.work.sent) == pytest.approx(tokens(said.collectives), rel=0.03)


def test_kinds_add_up_to_the_compilers_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages, with stacks of gradients whole in one group."""
    totals = []
    memory = planning.hlo.memory
    monkeypatch.setattr(planning.hlo, "memory", lambda compiled: totals.append(memory(compiled)) or totals[-1])
    config = dataclasses.replace(
        CONFIG,
        model=dataclasses.replace(CONFIG.model, layers=2),
        sharding=dataclasses.replace(CONFIG.sharding, zero_stage=1),
    )
    plan = make_plan(config, "a100", 2, 4)
    assert plan.memory.peak == totals[0].peak
    assert (len(plan.largest), plan.advice) == (6, ())
    assert all(each.bytes <= getattr(plan.memory, each.kind) for each in plan.largest)
    assert plan.limit == int(0.92 * CHIPS["a100"].memory_bytes)
    assert plan.memory.gradients >= 4 * (plan.parameters - 7_680 * 1024)
    moved = [each for each in plan.collectives if each.bytes > 1e6]
    assert {(each.axes, each.link) for each in moved} == {(("fsdp",), "network")}
    for each in moved:  # four rings, as many as a host has GPUs, leave each host
        assert each.seconds == pytest.approx(each.bytes / (4 * CHIPS["a100"].network_bytes_per_second))


def test_sequence_parallelism_is_planned_for() -> None:
    config = dataclasses.replace(
        CONFIG,
        model=dataclasses.replace(CONFIG.model, layers=2),
        mesh=MeshConfig(tensor=8),
        sharding=dataclasses.replace(CONFIG.sharding, sequence_parallel=True),
    )
    moved = make_plan(config, "h200", 1, 8).collectives
    assert {each.kind for each in moved if each.bytes > 1e6} == {"all-gather", "reduce-scatter"}


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """`plan --search` of the tiny recipe, in this process, whose JAX it leaves as it was."""
    before = {name: jax.config.values[name] for name in ("jax_platforms", "jax_enable_compilation_cache")}

    def run(*arguments: object) -> int:
        given = ["plan", "--search", "--config", TINY, "--gpu", "h100", "--gpus-per-host", 2, *arguments]
        monkeypatch.setattr(sys, "argv", [*map(str, given)])
        return planning.main()

    yield run
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_search_command(
    search: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(choose, "DOZEN", 1)
    file = tmp_path / "found.py"
    assert search("--explain", "--write", file) == 0
    said, written = capsys.readouterr().out, configuration.load(str(file))
    assert "fit by arithmetic, 1 compiled, in " in said and "\nmesh\n  > fsdp 2* (" in said
    validate(written)
    assert written.mesh.devices == 2 and written.training.batch_size == 4
    flags = said.split("fastest that fits: ")[1].splitlines()[0].split()
    assert configuration.override(configuration.load(str(TINY)), flags, "plan") == written
    with pytest.raises(InputError, match=r"--write .*found.py: exists, and is not overwritten"):
        search("--write", file)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--write", "no/such/folder.py"), "--write no/such/folder.py: no such folder as no/such"),
        (("--write", "new.json"), "--write new.json: a recipe is Python: name it new.py"),
        (
            ("--model.latent-rank", 8, "--model.rotary-head-dim", 4, "--model.kv-heads", 2),
            "--search does not know models with latent attention yet, and model.latent_rank=8",
        ),
        (("--allow", "model.width"), "argument --allow: invalid choice: 'model.width'"),
        (("--training.sequence-length", 0), "training.sequence_length=0: must be at least 1"),
    ],
)
def test_bad_input_of_the_search(search: Callable[..., int], arguments: tuple[object, ...], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        search(*arguments)


def test_explain_goes_with_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["plan", "--config", "10b.py", "--explain"])
    with pytest.raises(InputError, match="--explain goes with --search"):
        planning.main()


@pytest.mark.slow
def test_the_search_is_at_least_as_good_as_the_recipe_and_its_arithmetic_close() -> None:
    recipe, cluster = configuration.load("10b.py"), Cluster("h100", 1, 8)
    limit = int(0.92 * CHIPS["h100"].memory_bytes)
    found = choose.search(recipe, cluster, limit, (), lambda some: [make_plan(each, "h100", 1, 8) for each in some])
    assert found.winner is not None
    of_recipe = next(choice for choice in found.choices if choice.config == recipe)
    assert of_recipe.fits and found.winner.time.total <= of_recipe.time.total
    for choice in found.choices:
        assert choice.candidate.footprint.peak == pytest.approx(choice.plan.memory.peak, rel=0.1)
        assert choice.candidate.time.total == pytest.approx(choice.time.total, rel=0.05)


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(InputError, match=r"--hosts 2 × --gpus-per-host 8 are 16 GPUs, the mesh has 8"):
        make_plan(CONFIG, "h200", 2, 8)


def test_the_command() -> None:
    done = command("plan", "--config", TINY, "--gpus-per-host", 2, "--mesh.fsdp=2", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    memory = said["memory"]
    assert memory.pop("peak") == sum(memory.values()) == said["limit"] - said["spare"]
    assert said["fits"] is True and said["hosts"] == 1 and said["flops"] > 0 and said["collectives"]


def test_without_the_plan_extra_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "jax_plugins").mkdir()
    (tmp_path / "jax_plugins" / "__init__.py").touch()  # hides those that are installed
    process = start("plan", "--config", "quickstart.py", "--gpus-per-host", 1, PYTHONPATH=f"{tmp_path}:{ROOT}")
    _, complaint = process.communicate(timeout=300)
    assert process.returncode == 2
    assert complaint == "error: compiling for GPUs needs JAX's CUDA plugin: pip install 'jaxopt_llm[plan]'\n"
