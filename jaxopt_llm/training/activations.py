"""The activations of one microbatch on each device, by name: their shapes, and what a layer keeps of them."""

from dataclasses import dataclass

from jaxopt_llm.execution.stacks import KEPT_BY, RematConfig
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.intermediates import AXES, Intermediate
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.training.step import TrainingConfig


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
            "query_latent": model.query_rank,
            "latent": model.latent_rank,
            "turned_dim": model.turned_dim,
            "key_dim": model.key_dim,
            "value_dim": model.value_dim,
            "mlp": model.mlp_width,
        }
        shape = (self.training.batch_size // self.training.accumulation, *(sizes[axis] for axis in axes))
        split = (None if self.placement.replicates(axis, sizes[axis]) else axis for axis in axes)
        return tuple(self.placement.activation("batch", *split).shard_shape(shape))

    @property
    def sent(self) -> tuple[int, ...]:
        """The device's part of what goes from one stage of a pipeline to another."""
        rows, sequence = self.training.batch_size // self.training.accumulation, self.training.sequence_length
        return tuple(self.placement.sent(sequence).shard_shape((rows, sequence, self.model.width)))

    def kept(self, remat: RematConfig) -> list[Intermediate]:
        """What a layer keeps on the device from its forward to its backward."""
        policy = KEPT_BY[remat.policy] if isinstance(remat.policy, str) else remat.policy
        names = {"block_input", *policy} - {*remat.offload}
        # What joins the residual stream is read by a norm after it alone.
        unread = {"mlp_output"} if self.model.norm_placement == "pre" else set()
        return [name for name in self._there if name in names - unread]

    @property
    def _there(self) -> list[Intermediate]:
        model = self.model
        absent = {"mlp_gate"} if model.mlp == "gelu" else set()
        absent |= set() if model.latent_rank else {"latent", "rotary_key"}
        absent |= set() if model.latent_rank and model.query_rank else {"query_latent"}
        return [name for name in AXES if name not in absent]
