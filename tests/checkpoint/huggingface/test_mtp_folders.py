"""Modules of multi-token prediction in Hugging Face folders: read on request, trained and written."""

import json
from dataclasses import replace
from pathlib import Path

import folders
import jax
import numpy as np
import pytest
import toy
from commands import command, metrics, some_text
from test_expert_tensors import DEEPSEEK3
from test_model_folder import rewrite

from jaxopt_llm.checkpoint.huggingface import model_folder, safetensors
from jaxopt_llm.checkpoint.huggingface.model_folder import ModelFolder, Origin, open_model_folder, write_model_folder
from jaxopt_llm.config import ModelConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.parallel.zero import parameter_sharding

GLM = replace_fields(
    folders.CONFIG,
    {"pattern": ("global",), "biases": "qkv", "moe.experts": 4, "moe.expert_width": 6, "moe.dense_layers": 1}
    | {"moe.router": "sigmoid", "moe.router_bias": True, "moe.shared_expert_width": 6, "rope.size": 2, "mtp_layers": 1},
)
MODELS = {"deepseek_v3": replace(DEEPSEEK3, mtp_layers=2), "glm4_moe": GLM}
LAYER = "model.layers.5."


def read(folder: ModelFolder, config: ModelConfig) -> object:
    placement = toy.placement()
    return tree.map_with_path(
        lambda path, spec: np.asarray(folder.read(path, spec, parameter_sharding(spec, placement))),
        param_specs(config),
    )


def contents(path: Path) -> dict[str, tuple[str, bytes]]:
    return {name: (str(each.dtype), each.read().tobytes()) for name, each in safetensors.open_folder(path).items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_is_read_and_written_to_the_bit(name: str, tmp_path: Path) -> None:
    config, first, second = MODELS[name], tmp_path / "first", tmp_path / "second"
    folder = open_model_folder(folders.folder(first, config), mtp_layers=config.mtp_layers)
    assert folder.family.model_type == name
    found = read(folder, config)
    jax.tree.map(np.testing.assert_array_equal, found, folders.params(config))
    write_model_folder(second, jax.device_put(found, toy.placement().replicated), config, Origin(first))
    assert contents(first) == contents(second)
    settings = [json.loads((path / "config.json").read_text()) for path in (first, second)]
    assert settings[0]["num_nextn_predict_layers"] == settings[1]["num_nextn_predict_layers"] == config.mtp_layers


def test_a_module_has_the_published_names(tmp_path: Path) -> None:
    """Those of deepseek-ai/DeepSeek-V3, which vLLM and SGLang read; its tables are those of the model."""
    stored = safetensors.open_folder(folders.folder(tmp_path / "folder", replace(DEEPSEEK3, mtp_layers=1)))
    of_layers = {name.removeprefix("model.layers.4.") for name in stored if name.startswith("model.layers.4.")}
    of_module = {name.removeprefix(LAYER) for name in stored if name.startswith(LAYER)}
    assert of_module - of_layers == {
        *("embed_tokens.weight", "enorm.weight", "hnorm.weight", "eh_proj.weight"),
        *("shared_head.norm.weight", "shared_head.head.weight"),
    }
    assert not of_layers - of_module
    for copy, name in (
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("shared_head.head.weight", "lm_head.weight"),
    ):
        np.testing.assert_array_equal(stored[LAYER + copy].read(), stored[name].read())
    assert stored[f"{LAYER}eh_proj.weight"].array.shape == (32, 64)  # [out, embedding and hidden state]


def test_modules_are_read_on_request(tmp_path: Path) -> None:
    """The first of two; the other one is kept."""
    path, second, config = tmp_path / "folder", tmp_path / "second", replace(DEEPSEEK3, mtp_layers=2)
    folders.folder(path, config)
    assert not any(".layers.5." in name for name in open_model_folder(path).stored)
    one = replace(config, mtp_layers=1)
    found = read(open_model_folder(path, mtp_layers=1), one)
    expected = folders.params(config)
    jax.tree.map(np.testing.assert_array_equal, found, {name: expected[name] for name in found})
    changed = jax.tree.map(lambda leaf: leaf + 1, found)
    write_model_folder(second, jax.device_put(changed, toy.placement().replicated), one, Origin(path))
    before, after = contents(path), contents(second)
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] == after[name]} == {n for n in before if ".layers.6." in n}


def test_what_a_folder_lacks_is_refused(tmp_path: Path) -> None:
    path = folders.folder(tmp_path / "folder", replace(DEEPSEEK3, mtp_layers=1))
    with pytest.raises(InputError, match=r"^model.mtp_layers=2: the modules .* are 1: set --model.mtp-layers 1$"):
        open_model_folder(path, mtp_layers=2)
    llama = folders.folder(tmp_path / "llama", replace(folders.CONFIG, biases="none", pattern=("global",)))
    with pytest.raises(InputError, match="^model.mtp_layers=1: those of llama are not read"):
        open_model_folder(llama, mtp_layers=1)
    with pytest.raises(InputError, match=r"does not support model.mtp_layers=1$"):
        model_folder.choose_family(replace(folders.CONFIG, mtp_layers=1))


def test_a_copy_that_differs_is_named(tmp_path: Path) -> None:
    path = folders.folder(tmp_path / "folder", replace(DEEPSEEK3, mtp_layers=1))
    assert [*open_model_folder(path, mtp_layers=1).describe_mtp()] == []
    head = f"{LAYER}shared_head.head.weight"
    rewrite(path, lambda arrays: arrays[head].__setitem__(3, 0))
    (line,) = open_model_folder(path, mtp_layers=1).describe_mtp()
    assert line == f"{path}: {head} differs from lm_head.weight, which its module shares: the copy is not read"
    (line,) = open_model_folder(path).describe_mtp()
    assert line == f"{path}: modules of multi-token prediction that are not trained (model.mtp_layers): 1"


@pytest.mark.slow
def test_a_module_is_trained_and_exported(tmp_path: Path) -> None:
    """As a part of the model; with adapters it is frozen, and written as it was."""
    base = folders.folder_with_tokenizer(tmp_path / "base", replace(DEEPSEEK3, layers=2, mtp_layers=1))
    of_module = "model.layers.2."
    flags = ("--config", "pretrain.py", "--model.pretrained", base, "--model.mtp-layers", 1)
    flags += some_text(tmp_path / "a.jsonl")
    flags += ("--training.steps", 2, "--training.batch-size", 4, "--training.sequence-length", 32)
    flags += ("--training.accumulation", 2, "--evaluation.every", 2, "--logging.every", 1, "--mesh.fsdp", 1)
    flags += ("--precision.compute-dtype", "float32", "--evaluation.batches", 1)
    before = contents(base)
    for name, adapters, writes in (("full", (), "export"), ("lora", ("--lora.rank", 2), "merge")):
        run, written = tmp_path / name, tmp_path / f"{name}-written"
        done = command("train", "--run.directory", run, *flags, *adapters)
        assert done.returncode == 0, done.stderr
        assert "mtp_loss " in done.stdout
        assert all(record["mtp_loss"] > 0 for record in metrics(run))
        done = command("convert", writes, "--checkpoint", run, "--to", written)
        assert done.returncode == 0 and "checked by reading it back" in done.stdout, done.stderr
        after = contents(written)
        assert before.keys() == after.keys()
        module = {each for each in before if each.startswith(of_module)}
        assert {each for each in module if before[each] == after[each]} == (module if adapters else set())
    done = command("generate", "--checkpoint", tmp_path / "full", "--prompt", "a", "--tokens", 3)
    assert done.returncode == 0, done.stderr
