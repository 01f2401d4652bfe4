"""QLoRA (Dettmers et al. 2023, arXiv:2305.14314) of Llama 3 8B: 8,030,261,248 parameters.

    python -m jaxopt_llm.train --config llama3_8b_qlora.py --model.pretrained FOLDER --data.paths chats.jsonl

Hardware: one GPU of 12 GB. Memory and communication per GPU and step, as compiled by

    python -m jaxopt_llm.plan --config llama3_8b_qlora.py --remat.policy full --gpu 4090 --hosts 1 --gpus-per-host 1

are 9.2 GiB at the peak and 0.0 GiB sent. Without --remat.policy full, a run recomputes less where the memory suffices.
Rank, alpha, dropout, learning rate, clip norm and the 16 rows of a step are the paper's for 7B. The rows have 2048
tokens and are processed one at a time. FOLDER is the downloaded model; Llama 3.1 works, too. For chats.jsonl see
docs/chat.md.
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
    steps = 1000
    return Config(
        run=RunConfig(directory="runs/llama3_8b_qlora"),
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
        training=TrainingConfig(steps=steps, batch_size=16, accumulation=16, sequence_length=2048),
        lora=LoraConfig(rank=64, alpha=16.0, base="nf4", double_quantisation=True, dropout=0.1),
        optimizer=OptimizerConfig(learning_rate=2e-4, beta2=0.999, weight_decay=0.0, clip_norm=0.3),
        schedule=ScheduleConfig(kind="constant", warmup_steps=30),
    )
