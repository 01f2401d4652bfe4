"""Codecs of fields that say of which kind each layer of a model is: with experts or without, and how it attends."""

from typing import Any

from jaxopt_llm.checkpoint.huggingface.codecs import (
    CORRECT,
    GLOBAL_LAYERS,
    SLIDING_LAYERS,
    Codec,
    Settings,
    copy_fields,
    find_shortest_period,
    list_layer_kinds,
    read_has_experts,
    read_layer_count,
    read_layer_types,
    read_layer_values,
    read_layers,
    read_positions,
    read_value,
    read_windows,
    shorten,
    unsupported,
    write_layer_types,
    write_window,
)
from jaxopt_llm.config import Kind, ModelConfig

# --- layers with experts

MLP_TYPES = {"dense": False, "sparse": True}


def _read_mlp_types(settings: Settings) -> dict[str, Any]:
    """Read the layers of GLM-4.7-Flash: mlp_layer_types, by default dense only in the first one."""
    types = read_layer_values(settings, "mlp_layer_types", lambda layer: "sparse" if layer else "dense")
    if unknown := [each for each in types if not (isinstance(each, str) and each in MLP_TYPES)]:
        raise unsupported(f"mlp_layer_types={unknown[0]!r}", "must be dense or sparse", CORRECT)
    has_experts = [MLP_TYPES[each] for each in types]
    first = read_value(settings, "first_k_dense_replace", int, has_experts.count(False))
    if settings.get("first_k_dense_replace") is not None and has_experts != [i >= first for i in range(len(types))]:
        problem = "differs from mlp_layer_types; without that field, only the first layer is dense"
        raise unsupported(f"first_k_dense_replace={first!r}", problem, CORRECT)
    return read_has_experts(has_experts, f"mlp_layer_types={shorten(types)}")


def _write_mlp_types(config: ModelConfig) -> Settings:
    names = {has_experts: name for name, has_experts in MLP_TYPES.items()}
    return {"mlp_layer_types": [names[config.moe.has_experts(layer)] for layer in range(config.layers)]}


def _read_prior_mlp_types(settings: Settings) -> dict[str, Any]:
    """Read the layers of K-EXAONE: mlp_layer_types or, without it, first_k_dense_replace, by default 1."""
    if settings.get("mlp_layer_types") is not None:
        return _read_mlp_types(settings | {"first_k_dense_replace": None})
    return {"moe.dense_layers": read_value(settings, "first_k_dense_replace", int, 1, minimum=0)}


def _read_expert_interval(settings: Settings) -> dict[str, Any]:
    """Read ERNIE's layers: each moe_layer_interval-th has experts, from a first to a last one (-1: of the model)."""
    every = read_value(settings, "moe_layer_interval", int, minimum=1)
    first, last = (read_value(settings, f"moe_layer_{end}_index", int) for end in ("start", "end"))
    layers = read_layer_count(settings)
    has_experts = [
        (layer + 1) % every == 0 and first <= layer <= (last if last != -1 else layers) for layer in range(layers)
    ]
    return read_has_experts(
        has_experts, f"moe_layer_start_index={first}, moe_layer_end_index={last}, moe_layer_interval={every}"
    )


def _write_expert_interval(config: ModelConfig) -> Settings:
    first, last = config.moe.dense_layers, config.layers - 1
    return {
        "moe_layer_start_index": first,
        "moe_layer_end_index": last,
        "moe_layer_interval": config.moe.expert_every,
    }


def _read_choices(settings: Settings) -> dict[str, Any]:
    """Read Hunyuan's number of experts for each token: one number, or a list of one for each layer."""
    given = settings.get("moe_topk")
    first, *others = read_layer_values(settings, "moe_topk", lambda layer: 1) if isinstance(given, list) else [given]
    if any(each != first for each in others):
        raise unsupported(f"moe_topk={shorten(given)}", "the model would need another number in some of its layers")
    return {"moe.experts_per_token": read_value({"moe_topk": first}, "moe_topk", int, minimum=1)}


def _read_expert_list(settings: Settings) -> dict[str, Any]:
    """Read the layers of Llama 4: those in moe_layers, or each interleave_moe_layer_step-th."""
    every, layers = read_value(settings, "interleave_moe_layer_step", int, minimum=1), read_layer_count(settings)
    given = read_layers(settings, "moe_layers", [*range(every - 1, layers, every)])
    return read_has_experts([layer in given for layer in range(layers)], f"moe_layers={shorten(given)}")


def _write_expert_list(config: ModelConfig) -> Settings:
    return {
        "moe_layers": [layer for layer in range(config.layers) if config.moe.has_experts(layer)],
        "interleave_moe_layer_step": config.moe.expert_every,
    }


# --- layers with positions or without, and with chunks or without

# Whether a layer has RoPE and whether it has chunks -> its kind.
CHUNKED_LAYERS = "chunked_attention"
LLAMA4_TYPES: dict[tuple[int, str], Kind] = {
    (1, CHUNKED_LAYERS): "chunked",
    (1, GLOBAL_LAYERS): "global",
    (0, GLOBAL_LAYERS): "global_nope",
}


def _read_chunks(settings: Settings) -> dict[str, Any]:
    """Read the layers of Llama 4.

    Those with RoPE are in no_rope_layers, or are all except each no_rope_layer_interval-th. Those with chunks are in
    layer_types, or are those with RoPE.
    """
    if not settings.get("no_rope_layers"):  # an empty list stands for the interval, too
        settings = settings | {"no_rope_layers": None}
    has_positions = read_positions(settings)
    types = read_layer_values(
        settings, "layer_types", lambda layer: CHUNKED_LAYERS if has_positions[layer] else GLOBAL_LAYERS
    )
    kinds = list(zip(has_positions, types, strict=True))
    if unknown := [each for each in kinds if each not in [*LLAMA4_TYPES]]:
        need = f"only {CHUNKED_LAYERS} with RoPE and {GLOBAL_LAYERS} are read; the model would need other layers"
        raise unsupported(f"layer_types={shorten(unknown[0][1])}, no_rope_layers={unknown[0][0]}", need)
    pattern = find_shortest_period(LLAMA4_TYPES[each] for each in kinds)
    if "chunked" not in pattern:
        return {"pattern": pattern}
    return {"pattern": pattern, "window": read_value(settings, "attention_chunk_size", int)}


def _read_qwen2_windows(settings: Settings) -> dict[str, Any]:
    """Read the windows of Qwen2-MoE: of each second layer below max_window_layers, or of those in layer_types."""
    used = read_value(settings, "use_sliding_window", bool, False)
    last = read_value(settings, "max_window_layers", int) if used else 0
    kinds = read_layer_types(settings, lambda layer: layer % 2 == 0 and layer < last)
    if "sliding" in kinds and not used:
        raise unsupported("layer_types", f"{SLIDING_LAYERS} requires use_sliding_window=true", CORRECT)
    return read_windows(kinds, settings)


def _write_qwen2_windows(config: ModelConfig) -> Settings:
    used = "sliding" in config.pattern
    return write_layer_types(config) | {"use_sliding_window": used, "max_window_layers": config.layers}


def _read_windows_after_global(settings: Settings) -> dict[str, Any]:
    """Read windows of all layers except each fourth from the first on, or of those that layer_types names."""
    return read_windows(read_layer_types(settings, lambda layer: layer % 4 > 0), settings)


def _write_chunks(config: ModelConfig) -> Settings:
    names = {kind: each for each, kind in LLAMA4_TYPES.items()}
    has_positions, types = zip(*(names.get(kind, (1, "")) for kind in list_layer_kinds(config)), strict=True)
    return {
        "no_rope_layers": list(has_positions),
        "no_rope_layer_interval": 4,
        "layer_types": list(types),
        "attention_chunk_size": config.window,
    }


GRANITE_ATTENTION = ("attention", "full_attention")  # names of older and of newer versions of transformers
GRANITE_POSITIONS: dict[str | None, Kind] = {"rope": "global", "nope": "global_nope", None: "global_nope"}


def _read_granite_kinds(settings: Settings) -> dict[str, Any]:
    """Read the layers of Granite 4, and whether they have positions. Without layer_types, they are mamba layers."""
    types = read_layer_values(settings, "layer_types", lambda layer: "mamba")
    if unknown := [each for each in types if each not in GRANITE_ATTENTION]:
        need = f"only {GRANITE_ATTENTION[0]!r} is read; the model would need layers of this kind"
        raise unsupported(f"layer_types={shorten(unknown[0])}", need)
    if settings.get("num_local_experts"):
        need = "only 0 is read; the model would need experts beside the MLPs of this family"
        raise unsupported(f"num_local_experts={settings['num_local_experts']!r}", need)
    positions = settings.get("position_embedding_type")
    if positions not in [*GRANITE_POSITIONS]:
        need = f"only {' and '.join(map(repr, GRANITE_POSITIONS))} are read; the model would need other positions"
        raise unsupported(f"position_embedding_type={shorten(positions)}", need)
    return {"pattern": (GRANITE_POSITIONS[positions],)}


def _write_granite_kinds(config: ModelConfig) -> Settings:
    return {
        "layer_types": [GRANITE_ATTENTION[0]] * config.layers,
        "position_embedding_type": None if config.pattern[0] == "global_nope" else "rope",
        "num_local_experts": 0,
        "mamba_n_heads": 1,  # the class checks it against hidden_size even if no layer reads it
    }


DELTA_LAYERS = "linear_attention"


def _read_delta_kinds(settings: Settings) -> dict[str, Any]:
    """Read the layers of Qwen3-Next: layer_types or, without it, attention in every full_attention_interval-th."""
    every = read_value(settings, "full_attention_interval", int, 4, minimum=1)
    types = read_layer_values(
        settings, "layer_types", lambda layer: DELTA_LAYERS if (layer + 1) % every else GLOBAL_LAYERS
    )
    kinds: dict[Any, Kind] = {DELTA_LAYERS: "gated_delta", GLOBAL_LAYERS: "global"}
    if unknown := [each for each in types if not (isinstance(each, str) and each in kinds)]:
        need = f"only {' and '.join(kinds)} are read; the model would need layers of this kind"
        raise unsupported(f"layer_types={shorten(unknown[0])}", need)
    return {"pattern": find_shortest_period(kinds[each] for each in types)}


def _write_delta_kinds(config: ModelConfig) -> Settings:
    kinds = list_layer_kinds(config)
    return {"layer_types": [DELTA_LAYERS if kind == "gated_delta" else GLOBAL_LAYERS for kind in kinds]}


DELTA_SIZES = copy_fields(
    {
        "delta.key_heads": "linear_num_key_heads",
        "delta.value_heads": "linear_num_value_heads",
        "delta.key_head_dim": "linear_key_head_dim",
        "delta.value_head_dim": "linear_value_head_dim",
        "delta.kernel": "linear_conv_kernel_dim",
    }
)
DELTA_KINDS = Codec(_read_delta_kinds, _write_delta_kinds)
EXPERT_TYPES = Codec(_read_mlp_types, _write_mlp_types)
PRIOR_EXPERT_TYPES = Codec(_read_prior_mlp_types, _write_mlp_types)
WINDOWS_AFTER_GLOBAL = Codec(_read_windows_after_global, write_window)
EXPERT_INTERVAL = Codec(_read_expert_interval, _write_expert_interval)
EXPERT_LIST = Codec(_read_expert_list, _write_expert_list)
CHOICES = Codec(_read_choices, lambda config: {"moe_topk": config.moe.experts_per_token})
QWEN2_WINDOWS = Codec(_read_qwen2_windows, _write_qwen2_windows)
CHUNKS = Codec(_read_chunks, _write_chunks)
GRANITE_KINDS = Codec(_read_granite_kinds, _write_granite_kinds)
