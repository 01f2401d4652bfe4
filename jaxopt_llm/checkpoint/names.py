"""Names of tensors in Hugging Face's folders, and what they are of our leaves: see Family.names."""

BY_HEAD = " by head "  # between leaves that lie side by side within each head of a tensor's output

OUTSIDE = {
    "model.embed_tokens.weight": "outer/embedding/table",
    "model.norm.weight": "outer/final_norm/scale",
    "lm_head.weight": "outer/head/table",
}


def in_layer(names: dict[str, str]) -> dict[str, str]:
    return {f"model.layers.{{}}.{name}": ours for name, ours in names.items()}


ATTENTION = in_layer(
    {
        "self_attn.q_proj.weight": "attention/query",
        "self_attn.k_proj.weight": "attention/key",
        "self_attn.v_proj.weight": "attention/value",
        "self_attn.o_proj.weight": "attention/output",
    }
)
FUSED = in_layer(
    {
        "self_attn.qkv_proj.weight": "attention/query attention/key attention/value",
        "self_attn.o_proj.weight": "attention/output",
        "mlp.gate_up_proj.weight": "mlp/gate mlp/up",
        "mlp.down_proj.weight": "mlp/down",
    }
)
QKV_BIASES = in_layer(
    {f"self_attn.{name[0]}_proj.bias": f"attention/{name}_bias" for name in ("query", "key", "value")}
)
QK_NORMS = in_layer(
    {"self_attn.q_norm.weight": "query_norm/scale", "self_attn.k_norm.weight": "key_norm/scale"},
)
MLP = in_layer({f"mlp.{name}_proj.weight": f"mlp/{name}" for name in ("gate", "up", "down")})
NORMS = in_layer(
    {"input_layernorm.weight": "attention_norm/scale", "post_attention_layernorm.weight": "mlp_norm/scale"}
)
POST_NORMS = in_layer(
    {
        "post_attention_layernorm.weight": "attention_post_norm/scale",
        "post_feedforward_layernorm.weight": "mlp_post_norm/scale",
    }
)
GEMMA_NORMS = NORMS | POST_NORMS | in_layer({"pre_feedforward_layernorm.weight": "mlp_norm/scale"})
LLAMA = OUTSIDE | ATTENTION | MLP | NORMS
LATENT_ATTENTION = in_layer(
    {
        "self_attn.q_proj.weight": "attention/query",
        "self_attn.q_a_proj.weight": "attention/query_down",
        "self_attn.q_a_layernorm.weight": "query_latent_norm/scale",
        "self_attn.q_b_proj.weight": "attention/query_up",
        "self_attn.kv_a_proj_with_mqa.weight": "attention/latent attention/rotary_key",
        "self_attn.kv_a_layernorm.weight": "latent_norm/scale",
        "self_attn.kv_b_proj.weight": f"attention/key{BY_HEAD}attention/value",
        "self_attn.o_proj.weight": "attention/output",
    }
)
MIXTRAL_EXPERTS = in_layer(
    {
        "block_sparse_moe.gate.weight": "mlp/router",
        "block_sparse_moe.experts.{}.w1.weight": "mlp/gate",
        "block_sparse_moe.experts.{}.w3.weight": "mlp/up",
        "block_sparse_moe.experts.{}.w2.weight": "mlp/down",
    }
)
EXPERTS = in_layer(
    {
        "mlp.gate.weight": "mlp/router",
        **{f"mlp.experts.{{}}.{name}_proj.weight": f"mlp/{name}" for name in ("gate", "up", "down")},
    }
)


SHARED_EXPERTS = in_layer(
    {f"mlp.shared_experts.{name}_proj.weight": f"mlp/shared_{name}" for name in ("gate", "up", "down")}
)
ROUTER_BIAS = in_layer({"mlp.gate.e_score_correction_bias": "mlp/router_bias"})


def in_memory(mixture: str, gate: str, up: str, down: str) -> dict[str, str]:
    """See Family.in_memory; of experts whose folders have these names."""
    gate, up, down = (f"model.layers.{{}}.{mixture}.experts.{{}}.{name}.weight" for name in (gate, up, down))
    return {
        "model.layers.{}.mlp.experts.gate_up_proj": f"{gate} {up}",
        "model.layers.{}.mlp.experts.down_proj": down,
    }


GPT = {
    "transformer.wte.weight": "outer/embedding/table",
    "transformer.wpe.weight": "outer/positions/table",
    "transformer.ln_f.weight": "outer/final_norm/scale",
    "transformer.ln_f.bias": "outer/final_norm/bias",
    "lm_head.weight": "outer/head/table",
    "transformer.h.{}.ln_1.weight": "attention_norm/scale",
    "transformer.h.{}.ln_1.bias": "attention_norm/bias",
    "transformer.h.{}.ln_2.weight": "mlp_norm/scale",
    "transformer.h.{}.ln_2.bias": "mlp_norm/bias",
    "transformer.h.{}.attn.c_attn.weight": "attention/query attention/key attention/value",
    "transformer.h.{}.attn.c_attn.bias": "attention/query_bias attention/key_bias attention/value_bias",
    "transformer.h.{}.attn.c_proj.weight": "attention/output",
    "transformer.h.{}.attn.c_proj.bias": "attention/output_bias",
    "transformer.h.{}.mlp.c_fc.weight": "mlp/up",
    "transformer.h.{}.mlp.c_fc.bias": "mlp/up_bias",
    "transformer.h.{}.mlp.c_proj.weight": "mlp/down",
    "transformer.h.{}.mlp.c_proj.bias": "mlp/down_bias",
}
