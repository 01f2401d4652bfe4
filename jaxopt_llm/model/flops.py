"""Floating-point operations that a model needs: the numerator of model FLOP utilisation (MFU)."""

from dataclasses import dataclass

import jax

from jaxopt_llm.config import Kind, ModelConfig, PrecisionConfig
from jaxopt_llm.config.model import GATED_DELTA, WINDOWED
from jaxopt_llm.core import tree
from jaxopt_llm.model import param
from jaxopt_llm.model.decoder_specs import locate_layers, name_modules
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.param import ParamSpec


@dataclass(frozen=True)
class CodeProducts:
    """Products of a weight that multiply codes with codes. Those of experts and of adapters never do.

    dtype: of the codes, a key of Chip.peak_flops.
    legs: of the forward, of the gradient of the input (dx) and of the weight (dw).
    """

    dtype: str
    legs: tuple[str, ...]


CODE_PRODUCTS = {"fp8": CodeProducts("float8", ("forward", "dx", "dw")), "int8": CodeProducts("int8", ("forward",))}


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a training step per token, under two conventions that differ only in attention.

    causal: a query meets the keys that it may see, which is about half of the sequence, or its window (the convention
        of FlashAttention's papers).
    full: a query meets all keys of the sequence or of its window (PaLM, arXiv:2204.02311, appendix B, and Megatron-LM).

    Neither considers the bounds of packed documents. Recomputation, look-ups and elementwise operations do not count.
    """

    causal: float
    full: float


def count_per_token(config: ModelConfig, trainable: Params, frozen: Params, sequence_length: int) -> ModelFlops:
    """Count the FLOPs of a training step per token.

    Each weight of a matmul takes two operations per token in the forward, two for the gradient of the input and, if it
    is trainable, two for its own gradient. The matmuls of attention, which have no weights, count three times.

    trainable, frozen: specs, the halves of a `tree.partition`.
    """
    products = 3 * _matmul_weights(config, trainable) + 2 * _matmul_weights(config, frozen)
    attention = {True: 0.0, False: 0.0}
    for segment in name_modules(config).values():
        for kind in segment.kinds:
            for causal in attention:
                attention[causal] += segment.repeats * _count_mixed(config, kind, sequence_length, causal)
    return ModelFlops(*(2 * (products + 3 * attention[causal]) for causal in (True, False)))


def _count_mixed(config: ModelConfig, kind: Kind, sequence_length: int, causal: bool) -> float:
    """Return the numbers that a token is multiplied with in the matmuls without weights of a layer."""
    if kind == GATED_DELTA:  # it reads the state with its key, changes it, and reads it with its query
        return 3 * config.delta.value_heads * config.delta.key_head_dim * config.delta.value_head_dim
    of_kind = config.of_layers(kind)
    keys = mean_keys_of_layer(config, kind, sequence_length, causal)
    return config.heads * (of_kind.head_dim + of_kind.value_dim) * keys


def count_quantised_per_token(
    config: ModelConfig, trainable: Params, frozen: Params, precision: PrecisionConfig
) -> float:
    """Count the FLOPs that multiply codes with codes (CODE_PRODUCTS).

    trainable, frozen: specs, the halves of a `tree.partition`.
    """
    legs = CODE_PRODUCTS[precision.matmul].legs if precision.matmul in CODE_PRODUCTS else ()
    products = len(legs), sum(leg != "dw" for leg in legs)
    adapters = leaves.adapter_paths(trainable) | leaves.adapter_paths(frozen)
    quantised = [prefix for prefix, _, layer in locate_layers(config) if _is_quantised(config, precision, layer)]

    def weights(path: str, spec: ParamSpec) -> int:
        if spec.layers is None or not spec.contracting or spec.expert_dims or path in adapters:
            return 0
        layers = sum(path.startswith(prefix) for prefix in quantised)
        return param.count_parameters(spec) // param.count_layers(spec) * layers

    counts = (sum(jax.tree.leaves(tree.map_with_path(weights, specs))) for specs in (trainable, frozen))
    return 2.0 * sum(number * count for number, count in zip(products, counts, strict=True))


def count_quantised_blocks(config: ModelConfig, precision: PrecisionConfig) -> int:
    """Return the number of blocks whose products `precision.matmul` computes."""
    return sum(_is_quantised(config, precision, layer) for layer in range(config.blocks))


def _is_quantised(config: ModelConfig, precision: PrecisionConfig, layer: int) -> bool:
    exempt = precision.compute_dtype_layers
    return not exempt or exempt <= layer < config.layers - exempt


def count_active_parameters(config: ModelConfig, specs: Params) -> int:
    """Count the parameters that a token uses: of the experts of a layer, only experts_per_token."""
    adapters = leaves.select_adapters(specs)
    return sum(_active(config, spec) for spec in jax.tree.leaves((leaves.unwrap_specs(specs), adapters)))


def describe_parameters(parameters: int, active: int) -> str:
    """Return the number of parameters for people, with the number of active ones if it is lower."""
    return f"{parameters:,} parameters" + (f" ({active:,} active)" if active < parameters else "")


def _active(config: ModelConfig, spec: ParamSpec) -> int:
    count = param.count_parameters(spec)
    return count // config.moe.experts * config.moe.experts_per_token if spec.expert_dims else count


def _matmul_weights(config: ModelConfig, specs: Params) -> int:
    """Count the weights of matmuls per token. A table counts only as the head, because a look-up is not a matmul."""
    looked_up: tuple[str, ...] = ("non_layer/positions/", "non_layer/layer_inputs/table")
    looked_up += () if config.table_is_head else ("non_layer/embedding/",)

    def weights(path: str, spec: ParamSpec) -> int:
        if not spec.is_multiplied or path.startswith(looked_up):
            return 0
        size = _active(config, spec)
        return size // spec.shape[0] * config.vocabulary_size * config.losses if "vocabulary" in spec.axes else size

    return sum(jax.tree.leaves(tree.map_with_path(weights, leaves.unpack_codes(specs))))


def mean_keys_of_layer(config: ModelConfig, kind: Kind, length: int, causal: bool) -> float:
    """Return the number of keys that a query sees in a layer, mean over the queries of a sequence."""
    window = min(config.window, length) if kind in WINDOWED else length
    return mean_visible_keys(window if kind == "chunked" else length, window, causal)


def mean_visible_keys(length: int, window: int, causal: bool) -> float:
    """Return the number of keys that a query sees, mean over the queries of a sequence."""
    return window - window * (window - 1) / (2 * length) if causal else float(window)
