"""Settings of the model: one decoder that covers many families.

The families are Llama, Mistral, Mixtral, Qwen, DeepSeek-V2/V3, Gemma 2, Phi-3, OLMo 2, OLMoE, SmolLM3 and GPT-2/3.
"""

import math
from dataclasses import dataclass
from typing import Literal

from jaxopt_llm.config.metadata import AT_LEAST_ONE, NON_NEGATIVE, POSITIVE, Bounds, find_out_of_range, section, setting
from jaxopt_llm.config.mla import MLAConfig
from jaxopt_llm.config.moe import MoEConfig
from jaxopt_llm.config.rope import RopeConfig

Kind = Literal["global", "sliding", "global_nope"]
GATED = ("swiglu", "geglu")  # the values of `mlp` with a gate projection
MAX_LAYERS = 10_000  # the layout lists every layer


@dataclass(frozen=True)
class ModelConfig:
    pretrained: str = setting("", resume="freely", in_pretrained=False)
    """Model to start from: folder of a Hugging Face model, its id on the Hugging Face hub (org/name or
    org/name@revision), or directory of a run of this program. The initial parameters are its weights (of a run: its
    last checkpoint). Its config.json sets all fields of this section except resize_vocabulary, last_layers,
    moe.capacity_factor, moe.balance_loss, moe.router_z_loss and moe.router_bias_rate. Empty = random initial
    parameters."""
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
    heads: int = setting(4, resume="never", bounds=AT_LEAST_ONE)
    """Number of query heads (num_attention_heads)."""
    kv_heads: int = setting(2, resume="never", bounds=AT_LEAST_ONE)
    """Number of key-value heads, each shared by heads / kv_heads query heads (GQA; num_key_value_heads)."""
    head_dim: int = setting(32, resume="never", bounds=AT_LEAST_ONE)
    """Size of each query and key head, and of each value head without MLA. Must be even, because RoPE rotates
    pairs of values."""
    mlp_width: int = setting(384, resume="never", bounds=AT_LEAST_ONE)
    """Hidden size of the MLP (intermediate_size)."""
    pattern: tuple[Kind, ...] = setting(("global",), resume="never")
    """Attention of successive blocks, repeated over the model. global: attend to the whole document; sliding: attend to
    the last `window` tokens; global_nope: global without RoPE (SmolLM3)."""
    window: int = setting(128, bounds=AT_LEAST_ONE)
    """Tokens that a sliding block attends to, including the current one (sliding_window)."""
    positions: Literal["rotary", "learned"] = setting("rotary", resume="never")
    """Position encoding. rotary: RoPE on queries and keys in all blocks except global_nope; learned: a row of a table
    is added to the embedding (GPT-2)."""
    max_positions: int = setting(1024, resume="never", bounds=AT_LEAST_ONE)
    """With positions=learned: rows of the table, and so the maximum sequence length (n_positions)."""
    norm: Literal["rms", "layer"] = setting("rms", resume="never")
    """Type of norm. rms: divide by the root mean square (RMSNorm); layer: also subtract the mean before and add a bias
    after (LayerNorm)."""
    norm_placement: Literal["pre", "post", "both"] = setting("pre", resume="never")
    """Position of the norms in each sublayer. pre: its input; post: its output, before it is added to the residual
    stream (OLMo 2); both: its input and its output (Gemma 2)."""
    norm_zero_centered: bool = False
    """Store norm scales as their difference from 1, as Gemma's checkpoints do."""
    norm_epsilon: float = setting(1e-5, bounds=POSITIVE)
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
    attention_scale: float = setting(0.0, bounds=NON_NEGATIVE)
    """Factor of the attention scores. 0 = 1 / sqrt(head_dim)."""
    attention_softcap: float = setting(0.0, bounds=NON_NEGATIVE)
    """Smooth bound of the attention scores, to ± this (Gemma 2: attn_logit_softcapping). 0 = off."""
    logit_softcap: float = setting(0.0, bounds=NON_NEGATIVE)
    """Smooth bound of the logits, to ± this (Gemma 2: final_logit_softcapping). 0 = off."""
    scale_embedding: bool = False
    """Multiply embeddings by sqrt(width) (Gemma)."""
    tied_head: bool = setting(True, resume="never")
    """Use the embedding table as the output head (tie_word_embeddings)."""

    rope: RopeConfig = section(RopeConfig)
    mla: MLAConfig = section(MLAConfig)
    moe: MoEConfig = section(MoEConfig)

    @property
    def rotary_dim(self) -> int:
        """Size of the part of head_dim that RoPE rotates."""
        return self.mla.rotary_head_dim if self.mla.kv_rank else self.head_dim

    @property
    def key_dim(self) -> int:
        """Size of the part of head_dim in which key heads have their own keys."""
        return self.head_dim - self.mla.rotary_head_dim if self.mla.kv_rank else self.head_dim

    @property
    def value_dim(self) -> int:
        return self.mla.value_head_dim if self.mla.kv_rank else self.head_dim

    @property
    def has_gate(self) -> bool:
        """Use of a gate projection in the MLP, in addition to `up`."""
        return self.mlp in GATED

    @property
    def period(self) -> int:
        """Number of layers after which the kinds of layers repeat."""
        return math.lcm(len(self.pattern), self.moe.expert_every if self.moe.experts else 1)

    def problems(self) -> list[str]:
        found = find_out_of_range("model", self)
        found += self.rope.problems(self.rotary_dim) + self.mla.problems(self.head_dim) + self.moe.problems(self.layers)
        found += self._latent_problems() if self.mla.kv_rank else []
        if self.resize_vocabulary and not self.pretrained:
            found.append(
                f"model.resize_vocabulary={self.resize_vocabulary}: there is no model whose tables to resize; set "
                "--model.vocabulary-size instead"
            )
        if self.last_layers >= max(self.layers, 1):
            found.append(f"model.last_layers={self.last_layers}: must be below model.layers={self.layers}")
        if not self.pattern:
            found.append("model.pattern: must name at least one kind of block")
        learned, rope = self.positions == "learned", self.rope
        if learned and "global_nope" in self.pattern:
            found.append("model.pattern: global_nope requires model.positions=rotary; write global")
        if learned and rope.factor > 1:
            found.append(
                f"model.rope.factor={rope.factor}: no effect with model.positions=learned; set --model.rope.factor 1"
            )
        if self.kv_heads >= 1 and self.heads % self.kv_heads:
            found.append(f"model.heads={self.heads}: must be a multiple of model.kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            found.append(f"model.head_dim={self.head_dim}: must be even")
        if self.moe.experts and self.biases == "all":
            found.append("model.biases=all: experts have no biases; set --model.biases none or qkv")
        return found

    def _latent_problems(self) -> list[str]:
        found = []
        if self.kv_heads != self.heads:
            found.append(
                f"model.kv_heads={self.kv_heads}: with model.mla.kv_rank each query head has its own keys; set "
                f"--model.kv-heads {self.heads}"
            )
        return found + [
            f"model.{name}={getattr(self, name)}: must be {required} with model.mla.kv_rank"
            for name, required in (("positions", "rotary"), ("norm", "rms"), ("qk_norm", "none"), ("biases", "none"))
            if getattr(self, name) != required
        ]
