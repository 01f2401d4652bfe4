"""Names of tensors in Hugging Face folders: tables of `Family.names` and `Family.in_memory_names`.

A name maps to the path of our parameter; `{}` is the number of a layer, and a second `{}` that of an expert.
"""

from typing import TypeVar

from jaxopt_llm.checkpoint.huggingface.family import ALL_EXPERTS, BY_HEAD, BY_OUTPUT, EITHER

T = TypeVar("T")

OUTSIDE = {
    "model.embed_tokens.weight": "non_layer/embedding/table",
    "model.norm.weight": "non_layer/final_norm/scale",
    "lm_head.weight": "non_layer/head/table",
}


def layer_names(names: dict[str, T]) -> dict[str, T]:
    """Return the names with the prefix of a layer."""
    return {f"model.layers.{{}}.{name}": ours for name, ours in names.items()}


def mlp_names(module: str, prefix: str = "mlp/") -> dict[str, str]:
    """Return the names of the three projections of a gated MLP. prefix: start of our leaves' paths."""
    return layer_names({f"{module}.{name}_proj.weight": f"{prefix}{name}" for name in ("gate", "up", "down")})


def norm_names(norms: dict[str, str]) -> dict[str, str]:
    """Return the names of the scales of norms. norms: name of a module of a layer -> our norm."""
    return layer_names({f"{module}.weight": f"{norm}/scale" for module, norm in norms.items()})


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
ATTENTION_BIASES = QKV_BIASES | layer_names({"self_attn.o_proj.bias": "attention/output_bias"})
BIASES = ATTENTION_BIASES | layer_names(
    {f"mlp.{name}_proj.bias": f"mlp/{name}_bias" for name in ("gate", "up", "down")}
)
SINKS = layer_names({"self_attn.sinks": "attention/sinks"})
QK_NORMS = norm_names({"self_attn.q_norm": "query_norm", "self_attn.k_norm": "key_norm"})
HUNYUAN_QK_NORMS = norm_names({"self_attn.query_layernorm": "query_norm", "self_attn.key_layernorm": "key_norm"})
MLP = mlp_names("mlp")
XIELU = layer_names({f"mlp.act_fn.{name}": f"mlp/{name}" for name in ("alpha_p", "alpha_n")})
NORMS = norm_names({"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"})
NORM_BIASES = {"model.norm.bias": "non_layer/final_norm/bias"} | layer_names(
    {"input_layernorm.bias": "attention_norm/bias", "post_attention_layernorm.bias": "mlp_norm/bias"}
)
VAULTGEMMA_NORMS = norm_names({"input_layernorm": "attention_norm", "pre_feedforward_layernorm": "mlp_norm"})
APERTUS_NORMS = norm_names({"attention_layernorm": "attention_norm", "feedforward_layernorm": "mlp_norm"})
POST_NORMS = norm_names(
    {"post_attention_layernorm": "attention_post_norm", "post_feedforward_layernorm": "mlp_post_norm"}
)
GEMMA_NORMS = NORMS | POST_NORMS | norm_names({"pre_feedforward_layernorm": "mlp_norm"})
# Of Gemma 4. With experts, its MLP is the shared expert.
GEMMA4_MLP = layer_names(
    {f"mlp.{name}_proj.weight": f"mlp/shared_{name}{EITHER}mlp/{name}" for name in ("gate", "up", "down")}
    | {
        "router.proj.weight": "mlp/router",
        "router.scale": "router_norm/scale",
        "router.per_expert_scale": "mlp/expert_scale",
        "experts.gate_up_proj": f"{ALL_EXPERTS}mlp/gate mlp/up",
        "experts.down_proj": f"{ALL_EXPERTS}mlp/down",
        "pre_feedforward_layernorm_2.weight": "experts_norm/scale",
        "post_feedforward_layernorm_2.weight": "experts_post_norm/scale",
        "post_feedforward_layernorm_1.weight": "shared_post_norm/scale",
    }
)
GEMMA4_LAYER = layer_names(
    {
        "layer_scalar": "layer/scale",
        "per_layer_input_gate.weight": "input_mlp/gate",
        "per_layer_projection.weight": "input_mlp/down",
        "post_per_layer_input_norm.weight": "input_mlp_post_norm/scale",
    }
) | {
    "model.embed_tokens_per_layer.weight": "non_layer/layer_inputs/table",
    "model.per_layer_model_projection.weight": "non_layer/layer_inputs/projection",
    "model.per_layer_projection_norm.weight": "non_layer/layer_inputs_norm/scale",
}
GLM_MLP = layer_names({"mlp.gate_up_proj.weight": "mlp/gate mlp/up", "mlp.down_proj.weight": "mlp/down"})
STARCODER_MLP = layer_names(
    {
        f"mlp.c_{name}.{kind}": f"mlp/{ours}{end}"
        for name, ours in (("fc", "up"), ("proj", "down"))
        for kind, end in (("weight", ""), ("bias", "_bias"))
    }
)
GLM_NORMS = NORMS | norm_names(
    {"post_self_attn_layernorm": "attention_post_norm", "post_mlp_layernorm": "mlp_post_norm"}
)
AFMOE_NORMS = norm_names(
    {"input_layernorm": "attention_norm", "post_attention_layernorm": "attention_post_norm"}
    | {"pre_mlp_layernorm": "mlp_norm", "post_mlp_layernorm": "mlp_post_norm"}
)
ATTENTION_GATE = layer_names({"self_attn.gate_proj.weight": "attention/gate"})
# Modules of multi-token prediction are layers after the last one. Their first norm is that of the embedding, which is
# also the first half of the inputs of eh_proj.
MTP = (
    norm_names({"enorm": "mtp_embedding_norm", "hnorm": "mtp_hidden_norm"})
    | layer_names({"eh_proj.weight": "mtp/projection"})
    | norm_names({"shared_head.norm": "mtp_output_norm"})
)
# Copies of the tables, in each module.
MTP_COPIES = layer_names(
    {"embed_tokens.weight": "non_layer/embedding/table", "shared_head.head.weight": "non_layer/head/table"}
)
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
WHOLE_EXPERTS = layer_names(
    {
        "mlp.gate.weight": "mlp/router",
        "mlp.experts.gate_up_proj": f"{ALL_EXPERTS}mlp/gate mlp/up",
        "mlp.experts.down_proj": f"{ALL_EXPERTS}mlp/down",
    }
)
SHARED_EXPERTS = mlp_names("mlp.shared_experts", "mlp/shared_")
AFMOE_ROUTER = layer_names({"mlp.router.gate.weight": "mlp/router", "mlp.expert_bias": "mlp/router_bias"})
ROUTER_BIAS = layer_names({"mlp.gate.e_score_correction_bias": "mlp/router_bias"})
ERNIE_ROUTER_BIAS = layer_names({"mlp.moe_statics.e_score_correction_bias": "mlp/router_bias"})
GRANITE_EXPERTS = layer_names(
    {
        "block_sparse_moe.router.layer.weight": "mlp/router",
        "block_sparse_moe.input_linear.weight": f"{ALL_EXPERTS}mlp/gate mlp/up",
        "block_sparse_moe.output_linear.weight": f"{ALL_EXPERTS}mlp/down",
    }
)
GRANITE_SHARED = layer_names(
    {
        "shared_mlp.input_linear.weight": "mlp/shared_gate mlp/shared_up",
        "shared_mlp.output_linear.weight": "mlp/shared_down",
    }
)

EXAONE_ROUTER_BIAS = layer_names({"mlp.e_score_correction_bias": "mlp/router_bias"})
HY_MLPS = mlp_names("mlp.experts.{}") | mlp_names("mlp.shared_mlp", "mlp/shared_")
HY_EXPERTS = AFMOE_ROUTER | HY_MLPS
HUNYUAN_EXPERTS = layer_names({"mlp.gate.wg.weight": "mlp/router"}) | HY_MLPS
QWEN2_SHARED = mlp_names("mlp.shared_expert", "mlp/shared_") | layer_names(
    {"mlp.shared_expert_gate.weight": "mlp/router_of_shared"}
)
# Of Qwen3-Next and Qwen3.5. A projection of queries also has their gates, head by head.
GATED_ATTENTION = ATTENTION | layer_names({"self_attn.q_proj.weight": f"attention/query{BY_HEAD}attention/gate"})
GATED_DELTA = layer_names(
    {
        "linear_attn.conv1d.weight": "delta/query_kernel delta/key_kernel delta/value_kernel",
        "linear_attn.dt_bias": "delta/decay_offset",
        "linear_attn.A_log": "delta/decay_rate",
        "linear_attn.norm.weight": "delta_norm/scale",
        "linear_attn.out_proj.weight": "delta/output",
    }
)
FUSED_GATED_DELTA = GATED_DELTA | layer_names(
    {
        "linear_attn.in_proj_qkvz.weight": BY_HEAD.join(f"delta/{name}" for name in ("query", "key", "value", "gate")),
        "linear_attn.in_proj_ba.weight": f"delta/beta{BY_HEAD}delta/decay",
    }
)
SPLIT_GATED_DELTA = GATED_DELTA | layer_names(
    {
        "linear_attn.in_proj_qkv.weight": "delta/query delta/key delta/value",
        "linear_attn.in_proj_z.weight": "delta/gate",
        "linear_attn.in_proj_b.weight": "delta/beta",
        "linear_attn.in_proj_a.weight": "delta/decay",
    }
)
LLAMA4_MLPS = (
    mlp_names("feed_forward")
    | mlp_names("feed_forward.shared_expert", "mlp/shared_")
    | layer_names(
        {
            "feed_forward.router.weight": "mlp/router",
            "feed_forward.experts.gate_up_proj": f"{ALL_EXPERTS}mlp/gate mlp/up",
            "feed_forward.experts.down_proj": f"{ALL_EXPERTS}mlp/down",
        }
    )
)


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


def held_names(names: dict[str, str]) -> dict[str, str]:
    """Return `Family.in_memory_names` of tensors that have another name in memory. names: without the layer."""
    return layer_names({held: f"model.layers.{{}}.{published}" for held, published in names.items()})


STACKED_EXPERTS = stacked_expert_names("mlp", "gate_proj", "up_proj", "down_proj")
STACKED_MIXTRAL_EXPERTS = stacked_expert_names("block_sparse_moe", "w1", "w3", "w2") | held_names(
    {"mlp.gate.weight": "block_sparse_moe.gate.weight"}
)
IN_MEMORY_ERNIE = held_names(
    {"mlp.gate.moe_statics.e_score_correction_bias": "mlp.moe_statics.e_score_correction_bias"}
)
IN_MEMORY_EXAONE = held_names({"mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias"})
IN_MEMORY_HY = held_names(
    {"mlp.gate.weight": "mlp.router.gate.weight", "mlp.e_score_correction_bias": "mlp.expert_bias"}
    | {
        f"mlp.shared_experts.{name}_proj.weight": f"mlp.shared_mlp.{name}_proj.weight"
        for name in ("gate", "up", "down")
    }
)
IN_MEMORY_GRANITE = held_names(
    {
        "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
        "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
        "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    }
)
GPT_OSS_EXPERTS = layer_names(
    {
        "mlp.router.weight": "mlp/router",
        "mlp.router.bias": "mlp/logit_bias",
        "mlp.experts.gate_up_proj": f"{ALL_EXPERTS}mlp/gate{BY_OUTPUT}mlp/up",
        "mlp.experts.gate_up_proj_bias": f"{ALL_EXPERTS}mlp/gate_bias{BY_OUTPUT}mlp/up_bias",
        "mlp.experts.down_proj": f"{ALL_EXPERTS}mlp/down",
        "mlp.experts.down_proj_bias": f"{ALL_EXPERTS}mlp/down_bias",
    }
)
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
