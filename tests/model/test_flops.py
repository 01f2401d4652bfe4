"""Counted FLOPs against those of the compiled step, without recomputation."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import toy

from jaxopt_llm.compiler import hlo
from jaxopt_llm.config import (
    LoraConfig,
    Matmul,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RematConfig,
    ScheduleConfig,
    TrainingConfig,
)
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.model import flops
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.linear.projections import RANK_MULTIPLE
from jaxopt_llm.step.lora import adapt_model

ROWS, SEQUENCE = 2, 8
# A vocabulary without padding, because the step also computes padded rows.
CONFIG = dataclasses.replace(toy.CONFIG, vocabulary_size=256, pattern=("global",))


LATENT = {"kv_heads": 4, "head_dim": 6, "mla.kv_rank": 12, "mla.rotary_head_dim": 4, "mla.value_head_dim": 3}


@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 100])
def test_queries_of_a_chunk_see_its_keys(chunk: int) -> None:
    config = dataclasses.replace(CONFIG, pattern=("chunked",), window=chunk)
    visible = [position % chunk + 1 for position in range(SEQUENCE)]
    assert flops.mean_keys_of_layer(config, "chunked", SEQUENCE, causal=True) == np.mean(visible)
    assert flops.mean_keys_of_layer(config, "chunked", SEQUENCE, causal=False) == min(chunk, SEQUENCE)


@pytest.mark.parametrize(
    "switches, lora",
    [
        ({}, LoraConfig()),
        ({}, LoraConfig(rank=2)),
        ({"tied_head": False}, LoraConfig()),
        ({"tied_head": False}, LoraConfig(rank=2)),
        ({"positions": "learned", "mlp": "gelu", "biases": "all"}, LoraConfig()),
        (LATENT, LoraConfig()),
        (LATENT | {"mla.query_rank": 10}, LoraConfig()),
    ],
)
def test_compiled_step_has_the_counted_flops(switches: dict[str, Any], lora: LoraConfig) -> None:
    config = replace_fields(CONFIG, switches)
    training = TrainingConfig(batch_size=ROWS, sequence_length=SEQUENCE)
    program = toy.make_program(
        config, training, OptimizerConfig(), ScheduleConfig(), RematConfig("none"), lora, toy.placement()
    )
    compiled = program.step.lower(program.state, program.batch).compile(toy.QUICK_COMPILE)
    needed = flops.count_per_token(config, program.specs.masters, program.specs.frozen, SEQUENCE)
    # Attention's backward computes the scores again: seven matmuls, of which six are counted.
    scores = 2 * SEQUENCE * config.heads * config.head_dim * config.layers
    recomputed = ROWS * SEQUENCE * scores
    if lora.rank:
        recomputed += ROWS * SEQUENCE * config.layers * count_zeros_of_adapters(config, lora.rank)
    assert hlo.count_dot_flops(compiled.as_text()) == ROWS * SEQUENCE * needed.full + recomputed


def count_zeros_of_adapters(config: ModelConfig, rank: int) -> int:
    """Return the FLOPs of a layer, for each token, that multiply zeros where adapters of one input share products.

    The B of each is 0 at the ranks of the others, and the ranks together are padded.
    """
    heads, kv_heads = config.heads * config.head_dim, config.kv_heads * config.head_dim
    groups = (
        (config.width, (heads, kv_heads, kv_heads)),
        (heads, (config.width,)),
        (config.width, (config.mlp_width, config.mlp_width)),
        (config.mlp_width, (config.width,)),
    )
    computed = needed = 0
    for inputs, outputs in groups:
        ranks = -(-rank * len(outputs) // RANK_MULTIPLE) * RANK_MULTIPLE
        computed += ranks * (inputs + sum(outputs))
        needed += rank * sum(inputs + each for each in outputs)
    return 6 * (computed - needed)  # forward, and the gradients of both operands


@pytest.mark.parametrize("quantised", [{"base": "int8"}, {"base": "nf4"}, {"base": "nf4", "double_quantisation": True}])
def test_a_quantised_base_has_as_many_flops_and_parameters(quantised: dict[str, Any]) -> None:
    """Compares with a float base: the codes of NF4, two per byte, are one weight each."""

    def count(config: ModelConfig, lora: LoraConfig) -> tuple[flops.ModelFlops, int, int]:
        model, trained, frozen = adapt_model(Decoder(config), lora, PrecisionConfig())
        active = flops.count_active_parameters(config, model.specs)
        needed = flops.count_per_token(config, trained, frozen, SEQUENCE)
        return needed, leaves.count_parameters(model.specs), active

    lora = LoraConfig(rank=2)
    for config in (CONFIG, dataclasses.replace(CONFIG, tied_head=False), EXPERTS):
        assert count(config, dataclasses.replace(lora, **quantised)) == count(config, lora)


# ---- Experts: FLOPs and parameters that a token uses.

EXPERTS = replace_fields(
    CONFIG,
    {
        "layers": 6,
        "moe.experts": 8,
        "moe.experts_per_token": 3,
        "moe.expert_width": 8,
        "moe.shared_expert_width": 4,
        "moe.dense_layers": 1,
        "moe.expert_every": 2,
    },
)
MOE_LAYERS = 3  # the second, fourth and sixth of the layers


@pytest.mark.parametrize("rank", [0, 2])
def test_flops_count_only_the_experts_that_a_token_uses(rank: int) -> None:
    """Compares with a model whose layers are all dense."""

    def count(config: ModelConfig) -> flops.ModelFlops:
        _, trained, frozen = adapt_model(
            Decoder(config), LoraConfig(rank=rank, targets=("*/mlp/up",)), PrecisionConfig()
        )
        return flops.count_per_token(config, trained, frozen, SEQUENCE)

    moe, dense = count(EXPERTS), count(dataclasses.replace(CONFIG, layers=6))
    width, inner = EXPERTS.width, 3 * EXPERTS.moe.expert_width
    weights = 3 * width * (inner + EXPERTS.moe.shared_expert_width - CONFIG.mlp_width) + width * EXPERTS.moe.experts
    factors = rank * (3 * width + inner) - rank * (width + CONFIG.mlp_width)
    expected = MOE_LAYERS * ((4 if rank else 6) * weights + 6 * factors)
    assert (moe.causal - dense.causal, moe.full - dense.full) == pytest.approx((expected, expected), rel=1e-12)


@pytest.mark.parametrize("rank", [0, 2])
def test_active_parameters_are_those_that_a_token_uses(rank: int) -> None:
    """Includes the adapters of experts."""
    lora = LoraConfig(rank=rank, targets=("*/mlp/up",), base="int8" if rank else "float")
    specs = adapt_model(Decoder(EXPERTS), lora, PrecisionConfig())[0].specs
    idle = MOE_LAYERS * (EXPERTS.moe.experts - EXPERTS.moe.experts_per_token)
    per_expert = 3 * EXPERTS.width * EXPERTS.moe.expert_width + rank * (EXPERTS.width + EXPERTS.moe.expert_width)
    assert leaves.count_parameters(specs) - flops.count_active_parameters(EXPERTS, specs) == idle * per_expert
    assert flops.describe_parameters(10, 10) == "10 parameters"
    assert flops.describe_parameters(1000, 10) == "1,000 parameters (10 active)"


def test_quantised_flops_exclude_experts() -> None:
    specs = param_specs(EXPERTS)
    attention = 4 * EXPERTS.width * EXPERTS.head_dim * (EXPERTS.heads + EXPERTS.kv_heads) // 2
    shared, mlp = 3 * EXPERTS.width * EXPERTS.moe.shared_expert_width, 3 * EXPERTS.width * EXPERTS.mlp_width
    for exempt, moe, dense in ((0, 3, 3), (1, 2, 2), (2, 1, 1)):
        precision = PrecisionConfig(matmul="int8", compute_dtype_layers=exempt)
        found = flops.count_quantised_per_token(EXPERTS, specs, {}, precision)
        assert found == 2 * (moe * (attention + shared) + dense * (attention + mlp))


def test_causal_attention_counts_the_keys_that_a_query_sees() -> None:
    def attention(config: ModelConfig) -> tuple[float, float]:
        without_weights = flops.count_per_token(config, {}, {}, SEQUENCE)
        unit = 12 * config.heads * config.head_dim * config.layers
        return without_weights.causal / unit, without_weights.full / unit

    distance = np.subtract.outer(np.arange(SEQUENCE), np.arange(SEQUENCE))
    visible = distance >= 0
    assert attention(CONFIG) == (np.mean(visible.sum(1)), SEQUENCE)
    sliding = dataclasses.replace(CONFIG, pattern=("sliding",), window=3)
    assert attention(sliding) == (np.mean((visible & (distance < 3)).sum(1)), 3)


@pytest.mark.parametrize(("matmul", "products"), [("fp8", 2), ("int8", 1), ("int4_qat", 0)])
def test_quantised_flops_of_a_base_are_those_without_a_gradient(matmul: Matmul, products: int) -> None:
    precision = PrecisionConfig(matmul=matmul)
    _, adapters, base = adapt_model(Decoder(CONFIG), LoraConfig(rank=4), precision)
    attention = 4 * CONFIG.width * CONFIG.head_dim * (CONFIG.heads + CONFIG.kv_heads) // 2
    per_layer = attention + 3 * CONFIG.width * CONFIG.mlp_width
    found = flops.count_quantised_per_token(CONFIG, adapters, base, precision)
    assert found == 2 * products * per_layer * CONFIG.layers
