"""The loss of a checkpoint, on what the run held out and on anything else."""

import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import folders
import jax
import pytest
from commands import assert_one_line, command, train

from jaxopt_llm import evaluate
from jaxopt_llm.core.errors import OutOfMemory
from jaxopt_llm.inference import models
from jaxopt_llm.kernels import attention_xla
from jaxopt_llm.kernels.attention import IMPLEMENTATIONS
from jaxopt_llm.kernels.attention_auto import AttentionCall, AttentionChoice

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("evaluate") / "run"
    documents = (json.dumps({"text": f"document {number} " * 5}) for number in range(60))
    (directory.parent / "documents.jsonl").write_text("\n".join(documents))
    data = ("--data.paths", directory.parent / "documents.jsonl", "--data.held-out", 0.2)
    # All of the held-out split: more batches than it has.
    whole = ("--evaluation.batches", 1000, "--training.batch-size", 1)
    done = train(directory, "--training.steps", 2, *data, *whole, "--model.layers", 3, "--checkpoint.every", 1)
    assert done.returncode == 0, done.stderr
    return directory


def evaluated(run: Path, *arguments: object) -> tuple[float, float, int]:
    """Loss, perplexity, tokens."""
    told = command("evaluate", "--checkpoint", run, *arguments)
    assert told.returncode == 0, told.stderr
    found = re.search(
        r"([\d.]+) nats per token, perplexity ([\d.]+), over the ([\d,]+) tokens that the loss counts", told.stdout
    )
    assert found
    return float(found[1]), float(found[2]), int(found[3].replace(",", ""))


def test_the_held_out_split_has_the_loss_that_the_run_measured(run: Path) -> None:
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    loss, perplexity, tokens = evaluated(run)
    assert loss == pytest.approx(last["eval_loss"], abs=1e-4)
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-3)
    # Whatever the batch, and with rows of nothing at its end.
    assert evaluated(run, "--training.batch-size", 7) == (loss, perplexity, tokens)


def test_the_checkpoint_of_a_step_is_evaluated(run: Path) -> None:
    at_step = command("evaluate", "--checkpoint", run, "--step", 1, "--batches", 1)
    assert at_step.returncode == 0 and at_step.stdout.startswith("step 1 on the held-out split"), at_step.stderr
    best = command("evaluate", "--checkpoint", run, "--step", "best", "--batches", 1)
    assert best.returncode == 0 and best.stdout.startswith("step 2 on the held-out split"), best.stderr
    for module, more in (("evaluate", ()), ("generate", ("--prompt", "x"))):
        refused = command(module, "--checkpoint", run, "--step", 5, *more)
        assert refused.returncode == 2
        assert_one_line(refused.stderr, "--step 5: ", "has no checkpoint of this step; choose one of 1, 2, or best")


def test_batch_and_layers_need_not_divide_as_the_run_had_to(run: Path, tmp_path: Path) -> None:
    divided = shutil.copytree(run, tmp_path / "run")
    config = json.loads((divided / "config.json").read_text())
    config["mesh"]["pipeline"] = config["remat"]["every"] = 2  # the second of two stages has a layer less
    config["training"] |= {"batch_size": 4, "accumulation": 2}
    (divided / "config.json").write_text(json.dumps(config))
    assert evaluated(divided, "--training.batch-size", 3) == evaluated(run)


def test_attention_is_chosen_for_the_device(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Any, ...]] = []
    passed: list[str] = []

    class Kernel:
        reads_out = False

        def forward(self, *of: Any) -> Any:
            passed.append("kernel")
            return attention_xla.forward(*of)

    def choose(*of: Any) -> AttentionChoice:
        asked.append(of)
        return AttentionChoice("pallas", "for a reason")

    monkeypatch.setattr(models, "choose_attention", choose)
    monkeypatch.setitem(IMPLEMENTATIONS, "pallas", Kernel())
    monkeypatch.setattr(sys, "argv", ["evaluate", "--checkpoint", str(run), "--batches", "1"])
    assert evaluate.main() == 0
    config = json.loads((run / "config.json").read_text())
    model, length = config["model"], config["training"]["sequence_length"]
    call = AttentionCall(model["head_dim"], config["precision"]["compute_dtype"], length)
    assert asked == [(jax.devices()[0], "auto", call)] and passed
    assert capsys.readouterr().err == "attention: pallas, for a reason\n"


def test_any_source_is_read_whole(run: Path) -> None:
    text = run.parent / "other.txt"
    text.write_text("x" * 1000)
    *_, tokens = evaluated(run, "--data.paths", text)
    assert tokens == 1000 + 1  # and the end of the document; the beginning is nobody's target
    *_, tokens = evaluated(run, "--data.paths", text, "--batches", 2)
    assert tokens == 2 * 32
    told = command("evaluate", "--checkpoint", run, "--data.paths", text, "--batches", 2).stdout
    assert told.endswith(", over the 64 tokens that the loss counts, with --batches 2\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model.width", 8), "--model.width: the checkpoint determines it; leave it out"),
        (("--batches", 0), "--batches 0: must be at least 1"),
        (("--data.paths", "nowhere.txt"), "nowhere.txt"),
        (("--data.path", "x"), "did you mean --data.paths"),
        (("--adaptor", "x"), "did you mean --adapter?"),
    ],
)
def test_bad_input(run: Path, arguments: tuple[object, ...], said: str) -> None:
    refused = command("evaluate", "--checkpoint", run, *arguments)
    assert refused.returncode == 2
    assert_one_line(refused.stderr, said)


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("inference.models.load_model", "loading the checkpoint: .*: use a GPU"),
        ("evaluate.evaluate", "evaluating: .*batch-size"),
    ],
)
def test_out_of_memory_it_says_what_to_change(
    fails: str, said: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1024 bytes.")

    monkeypatch.setattr(sys, "argv", ["evaluate", "--checkpoint", str(run)])
    monkeypatch.setattr(f"jaxopt_llm.{fails}", exhausted)
    with pytest.raises(OutOfMemory, match=f"out of memory {said}"):
        evaluate.main()


def test_a_model_folder_needs_data(tmp_path: Path) -> None:
    """Otherwise the loss on Python's standard library would look like that on the user's own documents."""
    done = command("evaluate", "--checkpoint", folders.folder_with_tokenizer(tmp_path / "model"))
    assert done.returncode == 2
    assert_one_line(
        done.stderr, "model: a model folder has no held-out documents; name the documents with --data.paths"
    )
