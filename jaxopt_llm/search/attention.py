"""Attention as the arithmetic of memory and of time sees it: by what computes it, and by what devices exchange where
they divide a sequence. Of one layer, on one device.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Final

from jaxopt_llm.config import TrainConfig
from jaxopt_llm.kernels.attention import KERNELS, unsupported
from jaxopt_llm.kernels.attention_auto import fastest
from jaxopt_llm.kernels.attention_xla import CAUSAL_PARTS, CAUSAL_ROWS, QUERY_BLOCK
from jaxopt_llm.model import flops
from jaxopt_llm.model.attention import kernel_head_dim
from jaxopt_llm.model.config import Kind, ModelConfig

AUTO = "auto"
RING: Final = "ring"
ALL_TO_ALL: Final = "all_to_all"


def settled(config: TrainConfig, capability: tuple[int, int] | None) -> TrainConfig:
    """With what `auto` takes on a GPU of this compute capability, None without one: as make_program does."""
    training, mesh = config.training, config.mesh
    if training.attention != AUTO:
        return config
    keys = training.sequence_length // (mesh.context if config.sharding.context_exchange == RING else 1)
    name = _taken(kernel_head_dim(config.model), config.precision.compute_dtype, keys, capability)
    return replace(config, training=replace(training, attention=name))


@functools.cache
def _taken(head_dim: int, dtype: str, keys: int, capability: tuple[int, int] | None) -> Any:
    return fastest(head_dim, dtype, keys, capability, unsupported(head_dim, dtype, capability)).name


@dataclass(frozen=True)
class Attention:
    """flash: whether scores stay on the chip; those of `auto` do not, until it is `settled`. devices: that divide a
    sequence; exchange: how they do, "" for one. heads, kv_heads: of a device, before heads are exchanged."""

    model: ModelConfig
    flash: bool
    sequence: int
    devices: int
    exchange: str
    heads: float
    kv_heads: float

    @classmethod
    def of(cls, config: TrainConfig) -> "Attention":
        model, mesh = config.model, config.mesh
        exchange = config.sharding.context_exchange if mesh.context > 1 else ""
        shards = mesh.tensor * (mesh.context if exchange == ALL_TO_ALL else 1)
        return cls(
            model=model,
            flash=config.training.attention in KERNELS,
            sequence=config.training.sequence_length,
            devices=mesh.context,
            exchange=exchange,
            heads=model.heads / mesh.tensor,
            kv_heads=math.lcm(model.kv_heads, shards) / mesh.tensor,  # repeated for those that share one
        )

    def keys_formed(self, kind: Kind) -> float:
        """Keys for which a query's scores are formed: by a kernel those that it sees; by xla masked ones, too, in a
        ring all there are, else those of its part or block (see kernels/attention_xla.py)."""
        model, sequence = self.model, self.sequence
        if self.flash:
            window = model.window if kind == "sliding" else sequence
            return flops.keys_seen(sequence, min(window, sequence), causal=True)
        if self.exchange == RING:
            return float(sequence)
        if kind == "sliding":
            return float(min(QUERY_BLOCK + model.window - 1, sequence))
        parts = min(CAUSAL_PARTS, -(-sequence // CAUSAL_ROWS))
        return sequence * (parts + 1) / (2 * parts)

    @property
    def sizes(self) -> tuple[int, int]:
        """Of a head's keys and values, as what attends is given them."""
        padded = kernel_head_dim(self.model)
        return (padded, padded) if self.flash else (self.model.head_dim, self.model.value_dim)

    @property
    def scores(self) -> float:
        """Of a row, that are in memory at once."""
        if self.flash:
            return 0.0
        meeting = self.sequence / (self.devices if self.exchange == RING else 1)
        heads = self.heads / (self.devices if self.exchange == ALL_TO_ALL else 1)
        return heads * min(QUERY_BLOCK, meeting) * meeting
