"""Out of memory: the error, its exit code 2, and the checkpoints that stay."""

import dataclasses
import functools
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import toy
from test_loop import tiny

from jaxopt_llm import train as command
from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.compiler import hlo
from jaxopt_llm.compiler.buffers import Peak
from jaxopt_llm.config import CheckpointConfig, Config, MeshConfig, ModelConfig
from jaxopt_llm.core.errors import InputError, OutOfMemory
from jaxopt_llm.observe.preemption import Preemption
from jaxopt_llm.parallel import mesh
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.planning import oom
from jaxopt_llm.run import setup
from jaxopt_llm.step.program import Program

MODEL = ModelConfig(width=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp_width=16)
XLA = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."


def config(directory: Path, **sections: Any) -> Config:
    sections = {"model": MODEL, "mesh": MeshConfig(), **sections}
    return dataclasses.replace(tiny(directory), **sections)


@functools.cache
def lowered() -> jax.stages.Lowered:
    """Return a lowered step that holds 4 MiB, most of it in one array."""

    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer_product"):
            return jax.numpy.sort(x[:, None] * x[None]).sum()

    return jax.jit(step).lower(jax.ShapeDtypeStruct((1024,), "float32"))


def explainer(directory: Path, *steps: int) -> oom.OomExplainer:
    """Return the explainer of a run with checkpoints of these steps."""
    run = config(directory)
    for step in steps:
        (directory / "checkpoints" / str(step)).mkdir(parents=True)
    return oom.make_explainer(run, *on_one_device(run), Checkpoints(directory / "checkpoints"))


def on_one_device(run: Config) -> tuple[Program, Placement]:
    devices = make_mesh(run.mesh, jax.devices("cpu")[:1])
    placement = Placement(devices, run.sharding, run.precision, run.offload)
    program = toy.make_program(run.model, run.training, run.optimizer, run.schedule, run.remat, run.lora, placement)
    return program, placement


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    gpu = SimpleNamespace(memory_stats=lambda: {"bytes_limit": limit, "bytes_in_use": 3 * 2**29})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])


def needing(monkeypatch: pytest.MonkeyPatch, device: int, host: int = 0) -> None:
    monkeypatch.setattr(oom.hlo, "read_memory", lambda compiled: hlo.Memory(device, 0, 0, 0, host))


def test_a_program_that_needs_too_much_device_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    explain = explainer(tmp_path / "run")
    monkeypatch.setattr(oom, "advise", lambda *_: ())
    on_a_gpu(monkeypatch, 2**30)
    needing(monkeypatch, 2**30)
    explain.check_fits({"the step": (lowered(), None)})  # type: ignore[dict-item]
    needing(monkeypatch, 3 * 2**29)
    with pytest.raises(OutOfMemory) as refused:
        explain.check_fits({"the step": (lowered(), None)})  # type: ignore[dict-item]
    assert str(refused.value) == "the step needs 1.5 GiB per device, but XLA may use only 1.0 GiB: 0.5 GiB too much"
    assert refused.value.exit_code == 2


def test_the_copy_of_a_check_of_replicas_must_fit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explain = explainer(tmp_path / "run")
    monkeypatch.setattr(oom, "advise", lambda *_: ())
    on_a_gpu(monkeypatch, 2**30)
    needing(monkeypatch, 2**29)
    programs = {name: (lowered(), None) for name in ("the step", "an evaluation")}
    monkeypatch.setattr(oom, "count_resting_bytes", lambda state, kind=None: 0 if kind else 2**29)
    explain.check_fits(programs, copies_state=True)  # type: ignore[arg-type]
    monkeypatch.setattr(oom, "count_resting_bytes", lambda state, kind=None: 0 if kind else 2**30)
    explain.check_fits(programs)  # type: ignore[arg-type]
    with pytest.raises(OutOfMemory, match="the step, with a copy of the state for run.check_replicas, needs 1.5 GiB"):
        explain.check_fits(programs, copies_state=True)  # type: ignore[arg-type]


def test_a_program_that_needs_too_much_host_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explain = explainer(tmp_path / "run")
    monkeypatch.setattr(oom, "advise", lambda *_: ())
    needing(monkeypatch, 0, host=2**50)
    with pytest.raises(InputError, match="needs 8,388,608.0 GiB on the simulated devices together"):
        explain.check_fits({"the step": (lowered(), None)})  # type: ignore[dict-item]
    on_a_gpu(monkeypatch, 2**30)
    with pytest.raises(
        InputError, match=r"needs 8,388,608.0 GiB of host memory for --offload.* and --remat.offload, but"
    ):
        explain.check_fits({"the step": (lowered(), None)})  # type: ignore[dict-item]


def test_a_failed_allocation_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check an error at run time: the program is compiled again to list its arrays."""
    explain = explainer(tmp_path / "run", 3, 12)
    on_a_gpu(monkeypatch, 2**31)
    with pytest.raises(OutOfMemory) as refused, explain.explain_oom(lambda: "in step 15", lowered):
        raise jax.errors.JaxRuntimeError(XLA)
    assert str(refused.value) == (
        "out of memory in step 15: XLA could not allocate 16.00 GiB more, with 1.5 of 2.0 GiB in use; "
        f"the run can resume from checkpoint 12 in {tmp_path / 'run' / 'checkpoints'}"
    )
    said = "\n".join(refused.value.details)
    assert "f32[1024,1024]" in said
    assert "master weights of non_layer/embedding/table: float32[384,16]" in said
    assert "--lora" not in said and "--optimizer.state-dtype" not in said  # a resume cannot change them
    assert len(refused.value.details) < 25


def test_commands_that_use_weights_name_a_remedy() -> None:
    said = "out of memory evaluating: XLA could not allocate 16.00 GiB more: do less"
    with pytest.raises(OutOfMemory, match=said), oom.explain_oom("evaluating", "do less"):
        raise jax.errors.JaxRuntimeError(XLA)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), oom.explain_oom("evaluating", "do less"):
        raise jax.errors.JaxRuntimeError("INTERNAL: no")


def test_other_errors_are_not_replaced(tmp_path: Path) -> None:
    explain = explainer(tmp_path / "run")
    with pytest.raises(jax.errors.JaxRuntimeError), explain.explain_oom(lambda: "in step 1", lowered):
        raise jax.errors.JaxRuntimeError("INTERNAL: no")


@pytest.mark.parametrize(
    ("text", "bytes"),
    [
        (XLA, 2**34),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.50GiB.", 3 * 2**29),
        ("RESOURCE_EXHAUSTED: Failed to allocate request for 2.0KiB (2048B) on device ordinal 0", 2048),
        ("RESOURCE_EXHAUSTED: no more", None),
    ],
)
def test_requested_bytes_are_parsed(text: str, bytes: int | None) -> None:
    assert oom._parse_requested(text) == bytes


@pytest.mark.parametrize("every", [0, 2])
def test_a_run_counts_the_copy_of_its_check(every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[bool] = []

    def note(self: oom.OomExplainer, programs: oom.Programs, copies_state: bool) -> None:
        counted.append(copies_state)
        raise KeyboardInterrupt  # nothing else is of interest

    monkeypatch.setattr(oom.OomExplainer, "check_fits", note)
    monkeypatch.setattr(mesh, "visible_devices", lambda: jax.devices("cpu")[:1])
    run = config(tmp_path / "run")
    with Preemption() as preemption, pytest.raises(KeyboardInterrupt):
        command.train(dataclasses.replace(run, run=dataclasses.replace(run.run, check_replicas=every)), preemption)
    assert counted == [every > 0]


def test_a_step_that_runs_out_of_memory_leaves_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the compiled program run out of memory in its fourth call."""
    run = config(tmp_path / "run", checkpoint=CheckpointConfig(every=2, keep=3))
    monkeypatch.setattr(mesh, "visible_devices", lambda: jax.devices("cpu")[:1])
    program, _ = on_one_device(run)
    compiled = program.step.lower(program.state, program.batch).compile(toy.QUICK_COMPILE)
    calls = itertools.count(1)

    class Failing:
        hyperparameters, placed = program.step.hyperparameters, program.step.placed

        def lower(self, *_: Any) -> "Failing":
            return self

        def compile(self, **_: Any) -> "Failing":
            return self

        def memory_analysis(self) -> Any:
            return compiled.memory_analysis()

        def __call__(self, *arguments: Any) -> Any:
            if next(calls) == 4:
                raise jax.errors.JaxRuntimeError(XLA)
            return compiled(*arguments)

    monkeypatch.setattr(setup, "make_program", lambda *_, **__: dataclasses.replace(program, step=Failing()))
    monkeypatch.setattr(oom, "find_peak", lambda *_: Peak(compiled, oom.hlo.read_memory(compiled), ()))
    monkeypatch.setattr(oom, "advise", lambda *_: ())
    told = "out of memory in step 4 or the one before: .* checkpoint 2 in "
    with Preemption() as preemption, pytest.raises(OutOfMemory, match=told):
        command.train(run, preemption)
    assert Checkpoints(tmp_path / "run" / "checkpoints").latest_verified_step() == 2
