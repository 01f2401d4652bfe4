"""Model folders whose blocks are held as codes: `--quantise` and `--outlier-threshold`."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import folders
import jax
import jax.numpy as jnp
import pytest
from chats import write_tokenizer

from jaxopt_llm import evaluate, generate
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.inference import models
from jaxopt_llm.inference.flags import Quantisation

CONFIG = replace(folders.CONFIG, vocabulary_size=512, layers=2, width=64, mlp_width=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantised") / "model"
    (path.parent / "text.txt").write_text("What is 1 + 1? It is 2. " * 20)
    return write_tokenizer(folders.folder(path, CONFIG))


def call(command: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [command.__name__, *map(str, arguments)])
    assert command.main() == 0


@pytest.mark.parametrize(
    ("given", "difference"),
    [
        (("--quantise", "int8"), 2e-3),
        (("--quantise", "int8", "--outlier-threshold", 6), 2e-3),
        (("--quantise", "nf4"), 5e-2),
    ],
)
def test_losses_are_nearly_those_of_the_weights(
    given: tuple[object, ...],
    difference: float,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    losses = []
    for flags in ((), given):
        text = folder.parent / "text.txt"
        call(evaluate, monkeypatch, "--checkpoint", folder, "--data.paths", text, "--training.batch-size", 1, *flags)
        losses.append(float(capsys.readouterr().out.split(": ")[-1].split()[0]))
    assert losses[1] != losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=difference)
    call(generate, monkeypatch, "--checkpoint", folder, "--prompt", "What is", "--tokens", 4, *given)
    assert capsys.readouterr().out.startswith("What is")


@pytest.mark.parametrize(("base", "dtype"), [("int8", "int8"), ("nf4", "uint8")])
def test_the_matrices_of_the_blocks_rest_as_codes(base: str, dtype: str, folder: Path) -> None:
    source = models.load_model(folder, quantisation=Quantisation(base))  # type: ignore[arg-type]
    found = {path: leaf.dtype for path, leaf in tree.leaves_with_path(source.params)}
    codes = {path for path in found if path.endswith("/codes")}
    matrices = {"query", "key", "value", "output", "gate", "up", "down"}
    assert {path.split("/")[-2] for path in codes} == matrices
    assert {found[path] for path in codes} == {jnp.dtype(dtype)}
    assert {found[path] for path in found.keys() - codes} == {jnp.dtype("float32")}
    split = models.load_model(folder, tensor=2, quantisation=Quantisation(base))  # type: ignore[arg-type]
    equal = jax.tree.map(lambda a, b: bool((jax.device_get(a) == jax.device_get(b)).all()), source.params, split.params)
    assert all(jax.tree.leaves(equal))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (("--outlier-threshold", 6), "--outlier-threshold 6.0 has no effect without --quantise int8: add it"),
        (("--quantise", "nf4", "--outlier-threshold", 6), "--outlier-threshold 6.0 has no effect without"),
        (
            ("--quantise", "int8", "--outlier-threshold", -1),
            "-1.0: must be a finite number of at least 0",
        ),
        (("--quantise", "int8", "--adapter", "a"), "--quantise int8 does not support --adapter a: leave one of them"),
    ],
)
def test_what_does_not_go_together_is_refused(
    given: tuple[object, ...], problem: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=problem):
        call(generate, monkeypatch, "--checkpoint", folder, "--prompt", "a", *given)


def test_outliers_are_split_off(folder: Path) -> None:
    precisions = [
        models.load_model(folder, quantisation=Quantisation("int8", x)).placement.precision for x in (0.0, 6.0)
    ]
    assert [(each.matmul, each.outlier_threshold) for each in precisions] == [("compute_dtype", 0), ("int8", 6)]


def test_a_run_and_experts_are_refused(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = models.open_config(folder)
    monkeypatch.setattr(models, "_open_config_and_folder", lambda *_: (config, None))
    with pytest.raises(InputError, match="^--quantise int8: .* is a run, whose lora.base is the format of its weights"):
        call(generate, monkeypatch, "--checkpoint", folder, "--prompt", "a", "--quantise", "int8")
    monkeypatch.undo()
    experts = replace_fields(
        CONFIG, {"moe.experts": 4, "moe.expert_width": 32, "pattern": ("global",), "biases": "none"}
    )
    path = write_tokenizer(folders.folder(tmp_path / "experts", experts))
    with pytest.raises(InputError, match="^--outlier-threshold 6.0 does not support experts: leave it out"):
        models.load_model(path, quantisation=Quantisation("int8", 6.0))


def test_sizes_that_have_no_blocks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tokenizer(folders.folder(tmp_path / "model", replace(CONFIG, width=40)))
    with pytest.raises(
        InputError, match="^--quantise nf4: model.width=40 is not a multiple of .*: set --quantise int8$"
    ):
        call(generate, monkeypatch, "--checkpoint", path, "--prompt", "a", "--quantise", "nf4")
