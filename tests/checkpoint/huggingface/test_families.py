"""Published config.json files as our models, checked against the published numbers of parameters."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from published import (
    HUNYUAN,
    LENGTH,
    LINEAR_ROPE,
    LLAMA3_ROPE,
    LONG_ROPE,
    PROPORTIONAL_ROPE,
    PUBLISHED,
    YARN_ROPE,
    published,
)

from jaxopt_llm.checkpoint.huggingface import codecs, find_family
from jaxopt_llm.checkpoint.huggingface.codecs import Unsupported
from jaxopt_llm.checkpoint.huggingface.family import canonicalise
from jaxopt_llm.checkpoint.huggingface.tensor_layout import list_tensor_layouts
from jaxopt_llm.config import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from jaxopt_llm.config.fields import get_field, replace_fields

pytestmark = pytest.mark.core


DELTA_MODEL: dict[str, Any] = {
    "pattern": ("gated_delta", "global"),
    "attention_gate": "element",
    "qk_norm": "head",
    "norm_zero_centered": True,
    "delta.kernel": 3,
}
GATED_EXPERT = {"moe.shared_expert_width": 8, "moe.shared_expert_gate": True}
LLAMA4_MODEL: dict[str, Any] = {
    "pattern": ("chunked", "global_nope"),
    "qk_norm": "rotated_unit",
    "rope.interleaved": True,
    "rope.query_growth": 0.3,
    "rope.growth_layers": "nope",
    "moe.experts": 4,
    "moe.experts_per_token": 1,
    "moe.shared_expert_width": 384,
    "moe.router": "sigmoid",
    "moe.router_renormalises": False,
    "moe.router_weighs": "inputs",
}
DEEPSEEK: dict[str, Any] = {
    "kv_heads": 4,
    "mla.kv_rank": 8,
    "moe.experts": 4,
    "moe.expert_width": 8,
    "moe.shared_expert_width": 16,
    "moe.router_renormalises": False,
}


COHERE: dict[str, Any] = {"norm": "layer_no_bias", "parallel_block": True, "rope.interleaved": True}


def read(settings: dict[str, Any]) -> ModelConfig:
    return find_family.find_by_settings(settings).read(settings)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_sizes(name: str) -> None:
    settings, (_, parameters, fields) = published(name), PUBLISHED[name]
    family, config = find_family.find_by_settings(settings), read(settings)
    assert {key: get_field(config, key) for key in fields} == fields
    shapes = [layout.shape for layout in list_tensor_layouts(family, config).values()]
    assert sum(map(math.prod, shapes)) == parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_written_config_reads_back_as_the_same_model(name: str) -> None:
    config = read(published(name))
    family = find_family.find_by_model(config, published(name))
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
        ("exaone4", {"layer_types": None, "sliding_window_pattern": 2}, ("sliding", "global_nope")),
        ("exaone4", {"layer_types": ["full_attention"] * 64}, ("global_nope",)),
        ("exaone4", {"layer_types": None, "sliding_window": None}, ("global",)),
        ("cohere2", {"sliding_window_pattern": None}, ("sliding", "sliding", "sliding", "global_nope")),
        ("cohere2", {"layer_types": ["full_attention"] * 32, "sliding_window": None}, ("global_nope",)),
    ],
)
def test_layer_kinds(name: str, changes: dict[str, Any], pattern: tuple[str, ...]) -> None:
    config = read(published(name) | changes)
    assert config.pattern == pattern
    family = find_family.find_by_settings(published(name))
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
    family = find_family.find_by_settings(published("qwen3_moe"))
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
        # The class of gpt-oss scales by default.
        (
            "gpt_oss 20b",
            {"rope_scaling": None},
            {"scaling": "yarn", "factor": 32.0, "truncate": False, "original_length": 4096},
        ),
        ("gpt_oss 20b", {"rope_scaling": {"rope_type": "default"}}, {"factor": 1.0}),
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
    family = find_family.find_by_settings(published(name))
    assert canonicalise(read(family.write(config))) == canonicalise(config)


@pytest.mark.parametrize(
    ("config", "family"),
    [
        (ModelConfig(), "llama"),
        (ModelConfig(kv_heads=4, mla=MLAConfig(kv_rank=8)), "youtu"),
        (ModelConfig(norm="layer", biases="all", mlp="gelu"), "starcoder2"),
        (ModelConfig(norm="layer", biases="qkv"), "stablelm"),
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
        (ModelConfig(moe=MoEConfig(experts=4, shared_expert_width=8)), "granitemoeshared"),
        (replace_fields(ModelConfig(), DELTA_MODEL), "qwen3_5_text"),
        (replace_fields(ModelConfig(), DELTA_MODEL | {"moe.experts": 4, **GATED_EXPERT}), "qwen3_next"),
        (replace_fields(ModelConfig(), LLAMA4_MODEL), "llama4_text"),
        (replace_fields(ModelConfig(), LLAMA4_MODEL | {"rope.growth_length": 9}), "llama4_text"),
        (ModelConfig(rope=RopeConfig(query_growth=0.1, growth_length=8192)), "ministral3"),
        (ModelConfig(mlp="clamped_swiglu", attention_sinks=True, biases="all", moe=MoEConfig(experts=4)), "gpt_oss"),
        (ModelConfig(moe=MoEConfig(balance_loss=0.5)), "llama"),
        (ModelConfig(rope=RopeConfig(scaling="yarn", factor=2.0)), "llama"),
        (ModelConfig(rope=RopeConfig(scaling="yarn", factor=2.0, mscale=2.0)), "llama"),  # as an attention_factor
        (
            ModelConfig(rope=RopeConfig(scaling="longrope", short_factors=(1.0,) * 16, long_factors=(2.0,) * 16)),
            "llama",
        ),
        (ModelConfig(pattern=("sliding",), rope=RopeConfig(scaling="dynamic", original_length=64)), "mistral"),
        (ModelConfig(mlp="relu2"), "arcee"),
        (ModelConfig(mlp="xielu", qk_norm="head"), "apertus"),
        (ModelConfig(qk_norm="rotated_head"), "hunyuan_v1_dense"),
        (ModelConfig(qk_norm="head", norm_placement="post", pattern=("sliding", "global_nope")), "exaone4"),
        (replace_fields(ModelConfig(), COHERE), "cohere"),
        (replace_fields(ModelConfig(), COHERE | {"pattern": ("sliding", "global_nope")}), "cohere2"),
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
    assert find_family.find_by_model(config).model_type == family


def test_a_family_that_cannot_express_the_balance_loss_does_not_fit() -> None:
    mixtral = next(family for family in find_family.FAMILIES if family.model_type == "mixtral")
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
        ({"attention_sinks": True}, "model.attention_sinks=True"),
        ({"moe.experts": 4, "qk_norm": "head", "biases": "all"}, "model.biases=all"),
        ({"rope.query_growth": 0.1, "rope.growth_length": 100}, "model.rope.growth_length=100"),
        ({"moe.experts": 4, "moe.router": "sigmoid"}, "model.moe.router=sigmoid"),
        ({"moe.experts": 4, "moe.router_bias": True}, "model.moe.router_bias=True"),
        ({"moe.experts": 4, "moe.router_groups": 2}, "model.moe.router_groups=2"),
        ({"moe.experts": 4, "moe.router_scale": 2.0}, "model.moe.router_scale=2.0"),
        ({"moe.experts": 4, "moe.dense_layers": 1}, "model.moe.dense_layers=1"),
        ({"kv_heads": 4, "mla.kv_rank": 8, "logit_softcap": 3.0}, "model.logit_softcap=3.0"),
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
        find_family.find_by_model(replace_fields(ModelConfig(), changes))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "qwen3_next 80b a3b",
            {"layer_types": ["linear_attention", "mamba"] * 24},
            "layer_types='mamba': only linear_attention and full_attention are read; the model would need layers of",
        ),
        ("qwen3_5_text 9b", {"attention_bias": True}, "attention_bias=True: only False is read; the model would need"),
        ("qwen3_5_text 9b", {"linear_num_value_heads": 24}, "model.delta.value_heads=24: must be a multiple of"),
        ("granite 3.3 8b", {"logits_scaling": 0}, "logits_scaling=0.0: must be above 0"),
        (
            "llama",
            {"model_type": "bert"},
            "model_type='bert': no family of this name is read; the nearest is ",
        ),
        (
            "llama",
            {"architectures": ["LlamaForTokenClassification"]},
            "only LlamaForCausalLM or LlamaForSequenceClassification is read",
        ),
        (
            "llama",
            {"architectures": ["LlamaForSequenceClassification"], "problem_type": "multi_label_classification"},
            "problem_type='multi_label_classification': only 'single_label_classification' is read",
        ),
        ("cohere", {"architectures": ["CohereForSequenceClassification"]}, "only CohereForCausalLM is read"),
        (
            "llama",
            {"quantization_config": {"quant_method": "hqq"}},
            "quant_method='hqq': of weights as codes, only those of fp8, mxfp4, compressed-tensors, gptq, awq",
        ),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        ("llama", {"hidden_size": "4096"}, "hidden_size='4096': must be a whole number"),
        ("llama", {"hidden_size": 2**40}, "must be a whole number below"),
        ("llama", {"num_attention_heads": 0}, "model.heads=0: must be at least 1"),
        ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps=inf: must be a finite number"),
        ("olmo2", {"attention_bias": True}, "attention_bias=True: only False"),
        ("llama", {"hidden_act": "relu"}, "hidden_act='relu': only 'silu'"),
        ("gpt_oss 20b", {"swiglu_limit": 5.0}, "swiglu_limit=5.0: only 7.0 is read"),
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
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "moe"] * 24}, "mlp_layer_types='moe': must be dense or sparse"),
        ("glm4_moe_lite", {"first_k_dense_replace": "1"}, "first_k_dense_replace='1': must be a whole number"),
        ("hunyuan_v1_moe a13b", {"moe_topk": [[8]] * 32}, "moe_topk=.*: must be a whole number"),
        ("llama4_text scout", {"layer_types": [["chunked_attention"]] * 48}, "layer_types=.*chunked_attention"),
        ("granitemoehybrid 4.0 1b", {"position_embedding_type": ["rope"]}, "position_embedding_type="),
        ("glm4_moe_lite", {"first_k_dense_replace": 3}, "first_k_dense_replace=3: differs from mlp_layer_types"),
        (
            "glm4_moe_lite",
            {"mlp_layer_types": ["sparse"] * 46 + ["dense"], "first_k_dense_replace": None},
            "mlp_layer_types=.*: from some layer on",
        ),
        ("hunyuan_v1_moe a13b", {"moe_topk": [8] * 31 + [4]}, "moe_topk=.*: the model would need another number in"),
        ("hunyuan_v1_moe a13b", {"use_cla": True}, "use_cla=True: only False"),
        (
            "qwen2_moe 1.5 a2.7b",
            {"shared_expert_intermediate_size": 0},
            "shared_expert_intermediate_size=0: must be at",
        ),
        ("qwen2_moe 1.5 a2.7b", {"layer_types": ["sliding_attention"] * 24}, "requires use_sliding_window=true"),
        ("llama4_text scout", {"attention_chunk_size": None}, "attention_chunk_size is missing"),
        ("llama4_text scout", {"attn_temperature_tuning": "yes"}, "attn_temperature_tuning='yes': must be true or"),
        ("llama4_text scout", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1: only 0.0"),
        ("llama4_text scout", {"moe_layers": [0, 5]}, "moe_layers=.*: from some layer on"),
        ("qwen3_vl_moe_text 30b", {"norm_topk_prob": False}, "norm_topk_prob=False: only True is read; .* another sum"),
        ("llama4_text scout", {"moe_layers": "all"}, "moe_layers='all': must be a list of layers"),
        (
            "llama4_text scout",
            {"layer_types": ["chunked_attention"] * 48},
            "layer_types='chunked_attention', no_rope_layers=0: only chunked_attention with RoPE",
        ),
        ("ernie4_5_moe 21b", {"use_bias": True}, "use_bias=True: only False"),
        ("ernie4_5_moe 21b", {"moe_layer_end_index": 20}, "moe_layer_end_index=20, moe_layer_interval=1: from some"),
        ("ernie4_5_moe 21b", {"moe_norm_min": 0.5}, "moe_norm_min=0.5: only 1e-12"),
        ("granitemoehybrid 4.0 1b", {"layer_types": ["mamba"] * 40}, "layer_types='mamba': only 'attention' is read"),
        ("granitemoehybrid 4.0 1b", {"layer_types": None}, "layer_types='mamba': only 'attention' is read"),
        ("granitemoehybrid 4.0 1b", {"num_local_experts": 8}, "num_local_experts=8: only 0 is read"),
        (
            "granitemoehybrid 4.0 1b",
            {"position_embedding_type": "learned"},
            "position_embedding_type='learned': only 'rope' and",
        ),
        ("arcee", {"hidden_act": "silu"}, "hidden_act='silu': only 'relu2'"),
        ("apertus", {"hidden_act": "relu2"}, "hidden_act='relu2': only 'xielu'"),
        (
            "hunyuan_v1_dense",
            {"rope_scaling": HUNYUAN["rope_scaling"] | {"alpha": -1.0}},
            "alpha=-1.0: must be at least",
        ),
        ("exaone4", {"layer_types": None}, "sliding_window_pattern='LLLG': must be a whole number"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm=True: only False"),
        ("cohere2", {"head_dim": 64}, "head_dim=64: times num_attention_heads=32 it must be hidden_size=4096"),
        ("cohere2", {"sliding_window": None, "layer_types": ["sliding_attention"] * 32}, "sliding_window is missing"),
        ("gemma4_text e4b", {"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input=9: only vocab_size=262144"),
        ("gemma4_text e4b", {"num_kv_shared_layers": 40}, "shared_key_layers=40: no earlier layer that is global has"),
        ("gemma4_text e4b", {"num_kv_shared_layers": 42}, "shared_key_layers=42: no earlier layer that is sliding has"),
        ("gemma4_text 31b", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all': only 'vision'"),
        ("gemma4_text 31b", {"per_layer_config": {"5": {"head_dim": 512}}}, "per_layer_config=.*: only head_dim and"),
        ("gemma4_text 31b", {"rope_parameters": PROPORTIONAL_ROPE}, "partial_rotary_factor=0.001: must be a share of"),
        ("gemma4_text 26b", {"top_k_experts": None}, "top_k_experts is missing"),
        ("gemma2", {"num_attention_heads": 15}, "hidden_size=3584: must be a multiple of num_attention_heads=15"),
    ],
)
def test_unsupported_config_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        read(published(name) | changes)
