"""Llama 2 70B (Touvron et al. 2023, arXiv:2307.09288): 68,976,648,192 parameters.

    python -m jaxopt_llm.train --config llama2_70b.py --data.paths prepared --data.tokenizer tokenizer.json

Hardware: 8 hosts of 8 GPUs of 80 GB, on every host (scripts/slurm.sbatch). As compiled,

    python -m jaxopt_llm.plan --config llama2_70b.py --gpu h100 --hosts 8 --gpus-per-host 8

37.1 GiB at the peak and 504.9 GiB sent, of each GPU in a step. ZeRO-3 over all GPUs, 2
rows of 4096 tokens on each. The paper's batch is 1024 rows: --training.batch-size 1024 --training.accumulation 8.
"""

from jaxopt_llm.config import RunConfig, TrainConfig
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.parallel.mesh import MeshConfig
from jaxopt_llm.training.optimizer import OptimizerConfig
from jaxopt_llm.training.schedule import ScheduleConfig
from jaxopt_llm.training.step import TrainingConfig


def get_config() -> TrainConfig:
    steps = 500_000
    return TrainConfig(
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
        training=TrainingConfig(steps=steps, batch_size=128, sequence_length=4096),
        optimizer=OptimizerConfig(learning_rate=1.5e-4, epsilon=1e-5),
        schedule=ScheduleConfig(warmup_steps=2000, decay_steps=steps),
        mesh=MeshConfig(fsdp=64),
    )
