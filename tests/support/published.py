"""The config.json of published models, written by hand, with their numbers of parameters."""

from typing import Any


def sizes(vocabulary: int, width: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        **more,
    }


LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
YARN_ROPE = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 2.0}
PROPORTIONAL_ROPE = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.001}}
LENGTH = {"max_position_embeddings": 131_072}
LONG_ROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
GEMMA3 = {
    **{"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000},
    **{"rope_theta": 1000000, "sliding_window_pattern": 6, "attn_logit_softcapping": None},
}
AFM_ROPE = {key: YARN_ROPE[key] for key in ("beta_fast", "beta_slow", "original_max_position_embeddings")}
AFM_ROPE |= {"rope_type": "yarn", "factor": 20.0, "mscale": 1.0}
APERTUS = {"hidden_act": "xielu", "attention_bias": False, "mlp_bias": False, "post_norm": False, "qk_norm": True}
HUNYUAN = {
    **{"head_dim": 128, "attention_bias": False, "use_qk_norm": True, "tie_word_embeddings": True, "rope_theta": 1e4},
    "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "type": "dynamic"},
}
GEMMA4 = {
    **{"hidden_activation": "gelu_pytorch_tanh", "attention_k_eq_v": True, "final_logit_softcapping": 30.0},
    **{"head_dim": 256, "global_head_dim": 512, "sliding_window": 1024, "use_bidirectional_attention": "vision"},
    **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False},
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}
SHARED_FIELDS = ("hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp", "layer_types")
GEMMA4_E = {name: value for name, value in GEMMA4.items() if name not in SHARED_FIELDS}
GEMMA4_E |= {"attention_k_eq_v": False, "sliding_window": 512, "vocab_size_per_layer_input": 262144}
GLM_EXPERTS = {"n_shared_experts": 1, "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 8}
ERNIE_EXPERTS = {
    **{"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2},
    **{"moe_layer_start_index": 1, "moe_layer_end_index": 27, "moe_layer_interval": 1},
}
QWEN3_VL_EXPERTS = {
    **{"head_dim": 128, "attention_bias": False, "rope_theta": 5000000, "tie_word_embeddings": False},
    **{"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "num_experts": 128},
    **{"num_experts_per_tok": 8, "max_position_embeddings": 262144},
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
}
LLAMA4 = {
    **{"head_dim": 128, "attention_chunk_size": 8192, "intermediate_size_mlp": 16384, "no_rope_layers": []},
    **{"num_experts_per_tok": 1, "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0},
    **{"attention_bias": False, "output_router_logits": False, "for_llm_compressor": False},
}
GRANITE_MOE = {
    **{"attention_bias": False, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "num_experts_per_tok": 8},
    **{"rope_theta": 10000.0, "tie_word_embeddings": True, "router_aux_loss_coef": 0.0},
}
GPT_OSS = {
    **{"attention_bias": True, "attention_dropout": 0.0, "head_dim": 64, "initial_context_length": 4096},
    **{"experts_per_token": 4, "num_experts_per_tok": 4, "output_router_logits": False, "router_aux_loss_coef": 0.9},
    **{"sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "rope_theta": 150000, **LENGTH},
    "rope_scaling": {
        **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
        **{"rope_type": "yarn", "truncate": False},
    },
}
# As published, in the older form and without the fields that each omits: config.json, number of parameters, and some
# of our fields.
DELTA = {
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "tie_word_embeddings": False},
}
PUBLISHED: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "llama": (
        sizes(32000, 4096, 11008, 32, 32, 32, tie_word_embeddings=False, rope_scaling=None, pretraining_tp=1),
        6_738_415_616,
        {"rope.theta": 10_000.0, "head_dim": 128, "tied_head": False},
    ),
    "llama 3.1": (
        sizes(128256, 4096, 14336, 32, 32, 8, rope_theta=500000.0, rope_scaling=LLAMA3_ROPE, mlp_bias=False),
        8_030_261_248,
        {"rope.factor": 8.0, "rope.theta": 500_000.0, "rope.original_length": 8192},
    ),
    "mistral": (
        sizes(32000, 4096, 14336, 32, 32, 8, sliding_window=4096, rope_theta=10000.0, tie_word_embeddings=False),
        7_241_732_096,
        {"pattern": ("sliding",), "window": 4096},
    ),
    "qwen2": (
        sizes(
            152064, 3584, 18944, 28, 28, 4, use_sliding_window=False, sliding_window=131072, max_window_layers=28,
            rope_theta=1000000.0, tie_word_embeddings=False,
        ),
        7_615_616_512,
        {"pattern": ("global",), "biases": "qkv", "head_dim": 128},
    ),
    "qwen3": (
        sizes(
            151936, 4096, 12288, 36, 32, 8, head_dim=128, attention_bias=False, use_sliding_window=False,
            sliding_window=None, max_window_layers=36, rope_theta=1000000, tie_word_embeddings=False,
        ),
        8_190_735_360,
        {"qk_norm": "head", "rope.theta": 1_000_000.0},
    ),
    "gemma2": (
        sizes(
            256000, 3584, 14336, 42, 16, 8, hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh",
            head_dim=256, query_pre_attn_scalar=256, sliding_window=4096, sliding_window_size=4096,
            attn_logit_softcapping=50.0, final_logit_softcapping=30.0, rope_theta=10000.0,
        ),
        9_241_705_984,
        {"pattern": ("sliding", "global"), "tied_head": True, "attention_scale": 0.0625, "mlp": "geglu"},
    ),
    "phi3": (
        sizes(
            32064, 3072, 8192, 32, 32, 32, sliding_window=2047, rope_theta=10000.0, tie_word_embeddings=False,
            auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
        ),
        3_821_079_552,
        {"pattern": ("sliding",), "window": 2047, "head_dim": 96},
    ),
    "olmo2": (
        sizes(100352, 4096, 11008, 32, 32, 32, rope_theta=500000, attention_bias=False, tie_word_embeddings=False),
        7_298_617_344,
        {"norm_placement": "post", "qk_norm": "projection"},
    ),
    "smollm3": (
        sizes(
            128256, 2048, 11008, 36, 16, 4, no_rope_layers=[1, 1, 1, 0] * 9, no_rope_layer_interval=4,
            layer_types=["full_attention"] * 36, use_sliding_window=False, rope_theta=5000000.0,
        ),
        3_075_098_624,
        {"pattern": ("global", "global", "global", "global_nope"), "tied_head": True},
    ),
    "mixtral": (
        sizes(
            32000, 4096, 14336, 32, 32, 8, sliding_window=None, rope_theta=1000000.0, tie_word_embeddings=False,
            num_local_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.02, output_router_logits=False,
        ),
        46_702_792_704,
        {"moe.experts": 8, "moe.experts_per_token": 2, "moe.expert_width": 14336, "moe.balance_loss": 0.02},
    ),
    "qwen3_moe": (
        sizes(
            151936, 2048, 6144, 48, 32, 4, head_dim=128, attention_bias=False, use_sliding_window=False,
            sliding_window=None, max_window_layers=48, rope_theta=1000000.0, tie_word_embeddings=False,
            decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True, num_experts=128,
            num_experts_per_tok=8, router_aux_loss_coef=0.001, output_router_logits=False,
        ),
        30_532_122_624,
        {"moe.experts": 128, "moe.experts_per_token": 8, "moe.expert_width": 768, "qk_norm": "head",
         "pattern": ("global",)},
    ),
    "qwen3_next 80b a3b": (
        sizes(
            151936, 2048, 5120, 48, 16, 2, head_dim=256, num_experts=512, num_experts_per_tok=10, norm_topk_prob=True,
            moe_intermediate_size=512, shared_expert_intermediate_size=512, decoder_sparse_step=1, mlp_only_layers=[],
            full_attention_interval=4, partial_rotary_factor=0.25, rope_theta=10000000, rope_scaling=None, **DELTA,
        ),
        79_674_391_296,
        {"pattern": ("gated_delta",) * 3 + ("global",), "attention_gate": "element", "qk_norm": "head",
         "norm_zero_centered": True, "rope.size": 64, "delta.key_heads": 16, "delta.value_heads": 32,
         "moe.shared_expert_gate": True, "moe.shared_expert_width": 512},
    ),
    "qwen3_5_text 9b": (
        sizes(
            248320, 4096, 12288, 32, 16, 4, head_dim=256, attention_bias=False,
            layer_types=[*["linear_attention"] * 3, "full_attention"] * 8,
            rope_parameters={"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                             "mrope_interleaved": True, "mrope_section": [11, 11, 10]}, **DELTA,
        ),
        8_953_803_264,
        {"pattern": ("gated_delta",) * 3 + ("global",), "rope.size": 64, "delta.kernel": 4, "tied_head": False},
    ),
    "qwen3_5_moe_text 35b a3b": (
        sizes(
            248320, 2048, 0, 40, 16, 2, head_dim=256, num_experts=256, num_experts_per_tok=8,
            moe_intermediate_size=512, shared_expert_intermediate_size=512, router_aux_loss_coef=0.001,
            rope_parameters={"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}, **DELTA,
        ),
        34_660_610_688,
        {"pattern": ("gated_delta",) * 3 + ("global",), "moe.experts": 256, "moe.router_renormalises": True},
    ),
    "olmoe": (
        sizes(
            50304, 2048, 1024, 16, 16, 16, attention_bias=False, clip_qkv=None, rope_theta=10000.0, rope_scaling=None,
            tie_word_embeddings=False, norm_topk_prob=False, num_experts=64, num_experts_per_tok=8,
            router_aux_loss_coef=0.01, output_router_logits=False,
        ),
        6_919_161_856,
        {"moe.experts": 64, "moe.expert_width": 1024, "qk_norm": "projection", "moe.router_renormalises": False},
    ),
    "deepseek_v2 lite": (
        sizes(
            102400, 2048, 10944, 27, 16, 16, rms_norm_eps=1e-6, attention_bias=False, aux_loss_alpha=0.001,
            first_k_dense_replace=1, kv_lora_rank=512, moe_intermediate_size=1408, moe_layer_freq=1, n_group=1,
            n_routed_experts=64, n_shared_experts=2, norm_topk_prob=False, num_experts_per_tok=6, pretraining_tp=1,
            q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, rope_scaling=YARN_ROPE, rope_theta=10000,
            routed_scaling_factor=1.0, scoring_func="softmax", seq_aux=True, tie_word_embeddings=False, topk_group=1,
            topk_method="greedy", v_head_dim=128, max_position_embeddings=163840,
        ),
        15_706_484_224,
        {"mla.kv_rank": 512, "mla.query_rank": 0, "head_dim": 192, "rope.factor": 40.0,
         "moe.shared_expert_width": 2816},
    ),
    "deepseek_v2": (
        sizes(
            102400, 5120, 12288, 60, 128, 128, rms_norm_eps=1e-6, attention_bias=False, aux_loss_alpha=0.001,
            first_k_dense_replace=1, kv_lora_rank=512, moe_intermediate_size=1536, moe_layer_freq=1, n_group=8,
            n_routed_experts=160, n_shared_experts=2, norm_topk_prob=False, num_experts_per_tok=6, q_lora_rank=1536,
            qk_nope_head_dim=128, qk_rope_head_dim=64, rope_scaling=YARN_ROPE, rope_theta=10000, topk_group=3,
            routed_scaling_factor=16.0, scoring_func="softmax", tie_word_embeddings=False, v_head_dim=128,
            topk_method="group_limited_greedy", max_position_embeddings=163840,
        ),
        235_741_434_880,
        {"mla.query_rank": 1536, "moe.router_groups": 8, "moe.router_groups_per_token": 3, "moe.router_scale": 16.0},
    ),
    "deepseek_v3": (
        sizes(
            129280, 7168, 18432, 61, 128, 128, rms_norm_eps=1e-6, attention_bias=False, aux_loss_alpha=0.001,
            first_k_dense_replace=3, kv_lora_rank=512, moe_intermediate_size=2048, moe_layer_freq=1, n_group=8,
            n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8, q_lora_rank=1536,
            qk_nope_head_dim=128, qk_rope_head_dim=64, rope_theta=10000, routed_scaling_factor=2.5,
            rope_scaling=YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0}, scoring_func="sigmoid", topk_group=4,
            topk_method="noaux_tc", num_nextn_predict_layers=1, tie_word_embeddings=False, v_head_dim=128,
        ),
        671_026_419_200,
        {"moe.router": "sigmoid", "moe.router_bias": True, "moe.dense_layers": 3, "rope.mscale_all_dim": 1.0},
    ),
    "gemma3_text 1b": (
        sizes(262144, 1152, 6912, 26, 4, 1, head_dim=256, sliding_window=512, rope_scaling=None, **GEMMA3),
        999_885_952,
        {"pattern": (*["sliding"] * 5, "global"), "rope.theta": 1e6, "rope.sliding_theta": 1e4, "window": 512},
    ),
    "gemma3_text 27b": (
        sizes(
            262208, 5376, 21504, 62, 32, 16, head_dim=128, sliding_window=1024,
            rope_scaling={"factor": 8.0, "rope_type": "linear"}, **GEMMA3 | {"query_pre_attn_scalar": 168},
        ),
        27_009_346_304,
        {"attention_scale": 168**-0.5, "rope.factor": 8.0, "rope.sliding_theta": 1e4, "embedding_scale": 5376**0.5},
    ),
    "gemma4_text 31b": (
        sizes(262144, 5376, 21504, 60, 32, 16, num_global_key_value_heads=4, enable_moe_block=False, **GEMMA4),
        30_697_345_340,
        {"global_head_dim": 512, "global_kv_heads": 4, "rope.rotated_pairs": 64, "values_from_keys": True},
    ),
    "gemma4_text 26b": (
        sizes(
            262144, 2816, 2112, 30, 16, 8, num_global_key_value_heads=2, enable_moe_block=True, num_experts=128,
            top_k_experts=8, moe_intermediate_size=704, **GEMMA4,
        ),
        25_233_141_790,
        {"moe.experts": 128, "moe.shared_expert_width": 2112, "moe.own_norms": True, "moe.expert_scales": True},
    ),
    "gemma4_text e4b": (
        sizes(
            262144, 2560, 10240, 42, 8, 2, hidden_size_per_layer_input=256, num_kv_shared_layers=18,
            use_double_wide_mlp=False, layer_types=[*["sliding_attention"] * 5, "full_attention"] * 7, **GEMMA4_E,
        ),
        7_463_013_418,
        {"layer_input_size": 256, "shared_key_layers": 18, "wide_mlp": False, "global_head_dim": 512},
    ),
    "gemma4_text e2b": (
        sizes(
            262144, 1536, 6144, 35, 8, 1, hidden_size_per_layer_input=256, num_kv_shared_layers=20,
            use_double_wide_mlp=True, layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7, **GEMMA4_E,
        ),
        4_628_569_379,
        {"layer_input_size": 256, "shared_key_layers": 20, "wide_mlp": True, "values_from_keys": False},
    ),
    "olmo3 7b": (
        sizes(
            100278, 4096, 11008, 32, 32, 32, rope_theta=500000, rope_scaling=None, sliding_window=4096,
            attention_bias=False, tie_word_embeddings=False,
            layer_types=[*["sliding_attention"] * 3, "full_attention"] * 8,
        ),
        7_298_011_136,
        {"pattern": ("sliding", "sliding", "sliding", "global"), "rope.sliding_theta": 500_000.0},
    ),
    "ministral": (
        sizes(
            32000, 4096, 14336, 32, 32, 8, head_dim=128, sliding_window=4096, rope_theta=10000.0,
            layer_types=["sliding_attention", "full_attention"] * 16, tie_word_embeddings=False,
        ),
        7_241_732_096,
        {"pattern": ("sliding", "global")},
    ),
    "mistral small 3.1": (
        sizes(131072, 5120, 32768, 40, 32, 8, head_dim=128, rope_theta=1e9, sliding_window=None),
        23_572_403_200,
        {"pattern": ("global",), "head_dim": 128},
    ),
    "ministral3 8b": (
        sizes(
            131072, 4096, 14336, 34, 32, 8, head_dim=128, sliding_window=None, tie_word_embeddings=False,
            rope_parameters=YARN_ROPE | {"rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        ),
        8_489_553_920,
        {"rope.query_growth": 0.1, "rope.original_length": 16384, "rope.factor": 16.0},
    ),
    "glm4 32b": (
        sizes(
            151552, 6144, 23040, 61, 48, 2, head_dim=128, attention_bias=False, partial_rotary_factor=0.5,
            rope_theta=10000.0, tie_word_embeddings=False,
        ),
        32_566_081_536,
        {"rope.size": 64, "rope.interleaved": True, "biases": "none", "norm_placement": "both"},
    ),
    "glm4_moe 4.5": (
        sizes(
            151552, 5120, 12288, 92, 96, 8, head_dim=128, attention_bias=True, use_qk_norm=True, rope_theta=1000000,
            partial_rotary_factor=0.5, moe_intermediate_size=1536, n_routed_experts=160, first_k_dense_replace=3,
            routed_scaling_factor=2.5, num_nextn_predict_layers=1, tie_word_embeddings=False, **GLM_EXPERTS,
        ),
        352_797_829_024,
        {"qk_norm": "head", "biases": "qkv", "rope.size": 64, "moe.router_scale": 2.5, "moe.shared_expert_width": 1536},
    ),
    "glm4_moe air": (
        sizes(
            151552, 4096, 10944, 46, 96, 8, head_dim=128, attention_bias=True, use_qk_norm=False, rope_theta=1000000,
            partial_rotary_factor=0.5, moe_intermediate_size=1408, n_routed_experts=128, first_k_dense_replace=1,
            routed_scaling_factor=1.0, num_nextn_predict_layers=1, tie_word_embeddings=False, **GLM_EXPERTS,
        ),
        106_852_251_264,
        {"qk_norm": "none", "moe.router": "sigmoid", "moe.router_bias": True},
    ),
    "dots1": (
        sizes(
            152064, 4608, 10944, 62, 32, 32, attention_bias=False, moe_intermediate_size=1408, n_routed_experts=128,
            first_k_dense_replace=1, routed_scaling_factor=2.5, rope_theta=10000000, use_sliding_window=False,
            sliding_window=None, tie_word_embeddings=False, scoring_func="sigmoid", topk_method="noaux_tc",
            **GLM_EXPERTS | {"n_shared_experts": 2, "num_experts_per_tok": 6},
        ),
        161_206_283_840,
        {"qk_norm": "head", "moe.shared_expert_width": 2816, "head_dim": 144},
    ),
    "afmoe trinity mini": (
        sizes(
            200192, 2048, 6144, 32, 32, 4, head_dim=128, moe_intermediate_size=1024, num_experts=128,
            num_experts_per_tok=8, num_shared_experts=1, num_dense_layers=2, route_scale=2.826, mup_enabled=True,
            sliding_window=2048, global_attn_every_n_layers=4, rope_theta=10000, tie_word_embeddings=False,
        ),
        26_123_974_400,
        {"attention_gate": "element", "moe.router_scale": 2.826, "embedding_scale": 2048**0.5, "moe.experts": 128,
         "pattern": ("sliding", "sliding", "sliding", "global_nope"), "norm_placement": "both"},
    ),
    "minimax_m2": (
        sizes(
            200064, 3072, 1536, 62, 48, 8, head_dim=128, rotary_dim=64, rope_theta=5000000, num_local_experts=256,
            num_experts_per_tok=8, scoring_func="sigmoid", use_qk_norm=True, use_routing_bias=True,
            shared_intermediate_size=0, tie_word_embeddings=False,
        ),
        228_689_764_864,
        {"rope.size": 64, "qk_norm": "projection", "moe.router": "sigmoid", "moe.experts": 256},
    ),
    "granite 3.3 8b": (
        sizes(
            49159, 4096, 12800, 40, 32, 8, rope_theta=10000000.0, attention_bias=False, mlp_bias=False,
            embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=16.0, attention_multiplier=0.0078125,
            tie_word_embeddings=True,
        ),
        8_170_864_640,
        {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 1 / 16, "attention_scale": 1 / 128},
    ),
    "seed_oss 36b": (
        sizes(
            155136, 5120, 27648, 64, 80, 8, head_dim=128, attention_bias=True, attention_out_bias=False, mlp_bias=False,
            rope_theta=10000000.0, rope_scaling={"rope_type": "default"}, tie_word_embeddings=False,
        ),
        36_151_104_512,
        {"biases": "qkv", "head_dim": 128},
    ),
    "ernie4_5 0.3b": (
        sizes(103424, 1024, 3072, 18, 16, 2, head_dim=128, use_bias=False, rope_theta=500000.0),
        360_748_032,
        {"rope.interleaved": True, "tied_head": True},
    ),
    "phi3 4 mini": (
        sizes(
            200064, 3072, 8192, 32, 24, 8, partial_rotary_factor=0.75, sliding_window=262144, tie_word_embeddings=True,
            original_max_position_embeddings=4096, rope_scaling=LONG_ROPE, **LENGTH,
        ),
        3_836_021_760,
        {"rope.size": 96, "rope.scaling": "longrope", "rope.factor": 32.0},
    ),
    "glm4_moe_lite": (
        sizes(
            154880, 2048, 10240, 47, 20, 20, attention_bias=False, kv_lora_rank=512, q_lora_rank=768,
            qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, moe_intermediate_size=1536, n_routed_experts=64,
            first_k_dense_replace=1, routed_scaling_factor=1.8, num_nextn_predict_layers=1, partial_rotary_factor=1.0,
            rope_scaling=None, rope_theta=1000000, topk_method="noaux_tc", tie_word_embeddings=False,
            **GLM_EXPERTS | {"num_experts_per_tok": 4},
        ),
        29_943_393_920,
        {"mla.query_rank": 768, "head_dim": 256, "moe.dense_layers": 1, "moe.router_scale": 1.8, "moe.experts": 64},
    ),
    "ernie4_5_moe 21b": (
        sizes(
            103424, 2560, 12288, 28, 20, 4, use_bias=False, rope_theta=500000.0, tie_word_embeddings=True,
            **ERNIE_EXPERTS,
        ),
        21_825_437_888,
        {"moe.router_bias": True, "moe.router": "softmax", "moe.shared_expert_width": 3072, "moe.dense_layers": 1},
    ),
    "ernie4_5_moe 300b": (
        sizes(
            103424, 8192, 28672, 54, 64, 8, use_bias=False, rope_theta=500000.0, tie_word_embeddings=False,
            **ERNIE_EXPERTS | {"moe_k": 8, "moe_intermediate_size": 3584, "moe_num_shared_experts": 0}
            | {"moe_layer_start_index": 3, "moe_layer_end_index": 53},
        ),
        299_484_163_264,
        {"moe.experts_per_token": 8, "moe.shared_expert_width": 0, "moe.dense_layers": 3, "head_dim": 128},
    ),
    "granitemoe 1b": (
        sizes(
            49155, 1024, 512, 24, 16, 8, num_local_experts=32, attention_multiplier=0.015625, logits_scaling=6.0,
            **GRANITE_MOE,
        ),
        1_334_628_352,
        {"moe.experts": 32, "moe.expert_width": 512, "attention_scale": 1 / 64, "logit_scale": 1 / 6},
    ),
    "granitemoe 3b": (
        sizes(
            49155, 1536, 512, 32, 24, 8, num_local_experts=40, attention_multiplier=0.015625, logits_scaling=6.0,
            **GRANITE_MOE,
        ),
        3_298_793_472,
        {"moe.experts": 40, "moe.experts_per_token": 8, "residual_scale": 0.22, "embedding_scale": 12.0},
    ),
    "granitemoehybrid 4.0 1b": (
        sizes(
            100352, 2048, 4096, 40, 16, 4, num_local_experts=0, shared_intermediate_size=4096,
            layer_types=["attention"] * 40, position_embedding_type="rope", attention_multiplier=0.0078125,
            logits_scaling=8.0, mamba_n_heads=64, **GRANITE_MOE | {"rope_theta": 10000000},
        ),
        1_631_750_144,
        {"pattern": ("global",), "mlp_width": 4096, "moe.experts": 0, "attention_scale": 1 / 128},
    ),
    "hunyuan_v1_moe a13b": (
        sizes(
            128167, 4096, 3072, 32, 32, 8, num_experts=64, moe_topk=[8] * 32, moe_intermediate_size=[3072] * 32,
            num_shared_expert=[1] * 32, use_mixed_mlp_moe=True, moe_layer_num_skipped=0, norm_topk_prob=True,
            use_cla=False, **HUNYUAN,
        ),
        80_393_183_232,
        {"qk_norm": "rotated_head", "moe.experts": 64, "moe.experts_per_token": 8, "moe.shared_expert_width": 3072,
         "rope.theta": 1e4 * 1000 ** (128 / 126)},
    ),
    "qwen2_moe 1.5 a2.7b": (
        sizes(
            151936, 2048, 5632, 24, 16, 16, moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
            num_experts=60, num_experts_per_tok=4, norm_topk_prob=False, decoder_sparse_step=1, rope_theta=1000000.0,
            use_sliding_window=False, sliding_window=32768, max_window_layers=21, router_aux_loss_coef=0.001,
            tie_word_embeddings=False,
        ),
        14_315_784_192,
        {"moe.shared_expert_gate": True, "moe.shared_expert_width": 5632, "biases": "qkv", "pattern": ("global",)},
    ),
    "llama4_text scout": (
        sizes(
            202048, 5120, 8192, 48, 40, 8, num_local_experts=16, interleave_moe_layer_step=1, use_qk_norm=True,
            rope_scaling=LLAMA3_ROPE | {"factor": 16.0, "high_freq_factor": 1.0}, **LLAMA4,
        ),
        107_769_861_120,
        {"pattern": ("chunked", "chunked", "chunked", "global_nope"), "window": 8192, "qk_norm": "rotated_unit",
         "moe.router_weighs": "inputs", "moe.shared_expert_width": 8192, "rope.growth_length": 8192},
    ),
    "llama4_text maverick": (
        sizes(
            202048, 5120, 8192, 48, 40, 8, num_local_experts=128, interleave_moe_layer_step=2, use_qk_norm=False,
            rope_scaling=None, **LLAMA4,
        ),
        400_711_848_960,
        {"moe.expert_every": 2, "moe.experts": 128, "mlp_width": 16384, "qk_norm": "none", "rope.query_growth": 0.1},
    ),
    "kimi_k2": (
        sizes(
            163840, 7168, 18432, 61, 64, 64, rms_norm_eps=1e-6, attention_bias=False, aux_loss_alpha=0.001,
            first_k_dense_replace=1, kv_lora_rank=512, moe_intermediate_size=2048, moe_layer_freq=1,
            n_routed_experts=384, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            rope_theta=50000.0, routed_scaling_factor=2.827, scoring_func="sigmoid", topk_method="noaux_tc",
            rope_scaling=YARN_ROPE | {"beta_fast": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            tie_word_embeddings=False, architectures=["DeepseekV3ForCausalLM"], **GLM_EXPERTS,
        ),
        1_026_408_232_448,
        {"moe.experts": 384, "rope.high_frequency_factor": 1.0, "moe.router_groups": 1},
    ),
    "qwen3_vl_text 8b": (
        sizes(
            151936, 4096, 12288, 36, 32, 8, head_dim=128, attention_bias=False, rope_theta=5000000,
            rope_scaling={"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            tie_word_embeddings=False,
        ),
        8_190_735_360,
        {"qk_norm": "head", "rope.theta": 5e6},
    ),
    "qwen3_vl_moe_text 30b": (
        sizes(151936, 2048, 6144, 48, 32, 4, moe_intermediate_size=768, **QWEN3_VL_EXPERTS),
        30_532_122_624,
        {"moe.experts": 128, "moe.expert_width": 768, "moe.router_renormalises": True, "rope.theta": 5e6},
    ),
    "qwen3_vl_moe_text 235b": (
        sizes(151936, 4096, 12288, 94, 64, 4, moe_intermediate_size=1536, **QWEN3_VL_EXPERTS),
        235_093_634_560,
        {"qk_norm": "head", "moe.dense_layers": 0, "head_dim": 128, "tied_head": False},
    ),
    "arcee": (
        sizes(
            128004, 2560, 18432, 36, 20, 4, head_dim=128, hidden_act="relu2", attention_bias=False, mlp_bias=False,
            rope_theta=10000.0, rope_scaling=AFM_ROPE, tie_word_embeddings=False, max_position_embeddings=65536,
        ),
        4_619_184_640,
        {"mlp": "relu2", "rope.factor": 20.0, "rope.scaling": "yarn", "rope.original_length": 4096},
    ),
    "apertus": (
        sizes(131072, 4096, 21504, 32, 32, 8, rope_theta=12000000, rope_scaling=LLAMA3_ROPE, **APERTUS),
        8_053_338_176,
        {"mlp": "xielu", "qk_norm": "head", "rope.factor": 8.0, "head_dim": 128},
    ),
    "apertus 70b": (
        sizes(131072, 8192, 43008, 80, 64, 8, rope_theta=12000000, rope_scaling=LLAMA3_ROPE, **APERTUS),
        70_599_864_480,
        {"mlp": "xielu", "mlp_width": 43008},
    ),
    "hunyuan_v1_dense 0.5b": (
        sizes(120818, 1024, 3584, 24, 16, 8, **HUNYUAN),
        539_010_048,
        {"qk_norm": "rotated_head", "head_dim": 128, "rope.theta": 10000.0 * 1000.0 ** (128 / 126)},
    ),
    "hunyuan_v1_dense 1.8b": (sizes(120818, 2048, 6144, 32, 16, 4, **HUNYUAN), 1_791_080_448, {"tied_head": True}),
    "hunyuan_v1_dense 4b": (sizes(120818, 3072, 8192, 36, 32, 8, **HUNYUAN), 4_221_757_440, {"rope.scaling": "llama3"}),
    "hunyuan_v1_dense": (sizes(128167, 4096, 14336, 32, 32, 8, **HUNYUAN), 7_504_568_320, {"rope.factor": 1.0}),
    "exaone4": (
        sizes(
            102400, 5120, 27392, 64, 40, 8, head_dim=128, rope_theta=1000000, tie_word_embeddings=False,
            rope_scaling=LLAMA3_ROPE | {"factor": 16.0}, sliding_window=4096, sliding_window_pattern="LLLG",
            layer_types=[*["sliding_attention"] * 3, "full_attention"] * 16,
        ),
        32_003_216_384,
        {"pattern": ("sliding", "sliding", "sliding", "global_nope"), "norm_placement": "post", "qk_norm": "head"},
    ),
    "exaone4 1.2b": (
        sizes(
            102400, 2048, 4096, 30, 32, 8, head_dim=64, rope_theta=1000000, rope_scaling=LLAMA3_ROPE | {"factor": 16.0},
            sliding_window=None, sliding_window_pattern=None, tie_word_embeddings=True,
            layer_types=["full_attention"] * 30,
        ),
        1_279_391_488,
        {"pattern": ("global",), "tied_head": True},
    ),
    "cohere": (
        sizes(256000, 8192, 22528, 40, 64, 64, layer_norm_eps=1e-5, logit_scale=0.0625, rope_theta=8000000.0),
        34_980_831_232,
        {"norm": "layer_no_bias", "parallel_block": True, "logit_scale": 0.0625, "tied_head": True},
    ),
    "cohere2": (
        sizes(
            256000, 4096, 14336, 32, 32, 8, head_dim=128, layer_norm_eps=1e-5, logit_scale=0.25, rope_theta=50000,
            rope_scaling=None, sliding_window=4096, sliding_window_pattern=4, use_qk_norm=False, **LENGTH,
        ),
        8_028_033_024,
        {"pattern": ("sliding", "sliding", "sliding", "global_nope"), "rope.interleaved": True, "logit_scale": 0.25},
    ),
    "cohere2 command a": (
        sizes(
            256000, 12288, 36864, 64, 96, 8, head_dim=128, layer_norm_eps=1e-5, logit_scale=0.25, rope_theta=50000,
            rope_scaling=None, sliding_window=4096, sliding_window_pattern=4, use_qk_norm=False, **LENGTH,
        ),
        111_057_580_032,
        {"parallel_block": True},
    ),
    "gpt_oss 20b": (
        sizes(201088, 2880, 2880, 24, 64, 8, layer_types=["sliding_attention", "full_attention"] * 12, **GPT_OSS)
        | {"num_local_experts": 32},
        20_914_757_184,
        {"pattern": ("sliding", "global"), "window": 128, "biases": "all", "rope.factor": 32.0, "rope.truncate": False,
         "moe.experts": 32, "moe.experts_per_token": 4, "moe.expert_width": 2880, "attention_sinks": True},
    ),
    "gpt_oss 120b": (
        sizes(201088, 2880, 2880, 36, 64, 8, layer_types=["sliding_attention", "full_attention"] * 18, **GPT_OSS)
        | {"num_local_experts": 128},
        116_829_156_672,
        {"moe.experts": 128, "moe.experts_per_token": 4, "rope.theta": 150_000.0, "mlp": "clamped_swiglu"},
    ),
    "gemma 2b": (
        sizes(256000, 2048, 16384, 18, 8, 1, head_dim=256, hidden_act="gelu", rope_theta=10000.0)
        | {"hidden_activation": None},
        2_506_172_416,
        {"mlp": "geglu", "norm_zero_centered": True, "embedding_scale": 2048**0.5, "tied_head": True, "kv_heads": 1},
    ),
    "gemma 7b": (
        sizes(256000, 3072, 24576, 28, 16, 16, head_dim=256, hidden_act="gelu_pytorch_tanh", rope_theta=10000.0),
        8_537_680_896,
        {"norm_placement": "pre", "head_dim": 256},
    ),
    "glm 9b": (
        sizes(
            151552, 4096, 13696, 40, 32, 2, head_dim=128, attention_bias=True, partial_rotary_factor=0.5,
            rope_theta=10000.0, tie_word_embeddings=False,
        ),
        9_399_951_360,
        {"norm_placement": "pre", "biases": "qkv", "rope.size": 64, "rope.interleaved": True},
    ),
    "starcoder2 3b": (
        sizes(
            49152, 3072, 12288, 30, 24, 2, hidden_act="gelu_pytorch_tanh", norm_epsilon=1e-5, norm_type="layer_norm",
            mlp_type="default", use_bias=True, sliding_window=4096, rope_theta=999999.4420358813,
        ),
        3_030_371_328,
        {"norm": "layer", "mlp": "gelu", "biases": "all", "pattern": ("sliding",), "tied_head": True},
    ),
    "stablelm 2 1.6b": (
        sizes(
            100352, 2048, 5632, 24, 32, 32, layer_norm_eps=1e-5, use_qkv_bias=True, partial_rotary_factor=0.25,
            rope_theta=10000, tie_word_embeddings=False,
        ),
        1_644_515_328,
        {"norm": "layer", "biases": "qkv", "rope.size": 16, "mlp": "swiglu"},
    ),
    "stablelm 3b": (
        sizes(
            50304, 2560, 6912, 32, 32, 32, layer_norm_eps=1e-5, use_qkv_bias=False, partial_rotary_factor=0.25,
            rope_theta=10000, tie_word_embeddings=False,
        ),
        2_795_443_200,
        {"norm": "layer", "biases": "none", "rope.size": 20},
    ),
    "gpt2": (
        {
            "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_ctx": 1024,
            "layer_norm_epsilon": 1e-05, "activation_function": "gelu_new",
        },
        124_439_808,
        {"positions": "learned", "max_positions": 1024, "mlp_width": 3072, "biases": "all", "tied_head": True},
    ),
}  # fmt: skip


def published(name: str) -> dict[str, Any]:
    """Return the config.json of a model in `PUBLISHED`."""
    return {"model_type": name.split()[0], **PUBLISHED[name][0]}
