"""Attention in the arithmetic of memory and time, for one layer on one device.

The cost depends on the implementation, and on what devices exchange if they divide a sequence.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Final

from jaxopt_llm.config import Config, Kind, ModelConfig
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.config.model import GATED_DELTA, WINDOWED
from jaxopt_llm.kernels.attention import KERNELS, find_unsupported
from jaxopt_llm.kernels.attention_auto import AttentionCall, choose_fastest
from jaxopt_llm.kernels.attention_cudnn import count_workspace
from jaxopt_llm.kernels.attention_xla import CAUSAL_PARTS, CAUSAL_ROWS, QUERY_BLOCK
from jaxopt_llm.model import flops
from jaxopt_llm.model.self_attention import find_implementation, kernel_head_dim, most_frequent_kind
from jaxopt_llm.planning.search.passes import Passes
from jaxopt_llm.step.program import describe_attention

RING: Final = "ring"
ALL_TO_ALL: Final = "all_to_all"


def resolve_attention(config: Config, capability: tuple[int, int] | None) -> Config:
    """Replace `training.attention=auto` by the implementation that `make_program` would use.

    Args:
        capability: compute capability of the GPU, or None without a GPU.
    """
    training = config.training
    if training.attention != AUTO:
        return config
    name = _find_fastest(describe_attention(config), capability)
    return replace(config, training=replace(training, attention=name))


@functools.cache
def _find_fastest(call: AttentionCall, capability: tuple[int, int] | None) -> Any:
    return choose_fastest(call, capability, find_unsupported(call, capability)).name


@dataclass(frozen=True)
class AttentionCost:
    """Sizes of attention in one layer on one device.

    implementation: name in kernels/attention.py, or auto, which counts as xla until `resolve_attention` replaces it.
    segments: maximum number of segments in a row, as cuDNN is compiled for it.
    sequence_shards: devices that divide a sequence.
    exchange: how these devices exchange, ring or all_to_all; "" for a single device.
    heads, kv_heads: heads of a device, before heads are exchanged.
    """

    model: ModelConfig
    implementation: str
    segments: int
    sequence: int
    sequence_shards: int
    exchange: str
    heads: float
    kv_heads: float

    @classmethod
    def from_config(cls, config: Config, kind: Kind | None = None) -> "AttentionCost":
        """Return the cost of a layer of this kind; None: of the most frequent one."""
        kind = kind or most_frequent_kind(config.model)
        model, mesh = config.model.of_layers(kind), config.mesh
        exchange = (RING if config.sharding.has_ring else ALL_TO_ALL) if mesh.context > 1 else ""
        shards = mesh.tensor * (mesh.context if exchange == ALL_TO_ALL else 1)
        return cls(
            model=model,
            implementation=find_implementation(config.model, kind, config.training.attention),
            segments=describe_attention(config).segments or 1,
            sequence=config.training.sequence_length,
            sequence_shards=mesh.context,
            exchange=exchange,
            heads=model.heads / mesh.tensor,
            kv_heads=math.lcm(model.kv_heads, shards) / mesh.tensor,  # repeated for devices that share a head
        )

    @property
    def kv_size(self) -> float:
        """Size of a token's keys on a device, before heads are exchanged."""
        return self.kv_heads * self.model.head_dim

    @property
    def flash(self) -> bool:
        """Return whether a kernel keeps the scores on the chip."""
        return self.implementation in KERNELS

    @property
    def by_pairs(self) -> bool:
        """Return whether a ring copies chunks of its parts, as it does for an implementation that skips no keys."""
        return self.exchange == RING and not (self.flash and KERNELS[self.implementation].skips_keys)

    @property
    def cudnn(self) -> bool:
        return self.implementation == "cudnn"

    def count_scored_keys(self, kind: Kind) -> float:
        """Return the mean number of keys for which a query's scores are computed.

        A kernel computes only the scores of keys that the query sees. `xla` also computes masked scores of the query's
        part or block (kernels/attention_xla.py).
        """
        model, sequence = self.model, self.sequence
        if self.flash:
            return flops.mean_keys_of_layer(model, kind, sequence, causal=True)
        # In a ring these are the keys of the device's own part, and half of those of every other part (ring.py).
        own = sequence // self.sequence_shards if self.exchange == RING else sequence
        others = (sequence - own) / 2
        if kind in WINDOWED:
            return others + min(QUERY_BLOCK + model.window - 1, own)
        parts = min(CAUSAL_PARTS, -(-own // CAUSAL_ROWS))
        return others + own * (parts + 1) / (2 * parts)

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Sizes of a head's keys and values as the implementation reads them; kernels read padded heads."""
        padded = kernel_head_dim(self.model)
        return (padded, padded) if self.flash else (self.model.head_dim, self.model.value_dim)

    @property
    def workspace(self) -> float:
        """Bytes that cuDNN's backward of a row works in."""
        # Each device has a part of the heads, or in a ring of the rows.
        heads = self.heads / (self.sequence_shards if self.exchange else 1)
        return count_workspace(self.segments, self.sequence, heads, kernel_head_dim(self.model))

    @property
    def live_scores(self) -> float:
        """Scores of a row that are in memory at the same time."""
        if self.flash:
            return 0.0
        keys = self.sequence / (self.sequence_shards if self.exchange == RING else 1)
        heads = self.heads / (self.sequence_shards if self.exchange == ALL_TO_ALL else 1)
        return heads * min(QUERY_BLOCK, keys) * keys


def list_attention(passes: Passes) -> list[tuple[Kind, float]]:
    """Return the kinds of layers of a chunk that attend, each with its number of layers."""
    return [(kind, number) for kind, number in passes.kinds if kind != GATED_DELTA]


def count_head_values(config: Config, passes: Passes) -> tuple[float, float]:
    """Return the sizes of a token's queries and of its keys on a device, summed over the layers of a chunk."""
    costs = [(AttentionCost.from_config(config, kind), number) for kind, number in list_attention(passes)]
    queries = sum(number * cost.heads * cost.model.head_dim for cost, number in costs)
    return queries, sum(number * cost.kv_size for cost, number in costs)
