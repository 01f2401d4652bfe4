"""Adapters of PEFT folders over loaded models, and runs from Python."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import adapters
import chex
import folders
import jax
import numpy as np
import pytest
import texts
import toy
from chats import write_tokenizer
from commands import command, some_text, train

from jaxopt_llm import convert, evaluate, generate, load_pretrained
from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface import safetensors
from jaxopt_llm.checkpoint.huggingface.model_folder import LoadedLayers, collect_leaves
from jaxopt_llm.checkpoint.peft.adapter_writer import WholeParameters, write_adapter_folder
from jaxopt_llm.config.fields import replace_fields, to_json
from jaxopt_llm.core.errors import CommandError, InputError
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer
from jaxopt_llm.data.tokens.tokenizer_files import keep_tokenizer
from jaxopt_llm.inference import models
from jaxopt_llm.inference.load import Pretrained

pytestmark = pytest.mark.core

CONFIG = replace(folders.CONFIG, vocabulary_size=512, layers=2)
TOKENS = np.arange(24).reshape(2, 12) * 7 % 512


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(folders.folder(tmp_path_factory.mktemp("base") / "base", CONFIG))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    params = adapters.add_adapters(CONFIG, "attention/query mlp/down head/table")
    return adapters.write_adapters(tmp_path_factory.mktemp("adapter") / "adapter", params, CONFIG)


@pytest.fixture(scope="module")
def merged(base: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("merged") / "merged"
    convert.merge_folders(base, adapter, path, None, 10**9)
    return path


@pytest.fixture(scope="module")
def run_of_base(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run"
    folders.make_run(base, path)
    return path


def logits(loaded: models.LoadedModel) -> jax.Array:
    model = loaded.config.model
    return Pretrained(model, loaded.params, Path(), models.Origin, loaded.model, loaded.placement).logits(TOKENS)


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(main: Callable[[], int], *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        assert main() == 0
        return capsys.readouterr().out

    return call


def test_a_model_with_adapters_computes_what_the_merged_model_computes(
    base: Path, adapter: Path, merged: Path, run_of_base: Path
) -> None:
    expected = load_pretrained(merged).logits(TOKENS)
    by_way: dict[str, Any] = {
        "folder": logits(models.load_model(base, adapter=adapter)),
        "split": logits(models.load_model(base, tensor=2, adapter=adapter)),
        "run": logits(models.load_model(run_of_base, adapter=adapter)),
        "loaded folder": logits(models.adapt_loaded(models.load_model(base), base, adapter)),
        "loaded run": logits(models.adapt_loaded(models.load_model(run_of_base), run_of_base, adapter)),
        "Python": load_pretrained(base, adapter).logits(TOKENS),
        "run from Python": load_pretrained(run_of_base, adapter).logits(TOKENS),
    }
    largest = np.abs(expected).max()
    for name, found in by_way.items():
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * largest, err_msg=name)
    assert np.abs(load_pretrained(base).logits(TOKENS) - expected).max() > 0.1 * largest


def test_generate_and_evaluate_take_adapters(
    base: Path, adapter: Path, merged: Path, run_of_base: Path, tmp_path: Path, printed: Callable[..., str]
) -> None:
    (tmp_path / "text.txt").write_text("What is 1 + 1? It is 2.")
    data = ("--data.paths", tmp_path / "text.txt", "--training.sequence-length", 8)
    prompt = ("--prompt", "What is", "--tokens", 8)
    for main, arguments in ((generate.main, prompt), (evaluate.main, data)):
        expected, model = printed(main, "--checkpoint", merged, *arguments), f"the adapters {adapter}"
        for checkpoint, name in ((base, model), (run_of_base, f"{model} over step 0")):
            found = printed(main, "--checkpoint", checkpoint, "--adapter", adapter, *arguments)
            assert found == expected.replace("step 0 on", f"{name} on")
        assert printed(main, "--checkpoint", base, *arguments) != expected


def test_adapters_bring_larger_tables_and_their_tokenizer(base: Path, run_of_base: Path, tmp_path: Path) -> None:
    """The tables are trained, and have rows for tokens that the base does not have."""
    larger, path = replace(CONFIG, vocabulary_size=600), tmp_path / "adapter"
    params = jax.device_put(adapters.add_adapters(larger, "attention/query"), toy.placement().replicated)
    whole = WholeParameters(
        LoadedLayers(collect_leaves(params)), frozenset({"non_layer/embedding/table", "non_layer/head/table"}), True
    )
    family = huggingface.choose_family(larger)
    write_adapter_folder(path, params, family, larger, adapters.LORA, whole=whole)
    assert json.loads((path / "adapter_config.json").read_text())["modules_to_save"] == ["embed_tokens", "lm_head"]
    texts.write_byte_tokenizer(path / "tokenizer.json", more=343)

    loaded = models.load_model(base, adapter=path)
    assert (loaded.config.model.vocabulary_size, loaded.tokenizer.vocabulary_size) == (600, 600)
    own = models.load_model(base, replace(loaded.config.data, tokenizer=str(base / "tokenizer.json")), adapter=path)
    assert own.tokenizer.vocabulary_size <= 512
    for table in ("embedding", "head"):
        expected = params["non_layer"][table]["table"]
        np.testing.assert_array_equal(loaded.params["non_layer"][table]["table"], expected)
    convert.merge_folders(base, path, tmp_path / "merged", None, 10**9)
    found, merged = load_pretrained(base, path), load_pretrained(tmp_path / "merged")
    assert merged.config.vocabulary_size == 600
    chex.assert_trees_all_close(found.logits(TOKENS + 80), merged.logits(TOKENS + 80), rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="it also has weights of the model itself .*convert export --checkpoint"):
        load_pretrained(run_of_base, path)
    with pytest.raises(InputError, match="weights of the model itself .*cannot be shared; merge it .*--base"):
        models.adapt_loaded(models.load_model(base), base, path)


def test_adapters_of_another_base_are_a_warning(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter").mkdir()
    for file in adapter.iterdir():
        (tmp_path / "adapter" / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "adapter" / "adapter_config.json"
    for trained_over, warned in ((f"org/{base.name}", False), ("org/other", True), (None, False)):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": trained_over}))
        models.load_model(base, adapter=tmp_path / "adapter")
        assert (
            f"warning: the adapters {config.parent} were trained over org/other" in capsys.readouterr().err
        ) == warned


@pytest.mark.slow
def test_adapters_that_do_not_fit_are_refused(
    base: Path, adapter: Path, run_of_base: Path, lora_run: Path, tmp_path: Path
) -> None:
    narrow = write_tokenizer(folders.folder(tmp_path / "narrow", replace(CONFIG, width=16)))
    for checkpoint, given, said in (
        (narrow, adapter, "shape .* check that the adapter belongs to the model"),
        (base, run_of_base, "--adapter .*: this is a run directory; export its adapters first"),
        (base, tmp_path / "none", "none: no such folder"),
        (lora_run, adapter, "has adapters already; leave out --adapter, or merge them first"),
        (adapter, None, "this is a PEFT folder of adapters; name it with --adapter, and its base model with"),
    ):
        with pytest.raises(InputError, match=said):
            models.load_model(checkpoint, adapter=given)


def test_base_weights_next_to_adapters_need_a_folder_to_compare_with(
    base: Path, adapter: Path, run_of_base: Path, tmp_path: Path
) -> None:
    table = safetensors.open_folder(base)["model.embed_tokens.weight"].array
    (tmp_path / "adapter").mkdir()
    for file in adapter.iterdir():
        (tmp_path / "adapter" / file.name).write_bytes(file.read_bytes())
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    adapters.rewrite_adapters(tmp_path / "adapter", lambda arrays: arrays.update({name: table}))
    models.load_model(base, adapter=tmp_path / "adapter")
    with pytest.raises(InputError, match="which no Hugging Face folder is given to compare with"):
        models.load_model(run_of_base, adapter=tmp_path / "adapter")


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run that trains adapters over codes of a random base, which its checkpoint holds."""
    path = tmp_path_factory.mktemp("lora") / "run"
    lora = ("--lora.rank", 2, "--lora.base", "int8", "--lora.dora", True, "--optimizer.learning-rate", 0.01)
    done = train(path, *lora, "--training.steps", 2, "--precision.compute-dtype", "float32")
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def qlora_run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run that trains adapters over NF4 codes of a folder, which its checkpoint does not hold."""
    path = tmp_path_factory.mktemp("qlora") / "run"
    lora = ("--lora.rank", 2, "--lora.base", "nf4", "--lora.double-quantisation", True)
    lora += ("--optimizer.learning-rate", 0.01, "--precision.compute-dtype", "float32")
    sizes = ("--training.steps", 2, "--training.accumulation", 1, "--training.batch-size", 4)
    sizes += ("--training.sequence-length", 32)
    options = (*lora, *sizes, *some_text(path.parent / "a.jsonl"), "--evaluation.batches", 1, "--run.directory", path)
    done = command("train", "--config", "finetune.py", "--data.content", "text", "--model.pretrained", base, *options)
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.parametrize("name", ["lora_run", pytest.param("qlora_run", marks=pytest.mark.slow)])
def test_a_run_is_loaded_from_python_as_generate_loads_it(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    lora_run = request.getfixturevalue(name)
    model, loaded = load_pretrained(lora_run), models.load_model(lora_run)
    chex.assert_trees_all_equal(toy.by_layer(model.params), loaded.params)
    ids = TOKENS % 256
    assert model.logits(ids).dtype == np.float32
    # Both write the same folder: from memory, and from the files one layer at a time.
    model.save_pretrained(tmp_path / "saved")
    convert.merge_run(lora_run, tmp_path / "merged", "float32", 10**9)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "merged" / name).read_bytes()
    expected = load_pretrained(tmp_path / "merged").logits(ids)
    np.testing.assert_allclose(model.logits(ids), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_moved_base_is_named_before_its_tokenizer_and_found_with_base(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, old = tmp_path / "run", str(tmp_path / "old")
    (directory / "checkpoints").mkdir(parents=True)
    settings = {"model.pretrained": old, "data.tokenizer": old, "lora.rank": 2}
    config = replace_fields(models.open_config(base), settings)
    (directory / "config.json").write_text(to_json(config))
    tokenizer = load_tokenizer(models.open_config(base).data)
    keep_tokenizer(models.open_config(base).data, tokenizer, directory)  # as every run does
    (directory / "corpus.json").write_text(json.dumps({"base_sha256": "", "tokenizer_sha256": tokenizer.sha256}))

    def refuse(main: Callable[[], int], *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments), "--checkpoint", str(directory)])
        with pytest.raises(CommandError) as error:
            main()
        assert capsys.readouterr().err.count("warning") == 0
        return str(error.value)

    generates = (generate.main, "--prompt", "x")
    merges = (convert.main, "merge", "--to", tmp_path / "new")
    commands = (generates, (evaluate.main, "--data.paths", __file__), merges)
    for given in commands:
        problem = f"model.pretrained={old}: the folder does not exist, but the checkpoints of {directory} do not hold "
        assert refuse(*given).startswith(problem)
        assert "name its new location with --base" in refuse(*given, "--base", tmp_path / "nowhere")
        moved = refuse(*given, "--base", base)  # goes on to the weights, which this run does not have
        assert "the run has no checkpoint yet" in moved or f"{base}: its weights differ" in moved
    found = models.open_config(directory, base)
    assert found.model.pretrained == str(base)
    assert found.data.tokenizer == str(directory / "tokenizer")  # the run's own copy, wherever the base is
    (directory / "corpus.json").write_text(json.dumps({"base_sha256": None, "tokenizer_sha256": tokenizer.sha256}))
    assert "hold all weights of the model; leave it out" in refuse(*generates, "--base", base)
    with pytest.raises(InputError, match=f"--base {directory}: {base} is a model folder"):
        models.open_config(base, directory)
    with pytest.raises(InputError, match="leave it out"):
        load_pretrained(base, base=directory)
    with pytest.raises(InputError, match="hold all weights of the model"):
        load_pretrained(directory, base=base)
