"""Codecs for mixtures of experts: number of experts, top-k routing and the layers that have experts. See codecs.py."""

from typing import Any

from jaxopt_llm.checkpoint.huggingface.codecs import (
    Codec,
    Settings,
    Unsupported,
    copy_fields,
    read_layer_count,
    read_value,
)
from jaxopt_llm.config import ModelConfig


def find_expert_layers(has_experts: list[bool]) -> tuple[int, int] | None:
    """Return the smallest `dense_layers` and `expert_every` that describe which layers have experts.

    None: no layer has experts, or these two fields cannot describe the layers.
    """
    layers = range(len(has_experts))
    expert_layers = [layer for layer in layers if has_experts[layer]]
    if not expert_layers:
        return None
    first = expert_layers[0]
    if len(expert_layers) > 1:
        every = expert_layers[1] - first
    else:
        candidates = range(1, first + 2)
        fitting = (each for each in candidates if (first + 1) % each == 0 and first + each not in layers)
        every = next(fitting, first + 1)
    for dense in (0, first):
        if has_experts == [layer >= dense and (layer + 1) % every == 0 for layer in layers]:
            return dense, every
    return None


def _read_expert_layers(settings: Settings) -> dict[str, Any]:
    """Read Qwen3-MoE's layers: each decoder_sparse_step-th has experts, except those in mlp_only_layers."""
    every, dense_layers = read_value(settings, "decoder_sparse_step", int), settings.get("mlp_only_layers") or []
    if every < 1:
        raise Unsupported(f"decoder_sparse_step={every}: must be at least 1")
    if not isinstance(dense_layers, list) or any(type(each) is not int for each in dense_layers):
        raise Unsupported(f"mlp_only_layers={dense_layers!r}: must be a list of layers")
    layers, dense = range(read_layer_count(settings)), set(dense_layers)
    found = find_expert_layers([layer not in dense and (layer + 1) % every == 0 for layer in layers])
    if found is None:
        raise Unsupported(
            f"mlp_only_layers={dense_layers!r}, decoder_sparse_step={every}: from some layer on, every n-th layer must "
            "have experts, and all others none"
        )
    return dict(zip(("dense_layers", "expert_every"), found, strict=True))


def _write_expert_layers(config: ModelConfig) -> Settings:
    every = config.expert_every
    dense = [layer for layer in range(config.dense_layers) if (layer + 1) % every == 0]
    return {"decoder_sparse_step": every, "mlp_only_layers": dense}


def copy_expert_count(name: str, alias: str, default: int) -> Codec:
    """Return a codec for the number of experts, which versions of transformers write under one of two names."""

    def read(settings: Settings) -> dict[str, Any]:
        given = {each: settings[each] for each in (name, alias) if settings.get(each) is not None}
        if len(given) == 2 and given[name] != given[alias]:
            raise Unsupported(f"{alias}={given[alias]!r}: it is another name of {name}, which is {given[name]!r}")
        count = read_value({name: next(iter(given.values()), None)}, name, int, default)
        if count < 1:
            raise Unsupported(f"{name}={count}: must be at least 1")
        return {"experts": count}

    return Codec(read, lambda config: {name: config.experts})


EXPERT_LAYERS = Codec(_read_expert_layers, _write_expert_layers)
TOP_K = copy_fields(experts_per_token="num_experts_per_tok", balance_loss="router_aux_loss_coef")
RENORMALISES = copy_fields(router_renormalises="norm_topk_prob")
