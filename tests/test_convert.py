"""Folders into run directories and back, and training that begins from one: the commands."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import texts
import toy
from commands import ROOT, checkpoint, command, metrics, some_text, train
from test_evaluate import evaluated

from jaxopt_llm import convert, load_pretrained
from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.checkpoint.huggingface import safetensors
from jaxopt_llm.checkpoint.huggingface.model_folder import write_model_folder
from jaxopt_llm.checkpoint.huggingface.safetensors import TensorSpec
from jaxopt_llm.config import Config, cli
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.model import flops, param
from jaxopt_llm.model.decoder_specs import param_specs

CONFIG = replace(folders.CONFIG, layers=2, pattern=("global",))
RECIPE = """
from jaxopt_llm.config import Config, ModelConfig, ScheduleConfig, TrainingConfig

def get_config():
    return Config(
        model=ModelConfig(pretrained={path!r}),
        training=TrainingConfig(steps=2, batch_size=4, sequence_length=32),
        schedule=ScheduleConfig(warmup_steps=0),
    )
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.folder_with_tokenizer(tmp_path_factory.mktemp("model") / "folder", CONFIG)


def tensors(path: Path) -> dict[str, np.ndarray]:
    return {name: stored.array for name, stored in safetensors.open_folder(path).items()}


def done(module: str, *arguments: object) -> str:
    found = command(module, *arguments)
    assert (found.returncode, found.stderr) == (0, ""), found.stderr
    return found.stdout


def refused(module: str, *arguments: object) -> str:
    found = command(module, *arguments)
    assert (found.returncode, found.stdout) == (2, ""), found.stderr
    (line,) = found.stderr.splitlines()
    return line


@pytest.mark.core
def test_there_and_back(folder: Path, tmp_path: Path) -> None:
    """With the folder's own tokenizer, which comes along."""
    source, run, back = (tmp_path / name for name in ("source", "run", "back"))
    shutil.copytree(folder, source)
    folders.make_run(source, run)
    assert done("generate", "--checkpoint", run, "--prompt", "def", "--tokens", 4).startswith("def")
    assert "choose one of 0, or best" in refused("convert", "export", "--checkpoint", run, "--to", back, "--step", 3)
    said = done("convert", "export", "--checkpoint", run, "--to", back, "--shard-bytes", 20_000, "--step", 0)
    assert said.splitlines()[0] == f"step 0 of {run} is in {back}, in float32"
    assert len(list(back.glob("*.safetensors"))) > 1
    assert (back / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    one, two = tensors(folder), tensors(back)
    assert one.keys() == two.keys()
    assert all(one[name].tobytes() == two[name].tobytes() for name in one)

    model = replace(cli.load_run_config(run, "").model, pretrained=str(run))
    assert pretrained.find_source_folder(Config(model=model)) == source  # of a run that begins from this one

    for conversion in ("export", "merge"):
        said = refused("convert", conversion, "--checkpoint", folder, "--to", run / "new")
        assert f"--checkpoint {folder}: this is a Hugging Face model folder, not a training run; " in said
        adapters = folder.parent / f"adapters of {conversion}"
        adapters.mkdir()
        for beside in ("adapter_config.json", "config.json"):  # of a model: transformers reads the adapters
            (adapters / beside).write_bytes((folder / "config.json").read_bytes())
            said = refused("convert", conversion, "--checkpoint", adapters, "--to", run / "new")
            assert "this is a PEFT folder of adapters, not a training run; merge takes it with --base" in said
    assert "already exists" in refused("convert", "export", "--checkpoint", run, "--to", back)
    folders_have_no_step = ("--base", folder, "--adapter", back, "--to", run / "new", "--step", 2)
    assert "--step 2: --base is a model folder" in refused("convert", "merge", *folders_have_no_step)
    assert "it has no adapters" in refused("convert", "merge", "--checkpoint", run, "--to", run / "new")
    assert {path.name for path in run.iterdir()} == {"checkpoints", "config.json", "corpus.json", "tokenizer"}


def test_training_begins_from_a_folder_and_ends_as_one(folder: Path, tmp_path: Path) -> None:
    recipe, run, out = tmp_path / "recipe.py", tmp_path / "run", tmp_path / "out"
    recipe.write_text(RECIPE.format(path=str(folder)))
    # So slow that nothing changes: the checkpoint and the loss are the folder's.
    still = ("--optimizer.learning-rate", 1e-30, "--optimizer.weight-decay", 0, "--evaluation.batches", 1)
    options = ("--config", recipe, "--run.directory", run, "--mesh.fsdp", 2, *still, *some_text(tmp_path / "a.jsonl"))
    assert f"starts from the weights of {folder}" in done("train", *options)
    config = json.loads((run / "config.json").read_text())["model"]
    assert (config["pretrained"], config["width"], config["biases"]) == (str(folder), CONFIG.width, "qkv")
    jax.tree.map(np.testing.assert_array_equal, checkpoint(run, 2)["masters"], folders.params(CONFIG))
    assert "is finished at step 2" in done("train", *options)

    done("convert", "export", "--checkpoint", run, "--to", out, "--dtype", "bfloat16")
    expected = folders.params(CONFIG, jnp.bfloat16)
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(out).params, expected)


@pytest.mark.slow
def test_a_larger_tokenizer_needs_more_rows_and_they_are_exported(folder: Path, tmp_path: Path) -> None:
    recipe, run, out = tmp_path / "recipe.py", tmp_path / "run", tmp_path / "out"
    recipe.write_text(RECIPE.format(path=str(folder)))
    tokenizer = texts.write_byte_tokenizer(tmp_path / "tokenizer.json", more=43)
    still = ("--optimizer.learning-rate", 1e-30, "--optimizer.weight-decay", 0, "--evaluation.batches", 1)
    options = ("--config", recipe, *still, *some_text(tmp_path / "a.jsonl"), "--data.tokenizer", tokenizer)
    said = refused("train", *options, "--run.directory", run)
    assert f"the tokenizer {tokenizer} has 300 tokens; set --model.resize-vocabulary 300" in said
    options += ("--model.resize-vocabulary", 300)
    said = done("train", *options, "--run.directory", run)
    assert f"tokenizer: {tokenizer}, 300 tokens, no BOS, EOS 256\n" in said
    assert "is finished at step 2" in done("train", *options, "--run.directory", run)
    done("convert", "export", "--checkpoint", run, "--to", out)
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 300
    assert (out / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    one, two = tensors(folder), tensors(out)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        np.testing.assert_array_equal(two[name][:258], one[name])
        np.testing.assert_array_equal(two[name][258:], np.tile(one[name].mean(0, np.float64).astype("f4"), (42, 1)))
    assert load_pretrained(out).logits([[1, 299]]).shape == (1, 2, 300)

    adapted = (*options, "--lora.rank", 2, "--run.directory", tmp_path / "adapted")
    done("train", *adapted)
    done("train", *adapted, "--training.steps", 3)  # reads the frozen base again
    done("convert", "export", "--checkpoint", tmp_path / "adapted", "--to", tmp_path / "adapter")
    exported = safetensors.open_file(tmp_path / "adapter" / "adapter_model.safetensors")
    convert.merge_run(tmp_path / "adapted", tmp_path / "merged", None, 10**9)
    merged = tensors(tmp_path / "merged")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        np.testing.assert_array_equal(merged[name], two[name])
        np.testing.assert_array_equal(exported[f"base_model.model.{name}"].array, two[name])

    # Its tables are trained from now on, because only trained weights come from an adapter.
    goes_on = (*options[:-2], "--run.directory", tmp_path / "goes on", "--precision.compute-dtype", "float32")
    done("train", *goes_on, "--lora.pretrained", tmp_path / "adapter")
    settings = json.loads((tmp_path / "goes on" / "config.json").read_text())
    assert settings["training"]["trainable"] == ["non_layer/embedding/table", "non_layer/head/table"]
    assert settings["model"]["resize_vocabulary"] == 300
    done("train", *goes_on, "--lora.pretrained", tmp_path / "adapter", "--training.steps", 3)
    said = refused(
        "train",
        *options,
        "--run.directory",
        run,
        "--model.resize-vocabulary",
        301,
        *("--lora.pretrained", tmp_path / "adapter"),
    )
    assert "its tables have 300 rows; set --model.resize-vocabulary 300" in said


@pytest.mark.slow
def test_experts_are_trained_from_a_folder_and_end_as_one(tmp_path: Path) -> None:
    """Spread over a mesh, and in two segments of layers."""
    model = replace_fields(
        CONFIG,
        {
            "biases": "none",
            "qk_norm": "head",
            "moe.experts": 4,
            "moe.expert_width": 8,
            "moe.dense_layers": 1,
            "layers": 3,
        },
    )
    folder, recipe = folders.folder_with_tokenizer(tmp_path / "folder", model), tmp_path / "recipe.py"
    run, out = tmp_path / "run", tmp_path / "out"
    recipe.write_text(RECIPE.format(path=str(folder)))
    still = ("--optimizer.learning-rate", 1e-30, "--optimizer.weight-decay", 0, "--evaluation.batches", 1)
    mesh = (*some_text(tmp_path / "a.jsonl"), "--mesh.expert", 2, "--mesh.fsdp", 2, "--model.moe.balance-loss", 0.1)
    said = done("train", "--config", recipe, "--run.directory", run, *mesh, *still)
    specs = param_specs(model)
    assert (
        f"{param.count_parameters(specs):,} parameters ({flops.count_active_parameters(model, specs):,} active) on 4 "
        "cpu" in said
    )
    assert json.loads((run / "config.json").read_text())["model"]["moe"]["balance_loss"] == 0.1
    done("convert", "export", "--checkpoint", run, "--to", out)
    one, two = tensors(folder), tensors(out)
    assert one.keys() == two.keys() and "model.layers.2.mlp.experts.3.up_proj.weight" in one
    assert all(one[name].tobytes() == two[name].tobytes() for name in one)
    assert json.loads((out / "config.json").read_text())["router_aux_loss_coef"] == 0.1


@pytest.mark.slow
def test_adapters_go_out_are_merged_and_begin_a_run(folder: Path, tmp_path: Path) -> None:
    recipe, run, again = tmp_path / "recipe.py", tmp_path / "run", tmp_path / "again"
    base, away = tmp_path / "base", tmp_path / "away"
    shutil.copytree(folder, base)
    recipe.write_text(RECIPE.format(path=str(base)))
    options = ("train", "--config", recipe, "--evaluation.batches", 1, "--precision.compute-dtype", "float32")
    options += some_text(tmp_path / "a.jsonl")
    lora = ("--lora.rank", 2, "--lora.alpha", 3, "--lora.targets", "*/attention/*", "*/mlp/down")
    done(*options, *lora, "--run.directory", run, "--optimizer.learning-rate", 1e-2)
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    base.rename(away)  # no adapter wants it to go out
    said = done("convert", "export", "--checkpoint", run, "--to", adapter)
    away.rename(base)
    assert said == f"the adapters of step 2 of {run} are in {adapter}, in float32\n"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)

    # A run of adapters is no beginning, so the advice for other data is to merge first.
    flags = (*options[:-1], tmp_path / "b.jsonl", *lora, "--run.directory", run, "--optimizer.learning-rate", 1e-2)
    (tmp_path / "b.jsonl").write_text((tmp_path / "a.jsonl").read_text() + '\n{"text": "one more"}\n')
    said = refused(*flags, "--training.steps", 3)
    assert "start a new run with --model.pretrained FOLDER, which" in said and f"merge --checkpoint {run} --to" in said

    # The sum of the run is that of the folders.
    done("convert", "merge", "--checkpoint", run, "--to", merged)
    convert.merge_folders(base, adapter, tmp_path / "other", None, 10**9)
    one, two, before = tensors(merged), tensors(tmp_path / "other"), tensors(base)
    assert all(one[name].tobytes() == two[name].tobytes() for name in one.keys() | two.keys())
    changed = {name for name in one if not np.array_equal(one[name], before[name])}
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")
    assert changed == {f"model.layers.{layer}.{name}.weight" for layer in range(2) for name in names}

    # So slow that nothing changes; and B is not at zero, where a run without the folder would begin.
    still = ("--optimizer.learning-rate", 1e-30, "--optimizer.weight-decay", 0)
    still += ("--mesh.pipeline", 2, "--training.accumulation", 2)
    begins = (*options, "--run.directory", again, "--lora.pretrained")
    assert f"starts from the adapters of {adapter}\n" in done(*begins, os.path.relpath(adapter, ROOT.parent), *still)
    first, second = (checkpoint(each, 2)["masters"] for each in (run, again))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert all(np.any(each) for each in jax.tree.leaves(second))

    with pytest.raises(InputError) as error:
        arguments = map(str, (*begins[1:], adapter, "--lora.rank", 4, "--lora.targets", "*/mlp/*"))
        pretrained.resolve_pretrained(cli.parse_config([*arguments], "train"))
    conflicts = "lora.rank=4 (the stored value is 2), lora.targets=('*/mlp/*',) (the stored value is"
    assert f"leave out {conflicts}" in str(error.value)
    # A table that came along, and is another's.
    other = shutil.copytree(adapter, tmp_path / "other adapter")
    stored = {name: each.array for name, each in safetensors.open_file(adapter / "adapter_model.safetensors").items()}
    stored["base_model.model.model.embed_tokens.base_layer.weight"] = before["model.embed_tokens.weight"] + 1
    described = {name: TensorSpec(each.dtype, each.shape) for name, each in stored.items()}
    safetensors.write_file(other / "adapter_model.safetensors", described, stored.__getitem__)
    said = refused(*begins, other, "--run.directory", tmp_path / "third")
    assert f"the base weights of model.embed_tokens differ from those in {base}" in said

    assert "merge requires --checkpoint RUN_DIR, or" in refused("convert", "merge", "--base", base, "--to", run / "new")


@pytest.mark.slow
def test_checkpoints_of_adapters_leave_the_base_where_it_is(folder: Path, tmp_path: Path) -> None:
    """And go on from it on another mesh as if nothing had been, while it is the same."""
    base = tmp_path / "base"
    shutil.copytree(folder, base)
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.format(path=str(base)))
    documents = (json.dumps({"text": f"document {number} " * 5}) for number in range(40))
    (tmp_path / "documents.jsonl").write_text("\n".join(documents))
    corpus = ("--data.paths", tmp_path / "documents.jsonl", "--data.held-out", 0.2, "--evaluation.batches", 1000)
    options = ("--config", recipe, *corpus, "--training.batch-size", 1, "--precision.compute-dtype", "float32")
    options += ("--schedule.decay-steps", 4)  # of runs of any length
    qlora = ("--lora.rank", 2, "--lora.base", "nf4", "--lora.dora", "True", "--lora.dropout", 0.1)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    done("train", *options, *qlora, "--run.directory", whole, "--training.steps", 3, "--checkpoint.every", 1)
    done("train", *options, *qlora, "--run.directory", parted, "--training.steps", 2)
    held = {path.name for path in (parted / "checkpoints" / "2").iterdir() if path.is_dir()}
    assert held == {"masters", "moments", "guard"}
    goes_on = (*options, *qlora, "--run.directory", parted, "--training.steps", 3)
    on_stages = command("train", *goes_on, "--mesh.pipeline", 2)
    assert "continues from step 2" in on_stages.stdout
    assert on_stages.stderr.startswith("warning: fewer microbatches than stages") and on_stages.returncode == 0
    one, other = (checkpoint(each, 3)["masters"] for each in (whole, parted))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), one, other)
    assert metrics(whole)[-1]["eval_loss"] == pytest.approx(metrics(parted)[-1]["eval_loss"], rel=1e-6)
    assert evaluated(parted)[0] == pytest.approx(metrics(parted)[-1]["eval_loss"], abs=1e-4)

    base.rename(tmp_path / "moved")
    with pytest.raises(InputError, match=f"{base}: the folder does not exist, .* name its new location with --base"):
        convert.merge_run(parted, tmp_path / "merged", None, 10**9)
    convert.merge_run(parted, tmp_path / "merged", None, 10**9, base=tmp_path / "moved")
    (tmp_path / "moved").rename(base)

    # What is not trained goes out in the folder's dtype, not in that in which it was computed with.
    norms = ("--training.trainable", "*/scale", "--precision.compute-dtype", "bfloat16", "--training.steps", 1)
    done("train", *options, *norms, "--run.directory", tmp_path / "norms")
    convert.export_run(tmp_path / "norms", tmp_path / "out", None, 10**9)
    one, other = tensors(tmp_path / "out"), tensors(base)
    assert {name for name in other if one[name].tobytes() != other[name].tobytes()} == {
        name for name in other if "norm" in name
    }

    (base / "model.safetensors.index.json").unlink()
    for file in base.glob("*.safetensors"):
        file.unlink()
    other_weights = folders.params(CONFIG)
    other_weights["non_layer"]["embedding"]["table"][-200:-150] += 1
    write_model_folder(tmp_path / "new", jax.device_put(other_weights, toy.placement().replicated), CONFIG)
    shutil.copytree(tmp_path / "new", base, dirs_exist_ok=True)
    assert f"model.pretrained={base}: its weights differ from those that {parted} started from" in refused(
        "train", *goes_on, "--training.steps", 4
    )
    assert f"the run in {parted} started from a Hugging Face folder: set --model.pretrained" in refused(
        "train", *goes_on, "--training.steps", 4, "--model.pretrained", tmp_path / "norms"
    )
    said = refused("train", *goes_on, "--lora.pretrained", parted)
    assert f"convert export --checkpoint {parted} --to FOLDER" in said


@pytest.mark.slow
def test_a_model_of_ones_own_goes_out(tmp_path: Path) -> None:
    """Trained from the initialiser: whose token ids are the tokenizer's."""
    assert train(tmp_path / "run", "--training.steps", 1).returncode == 0
    done("convert", "export", "--checkpoint", tmp_path / "run", "--to", tmp_path / "out")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = {"model_type": "llama", "bos_token_id": 256, "eos_token_id": 257, "max_position_embeddings": 32}
    assert wanted.items() <= said.items()
    assert load_pretrained(tmp_path / "out").logits([[1, 2]]).shape == (1, 2, 258)


def test_bad_input_is_one_line(folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.format(path=str(folder)))
    begins = ("train", "--config", recipe, "--run.directory", tmp_path / "run")
    said = refused(*begins, "--model.width", 64, "--model.layers", 3)
    assert "sets the model's fields; leave out model.width=64 (the stored value is 32), model.layers=3" in said
    assert "no such folder" in refused(*begins, "--model.pretrained", tmp_path / "none")
    assert refused(*begins).endswith(
        f"data.paths: name the data on which to train {folder}, files, folders or globs, with --data.paths"
    )
    text = some_text(tmp_path / "a.jsonl")
    assert f"the ids of {folder} are not bytes" in refused(*begins, *text, "--data.tokenizer", "bytes")
    assert f"{folder} has 258 token ids, and rows can only be added" in refused(*begins, "--model.resize-vocabulary", 9)
    fresh = ("train", "--config", "quickstart.py", "--run.directory", tmp_path / "run")
    assert "there is no model whose tables to resize" in refused(*fresh, "--model.resize-vocabulary", 300)
    bare = folders.folder(tmp_path / "bare", CONFIG)
    assert "not a readable tokenizer.json" in refused("generate", "--checkpoint", bare, "--prompt", "a")
    small = folders.folder(tmp_path / "small", replace(CONFIG, vocabulary_size=100))
    (small / "model.safetensors.index.json").unlink()
    (small / "pytorch_model.bin").touch()
    for file in small.glob("*.safetensors"):
        file.unlink()
    assert "are pickles" in refused("generate", "--checkpoint", small, "--prompt", "a")
    assert not (tmp_path / "run").exists()
