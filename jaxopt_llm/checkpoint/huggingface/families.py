"""Families of Hugging Face models: a table of tensor names and config.json fields for each.

A family fits a ModelConfig if the config.json that it writes reads back as the same model.
"""

from typing import Any

from jaxopt_llm.checkpoint.huggingface import names
from jaxopt_llm.checkpoint.huggingface.codecs import (
    DIVISIBLE,
    GPT_HEADS,
    GPT_SIZES,
    HEADS,
    MLP_SIZE,
    NO_BIASES,
    PROJECTION_NORMS,
    QUERY_SCALAR,
    SIZES,
    SOFTCAPS,
    SWIGLU,
    Codec,
    Settings,
    Unsupported,
    check_value,
    copy_fields,
    require_absent,
    require_values,
    set_fields,
    shorten,
    unsupported,
)
from jaxopt_llm.checkpoint.huggingface.codecs_deepseek import EXPERT_GROUPS, LATENTS, SHARED_EXPERT_SIZES
from jaxopt_llm.checkpoint.huggingface.codecs_moe import EXPERT_LAYERS, RENORMALISES, TOP_K, copy_expert_count
from jaxopt_llm.checkpoint.huggingface.codecs_rope import PHI3_ROPE, ROPE, SCORED_ROPE
from jaxopt_llm.checkpoint.huggingface.codecs_windows import (
    ALTERNATING_WINDOWS,
    MOE_WINDOW,
    NOPE,
    ONE_WINDOW,
    WINDOWS_FROM_LAYER,
)
from jaxopt_llm.checkpoint.huggingface.family import Family
from jaxopt_llm.checkpoint.huggingface.nearest_family import describe_nearest
from jaxopt_llm.config import ModelConfig


def find_by_settings(settings: Settings) -> Family:
    """Return the family of a config.json. Raise Unsupported if there is none, or if the file asks for other code."""
    model_type, architectures = settings.get("model_type"), settings.get("architectures")
    family = next((each for each in FAMILIES if each.model_type == model_type), None)
    if family is None:
        problem = f"no family of this name is read; {describe_nearest(settings, FAMILIES)}"
        raise unsupported(f"model_type={model_type!r}", problem)
    if architectures not in (None, [family.architecture]):
        problem = f"only {family.architecture} is read; the model would need another head, or layers of another kind"
        raise unsupported(f"architectures={architectures}", problem)
    check_value(settings, "is_causal", True)
    if each := settings.get("per_layer_config"):
        raise unsupported(
            f"per_layer_config={shorten(each)}", "the model would need settings that differ between its layers"
        )
    if model_type == "mistral" and (types := settings.get("layer_types")) is not None:
        problem = "transformers loads a mistral with it as a ministral; the model would need kinds of layers"
        raise unsupported(f"layer_types={shorten(types)}", problem)
    if settings.get("quantization_config"):
        raise _quantised(settings["quantization_config"])
    return family


def _quantised(quantisation: Any) -> Unsupported:
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
    return unsupported(
        f"quantization_config.quant_method={method!r}",
        "weights as codes are not read",
        "use the model with its original weights, and --lora.base nf4 or int8 to hold them as codes in training",
    )


def find_by_model(config: ModelConfig, preferred: str | None = None) -> Family:
    """Return the first family that fits a model.

    Args:
        config: the model.
        preferred: model_type of the family to try first.

    Raises:
        Unsupported: no family fits; the message names the nearest family and the fields that it lacks.
    """
    ordered = sorted(FAMILIES, key=lambda family: family.model_type != preferred)
    differences = {family: family.find_differences(config) for family in ordered}
    fitting = next((family for family in ordered if not differences[family]), None)
    if fitting is None:
        nearest = min(ordered, key=lambda family: len(differences[family]))
        raise Unsupported(
            f"no Hugging Face family fits the model; the nearest, {nearest.model_type}, does not support "
            f"{', '.join(differences[nearest])}"
        )
    return fitting


BASIC_CODECS = (SIZES, HEADS, ROPE)
ROTARY_CODECS = (*BASIC_CODECS, MLP_SIZE)
GATED_CODECS = (*ROTARY_CODECS, SWIGLU)
UNTIED_DEFAULTS: Settings = {"tie_word_embeddings": False, "rope_theta": 10_000.0}


DEEPSEEK_NAMES = names.OUTSIDE | names.LATENT_ATTENTION | names.MLP | names.NORMS | names.EXPERTS | names.SHARED_EXPERTS
DEEPSEEK_CODECS: tuple[Codec, ...] = (
    *(SIZES, MLP_SIZE, LATENTS, SCORED_ROPE, SWIGLU, SHARED_EXPERT_SIZES),
    copy_fields(
        {"moe.dense_layers": "first_k_dense_replace", "moe.experts": "n_routed_experts"}
        | {"moe.experts_per_token": "num_experts_per_tok", "moe.router_scale": "routed_scaling_factor"}
        | {"moe.balance_loss": "aux_loss_alpha"}
    ),
    require_values(attention_bias=False, moe_layer_freq=1),
)
DEEPSEEK_DEFAULTS = UNTIED_DEFAULTS | {
    **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    "aux_loss_alpha": 0.001,
}

FAMILIES = (
    Family("llama", "LlamaForCausalLM", names.LLAMA, (*GATED_CODECS, DIVISIBLE, NO_BIASES), UNTIED_DEFAULTS),
    Family(
        "mistral",
        "MistralForCausalLM",
        names.LLAMA,
        (*GATED_CODECS, ONE_WINDOW),
        UNTIED_DEFAULTS | {"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        names.LLAMA | names.QKV_BIASES,
        (*GATED_CODECS, WINDOWS_FROM_LAYER, set_fields({"biases": "qkv"})),
        UNTIED_DEFAULTS | {"sliding_window": 4096, "max_window_layers": 28},
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        names.LLAMA | names.QK_NORMS,
        (*GATED_CODECS, WINDOWS_FROM_LAYER, require_values(attention_bias=False), set_fields({"qk_norm": "head"})),
        UNTIED_DEFAULTS | {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.MLP | names.GEMMA_NORMS,
        (
            *ROTARY_CODECS,
            DIVISIBLE,
            ALTERNATING_WINDOWS,
            QUERY_SCALAR,
            SOFTCAPS,
            require_values(hidden_activation="gelu_pytorch_tanh", attention_bias=False),
            require_values(use_bidirectional_attention=False),
            set_fields({"norm_placement": "both", "norm_zero_centered": True, "mlp": "geglu", "scale_embedding": True}),
        ),
        {"tie_word_embeddings": True, "rope_theta": 10_000.0, "num_key_value_heads": 4, "head_dim": 256}
        | {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        | {"sliding_window": 4096},
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        names.OUTSIDE | names.FUSED | names.NORMS,
        (SIZES, HEADS, PHI3_ROPE, MLP_SIZE, SWIGLU, ONE_WINDOW),
        UNTIED_DEFAULTS | {"original_max_position_embeddings": 4096},
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.MLP | names.QK_NORMS | names.POST_NORMS,
        (
            *GATED_CODECS,
            require_values(attention_bias=False),
            set_fields({"norm_placement": "post", "qk_norm": "projection"}),
        ),
        UNTIED_DEFAULTS,
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        names.LLAMA,
        (*GATED_CODECS, NO_BIASES, NOPE),
        {"tie_word_embeddings": True, "rope_theta": 2_000_000.0, "num_key_value_heads": 4, "no_rope_layer_interval": 4},
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.NORMS | names.MIXTRAL_EXPERTS,
        (
            *BASIC_CODECS,
            SWIGLU,
            ONE_WINDOW,
            copy_expert_count("num_local_experts", "num_experts", 8),
            TOP_K,
            copy_fields({"moe.expert_width": "intermediate_size"}),
            require_values(router_jitter_noise=0.0),
            require_absent("layer_types"),
        ),
        {"tie_word_embeddings": False, "rope_theta": 1_000_000.0, "num_key_value_heads": 8}
        | {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.001},
        in_memory_names=names.STACKED_MIXTRAL_EXPERTS,
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        names.LLAMA | names.QK_NORMS | names.EXPERTS,
        (
            *GATED_CODECS,
            MOE_WINDOW,
            copy_expert_count("num_experts", "num_local_experts", 128),
            TOP_K,
            RENORMALISES,
            EXPERT_LAYERS,
            copy_fields({"moe.expert_width": "moe_intermediate_size"}),
            require_values(attention_bias=False),
            require_absent("layer_types"),
            set_fields({"qk_norm": "head"}),
        ),
        UNTIED_DEFAULTS
        | {"num_key_value_heads": 4, "sliding_window": 4096, "decoder_sparse_step": 1, "moe_intermediate_size": 768}
        | {"num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.001},
        in_memory_names=names.STACKED_EXPERTS,
    ),
    Family(
        "olmoe",
        "OlmoeForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.NORMS | names.QK_NORMS | names.EXPERTS,
        (
            *BASIC_CODECS,
            SWIGLU,
            PROJECTION_NORMS,
            copy_expert_count("num_experts", "num_local_experts", 64),
            TOP_K,
            RENORMALISES,
            copy_fields({"moe.expert_width": "intermediate_size"}),
            require_values(attention_bias=False),
            require_absent("clip_qkv", "sliding_window", "layer_types"),
            set_fields({"qk_norm": "projection"}),
        ),
        UNTIED_DEFAULTS | {"num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.01},
        in_memory_names=names.STACKED_EXPERTS,
    ),
    Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        DEEPSEEK_NAMES,
        (
            *DEEPSEEK_CODECS,
            DIVISIBLE,
            EXPERT_GROUPS,
            require_values(mlp_bias=False, scoring_func="softmax", norm_topk_prob=False),
            set_fields({"moe.router_renormalises": False}),
        ),
        DEEPSEEK_DEFAULTS
        | {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407}
        | {"first_k_dense_replace": 0, "routed_scaling_factor": 1.0},
        in_memory_names=names.STACKED_EXPERTS,
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        DEEPSEEK_NAMES | names.ROUTER_BIAS,
        (
            *DEEPSEEK_CODECS,
            RENORMALISES,
            copy_fields({"moe.router_groups": "n_group", "moe.router_groups_per_token": "topk_group"}),
            require_values(topk_method="noaux_tc", scoring_func="sigmoid", rope_interleave=True),
            set_fields({"moe.router": "sigmoid", "moe.router_bias": True}),
            Codec(lambda settings: {}, lambda config: {"num_nextn_predict_layers": 0}),
        ),
        DEEPSEEK_DEFAULTS
        | {"n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "num_experts_per_tok": 8}
        | {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
        | {"n_group": 8, "topk_group": 4},
        mtp_prefix="model.layers.{}.",
        in_memory_names=names.STACKED_EXPERTS,
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        names.GPT,
        (
            GPT_SIZES,
            GPT_HEADS,
            require_values(
                activation_function=("gelu_new", "gelu_pytorch_tanh"),
                scale_attn_weights=True,
                scale_attn_by_inverse_layer_idx=False,
                add_cross_attention=False,
            ),
            set_fields({"positions": "learned", "norm": "layer", "biases": "all", "mlp": "gelu"}),
        ),
        {"tie_word_embeddings": True},
        input_first=True,
        base_prefix="transformer.",
        ignored=("*.attn.bias", "*.attn.masked_bias"),
    ),
)
