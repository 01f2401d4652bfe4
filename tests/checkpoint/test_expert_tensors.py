"""Folders of mixtures of experts, a tensor for each: into our stacks and back, and refused where they are not whole."""

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
from commands import command
from test_huggingface import resident_of_files, rewrite
from test_peft import ALPHA, QUERY, RANK, adapters, opened
from test_peft import rewrite as rewrite_adapter
from test_peft import write as write_adapter

from jaxopt_llm import load_pretrained, tree
from jaxopt_llm.checkpoint import huggingface, safetensors
from jaxopt_llm.checkpoint.family import canonical
from jaxopt_llm.config import TrainConfig, with_pretrained
from jaxopt_llm.errors import InputError
from jaxopt_llm.execution.stages import rest_on_stages
from jaxopt_llm.kernels import grouped_matmul_xla
from jaxopt_llm.kernels.grouped_matmul import IMPLEMENTATIONS
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.decoder import make_parts

pytestmark = pytest.mark.core

EXPERTS = 4
BASE = replace(folders.CONFIG, pattern=("global",), biases="none", experts=EXPERTS, expert_width=6)
MIXTRAL = BASE
QWEN = replace(BASE, qk_norm="head", expert_every=2, router_renormalises=False)
OLMOE = replace(BASE, qk_norm="projection", kv_heads=4, width=16)
LATENT: dict[str, Any] = {
    "kv_heads": 4,
    "head_dim": 10,
    "latent_rank": 8,
    "rotary_head_dim": 6,
    "value_head_dim": 12,
    "dense_layers": 1,
    "shared_expert_width": 12,
}
DEEPSEEK2 = replace(BASE, **LATENT, router_renormalises=False, router_groups=2)
DEEPSEEK3 = replace(BASE, **LATENT, query_rank=16, router="sigmoid", router_bias=True, router_scale=2.5)
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
def test_every_expert_comes_into_its_place(family: str, name: str, tmp_path: Path) -> None:
    config, placement = CONFIGS[family], toy.placement(**PLACEMENTS[name])
    parts, expected = make_parts(config), folders.params(config)
    if stages := PLACEMENTS[name].get("pipeline"):
        parts = rest_on_stages(parts, stages)
        expected = toy.on_stages(parts.specs, expected)
    folder = huggingface.open_folder(folders.folder(tmp_path / "folder", config))
    assert folder.family.model_type == family
    assert canonical(folder.config) == canonical(config)

    def check(path: str, spec: Any, values: np.ndarray) -> None:
        leaf = folder.read(path, spec, placement.parameters(spec))
        np.testing.assert_array_equal(leaf, values, err_msg=path)

    tree.map_with_path(check, parts.specs, expected)


def test_tensors_have_their_published_names_and_shapes(tmp_path: Path) -> None:
    """Of a layer's mixture, a matrix is [out, in]."""
    expected = {"gate.weight": (EXPERTS, 32)}
    for expert in range(EXPERTS):
        shapes = {"w1": (6, 32), "w3": (6, 32), "w2": (32, 6)}
        expected |= {f"experts.{expert}.{name}.weight": shape for name, shape in shapes.items()}
    prefix = "model.layers.3.block_sparse_moe."
    stored = safetensors.open_folder(folders.folder(tmp_path / "folder", MIXTRAL))
    assert {n.removeprefix(prefix): each.array.shape for n, each in stored.items() if n.startswith(prefix)} == expected


def test_the_host_holds_one_tensor_beside_the_parts(tmp_path: Path) -> None:
    """Of 16-bit tensors that become 32 bits wide."""
    config = replace(MIXTRAL, layers=2, experts=16, width=256, expert_width=1024)
    folder = huggingface.open_folder(folders.folder(tmp_path / "folder", config, jnp.bfloat16, most=10**9))
    placement, specs = toy.placement(expert=4), make_parts(config).specs["segment_0"]["block_0"]["mlp"]
    path = "segment_0/block_0/mlp/"
    folder.read(path + "down", specs["down"], placement.parameters(specs["down"]))  # what is imported at first
    mapped = resident_of_files()
    tracemalloc.start()
    leaf = folder.read(path + "up", specs["up"], placement.parameters(specs["up"]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    one = 4 * 256 * 1024
    assert leaf.nbytes == 32 * one
    assert 32 * one <= peak < 33.5 * one
    assert resident_of_files() - mapped < 2 * one


@pytest.mark.parametrize("family", CONFIGS)
def test_a_round_trip_is_equal_to_the_bit(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of each leaf the experts of a layer come from the devices at once."""
    fetched = []

    def one_layer(*arguments: Any) -> np.ndarray:
        fetched.append(arguments)
        return of_one_layer(*arguments)

    of_one_layer = huggingface.one_layer
    config = CONFIGS[family]
    source = folders.folder(tmp_path / "one", config, jnp.bfloat16)
    monkeypatch.setattr(huggingface, "one_layer", one_layer)
    load_pretrained(source).save_pretrained(tmp_path / "two")
    specs = jax.tree.leaves(make_parts(config).specs)
    assert len(fetched) == sum(1 if spec.layers is None else len(spec.layers) for spec in specs)
    assert {huggingface.read_settings(tmp_path / name)["torch_dtype"] for name in ("one", "two")} == {"bfloat16"}
    one, two = (safetensors.open_folder(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].array.dtype == two[name].array.dtype == jnp.bfloat16
        assert one[name].array.tobytes() == two[name].array.tobytes()


def test_a_routers_bias_stays_in_float32(tmp_path: Path) -> None:
    """In a folder of 16 bits, which says so of all else."""
    params = jax.device_put(folders.params(DEEPSEEK3), toy.placement().replicated)
    huggingface.write(tmp_path / "folder", params, DEEPSEEK3, dtype="bfloat16")
    stored = safetensors.open_folder(tmp_path / "folder")
    wide = {name: each.array for name, each in stored.items() if each.array.dtype != jnp.bfloat16}
    name = "model.layers.{}.mlp.gate.e_score_correction_bias"
    assert {key: each.dtype for key, each in wide.items()} == {
        name.format(layer): jnp.float32 for layer in range(1, DEEPSEEK3.layers)
    }
    expected = params["segment_1"]["block_0"]["mlp"]["router_bias"]
    np.testing.assert_array_equal([wide[name.format(layer)] for layer in range(1, DEEPSEEK3.layers)], expected)
    assert huggingface.read_settings(tmp_path / "folder")["torch_dtype"] == "bfloat16"


def test_what_a_router_is_taught_beside_the_loss_is_the_runs_own(tmp_path: Path) -> None:
    """All else of a model is the folder's."""
    folder = folders.folder(tmp_path / "folder", replace(MIXTRAL, balance_loss=0.02))
    assert huggingface.read_config(folder)[1].balance_loss == 0.02
    model = ModelConfig(
        pretrained=str(folder), balance_loss=0.5, router_z_loss=0.1, router_bias_rate=0.2, expert_capacity=2.0
    )
    found = with_pretrained(TrainConfig(model=model)).model
    own = found.balance_loss, found.router_z_loss, found.router_bias_rate, found.expert_capacity
    assert own == (0.5, 0.1, 0.2, 2.0)
    assert (found.experts, found.width) == (EXPERTS, 32)
    with pytest.raises(InputError, match="leave out model.experts_per_token=3"):
        with_pretrained(TrainConfig(model=replace(model, experts_per_token=3)))


def test_a_loaded_folder_is_multiplied_as_is_best_for_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    multiplied: list[tuple[int, ...]] = []

    class Kernel:
        def forward(self, x: jax.Array, w: jax.Array, *of: Any, **settings: Any) -> jax.Array:
            multiplied.append(w.shape)
            return grouped_matmul_xla.forward(x, w, *of, **settings)

    monkeypatch.setattr("jaxopt_llm.run.choose_expert_products", lambda device, *of: asked.append(of) or "pallas")
    monkeypatch.setitem(IMPLEMENTATIONS, "pallas", Kernel())
    load_pretrained(folders.folder(tmp_path / "folder", MIXTRAL)).logits([[1, 2, 3]])
    assert asked == [("auto", "float32")]
    assert set(multiplied) == {(EXPERTS, 32, 6), (EXPERTS, 6, 32)}


def test_many_tensors_are_told_from_others_by_fewer_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders.folder(tmp_path / "folder", MIXTRAL)

    def digest(row: int) -> str:
        rewrite(folder, lambda arrays: arrays[ONE].__setitem__((row, 0), arrays[ONE][row, 0] + 1))
        return huggingface.open_folder(folder).sha256

    assert digest(3) != digest(3)
    monkeypatch.setattr(huggingface, "DIGESTED_IN_ALL", 100 * len(safetensors.open_folder(folder)))
    assert digest(3) == digest(3) != digest(0)  # of 768 bytes each seventh row


# ---- As transformers' classes hold them.


def as_in_memory(family: str, arrays: dict[str, np.ndarray]) -> None:
    """All experts of a layer in one tensor, their gates and ups below each other."""
    for name in list(arrays):
        if ".experts." not in name:
            arrays[name.replace("block_sparse_moe", "mlp")] = arrays.pop(name)
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    mixture = "block_sparse_moe" if family == "mixtral" else "mlp"
    for layer in range(CONFIGS[family].layers):
        if not CONFIGS[family].has_experts(layer):
            continue
        experts = f"model.layers.{layer}.{mixture}.experts."
        both = [np.concatenate([arrays.pop(f"{experts}{e}.{n}.weight") for n in (gate, up)]) for e in range(EXPERTS)]
        arrays[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.stack(both)
        downs = [arrays.pop(f"{experts}{e}.{down}.weight") for e in range(EXPERTS)]
        arrays[f"model.layers.{layer}.mlp.experts.down_proj"] = np.stack(downs)


@pytest.mark.parametrize("family", CONFIGS)
def test_what_classes_hold_is_read_as_well(family: str, tmp_path: Path) -> None:
    folder = folders.folder(tmp_path / "folder", CONFIGS[family])
    rewrite(folder, functools.partial(as_in_memory, family))
    assert not any(".experts.0." in name for name in safetensors.open_folder(folder))
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(folder).params, folders.params(CONFIGS[family]))


# ---- What is not whole.

ONE = "model.layers.3.block_sparse_moe.experts.2.w3.weight"
JOINED = "model.layers.3.mlp.experts.gate_up_proj"


def narrowed(arrays: dict[str, np.ndarray]) -> None:
    as_in_memory("mixtral", arrays)
    arrays[JOINED] = arrays[JOINED][:3]


def twice(arrays: dict[str, np.ndarray]) -> None:
    one = arrays[ONE]
    as_in_memory("mixtral", arrays)
    arrays[ONE] = one


def beyond(arrays: dict[str, np.ndarray]) -> None:
    as_in_memory("mixtral", arrays)
    arrays[JOINED.replace(".3.", ".5.")] = arrays[JOINED]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda arrays: arrays.pop(ONE), f"tensor '{ONE}' is missing"),
        (lambda arrays: arrays.update({ONE.replace(".2.", ".4."): arrays[ONE]}), "experts.4.w3.weight' is none of a"),
        (lambda arrays: arrays.update({ONE: arrays[ONE][:5]}), rf"tensor '{ONE}' is \[5, 32\], .* must be \[6, 32\]"),
        (lambda arrays: arrays[ONE].__setitem__((1, 2), np.nan), f"tensor '{ONE}' has values that are not finite"),
        (narrowed, rf"tensor '{JOINED}' is \[3, 12, 32\], and by config.json it must be \[4, 12, 32\]"),
        (twice, f"tensor '{ONE}' is there twice, and once within '{JOINED}'"),
        (beyond, "tensor 'model.layers.5.mlp.experts.gate_up_proj' is none of a MixtralForCausalLM's"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_the_models_are_named(change: Callable[..., Any], said: str, tmp_path: Path) -> None:
    folder = folders.folder(tmp_path / "folder", MIXTRAL)
    rewrite(folder, change)
    with pytest.raises(InputError, match=said):
        load_pretrained(folder)


def test_what_predicts_more_tokens_is_left_out(tmp_path: Path) -> None:
    """A layer after the last, as published; not two, nor one like the others, of which config.json has too few."""
    folder = folders.folder(tmp_path / "folder", DEEPSEEK3)

    def with_layer(number: int, arrays: dict[str, np.ndarray]) -> None:
        arrays[f"model.layers.{number}.eh_proj.weight"] = np.ones((32, 64), np.float32)
        arrays[f"model.layers.{number}.self_attn.kv_a_layernorm.weight"] = np.ones(8, np.float32)

    rewrite(folder, functools.partial(with_layer, 5))
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(folder).params, folders.params(DEEPSEEK3))
    rewrite(folder, functools.partial(with_layer, 6))
    with pytest.raises(InputError, match="tensor 'model.layers.6.eh_proj.weight' is none of a DeepseekV3ForCausalLM's"):
        load_pretrained(folder)
    rewrite(folder, lambda arrays: [arrays.pop(f"model.layers.{number}.eh_proj.weight") for number in (5, 6)])
    with pytest.raises(InputError, match="tensor 'model.layers.5.self_attn.kv_a_layernorm.weight' is none of a"):
        load_pretrained(folder)


def test_a_layer_without_experts_has_none(tmp_path: Path) -> None:
    folder = folders.folder(tmp_path / "folder", QWEN)
    name = "model.layers.2.mlp.experts.down_proj"
    rewrite(folder, lambda arrays: arrays.update({name: np.ones((EXPERTS, 32, 6), np.float32)}))
    with pytest.raises(InputError, match=f"tensor '{name}' is none of a Qwen3MoeForCausalLM's"):
        load_pretrained(folder)


def test_a_command_refuses_a_folder_that_lacks_an_expert(tmp_path: Path) -> None:
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


# ---- Adapters.


def test_adapters_of_attention_go_there_and_back(tmp_path: Path) -> None:
    """Of all layers, those without experts among them; PEFT would take the MLPs of these for experts."""
    path = write_adapter(tmp_path / "adapter", adapters(QWEN, "attention/query"), QWEN)
    found = opened(path, QWEN)
    blocks = ("segment_0/block_0", "segment_0/block_1", "segment_1/block_0")
    assert {weight for weight, _ in found.parts} == {f"{block}/attention/query" for block in blocks}
    with pytest.raises(InputError, match="adapters of segment_1/block_0/mlp/down: PEFT has no modules of experts, nor"):
        write_adapter(tmp_path / "other", adapters(QWEN, "attention/query segment_1/block_0/mlp/down"), QWEN)


def test_adapters_of_experts_are_not_written_but_folded_in(tmp_path: Path) -> None:
    params = adapters(MIXTRAL, "attention/query mlp/down")
    with pytest.raises(InputError, match="adapters of segment_0/block_0/mlp/down: PEFT has no modules of experts"):
        write_adapter(tmp_path / "adapter", params, MIXTRAL)
    assert not (tmp_path / "adapter").exists()

    huggingface.write(tmp_path / "whole", jax.device_put(params, toy.placement().replicated), MIXTRAL)
    found = load_pretrained(tmp_path / "whole").params["segment_0"]["block_0"]["mlp"]["down"]
    down = params["segment_0"]["block_0"]["mlp"]["down"]
    expected = down.base + ALPHA / RANK * np.einsum("lefr,ledr->lefd", down.lora_a, down.lora_b)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("module", ["gate", "experts.2.w3"])
def test_adapters_of_experts_are_not_read(module: str, tmp_path: Path) -> None:
    """As older versions of transformers have modules for them."""
    path = write_adapter(tmp_path / "adapter", adapters(MIXTRAL, "attention/query"), MIXTRAL)
    name = QUERY.replace("self_attn.q_proj", f"block_sparse_moe.{module}")
    rewrite_adapter(path, lambda arrays: arrays.update({name: arrays[QUERY]}))
    with pytest.raises(
        InputError, match=f"tensor '{name}': adapters of experts, and of MLPs beside them, are not read"
    ):
        opened(path, MIXTRAL)
