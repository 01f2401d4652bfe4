"""What `plan` says, against the compiler's own figures and the formulas."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import pytest
from commands import ROOT, command, start
from jax.sharding import AbstractMesh

from jaxopt_llm import plan as planning
from jaxopt_llm.config import TrainConfig
from jaxopt_llm.errors import InputError
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.parallel.buffers import Buffer
from jaxopt_llm.parallel.mesh import AXES, MeshConfig, compiler_options, make_mesh
from jaxopt_llm.parallel.topology import CHIPS, gpu_topology
from jaxopt_llm.plan import Plan, make_plan
from jaxopt_llm.training.step import TrainingConfig

CONFIG = TrainConfig(
    model=ModelConfig(width=1024, layers=8, heads=8, kv_heads=8, head_dim=128, mlp_width=4096, vocabulary_size=7_680),
    training=TrainingConfig(batch_size=8, sequence_length=128),
    mesh=MeshConfig(fsdp=8),
)


@pytest.fixture(scope="module")
def plans() -> dict[int, Plan]:
    """With one row on each GPU, and with 16."""

    def rows(count: int) -> Plan:
        training = dataclasses.replace(CONFIG.training, batch_size=8 * count)
        return make_plan(dataclasses.replace(CONFIG, training=training), "h200", 1, 8)

    return {count: rows(count) for count in (1, 16)}


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


def test_links() -> None:
    mesh = AbstractMesh((1, 2, 4, 1, 1, 2), AXES)  # 16 GPUs: data 2, fsdp 4, tensor 2
    chip = CHIPS["h100"]

    def link(*axes: str, kind: str = "all-gather", gpus_per_host: int = 8) -> tuple[str, float]:
        return planning._link(axes, kind, mesh, chip, gpus_per_host)

    assert link("fsdp", "tensor") == ("nvlink", chip.nvlink_bytes_per_second)
    assert link("data") == ("network", chip.network_bytes_per_second)
    assert link("data", "fsdp") == ("network", 4 * chip.network_bytes_per_second)
    assert link("fsdp", gpus_per_host=4) == ("network", 2 * chip.network_bytes_per_second)
    assert link("data", "fsdp", "tensor", kind="collective-permute") == ("network", chip.network_bytes_per_second)


@pytest.mark.parametrize(
    ("source", "opcode", "shape", "kind"),
    [
        ("jit(step)/jvp()/while/body/gather_weight/sharding_constraint", "fusion", (8,), "gathered_weights"),
        ("jit(step)/transpose(jvp(weight_gradient))/scatter-add", "fusion", (8,), "gradients"),
        ("", "reduce-scatter", (8,), "gradients"),
        ("jit(step)/transpose(jvp())/while", "while", (1, 36, 640), "gradients"),
        ("jit(step)/update/while/body/mul", "fusion", (8,), "optimizer"),
        ("jit(step)/jvp()/while", "while", (36, 4096, 640), "activations"),
        ("", "copy", (8,), "other"),
    ],
)  # fmt: skip
def test_what_a_temporary_is(source: str, opcode: str, shape: tuple[int, ...], kind: str) -> None:
    assert planning._kind(Buffer(math.prod(shape) * 4, "f32", shape, opcode, source), {(36, 640)}) == kind


def test_gathers_run_ahead_only_where_no_loop_over_microbatches_would_keep_gradients() -> None:
    mesh = make_mesh(MeshConfig(fsdp=8), gpu_topology("h200"))
    ahead = "xla_gpu_enable_pipelined_all_gather"
    assert compiler_options(mesh, 1)[ahead] is True
    assert ahead not in compiler_options(mesh, 4)
    assert compiler_options(mesh, 4)["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert not compiler_options(make_mesh(MeshConfig(fsdp=8), jax.devices("cpu")), 1)


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(InputError, match=r"--hosts 2 × --gpus-per-host 8 are 16 GPUs, the mesh has 8"):
        make_plan(CONFIG, "h200", 2, 8)


def test_the_command() -> None:
    recipe = ROOT / "benchmarks" / "recipes" / "tiny.py"
    done = command("plan", "--config", recipe, "--gpus-per-host", 2, "--mesh.fsdp=2", "--json")
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
