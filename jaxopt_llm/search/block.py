"""One block as the arithmetic of memory and of time sees it: sizes per token on one device. Of layers that differ, the
mean.

Letters: D width, H heads, G key-value heads, K head size, V that of values, F MLP width.
"""

from dataclasses import dataclass
from typing import Literal

from jaxopt_llm.config import TrainConfig
from jaxopt_llm.execution.stacks import KEPT_BY, QKV, RematConfig
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.intermediates import Intermediate
from jaxopt_llm.search.mixture import Mixture

# Beside what rematerialisation can name, what a mixture of experts makes: a router's logits, and the rows that experts
# read.
Made = Intermediate | Literal["router", "expert_rows"]
OF_MIXTURES: frozenset[Made] = frozenset({"router", "expert_rows"})


@dataclass(frozen=True)
class Block:
    """elements: of each intermediate, per token. weights: on this device, of the product that makes it, that a token
    meets.
    residual: elements of the residual stream per token, divided under sequence parallelism. dense: the share of layers
    that have an MLP for all tokens, beside experts or without."""

    elements: dict[Made, float]
    weights: dict[Made, float]
    residual: float
    dense: float

    @classmethod
    def of(cls, config: TrainConfig) -> "Block":
        model, tensor, mixture = config.model, config.mesh.tensor, Mixture.of(config)
        width, heads, mlp = model.width, model.heads / tensor, _mlp_width(model, mixture) / tensor
        # Fewer key-value heads than devices rest and are computed whole on each.
        kv_heads = model.kv_heads / (tensor if model.kv_heads >= tensor else 1)
        queries, mixed = heads * model.head_dim, heads * model.value_dim
        keys, values = kv_heads * model.key_dim, kv_heads * model.value_dim
        latent, query_latent = model.latent_rank, model.latent_rank and model.query_rank
        shared = model.rotary_head_dim if latent else 0  # latents and what heads share are whole on each device
        residual = width / tensor if config.sharding.sequence_parallel else width
        gated = model.mlp != "gelu"
        # Of what all layers have on average: of a mixture room for the most rows there can be, products with those that
        # there are.
        inner, rows = model.expert_width / tensor, mixture.share * mixture.rows
        passed = mixture.share * model.experts_per_token
        dense = 1 - mixture.share * (model.shared_expert_width == 0)
        hidden, multiplied = mlp + rows * inner, width * (mlp + passed * inner)
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
                "router": mixture.share * width * model.experts,
            },
            residual=residual,
            dense=dense,
        )


def _mlp_width(model: ModelConfig, mixture: Mixture) -> float:
    """Of the MLPs that all tokens pass."""
    return mixture.share * model.shared_expert_width + (1 - mixture.share) * model.mlp_width


def kept(remat: RematConfig, model: ModelConfig) -> frozenset[Made]:
    """What the backward finds of a block on the device, its input among it."""
    policy = KEPT_BY[remat.policy] if isinstance(remat.policy, str) else remat.policy
    names = {"block_input", *policy} - set(remat.offload)
    # Nothing but a norm after the MLP reads its output again. And no policy names what is a mixture's.
    unread = set() if _reads_mlp_output(model) else {"mlp_output"}
    return frozenset((names - unread) | (set() if remat.checkpoints else OF_MIXTURES))


def recomputed(remat: RematConfig, model: ModelConfig) -> frozenset[Made]:
    """What the backward computes again of what a product or attention makes."""
    wanted: set[Made] = {*QKV, "attention", "attention_output", "mlp_gate", "mlp_up"}
    wanted |= OF_MIXTURES if model.experts else set()
    if _reads_mlp_output(model):
        wanted.add("mlp_output")
    return frozenset(wanted - kept(remat, model) - set(remat.offload))


def _reads_mlp_output(model: ModelConfig) -> bool:
    return model.norm_placement in ("post", "both")
