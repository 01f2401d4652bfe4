"""A mixture of experts as the arithmetic of memory and of time sees it: how many rows a device has, and what goes over
`expert`. Of one layer that has experts, for each token of a device.

Tokens go to their experts and back as model/experts.py has it: where that comes to have other forms, they belong here.
"""

from dataclasses import dataclass

from jaxopt_llm.config import TrainConfig


@dataclass(frozen=True)
class Mixture:
    """share: of the layers that have experts, 0 of a dense model. rows: that a device has room for, whatever the load.
    exchanged: rows of the residual stream that a group along `expert` exchanges at once, there and back by collectives
    of these kinds; summed: those that `tensor` sums."""

    share: float
    rows: float
    exchanged: float
    summed: float
    there: str
    back: str

    @classmethod
    def of(cls, config: TrainConfig) -> "Mixture":
        model, devices = config.model, config.mesh.expert
        share = sum(map(model.has_experts, range(model.layers))) / model.layers
        # Tokens are brought together, and each device has room for all of their choices that can be its own experts'.
        rows = devices * min(model.experts_per_token, model.experts // devices) if share else 0
        return cls(share, rows, exchanged=devices, summed=devices, there="all-gather", back="reduce-scatter")
