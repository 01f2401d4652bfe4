"""Llama-style decoder: Llama 2 13B with 36 layers and 8 key-value heads. 10,237,096,960 parameters.

    python -m jaxopt_llm.train --config 10b.py --data.paths prepared --data.tokenizer tokenizer.json

Hardware: 8 GPUs of 80 GB in one host. Memory and communication per GPU and step, as compiled by

    python -m jaxopt_llm.plan --config 10b.py --remat.policy full --gpu h100 --hosts 1 --gpus-per-host 8

are 39.7 GiB at the peak and 66.2 GiB sent. Without --remat.policy full, a run recomputes less where the memory
suffices. The recipe uses ZeRO-3 with 4 rows of 4096 tokens on each GPU. To use more GPUs, set --mesh.data N on N hosts:
gradients are reduced inside each host, and between hosts once a step.
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
        run=RunConfig(directory="runs/10b"),
        model=ModelConfig(
            vocabulary_size=32_000,
            width=5120,
            layers=36,
            heads=40,
            kv_heads=8,
            head_dim=128,
            mlp_width=13_824,
            tied_head=False,
        ),
        training=TrainingConfig(steps=100_000, batch_size=32, sequence_length=4096),
        optimizer=OptimizerConfig(learning_rate=3e-4),
        schedule=ScheduleConfig(warmup_steps=2000),
        mesh=MeshConfig(fsdp=8),
    )
