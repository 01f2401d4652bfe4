"""Settings of the model: one decoder that covers many families.

The families are Llama, Mistral, Mixtral, Qwen, DeepSeek-V2/V3, Gemma 2, Phi-3, OLMo 2, OLMoE, SmolLM3 and GPT-2/3.
"""

import math
from dataclasses import dataclass
from typing import Literal

from jaxopt_llm.config.metadata import setting

Kind = Literal["global", "sliding", "global_nope"]
MAX_LAYERS = 10_000  # the layout lists every layer
MAX_EXPERTS = 200_000  # over all layers: a Hugging Face folder lists the tensors of every expert


@dataclass(frozen=True)
class ModelConfig:
    pretrained: str = setting("", resume="freely", in_pretrained=False)
    """Folder of a Hugging Face model, or directory of a run of this program, to start from. The initial parameters are
    its weights (of a run: its last checkpoint). Its config.json sets all fields of this section except last_layers,
    expert_capacity, balance_loss, router_z_loss and router_bias_rate. Empty = random initial parameters."""
    vocabulary_size: int = setting(258, resume="never")
    """Number of token ids (vocab_size). The byte tokenizer has 258."""
    width: int = setting(128, resume="never")
    """Size of the residual stream (hidden_size)."""
    layers: int = setting(4, resume="never")
    """Number of blocks (num_hidden_layers)."""
    last_layers: int = setting(0, resume="never", in_pretrained=False)
    """Number of layers at the end that form a separate stack, so that path patterns can select them, as segment_1/*
    if the length of model.pattern divides the number of the other layers. 0 = none."""
    heads: int = setting(4, resume="never")
    """Number of query heads (num_attention_heads)."""
    kv_heads: int = setting(2, resume="never")
    """Number of key-value heads, each shared by heads / kv_heads query heads (GQA; num_key_value_heads)."""
    head_dim: int = setting(32, resume="never")
    """Size of each query and key head, and of each value head if latent_rank is 0. Must be even, because RoPE rotates
    pairs of values."""
    latent_rank: int = setting(0, resume="never")
    """Size of the latent vector from which keys and values are projected (multi-head latent attention, MLA, of
    DeepSeek-V2: kv_lora_rank). Generation caches only this vector and rotary_head_dim values per token. 0 = keys and
    values are projected from the residual stream."""
    query_rank: int = setting(0, resume="never")
    """With latent_rank: size of the latent vector from which queries are projected (q_lora_rank). 0 = queries are
    projected from the residual stream."""
    rotary_head_dim: int = setting(16, resume="never")
    """With latent_rank: size of the last part of each query and key head, the only one that RoPE rotates. All heads
    share one key for it (qk_rope_head_dim)."""
    value_head_dim: int = setting(32, resume="never")
    """With latent_rank: size of each value head (v_head_dim)."""
    mlp_width: int = setting(384, resume="never")
    """Hidden size of the MLP (intermediate_size)."""
    experts: int = setting(0, resume="never")
    """Number of experts (MLPs) in each MoE layer; a router chooses among them for each token. 0 = a dense model."""
    experts_per_token: int = 2
    """Number of experts that the router chooses for each token (top-k; num_experts_per_tok)."""
    expert_width: int = setting(384, resume="never")
    """Hidden size of each expert (moe_intermediate_size)."""
    shared_expert_width: int = setting(0, resume="never")
    """Hidden size of the shared expert, an MLP that every token passes in addition to the chosen experts (DeepSeek,
    Qwen2-MoE). 0 = no shared expert."""
    dense_layers: int = setting(0, resume="never")
    """Number of layers at the start of the model that have one MLP and no experts (DeepSeek: first_k_dense_replace)."""
    expert_every: int = setting(1, resume="never")
    """A layer after dense_layers has experts if its number, counted from 1 at the start of the model, is a multiple of
    this (decoder_sparse_step). 1 = all layers after dense_layers."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Function from router logits to scores: softmax over all experts (Mixtral), or sigmoid of each logit (DeepSeek-V3:
    scoring_func)."""
    router_renormalises: bool = True
    """Divide the scores of the chosen experts by their sum (norm_topk_prob)."""
    router_scale: float = 1.0
    """Factor of the scores of the chosen experts, after router_renormalises (DeepSeek: routed_scaling_factor)."""
    router_groups: int = 1
    """Number of groups of consecutive experts (DeepSeek: n_group). The router first chooses groups for a token, then
    experts within them. A group's score is its best expert's (DeepSeek-V2) or, with router=sigmoid, the sum of its two
    best (DeepSeek-V3). 1 = no groups."""
    router_groups_per_token: int = 1
    """Number of groups that the router chooses for each token (DeepSeek: topk_group)."""
    router_bias: bool = setting(False, resume="never")
    """Add a bias that follows the load to the scores when experts are chosen, but not to their weights: load balancing
    without an auxiliary loss (DeepSeek-V3; Wang et al. 2024). Use it with balance_loss or instead of it."""
    router_bias_rate: float = setting(0.001, in_pretrained=False)
    """With router_bias: change of the bias per step, up for an expert with less than the mean load of the batch and
    down for an expert with more."""
    balance_loss: float = setting(0.01, in_pretrained=False)
    """Weight of the load-balancing loss of each MoE layer's router, which is 1 for an even load (Switch, Fedus et al.
    2022; router_aux_loss_coef). 0 = off."""
    router_z_loss: float = setting(0.0, in_pretrained=False)
    """Weight of the router z-loss: log(Z)² per token, where Z is the denominator of the router's softmax (ST-MoE, Zoph
    et al. 2022, uses 0.001). 0 = off."""
    expert_capacity: float = setting(0.0, in_pretrained=False)
    """Capacity factor: each expert takes from a sequence at most this many times its even share of the choices, keeps
    the first ones and drops the others (Switch). 0 = no choice is dropped."""
    pattern: tuple[Kind, ...] = setting(("global",), resume="never")
    """Attention of successive blocks, repeated over the model. global: attend to the whole document; sliding: attend to
    the last `window` tokens; global_nope: global without RoPE (SmolLM3)."""
    window: int = 128
    """Tokens that a sliding block attends to, including the current one (sliding_window)."""
    positions: Literal["rotary", "learned"] = setting("rotary", resume="never")
    """Position encoding. rotary: RoPE on queries and keys in all blocks except global_nope; learned: a row of a table
    is added to the embedding (GPT-2)."""
    max_positions: int = setting(1024, resume="never")
    """With positions=learned: rows of the table, and so the maximum sequence length (n_positions)."""
    rope_theta: float = 10_000.0
    """Base of the RoPE frequencies."""
    rope_scaling: Literal["llama3", "yarn"] = "llama3"
    """Interpolation by which rope_factor lowers the RoPE frequencies between the two bounds below. llama3: by the
    number of turns (Llama 3.1); yarn: by the index of the frequency (YaRN, DeepSeek; published bounds 1 and 32)."""
    rope_factor: float = 1.0
    """Factor by which low RoPE frequencies are lowered, for sequences this many times longer. 1 = no scaling."""
    rope_low_frequency_factor: float = 1.0
    """A frequency with at most this many turns in rope_original_length tokens is lowered by the full rope_factor
    (low_freq_factor; YaRN: beta_slow)."""
    rope_high_frequency_factor: float = 4.0
    """A frequency with at least this many turns in rope_original_length tokens stays unchanged; between the two bounds
    the factor is interpolated (high_freq_factor; YaRN: beta_fast)."""
    rope_original_length: int = 8192
    """Sequence length before RoPE scaling, in tokens (original_max_position_embeddings)."""
    rope_mscale: float = 1.0
    """With rope_scaling=yarn: rotated queries and keys are multiplied by (1 + 0.1 × rope_mscale × log(rope_factor)) /
    (1 + 0.1 × rope_mscale_all_dim × log(rope_factor)) (DeepSeek: mscale)."""
    rope_mscale_all_dim: float = 0.0
    """With rope_scaling=yarn: attention scores are multiplied by the square of 1 + 0.1 × rope_mscale_all_dim ×
    log(rope_factor) (DeepSeek: mscale_all_dim)."""
    norm: Literal["rms", "layer"] = setting("rms", resume="never")
    """Type of norm. rms: divide by the root mean square (RMSNorm); layer: also subtract the mean before and add a bias
    after (LayerNorm)."""
    norm_placement: Literal["pre", "post", "both"] = setting("pre", resume="never")
    """Position of the norms in each sublayer. pre: its input; post: its output, before it is added to the residual
    stream (OLMo 2); both: its input and its output (Gemma 2)."""
    norm_zero_centered: bool = False
    """Store norm scales as their difference from 1, as Gemma's checkpoints do."""
    norm_epsilon: float = 1e-5
    """Value that norms add to the mean square (rms_norm_eps)."""
    qk_norm: Literal["none", "head", "projection"] = setting("none", resume="never")
    """Norms of queries and keys before RoPE. head: of each head (Qwen3); projection: of all heads together (OLMo 2);
    none: no norms."""
    biases: Literal["none", "qkv", "all"] = setting("none", resume="never")
    """Projections with a bias. none: no projection; qkv: the query, key and value projections (Qwen2); all: every
    projection of the blocks (GPT-2)."""
    mlp: Literal["swiglu", "geglu", "gelu"] = setting("swiglu", resume="never")
    """Type of MLP. swiglu and geglu: the hidden layer is gated with SiLU or GELU of a second projection; gelu: GELU of
    one projection, without a gate. GELU is the tanh approximation."""
    attention_scale: float = 0.0
    """Factor of the attention scores. 0 = 1 / sqrt(head_dim)."""
    attention_softcap: float = 0.0
    """Smooth bound of the attention scores, to ± this (Gemma 2: attn_logit_softcapping). 0 = off."""
    logit_softcap: float = 0.0
    """Smooth bound of the logits, to ± this (Gemma 2: final_logit_softcapping). 0 = off."""
    scale_embedding: bool = False
    """Multiply embeddings by sqrt(width) (Gemma)."""
    tied_head: bool = setting(True, resume="never")
    """Use the embedding table as the output head (tie_word_embeddings)."""

    @property
    def turned_dim(self) -> int:
        """Size of the part of head_dim that RoPE rotates."""
        return self.rotary_head_dim if self.latent_rank else self.head_dim

    @property
    def key_dim(self) -> int:
        """Size of the part of head_dim in which key heads have their own keys."""
        return self.head_dim - self.rotary_head_dim if self.latent_rank else self.head_dim

    @property
    def value_dim(self) -> int:
        return self.value_head_dim if self.latent_rank else self.head_dim

    @property
    def period(self) -> int:
        """Number of layers after which the kinds of layers repeat."""
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
        if self.layers > MAX_LAYERS:
            found.append(f"model.layers={self.layers}: must be at most {MAX_LAYERS:,}")
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
                found.append("model.pattern: global_nope requires model.positions=rotary; write global")
            if self.rope_factor > 1:
                found.append(
                    f"model.rope_factor={self.rope_factor}: has no effect with model.positions=learned; set "
                    "--model.rope-factor 1"
                )
        if self.kv_heads >= 1 and self.heads % self.kv_heads:
            found.append(f"model.heads={self.heads}: must be a multiple of model.kv_heads={self.kv_heads}")
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
                f"model.kv_heads={self.kv_heads}: with model.latent_rank each query head has its own keys; set "
                f"--model.kv-heads {self.heads}"
            )
        found += [
            f"model.{name}={getattr(self, name)}: must be {required} with model.latent_rank"
            for name, required in (("positions", "rotary"), ("norm", "rms"), ("qk_norm", "none"), ("biases", "none"))
            if getattr(self, name) != required
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
                "model.router_renormalises=True: with model.experts_per_token=1 every weight is 1, so the router gets "
                "no gradient from the loss; set --model.router-renormalises False, as Switch does"
            )
        found += self._group_problems()
        if self.experts * self.layers > MAX_EXPERTS:
            found.append(f"model.experts={self.experts} × model.layers={self.layers}: must be at most {MAX_EXPERTS:,}")
        if self.shared_expert_width < 0:
            found.append(f"model.shared_expert_width={self.shared_expert_width}: must be at least 0")
        if not self.router_scale > 0:
            found.append(f"model.router_scale={self.router_scale}: must be above 0")
        if not 0 <= self.dense_layers < self.layers:
            found.append(
                f"model.dense_layers={self.dense_layers}: must be at least 0, and below model.layers={self.layers}"
            )
        if self.expert_capacity < 0 or 0 < self.expert_capacity < 1:
            found.append(
                f"model.expert_capacity={self.expert_capacity}: must be at least 1, or 0 to drop no choices; below 1, "
                "some choices are dropped even if the load is even"
            )
        found += [
            f"model.{name}={getattr(self, name)}: must be at least 0"
            for name in ("balance_loss", "router_z_loss", "router_bias_rate")
            if getattr(self, name) < 0
        ]
        if not found and not any(map(self.has_experts, range(self.layers))):
            found.append(
                f"model.experts={self.experts}: no layer has experts with model.expert_every={self.expert_every}, "
                f"model.dense_layers={self.dense_layers} and model.layers={self.layers}; set a smaller "
                "--model.expert-every or --model.dense-layers"
            )
        if self.biases == "all":
            found.append("model.biases=all: experts have no biases; set --model.biases none or qkv")
        return found

    def _group_problems(self) -> list[str]:
        groups, chosen, experts = self.router_groups, self.router_groups_per_token, self.experts
        if not 1 <= chosen <= groups:
            return [
                f"model.router_groups_per_token={chosen}: must be at least 1, and at most model.router_groups={groups}"
            ]
        if experts % groups:
            return [f"model.experts={experts}: must be a multiple of model.router_groups={groups}"]
        size, found = experts // groups, []
        if chosen * size < self.experts_per_token and groups > 1:
            found.append(
                f"model.experts_per_token={self.experts_per_token}: exceeds the {chosen * size} experts of "
                f"model.router_groups_per_token={chosen} of {groups} groups; lower it, or raise "
                "--model.router-groups-per-token"
            )
        if groups > 1 and size == 1 and self.router == "sigmoid":
            found.append(
                f"model.router_groups={groups}: with model.router=sigmoid a group's score is the sum of its two best "
                f"experts, and each group of model.experts={experts} has only one; set --model.router-groups to at "
                f"most {experts // 2}"
            )
        return found
