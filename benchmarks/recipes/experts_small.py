"""3.3M active of 10.3M parameters: a model with experts that two CPU cores measure in seconds.

Hardware: 2 CPU cores. It is not for learning: `configs/quickstart.py` is.
"""

from jaxopt_llm.config import TrainConfig
from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.parallel.precision import PrecisionConfig
from jaxopt_llm.training.step import TrainingConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(
            width=256, layers=4, heads=4, kv_heads=2, head_dim=64, experts=8, experts_per_token=2, expert_width=384
        ),
        training=TrainingConfig(batch_size=4, sequence_length=256),
        precision=PrecisionConfig(compute_dtype="float32"),  # CPUs are slow in 16 bits
        remat=RematConfig(policy="none"),
    )
