"""Families of Hugging Face models: a table of tensor names and config.json fields for each.

A family fits a ModelConfig if the config.json that it writes reads back as the same model.
"""

from jaxopt_llm.checkpoint.huggingface import codecs, quantised, rope_codecs
from jaxopt_llm.checkpoint.huggingface.codecs import Codec, Settings, Unsupported
from jaxopt_llm.checkpoint.huggingface.family import BY_HEAD, Family, describe_nearest
from jaxopt_llm.config import ModelConfig

# --- names of tensors: see `Family.names`

OUTSIDE = {
    "model.embed_tokens.weight": "non_layer/embedding/table",
    "model.norm.weight": "non_layer/final_norm/scale",
    "lm_head.weight": "non_layer/head/table",
}


def layer_names(names: dict[str, str]) -> dict[str, str]:
    """Return the names with the prefix of a layer."""
    return {f"model.layers.{{}}.{name}": ours for name, ours in names.items()}


def mlp_names(module: str, prefix: str = "mlp/") -> dict[str, str]:
    """Return the names of the three projections of a gated MLP. prefix: start of our leaves' paths."""
    return layer_names({f"{module}.{name}_proj.weight": f"{prefix}{name}" for name in ("gate", "up", "down")})


ATTENTION = layer_names(
    {f"self_attn.{name[0]}_proj.weight": f"attention/{name}" for name in ("query", "key", "value", "output")}
)
FUSED = layer_names(
    {
        "self_attn.qkv_proj.weight": "attention/query attention/key attention/value",
        "self_attn.o_proj.weight": "attention/output",
        "mlp.gate_up_proj.weight": "mlp/gate mlp/up",
        "mlp.down_proj.weight": "mlp/down",
    }
)
QKV_BIASES = layer_names(
    {f"self_attn.{name[0]}_proj.bias": f"attention/{name}_bias" for name in ("query", "key", "value")}
)
BIASES = QKV_BIASES | layer_names(
    {"self_attn.o_proj.bias": "attention/output_bias"}
    | {f"mlp.{name}_proj.bias": f"mlp/{name}_bias" for name in ("gate", "up", "down")}
)
QK_NORMS = layer_names({"self_attn.q_norm.weight": "query_norm/scale", "self_attn.k_norm.weight": "key_norm/scale"})
MLP = mlp_names("mlp")
NORMS = layer_names(
    {"input_layernorm.weight": "attention_norm/scale", "post_attention_layernorm.weight": "mlp_norm/scale"}
)
POST_NORMS = layer_names(
    {
        "post_attention_layernorm.weight": "attention_post_norm/scale",
        "post_feedforward_layernorm.weight": "mlp_post_norm/scale",
    }
)
GEMMA_NORMS = NORMS | POST_NORMS | layer_names({"pre_feedforward_layernorm.weight": "mlp_norm/scale"})
GLM_NORMS = NORMS | layer_names(
    {
        "post_self_attn_layernorm.weight": "attention_post_norm/scale",
        "post_mlp_layernorm.weight": "mlp_post_norm/scale",
    }
)
LLAMA = OUTSIDE | ATTENTION | MLP | NORMS
LATENT_ATTENTION = layer_names(
    {
        "self_attn.q_proj.weight": "attention/query",
        "self_attn.q_a_proj.weight": "attention/query_down",
        "self_attn.q_a_layernorm.weight": "query_latent_norm/scale",
        "self_attn.q_b_proj.weight": "attention/query_up",
        "self_attn.kv_a_proj_with_mqa.weight": "attention/latent attention/rotary_key",
        "self_attn.kv_a_layernorm.weight": "latent_norm/scale",
        "self_attn.kv_b_proj.weight": f"attention/key{BY_HEAD}attention/value",
        "self_attn.o_proj.weight": "attention/output",
    }
)
MIXTRAL_EXPERTS = layer_names(
    {
        "block_sparse_moe.gate.weight": "mlp/router",
        "block_sparse_moe.experts.{}.w1.weight": "mlp/gate",
        "block_sparse_moe.experts.{}.w3.weight": "mlp/up",
        "block_sparse_moe.experts.{}.w2.weight": "mlp/down",
    }
)
EXPERTS = layer_names({"mlp.gate.weight": "mlp/router"}) | mlp_names("mlp.experts.{}")
SHARED_EXPERTS = mlp_names("mlp.shared_experts", "mlp/shared_")
ROUTER_BIAS = layer_names({"mlp.gate.e_score_correction_bias": "mlp/router_bias"})


def stacked_expert_names(module: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Return `Family.in_memory_names` of the experts.

    Args:
        module: name of the module that holds the experts in the folder's tensor names.
        gate: name of the gate projection there.
        up: name of the up projection there.
        down: name of the down projection there.
    """
    gate, up, down = (f"model.layers.{{}}.{module}.experts.{{}}.{name}.weight" for name in (gate, up, down))
    return {"model.layers.{}.mlp.experts.gate_up_proj": f"{gate} {up}", "model.layers.{}.mlp.experts.down_proj": down}


STACKED_EXPERTS = stacked_expert_names("mlp", "gate_proj", "up_proj", "down_proj")
STACKED_MIXTRAL_EXPERTS = {
    **stacked_expert_names("block_sparse_moe", "w1", "w3", "w2"),
    "model.layers.{}.mlp.gate.weight": "model.layers.{}.block_sparse_moe.gate.weight",
}
GPT = {
    "transformer.wte.weight": "non_layer/embedding/table",
    "transformer.wpe.weight": "non_layer/positions/table",
    "transformer.ln_f.weight": "non_layer/final_norm/scale",
    "transformer.ln_f.bias": "non_layer/final_norm/bias",
    "lm_head.weight": "non_layer/head/table",
    "transformer.h.{}.ln_1.weight": "attention_norm/scale",
    "transformer.h.{}.ln_1.bias": "attention_norm/bias",
    "transformer.h.{}.ln_2.weight": "mlp_norm/scale",
    "transformer.h.{}.ln_2.bias": "mlp_norm/bias",
    "transformer.h.{}.attn.c_attn.weight": "attention/query attention/key attention/value",
    "transformer.h.{}.attn.c_attn.bias": "attention/query_bias attention/key_bias attention/value_bias",
    "transformer.h.{}.attn.c_proj.weight": "attention/output",
    "transformer.h.{}.attn.c_proj.bias": "attention/output_bias",
    "transformer.h.{}.mlp.c_fc.weight": "mlp/up",
    "transformer.h.{}.mlp.c_fc.bias": "mlp/up_bias",
    "transformer.h.{}.mlp.c_proj.weight": "mlp/down",
    "transformer.h.{}.mlp.c_proj.bias": "mlp/down_bias",
}


# --- families

BASIC_CODECS = (codecs.SIZES, codecs.HEADS, rope_codecs.ROPE)
ROTARY_CODECS = (*BASIC_CODECS, codecs.MLP_SIZE)
GATED_CODECS = (*ROTARY_CODECS, codecs.SWIGLU)
UNTIED_DEFAULTS: Settings = {"tie_word_embeddings": False, "rope_theta": 10_000.0}


DEEPSEEK_NAMES = OUTSIDE | LATENT_ATTENTION | MLP | NORMS | EXPERTS | SHARED_EXPERTS
ROUTED_CODECS: tuple[Codec, ...] = (  # DeepSeek's experts
    codecs.SHARED_EXPERT_SIZES,
    codecs.copy_fields(
        {"moe.dense_layers": "first_k_dense_replace", "moe.experts": "n_routed_experts"}
        | {"moe.experts_per_token": "num_experts_per_tok", "moe.router_scale": "routed_scaling_factor"}
    ),
    codecs.require_values(moe_layer_freq=1),
)
SIGMOID_CODECS: tuple[Codec, ...] = (  # those of DeepSeek-V3
    *ROUTED_CODECS,
    codecs.RENORMALISES,
    codecs.copy_fields({"moe.router_groups": "n_group", "moe.router_groups_per_token": "topk_group"}),
    codecs.require_values(topk_method="noaux_tc", scoring_func="sigmoid"),
    codecs.set_fields({"moe.router": "sigmoid", "moe.router_bias": True}),
)
SIGMOID_DEFAULTS: Settings = {
    **{"n_shared_experts": 1, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    "router_aux_loss_coef": 0.0,
}
DEEPSEEK_CODECS: tuple[Codec, ...] = (
    codecs.SIZES,
    codecs.MLP_SIZE,
    codecs.LATENTS,
    codecs.QUERY_LATENTS,
    rope_codecs.SCORED_ROPE,
    codecs.SWIGLU,
    codecs.copy_fields({"moe.balance_loss": "aux_loss_alpha"}),
    codecs.require_values(attention_bias=False),
)
DEEPSEEK_DEFAULTS = UNTIED_DEFAULTS | {
    **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    "aux_loss_alpha": 0.001,
}

FAMILIES = (
    Family(
        "llama", "LlamaForCausalLM", LLAMA | BIASES, (*GATED_CODECS, codecs.DIVISIBLE, codecs.BIASES), UNTIED_DEFAULTS
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        LLAMA,
        (*GATED_CODECS, codecs.ONE_WINDOW),
        UNTIED_DEFAULTS | {"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    Family(
        "ministral",
        "MinistralForCausalLM",
        LLAMA,
        (*GATED_CODECS, codecs.WINDOWS_BY_TYPE),
        UNTIED_DEFAULTS | {"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    Family(
        "ministral3",
        "Ministral3ForCausalLM",
        LLAMA,
        (*BASIC_CODECS[:2], rope_codecs.GROWING_ROPE, codecs.MLP_SIZE, codecs.SWIGLU, codecs.ONE_WINDOW),
        UNTIED_DEFAULTS | {"num_key_value_heads": 8, "head_dim": 128},
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        LLAMA | QKV_BIASES,
        (*GATED_CODECS, codecs.WINDOWS_FROM_LAYER, codecs.set_fields({"biases": "qkv"})),
        UNTIED_DEFAULTS | {"sliding_window": 4096, "max_window_layers": 28},
        second_names=("qwen2_5_vl_text",),
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        LLAMA | QK_NORMS,
        (
            *GATED_CODECS,
            codecs.WINDOWS_FROM_LAYER,
            codecs.require_values(attention_bias=False),
            codecs.set_fields({"qk_norm": "head"}),
        ),
        UNTIED_DEFAULTS | {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
        second_names=("qwen3_vl_text",),
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        OUTSIDE | ATTENTION | MLP | GEMMA_NORMS,
        (
            *ROTARY_CODECS,
            codecs.DIVISIBLE,
            codecs.ALTERNATING_WINDOWS,
            codecs.QUERY_SCALAR,
            codecs.SOFTCAPS,
            codecs.require_values(hidden_activation="gelu_pytorch_tanh", attention_bias=False),
            codecs.require_values(use_bidirectional_attention=False),
            codecs.ROOT_SCALE,
            codecs.set_fields({"norm_placement": "both", "norm_zero_centered": True, "mlp": "geglu"}),
        ),
        {"tie_word_embeddings": True, "rope_theta": 10_000.0, "num_key_value_heads": 4, "head_dim": 256}
        | {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        | {"sliding_window": 4096},
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        OUTSIDE | ATTENTION | MLP | GEMMA_NORMS | QK_NORMS,
        (
            *(codecs.SIZES, codecs.HEADS, rope_codecs.LAYERED_ROPE, codecs.MLP_SIZE),
            codecs.DIVISIBLE,
            codecs.GEMMA3_WINDOWS,
            codecs.QUERY_SCALAR,
            codecs.SOFTCAPS,
            codecs.require_values(hidden_activation="gelu_pytorch_tanh", attention_bias=False),
            codecs.require_values(use_bidirectional_attention=False),
            codecs.ROOT_SCALE,
            codecs.set_fields(
                {"norm_placement": "both", "norm_zero_centered": True, "qk_norm": "head", "mlp": "geglu"}
            ),
        ),
        {
            "tie_word_embeddings": True,
            "rope_theta": 1_000_000.0,
            rope_codecs.LOCAL_THETA: 10_000.0,
            "rms_norm_eps": 1e-6,
        }
        | {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
        | {"query_pre_attn_scalar": 256, "sliding_window": 4096},
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        OUTSIDE | FUSED | NORMS,
        (codecs.SIZES, codecs.HEADS, rope_codecs.PHI3_ROPE, codecs.MLP_SIZE, codecs.SWIGLU, codecs.ONE_WINDOW),
        UNTIED_DEFAULTS | {"original_max_position_embeddings": 4096},
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        OUTSIDE | ATTENTION | MLP | QK_NORMS | POST_NORMS,
        (
            *GATED_CODECS,
            codecs.require_values(attention_bias=False),
            codecs.set_fields({"norm_placement": "post", "qk_norm": "projection"}),
        ),
        UNTIED_DEFAULTS,
    ),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        OUTSIDE | ATTENTION | MLP | QK_NORMS | POST_NORMS,
        (
            *(codecs.SIZES, codecs.HEADS, rope_codecs.LAYERED_ROPE, codecs.MLP_SIZE, codecs.SWIGLU),
            codecs.OLMO3_WINDOWS,
            codecs.require_values(attention_bias=False),
            codecs.set_fields({"norm_placement": "post", "qk_norm": "projection"}),
        ),
        UNTIED_DEFAULTS | {"rope_theta": 500_000.0, rope_codecs.LOCAL_THETA: 500_000.0, "sliding_window": 4096},
    ),
    Family(
        "glm4",
        "Glm4ForCausalLM",
        OUTSIDE
        | ATTENTION
        | QKV_BIASES
        | layer_names({"mlp.gate_up_proj.weight": "mlp/gate mlp/up", "mlp.down_proj.weight": "mlp/down"})
        | GLM_NORMS,
        (
            *(codecs.SIZES, codecs.HEADS, rope_codecs.PARTIAL_ROPE, codecs.MLP_SIZE, codecs.SWIGLU),
            *(codecs.INPUT_BIASES, rope_codecs.INTERLEAVED),
            codecs.set_fields({"norm_placement": "both"}),
        ),
        UNTIED_DEFAULTS
        | {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, rope_codecs.SHARE: 0.5}
        | {"rms_norm_eps": 0.00000015625},
    ),
    Family(
        "granite",
        "GraniteForCausalLM",
        LLAMA | BIASES,
        (*GATED_CODECS, codecs.BIASES, *codecs.MULTIPLIERS),
        UNTIED_DEFAULTS
        | {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0, "logits_scaling": 1.0},
    ),
    Family(
        "seed_oss",
        "SeedOssForCausalLM",
        LLAMA | BIASES,
        (*GATED_CODECS, codecs.OUTPUT_BIASES, codecs.require_values(mlp_bias=False)),
        UNTIED_DEFAULTS | {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    ),
    Family(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        LLAMA | BIASES,
        (*GATED_CODECS, codecs.ALL_BIASES, rope_codecs.INTERLEAVED),
        {"tie_word_embeddings": True, "rope_theta": 500_000.0, "num_key_value_heads": 2, "head_dim": 128},
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        LLAMA,
        (*GATED_CODECS, codecs.NO_BIASES, codecs.NOPE),
        {"tie_word_embeddings": True, "rope_theta": 2_000_000.0, "num_key_value_heads": 4, "no_rope_layer_interval": 4},
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        OUTSIDE | ATTENTION | NORMS | MIXTRAL_EXPERTS,
        (
            *BASIC_CODECS,
            codecs.SWIGLU,
            codecs.ONE_WINDOW,
            codecs.copy_expert_count("num_local_experts", "num_experts", 8),
            codecs.TOP_K,
            codecs.copy_fields({"moe.expert_width": "intermediate_size"}),
            codecs.require_values(router_jitter_noise=0.0),
            codecs.require_absent("layer_types"),
        ),
        {"tie_word_embeddings": False, "rope_theta": 1_000_000.0, "num_key_value_heads": 8}
        | {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.001},
        in_memory_names=STACKED_MIXTRAL_EXPERTS,
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        LLAMA | QK_NORMS | EXPERTS,
        (
            *GATED_CODECS,
            codecs.MOE_WINDOW,
            codecs.copy_expert_count("num_experts", "num_local_experts", 128),
            codecs.TOP_K,
            codecs.RENORMALISES,
            codecs.EXPERT_LAYERS,
            codecs.copy_fields({"moe.expert_width": "moe_intermediate_size"}),
            codecs.require_values(attention_bias=False),
            codecs.require_absent("layer_types"),
            codecs.set_fields({"qk_norm": "head"}),
        ),
        UNTIED_DEFAULTS
        | {"num_key_value_heads": 4, "sliding_window": 4096, "decoder_sparse_step": 1, "moe_intermediate_size": 768}
        | {"num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.001},
        in_memory_names=STACKED_EXPERTS,
    ),
    Family(
        "olmoe",
        "OlmoeForCausalLM",
        OUTSIDE | ATTENTION | NORMS | QK_NORMS | EXPERTS,
        (
            *BASIC_CODECS,
            codecs.SWIGLU,
            codecs.PROJECTION_NORMS,
            codecs.copy_expert_count("num_experts", "num_local_experts", 64),
            codecs.TOP_K,
            codecs.RENORMALISES,
            codecs.copy_fields({"moe.expert_width": "intermediate_size"}),
            codecs.require_values(attention_bias=False),
            codecs.require_absent("clip_qkv", "sliding_window", "layer_types"),
            codecs.set_fields({"qk_norm": "projection"}),
        ),
        UNTIED_DEFAULTS | {"num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.01},
        in_memory_names=STACKED_EXPERTS,
    ),
    Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        DEEPSEEK_NAMES,
        (
            *DEEPSEEK_CODECS,
            *ROUTED_CODECS,
            codecs.DIVISIBLE,
            codecs.EXPERT_GROUPS,
            codecs.require_values(mlp_bias=False, scoring_func="softmax", norm_topk_prob=False),
            codecs.set_fields({"moe.router_renormalises": False}),
        ),
        DEEPSEEK_DEFAULTS
        | {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407}
        | {"first_k_dense_replace": 0, "routed_scaling_factor": 1.0},
        in_memory_names=STACKED_EXPERTS,
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        DEEPSEEK_NAMES | ROUTER_BIAS,
        (
            *DEEPSEEK_CODECS,
            *SIGMOID_CODECS,
            codecs.require_values(rope_interleave=True),
            Codec(lambda settings: {}, lambda config: {"num_nextn_predict_layers": 0}),
        ),
        DEEPSEEK_DEFAULTS
        | {"n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "num_experts_per_tok": 8}
        | {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
        | {"n_group": 8, "topk_group": 4},
        mtp_prefix="model.layers.{}.",
        second_names=("kimi_k2",),
        in_memory_names=STACKED_EXPERTS,
    ),
    Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        LLAMA | QKV_BIASES | QK_NORMS | EXPERTS | SHARED_EXPERTS | ROUTER_BIAS,
        (
            *(codecs.SIZES, codecs.HEADS, rope_codecs.PARTIAL_ROPE, codecs.MLP_SIZE, codecs.SWIGLU),
            *(codecs.INPUT_BIASES, codecs.HEAD_NORMS),
            *SIGMOID_CODECS,
            codecs.BALANCE_LOSS,
            Codec(lambda settings: {}, lambda config: {"num_nextn_predict_layers": 0}),
        ),
        UNTIED_DEFAULTS
        | SIGMOID_DEFAULTS
        | {"num_key_value_heads": 8, rope_codecs.SHARE: 0.5, "first_k_dense_replace": 1, "n_routed_experts": 128}
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 1408},
        mtp_prefix="model.layers.{}.",
        in_memory_names=STACKED_EXPERTS,
    ),
    Family(
        "dots1",
        "Dots1ForCausalLM",
        LLAMA | QK_NORMS | EXPERTS | SHARED_EXPERTS | ROUTER_BIAS,
        (
            *(*GATED_CODECS, codecs.WINDOWS_FROM_LAYER),
            *SIGMOID_CODECS,
            codecs.BALANCE_LOSS,
            codecs.require_values(attention_bias=False),
            codecs.set_fields({"qk_norm": "head"}),
        ),
        UNTIED_DEFAULTS
        | SIGMOID_DEFAULTS
        | {"norm_topk_prob": False, "first_k_dense_replace": 0, "sliding_window": 4096, "max_window_layers": 62},
        in_memory_names=STACKED_EXPERTS,
    ),
    Family(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        OUTSIDE
        | ATTENTION
        | NORMS
        | QK_NORMS
        | MIXTRAL_EXPERTS
        | layer_names({"block_sparse_moe.e_score_correction_bias": "mlp/router_bias"}),
        (
            *(codecs.SIZES, codecs.HEADS, rope_codecs.MINIMAX_ROPE, codecs.SWIGLU),
            codecs.copy_expert_count("num_local_experts", "num_experts", 256),
            codecs.TOP_K,
            codecs.copy_fields({"moe.expert_width": "intermediate_size"}),
            codecs.require_values(router_jitter_noise=0.0, scoring_func="sigmoid"),
            codecs.set_fields({"moe.router": "sigmoid", "moe.router_bias": True, "qk_norm": "projection"}),
        ),
        {"tie_word_embeddings": False, "rope_theta": 5_000_000.0, "num_key_value_heads": 8, "head_dim": 128}
        | {"num_experts_per_tok": 8, "router_aux_loss_coef": 0.001},
        in_memory_names={
            **STACKED_MIXTRAL_EXPERTS,
            "model.layers.{}.mlp.e_score_correction_bias": "model.layers.{}.block_sparse_moe.e_score_correction_bias",
        },
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        GPT,
        (
            codecs.GPT_SIZES,
            codecs.GPT_HEADS,
            codecs.require_values(
                activation_function=("gelu_new", "gelu_pytorch_tanh"),
                scale_attn_weights=True,
                scale_attn_by_inverse_layer_idx=False,
                add_cross_attention=False,
            ),
            codecs.set_fields({"positions": "learned", "norm": "layer", "biases": "all", "mlp": "gelu"}),
        ),
        {"tie_word_embeddings": True},
        input_first=True,
        base_prefix="transformer.",
        ignored=("*.attn.bias", "*.attn.masked_bias"),
    ),
)


# --- the family of a model


def find_by_settings(settings: Settings) -> Family:
    """Return the family of a config.json. Raise Unsupported if there is none, or if the file asks for other code."""
    model_type, architectures = settings.get("model_type"), settings.get("architectures")
    if model_type == "mistral" and settings.get("layer_types") is not None:  # as transformers reads it
        model_type, architectures = "ministral", None
    family = next((each for each in FAMILIES if model_type in each.model_types), None)
    if family is None:
        problem = f"no family of this name is read; {describe_nearest(settings, FAMILIES)}"
        raise codecs.unsupported(f"model_type={model_type!r}", problem)
    if architectures not in (None, [family.architecture]):
        problem = f"only {family.architecture} is read; the model would need another head, or layers of another kind"
        raise codecs.unsupported(f"architectures={architectures}", problem)
    codecs.check_value(settings, "is_causal", True)
    if each := settings.get("per_layer_config"):
        raise codecs.unsupported(
            f"per_layer_config={codecs.shorten(each)}", "the model would need settings that differ between its layers"
        )
    quantised.check_method(settings)
    return family


def find_by_model(config: ModelConfig, source: Settings | None = None) -> Family:
    """Return the first family that fits a model.

    Args:
        config: the model.
        source: config.json of the folder that the model came from, whose family is tried first.

    Raises:
        Unsupported: no family fits; the message names the nearest family and the fields that it lacks.
    """
    preferred = (source or {}).get("model_type")
    ordered = sorted(FAMILIES, key=lambda family: preferred not in family.model_types)
    differences = {family: family.find_differences(config) for family in ordered}
    fitting = next((family for family in ordered if not differences[family]), None)
    if fitting is None:
        nearest = min(ordered, key=lambda family: len(differences[family]))
        raise Unsupported(
            f"no Hugging Face family fits the model; the nearest, {nearest.model_type}, does not support "
            f"{', '.join(differences[nearest])}"
        )
    return fitting
