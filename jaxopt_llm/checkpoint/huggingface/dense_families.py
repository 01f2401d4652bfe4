"""Families of Hugging Face models without experts: a table of tensor names and config.json fields for each."""

from jaxopt_llm.checkpoint.huggingface import codecs, gemma4_codecs, layer_codecs, rope_codecs
from jaxopt_llm.checkpoint.huggingface import tensor_names as names
from jaxopt_llm.checkpoint.huggingface.codecs import Codec, Settings
from jaxopt_llm.checkpoint.huggingface.family import Family
from jaxopt_llm.model import layers

BASIC_CODECS = (codecs.SIZES, codecs.HEADS, rope_codecs.ROPE)
ROTARY_CODECS = (*BASIC_CODECS, codecs.MLP_SIZE)
GATED_CODECS = (*ROTARY_CODECS, codecs.SWIGLU)
UNTIED_DEFAULTS: Settings = {"tie_word_embeddings": False, "rope_theta": 10_000.0}
UNTIED: Settings = {"tie_word_embeddings": False}  # classes, or versions of one, differ in the default of rope_theta
NO_MLP_BIAS = codecs.require_values(mlp_bias=False)

LATENT_CODECS: tuple[Codec, ...] = (
    codecs.SIZES,
    codecs.MLP_SIZE,
    codecs.LATENTS,
    codecs.QUERY_LATENTS,
    rope_codecs.SCORED_ROPE,
    codecs.SWIGLU,
    codecs.require_values(attention_bias=False),
)
LATENT_DEFAULTS: Settings = {
    **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
}
GRANITE_DEFAULTS = UNTIED_DEFAULTS | {
    **{"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0, "logits_scaling": 1.0},
    "rms_norm_eps": 1e-6,
}
GEMMA2_DEFAULTS: Settings = {
    **{"tie_word_embeddings": True, "rope_theta": 10_000.0, "num_key_value_heads": 4, "head_dim": 256},
    **{"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "sliding_window": 4096,
}
GLM_CODECS: tuple[Codec, ...] = (
    *(codecs.SIZES, codecs.HEADS, rope_codecs.PARTIAL_ROPE, codecs.MLP_SIZE, codecs.SWIGLU),
    *(codecs.INPUT_BIASES, rope_codecs.INTERLEAVED),
)
GLM_DEFAULTS = UNTIED_DEFAULTS | {
    **{"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, rope_codecs.SHARE: 0.5},
    "rms_norm_eps": 0.00000015625,
}


def set_activation(kind: str) -> tuple[Codec, Codec]:
    """Return codecs of a kind of MLP whose name here is also its `hidden_act`."""
    return codecs.require_values(hidden_act=kind), codecs.set_fields({"mlp": kind})


APERTUS_ROPE: Settings = {
    **{"rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0, "original_max_position_embeddings": 8192},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
CWM_ROPE: Settings = {
    **{"rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 8192},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
COHERE_NAMES = names.OUTSIDE | names.ATTENTION | names.BIASES | names.MLP | names.NORMS
COHERE_CODECS: tuple[Codec, ...] = (
    *(codecs.LAYER_NORM_SIZES, rope_codecs.ROPE, rope_codecs.INTERLEAVED, codecs.MLP_SIZE, codecs.SWIGLU),
    *(codecs.ATTENTION_BIASES, codecs.copy_fields({"logit_scale": "logit_scale"})),
    codecs.require_values(use_qk_norm=False),
    codecs.set_fields({"norm": "layer_no_bias", "parallel_block": True}),
)
COHERE_DEFAULTS: Settings = {
    **{"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 0.0625},
}

DELTA_CODECS: tuple[Codec, ...] = (  # of Gated DeltaNets between layers with gated attention
    *(codecs.SIZES, codecs.HEADS, rope_codecs.PARTIAL_ROPE, codecs.SWIGLU, layer_codecs.DELTA_KINDS),
    *(layer_codecs.DELTA_SIZES, codecs.require_values(attention_bias=False)),
    codecs.set_fields({"qk_norm": "head", "attention_gate": "element", "norm_zero_centered": True}),
)
DELTA_DEFAULTS: Settings = UNTIED_DEFAULTS | {
    **{rope_codecs.SHARE: 0.25, "head_dim": 256, "num_attention_heads": 16, "rms_norm_eps": 1e-6},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
}

FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        names.LLAMA | names.BIASES,
        (*GATED_CODECS, codecs.DIVISIBLE, codecs.BIASES),
        UNTIED_DEFAULTS,
        classifier="LlamaForSequenceClassification",
        models="Llama 2, 3, 3.1 to 3.3",
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        names.LLAMA,
        (*GATED_CODECS, codecs.ONE_WINDOW),
        UNTIED_DEFAULTS | {"num_key_value_heads": 8, "sliding_window": 4096},
        classifier="MistralForSequenceClassification",
        models="Mistral, Mistral Small 3, Magistral, Devstral",
    ),
    Family(
        "ministral",
        "MinistralForCausalLM",
        names.LLAMA,
        (*GATED_CODECS, codecs.WINDOWS_BY_TYPE),
        UNTIED_DEFAULTS | {"num_key_value_heads": 8, "sliding_window": 4096},
        classifier="MinistralForSequenceClassification",
        models="Ministral",
    ),
    Family(
        "ministral3",
        "Ministral3ForCausalLM",
        names.LLAMA,
        (*BASIC_CODECS[:2], rope_codecs.GROWING_ROPE, codecs.MLP_SIZE, codecs.SWIGLU, codecs.ONE_WINDOW),
        UNTIED | {"num_key_value_heads": 8, "head_dim": 128},
        classifier="Ministral3ForSequenceClassification",
        models="Ministral 3",
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        names.LLAMA | names.QKV_BIASES,
        (*GATED_CODECS, codecs.WINDOWS_FROM_LAYER, codecs.set_fields({"biases": "qkv"})),
        UNTIED | {"sliding_window": 4096, "max_window_layers": 28},
        second_names=("qwen2_5_vl_text", "qwen2_vl_text"),
        classifier="Qwen2ForSequenceClassification",
        models="Qwen2, Qwen2.5, text of Qwen2-VL and Qwen2.5-VL",
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        names.LLAMA | names.QK_NORMS,
        (
            *GATED_CODECS,
            codecs.WINDOWS_FROM_LAYER,
            codecs.require_values(attention_bias=False),
            codecs.set_fields({"qk_norm": "head"}),
        ),
        UNTIED | {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
        second_names=("qwen3_vl_text",),
        classifier="Qwen3ForSequenceClassification",
        models="Qwen3 (dense), text of Qwen3-VL (dense)",
    ),
    Family(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        names.OUTSIDE | names.GATED_ATTENTION | names.SPLIT_GATED_DELTA | names.MLP | names.NORMS | names.QK_NORMS,
        (*DELTA_CODECS, codecs.MLP_SIZE),
        DELTA_DEFAULTS | {"num_key_value_heads": 4},
        mtp_prefix="mtp.",
        classifier="Qwen3_5TextForSequenceClassification",
        models="text of Qwen3.5 (dense)",
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.MLP | names.GEMMA_NORMS,
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
        GEMMA2_DEFAULTS,
        classifier="Gemma2ForSequenceClassification",
        models="Gemma 2",
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.MLP | names.GEMMA_NORMS | names.QK_NORMS,
        (
            *(codecs.SIZES, codecs.HEADS, rope_codecs.LAYERED_ROPE, codecs.MLP_SIZE),
            codecs.DIVISIBLE,
            codecs.GEMMA3_WINDOWS,
            codecs.QUERY_SCALAR,
            codecs.copy_switches(
                {"logit_softcap": "final_logit_softcapping"}
            ),  # the class ignores attn_logit_softcapping
            codecs.require_values(hidden_activation="gelu_pytorch_tanh", attention_bias=False),
            codecs.require_values(use_bidirectional_attention=False),
            codecs.ROOT_SCALE,
            codecs.set_fields(
                {"norm_placement": "both", "norm_zero_centered": True, "qk_norm": "head", "mlp": "geglu"}
            ),
        ),
        {"tie_word_embeddings": True, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6, "sliding_window": 4096}
        | {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
        | {"query_pre_attn_scalar": 256, rope_codecs.LOCAL_THETA: 10_000.0},
        classifier="Gemma3TextForSequenceClassification",
        models="Gemma 3",
    ),
    Family(
        "gemma4_text",
        "Gemma4ForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.GEMMA4_MLP | names.GEMMA_NORMS | names.QK_NORMS | names.GEMMA4_LAYER,
        (
            *(codecs.SIZES, codecs.HEADS, gemma4_codecs.WINDOWS, gemma4_codecs.GLOBAL_LAYERS, gemma4_codecs.ROPE),
            *(gemma4_codecs.MLP, gemma4_codecs.TEXT, gemma4_codecs.LAYER_INPUTS, gemma4_codecs.SHARING),
            codecs.copy_switches({"logit_softcap": "final_logit_softcapping"}),
            codecs.require_values(hidden_activation="gelu_pytorch_tanh", attention_bias=False),
            codecs.ROOT_SCALE,
            codecs.set_fields(
                {"norm_placement": "both", "qk_norm": "head", "value_norm": True, "mlp": "geglu"}
                | {"attention_scale": 1.0, "layer_scales": True}
            ),
        ),
        {"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "vocab_size": 262_144, "sliding_window": 512}
        | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_size_per_layer_input": 256},
        reads_layer_settings=True,
        models="Gemma 4 31B, 26B-A4B, E4B, E2B",
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        names.OUTSIDE | names.FUSED | names.NORMS,
        (codecs.SIZES, codecs.HEADS, rope_codecs.PHI3_ROPE, codecs.MLP_SIZE, codecs.SWIGLU, codecs.ONE_WINDOW),
        UNTIED_DEFAULTS | {"original_max_position_embeddings": 4096},
        classifier="Phi3ForSequenceClassification",
        models="Phi-3, Phi-3.5, Phi-4-mini",
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.MLP | names.QK_NORMS | names.POST_NORMS,
        (
            *GATED_CODECS,
            codecs.require_values(attention_bias=False),
            codecs.set_fields({"norm_placement": "post", "qk_norm": "projection"}),
        ),
        UNTIED_DEFAULTS,
        classifier="Olmo2ForSequenceClassification",
        models="OLMo 2",
    ),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.MLP | names.QK_NORMS | names.POST_NORMS,
        (
            *(codecs.SIZES, codecs.HEADS, rope_codecs.LAYERED_ROPE, codecs.MLP_SIZE, codecs.SWIGLU),
            codecs.OLMO3_WINDOWS,
            codecs.require_values(attention_bias=False),
            codecs.set_fields({"norm_placement": "post", "qk_norm": "projection"}),
        ),
        UNTIED_DEFAULTS | {"rope_theta": 500_000.0, rope_codecs.LOCAL_THETA: 500_000.0, "sliding_window": 4096},
        classifier="Olmo3ForSequenceClassification",
        models="OLMo 3",
    ),
    Family(
        "glm4",
        "Glm4ForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.QKV_BIASES | names.GLM_MLP | names.GLM_NORMS,
        (*GLM_CODECS, codecs.set_fields({"norm_placement": "both"})),
        GLM_DEFAULTS,
        classifier="Glm4ForSequenceClassification",
        models="GLM-4",
    ),
    Family(
        "arcee",
        "ArceeForCausalLM",
        names.LLAMA | names.BIASES,
        (*ROTARY_CODECS, codecs.DIVISIBLE, codecs.BIASES, *set_activation("relu2")),
        UNTIED_DEFAULTS,
        classifier="ArceeForSequenceClassification",
        models="Arcee (AFM)",
    ),
    Family(
        "apertus",
        "ApertusForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.MLP | names.BIASES | names.XIELU | names.QK_NORMS | names.APERTUS_NORMS,
        (
            *(codecs.SIZES, codecs.HEADS, rope_codecs.EXPLICIT_ROPE, codecs.MLP_SIZE),
            *(codecs.ATTENTION_BIASES, *set_activation("xielu")),
            codecs.set_fields({"qk_norm": "head"}),
        ),
        {"tie_word_embeddings": False, "rope_parameters": APERTUS_ROPE},
        constants=names.layer_names({"mlp.act_fn.beta": layers.XIELU_BETA, "mlp.act_fn.eps": layers.XIELU_EPSILON}),
        models="Apertus",
    ),
    Family(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        names.LLAMA | names.BIASES | names.HUNYUAN_QK_NORMS,
        (
            *(codecs.SIZES, codecs.HEADS, rope_codecs.HUNYUAN_ROPE, codecs.MLP_SIZE, codecs.SWIGLU),
            codecs.ATTENTION_BIASES,
            codecs.set_fields({"qk_norm": "rotated_head"}),
        ),
        UNTIED_DEFAULTS,
        classifier="HunYuanDenseV1ForSequenceClassification",
        models="Hunyuan (dense)",
    ),
    Family(
        "exaone4",
        "Exaone4ForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.MLP | names.QK_NORMS | names.POST_NORMS,
        (*GATED_CODECS, codecs.EXAONE4_WINDOWS, codecs.set_fields({"norm_placement": "post", "qk_norm": "head"})),
        UNTIED_DEFAULTS | {"num_key_value_heads": 32, "sliding_window": 4096},
        classifier="Exaone4ForSequenceClassification",
        models="EXAONE 4",
    ),
    Family(
        "cohere",
        "CohereForCausalLM",
        COHERE_NAMES,
        (*COHERE_CODECS, codecs.HEADS),
        COHERE_DEFAULTS,
        models="Command R, Aya",
    ),
    Family(
        "cohere2",
        "Cohere2ForCausalLM",
        COHERE_NAMES,
        (*COHERE_CODECS, codecs.HEADS, codecs.HEADS_FILL_WIDTH, codecs.COHERE2_WINDOWS),
        COHERE_DEFAULTS | {"rope_theta": 10_000.0, "sliding_window": 4096},
        models="Command R7B, Command A, text of Aya Vision and Command A Vision",
    ),
    Family(
        "granite",
        "GraniteForCausalLM",
        names.LLAMA | names.BIASES,
        (*GATED_CODECS, codecs.BIASES, *codecs.MULTIPLIERS),
        GRANITE_DEFAULTS,
        models="Granite 3 (dense)",
    ),
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        names.OUTSIDE
        | names.ATTENTION
        | names.BIASES
        | names.NORMS
        | names.layer_names(
            {"shared_mlp.input_linear.weight": "mlp/gate mlp/up", "shared_mlp.output_linear.weight": "mlp/down"}
        ),
        (
            *(*BASIC_CODECS, codecs.SWIGLU, codecs.ATTENTION_BIASES, *codecs.MULTIPLIERS),
            codecs.copy_fields({"mlp_width": "shared_intermediate_size"}),
            layer_codecs.GRANITE_KINDS,
        ),
        GRANITE_DEFAULTS | {"num_local_experts": 8, "shared_intermediate_size": 1024},
        models="Granite 4 without mamba layers",
    ),
    Family(
        "seed_oss",
        "SeedOssForCausalLM",
        names.LLAMA | names.BIASES,
        (*GATED_CODECS, codecs.OUTPUT_BIASES, codecs.require_values(mlp_bias=False)),
        UNTIED_DEFAULTS | {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        classifier="SeedOssForSequenceClassification",
        models="Seed-OSS",
    ),
    Family(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        names.LLAMA | names.BIASES,
        (*GATED_CODECS, codecs.ALL_BIASES, rope_codecs.INTERLEAVED),
        {"tie_word_embeddings": True, "rope_theta": 500_000.0, "num_key_value_heads": 2, "head_dim": 128},
        models="ERNIE 4.5 (dense)",
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        names.LLAMA,
        (*GATED_CODECS, codecs.NO_BIASES, codecs.NOPE),
        {"tie_word_embeddings": True, "rope_theta": 2_000_000.0, "num_key_value_heads": 4, "no_rope_layer_interval": 4},
        classifier="SmolLM3ForSequenceClassification",
        models="SmolLM3",
    ),
    Family(
        "gemma",
        "GemmaForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.MLP | names.NORMS,
        (
            *(*ROTARY_CODECS, codecs.ROOT_SCALE),
            # "gelu" in published folders means the tanh approximation, too.
            codecs.require_values(hidden_act=("gelu_pytorch_tanh", "gelu"), hidden_activation="gelu_pytorch_tanh"),
            codecs.require_values(attention_bias=False, use_bidirectional_attention=False),
            codecs.set_fields({"norm_zero_centered": True, "mlp": "geglu"}),
        ),
        {"tie_word_embeddings": True, "rope_theta": 10_000.0, "num_key_value_heads": 16, "head_dim": 256}
        | {"rms_norm_eps": 1e-6},
        classifier="GemmaForSequenceClassification",
        models="Gemma 1, CodeGemma",
    ),
    Family(
        "vaultgemma",
        "VaultGemmaForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.MLP | names.VAULTGEMMA_NORMS,
        (
            *(*ROTARY_CODECS, codecs.ALTERNATING_WINDOWS, codecs.QUERY_SCALAR, codecs.SOFTCAPS, codecs.ROOT_SCALE),
            codecs.require_values(hidden_activation="gelu_pytorch_tanh", attention_bias=False),
            codecs.set_fields({"norm_zero_centered": True, "mlp": "geglu"}),
        ),
        GEMMA2_DEFAULTS,
        models="VaultGemma",
    ),
    Family(
        "glm",
        "GlmForCausalLM",
        names.OUTSIDE | names.ATTENTION | names.QKV_BIASES | names.GLM_MLP | names.NORMS,
        GLM_CODECS,
        GLM_DEFAULTS,
        classifier="GlmForSequenceClassification",
        models="GLM-4-9B, GLM-Edge",
    ),
    Family(
        "helium",
        "HeliumForCausalLM",
        names.LLAMA | names.QKV_BIASES,
        (*GATED_CODECS, codecs.HEADS_FILL_WIDTH, codecs.INPUT_BIASES, rope_codecs.INTERLEAVED, NO_MLP_BIAS),
        {"tie_word_embeddings": False, "rope_theta": 100_000.0, "rms_norm_eps": 1e-8, "head_dim": 128},
        classifier="HeliumForSequenceClassification",
        models="Helium",
    ),
    Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        names.OUTSIDE
        | names.ATTENTION
        | names.ATTENTION_BIASES
        | names.STARCODER_MLP
        | names.NORMS
        | names.NORM_BIASES,
        (
            codecs.copy_fields(codecs.SIZE_NAMES | {"norm_epsilon": "norm_epsilon", "mlp_width": "intermediate_size"}),
            *(codecs.HEADS, rope_codecs.ROPE, codecs.ONE_WINDOW, codecs.ALL_BIASES),
            codecs.require_values(hidden_act="gelu_pytorch_tanh"),
            codecs.set_fields({"norm": "layer", "mlp": "gelu"}),
        ),
        {"tie_word_embeddings": True, "rope_theta": 10_000.0, "num_key_value_heads": 2, "norm_epsilon": 1e-5}
        | {"use_bias": True},
        classifier="Starcoder2ForSequenceClassification",
        models="StarCoder2",
    ),
    Family(
        "stablelm",
        "StableLmForCausalLM",
        names.LLAMA | names.QKV_BIASES | names.NORM_BIASES,
        (
            *(codecs.LAYER_NORM_SIZES, codecs.HEADS, codecs.HEADS_FILL_WIDTH, rope_codecs.PARTIAL_ROPE),
            *(codecs.MLP_SIZE, codecs.SWIGLU, codecs.STABLELM_BIASES),
            codecs.require_values(qk_layernorm=False, use_parallel_residual=False),
            codecs.set_fields({"norm": "layer"}),
        ),
        UNTIED_DEFAULTS | {"layer_norm_eps": 1e-5, "num_key_value_heads": 32, rope_codecs.SHARE: 0.25},
        classifier="StableLmForSequenceClassification",
        models="StableLM 3B, StableLM 2 1.6B",
    ),
    Family(
        "cwm",
        "CwmForCausalLM",
        names.LLAMA,
        (
            *(codecs.SIZES, codecs.HEADS, rope_codecs.EXPLICIT_ROPE, codecs.MLP_SIZE, codecs.SWIGLU),
            *(layer_codecs.WINDOWS_AFTER_GLOBAL, NO_MLP_BIAS),
        ),
        {"tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 8192}
        | {"rope_parameters": CWM_ROPE},
        models="CWM (Code World Model)",
    ),
    Family(
        "youtu",
        "YoutuForCausalLM",
        names.OUTSIDE | names.LATENT_ATTENTION | names.MLP | names.NORMS,
        (*LATENT_CODECS, codecs.require_values(rope_interleave=True)),
        LATENT_DEFAULTS | {"tie_word_embeddings": True, "rope_theta": 10_000.0},
        models="Youtu-LLM",
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        names.GPT,
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
        input_first="transformer.h.*",
        base_prefix="transformer.",
        ignored=("*.attn.bias", "*.attn.masked_bias"),
        classifier="GPT2ForSequenceClassification",
        models="GPT-2",
    ),
)
