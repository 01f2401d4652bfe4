"""The families that the decoder's switches cover: logits of Hugging Face's own classes, with the same weights.

One table a family: its class, its settings and ours, and its parameters by name. Values are ours, random.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import toy

from jaxopt_llm.execution import scan
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import Params, make_parts
from jaxopt_llm.model.param import ParamSpec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROWS, LENGTH, LAYERS, WINDOW = 2, 12, 5, 4
MODEL = ModelConfig(
    vocabulary_size=256,  # no padding
    width=32,
    layers=LAYERS,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_width=48,
    window=WINDOW,
    rope_theta=100.0,
    norm_epsilon=1e-2,
)
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 256, "attn_implementation": "eager"}
SETTINGS = IDS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}

# Theirs -> ours, within a layer; several of ours are one of theirs, side by side.
ATTENTION = {
    "self_attn.q_proj.weight": "attention/query",
    "self_attn.k_proj.weight": "attention/key",
    "self_attn.v_proj.weight": "attention/value",
    "self_attn.o_proj.weight": "attention/output",
}
QKV_BIASES = {f"self_attn.{name[0]}_proj.bias": f"attention/{name}_bias" for name in ("query", "key", "value")}
QK_NORMS = {
    "self_attn.q_norm.weight": "query_norm/scale",
    "self_attn.k_norm.weight": "key_norm/scale",
}
MLP = {f"mlp.{name}_proj.weight": f"mlp/{name}" for name in ("gate", "up", "down")}
NORMS = {
    "input_layernorm.weight": "attention_norm/scale",
    "post_attention_layernorm.weight": "mlp_norm/scale",
}
POST_NORMS = {
    "post_attention_layernorm.weight": "attention_post_norm/scale",
    "post_feedforward_layernorm.weight": "mlp_post_norm/scale",
}
LLAMA = ATTENTION | MLP | NORMS


class Family(NamedTuple):
    name: str
    settings: dict[str, Any]
    switches: dict[str, Any]
    layer: dict[str, str] = LLAMA
    transposed: bool = True  # [out, in], as torch.nn.Linear


FAMILIES = {
    "llama 2": Family("Llama", {"head_dim": 8, "tie_word_embeddings": False}, {"tied_head": False}),
    "llama 3.1": Family(
        "Llama",
        {
            "head_dim": 8,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 8.0,
                "low_freq_factor": 0.5,
                "high_freq_factor": 2.0,
                "original_max_position_embeddings": 14,
            },
        },
        {
            "rope_factor": 8.0,
            "rope_low_frequency_factor": 0.5,
            "rope_high_frequency_factor": 2.0,
            "rope_original_length": 14,
        },
    ),
    "mistral": Family(
        "Mistral",
        {"head_dim": 8, "sliding_window": WINDOW, "tie_word_embeddings": False},
        {"pattern": ("sliding",), "tied_head": False},
    ),
    "qwen 2": Family("Qwen2", {"tie_word_embeddings": True}, {"biases": "qkv"}, LLAMA | QKV_BIASES),
    "qwen 3": Family(
        "Qwen3", {"head_dim": 8, "tie_word_embeddings": True}, {"qk_norm": "head"}, LLAMA | QK_NORMS
    ),
    "gemma 2": Family(
        "Gemma2",
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        {
            "pattern": ("sliding", "global"),
            "norm_placement": "both",
            "norm_zero_centered": True,
            "mlp": "geglu",
            "attention_scale": 12**-0.5,
            "attention_softcap": 2.0,
            "logit_softcap": 3.0,
            "scale_embedding": True,
        },
        LLAMA | POST_NORMS | {"pre_feedforward_layernorm.weight": "mlp_norm/scale"},
    ),
    "phi 3": Family(
        "Phi3",
        {"sliding_window": WINDOW, "tie_word_embeddings": False},
        {"pattern": ("sliding",), "tied_head": False},
        NORMS
        | {
            "self_attn.qkv_proj.weight": "attention/query attention/key attention/value",
            "self_attn.o_proj.weight": "attention/output",
            "mlp.gate_up_proj.weight": "mlp/gate mlp/up",
            "mlp.down_proj.weight": "mlp/down",
        },
    ),
    "olmo 2": Family(
        "Olmo2",
        {"tie_word_embeddings": False},
        {"norm_placement": "post", "qk_norm": "projection", "tied_head": False},
        ATTENTION | MLP | QK_NORMS | POST_NORMS,
    ),
    "smollm 3": Family(
        "SmolLM3", {"tie_word_embeddings": True}, {"pattern": ("global", "global", "global", "global_nope")}
    ),
    "gpt 2": Family(
        "GPT2",
        {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_inner": 48, "n_positions": 16, "layer_norm_epsilon": 1e-2},
        {
            "kv_heads": 4,
            "norm": "layer",
            "positions": "learned",
            "max_positions": 16,
            "biases": "all",
            "mlp": "gelu",
        },
        {
            "ln_1.weight": "attention_norm/scale",
            "ln_1.bias": "attention_norm/bias",
            "ln_2.weight": "mlp_norm/scale",
            "ln_2.bias": "mlp_norm/bias",
            "attn.c_attn.weight": "attention/query attention/key attention/value",
            "attn.c_attn.bias": "attention/query_bias attention/key_bias attention/value_bias",
            "attn.c_proj.weight": "attention/output",
            "attn.c_proj.bias": "attention/output_bias",
            "mlp.c_fc.weight": "mlp/up",
            "mlp.c_fc.bias": "mlp/up_bias",
            "mlp.c_proj.weight": "mlp/down",
            "mlp.c_proj.bias": "mlp/down_bias",
        },
        transposed=False,
    ),
}  # fmt: skip


def as_matrix(spec: ParamSpec, leaf: np.ndarray) -> np.ndarray:
    """[repeats, what a product sums over, the rest], or [repeats, all] of what is in no product."""
    fan_in = (spec.layer().fan_in,) if spec.contracting else ()
    return leaf.reshape(len(leaf), *fan_in, -1)


def theirs(family: Family, config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Our parameters by their names."""
    parts, outer = make_parts(config), params["outer"]
    gpt = family.name == "GPT2"
    base, prefix = ("transformer", "transformer.h") if gpt else ("model", "model.layers")
    names = ("wte", "ln_f") if gpt else ("embed_tokens", "norm")
    found = {f"{base}.{names[0]}.weight": outer["embedding"]["table"]}
    found |= {"lm_head.weight": outer["embedding" if config.tied_head else "head"]["table"]}
    found |= {f"{base}.{names[1]}.{'bias' if n == 'bias' else 'weight'}": v for n, v in outer["final_norm"].items()}
    if gpt:
        found["transformer.wpe.weight"] = outer["positions"]["table"]
    layer = 0
    for number, segment in enumerate(parts.layout):
        for repeat in range(segment.repeats):
            for position in range(len(segment.kinds)):
                section, block = f"segment_{number}", f"block_{position}"
                matrices = jax.tree.map(as_matrix, parts.specs[section][block], params[section][block])
                for name, ours in family.layer.items():
                    pieces = [matrices[group][leaf][repeat] for group, leaf in (one.split("/") for one in ours.split())]
                    value = np.concatenate(pieces, axis=-1)
                    found[f"{prefix}.{layer}.{name}"] = value.T if family.transposed else value
                layer += 1
    used = {one for ours in family.layer.values() for one in ours.split()}
    assert used == {f"{group}/{leaf}" for group, leaves in matrices.items() for leaf in leaves}
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_the_familys_own(name: str) -> None:
    family = FAMILIES[name]
    config = replace(MODEL, **family.switches)
    settings = (IDS if family.name == "GPT2" else SETTINGS) | family.settings
    model_type = getattr(transformers, "GPT2LMHeadModel" if family.name == "GPT2" else f"{family.name}ForCausalLM")
    model = model_type(getattr(transformers, f"{family.name}Config")(**settings)).eval()
    parts = make_parts(config)
    params = toy.params(parts.specs)
    model.load_state_dict({key: torch.tensor(value) for key, value in theirs(family, config, params).items()})

    tokens = np.random.default_rng(0).integers(3, config.vocabulary_size, (ROWS, LENGTH))
    positions = np.broadcast_to(np.arange(LENGTH), tokens.shape)
    context = Context(positions=positions, segment_ids=np.ones_like(tokens), placement=toy.placement())
    forward = jax.jit(
        lambda params: scan.forward(parts, params, tokens, context)[0], compiler_options=toy.QUICK_COMPILE
    )
    with torch.no_grad():
        expected = model(torch.tensor(tokens), use_cache=False).logits.numpy()
    np.testing.assert_allclose(forward(params), expected, rtol=1e-5, atol=2e-5)
