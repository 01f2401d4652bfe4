"""One block in the arithmetic of memory and time: sizes per token on one device. If layers differ, their mean.

Letters: D width, H heads, G key-value heads, K head size, V size of a value head, F MLP width.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from jaxopt_llm.config import Config, Intermediate, ModelConfig, RematConfig
from jaxopt_llm.execution.segments import SAVED_BY_POLICY, saved_intermediates
from jaxopt_llm.planning.search.moe_cost import MoECost

# Intermediates that remat can name, and those that only a mixture of experts has: the router's logits, and the rows
# that experts read.
Result = Intermediate | Literal["router", "expert_rows"]
MOE_RESULTS: frozenset[Result] = frozenset({"router", "expert_rows"})


@dataclass(frozen=True)
class BlockCost:
    """Sizes of a block on one device.

    elements: elements of each intermediate, per token.
    weights: weights on this device that a token is multiplied with to make the intermediate.
    expert_weights: the part of them that are experts' matrices, in grouped matmuls.
    residual: elements of the residual stream per token; sequence parallelism divides them.
    dense: share of the layers that have an MLP for all tokens, next to experts or without any.
    """

    elements: dict[Result, float]
    weights: dict[Result, float]
    expert_weights: dict[Result, float]
    residual: float
    dense: float

    @classmethod
    def from_config(cls, config: Config) -> "BlockCost":
        model, tensor, moe = config.model, config.mesh.tensor, MoECost.from_config(config)
        width, heads = model.width, model.heads / tensor
        # Key-value heads that are fewer than the devices are stored and computed whole on each device.
        kv_heads = model.kv_heads / (tensor if model.kv_heads >= tensor else 1)
        queries, mixed = heads * model.head_dim, heads * model.value_dim
        keys, values = kv_heads * model.key_dim, kv_heads * model.value_dim
        latent, query_latent = model.mla.kv_rank, model.mla.kv_rank and model.mla.query_rank
        shared = model.mla.rotary_head_dim if latent else 0  # whole on each device, as latents are
        residual = width / tensor if config.sharding.sequence_parallel else width
        gated = model.has_gate
        # Means over all layers. A mixture needs room for the most rows that can arrive, but multiplies only those that
        # do arrive with an even load.
        inner, rows = model.moe.expert_width / tensor, moe.share * moe.rows
        chosen = moe.share * model.moe.experts_per_token
        dense = 1 - moe.share * (model.moe.shared_expert_width == 0)
        mlp = (moe.share * model.moe.shared_expert_width + (1 - moe.share) * model.mlp_width) / tensor  # of all tokens
        hidden, of_experts = mlp + rows * inner, width * chosen * inner
        multiplied = width * mlp + of_experts
        return cls(
            elements={
                "block_input": residual,
                "attention_input": width,
                "query_latent": query_latent,
                "latent": latent,
                "rotary_key": shared,
                "query": queries,
                "key": keys,
                "value": values,
                "attention": mixed,
                "attention_output": residual,
                "mlp_input": dense * width + (1 - dense) * residual,
                "mlp_gate": hidden * gated,
                "mlp_up": hidden,
                "mlp_output": residual,
                "router": 0.0,
                "expert_rows": rows * width,
            },
            weights={
                "query_latent": width * query_latent,
                "latent": width * latent,
                "rotary_key": width * shared,
                "query": (query_latent or width) * queries,
                "key": (latent or width) * keys,
                "value": (latent or width) * values,
                "attention_output": mixed * width,
                "mlp_gate": multiplied * gated,
                "mlp_up": multiplied,
                "mlp_output": multiplied,
                "router": moe.share * width * model.moe.experts,
            },
            expert_weights={
                "mlp_gate": of_experts * gated,
                "mlp_up": of_experts,
                "mlp_output": of_experts,
            },
            residual=residual,
            dense=dense,
        )


def list_saved(remat: RematConfig, model: ModelConfig) -> frozenset[Result]:
    """Return the results of a block that are saved on the device for its backward, including the block's input."""
    names = {"block_input", *saved_intermediates(remat)} - set(remat.offload)
    # Only a norm after the MLP reads the MLP's output again. No policy can name the results of a mixture.
    unread = set() if _reads_mlp_output(model) else {"mlp_output"}
    return frozenset((names - unread) | (set() if remat.enabled else MOE_RESULTS))


def list_recomputed(remat: RematConfig, model: ModelConfig) -> frozenset[Result]:
    """Return the results of matmuls and of attention that the backward computes again."""
    read: set[Result] = {*SAVED_BY_POLICY["none"]}
    read |= MOE_RESULTS if model.moe.experts else set()
    if not _reads_mlp_output(model):
        read.remove("mlp_output")
    return frozenset(read - list_saved(remat, model) - set(remat.offload))


def list_existing(model: ModelConfig) -> list[Intermediate]:
    """Return the intermediates that the blocks of a model have."""
    absent: set[Intermediate] = set() if model.has_gate else {"mlp_gate"}
    if not model.mla.kv_rank:
        absent |= {"query_latent", "latent", "rotary_key"}
    elif not model.mla.query_rank:
        absent.add("query_latent")
    return [name for name in get_args(Intermediate) if name not in absent]


def _reads_mlp_output(model: ModelConfig) -> bool:
    return model.norm_placement in ("post", "both")
