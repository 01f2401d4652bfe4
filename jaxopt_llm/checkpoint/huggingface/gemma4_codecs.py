"""Codecs of Gemma 4: global layers with their own heads and RoPE, inputs of layers, and keys that layers share."""

from typing import Any

from jaxopt_llm.checkpoint.huggingface import codecs, rope_codecs
from jaxopt_llm.checkpoint.huggingface.codecs import (
    CORRECT,
    Codec,
    Settings,
    check_value,
    read_value,
    shorten,
    unsupported,
)
from jaxopt_llm.config import Kind, ModelConfig

SLIDING_BETWEEN, GLOBAL_HEAD_DIM = 6, 512  # defaults of the class: every sixth layer is global
INPUT_ROWS = 262_144  # default of the class
LAYER_SETTINGS = "per_layer_config"
LAYER_FIELDS = {"head_dim": "global_head_dim", "num_key_value_heads": "global_kv_heads"}


def _read_kinds(settings: Settings) -> list[Kind]:
    """Return the kinds of the layers. The class makes the last one global."""
    kinds = codecs.read_layer_types(settings, lambda layer: (layer + 1) % SLIDING_BETWEEN > 0)
    return [*kinds[:-1], "global"]


def _read_global_layers(settings: Settings) -> dict[str, Any]:
    """Read the heads of global layers, from the published fields or from those that transformers writes."""
    from_keys = read_value(settings, "attention_k_eq_v", bool, False)
    own = _read_layer_settings(settings)
    if own is None:
        own = {"head_dim": read_value(settings, "global_head_dim", int, GLOBAL_HEAD_DIM, minimum=1)}
        if from_keys:  # otherwise the class does not read this field
            own["num_key_value_heads"] = read_value(settings, "num_global_key_value_heads", int, 0)
    differing = {
        ours: own[theirs]
        for theirs, ours in LAYER_FIELDS.items()
        if own.get(theirs, settings[theirs]) != settings[theirs]
    }
    return {"values_from_keys": from_keys, **dict.fromkeys(LAYER_FIELDS.values(), 0), **differing}


def _read_layer_settings(settings: Settings) -> dict[str, int] | None:
    """Return the fields that global layers have in the form that transformers writes; None for the published form."""
    if settings.get(LAYER_SETTINGS) is None:
        return None
    given = settings[LAYER_SETTINGS]
    if given == {}:  # transformers writes it if no layer differs
        return {}
    layers = [str(layer) for layer, kind in enumerate(_read_kinds(settings)) if kind == "global"]
    first = given.get(layers[0]) if isinstance(given, dict) else None
    if not isinstance(first, dict) or given != dict.fromkeys(layers, first) or not first.keys() <= LAYER_FIELDS.keys():
        need = f"only {' and '.join(LAYER_FIELDS)} are read, the same in all layers with {codecs.GLOBAL_LAYERS}"
        raise unsupported(f"{LAYER_SETTINGS}={shorten(given)}", need)
    return {name: read_value(first, name, int, minimum=1) for name in first}


def _write_global_layers(config: ModelConfig) -> Settings:
    """Write both forms: transformers prefers its own one, and other programs read the published one."""
    of_global = config.of_layers("global")
    own = {"head_dim": of_global.head_dim, "num_key_value_heads": of_global.kv_heads}
    kinds = codecs.list_layer_kinds(config)
    return {
        "attention_k_eq_v": config.values_from_keys,
        "global_head_dim": of_global.head_dim,
        "num_global_key_value_heads": of_global.kv_heads,
        LAYER_SETTINGS: {str(layer): own for layer, kind in enumerate(kinds) if kind == "global"},
    }


DEFAULT_ROPE = {
    codecs.GLOBAL_LAYERS: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    codecs.SLIDING_LAYERS: {"rope_type": "default", "rope_theta": 10_000.0},
}


def _read_rope(settings: Settings) -> dict[str, Any]:
    """Read RoPE for each kind of layer. In global layers it may be proportional: it rotates a share of the pairs."""
    kinds = settings.get("rope_parameters") or DEFAULT_ROPE
    of_global = kinds.get(codecs.GLOBAL_LAYERS) if isinstance(kinds, dict) else None
    if not isinstance(of_global, dict) or of_global.get("rope_type") != "proportional":
        return rope_codecs.LAYERED_ROPE.read(settings | {"rope_parameters": kinds})
    share = read_value(of_global, rope_codecs.SHARE, float, 1.0)
    head_dim = _read_global_layers(settings)["global_head_dim"] or read_value(settings, "head_dim", int)
    pairs = int(share * head_dim // 2)
    if not 1 <= pairs <= head_dim // 2:
        problem = f"must be a share of the {head_dim // 2} pairs of a head, at least one of them"
        raise unsupported(f"{rope_codecs.SHARE}={share}", problem, CORRECT)
    factor = read_value(of_global, "factor", float, 1.0)
    kind = {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}
    plain = {"rope_theta": of_global.get("rope_theta"), **kind}
    fields = rope_codecs.LAYERED_ROPE.read(settings | {"rope_parameters": kinds | {codecs.GLOBAL_LAYERS: plain}})
    return fields | {"rope.rotated_pairs": pairs % (head_dim // 2)}


def _write_rope(config: ModelConfig) -> Settings:
    kinds = rope_codecs.LAYERED_ROPE.write(config)["rope_parameters"]
    rope, of_global = config.rope, kinds[codecs.GLOBAL_LAYERS]
    if rope.rotated_pairs and of_global["rope_type"] in ("default", "linear"):
        share = 2 * rope.rotated_pairs / config.of_layers("global").head_dim
        proportional = {"rope_type": "proportional", rope_codecs.SHARE: share}
        of_global = {name: value for name, value in of_global.items() if name != "type"} | proportional
    return {"rope_parameters": kinds | {codecs.GLOBAL_LAYERS: of_global}}


def _check_text(settings: Settings) -> dict[str, Any]:
    """Check attention to later tokens: `vision` allows it only between the tokens of an image."""
    check_value(settings, "use_bidirectional_attention", "vision")
    return {}


EXPERT_FIELDS = {
    "experts": "num_experts",
    "experts_per_token": "top_k_experts",
    "expert_width": "moe_intermediate_size",
}
BALANCE = "router_aux_loss_coef"  # as in other families; the class computes no such loss


def _read_mlp(settings: Settings) -> dict[str, Any]:
    """Read the MLP of each layer, which is the shared expert of layers with experts."""
    width = read_value(settings, "intermediate_size", int)
    if not read_value(settings, "enable_moe_block", bool, False):
        return {"mlp_width": width}
    sizes = {f"moe.{ours}": read_value(settings, theirs, int, minimum=1) for ours, theirs in EXPERT_FIELDS.items()}
    balance = {"moe.balance_loss": read_value(settings, BALANCE, float, 0.0)}
    return sizes | balance | {"moe.shared_expert_width": width, "moe.own_norms": True, "moe.expert_scales": True}


def _write_mlp(config: ModelConfig) -> Settings:
    moe = config.moe
    if not moe.own_norms:
        return {"intermediate_size": config.mlp_width, "enable_moe_block": False}
    sizes = {theirs: getattr(moe, ours) for ours, theirs in EXPERT_FIELDS.items()}
    balance = {BALANCE: moe.balance_loss}
    return sizes | balance | {"intermediate_size": moe.shared_expert_width, "enable_moe_block": True}


def _read_layer_inputs(settings: Settings) -> dict[str, Any]:
    """Read the layers' inputs, whose table has as many rows as that of the embeddings."""
    size = read_value(settings, "hidden_size_per_layer_input", int, 0)
    rows = read_value(settings, "vocab_size_per_layer_input", int, INPUT_ROWS)
    if size and rows != settings["vocab_size"]:
        need = f"only vocab_size={settings['vocab_size']} is read; the model would need tables of different sizes"
        raise unsupported(f"vocab_size_per_layer_input={rows}", need)
    return {"layer_input_size": size}


def _write_layer_inputs(config: ModelConfig) -> Settings:
    return {
        "hidden_size_per_layer_input": config.layer_input_size,
        "vocab_size_per_layer_input": config.vocabulary_size,
    }


def _read_sharing(settings: Settings) -> dict[str, Any]:
    """Read the layers that share keys. The class doubles the MLPs of these layers only, and no experts."""
    shared = read_value(settings, "num_kv_shared_layers", int, 0, minimum=0)
    return {
        "shared_key_layers": shared,
        "wide_mlp": bool(shared) and read_value(settings, "use_double_wide_mlp", bool, False),
    }


def _write_sharing(config: ModelConfig) -> Settings:
    return {
        "num_kv_shared_layers": config.shared_key_layers,
        "use_double_wide_mlp": config.wide_mlp and config.shared_key_layers > 0,
    }


LAYER_INPUTS = Codec(_read_layer_inputs, _write_layer_inputs)
SHARING = Codec(_read_sharing, _write_sharing)
MLP = Codec(_read_mlp, _write_mlp)
WINDOWS = Codec(lambda settings: codecs.read_windows(_read_kinds(settings), settings), codecs.write_layer_types)
GLOBAL_LAYERS = Codec(_read_global_layers, _write_global_layers)
ROPE = Codec(_read_rope, _write_rope)
TEXT = Codec(_check_text, lambda config: {})  # a folder keeps its own value, which its vision tower needs
