"""Quantised products through the commands."""

import json
from pathlib import Path

import pytest
from commands import command, metrics, train
from test_evaluate import evaluated

SIZES = ("--model.head-dim", 32, "--model.width", 32, "--model.mlp-width", 32, "--precision.compute-dtype", "float32")


@pytest.mark.slow
@pytest.mark.parametrize("matmul", ["fp8", "int4_qat"])
def test_commands_use_weights_as_training_measured_them(tmp_path: Path, matmul: str) -> None:
    documents = (json.dumps({"text": f"document {number} " * 5}) for number in range(60))
    (tmp_path / "documents.jsonl").write_text("\n".join(documents))
    whole_split = ("--data.held-out", 0.2, "--evaluation.batches", 1000, "--training.batch-size", 1)
    settings = ("--data.paths", tmp_path / "documents.jsonl", *whole_split, *SIZES)
    run = tmp_path / "run"
    done = train(run, "--training.steps", 3, *settings, "--precision.matmul", matmul)
    assert (done.returncode, done.stderr) == (0, "")
    assert evaluated(run)[0] == pytest.approx(metrics(run)[-1]["eval_loss"], abs=1e-4)
    written = command("generate", "--checkpoint", run, "--prompt", "def ", "--tokens", 3)
    assert written.returncode == 0 and written.stdout.startswith("def "), written.stderr
    refused = train(run, "--training.steps", 4, *settings)
    assert refused.returncode == 2 and f"precision.matmul was {matmul} and is compute_dtype" in refused.stderr
