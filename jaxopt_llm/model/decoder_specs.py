"""Parameters of a decoder: the segments into which its layers are stacked, and a ParamSpec for each leaf."""

import itertools
import math

import jax
import numpy as np

from jaxopt_llm.config import ModelConfig
from jaxopt_llm.model import latent_attention, layers
from jaxopt_llm.model.model import Params, Segment
from jaxopt_llm.model.moe import experts
from jaxopt_llm.model.param import ParamSpec, normal
from jaxopt_llm.model.self_attention import attention_specs

VOCABULARY_MULTIPLE = 128  # tables have a multiple of this many rows: a constant, so values do not depend on the mesh


def list_segments(config: ModelConfig) -> tuple[Segment, ...]:
    """Return the segments of a decoder, in order.

    The layers are cut at the end of the dense layers before the first MoE layer, and before `last_layers`. Each part is
    one segment of as many whole periods as it has, and one segment of the remaining layers.
    """
    period = config.period
    kinds = [config.pattern[layer % len(config.pattern)] for layer in range(config.layers)]
    cuts = {0, config.moe.dense_layers if config.moe.experts else 0, config.layers - config.last_layers, config.layers}
    segments = []
    for begin, end in itertools.pairwise(sorted(cuts)):
        rest = end - (end - begin) % period
        for first, length, repeats in ((begin, period, (rest - begin) // period), (rest, end - rest, 1)):
            if length and repeats:
                index = first + np.arange(repeats * length, dtype=np.int32).reshape(repeats, length)
                experts = tuple(config.moe.has_experts(layer) for layer in range(first, first + length))
                segments.append(Segment(tuple(kinds[first : first + length]), repeats, {"index": index}, experts))
    return tuple(segments)


def locate_layers(config: ModelConfig) -> list[tuple[str, int, int]]:
    """Return for each layer the prefix of its leaves' paths, its row in their stacks, and its index in the model.

    The order is that of the segments and their rows.
    """
    return [
        (f"segment_{segment_index}/block_{block_index}/", row, int(layer))
        for segment_index, segment in enumerate(list_segments(config))
        for row, layers in enumerate(segment.per_layer["index"])
        for block_index, layer in enumerate(layers)
    ]


def pad_vocabulary_size(size: int) -> int:
    return -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def param_specs(config: ModelConfig) -> Params:
    vocabulary = pad_vocabulary_size(config.vocabulary_size)
    # A row of the table is a vector of the residual stream and, if tied, a classifier over it: fan-in `width`.
    table = ParamSpec((vocabulary, config.width), ("vocabulary", "embed"), (1,), normal())
    non_layer = {"embedding": {"table": table}, "final_norm": _norm_specs(config, embed=config.width)}
    if config.positions == "learned":
        rows = ParamSpec((config.max_positions, config.width), ("positions", "embed"), (1,), normal())
        non_layer["positions"] = {"table": rows}
    if not config.tied_head:
        non_layer["head"] = {"table": table}
    biased = config.biases in ("mlp", "all")
    # Each block adds to the residual stream twice. This scale keeps the variance near 1 (Radford et al. 2019, GPT-2).
    residual_scale = 1 / math.sqrt(2 * config.layers)
    dense = layers.mlp_specs(config.width, config.mlp_width, residual_scale, has_gate=config.has_gate, biased=biased)
    moe = experts.moe_specs(config, residual_scale) if config.moe.experts else {}
    attention = latent_attention.latent_attention_specs if config.mla.kv_rank else attention_specs
    block = {
        "attention": attention(config, residual_scale),
        **{name: _norm_specs(config, **dims) for name, dims in _block_norms(config).items()},
    }
    specs: Params = {"non_layer": non_layer}
    for index, segment in enumerate(list_segments(config)):
        blocks = [block | {"mlp": moe if has_experts else dense} for has_experts in segment.experts]
        specs[f"segment_{index}"] = {
            f"block_{position}": jax.tree.map(lambda spec, repeats=segment.repeats: spec.stack(repeats), layer)
            for position, layer in enumerate(blocks)
        }
    return specs


def _block_norms(config: ModelConfig) -> dict[str, dict[str, int]]:
    """Return the norms of a block, each with the sizes of its dimensions by logical axis."""
    heads, kv_heads, head = {"heads": config.heads}, {"kv_heads": config.kv_heads}, {"head_dim": config.head_dim}
    residual = {
        "pre": ("attention_norm", "mlp_norm"),
        "post": ("attention_post_norm", "mlp_post_norm"),
        "both": ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm"),
    }[config.norm_placement]
    qk: dict[str, dict[str, dict[str, int]]] = {
        "none": {},
        "head": {"query_norm": head, "key_norm": head},
        "projection": {"query_norm": heads | head, "key_norm": kv_heads | head},
    }
    ranks = {"latent_norm": config.mla.kv_rank, "query_latent_norm": config.mla.kv_rank and config.mla.query_rank}
    latents = {name: {"latent": rank} for name, rank in ranks.items() if rank}
    return {name: {"embed": config.width} for name in residual} | qk[config.qk_norm] | latents


def _norm_specs(config: ModelConfig, **dims: int) -> dict[str, ParamSpec]:
    return layers.norm_specs(config.norm, config.norm_zero_centered, tuple(dims.values()), tuple(dims))
