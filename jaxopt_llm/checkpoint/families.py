"""The families of Hugging Face's folders: a table of tensor names and of config.json's fields for each.

A family serves a ModelConfig where what it writes reads back as the same model.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from jaxopt_llm.checkpoint.codecs import (
    ALTERNATING_WINDOWS,
    DIVISIBLE,
    GPT_HEADS,
    GPT_SIZES,
    HINTS,
    NO_BIASES,
    NOPE,
    ONE_WINDOW,
    QUERY_SCALAR,
    ROTARY,
    SOFTCAPS,
    SWIGLU,
    WINDOWS_FROM,
    Codec,
    Settings,
    Unsupported,
    always,
    fixed,
    period,
)
from jaxopt_llm.model.config import ModelConfig


@dataclass(frozen=True, eq=False)
class Family:
    """names: a tensor's name, {} for the number of its layer, -> our leaf: the path in a block, or of what is outside
    the stacks. Several, apart by blanks, lie side by side along the output's dimension.
    defaults: fields that its config.json may lack, where that stands for something.
    input_first: whether matrices of the blocks are [in, out], not [out, in] as torch.nn.Linear's.
    base: what a file of the model without its head lacks at the start of its names.
    ignored: names of tensors that hold no parameters, as patterns.
    """

    model_type: str
    architecture: str
    names: dict[str, str]
    codecs: tuple[Codec, ...]
    defaults: Settings = field(default_factory=dict)
    input_first: bool = False
    base: str = "model."
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)

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
    unread = ["pretrained", "last_layers"]
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
        pattern=period([config.pattern[i % len(config.pattern)] for i in range(config.layers)]),
        attention_scale=config.attention_scale or config.head_dim**-0.5,
    )


UNTIED: Settings = {"tie_word_embeddings": False, "rope_theta": 10_000.0}


# --- names

OUTSIDE = {
    "model.embed_tokens.weight": "outer/embedding/table",
    "model.norm.weight": "outer/final_norm/scale",
    "lm_head.weight": "outer/head/table",
}


def _in_layer(names: dict[str, str]) -> dict[str, str]:
    return {f"model.layers.{{}}.{name}": ours for name, ours in names.items()}


ATTENTION = _in_layer(
    {
        "self_attn.q_proj.weight": "attention/query",
        "self_attn.k_proj.weight": "attention/key",
        "self_attn.v_proj.weight": "attention/value",
        "self_attn.o_proj.weight": "attention/output",
    }
)
FUSED = _in_layer(
    {
        "self_attn.qkv_proj.weight": "attention/query attention/key attention/value",
        "self_attn.o_proj.weight": "attention/output",
        "mlp.gate_up_proj.weight": "mlp/gate mlp/up",
        "mlp.down_proj.weight": "mlp/down",
    }
)
QKV_BIASES = _in_layer(
    {f"self_attn.{name[0]}_proj.bias": f"attention/{name}_bias" for name in ("query", "key", "value")}
)
QK_NORMS = _in_layer(
    {"self_attn.q_norm.weight": "query_norm/scale", "self_attn.k_norm.weight": "key_norm/scale"},
)
MLP = _in_layer({f"mlp.{name}_proj.weight": f"mlp/{name}" for name in ("gate", "up", "down")})
NORMS = _in_layer(
    {"input_layernorm.weight": "attention_norm/scale", "post_attention_layernorm.weight": "mlp_norm/scale"}
)
POST_NORMS = _in_layer(
    {
        "post_attention_layernorm.weight": "attention_post_norm/scale",
        "post_feedforward_layernorm.weight": "mlp_post_norm/scale",
    }
)
GEMMA_NORMS = NORMS | POST_NORMS | _in_layer({"pre_feedforward_layernorm.weight": "mlp_norm/scale"})
LLAMA = OUTSIDE | ATTENTION | MLP | NORMS
GPT = {
    "transformer.wte.weight": "outer/embedding/table",
    "transformer.wpe.weight": "outer/positions/table",
    "transformer.ln_f.weight": "outer/final_norm/scale",
    "transformer.ln_f.bias": "outer/final_norm/bias",
    "lm_head.weight": "outer/head/table",
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
