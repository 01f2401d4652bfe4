"""LoRA of Llama 3 8B (Llama team 2024, arXiv:2407.21783) with the base in bf16: 8,030,261,248 parameters.

    python -m jaxopt_llm.train --config llama3_8b_lora.py --model.pretrained FOLDER --data.paths chats.jsonl

Hardware: one GPU of 24 GB. Memory and communication per GPU and step, as compiled by

    python -m jaxopt_llm.plan --config llama3_8b_lora.py --remat.policy full --gpu 4090 --hosts 1 --gpus-per-host 1

are 16.9 GiB at the peak and 0.0 GiB sent. Without --remat.policy full, a run recomputes less where the memory suffices.
A step has 16 rows of 2048 tokens, one at a time. All matrices of the blocks have adapters and alpha is twice the rank,
as Biderman et al. advise (2024, arXiv:2405.09673). FOLDER is the downloaded model; Llama 3.1 works, too. For
chats.jsonl see docs/chat.md.
"""

from jaxopt_llm.config import (
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RopeConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(directory="runs/llama3_8b_lora"),
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
        data=DataConfig(paths=("chats.jsonl",), content="chat"),
        training=TrainingConfig(steps=1000, batch_size=16, accumulation=16, sequence_length=2048),
        lora=LoraConfig(rank=16, alpha=32.0),
        optimizer=OptimizerConfig(learning_rate=2e-4, beta2=0.999, weight_decay=0.01),
        schedule=ScheduleConfig(warmup_steps=50),
    )
