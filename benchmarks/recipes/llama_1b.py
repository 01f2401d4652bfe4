"""1.1B parameters in TinyLlama's shape (Zhang et al. 2024, arXiv:2401.02385): scripts/gpu_check measures a step of it.

Hardware: one GPU of 80 GB. As compiled for an H200, 56.6 GiB at the peak. It is not for learning: there is no tokenizer
of 32,000 ids yet.
"""

from jaxopt_llm.config import Config, DataConfig, ModelConfig, RematConfig, TrainingConfig


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            vocabulary_size=32_000,
            width=2048,
            layers=22,
            heads=32,
            kv_heads=4,
            head_dim=64,
            mlp_width=5632,
            tied_head=False,
        ),
        data=DataConfig(documents_per_row=1),
        training=TrainingConfig(steps=100_000, batch_size=16, sequence_length=2048),
        remat=RematConfig(policy="none"),
    )
