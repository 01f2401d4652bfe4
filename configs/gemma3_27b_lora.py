"""LoRA (Hu et al. 2021, arXiv:2106.09685) of the text model of Gemma 3 27B: 27,009,346,304 parameters.

    python -m jaxopt_llm.train --config gemma3_27b_lora.py --model.pretrained FOLDER --data.paths chats.jsonl

Hardware: 8 GPUs of 24 GB or more in one host. Memory and communication per GPU and step, as compiled by

    python -m jaxopt_llm.plan --config gemma3_27b_lora.py --remat.policy full --gpu h100 --hosts 1 --gpus-per-host 8

are 15.9 GiB at the peak and 177.7 GiB sent. Without --remat.policy full, a run recomputes less where the memory
suffices.
FOLDER is the downloaded model with its vision tower, which an export or a merge keeps. For chats.jsonl see
docs/chat.md.
"""

from jaxopt_llm.config import (
    Config,
    DataConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RopeConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)


def get_config() -> Config:
    width = 5376
    return Config(
        run=RunConfig(directory="runs/gemma3_27b_lora"),
        model=ModelConfig(
            vocabulary_size=262_208,
            width=width,
            layers=62,
            heads=32,
            kv_heads=16,
            head_dim=128,
            mlp_width=21_504,
            pattern=("sliding", "sliding", "sliding", "sliding", "sliding", "global"),
            window=1024,
            norm_placement="both",
            norm_zero_centered=True,
            norm_epsilon=1e-6,
            qk_norm="head",
            mlp="geglu",
            attention_scale=168**-0.5,
            embedding_scale=width**0.5,
            rope=RopeConfig(theta=1_000_000.0, sliding_theta=10_000.0, scaling="linear", factor=8.0),
        ),
        data=DataConfig(paths=("chats.jsonl",), content="chat"),
        mesh=MeshConfig(fsdp=8),
        training=TrainingConfig(steps=1000, batch_size=16, accumulation=2, sequence_length=4096),
        lora=LoraConfig(rank=16, alpha=32.0),
        optimizer=OptimizerConfig(learning_rate=2e-4, weight_decay=0.0),
        schedule=ScheduleConfig(warmup_steps=30),
    )
