"""Answers that a job of two processes draws: answers, rewards, losses and errors are those of one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import folders
import numpy as np
import pytest
from commands import metrics, start
from drawing import make_config, records
from gates import finish
from ports import free_address
from servers import running

from jaxopt_llm.config import DataConfig, ModelConfig, fields
from jaxopt_llm.inference import models


def write_config(
    folder: Path,
    name: str,
    server: str = "",
    **settings: Any,
) -> Path:
    """Write the configuration of a tiny run with adapters, over a base that is a folder."""
    config = make_config(folder, **{"mesh.fsdp": 2, "lora.rank": 4} | settings)
    base, data = ModelConfig(pretrained=str(folder / "base")), replace(config.data, tokenizer=DataConfig().tokenizer)
    config = replace(config, model=base, data=data, run=replace(config.run, directory=str(folder / name)))
    config = replace(config, rollouts=replace(config.rollouts, server=server))
    path = folder / f"{name}.json"
    path.write_text(fields.to_json(config))
    return path


def train_job(count: int, config: Path, code: int = 0) -> list[tuple[str, str]]:
    address, port = free_address().split(":")
    job = {"MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    started = [start("train", "--config", config, RANK=str(index), **job) for index in range(count)]
    return [finish(process, code) for process in started]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grpo")
    folders.folder_with_tokenizer(path / "base", replace(folders.CONFIG, vocabulary_size=258, layers=2))
    return path


@pytest.mark.parametrize("objective", ["grpo", "distill"])
def test_two_processes_draw_and_learn_as_one(folder: Path, objective: str) -> None:
    settings = {"training.steps": 4, "rollouts.updates": 2, "evaluation.every": 2, "data.held_out": 0.3}
    settings |= {"training.objective": objective}
    if objective == "distill":
        folders.folder_with_tokenizer(folder / "teacher", replace(folders.CONFIG, vocabulary_size=258, layers=3))
        settings |= {"distillation.teacher": str(folder / "teacher")}
    names = [f"{objective}-{count}" for count in (1, 2)]
    for count, name in enumerate(names):
        train_job(count + 1, write_config(folder, name, **settings))
    one, two = ([answer for each in records(folder / name) for answer in each["answers"]] for name in names)
    assert [each["tokens"] for each in one] == [each["tokens"] for each in two]
    assert [each["rewards"] for each in one] == [each["rewards"] for each in two]
    for name in ("loss", "grad_norm", "rewards/mean", "eval_rewards/mean", "eval_loss"):
        values = [[each.get(name, 0) for each in metrics(folder / run)] for run in names]
        np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-6)


def test_a_server_answers_all_processes_and_errors_end_them_after_a_checkpoint(folder: Path) -> None:
    """Process 0 asks the server and the functions. All compare the log-probabilities, and end together."""
    server = pytest.importorskip("jaxopt_llm.inference.server")
    base = models.load_model(folder / "base")
    adapters = server.Folders(
        folder, lambda source, path: models.adapt_loaded(source, folder / "base", path), models.reload_loaded
    )
    settings = {"rollouts.rewards": (f"{folder / 'mine.py'}:fails_in_step_4",), "checkpoint.every": 100}
    with running({"base": base}, folders=adapters) as (address, served):
        config = write_config(folder, "served", f"{address}/v1", **settings)
        ended = train_job(2, config, 2)
        assert [*served._worker.models] == ["base"]
    assert all("ZeroDivisionError" in stderr for _, stderr in ended)
    directory = folder / "served"
    assert [path.name for path in (directory / "checkpoints").iterdir() if path.name.isdigit()] == ["3"]
    found = metrics(directory)
    assert len({each["weights"] for each in records(directory)}) == len(found) == 3
    assert all(each["sampler_kl"] < 1e-9 and each["probe_difference"] < 1e-4 for each in found)
