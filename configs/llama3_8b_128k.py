"""Llama 3.1 8B (Llama team 2024, arXiv:2407.21783) on sequences of 131,072 tokens: 8,030,261,248 parameters.

    python -m jaxopt_llm.train --config llama3_8b_128k.py --model.pretrained FOLDER --data.paths prepared

Hardware: 8 GPUs of 141 GB in one host. Memory and communication per GPU and step, as compiled by

    python -m jaxopt_llm.plan --config llama3_8b_128k.py --gpu h200 --hosts 1 --gpus-per-host 8

are 75.7 GiB at the peak and 616.1 GiB sent. The GPUs divide every sequence, 16,384 tokens per GPU, and ZeRO-3 shards
everything that is trained; for attention they exchange their tokens for heads (docs/attention.md). A step is 8
sequences, one after another: 1,048,576 tokens. Only elementwise operations are recomputed; with --remat.policy full the
peak is 33.7 GiB.

FOLDER is the downloaded Llama 3.1 8B. Without --model.pretrained the initial weights are random.
"""

from jaxopt_llm.config import (
    Config,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RematConfig,
    RopeConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(directory="runs/llama3_8b_128k"),
        model=ModelConfig(
            vocabulary_size=128_256,
            width=4096,
            layers=32,
            heads=32,
            kv_heads=8,
            head_dim=128,
            mlp_width=14_336,
            tied_head=False,
            rope=RopeConfig(
                theta=500_000.0, factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192
            ),
        ),
        training=TrainingConfig(steps=1000, batch_size=8, accumulation=8, sequence_length=131_072),
        optimizer=OptimizerConfig(learning_rate=1e-5),
        schedule=ScheduleConfig(warmup_steps=50),
        mesh=MeshConfig(context=8),
        remat=RematConfig("none"),
    )
