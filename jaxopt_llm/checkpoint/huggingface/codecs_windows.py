"""Codecs for the kinds of layers: sliding windows and layers without positions (NoPE). See codecs.py."""

from collections.abc import Callable, Iterable
from typing import Any

from jaxopt_llm.checkpoint.huggingface.codecs import (
    CORRECT,
    Codec,
    Settings,
    read_layer_count,
    read_value,
    shorten,
    unsupported,
)
from jaxopt_llm.config import Kind, ModelConfig

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
    return _read_windows(["global" if settings.get("sliding_window") is None else "sliding"], settings)


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


def _read_layer_values(settings: Settings, name: str, default: Callable[[int], Any]) -> list[Any]:
    """Return a field with a list of one value per layer. default: layer -> value, for a missing field."""
    count, given = read_layer_count(settings), settings.get(name)
    if given is None:
        return [default(layer) for layer in range(count)]
    if not isinstance(given, list) or len(given) < count:
        raise unsupported(
            f"{name}={shorten(given)}", f"must be a list with a value for each of the {count} layers", CORRECT
        )
    return given[:count]


def _read_windows(kinds: Iterable[Kind], settings: Settings) -> dict[str, Any]:
    pattern = find_shortest_period(kinds)
    if "sliding" not in pattern:
        return {"pattern": pattern}
    return {"pattern": pattern, "window": read_value(settings, "sliding_window", int)}


def _read_layer_types(settings: Settings, default: Callable[[int], str]) -> list[Kind]:
    """Return the kind of each layer from layer_types. default: layer -> its type, for a missing field."""
    types = _read_layer_values(settings, "layer_types", default)
    if unknown := [each for each in types if not (isinstance(each, str) and each in LAYER_TYPES)]:
        need = f"only {' and '.join(LAYER_TYPES)} are read; the model would need layers of this kind"
        raise unsupported(f"layer_types={unknown[0]!r}", need)
    return [LAYER_TYPES[each] for each in types]


def _read_windows_from_layer(settings: Settings) -> dict[str, Any]:
    """Read Qwen's windows: of the layers from max_window_layers on, or of those that layer_types names."""
    used = read_value(settings, "use_sliding_window", bool, False) and settings.get("sliding_window") is not None
    first = read_value(settings, "max_window_layers", int) if used and settings.get("layer_types") is None else 0
    kinds = _read_layer_types(
        settings, lambda layer: "sliding_attention" if used and layer >= first else "full_attention"
    )
    if "sliding" in kinds and not used:
        need = "sliding_attention requires use_sliding_window=true and a sliding_window"
        raise unsupported("layer_types", need, CORRECT)
    return _read_windows(kinds, settings)


def _read_alternating_windows(settings: Settings) -> dict[str, Any]:
    """Read Gemma 2's windows: of every second layer, starting with the first, or of those that layer_types names."""
    kinds = _read_layer_types(settings, lambda layer: "full_attention" if layer % 2 else "sliding_attention")
    return _read_windows(kinds, settings)


def _read_nope(settings: Settings) -> dict[str, Any]:
    """Read SmolLM3's NoPE layers.

    Every no_rope_layer_interval-th layer has no positions, or no_rope_layers lists 1 for each layer with positions and
    0 for each layer without.
    """
    interval = read_value(settings, "no_rope_layer_interval", int, minimum=1)
    has_positions = _read_layer_values(settings, "no_rope_layers", lambda layer: int((layer + 1) % interval != 0))
    kinds = _read_layer_types(settings, lambda layer: "full_attention")
    if "sliding" in kinds or settings.get("use_sliding_window"):
        used = settings.get("use_sliding_window")
        need = "the model would need windows together with layers without positions"
        raise unsupported(f"use_sliding_window={used!r}", need)
    if any(each not in (0, 1) for each in has_positions):
        raise unsupported(f"no_rope_layers={shorten(has_positions)}", "must contain only 0 and 1", CORRECT)
    return {"pattern": find_shortest_period("global" if each else "global_nope" for each in has_positions)}


def _layer_kinds(config: ModelConfig) -> list[Kind]:
    return [config.pattern[layer % len(config.pattern)] for layer in range(config.layers)]


def _write_layer_types(config: ModelConfig) -> Settings:
    kinds = _layer_kinds(config)
    names = {kind: name for name, kind in LAYER_TYPES.items()}
    return {
        "layer_types": [names.get(kind, "full_attention") for kind in kinds],
        "sliding_window": config.window if "sliding" in kinds else None,
    }


def _write_windows_from_layer(config: ModelConfig) -> Settings:
    kinds = _layer_kinds(config)
    windows = "sliding" in kinds
    first = kinds.index("sliding") if windows else config.layers
    return _write_layer_types(config) | {"use_sliding_window": windows, "max_window_layers": first}


def _write_nope(config: ModelConfig) -> Settings:
    has_positions = [int(kind != "global_nope") for kind in _layer_kinds(config)]
    return _write_layer_types(config) | {
        "no_rope_layers": has_positions,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
    }


ONE_WINDOW = Codec(_read_one_window, _write_one_window)
MOE_WINDOW = Codec(_read_moe_window, _write_moe_window)
WINDOWS_FROM_LAYER = Codec(_read_windows_from_layer, _write_windows_from_layer)
ALTERNATING_WINDOWS = Codec(_read_alternating_windows, _write_layer_types)
NOPE = Codec(_read_nope, _write_nope)
