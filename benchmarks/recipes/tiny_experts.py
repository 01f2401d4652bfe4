"""`tiny.py` with experts: tries a benchmark out on a CPU, where its figures mean nothing."""

from jaxopt_llm.config import Config, ModelConfig, MoEConfig, TrainingConfig


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            width=16,
            layers=2,
            heads=2,
            kv_heads=1,
            head_dim=8,
            moe=MoEConfig(experts=4, experts_per_token=2, expert_width=16),
        ),
        training=TrainingConfig(batch_size=4, sequence_length=32),
    )
