"""Tests of an engine whose step does not fit: the error names arrays, settings and the checkpoint to resume from."""

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxopt_llm
from jaxopt_llm.compiler import hlo
from jaxopt_llm.config import Config
from jaxopt_llm.core.errors import OutOfMemory
from jaxopt_llm.planning import oom
from jaxopt_llm.planning.oom import OomExplainer

XLA = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."
BATCH = {"x": jnp.ones((16, 8)), "y": jnp.ones((16, 1))}


def loss(model: nnx.Linear, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def make_engine(**sections: Any) -> jaxopt_llm.Engine:
    config = Config(
        mesh={"fsdp": 8},  # type: ignore[arg-type]
        checkpoint={"every": 2},  # type: ignore[arg-type]
        logging={"every": 1, "tensorboard": False},  # type: ignore[arg-type]
        precision={"compute_dtype": "float32"},  # type: ignore[arg-type]
        **sections,
    )
    return jaxopt_llm.initialize(lambda: nnx.Linear(8, 1, rngs=nnx.Rngs(0)), loss, BATCH, config)


def test_a_step_that_runs_out_of_memory_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the compiled step run out of memory in its fourth call."""
    engine = make_engine(sharding={"zero_stage": 1})
    compiled, calls = engine.compiled_step, itertools.count(1)

    class Failing:
        memory_analysis = staticmethod(compiled.memory_analysis)

        def __call__(self, *arguments: Any) -> Any:
            if next(calls) == 4:
                raise jax.errors.JaxRuntimeError(XLA)
            return compiled(*arguments)

    monkeypatch.setitem(engine.steps.find_first().__dict__, "compiled", Failing())
    told = "out of memory in step 4 or the one before: XLA could not allocate 16.00 GiB more; .* checkpoint 2 in "
    with pytest.raises(OutOfMemory, match=told) as refused:
        jaxopt_llm.fit(engine, lambda step: BATCH, 6, tmp_path / "run")
    said = "\n".join(refused.value.details)
    assert "master weights of non_layer/bias: float32[1]" in said
    assert "sharding.zero_stage=3: 0.00 MiB less of the state per device" in said
    assert "training.accumulation=2: half of the activations" in said
    assert "optimizer.state_dtype" not in said  # a resume cannot change it
    assert "offload" not in said  # simulated devices and the host share one memory


def test_a_step_that_does_not_fit_is_refused_before_the_state_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    monkeypatch.setattr(oom.hlo, "read_memory", lambda compiled: hlo.Memory(2**50, 0, 0, 0, 0))
    with pytest.raises(
        OutOfMemory, match="the step needs 8,388,608.0 GiB on the simulated devices together"
    ) as refused:
        jaxopt_llm.fit(engine, lambda step: BATCH, 6, tmp_path / "run")
    assert engine._state is None
    said = "\n".join(refused.value.details)
    assert "optimizer.state_dtype=int8" in said and "sharding.zero_stage" not in said


@pytest.mark.parametrize("every", [0, 2])
def test_the_copy_of_a_check_of_replicas_is_counted(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[bool] = []
    monkeypatch.setattr(OomExplainer, "check_fits", lambda self, programs, copies: counted.append(copies))
    jaxopt_llm.fit(make_engine(run={"check_replicas": every}), lambda step: BATCH, 1, tmp_path / "run")
    assert counted == [every > 0]


def test_the_step_is_compiled_once_for_all_ends_of_the_schedule(tmp_path: Path) -> None:
    engine = make_engine()
    before = engine.compiled_step
    jaxopt_llm.fit(engine, lambda step: BATCH, 2, tmp_path / "run")  # the schedule ends with the run
    engine.step(BATCH)
    assert engine.compiled_step is before


def test_a_run_records_the_memory_of_its_step(tmp_path: Path) -> None:
    engine = jaxopt_llm.fit(make_engine(), lambda step: BATCH, 2, tmp_path / "run")
    written = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert written["peak"] == hlo.read_memory(engine.compiled_step).peak == sum(written["kinds"].values())
