"""Names of tensors in Hugging Face folders, and our leaves that they hold: see `Family.names`."""

BY_HEAD = " by head "  # separates leaves that lie next to each other within each head of a tensor's output

OUTSIDE = {
    "model.embed_tokens.weight": "non_layer/embedding/table",
    "model.norm.weight": "non_layer/final_norm/scale",
    "lm_head.weight": "non_layer/head/table",
}


def layer_names(names: dict[str, str]) -> dict[str, str]:
    """Return the names with the prefix of a layer."""
    return {f"model.layers.{{}}.{name}": ours for name, ours in names.items()}


def mlp_names(module: str, prefix: str = "mlp/") -> dict[str, str]:
    """Return the names of the three projections of a gated MLP. prefix: start of our leaves' paths."""
    return layer_names({f"{module}.{name}_proj.weight": f"{prefix}{name}" for name in ("gate", "up", "down")})


ATTENTION = layer_names(
    {f"self_attn.{name[0]}_proj.weight": f"attention/{name}" for name in ("query", "key", "value", "output")}
)
FUSED = layer_names(
    {
        "self_attn.qkv_proj.weight": "attention/query attention/key attention/value",
        "self_attn.o_proj.weight": "attention/output",
        "mlp.gate_up_proj.weight": "mlp/gate mlp/up",
        "mlp.down_proj.weight": "mlp/down",
    }
)
QKV_BIASES = layer_names(
    {f"self_attn.{name[0]}_proj.bias": f"attention/{name}_bias" for name in ("query", "key", "value")}
)
QK_NORMS = layer_names({"self_attn.q_norm.weight": "query_norm/scale", "self_attn.k_norm.weight": "key_norm/scale"})
MLP = mlp_names("mlp")
NORMS = layer_names(
    {"input_layernorm.weight": "attention_norm/scale", "post_attention_layernorm.weight": "mlp_norm/scale"}
)
POST_NORMS = layer_names(
    {
        "post_attention_layernorm.weight": "attention_post_norm/scale",
        "post_feedforward_layernorm.weight": "mlp_post_norm/scale",
    }
)
GEMMA_NORMS = NORMS | POST_NORMS | layer_names({"pre_feedforward_layernorm.weight": "mlp_norm/scale"})
LLAMA = OUTSIDE | ATTENTION | MLP | NORMS
LATENT_ATTENTION = layer_names(
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
MIXTRAL_EXPERTS = layer_names(
    {
        "block_sparse_moe.gate.weight": "mlp/router",
        "block_sparse_moe.experts.{}.w1.weight": "mlp/gate",
        "block_sparse_moe.experts.{}.w3.weight": "mlp/up",
        "block_sparse_moe.experts.{}.w2.weight": "mlp/down",
    }
)
EXPERTS = layer_names({"mlp.gate.weight": "mlp/router"}) | mlp_names("mlp.experts.{}")
SHARED_EXPERTS = mlp_names("mlp.shared_experts", "mlp/shared_")
ROUTER_BIAS = layer_names({"mlp.gate.e_score_correction_bias": "mlp/router_bias"})


def stacked_expert_names(module: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Return `Family.in_memory_names` of the experts.

    Args:
        module: name of the module that holds the experts in the folder's tensor names.
        gate: name of the gate projection there.
        up: name of the up projection there.
        down: name of the down projection there.
    """
    gate, up, down = (f"model.layers.{{}}.{module}.experts.{{}}.{name}.weight" for name in (gate, up, down))
    return {"model.layers.{}.mlp.experts.gate_up_proj": f"{gate} {up}", "model.layers.{}.mlp.experts.down_proj": down}


STACKED_EXPERTS = stacked_expert_names("mlp", "gate_proj", "up_proj", "down_proj")
STACKED_MIXTRAL_EXPERTS = {
    **stacked_expert_names("block_sparse_moe", "w1", "w3", "w2"),
    "model.layers.{}.mlp.gate.weight": "model.layers.{}.block_sparse_moe.gate.weight",
}
GPT = {
    "transformer.wte.weight": "non_layer/embedding/table",
    "transformer.wpe.weight": "non_layer/positions/table",
    "transformer.ln_f.weight": "non_layer/final_norm/scale",
    "transformer.ln_f.bias": "non_layer/final_norm/bias",
    "lm_head.weight": "non_layer/head/table",
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
