"""A mixture of experts as the arithmetic of memory and of time sees it: how many rows a device has, and what goes over
`expert`. Of one layer that has experts, for each token of a device.
"""

from dataclasses import dataclass

from jaxopt_llm.config import TrainConfig
from jaxopt_llm.model import exchange


@dataclass(frozen=True)
class Mixture:
    """share: of the layers that have experts, 0 of a dense model. rows: that a device has room for, whatever the load.
    exchanged: rows of the residual stream that collectives of these kinds move along `expert`, there and back. Of
    rounds the first, which is all where the load is even."""

    share: float
    rows: float
    exchanged: float
    there: str
    back: str

    @classmethod
    def of(cls, config: TrainConfig) -> "Mixture":
        model, devices = config.model, config.mesh.expert
        share = sum(map(model.has_experts, range(model.layers))) / model.layers
        if not share:
            return cls(share, rows=0, exchanged=0, there="all-gather", back="reduce-scatter")
        rows: float = devices * min(model.experts_per_token, model.experts // devices)  # of all choices that can come
        form = exchange.form(model, config.sharding, devices)
        if form == "gather":
            return cls(share, rows, exchanged=devices, there="all-gather", back="reduce-scatter")
        rows = min(config.sharding.expert_room * model.experts_per_token, rows)
        filled = rows if form == "all_to_all" else model.experts_per_token
        kind = {"all_to_all": "all-to-all", "ragged": "ragged-all-to-all"}[form]
        return cls(share, rows, exchanged=filled, there=kind, back=kind)
