"""The families of Hugging Face's folders: a table of tensor names and of config.json's fields for each.

A family serves a ModelConfig where what it writes reads back as the same model.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from jaxopt_llm.checkpoint.codecs import (
    ALTERNATING_WINDOWS,
    BASICS,
    CHOICE,
    DIVISIBLE,
    GPT_HEADS,
    GPT_SIZES,
    HINTS,
    MOE_WINDOW,
    NO_BIASES,
    NOPE,
    ONE_WINDOW,
    PROJECTION_NORMS,
    QUERY_SCALAR,
    RENORMALISES,
    ROTARY,
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
    period,
    sparse_layers,
)
from jaxopt_llm.checkpoint.names import (
    ATTENTION,
    EXPERTS,
    FUSED,
    GEMMA_NORMS,
    GPT,
    LLAMA,
    MIXTRAL_EXPERTS,
    MLP,
    NORMS,
    OUTSIDE,
    POST_NORMS,
    QK_NORMS,
    QKV_BIASES,
    in_memory,
)
from jaxopt_llm.model.config import ModelConfig


@dataclass(frozen=True, eq=False)
class Family:
    """names: a tensor's name, {} for the number of its layer and a second one for that of its expert, -> our leaf: the
    path in a block, or of what is outside the stacks. Several, apart by blanks, lie side by side along the output's
    dimension.
    defaults: fields that its config.json may lack, where that stands for something.
    input_first: whether matrices of the blocks are [in, out], not [out, in] as torch.nn.Linear's.
    base: what a file of the model without its head lacks at the start of its names.
    ignored: names of tensors that hold no parameters, as patterns.
    in_memory: other names, by which transformers' classes hold a layer's parameters since version 5, and write them on
    request -> the tensors of `names` that they are, side by side, and of all experts one after the other.
    """

    model_type: str
    architecture: str
    names: dict[str, str]
    codecs: tuple[Codec, ...]
    defaults: Settings = field(default_factory=dict)
    input_first: bool = False
    base: str = "model."
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    in_memory: dict[str, str] = field(default_factory=dict)

    def read(self, settings: Settings) -> ModelConfig:
        whole = self.defaults | settings
        fields: dict[str, Any] = {}
        for codec in self.codecs:
            fields |= codec.read(whole)
        config = ModelConfig(**fields)
        found = config.problems()
        if found:
            raise Unsupported("; ".join(found))
        return config

    def write(self, config: ModelConfig) -> Settings:
        settings: Settings = {"architectures": [self.architecture], "model_type": self.model_type}
        for codec in self.codecs:
            settings |= codec.write(config)
        return settings

    def differences(self, config: ModelConfig) -> list[str]:
        """What its config.json cannot say of a model."""
        try:
            said, wanted = canonical(self.read(self.write(config))), canonical(config)
        except Unsupported as error:
            return [str(error)]
        return [
            f"model.{name}={getattr(wanted, name)}" for name in HINTS if getattr(wanted, name) != getattr(said, name)
        ]


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


def canonical(config: ModelConfig) -> ModelConfig:
    """The same model, with defaults in the fields that it does not read."""
    # The last two are of training alone, and nowhere there.
    unread = ["pretrained", "last_layers", "router_z_loss", "router_bias_rate"]
    changed: dict[str, Any] = {}
    has_experts = [config.has_experts(layer) for layer in range(config.layers)]
    if sparse := sparse_layers(has_experts):
        changed = dict(zip(("dense_layers", "expert_every"), sparse, strict=True))
        unread += ["mlp_width"] if all(has_experts) else []
    else:
        unread += OF_EXPERTS
    if "sliding" not in config.pattern:
        unread.append("window")
    if config.positions == "learned":
        unread += ["rope_theta"]
    else:
        unread += ["max_positions"]
    if config.positions == "learned" or config.rope_factor == 1:
        unread += ["rope_low_frequency_factor", "rope_high_frequency_factor", "rope_original_length"]
    return replace(
        config,
        **{name: getattr(ModelConfig, name) for name in unread},
        **changed,
        pattern=period([config.pattern[i % len(config.pattern)] for i in range(config.layers)]),
        attention_scale=config.attention_scale or config.head_dim**-0.5,
    )


# Fields that a model without experts does not read.
OF_EXPERTS = (
    *("experts", "experts_per_token", "expert_width", "shared_expert_width", "dense_layers", "expert_every"),
    *("router", "router_renormalises", "router_scale", "router_groups", "router_groups_per_token", "router_bias"),
    *("balance_loss", "expert_capacity"),
)
UNTIED: Settings = {"tie_word_embeddings": False, "rope_theta": 10_000.0}


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
