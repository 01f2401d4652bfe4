"""The activations of one microbatch on each device, by name: their shapes, and what a layer keeps of them."""

import math
from dataclasses import dataclass

from jaxopt_llm.execution.stacks import KEPT_BY, RematConfig
from jaxopt_llm.model import exchange
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.intermediates import AXES, Intermediate
from jaxopt_llm.model.layers import INWARD
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.training.step import TrainingConfig


@dataclass(frozen=True)
class Activations:
    model: ModelConfig
    training: TrainingConfig
    placement: Placement

    def shape(self, *axes: str, **others: int) -> tuple[int, ...]:
        """The device's part of an array [B, *axes]; others: sizes of axes in place of the model's."""
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
        } | others
        shape = (self.training.batch_size // self.training.accumulation, *(sizes[axis] for axis in axes))
        split = (None if self.placement.replicates(axis, sizes[axis]) else axis for axis in axes)
        return tuple(self.placement.activation("batch", *split).shard_shape(shape))

    def shapes(self, name: Intermediate) -> list[tuple[int, ...]]:
        """The device's parts of an intermediate, in layers of all kinds that there are."""
        model = self.model
        if name not in ("mlp_input", *INWARD.values()) or not model.experts:
            return [self.shape(*AXES[name])]
        dense = not all(map(model.has_experts, range(model.layers)))
        widths = [model.mlp_width] * dense + [model.shared_expert_width] * (model.shared_expert_width > 0)
        if name == "mlp_input":  # which experts have as the residual stream is divided
            return list(dict.fromkeys([self.shape(*AXES[name])] * len(widths) + [self.shape(*AXES["mlp_output"])]))
        of_experts = (self._rows, model.expert_width // self.placement.size("tensor"))
        return [*(self.shape(*AXES[name], mlp=width) for width in widths), of_experts]

    @property
    def _rows(self) -> int:
        return exchange.rows(self.model, self.placement, math.prod(self.shape("sequence")))

    @property
    def sent(self) -> tuple[int, ...]:
        """The device's part of what goes from one stage of a pipeline to another."""
        rows, sequence = self.training.batch_size // self.training.accumulation, self.training.sequence_length
        return tuple(self.placement.sent(sequence).shard_shape((rows, sequence, self.model.width)))

    def kept(self, remat: RematConfig) -> list[tuple[str, tuple[int, ...]]]:
        """What a layer keeps on the device from its forward to its backward, by name, and of which shape."""
        policy = KEPT_BY[remat.policy] if isinstance(remat.policy, str) else remat.policy
        names = {"block_input", *policy} - {*remat.offload}
        # What joins the residual stream is read by a norm after it alone.
        unread = {"mlp_output"} if self.model.norm_placement == "pre" else set()
        found: list[tuple[str, tuple[int, ...]]] = [
            (name, shape) for name in self._there if name in names - unread for shape in self.shapes(name)
        ]
        if self.model.experts and not remat.checkpoints:
            found.append(("rows for experts", (self._rows, self.model.width)))
        return found

    @property
    def _there(self) -> list[Intermediate]:
        model = self.model
        absent = {"mlp_gate"} if model.mlp == "gelu" else set()
        absent |= set() if model.latent_rank else {"latent", "rotary_key"}
        absent |= set() if model.latent_rank and model.query_rank else {"query_latent"}
        return [name for name in AXES if name not in absent]
