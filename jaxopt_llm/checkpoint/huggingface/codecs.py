"""Codecs between fields of config.json and fields of ModelConfig.

A codec is a pair of functions, one for each direction. It raises Unsupported for a value that the family's classes in
transformers read and that our model does not compute.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxopt_llm.config import ModelConfig
from jaxopt_llm.config.fields import METADATA, get_field, walk_fields
from jaxopt_llm.config.model import MAX_LAYERS
from jaxopt_llm.core.errors import InputError

Settings = dict[str, Any]  # content of a Hugging Face config.json
FIELD_TYPES = {name: hint for name, hint, _ in walk_fields(ModelConfig)}
PRETRAINED_FIELDS = [name for name in FIELD_TYPES if METADATA[f"model.{name}"].in_pretrained]
TYPE_NAMES = {int: "a whole number below 2**31", float: "a finite number", bool: "true or false"}


ANOTHER_WAY = (
    "use a model of the table in docs/pretrained.md, or train this one as a Flax model with jaxopt_llm.initialize "
    "(docs/guides/any_model.md)"
)
CORRECT = "correct it, or use the config.json of the published model"

# What a model with another value of a field would need, for fields that support some values only.
NEEDS = {
    "activation_function": "another activation in the MLPs",
    "add_cross_attention": "attention to an encoder in each layer",
    "attention_bias": "biases of the attention projections",
    "clip_qkv": "queries, keys and values cut to a range",
    "hidden_act": "another activation in the MLPs",
    "hidden_activation": "another activation in the MLPs",
    "is_causal": "attention to later tokens",
    "layer_types": "kinds of attention that this family does not have",
    "mlp_bias": "biases of the MLPs",
    "moe_layer_freq": "layers without experts between those with experts",
    "norm_topk_prob": "weights of the chosen experts that sum to 1, which the class in transformers does not compute",
    "rope_interleave": "queries and keys in which RoPE pairs halves instead of neighbours",
    "router_jitter_noise": "noise in the input of the routers",
    "scale_attn_by_inverse_layer_idx": "scores divided by the number of the layer",
    "scale_attn_weights": "scores that are not divided by the root of the head's size",
    "scoring_func": "another function of the routers' logits",
    "sliding_window": "a sliding window in this family",
    "topk_method": "another choice of experts by the routers",
    "use_bidirectional_attention": "attention to later tokens",
}


class Unsupported(InputError):
    """A config.json without an equivalent ModelConfig, or the reverse.

    The message names the field and its value, what the model would need, and what can be done.
    """


def shorten(value: Any) -> str:
    """Return a value for a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."


def unsupported(field: str, problem: str, remedy: str = ANOTHER_WAY) -> Unsupported:
    return Unsupported(f"{field}: {problem}; {remedy}")


@dataclass(frozen=True)
class Codec:
    """Pair of conversions of some fields: `read` from config.json, `write` to config.json."""

    read: Callable[[Settings], dict[str, Any]]
    write: Callable[[ModelConfig], Settings]


def read_value(settings: Settings, name: str, kind: Any, default: Any = None, minimum: int | None = None) -> Any:
    """Return the value of a field.

    Args:
        settings: content of config.json.
        name: name of the field.
        kind: type of the field: int, float, bool or str.
        default: value for a field that is null or missing; without a default such a field is an error.
        minimum: smallest supported value.

    Raises:
        Unsupported: the field has another type, is out of range, or is missing.
    """
    value = settings.get(name)
    if value is None:
        if default is None:
            raise Unsupported(f"{name} is missing; {CORRECT}")
        return default
    if kind is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if type(value) is not kind or (kind is not bool and not abs(value) < (2**31 if kind is int else math.inf)):
        raise unsupported(f"{name}={shorten(value)}", f"must be {TYPE_NAMES[kind]}", CORRECT)
    if minimum is not None and value < minimum:
        raise unsupported(f"{name}={value}", f"must be at least {minimum}", CORRECT)
    return value


def read_layer_count(settings: Settings) -> int:
    count = read_value(settings, "num_hidden_layers", int)
    if count > MAX_LAYERS:
        raise unsupported(f"num_hidden_layers={count}", f"must be at most {MAX_LAYERS:,}", CORRECT)
    return count


def check_value(settings: Settings, name: str, *supported: Any) -> None:
    """Raise Unsupported if a field is neither null or missing nor one of the supported values."""
    if settings.get(name) not in (None, *supported):
        first = repr(supported[0]) if supported else "null"
        raise unsupported(
            f"{name}={shorten(settings[name])}", f"only {first} is read; the model would need {NEEDS[name]}"
        )


def check_alias(settings: Settings, alias: str, name: str) -> None:
    """Raise Unsupported if a field and its other name have different values."""
    value = settings.get(name)
    if value is not None and settings.get(alias) not in (None, value):
        raise unsupported(f"{alias}={settings[alias]!r}", f"it is another name of {name}, which is {value!r}", CORRECT)


def check_multiple(settings: Settings, width_name: str, heads_name: str) -> tuple[int, int]:
    """Return the width and the number of heads. Raise Unsupported if the width is not a multiple of it."""
    width, heads = read_value(settings, width_name, int), read_value(settings, heads_name, int)
    if heads > 0 and width % heads:
        raise unsupported(f"{width_name}={width}", f"must be a multiple of {heads_name}={heads}", CORRECT)
    return width, heads


def copy_fields(names: dict[str, str]) -> Codec:
    """Return a codec for fields with the same value under two names, {our dotted name: their name}."""
    return Codec(
        lambda settings: {ours: read_value(settings, theirs, FIELD_TYPES[ours]) for ours, theirs in names.items()},
        lambda config: {theirs: get_field(config, ours) for ours, theirs in names.items()},
    )


def set_fields(fields: dict[str, Any]) -> Codec:
    """Return a codec for our fields that are the same in the whole family and have no field in config.json."""
    return Codec(lambda settings: fields, lambda config: {})


def require_values(**values: Any) -> Codec:
    """Return a codec for fields of config.json that support one value only.

    A tuple lists several spellings of this value; the first one is written.
    """
    choices = {name: value if isinstance(value, tuple) else (value,) for name, value in values.items()}

    def read(settings: Settings) -> dict[str, Any]:
        for name, allowed in choices.items():
            check_value(settings, name, *allowed)
        return {}

    return Codec(read, lambda config: {name: allowed[0] for name, allowed in choices.items()})


def require_absent(*names: str) -> Codec:
    """Return a codec for fields of config.json that must be null or missing."""

    def read(settings: Settings) -> dict[str, Any]:
        for name in names:
            check_value(settings, name)
        return {}

    return Codec(read, lambda config: {})


def read_heads(settings: Settings) -> dict[str, Any]:
    heads = read_value(settings, "num_attention_heads", int)
    head_dim = read_value(settings, "hidden_size", int) // max(heads, 1)
    return {
        "kv_heads": read_value(settings, "num_key_value_heads", int, heads),
        "head_dim": read_value(settings, "head_dim", int, head_dim),
    }


GPT_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def _read_gpt(settings: Settings) -> dict[str, Any]:
    for alias, name in GPT_ALIASES.items():
        check_alias(settings, alias, name)
    width, heads = check_multiple(settings, "n_embd", "n_head")
    mlp_width = read_value(settings, "n_inner", int, 4 * width)
    return {"kv_heads": heads, "head_dim": width // max(heads, 1), "mlp_width": mlp_width}


def _check_divisible(settings: Settings) -> dict[str, Any]:
    """Check a restriction of the classes of Llama and Gemma 2, which holds regardless of head_dim."""
    check_multiple(settings, "hidden_size", "num_attention_heads")
    return {}


def _check_projection_norms(settings: Settings) -> dict[str, Any]:
    """Check a restriction of OLMoE's class, whose query and key norms have hidden_size, regardless of head_dim."""
    heads, head_dim = read_value(settings, "num_attention_heads", int), read_heads(settings)["head_dim"]
    if heads * head_dim != settings["hidden_size"]:
        problem = f"times num_attention_heads={heads} it must be hidden_size={settings['hidden_size']}"
        raise unsupported(f"head_dim={head_dim}", problem, CORRECT)
    return {}


def _write_query_scalar(config: ModelConfig) -> Settings:
    return {"query_pre_attn_scalar": round((config.attention_scale or config.head_dim**-0.5) ** -2)}


def _read_query_scalar(settings: Settings) -> dict[str, Any]:
    return {"attention_scale": read_value(settings, "query_pre_attn_scalar", int, minimum=1) ** -0.5}


SIZES = copy_fields(
    {"vocabulary_size": "vocab_size", "width": "hidden_size", "layers": "num_hidden_layers"}
    | {"heads": "num_attention_heads", "norm_epsilon": "rms_norm_eps", "tied_head": "tie_word_embeddings"}
)
MLP_SIZE = copy_fields({"mlp_width": "intermediate_size"})
HEADS = Codec(read_heads, lambda config: {"num_key_value_heads": config.kv_heads, "head_dim": config.head_dim})
DIVISIBLE = Codec(_check_divisible, lambda config: {})
PROJECTION_NORMS = Codec(_check_projection_norms, lambda config: {})
QUERY_SCALAR = Codec(_read_query_scalar, _write_query_scalar)
SWIGLU = require_values(hidden_act=("silu", "swish"))
NO_BIASES = require_values(attention_bias=False, mlp_bias=False)
GPT_SIZES = copy_fields(
    {"vocabulary_size": "vocab_size", "width": "n_embd", "layers": "n_layer", "heads": "n_head"}
    | {"max_positions": "n_positions", "norm_epsilon": "layer_norm_epsilon", "tied_head": "tie_word_embeddings"}
)
GPT_HEADS = Codec(_read_gpt, lambda config: {"n_inner": config.mlp_width})
_SOFTCAP_NAMES = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
SOFTCAPS = Codec(  # a softcap that is off is 0 in our config and null in config.json
    lambda settings: {ours: read_value(settings, theirs, float, 0.0) for ours, theirs in _SOFTCAP_NAMES.items()},
    lambda config: {theirs: get_field(config, ours) or None for ours, theirs in _SOFTCAP_NAMES.items()},
)
