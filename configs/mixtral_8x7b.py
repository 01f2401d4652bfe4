"""Mixtral 8x7B (Jiang et al. 2024, arXiv:2401.04088): 46,702,792,704 parameters (12,879,925,248 active).

    python -m jaxopt_llm.train --config mixtral_8x7b.py --data.paths prepared --data.tokenizer tokenizer.json

Hardware: 8 H200 in one host; each holds one expert of each layer. Memory and communication per GPU and
step, as compiled by

    python -m jaxopt_llm.plan --config mixtral_8x7b.py --remat.policy full --gpu h200 --hosts 1 --gpus-per-host 8

are 73.7 GiB at the peak and 124.2 GiB sent. Without --remat.policy full, a run recomputes less where the memory
suffices. On 8 such hosts, --mesh.fsdp 8 --training.accumulation 1 --training.batch-size 128 takes 15.9 GiB by the
arithmetic of `plan`: fsdp then shards the experts, too.

ZeRO-3 shards the parameters that all tokens use. Each GPU processes 2 rows of 4096 tokens at a time; a step has 64
rows. The moments are bfloat16 (docs/moments.md): with float32 they take 21.8 GiB more, and the backward has to compute
a part of the experts' matmuls again. --model.pretrained FOLDER starts from the published weights. The default learning
rate is too high for them; set --optimizer.learning-rate 1e-5.
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
        run=RunConfig(directory="runs/mixtral_8x7b"),
        model=ModelConfig(
            vocabulary_size=32_000,
            width=4096,
            layers=32,
            heads=32,
            kv_heads=8,
            head_dim=128,
            tied_head=False,
            moe=MoEConfig(experts=8, experts_per_token=2, expert_width=14_336, balance_loss=0.02),
            rope=RopeConfig(theta=1_000_000.0),
        ),
        training=TrainingConfig(steps=500_000, batch_size=64, sequence_length=4096, accumulation=4),
        optimizer=OptimizerConfig(learning_rate=3e-4, state_dtype="bfloat16"),
        schedule=ScheduleConfig(warmup_steps=2000),
        mesh=MeshConfig(expert=8),
    )
