"""Llama 2 7B (Touvron et al. 2023, arXiv:2307.09288): 6,738,415,616 parameters.

    python -m jaxopt_llm.train --config llama2_7b.py --data.paths prepared --data.tokenizer tokenizer.json

Hardware: 8 GPUs of 80 GB in one host. Memory and communication per GPU and step, as compiled by

    python -m jaxopt_llm.plan --config llama2_7b.py --remat.policy full --gpu h100 --hosts 1 --gpus-per-host 8

are 28.6 GiB at the peak and 43.5 GiB sent. Without --remat.policy full, a run recomputes less where the memory
suffices. The recipe uses ZeRO-3 with 4 rows of 4096 tokens on each GPU. The paper's batch is 1024 rows:
--training.batch-size 1024 --training.accumulation 32.
"""

from jaxopt_llm.config import (
    Config,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(directory="runs/llama2_7b"),
        model=ModelConfig(
            vocabulary_size=32_000,
            width=4096,
            layers=32,
            heads=32,
            kv_heads=32,
            head_dim=128,
            mlp_width=11_008,
            tied_head=False,
        ),
        training=TrainingConfig(steps=500_000, batch_size=32, sequence_length=4096),
        optimizer=OptimizerConfig(learning_rate=3e-4, epsilon=1e-5),
        schedule=ScheduleConfig(warmup_steps=2000),
        mesh=MeshConfig(fsdp=8),
    )
