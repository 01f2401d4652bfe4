"""The activations of one microbatch on each device, by name: their shapes, and what a layer keeps of them."""

import math
from dataclasses import dataclass

from jaxopt_llm.execution.stacks import KEPT_BY, RematConfig
from jaxopt_llm.kernels.attention import CAUSAL_PARTS, CAUSAL_ROWS, QUERY_BLOCK
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.intermediates import AXES, Intermediate
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.training.step import TrainingConfig

SCORE = 4 + 4  # bytes of an attention score and of its gradient


@dataclass(frozen=True)
class Activations:
    model: ModelConfig
    training: TrainingConfig
    placement: Placement

    def shape(self, *axes: str) -> tuple[int, ...]:
        """The device's part of an array [B, *axes]."""
        model, sequence = self.model, self.training.sequence_length
        sizes = {
            "sequence": sequence,
            "residual_sequence": sequence,
            "embed": model.width,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "mlp": model.mlp_width,
        }
        shape = (self.training.batch_size // self.training.accumulation, *(sizes[axis] for axis in axes))
        split = (None if self.placement.replicates(axis, sizes[axis]) else axis for axis in axes)
        return tuple(self.placement.activation("batch", *split).shard_shape(shape))

    @property
    def tokens(self) -> int:
        return math.prod(self.shape("sequence"))

    def values(self, name: Intermediate) -> int:
        values = math.prod(self.shape(*AXES[name]))
        # Beside attention's result the float32 log-sum-exp, two values of 16 bits.
        return values + 2 * math.prod(self.shape("sequence", "heads")) if name == "attention" else values

    def kept(self, remat: RematConfig) -> list[Intermediate]:
        """What a layer keeps on the device from its forward to its backward."""
        policy = KEPT_BY[remat.policy] if isinstance(remat.policy, str) else remat.policy
        names = {"block_input", *policy} - {*remat.offload}
        # What joins the residual stream is read by a norm after it alone.
        unread = {"mlp_output"} if self.model.norm_placement == "pre" else set()
        return [name for name in self._there if name in names - unread]

    def in_layer(self, compute: int) -> int:
        """Bytes of a layer's backward: its intermediates with their gradients, and a block of attention's scores."""
        return 2 * compute * sum(map(self.values, self._there)) + SCORE * self._scores

    @property
    def masks(self) -> int:
        """Bytes of the masks of attention's parts, where XLA makes constants of them: each part sees more keys."""
        parts = -(-self.training.sequence_length // self._part)
        return 4 * self._scores * (parts + 1) // 2

    @property
    def _part(self) -> int:
        """Queries that attention handles together."""
        return max(-(-self.training.sequence_length // CAUSAL_PARTS), CAUSAL_ROWS)

    @property
    def _scores(self) -> int:
        """Of a block of queries with all keys."""
        queries = min(QUERY_BLOCK, self._part, self.training.sequence_length)
        return math.prod(self.shape("heads", "sequence")) * queries

    @property
    def _there(self) -> list[Intermediate]:
        return [name for name in AXES if name != "mlp_gate" or self.model.mlp != "gelu"]
