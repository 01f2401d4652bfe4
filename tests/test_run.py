"""What a run left, as it is read back."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from commands import train

from jaxopt_llm import run


def test_parameters_take_all_devices_where_one_is_too_small() -> None:
    devices = jax.devices()
    assert run.devices_for(75, devices, 100) == devices[:1]
    assert run.devices_for(76, devices, 100) == devices
    assert run.devices_for(76, devices, None) == devices[:1]


def test_they_rest_divided_and_in_compute_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = train(tmp_path, "--training.steps", 1, "--precision.compute-dtype", "bfloat16")
    assert (done.returncode, done.stderr) == (0, "")
    monkeypatch.setattr(run, "devices_for", lambda needed, devices, limit: devices)
    loaded = run.load(tmp_path)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype("bfloat16")}
    table = loaded.params["outer"]["embedding"]["table"]
    assert table.sharding.num_devices == 8 and not table.is_fully_replicated
