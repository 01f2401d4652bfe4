"""Jobs of two processes: a flipped bit ends all of them, and a spike brings all of them back to the same checkpoint."""

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from commands import metrics, some_text, start_python, tiny
from gates import finish
from ports import free_address

# The command `train` with a fault. Its first argument: what happens, "flip" or "spike". A bit of the first master
# weight is flipped in the last process after its step 3. Step 5 counts as a spike, once.
FAULTY = """
import os, sys
import jax, numpy as np
from jaxopt_llm.core import errors
from jaxopt_llm import train
from jaxopt_llm.run import divergence, records
from jaxopt_llm.run import workload

fault = sys.argv.pop(1)
run, check, calls, spikes = workload.DecoderWorkload.step, records.check_skips, [], []

def flip(leaf):
    parts = [np.array(shard.data) for shard in leaf.addressable_shards]
    parts[0].reshape(-1).view(np.uint32)[0] ^= 1
    arrays = [jax.device_put(part, shard.device) for part, shard in zip(parts, leaf.addressable_shards)]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)

def step(self, state, batch):
    state, metrics = run(self, state, batch)
    calls.append(0)
    if fault == "flip" and len(calls) == 3 and os.environ.get("RANK") == "1":
        leaves, structure = jax.tree.flatten(state.masters)
        state = state.replace(masters=jax.tree.unflatten(structure, [flip(leaves[0]), *leaves[1:]]))
    return state, metrics

def check_skips(step, metrics, config):
    if fault == "spike" and step == 5 and not spikes:
        spikes.append(step)
        return "planted"
    return check(step, metrics, config)

workload.DecoderWorkload.step = step
records.check_skips = check_skips
divergence.is_spike = lambda metrics: True
errors.run_command(train.main)
"""
FOUND = r"step 4: device 0 of process 0, device \d+ of process 1: copies of the same values differ, in masters/"
RUN = ("--training.steps", 8, "--checkpoint.every", 2, "--logging.tensorboard", False, "--evaluation.every", 8)


def start_job(count: int, fault: str, directory: Path, *overrides: object) -> list[subprocess.Popen[str]]:
    address, port = free_address().split(":")
    job = {"MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    return [
        start_python("-c", FAULTY, fault, *tiny(directory), *RUN, *overrides, RANK=str(index), **job)
        for index in range(count)
    ]


def read_events(directory: Path) -> list[tuple[int, str, str]]:
    events = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [(event["step"], event["event"], event.get("detail", "")) for event in events]


@pytest.mark.slow
def test_a_bit_flipped_in_one_process_ends_both(tmp_path: Path) -> None:
    """The same command without the fault continues from the checkpoint before it."""
    run = tmp_path / "run"
    settings = ("--mesh.data", 2, "--mesh.fsdp", 2, "--run.check-replicas", 100, *some_text(tmp_path / "text.jsonl"))
    outputs = [finish(process, 9) for process in start_job(2, "flip", run, *settings)]
    assert re.search(FOUND, outputs[0][1])
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["2"]
    assert (4, "corruption") in [event[:2] for event in read_events(run)]
    for process in start_job(2, "none", run, *settings):
        finish(process)
    assert (2, "resume", "") in read_events(run)


@pytest.mark.slow
def test_a_spike_brings_both_processes_back(tmp_path: Path) -> None:
    """They train on the same batches as one process does."""
    settings = ("--mesh.fsdp", 2, "--training.on-spike", "rollback", *some_text(tmp_path / "text.jsonl"))
    for count in (1, 2):
        for process in start_job(count, "spike", tmp_path / str(count), *settings):
            finish(process)
        detail = "a spike: back to step 4, without batches 4 to 4"
        assert (5, "rollback", detail) in read_events(tmp_path / str(count))
    losses = [[record["loss"] for record in metrics(tmp_path / name)] for name in ("1", "2")]
    assert len(losses[0]) == 8
    np.testing.assert_allclose(*losses, rtol=1e-6)
