"""Llama 2 70B (Touvron et al. 2023, arXiv:2307.09288): 68,976,648,192 parameters.

    python -m jaxopt_llm.train --config llama2_70b.py --data.paths prepared --data.tokenizer tokenizer.json

Hardware: 16 hosts with 8 GPUs of 80 GB each. Run the command on every host (scripts/slurm.sbatch). Memory and
communication per GPU and step, as compiled by

    python -m jaxopt_llm.plan --config llama2_70b.py --remat.policy full --gpu h100 --hosts 16 --gpus-per-host 8

are 52.9 GiB at the peak and 1,017.9 GiB sent. Without --remat.policy full, a run recomputes less where the memory
suffices. The recipe uses ZeRO-3 over all GPUs. The batch is the paper's: 1024 rows of 4096 tokens, in 2 microbatches
with 4 rows for each GPU. More microbatches leave memory to recompute less, but every microbatch gathers the weights
over the network. llama2_70b_pipeline.py is about as fast by the roofline of `plan`, and can do with less memory.
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
    return Config(
        run=RunConfig(directory="runs/llama2_70b"),
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
        training=TrainingConfig(steps=500_000, batch_size=1024, sequence_length=4096, accumulation=2),
        optimizer=OptimizerConfig(learning_rate=1.5e-4, epsilon=1e-5),
        schedule=ScheduleConfig(warmup_steps=2000),
        mesh=MeshConfig(fsdp=128),
    )
