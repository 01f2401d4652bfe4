"""ModelConfig: one decoder whose switches cover Llama, Mistral, Mixtral, Qwen, DeepSeek-V2/V3, Gemma 2, Phi-3, OLMo 2,
OLMoE, SmolLM3 and GPT-2/3."""

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["global", "sliding", "global_nope"]
MOST_LAYERS = 10_000  # a layout names every layer
MOST_EXPERTS = 200_000  # of all layers, whose tensors a folder names


@dataclass(frozen=True)
class ModelConfig:
    pretrained: str = ""
    """folder of a Hugging Face model, or directory of a run of ours: initial parameters come from its weights, of a run
    its last checkpoint's, every other field of this section but last_layers, balance_loss, router_z_loss and
    router_bias_rate from its config.json"""
    vocabulary_size: int = 258
    """token ids; the byte tokenizer has 258"""
    width: int = 128
    """size of the residual stream"""
    layers: int = 4
    """number of blocks"""
    last_layers: int = 0
    """so many layers at the end are a stack of their own, which patterns of paths can tell from the others: segment_1/*
    where the pattern divides those"""
    heads: int = 4
    """query heads"""
    kv_heads: int = 2
    """key-value heads, each shared by heads / kv_heads query heads"""
    head_dim: int = 32
    """size of one head's queries and keys, and of its values where model.latent_rank is 0; even, because rotary
    positions turn pairs"""
    latent_rank: int = 0
    """keys and values are projections of a vector of this size, which is all that generation keeps of a token beside
    rotary_head_dim (multi-head latent attention, DeepSeek-V2: kv_lora_rank); 0: each has its own of the residual
    stream"""
    query_rank: int = 0
    """with latent_rank: queries are projections of a vector of this size (q_lora_rank); 0: of the residual stream"""
    rotary_head_dim: int = 16
    """with latent_rank: the last so many of head_dim are turned by positions, and all heads have one key for them
    (qk_rope_head_dim)"""
    value_head_dim: int = 32
    """with latent_rank: size of one head's values (v_head_dim)"""
    mlp_width: int = 384
    """hidden size of the MLP"""
    experts: int = 0
    """MLPs of a layer that has a mixture of them, of which a router chooses for each token; 0: no layer has"""
    experts_per_token: int = 2
    """how many are chosen"""
    expert_width: int = 384
    """hidden size of each"""
    shared_expert_width: int = 0
    """hidden size of an MLP beside the experts that every token passes; 0: there is none"""
    dense_layers: int = 0
    """so many layers at the beginning have one MLP, no experts"""
    expert_every: int = 1
    """of the others the last of every so many layers has experts, counted from the model's beginning"""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """what makes scores of a router's logits: over all experts (Mixtral), or of each by itself (DeepSeek-V3)"""
    router_renormalises: bool = True
    """whether the scores of the chosen experts are divided by their sum"""
    router_scale: float = 1.0
    """then multiplies them"""
    router_groups: int = 1
    """experts lie in so many groups, in their order, of which a token chooses before it chooses experts of these: by
    each group's best score (DeepSeek-V2), with router=sigmoid by the sum of its two best (DeepSeek-V3)"""
    router_groups_per_token: int = 1
    """how many groups are chosen"""
    router_bias: bool = False
    """whether experts are chosen, not weighed, by score + a bias that follows the load, as beside or in place of
    balance_loss (DeepSeek-V3)"""
    router_bias_rate: float = 0.001
    """a step adds as much to the bias of an expert with less than the mean load of its batch, and takes it from one
    with more"""
    balance_loss: float = 0.01
    """times what a layer's router loses by an uneven load, 1 where it is even, is minimised beside the loss"""
    router_z_loss: float = 0.0
    """times log(Z)² of each token, Z being the sum of the router's softmax, likewise: 0.001 in the paper (ST-MoE)"""
    expert_capacity: float = 0.0
    """of a sequence each expert takes at most so many times its even share of the choices, the first of them, and drops
    what is beyond (Switch); 0: drops nothing"""
    pattern: tuple[Kind, ...] = ("global",)
    """attention of successive blocks, repeated: global sees the whole document, sliding the last `window` tokens,
    global_nope is global without rotary positions (SmolLM3)"""
    window: int = 128
    """tokens that a sliding block sees, its own among them"""
    positions: Literal["rotary", "learned"] = "rotary"
    """rotary turns queries and keys in every block but the nope ones; learned adds a row of a table to the embedding
    (GPT-2)"""
    max_positions: int = 1024
    """rows of the table of learned positions; no sequence may be longer"""
    rope_theta: float = 10_000.0
    """base of the rotary frequencies"""
    rope_scaling: Literal["llama3", "yarn"] = "llama3"
    """how rope_factor slows frequencies down between the two bounds below: by their turns (Llama 3.1), or by their
    number (YaRN: DeepSeek), of which the published bounds are 1 and 32"""
    rope_factor: float = 1.0
    """slows the low rotary frequencies down, as for sequences so many times longer; 1 scales none"""
    rope_low_frequency_factor: float = 1.0
    """turns in rope_original_length tokens up to which a frequency is slowed down by all of rope_factor"""
    rope_high_frequency_factor: float = 4.0
    """turns in rope_original_length tokens from which a frequency stays as it is; in between the two are mixed"""
    rope_original_length: int = 8192
    """tokens of a sequence before the frequencies were scaled"""
    rope_mscale: float = 1.0
    """with yarn: what is turned grows by 1 + this × 0.1 log(rope_factor), over the same of rope_mscale_all_dim"""
    rope_mscale_all_dim: float = 0.0
    """with yarn: attention scores grow by the square of 1 + this × 0.1 log(rope_factor)"""
    norm: Literal["rms", "layer"] = "rms"
    """rms divides by the root mean square; layer subtracts the mean before, and adds a bias after"""
    norm_placement: Literal["pre", "post", "both"] = "pre"
    """of a sublayer's input, of its output before it joins the residual stream (OLMo 2), or both (Gemma 2)"""
    norm_zero_centered: bool = False
    """whether norm scales are kept as their distance from 1, as in Gemma's checkpoints"""
    norm_epsilon: float = 1e-5
    """added to the mean square in norms"""
    qk_norm: Literal["none", "head", "projection"] = "none"
    """norms of queries and keys before they are turned: of each head (Qwen3), or of all heads together (OLMo 2)"""
    biases: Literal["none", "qkv", "all"] = "none"
    """of the query, key and value projections (Qwen2), or of every projection of the blocks (GPT-2)"""
    mlp: Literal["swiglu", "geglu", "gelu"] = "swiglu"
    """swiglu and geglu gate the hidden layer with SiLU or GELU of a second projection; gelu has that one alone. GELU is
    the tanh form"""
    attention_scale: float = 0.0
    """factor of the attention scores; 0 stands for 1 / sqrt(head_dim)"""
    attention_softcap: float = 0.0
    """bounds attention scores smoothly to ± this (Gemma 2); 0 does not"""
    logit_softcap: float = 0.0
    """bounds logits smoothly to ± this (Gemma 2); 0 does not"""
    scale_embedding: bool = False
    """whether embeddings are multiplied by sqrt(width) (Gemma)"""
    tied_head: bool = True
    """whether the embedding table is the head"""

    @property
    def turned_dim(self) -> int:
        """Of head_dim, what rotary positions turn."""
        return self.rotary_head_dim if self.latent_rank else self.head_dim

    @property
    def key_dim(self) -> int:
        """Of head_dim, what each key head has of its own."""
        return self.head_dim - self.rotary_head_dim if self.latent_rank else self.head_dim

    @property
    def value_dim(self) -> int:
        return self.value_head_dim if self.latent_rank else self.head_dim

    @property
    def period(self) -> int:
        """After so many layers kinds repeat."""
        return math.lcm(len(self.pattern), self.expert_every if self.experts else 1)

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and layer >= self.dense_layers and (layer + 1) % self.expert_every == 0

    def problems(self) -> list[str]:
        sizes = ("vocabulary_size", "width", "layers", "heads", "kv_heads", "head_dim", "mlp_width", "window")
        found = [
            f"model.{name}={getattr(self, name)}: must be at least 1"
            for name in (*sizes, "max_positions", "rope_factor", "rope_original_length")
            if getattr(self, name) < 1
        ]
        if self.layers > MOST_LAYERS:
            found.append(f"model.layers={self.layers}: must be at most {MOST_LAYERS:,}")
        found += [
            f"model.{name}={getattr(self, name)}: must be above 0"
            for name in ("rope_theta", "norm_epsilon", "rope_low_frequency_factor")
            if not getattr(self, name) > 0
        ]
        found += [
            f"model.{name}={getattr(self, name)}: must be at least 0"
            for name in ("attention_scale", "attention_softcap", "logit_softcap", "rope_mscale", "rope_mscale_all_dim")
            if getattr(self, name) < 0
        ]
        if self.rope_scaling == "yarn" and not self.rope_theta > 1:
            found.append(f"model.rope_theta={self.rope_theta}: must be above 1 with model.rope_scaling=yarn")
        if self.rope_high_frequency_factor <= self.rope_low_frequency_factor:
            found.append(
                f"model.rope_high_frequency_factor={self.rope_high_frequency_factor}: must be above "
                f"model.rope_low_frequency_factor={self.rope_low_frequency_factor}"
            )
        if not 0 <= self.last_layers < max(self.layers, 1):
            found.append(
                f"model.last_layers={self.last_layers}: must be at least 0, and below model.layers={self.layers}"
            )
        found += self._expert_problems() if self.experts else []
        found += self._latent_problems() if self.latent_rank else []
        if not self.pattern:
            found.append("model.pattern: must name at least one kind of block")
        if self.positions == "learned":
            if "global_nope" in self.pattern:
                found.append("model.pattern: with model.positions=learned no block is rotary; write global")
            if self.rope_factor > 1:
                found.append(f"model.rope_factor={self.rope_factor}: scales nothing with model.positions=learned")
        if self.kv_heads >= 1 and self.heads % self.kv_heads:
            found.append(f"model.heads={self.heads} does not divide by model.kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            found.append(f"model.head_dim={self.head_dim}: must be even")
        return found

    def _latent_problems(self) -> list[str]:
        found = [
            f"model.{name}={getattr(self, name)}: must be at least {least}"
            for name, least in (("latent_rank", 0), ("query_rank", 0), ("value_head_dim", 1))
            if getattr(self, name) < least
        ]
        if not 0 < self.rotary_head_dim < self.head_dim or self.rotary_head_dim % 2:
            found.append(
                f"model.rotary_head_dim={self.rotary_head_dim}: must be even, above 0 and below "
                f"model.head_dim={self.head_dim}"
            )
        if self.kv_heads != self.heads:
            found.append(
                f"model.kv_heads={self.kv_heads}: with model.latent_rank each query head has keys of its own; set "
                f"{self.heads}"
            )
        found += [
            f"model.{name}={getattr(self, name)}: model.latent_rank goes with {only} alone"
            for name, only in (("positions", "rotary"), ("norm", "rms"), ("qk_norm", "none"), ("biases", "none"))
            if getattr(self, name) != only
        ]
        return found

    def _expert_problems(self) -> list[str]:
        found = [
            f"model.{name}={getattr(self, name)}: must be at least {least}"
            for name, least in (("experts", 1), ("experts_per_token", 1), ("expert_width", 1), ("expert_every", 1))
            if getattr(self, name) < least
        ]
        if self.experts_per_token > self.experts:
            found.append(
                f"model.experts_per_token={self.experts_per_token}: must be at most model.experts={self.experts}"
            )
        if self.experts_per_token == 1 and self.router_renormalises:
            found.append(
                "model.router_renormalises=True: with model.experts_per_token=1 every weight is 1, and the loss "
                "teaches the router nothing: set False, as Switch has it"
            )
        found += self._group_problems()
        if self.experts * self.layers > MOST_EXPERTS:
            found.append(
                f"model.experts={self.experts}: times model.layers={self.layers} it must be at most {MOST_EXPERTS:,}"
            )
        if self.shared_expert_width < 0 or not self.router_scale > 0:
            found.append("model.shared_expert_width must be at least 0, and model.router_scale above 0")
        if not 0 <= self.dense_layers < self.layers:
            found.append(
                f"model.dense_layers={self.dense_layers}: must be at least 0, and below model.layers={self.layers}"
            )
        if self.expert_capacity < 0 or 0 < self.expert_capacity < 1:
            found.append(
                f"model.expert_capacity={self.expert_capacity}: must be at least 1, or 0 to drop nothing: below 1 some "
                "choices are dropped whatever the router does"
            )
        found += [
            f"model.{name}={getattr(self, name)}: must be at least 0"
            for name in ("balance_loss", "router_z_loss", "router_bias_rate")
            if getattr(self, name) < 0
        ]
        if not found and not any(map(self.has_experts, range(self.layers))):
            found.append(
                f"model.experts={self.experts}: no layer has them with model.expert_every={self.expert_every} and "
                f"model.dense_layers={self.dense_layers} of model.layers={self.layers}"
            )
        if self.biases == "all":
            found.append("model.biases=all: experts have none; take none or qkv")
        return found

    def _group_problems(self) -> list[str]:
        groups, chosen, experts = self.router_groups, self.router_groups_per_token, self.experts
        if not 1 <= chosen <= groups:
            return [
                f"model.router_groups_per_token={chosen}: must be at least 1, and at most model.router_groups={groups}"
            ]
        if experts % groups:
            return [f"model.experts={experts} does not divide into model.router_groups={groups}"]
        size, found = experts // groups, []
        if chosen * size < self.experts_per_token and groups > 1:
            found.append(
                f"model.experts_per_token={self.experts_per_token}: model.router_groups_per_token={chosen} of "
                f"{groups} groups have {chosen * size} experts; set at most that, or more groups per token"
            )
        if groups > 1 and size == 1 and self.router == "sigmoid":
            found.append(
                f"model.router_groups={groups}: with model.router=sigmoid a group's score is that of its two best "
                f"experts, and of model.experts={experts} each would have one; set at most {experts // 2}"
            )
        return found
