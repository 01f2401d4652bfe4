"""Qwen3 30B-A3B (Qwen team 2025, arXiv:2505.09388): 30,532,122,624 parameters (3,353,032,704 active).

    python -m jaxopt_llm.train --config qwen3_30b_a3b.py --data.paths prepared --data.tokenizer tokenizer.json

Hardware: 8 H200 in one host, 16 experts of each layer on each. As compiled,

    python -m jaxopt_llm.plan --config qwen3_30b_a3b.py --gpu h200 --hosts 1 --gpus-per-host 8

85.6 GiB at the peak and 248.1 GiB sent, of each GPU in a step. On 8 such hosts, where --mesh.fsdp 8 divides the
experts, too, --training.accumulation 1 --training.batch-size 128 takes 21.9 GiB.

ZeRO-3 of what all tokens pass, 2 rows of 4096 tokens on each GPU at a time, 64 in a step. --model.pretrained FOLDER
begins from the published weights, for which this learning rate is too high: --optimizer.learning-rate 1e-5.
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
    steps = 500_000
    return Config(
        run=RunConfig(directory="runs/qwen3_30b_a3b"),
        model=ModelConfig(
            vocabulary_size=151_936,
            width=2048,
            layers=48,
            heads=32,
            kv_heads=4,
            head_dim=128,
            experts=128,
            experts_per_token=8,
            expert_width=768,
            balance_loss=0.001,
            rope_theta=1_000_000.0,
            norm_epsilon=1e-6,
            qk_norm="head",
            tied_head=False,
        ),
        training=TrainingConfig(steps=steps, batch_size=64, sequence_length=4096, accumulation=4),
        optimizer=OptimizerConfig(learning_rate=3e-4),
        schedule=ScheduleConfig(warmup_steps=2000, decay_steps=steps),
        mesh=MeshConfig(expert=8),
    )
