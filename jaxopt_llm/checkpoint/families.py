"""The families of Hugging Face's folders: a table of tensor names and of config.json's fields for each.

A family serves a ModelConfig where what it writes reads back as the same model.
"""

from jaxopt_llm.checkpoint.codecs import (
    ALTERNATING_WINDOWS,
    CHOICE,
    DIVISIBLE,
    GPT_HEADS,
    GPT_SIZES,
    HEADS,
    MLP_SIZE,
    MOE_WINDOW,
    NO_BIASES,
    NOPE,
    ONE_WINDOW,
    PROJECTION_NORMS,
    QUERY_SCALAR,
    RENORMALISES,
    SIZES,
    SOFTCAPS,
    SPARSE_LAYERS,
    SWIGLU,
    WINDOWS_FROM,
    Codec,
    Settings,
    Unsupported,
    absent,
    always,
    copied,
    experts,
    fixed,
)
from jaxopt_llm.checkpoint.codecs_deepseek import GROUPS, LATENTS, SHARED
from jaxopt_llm.checkpoint.codecs_rope import ROPE, YARN
from jaxopt_llm.checkpoint.family import Family
from jaxopt_llm.checkpoint.names import (
    ATTENTION,
    EXPERTS,
    FUSED,
    GEMMA_NORMS,
    GPT,
    LATENT_ATTENTION,
    LLAMA,
    MIXTRAL_EXPERTS,
    MLP,
    NORMS,
    OUTSIDE,
    POST_NORMS,
    QK_NORMS,
    QKV_BIASES,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    in_memory,
)
from jaxopt_llm.model.config import ModelConfig


def find(settings: Settings) -> Family:
    """The family of a config.json."""
    model_type, architectures = settings.get("model_type"), settings.get("architectures")
    family = next((each for each in FAMILIES if each.model_type == model_type), None)
    if family is None:
        known = ", ".join(each.model_type for each in FAMILIES)
        raise Unsupported(f"model_type={model_type!r}: not a family that is known here ({known})")
    if architectures not in (None, [family.architecture]):
        raise Unsupported(f"architectures={architectures}: only {family.architecture} is known here")
    if settings.get("is_causal") not in (None, True):
        raise Unsupported(f"is_causal={settings['is_causal']!r}: only True is known here")
    if settings.get("per_layer_config"):
        raise Unsupported("per_layer_config: layers that differ in it are not known here")
    if model_type == "mistral" and settings.get("layer_types") is not None:
        raise Unsupported("layer_types: with it a mistral is loaded as a ministral, which is not known here")
    if settings.get("quantization_config"):
        raise Unsupported("quantization_config: quantised weights are not read; bring the folder of the unquantised")
    return family


def fitting(config: ModelConfig, preferred: str | None = None) -> Family:
    """The first family that serves a model. preferred: the model_type of the one that is tried first."""
    tried = {each: each.differences(config) for each in sorted(FAMILIES, key=lambda each: each.model_type != preferred)}
    fits = next((family for family, differences in tried.items() if not differences), None)
    if fits is None:
        nearest, differences = min(tried.items(), key=lambda item: len(item[1]))
        raise Unsupported(
            f"no family has such a model: {nearest.model_type}, the nearest, lacks {', '.join(differences)}"
        )
    return fits


BASICS = (SIZES, HEADS, ROPE)
ROTARY = (*BASICS, MLP_SIZE)
UNTIED: Settings = {"tie_word_embeddings": False, "rope_theta": 10_000.0}


DEEPSEEK = OUTSIDE | LATENT_ATTENTION | MLP | NORMS | EXPERTS | SHARED_EXPERTS
OF_DEEPSEEK: tuple[Codec, ...] = (
    *(SIZES, MLP_SIZE, LATENTS, YARN, SWIGLU, SHARED),
    copied(
        dense_layers="first_k_dense_replace",
        experts="n_routed_experts",
        experts_per_token="num_experts_per_tok",
        router_scale="routed_scaling_factor",
        balance_loss="aux_loss_alpha",
    ),
    fixed(attention_bias=False, moe_layer_freq=1),
)


FAMILIES = (
    Family("llama", "LlamaForCausalLM", LLAMA, (*ROTARY, DIVISIBLE, SWIGLU, NO_BIASES), UNTIED),
    Family(
        "mistral",
        "MistralForCausalLM",
        LLAMA,
        (*ROTARY, SWIGLU, ONE_WINDOW),
        UNTIED | {"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        LLAMA | QKV_BIASES,
        (*ROTARY, SWIGLU, WINDOWS_FROM, always(biases="qkv")),
        UNTIED | {"sliding_window": 4096, "max_window_layers": 28},
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        LLAMA | QK_NORMS,
        (*ROTARY, SWIGLU, WINDOWS_FROM, fixed(attention_bias=False), always(qk_norm="head")),
        UNTIED | {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        OUTSIDE | ATTENTION | MLP | GEMMA_NORMS,
        (
            *ROTARY,
            DIVISIBLE,
            ALTERNATING_WINDOWS,
            QUERY_SCALAR,
            SOFTCAPS,
            fixed(hidden_activation="gelu_pytorch_tanh", attention_bias=False, use_bidirectional_attention=False),
            always(norm_placement="both", norm_zero_centered=True, mlp="geglu", scale_embedding=True),
        ),
        UNTIED
        | {
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    Family("phi3", "Phi3ForCausalLM", OUTSIDE | FUSED | NORMS, (*ROTARY, SWIGLU, ONE_WINDOW), UNTIED),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        OUTSIDE | ATTENTION | MLP | QK_NORMS | POST_NORMS,
        (
            *ROTARY,
            SWIGLU,
            fixed(attention_bias=False),
            always(norm_placement="post", qk_norm="projection"),
        ),
        UNTIED,
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        LLAMA,
        (*ROTARY, SWIGLU, NO_BIASES, NOPE),
        {
            "tie_word_embeddings": True,
            "rope_theta": 2_000_000.0,
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
        },
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        OUTSIDE | ATTENTION | NORMS | MIXTRAL_EXPERTS,
        (
            *BASICS,
            SWIGLU,
            ONE_WINDOW,
            experts("num_local_experts", "num_experts", 8),
            CHOICE,
            copied(expert_width="intermediate_size"),
            fixed(router_jitter_noise=0.0),
            absent("layer_types"),
        ),
        {
            "tie_word_embeddings": False,
            "rope_theta": 1_000_000.0,
            "num_key_value_heads": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
        },
        in_memory=in_memory("block_sparse_moe", "w1", "w3", "w2")
        | {"model.layers.{}.mlp.gate.weight": "model.layers.{}.block_sparse_moe.gate.weight"},
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        LLAMA | QK_NORMS | EXPERTS,
        (
            *ROTARY,
            SWIGLU,
            MOE_WINDOW,
            experts("num_experts", "num_local_experts", 128),
            CHOICE,
            RENORMALISES,
            SPARSE_LAYERS,
            copied(expert_width="moe_intermediate_size"),
            fixed(attention_bias=False),
            absent("layer_types"),
            always(qk_norm="head"),
        ),
        UNTIED
        | {
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
        },
        in_memory=in_memory("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    Family(
        "olmoe",
        "OlmoeForCausalLM",
        OUTSIDE | ATTENTION | NORMS | QK_NORMS | EXPERTS,
        (
            *BASICS,
            SWIGLU,
            PROJECTION_NORMS,
            experts("num_experts", "num_local_experts", 64),
            CHOICE,
            RENORMALISES,
            copied(expert_width="intermediate_size"),
            fixed(attention_bias=False),
            absent("clip_qkv", "sliding_window", "layer_types"),
            always(qk_norm="projection"),
        ),
        UNTIED
        | {
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.01,
        },
        in_memory=in_memory("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        DEEPSEEK,
        (
            *OF_DEEPSEEK,
            DIVISIBLE,
            GROUPS,
            fixed(mlp_bias=False, scoring_func="softmax", norm_topk_prob=False),
            always(router_renormalises=False),
        ),
        UNTIED
        | {
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 0,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "routed_scaling_factor": 1.0,
            "aux_loss_alpha": 0.001,
        },
        in_memory=in_memory("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        DEEPSEEK | ROUTER_BIAS,
        (
            *OF_DEEPSEEK,
            RENORMALISES,
            copied(router_groups="n_group", router_groups_per_token="topk_group"),
            fixed(topk_method="noaux_tc", scoring_func="sigmoid", rope_interleave=True),
            always(router="sigmoid", router_bias=True),
            Codec(lambda settings: {}, lambda config: {"num_nextn_predict_layers": 0}),
        ),
        UNTIED
        | {
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 3,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
            "routed_scaling_factor": 2.5,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "aux_loss_alpha": 0.001,
        },
        predicts_more="model.layers.{}.",
        in_memory=in_memory("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        GPT,
        (
            GPT_SIZES,
            GPT_HEADS,
            fixed(
                activation_function=("gelu_new", "gelu_pytorch_tanh"),
                scale_attn_weights=True,
                scale_attn_by_inverse_layer_idx=False,
                add_cross_attention=False,
            ),
            always(positions="learned", norm="layer", biases="all", mlp="gelu"),
        ),
        {"tie_word_embeddings": True},
        input_first=True,
        base="transformer.",
        ignored=("*.attn.bias", "*.attn.masked_bias"),
    ),
)
