"""Shapes of one microbatch's activations on each device, by name, and those that a layer saves for the backward."""

import math
from dataclasses import dataclass

from jaxopt_llm.config import Intermediate, ModelConfig, RematConfig, TrainingConfig
from jaxopt_llm.model.intermediates import INTERMEDIATE_AXES
from jaxopt_llm.model.layers import INPUT_PROJECTIONS
from jaxopt_llm.model.moe import exchange
from jaxopt_llm.parallel.activations import sent_sharding
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.planning.search.block_cost import list_existing, list_saved

EXPERT_ROWS = "expert rows"  # tokens sorted by expert, as the experts read them; no remat policy can name them


@dataclass(frozen=True)
class Activations:
    """Activations of one microbatch on each device."""

    model: ModelConfig
    training: TrainingConfig
    placement: Placement

    def local_shape(self, *axes: str, **sizes: int) -> tuple[int, ...]:
        """Return the shape of each device's part of an array [B, *axes].

        Args:
            axes: names of axes.
            sizes: sizes that replace the model's own sizes of these axes.
        """
        model, sequence = self.model, self.training.sequence_length
        axis_sizes = {
            "sequence": sequence,
            "residual_sequence": sequence,
            "embed": model.width,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "query_latent": model.mla.query_rank,
            "latent": model.mla.kv_rank,
            "rotary_dim": model.rotary_dim,
            "key_dim": model.key_dim,
            "value_dim": model.value_dim,
            "mlp": model.mlp_width,
        } | sizes
        shape = (self.training.batch_size // self.training.accumulation, *(axis_sizes[axis] for axis in axes))
        split = (None if self.placement.replicates(axis, axis_sizes[axis]) else axis for axis in axes)
        return tuple(self.placement.activation("batch", *split).shard_shape(shape))

    def local_shapes(self, name: Intermediate) -> list[tuple[int, ...]]:
        """Return the shapes of each device's part of an intermediate, one for each kind of layer that differs."""
        model = self.model
        if name not in ("mlp_input", *INPUT_PROJECTIONS.values()) or not model.moe.experts:
            return [self.local_shape(*INTERMEDIATE_AXES[name])]
        dense = not all(map(model.moe.has_experts, range(model.layers)))
        widths = [model.mlp_width] * dense + [model.moe.shared_expert_width] * (model.moe.shared_expert_width > 0)
        if name == "mlp_input":
            dense_input = self.local_shape(*INTERMEDIATE_AXES[name])
            moe_input = self.local_shape(*INTERMEDIATE_AXES["mlp_output"])  # divided as the residual stream is
            return list(dict.fromkeys([dense_input] * len(widths) + [moe_input]))
        of_experts = (self._expert_rows, model.moe.expert_width // self.placement.size("tensor"))
        return [*(self.local_shape(*INTERMEDIATE_AXES[name], mlp=width) for width in widths), of_experts]

    @property
    def _expert_rows(self) -> int:
        return exchange.count_rows(self.model.moe, self.placement, math.prod(self.local_shape("sequence")))

    @property
    def stage_input_shape(self) -> tuple[int, ...]:
        """Shape of each device's part of the activation that pipeline stages send to each other."""
        rows, sequence = self.training.batch_size // self.training.accumulation, self.training.sequence_length
        return tuple(sent_sharding(sequence, self.placement).shard_shape((rows, sequence, self.model.width)))

    def list_saved(self, remat: RematConfig) -> list[tuple[str, tuple[int, ...]]]:
        """Return name and shape of what a layer saves on the device from its forward to its backward."""
        names = list_saved(remat, self.model)
        saved: list[tuple[str, tuple[int, ...]]] = [
            (name, shape) for name in list_existing(self.model) if name in names for shape in self.local_shapes(name)
        ]
        if self.model.moe.experts and not remat.enabled:
            saved.append((EXPERT_ROWS, (self._expert_rows, self.model.width)))
        return saved
