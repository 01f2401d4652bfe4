"""What a run left, as it is read back."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from commands import train

from jaxopt_llm import run
from jaxopt_llm.execution.decode import Sampling
from jaxopt_llm.generate import generate


def test_parameters_take_all_devices_where_one_is_too_small() -> None:
    devices = jax.devices()
    assert run.devices_for(75, devices, 100) == devices[:1]
    assert run.devices_for(76, devices, 100) == devices
    assert run.devices_for(76, devices, None) == devices[:1]
    assert run.devices_for(150, devices, 100, tensor=2) == devices[:2]
    assert run.devices_for(151, devices, 100, tensor=2) == devices
    assert run.fits(600, devices, 100) and not run.fits(601, devices, 100)


def test_they_rest_divided_and_in_compute_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = train(tmp_path, "--training.steps", 1, "--precision.compute-dtype", "bfloat16")
    assert (done.returncode, done.stderr) == (0, "")
    monkeypatch.setattr(run, "devices_for", lambda needed, devices, limit, tensor: devices)
    loaded = run.load(tmp_path)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype("bfloat16")}
    table = loaded.params["outer"]["embedding"]["table"]
    assert table.sharding.num_devices == 8 and not table.is_fully_replicated


@pytest.mark.slow
def test_what_the_devices_do_not_hold_rests_on_the_host_and_writes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = train(tmp_path, "--training.steps", 1)
    assert (done.returncode, done.stderr) == (0, "")
    on_device = run.load(tmp_path)
    monkeypatch.setattr(run, "fits", lambda needed, devices, limit: False)
    on_host = run.load(tmp_path)
    kinds = {
        section: {x.sharding.memory_kind for x in jax.tree.leaves(on_host.params[section])}
        for section in on_host.params
    }
    assert kinds == {"outer": {"device"}, "segment_0": {"pinned_host"}}
    texts = [generate(each, ["x"], 4, Sampling(), 0, ()) for each in (on_device, on_host)]
    assert texts[0] == texts[1]
