"""3.3M active of 10.3M parameters: a model with experts that two CPU cores measure in seconds.

Hardware: 2 CPU cores. It is not for learning: `configs/quickstart.py` is.
"""

from jaxopt_llm.config import Config, ModelConfig, MoEConfig, PrecisionConfig, RematConfig, TrainingConfig


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            width=256,
            layers=4,
            heads=4,
            kv_heads=2,
            head_dim=64,
            moe=MoEConfig(experts=8, experts_per_token=2, expert_width=384),
        ),
        training=TrainingConfig(batch_size=4, sequence_length=256),
        precision=PrecisionConfig(compute_dtype="float32"),  # for CPUs without bf16
        remat=RematConfig(policy="none"),
    )
