"""A Llama of 0.14B parameters, in GPT-2's smallest shape: a step that a GPU compiles and measures in seconds.

Hardware: one GPU. It is not for learning: there is no tokenizer of 32,000 ids yet.
"""

from jaxopt_llm.config import Config, ModelConfig, RematConfig, TrainingConfig


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            vocabulary_size=32_000,
            width=768,
            layers=12,
            heads=12,
            kv_heads=12,
            head_dim=64,
            mlp_width=3072,
        ),
        training=TrainingConfig(batch_size=16, sequence_length=1024),
        remat=RematConfig(policy="none"),
    )
