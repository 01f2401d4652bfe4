"""Fields of config.json as fields of ModelConfig, and back: a codec is the pair of functions.

What a family's classes read and is not computed here is refused: a codec raises Unsupported.
"""

import math
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jaxopt_llm.model.config import MOST_LAYERS, Kind, ModelConfig

Settings = dict[str, Any]  # what a config.json holds
HINTS = typing.get_type_hints(ModelConfig)
NAMED = {int: "a whole number below 2**31", float: "a finite number", bool: "true or false"}


class Unsupported(Exception):
    """A config.json that no ModelConfig says the same as, or the reverse. The message names the field."""


@dataclass(frozen=True)
class Codec:
    read: Callable[[Settings], dict[str, Any]]
    write: Callable[[ModelConfig], Settings]


def value_of(settings: Settings, name: str, kind: Any, default: Any = None) -> Any:
    """A field's value. default: in place of null and of a missing one; without it these are refused."""
    value = settings.get(name)
    if value is None:
        if default is None:
            raise Unsupported(f"{name} is missing")
        return default
    if kind is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if type(value) is not kind or (kind is not bool and not abs(value) < (2**31 if kind is int else math.inf)):
        raise Unsupported(f"{name}={value!r}: must be {NAMED[kind]}")
    return value


def copied(**names: str) -> Codec:
    """ours="theirs": one value under two names."""
    return Codec(
        lambda settings: {ours: value_of(settings, theirs, HINTS[ours]) for ours, theirs in names.items()},
        lambda config: {theirs: getattr(config, ours) for ours, theirs in names.items()},
    )


def optional(**names: str) -> Codec:
    """ours="theirs": 0 here is null there."""
    return Codec(
        lambda settings: {ours: value_of(settings, theirs, float, 0.0) for ours, theirs in names.items()},
        lambda config: {theirs: getattr(config, ours) or None for ours, theirs in names.items()},
    )


def always(**fields: Any) -> Codec:
    """What is so in the whole family and in no field of its config.json."""
    return Codec(lambda settings: fields, lambda config: {})


def fixed(**values: Any) -> Codec:
    """Theirs that can be nothing else; of several that mean the same the first is written."""
    choices = {name: value if isinstance(value, tuple) else (value,) for name, value in values.items()}

    def read(settings: Settings) -> dict[str, Any]:
        for name, allowed in choices.items():
            if settings.get(name) not in (None, *allowed):
                raise Unsupported(f"{name}={settings[name]!r}: only {allowed[0]!r} is known here")
        return {}

    return Codec(read, lambda config: {name: allowed[0] for name, allowed in choices.items()})


def absent(*names: str) -> Codec:
    """Theirs that must be null or missing."""

    def read(settings: Settings) -> dict[str, Any]:
        for name in names:
            if settings.get(name) is not None:
                raise Unsupported(f"{name}={settings[name]!r}: only null is known here")
        return {}

    return Codec(read, lambda config: {})


def _read_heads(settings: Settings) -> dict[str, Any]:
    heads = value_of(settings, "num_attention_heads", int)
    head_dim = value_of(settings, "hidden_size", int) // max(heads, 1)
    return {
        "kv_heads": value_of(settings, "num_key_value_heads", int, heads),
        "head_dim": value_of(settings, "head_dim", int, head_dim),
    }


def _read_one_window(settings: Settings) -> dict[str, Any]:
    """Mistral, Phi-3: of all layers or none."""
    if settings.get("sliding_window") is None:
        return {"pattern": ("global",)}
    return {"pattern": ("sliding",), "window": value_of(settings, "sliding_window", int)}


def _write_one_window(config: ModelConfig) -> Settings:
    return {"sliding_window": config.window if "sliding" in config.pattern else None}


def _read_moe_window(settings: Settings) -> dict[str, Any]:
    """Qwen3-MoE: of all layers or none."""
    if not value_of(settings, "use_sliding_window", bool, False):
        return {"pattern": ("global",)}
    if settings.get("max_window_layers") not in (None, 0):
        raise Unsupported(
            f"max_window_layers={settings['max_window_layers']!r}: versions of transformers differ in whether the "
            "layers below it have a window; only 0 is known here"
        )
    return _read_one_window(settings)


def _write_moe_window(config: ModelConfig) -> Settings:
    used = "sliding" in config.pattern
    return _write_one_window(config) | {"use_sliding_window": used, "max_window_layers": 0 if used else config.layers}


GPT_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
LAYER_TYPES: dict[str, Kind] = {"full_attention": "global", "sliding_attention": "sliding"}


def _layer_count(settings: Settings) -> int:
    count = value_of(settings, "num_hidden_layers", int)
    if count > MOST_LAYERS:
        raise Unsupported(f"num_hidden_layers={count}: must be at most {MOST_LAYERS:,}")
    return count


def _layers(settings: Settings, name: str, default: Callable[[int], Any]) -> list[Any]:
    """A field's list with a value for each layer."""
    count, given = _layer_count(settings), settings.get(name)
    if given is None:
        return [default(layer) for layer in range(count)]
    if not isinstance(given, list) or len(given) < count:
        raise Unsupported(f"{name}: must be a list with a value for each of the {count} layers")
    return given[:count]


def _windows(pattern: Iterable[Any], settings: Settings) -> dict[str, Any]:
    kinds = period(pattern)
    if "sliding" not in kinds:
        return {"pattern": kinds}
    return {"pattern": kinds, "window": value_of(settings, "sliding_window", int)}


def _kinds(types: list[Any]) -> list[Kind]:
    if unknown := [each for each in types if not (isinstance(each, str) and each in LAYER_TYPES)]:
        raise Unsupported(f"layer_types: {unknown[0]!r} is not one of {', '.join(LAYER_TYPES)}")
    return [LAYER_TYPES[each] for each in types]


def _read_windows_from(settings: Settings) -> dict[str, Any]:
    """Qwen: of the layers from max_window_layers on, or as layer_types says."""
    used = value_of(settings, "use_sliding_window", bool, False) and settings.get("sliding_window") is not None
    first = value_of(settings, "max_window_layers", int) if used and settings.get("layer_types") is None else 0
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
    interval = value_of(settings, "no_rope_layer_interval", int)
    if interval < 1:
        raise Unsupported(f"no_rope_layer_interval={interval}: must be at least 1")
    turned = _layers(settings, "no_rope_layers", lambda layer: int((layer + 1) % interval != 0))
    kinds = _kinds(_layers(settings, "layer_types", lambda layer: "full_attention"))
    if "sliding" in kinds or settings.get("use_sliding_window"):
        raise Unsupported("use_sliding_window: windows beside layers without positions are not known here")
    if any(each not in (0, 1) for each in turned):
        raise Unsupported("no_rope_layers: it has other values than 0 and 1")
    return {"pattern": period("global" if each else "global_nope" for each in turned)}


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


def period(pattern: Iterable[Kind]) -> tuple[Kind, ...]:
    """The shortest beginning that, repeated, is the whole."""
    kinds = tuple(pattern)
    for length in range(1, len(kinds)):
        if all(kind == kinds[i % length] for i, kind in enumerate(kinds)):
            return kinds[:length]
    return kinds


def sparse_layers(has_experts: list[bool]) -> tuple[int, int] | None:
    """dense_layers and expert_every, as small as they can be, of the layers that have experts; None where these cannot
    say it."""
    layers = range(len(has_experts))
    sparse = [layer for layer in layers if has_experts[layer]]
    if not sparse:
        return None
    first = sparse[0]
    of_one = (every for every in range(1, first + 2) if (first + 1) % every == 0 and first + every not in layers)
    every = sparse[1] - first if len(sparse) > 1 else next(of_one, first + 1)
    for dense in (0, first):
        if has_experts == [layer >= dense and (layer + 1) % every == 0 for layer in layers]:
            return dense, every
    return None


def _read_sparse_layers(settings: Settings) -> dict[str, Any]:
    """Qwen3-MoE: of every so many layers the last has experts, unless it is named."""
    every, without = value_of(settings, "decoder_sparse_step", int), settings.get("mlp_only_layers") or []
    if every < 1:
        raise Unsupported(f"decoder_sparse_step={every}: must be at least 1")
    if not isinstance(without, list) or any(type(each) is not int for each in without):
        raise Unsupported(f"mlp_only_layers={without!r}: must be a list of layers")
    layers, named = range(_layer_count(settings)), set(without)
    found = sparse_layers([layer not in named and (layer + 1) % every == 0 for layer in layers])
    if found is None:
        raise Unsupported(
            f"mlp_only_layers={without!r}, decoder_sparse_step={every}: from some layer on every so many'th must have "
            "experts"
        )
    return dict(zip(("dense_layers", "expert_every"), found, strict=True))


def _write_sparse_layers(config: ModelConfig) -> Settings:
    every = config.expert_every
    dense = [layer for layer in range(config.dense_layers) if (layer + 1) % every == 0]
    return {"decoder_sparse_step": every, "mlp_only_layers": dense}


def experts(name: str, alias: str, default: int) -> Codec:
    """The number of experts, which versions of transformers write under one name or the other."""

    def read(settings: Settings) -> dict[str, Any]:
        given = {each: settings[each] for each in (name, alias) if settings.get(each) is not None}
        if len(given) == 2 and given[name] != given[alias]:
            raise Unsupported(f"{alias}={given[alias]!r}: it is another name of {name}, which is {given[name]!r}")
        count = value_of({name: next(iter(given.values()), None)}, name, int, default)
        if count < 1:
            raise Unsupported(f"{name}={count}: must be at least 1")
        return {"experts": count}

    return Codec(read, lambda config: {name: config.experts})


def _check_projection_norms(settings: Settings) -> dict[str, Any]:
    """OLMoE's class has norms of hidden_size, whatever head_dim says."""
    heads, head_dim = value_of(settings, "num_attention_heads", int), _read_heads(settings)["head_dim"]
    if heads * head_dim != settings["hidden_size"]:
        raise Unsupported(
            f"head_dim={head_dim}: times num_attention_heads={heads} it must be hidden_size={settings['hidden_size']}"
        )
    return {}


def _read_gpt(settings: Settings) -> dict[str, Any]:
    for alias, name in GPT_ALIASES.items():
        if settings.get(alias) not in (None, settings.get(name)):
            raise Unsupported(
                f"{alias}={settings[alias]!r}: it is another name of {name}, which is {settings.get(name)!r}"
            )
    heads, width = value_of(settings, "n_head", int), value_of(settings, "n_embd", int)
    if heads < 1 or width % heads:
        raise Unsupported(f"n_embd={width} does not divide by n_head={heads}")
    return {
        "kv_heads": heads,
        "head_dim": width // heads,
        "mlp_width": value_of(settings, "n_inner", int, 4 * width),
    }


def _check_divisible(settings: Settings) -> dict[str, Any]:
    """Llama's and Gemma 2's classes refuse others, whatever head_dim says."""
    heads, width = value_of(settings, "num_attention_heads", int), value_of(settings, "hidden_size", int)
    if heads > 0 and width % heads:
        raise Unsupported(f"hidden_size={width} does not divide by num_attention_heads={heads}")
    return {}


def _write_query_scalar(config: ModelConfig) -> Settings:
    return {"query_pre_attn_scalar": round((config.attention_scale or config.head_dim**-0.5) ** -2)}


def _read_query_scalar(settings: Settings) -> dict[str, Any]:
    scalar = value_of(settings, "query_pre_attn_scalar", int)
    if scalar < 1:
        raise Unsupported(f"query_pre_attn_scalar={scalar}: must be at least 1")
    return {"attention_scale": scalar**-0.5}


SIZES = copied(
    vocabulary_size="vocab_size",
    width="hidden_size",
    layers="num_hidden_layers",
    heads="num_attention_heads",
    norm_epsilon="rms_norm_eps",
    tied_head="tie_word_embeddings",
)
MLP_SIZE = copied(mlp_width="intermediate_size")
HEADS = Codec(_read_heads, lambda config: {"num_key_value_heads": config.kv_heads, "head_dim": config.head_dim})
DIVISIBLE = Codec(_check_divisible, lambda config: {})
ONE_WINDOW = Codec(_read_one_window, _write_one_window)
WINDOWS_FROM = Codec(_read_windows_from, _write_windows_from)
ALTERNATING_WINDOWS = Codec(_read_alternating_windows, _write_layer_types)
NOPE = Codec(_read_nope, _write_nope)
QUERY_SCALAR = Codec(_read_query_scalar, _write_query_scalar)
SWIGLU = fixed(hidden_act=("silu", "swish"))
NO_BIASES = fixed(attention_bias=False, mlp_bias=False)
GPT_SIZES = copied(
    vocabulary_size="vocab_size",
    width="n_embd",
    layers="n_layer",
    heads="n_head",
    max_positions="n_positions",
    norm_epsilon="layer_norm_epsilon",
    tied_head="tie_word_embeddings",
)
GPT_HEADS = Codec(_read_gpt, lambda config: {"n_inner": config.mlp_width})
SOFTCAPS = optional(attention_softcap="attn_logit_softcapping", logit_softcap="final_logit_softcapping")
MOE_WINDOW = Codec(_read_moe_window, _write_moe_window)
SPARSE_LAYERS = Codec(_read_sparse_layers, _write_sparse_layers)
CHOICE = copied(experts_per_token="num_experts_per_tok", balance_loss="router_aux_loss_coef")
RENORMALISES = copied(router_renormalises="norm_topk_prob")
PROJECTION_NORMS = Codec(_check_projection_norms, lambda config: {})
