"""LoRA (Hu et al. 2021, arXiv:2106.09685) of gpt-oss 20B: 20,914,757,184 parameters.

    python -m jaxopt_llm.train --config gpt_oss_20b_lora.py --model.pretrained FOLDER --data.paths chats.jsonl

Hardware: 1 GPU of 80 GB. Memory and communication per GPU and step, as compiled by

    python -m jaxopt_llm.plan --config gpt_oss_20b_lora.py --remat.policy full --gpu h100 --hosts 1 --gpus-per-host 1

are 45.1 GiB at the peak and 0.0 GiB sent. Its roofline says 19,600 tokens/s, which is not measured. Without
--remat.policy full, a run recomputes less where the memory suffices.

The adapters are on attention. --lora.targets all-linear adapts the experts, too: 50.0 GiB. --lora.base nf4 holds the
matrices of the blocks in 4 bits. For chats.jsonl see docs/chat.md.
"""

from jaxopt_llm.config import (
    Config,
    DataConfig,
    LoraConfig,
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
        run=RunConfig(directory="runs/gpt_oss_20b_lora"),
        model=ModelConfig(
            vocabulary_size=201_088,
            width=2880,
            layers=24,
            heads=64,
            kv_heads=8,
            head_dim=64,
            pattern=("sliding", "global"),
            window=128,
            norm_epsilon=1e-5,
            biases="all",
            mlp="clamped_swiglu",
            attention_sinks=True,
            tied_head=False,
            rope=RopeConfig(
                theta=150_000.0,
                scaling="yarn",
                factor=32.0,
                low_frequency_factor=1.0,
                high_frequency_factor=32.0,
                original_length=4096,
                truncate=False,
            ),
            moe=MoEConfig(experts=32, experts_per_token=4, expert_width=2880, balance_loss=0.0),
        ),
        data=DataConfig(paths=("chats.jsonl",), content="chat"),
        mesh=MeshConfig(fsdp=1),
        training=TrainingConfig(steps=1000, batch_size=16, accumulation=8, sequence_length=4096),
        lora=LoraConfig(rank=16, alpha=32.0, targets=("*/attention/*",)),
        optimizer=OptimizerConfig(learning_rate=2e-4, weight_decay=0.0),
        schedule=ScheduleConfig(warmup_steps=30),
    )
