"""Every placement computes the same: a pairwise cover of the settings that place it, against one device."""

import functools
import math
from dataclasses import fields, replace
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import jax
import numpy as np
import pytest
import toy
from matrix import pairwise

from jaxopt_llm.config import (
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    PrecisionConfig,
    RematConfig,
    ScheduleConfig,
    ShardingConfig,
    TrainingConfig,
)
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.config.parallel import Residuals
from jaxopt_llm.core import tree
from jaxopt_llm.kernels import attention_xla
from jaxopt_llm.kernels.attention import IMPLEMENTATIONS
from jaxopt_llm.kernels.attention_auto import AttentionChoice
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import checkpoint_sharding
from jaxopt_llm.step import state as training_state

UNTIED: dict[str, Any] = {"tied_head": False, "norm_placement": "post", "qk_norm": "head", "biases": "qkv"}
# By which head, the one of two segments and two kinds of block, and with many of the decoder's switches on.
MODELS = {
    "tied": toy.UNIFORM,
    "global": replace(toy.UNIFORM, pattern=("global",), mlp="relu2"),
    "untied": replace(toy.UNIFORM, **UNTIED),
    "segments": replace(toy.CONFIG, **UNTIED),
    "gpt": replace(
        toy.UNIFORM,
        norm="layer",
        positions="learned",
        max_positions=16,
        biases="all",
        mlp="gelu",
        attention_softcap=5.0,
    ),
    "gemma": replace(
        toy.UNIFORM,
        biases="mlp",
        norm_placement="both",
        norm_zero_centered=True,
        qk_norm="projection",
        mlp="geglu",
        attention_softcap=5.0,
        logit_softcap=5.0,
        embedding_scale=4.0,
        residual_scale=0.6,
        logit_scale=0.7,
    ),
    "positions": replace_fields(
        toy.CONFIG,
        {
            "head_dim": 8,
            "biases": "attention",
            "rope.sliding_theta": 30.0,
            "rope.size": 4,
            "rope.interleaved": True,
            "rope.query_growth": 0.7,
            "rope.scaling": "dynamic",
            "rope.factor": 3.0,
            "rope.original_length": 3,
        },
    ),
    "parallel": replace(
        toy.UNIFORM,
        norm="layer_no_bias",
        parallel_block=True,
        qk_norm="rotated_head",
        attention_gate="element",
        mlp="xielu",
        tied_head=False,
    ),
    "experts": replace_fields(
        toy.UNIFORM,
        {"layers": 4, "moe.experts": 4, "moe.expert_width": 8, "moe.expert_every": 2, "moe.router_z_loss": 1e-2},
    ),
    "shared": replace_fields(
        toy.UNIFORM,
        {
            "moe.experts": 8,
            "moe.experts_per_token": 3,
            "moe.expert_width": 4,
            "moe.shared_expert_width": 8,
            "moe.dense_layers": 1,
            "moe.router": "sigmoid",
            "moe.router_scale": 2.5,
            "moe.router_groups": 4,
            "moe.router_groups_per_token": 2,
            "moe.router_bias": True,
            "moe.balance_loss": 0.1,
            "moe.capacity_factor": 1.0,
        },
    ),
}
# Documents of several chunks; the scores weigh the inputs of experts.
MODELS["llama4"] = replace_fields(
    toy.UNIFORM,
    {
        "layers": 4,
        "pattern": ("chunked", "global_nope"),
        "qk_norm": "rotated_unit",
        "rope.interleaved": True,
        "rope.query_growth": 0.7,
        "rope.growth_layers": "nope",
        "rope.growth_length": 3,
        "moe.experts": 4,
        "moe.experts_per_token": 1,
        "moe.expert_width": 8,
        "moe.expert_every": 2,
        "moe.shared_expert_width": 8,
        "moe.router": "sigmoid",
        "moe.router_renormalises": False,
        "moe.router_weighs": "inputs",
        "moe.shared_expert_gate": True,
    },
)
LATENT: dict[str, Any] = {
    "kv_heads": 4,
    "head_dim": 6,
    "mla.kv_rank": 16,
    "mla.rotary_head_dim": 4,
    "mla.value_head_dim": 3,
    "rope.scaling": "yarn",
    "rope.factor": 4.0,
    "rope.original_length": 32,
    "rope.mscale_all_dim": 0.7,
}
MODELS |= {
    "latent": replace_fields(toy.UNIFORM, {**LATENT, "mla.query_rank": 16}),
    "deepseek": replace_fields(MODELS["shared"], {**LATENT, "moe.capacity_factor": 0.0}),
    "gpt_oss": replace_fields(
        toy.CONFIG,
        {
            "attention_sinks": True,
            "biases": "all",
            "mlp": "clamped_swiglu",
            "tied_head": False,
            "moe.experts": 4,
            "moe.expert_width": 8,
        },
    ),
    # Two sizes of heads, and key-value heads that a part of the devices of `tensor` share in global layers only.
    "gemma4": replace_fields(
        toy.CONFIG,
        {
            "norm_epsilon": 1.0,  # norms of small results would make rounding exceed the tolerance
            "logit_scale": 4.0,
            "norm_placement": "both",
            "qk_norm": "head",
            "mlp": "geglu",
            "global_head_dim": 8,
            "global_kv_heads": 1,
            "values_from_keys": True,
            "value_norm": True,
            "layer_scales": True,
            "rope.sliding_theta": 30.0,
            "rope.rotated_pairs": 3,
        },
    ),
}

MODELS["gemma4_experts"] = replace_fields(
    MODELS["gemma4"],
    {
        "layers": 4,  # one segment
        "moe.experts": 4,
        "moe.expert_width": 8,
        "moe.shared_expert_width": 12,
        "moe.own_norms": True,
        "moe.expert_scales": True,
    },
)
MODELS["gemma4_keys"] = replace_fields(
    MODELS["gemma4"],
    {"values_from_keys": False, "shared_key_layers": 2, "wide_mlp": True, "layer_input_size": 8},
)


# Layers with a state between layers with gated attention, and experts.
MODELS["qwen3_next"] = replace_fields(
    toy.UNIFORM,
    {
        "layers": 4,
        "pattern": ("gated_delta", "global"),
        "attention_gate": "element",
        "qk_norm": "head",
        "norm_zero_centered": True,
        "tied_head": False,
        "delta.key_heads": 4,
        "delta.value_heads": 8,
        "delta.key_head_dim": 4,
        "delta.value_head_dim": 6,
        "delta.kernel": 3,
    },
)
MODELS["qwen3_next_experts"] = replace_fields(
    MODELS["qwen3_next"],
    {
        "moe.experts": 4,
        "moe.expert_width": 8,
        "moe.shared_expert_width": 8,
        "moe.shared_expert_gate": True,
    },
)


def list_values(name: str) -> list[Any]:
    """Return the values of a switch; [] for a field that is no choice."""
    hint = get_type_hints(ModelConfig)[name]
    return [False, True] if hint is bool else list(get_args(hint)) if get_origin(hint) is Literal else []


def add_new_switches(models: dict[str, ModelConfig], model: ModelConfig) -> ModelConfig:
    """Return the model with a value that no model has of each switch that has one."""
    used = {field.name: {getattr(each, field.name) for each in models.values()} for field in fields(ModelConfig)}
    missing = {name: [value for value in list_values(name) if value not in values] for name, values in used.items()}
    return replace(model, **{name: values[0] for name, values in missing.items() if values})


# Two modules behind the layers: a block of experts with latents each, or one that slides and one that does not.
MODELS["mtp_experts"] = replace_fields(MODELS["deepseek"], {"mtp_layers": 1})
MODELS["mtp"] = replace(toy.UNIFORM, **UNTIED, pattern=("sliding", "global"), layers=4, mtp_layers=2)
MODELS["segments"] = add_new_switches(MODELS, MODELS["segments"])
ROWS, LENGTH = 24, 16
LOSS_CHUNK = 7  # tokens: less than any device has, and no divisor of what it has
DEVICES = 8
CASES = pairwise(
    {
        "pipeline": (1, 2),
        "zero": (0, 1, 2, 3),
        "tensor": (1, 2, 4),  # of which 4 exceeds the key-value heads: they are repeated
        "sequence_parallel": (False, True),
        "split": ({}, {"data": 2}, {"fsdp": 2}, {"data": 2, "fsdp": 2}, {"context": 2}, {"context": 2, "fsdp": 2}),
        "accumulation": (1, 3),
        "remat": ("none", "full"),
        "model": ("tied", "untied"),
        "adapt": ("full", "lora", "lora-int8"),
        "attention": ("xla", "kernel"),
        "exchange": ("ring", "all_to_all"),
    },
    lambda case: (
        case["pipeline"] * case["tensor"] * math.prod(case["split"].values()) <= DEVICES
        and case["tensor"] > case["sequence_parallel"]
        and (case["exchange"] == "ring" or ("context" in case["split"] and case["tensor"] < 4))
    ),
)
BASIC = {
    "pipeline": 1,
    "zero": 1,
    "tensor": 1,
    "sequence_parallel": False,
    "split": {},
    "accumulation": 3,
    "remat": "full",
    "model": "tied",
    "adapt": "full",
    "attention": "xla",
    "exchange": "ring",
}
ROUNDS = {"exchange": "all_to_all"}  # of experts, in several rounds: there is room for half of an even load
# Beyond the cover: the third batch axis, more devices along one, segments of unlike blocks, the decoder's other
# switches, experts, latents, under tensor and under sequence parallelism, and the other rematerialisation policies.
EXTRAS = [
    BASIC | {"split": {"fsdp": 2, "expert": 2}, "remat": "offload"},
    BASIC | {"zero": 2, "split": {"fsdp": 8}, "remat": "save_attention"},
    BASIC | {"zero": 3, "tensor": 2, "split": {"fsdp": 2}, "accumulation": 1, "model": "segments", "remat": "none"},
    BASIC | {"model": "gpt", "zero": 3, "tensor": 4, "sequence_parallel": True, "split": {"fsdp": 2}, "remat": "named"},
    BASIC | {"model": "gemma", "zero": 3, "tensor": 4, "split": {"fsdp": 2}, "remat": "dots"},
    BASIC | {"model": "parallel", "zero": 3, "tensor": 4, "split": {"fsdp": 2}, "remat": "dots"},
    BASIC | {"zero": 3, "tensor": 2, "split": {"data": 2, "fsdp": 2}, "adapt": "qlora"},
    BASIC | {"model": "gemma4", "zero": 3, "tensor": 2, "split": {"fsdp": 2}, "pipeline": 2, "remat": "save_qkv"},
    BASIC | {"model": "gemma4_keys", "zero": 3, "tensor": 2, "split": {"context": 2, "fsdp": 2}},
    BASIC | {"model": "positions", "zero": 3, "tensor": 2, "split": {"context": 2, "fsdp": 2}, "attention": "kernel"},
    BASIC
    | ROUNDS
    | {"model": "experts", "split": {"expert": 2}, "pipeline": 2, "tensor": 2, "sequence_parallel": True},
    BASIC
    | {"model": "latent", "zero": 3, "tensor": 2, "sequence_parallel": True, "split": {"fsdp": 2}, "remat": "save_qkv"},
    BASIC
    | ROUNDS
    | {"model": "gpt_oss", "zero": 3, "tensor": 2, "sequence_parallel": True, "split": {"expert": 2, "fsdp": 2}},
]
CORE_MODELS = ("gpt", "gemma", "gemma4", "gemma4_keys", "parallel", "experts", "gpt_oss")
MARKS: dict[int, list[pytest.MarkDecorator]] = {0: [pytest.mark.core], 3: []}  # of one in six; the others are slow
# Latents, which `tensor` leaves whole, on every axis, and their matrices under each kind of leaf.
SLOW_LATENTS = [
    BASIC | {"model": "latent", "pipeline": 2, "tensor": 2, "split": {"context": 2}, "attention": "kernel"},
    BASIC | {"model": "latent", "zero": 3, "tensor": 2, "split": {"fsdp": 2}, "adapt": "lora-int8", "remat": "none"},
    BASIC | {"model": "latent", "zero": 3, "split": {"context": 4}, "exchange": "all_to_all", "attention": "kernel"},
    BASIC | {"model": "latent", "zero": 2, "tensor": 2, "split": {"data": 2, "fsdp": 2}, "adapt": "qlora"},
    BASIC | {"model": "deepseek", "split": {"expert": 2, "fsdp": 2}, "tensor": 2, "zero": 3},
    BASIC | {"model": "deepseek", "split": {"expert": 2}, "pipeline": 2, "tensor": 2, "sequence_parallel": True},
]
# Experts on all of eight devices, in either form: beside repeated heads, beside fsdp, alone, and in stages.
SLOW_EXPERTS = [
    BASIC | {"model": "shared", "zero": 3, "split": {"expert": 2}, "tensor": 4},
    BASIC | ROUNDS | {"model": "shared", "zero": 3, "split": {"expert": 2, "fsdp": 2}, "tensor": 2},
    BASIC | ROUNDS | {"model": "shared", "zero": 3, "split": {"expert": 8}},
    BASIC | {"model": "shared", "zero": 3, "split": {"expert": 2, "fsdp": 2}, "pipeline": 2},
]
SLOW_GEMMA4 = [
    BASIC | {"model": "gemma4", "zero": 3, "split": {"context": 2, "fsdp": 2}, "tensor": 2, "attention": "kernel"},
    BASIC | {"model": "gemma4", "zero": 2, "split": {"context": 4}, "exchange": "all_to_all", "remat": "none"},
    BASIC | {"model": "gemma4", "zero": 3, "tensor": 4, "sequence_parallel": True, "split": {"fsdp": 2}},
    BASIC | {"model": "gemma4", "zero": 3, "split": {"fsdp": 2}, "adapt": "lora", "remat": "save_attention"},
    BASIC | {"model": "gemma4", "zero": 3, "tensor": 2, "split": {"fsdp": 2}, "adapt": "qlora"},
    BASIC | {"model": "gemma4_experts", "zero": 3, "split": {"expert": 2, "fsdp": 2}, "tensor": 2},
    BASIC | ROUNDS | {"model": "gemma4_experts", "split": {"expert": 2}, "pipeline": 2, "tensor": 2},
    BASIC | {"model": "gemma4_experts", "zero": 3, "split": {"expert": 2, "context": 2}, "adapt": "lora"},
    BASIC | {"model": "gemma4_experts", "zero": 3, "split": {"expert": 2}, "tensor": 2, "adapt": "lora-nf4"},
    BASIC | {"model": "gemma4", "pipeline": 3, "tensor": 2, "sequence_parallel": True, "adapt": "lora-int8"},
    BASIC | {"model": "gemma4_keys", "zero": 3, "tensor": 4, "sequence_parallel": True, "split": {"fsdp": 2}},
    BASIC | {"model": "gemma4_keys", "zero": 2, "split": {"context": 4}, "exchange": "all_to_all", "remat": "none"},
    BASIC | {"model": "gemma4_keys", "split": {"data": 2, "fsdp": 2}, "accumulation": 1, "attention": "kernel"},
    BASIC | {"model": "gemma4_keys", "zero": 3, "split": {"fsdp": 2}, "adapt": "lora", "remat": "named"},
    BASIC | {"model": "gemma4_keys", "zero": 3, "tensor": 2, "split": {"fsdp": 2}, "adapt": "qlora"},
]
CHUNKS = [
    BASIC | {"model": "llama4", "zero": 3, "tensor": 2, "split": {"fsdp": 2}, "attention": "kernel"},
    BASIC | {"model": "llama4", "zero": 1, "split": {"context": 4}, "attention": "kernel"},
    BASIC | {"model": "llama4", "split": {"context": 2, "expert": 2}, "exchange": "all_to_all"},
    BASIC | ROUNDS | {"model": "llama4", "zero": 3, "split": {"expert": 2}, "tensor": 4, "sequence_parallel": True},
    BASIC | {"model": "llama4", "pipeline": 2, "split": {"expert": 2, "context": 2}, "remat": "named"},
    BASIC | {"model": "llama4", "tensor": 2, "split": {"fsdp": 2}, "adapt": "lora", "remat": "none"},
    BASIC | {"model": "llama4", "zero": 3, "split": {"fsdp": 2, "context": 2}, "adapt": "lora-nf4"},
]
# Sinks and the biases of experts on every axis, with each exchange of either, and under each kind of leaf.
SLOW_SINKS = [
    BASIC | {"model": "gpt_oss", "split": {"expert": 2, "context": 2}, "tensor": 2, "attention": "kernel"},
    BASIC | ROUNDS | {"model": "gpt_oss", "split": {"context": 2, "expert": 2}, "remat": "save_attention"},
    BASIC | {"model": "gpt_oss", "tensor": 4, "split": {"fsdp": 2}, "zero": 3, "attention": "kernel", "remat": "none"},
    BASIC | ROUNDS | {"model": "gpt_oss", "split": {"expert": 2}, "pipeline": 2, "tensor": 2, "zero": 1},
    BASIC | {"model": "gpt_oss", "split": {"context": 2}, "pipeline": 2, "tensor": 2, "sequence_parallel": True},
    BASIC | {"model": "gpt_oss", "split": {"expert": 2, "fsdp": 2}, "zero": 3, "adapt": "lora"},
    BASIC | {"model": "gpt_oss", "split": {"expert": 2, "fsdp": 2}, "tensor": 2, "adapt": "lora-nf4", "zero": 2},
    BASIC | {"model": "gpt_oss", "split": {"expert": 4}, "pipeline": 2, "adapt": "lora-int8", "accumulation": 1},
]
# Modules of multi-token prediction on every axis, and under each kind of leaf.
MTP = [
    BASIC | {"model": "mtp", "split": {"context": 2, "fsdp": 2}, "tensor": 2, "zero": 3},
    BASIC | {"model": "mtp_experts", "split": {"expert": 2, "fsdp": 2}, "tensor": 2, "sequence_parallel": True},
]
DELTA = [
    BASIC | {"model": "qwen3_next", "zero": 3, "tensor": 2, "sequence_parallel": True, "split": {"fsdp": 2}},
    BASIC | {"model": "qwen3_next", "pipeline": 2, "tensor": 2, "split": {"data": 2}, "remat": "save_qkv", "zero": 2},
]
SLOW_DELTA = [
    BASIC | {"model": "qwen3_next", "zero": 3, "tensor": 4, "split": {"fsdp": 2}, "remat": "none"},
    BASIC | {"model": "qwen3_next", "zero": 0, "split": {"data": 2, "fsdp": 2}, "accumulation": 1, "remat": "named"},
    BASIC | {"model": "qwen3_next", "zero": 1, "split": {"fsdp": 8}, "remat": "save_attention"},
    BASIC | {"model": "qwen3_next", "zero": 2, "split": {"data": 2, "fsdp": 2}, "remat": "offload"},
    BASIC | {"model": "qwen3_next", "zero": 3, "tensor": 2, "split": {"fsdp": 2}, "adapt": "delta"},
    BASIC | {"model": "qwen3_next", "pipeline": 2, "split": {"fsdp": 2}, "adapt": "delta-nf4"},
    BASIC | {"model": "qwen3_next_experts", "zero": 3, "split": {"expert": 2, "fsdp": 2}, "tensor": 2},
    BASIC | ROUNDS | {"model": "qwen3_next_experts", "split": {"expert": 2}, "pipeline": 2, "tensor": 2, "zero": 1},
]
SLOW_MTP = [
    BASIC | {"model": "mtp", "pipeline": 2, "tensor": 2, "sequence_parallel": True, "split": {"fsdp": 2}, "zero": 3},
    BASIC | {"model": "mtp", "pipeline": 2, "split": {"context": 2, "data": 2}, "accumulation": 1, "zero": 0},
    BASIC | {"model": "mtp_experts", "pipeline": 2, "split": {"expert": 2}, "tensor": 2, "zero": 1},
    BASIC | {"model": "mtp", "pipeline": 2, "split": {"fsdp": 2}, "adapt": "qlora"},
    BASIC | {"model": "mtp", "zero": 3, "split": {"context": 4}, "exchange": "all_to_all", "remat": "none"},
    BASIC | {"model": "mtp", "zero": 2, "tensor": 4, "sequence_parallel": True, "split": {"fsdp": 2}, "remat": "every"},
    BASIC | {"model": "mtp", "zero": 0, "split": {"data": 2, "fsdp": 2}, "accumulation": 1, "attention": "kernel"},
    BASIC | {"model": "mtp", "zero": 3, "split": {"fsdp": 2}, "tensor": 2, "adapt": "lora"},
    BASIC | {"model": "mtp", "zero": 3, "split": {"fsdp": 2}, "tensor": 2, "adapt": "qlora"},
    BASIC | {"model": "mtp_experts", "zero": 3, "split": {"context": 2, "expert": 2}, "remat": "named"},
    BASIC | ROUNDS | {"model": "mtp_experts", "zero": 3, "split": {"expert": 4}, "remat": "dots"},
]
# What is left of the switches' own product with the axes.
SLOW = [
    BASIC | {"model": "shared", "split": {"expert": 2, "fsdp": 2, "context": 2}, "zero": 1, "remat": "offload"},
    BASIC | ROUNDS | {"model": "experts", "split": {"expert": 2, "data": 2}, "tensor": 2, "zero": 0},
    BASIC | {"model": "shared", "split": {"expert": 8}, "zero": 2, "remat": "named", "accumulation": 1},
    BASIC | {"model": "experts", "split": {"expert": 2, "fsdp": 2}, "tensor": 2, "zero": 1, "adapt": "lora-nf4"},
    BASIC | ROUNDS | {"model": "shared", "split": {"expert": 2, "fsdp": 2}, "pipeline": 2, "zero": 3, "adapt": "lora"},
    BASIC | ROUNDS | {"model": "experts", "split": {"expert": 4, "fsdp": 2}, "zero": 3, "adapt": "lora-int8"},
    BASIC | {"pipeline": 3, "tensor": 2, "sequence_parallel": True, "model": "segments", "remat": "every"},
    BASIC
    | {"model": "gpt", "zero": 2, "pipeline": 2, "tensor": 2, "sequence_parallel": True, "split": {"fsdp": 2}}
    | {"remat": "save_qkv"},
    BASIC | {"model": "gemma", "pipeline": 2, "tensor": 2, "sequence_parallel": True, "remat": "offload"},
    BASIC
    | {"model": "parallel", "pipeline": 2, "tensor": 2, "sequence_parallel": True, "split": {"context": 2}, "zero": 1},
    BASIC
    | {"model": "parallel", "zero": 2, "tensor": 2, "sequence_parallel": True, "split": {"data": 2, "fsdp": 2}}
    | {"adapt": "qlora"},
    BASIC | {"model": "parallel", "pipeline": 2, "split": {"fsdp": 2}, "adapt": "lora-int8", "remat": "save_qkv"},
    BASIC | {"zero": 3, "split": {"context": 8}, "remat": "save_attention", "model": "segments"},
    BASIC | {"model": "positions", "pipeline": 2, "split": {"fsdp": 2, "context": 2}, "adapt": "qlora"},
    BASIC | {"model": "positions", "split": {"context": 4}, "exchange": "all_to_all", "adapt": "lora"},
    BASIC | {"pipeline": 2, "accumulation": 1, "model": "segments"},
    BASIC | {"pipeline": 2, "split": {"data": 2, "fsdp": 2}, "adapt": "qlora"},
    BASIC | {"pipeline": 2, "tensor": 2, "split": {"fsdp": 2}, "remat": "save_attention", "attention": "kernel"},
]
REMAT = {
    **{policy: RematConfig(policy) for policy in ("none", "full", "dots", "save_qkv", "save_attention")},
    "named": RematConfig(("attention_input", "latent", "mlp_input", "mlp_gate", "mlp_up", "mlp_output")),
    "every": RematConfig("full", every=2),
    "offload": RematConfig("save_qkv", offload=("block_input", "attention", "mlp_up")),
}
# Every product, tables included, but for the MLPs of the second segment.
ADAPT = {
    "full": LoraConfig(),
    "lora": LoraConfig(rank=4, targets=("*/attention/*", "segment_0/*/mlp/*", "non_layer/*/table")),
    "lora-int8": LoraConfig(rank=4, targets=("*/attention/*", "segment_0/*/mlp/*", "non_layer/*/table"), base="int8"),
    "lora-nf4": LoraConfig(rank=4, targets=("*/mlp/[ugd]*",), base="nf4"),
    "delta": LoraConfig(rank=4, targets=("*/delta/*", "*/attention/*")),
    "delta-nf4": LoraConfig(
        rank=4, targets=("*/delta/*", "*/mlp/*"), base="nf4", double_quantisation=True, dora=True, dropout=0.25
    ),
    "qlora": LoraConfig(
        rank=4,
        targets=("*/attention/*", "segment_0/*/mlp/*"),
        base="nf4",
        double_quantisation=True,
        dora=True,
        dropout=0.25,
    ),
}


class Result(NamedTuple):
    loss: float
    norm: float
    gradients: Params
    masters: Params
    frozen: Params


@pytest.fixture(autouse=True)
def kernel_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the one for GPUs stands XLA's, on each device's own rows and heads as that one is."""
    monkeypatch.setitem(IMPLEMENTATIONS, "pallas", attention_xla)
    monkeypatch.setattr(
        "jaxopt_llm.step.program.kernel_choice.choose_attention", lambda device, asked, *of: AttentionChoice(asked)
    )


def compute(
    placement: Placement,
    accumulation: int,
    remat: str,
    model: str,
    adapt: str,
    attention: str = "xla",
    loss_chunk: int = LOSS_CHUNK,
    residuals: Residuals = "store",
) -> Result:
    """The real training step, twice: loss, norm and gradients of the first, and the parameters after the second."""
    training = TrainingConfig(
        batch_size=ROWS,
        sequence_length=LENGTH,
        accumulation=accumulation,
        loss_chunk=loss_chunk,
        attention={"kernel": "pallas"}.get(attention, attention),
        z_loss=1e-2,
    )
    # An epsilon under which rounding noise of a zero gradient does not become a full step; a clip that always acts.
    optimizer = OptimizerConfig(learning_rate=1e-2, epsilon=1e-3, clip_norm=0.5)
    of = (MODELS[model], training, optimizer, ScheduleConfig(1, 10), REMAT[remat], ADAPT[adapt])
    program = toy.make_program(*of, placement, pipelined=PipelineConfig(residuals=residuals))
    saved = checkpoint_sharding(training_state.checkpoint_specs(program.specs), placement)
    state = training_state.resume_state(program.specs, 0, placement, **jax.device_put(initial(model, adapt), saved))

    first, second = (toy.microbatches(toy.packed(ROWS, LENGTH, seed), accumulation) for seed in range(2))
    state, metrics = program.step(state, jax.device_put(first, program.batch_sharding))
    # Adam's first moment after one step from zero is (1 - beta1) × the clipped gradient.
    gradients = {group: moments[0].mu for group, moments in to_host(program.to_checkpoint(state)["moments"]).items()}
    state, _ = program.step(state, jax.device_put(second, program.batch_sharding))
    assert metrics["grad_norm"] > optimizer.clip_norm
    last, loss, norm = to_host(program.to_checkpoint(state)), float(metrics["loss"]), float(metrics["grad_norm"])
    return Result(loss, norm, gradients, last["masters"], last.get("frozen", {}))


@functools.cache
def fresh(model: str, adapt: str) -> dict[str, Params]:
    return initialize(toy.placement(), model, adapt)


@functools.cache
def initial(model: str, adapt: str) -> dict[str, Params]:
    """What a checkpoint before the first step holds, made on one device, but for the adapters' zeros: A would have no
    gradient."""
    random = np.random.default_rng(0)

    def value(path: str, leaf: np.ndarray) -> np.ndarray:
        return random.normal(scale=0.1, size=leaf.shape).astype(leaf.dtype) if path.endswith("lora_b") else leaf

    trees = fresh(model, adapt)
    return {**trees, "masters": tree.map_with_path(value, trees["masters"])}


def initialize(placement: Placement, model: str, adapt: str) -> dict[str, Params]:
    training, optimizer, schedule = TrainingConfig(), OptimizerConfig(), ScheduleConfig()
    of = (MODELS[model], training, optimizer, schedule, RematConfig("none"), ADAPT[adapt])
    program = toy.make_program(*of, placement)
    return to_host(
        program.to_checkpoint(training_state.initialize_state(program.specs, program.optimizers, 0, placement))
    )


def to_host(leaves: Any) -> Any:
    return jax.tree.map(np.asarray, leaves)


@functools.cache
def one_device(model: str, adapt: str) -> Result:
    return compute(toy.placement(), 1, "none", model, adapt, loss_chunk=0)


def assert_equal(found: Params, expected: Params, share: float = 1e-5) -> None:
    """The design's sense of equal: each leaf to `share` of itself and a hundredth of it of the whole."""
    whole = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(expected)))

    def check(path: str, a: np.ndarray, b: np.ndarray) -> None:
        error = np.linalg.norm(a - b)
        assert error <= share * (np.linalg.norm(b) + 1e-2 * whole), f"{path}: off by {error}"

    tree.map_with_path(check, found, expected)


def sizes(case: dict[str, Any]) -> dict[str, int]:
    return {"pipeline": case["pipeline"], **case["split"], "tensor": case["tensor"]}


def name(case: dict[str, Any]) -> str:
    axes = "-".join(f"{axis}{size}" for axis, size in sizes(case).items() if size > 1)
    axes += "-sequence" * case["sequence_parallel"] + "-exchange" * (case["exchange"] == "all_to_all")
    rest = "-".join(case[each] for each in ("remat", "model", "adapt", "attention"))
    return f"zero{case['zero']}-{axes}-accumulate{case['accumulation']}-{rest}"


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=MARKS.get(index % 6, [pytest.mark.slow])) for index, case in enumerate(CASES)),
        *(
            pytest.param(case, marks=[pytest.mark.core] * (case["model"] in CORE_MODELS))
            for case in (*EXTRAS, *MTP, *DELTA)
        ),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                *SLOW,
                *SLOW_LATENTS,
                *SLOW_EXPERTS,
                *CHUNKS,
                *SLOW_SINKS,
                *SLOW_GEMMA4,
                *SLOW_MTP,
                *SLOW_DELTA,
            )
        ),
    ],
    ids=name,
)
def test_placement_changes_nothing(case: dict[str, Any]) -> None:
    sharding = ShardingConfig(
        case["zero"],
        case["sequence_parallel"],
        context_exchange=case["exchange"],
        expert_exchange="all_to_all" if case["exchange"] == "all_to_all" else "gather",
        expert_room=0.5,
    )
    placement = replace(toy.placement(**sizes(case)), sharding=sharding)
    of = (case["accumulation"], case["remat"], case["model"], case["adapt"], case["attention"])
    found = compute(placement, *of, residuals="store" if case["zero"] % 2 else "recompute")
    expected = one_device(case["model"], case["adapt"])
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.norm == pytest.approx(expected.norm, rel=1e-5)
    assert_equal(found.gradients, expected.gradients)
    assert_equal(found.masters, expected.masters)
    if case["adapt"] != "full":
        jax.tree.map(np.testing.assert_array_equal, found.frozen, initial(case["model"], case["adapt"])["frozen"])


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype, share", [("float32", 1e-4), ("bfloat16", 4e-2), ("float16", 5e-3)])
def test_a_gpu_computes_what_the_cpu_does(gpu: jax.Device, compute_dtype: str, share: float) -> None:
    precision = PrecisionConfig(compute_dtype=compute_dtype)  # type: ignore[arg-type]
    with jax.default_matmul_precision("highest"):
        found = compute(
            Placement(make_mesh(MeshConfig(), [gpu]), ShardingConfig(), precision), 3, "full", "tied", "full"
        )
    expected = one_device("tied", "full")
    assert found.loss == pytest.approx(expected.loss, rel=share / 10)
    assert found.norm == pytest.approx(expected.norm, rel=share)
    assert_equal(found.gradients, expected.gradients, share)
    assert_equal(found.masters, expected.masters, share)


@pytest.mark.parametrize(
    "zero, split, adapt",
    [
        (0, {"tensor": 2}, "full"),
        (1, {"data": 2, "fsdp": 2}, "lora"),
        (3, {"fsdp": 4, "tensor": 2}, "full"),
        pytest.param(3, {"pipeline": 2, "fsdp": 2, "tensor": 2}, "lora-int8", marks=pytest.mark.core),
    ],
)
def test_initial_values_are_equal(zero: int, split: dict[str, int], adapt: str) -> None:
    found = initialize(toy.placement(zero, **split), "untied", adapt)
    # To the bit in a run. What is compiled without optimisations, as in these tests, rounds apart in vectors and alone.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=5e-7), found, fresh("untied", adapt))


def test_the_models_have_every_switch() -> None:
    """A new value is added to one of the models; a second one of the same switch goes into MODELS."""
    for field in fields(ModelConfig):
        if values := list_values(field.name):
            assert {getattr(model, field.name) for model in MODELS.values()} == {*values}, field.name


def test_the_cover_has_many_meshes() -> None:
    assert len({tuple(sizes(case).items()) for case in CASES}) >= 16


def test_the_model_and_its_batches_are_heterogeneous() -> None:
    layout = Decoder(toy.CONFIG).layout
    assert len(layout) == 2
    assert {kind for segment in layout for kind in segment.kinds} == {"global", "sliding"}
    assert toy.packed(ROWS, LENGTH).segment_ids.max(axis=1).min() > 1


@pytest.mark.parametrize(
    "zero, reduce_dtype, stages",
    [
        *((0, "bfloat16", 1), (2, "float32", 1)),
        pytest.param(1, "bfloat16", 2, marks=pytest.mark.slow),
        pytest.param(3, "bfloat16", 1, marks=pytest.mark.core),
        pytest.param(1, "float32", 1, marks=pytest.mark.slow),
    ],
)
def test_sixteen_bits_stay_close(zero: int, reduce_dtype: str, stages: int) -> None:
    """bf16 has 8 bits: gradients within 2% as a whole and 4% leaf by leaf of float32's, whatever the placement."""
    precision = PrecisionConfig(compute_dtype="bfloat16", reduce_dtype=reduce_dtype)  # type: ignore[arg-type]
    found = compute(
        replace(toy.placement(zero, pipeline=stages, fsdp=2), precision=precision), 1, "full", "tied", "full"
    )
    expected = one_device("tied", "full")
    assert found.loss == pytest.approx(expected.loss, rel=1e-3)
    assert found.norm == pytest.approx(expected.norm, rel=2e-2)
    assert toy.distance(found.gradients, expected.gradients) < 2e-2

    def check(path: str, a: np.ndarray, b: np.ndarray) -> None:
        assert toy.distance(a, b) < 4e-2, path

    tree.map_with_path(check, found.gradients, expected.gradients)
