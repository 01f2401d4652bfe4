"""Settings of a Mixture-of-Experts (MoE) model."""

from dataclasses import dataclass
from typing import Literal

from jaxopt_llm.config.metadata import AT_LEAST_ONE, NON_NEGATIVE, POSITIVE, find_out_of_range, setting

MAX_EXPERTS = 200_000  # over all layers: a Hugging Face folder lists the tensors of every expert


@dataclass(frozen=True)
class MoEConfig:
    experts: int = setting(0, resume="never", bounds=NON_NEGATIVE)
    """Number of experts (MLPs) in each MoE layer; a router chooses among them for each token. 0 = a dense model."""
    experts_per_token: int = setting(2, bounds=AT_LEAST_ONE)
    """Number of experts that the router chooses for each token (top-k; num_experts_per_tok)."""
    expert_width: int = setting(384, resume="never", bounds=AT_LEAST_ONE)
    """Hidden size of each expert (moe_intermediate_size)."""
    shared_expert_width: int = setting(0, resume="never", bounds=NON_NEGATIVE)
    """Hidden size of the shared expert, an MLP that every token passes in addition to the chosen experts (DeepSeek,
    Qwen2-MoE). 0 = no shared expert."""
    dense_layers: int = setting(0, resume="never", bounds=NON_NEGATIVE)
    """Number of layers at the start of the model that have one MLP and no experts (DeepSeek: first_k_dense_replace)."""
    expert_every: int = setting(1, resume="never", bounds=AT_LEAST_ONE)
    """A layer after dense_layers has experts if its number, counted from 1 at the start of the model, is a multiple of
    this (decoder_sparse_step). 1 = all layers after dense_layers."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Function from router logits to scores: softmax over all experts (Mixtral), or sigmoid of each logit (DeepSeek-V3:
    scoring_func)."""
    router_renormalises: bool = True
    """Divide the scores of the chosen experts by their sum (norm_topk_prob)."""
    router_scale: float = setting(1.0, bounds=POSITIVE)
    """Factor of the scores of the chosen experts, after router_renormalises (DeepSeek: routed_scaling_factor)."""
    router_groups: int = setting(1, bounds=AT_LEAST_ONE)
    """Number of groups of consecutive experts (DeepSeek: n_group). The router first chooses groups for a token, then
    experts within them. A group's score is its best expert's (DeepSeek-V2) or, with router=sigmoid, the sum of its two
    best (DeepSeek-V3). 1 = no groups."""
    router_groups_per_token: int = setting(1, bounds=AT_LEAST_ONE)
    """Number of groups that the router chooses for each token (DeepSeek: topk_group)."""
    router_bias: bool = setting(False, resume="never")
    """Add a bias that follows the load to the scores when experts are chosen, but not to their weights: load balancing
    without an auxiliary loss (DeepSeek-V3; Wang et al. 2024). Use it with balance_loss or instead of it."""
    router_bias_rate: float = setting(0.001, in_pretrained=False, bounds=NON_NEGATIVE)
    """With router_bias: change of the bias per step, up for an expert with less than the mean load of the batch and
    down for an expert with more."""
    balance_loss: float = setting(0.01, in_pretrained=False, bounds=NON_NEGATIVE)
    """Weight of the load-balancing loss of each MoE layer's router, which is 1 for an even load (Switch, Fedus et al.
    2022; router_aux_loss_coef). 0 = off."""
    router_z_loss: float = setting(0.0, in_pretrained=False, bounds=NON_NEGATIVE)
    """Weight of the router z-loss: log(Z)² per token, where Z is the denominator of the router's softmax (ST-MoE, Zoph
    et al. 2022, uses 0.001). 0 = off."""
    capacity_factor: float = setting(0.0, in_pretrained=False, bounds=NON_NEGATIVE)
    """Capacity factor: each expert takes from a sequence at most this many times its even share of the choices, keeps
    the first ones and drops the others (Switch). 0 = no choice is dropped."""

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer is an MoE layer."""
        return self.experts > 0 and layer >= self.dense_layers and (layer + 1) % self.expert_every == 0

    def problems(self, layers: int) -> list[str]:
        """List the errors in this section. layers: number of layers of the model."""
        found = find_out_of_range("model.moe", self)
        if not self.experts or found:
            return found
        chosen, experts = self.experts_per_token, self.experts
        if chosen > experts:
            found.append(f"model.moe.experts_per_token={chosen}: must be at most model.moe.experts={experts}")
        if chosen == 1 and self.router_renormalises:
            found.append(
                "model.moe.router_renormalises=True: with model.moe.experts_per_token=1 every weight is 1, so the "
                "router gets no gradient from the loss; set --model.moe.router-renormalises False, as Switch does"
            )
        found += self._group_problems()
        if experts * layers > MAX_EXPERTS:
            found.append(f"model.moe.experts={experts} × model.layers={layers}: must be at most {MAX_EXPERTS:,}")
        if not self.dense_layers < layers:
            found.append(f"model.moe.dense_layers={self.dense_layers}: must be below model.layers={layers}")
        if 0 < self.capacity_factor < 1:
            found.append(f"model.moe.capacity_factor={self.capacity_factor}: must be at least 1, or 0 to drop none")
        if not found and not any(map(self.has_experts, range(layers))):
            found.append(
                f"model.moe.experts={experts}: no layer has experts with "
                f"model.moe.expert_every={self.expert_every}, model.moe.dense_layers={self.dense_layers} and "
                f"model.layers={layers}; set a smaller --model.moe.expert-every or --model.moe.dense-layers"
            )
        return found

    def _group_problems(self) -> list[str]:
        groups, chosen, experts = self.router_groups, self.router_groups_per_token, self.experts
        if chosen > groups:
            return [f"model.moe.router_groups_per_token={chosen}: must be at most model.moe.router_groups={groups}"]
        if experts % groups:
            return [f"model.moe.experts={experts}: must be a multiple of model.moe.router_groups={groups}"]
        size, found = experts // groups, []
        if chosen * size < self.experts_per_token and groups > 1:
            found.append(
                f"model.moe.experts_per_token={self.experts_per_token}: exceeds the {chosen * size} experts of "
                f"model.moe.router_groups_per_token={chosen} of {groups} groups; lower it, or raise "
                "--model.moe.router-groups-per-token"
            )
        if groups > 1 and size == 1 and self.router == "sigmoid":
            found.append(
                f"model.moe.router_groups={groups}: with model.moe.router=sigmoid a group's score is the sum of its "
                f"two best experts, and each group of model.moe.experts={experts} has only one; set "
                f"--model.moe.router-groups to at most {experts // 2}"
            )
        return found
