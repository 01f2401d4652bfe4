"""Families of Hugging Face models with experts: a table of tensor names and config.json fields for each."""

from jaxopt_llm.checkpoint.huggingface import codecs, layer_codecs, rope_codecs
from jaxopt_llm.checkpoint.huggingface import tensor_names as names
from jaxopt_llm.checkpoint.huggingface.codecs import Codec, Settings
from jaxopt_llm.checkpoint.huggingface.dense_families import (
    BASIC_CODECS,
    DELTA_CODECS,
    DELTA_DEFAULTS,
    GATED_CODECS,
    GRANITE_DEFAULTS,
    LATENT_CODECS,
    LATENT_DEFAULTS,
    UNTIED_DEFAULTS,
)
from jaxopt_llm.checkpoint.huggingface.family import Family
from jaxopt_llm.model import layers

DEEPSEEK_NAMES = names.OUTSIDE | names.LATENT_ATTENTION | names.MLP | names.NORMS | names.EXPERTS | names.SHARED_EXPERTS
ROUTED_CODECS: tuple[Codec, ...] = (  # DeepSeek's experts
    codecs.SHARED_EXPERT_SIZES,
    codecs.copy_fields(
        {"moe.experts": "n_routed_experts", "moe.experts_per_token": "num_experts_per_tok"}
        | {"moe.router_scale": "routed_scaling_factor"}
    ),
    codecs.require_values(moe_layer_freq=1),
)
FIRST_DENSE = codecs.copy_fields({"moe.dense_layers": "first_k_dense_replace"})
EXPERT_GROUPS = codecs.copy_fields({"moe.router_groups": "n_group", "moe.router_groups_per_token": "topk_group"})
SIGMOID_CODECS: tuple[Codec, ...] = (  # those of DeepSeek-V3
    *ROUTED_CODECS,
    codecs.RENORMALISES,
    EXPERT_GROUPS,
    codecs.require_values(topk_method="noaux_tc", scoring_func="sigmoid"),
    codecs.set_fields({"moe.router": "sigmoid", "moe.router_bias": True}),
)
SIGMOID_DEFAULTS: Settings = {
    **{"n_shared_experts": 1, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    "router_aux_loss_coef": 0.0,
}
DEEPSEEK_CODECS = (*LATENT_CODECS, FIRST_DENSE, codecs.copy_fields({"moe.balance_loss": "aux_loss_alpha"}))
# Read on request only: see `ModelConfig.mtp_layers`.
MTP_COUNT = Codec(lambda settings: {}, lambda config: {"num_nextn_predict_layers": config.mtp_layers})
DEEPSEEK_DEFAULTS = UNTIED_DEFAULTS | LATENT_DEFAULTS | {"aux_loss_alpha": 0.001}
GRANITE_EXPERT_CODECS: tuple[Codec, ...] = (
    *(*BASIC_CODECS, codecs.SWIGLU, codecs.ATTENTION_BIASES, *codecs.MULTIPLIERS, codecs.TOP_K),
    codecs.copy_fields({"moe.experts": "num_local_experts", "moe.expert_width": "intermediate_size"}),
)
GRANITE_EXPERT_DEFAULTS = GRANITE_DEFAULTS | {
    **{"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001},
}
QWEN3_EXPERT_CODECS: tuple[Codec, ...] = (
    *(*GATED_CODECS, codecs.TOP_K, codecs.EXPERT_LAYERS),
    codecs.copy_fields({"moe.expert_width": "moe_intermediate_size"}),
    codecs.require_values(attention_bias=False),
    codecs.set_fields({"qk_norm": "head"}),
)

DELTA_EXPERT_CODECS: tuple[Codec, ...] = (
    *(codecs.TOP_K, codecs.QWEN2_SHARED_SIZE, codecs.copy_fields({"moe.expert_width": "moe_intermediate_size"})),
    codecs.set_fields({"moe.shared_expert_gate": True}),
)
DELTA_EXPERT_DEFAULTS: Settings = {
    **{"num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    "router_aux_loss_coef": 0.001,
}

FAMILIES = (
    Family(
        "mixtral",
        "MixtralForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.NORMS | names.MIXTRAL_EXPERTS,
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
        in_memory_names=names.STACKED_MIXTRAL_EXPERTS,
        classifier="MixtralForSequenceClassification",
        models="Mixtral",
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        names.LLAMA | names.QK_NORMS | names.EXPERTS,
        (
            *(*QWEN3_EXPERT_CODECS, codecs.MOE_WINDOW, codecs.RENORMALISES),
            codecs.copy_expert_count("num_experts", "num_local_experts", 128),
            codecs.require_absent("layer_types"),
        ),
        UNTIED_DEFAULTS
        | {"num_key_value_heads": 4, "sliding_window": 4096, "decoder_sparse_step": 1, "moe_intermediate_size": 768}
        | {"num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.001},
        in_memory_names=names.STACKED_EXPERTS,
        classifier="Qwen3MoeForSequenceClassification",
        models="Qwen3-MoE",
    ),
    Family(
        "qwen3_vl_moe_text",
        "Qwen3VLMoeForConditionalGeneration",  # the text model has no class of its own with a head
        names.LLAMA | names.QK_NORMS | names.WHOLE_EXPERTS,
        (
            *QWEN3_EXPERT_CODECS,
            codecs.copy_expert_count("num_experts", "num_local_experts", 60),
            codecs.require_values(norm_topk_prob=True),
        ),
        UNTIED_DEFAULTS
        | {"rope_theta": 500_000.0, "num_key_value_heads": 16, "decoder_sparse_step": 1, "moe_intermediate_size": 1408}
        | {"num_experts_per_tok": 4, "router_aux_loss_coef": 0.001},
        input_first="*.experts.*_proj",  # as published; transformers 5 saves [out, in], quantisers single experts
        forms=(
            {"input_first": ""},
            {"names": names.LLAMA | names.QK_NORMS | names.EXPERTS, "in_memory_names": names.STACKED_EXPERTS},
        ),
        models="text of Qwen3-VL-MoE",
    ),
    Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        names.OUTSIDE
        | names.GATED_ATTENTION
        | names.FUSED_GATED_DELTA
        | names.MLP
        | names.NORMS
        | names.QK_NORMS
        | names.EXPERTS
        | names.QWEN2_SHARED,
        (
            *(*DELTA_CODECS, *DELTA_EXPERT_CODECS, codecs.MLP_SIZE, codecs.EXPERT_LAYERS, codecs.RENORMALISES),
            codecs.copy_expert_count("num_experts", "num_local_experts", 512),
        ),
        DELTA_DEFAULTS
        | DELTA_EXPERT_DEFAULTS
        | {"num_experts_per_tok": 10, "decoder_sparse_step": 1, "norm_topk_prob": True, "intermediate_size": 5632},
        mtp_prefix="mtp.",
        in_memory_names=names.STACKED_EXPERTS,
        classifier="Qwen3NextForSequenceClassification",
        models="Qwen3-Next",
    ),
    Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        names.OUTSIDE
        | names.GATED_ATTENTION
        | names.SPLIT_GATED_DELTA
        | names.NORMS
        | names.QK_NORMS
        | names.EXPERTS
        | names.QWEN2_SHARED,
        (*DELTA_CODECS, *DELTA_EXPERT_CODECS, codecs.copy_expert_count("num_experts", "num_local_experts", 256)),
        DELTA_DEFAULTS | DELTA_EXPERT_DEFAULTS | {"num_experts_per_tok": 8},
        mtp_prefix="mtp.",
        in_memory_names=names.STACKED_EXPERTS,
        models="text of Qwen3.5 (MoE)",
    ),
    Family(
        "olmoe",
        "OlmoeForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.NORMS | names.QK_NORMS | names.EXPERTS,
        (
            *BASIC_CODECS,
            codecs.SWIGLU,
            codecs.HEADS_FILL_WIDTH,
            codecs.copy_expert_count("num_experts", "num_local_experts", 64),
            codecs.TOP_K,
            codecs.RENORMALISES,
            codecs.copy_fields({"moe.expert_width": "intermediate_size"}),
            codecs.require_values(attention_bias=False),
            codecs.require_absent("clip_qkv", "sliding_window", "layer_types"),
            codecs.set_fields({"qk_norm": "projection"}),
        ),
        UNTIED_DEFAULTS | {"num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.01},
        in_memory_names=names.STACKED_EXPERTS,
        models="OLMoE",
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
        in_memory_names=names.STACKED_EXPERTS,
        classifier="DeepseekV2ForSequenceClassification",
        models="DeepSeek-V2",
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        DEEPSEEK_NAMES | names.ROUTER_BIAS | names.MTP,
        (*DEEPSEEK_CODECS, *SIGMOID_CODECS, codecs.require_values(rope_interleave=True), MTP_COUNT),
        DEEPSEEK_DEFAULTS
        | {"n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "num_experts_per_tok": 8}
        | {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
        | {"n_group": 8, "topk_group": 4},
        mtp_prefix="model.layers.{}.",
        mtp_copies=names.MTP_COPIES,
        second_names=("kimi_k2",),
        in_memory_names=names.STACKED_EXPERTS,
        classifier="DeepseekV3ForSequenceClassification",
        models="DeepSeek-V3, R1, Kimi K2",
    ),
    Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        names.LLAMA
        | names.QKV_BIASES
        | names.QK_NORMS
        | names.EXPERTS
        | names.SHARED_EXPERTS
        | names.ROUTER_BIAS
        | names.MTP,
        (
            *(codecs.SIZES, codecs.HEADS, rope_codecs.PARTIAL_ROPE, codecs.MLP_SIZE, codecs.SWIGLU),
            *(codecs.INPUT_BIASES, codecs.copy_qk_norm("head")),
            *(*SIGMOID_CODECS, FIRST_DENSE),
            codecs.BALANCE_LOSS,
            MTP_COUNT,
        ),
        UNTIED_DEFAULTS
        | SIGMOID_DEFAULTS
        | {"num_key_value_heads": 8, rope_codecs.SHARE: 0.5, "first_k_dense_replace": 1, "n_routed_experts": 128}
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 1408},
        mtp_prefix="model.layers.{}.",
        mtp_copies=names.MTP_COPIES,
        in_memory_names=names.STACKED_EXPERTS,
        models="GLM-4.5, 4.6, 4.7",
    ),
    Family(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        DEEPSEEK_NAMES | names.ROUTER_BIAS | names.MTP,
        (
            *(*LATENT_CODECS, *SIGMOID_CODECS, layer_codecs.EXPERT_TYPES, codecs.BALANCE_LOSS),
            codecs.require_values(rope_interleave=True),
            MTP_COUNT,
        ),
        UNTIED_DEFAULTS
        | SIGMOID_DEFAULTS
        | {"kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64}
        | {"v_head_dim": 256, "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536}
        | {"routed_scaling_factor": 1.8},
        mtp_prefix="model.layers.{}.",
        mtp_copies=names.MTP_COPIES,
        in_memory_names=names.STACKED_EXPERTS,
        models="GLM-4.7-Flash",
    ),
    Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        names.LLAMA | names.EXPERTS | names.SHARED_EXPERTS | names.ERNIE_ROUTER_BIAS,
        (
            *(*GATED_CODECS, rope_codecs.INTERLEAVED, layer_codecs.EXPERT_INTERVAL, codecs.BALANCE_LOSS),
            codecs.copy_shared_experts("moe_num_shared_experts", minimum=0),
            codecs.copy_fields({"moe.experts": "moe_num_experts", "moe.experts_per_token": "moe_k"}),
            codecs.require_values(use_bias=False, moe_norm_min=1e-12),
            codecs.set_fields({"moe.router_bias": True}),
        ),
        {"tie_word_embeddings": True, "rope_theta": 500_000.0, "num_key_value_heads": 4}
        | {"moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2, "moe_intermediate_size": 1536}
        | {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1}
        | {"router_aux_loss_coef": 0.001},
        rows="*.moe_statics.e_score_correction_bias",
        mtp_prefix="model.mtp_",
        in_memory_names=names.STACKED_EXPERTS | names.IN_MEMORY_ERNIE,
        models="ERNIE 4.5 MoE",
    ),
    Family(
        "granitemoe",
        "GraniteMoeForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.BIASES | names.NORMS | names.GRANITE_EXPERTS,
        GRANITE_EXPERT_CODECS,
        GRANITE_EXPERT_DEFAULTS,
        in_memory_names=names.IN_MEMORY_GRANITE,
        models="Granite 3 MoE",
    ),
    Family(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.BIASES | names.NORMS | names.GRANITE_EXPERTS | names.GRANITE_SHARED,
        (*GRANITE_EXPERT_CODECS, codecs.copy_fields({"moe.shared_expert_width": "shared_intermediate_size"})),
        GRANITE_EXPERT_DEFAULTS | {"shared_intermediate_size": 0},
        in_memory_names=names.IN_MEMORY_GRANITE,
        models="Granite 3 MoE",
    ),
    Family(
        "dots1",
        "Dots1ForCausalLM",
        names.LLAMA | names.QK_NORMS | names.EXPERTS | names.SHARED_EXPERTS | names.ROUTER_BIAS,
        (
            *(*GATED_CODECS, codecs.WINDOWS_FROM_LAYER),
            *(*SIGMOID_CODECS, FIRST_DENSE),
            codecs.BALANCE_LOSS,
            codecs.require_values(attention_bias=False),
            codecs.set_fields({"qk_norm": "head"}),
        ),
        UNTIED_DEFAULTS
        | SIGMOID_DEFAULTS
        | {"norm_topk_prob": False, "first_k_dense_replace": 0, "sliding_window": 4096, "max_window_layers": 62},
        in_memory_names=names.STACKED_EXPERTS,
        models="dots.llm1",
    ),
    Family(
        "afmoe",
        "AfmoeForCausalLM",
        names.OUTSIDE
        | names.ATTENTION
        | names.ATTENTION_GATE
        | names.BIASES
        | names.QK_NORMS
        | names.AFMOE_NORMS
        | names.MLP
        | names.mlp_names("mlp.experts.{}")
        | names.AFMOE_ROUTER
        | names.SHARED_EXPERTS,
        (
            *(*GATED_CODECS, codecs.ATTENTION_BIASES, codecs.AFMOE_WINDOWS, codecs.MUP_SCALE),
            codecs.copy_expert_count("num_experts", "num_local_experts", 64),
            codecs.TOP_K,
            codecs.AFMOE_SHARED_EXPERT_SIZES,
            codecs.copy_fields({"moe.dense_layers": "num_dense_layers", "moe.router_scale": "route_scale"}),
            codecs.set_fields({"moe.router": "sigmoid", "moe.router_bias": True}),
            codecs.set_fields({"attention_gate": "element", "qk_norm": "head", "norm_placement": "both"}),
        ),
        UNTIED_DEFAULTS
        | {"head_dim": 128, "sliding_window": 1024, "num_dense_layers": 1, "num_shared_experts": 2, "route_scale": 1.0}
        | {"num_experts_per_tok": 6, "moe_intermediate_size": 1408, "router_aux_loss_coef": 0.0},
        in_memory_names=names.STACKED_EXPERTS,
        models="Trinity (AFMoE)",
    ),
    Family(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        names.OUTSIDE
        | names.ATTENTION
        | names.NORMS
        | names.QK_NORMS
        | names.MIXTRAL_EXPERTS
        | names.layer_names({"block_sparse_moe.e_score_correction_bias": "mlp/router_bias"}),
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
            **names.STACKED_MIXTRAL_EXPERTS,
            "model.layers.{}.mlp.e_score_correction_bias": "model.layers.{}.block_sparse_moe.e_score_correction_bias",
        },
        models="MiniMax-M2",
    ),
    Family(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.BIASES | names.NORMS | names.HUNYUAN_QK_NORMS | names.HUNYUAN_EXPERTS,
        (
            *(codecs.SIZES, codecs.HEADS, rope_codecs.HUNYUAN_ROPE, codecs.SWIGLU, codecs.ATTENTION_BIASES),
            *(codecs.ONE_EXPERT_SIZE, layer_codecs.CHOICES, codecs.BALANCE_LOSS),
            codecs.copy_expert_count("num_experts", "num_local_experts", 1),
            codecs.require_values(use_cla=False),
            codecs.set_fields({"qk_norm": "rotated_head"}),
        ),
        UNTIED_DEFAULTS | {"moe_topk": 1, "router_aux_loss_coef": 0.0},
        in_memory_names=names.STACKED_EXPERTS,
        classifier="HunYuanMoEV1ForSequenceClassification",
        models="Hunyuan-A13B",
    ),
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        names.LLAMA | names.QKV_BIASES | names.EXPERTS | names.QWEN2_SHARED,
        (
            *(*GATED_CODECS, codecs.QWEN2_BIASES, layer_codecs.QWEN2_WINDOWS),
            codecs.copy_expert_count("num_experts", "num_local_experts", 60),
            *(codecs.TOP_K, codecs.RENORMALISES, codecs.EXPERT_LAYERS),
            *(codecs.copy_fields({"moe.expert_width": "moe_intermediate_size"}), codecs.QWEN2_SHARED_SIZE),
            codecs.set_fields({"moe.shared_expert_gate": True}),
        ),
        UNTIED_DEFAULTS
        | {"qkv_bias": True, "sliding_window": 4096, "max_window_layers": 28, "decoder_sparse_step": 1}
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4}
        | {"norm_topk_prob": False, "router_aux_loss_coef": 0.001},
        in_memory_names=names.STACKED_EXPERTS,
        classifier="Qwen2MoeForSequenceClassification",
        models="Qwen1.5-MoE, Qwen2-MoE",
    ),
    Family(
        "llama4_text",
        "Llama4ForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.BIASES | names.NORMS | names.LLAMA4_MLPS,
        (
            *(*BASIC_CODECS, rope_codecs.INTERLEAVED, rope_codecs.TEMPERATURE, codecs.SWIGLU, codecs.ATTENTION_BIASES),
            *(layer_codecs.CHUNKS, layer_codecs.EXPERT_LIST, codecs.TOP_K, codecs.copy_qk_norm("rotated_unit")),
            codecs.copy_fields({"mlp_width": "intermediate_size_mlp", "moe.experts": "num_local_experts"}),
            codecs.ONE_EXPERT_SIZE,
            codecs.require_values(router_jitter_noise=0.0),
            codecs.set_fields(
                {"moe.router": "sigmoid", "moe.router_renormalises": False, "moe.router_weighs": "inputs"}
            ),
        ),
        UNTIED_DEFAULTS
        | {"rope_theta": 500_000.0, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16}
        | {"num_experts_per_tok": 1, "intermediate_size_mlp": 16_384, "interleave_moe_layer_step": 1}
        | {"use_qk_norm": True, "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "floor_scale": 8192}
        | {"attn_temperature_tuning": True, "attn_scale": 0.1, "router_aux_loss_coef": 0.001},
        input_first="*.feed_forward.experts.*",
        swaps_expert_factors=True,
        models="Llama 4 Scout, Maverick (text)",
    ),
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.ATTENTION_BIASES | names.SINKS | names.NORMS | names.GPT_OSS_EXPERTS,
        (
            *(codecs.SIZES, codecs.HEADS, rope_codecs.GPT_OSS_ROPE, codecs.SWIGLU),
            codecs.ALTERNATING_WINDOWS,
            codecs.copy_biases(("attention_bias",), {(False,): "mlp", (True,): "all"}),
            codecs.copy_expert_count("num_local_experts", "num_experts", 128),
            codecs.TOP_K,
            codecs.copy_fields({"moe.expert_width": "intermediate_size"}),
            codecs.require_values(swiglu_limit=layers.SWIGLU_LIMIT, swiglu_alpha=layers.SWIGLU_ALPHA),
            codecs.set_fields({"mlp": "clamped_swiglu", "attention_sinks": True}),
        ),
        {"tie_word_embeddings": False, "rope_theta": 150_000.0, "num_key_value_heads": 8, "head_dim": 64}
        | {"sliding_window": 128, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.001, "attention_bias": True},
        input_first="*.experts.*",
        classifier="GptOssForSequenceClassification",
        models="gpt-oss 20B, 120B",
    ),
    Family(
        "solar_open",
        "SolarOpenForCausalLM",
        names.OUTSIDE
        | names.ATTENTION
        | names.QKV_BIASES
        | names.NORMS
        | names.EXPERTS
        | names.SHARED_EXPERTS
        | names.ROUTER_BIAS,
        (
            *(codecs.SIZES, codecs.HEADS, rope_codecs.PARTIAL_ROPE, codecs.SWIGLU, codecs.INPUT_BIASES),
            *(*SIGMOID_CODECS, codecs.BALANCE_LOSS),
        ),
        UNTIED_DEFAULTS
        | SIGMOID_DEFAULTS
        | {"rope_theta": 1_000_000.0, "num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 128}
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 1280},
        in_memory_names=names.STACKED_EXPERTS,
        models="Solar Open",
    ),
    Family(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        names.LLAMA | names.QK_NORMS | names.EXPERTS | names.SHARED_EXPERTS | names.EXAONE_ROUTER_BIAS,
        (
            *(*GATED_CODECS, codecs.COHERE2_WINDOWS, layer_codecs.PRIOR_EXPERT_TYPES),
            codecs.copy_expert_count("num_experts", "num_local_experts", 64),
            codecs.copy_shared_experts("num_shared_experts", minimum=1),
            codecs.copy_fields({"moe.router_scale": "routed_scaling_factor"}),
            *(codecs.TOP_K, codecs.RENORMALISES, EXPERT_GROUPS),
            codecs.set_fields({"moe.router": "sigmoid", "moe.router_bias": True, "qk_norm": "head"}),
        ),
        UNTIED_DEFAULTS
        | SIGMOID_DEFAULTS
        | {"num_key_value_heads": 32, "sliding_window": 4096, "num_experts_per_tok": 8, "num_shared_experts": 1}
        | {"moe_intermediate_size": 1024, "routed_scaling_factor": 2.5},
        mtp_prefix="mtp.",
        in_memory_names=names.STACKED_EXPERTS | names.IN_MEMORY_EXAONE,
        models="K-EXAONE",
    ),
    Family(
        "hy_v3",
        "HYV3ForCausalLM",
        names.LLAMA | names.BIASES | names.QK_NORMS | names.HY_EXPERTS,
        (
            *(*GATED_CODECS, codecs.ATTENTION_BIASES, layer_codecs.EXPERT_TYPES),
            codecs.require_values(mlp_bias=False),
            codecs.copy_expert_count("num_experts", "num_local_experts", 192),
            codecs.copy_shared_experts("num_shared_experts", minimum=1),
            *(codecs.TOP_K, codecs.copy_fields({"moe.router_scale": "router_scaling_factor"})),
            codecs.set_fields({"moe.router": "sigmoid", "moe.router_bias": True, "qk_norm": "head"}),
        ),
        UNTIED_DEFAULTS
        | {"rope_theta": 11_158_840.0, "num_key_value_heads": 8, "head_dim": 128, "num_shared_experts": 1}
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 1536, "router_scaling_factor": 2.826}
        | {"router_aux_loss_coef": 0.0},
        mtp_prefix="model.layers.{}.",
        in_memory_names=names.STACKED_EXPERTS | names.IN_MEMORY_HY,
        models="Hy3",
    ),
)
