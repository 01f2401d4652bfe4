"""Model folders are read into any mesh with little host memory, and refused if they are incomplete."""

import json
import os
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
import texts
import toy

from jaxopt_llm import convert, load_pretrained
from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface import safetensors
from jaxopt_llm.checkpoint.huggingface.model_folder import write_model_folder
from jaxopt_llm.checkpoint.huggingface.safetensors import TensorSpec
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.execution.stage_layout import stack_by_stage
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.parallel.zero import parameter_sharding

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
def test_leaves_are_read_into_any_mesh(name: str, folder: Path) -> None:
    placement = toy.placement(**PLACEMENTS[name])
    parts, expected = Decoder(folders.CONFIG), folders.params()
    if stages := PLACEMENTS[name].get("pipeline"):
        parts = stack_by_stage(parts, stages)
        expected = toy.on_stages(parts.specs, expected)
    opened = huggingface.open_model_folder(folder)
    assert opened.config == replace_fields(folders.CONFIG, {"rope.original_length": opened.config.rope.original_length})

    def check(path: str, spec: Any, values: np.ndarray) -> None:
        sharding = parameter_sharding(spec, placement)
        leaf = opened.read(path, spec, sharding)
        assert (leaf.sharding, leaf.dtype) == (sharding, spec.dtype)
        np.testing.assert_array_equal(leaf, values)

    tree.map_with_path(check, parts.specs, expected)


def resident_file_bytes() -> int:
    """Return the bytes of mapped files that are in this process's memory."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssFile"))


def test_host_holds_one_tensor_in_addition_to_the_shards(tmp_path: Path) -> None:
    """Check 16 layers of 16-bit tensors that are read into float32."""
    config = replace(folders.CONFIG, width=256, mlp_width=2048, layers=16, pattern=("global",))
    opened = huggingface.open_model_folder(folders.folder(tmp_path / "folder", config, jnp.bfloat16, most=10**9))
    specs = Decoder(config).specs
    placement = toy.placement(zero_stage=3, fsdp=4)
    path, spec = "segment_0/block_0/mlp/up", specs["segment_0"]["block_0"]["mlp"]["up"]
    down = specs["segment_0"]["block_0"]["mlp"]["down"]
    opened.read(
        path.replace("up", "down"), down, parameter_sharding(down, placement)
    )  # the first read also imports modules
    mapped = resident_file_bytes()
    tracemalloc.start()
    leaf = opened.read(path, spec, parameter_sharding(spec, placement))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    one = 4 * 256 * 2048
    assert leaf.nbytes == 16 * one
    assert 16 * one <= peak < 17 * one
    assert resident_file_bytes() - mapped < 2 * one  # the whole file has 16 / 2


def test_a_file_that_is_truncated_during_a_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An access to a mapped page that the file has no more would end the process with SIGBUS."""
    file, preadv = tmp_path / "folder" / "model.safetensors", os.preadv
    folders.folder(tmp_path / "folder", most=10**9)
    opened, whole = huggingface.open_model_folder(tmp_path / "folder"), file.read_bytes()
    spec = Decoder(folders.CONFIG).specs["non_layer"]["embedding"]["table"]
    table = opened.stored["model.embed_tokens.weight"]

    def cut_and_read(*arguments: Any) -> int:
        os.truncate(file, 5000)
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", cut_and_read)
    for read in (
        lambda: opened.read("non_layer/embedding/table", spec, parameter_sharding(spec, toy.placement())),
        lambda: opened.sha256,
        lambda: huggingface.have_equal_values(table, table),
    ):
        file.write_bytes(whole)
        with pytest.raises(InputError, match="model.safetensors: the file was truncated while it was read"):
            read()


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
    settings = json.loads((tmp_path / "two" / "config.json").read_text())
    assert (settings["eos_token_id"], settings["torch_dtype"]) == ([1, 7], dtype)
    assert not {"auto_map", "_name_or_path"} & settings.keys()
    assert (tmp_path / "two" / "tokenizer.json").exists() and not (tmp_path / "two" / "secret.txt").exists()
    with pytest.raises(InputError, match="already exists"):
        model.save_pretrained(tmp_path / "two")


def test_logits_refuse_invalid_tokens(folder: Path) -> None:
    model = load_pretrained(folder)
    assert model.logits([[1, 2, 3]]).shape == (1, 3, folders.CONFIG.vocabulary_size)
    for tokens in ([1, 2], [[0.5]], [[-1]], [[folders.CONFIG.vocabulary_size]], [[]]):
        with pytest.raises(InputError, match="tokens: "):
            model.logits(tokens)


# --- Errors.

UP = "model.layers.3.mlp.up_proj.weight"


def test_each_parameter_keeps_its_dtype(tmp_path: Path) -> None:
    """In a folder of bfloat16 with float32 norms and one float32 matrix. An export of a run has one dtype."""
    folder, thirds = folders.folder(tmp_path / "folder", dtype=jnp.bfloat16), np.float32(1 / 3)

    def widen(arrays: dict[str, np.ndarray]) -> None:
        for name in [name for name in arrays if "norm" in name or name.endswith("layers.1.self_attn.q_proj.weight")]:
            arrays[name] = np.full(arrays[name].shape, thirds)  # which bfloat16 would round

    rewrite(folder, widen)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"torch_dtype": "bfloat16"}))
    before = safetensors.open_folder(folder)
    model = load_pretrained(folder)
    queries = [path for path, leaf in tree.leaves_with_path(model.params) if (leaf == thirds).any() and "query" in path]
    assert len(queries) == 1  # the stack of layer 1: all its layers are float32
    for path, leaf in tree.leaves_with_path(model.params):
        wide = "norm" in path or path in queries
        assert leaf.dtype == (jnp.float32 if wide else jnp.bfloat16), path

    def check(path: Path, is_wide: Callable[[str], bool], torch_dtype: str) -> None:
        after = safetensors.open_folder(path)
        assert after.keys() == before.keys()
        for name, each in after.items():
            assert each.array.dtype == (jnp.float32 if is_wide(name) else jnp.bfloat16), name
            np.testing.assert_array_equal(each.array, before[name].array.astype(each.array.dtype))
        assert json.loads((path / "config.json").read_text())["torch_dtype"] == torch_dtype

    def in_stack(name: str) -> bool:
        return name.endswith("self_attn.q_proj.weight") and int(name.split(".")[2]) in (1, 3)

    model.save_pretrained(tmp_path / "saved")
    check(tmp_path / "saved", lambda name: "norm" in name or in_stack(name), "float32")
    texts.write_byte_tokenizer(folder / "tokenizer.json")
    folders.make_run(folder, tmp_path / "run")
    convert.export_run(tmp_path / "run", tmp_path / "exported", None, 10**9)
    check(tmp_path / "exported", lambda name: False, "bfloat16")


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """Change the tensors of a folder, and write them into one file."""
    arrays = {name: np.array(stored.array) for name, stored in safetensors.open_folder(folder).items()}
    change(arrays)
    for file in [*folder.glob("*.safetensors"), folder / safetensors.INDEX]:
        file.unlink(missing_ok=True)
    specs = {name: TensorSpec(array.dtype, array.shape) for name, array in arrays.items()}
    safetensors.write_folder(folder, specs, arrays.__getitem__, safetensors.MAX_FILE_BYTES)


def set_value(arrays: dict[str, np.ndarray], value: float) -> None:
    arrays[UP][5, 7] = value


def transpose(arrays: dict[str, np.ndarray]) -> None:
    arrays[UP] = arrays[UP].T


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.pop(UP), f"tensor '{UP}' is missing"),
        (lambda arrays: arrays.update({"model.layers.5.mlp.up_proj.weight": arrays[UP]}), "layers.5.* does not belong"),
        (
            lambda arrays: arrays.update({"../../etc": arrays[UP]}),
            r"tensor '../../etc' does not belong to a Qwen2ForCausalLM",
        ),
        (transpose, rf"model.safetensors: tensor '{UP}' has shape \[32, 24\], but config.json requires \[24, 32\]"),
        (lambda arrays: arrays.update({UP: arrays[UP] > 0}), f"tensor '{UP}' is bool, not one of F32, F16, BF16"),
        (lambda arrays: set_value(arrays, np.nan), f"model.safetensors: tensor '{UP}' has values that are not finite"),
        (lambda arrays: set_value(arrays, np.inf), f"tensor '{UP}' has values that are not finite"),
    ],
)
def test_invalid_tensors_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    folder = folders.folder(tmp_path / "folder")
    rewrite(folder, change)
    with pytest.raises(InputError, match=message):
        load_pretrained(folder)


def test_values_that_overflow_on_reading_are_refused(tmp_path: Path) -> None:
    folder = folders.folder(tmp_path / "folder")
    rewrite(folder, lambda arrays: set_value(arrays, 1e6))
    opened, spec = (
        huggingface.open_model_folder(folder),
        Decoder(folders.CONFIG).specs["segment_0"]["block_1"]["mlp"]["up"],
    )
    narrow = replace(spec, dtype=np.dtype(np.float16))
    with pytest.raises(InputError, match=f"'{UP}' has values that are not finite in float16"):
        opened.read("segment_0/block_1/mlp/up", narrow, toy.placement().replicated)


def test_values_that_overflow_on_writing_are_refused(tmp_path: Path) -> None:
    folder = folders.folder(tmp_path / "folder")
    rewrite(folder, lambda arrays: set_value(arrays, 1e6))
    model = load_pretrained(folder)
    with pytest.raises(InputError, match=f"'{UP}' has values that are not finite in float16"):
        write_model_folder(tmp_path / "narrow", model.params, model.config, dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_stored_tied_head_must_equal_the_table(tmp_path: Path) -> None:
    config = replace(folders.CONFIG, tied_head=True)
    folder = folders.folder(tmp_path / "folder", config)
    table = "model.embed_tokens.weight"
    rewrite(folder, lambda arrays: arrays.update({"lm_head.weight": arrays[table].copy()}))
    expected = folders.params(config)
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(folder).params, expected)
    rewrite(folder, lambda arrays: arrays["lm_head.weight"].__setitem__((3, 4), 9))
    with pytest.raises(InputError, match="'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        load_pretrained(folder)


def test_constants_of_a_family_are_checked_and_written_back(tmp_path: Path) -> None:
    config = replace(folders.CONFIG, pattern=("global",), biases="none", qk_norm="head", mlp="xielu")
    folder, beta = folders.folder(tmp_path / "folder", config, jnp.bfloat16), "model.layers.4.mlp.act_fn.beta"
    model = load_pretrained(folder)
    model.save_pretrained(tmp_path / "back")
    one, two = (safetensors.open_folder(each) for each in (folder, tmp_path / "back"))
    assert one.keys() == two.keys() and one[beta].array.shape == ()
    assert float(two[beta].array) == 0.5 and two["model.layers.0.mlp.act_fn.eps"].array == jnp.bfloat16(-1e-6)
    rewrite(folder, lambda arrays: arrays.update({beta: np.float32(0.6)}))
    with pytest.raises(InputError, match=f"tensor '{beta}' is 0.6.*; only 0.5 is computed"):
        load_pretrained(folder)


def test_keys_of_layers_that_read_those_of_others_are_left_out(tmp_path: Path) -> None:
    """Published folders have them, and the class in transformers does not read them."""
    folder = folders.folder(tmp_path / "folder", folders.SHARED_KEYS)
    names = set(safetensors.open_folder(folder))
    more = [f"self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]
    rewrite(
        folder,
        lambda arrays: arrays.update(
            {f"model.layers.{layer}.{name}": arrays[f"model.layers.3.{name}"] for layer in (4, 5) for name in more}
        ),
    )
    model = load_pretrained(folder)
    jax.tree.map(np.testing.assert_array_equal, model.params, folders.params(folders.SHARED_KEYS))
    model.save_pretrained(tmp_path / "back")
    assert set(safetensors.open_folder(tmp_path / "back")) == names
    rewrite(folder, lambda arrays: arrays.pop("model.layers.3.self_attn.k_proj.weight"))
    with pytest.raises(InputError, match=r"'model.layers.3.self_attn.k_proj.weight' is missing"):
        load_pretrained(folder)


def test_names_without_base_prefix_and_masks_are_supported(tmp_path: Path) -> None:
    """Check the form of the first published folder of GPT-2."""
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

    def publish(arrays: dict[str, np.ndarray]) -> None:
        for name in list(arrays):
            arrays[name.removeprefix("transformer.")] = arrays.pop(name)
        arrays["h.0.attn.bias"] = np.ones((1, 1, 4, 4), np.float32)
        arrays["h.0.attn.masked_bias"] = np.ones((), bool)  # in later folders masks are not floats

    rewrite(folder, publish)
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(folder).params, folders.params(config))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "it has no config.json"),
        ("[]", "config.json: the JSON is not an object"),
        ("{", "config.json: invalid JSON"),
        ('{"model_type": "llama", "model_type": "qwen2"}', "'model_type' appears twice"),
        ('{"model_type": "mamba", "auto_map": {"AutoModel": "evil.Model"}}', "config.json: model_type='mamba'"),
    ],
)
def test_invalid_config_is_refused(content: str | None, message: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=message):
        load_pretrained(tmp_path)
