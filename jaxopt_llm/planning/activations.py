"""Shapes of one microbatch's activations on each device, by name: those that a layer saves for the backward."""

import math
from dataclasses import dataclass

from jaxopt_llm.config import Config
from jaxopt_llm.execution.trace import Mark
from jaxopt_llm.model.moe import exchange
from jaxopt_llm.parallel.activations import sent_sharding
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.planning.search.block_cost import follow_backward, trace_layers


@dataclass(frozen=True)
class Activations:
    """Activations of one microbatch on each device."""

    config: Config
    placement: Placement

    def local_shape(self, mark: Mark) -> tuple[int, ...]:
        """Return the shape of each device's part of an intermediate."""
        rows, sequence = self._global_shape
        sizes = {"batch": rows, "sequence": sequence, "residual_sequence": sequence, "expert_rows": self._expert_rows}
        whole = [sizes.get(axis or "", size) for axis, size in zip(mark.name.axes, mark.shape, strict=True)]
        return tuple(
            1 if axis == "devices" else size // self.placement.count_parts(axis, size)
            for axis, size in zip(mark.name.axes, whole, strict=True)
        )

    @property
    def _global_shape(self) -> tuple[int, int]:
        training = self.config.training
        return training.batch_size // training.accumulation, training.sequence_length

    @property
    def _expert_rows(self) -> int:
        rows, sequence = self._global_shape
        tokens = math.prod(self.placement.activation("batch", "sequence").shard_shape((rows, sequence)))
        return (
            exchange.count_rows(self.config.model.moe, self.placement, tokens) if self.config.model.moe.experts else 0
        )

    @property
    def stage_input_shape(self) -> tuple[int, ...]:
        """Shape of each device's part of the activation that pipeline stages send to each other."""
        rows, sequence = self._global_shape
        sent = sent_sharding(sequence, self.placement)
        return tuple(sent.shard_shape((rows, sequence, self.config.model.width)))

    def list_saved(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return name and shape of what a layer saves on the device from its forward to its backward."""
        remat = self.config.remat
        marks = (mark for trace, _ in trace_layers(self.config) for mark in follow_backward(trace, remat).saved)
        return [(mark.name, self.local_shape(mark)) for mark in marks if mark.name not in remat.offload]
