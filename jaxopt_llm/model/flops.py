"""Floating-point operations that a model needs: the numerator of model FLOP utilisation (MFU)."""

from dataclasses import dataclass

import jax

from jaxopt_llm import tree
from jaxopt_llm.model import leaves, param
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.decoder import Params, layout, places
from jaxopt_llm.model.experts import ROUTER
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.precision import PrecisionConfig


@dataclass(frozen=True)
class ModelFlops:
    """Per token of a training step, under two conventions that differ in attention alone.

    causal: a query meets the keys that it may see, about half of the sequence, or its window (as FlashAttention's
        papers count). full: it meets all keys of the sequence or of its window (as PaLM, arXiv:2204.02311, appendix B,
        and Megatron-LM count). Packed documents are not told apart, nothing recomputed is counted, and neither are
        look-ups and what is elementwise.
    """

    causal: float
    full: float


def per_token(config: ModelConfig, trainable: Params, frozen: Params, sequence_length: int) -> ModelFlops:
    """Two operations per weight of a product and token forward, as many again for the gradient of the product's input,
    and as many again for that of the weight where it is trained; attention's products, without weights, three times.

    trainable, frozen: specs, the halves of a `tree.partition`.
    """
    products = 3 * _product_weights(config, trainable) + 2 * _product_weights(config, frozen)
    attention = {True: 0.0, False: 0.0}
    for segment in layout(config):
        for kind in segment.kinds:
            window = config.window if kind == "sliding" else sequence_length
            for causal in attention:
                seen = keys_seen(sequence_length, min(window, sequence_length), causal)
                attention[causal] += segment.repeats * config.heads * (config.head_dim + config.value_dim) * seen
    return ModelFlops(*(2 * (products + 3 * attention[causal]) for causal in (True, False)))


def quantised_per_token(config: ModelConfig, trainable: Params, precision: PrecisionConfig) -> float:
    """Of those operations, the ones between codes: see `precision.matmul`. Experts' products are none."""
    products = {"fp8": 3, "int8": 1}.get(precision.matmul, 0)  # forward, gradient of the input, gradient of the weight
    wide = precision.compute_dtype_layers
    narrow = [prefix for prefix, _, layer in places(config) if wide <= layer < config.layers - wide]

    def weights(path: str, spec: ParamSpec) -> int:
        if spec.layers is None or not spec.contracting or spec.numbered:
            return 0
        layers = sum(path.startswith(prefix) for prefix in narrow)
        return param.count(spec) // param.depth(spec) * layers

    return 2 * products * sum(jax.tree.leaves(tree.map_with_path(weights, trainable)))


def active(config: ModelConfig, specs: Params) -> int:
    """Parameters that a token meets: of a layer's experts those that it goes to."""
    adapters = tree.partition(specs, leaves.is_adapter)[0]
    return sum(_met(config, spec) for spec in jax.tree.leaves((leaves.bare(specs), adapters)))


def in_words(parameters: int, active: int) -> str:
    """How many there are, and how many of them are active where not all are."""
    return f"{parameters:,} parameters" + (f" ({active:,} active)" if active < parameters else "")


def _met(config: ModelConfig, spec: ParamSpec) -> int:
    count = param.count(spec)
    return count // config.experts * config.experts_per_token if spec.numbered else count


def _product_weights(config: ModelConfig, specs: Params) -> int:
    """Weights that a product sums over. A table counts as the head: looking rows up is no product."""
    looked_up = ("outer/positions/",) if config.tied_head else ("outer/positions/", "outer/embedding/")

    def weights(path: str, spec: ParamSpec) -> int:
        if not (spec.contracting or path.endswith(ROUTER)) or path.startswith(looked_up):
            return 0
        size = _met(config, spec)
        return size // spec.shape[0] * config.vocabulary_size if "vocabulary" in spec.axes else size

    return sum(jax.tree.leaves(tree.map_with_path(weights, specs)))


def keys_seen(length: int, window: int, causal: bool) -> float:
    """Mean over the queries of a sequence."""
    return window - window * (window - 1) / (2 * length) if causal else float(window)
