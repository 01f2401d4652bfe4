"""Published config.json files as our models, checked against the published numbers of parameters."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from jaxopt_llm.checkpoint.huggingface import codecs, families
from jaxopt_llm.checkpoint.huggingface.codecs import Unsupported
from jaxopt_llm.checkpoint.huggingface.family import canonicalise
from jaxopt_llm.checkpoint.huggingface.tensor_layout import list_tensor_layouts
from jaxopt_llm.config import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from jaxopt_llm.config.fields import get_field, replace_fields

pytestmark = pytest.mark.core


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
LENGTH = {"max_position_embeddings": 131_072}
LONG_ROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
GEMMA3 = {
    **{"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000},
    **{"rope_theta": 1000000, "sliding_window_pattern": 6, "attn_logit_softcapping": None},
}
GLM_EXPERTS = {"n_shared_experts": 1, "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 8}
# As published, in the older form and without the fields that each omits: config.json, number of parameters, and some
# of our fields.
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
    "gpt2": (
        {
            "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_ctx": 1024,
            "layer_norm_epsilon": 1e-05, "activation_function": "gelu_new",
        },
        124_439_808,
        {"positions": "learned", "max_positions": 1024, "mlp_width": 3072, "biases": "all", "tied_head": True},
    ),
}  # fmt: skip


DEEPSEEK: dict[str, Any] = {
    "kv_heads": 4,
    "mla.kv_rank": 8,
    "moe.experts": 4,
    "moe.expert_width": 8,
    "moe.shared_expert_width": 16,
    "moe.router_renormalises": False,
}


def published(name: str) -> dict[str, Any]:
    return {"model_type": name.split()[0], **PUBLISHED[name][0]}


def read(settings: dict[str, Any]) -> ModelConfig:
    return families.find_by_settings(settings).read(settings)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_sizes(name: str) -> None:
    settings, (_, parameters, fields) = published(name), PUBLISHED[name]
    family, config = families.find_by_settings(settings), read(settings)
    assert {key: get_field(config, key) for key in fields} == fields
    shapes = [layout.shape for layout in list_tensor_layouts(family, config).values()]
    assert sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes) == parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_written_config_reads_back_as_the_same_model(name: str) -> None:
    config = read(published(name))
    family = families.find_by_model(config, published(name))
    assert published(name)["model_type"] in family.model_types
    assert canonicalise(read(family.write(config))) == canonicalise(config)


@pytest.mark.parametrize(
    ("name", "changes", "pattern"),
    [
        ("mistral", {"sliding_window": None}, ("global",)),
        (
            "qwen2",
            {"use_sliding_window": True, "max_window_layers": 3, "num_hidden_layers": 5},
            ("global", "global", "global", "sliding", "sliding"),
        ),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, ("sliding",)),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"] * 21}, ("global", "sliding")),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2}, ("global", "global_nope")),
        ("gemma2", {"layer_types": None}, ("sliding", "global")),
        ("ministral", {"layer_types": None}, ("sliding",)),
        ("ministral", {"model_type": "mistral"}, ("sliding", "global")),  # as transformers reads it
    ],
)
def test_layer_kinds(name: str, changes: dict[str, Any], pattern: tuple[str, ...]) -> None:
    config = read(published(name) | changes)
    assert config.pattern == pattern
    family = families.find_by_settings(published(name))
    assert read(family.write(config)) == config


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"mlp_only_layers": [0, 1]}, {"moe.dense_layers": 2, "moe.expert_every": 1}),
        ({"decoder_sparse_step": 3}, {"moe.dense_layers": 0, "moe.expert_every": 3}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 1, 3]}, {"moe.dense_layers": 5, "moe.expert_every": 2}),
        ({"mlp_only_layers": list(range(0, 48, 2))}, {"moe.dense_layers": 0, "moe.expert_every": 2}),
        (
            {"mlp_only_layers": list(range(46)), "num_hidden_layers": 47},
            {"moe.dense_layers": 46, "moe.expert_every": 1},
        ),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
            {"pattern": ("sliding",), "window": 8},
        ),
        ({"num_experts": None, "num_local_experts": 16}, {"moe.experts": 16}),
        ({"num_experts": None}, {"moe.experts": 128}),
    ],
)
def test_expert_layers_and_windows(changes: dict[str, Any], fields: dict[str, Any]) -> None:
    config = read(published("qwen3_moe") | changes)
    assert {name: get_field(config, name) for name in fields} == fields
    family = families.find_by_settings(published("qwen3_moe"))
    written = family.write(config)
    assert read(written) == config
    # The rule of the class in transformers, for each layer.
    original = published("qwen3_moe") | changes
    for settings in (original, written):
        sparse = [
            layer not in settings["mlp_only_layers"] and (layer + 1) % settings["decoder_sparse_step"] == 0
            for layer in range(config.layers)
        ]
        assert sparse == [config.moe.has_experts(layer) for layer in range(config.layers)]


@pytest.mark.parametrize("count", range(1, 8))
def test_expert_layers_have_the_smallest_description(count: int) -> None:
    """Compare with an exhaustive search over the two fields; some sets of layers have no description."""
    pairs = [(every, dense) for every in range(1, count + 1) for dense in range(count)]
    expected: dict[tuple[bool, ...], tuple[int, int]] = {}
    for every, dense in pairs:
        expected.setdefault(
            tuple(layer >= dense and (layer + 1) % every == 0 for layer in range(count)), (dense, every)
        )
    for layers in itertools.product((False, True), repeat=count):
        found = codecs.find_expert_layers([*layers])
        assert (found is not None) == (any(layers) and layers in expected), layers
        if found is not None:
            dense, every = found
            assert layers == tuple(layer >= dense and (layer + 1) % every == 0 for layer in range(count))
            assert every == expected[layers][1]


def test_rope_fields_have_the_precedence_of_transformers() -> None:
    both = published("llama") | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    config = read(both | {"rope_scaling": LLAMA3_ROPE, "original_max_position_embeddings": 4096})
    assert (config.rope.factor, config.rope.theta, config.rope.original_length) == (8.0, 10_000.0, 4096)


@pytest.mark.parametrize(
    ("name", "changes", "fields"),
    [
        ("llama", {"rope_scaling": LINEAR_ROPE}, {"scaling": "linear", "factor": 2.0}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 1.0}}, {"scaling": "linear", "factor": 1.0}),
        (
            "llama",
            {"rope_scaling": {"type": "dynamic", "factor": 3}, "max_position_embeddings": 2048},
            {"scaling": "dynamic", "factor": 3.0, "original_length": 2048},
        ),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 2048},
            {"original_length": 2048, "high_frequency_factor": 32.0, "attention_factor": 0.0, "truncate": True},
        ),
        ("llama", {"rope_scaling": YARN_ROPE}, {"attention_factor": 1.0, "mscale_all_dim": 0.0}),
        ("llama", {"rope_scaling": YARN_ROPE | {"mscale": None}}, {"attention_factor": 0.0}),
        ("qwen3", {"rope_scaling": YARN_ROPE | {"attention_factor": 1.5}}, {"attention_factor": 1.5}),
        ("qwen3", {"rope_scaling": YARN_ROPE | {"truncate": False}}, {"truncate": False}),
        ("deepseek_v2", {"rope_scaling": LLAMA3_ROPE}, {"scaling": "llama3", "factor": 8.0}),
        (
            "deepseek_v2",
            {"rope_scaling": YARN_ROPE | {"mscale": None, "factor": 2.0}},
            {"attention_factor": 1 + 0.1 * math.log(2), "mscale_all_dim": 0.707},
        ),
        (
            "deepseek_v2",
            {"rope_scaling": YARN_ROPE | {"attention_factor": 1.5}},
            {"attention_factor": 1.5, "mscale_all_dim": 0.707},
        ),
        (
            "deepseek_v2",
            {"rope_scaling": YARN_ROPE | {"factor": None}, "max_position_embeddings": 8192},
            {"factor": 2.0, "original_length": 4096},
        ),
        (
            "phi3",
            {"rope_scaling": LONG_ROPE, "original_max_position_embeddings": 4096, "max_position_embeddings": 131072},
            {"scaling": "longrope", "factor": 32.0, "original_length": 4096, "long_factors": (2.0,) * 48},
        ),
        ("phi3", {"rope_scaling": LONG_ROPE | {"type": "su"}, "max_position_embeddings": 4096}, {"factor": 1.0}),
        # The class of Phi-3 has its own original length, which takes precedence over the one inside.
        (
            "phi3",
            {"rope_scaling": LONG_ROPE | {"original_max_position_embeddings": 64}, "max_position_embeddings": 8192},
            {"original_length": 4096, "factor": 2.0},
        ),
    ],
)
def test_rope_kinds(name: str, changes: dict[str, Any], fields: dict[str, Any]) -> None:
    config = read(published(name) | changes)
    assert {each: get_field(config.rope, each) for each in fields} == fields
    family = families.find_by_settings(published(name))
    assert canonicalise(read(family.write(config))) == canonicalise(config)


@pytest.mark.parametrize(
    ("config", "family"),
    [
        (ModelConfig(), "llama"),
        (ModelConfig(pattern=("sliding",) * 3), "mistral"),
        (ModelConfig(width=36, heads=5, kv_heads=5, head_dim=8), "mistral"),  # Llama's class refuses this width
        (ModelConfig(pattern=("global", "sliding"), biases="qkv"), "qwen2"),
        (ModelConfig(pattern=("global", "sliding"), qk_norm="head"), "qwen3"),
        (ModelConfig(pattern=("global_nope", "global")), "smollm3"),
        (ModelConfig(mlp_width=7, moe=MoEConfig(experts=4)), "mixtral"),  # no layer reads mlp_width
        (ModelConfig(qk_norm="head", moe=MoEConfig(experts=4, dense_layers=1)), "qwen3_moe"),
        (
            ModelConfig(moe=MoEConfig(experts=4, expert_every=5, experts_per_token=3)),
            "llama",
        ),  # none of the 4 layers has experts
        # These fields do not change logits, except for the capacity, which generation does not use.
        (
            ModelConfig(moe=MoEConfig(experts=4, router_z_loss=0.1, router_bias_rate=0.1, capacity_factor=1.5)),
            "mixtral",
        ),
        (ModelConfig(qk_norm="projection", head_dim=32, width=128, moe=MoEConfig(experts=4)), "olmoe"),
        (ModelConfig(moe=MoEConfig(balance_loss=0.5)), "llama"),
        (ModelConfig(rope=RopeConfig(scaling="yarn", factor=2.0)), "llama"),
        (ModelConfig(rope=RopeConfig(scaling="yarn", factor=2.0, mscale=2.0)), "llama"),  # as an attention_factor
        (
            ModelConfig(rope=RopeConfig(scaling="longrope", short_factors=(1.0,) * 16, long_factors=(2.0,) * 16)),
            "llama",
        ),
        (ModelConfig(pattern=("sliding",), rope=RopeConfig(scaling="dynamic", original_length=64)), "mistral"),
        (replace_fields(ModelConfig(), DEEPSEEK), "deepseek_v2"),
        (
            replace_fields(
                ModelConfig(),
                DEEPSEEK | {"moe.router_bias": True, "moe.router": "sigmoid", "moe.router_bias_rate": 0.0},
            ),
            "deepseek_v3",
        ),
        (
            ModelConfig(rope=RopeConfig(scaling="yarn", mscale=2.0), mla=MLAConfig(query_rank=7)),
            "llama",
        ),  # no layer reads these fields
    ],
)
def test_find_by_model(config: ModelConfig, family: str) -> None:
    assert families.find_by_model(config).model_type == family


def test_a_family_that_cannot_express_the_balance_loss_does_not_fit() -> None:
    mixtral = next(family for family in families.FAMILIES if family.model_type == "mixtral")
    without = codecs.copy_fields({"moe.experts_per_token": "num_experts_per_tok"})
    lacking = replace(mixtral, codecs=tuple(without if each is codecs.TOP_K else each for each in mixtral.codecs))
    config = ModelConfig(moe=MoEConfig(experts=4, balance_loss=0.5))
    assert (mixtral.find_differences(config), lacking.find_differences(config)) == ([], ["model.moe.balance_loss=0.5"])


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"logit_softcap": 3.0}, "model.logit_softcap=3.0"),
        ({"norm_zero_centered": True}, "model.norm_zero_centered=True"),
        ({"pattern": ("sliding", "global_nope")}, "model.pattern="),
        ({"moe.experts": 4, "moe.router": "sigmoid"}, "model.moe.router=sigmoid"),
        ({"moe.experts": 4, "moe.router_bias": True}, "model.moe.router_bias=True"),
        ({"moe.experts": 4, "moe.router_groups": 2}, "model.moe.router_groups=2"),
        ({"moe.experts": 4, "moe.router_scale": 2.0}, "model.moe.router_scale=2.0"),
        ({"moe.experts": 4, "moe.shared_expert_width": 8}, "model.moe.shared_expert_width=8"),
        ({"moe.experts": 4, "moe.dense_layers": 1}, "model.moe.dense_layers=1"),
        ({"kv_heads": 4, "mla.kv_rank": 8}, "model.mla.kv_rank=8"),
        (
            DEEPSEEK | {"moe.shared_expert_width": 9},
            "model.moe.shared_expert_width=9: must be a multiple of model.moe.expert_width=8",
        ),
        ({"rope.scaling": "yarn", "rope.factor": 2.0, "rope.mscale_all_dim": 0.5}, "model.rope.mscale_all_dim=0.5"),
        (DEEPSEEK | {"moe.expert_every": 2}, "model.moe.expert_every=2"),
        (DEEPSEEK | {"moe.router": "sigmoid"}, "model.moe.router=sigmoid"),
    ],
)
def test_model_that_fits_no_family_is_refused(changes: dict[str, Any], missing: str) -> None:
    with pytest.raises(
        Unsupported, match="no Hugging Face family fits the model; the nearest, .*, does not support .*" + missing
    ):
        families.find_by_model(replace_fields(ModelConfig(), changes))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "llama",
            {"model_type": "bert"},
            "model_type='bert': no family of this name is read; the nearest is ",
        ),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "only LlamaForCausalLM"),
        (
            "llama",
            {"quantization_config": {"quant_method": "gptq"}},
            "quant_method='gptq': of weights as codes, only 'fp8' is read",
        ),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        ("llama", {"hidden_size": "4096"}, "hidden_size='4096': must be a whole number"),
        ("llama", {"hidden_size": 2**40}, "must be a whole number below"),
        ("llama", {"num_attention_heads": 0}, "model.heads=0: must be at least 1"),
        ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps=inf: must be a finite number"),
        ("olmo2", {"attention_bias": True}, "attention_bias=True: only False"),
        ("llama", {"hidden_act": "relu"}, "hidden_act='relu': only 'silu'"),
        ("llama", {"rope_scaling": {"type": "proportional"}}, "rope_type='proportional': the model would need other"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "model.rope.factor=0.5: must be at least 1"),
        ("llama", {"rope_parameters": {"full_attention": {}}}, "need other frequencies in some of its layers"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "factor is missing"),
        ("phi3", LENGTH | {"rope_scaling": {"type": "longrope"}}, "short_factor=None: must be a list of numbers"),
        (
            "phi3",
            LENGTH | {"rope_scaling": LONG_ROPE | {"short_factor": [1.0]}},
            "short_factors: 1 values; .*each of the 48",
        ),
        (
            "phi3",
            LENGTH | {"rope_scaling": LONG_ROPE | {"long_factor": [0.0] * 48}},
            "long_factors: 0.0 must be above 0",
        ),
        (
            "phi3",
            LENGTH | {"rope_scaling": LONG_ROPE | {"long_factor": ["1"] * 48}},
            "long_factor='1': must be a finite number",
        ),
        ("phi3", {"rope_scaling": LINEAR_ROPE}, "rope_type='linear': .* those of 'default', 'longrope', 'su', 'yarn'"),
        ("qwen3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor=0.75"),
        (
            "qwen2",
            {"layer_types": ["sliding_attention"] * 28},
            "layer_types: sliding_attention requires use_sliding_window=true",
        ),
        ("gemma2", {"layer_types": ["linear_attention"] * 42}, "layer_types='linear_attention': only"),
        ("gemma2", {"layer_types": ["full_attention"]}, "a value for each of the 42 layers"),
        ("smollm3", {"no_rope_layers": [2] * 36}, "no_rope_layers=.*: must contain only 0 and 1"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval=0"),
        ("qwen2", {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers=2147483647: must be at most 10,000"),
        ("llama", {"rope_theta": 10**400}, "must be a finite number"),
        ("smollm3", {"use_sliding_window": True}, "windows together with layers without positions"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2", {"n_head": 7}, "n_embd=768: must be a multiple of n_head=7"),
        ("gpt2", {"num_attention_heads": 6}, "num_attention_heads=6: it is another name of n_head, which is 12"),
        ("llama", {"is_causal": False}, "is_causal=False: only True"),
        ("qwen2", {"per_layer_config": {"2": {"rms_norm_eps": 1.0}}}, "per_layer_config"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1: only 0.0"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts=0: must be at least 1"),
        ("mixtral", {"num_experts": 4}, "num_experts=4: it is another name of num_local_experts, which is 8"),
        ("mixtral", {"num_experts_per_tok": 9}, "experts_per_token=9: must be at most model.moe.experts=8"),
        ("mixtral", {"layer_types": ["full_attention"] * 32}, "layer_types=.*: only null"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen3_moe", {"mlp_only_layers": [3]}, "mlp_only_layers=\\[3\\], decoder_sparse_step=1: from some layer on"),
        ("qwen3_moe", {"mlp_only_layers": list(range(48))}, "every n-th layer must have experts"),
        ("qwen3_moe", {"mlp_only_layers": [True]}, "mlp_only_layers=\\[True\\]: must be a list of layers"),
        (
            "qwen3_moe",
            {"num_experts": 2**31 - 1},
            "model.moe.experts=2147483647 × model.layers=48: must be at most 200,000",
        ),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0: must be at least 1"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, "max_window_layers=48: only 0 is read"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0: only null"),
        ("olmoe", {"sliding_window": 8}, "sliding_window=8: only null"),
        ("olmoe", {"head_dim": 64}, "head_dim=64: times num_attention_heads=16 it must be hidden_size=2048"),
        ("deepseek_v2", {"num_key_value_heads": 8}, "num_key_value_heads=8: only num_attention_heads=128"),
        ("deepseek_v2", {"kv_lora_rank": 0}, "kv_lora_rank=0: must be at least 1"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True: only False"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc': only 'greedy' and"),
        ("deepseek_v2", {"n_group": None}, "n_group is missing"),
        ("deepseek_v2", {"n_shared_experts": 0}, "n_shared_experts=0: must be at least 1"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq=2: only 1"),
        ("deepseek_v2", {"first_k_dense_replace": 60}, "model.moe.dense_layers=60: must be below"),
        (
            "deepseek_v2",
            {"rope_scaling": LINEAR_ROPE | {"mscale_all_dim": 0.7}},
            "mscale_all_dim=0.7: rope_type='linear' would need scaled scores",
        ),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False: only True"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax': only 'sigmoid'"),
        ("deepseek_v3", {"n_group": 7}, "model.moe.experts=256: must be a multiple of model.moe.router_groups=7"),
        ("gemma2", {"num_attention_heads": 15}, "hidden_size=3584: must be a multiple of num_attention_heads=15"),
    ],
)
def test_unsupported_config_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        read(published(name) | changes)
