"""The families of Hugging Face's folders: a table of tensor names and of config.json's fields for each.

A field is translated by a codec: a pair of functions, config.json -> fields of ModelConfig, and back. A family serves a
ModelConfig where what it writes reads back as the same model.
"""

import math
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from jaxopt_llm.model.config import Kind, ModelConfig

Settings = dict[str, Any]  # what a config.json holds
HINTS = typing.get_type_hints(ModelConfig)
NAMED = {int: "a whole number below 2**31", float: "a finite number", bool: "true or false"}


class Unsupported(Exception):
    """A config.json that no ModelConfig says the same as, or the reverse. The message names the field."""


@dataclass(frozen=True)
class Codec:
    read: Callable[[Settings], dict[str, Any]]
    write: Callable[[ModelConfig], Settings]


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
    unread = ["pretrained"]
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
        pattern=_period([config.pattern[i % len(config.pattern)] for i in range(config.layers)]),
        attention_scale=config.attention_scale or config.head_dim**-0.5,
    )


# --- codecs


def _value(settings: Settings, name: str, kind: Any, default: Any = None) -> Any:
    """A field's value. default: in place of null and of a missing one; without it these are refused."""
    value = settings.get(name)
    if value is None:
        if default is None:
            raise Unsupported(f"{name} is missing")
        return default
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is not bool and not abs(value) < (2**31 if kind is int else math.inf)):
        raise Unsupported(f"{name}={value!r}: must be {NAMED[kind]}")
    return value


def _copied(**names: str) -> Codec:
    """ours="theirs": one value under two names."""
    return Codec(
        lambda settings: {ours: _value(settings, theirs, HINTS[ours]) for ours, theirs in names.items()},
        lambda config: {theirs: getattr(config, ours) for ours, theirs in names.items()},
    )


def _optional(**names: str) -> Codec:
    """ours="theirs": 0 here is null there."""
    return Codec(
        lambda settings: {ours: _value(settings, theirs, float, 0.0) for ours, theirs in names.items()},
        lambda config: {theirs: getattr(config, ours) or None for ours, theirs in names.items()},
    )


def _always(**fields: Any) -> Codec:
    """What is so in the whole family and in no field of its config.json."""
    return Codec(lambda settings: fields, lambda config: {})


def _fixed(**values: Any) -> Codec:
    """Theirs that can be nothing else; of several that mean the same the first is written."""
    choices = {name: value if isinstance(value, tuple) else (value,) for name, value in values.items()}

    def read(settings: Settings) -> dict[str, Any]:
        for name, allowed in choices.items():
            if settings.get(name) not in (None, *allowed):
                raise Unsupported(f"{name}={settings[name]!r}: only {allowed[0]!r} is known here")
        return {}

    return Codec(read, lambda config: {name: allowed[0] for name, allowed in choices.items()})


def _read_heads(settings: Settings) -> dict[str, Any]:
    heads = _value(settings, "num_attention_heads", int)
    head_dim = _value(settings, "hidden_size", int) // max(heads, 1)
    return {
        "kv_heads": _value(settings, "num_key_value_heads", int, heads),
        "head_dim": _value(settings, "head_dim", int, head_dim),
    }


def _read_rope(settings: Settings) -> dict[str, Any]:
    """Of the older form, rope_theta beside rope_scaling, and the newer one, rope_parameters with both."""
    scaling = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise Unsupported(f"rope_parameters={scaling!r}: one set for all layers is known here")
    for where in (settings, scaling):
        if where.get("partial_rotary_factor", 1) != 1:
            raise Unsupported(f"partial_rotary_factor={where['partial_rotary_factor']!r}: only 1 is known here")
    fields = {"rope_theta": _value({**settings, **scaling}, "rope_theta", float)}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return fields
    if kind != "llama3":
        raise Unsupported(f"rope_type={kind!r}: only 'default' and 'llama3' are known here")
    return fields | {
        "rope_factor": _value(scaling, "factor", float),
        "rope_low_frequency_factor": _value(scaling, "low_freq_factor", float),
        "rope_high_frequency_factor": _value(scaling, "high_freq_factor", float),
        "rope_original_length": _value(scaling, "original_max_position_embeddings", int),
    }


def _write_rope(config: ModelConfig) -> Settings:
    """In the older form, which every version reads."""
    scaling = {
        "rope_type": "llama3",
        "factor": config.rope_factor,
        "low_freq_factor": config.rope_low_frequency_factor,
        "high_freq_factor": config.rope_high_frequency_factor,
        "original_max_position_embeddings": config.rope_original_length,
    }
    return {"rope_theta": config.rope_theta, "rope_scaling": scaling if config.rope_factor > 1 else None}


def _read_one_window(settings: Settings) -> dict[str, Any]:
    """Mistral, Phi-3: of all layers or none."""
    if settings.get("sliding_window") is None:
        return {"pattern": ("global",)}
    return {"pattern": ("sliding",), "window": _value(settings, "sliding_window", int)}


def _write_one_window(config: ModelConfig) -> Settings:
    return {"sliding_window": config.window if "sliding" in config.pattern else None}


LAYER_TYPES: dict[str, Kind] = {"full_attention": "global", "sliding_attention": "sliding"}


def _layers(settings: Settings, name: str, default: Callable[[int], Any]) -> list[Any]:
    """A field's list with a value for each layer."""
    count = _value(settings, "num_hidden_layers", int)
    given = settings.get(name)
    if given is None:
        return [default(layer) for layer in range(count)]
    if not isinstance(given, list) or len(given) < count:
        raise Unsupported(f"{name}: must be a list with a value for each of the {count} layers")
    return given[:count]


def _windows(pattern: Iterable[Any], settings: Settings) -> dict[str, Any]:
    period = _period(pattern)
    if "sliding" not in period:
        return {"pattern": period}
    return {"pattern": period, "window": _value(settings, "sliding_window", int)}


def _kinds(types: list[Any]) -> list[Kind]:
    if unknown := [each for each in types if not (isinstance(each, str) and each in LAYER_TYPES)]:
        raise Unsupported(f"layer_types: {unknown[0]!r} is not one of {', '.join(LAYER_TYPES)}")
    return [LAYER_TYPES[each] for each in types]


def _read_windows_from(settings: Settings) -> dict[str, Any]:
    """Qwen: of the layers from max_window_layers on, or as layer_types says."""
    used = _value(settings, "use_sliding_window", bool, False) and settings.get("sliding_window") is not None
    first = _value(settings, "max_window_layers", int) if used and settings.get("layer_types") is None else 0
    types = _layers(
        settings, "layer_types", lambda layer: "sliding_attention" if used and layer >= first else "full_attention"
    )
    if "sliding_attention" in types and not used:
        raise Unsupported("layer_types: it names sliding_attention, and use_sliding_window is not true")
    return _windows(_kinds(types), settings)


def _read_alternating_windows(settings: Settings) -> dict[str, Any]:
    """Gemma 2: of every second layer from the first on, or as layer_types says."""
    types = _layers(settings, "layer_types", lambda layer: "full_attention" if layer % 2 else "sliding_attention")
    return _windows(_kinds(types), settings)


def _read_nope(settings: Settings) -> dict[str, Any]:
    """SmolLM3: positions in all layers but every so many'th, or as no_rope_layers says, which has a 1 for them."""
    interval = _value(settings, "no_rope_layer_interval", int)
    turned = _layers(settings, "no_rope_layers", lambda layer: int((layer + 1) % interval != 0))
    kinds = _kinds(_layers(settings, "layer_types", lambda layer: "full_attention"))
    if "sliding" in kinds or settings.get("use_sliding_window"):
        raise Unsupported("use_sliding_window: windows beside layers without positions are not known here")
    if any(each not in (0, 1) for each in turned):
        raise Unsupported("no_rope_layers: it has other values than 0 and 1")
    return {"pattern": _period("global" if each else "global_nope" for each in turned)}


def _by_layer(config: ModelConfig) -> list[Kind]:
    return [config.pattern[layer % len(config.pattern)] for layer in range(config.layers)]


def _write_layer_types(config: ModelConfig) -> Settings:
    kinds = _by_layer(config)
    named = {kind: name for name, kind in LAYER_TYPES.items()}
    windows = "sliding" in kinds
    return {
        "layer_types": [named.get(kind, "full_attention") for kind in kinds],
        "sliding_window": config.window if windows else None,
    }


def _write_windows_from(config: ModelConfig) -> Settings:
    kinds = _by_layer(config)
    windows = "sliding" in kinds
    first = kinds.index("sliding") if windows else config.layers
    return _write_layer_types(config) | {"use_sliding_window": windows, "max_window_layers": first}


def _write_nope(config: ModelConfig) -> Settings:
    turned = [int(kind != "global_nope") for kind in _by_layer(config)]
    return _write_layer_types(config) | {
        "no_rope_layers": turned,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
    }


def _period(pattern: Iterable[Kind]) -> tuple[Kind, ...]:
    """The shortest beginning that, repeated, is the whole."""
    kinds = tuple(pattern)
    for length in range(1, len(kinds)):
        if all(kind == kinds[i % length] for i, kind in enumerate(kinds)):
            return kinds[:length]
    return kinds


def _read_gpt(settings: Settings) -> dict[str, Any]:
    heads, width = _value(settings, "n_head", int), _value(settings, "n_embd", int)
    if heads < 1 or width % heads:
        raise Unsupported(f"n_embd={width} does not divide by n_head={heads}")
    return {
        "kv_heads": heads,
        "head_dim": width // heads,
        "mlp_width": _value(settings, "n_inner", int, 4 * width),
    }


def _write_query_scalar(config: ModelConfig) -> Settings:
    return {"query_pre_attn_scalar": round((config.attention_scale or config.head_dim**-0.5) ** -2)}


def _read_query_scalar(settings: Settings) -> dict[str, Any]:
    scalar = _value(settings, "query_pre_attn_scalar", int)
    if scalar < 1:
        raise Unsupported(f"query_pre_attn_scalar={scalar}: must be at least 1")
    return {"attention_scale": scalar**-0.5}


SIZES = _copied(
    vocabulary_size="vocab_size",
    width="hidden_size",
    layers="num_hidden_layers",
    heads="num_attention_heads",
    mlp_width="intermediate_size",
    norm_epsilon="rms_norm_eps",
    tied_head="tie_word_embeddings",
)
HEADS = Codec(_read_heads, lambda config: {"num_key_value_heads": config.kv_heads, "head_dim": config.head_dim})
ROPE = Codec(_read_rope, _write_rope)
ONE_WINDOW = Codec(_read_one_window, _write_one_window)
WINDOWS_FROM = Codec(_read_windows_from, _write_windows_from)
ALTERNATING_WINDOWS = Codec(_read_alternating_windows, _write_layer_types)
NOPE = Codec(_read_nope, _write_nope)
QUERY_SCALAR = Codec(_read_query_scalar, _write_query_scalar)
SWIGLU = _fixed(hidden_act=("silu", "swish"))
NO_BIASES = _fixed(attention_bias=False, mlp_bias=False)
ROTARY = (SIZES, HEADS, ROPE)
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
    Family("llama", "LlamaForCausalLM", LLAMA, (*ROTARY, SWIGLU, NO_BIASES), UNTIED),
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
        (*ROTARY, SWIGLU, WINDOWS_FROM, _always(biases="qkv")),
        UNTIED | {"sliding_window": 4096, "max_window_layers": 28},
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        LLAMA | QK_NORMS,
        (*ROTARY, SWIGLU, WINDOWS_FROM, _fixed(attention_bias=False), _always(qk_norm="head")),
        UNTIED | {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        OUTSIDE | ATTENTION | MLP | GEMMA_NORMS,
        (
            *ROTARY,
            ALTERNATING_WINDOWS,
            QUERY_SCALAR,
            _optional(attention_softcap="attn_logit_softcapping", logit_softcap="final_logit_softcapping"),
            _fixed(hidden_activation="gelu_pytorch_tanh", attention_bias=False, use_bidirectional_attention=False),
            _always(norm_placement="both", norm_zero_centered=True, mlp="geglu", scale_embedding=True),
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
            _fixed(attention_bias=False),
            _always(norm_placement="post", qk_norm="projection"),
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
            _copied(
                vocabulary_size="vocab_size",
                width="n_embd",
                layers="n_layer",
                heads="n_head",
                max_positions="n_positions",
                norm_epsilon="layer_norm_epsilon",
                tied_head="tie_word_embeddings",
            ),
            Codec(_read_gpt, lambda config: {"n_inner": config.mlp_width}),
            _fixed(
                activation_function=("gelu_new", "gelu_pytorch_tanh"),
                scale_attn_weights=True,
                scale_attn_by_inverse_layer_idx=False,
                add_cross_attention=False,
            ),
            _always(positions="learned", norm="layer", biases="all", mlp="gelu"),
        ),
        {"tie_word_embeddings": True},
        input_first=True,
        base="transformer.",
        ignored=("*.attn.bias", "*.attn.masked_bias"),
    ),
)
