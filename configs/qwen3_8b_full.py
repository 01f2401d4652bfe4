"""Full fine-tuning of Qwen3 8B (Qwen team 2025, arXiv:2505.09388): 8,190,735,360 parameters.

    python -m jaxopt_llm.train --config qwen3_8b_full.py --model.pretrained FOLDER --data.paths chats.jsonl

Hardware: 8 GPUs of 80 GB in one host. Memory and communication per GPU and step, as compiled by

    python -m jaxopt_llm.plan --config qwen3_8b_full.py --remat.policy full --gpu h100 --hosts 1 --gpus-per-host 8

are 27.8 GiB at the peak and 205.5 GiB sent. Without --remat.policy full, a run recomputes less where the memory
suffices. The recipe uses ZeRO-3. Each GPU processes 2 rows of 4096 tokens at a time; a step has 64 rows. FOLDER is the
downloaded model. For chats.jsonl see docs/chat.md.
"""

from jaxopt_llm.config import (
    Config,
    DataConfig,
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
        run=RunConfig(directory="runs/qwen3_8b_full"),
        model=ModelConfig(
            vocabulary_size=151_936,
            width=4096,
            layers=36,
            heads=32,
            kv_heads=8,
            head_dim=128,
            mlp_width=12_288,
            norm_epsilon=1e-6,
            qk_norm="head",
            tied_head=False,
            rope=RopeConfig(theta=1_000_000.0),
        ),
        data=DataConfig(paths=("chats.jsonl",), content="chat"),
        training=TrainingConfig(steps=1000, batch_size=64, accumulation=4, sequence_length=4096),
        optimizer=OptimizerConfig(learning_rate=1e-5, weight_decay=0.0),
        schedule=ScheduleConfig(warmup_steps=50),
        mesh=MeshConfig(fsdp=8),
    )
