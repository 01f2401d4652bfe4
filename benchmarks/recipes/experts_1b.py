"""1.1B active of 3.4B parameters: `llama_1b.py` with 8 experts in each layer, 2 for a token, each half as wide as its
MLP is. benchmarks/experts.py compares a step of it with dense models.

Hardware: one GPU of 141 GB. As compiled for an H200, 68.1 GiB at the peak. It is not for learning: there is no
tokenizer of 32,000 ids yet.
"""

from jaxopt_llm.config import Config, DataConfig, ModelConfig, MoEConfig, RematConfig, TrainingConfig


def get_config() -> Config:
    return Config(
        model=ModelConfig(
            vocabulary_size=32_000,
            width=2048,
            layers=22,
            heads=32,
            kv_heads=4,
            head_dim=64,
            tied_head=False,
            moe=MoEConfig(experts=8, experts_per_token=2, expert_width=2816),
        ),
        data=DataConfig(documents_per_row=1),
        training=TrainingConfig(batch_size=8, sequence_length=2048),
        remat=RematConfig(policy="none"),
    )
