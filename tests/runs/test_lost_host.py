"""A job of two processes that loses one of them with its memory: it continues from the copies in the other one's."""

import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import checkpoint, metrics, some_text, start_training
from gates import after_step, finish, start_gated, wait_until
from ports import free_address

from jaxopt_llm.checkpoint.native.identity import read_identity


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [("--mesh.fsdp", 4), ("--mesh.data", 2, "--mesh.fsdp", 2)])
def test_a_job_continues_without_the_memory_of_one_process(mesh: tuple[object, ...], tmp_path: Path) -> None:
    """The checkpoints on the storage are of steps 4 and 8, the copies of every second step. It dies after step 7."""
    memory = tmp_path / "memory"
    settings = (*mesh, "--training.steps", 10, "--checkpoint.every", 4, "--checkpoint.replicate-every", 2)
    settings += ("--checkpoint.replicate-directory", memory, "--logging.tensorboard", False)
    settings += some_text(tmp_path / "text.jsonl")

    def job() -> list[dict[str, str]]:
        address, port = free_address().split(":")
        shared = {"MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": "2"}
        return [{**shared, "RANK": str(index)} for index in range(2)]

    def train(directory: Path) -> str:
        processes = [start_training(directory, *settings, **each) for each in job()]
        (output, _), _ = map(finish, processes)
        return output

    whole, run = tmp_path / "whole", tmp_path / "run"
    train(whole)
    first, second = job()
    gate = after_step(tmp_path / "gate", 7)
    processes = [
        start_training(run, *settings, **first),
        start_gated(run, [gate], *settings, **second),
    ]
    wait_until(gate.reached, processes[1])
    processes[1].kill()
    finish(processes[0], 5)
    copies = memory / f"jaxopt_llm-{os.getuid()}" / read_identity(run).run
    shutil.rmtree(copies / "process-1")
    shutil.rmtree(run / "checkpoints" / "8", ignore_errors=True)
    assert "step 6 is in the memory of the hosts" in train(run)
    losses = [[(each["loss"], each["grad_norm"]) for each in metrics(name)] for name in (whole, run)]
    assert losses[0] == losses[1] and len(losses[0]) == 10
    jax.tree.map(np.testing.assert_array_equal, checkpoint(run, 10), checkpoint(whole, 10))
    assert not [*(copies / "process-0").iterdir()]
