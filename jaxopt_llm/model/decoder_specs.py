"""Parameters of a decoder: the segments into which its layers are stacked, and a ParamSpec for each leaf."""

import itertools
import math

import jax
import numpy as np

from jaxopt_llm.config import Kind, ModelConfig
from jaxopt_llm.config.model import GATED_DELTA
from jaxopt_llm.model import gated_delta, latent_attention, layers
from jaxopt_llm.model.model import Keys, Params, Segment, name_mtp_modules, name_segments
from jaxopt_llm.model.moe import experts
from jaxopt_llm.model.param import ParamSpec, normal
from jaxopt_llm.model.self_attention import attention_specs

KEY_PARAMETERS = ("key", "value", "key_bias", "value_bias", "key_norm")  # of a block
VOCABULARY_MULTIPLE = 128  # tables have a multiple of this many rows: a constant, so values do not depend on the mesh
SCORE_DEVIATION = 0.02  # of the initial weights of the head of scores; the usual initializer_range
# Exact, and not learned: it is a constant of a published model.
LAYER_SCALE = ParamSpec((1,), (None,), exact=True, sign_rate=0.0)


def list_segments(config: ModelConfig) -> tuple[Segment, ...]:
    """Return the segments of a decoder, in order.

    The layers are cut at the end of the dense layers before the first MoE layer, before `last_layers`, and before and
    after the last period that has keys, if later layers share them. Each part is one segment of as many whole periods
    as it has, and one segment of the remaining layers.
    """
    period = config.period
    kinds = [config.pattern[layer % len(config.pattern)] for layer in range(config.layers)]
    cuts = {0, config.moe.dense_layers if config.moe.experts else 0, config.layers - config.last_layers, config.layers}
    with_keys = config.layers_with_keys
    giving = (
        max(with_keys - period, 0) if config.shared_key_layers else with_keys
    )  # the first layer that gives its keys
    cuts |= {giving, with_keys}
    segments = []
    for begin, end in itertools.pairwise(sorted(cuts)):
        rest = end - (end - begin) % period
        keys: Keys = "own" if end <= giving else "given" if end <= with_keys else "taken"
        for first, length, repeats in ((begin, period, (rest - begin) // period), (rest, end - rest, 1)):
            if length and repeats:
                index = first + np.arange(repeats * length, dtype=np.int32).reshape(repeats, length)
                experts = tuple(config.moe.has_experts(layer) for layer in range(first, first + length))
                segments.append(Segment(tuple(kinds[first : first + length]), repeats, {"index": index}, experts, keys))
    return tuple(segments)


def list_mtp_modules(config: ModelConfig) -> tuple[Segment, ...]:
    """Return the segments of the MTP modules: a block of the kind that a further layer would have."""
    return tuple(
        Segment(
            (config.pattern[layer % len(config.pattern)],),
            1,
            {"index": np.full((1, 1), layer, np.int32)},
            (config.moe.has_experts(layer),),
        )
        for layer in range(config.layers, config.blocks)
    )


def name_modules(config: ModelConfig) -> dict[str, Segment]:
    """Return the segments and the MTP modules by their names in the parameters."""
    return name_segments(list_segments(config)) | name_mtp_modules(list_mtp_modules(config))


def locate_layers(config: ModelConfig) -> list[tuple[str, int, int]]:
    """Return for each layer the prefix of its leaves' paths, its row in their stacks, and its index in the model.

    The layers are ordered by segment and row. The blocks of MTP modules follow the last layer.
    """
    return [
        (f"{name}/block_{block_index}/", row, int(layer))
        for name, segment in name_modules(config).items()
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
    if config.layer_input_size:
        non_layer |= _layer_input_specs(config, vocabulary)
    if config.scores:  # with the deviation of transformers, on which the first rewards depend
        score = normal(SCORE_DEVIATION * math.sqrt(config.width))
        non_layer["score"] = {"table": ParamSpec((config.scores, config.width), (None, "embed"), (1,), score)}
    elif not config.tied_head:
        non_layer["head"] = {"table": table}
    biased = config.biases in ("mlp", "all")
    # Each block adds to the residual stream twice. This scale keeps the variance near 1 (Radford et al. 2019, GPT-2).
    residual_scale = 1 / math.sqrt(2 * config.layers)

    def mlp(width: int) -> Params:
        specs = layers.mlp_specs(config.width, width, residual_scale, has_gate=config.has_gate, biased=biased)
        return specs | layers.activation_specs(config.mlp)

    moe = experts.moe_specs(config, residual_scale) if config.moe.experts else {}
    attention = latent_attention.latent_attention_specs if config.mla.kv_rank else attention_specs

    def block_specs(kind: Kind, has_experts: bool, takes_keys: bool, is_mtp: bool) -> Params:
        of_kind, without = config.of_layers(kind), KEY_PARAMETERS if takes_keys else ()
        norms = _block_norms(of_kind, kind, has_experts)
        if kind == GATED_DELTA:
            norm = layers.norm_specs("rms", False, (config.delta.value_head_dim,), ("head_dim",))
            mixer = {"delta": gated_delta.gated_delta_specs(config, residual_scale), "delta_norm": norm}
        else:
            projections = attention(of_kind, residual_scale)
            mixer = {"attention": {name: spec for name, spec in projections.items() if name not in without}}
        return {
            **mixer,
            **{name: _norm_specs(config, **dims) for name, dims in norms.items() if name not in without},
            "mlp": moe if has_experts else mlp(config.mlp_width * (2 if config.wide_mlp and takes_keys else 1)),
            **(_input_mlp_specs(config, residual_scale) if config.layer_input_size else {}),
            **({"layer": {"scale": LAYER_SCALE}} if config.layer_scales else {}),
            **(_mtp_specs(config) if is_mtp else {}),
        }

    specs: Params = {"non_layer": non_layer}
    modules = name_mtp_modules(list_mtp_modules(config))
    for name, segment in name_modules(config).items():
        of_segment = segment.keys == "taken", name in modules
        blocks = [block_specs(*block, *of_segment) for block in zip(segment.kinds, segment.experts, strict=True)]
        specs[name] = {
            f"block_{position}": jax.tree.map(lambda spec, repeats=segment.repeats: spec.stack(repeats), layer)
            for position, layer in enumerate(blocks)
        }
    return specs


def _layer_input_specs(config: ModelConfig, vocabulary: int) -> Params:
    """Return the parameters of the inputs of all layers."""
    layers, size = config.layers, config.layer_input_size
    table = ParamSpec((vocabulary, layers * size), ("vocabulary", "embed"), (1,), normal(math.sqrt(layers)))
    projection = ParamSpec((config.width, layers, size), ("embed", None, "mlp"), (0,), normal())
    return {
        "layer_inputs": {"table": table, "projection": projection},
        "layer_inputs_norm": _norm_specs(config, mlp=size),
    }


def _mtp_specs(config: ModelConfig) -> Params:
    """Return the parameters that an MTP module has in addition to a block's."""
    # The first half of the inputs is the embedding, as in published folders (eh_proj).
    projection = ParamSpec((2 * config.width, config.width), ("mlp", "embed"), (0,), normal())
    norms = ("mtp_embedding_norm", "mtp_hidden_norm", "mtp_output_norm")
    return {"mtp": {"projection": projection}} | {name: _norm_specs(config, embed=config.width) for name in norms}


def _input_mlp_specs(config: ModelConfig, residual_scale: float) -> Params:
    """Return the parameters of the MLP whose gate a layer's input multiplies."""
    specs = layers.mlp_specs(config.width, config.layer_input_size, residual_scale, has_gate=True, biased=False)
    own = {name: spec for name, spec in specs.items() if name != "up"}
    return {"input_mlp": own, "input_mlp_post_norm": _norm_specs(config, embed=config.width)}


def _block_norms(config: ModelConfig, kind: Kind, has_experts: bool) -> dict[str, dict[str, int]]:
    """Return the norms of a block that `norm` describes, each with the sizes of its dimensions by logical axis."""
    heads, kv_heads, head = {"heads": config.heads}, {"kv_heads": config.kv_heads}, {"head_dim": config.head_dim}
    residual = {
        "pre": ("attention_norm", "mlp_norm"),
        "post": ("attention_post_norm", "mlp_post_norm"),
        "both": ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm"),
    }[config.norm_placement]
    qk: dict[str, dict[str, dict[str, int]]] = {
        "none": {},
        "rotated_unit": {},
        "head": {"query_norm": head, "key_norm": head},
        "rotated_head": {"query_norm": head, "key_norm": head},
        "projection": {"query_norm": heads | head, "key_norm": kv_heads | head},
    }
    ranks = {"latent_norm": config.mla.kv_rank, "query_latent_norm": config.mla.kv_rank and config.mla.query_rank}
    latents = {name: {"latent": rank} for name, rank in ranks.items() if rank}
    if config.parallel_block:
        residual = tuple(name for name in residual if name != "mlp_norm")
    if has_experts and config.moe.own_norms:
        residual = (*residual, "router_norm", "experts_norm", "experts_post_norm", "shared_post_norm")
    of_attention = {} if kind == GATED_DELTA else qk[config.qk_norm] | latents
    return {name: {"embed": config.width} for name in residual} | of_attention


def _norm_specs(config: ModelConfig, **dims: int) -> dict[str, ParamSpec]:
    return layers.norm_specs(config.norm, config.norm_zero_centered, tuple(dims.values()), tuple(dims))
