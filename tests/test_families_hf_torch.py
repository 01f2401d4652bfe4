"""Models of Hugging Face's own classes, brought here from the folders that they write, and back.

Each family in at least two forms, with the fields of its published config.json and small sizes; values are random.
"""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxopt_llm
from jaxopt_llm.checkpoint.huggingface import find_family, safetensors
from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface.model_folder import write_model_folder
from jaxopt_llm.checkpoint.huggingface.tensor_layout import list_tensor_layouts
from jaxopt_llm.config import RematConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core import tree
from jaxopt_llm.execution import scan
from jaxopt_llm.inference.load import Pretrained
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import OBJECTIVE

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROWS, LENGTH, LAYERS, WINDOW = 2, 20, 5, 4
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 250, "attn_implementation": "eager"}
SIZES = IDS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,  # as large as the mean square of an embedding: dropping it shows
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
GPT = IDS | {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 32, "layer_norm_epsilon": 1e-2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 0.5,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 14,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}

LATENT = SIZES | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
ROUTED = SIZES | {key: each for key, each in LATENT.items() if "_experts" in key or "moe" in key or "_repl" in key}
ROUTED |= {"num_experts_per_tok": 3, "routed_scaling_factor": 1.5}
SOLAR = {name: each for name, each in ROUTED.items() if name not in ("first_k_dense_replace", "intermediate_size")}
DENSE_LATENT = {name: each for name, each in LATENT.items() if name not in ROUTED or name in SIZES}
DENSE_LATENT |= {"pad_token_id": None}  # whose row the class sets to 0 when it loads a folder
AFMOE = SIZES | MOE | {"num_shared_experts": 1, "num_dense_layers": 1, "route_scale": 2.5}
# Of the four pairs that are turned one stays, one is slowed down, and two are mixed.
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "beta_fast": 4,
    "beta_slow": 0.1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 32,
}

LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
DYNAMIC_ROPE = LINEAR_ROPE | {"rope_type": "dynamic"}  # the original length is max_position_embeddings
ALPHA_ROPE = DYNAMIC_ROPE | {"alpha": 50.0, "factor": 1.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.5, 2.5, 4.0, 8.0],
    "original_max_position_embeddings": 14,
}
PARTIAL_LONG_ROPE = LONG_ROPE | {
    **{"partial_rotary_factor": 0.75, "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 2.5, 4.0]},
}
PROPORTIONAL_ROPE = {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5, "factor": 2.0}
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 30.0}
LONGER = LONG_ROPE | {"original_max_position_embeddings": 32}  # than the tokens below, which have the short factors
PLAIN_YARN = {key: each for key, each in YARN_ROPE.items() if "mscale" not in key}

# Rows longer than the window, with two layers after the last whole period, of which the class makes the last global.
GEMMA4 = SIZES | {
    **{"num_hidden_layers": 5, "sliding_window": WINDOW, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
    **{"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]},
}

CONFIGS = {name: f"{name}TextConfig" for name in ("Gemma3", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe")}
MULTIPLIERS = {
    **{"embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.4, "attention_multiplier": 0.3},
}
GRANITE_MOE = MULTIPLIERS | {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24}
GRANITE_4 = MULTIPLIERS | {"num_local_experts": 0, "shared_intermediate_size": 40, "mamba_n_heads": 4}
GRANITE_4 |= {"layer_types": ["full_attention"] * LAYERS}

LLAMA4 = {
    **{
        "num_local_experts": 4,
        "intermediate_size": 24,
        "intermediate_size_mlp": 40,
        "attention_chunk_size": WINDOW + 1,
    },
    **{"floor_scale": 3, "attn_scale": 0.6, "head_dim": 8, "no_rope_layer_interval": 2},
}

# Layers after the last whole period; key heads that value heads share, and heads of unlike sizes.
DELTA = SIZES | {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 10},
    **{"head_dim": 16, "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.25}},
}
DELTA_MOE = DELTA | MOE | {"shared_expert_intermediate_size": 20}
LINEAR_LAST = {"layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"]}
LINEAR_LAST |= {"num_hidden_layers": 4, "linear_num_key_heads": 3, "linear_num_value_heads": 3}
LINEAR_LAST |= {"linear_conv_kernel_dim": 3, "tie_word_embeddings": True}

# The class, and what it is given.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("Llama", SIZES | {"num_key_value_heads": 4}),
    "llama 3.1": ("Llama", SIZES | {"rope_parameters": LLAMA3_ROPE}),
    "llama 3.2": ("Llama", SIZES | {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True, "head_dim": 16}),
    "mistral 0.1": ("Mistral", SIZES | {"sliding_window": WINDOW}),
    "mistral 0.3": ("Mistral", SIZES | {"sliding_window": None, "head_dim": 16}),
    "qwen 2": ("Qwen2", SIZES),
    "qwen 2.5, yarn": (
        "Qwen2",
        SIZES | {"rope_parameters": PLAIN_YARN},
    ),
    "qwen 2 tied, windows": ("Qwen2", SIZES | WINDOWS | {"tie_word_embeddings": True}),
    "qwen 3": ("Qwen3", SIZES | {"head_dim": 16}),
    "qwen 3 tied, windows": ("Qwen3", SIZES | WINDOWS | {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma 2": (
        "Gemma2",
        SIZES
        | {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma 2 uncapped": (
        "Gemma2",
        SIZES
        | {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "num_hidden_layers": 4,
        },
    ),
    "phi 3": ("Phi3", SIZES | {"num_key_value_heads": 4, "sliding_window": WINDOW}),
    "phi 3 grouped": ("Phi3", SIZES | {"sliding_window": None, "tie_word_embeddings": True}),
    "olmo 2": ("Olmo2", SIZES | {"num_key_value_heads": 4}),
    "olmo 2 grouped": ("Olmo2", SIZES | {"tie_word_embeddings": True}),
    "smollm 3": ("SmolLM3", SIZES | {"tie_word_embeddings": True}),
    "smollm 3 untied": (
        "SmolLM3",
        SIZES | {"tie_word_embeddings": False, "no_rope_layers": [1, 0, 1, 1, 0], "num_key_value_heads": 4},
    ),
    "mixtral": ("Mixtral", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral tied, windows": (
        "Mixtral",
        SIZES
        | {
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": WINDOW,
            "head_dim": 16,
            "tie_word_embeddings": True,
        },
    ),
    "qwen 3 moe": ("Qwen3Moe", SIZES | MOE | {"norm_topk_prob": True, "head_dim": 16, "mlp_only_layers": [0, 1]}),
    "qwen 3 moe tied, windows": (
        "Qwen3Moe",
        SIZES | MOE | WINDOWS | {"max_window_layers": 0, "decoder_sparse_step": 2, "tie_word_embeddings": True},
    ),
    "qwen 3 next": ("Qwen3Next", DELTA_MOE | {"norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen 3 next tied": (
        "Qwen3Next",
        DELTA_MOE | LINEAR_LAST | {"norm_topk_prob": False, "decoder_sparse_step": 2},
    ),
    "qwen 3.5": ("Qwen3_5", DELTA),
    "qwen 3.5 tied": ("Qwen3_5", DELTA | LINEAR_LAST | {"num_key_value_heads": 4}),
    "qwen 3.5 moe": ("Qwen3_5Moe", {name: DELTA_MOE[name] for name in DELTA_MOE if name != "intermediate_size"}),
    "qwen 3.5 moe tied": (
        "Qwen3_5Moe",
        {name: each for name, each in (DELTA_MOE | LINEAR_LAST).items() if name != "intermediate_size"},
    ),
    "olmoe": ("Olmoe", SIZES | MOE | {"num_key_value_heads": 4}),
    "olmoe tied, grouped": ("Olmoe", SIZES | MOE | {"norm_topk_prob": True, "tie_word_embeddings": True}),
    "deepseek 2": (
        "DeepseekV2",
        LATENT | {"q_lora_rank": 16, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek 2 lite": (
        "DeepseekV2",
        LATENT | {"q_lora_rank": None, "topk_method": "greedy", "rope_parameters": YARN_ROPE, "n_shared_experts": 1},
    ),
    "deepseek 3": (
        "DeepseekV3",
        LATENT | {"q_lora_rank": 16, "n_group": 4, "topk_group": 2, "rope_parameters": YARN_ROPE | {"mscale": 1.0}},
    ),
    "deepseek 3 unscaled": (
        "DeepseekV3",
        LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "num_mtp_layers": 0},
    ),
    "llama, linear": ("Llama", SIZES | {"rope_parameters": LINEAR_ROPE}),
    "gemma 2, linear": ("Gemma2", SIZES | {"head_dim": 8, "rope_parameters": LINEAR_ROPE}),
    "llama, dynamic": ("Llama", SIZES | {"rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": 14}),
    "qwen 2, dynamic, short": ("Qwen2", SIZES | {"rope_parameters": DYNAMIC_ROPE}),
    "olmo 2, dynamic": ("Olmo2", SIZES | {"rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": 9}),
    "qwen 3, yarn with factor": (
        "Qwen3",
        SIZES | {"head_dim": 16, "rope_parameters": PLAIN_YARN | {"attention_factor": 1.7, "truncate": False}},
    ),
    "llama, yarn with mscale": (
        "Llama",
        SIZES | {"rope_parameters": YARN_ROPE | {"mscale": 1.5, "mscale_all_dim": 0.5}},
    ),
    "mistral, yarn without length": (
        "Mistral",
        SIZES
        | {"rope_parameters": {key: each for key, each in PLAIN_YARN.items() if "original" not in key}}
        | {"max_position_embeddings": 24},
    ),
    "olmo 2, yarn of the lengths": ("Olmo2", SIZES | {"rope_parameters": PLAIN_YARN | {"factor": None}}),
    "phi 3, longrope": ("Phi3", SIZES | {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 14}),
    "phi 3, longrope, short": ("Phi3", SIZES | {"rope_parameters": LONGER, "original_max_position_embeddings": 32}),
    "phi 3, su": (
        "Phi3",
        SIZES
        | {"rope_parameters": LONG_ROPE | {"rope_type": "su", "attention_factor": 1.3}}
        | {"original_max_position_embeddings": 14},
    ),
    "qwen 2, longrope": ("Qwen2", SIZES | {"rope_parameters": LONG_ROPE | {"factor": 32.0}}),
    "deepseek 2, dynamic": (
        "DeepseekV2",
        LATENT
        | {"q_lora_rank": None, "topk_method": "greedy", "rope_parameters": DYNAMIC_ROPE}
        | {"max_position_embeddings": 14},
    ),
    "deepseek 3, yarn with factor": (
        "DeepseekV3",
        LATENT
        | {"q_lora_rank": 16, "n_group": 4, "topk_group": 2}
        | {"rope_parameters": YARN_ROPE | {"mscale": None, "attention_factor": 1.7, "truncate": False}},
    ),
    "deepseek 3, yarn without mscale": (
        "DeepseekV3",
        LATENT
        | {"q_lora_rank": 16, "n_group": 4, "topk_group": 2}
        | {"rope_parameters": {key: each for key, each in YARN_ROPE.items() if key != "mscale"}},
    ),
    "ministral 3": (
        "Ministral3",
        SIZES
        | {"head_dim": 16, "sliding_window": None}
        | {"rope_parameters": PLAIN_YARN | {"llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 6}},
    ),
    "ministral 3, unscaled": (
        "Ministral3",
        SIZES
        | {"head_dim": 8, "sliding_window": WINDOW, "tie_word_embeddings": True}
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "llama_4_scaling_beta": 0.4}
            | {"original_max_position_embeddings": 6}
        },
    ),
    "ministral": (
        "Ministral",
        SIZES
        | {"head_dim": 8}
        | {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]},
    ),
    "ministral tied": (
        "Ministral",
        SIZES | {"sliding_window": WINDOW + 2, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "glm 4.5": (
        "Glm4Moe",
        ROUTED
        | {"head_dim": 12, "use_qk_norm": True, "attention_bias": True, "n_group": 4, "topk_group": 2}
        | {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}, "num_mtp_layers": 0},
    ),
    "glm 4.5 air": (
        "Glm4Moe",
        ROUTED
        | {"head_dim": 16, "n_shared_experts": 1, "tie_word_embeddings": True, "norm_topk_prob": False}
        | {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}, "num_mtp_layers": 0},
    ),
    "dots 1": ("Dots1", ROUTED | {"head_dim": 16, "norm_topk_prob": True, "use_sliding_window": False}),
    "dots 1 tied, windows": (
        "Dots1",
        ROUTED | WINDOWS | {"n_shared_experts": 1, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "afmoe": (
        "Afmoe",
        AFMOE | {"head_dim": 12, "sliding_window": WINDOW, "global_attn_every_n_layers": 3, "mup_enabled": True},
    ),
    "afmoe tied, biases": (
        "Afmoe",
        AFMOE
        | {"head_dim": 8, "sliding_window": WINDOW + 2, "num_key_value_heads": 4, "attention_bias": True}
        | {"tie_word_embeddings": True, "num_shared_experts": 2, "num_dense_layers": 2},
    ),
    "minimax m2": (
        "MiniMaxM2",
        SIZES
        | {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24}
        | {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    ),
    "minimax m2 tied": (
        "MiniMaxM2",
        SIZES
        | {"head_dim": 12, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24}
        | {"rope_parameters": None, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "llama, biases": ("Llama", SIZES | {"attention_bias": True, "mlp_bias": True}),
    "llama, biases of attention": ("Llama", SIZES | {"attention_bias": True, "tie_word_embeddings": True}),
    "gemma 3": (
        "Gemma3",
        SIZES
        | {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 12, "sliding_window_pattern": 3}
        | {"attn_logit_softcapping": 2.0}  # which the class does not apply
        | {"rope_parameters": {"full_attention": LINEAR_ROPE, "sliding_attention": LOCAL_ROPE}},
    ),
    "gemma 3 untied": (
        "Gemma3",
        SIZES
        | {"head_dim": 8, "sliding_window": WINDOW + 3, "num_key_value_heads": 1, "tie_word_embeddings": False}
        | {"rope_parameters": None, "final_logit_softcapping": 3.0, "num_hidden_layers": 7},
    ),
    "gemma 4": (
        "Gemma4",
        GEMMA4
        | {"global_head_dim": 12, "num_global_key_value_heads": 1, "final_logit_softcapping": 3.0}
        | {"rope_parameters": {"full_attention": PROPORTIONAL_ROPE, "sliding_attention": LOCAL_ROPE}},
    ),
    "gemma 4, own values": (
        "Gemma4",
        GEMMA4
        | {"global_head_dim": 16, "attention_k_eq_v": False, "tie_word_embeddings": False, "rope_parameters": None},
    ),
    "gemma 4, experts": (
        "Gemma4",
        GEMMA4
        | {"global_head_dim": 12, "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 6}
        | {"top_k_experts": 3, "moe_intermediate_size": 20}
        | {"rope_parameters": {"full_attention": PROPORTIONAL_ROPE, "sliding_attention": LOCAL_ROPE}},
    ),
    "gemma 4, shared keys": (
        "Gemma4",
        GEMMA4
        | {"global_head_dim": 12, "num_key_value_heads": 1, "attention_k_eq_v": False, "final_logit_softcapping": 3.0}
        | {
            "num_hidden_layers": 7,
            "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2 + ["full_attention"],
        }
        | {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 250, "num_kv_shared_layers": 3}
        | {"use_double_wide_mlp": True}
        | {"rope_parameters": {"full_attention": PROPORTIONAL_ROPE, "sliding_attention": LOCAL_ROPE}},
    ),
    "gemma 4, layer inputs": (
        "Gemma4",
        GEMMA4
        | {"global_head_dim": 16, "tie_word_embeddings": False, "rope_parameters": None}
        | {"hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 250},
    ),
    "olmo 3": (
        "Olmo3",
        SIZES
        | {"sliding_window": WINDOW}
        | {"rope_parameters": {"full_attention": PLAIN_YARN, "sliding_attention": LOCAL_ROPE}},
    ),
    "olmo 3 tied": (
        "Olmo3",
        SIZES | {"sliding_window": WINDOW, "rope_parameters": None, "tie_word_embeddings": True},
    ),
    "glm 4": (
        "Glm4",
        SIZES | {"head_dim": 12, "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    ),
    "glm 4 without biases": (
        "Glm4",
        SIZES
        | {"head_dim": 16, "attention_bias": False, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 1.0}},
    ),
    "granite": (
        "Granite",
        SIZES
        | {"embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.4, "attention_multiplier": 0.3},
    ),
    "granite tied": (
        "Granite",
        SIZES | {"attention_bias": True, "tie_word_embeddings": True, "embedding_multiplier": 12, "logits_scaling": 8},
    ),
    "seed oss": ("SeedOss", SIZES | {"head_dim": 16, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "seed oss, output biases": (
        "SeedOss",
        SIZES
        | {"head_dim": 6, "attention_dropout": 0.0, "residual_dropout": 0.0, "attention_out_bias": True}
        | {"tie_word_embeddings": True},
    ),
    "ernie 4.5": ("Ernie4_5", SIZES | {"head_dim": 16, "use_bias": True}),
    "ernie 4.5 untied": ("Ernie4_5", SIZES | {"head_dim": 8, "tie_word_embeddings": False}),
    "glm 4.7 flash": (
        "Glm4MoeLite",
        {key: each for key, each in LATENT.items() if key != "first_k_dense_replace"}
        | {"q_lora_rank": 16, "n_group": 4, "topk_group": 2, "rope_parameters": YARN_ROPE | {"mscale": 1.0}},
    ),
    "glm 4.7 flash tied": (
        "Glm4MoeLite",
        {key: each for key, each in LATENT.items() if key != "first_k_dense_replace"}
        | {"q_lora_rank": None, "norm_topk_prob": False, "n_shared_experts": 1, "tie_word_embeddings": True}
        | {"mlp_layer_types": ["dense", "sparse"] * 2 + ["dense"]},
    ),
    "ernie 4.5 moe": (
        "Ernie4_5_Moe",
        SIZES
        | {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 12, "moe_num_shared_experts": 2}
        | {"moe_layer_start_index": 1, "moe_layer_end_index": -1},
    ),
    "ernie 4.5 moe untied": (
        "Ernie4_5_Moe",
        SIZES
        | {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 20, "moe_num_shared_experts": 0}
        | {"moe_layer_start_index": 3, "moe_layer_interval": 2, "tie_word_embeddings": False},
    ),
    "granite moe": ("GraniteMoe", SIZES | GRANITE_MOE),
    "granite moe tied": (
        "GraniteMoe",
        SIZES | GRANITE_MOE | {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 4},
    ),
    "granite moe shared": ("GraniteMoeShared", SIZES | GRANITE_MOE | {"shared_intermediate_size": 20}),
    "granite moe shared, none": (
        "GraniteMoeShared",
        SIZES | GRANITE_MOE | {"num_local_experts": 5, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    ),
    "granite 4": ("GraniteMoeHybrid", SIZES | GRANITE_4 | {"position_embedding_type": "rope"}),
    "granite 4 without positions": (
        "GraniteMoeHybrid",
        SIZES | GRANITE_4 | {"position_embedding_type": None, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "hunyuan moe": (
        "HunYuanMoEV1",
        SIZES | {"head_dim": 12, "num_experts": 6, "moe_topk": 3, "rope_parameters": ALPHA_ROPE},
    ),
    "hunyuan moe tied": (
        "HunYuanMoEV1",
        SIZES
        | {"head_dim": 8, "num_experts": 5, "moe_topk": [2] * LAYERS, "attention_bias": True}
        | {"num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "qwen 2 moe": ("Qwen2Moe", SIZES | MOE | {"shared_expert_intermediate_size": 20, "mlp_only_layers": [0]}),
    "qwen 2 moe tied, windows": (
        "Qwen2Moe",
        SIZES
        | MOE
        | WINDOWS
        | {"max_window_layers": 4, "decoder_sparse_step": 2, "tie_word_embeddings": True, "norm_topk_prob": True}
        | {"qkv_bias": False, "shared_expert_intermediate_size": 28},
    ),
    "llama 4 scout": (
        "Llama4",
        SIZES | LLAMA4 | {"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": 1.0, "high_freq_factor": 1.0}},
    ),
    "llama 4 maverick": (
        "Llama4",
        SIZES
        | LLAMA4
        | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "num_local_experts": 5, "num_experts_per_tok": 2}
        | {"attention_bias": True, "no_rope_layers": [1, 1, 0, 1, 1], "tie_word_embeddings": True, "head_dim": 12},
    ),
    "llama 4 without temperature": (
        "Llama4",
        SIZES
        | LLAMA4
        | {"attn_temperature_tuning": False, "moe_layers": [2, 3, 4], "num_key_value_heads": 4}
        | {"layer_types": ["chunked_attention", *["full_attention"] * 3, "chunked_attention"]},
    ),
    "phi 4 mini": (
        "Phi3",
        SIZES
        | {"tie_word_embeddings": True, "original_max_position_embeddings": 14}
        | {"rope_parameters": PARTIAL_LONG_ROPE},
    ),
    "arcee": ("Arcee", SIZES | {"hidden_act": "relu2", "head_dim": 12, "rope_parameters": PLAIN_YARN}),
    "arcee tied, biases": (
        "Arcee",
        SIZES | {"num_key_value_heads": 4, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    # With 48 hidden values a learned value's gradient is the small rest of a sum, and so are its errors.
    "apertus": ("Apertus", SIZES | {"intermediate_size": 44, "rope_parameters": LLAMA3_ROPE}),
    "apertus tied, unscaled": (
        "Apertus",
        SIZES | {"head_dim": 12, "num_key_value_heads": 1, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "hunyuan": (
        "HunYuanDenseV1",
        SIZES | {"head_dim": 12, "rope_parameters": ALPHA_ROPE, "tie_word_embeddings": True},
    ),
    "hunyuan, dynamic": (
        "HunYuanDenseV1",
        SIZES
        | {"head_dim": 8, "num_key_value_heads": 4, "attention_bias": True, "max_position_embeddings": 14}
        | {"rope_parameters": DYNAMIC_ROPE},
    ),
    "exaone 4": (
        "Exaone4",
        SIZES | {"head_dim": 12, "sliding_window": WINDOW, "sliding_window_pattern": 4, "rope_parameters": LLAMA3_ROPE},
    ),
    "exaone 4 tied, global": (
        "Exaone4",
        SIZES
        | {"head_dim": 16, "sliding_window": None, "tie_word_embeddings": True}
        | {"layer_types": ["full_attention"] * LAYERS},
    ),
    "cohere": ("Cohere", SIZES | {"layer_norm_eps": 1e-2, "logit_scale": 0.3, "head_dim": 12}),
    "cohere untied, biases": (
        "Cohere",
        SIZES
        | {"layer_norm_eps": 1e-2, "tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 4},
    ),
    "cohere 2": (
        "Cohere2",
        SIZES | {"layer_norm_eps": 1e-2, "logit_scale": 0.25, "sliding_window": WINDOW, "sliding_window_pattern": 3},
    ),
    "cohere 2 untied": (
        "Cohere2",
        SIZES
        | {"layer_norm_eps": 1e-2, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
        | {"sliding_window": WINDOW + 3, "attention_bias": True},
    ),
    "gpt oss": (
        "GptOss",
        SIZES
        | {"head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 5, "num_experts_per_tok": 3}
        | {"rope_parameters": PLAIN_YARN | {"truncate": False}},
    ),
    "gpt oss tied": (
        "GptOss",
        SIZES
        | {"head_dim": 6, "num_key_value_heads": 1, "attention_bias": False, "tie_word_embeddings": True}
        | {"sliding_window": WINDOW + 2, "num_local_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 4}
        | {"layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"]},
    ),
    "gemma": ("Gemma", SIZES | {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma untied": ("Gemma", SIZES | {"head_dim": 8, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    "vault gemma": (
        "VaultGemma",
        SIZES
        | {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0}
        | {"final_logit_softcapping": 3.0},
    ),
    "vault gemma, global": (
        "VaultGemma",
        SIZES
        | {"head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None}
        | {"layer_types": ["full_attention"] * LAYERS, "tie_word_embeddings": False, "num_key_value_heads": 1},
    ),
    "glm": (
        "Glm",
        SIZES | {"head_dim": 12, "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    ),
    "glm without biases": (
        "Glm",
        SIZES
        | {"head_dim": 16, "attention_bias": False, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 1.0}},
    ),
    "helium": ("Helium", SIZES | {"head_dim": 8}),
    "helium tied, biases": (
        "Helium",
        SIZES | {"head_dim": 16, "num_attention_heads": 2, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "starcoder 2": (
        "Starcoder2",
        SIZES | {"norm_epsilon": 1e-2, "sliding_window": WINDOW, "num_key_value_heads": 1, "residual_dropout": 0.0},
    ),
    "starcoder 2 untied": (
        "Starcoder2",
        SIZES | {"norm_epsilon": 1e-2, "sliding_window": None, "use_bias": False, "tie_word_embeddings": False},
    ),
    "stablelm": (
        "StableLm",
        SIZES | {"layer_norm_eps": 1e-2, "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.25}},
    ),
    "stablelm 2 tied": (
        "StableLm",
        SIZES
        | {"layer_norm_eps": 1e-2, "use_qkv_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    ),
    "cwm": ("Cwm", SIZES | {"sliding_window": WINDOW, "head_dim": 12, "rope_parameters": LLAMA3_ROPE}),
    "cwm tied": (
        "Cwm",
        SIZES
        | {"sliding_window": WINDOW + 2, "head_dim": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]},
    ),
    "youtu": ("Youtu", DENSE_LATENT | {"q_lora_rank": 16, "rope_parameters": YARN_ROPE | {"mscale": 1.0}}),
    "youtu untied": ("Youtu", DENSE_LATENT | {"q_lora_rank": None, "tie_word_embeddings": False}),
    "solar open": ("SolarOpen", SOLAR | {"head_dim": 12, "n_group": 4, "topk_group": 2}),
    "solar open tied, biases": (
        "SolarOpen",
        SOLAR
        | {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True, "norm_topk_prob": False}
        | {"n_shared_experts": 1, "rope_parameters": PLAIN_YARN},
    ),
    "k exaone": (
        "ExaoneMoe",
        SIZES
        | MOE
        | {"head_dim": 12, "sliding_window": WINDOW, "sliding_window_pattern": 4, "num_shared_experts": 2}
        | {"routed_scaling_factor": 1.5, "n_group": 3, "topk_group": 2, "num_experts": 6},
    ),
    "k exaone tied, without positions": (
        "ExaoneMoe",
        SIZES
        | MOE
        | {"head_dim": 8, "sliding_window": 3, "layer_types": ["full_attention"] * LAYERS, "norm_topk_prob": False}
        | {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "hy 3": ("HYV3", SIZES | MOE | {"head_dim": 12, "num_shared_experts": 2, "router_scaling_factor": 1.5}),
    "hy 3 tied": (
        "HYV3",
        SIZES
        | MOE
        | {"head_dim": 8, "num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True}
        | {"mlp_layer_types": ["dense", "sparse"] * 2 + ["dense"]},
    ),
    "gpt 2": ("GPT2", GPT),
    "gpt 2 untied": ("GPT2", GPT | {"n_inner": 48, "tie_word_embeddings": False}),
}


BUFFERS = ("e_score_correction_bias", "expert_bias", "layer_scalar")  # of a folder, which no loss teaches


class Case:
    """A model of theirs, the folder that it wrote, and the same model here."""

    def __init__(self, name: str, folder: Path) -> None:
        prefix, settings = CASES[name]
        config = getattr(transformers, CONFIGS.get(prefix, f"{prefix}Config"))(**settings)
        self.model = getattr(transformers, prefix + ("LMHeadModel" if prefix == "GPT2" else "ForCausalLM"))(config)
        self.model.eval()
        torch.manual_seed(0)
        with torch.no_grad():
            buffers = [each for name, each in self.model.named_buffers() if name.endswith(BUFFERS)]
            rates = [each for name, each in self.model.named_parameters() if name.endswith("A_log")]
            for parameter in [*self.model.parameters(), *buffers]:
                if any(parameter is each for each in rates):  # with faster decays, little would depend on the state
                    parameter.uniform_(-2, 0.5)
                elif parameter.ndim == 1:  # away from 1 and 0: a scale or bias that is dropped or swapped shows
                    parameter += torch.empty_like(parameter).uniform_(-0.5, 0.5)
                else:
                    parameter.normal_(0, 1 / math.sqrt(parameter.shape[-1]))
        self.model.save_pretrained(folder, max_shard_size="20KB")  # in several files
        self.folder = folder
        self.tokens = np.random.default_rng(0).integers(3, 250, (ROWS, LENGTH))
        self.here: Pretrained = jaxopt_llm.load_pretrained(folder)

    def their_logits(self, model: Any) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor(self.tokens), use_cache=False).logits.numpy()


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    made: dict[str, Case] = {}

    class Made(dict[str, Case]):
        def __missing__(self, name: str) -> Case:
            self[name] = Case(name, tmp_path_factory.mktemp("model"))
            return self[name]

    return Made(made)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_the_familys_own(name: str, cases: dict[str, Case]) -> None:
    case = cases[name]
    expected = case.their_logits(case.model)
    found = case.here.logits(case.tokens)
    assert (found.dtype, found.shape) == (jnp.float32, expected.shape)
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", CASES)
def test_a_round_trip_is_equal_to_the_bit(name: str, cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases[name]
    case.here.save_pretrained(tmp_path / "back")
    back, said = type(case.model).from_pretrained(
        tmp_path / "back", attn_implementation="eager", output_loading_info=True
    )
    assert not any(said.values()), said
    for key, value in case.model.state_dict().items():
        assert torch.equal(back.state_dict()[key], value), key
    np.testing.assert_array_equal(case.their_logits(back), case.their_logits(case.model))
    again = jaxopt_llm.load_pretrained(tmp_path / "back")
    assert again.config == case.here.config
    jax.tree.map(np.testing.assert_array_equal, again.params, case.here.params)


@pytest.mark.parametrize(
    "name",
    [
        *("mistral 0.1", "gpt 2", "gpt oss tied", "gemma 2", "mixtral", "qwen 3 moe", "olmoe", "deepseek 2 lite"),
        *("deepseek 3", "llama 4 scout", "granite moe shared", "ernie 4.5 moe"),
        "granite 4 without positions",
    ],
)
def test_a_model_of_ones_own_is_loaded_there(name: str, cases: dict[str, Case], tmp_path: Path) -> None:
    """Whose config.json says what ModelConfig knows, and no more."""
    case = cases[name]
    write_model_folder(tmp_path / "own", case.here.params, case.here.config, max_file_bytes=20_000)
    assert (tmp_path / "own" / safetensors.INDEX).exists()
    own = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own", attn_implementation="eager")
    assert type(own) is type(case.model)
    np.testing.assert_array_equal(case.their_logits(own), case.their_logits(case.model))


@pytest.mark.parametrize(
    "name",
    [
        *("mixtral", "qwen 3 moe", "olmoe", "deepseek 2", "deepseek 3", "ernie 4.5 moe", "granite moe shared"),
        *("k exaone", "hy 3"),
    ],
)
def test_experts_are_read_as_the_classes_hold_them(name: str, cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases[name]
    case.model.save_pretrained(tmp_path, save_original_format=False)
    assert any(stored.array.ndim == 3 for stored in safetensors.open_folder(tmp_path).values())
    found = jaxopt_llm.load_pretrained(tmp_path)
    assert found.config == case.here.config
    jax.tree.map(np.testing.assert_array_equal, found.params, case.here.params)


# The further forms of a family differ in what the logits show already.
ONE_EACH = {*{prefix: name for name, (prefix, _) in reversed(CASES.items())}.values(), "gemma 4, experts"}


@pytest.mark.parametrize("name", [name for name in CASES if name in ONE_EACH])
def test_loss_and_gradients_are_the_familys_own(name: str, cases: dict[str, Case], tmp_path: Path) -> None:
    """Without what balances a router, which is another function there, and added on request."""
    case = cases[name]
    ids = torch.tensor(case.tokens)
    expected = case.model(ids, labels=ids, use_cache=False).loss
    case.model.zero_grad()
    expected.backward()

    # Their own code gives the gradients of experts the names that folders have.
    gradients = {key: each.grad for key, each in case.model.named_parameters() if each.grad is not None}
    case.model.save_pretrained(tmp_path, state_dict=gradients)
    theirs = safetensors.open_folder(tmp_path)

    here = case.here
    parts = Decoder(replace_fields(here.config, {"moe.balance_loss": 0.0}))
    mask = np.arange(LENGTH) < LENGTH - 1
    batch = Batch(
        tokens=case.tokens,
        targets=np.roll(case.tokens, -1, axis=1),
        loss_mask=np.broadcast_to(mask, case.tokens.shape),
        segment_ids=np.ones_like(case.tokens),
        positions=np.broadcast_to(np.arange(LENGTH), case.tokens.shape),
    )
    one = jax.tree.map(lambda field: jnp.asarray(field[None], field.dtype if field.dtype == bool else np.int32), batch)
    tokens = ROWS * (LENGTH - 1)

    @jax.jit
    def run(params: Any) -> Any:
        nothing = jax.tree.map(lambda leaf: None, params)
        sums, gradients = scan.loss_and_gradients(
            parts, params, nothing, one, jnp.float32(1 / tokens), here.placement, RematConfig("none")
        )
        return sums[OBJECTIVE], gradients

    loss, gradients = run(here.params)
    np.testing.assert_allclose(loss / tokens, expected.item(), rtol=1e-5)
    leaves = {path: np.asarray(leaf) for path, leaf in tree.leaves_with_path(gradients)}
    family, config = huggingface.read_config(case.folder)
    for key, tensor in list_tensor_layouts(family, config).items():
        pieces = []
        for piece in tensor.pieces:
            place = tuple(each for each in (piece.layer, piece.expert) if each is not None)
            pieces.append(leaves[piece.path][place][tuple(slice(size) for size in piece.spec.shape)])
        if key.endswith(BUFFERS):
            assert key not in theirs
            continue
        wanted = theirs[key].array
        assert np.abs(tensor.join(pieces) - wanted).max() <= 1e-4 * np.abs(wanted).max(), key


def test_the_formats_own_library_reads_what_is_written(tmp_path: Path) -> None:
    """Of several dtypes, and of tensors without values or dimensions."""
    library = pytest.importorskip("safetensors.torch")
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(4).astype(jnp.bfloat16),
        "c": np.zeros((0, 3), np.float16),
        "d": np.array(1.5, np.float16),
    }
    described = {name: safetensors.TensorSpec(array.dtype, array.shape) for name, array in arrays.items()}
    safetensors.write_folder(tmp_path, described, arrays.__getitem__, safetensors.MAX_FILE_BYTES)
    found = library.load_file(tmp_path / safetensors.SINGLE)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert str(found[name].dtype) == f"torch.{array.dtype}"
        np.testing.assert_array_equal(found[name].float().numpy(), array.astype(np.float32))


def test_every_family_is_here_twice() -> None:
    """Except those without a class of text alone, which test_text_part_hf_torch.py has."""
    classes = [f"{prefix}LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM" for prefix, _ in CASES.values()]
    of_text = [each for each in find_family.FAMILIES if not each.architecture.endswith("ForConditionalGeneration")]
    assert all(classes.count(family.architecture) >= 2 for family in of_text)
