"""Folders with FP8 weights: the values are those that transformers' own dequantisation gives, to the bit."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxopt_llm
from jaxopt_llm.checkpoint.huggingface import quantised, safetensors
from jaxopt_llm.core.errors import InputError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
save = pytest.importorskip("safetensors.torch")

SIZES = {
    **{"vocab_size": 250, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
BLOCK = 32
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}


def quantise(weight: Any, block: int) -> tuple[Any, Any]:
    """Return codes and the factor of each block; block 0: one factor."""
    rows, columns = weight.shape
    size = (block, block) if block else (rows, columns)
    blocks = weight.reshape(rows // size[0], size[0], columns // size[1], size[1])
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).reshape(rows, columns)
    return codes, scales if block else scales.reshape(())


def write(folder: Path, prefix: str, more: dict[str, Any], block: int = BLOCK) -> Path:
    config = getattr(transformers, f"{prefix}Config")(**SIZES | more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(folder / "float")
    tensors: dict[str, Any] = {}
    for name, tensor in save.load_file(folder / "float" / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            codes, scales = quantise(tensor.float(), block)
            tensors |= {name: codes, f"{name}_scale_inv": scales}
    (folder / "fp8").mkdir()
    save.save_file(tensors, folder / "fp8" / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "float" / "config.json").read_text())
    method = FP8 if block else {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    (folder / "fp8" / "config.json").write_text(json.dumps(settings | {"quantization_config": method}))
    return folder / "fp8"


@pytest.mark.parametrize(("prefix", "more"), [("Qwen3", {}), ("Qwen3Moe", EXPERTS)])
def test_values_are_those_of_transformers(prefix: str, more: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path, prefix, more)
    here = jaxopt_llm.load_pretrained(folder)
    here.save_pretrained(tmp_path / "back")
    there = getattr(transformers, f"{prefix}ForCausalLM").from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    )
    back, said = type(there).from_pretrained(tmp_path / "back", dtype=torch.bfloat16, output_loading_info=True)
    assert not any(said.values()), said
    for name, value in there.state_dict().items():
        assert value.dtype == torch.bfloat16 and torch.equal(back.state_dict()[name], value), name
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    written = safetensors.open_folder(tmp_path / "back").values()
    assert {each.array.dtype for each in written} == {jnp.dtype(jnp.bfloat16)}


def test_a_part_of_a_weight_has_its_own_scales(tmp_path: Path) -> None:
    """As a device reads it: some rows and columns, transposed."""
    folder = write(tmp_path, "Qwen3", {})
    settings = json.loads((folder / "config.json").read_text())
    stored = quantised.join_scales(safetensors.open_folder(folder), settings)["model.layers.0.mlp.gate_proj.weight"]
    part = np.s_[40:70, 20:50]
    np.testing.assert_array_equal(stored.read(stored.array[part].T), stored.read()[part].T)


def test_a_weight_may_have_one_scale(tmp_path: Path) -> None:
    folder = write(tmp_path, "Qwen3", {}, block=0)
    here = jaxopt_llm.load_pretrained(folder)
    stored = save.load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    expected = (stored[name].float() * stored[f"{name}_scale_inv"]).bfloat16().float().numpy().T
    found = np.asarray(here.params["segment_0"]["block_0"]["attention"]["key"][1], np.float32)
    np.testing.assert_array_equal(found.reshape(expected.shape), expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t, n: t.pop(f"{n}_scale_inv"), "k_proj.weight' has no scales"),
        (lambda t, n: t.update({n: t[n].float()}), "k_proj.weight_scale_inv' scales no tensor of codes"),
        (lambda t, n: t.update({f"{n}_scale_inv": torch.ones(3, 2)}), r"shape \[3, 2\], but the weight \[32, 64\]"),
        (lambda t, n: t[f"{n}_scale_inv"].fill_(float("nan")), "k_proj.weight_scale_inv' has scales below 0 or not"),
    ],
)
def test_corrupt_scales_are_named(change: Any, said: str, tmp_path: Path) -> None:
    folder = write(tmp_path, "Qwen3", {})
    tensors = save.load_file(folder / "model.safetensors")
    change(tensors, "model.layers.0.self_attn.k_proj.weight")
    save.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=said):
        jaxopt_llm.load_pretrained(folder)
