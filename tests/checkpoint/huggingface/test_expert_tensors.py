"""Folders of MoE models, with one tensor per expert, are read into our stacks and written back."""

import functools
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
from adapters import ALPHA, QUERY, RANK, add_adapters, open_adapters, rewrite_adapters, write_adapters
from commands import command
from test_model_folder import resident_file_bytes, rewrite

from jaxopt_llm import convert, load_pretrained
from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface import safetensors
from jaxopt_llm.checkpoint.huggingface.family import canonicalise
from jaxopt_llm.checkpoint.huggingface.model_folder import (
    LoadedLayers,
    choose_family,
    collect_leaves,
    write_model_folder,
)
from jaxopt_llm.checkpoint.peft.adapter_writer import WholeParameters, write_adapter_folder
from jaxopt_llm.checkpoint.pretrained import resolve_pretrained
from jaxopt_llm.config import Config, LoraConfig, ModelConfig, MoEConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.execution.stage_layout import stack_by_stage
from jaxopt_llm.kernels.grouped_matmul import IMPLEMENTATIONS, XlaProducts
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.model.linear import leaves
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
GPT_OSS = replace_fields(
    BASE, {"biases": "all", "mlp": "clamped_swiglu", "attention_sinks": True, "pattern": ("sliding", "global")}
)
CONFIGS = {
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN,
    "olmoe": OLMOE,
    "deepseek_v2": DEEPSEEK2,
    "deepseek_v3": DEEPSEEK3,
    "gpt_oss": GPT_OSS,
}
# Their tensors hold all experts of a layer: as [out, in], and as [in, out] beside dense layers.
WHOLE = {
    "granitemoeshared": replace_fields(BASE, {"moe.shared_expert_width": 10}),
    "llama4_text": replace_fields(
        BASE,
        {
            "pattern": ("chunked", "global_nope"),
            "qk_norm": "rotated_unit",
            "rope.interleaved": True,
            "moe.expert_every": 2,
            "moe.experts_per_token": 1,
            "moe.shared_expert_width": 6,
            "moe.router": "sigmoid",
            "moe.router_renormalises": False,
            "moe.router_weighs": "inputs",
        },
    ),
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "experts, divided and split": {"zero_stage": 3, "expert": 2, "fsdp": 2, "tensor": 2},
    "an expert on each": {"zero_stage": 3, "expert": 4, "data": 2},
    "stages": {"pipeline": 2, "zero_stage": 3, "expert": 2, "fsdp": 2},
}


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("family", [*CONFIGS, *WHOLE])
def test_experts_are_read_into_any_mesh(family: str, name: str, tmp_path: Path) -> None:
    config, placement = (CONFIGS | WHOLE)[family], toy.placement(**PLACEMENTS[name])
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


def test_experts_that_one_tensor_holds_are_in_first_and_their_gate_and_up_alternate(tmp_path: Path) -> None:
    stored = safetensors.open_folder(folders.folder(tmp_path / "folder", GPT_OSS))
    prefix = "model.layers.1.mlp.experts."
    shapes = {
        "gate_up_proj": (4, 32, 12),
        "gate_up_proj_bias": (4, 12),
        "down_proj": (4, 6, 32),
        "down_proj_bias": (4, 32),
    }
    assert {n.removeprefix(prefix): each.array.shape for n, each in stored.items() if n.startswith(prefix)} == shapes
    mlp = folders.params(GPT_OSS)["segment_0"]["block_1"]["mlp"]
    fused = stored[f"{prefix}gate_up_proj"].read()
    np.testing.assert_array_equal(fused[..., 0::2], mlp["gate"][0])
    np.testing.assert_array_equal(fused[..., 1::2], mlp["up"][0])


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


def test_tensors_of_all_experts_have_their_published_shapes(tmp_path: Path) -> None:
    granite = safetensors.open_folder(folders.folder(tmp_path / "granite", WHOLE["granitemoeshared"]))
    llama = safetensors.open_folder(folders.folder(tmp_path / "llama", WHOLE["llama4_text"]))
    prefix = "model.layers.3."
    shapes = {
        f"{prefix}block_sparse_moe.input_linear.weight": (EXPERTS, 12, 32),
        f"{prefix}block_sparse_moe.output_linear.weight": (EXPERTS, 32, 6),
        f"{prefix}block_sparse_moe.router.layer.weight": (EXPERTS, 32),
        f"{prefix}shared_mlp.input_linear.weight": (20, 32),
        f"{prefix}feed_forward.experts.gate_up_proj": (EXPERTS, 32, 12),
        f"{prefix}feed_forward.experts.down_proj": (EXPERTS, 6, 32),
        f"{prefix}feed_forward.router.weight": (EXPERTS, 32),
        "model.layers.2.feed_forward.up_proj.weight": (BASE.mlp_width, 32),
    }
    stored = granite | llama
    assert {name: stored[name].array.shape for name in shapes} == shapes


@pytest.mark.parametrize("family", [*CONFIGS, *WHOLE])
def test_a_round_trip_is_equal_to_the_bit(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of a layer are also fetched from the devices together, once for each leaf."""
    fetched = []

    def record_and_fetch(*arguments: Any) -> np.ndarray:
        fetched.append(arguments)
        return fetch_layer(*arguments)

    fetch_layer = leaves.fetch_layer
    config = (CONFIGS | WHOLE)[family]
    source = folders.folder(tmp_path / "one", config, jnp.bfloat16)
    monkeypatch.setattr(leaves, "fetch_layer", record_and_fetch)
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


@pytest.mark.parametrize("family", [name for name in CONFIGS if name != "gpt_oss"])
def test_in_memory_tensors_are_read(family: str, tmp_path: Path) -> None:
    folder = folders.folder(tmp_path / "folder", CONFIGS[family])
    rewrite(folder, functools.partial(stack_experts, family))
    assert not any(".experts.0." in name for name in safetensors.open_folder(folder))
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(folder).params, folders.params(CONFIGS[family]))


# --- The text of Qwen3-VL-MoE, whose folders have three forms.

PUBLISHED_FORM, SAVED_FORM, SINGLE_FORM = "published: in first", "saved by transformers 5: out first", "single experts"
FORMS = {
    PUBLISHED_FORM: lambda name: True,
    SAVED_FORM: lambda name: False,
    SINGLE_FORM: None,
    "both orders": lambda name: "down_proj" in name,
}


def give_form(form: str, arrays: dict[str, np.ndarray]) -> None:
    """Give the tensors of a folder of QWEN the form and the names of one of Qwen3-VL-MoE, and add a vision tower."""
    is_turned = FORMS[form]
    if is_turned:
        stack_experts("qwen3_moe", arrays)
    for name in list(arrays):
        array = arrays.pop(name)
        if is_turned and ".experts." in name and is_turned(name):
            array = np.ascontiguousarray(array.swapaxes(1, 2))
        arrays[name.replace("model.", "model.language_model.", 1)] = array
    arrays["model.visual.patch_embed.proj.weight"] = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)


def make_vl_moe(folder: Path, form: str, width: int = 6) -> ModelConfig:
    """Write a folder of Qwen3-VL-MoE, and return the model of its text. width: of the experts."""
    config = replace_fields(QWEN, {"moe.expert_width": width, "moe.router_renormalises": True})
    folders.folder(folder, config)
    rewrite(folder, functools.partial(give_form, form))
    text = json.loads((folder / "config.json").read_text())
    text |= {"model_type": "qwen3_vl_moe_text", "architectures": None}
    settings = {"model_type": "qwen3_vl_moe", "architectures": ["Qwen3VLMoeForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(settings | {"text_config": text}))
    return config


@pytest.mark.parametrize("form", [PUBLISHED_FORM, SAVED_FORM, SINGLE_FORM])
@pytest.mark.parametrize("width", [6, 16, 32], ids=["no square", "gate and up square", "down square"])
def test_forms_of_a_family_are_read_and_their_order_is_written(width: int, form: str, tmp_path: Path) -> None:
    """Single experts, which no class in transformers loads, are written as published."""
    config = make_vl_moe(tmp_path / "folder", form, width)
    found = load_pretrained(tmp_path / "folder")
    jax.tree.map(np.testing.assert_array_equal, found.params, folders.params(config))
    found.save_pretrained(tmp_path / "back")
    make_vl_moe(tmp_path / "expected", PUBLISHED_FORM if form == SINGLE_FORM else form, width)
    expected, back = (safetensors.open_folder(tmp_path / folder) for folder in ("expected", "back"))
    assert expected.keys() == back.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(back[name].read(), tensor.read(), err_msg=name)
    settings = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (settings["model_type"], settings["text_config"]["model_type"]) == ("qwen3_vl_moe", "qwen3_vl_moe_text")


def test_both_orders_in_one_folder_are_refused(tmp_path: Path) -> None:
    make_vl_moe(tmp_path / "folder", "both orders")
    with pytest.raises(InputError, match=r"down_proj' has shape \[4, 6, 32\], .* requires \[4, 32, 6\]"):
        load_pretrained(tmp_path / "folder")


def test_a_new_folder_of_such_a_model_is_one_of_qwen3_moe(tmp_path: Path) -> None:
    """Which has a class of text alone."""
    config = make_vl_moe(tmp_path / "folder", PUBLISHED_FORM)
    assert choose_family(config, tmp_path / "folder").model_type == "qwen3_vl_moe_text"
    assert choose_family(config).model_type == "qwen3_moe"


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


def add_mtp_layer(layer: int, arrays: dict[str, np.ndarray]) -> None:
    arrays[f"model.layers.{layer}.eh_proj.weight"] = np.linspace(0, 1, 32 * 64).reshape(32, 64).astype(jnp.bfloat16)
    arrays[f"model.layers.{layer}.self_attn.kv_a_layernorm.weight"] = np.ones(8, np.float32)


def change_config(folder: Path, **values: Any) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | values))


def test_mtp_layer_is_not_read(tmp_path: Path) -> None:
    """As many MTP layers after the last layer as config.json counts; another one and an ordinary layer are errors."""
    folder = folders.folder(tmp_path / "folder", DEEPSEEK3)
    rewrite(folder, functools.partial(add_mtp_layer, 5))
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(folder).params, folders.params(DEEPSEEK3))
    rewrite(folder, functools.partial(add_mtp_layer, 6))
    with pytest.raises(
        InputError, match="tensor 'model.layers.6.eh_proj.weight' does not belong to a DeepseekV3ForCausalLM"
    ):
        load_pretrained(folder)
    change_config(folder, num_nextn_predict_layers=2)
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(folder).params, folders.params(DEEPSEEK3))
    rewrite(folder, lambda arrays: [arrays.pop(f"model.layers.{layer}.eh_proj.weight") for layer in (5, 6)])
    with pytest.raises(
        InputError, match="tensor 'model.layers.5.self_attn.kv_a_layernorm.weight' does not belong to a"
    ):
        load_pretrained(folder)


def test_mtp_layers_are_kept_in_a_merged_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To the bit, in their own dtypes, also if the rest is rounded; and config.json counts them."""
    folder, merged = folders.folder(tmp_path / "folder", DEEPSEEK3), tmp_path / "merged"
    for layer in (5, 6):
        rewrite(folder, functools.partial(add_mtp_layer, layer))
    change_config(folder, num_nextn_predict_layers=2)
    adapter = write_adapters(tmp_path / "adapter", add_adapters(DEEPSEEK3, "attention/output"), DEEPSEEK3)
    convert.merge_folders(folder, adapter, merged, "bfloat16", 10**9)
    line = (
        "The 4 tensors of multi-token prediction (model.layers.5.eh_proj.weight, ...) are those of the base: they were"
    )
    assert line in capsys.readouterr().out and line in (merged / "README.md").read_text()
    before, after = safetensors.open_folder(folder), safetensors.open_folder(merged)
    assert before.keys() == after.keys()
    for name in before:
        if "layers.5." in name or "layers.6." in name:
            assert after[name].read().tobytes() == before[name].read().tobytes()
            assert after[name].dtype == before[name].dtype
    assert json.loads((merged / "config.json").read_text())["num_nextn_predict_layers"] == 2
    load_pretrained(merged).save_pretrained(tmp_path / "again")
    assert safetensors.open_folder(tmp_path / "again").keys() == before.keys()


@pytest.mark.parametrize("counts", [{"num_nextn_predict_layers": 1}, {}], ids=["counted", "not counted"])
def test_mtp_layers_with_a_name_of_their_own_are_kept(
    counts: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ERNIE's are no layers of the list."""
    config = replace_fields(BASE, {"rope.interleaved": True, "moe.router_bias": True, "moe.shared_expert_width": 12})
    folder, merged = folders.folder(tmp_path / "folder", config), tmp_path / "merged"
    values = np.linspace(0, 1, 32 * 64, dtype=np.float32).reshape(32, 64)
    mtp = {
        "model.mtp_linear_proj.0.weight": values,
        "model.mtp_block.0.self_attn.q_proj.weight": values.astype(jnp.bfloat16),
    }
    rewrite(folder, lambda arrays: arrays.update(mtp))
    change_config(folder, **counts)
    assert huggingface.open_model_folder(folder).family.model_type == "ernie4_5_moe"
    adapter = write_adapters(tmp_path / "adapter", add_adapters(config, "attention/output"), config)
    convert.merge_folders(folder, adapter, merged, "bfloat16", 10**9)
    assert "The 2 tensors of multi-token prediction (model.mtp_" in capsys.readouterr().out
    found = safetensors.open_folder(merged)
    assert found.keys() == safetensors.open_folder(folder).keys()
    for name, array in mtp.items():
        assert (found[name].read().tobytes(), found[name].dtype) == (array.tobytes(), array.dtype)
    assert counts.items() <= json.loads((merged / "config.json").read_text()).items()


def test_experts_of_a_layer_without_experts_are_refused(tmp_path: Path) -> None:
    folder = folders.folder(tmp_path / "folder", QWEN)
    name = "model.layers.2.mlp.experts.down_proj"
    rewrite(folder, lambda arrays: arrays.update({name: np.ones((EXPERTS, 32, 6), np.float32)}))
    with pytest.raises(InputError, match=f"tensor '{name}' does not belong to a Qwen3MoeForCausalLM"):
        load_pretrained(folder)


def test_commands_refuse_a_folder_without_an_expert(tmp_path: Path) -> None:
    folder = folders.folder(tmp_path / "folder", MIXTRAL)
    rewrite(folder, lambda arrays: arrays.pop(ONE))
    found = command("generate", "--checkpoint", folder, "--prompt", "a")
    assert (found.returncode, found.stdout) == (2, "")
    (line,) = found.stderr.splitlines()
    assert f"{folder}: tensor '{ONE}' is missing" in line


# --- Adapters.


def test_adapters_of_all_matrices_are_written_and_read(tmp_path: Path) -> None:
    """Of experts, and of the MLPs of layers without them, whose modules PEFT would take for experts."""
    targets = "attention/query mlp/gate mlp/up mlp/down"
    params = add_adapters(QWEN, targets)
    path = write_adapters(tmp_path / "adapter", params, QWEN)
    settings = json.loads((path / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["q_proj"]
    dense = {"mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"}
    assert {*settings["target_parameters"]} == dense | {"gate_up_proj", "down_proj"}
    found = open_adapters(path, QWEN)
    blocks = ("segment_0/block_0", "segment_0/block_1", "segment_1/block_0")
    assert {weight for weight, _ in found.parts} == {f"{block}/{each}" for block in blocks for each in targets.split()}
    for weight in found.add_to_specs(param_specs(QWEN))["segment_0"]:
        for kind in ("lora_a", "lora_b"):
            expected = getattr(params["segment_0"][weight]["mlp"]["up"], kind)
            out = np.zeros(expected.shape[1:], np.float32)
            found.fill(f"segment_0/{weight}/mlp/up/{kind}", out, 1, (slice(None),) * out.ndim)
            np.testing.assert_array_equal(out, expected[1])
            part = np.zeros_like(out[1:3])  # as a device that holds some experts reads it
            index = (slice(1, 3), *(slice(None),) * (out.ndim - 1))
            if out.ndim == 3:
                found.fill(f"segment_0/{weight}/mlp/up/{kind}", part, 1, index)
                np.testing.assert_array_equal(part, expected[1, 1:3])


def test_a_trained_sink_is_merged_and_not_written_as_a_module(tmp_path: Path) -> None:
    """PEFT would take the module that holds it, with all of attention, for trained."""
    path, params = "segment_0/block_0/attention/sinks", add_adapters(GPT_OSS, "attention/query")
    whole = WholeParameters(LoadedLayers(collect_leaves(params)), frozenset({path}), resized=False)
    with pytest.raises(
        InputError, match=f"{path} was trained: PEFT has no module for .*self_attn.sinks.*convert merge"
    ):
        write_adapter_folder(
            tmp_path / "adapter", params, choose_family(GPT_OSS), GPT_OSS, LoraConfig(RANK), whole=whole
        )


def test_adapters_of_experts_are_merged(tmp_path: Path) -> None:
    params = add_adapters(MIXTRAL, "attention/query mlp/down")
    write_model_folder(tmp_path / "whole", jax.device_put(params, toy.placement().replicated), MIXTRAL)
    found = load_pretrained(tmp_path / "whole").params["segment_0"]["block_0"]["mlp"]["down"]
    down = params["segment_0"]["block_0"]["mlp"]["down"]
    expected = down.base + ALPHA / RANK * np.einsum("lefr,ledr->lefd", down.lora_a, down.lora_b)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("block_sparse_moe.gate", "belongs to no adapter of the model's matrices, among which are no routers"),
        ("block_sparse_moe.experts.2.w3", "experts.2.w3 has an adapter, but adapter_config.json does not select it"),
        ("mlp.experts", "experts.down_proj has an adapter, but adapter_config.json does not select it"),
    ],
)
def test_adapters_of_experts_that_nothing_selects_are_refused(module: str, message: str, tmp_path: Path) -> None:
    path = write_adapters(tmp_path / "adapter", add_adapters(MIXTRAL, "attention/query"), MIXTRAL)
    name = QUERY.replace("self_attn.q_proj", module)
    rewrite_adapters(path, lambda arrays: arrays.update({name: arrays[QUERY]}))
    with pytest.raises(InputError, match=message):
        open_adapters(path, MIXTRAL)


def test_adapters_of_some_experts_are_refused(tmp_path: Path) -> None:
    path = write_adapters(tmp_path / "adapter", add_adapters(MIXTRAL, "attention/query"), MIXTRAL)
    stem = QUERY.replace("self_attn.q_proj", "block_sparse_moe.experts.2.w1").removesuffix(".lora_A.weight")
    factors = {f"{stem}.lora_A.weight": (RANK, 32), f"{stem}.lora_B.weight": (6, RANK)}
    rewrite_adapters(path, lambda arrays: arrays.update({name: np.ones(s, np.float32) for name, s in factors.items()}))
    file = path / "adapter_config.json"
    settings = json.loads(file.read_text()) | {"target_modules": r".*q_proj|.*\.0\..*experts\.2\.w1"}
    file.write_text(json.dumps(settings))
    with pytest.raises(InputError, match="experts.2.w1 has an adapter, but not all experts of its layer have"):
        open_adapters(path, MIXTRAL)
