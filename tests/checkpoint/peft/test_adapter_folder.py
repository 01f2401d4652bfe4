"""PEFT folders: adapters are read into any mesh, merged into their base, and refused if they are incomplete."""

import dataclasses
import json
import math
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
from adapters import ALPHA, LORA, QUERY, RANK, add_adapters, open_adapters, rewrite_adapters, write_adapters

from jaxopt_llm import load_pretrained
from jaxopt_llm.checkpoint.huggingface.find_family import FAMILIES
from jaxopt_llm.checkpoint.huggingface.model_folder import write_model_folder
from jaxopt_llm.checkpoint.peft import adapter_folder
from jaxopt_llm.checkpoint.peft.adapter_config import PeftConfig, find_endings, read_peft_config
from jaxopt_llm.checkpoint.peft.adapter_writer import write_adapter_folder
from jaxopt_llm.config import fields
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.execution.stage_layout import stack_by_stage
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.parallel.zero import parameter_sharding

pytestmark = pytest.mark.core

PLACEMENTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "divided and split": {"zero_stage": 3, "fsdp": 2, "tensor": 2},
    "stages": {"pipeline": 2, "zero_stage": 3, "fsdp": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with adapters of all queries, of mlp/down in one block, and of the head."""
    params = add_adapters(folders.CONFIG, "attention/query segment_0/block_0/mlp/down head/table")
    return write_adapters(tmp_path_factory.mktemp("adapter") / "folder", params)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_leaves_are_read_into_any_mesh(name: str, folder: Path) -> None:
    placement = toy.placement(**PLACEMENTS[name])
    adapter = open_adapters(folder)
    assert {f"lora.{name}" for name in adapter.lora} == {
        name for name, each in fields.METADATA.items() if name.startswith("lora.") and each.in_pretrained
    }
    assert adapter.lora == {
        "rank": RANK,
        "alpha": ALPHA,
        "targets": ("*/head/table", "*/query", "segment_0/block_0/mlp/down"),
        "rslora": False,
        "dora": False,
    }
    parts = Decoder(folders.CONFIG)
    expected = add_adapters(folders.CONFIG, "attention/query segment_0/block_0/mlp/down head/table")
    specs = adapter.add_to_specs(parts.specs)
    if stages := PLACEMENTS[name].get("pipeline"):
        rested = adapter.add_to_specs(stack_by_stage(parts, stages).specs)
        specs, expected = rested, toy.on_stages(rested, expected)
    assert jax.tree.structure(specs) == jax.tree.structure(expected)

    def check(path: str, spec: Any, values: np.ndarray) -> None:
        if path in leaves.adapter_paths(specs):
            sharding = parameter_sharding(spec, placement)
            leaf = adapter.read(path, spec, sharding)
            assert (leaf.sharding, leaf.dtype) == (sharding, spec.dtype)
            np.testing.assert_array_equal(leaf, values, err_msg=path)

    tree.map_with_path(check, specs, expected)


@pytest.mark.parametrize("base", ["float", "int8", "nf4"])
@pytest.mark.parametrize("dora", [False, True])
def test_merged_weight_is_the_sum(base: str, dora: bool) -> None:
    """Check an output projection, which sums over two dimensions."""
    random = np.random.default_rng(0)
    spec = param_specs(replace(folders.CONFIG, width=64))["segment_0"]["block_0"]["attention"]["output"].unstack()
    specs = leaves.lora_specs(spec, RANK, 1.5, dora)
    weight = jax.tree.map(lambda each: jnp.asarray(random.normal(size=each.shape), jnp.float32), specs)
    whole = np.asarray(weight.base)
    if base != "float":
        weight = replace(weight, base=leaves.quantise(weight.base, leaves.quantised_specs(spec, base, double=False)))  # type: ignore[arg-type]
        whole = np.asarray(leaves.dequantise(weight.base))
        assert not np.array_equal(whole, specs.base)
    expected = whole + 1.5 * np.einsum("hkr,dr->hkd", weight.lora_a, weight.lora_b)
    if dora:
        expected *= weight.magnitude / np.linalg.norm(expected.reshape(-1, 64), axis=0)
    np.testing.assert_allclose(leaves.merge_to_array(weight, spec.contracting), expected, rtol=1e-5, atol=1e-5)


def test_quantised_weights_are_written_dequantised(tmp_path: Path) -> None:
    """Check quantised stacks with and without an adapter."""
    specs = param_specs(folders.CONFIG)["segment_0"]["block_1"]["mlp"]
    params = add_adapters(folders.CONFIG, "segment_0/block_1/mlp/up")
    mlp = params["segment_0"]["block_1"]["mlp"]
    gate = leaves.quantise(jnp.asarray(mlp["gate"]), leaves.int8_specs(specs["gate"]))
    up = replace(mlp["up"], base=leaves.quantise(jnp.asarray(mlp["up"].base), leaves.nf4_specs(specs["up"], True)))
    mlp.update(gate=gate, up=up)
    write_model_folder(tmp_path / "whole", jax.device_put(params, toy.placement().replicated), folders.CONFIG)
    found = load_pretrained(tmp_path / "whole").params["segment_0"]["block_1"]["mlp"]
    np.testing.assert_array_equal(found["gate"], leaves.dequantise(gate))
    expected = leaves.dequantise(up.base) + ALPHA / RANK * np.einsum("ldr,lfr->ldf", up.lora_a, up.lora_b)
    np.testing.assert_allclose(found["up"], expected, rtol=1e-6, atol=1e-6)


def test_merged_weight_is_rounded_once(tmp_path: Path) -> None:
    """An adapter is merged into a 16-bit base in float32."""
    base = folders.folder(tmp_path / "base", dtype=jnp.bfloat16)
    model = load_pretrained(base, adapter=write_adapters(tmp_path / "adapter", add_adapters(folders.CONFIG, "mlp/up")))
    model.save_pretrained(tmp_path / "merged")
    found = load_pretrained(tmp_path / "merged").params["segment_0"]["block_0"]["mlp"]["up"]
    up = model.params["segment_0"]["block_0"]["mlp"]["up"]
    wide = jax.vmap(lambda each: leaves.merge_to_array(each, (0,)))(up)
    assert (found.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(found, wide.astype(jnp.bfloat16))


def test_endings_match_exactly_the_selected_names() -> None:
    names = [f"layers.{layer}.{part}" for layer in range(12) for part in ("attn.q", "attn.o", "mlp.o", "norm")]
    selected = {name for name in names if name.endswith("attn.o") or name in ("layers.1.attn.q", "layers.11.mlp.o")}
    found = find_endings(sorted(selected), names)
    assert sorted(found) == ["1.attn.q", "11.mlp.o", "attn.o"]
    config = PeftConfig(r=1, lora_alpha=1, target_modules=found)
    assert {name for name in names if config.selects(name, in_block=True)} == selected


@pytest.mark.parametrize(("rslora", "scales"), [(False, (0.5, 2)), (True, (2, 4))])
def test_scale_is_that_of_peft(rslora: bool, scales: tuple[float, float]) -> None:
    config = PeftConfig(16, 8, ["q_proj", "k_proj"], rank_pattern={"k_proj": 4}, use_rslora=rslora)
    assert tuple(config.scale(f"model.layers.0.self_attn.{name}_proj") for name in "qk") == scales


@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_in_a_fused_module_keep_their_scale(rslora: bool, tmp_path: Path) -> None:
    """Two of our adapters in one PEFT module have twice the rank, by which PEFT divides their product."""
    config = replace(folders.CONFIG, biases="none", pattern=("sliding",))
    phi3 = next(each for each in FAMILIES if each.model_type == "phi3")
    adapted = add_adapters(config, "attention/query attention/value attention/output")
    params = jax.device_put(adapted, toy.placement().replicated)
    write_adapter_folder(tmp_path / "adapter", params, phi3, config, dataclasses.replace(LORA, rslora=rslora))
    peft_config = read_peft_config(tmp_path / "adapter")
    modules = [f"model.layers.0.self_attn.{name}_proj" for name in ("qkv", "o")]
    assert [peft_config.rank(module) for module in modules] == [2 * RANK, RANK]
    expected = ALPHA / (math.sqrt(RANK) if rslora else RANK)
    assert [peft_config.scale(module) for module in modules] == pytest.approx([expected] * 2)


# --- Errors.


TENSOR_ERRORS: dict[str, tuple[Callable[[dict[str, np.ndarray]], object], str]] = {
    "missing": (lambda arrays: arrays.pop(QUERY), f"tensor '{QUERY}' is missing"),
    "extra": (
        lambda arrays: arrays.update(more=np.ones(1, np.float32)),
        "tensor 'more' belongs to no adapter of the model's matrices",
    ),
    "module that is not selected": (
        lambda arrays: arrays.update({QUERY.replace("q_proj", "k_proj"): arrays[QUERY]}),
        "model.layers.0.self_attn.k_proj has an adapter, but adapter_config.json does not select it",
    ),
    "magnitude without DoRA": (
        lambda arrays: arrays.update(
            {QUERY.replace("lora_A.weight", "lora_magnitude_vector"): np.ones(16, np.float32)}
        ),
        "lora_magnitude_vector' does not belong to an adapter as adapter_config.json describes it",
    ),
    "wrong shape": (
        lambda arrays: arrays.update({QUERY: arrays[QUERY][:1]}),
        "has shape [1, 32], but adapter_config.json and the model require [2, 32]",
    ),
    "not finite": (lambda arrays: arrays[QUERY].fill(math.nan), "q_proj has values that are not finite in float32"),
    "another base": (
        lambda arrays: arrays.update({"base_model.model.lm_head.base_layer.weight": np.ones((258, 32), np.float32)}),
        "the base weights of lm_head differ from those in",
    ),
}
CONFIG_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LOHA"}, "peft_type='LOHA': only 'LORA', 'TRAINABLE_TOKENS' is supported"),
    ({"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS'"),
    ({"bias": "all"}, "bias='all': only 'none' is supported"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa': only .* it changes the base: save with path_initial"),
    ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
    ({"modules_to_save": ["score"]}, "modules_to_save=\\['score'\\]: 'score' is no module of this decoder"),
    ({"modules_to_save": ["norm"]}, "tensor 'base_model.model.model.layers.0.input_layernorm.weight' is missing"),
    ({"modules_to_save": "lm_head"}, "modules_to_save='lm_head': must be a list of names"),
    ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication="),
    ({"trainable_token_indices": [1]}, "model.embed_tokens.token_adapter.trainable_tokens_delta' is missing"),
    ({"trainable_token_indices": [1, 1]}, "trainable_token_indices=.*: must be a list of different token ids, or a"),
    ({"trainable_token_indices": {"lm_head": [-1]}}, "trainable_token_indices=.*: must be a list of different"),
    ({"trainable_token_indices": {"norm": [1]}}, "'norm' is not an embedding or the head of this decoder"),
    ({"target_parameters": ["x"]}, "target_parameters="),
    ({"megatron_config": {"a": 1}}, "megatron_config="),
    ({"use_qalora": True}, "use_qalora=True"),
    ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens="),
    ({"lora_bias": True}, "lora_bias=True"),
    ({"of_a_later_version": 1}, "of_a_later_version=1: not supported"),
    ({"r": 0}, "r=0: must be a whole number of at least 1"),
    ({"r": None}, "r is missing"),
    ({"lora_alpha": -1}, "lora_alpha=-1: must be a number above 0"),
    ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern=.*: must be a map from patterns to whole numbers of at least 1"),
    (
        {"rank_pattern": {"(?i)q_proj": 1}},
        "rank_pattern=.*: must be a map from patterns to whole numbers of at least 1",
    ),
    ({"layers_to_transform": 0, "layers_pattern": "("}, "layers_pattern='\\(': must be a pattern or a list of them"),
    ({"alpha_pattern": {"(": 1}}, "alpha_pattern=.*: must be a map from patterns to numbers above 0"),
    ({"target_modules": None}, "target_modules is missing"),
    ({"target_modules": "*"}, "target_modules='\\*': must be a list of names or a pattern"),
    (
        {"target_modules": ["c_attn"]},
        "target_modules=\\['c_attn'\\], with layers_to_transform=None, selects no module of the model",
    ),
    ({"layers_to_transform": "0"}, "layers_to_transform='0': must be a whole number or a list of them"),
    ({"rank_pattern": {"0.self_attn.q_proj": 3}}, "has shape \\[2, 32\\], but .* require \\[3, 32\\]"),
    ({"use_dora": True}, "use_dora on lm_head: only matrices of blocks support it"),
]


@pytest.fixture
def folder_copy(folder: Path, tmp_path: Path) -> Path:
    (tmp_path / "copy").mkdir()
    for file in folder.iterdir():
        (tmp_path / "copy" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "copy"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.folder(tmp_path_factory.mktemp("base") / "folder")


@pytest.mark.parametrize("name", TENSOR_ERRORS)
def test_invalid_tensors_are_refused(name: str, base: Path, folder_copy: Path) -> None:
    change, message = TENSOR_ERRORS[name]
    rewrite_adapters(folder_copy, change)
    with pytest.raises(InputError) as error:
        load_pretrained(base, adapter=folder_copy)
    assert message in str(error.value)


@pytest.mark.parametrize(("settings", "message"), CONFIG_ERRORS, ids=[str(each) for each, _ in CONFIG_ERRORS])
def test_unsupported_adapters_are_refused(settings: dict[str, Any], message: str, folder_copy: Path) -> None:
    file = folder_copy / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(InputError, match=message):
        open_adapters(folder_copy)


def test_incomplete_folders_are_refused(folder_copy: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        open_adapters(folder_copy / "none")
    (folder_copy / adapter_folder.WEIGHTS).rename(folder_copy / adapter_folder.PICKLE)
    with pytest.raises(InputError, match=r"are pickles, .* python -c .*weights_only=True"):
        open_adapters(folder_copy)
    (folder_copy / adapter_folder.PICKLE).unlink()
    with pytest.raises(InputError, match="it has no adapter weights, adapter_model.safetensors"):
        open_adapters(folder_copy)
    (folder_copy / "adapter_config.json").unlink()
    with pytest.raises(InputError, match="it has no adapter_config.json"):
        open_adapters(folder_copy)


def test_adapters_of_a_tied_table_must_be_equal(tmp_path: Path) -> None:
    tied = replace(folders.CONFIG, tied_head=True)
    path = write_adapters(tmp_path / "adapter", add_adapters(tied, "embedding/table"), tied)
    open_adapters(path, tied)
    rewrite_adapters(path, lambda arrays: arrays["base_model.model.lm_head.lora_B.weight"].__imul__(2))
    with pytest.raises(InputError, match="model.embed_tokens and lm_head do not have the same adapter"):
        open_adapters(path, tied)


def test_adapters_that_peft_cannot_express_are_not_written(tmp_path: Path) -> None:
    """DoRA of only a part of a fused module is refused."""
    config = replace(folders.CONFIG, biases="none", pattern=("sliding",))
    phi3 = next(each for each in FAMILIES if each.model_type == "phi3")
    params = jax.device_put(add_adapters(config, "mlp/up", dora=True), toy.placement().replicated)
    with pytest.raises(
        InputError,
        match="DoRA of .*/mlp/up without .*/mlp/gate: both are in PEFT's module .*gate_up_proj; use `convert merge`",
    ):
        write_adapter_folder(tmp_path / "adapter", params, phi3, config, LORA)
    assert not (tmp_path / "adapter").exists()
