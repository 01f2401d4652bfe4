"""Sizes of a microbatch in the arithmetic of memory and time."""

from dataclasses import dataclass

from jaxopt_llm.config import Config
from jaxopt_llm.model.decoder_specs import pad_vocabulary_size
from jaxopt_llm.model.moe import exchange

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def count_tokens(config: Config) -> int:
    """Return the tokens of a microbatch on one device."""
    training = config.training
    rows = training.batch_size // (training.accumulation * config.mesh.batch_shards)
    return rows * training.sequence_length // config.mesh.context


def count_table_rows(config: Config) -> int:
    """Return the rows of embedding and head that a device looks up in and computes logits of.

    Pipeline stages divide these tables, too. With scores, these are the rows of their head, whole on every device.
    """
    if config.model.scores:
        return config.model.scores
    return -(-pad_vocabulary_size(config.model.vocabulary_size) // (config.mesh.tensor * config.mesh.pipeline))


def accumulates_gradients(config: Config) -> bool:
    """Return whether gradients are summed over microbatches in separate float32 arrays."""
    return config.training.accumulation > 1 or config.mesh.pipeline > 1


def adds_in_place(config: Config) -> bool:
    """Return whether a layer's gradients are added to that sum where they are formed (execution/scan.py).

    Loops over spans of layers with different precisions, and over groups of layers, form stacks of gradients first.
    """
    in_loop = config.mesh.pipeline == 1 and config.training.unroll != "all"
    is_plain = not config.precision.compute_dtype_layers and config.remat.every == 1
    return in_loop and is_plain and config.training.accumulation > 1 and config.precision.reduce_dtype == "float32"


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
        if exchange.get_exchange(config.sharding, devices) == "gather":
            return cls(share, rows, exchanged=devices, dispatch="all-gather", combine="reduce-scatter")
        rows = min(config.sharding.expert_room * model.moe.experts_per_token, rows)
        return cls(share, rows, exchanged=rows, dispatch="all-to-all", combine="all-to-all")
