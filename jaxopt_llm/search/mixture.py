"""A mixture of experts as the arithmetic of memory and of time sees it: how many rows a device has, and of how many
tokens. Of one layer that has experts.

Tokens go to their experts and back as model/experts.py has it: where that comes to have other forms, they belong here.
"""

from dataclasses import dataclass

from jaxopt_llm.config import TrainConfig


@dataclass(frozen=True)
class Mixture:
    """share: of the layers that have experts, 0 of a dense model. rows: that a device has room for, for each of its
    tokens: were all choices of those that are brought together for its own experts. together: tokens that are, for each
    of its own."""

    share: float
    rows: float
    together: int

    @classmethod
    def of(cls, config: TrainConfig) -> "Mixture":
        model, devices = config.model, config.mesh.expert
        if not model.experts:
            return cls(share=0.0, rows=0.0, together=1)
        share = sum(map(model.has_experts, range(model.layers))) / model.layers
        return cls(share, devices * min(model.experts_per_token, model.experts // devices), devices)
