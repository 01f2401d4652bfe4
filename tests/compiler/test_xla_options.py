"""Options of XLA's compiler that a program gets, and the options of the user."""

from pathlib import Path

import jax
import pytest
import toy
from commands import ROOT, command
from compiled_steps import ROWS, SEQUENCE, VOCABULARY, compiled

from jaxopt_llm.compiler import hlo, topology
from jaxopt_llm.compiler.topology import gpu_topology
from jaxopt_llm.compiler.xla_options import (
    DISABLE_PASSES,
    EARLY_COLLECTIVES,
    KNOWS_EARLY_COLLECTIVES,
    NO_WRONG_PASSES,
    PARALLEL_COLLECTIVES,
    PIPELINED_ALL_GATHER,
    REDUCE_SCATTER_THRESHOLD,
    REDUCED_TOGETHER,
    SCHEDULES_WELL,
    check_options,
    compiler_options,
)
from jaxopt_llm.config import Config, Matmul, MeshConfig, ModelConfig, XlaConfig, cli, fields
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.model import flops
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement

TRITON: tuple[tuple[Matmul, bool], ...] = (("compute_dtype", False), ("fp8", False), ("compute_dtype", True))
TINY = ROOT / "benchmarks" / "recipes" / "tiny.py"


def test_all_gather_is_pipelined_only_without_microbatches_and_experts() -> None:
    mesh = make_mesh(MeshConfig(fsdp=8), gpu_topology("h200"))
    assert compiler_options(mesh, 1).items() >= PIPELINED_ALL_GATHER.items()
    assert not compiler_options(mesh, 4).keys() & PIPELINED_ALL_GATHER.keys()
    # With experts, the backward would exchange the tokens early, and run attention once more for that.
    experts = make_mesh(MeshConfig(fsdp=2, expert=4), gpu_topology("h200"))
    assert not compiler_options(experts, 1).keys() & PIPELINED_ALL_GATHER.keys()
    assert compiler_options(mesh, 4)["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert not compiler_options(make_mesh(MeshConfig(fsdp=8), jax.devices("cpu")), 1)


@pytest.mark.skipif(not SCHEDULES_WELL, reason="these options are for jax 0.11 and later")
def test_few_gradients_are_reduced_together_on_any_number_of_gpus() -> None:
    """The option is in bytes that a device keeps."""
    for hosts in (1, 8):
        options = compiler_options(make_mesh(MeshConfig(fsdp=8 * hosts), gpu_topology("h100", hosts)), 1)
        assert options[REDUCE_SCATTER_THRESHOLD] == REDUCED_TOGETHER // (8 * hosts)
        assert options.items() >= PARALLEL_COLLECTIVES.items()
    assert REDUCE_SCATTER_THRESHOLD not in compiler_options(make_mesh(MeshConfig(tensor=8), gpu_topology("h100")), 1)


@pytest.mark.skipif(not SCHEDULES_WELL, reason="this option is for jax 0.11 and later")
def test_recomputed_layers_on_one_host_get_one_collective_at_a_time() -> None:
    for hosts, expected in ((1, False), (2, True)):
        mesh = make_mesh(MeshConfig(fsdp=8 * hosts), gpu_topology("h100", hosts))
        options = compiler_options(mesh, 1, recomputed="layers")
        assert (options.items() >= PARALLEL_COLLECTIVES.items()) == expected


@pytest.mark.skipif(not KNOWS_EARLY_COLLECTIVES, reason="this option is for jax 0.11.2 and later")
def test_collectives_begin_early_where_a_backward_between_hosts_computes_matmuls_again() -> None:
    two, one = (make_mesh(MeshConfig(fsdp=8 * hosts), gpu_topology("h100", hosts)) for hosts in (2, 1))
    ring = make_mesh(MeshConfig(fsdp=8, context=2), gpu_topology("h100", 2))
    found = [
        compiler_options(two, 2, recomputed="layers"),
        compiler_options(two, 2, recomputed="a part"),
        compiler_options(two, 2, recomputed="nothing"),
        compiler_options(two, 1, recomputed="layers"),
        compiler_options(one, 2, recomputed="a part"),
        compiler_options(ring, 2, recomputed="layers"),
    ]
    assert [options.items() >= EARLY_COLLECTIVES.items() for options in found] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]


def test_cublas_multiplies_where_it_adds_adapters_or_multiplies_codes() -> None:
    mesh = make_mesh(MeshConfig(fsdp=8), gpu_topology("h200"))
    found = [compiler_options(mesh, 1, matmul, adapters=on) for matmul, on in TRITON]
    assert [options.get("xla_gpu_enable_triton_gemm", True) for options in found] == [True, False, False]


def test_user_options_come_last_and_wrong_passes_stay_disabled() -> None:
    mesh = make_mesh(MeshConfig(fsdp=8), gpu_topology("h200"))
    user = XlaConfig(
        ("xla_gpu_enable_latency_hiding_scheduler=False", "xla_gpu_autotune_level=0", f"{DISABLE_PASSES}=dce")
    )
    options = compiler_options(mesh, 1, user=user)
    assert options["xla_gpu_enable_latency_hiding_scheduler"] is False
    assert (options["xla_gpu_autotune_level"], options[DISABLE_PASSES]) == (
        "0",
        f"{NO_WRONG_PASSES[DISABLE_PASSES]},dce",
    )


def test_own_remat_off_is_an_option_of_gpus_only() -> None:
    off, name = XlaConfig(own_remat="off"), "xla_gpu_memory_limit_slop_factor"
    mesh, on_cpu = (
        make_mesh(MeshConfig(fsdp=8), gpu_topology("h200")),
        make_mesh(MeshConfig(fsdp=8), jax.devices("cpu")),
    )
    assert compiler_options(mesh, user=off)[name] == 150
    assert all(name not in compiler_options(mesh, user=XlaConfig(own_remat=value)) for value in ("auto", "on"))
    assert not compiler_options(on_cpu, user=off)
    ours = XlaConfig((f"{name}=95",), own_remat="off")
    assert compiler_options(mesh, user=ours)[name] == "95"


def test_a_matmul_whose_result_is_kept_and_used_runs_once() -> None:
    layers = 8
    step = compiled(layers, MeshConfig(), 3, "none")
    model = ModelConfig(vocabulary_size=VOCABULARY, heads=8, head_dim=128, layers=layers)
    needed = flops.count_per_token(model, step.program.specs.masters, step.program.specs.frozen, SEQUENCE).full
    # The backward of attention computes the scores again.
    scores = 2 * layers * 8 * 128 * SEQUENCE
    assert hlo.count_dot_flops(step.text) == ROWS * SEQUENCE * (needed + scores)


@pytest.mark.slow
def test_user_options_reach_the_step() -> None:
    config = fields.replace_fields(cli.load_recipe(str(TINY.with_name("llama_small.py"))), {"model.layers": 2})
    mesh = make_mesh(MeshConfig(), gpu_topology("h200", gpus_per_host=1))
    placement = Placement(mesh, config.sharding, config.precision)
    of = (config.model, config.training, config.optimizer, config.schedule, config.remat, config.lora, placement)

    def calls_cublas(*options: str) -> bool:
        program = toy.make_program(*of, xla=XlaConfig(options))
        text = topology.compile_without_gpu(program.step.lower(program.state, program.batch)).as_text()
        return "__cublas$" in str(text)

    assert (calls_cublas("xla_gpu_enable_triton_gemm=true"), calls_cublas("xla_gpu_enable_triton_gemm=false")) == (
        False,
        True,
    )


def test_a_resume_may_change_user_options() -> None:
    changed = fields.replace_fields(Config(), {"xla.options": ("xla_gpu_autotune_level=0",)})
    assert not fields.forbidden_changes(Config(), changed)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_options_that_xla_rejects_are_named(platform: str) -> None:
    """Check this on a topology, without any of NVIDIA's tools."""
    mesh = make_mesh(MeshConfig(fsdp=8), gpu_topology("h200") if platform == "gpu" else jax.devices("cpu"))
    check_options(
        XlaConfig(("xla_gpu_all_gather_combine_threshold_bytes=1024", "xla_gpu_enable_command_buffer=")), mesh
    )
    with pytest.raises(InputError, match="xla_nothing=1: XLA of jax .* rejects it: .*No such compile option") as caught:
        check_options(XlaConfig(("xla_nothing=1", "xla_gpu_autotune_level=much")), mesh)
    assert "xla_gpu_autotune_level=much" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["xla_nothing=1"], "xla.options: xla_nothing=1: "),
        (["xla_gpu_autotune_level"], "xla.options: 'xla_gpu_autotune_level': must be NAME=VALUE"),
        (["gpu_autotune_level=1"], "xla.options: 'gpu_autotune_level=1': must be NAME=VALUE with a NAME that begins"),
        (
            ["xla_gpu_autotune_level=1", "xla_gpu_autotune_level=2"],
            "xla.options: xla_gpu_autotune_level is given twice",
        ),
    ],
)
def test_a_run_with_wrong_options_ends_before_it_starts(options: list[str], message: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = command("plan", "--config", TINY, "--gpus-per-host", 1, "--run.directory", run, "--xla.options", *options)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert not run.exists()
