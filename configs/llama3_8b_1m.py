"""Llama 3.1 8B (Llama team 2024, arXiv:2407.21783) on sequences of 1,048,576 tokens: 8,030,261,248 parameters.

    python -m jaxopt_llm.train --config llama3_8b_1m.py --model.pretrained FOLDER --data.paths prepared

Hardware: 64 GPUs of 141 GB in eight hosts. Memory and communication per GPU and step, as compiled by

    python -m jaxopt_llm.plan --config llama3_8b_1m.py --gpu h200 --hosts 8 --gpus-per-host 8

are 63.1 GiB at the peak and 2251.9 GiB sent. The GPUs divide every sequence, 16,384 tokens per GPU, and ZeRO-3 shards
everything that is trained; keys and values travel around a ring of all GPUs, beside the kernels of attention
(docs/attention.md). A step is 4 sequences, one after another: 4,194,304 tokens. RoPE is scaled by YaRN as in the models
that were trained on so many tokens (Xu et al. 2025, arXiv:2504.06214).

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
        run=RunConfig(directory="runs/llama3_8b_1m"),
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
                theta=500_000.0,
                scaling="yarn",
                factor=128.0,
                low_frequency_factor=1.0,
                high_frequency_factor=4.0,
                original_length=8192,
            ),
        ),
        training=TrainingConfig(steps=200, batch_size=4, accumulation=4, sequence_length=1_048_576),
        optimizer=OptimizerConfig(learning_rate=1e-5),
        schedule=ScheduleConfig(warmup_steps=10),
        mesh=MeshConfig(context=64),
        remat=RematConfig("none"),
    )
