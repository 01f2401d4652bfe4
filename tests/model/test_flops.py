"""What a model needs is what its compiled step does, less what is recomputed."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import toy

from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.model import flops
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.parallel import hlo
from jaxopt_llm.training.lora import LoraConfig
from jaxopt_llm.training.optimizer import OptimizerConfig
from jaxopt_llm.training.program import make_program
from jaxopt_llm.training.schedule import ScheduleConfig
from jaxopt_llm.training.step import TrainingConfig

ROWS, SEQUENCE = 2, 8
# A vocabulary without padding: padded rows are computed and not needed.
CONFIG = dataclasses.replace(toy.CONFIG, vocabulary_size=256, pattern=("global",))


@pytest.mark.parametrize(
    "switches, lora",
    [
        ({}, LoraConfig()),
        ({}, LoraConfig(rank=2)),
        ({"tied_head": False}, LoraConfig()),
        ({"tied_head": False}, LoraConfig(rank=2)),
        ({"positions": "learned", "mlp": "gelu", "biases": "all"}, LoraConfig()),
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
