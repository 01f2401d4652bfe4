"""Settings of the model: one decoder that covers many families.

The families are those of checkpoint/huggingface/find_family.py.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from jaxopt_llm.config.metadata import AT_LEAST_ONE, NON_NEGATIVE, POSITIVE, Bounds, Section, section, setting

# The settings that each kind of scaling reads, in addition to theta, scaling and factor.
READ_BY_SCALING: dict[str, tuple[str, ...]] = {
    "llama3": ("low_frequency_factor", "high_frequency_factor", "original_length"),
    "yarn": (
        *("low_frequency_factor", "high_frequency_factor", "original_length", "attention_factor", "truncate"),
        *("mscale", "mscale_all_dim"),
    ),
    "linear": (),
    "dynamic": ("original_length",),
    "longrope": ("original_length", "attention_factor", "short_factors", "long_factors"),
}


@dataclass(frozen=True)
class RopeConfig(Section, path="model.rope"):
    theta: float = setting(10_000.0, bounds=POSITIVE)
    """Base of the RoPE frequencies."""
    sliding_theta: float = setting(0.0, bounds=NON_NEGATIVE)
    """Base of the RoPE frequencies of sliding layers, which are not scaled (Gemma 3: rope_local_base_freq; OLMo 3). 0 =
    sliding layers have the frequencies of the others."""
    size: int = setting(0, bounds=NON_NEGATIVE)
    """Size of the first part of each head, the only one that RoPE rotates (partial_rotary_factor × head_dim). 0 = the
    whole head."""
    rotated_pairs: int = setting(0, bounds=NON_NEGATIVE)
    """Number of pairs of values, those with the highest frequencies, that RoPE rotates in a head; the others stay
    (Gemma 4: rope_type proportional). Sliding layers with sliding_theta rotate all. 0 = all."""
    interleaved: bool = False
    """Rotate pairs of neighbours, instead of a value of the first half with one of the second half (GLM-4, ERNIE 4.5).
    MLA always does."""
    scaling: Literal["llama3", "yarn", "linear", "dynamic", "longrope"] = "llama3"
    """Scaling of the RoPE frequencies for longer sequences (rope_type). llama3 and yarn interpolate between the two
    bounds below: by the number of turns (Llama 3.1), or by the index of the frequency (YaRN, DeepSeek; published bounds
    1 and 32). linear: divide all frequencies by the factor. dynamic and longrope depend on the length of each document:
    from original_length on, dynamic raises theta with the length (dynamic NTK); longrope divides by long_factors, and
    in shorter documents by short_factors (Phi-3). Each document of a packed row has the frequencies that it has
    alone."""
    factor: float = setting(1.0, bounds=AT_LEAST_ONE)
    """Factor by which low RoPE frequencies are lowered, for sequences this many times longer. longrope only derives
    attention_factor from it. 1 = no scaling, except with dynamic and longrope."""
    low_frequency_factor: float = setting(1.0, bounds=POSITIVE)
    """A frequency with at most this many turns in original_length tokens is lowered by the full factor
    (low_freq_factor; YaRN: beta_slow)."""
    high_frequency_factor: float = 4.0
    """A frequency with at least this many turns in original_length tokens stays unchanged; between the two bounds
    the factor is interpolated (high_freq_factor; YaRN: beta_fast)."""
    original_length: int = setting(8192, bounds=AT_LEAST_ONE)
    """Sequence length before RoPE scaling, in tokens (original_max_position_embeddings; dynamic:
    max_position_embeddings)."""
    attention_factor: float = setting(0.0, bounds=NON_NEGATIVE)
    """With scaling=yarn or longrope: factor of the rotated queries and keys (attention_factor). 0 = as published: yarn
    derives it from factor, mscale and mscale_all_dim; longrope uses √(1 + log(factor) / log(original_length))."""
    truncate: bool = True
    """With scaling=yarn: round the two bounds to whole indices of frequencies (truncate)."""
    short_factors: tuple[float, ...] = ()
    """With scaling=longrope: divisor of each frequency in documents of at most original_length tokens
    (short_factor)."""
    long_factors: tuple[float, ...] = ()
    """With scaling=longrope: divisor of each frequency in longer documents (long_factor)."""
    query_growth: float = setting(0.0, bounds=NON_NEGATIVE)
    """Queries are multiplied by 1 + this × log(1 + floor(position / growth_length)) (Ministral 3: llama_4_scaling_beta;
    Llama 4: attn_scale). 0 = off."""
    growth_layers: Literal["rotary", "nope"] = "rotary"
    """Layers whose queries grow. rotary: those with RoPE (Ministral 3); nope: those without, with positions that count
    from 1 in this factor (Llama 4)."""
    growth_length: int = setting(0, bounds=NON_NEGATIVE)
    """With query_growth: tokens in which the factor stays the same (Llama 4: floor_scale). 0 = original_length."""
    mscale: float = setting(1.0, bounds=NON_NEGATIVE)
    """With scaling=yarn: rotated queries and keys are multiplied by (1 + 0.1 × mscale × log(factor)) /
    (1 + 0.1 × mscale_all_dim × log(factor)) (DeepSeek: mscale)."""
    mscale_all_dim: float = setting(0.0, bounds=NON_NEGATIVE)
    """With scaling=yarn: attention scores are multiplied by the square of 1 + 0.1 × mscale_all_dim ×
    log(factor) (DeepSeek: mscale_all_dim)."""

    @property
    def by_length(self) -> bool:
        """Dependence of the frequencies on the length of a document."""
        return self.scaling in ("dynamic", "longrope")

    @property
    def read_by_growth(self) -> set[str]:
        """Fields that `query_growth` reads whatever the scaling is."""
        return {"original_length"} if self.query_growth and not self.growth_length else set()

    @property
    def is_scaled(self) -> bool:
        """Difference of the embedding from one without scaling."""
        attention_factor = self.attention_factor if self.scaling == "yarn" else 0.0
        return self.factor != 1 or self.by_length or attention_factor not in (0, 1)

    @property
    def magnitude(self) -> float:
        """Factor of rotated queries and keys, which keeps attention as sharp over longer sequences."""
        if self.scaling == "yarn":
            return self.attention_factor or self.yarn_factor(self.mscale) / self.yarn_factor(self.mscale_all_dim)
        if self.scaling == "longrope":
            derived = math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))
            return self.attention_factor or derived
        return 1.0

    def yarn_factor(self, mscale: float) -> float:
        """Return YaRN's attention factor (Peng et al. 2023, section 3.4). mscale: DeepSeek's weight of it."""
        return 1 + 0.1 * mscale * math.log(self.factor)

    def same_frequencies(self, length: int, other: int) -> bool:
        """Return whether documents of two lengths have the same frequencies."""
        if self.scaling == "longrope":
            return (length > self.original_length) == (other > self.original_length)
        return self.scaling != "dynamic" or max(length, self.original_length) == max(other, self.original_length)

    def of_layers(self, kind: str) -> "RopeConfig":
        """Return the settings of the layers of one kind."""
        if kind != "sliding" or not self.sliding_theta:
            return self
        growth = ("query_growth", "growth_layers", "growth_length", "original_length")
        return RopeConfig(
            theta=self.sliding_theta, **{name: getattr(self, name) for name in ("size", "interleaved", *growth)}
        )

    def find_problems(self, rotary_dim: int) -> list[str]:
        """Find problems. rotary_dim: size of the part of a head that is rotated."""
        found = self.find_out_of_range()
        if self.scaling == "yarn" and not self.theta > 1:
            found.append(f"model.rope.theta={self.theta}: must be above 1 with model.rope.scaling=yarn")
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if high < low:  # equal bounds are a step, as in Kimi K2 and Llama 4
            found.append(
                f"model.rope.high_frequency_factor={high}: must be at least model.rope.low_frequency_factor={low}"
            )
        if self.scaling == "dynamic" and rotary_dim <= 2:
            found.append(f"model.rope.scaling=dynamic: needs more than the {rotary_dim} rotated values of a head")
        if self.rotated_pairs > rotary_dim // 2:
            found.append(f"model.rope.rotated_pairs={self.rotated_pairs}: a head has {rotary_dim // 2} pairs")
        return found + (self._longrope_problems(rotary_dim // 2) if self.scaling == "longrope" else [])

    def _longrope_problems(self, pairs: int) -> list[str]:
        found = []
        for name, factors in (("short_factors", self.short_factors), ("long_factors", self.long_factors)):
            if len(factors) != pairs:
                problem = f"{len(factors)} values; scaling=longrope needs one for each of the {pairs} frequencies"
                found.append(f"model.rope.{name}: {problem}")
            elif not all(factor > 0 for factor in factors):
                found.append(f"model.rope.{name}: {min(factors)} must be above 0")
        if self.original_length < 2:
            found.append(f"model.rope.original_length={self.original_length}: must be at least 2 with scaling=longrope")
        return found


@dataclass(frozen=True)
class MLAConfig(Section, path="model.mla"):
    kv_rank: int = setting(0, resume="never", bounds=NON_NEGATIVE)
    """Size of the latent vector that keys and values are projected from (multi-head latent attention, MLA, of
    DeepSeek-V2: kv_lora_rank). Generation caches only this vector and rotary_head_dim values per token. 0 = keys and
    values are projected from the residual stream."""
    query_rank: int = setting(0, resume="never", bounds=NON_NEGATIVE)
    """With kv_rank: size of the latent vector that queries are projected from (q_lora_rank). 0 = queries are projected
    from the residual stream."""
    rotary_head_dim: int = setting(16, resume="never", bounds=AT_LEAST_ONE)
    """With kv_rank: size of the last part of each query and key head, the only one that RoPE rotates. All heads share
    one key for it (qk_rope_head_dim)."""
    value_head_dim: int = setting(32, resume="never", bounds=AT_LEAST_ONE)
    """With kv_rank: size of each value head (v_head_dim)."""

    def find_problems(self, head_dim: int) -> list[str]:
        """List the errors in this section. head_dim: size of each query and key head."""
        found = self.find_out_of_range()
        size = self.rotary_head_dim
        if self.kv_rank and (size >= head_dim or size % 2):
            found.append(f"model.mla.rotary_head_dim={size}: must be even and below model.head_dim={head_dim}")
        return found


@dataclass(frozen=True)
class DeltaConfig(Section, path="model.delta"):
    key_heads: int = setting(2, resume="never", bounds=AT_LEAST_ONE)
    """Number of heads of queries and keys in gated_delta layers, each shared by value_heads / key_heads heads of values
    (linear_num_key_heads)."""
    value_heads: int = setting(4, resume="never", bounds=AT_LEAST_ONE)
    """Number of heads of values, each with a state of its own (linear_num_value_heads)."""
    key_head_dim: int = setting(32, resume="never", bounds=AT_LEAST_ONE)
    """Size of each query and key head (linear_key_head_dim)."""
    value_head_dim: int = setting(32, resume="never", bounds=AT_LEAST_ONE)
    """Size of each value head (linear_value_head_dim)."""
    kernel: int = setting(4, resume="never", bounds=Bounds(minimum=2, maximum=64))
    """Tokens that the convolution of queries, keys and values reads, including the current one
    (linear_conv_kernel_dim)."""

    def problems(self) -> list[str]:
        found = self.find_out_of_range()
        if not found and self.value_heads % self.key_heads:
            problem = f"must be a multiple of model.delta.key_heads={self.key_heads}"
            found.append(f"model.delta.value_heads={self.value_heads}: {problem}")
        return found


MAX_EXPERTS = 200_000  # over all layers: a Hugging Face folder lists the tensors of every expert


@dataclass(frozen=True)
class MoEConfig(Section, path="model.moe"):
    experts: int = setting(0, resume="never", bounds=NON_NEGATIVE)
    """Number of experts (MLPs) in each MoE layer; a router chooses among them for each token. 0 = a dense model."""
    experts_per_token: int = setting(2, bounds=AT_LEAST_ONE)
    """Number of experts that the router chooses for each token (top-k; num_experts_per_tok)."""
    expert_width: int = setting(384, resume="never", bounds=AT_LEAST_ONE)
    """Hidden size of each expert (moe_intermediate_size)."""
    shared_expert_width: int = setting(0, resume="never", bounds=NON_NEGATIVE)
    """Hidden size of the shared expert, an MLP that every token passes in addition to the chosen experts (DeepSeek,
    Qwen2-MoE). 0 = no shared expert."""
    shared_expert_gate: bool = setting(False, resume="never")
    """Multiply the output of the shared expert by the sigmoid of a projection of its input to one value
    (Qwen2-MoE)."""
    own_norms: bool = setting(False, resume="never")
    """Use separate norms for the inputs of the experts, of their router and of the shared expert, and for the outputs
    of the experts and of the shared expert (Gemma 4). The router's logits are divided by the root of the width."""
    expert_scales: bool = setting(False, resume="never")
    """Multiply the weight of each expert by a learned factor (Gemma 4: per_expert_scale)."""
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
    router_weighs: Literal["outputs", "inputs"] = "outputs"
    """What the scores of the chosen experts multiply: the experts' outputs, or their inputs (Llama 4)."""
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

    def find_problems(self, layers: int) -> list[str]:
        """List the errors in this section. layers: number of layers of the model."""
        found = self.find_out_of_range()
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
        if self.own_norms and not self.shared_expert_width:
            found.append("model.moe.own_norms=True: there is no shared expert; set --model.moe.shared-expert-width")
        if self.own_norms and self.shared_expert_gate:
            found.append("model.moe.shared_expert_gate=True: must be False with model.moe.own_norms=True")
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


Kind = Literal["global", "sliding", "global_nope", "chunked", "gated_delta"]
GATED_DELTA: Final = "gated_delta"  # the kind of layers without attention
WINDOWED = ("sliding", "chunked")  # the kinds of layers that read `window`
GATED = ("swiglu", "geglu", "clamped_swiglu")  # the values of `mlp` with a gate projection
MAX_LAYERS = 10_000  # the layout lists every layer


@dataclass(frozen=True)
class ModelConfig(Section, path="model"):
    pretrained: str = setting("", resume="freely", in_pretrained=False)
    """Model to start from: folder of a Hugging Face model, its id on the Hugging Face hub (org/name or
    org/name@revision), or directory of a run of this program. The initial parameters are its weights (of a run: its
    last checkpoint). Its config.json sets all fields of this section except family, resize_vocabulary,
    last_layers, mtp_layers, moe.capacity_factor, moe.balance_loss, moe.router_z_loss and moe.router_bias_rate. Empty =
    random initial parameters."""
    family: str = setting("", resume="never", in_pretrained=False)
    """Family that the Hugging Face folder of `pretrained` is read as, by its model_type, such as llama, if this program
    does not know the folder's own model_type. An error says which family fits. Empty = the folder's own."""
    resize_vocabulary: int = setting(0, resume="never", in_pretrained=False, bounds=NON_NEGATIVE)
    """Number of token ids after rows are added to the tables of the model that `pretrained` names, for a tokenizer with
    more tokens. Each added row is the mean of the others (Hewitt 2021). 0 = as many as the model has."""
    vocabulary_size: int = setting(258, resume="never", bounds=AT_LEAST_ONE)
    """Number of token ids (vocab_size). The byte tokenizer has 258."""
    width: int = setting(128, resume="never", bounds=AT_LEAST_ONE)
    """Size of the residual stream (hidden_size)."""
    layers: int = setting(4, resume="never", bounds=Bounds(minimum=1, maximum=MAX_LAYERS))
    """Number of blocks (num_hidden_layers)."""
    last_layers: int = setting(0, resume="never", in_pretrained=False, bounds=NON_NEGATIVE)
    """Number of layers at the end that form a separate stack, so that path patterns can select them, as segment_1/*
    if the length of model.pattern divides the number of the other layers. 0 = none."""
    mtp_layers: int = setting(0, resume="never", in_pretrained=False, bounds=NON_NEGATIVE)
    """Number of modules of multi-token prediction (MTP) to train. Module k predicts the token k + 1 ahead by one more
    block, from the hidden state of the module before it and the embedding of the token k ahead (DeepSeek-V3, section
    2.2: num_nextn_predict_layers). training.mtp_weight weighs their loss. With pretrained they start from the modules
    of the folder. 0 = none; an export keeps those of the folder as they are."""
    heads: int = setting(4, resume="never", bounds=AT_LEAST_ONE)
    """Number of query heads (num_attention_heads)."""
    kv_heads: int = setting(2, resume="never", bounds=AT_LEAST_ONE)
    """Number of key-value heads, each shared by heads / kv_heads query heads (GQA; num_key_value_heads)."""
    head_dim: int = setting(32, resume="never", bounds=AT_LEAST_ONE)
    """Size of each query and key head, and of each value head without MLA. Must be even, because RoPE rotates
    pairs of values."""
    global_head_dim: int = setting(0, resume="never", bounds=NON_NEGATIVE)
    """Size of each head in global layers (Gemma 4). 0 = head_dim."""
    global_kv_heads: int = setting(0, resume="never", bounds=NON_NEGATIVE)
    """Number of key-value heads in global layers (Gemma 4: num_global_key_value_heads). 0 = kv_heads."""
    values_from_keys: bool = setting(False, resume="never")
    """In global layers, take the values from the key projection, before the norm and the rotation of the keys (Gemma 4:
    attention_k_eq_v). These layers have no value projection."""
    shared_key_layers: int = setting(0, resume="never", bounds=NON_NEGATIVE)
    """Number of layers at the end without keys and values of their own: they attend to those of the last earlier layer
    of their kind (Gemma 4: num_kv_shared_layers). 0 = every layer has its own."""
    mlp_width: int = setting(384, resume="never", bounds=AT_LEAST_ONE)
    """Hidden size of the MLP (intermediate_size)."""
    wide_mlp: bool = setting(False, resume="never")
    """Double mlp_width in the layers of shared_key_layers (Gemma 4: use_double_wide_mlp)."""
    layer_input_size: int = setting(0, resume="never", bounds=NON_NEGATIVE)
    """Size of an input of each layer beside the residual stream, which multiplies the gate of a small MLP at the end of
    the layer. It comes from the token, by a second table of embeddings, and from a projection of its embedding (Gemma
    4: hidden_size_per_layer_input). 0 = layers have no such input."""
    pattern: tuple[Kind, ...] = setting(("global",), resume="never")
    """Attention of successive blocks, repeated over the model. global: attend to the whole document; sliding: attend to
    the last `window` tokens; global_nope: global without RoPE (SmolLM3); chunked: attend to the tokens of the same
    chunk, of `window` tokens each, of the document (Llama 4); gated_delta: no attention, but a Gated DeltaNet, whose
    state has a fixed size (Yang et al. 2024; Qwen3-Next: linear_attention)."""
    window: int = setting(128, bounds=AT_LEAST_ONE)
    """Tokens that a sliding block attends to, including the current one (sliding_window), and size of the chunks of
    chunked blocks (attention_chunk_size)."""
    positions: Literal["rotary", "learned"] = setting("rotary", resume="never")
    """Position encoding. rotary: RoPE on queries and keys in all blocks except global_nope; learned: a row of a table
    is added to the embedding (GPT-2)."""
    max_positions: int = setting(1024, resume="never", bounds=AT_LEAST_ONE)
    """With positions=learned: rows of the table, and so the maximum sequence length (n_positions)."""
    norm: Literal["rms", "layer", "layer_no_bias"] = setting("rms", resume="never")
    """Type of norm. rms: divide by the root mean square (RMSNorm); layer: also subtract the mean before and add a bias
    after (LayerNorm); layer_no_bias: as layer, without the bias (Cohere)."""
    norm_placement: Literal["pre", "post", "both"] = setting("pre", resume="never")
    """Position of the norms in each sublayer. pre: its input; post: its output, before it is added to the residual
    stream (OLMo 2); both: its input and its output (Gemma 2)."""
    parallel_block: bool = setting(False, resume="never")
    """Attention and MLP of a block read the same input, with one norm if norm_placement has norms of inputs, and both
    outputs are added to the residual stream at once (GPT-J, Cohere). Otherwise the MLP follows attention."""
    norm_zero_centered: bool = False
    """Store norm scales as their difference from 1, as Gemma's checkpoints do."""
    norm_epsilon: float = setting(1e-5, bounds=POSITIVE)
    """Value that norms add to the mean square (rms_norm_eps)."""
    qk_norm: Literal["none", "head", "projection", "rotated_head", "rotated_unit"] = setting("none", resume="never")
    """Norms of queries and keys. head: of each head, before RoPE (Qwen3); projection: of all heads together, before
    RoPE (OLMo 2); rotated_head: of each head, after RoPE (Hunyuan); rotated_unit: of each head, after RoPE, without
    a scale, and only in layers with RoPE (Llama 4); none: no norms."""
    value_norm: bool = False
    """Divide each value head by its root mean square (Gemma 4)."""
    biases: Literal["none", "qkv", "attention", "mlp", "all"] = setting("none", resume="never")
    """Projections with a bias. none: no projection; qkv: the query, key and value projections (Qwen2); attention: these
    and the output projection; mlp: the projections of the MLPs, and of experts and their router; all: every projection
    of the blocks (GPT-2, gpt-oss)."""
    attention_gate: Literal["none", "element"] = setting("none", resume="never")
    """Gate of attention's output. element: multiply each value of each head by the sigmoid of a projection, without a
    bias, of attention's input (Qiu et al. 2025; AFMoE); none: no gate."""
    mlp: Literal["swiglu", "geglu", "gelu", "relu2", "xielu", "clamped_swiglu"] = setting("swiglu", resume="never")
    """Type of MLP. swiglu and geglu: the hidden layer is gated with SiLU or GELU of a second projection; gelu, relu2
    and xielu: GELU, the square of ReLU, or xIELU of one projection, without a gate. GELU is the tanh approximation.
    xIELU has two learned values in each layer (Huang & Schlag 2024; Apertus). clamped_swiglu: (up + 1) × gate ×
    sigmoid(1.702 × gate), with gate cut to at most 7 and up to ± 7 (gpt-oss)."""
    attention_scale: float = setting(0.0, bounds=NON_NEGATIVE)
    """Factor of the attention scores. 0 = 1 / sqrt(head_dim)."""
    attention_sinks: bool = setting(False, resume="never")
    """Add a key with a learned score and the value 0 to the softmax of each query head, so that a query need not attend
    to any token (gpt-oss: sinks)."""
    attention_softcap: float = setting(0.0, bounds=NON_NEGATIVE)
    """Smooth bound of the attention scores, to ± this (Gemma 2: attn_logit_softcapping). 0 = off."""
    logit_softcap: float = setting(0.0, bounds=NON_NEGATIVE)
    """Smooth bound of the logits, to ± this (Gemma 2: final_logit_softcapping). 0 = off."""
    embedding_scale: float = setting(1.0, bounds=POSITIVE)
    """Factor of the embeddings (Gemma: √width; Granite: embedding_multiplier)."""
    residual_scale: float = setting(1.0, bounds=POSITIVE)
    """Factor of the output of each sublayer before it is added to the residual stream (Granite:
    residual_multiplier)."""
    layer_scales: bool = setting(False, resume="never")
    """Multiply the output of each block by a number of the block, which training does not change (Gemma 4:
    layer_scalar)."""
    logit_scale: float = setting(1.0, bounds=POSITIVE)
    """Factor of the logits, before logit_softcap (Granite: 1 / logits_scaling)."""
    tied_head: bool = setting(True, resume="never")
    """Use the embedding table as the output head (tie_word_embeddings)."""
    scores: int = setting(0, resume="never", in_pretrained=False, bounds=NON_NEGATIVE)
    """Number of scores of a document, which a head computes at its last token in place of logits (num_labels): 1 for a
    reward or a number, otherwise the number of classes. With pretrained, 0 takes as many as the folder has
    (...ForSequenceClassification), and a folder without scores gets a new head. 0 = predict tokens."""

    rope: RopeConfig = section(RopeConfig)
    mla: MLAConfig = section(MLAConfig)
    delta: DeltaConfig = section(DeltaConfig)
    moe: MoEConfig = section(MoEConfig)

    @property
    def rotary_dim(self) -> int:
        """Size of the part of head_dim that RoPE rotates."""
        return self.mla.rotary_head_dim if self.mla.kv_rank else self.rope.size or self.head_dim

    @property
    def key_dim(self) -> int:
        """Size of the part of head_dim in which key heads have their own keys."""
        return self.head_dim - self.mla.rotary_head_dim if self.mla.kv_rank else self.head_dim

    @property
    def value_dim(self) -> int:
        return self.mla.value_head_dim if self.mla.kv_rank else self.head_dim

    def of_layers(self, kind: Kind) -> "ModelConfig":
        """Return the settings of attention in the layers of one kind, as if all layers had them."""
        if kind in WINDOWED:
            return replace(self, values_from_keys=False)
        return replace(
            self, head_dim=self.global_head_dim or self.head_dim, kv_heads=self.global_kv_heads or self.kv_heads
        )

    @property
    def has_gate(self) -> bool:
        """Use of a gate projection in the MLP, in addition to `up`."""
        return self.mlp in GATED

    @property
    def period(self) -> int:
        """Number of layers after which the kinds of layers repeat."""
        return math.lcm(len(self.pattern), self.moe.expert_every if self.moe.experts else 1)

    @property
    def table_is_head(self) -> bool:
        """True if the embedding table is also the head."""
        return self.tied_head and not self.scores

    @property
    def blocks(self) -> int:
        """Number of blocks: the layers, and one in each MTP module."""
        return self.layers + self.mtp_layers

    @property
    def losses(self) -> int:
        """Number of predictions of a token, each by the head: of the model, and of each MTP module."""
        return 1 + self.mtp_layers

    @property
    def layers_with_keys(self) -> int:
        """Number of layers, from the first, that have keys of their own."""
        return self.layers - self.shared_key_layers

    def problems(self) -> list[str]:
        found = self.find_out_of_range()
        found += self._rope_problems() + self.mla.find_problems(self.head_dim) + self.moe.find_problems(self.layers)
        found += self.delta.problems() + (self._latent_problems() if self.mla.kv_rank else [])
        if GATED_DELTA in self.pattern:
            found += self._require("gated_delta in model.pattern", shared_key_layers=0)
        if self.resize_vocabulary and not self.pretrained:
            found.append(
                f"model.resize_vocabulary={self.resize_vocabulary}: there is no model whose tables to resize; set "
                "--model.vocabulary-size instead"
            )
        if self.family and not self.pretrained:
            found.append(f"model.family={self.family} has no effect without model.pretrained: leave it out")
        if self.last_layers >= max(self.layers, 1):
            found.append(f"model.last_layers={self.last_layers}: must be below model.layers={self.layers}")
        found += self._require(f"model.scores={self.scores}", mtp_layers=0) if self.scores else []
        if not self.pattern:
            found.append("model.pattern: must name at least one kind of block")
        learned, rope = self.positions == "learned", self.rope
        if learned and "global_nope" in self.pattern:
            found.append("model.pattern: global_nope requires model.positions=rotary; write global")
        if learned and rope.factor > 1:
            found.append(
                f"model.rope.factor={rope.factor}: no effect with model.positions=learned; set --model.rope.factor 1"
            )
        for name in ("kv_heads", "global_kv_heads"):
            if (count := getattr(self, name)) >= 1 and self.heads % count:
                found.append(f"model.heads={self.heads}: must be a multiple of model.{name}={count}")
        for name in ("head_dim", "global_head_dim"):
            size = getattr(self, name)
            if size % 2:
                found.append(f"model.{name}={size}: must be even")
            if size and (rope.size % 2 or rope.size > size):
                found.append(f"model.rope.size={rope.size}: must be even and at most model.{name}={size}")
        found += self._require("model.value_norm=True", norm="rms") if self.value_norm else []
        if self.qk_norm == "rotated_unit":
            found += self._require("model.qk_norm=rotated_unit", positions="rotary", norm="rms")
        if self.moe.experts and self.moe.router_weighs == "inputs" and self.biases in ("mlp", "all"):
            found.append(
                f"model.biases={self.biases}: with model.moe.router_weighs=inputs experts have no biases; set "
                "--model.biases none or attention"
            )
        if self.moe.experts and self.moe.own_norms:
            found += self._require("model.moe.own_norms=True", norm_placement=("pre", "both"), parallel_block=False)
        found += self._sharing_problems() if self.shared_key_layers else []
        if self.mtp_layers:
            reason = f"model.mtp_layers={self.mtp_layers}"
            found += self._require(reason, positions="rotary", layer_input_size=0, shared_key_layers=0)
        if self.layer_input_size and not self.has_gate:
            found.append(f"model.mlp={self.mlp}: must be one of {', '.join(GATED)} with model.layer_input_size")
        if self.moe.experts and self.mlp == "xielu":
            found.append("model.mlp=xielu: experts have no learned values of an activation; set another --model.mlp")
        return found

    def _rope_problems(self) -> list[str]:
        scaled = [kind for kind in self.pattern if self.rope.of_layers(kind) is self.rope]
        sizes = {self.of_layers(kind).rotary_dim for kind in scaled} or {self.rotary_dim}
        return [*dict.fromkeys(problem for size in sorted(sizes) for problem in self.rope.find_problems(size))]

    def _require(self, reason: str, **required: Any) -> list[str]:
        """List the fields with another value than the required one, or than all of those in a tuple."""
        allowed = {name: value if isinstance(value, tuple) else (value,) for name, value in required.items()}
        return [
            f"model.{name}={getattr(self, name)}: must be {' or '.join(map(str, values))} with {reason}"
            for name, values in allowed.items()
            if getattr(self, name) not in values
        ]

    def _sharing_problems(self) -> list[str]:
        name = f"model.shared_key_layers={self.shared_key_layers}"
        kinds = [self.pattern[layer % len(self.pattern)] for layer in range(self.layers)] if self.pattern else []
        without = [kind for kind in kinds if kind not in kinds[: max(self.layers_with_keys, 0)]]
        found = [
            f"{name}: no earlier layer that is {kind} has keys; set a smaller --model.shared-key-layers"
            for kind in dict.fromkeys(without)
        ]
        if self.wide_mlp and self.moe.experts:
            found.append("model.wide_mlp=True: does not support experts; set --model.wide-mlp False")
        return found

    def _latent_problems(self) -> list[str]:
        found = []
        if self.kv_heads != self.heads:
            found.append(
                f"model.kv_heads={self.kv_heads}: with model.mla.kv_rank each query head has its own keys; set "
                f"--model.kv-heads {self.heads}"
            )
        return found + self._require(
            "model.mla.kv_rank",
            positions="rotary",
            norm="rms",
            **dict.fromkeys(("qk_norm", "biases", "attention_gate"), "none"),
            **dict.fromkeys(("attention_sinks", "values_from_keys", "value_norm"), False),
            **dict.fromkeys(("global_head_dim", "global_kv_heads", "shared_key_layers"), 0),
        )
