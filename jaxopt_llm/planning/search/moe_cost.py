"""Mixture of experts in the arithmetic of memory and time, for each token of a device in one MoE layer."""

from dataclasses import dataclass

from jaxopt_llm.config import Config
from jaxopt_llm.model.moe import exchange


@dataclass(frozen=True)
class MoECost:
    """Rows of experts on a device, and what goes over `expert`, per token in one MoE layer.

    share: share of the layers that are MoE layers; 0 for a dense model.
    rows: rows that a device has room for, whatever the load.
    exchanged: rows of the residual stream that the collectives move along `expert`, in each direction. They are counted
        for the first round, which is the only one if the load is even.
    dispatch, combine: collectives that bring tokens to the experts, and results back.
    """

    share: float
    rows: float
    exchanged: float
    dispatch: str
    combine: str

    @classmethod
    def from_config(cls, config: Config) -> "MoECost":
        model, devices = config.model, config.mesh.expert
        share = sum(map(model.moe.has_experts, range(model.blocks))) / model.blocks if model.moe.experts else 0.0
        if not share:
            return cls(share, rows=0, exchanged=0, dispatch="all-gather", combine="reduce-scatter")
        # The most choices that can arrive, if all tokens choose this device's experts.
        rows: float = devices * min(model.moe.experts_per_token, model.moe.experts // devices)
        form = exchange.get_exchange(config.sharding, devices)
        if form == "gather":
            return cls(share, rows, exchanged=devices, dispatch="all-gather", combine="reduce-scatter")
        rows = min(config.sharding.expert_room * model.moe.experts_per_token, rows)
        filled = rows if form == "all_to_all" else model.moe.experts_per_token
        kind = {"all_to_all": "all-to-all", "ragged": "ragged-all-to-all"}[form]
        return cls(share, rows, exchanged=filled, dispatch=kind, combine=kind)
