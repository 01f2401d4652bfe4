"""Folders of MoE models, with one tensor per expert, are read into our stacks and written back."""

import functools
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
from adapters import ALPHA, QUERY, RANK, add_adapters, open_adapters, rewrite_adapters, write_adapters
from commands import command
from test_model_folder import resident_file_bytes, rewrite

from jaxopt_llm import load_pretrained
from jaxopt_llm.checkpoint.huggingface import model_folder, safetensors
from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface.family import canonicalise
from jaxopt_llm.checkpoint.huggingface.model_folder import write_model_folder
from jaxopt_llm.checkpoint.pretrained import resolve_pretrained
from jaxopt_llm.config import Config, ModelConfig, MoEConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.execution.stage_layout import stack_by_stage
from jaxopt_llm.kernels.grouped_matmul import IMPLEMENTATIONS, XlaProducts
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.parallel.zero import parameter_sharding

pytestmark = pytest.mark.core

EXPERTS = 4
BASE = replace_fields(
    folders.CONFIG, {"pattern": ("global",), "biases": "none", "moe.experts": EXPERTS, "moe.expert_width": 6}
)
MIXTRAL = BASE
QWEN = replace_fields(BASE, {"qk_norm": "head", "moe.expert_every": 2, "moe.router_renormalises": False})
OLMOE = replace(BASE, qk_norm="projection", kv_heads=4, width=16)
LATENT: dict[str, Any] = {
    "kv_heads": 4,
    "head_dim": 10,
    "mla.kv_rank": 8,
    "mla.rotary_head_dim": 6,
    "mla.value_head_dim": 12,
    "moe.dense_layers": 1,
    "moe.shared_expert_width": 12,
}
DEEPSEEK2 = replace_fields(BASE, {**LATENT, "moe.router_renormalises": False, "moe.router_groups": 2})
DEEPSEEK3 = replace_fields(
    BASE, {**LATENT, "mla.query_rank": 16, "moe.router": "sigmoid", "moe.router_bias": True, "moe.router_scale": 2.5}
)
CONFIGS = {
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN,
    "olmoe": OLMOE,
    "deepseek_v2": DEEPSEEK2,
    "deepseek_v3": DEEPSEEK3,
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "experts, divided and split": {"zero_stage": 3, "expert": 2, "fsdp": 2, "tensor": 2},
    "an expert on each": {"zero_stage": 3, "expert": 4, "data": 2},
    "stages": {"pipeline": 2, "zero_stage": 3, "expert": 2, "fsdp": 2},
}


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("family", CONFIGS)
def test_experts_are_read_into_any_mesh(family: str, name: str, tmp_path: Path) -> None:
    config, placement = CONFIGS[family], toy.placement(**PLACEMENTS[name])
    parts, expected = Decoder(config), folders.params(config)
    if stages := PLACEMENTS[name].get("pipeline"):
        parts = stack_by_stage(parts, stages)
        expected = toy.on_stages(parts.specs, expected)
    folder = huggingface.open_model_folder(folders.folder(tmp_path / "folder", config))
    assert folder.family.model_type == family
    assert canonicalise(folder.config) == canonicalise(config)

    def check(path: str, spec: Any, values: np.ndarray) -> None:
        leaf = folder.read(path, spec, parameter_sharding(spec, placement))
        np.testing.assert_array_equal(leaf, values, err_msg=path)

    tree.map_with_path(check, parts.specs, expected)


def test_tensors_have_their_published_names_and_shapes(tmp_path: Path) -> None:
    """Check the tensors of the experts of one layer; matrices are [out, in]."""
    expected = {"gate.weight": (EXPERTS, 32)}
    for expert in range(EXPERTS):
        shapes = {"w1": (6, 32), "w3": (6, 32), "w2": (32, 6)}
        expected |= {f"experts.{expert}.{name}.weight": shape for name, shape in shapes.items()}
    prefix = "model.layers.3.block_sparse_moe."
    stored = safetensors.open_folder(folders.folder(tmp_path / "folder", MIXTRAL))
    assert {n.removeprefix(prefix): each.array.shape for n, each in stored.items() if n.startswith(prefix)} == expected


def test_host_holds_one_tensor_in_addition_to_the_shards(tmp_path: Path) -> None:
    """Check 16-bit tensors that are read into float32."""
    config = replace_fields(MIXTRAL, {"layers": 2, "moe.experts": 16, "width": 256, "moe.expert_width": 1024})
    folder = huggingface.open_model_folder(folders.folder(tmp_path / "folder", config, jnp.bfloat16, most=10**9))
    placement, specs = toy.placement(expert=4), Decoder(config).specs["segment_0"]["block_0"]["mlp"]
    path = "segment_0/block_0/mlp/"
    folder.read(
        path + "down", specs["down"], parameter_sharding(specs["down"], placement)
    )  # the first read also imports modules
    mapped = resident_file_bytes()
    tracemalloc.start()
    leaf = folder.read(path + "up", specs["up"], parameter_sharding(specs["up"], placement))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    one = 4 * 256 * 1024
    assert leaf.nbytes == 32 * one
    assert 32 * one <= peak < 33.5 * one
    assert resident_file_bytes() - mapped < 2 * one


@pytest.mark.parametrize("family", CONFIGS)
def test_a_round_trip_is_equal_to_the_bit(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of a layer are also fetched from the devices together, once for each leaf."""
    fetched = []

    def record_and_fetch(*arguments: Any) -> np.ndarray:
        fetched.append(arguments)
        return fetch_layer(*arguments)

    fetch_layer = model_folder.fetch_layer
    config = CONFIGS[family]
    source = folders.folder(tmp_path / "one", config, jnp.bfloat16)
    monkeypatch.setattr(model_folder, "fetch_layer", record_and_fetch)
    load_pretrained(source).save_pretrained(tmp_path / "two")
    specs = jax.tree.leaves(Decoder(config).specs)
    assert len(fetched) == sum(1 if spec.layers is None else len(spec.layers) for spec in specs)
    assert {huggingface.read_settings(tmp_path / name)["torch_dtype"] for name in ("one", "two")} == {"bfloat16"}
    one, two = (safetensors.open_folder(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].array.dtype == two[name].array.dtype == jnp.bfloat16
        assert one[name].array.tobytes() == two[name].array.tobytes()


def test_router_bias_stays_in_float32(tmp_path: Path) -> None:
    """All other tensors of the folder have 16 bits, and its config.json says so."""
    params = jax.device_put(folders.params(DEEPSEEK3), toy.placement().replicated)
    write_model_folder(tmp_path / "folder", params, DEEPSEEK3, dtype="bfloat16")
    stored = safetensors.open_folder(tmp_path / "folder")
    wide = {name: each.array for name, each in stored.items() if each.array.dtype != jnp.bfloat16}
    name = "model.layers.{}.mlp.gate.e_score_correction_bias"
    assert {key: each.dtype for key, each in wide.items()} == {
        name.format(layer): jnp.float32 for layer in range(1, DEEPSEEK3.layers)
    }
    expected = params["segment_1"]["block_0"]["mlp"]["router_bias"]
    np.testing.assert_array_equal([wide[name.format(layer)] for layer in range(1, DEEPSEEK3.layers)], expected)
    assert huggingface.read_settings(tmp_path / "folder")["torch_dtype"] == "bfloat16"


def test_router_training_fields_are_set_by_the_run(tmp_path: Path) -> None:
    """All other fields of a model come from the folder."""
    folder = folders.folder(tmp_path / "folder", replace_fields(MIXTRAL, {"moe.balance_loss": 0.02}))
    assert huggingface.read_config(folder)[1].moe.balance_loss == 0.02
    model = ModelConfig(
        pretrained=str(folder),
        moe=MoEConfig(balance_loss=0.5, router_z_loss=0.1, router_bias_rate=0.2, capacity_factor=2.0),
    )
    found = resolve_pretrained(Config(model=model)).model
    training_fields = (
        found.moe.balance_loss,
        found.moe.router_z_loss,
        found.moe.router_bias_rate,
        found.moe.capacity_factor,
    )
    assert training_fields == (0.5, 0.1, 0.2, 2.0)
    assert (found.moe.experts, found.width) == (EXPERTS, 32)
    with pytest.raises(InputError, match="leave out model.moe.experts_per_token=3"):
        resolve_pretrained(Config(model=replace_fields(model, {"moe.experts_per_token": 3})))


def test_loaded_folder_uses_the_expert_kernel_chosen_for_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    multiplied: list[tuple[int, ...]] = []

    class Kernel:
        def forward(self, x: jax.Array, w: jax.Array, *of: Any, **settings: Any) -> jax.Array:
            multiplied.append(w.shape)
            return XlaProducts.forward(x, w, *of, **settings)

    monkeypatch.setattr(
        "jaxopt_llm.inference.models.choose_grouped_matmul", lambda device, *of: asked.append(of) or "pallas"
    )
    monkeypatch.setitem(IMPLEMENTATIONS, "pallas", Kernel())
    load_pretrained(folders.folder(tmp_path / "folder", MIXTRAL)).logits([[1, 2, 3]])
    assert asked == [("auto", "float32")]
    assert set(multiplied) == {(EXPERTS, 32, 6), (EXPERTS, 6, 32)}


def test_digest_samples_fewer_rows_if_there_are_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders.folder(tmp_path / "folder", MIXTRAL)

    def digest(row: int) -> str:
        rewrite(folder, lambda arrays: arrays[ONE].__setitem__((row, 0), arrays[ONE][row, 0] + 1))
        return huggingface.open_model_folder(folder).sha256

    assert digest(3) != digest(3)
    monkeypatch.setattr(huggingface, "MAX_DIGEST_BYTES", 100 * len(safetensors.open_folder(folder)))
    assert digest(3) == digest(3) != digest(0)  # every seventh row of 768 bytes


# --- Tensors as transformers holds them in memory.


def stack_experts(family: str, arrays: dict[str, np.ndarray]) -> None:
    """Put all experts of a layer in one tensor, and concatenate their gate and up projections."""
    for name in list(arrays):
        if ".experts." not in name:
            arrays[name.replace("block_sparse_moe", "mlp")] = arrays.pop(name)
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    mixture = "block_sparse_moe" if family == "mixtral" else "mlp"
    for layer in range(CONFIGS[family].layers):
        if not CONFIGS[family].moe.has_experts(layer):
            continue
        experts = f"model.layers.{layer}.{mixture}.experts."
        both = [np.concatenate([arrays.pop(f"{experts}{e}.{n}.weight") for n in (gate, up)]) for e in range(EXPERTS)]
        arrays[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.stack(both)
        downs = [arrays.pop(f"{experts}{e}.{down}.weight") for e in range(EXPERTS)]
        arrays[f"model.layers.{layer}.mlp.experts.down_proj"] = np.stack(downs)


@pytest.mark.parametrize("family", CONFIGS)
def test_in_memory_tensors_are_read(family: str, tmp_path: Path) -> None:
    folder = folders.folder(tmp_path / "folder", CONFIGS[family])
    rewrite(folder, functools.partial(stack_experts, family))
    assert not any(".experts.0." in name for name in safetensors.open_folder(folder))
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(folder).params, folders.params(CONFIGS[family]))


# --- Errors.

ONE = "model.layers.3.block_sparse_moe.experts.2.w3.weight"
JOINED = "model.layers.3.mlp.experts.gate_up_proj"


def remove_an_expert(arrays: dict[str, np.ndarray]) -> None:
    stack_experts("mixtral", arrays)
    arrays[JOINED] = arrays[JOINED][:3]


def duplicate(arrays: dict[str, np.ndarray]) -> None:
    one = arrays[ONE]
    stack_experts("mixtral", arrays)
    arrays[ONE] = one


def add_a_layer(arrays: dict[str, np.ndarray]) -> None:
    stack_experts("mixtral", arrays)
    arrays[JOINED.replace(".3.", ".5.")] = arrays[JOINED]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.pop(ONE), f"tensor '{ONE}' is missing"),
        (
            lambda arrays: arrays.update({ONE.replace(".2.", ".4."): arrays[ONE]}),
            "experts.4.w3.weight' does not belong to a",
        ),
        (
            lambda arrays: arrays.update({ONE: arrays[ONE][:5]}),
            rf"tensor '{ONE}' has shape \[5, 32\], .* requires \[6, 32\]",
        ),
        (lambda arrays: arrays[ONE].__setitem__((1, 2), np.nan), f"tensor '{ONE}' has values that are not finite"),
        (remove_an_expert, rf"tensor '{JOINED}' has shape \[3, 12, 32\], but config.json requires \[4, 12, 32\]"),
        (duplicate, f"tensor '{ONE}' appears twice, once within '{JOINED}'"),
        (add_a_layer, "tensor 'model.layers.5.mlp.experts.gate_up_proj' does not belong to a MixtralForCausalLM"),
    ],
)
def test_invalid_tensors_are_refused(change: Callable[..., Any], message: str, tmp_path: Path) -> None:
    folder = folders.folder(tmp_path / "folder", MIXTRAL)
    rewrite(folder, change)
    with pytest.raises(InputError, match=message):
        load_pretrained(folder)


def test_mtp_layer_is_ignored(tmp_path: Path) -> None:
    """One MTP layer after the last layer is ignored; a second one and an ordinary layer are errors."""
    folder = folders.folder(tmp_path / "folder", DEEPSEEK3)

    def add_layer(layer: int, arrays: dict[str, np.ndarray]) -> None:
        arrays[f"model.layers.{layer}.eh_proj.weight"] = np.ones((32, 64), np.float32)
        arrays[f"model.layers.{layer}.self_attn.kv_a_layernorm.weight"] = np.ones(8, np.float32)

    rewrite(folder, functools.partial(add_layer, 5))
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(folder).params, folders.params(DEEPSEEK3))
    rewrite(folder, functools.partial(add_layer, 6))
    with pytest.raises(
        InputError, match="tensor 'model.layers.6.eh_proj.weight' does not belong to a DeepseekV3ForCausalLM"
    ):
        load_pretrained(folder)
    rewrite(folder, lambda arrays: [arrays.pop(f"model.layers.{layer}.eh_proj.weight") for layer in (5, 6)])
    with pytest.raises(
        InputError, match="tensor 'model.layers.5.self_attn.kv_a_layernorm.weight' does not belong to a"
    ):
        load_pretrained(folder)


def test_experts_of_a_layer_without_experts_are_refused(tmp_path: Path) -> None:
    folder = folders.folder(tmp_path / "folder", QWEN)
    name = "model.layers.2.mlp.experts.down_proj"
    rewrite(folder, lambda arrays: arrays.update({name: np.ones((EXPERTS, 32, 6), np.float32)}))
    with pytest.raises(InputError, match=f"tensor '{name}' does not belong to a Qwen3MoeForCausalLM"):
        load_pretrained(folder)


def test_commands_refuse_a_folder_without_an_expert(tmp_path: Path) -> None:
    folder = folders.folder(tmp_path / "folder", MIXTRAL)
    rewrite(folder, lambda arrays: arrays.pop(ONE))
    for arguments in (
        ("convert", "import", "--from", folder, "--to", tmp_path / "run"),
        ("generate", "--checkpoint", folder, "--prompt", "a"),
    ):
        found = command(*arguments)
        assert (found.returncode, found.stdout) == (2, "")
        (line,) = found.stderr.splitlines()
        assert f"{folder}: tensor '{ONE}' is missing" in line


# --- Adapters.


def test_adapters_of_attention_are_written_and_read(tmp_path: Path) -> None:
    """Check all layers, also those without experts, whose MLPs PEFT would take for experts."""
    path = write_adapters(tmp_path / "adapter", add_adapters(QWEN, "attention/query"), QWEN)
    found = open_adapters(path, QWEN)
    blocks = ("segment_0/block_0", "segment_0/block_1", "segment_1/block_0")
    assert {weight for weight, _ in found.parts} == {f"{block}/attention/query" for block in blocks}
    with pytest.raises(
        InputError, match="adapters of segment_1/block_0/mlp/down: PEFT has no modules for experts, nor"
    ):
        write_adapters(tmp_path / "other", add_adapters(QWEN, "attention/query segment_1/block_0/mlp/down"), QWEN)


def test_adapters_of_experts_are_merged_and_not_written(tmp_path: Path) -> None:
    params = add_adapters(MIXTRAL, "attention/query mlp/down")
    with pytest.raises(InputError, match="adapters of segment_0/block_0/mlp/down: PEFT has no modules for experts"):
        write_adapters(tmp_path / "adapter", params, MIXTRAL)
    assert not (tmp_path / "adapter").exists()

    write_model_folder(tmp_path / "whole", jax.device_put(params, toy.placement().replicated), MIXTRAL)
    found = load_pretrained(tmp_path / "whole").params["segment_0"]["block_0"]["mlp"]["down"]
    down = params["segment_0"]["block_0"]["mlp"]["down"]
    expected = down.base + ALPHA / RANK * np.einsum("lefr,ledr->lefd", down.lora_a, down.lora_b)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("module", ["gate", "experts.2.w3"])
def test_adapters_of_experts_are_not_read(module: str, tmp_path: Path) -> None:
    """Older versions of transformers have modules for them."""
    path = write_adapters(tmp_path / "adapter", add_adapters(MIXTRAL, "attention/query"), MIXTRAL)
    name = QUERY.replace("self_attn.q_proj", f"block_sparse_moe.{module}")
    rewrite_adapters(path, lambda arrays: arrays.update({name: arrays[QUERY]}))
    with pytest.raises(
        InputError,
        match=f"tensor '{name}': adapters of MLPs of a model with experts are not supported",
    ):
        open_adapters(path, MIXTRAL)
