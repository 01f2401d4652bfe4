"""Names of exported tensors, as other programs look for them: the converter of llama.cpp, and vLLM.

The converter maps names with the tables of its package `gguf`, by the architecture that it chooses for a class. vLLM
has no such table apart from its models: the names that it loads for experts are written out here.
"""

import re
from pathlib import Path
from typing import Any

import folders
import pytest
from published import PUBLISHED, published
from test_expert_tensors import CONFIGS

from jaxopt_llm.checkpoint.huggingface import safetensors
from jaxopt_llm.checkpoint.huggingface.find_family import find_by_settings
from jaxopt_llm.checkpoint.huggingface.tensor_layout import list_tensor_layouts

# Architectures that the converter chooses for our families, if they have another name.
ARCHITECTURES = {
    "mistral": "llama",
    "ministral": "llama",
    "ministral3": "mistral3",
    "mixtral": "llama",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "qwen3_moe": "qwen3moe",
    "qwen3_vl_moe_text": "qwen3vlmoe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "gpt_oss": "gpt-oss",
    "gemma4_text": "gemma4",
    "ernie4_5_moe": "ernie4_5-moe",
    "llama4_text": "llama4",
    "cohere": "command-r",
    "glm4_moe_lite": "deepseek2",
    "granitemoehybrid": "granitehybrid",
    "qwen2_moe": "qwen2moe",
}
# Tensors that the converter reads by code of its own, without its table of names.
CONVERTED = {
    "apertus": "mlp.act_fn.alpha_p mlp.act_fn.alpha_n",
    "gemma4_text": "router.scale router.per_expert_scale",
    "gpt_oss": "mlp.experts.gate_up_proj mlp.experts.gate_up_proj_bias mlp.experts.down_proj_bias",
    "granitemoe": "block_sparse_moe.input_linear",
    "granitemoehybrid": "shared_mlp.input_linear",
    "llama4_text": "feed_forward.experts.gate_up_proj",
    "qwen3_vl_moe_text": "mlp.experts.gate_up_proj",
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_llama_cpp_knows_all_tensors(model: str) -> None:
    gguf: Any = pytest.importorskip("gguf")
    family = find_by_settings(published(model))
    architectures = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}
    name = ARCHITECTURES.get(family.model_type, family.model_type)
    if name not in architectures:
        pytest.skip(f"llama.cpp has no {family.model_type}")
    table = gguf.get_tensor_name_map(architectures[name], 1)
    # As the converter does first: it stacks the experts of a layer, and gives a bias the usual end.
    layouts = list_tensor_layouts(family, family.read(published(model)))
    tensors = {re.sub(r"experts\.\d+", "experts", each) for each in layouts}
    tensors = {re.sub(r"\b(layers|h)\.\d+", r"\1.0", each) for each in tensors}
    tensors = {re.sub("e_score_correction_bias$", "e_score_correction.bias", each) for each in tensors}
    unknown = {each for each in tensors if table.get_name(each, try_suffixes=(".weight", ".bias")) is None}
    converted = {f"model.layers.0.{each}" for each in CONVERTED.get(family.model_type, "").split()}
    assert {each.removesuffix(".weight") for each in unknown} <= converted


VLLM = {
    "mixtral": "block_sparse_moe.experts.{}.w1 block_sparse_moe.experts.{}.w2 block_sparse_moe.experts.{}.w3 "
    "block_sparse_moe.gate",
    "qwen3_moe": "mlp.experts.{}.gate_proj mlp.experts.{}.up_proj mlp.experts.{}.down_proj mlp.gate",
    "olmoe": "mlp.experts.{}.gate_proj mlp.experts.{}.up_proj mlp.experts.{}.down_proj mlp.gate",
    "deepseek_v3": "mlp.experts.{}.gate_proj mlp.experts.{}.up_proj mlp.experts.{}.down_proj mlp.gate "
    "mlp.shared_experts.gate_proj mlp.shared_experts.up_proj mlp.shared_experts.down_proj",
}


@pytest.mark.parametrize("name", VLLM)
def test_vllm_finds_all_experts(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    stored = safetensors.open_folder(folders.folder(tmp_path / "folder", config))
    layer = next(layer for layer in range(config.layers) if config.moe.has_experts(layer))
    experts = range(config.moe.experts)
    expected = {each.format(expert) for each in VLLM[name].split() for expert in experts}
    prefix = f"model.layers.{layer}."
    found = {each.removeprefix(prefix).removesuffix(".weight") for each in stored if each.startswith(prefix)}
    assert {each for each in found if ("mlp" in each or "moe" in each) and not each.endswith("bias")} == expected
