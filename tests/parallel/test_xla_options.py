"""Which options of XLA's compiler a program gets, and what becomes of a user's own."""

from pathlib import Path

import jax
import pytest
from commands import ROOT, command
from test_bytes import ROWS, SEQUENCE, VOCABULARY, compiled

from jaxopt_llm import config as configuration
from jaxopt_llm.config import TrainConfig
from jaxopt_llm.errors import InputError
from jaxopt_llm.model import flops
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.parallel import hlo, topology
from jaxopt_llm.parallel.mesh import MeshConfig, make_mesh
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.parallel.topology import gpu_topology
from jaxopt_llm.parallel.xla_options import CORRECT, GATHERED_AHEAD, PASSES, XlaConfig, check, compiler_options
from jaxopt_llm.training.program import make_program

TINY = ROOT / "benchmarks" / "recipes" / "tiny.py"


def test_gathers_run_ahead_only_where_no_loop_over_microbatches_would_keep_gradients() -> None:
    mesh = make_mesh(MeshConfig(fsdp=8), gpu_topology("h200"))
    assert compiler_options(mesh, 1).items() >= GATHERED_AHEAD.items()
    assert not compiler_options(mesh, 4).keys() & GATHERED_AHEAD.keys()
    # Nor where a forward that is run again would bring tokens to experts ahead, and attention run once more for it.
    experts = make_mesh(MeshConfig(fsdp=2, expert=4), gpu_topology("h200"))
    assert not compiler_options(experts, 1).keys() & GATHERED_AHEAD.keys()
    assert compiler_options(mesh, 4)["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert not compiler_options(make_mesh(MeshConfig(fsdp=8), jax.devices("cpu")), 1)


def test_a_users_options_come_last_and_leave_wrong_passes_disabled() -> None:
    mesh = make_mesh(MeshConfig(fsdp=8), gpu_topology("h200"))
    own = XlaConfig(("xla_gpu_enable_latency_hiding_scheduler=False", "xla_gpu_autotune_level=0", f"{PASSES}=dce"))
    options = compiler_options(mesh, 1, own=own)
    assert options["xla_gpu_enable_latency_hiding_scheduler"] is False
    assert (options["xla_gpu_autotune_level"], options[PASSES]) == ("0", f"{CORRECT[PASSES]},dce")


def test_a_product_that_is_kept_and_used_is_formed_once() -> None:
    layers = 8
    step = compiled(layers, MeshConfig(), 3, "none")
    model = ModelConfig(vocabulary_size=VOCABULARY, heads=8, head_dim=128, layers=layers)
    needed = flops.per_token(model, step.program.specs.masters, step.program.specs.frozen, SEQUENCE).full
    # Attention's backward forms the scores again.
    scores = 2 * layers * 8 * 128 * SEQUENCE
    assert hlo.dot_flops(step.text) == ROWS * SEQUENCE * (needed + scores)


def test_a_users_options_reach_the_step() -> None:
    config = configuration.changed(configuration.load(str(TINY.with_name("llama_small.py"))), {"model.layers": 2})
    mesh = make_mesh(MeshConfig(), gpu_topology("h200", gpus_per_host=1))
    placement = Placement(mesh, config.sharding, config.precision)
    of = (config.model, config.training, config.optimizer, config.schedule, config.remat, config.lora, placement)

    def calls_cublas(*options: str) -> bool:
        program = make_program(*of, xla=XlaConfig(options))
        text = topology.compile(program.step.lower(program.state, program.batch)).as_text()
        return "__cublas$" in str(text)

    assert (calls_cublas("xla_gpu_enable_triton_gemm=true"), calls_cublas("xla_gpu_enable_triton_gemm=false")) == (
        False,
        True,
    )


def test_a_resume_may_change_them() -> None:
    changed = configuration.changed(TrainConfig(), {"xla.options": ("xla_gpu_autotune_level=0",)})
    assert not configuration.differences(TrainConfig(), changed)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_xla_is_asked_what_it_takes(platform: str) -> None:
    """On a topology, without any of NVIDIA's tools."""
    mesh = make_mesh(MeshConfig(fsdp=8), gpu_topology("h200") if platform == "gpu" else jax.devices("cpu"))
    check(XlaConfig(("xla_gpu_all_gather_combine_threshold_bytes=1024", "xla_gpu_enable_command_buffer=")), mesh)
    with pytest.raises(InputError, match="xla_nothing=1: jax .* says: .*No such compile option") as caught:
        check(XlaConfig(("xla_nothing=1", "xla_gpu_autotune_level=much")), mesh)
    assert "xla_gpu_autotune_level=much" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["xla_nothing=1"], "xla.options: xla_nothing=1: "),
        (["xla_gpu_autotune_level"], "xla.options: 'xla_gpu_autotune_level': must be NAME=VALUE"),
        (["gpu_autotune_level=1"], "xla.options: 'gpu_autotune_level=1': must be NAME=VALUE, of a NAME that begins"),
        (
            ["xla_gpu_autotune_level=1", "xla_gpu_autotune_level=2"],
            "xla.options: xla_gpu_autotune_level is given twice",
        ),
    ],
)
def test_a_run_with_other_options_ends_before_it_starts(options: list[str], complaint: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = command("plan", "--config", TINY, "--gpus-per-host", 1, "--run.directory", run, "--xla.options", *options)
    assert done.returncode == 2 and complaint in done.stderr and done.stderr.count("\n") == 1
    assert not run.exists()
