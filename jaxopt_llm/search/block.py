"""One block as the arithmetic of memory and of time sees it: sizes per token on one device.

Letters: D width, H heads, G key-value heads, K head size, V that of values, F MLP width.
"""

from dataclasses import dataclass

from jaxopt_llm.execution.stacks import KEPT_BY, QKV, RematConfig
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.intermediates import Intermediate


@dataclass(frozen=True)
class Block:
    """elements: of each intermediate, per token. weights: on this device, of the product that makes it.
    residual: elements of the residual stream per token, divided under sequence parallelism."""

    elements: dict[Intermediate, float]
    weights: dict[Intermediate, float]
    residual: float

    @classmethod
    def of(cls, model: ModelConfig, tensor: int, sequence_parallel: bool) -> "Block":
        width, heads, mlp = model.width, model.heads / tensor, _mlp_width(model) / tensor
        # Fewer key-value heads than devices rest and are computed whole on each.
        kv_heads = model.kv_heads / (tensor if model.kv_heads >= tensor else 1)
        queries, mixed = heads * model.head_dim, heads * model.value_dim
        keys, values = kv_heads * model.key_dim, kv_heads * model.value_dim
        latent, query_latent = model.latent_rank, model.latent_rank and model.query_rank
        shared = model.rotary_head_dim if latent else 0  # latents and what heads share are whole on each device
        residual = width / tensor if sequence_parallel else width
        gate = mlp if model.mlp != "gelu" else 0.0
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
                "mlp_input": width,
                "mlp_gate": gate,
                "mlp_up": mlp,
                "mlp_output": residual,
            },
            weights={
                "query_latent": width * query_latent,
                "latent": width * latent,
                "rotary_key": width * shared,
                "query": (query_latent or width) * queries,
                "key": (latent or width) * keys,
                "value": (latent or width) * values,
                "attention_output": mixed * width,
                "mlp_gate": width * gate,
                "mlp_up": width * mlp,
                "mlp_output": mlp * width,
            },
            residual=residual,
        )


def _mlp_width(model: ModelConfig) -> float:
    """Of the MLPs that a token meets in a layer, the mean over the layers."""
    mixed = sum(model.has_experts(layer) for layer in range(model.layers)) / model.layers
    met = model.experts_per_token * model.expert_width + model.shared_expert_width
    return mixed * met + (1 - mixed) * model.mlp_width


def kept(remat: RematConfig, model: ModelConfig) -> frozenset[Intermediate]:
    """What the backward finds of a block on the device, its input among it."""
    policy = KEPT_BY[remat.policy] if isinstance(remat.policy, str) else remat.policy
    names: set[Intermediate] = {"block_input", *policy} - set(remat.offload)
    # Nothing but a norm after the MLP reads its output again.
    return frozenset(names - (set() if _reads_mlp_output(model) else {"mlp_output"}))


def recomputed(remat: RematConfig, model: ModelConfig) -> frozenset[Intermediate]:
    """What the backward computes again of what a product or attention makes."""
    wanted: set[Intermediate] = {*QKV, "attention", "attention_output", "mlp_gate", "mlp_up"}
    if _reads_mlp_output(model):
        wanted.add("mlp_output")
    return frozenset(wanted - kept(remat, model) - set(remat.offload))


def _reads_mlp_output(model: ModelConfig) -> bool:
    return model.norm_placement in ("post", "both")
