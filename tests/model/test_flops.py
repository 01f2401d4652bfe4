"""What a model needs is what its compiled step does, less what is recomputed."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import toy

from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.model import flops, leaves
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.decoder import make_parts, param_specs
from jaxopt_llm.parallel import hlo
from jaxopt_llm.parallel.precision import PrecisionConfig
from jaxopt_llm.training.lora import LoraConfig, adapt
from jaxopt_llm.training.optimizer import OptimizerConfig
from jaxopt_llm.training.program import make_program
from jaxopt_llm.training.schedule import ScheduleConfig
from jaxopt_llm.training.step import TrainingConfig

ROWS, SEQUENCE = 2, 8
# A vocabulary without padding: padded rows are computed and not needed.
CONFIG = dataclasses.replace(toy.CONFIG, vocabulary_size=256, pattern=("global",))


LATENT = {"kv_heads": 4, "head_dim": 6, "latent_rank": 12, "rotary_head_dim": 4, "value_head_dim": 3}


@pytest.mark.parametrize(
    "switches, lora",
    [
        ({}, LoraConfig()),
        ({}, LoraConfig(rank=2)),
        ({"tied_head": False}, LoraConfig()),
        ({"tied_head": False}, LoraConfig(rank=2)),
        ({"positions": "learned", "mlp": "gelu", "biases": "all"}, LoraConfig()),
        (LATENT, LoraConfig()),
        (LATENT | {"query_rank": 10}, LoraConfig()),
    ],
)
def test_the_compiled_step_does_as_many(switches: dict[str, Any], lora: LoraConfig) -> None:
    config = dataclasses.replace(CONFIG, **switches)
    training = TrainingConfig(batch_size=ROWS, sequence_length=SEQUENCE)
    program = make_program(
        config, training, OptimizerConfig(), ScheduleConfig(), RematConfig("none"), lora, toy.placement()
    )
    compiled = program.step.lower(program.state, program.batch).compile(toy.QUICK_COMPILE)
    needed = flops.per_token(config, program.specs.masters, program.specs.frozen, SEQUENCE)
    # Attention's backward forms the scores again: seven products, of which six are needed.
    scores = 2 * SEQUENCE * config.heads * config.head_dim * config.layers
    recomputed = ROWS * SEQUENCE * scores
    if lora.rank:
        # The first product of an adapter inside `recomputed`, of all but the output projection's.
        recomputed += ROWS * SEQUENCE * 2 * lora.rank * config.layers * (5 * config.width + config.mlp_width)
    assert hlo.dot_flops(compiled.as_text()) == ROWS * SEQUENCE * needed.full + recomputed


# ---- Experts: what a token meets of them.

EXPERTS = dataclasses.replace(
    CONFIG,
    layers=6,
    experts=8,
    experts_per_token=3,
    expert_width=8,
    shared_expert_width=4,
    dense_layers=1,
    expert_every=2,
)
MIXED = 3  # of its layers: the second, fourth and sixth


@pytest.mark.parametrize("rank", [0, 2])
def test_experts_need_what_a_token_meets_of_them(rank: int) -> None:
    """Beyond a model whose layers are all dense."""

    def needed(config: ModelConfig) -> flops.ModelFlops:
        _, trained, frozen = adapt(make_parts(config), LoraConfig(rank=rank, targets=("*/mlp/up",)), PrecisionConfig())
        return flops.per_token(config, trained, frozen, SEQUENCE)

    mixed, dense = needed(EXPERTS), needed(dataclasses.replace(CONFIG, layers=6))
    width, inner = EXPERTS.width, 3 * EXPERTS.expert_width
    weights = 3 * width * (inner + EXPERTS.shared_expert_width - CONFIG.mlp_width) + width * EXPERTS.experts
    factors = rank * (3 * width + inner) - rank * (width + CONFIG.mlp_width)
    beyond = MIXED * ((4 if rank else 6) * weights + 6 * factors)
    assert (mixed.causal - dense.causal, mixed.full - dense.full) == pytest.approx((beyond, beyond), rel=1e-12)


@pytest.mark.parametrize("rank", [0, 2])
def test_active_parameters_are_those_that_a_token_meets(rank: int) -> None:
    """And of the adapters of experts."""
    lora = LoraConfig(rank=rank, targets=("*/mlp/up",), base="int8" if rank else "float")
    specs = adapt(make_parts(EXPERTS), lora, PrecisionConfig())[0].specs
    idle = MIXED * (EXPERTS.experts - EXPERTS.experts_per_token)
    of_expert = 3 * EXPERTS.width * EXPERTS.expert_width + rank * (EXPERTS.width + EXPERTS.expert_width)
    assert leaves.count(specs) - flops.active(EXPERTS, specs) == idle * of_expert
    assert flops.in_words(10, 10) == "10 parameters"
    assert flops.in_words(1000, 10) == "1,000 parameters (10 active)"


def test_operations_between_codes_are_those_of_layers_without_experts() -> None:
    """But for what all layers have."""
    specs = param_specs(EXPERTS)
    of_attention = 4 * EXPERTS.width * EXPERTS.head_dim * (EXPERTS.heads + EXPERTS.kv_heads) // 2
    of_shared, of_mlp = 3 * EXPERTS.width * EXPERTS.shared_expert_width, 3 * EXPERTS.width * EXPERTS.mlp_width
    for exempt, mixed, plain in ((0, 3, 3), (1, 2, 2), (2, 1, 1)):
        precision = PrecisionConfig(matmul="int8", compute_dtype_layers=exempt)
        found = flops.quantised_per_token(EXPERTS, specs, precision)
        assert found == 2 * (mixed * (of_attention + of_shared) + plain * (of_attention + of_mlp))


def test_causal_attention_is_counted_by_the_keys_that_a_query_sees() -> None:
    def attention(config: ModelConfig) -> tuple[float, float]:
        nothing = flops.per_token(config, {}, {}, SEQUENCE)
        unit = 12 * config.heads * config.head_dim * config.layers
        return nothing.causal / unit, nothing.full / unit

    distance = np.subtract.outer(np.arange(SEQUENCE), np.arange(SEQUENCE))
    seen = distance >= 0
    assert attention(CONFIG) == (np.mean(seen.sum(1)), SEQUENCE)
    sliding = dataclasses.replace(CONFIG, pattern=("sliding",), window=3)
    assert attention(sliding) == (np.mean((seen & (distance < 3)).sum(1)), 3)
