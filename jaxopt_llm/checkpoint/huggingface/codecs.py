"""Codecs between fields of config.json and fields of ModelConfig.

A codec is a pair of functions, one for each direction. It raises Unsupported for a value that the family's classes in
transformers read and that our model does not compute.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxopt_llm.config import Kind, ModelConfig
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
    "problem_type": "a loss with several labels of a document",
    "attention_bias": "biases of the attention projections",
    "clip_qkv": "queries, keys and values cut to a range",
    "hidden_act": "another activation in the MLPs",
    "hidden_activation": "another activation in the MLPs",
    "is_causal": "attention to later tokens",
    "layer_types": "kinds of attention that this family does not have",
    "mlp_bias": "biases of the MLPs",
    "moe_layer_freq": "layers without experts between those with experts",
    "moe_norm_min": "another bound of the sum of the chosen experts' scores",
    "norm_topk_prob": "another sum of the chosen experts' weights, which the class in transformers does not compute",
    "qk_layernorm": "norms of queries and keys in which each head has its own scale",
    "rope_interleave": "queries and keys in which RoPE pairs halves instead of neighbours",
    "router_jitter_noise": "noise in the input of the routers",
    "scale_attn_by_inverse_layer_idx": "scores divided by the number of the layer",
    "scale_attn_weights": "scores that are not divided by the root of the head's size",
    "scoring_func": "another function of the routers' logits",
    "sliding_window": "a sliding window in this family",
    "swiglu_alpha": "another slope of the gates of the MLPs",
    "swiglu_limit": "other limits of the gates of the MLPs",
    "topk_method": "another choice of experts by the routers",
    "use_bias": "biases of all projections except those of the experts",
    "use_parallel_residual": "attention and MLP that read the same input",
    "use_cla": "keys and values that layers share",
    "use_bidirectional_attention": "attention to later tokens",
    "use_qk_norm": "norms of queries and keys in which each head has its own scale",
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
    """Pair of conversions of some fields: `read` from config.json, `write` to config.json.

    required: fields of config.json that support one value only, with this value.
    """

    read: Callable[[Settings], dict[str, Any]]
    write: Callable[[ModelConfig], Settings]
    required: Mapping[str, Any] = field(default_factory=dict)


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


def read_layers(settings: Settings, name: str, default: list[int]) -> list[int]:
    """Return a field with the numbers of some layers. default: for a field that is null or missing."""
    layers = default if settings.get(name) is None else settings[name]
    if not isinstance(layers, list) or any(type(each) is not int for each in layers):
        raise unsupported(f"{name}={shorten(layers)}", "must be a list of layers", CORRECT)
    return layers


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


def copy_fields(names: dict[str, str], minimum: int | None = None) -> Codec:
    """Return a codec for fields with the same value under two names, {our dotted name: their name}.

    minimum: smallest value that is read.
    """
    return Codec(
        lambda settings: {
            ours: read_value(settings, theirs, FIELD_TYPES[ours], minimum=minimum) for ours, theirs in names.items()
        },
        lambda config: {theirs: get_field(config, ours) for ours, theirs in names.items()},
    )


def copy_switches(names: dict[str, str]) -> Codec:
    """Return a codec like `copy_fields` for parts of a model that 0 switches off in our fields, and null in theirs."""
    off = {ours: FIELD_TYPES[ours](0) for ours in names}
    return Codec(
        lambda settings: {ours: read_value(settings, names[ours], type(off[ours]), off[ours]) for ours in names},
        lambda config: {theirs: get_field(config, ours) or None for ours, theirs in names.items()},
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

    required = {name: allowed[0] for name, allowed in choices.items()}
    return Codec(read, lambda config: required, required)


def require_absent(*names: str) -> Codec:
    """Return a codec for fields of config.json that must be null or missing."""

    def read(settings: Settings) -> dict[str, Any]:
        for name in names:
            check_value(settings, name)
        return {}

    return Codec(read, lambda config: {}, dict.fromkeys(names))


# --- sizes, heads and biases


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


def _check_heads_fill_width(settings: Settings) -> dict[str, Any]:
    """Check a restriction of the classes whose heads have hidden_size together: OLMoE's norms, Cohere 2's heads."""
    heads, head_dim = read_value(settings, "num_attention_heads", int), read_heads(settings)["head_dim"]
    if heads * head_dim != settings["hidden_size"]:
        problem = f"times num_attention_heads={heads} it must be hidden_size={settings['hidden_size']}"
        raise unsupported(f"head_dim={head_dim}", problem, CORRECT)
    return {}


def _write_query_scalar(config: ModelConfig) -> Settings:
    return {"query_pre_attn_scalar": round((config.attention_scale or config.head_dim**-0.5) ** -2)}


def _read_query_scalar(settings: Settings) -> dict[str, Any]:
    return {"attention_scale": read_value(settings, "query_pre_attn_scalar", int, minimum=1) ** -0.5}


SIZE_NAMES = {
    **{"vocabulary_size": "vocab_size", "width": "hidden_size", "layers": "num_hidden_layers"},
    **{"heads": "num_attention_heads", "norm_epsilon": "rms_norm_eps", "tied_head": "tie_word_embeddings"},
}
SIZES = copy_fields(SIZE_NAMES)
LAYER_NORM_SIZES = copy_fields(SIZE_NAMES | {"norm_epsilon": "layer_norm_eps"})
MLP_SIZE = copy_fields({"mlp_width": "intermediate_size"})
HEADS = Codec(read_heads, lambda config: {"num_key_value_heads": config.kv_heads, "head_dim": config.head_dim})
DIVISIBLE = Codec(_check_divisible, lambda config: {})
HEADS_FILL_WIDTH = Codec(_check_heads_fill_width, lambda config: {})
QUERY_SCALAR = Codec(_read_query_scalar, _write_query_scalar)
ROOT_SCALE = Codec(  # of Gemma's embeddings
    lambda settings: {"embedding_scale": math.sqrt(read_value(settings, "hidden_size", int))}, lambda config: {}
)
MUP_SCALE = Codec(
    lambda settings: ROOT_SCALE.read(settings) if read_value(settings, "mup_enabled", bool, False) else {},
    lambda config: {"mup_enabled": config.embedding_scale != 1},
)
SWIGLU = require_values(hidden_act=("silu", "swish"))
NO_BIASES = require_values(attention_bias=False, mlp_bias=False)


def copy_qk_norm(kind: str) -> Codec:
    """Return a codec for the switch of norms of queries and keys. kind: their model.qk_norm."""
    return Codec(
        lambda settings: {"qk_norm": kind if read_value(settings, "use_qk_norm", bool, False) else "none"},
        lambda config: {"use_qk_norm": config.qk_norm == kind},
    )


def copy_biases(names: tuple[str, ...], kinds: dict[tuple[bool, ...], str]) -> Codec:
    """Return a codec for switches that give projections a bias. kinds: values of the fields `names` -> model.biases."""
    values = {kind: given for given, kind in kinds.items()}

    def read(settings: Settings) -> dict[str, Any]:
        given = tuple(read_value(settings, name, bool, False) for name in names)
        if given not in kinds:
            text = ", ".join(f"{name}={value}" for name, value in zip(names, given, strict=True))
            raise unsupported(text, "the model would need biases of other projections")
        return {"biases": kinds[given]}

    def write(config: ModelConfig) -> Settings:
        given = values.get(config.biases, (False,) * len(names))  # another model then reads back
        return dict(zip(names, given, strict=True))

    return Codec(read, write)


BIASES = copy_biases(
    ("attention_bias", "mlp_bias"),
    {(False, False): "none", (True, False): "attention", (False, True): "mlp", (True, True): "all"},
)
ATTENTION_BIASES = copy_biases(("attention_bias",), {(False,): "none", (True,): "attention"})
QWEN2_BIASES = copy_biases(("qkv_bias",), {(False,): "none", (True,): "qkv"})
STABLELM_BIASES = copy_biases(("use_qkv_bias",), {(False,): "none", (True,): "qkv"})
INPUT_BIASES = copy_biases(("attention_bias",), {(False,): "none", (True,): "qkv"})
OUTPUT_BIASES = copy_biases(
    ("attention_bias", "attention_out_bias"), {(False, False): "none", (True, False): "qkv", (True, True): "attention"}
)
ALL_BIASES = copy_biases(("use_bias",), {(False,): "none", (True,): "all"})


def _write_multipliers(config: ModelConfig) -> Settings:
    scale = config.attention_scale or config.head_dim**-0.5
    return {"attention_multiplier": scale, "logits_scaling": 1 / config.logit_scale}


def _read_divisor(settings: Settings, name: str) -> float:
    if (value := read_value(settings, name, float)) <= 0:
        raise unsupported(f"{name}={value}", "must be above 0", CORRECT)
    return value


MULTIPLIERS = (
    copy_fields({"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"}),
    Codec(
        lambda settings: {
            "attention_scale": read_value(settings, "attention_multiplier", float),
            "logit_scale": 1 / _read_divisor(settings, "logits_scaling"),
        },
        _write_multipliers,
    ),
)
GPT_SIZES = copy_fields(
    {"vocabulary_size": "vocab_size", "width": "n_embd", "layers": "n_layer", "heads": "n_head"}
    | {"max_positions": "n_positions", "norm_epsilon": "layer_norm_epsilon", "tied_head": "tie_word_embeddings"}
)
GPT_HEADS = Codec(_read_gpt, lambda config: {"n_inner": config.mlp_width})
SOFTCAPS = copy_switches({"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"})


# --- mixtures of experts


def find_expert_layers(has_experts: list[bool]) -> tuple[int, int] | None:
    """Return the smallest `dense_layers` and `expert_every` that describe which layers have experts.

    None: no layer has experts, or these two fields cannot describe the layers.
    """
    if not any(has_experts):
        return None
    first = has_experts.index(True)
    for every in range(1, first + 2):
        for dense in (0, first) if (first + 1) % every == 0 else ():
            if has_experts == [layer >= dense and (layer + 1) % every == 0 for layer in range(len(has_experts))]:
                return dense, every
    return None


def read_has_experts(has_experts: list[bool], fields: str) -> dict[str, Any]:
    """Return our fields of the layers that have experts. fields: those of config.json, for a message."""
    found = find_expert_layers(has_experts)
    if found is None:
        raise unsupported(fields, "from some layer on, every n-th layer must have experts, and all others none")
    return dict(zip(("moe.dense_layers", "moe.expert_every"), found, strict=True))


def _read_expert_layers(settings: Settings) -> dict[str, Any]:
    """Read Qwen3-MoE's layers: each decoder_sparse_step-th has experts, except those in mlp_only_layers."""
    every = read_value(settings, "decoder_sparse_step", int, minimum=1)
    dense_layers = read_layers(settings, "mlp_only_layers", [])
    layers, dense = range(read_layer_count(settings)), set(dense_layers)
    has_experts = [layer not in dense and (layer + 1) % every == 0 for layer in layers]
    return read_has_experts(has_experts, f"mlp_only_layers={dense_layers!r}, decoder_sparse_step={every}")


def _write_expert_layers(config: ModelConfig) -> Settings:
    every = config.moe.expert_every
    dense = [layer for layer in range(config.moe.dense_layers) if (layer + 1) % every == 0]
    return {"decoder_sparse_step": every, "mlp_only_layers": dense}


def copy_expert_count(name: str, alias: str, default: int) -> Codec:
    """Return a codec for the number of experts, which versions of transformers write under one of two names."""

    def read(settings: Settings) -> dict[str, Any]:
        check_alias(settings, alias, name)
        used = alias if settings.get(name) is None else name
        return {"moe.experts": read_value(settings, used, int, default, minimum=1)}

    return Codec(read, lambda config: {name: config.moe.experts})


EXPERT_LAYERS = Codec(_read_expert_layers, _write_expert_layers)
TOP_K = copy_fields({"moe.experts_per_token": "num_experts_per_tok", "moe.balance_loss": "router_aux_loss_coef"})
BALANCE_LOSS = copy_fields({"moe.balance_loss": "router_aux_loss_coef"})
RENORMALISES = copy_fields({"moe.router_renormalises": "norm_topk_prob"})


# --- DeepSeek: latent attention (MLA), shared experts and groups of experts


def _read_latents(settings: Settings) -> dict[str, Any]:
    heads = read_value(settings, "num_attention_heads", int)
    kv_heads = read_value(settings, "num_key_value_heads", int, heads)
    if kv_heads != heads:
        problem = f"only num_attention_heads={heads} is read; the model would need latents that heads share in groups"
        raise unsupported(f"num_key_value_heads={kv_heads}", problem)
    plain_dim, rotary_dim = (read_value(settings, f"qk_{part}_head_dim", int) for part in ("nope", "rope"))
    return {
        "kv_heads": heads,
        "head_dim": plain_dim + rotary_dim,
        "mla.kv_rank": read_value(settings, "kv_lora_rank", int, minimum=1),
        "mla.rotary_head_dim": rotary_dim,
        "mla.value_head_dim": read_value(settings, "v_head_dim", int),
    }


def _write_latents(config: ModelConfig) -> Settings:
    return {
        "num_key_value_heads": config.kv_heads,
        "kv_lora_rank": config.mla.kv_rank,
        "qk_nope_head_dim": config.key_dim,
        "qk_rope_head_dim": config.rotary_dim,
        "v_head_dim": config.value_dim,
    }


def copy_shared_experts(name: str, minimum: int) -> Codec:
    """Return a codec for the width of experts and, in the field `name`, the number of shared ones."""

    def read(settings: Settings) -> dict[str, Any]:
        count = read_value(settings, name, int, minimum=minimum)
        width = read_value(settings, "moe_intermediate_size", int)
        return {"moe.expert_width": width, "moe.shared_expert_width": count * width}

    def write(config: ModelConfig) -> Settings:
        count, rest = divmod(config.moe.shared_expert_width, max(config.moe.expert_width, 1))
        if rest or count < minimum:
            raise Unsupported(
                f"model.moe.shared_expert_width={config.moe.shared_expert_width}: must be a multiple of "
                f"model.moe.expert_width={config.moe.expert_width}"
            )
        return {name: count, "moe_intermediate_size": config.moe.expert_width}

    return Codec(read, write)


GREEDY, GROUP_LIMITED = "greedy", "group_limited_greedy"


def _read_expert_groups(settings: Settings) -> dict[str, Any]:
    method = settings.get("topk_method") or GREEDY
    if method not in (GREEDY, GROUP_LIMITED):
        problem = f"only {GREEDY!r} and {GROUP_LIMITED!r} are read; the model would need {NEEDS['topk_method']}"
        raise unsupported(f"topk_method={method!r}", problem)
    if method == GREEDY:
        return {"moe.router_groups": 1, "moe.router_groups_per_token": 1}
    groups, chosen = (read_value(settings, name, int) for name in ("n_group", "topk_group"))
    return {"moe.router_groups": groups, "moe.router_groups_per_token": chosen}


def _write_expert_groups(config: ModelConfig) -> Settings:
    groups, chosen = config.moe.router_groups, config.moe.router_groups_per_token
    return {"topk_method": GROUP_LIMITED if groups > 1 else GREEDY, "n_group": groups, "topk_group": chosen}


LATENTS = Codec(_read_latents, _write_latents)
QUERY_LATENTS = copy_switches({"mla.query_rank": "q_lora_rank"})
# Of the shared expert, which every layer has.
QWEN2_SHARED_SIZE = copy_fields({"moe.shared_expert_width": "shared_expert_intermediate_size"}, minimum=1)
ONE_EXPERT_SIZE = Codec(  # of the experts and of the shared one
    lambda settings: dict.fromkeys(
        ("moe.expert_width", "moe.shared_expert_width"), read_value(settings, "intermediate_size", int)
    ),
    lambda config: {"intermediate_size": config.moe.expert_width},
)
SHARED_EXPERT_SIZES = copy_shared_experts("n_shared_experts", minimum=1)
AFMOE_SHARED_EXPERT_SIZES = copy_shared_experts("num_shared_experts", minimum=1)
EXPERT_GROUPS = Codec(_read_expert_groups, _write_expert_groups)


# --- kinds of layers: sliding windows, and layers without positions (NoPE)

GLOBAL_LAYERS, SLIDING_LAYERS = "full_attention", "sliding_attention"
LAYER_TYPES: dict[str, Kind] = {"full_attention": "global", "sliding_attention": "sliding"}


def find_shortest_period(pattern: Iterable[Kind]) -> tuple[Kind, ...]:
    """Return the shortest prefix that yields the whole pattern when repeated."""
    kinds = tuple(pattern)
    for length in range(1, len(kinds)):
        if all(kind == kinds[i % length] for i, kind in enumerate(kinds)):
            return kinds[:length]
    return kinds


def _read_one_window(settings: Settings) -> dict[str, Any]:
    """Read the window of Mistral and Phi-3, which all layers have or none."""
    return read_windows(["global" if settings.get("sliding_window") is None else "sliding"], settings)


def _write_one_window(config: ModelConfig) -> Settings:
    return {"sliding_window": config.window if "sliding" in config.pattern else None}


def _read_moe_window(settings: Settings) -> dict[str, Any]:
    """Read the window of Qwen3-MoE, which all layers have or none."""
    if not read_value(settings, "use_sliding_window", bool, False):
        return {"pattern": ("global",)}
    if settings.get("max_window_layers") not in (None, 0):
        raise unsupported(
            f"max_window_layers={settings['max_window_layers']!r}",
            "only 0 is read, because versions of transformers differ in whether the layers below it have a window",
            "set it to 0 in the config.json if all layers have the window, or use_sliding_window to false if none has",
        )
    return _read_one_window(settings)


def _write_moe_window(config: ModelConfig) -> Settings:
    used = "sliding" in config.pattern
    return _write_one_window(config) | {"use_sliding_window": used, "max_window_layers": 0 if used else config.layers}


def read_layer_values(settings: Settings, name: str, default: Callable[[int], Any]) -> list[Any]:
    """Return a field with a list of one value per layer. default: layer -> value, for a missing field."""
    count, given = read_layer_count(settings), settings.get(name)
    if given is None:
        return [default(layer) for layer in range(count)]
    if not isinstance(given, list) or len(given) < count:
        raise unsupported(
            f"{name}={shorten(given)}", f"must be a list with a value for each of the {count} layers", CORRECT
        )
    return given[:count]


def read_windows(kinds: Iterable[Kind], settings: Settings) -> dict[str, Any]:
    pattern = find_shortest_period(kinds)
    if "sliding" not in pattern:
        return {"pattern": pattern}
    return {"pattern": pattern, "window": read_value(settings, "sliding_window", int)}


def read_layer_types(settings: Settings, has_window: Callable[[int], bool]) -> list[Kind]:
    """Return the kind of each layer from layer_types. has_window: of the number of a layer, if the field is missing."""
    types = read_layer_values(
        settings, "layer_types", lambda layer: SLIDING_LAYERS if has_window(layer) else GLOBAL_LAYERS
    )
    if unknown := [each for each in types if not (isinstance(each, str) and each in LAYER_TYPES)]:
        need = f"only {' and '.join(LAYER_TYPES)} are read; the model would need layers of this kind"
        raise unsupported(f"layer_types={unknown[0]!r}", need)
    return [LAYER_TYPES[each] for each in types]


def _read_windows_from_layer(settings: Settings) -> dict[str, Any]:
    """Read Qwen's windows: of the layers from max_window_layers on, or of those that layer_types names."""
    used = read_value(settings, "use_sliding_window", bool, False) and settings.get("sliding_window") is not None
    first = read_value(settings, "max_window_layers", int) if used and settings.get("layer_types") is None else 0
    kinds = read_layer_types(settings, lambda layer: used and layer >= first)
    if "sliding" in kinds and not used:
        need = "sliding_attention requires use_sliding_window=true and a sliding_window"
        raise unsupported("layer_types", need, CORRECT)
    return read_windows(kinds, settings)


def _read_windows_between(settings: Settings, every: int, name: str = "") -> dict[str, Any]:
    """Read windows of all layers except every n-th, or of those that layer_types names.

    every: n, if the config.json does not give it in the field `name`.
    """
    every = read_value(settings, name, int, every, minimum=1)
    return read_windows(read_layer_types(settings, lambda layer: (layer + 1) % every > 0), settings)


def read_positions(settings: Settings) -> list[int]:
    """Return 1 for each layer with positions and 0 for each layer without (NoPE).

    no_rope_layers lists them. Without it, every no_rope_layer_interval-th layer has no positions.
    """
    interval = read_value(settings, "no_rope_layer_interval", int, minimum=1)
    has_positions = read_layer_values(settings, "no_rope_layers", lambda layer: int((layer + 1) % interval != 0))
    if any(each not in (0, 1) for each in has_positions):
        raise unsupported(f"no_rope_layers={shorten(has_positions)}", "must contain only 0 and 1", CORRECT)
    return has_positions


def _read_nope(settings: Settings) -> dict[str, Any]:
    """Read SmolLM3's NoPE layers."""
    has_positions = read_positions(settings)
    kinds = read_layer_types(settings, lambda layer: False)
    if "sliding" in kinds or settings.get("use_sliding_window"):
        used = settings.get("use_sliding_window")
        need = "the model would need windows together with layers without positions"
        raise unsupported(f"use_sliding_window={used!r}", need)
    return {"pattern": find_shortest_period("global" if each else "global_nope" for each in has_positions)}


def list_layer_kinds(config: ModelConfig) -> list[Kind]:
    return [config.pattern[layer % len(config.pattern)] for layer in range(config.layers)]


def write_layer_types(config: ModelConfig) -> Settings:
    kinds = list_layer_kinds(config)
    names = {kind: name for name, kind in LAYER_TYPES.items()}
    return {
        "layer_types": [names.get(kind, "full_attention") for kind in kinds],
        "sliding_window": config.window if "sliding" in kinds else None,
    }


def write_window(config: ModelConfig) -> Settings:
    """Write a window also for a model without sliding layers, because the class makes their mask in any case."""
    return write_layer_types(config) | {"sliding_window": config.window}


def _write_windows_from_layer(config: ModelConfig) -> Settings:
    kinds = list_layer_kinds(config)
    windows = "sliding" in kinds
    first = kinds.index("sliding") if windows else config.layers
    return write_layer_types(config) | {"use_sliding_window": windows, "max_window_layers": first}


def _write_nope(config: ModelConfig) -> Settings:
    has_positions = [int(kind != "global_nope") for kind in list_layer_kinds(config)]
    return write_layer_types(config) | {
        "no_rope_layers": has_positions,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
    }


def _read_windows_by_type(settings: Settings) -> dict[str, Any]:
    """Read Ministral's windows: of the layers that layer_types names, or of all if there is one."""
    has_window = settings.get("sliding_window") is not None
    return read_windows(read_layer_types(settings, lambda layer: has_window), settings)


def _read_rotated_windows(settings: Settings, *, nope: bool, name: str) -> dict[str, Any]:
    """Read layers of which only the sliding ones have RoPE.

    Args:
        settings: content of config.json.
        nope: whether a model without sliding_window has no RoPE at all; otherwise all its layers have it.
        name: the field with n, if every n-th layer is global and layer_types is missing.
    """
    every, has_window = 1, settings.get("sliding_window") is not None
    if settings.get("layer_types") is None and has_window:
        every = read_value(settings, name, int, 4, minimum=1)
    kinds, nope = read_layer_types(settings, lambda layer: (layer + 1) % every > 0), nope or has_window
    return read_windows(("global_nope" if kind == "global" and nope else kind for kind in kinds), settings)


def _write_rotated_windows(config: ModelConfig) -> Settings:
    """Write a window also for a model without sliding layers, where it says that no layer has RoPE."""
    used = any(kind != "global" for kind in list_layer_kinds(config))
    return write_layer_types(config) | {"sliding_window": config.window if used else None}


WINDOWS_BY_TYPE = Codec(_read_windows_by_type, write_layer_types)
ONE_WINDOW = Codec(_read_one_window, _write_one_window)
MOE_WINDOW = Codec(_read_moe_window, _write_moe_window)
WINDOWS_FROM_LAYER = Codec(_read_windows_from_layer, _write_windows_from_layer)
ALTERNATING_WINDOWS, GEMMA3_WINDOWS, OLMO3_WINDOWS = (
    Codec(functools.partial(_read_windows_between, every=every, name=name), write_window)
    for every, name in ((2, ""), (6, "sliding_window_pattern"), (4, ""))
)
NOPE = Codec(_read_nope, _write_nope)
COHERE2_WINDOWS, AFMOE_WINDOWS, EXAONE4_WINDOWS = (
    Codec(functools.partial(_read_rotated_windows, nope=nope, name=name), _write_rotated_windows)
    for nope, name in (
        *((True, "sliding_window_pattern"), (True, "global_attn_every_n_layers")),
        (False, "sliding_window_pattern"),
    )
)
