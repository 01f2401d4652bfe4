"""Qwen3 30B-A3B (Qwen team 2025, arXiv:2505.09388): 30,532,122,624 parameters (3,353,032,704 active).

    python -m jaxopt_llm.train --config qwen3_30b_a3b.py --data.paths prepared --data.tokenizer tokenizer.json

Hardware: 8 H200 in one host; each holds 16 experts of each layer. Memory and communication per GPU and
step, as compiled by

    python -m jaxopt_llm.plan --config qwen3_30b_a3b.py --remat.policy full --gpu h200 --hosts 1 --gpus-per-host 8

are 65.9 GiB at the peak and 288.6 GiB sent. Without --remat.policy full, a run recomputes less where the memory
suffices. On 8 such hosts, --mesh.fsdp 8 --training.accumulation 1 --training.batch-size 128 takes 15.7 GiB: fsdp then
shards the experts, too.

ZeRO-3 shards the parameters that all tokens use. Each GPU processes 2 rows of 4096 tokens at a time; a step has 64
rows. --model.pretrained FOLDER starts from the published weights. The default learning rate is too high for them; set
--optimizer.learning-rate 1e-5.
"""

from jaxopt_llm.config import (
    Config,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    RopeConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(directory="runs/qwen3_30b_a3b"),
        model=ModelConfig(
            vocabulary_size=151_936,
            width=2048,
            layers=48,
            heads=32,
            kv_heads=4,
            head_dim=128,
            norm_epsilon=1e-6,
            qk_norm="head",
            tied_head=False,
            moe=MoEConfig(experts=128, experts_per_token=8, expert_width=768, balance_loss=0.001),
            rope=RopeConfig(theta=1_000_000.0),
        ),
        training=TrainingConfig(steps=500_000, batch_size=64, sequence_length=4096, accumulation=4),
        optimizer=OptimizerConfig(learning_rate=3e-4),
        schedule=ScheduleConfig(warmup_steps=2000),
        mesh=MeshConfig(expert=8),
    )
