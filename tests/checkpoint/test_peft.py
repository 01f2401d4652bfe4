"""PEFT's folders: adapters into any placement, folded into what they adapt, and refused where they are not whole."""

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

from jaxopt_llm import load_pretrained, tree
from jaxopt_llm.checkpoint import huggingface, peft, peft_config, peft_writing, safetensors
from jaxopt_llm.checkpoint.peft_config import PeftConfig, endings
from jaxopt_llm.checkpoint.safetensors import Described
from jaxopt_llm.errors import InputError
from jaxopt_llm.execution.stages import rest_on_stages
from jaxopt_llm.model import leaves
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.decoder import Params, make_parts, param_specs

pytestmark = pytest.mark.core

RANK, ALPHA = 2, 3.0
PLACEMENTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "divided and split": {"zero_stage": 3, "fsdp": 2, "tensor": 2},
    "stages": {"pipeline": 2, "zero_stage": 3, "fsdp": 2},
}


def adapters(config: ModelConfig, targets: str, dora: bool = False) -> Params:
    """Random parameters under random adapters of the matrices that end so; rows that pad a table are zero."""
    random = np.random.default_rng(1)

    def wrap(path: str, spec: Any, values: np.ndarray) -> Any:
        if not (spec.contracting and path.endswith(tuple(targets.split()))):
            return values
        specs = leaves.lora_specs(spec, RANK, ALPHA / RANK, dora)
        made = jax.tree.map(lambda each: random.normal(size=each.shape).astype(np.float32), replace(specs, base=None))
        if "vocabulary" in spec.axes:
            made.lora_b[config.vocabulary_size :] = 0
        return replace(made, base=values)

    return tree.map_with_path(wrap, param_specs(config), folders.params(config))


def write(path: Path, params: Params, config: ModelConfig = folders.CONFIG) -> Path:
    family = huggingface.family_of(config)
    peft_writing.write(path, jax.device_put(params, toy.placement().replicated), family, config, ALPHA)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """query of all layers, down of the first segment's first block, and the head."""
    params = adapters(folders.CONFIG, "attention/query segment_0/block_0/mlp/down head/table")
    return write(tmp_path_factory.mktemp("adapter") / "folder", params)


def opened(path: Path, config: ModelConfig = folders.CONFIG) -> peft.Adapter:
    return peft.open_adapter(path, huggingface.family_of(config), config)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_leaf_comes_into_its_place(name: str, folder: Path) -> None:
    placement = toy.placement(**PLACEMENTS[name])
    adapter = opened(folder)
    assert adapter.lora == {
        "rank": RANK,
        "alpha": ALPHA,
        "targets": ("*/head/table", "*/query", "segment_0/block_0/mlp/down"),
        "rslora": False,
        "dora": False,
    }
    parts = make_parts(folders.CONFIG)
    expected = adapters(folders.CONFIG, "attention/query segment_0/block_0/mlp/down head/table")
    specs = adapter.adapted(parts.specs)
    if stages := PLACEMENTS[name].get("pipeline"):
        rested = adapter.adapted(rest_on_stages(parts, stages).specs)
        specs, expected = rested, toy.on_stages(rested, expected)
    assert jax.tree.structure(specs) == jax.tree.structure(expected)

    def check(path: str, spec: Any, values: np.ndarray) -> None:
        if leaves.is_adapter(path):
            sharding = placement.parameters(spec)
            leaf = adapter.read(path, spec, sharding)
            assert (leaf.sharding, leaf.dtype) == (sharding, spec.dtype)
            np.testing.assert_array_equal(leaf, values, err_msg=path)

    tree.map_with_path(check, specs, expected)


@pytest.mark.parametrize("base", ["float", "int8", "nf4"])
@pytest.mark.parametrize("dora", [False, True])
def test_what_is_folded_in_is_the_sum(base: str, dora: bool) -> None:
    """Of an output projection, which sums over two dimensions."""
    random = np.random.default_rng(0)
    spec = param_specs(replace(folders.CONFIG, width=64))["segment_0"]["block_0"]["attention"]["output"].layer()
    specs = leaves.lora_specs(spec, RANK, 1.5, dora)
    weight = jax.tree.map(lambda each: jnp.asarray(random.normal(size=each.shape), jnp.float32), specs)
    whole = np.asarray(weight.base)
    if base != "float":
        weight = replace(weight, base=leaves.quantise(weight.base, leaves.coded_specs(spec, base, double=False)))  # type: ignore[arg-type]
        whole = np.asarray(leaves.dequantise(weight.base))
        assert not np.array_equal(whole, specs.base)
    expected = whole + 1.5 * np.einsum("hkr,dr->hkd", weight.lora_a, weight.lora_b)
    if dora:
        expected *= weight.magnitude / np.linalg.norm(expected.reshape(-1, 64), axis=0)
    np.testing.assert_allclose(leaves.merged(weight, spec.contracting), expected, rtol=1e-5, atol=1e-5)


def test_codes_become_the_weights_that_they_stand_for(tmp_path: Path) -> None:
    """Of stacks; under an adapter and not."""
    specs = param_specs(folders.CONFIG)["segment_0"]["block_1"]["mlp"]
    params = adapters(folders.CONFIG, "segment_0/block_1/mlp/up")
    of_mlp = params["segment_0"]["block_1"]["mlp"]
    gate = leaves.quantise(jnp.asarray(of_mlp["gate"]), leaves.int8_specs(specs["gate"]))
    up = replace(
        of_mlp["up"], base=leaves.quantise(jnp.asarray(of_mlp["up"].base), leaves.nf4_specs(specs["up"], True))
    )
    of_mlp.update(gate=gate, up=up)
    huggingface.write(tmp_path / "whole", jax.device_put(params, toy.placement().replicated), folders.CONFIG)
    found = load_pretrained(tmp_path / "whole").params["segment_0"]["block_1"]["mlp"]
    np.testing.assert_array_equal(found["gate"], leaves.dequantise(gate))
    expected = leaves.dequantise(up.base) + ALPHA / RANK * np.einsum("ldr,lfr->ldf", up.lora_a, up.lora_b)
    np.testing.assert_allclose(found["up"], expected, rtol=1e-6, atol=1e-6)


def test_the_sum_is_rounded_once(tmp_path: Path) -> None:
    """What is folded into a 16-bit base is formed in 32 bits."""
    base = folders.folder(tmp_path / "base", dtype=jnp.bfloat16)
    here = load_pretrained(base, adapter=write(tmp_path / "adapter", adapters(folders.CONFIG, "mlp/up")))
    here.save_pretrained(tmp_path / "merged")
    found = load_pretrained(tmp_path / "merged").params["segment_0"]["block_0"]["mlp"]["up"]
    up = here.params["segment_0"]["block_0"]["mlp"]["up"]
    wide = jax.vmap(lambda each: leaves.merged(each, (0,)))(up)
    assert (found.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(found, wide.astype(jnp.bfloat16))


def test_endings_select_those_chosen_and_no_other() -> None:
    names = [f"layers.{layer}.{part}" for layer in range(12) for part in ("attn.q", "attn.o", "mlp.o", "norm")]
    chosen = {name for name in names if name.endswith("attn.o") or name in ("layers.1.attn.q", "layers.11.mlp.o")}
    found = endings(sorted(chosen), names)
    assert sorted(found) == ["1.attn.q", "11.mlp.o", "attn.o"]
    config = PeftConfig(r=1, lora_alpha=1, target_modules=found)
    assert {name for name in names if config.selects(name, in_block=True)} == chosen


@pytest.mark.parametrize(("rslora", "scales"), [(False, (0.5, 2)), (True, (2, 4))])
def test_a_products_scale_is_pefts(rslora: bool, scales: tuple[float, float]) -> None:
    config = PeftConfig(16, 8, ["q_proj", "k_proj"], rank_pattern={"k_proj": 4}, use_rslora=rslora)
    assert tuple(config.scale(f"model.layers.0.self_attn.{name}_proj") for name in "qk") == scales


@pytest.mark.parametrize("rslora", [False, True])
def test_what_shares_a_module_keeps_its_strength(rslora: bool, tmp_path: Path) -> None:
    """Two adapters in one of PEFT's have twice the rank, which divides their product."""
    config = replace(folders.CONFIG, biases="none", pattern=("sliding",))
    phi3 = next(each for each in huggingface.families.FAMILIES if each.model_type == "phi3")
    made = adapters(config, "attention/query attention/value attention/output")
    params = jax.device_put(made, toy.placement().replicated)
    peft_writing.write(tmp_path / "adapter", params, phi3, config, ALPHA, rslora)
    said = peft_config.read(tmp_path / "adapter")
    modules = [f"model.layers.0.self_attn.{name}_proj" for name in ("qkv", "o")]
    assert [said.rank(module) for module in modules] == [2 * RANK, RANK]
    expected = ALPHA / (math.sqrt(RANK) if rslora else RANK)
    assert [said.scale(module) for module in modules] == pytest.approx([expected] * 2)


# --- what is refused


def rewrite(path: Path, tensors: Callable[[dict[str, np.ndarray]], object]) -> None:
    file = path / peft.WEIGHTS
    arrays = {name: stored.array.copy() for name, stored in safetensors.open_file(file).items()}
    tensors(arrays)
    described = {name: Described(array.dtype, array.shape) for name, array in arrays.items()}
    safetensors.write_file(file, described, arrays.__getitem__)


QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
TENSORS: dict[str, tuple[Callable[[dict[str, np.ndarray]], object], str]] = {
    "missing": (lambda of: of.pop(QUERY), f"tensor '{QUERY}' is missing"),
    "extra": (lambda of: of.update(more=np.ones(1, np.float32)), "tensor 'more' is of no adapter of a matrix"),
    "of a module that is not selected": (
        lambda of: of.update({QUERY.replace("q_proj", "k_proj"): of[QUERY]}),
        "model.layers.0.self_attn.k_proj has an adapter there, and none by adapter_config.json",
    ),
    "magnitude without DoRA": (
        lambda of: of.update({QUERY.replace("lora_A.weight", "lora_magnitude_vector"): np.ones(16, np.float32)}),
        "lora_magnitude_vector' is none that adapter_config.json has there",
    ),
    "misshapen": (lambda of: of.update({QUERY: of[QUERY][:1]}), "is [1, 32], and by adapter_config.json and the model"),
    "not finite": (lambda of: of[QUERY].fill(math.nan), "q_proj: it has values that are not finite in float32"),
    "of another base": (
        lambda of: of.update({"base_model.model.lm_head.base_layer.weight": np.ones((258, 32), np.float32)}),
        "the weights of lm_head that came along are not those in",
    ),
}
SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LOHA"}, "peft_type='LOHA': only 'LORA' is known here"),
    ({"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS'"),
    ({"bias": "all"}, "bias='all': only 'none' is known here"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa': only .* it changes the base: save with path_initial"),
    ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save=\\['lm_head'\\]: not known here"),
    ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication="),
    ({"trainable_token_indices": [1]}, "trainable_token_indices="),
    ({"target_parameters": ["x"]}, "target_parameters="),
    ({"megatron_config": {"a": 1}}, "megatron_config="),
    ({"use_qalora": True}, "use_qalora=True"),
    ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens="),
    ({"lora_bias": True}, "lora_bias=True"),
    ({"of_a_later_version": 1}, "of_a_later_version=1: not known here"),
    ({"r": 0}, "r=0: must be a whole number of at least 1"),
    ({"r": None}, "r is not there"),
    ({"lora_alpha": -1}, "lora_alpha=-1: must be a number above 0"),
    ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern=.*: must be whole numbers of at least 1 by patterns"),
    ({"rank_pattern": {"(?i)q_proj": 1}}, "rank_pattern=.*: must be whole numbers of at least 1 by patterns"),
    ({"layers_to_transform": 0, "layers_pattern": "("}, "layers_pattern='\\(': must be patterns"),
    ({"alpha_pattern": {"(": 1}}, "alpha_pattern=.*: must be numbers above 0 by patterns"),
    ({"target_modules": None}, "target_modules is not there"),
    ({"target_modules": "*"}, "target_modules='\\*': must be names or a pattern"),
    (
        {"target_modules": ["c_attn"]},
        "target_modules=\\['c_attn'\\], with layers_to_transform=None, selects nothing of the model",
    ),
    ({"layers_to_transform": "0"}, "layers_to_transform='0': must be whole numbers"),
    ({"rank_pattern": {"0.self_attn.q_proj": 3}}, "is \\[2, 32\\], and by .* it must be \\[3, 32\\]"),
    ({"use_dora": True}, "use_dora on lm_head: here it is for matrices of the blocks"),
]


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    (tmp_path / "copy").mkdir()
    for file in folder.iterdir():
        (tmp_path / "copy" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "copy"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.folder(tmp_path_factory.mktemp("base") / "folder")


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit_are_named(name: str, base: Path, copy: Path) -> None:
    change, said = TENSORS[name]
    rewrite(copy, change)
    with pytest.raises(InputError) as error:
        load_pretrained(base, adapter=copy)
    assert said in str(error.value)


@pytest.mark.parametrize(("settings", "said"), SETTINGS, ids=[str(each) for each, _ in SETTINGS])
def test_what_ours_cannot_be_is_refused(settings: dict[str, Any], said: str, copy: Path) -> None:
    file = copy / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(InputError, match=said):
        opened(copy)


def test_a_folder_that_is_not_one(copy: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        opened(copy / "none")
    (copy / peft.WEIGHTS).rename(copy / peft.PICKLE)
    with pytest.raises(InputError, match=r"are a pickle, .* python -c .*weights_only=True"):
        opened(copy)
    (copy / peft.PICKLE).unlink()
    with pytest.raises(InputError, match="adapter_model.safetensors is not there"):
        opened(copy)
    (copy / "adapter_config.json").unlink()
    with pytest.raises(InputError, match="it has no adapter_config.json"):
        opened(copy)


def test_a_tied_table_has_one_adapter(tmp_path: Path) -> None:
    tied = replace(folders.CONFIG, tied_head=True)
    path = write(tmp_path / "adapter", adapters(tied, "embedding/table"), tied)
    opened(path, tied)
    rewrite(path, lambda of: of["base_model.model.lm_head.lora_B.weight"].__imul__(2))
    with pytest.raises(InputError, match="model.embed_tokens and lm_head do not have the same adapter"):
        opened(path, tied)


def test_what_peft_has_no_words_for_is_not_written(tmp_path: Path) -> None:
    """DoRA of a part of what a fused module holds, whose other lengths are the base's."""
    config = replace(folders.CONFIG, biases="none", pattern=("sliding",))
    phi3 = next(each for each in huggingface.families.FAMILIES if each.model_type == "phi3")
    params = jax.device_put(adapters(config, "mlp/up", dora=True), toy.placement().replicated)
    with pytest.raises(InputError, match="DoRA of .*/mlp/up and not of .*/mlp/gate: PEFT has .*gate_up_proj"):
        peft_writing.write(tmp_path / "adapter", params, phi3, config, ALPHA)
    assert not (tmp_path / "adapter").exists()
