"""Models loaded from runs and Hugging Face folders."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import chex
import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from chats import write_tokenizer
from commands import train

from jaxopt_llm import evaluate, load_pretrained
from jaxopt_llm.config import DataConfig
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer
from jaxopt_llm.execution.sampling import Sampling
from jaxopt_llm.generate import generate
from jaxopt_llm.inference import models
from jaxopt_llm.inference.models import choose_devices, fits_in_memory


def test_parameters_use_all_devices_if_one_is_too_small() -> None:
    devices = jax.devices()
    assert choose_devices(75, devices, 100) == devices[:1]
    assert choose_devices(76, devices, 100) == devices
    assert choose_devices(76, devices, None) == devices[:1]
    assert choose_devices(150, devices, 100, tensor=2) == devices[:2]
    assert choose_devices(151, devices, 100, tensor=2) == devices
    assert fits_in_memory(600, devices, 100) and not fits_in_memory(601, devices, 100)


@pytest.mark.slow
def test_parameters_are_sharded_and_in_compute_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers stay in float32."""
    experts = (
        "--model.moe.experts",
        2,
        "--model.moe.expert-width",
        8,
        "--model.moe.router",
        "sigmoid",
        "--model.moe.router-bias",
        True,
        "--model.mlp-width",
        384,
    )
    done = train(tmp_path, "--training.steps", 1, "--precision.compute-dtype", "bfloat16", *experts)
    assert (done.returncode, done.stderr) == (0, "")
    monkeypatch.setattr(models, "choose_devices", lambda needed, devices, limit, tensor: devices)
    loaded = models.load_model(tmp_path)
    dtypes = {path: leaf.dtype for path, leaf in tree.leaves_with_path(loaded.params)}
    exact = [path for path in dtypes if path.endswith(("mlp/router", "mlp/router_bias"))]
    assert exact and {dtypes.pop(path) for path in exact} == {jnp.dtype("float32")}
    assert set(dtypes.values()) == {jnp.dtype("bfloat16")}
    table = loaded.params["non_layer"]["embedding"]["table"]
    assert table.sharding.num_devices == 8 and not table.is_fully_replicated
    monkeypatch.undo()
    split = models.load_model(tmp_path, tensor=2)
    assert_split(split, 2)
    chex.assert_trees_all_equal(split.params, loaded.params)


def assert_split(source: models.LoadedModel, count: int) -> None:
    """Check that every device holds only a part of each weight of the blocks and of each table."""
    assert source.placement.size("tensor") == source.placement.mesh.size == count
    whole = {path for path, leaf in tree.leaves_with_path(source.params) if leaf.is_fully_replicated}
    assert all("norm" in path or "router" in path or path.endswith(("key", "value")) for path in whole), whole


def test_a_hugging_face_folder_is_loaded_unchanged(tmp_path: Path) -> None:
    """Check its dtype, its tokenizer, and loading on one device or split over several."""
    config = replace(folders.CONFIG, vocabulary_size=512, layers=2)
    path = write_tokenizer(folders.folder(tmp_path / "model", config, jnp.bfloat16))
    source = models.load_model(path)
    assert source.step == 0 and source.placement.mesh.size == 1
    assert source.placement.precision.compute_dtype == "bfloat16"
    assert {leaf.dtype for leaf in jax.tree.leaves(source.params)} == {jnp.dtype("bfloat16")}
    chex.assert_trees_all_equal(source.params, toy.by_layer(load_pretrained(path).params))
    assert source.tokenizer.sha256 == load_tokenizer(DataConfig(tokenizer=str(path))).sha256
    with pytest.raises(InputError, match="--step best: .* is a model folder, which has no steps; leave it out"):
        models.load_model(path, step="best")
    with pytest.raises(InputError, match="step=2: .* is a model folder, which has no steps; leave it out"):
        load_pretrained(path, step=2)
    split = models.load_model(path, tensor=2)
    assert_split(split, 2)
    chex.assert_trees_all_equal(split.params, source.params)


def test_a_folder_is_evaluated_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tokenizer(folders.folder(tmp_path / "model", replace(folders.CONFIG, vocabulary_size=512, layers=2)))
    (tmp_path / "text.txt").write_text("What is 1 + 1? It is 2.")
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 8}))
    given = ("--checkpoint", path, "--data.paths", tmp_path / "text.txt", "--training.batch-size", 1)
    outputs = []
    for length in ((), ("--training.sequence_length=8",)):  # the default is the model's context
        monkeypatch.setattr(sys, "argv", ["evaluate", *map(str, given), *length])
        assert evaluate.main() == 0
        outputs.append(capsys.readouterr())
    assert outputs[0].out == outputs[1].out
    assert [line for line in outputs[0].err.splitlines() if line not in outputs[1].err.splitlines()] == [
        "rows of 8 tokens, the model's context, at most 2,048: see --training.sequence-length"
    ]
    tokenizer = load_tokenizer(DataConfig(tokenizer=str(path)))
    (ids,) = tokenizer.encode([(tmp_path / "text.txt").read_bytes()])
    row = np.array([each for each in (tokenizer.bos, *ids, tokenizer.eos) if each is not None], np.int32)
    losses = []
    for begin in range(0, row.size - 1, 8):  # two rows share a token: the last target and the first token
        part = row[begin : begin + 9]
        logits = load_pretrained(path).logits(part[None])[0, :-1]
        losses += [*-jax.nn.log_softmax(logits)[np.arange(part.size - 1), part[1:]]]
    assert f"{np.mean(losses):.4f} nats per token" in outputs[0].out


@pytest.mark.parametrize(("context", "rows"), [(8, (8, 1024)), (131_072, (2048, 4)), (None, (2048, 4))])
def test_a_folder_is_evaluated_on_rows_of_its_context(
    context: int | None, rows: tuple[int, int], tmp_path: Path
) -> None:
    path = folders.folder_with_tokenizer(tmp_path / "model")
    settings = json.loads((path / "config.json").read_text())
    settings.pop("max_position_embeddings", None)
    (path / "config.json").write_text(json.dumps(settings | ({"max_position_embeddings": context} if context else {})))
    training = models.open_config(path).training
    assert (training.sequence_length, training.batch_size) == rows


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model": 1}'])
def test_other_directories_are_rejected(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match="not a run directory .*, nor a Hugging Face model folder"):
        models.load_model(tmp_path)


def test_a_checkpoint_in_place_of_its_run_is_named_with_its_step(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "55"
    path.mkdir(parents=True)
    (tmp_path / "config.json").write_text("{}")
    for load in (models.load_config, models.open_config):
        with pytest.raises(InputError, match=f"of a run; name the run with --checkpoint {tmp_path} --step 55$"):
            load(path)


@pytest.mark.slow
def test_offloaded_parameters_generate_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = train(tmp_path, "--training.steps", 1)
    assert (done.returncode, done.stderr) == (0, "")
    on_device = models.load_model(tmp_path)
    monkeypatch.setattr(models, "fits_in_memory", lambda needed, devices, limit: False)
    on_host = models.load_model(tmp_path)
    kinds = {
        section: {x.sharding.memory_kind for x in jax.tree.leaves(on_host.params[section])}
        for section in on_host.params
    }
    assert kinds == {"non_layer": {"device"}, "segment_0": {"pinned_host"}}
    texts = [generate(each, ["x"], 4, Sampling(), ()) for each in (on_device, on_host)]
    assert texts[0] == texts[1]
