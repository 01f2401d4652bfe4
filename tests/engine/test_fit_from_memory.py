"""A run of fit that dies: it continues from the state in the memory of the host, and ends equal to the bit."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxopt_llm
from jaxopt_llm.config import Config


def make_batch(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(8, 4)).astype(np.float32)


def make_engine(directory: Path) -> jaxopt_llm.Engine:
    config = Config(
        mesh={"fsdp": 8},  # type: ignore[arg-type]
        checkpoint={"every": 4, "replicate_every": 2, "replicate_directory": str(directory)},  # type: ignore[arg-type]
        logging={"every": 1, "tensorboard": False},  # type: ignore[arg-type]
        precision={"compute_dtype": "float32"},  # type: ignore[arg-type]
    )

    def loss(model: Any, batch: Any) -> Any:
        return jnp.mean((batch @ model["w"] - 1) ** 2)

    return jaxopt_llm.initialize(lambda: {"w": jnp.ones((4, 2))}, loss, make_batch(0), config, optax.adamw(1e-2))


def test_a_run_continues_from_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(step: int) -> np.ndarray:
        if step == 7:
            raise RuntimeError("lost")
        return make_batch(step)

    memory = tmp_path / "memory"
    whole = jaxopt_llm.fit(make_engine(memory), make_batch, 10, tmp_path / "whole")
    with pytest.raises(RuntimeError, match="lost"):
        jaxopt_llm.fit(make_engine(memory), fail, 10, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["4"]
    resumed = jaxopt_llm.fit(make_engine(memory), make_batch, 10, tmp_path / "run")
    assert "step 6 is in the memory of the hosts" in capsys.readouterr().out
    for one, other in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
        np.testing.assert_array_equal(one, other)
    logs = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "run")]
    losses = [[json.loads(line)["loss"] for line in log] for log in logs]
    assert losses[0] == losses[1] and len(losses[0]) == 10
    assert not [path for path in memory.rglob("*") if path.is_file()]
