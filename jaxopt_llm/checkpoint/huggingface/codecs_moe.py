"""Codecs for mixtures of experts: number of experts, top-k routing and the layers that have experts. See codecs.py."""

from typing import Any

from jaxopt_llm.checkpoint.huggingface.codecs import (
    CORRECT,
    Codec,
    Settings,
    check_alias,
    copy_fields,
    read_layer_count,
    read_value,
    shorten,
    unsupported,
)
from jaxopt_llm.config import ModelConfig


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


def _read_expert_layers(settings: Settings) -> dict[str, Any]:
    """Read Qwen3-MoE's layers: each decoder_sparse_step-th has experts, except those in mlp_only_layers."""
    every = read_value(settings, "decoder_sparse_step", int, minimum=1)
    dense_layers = settings.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list) or any(type(each) is not int for each in dense_layers):
        raise unsupported(f"mlp_only_layers={shorten(dense_layers)}", "must be a list of layers", CORRECT)
    layers, dense = range(read_layer_count(settings)), set(dense_layers)
    found = find_expert_layers([layer not in dense and (layer + 1) % every == 0 for layer in layers])
    if found is None:
        raise unsupported(
            f"mlp_only_layers={dense_layers!r}, decoder_sparse_step={every}",
            "from some layer on, every n-th layer must have experts, and all others none",
        )
    return dict(zip(("moe.dense_layers", "moe.expert_every"), found, strict=True))


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
RENORMALISES = copy_fields({"moe.router_renormalises": "norm_topk_prob"})
