"""Llama 3 8B (Llama team 2024, arXiv:2407.21783): 8,030,261,248 parameters.

    python -m jaxopt_llm.train --config llama3_8b.py --data.paths prepared --data.tokenizer tokenizer.json

Hardware: 8 GPUs of 80 GB in one host. Memory and communication per GPU and step, as compiled by

    python -m jaxopt_llm.plan --config llama3_8b.py --remat.policy full --gpu h100 --hosts 1 --gpus-per-host 8

are 33.8 GiB at the peak and 50.6 GiB sent. Without --remat.policy full, a run recomputes less where the memory
suffices. The recipe uses ZeRO-3 with 2 rows of 8192 tokens on each GPU. The paper's batch starts at 1024 rows of 4096
tokens and grows; for a larger --training.batch-size raise --training.accumulation.
"""

from jaxopt_llm.config import (
    Config,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RopeConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(directory="runs/llama3_8b"),
        model=ModelConfig(
            vocabulary_size=128_256,
            width=4096,
            layers=32,
            heads=32,
            kv_heads=8,
            head_dim=128,
            mlp_width=14_336,
            tied_head=False,
            rope=RopeConfig(theta=500_000.0),
        ),
        training=TrainingConfig(steps=1_000_000, batch_size=16, sequence_length=8192),
        optimizer=OptimizerConfig(learning_rate=3e-4),
        schedule=ScheduleConfig(warmup_steps=8000),
        mesh=MeshConfig(fsdp=8),
    )
