"""QLoRA (Dettmers et al. 2023, arXiv:2305.14314) of Llama 2 70B: 68,976,648,192 parameters.

    python -m jaxopt_llm.train --config llama2_70b_qlora.py --model.pretrained FOLDER --data.paths chats.jsonl

Hardware: 8 GPUs of 80 GB in one host. Memory and communication per GPU and step, as compiled by

    python -m jaxopt_llm.plan --config llama2_70b_qlora.py --remat.policy full --gpu h100 --hosts 1 --gpus-per-host 8

are 16.5 GiB at the peak and 64.4 GiB sent. Without --remat.policy full, a run recomputes less where the memory
suffices. ZeRO-3 shards the 4-bit codes; each GPU has 2 rows of 2048 tokens. Rank, alpha, dropout, learning rate, clip
norm and the 16 rows of a step are the paper's for 65B. FOLDER is the downloaded model. For chats.jsonl see
docs/chat.md.

On 2 GPUs of 40 GB or more: --mesh.fsdp 2 --training.accumulation 8 takes 28.4 GiB on each.
On one GPU of 48 GB: --mesh.fsdp 1 --training.accumulation 16 --lora.rank 16 --optimizer.state-dtype int8 takes
41.4 GiB.
"""

from jaxopt_llm.config import (
    Config,
    DataConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)


def get_config() -> Config:
    steps = 1000
    return Config(
        run=RunConfig(directory="runs/llama2_70b_qlora"),
        model=ModelConfig(
            vocabulary_size=32_000,
            width=8192,
            layers=80,
            heads=64,
            kv_heads=8,
            head_dim=128,
            mlp_width=28_672,
            tied_head=False,
        ),
        data=DataConfig(paths=("chats.jsonl",), content="chat"),
        training=TrainingConfig(steps=steps, batch_size=16, sequence_length=2048),
        lora=LoraConfig(rank=64, alpha=16.0, base="nf4", double_quantisation=True, dropout=0.05),
        optimizer=OptimizerConfig(learning_rate=1e-4, beta2=0.999, weight_decay=0.0, clip_norm=0.3),
        schedule=ScheduleConfig(kind="constant", warmup_steps=30),
        mesh=MeshConfig(fsdp=8),
    )
