"""Folders of models: read into any placement, in little memory, and refused where they are not whole."""

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm import load_pretrained, tree
from jaxopt_llm.checkpoint import huggingface, safetensors
from jaxopt_llm.checkpoint.safetensors import Described
from jaxopt_llm.errors import InputError
from jaxopt_llm.execution.stages import rest_on_stages
from jaxopt_llm.model.decoder import make_parts

pytestmark = pytest.mark.core

PLACEMENTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "divided and split": {"zero_stage": 3, "fsdp": 2, "tensor": 2},
    "replicas, more than key-value heads": {"data": 2, "tensor": 4},
    "stages": {"pipeline": 2, "zero_stage": 3, "fsdp": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.folder(tmp_path_factory.mktemp("model") / "folder")


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_leaf_comes_into_its_place(name: str, folder: Path) -> None:
    placement = toy.placement(**PLACEMENTS[name])
    parts, expected = make_parts(folders.CONFIG), folders.params()
    if stages := PLACEMENTS[name].get("pipeline"):
        parts = rest_on_stages(parts, stages)
        expected = toy.on_stages(parts.specs, expected)
    opened = huggingface.open_folder(folder)
    assert opened.config == replace(folders.CONFIG, rope_original_length=opened.config.rope_original_length)

    def check(path: str, spec: Any, values: np.ndarray) -> None:
        sharding = placement.parameters(spec)
        leaf = opened.read(path, spec, sharding)
        assert (leaf.sharding, leaf.dtype) == (sharding, spec.dtype)
        np.testing.assert_array_equal(leaf, values)

    tree.map_with_path(check, parts.specs, expected)


def resident_of_files() -> int:
    """Bytes of mapped files that this process has in memory."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssFile"))


def test_the_host_holds_one_tensor_beside_the_parts(tmp_path: Path) -> None:
    """Of 16 layers, and of 16-bit tensors that become 32 bits wide."""
    config = replace(folders.CONFIG, width=256, mlp_width=2048, layers=16, pattern=("global",))
    opened = huggingface.open_folder(folders.folder(tmp_path / "folder", config, jnp.bfloat16, most=10**9))
    specs = make_parts(config).specs
    placement = toy.placement(zero_stage=3, fsdp=4)
    path, spec = "segment_0/block_0/mlp/up", specs["segment_0"]["block_0"]["mlp"]["up"]
    down = specs["segment_0"]["block_0"]["mlp"]["down"]
    opened.read(path.replace("up", "down"), down, placement.parameters(down))  # what is imported at first
    mapped = resident_of_files()
    tracemalloc.start()
    leaf = opened.read(path, spec, placement.parameters(spec))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    one = 4 * 256 * 2048
    assert leaf.nbytes == 16 * one
    assert 16 * one <= peak < 17 * one
    assert resident_of_files() - mapped < 2 * one  # of 16 / 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_round_trip_is_equal_to_the_bit(dtype: str, tmp_path: Path) -> None:
    source = folders.folder(tmp_path / "one", dtype=jnp.dtype(dtype))
    (source / "tokenizer.json").write_text("{}")
    (source / "secret.txt").write_text("mine")
    settings = json.loads((source / "config.json").read_text())
    settings |= {"eos_token_id": [1, 7], "auto_map": {"AutoModel": "evil.Model"}, "_name_or_path": "/home/me/model"}
    (source / "config.json").write_text(json.dumps(settings))
    model = load_pretrained(source)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype(dtype)}
    model.save_pretrained(tmp_path / "two")
    one, two = (safetensors.open_folder(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].array.dtype == two[name].array.dtype == jnp.dtype(dtype)
        assert one[name].array.tobytes() == two[name].array.tobytes()
    said = json.loads((tmp_path / "two" / "config.json").read_text())
    assert (said["eos_token_id"], said["torch_dtype"]) == ([1, 7], dtype)
    assert not {"auto_map", "_name_or_path"} & said.keys()
    assert (tmp_path / "two" / "tokenizer.json").exists() and not (tmp_path / "two" / "secret.txt").exists()
    with pytest.raises(InputError, match="there is something already"):
        model.save_pretrained(tmp_path / "two")


def test_logits_refuse_what_is_no_batch_of_ids(folder: Path) -> None:
    model = load_pretrained(folder)
    assert model.logits([[1, 2, 3]]).shape == (1, 3, folders.CONFIG.vocabulary_size)
    for tokens in ([1, 2], [[0.5]], [[-1]], [[folders.CONFIG.vocabulary_size]], [[]]):
        with pytest.raises(InputError, match="tokens: "):
            model.logits(tokens)


# ---- What is not whole.

UP = "model.layers.3.mlp.up_proj.weight"


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """The folder with other tensors, in one file."""
    arrays = {name: np.array(stored.array) for name, stored in safetensors.open_folder(folder).items()}
    change(arrays)
    for file in [*folder.glob("*.safetensors"), folder / safetensors.INDEX]:
        file.unlink(missing_ok=True)
    described = {name: Described(array.dtype, array.shape) for name, array in arrays.items()}
    safetensors.write_folder(folder, described, arrays.__getitem__)


def poke(arrays: dict[str, np.ndarray], value: float) -> None:
    arrays[UP][5, 7] = value


def swap(arrays: dict[str, np.ndarray]) -> None:
    arrays[UP] = arrays[UP].T


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda arrays: arrays.pop(UP), f"tensor '{UP}' is missing"),
        (lambda arrays: arrays.update({"model.layers.5.mlp.up_proj.weight": arrays[UP]}), "layers.5.* is none"),
        (lambda arrays: arrays.update({"../../etc": arrays[UP]}), r"tensor '../../etc' is none of a Qwen2ForCausalLM"),
        (swap, rf"model.safetensors: tensor '{UP}' is \[32, 24\], and by config.json it must be \[24, 32\]"),
        (lambda arrays: arrays.update({UP: arrays[UP] > 0}), f"tensor '{UP}' is bool, not one of F32, F16, BF16"),
        (lambda arrays: poke(arrays, np.nan), f"model.safetensors: tensor '{UP}' has values that are not finite"),
        (lambda arrays: poke(arrays, np.inf), f"tensor '{UP}' has values that are not finite"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_the_models_are_named(change: Any, said: str, tmp_path: Path) -> None:
    folder = folders.folder(tmp_path / "folder")
    rewrite(folder, change)
    with pytest.raises(InputError, match=said):
        load_pretrained(folder)


def test_values_that_their_place_cannot_hold_are_named(tmp_path: Path) -> None:
    folder = folders.folder(tmp_path / "folder")
    rewrite(folder, lambda arrays: poke(arrays, 1e6))
    opened, spec = (
        huggingface.open_folder(folder),
        make_parts(folders.CONFIG).specs["segment_0"]["block_1"]["mlp"]["up"],
    )
    narrow = replace(spec, dtype=np.dtype(np.float16))
    with pytest.raises(InputError, match=f"'{UP}' has values that are not finite in float16"):
        opened.read("segment_0/block_1/mlp/up", narrow, toy.placement().replicated)


def test_values_that_a_narrower_dtype_cannot_hold_are_not_written(tmp_path: Path) -> None:
    folder = folders.folder(tmp_path / "folder")
    rewrite(folder, lambda arrays: poke(arrays, 1e6))
    model = load_pretrained(folder)
    with pytest.raises(InputError, match=f"'{UP}' has values that are not finite in float16"):
        huggingface.write(tmp_path / "narrow", model.params, model.config, dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_tied_head_that_is_there_must_be_the_table(tmp_path: Path) -> None:
    config = replace(folders.CONFIG, tied_head=True)
    folder = folders.folder(tmp_path / "folder", config)
    table = "model.embed_tokens.weight"
    rewrite(folder, lambda arrays: arrays.update({"lm_head.weight": arrays[table].copy()}))
    expected = folders.params(config)
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(folder).params, expected)
    rewrite(folder, lambda arrays: arrays["lm_head.weight"].__setitem__((3, 4), 9))
    with pytest.raises(InputError, match="'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        load_pretrained(folder)


def test_names_without_their_base_and_buffers_are_known(tmp_path: Path) -> None:
    """As GPT-2's first folder has them."""
    config = replace(
        toy.CONFIG,
        pattern=("global",),
        layers=1,
        kv_heads=4,
        norm="layer",
        positions="learned",
        biases="all",
        mlp="gelu",
    )
    folder = folders.folder(tmp_path / "folder", config)

    def as_published(arrays: dict[str, np.ndarray]) -> None:
        for name in list(arrays):
            arrays[name.removeprefix("transformer.")] = arrays.pop(name)
        arrays["h.0.attn.bias"] = np.ones((1, 1, 4, 4), np.float32)
        arrays["h.0.attn.masked_bias"] = np.ones((), bool)  # later folders have masks that are no floats

    rewrite(folder, as_published)
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(folder).params, folders.params(config))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "it has no config.json"),
        ("[]", "config.json: no JSON object"),
        ("{", "config.json: no JSON where it should be"),
        ('{"model_type": "llama", "model_type": "qwen2"}', "config.json: 'model_type' is there twice"),
        ('{"model_type": "mamba", "auto_map": {"AutoModel": "evil.Model"}}', "config.json: model_type='mamba'"),
    ],
)
def test_a_config_that_cannot_be_taken_is_named(content: str | None, said: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=said):
        load_pretrained(tmp_path)
