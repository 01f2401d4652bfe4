"""All parameters of Qwen3 8B (Qwen team 2025, arXiv:2505.09388) tuned: 8,190,735,360 parameters.

    python -m jaxopt_llm.train --config qwen3_8b_full.py --model.pretrained FOLDER --data.tokenizer FOLDER \
        --data.paths chats.jsonl

Hardware: 8 GPUs of 80 GB in one host. As compiled,

    python -m jaxopt_llm.plan --config qwen3_8b_full.py --gpu h100 --hosts 1 --gpus-per-host 8

0 GiB at the peak and 0 GiB sent, of each GPU in a step.
"""

from jaxopt_llm.config import RunConfig, TrainConfig
from jaxopt_llm.data.config import DataConfig
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.parallel.mesh import MeshConfig
from jaxopt_llm.training.optimizer import OptimizerConfig
from jaxopt_llm.training.schedule import ScheduleConfig
from jaxopt_llm.training.step import TrainingConfig


def get_config() -> TrainConfig:
    steps = 1000
    return TrainConfig(
        run=RunConfig(directory="runs/qwen3_8b_full"),
        model=ModelConfig(
            vocabulary_size=151_936,
            width=4096,
            layers=36,
            heads=32,
            kv_heads=8,
            head_dim=128,
            mlp_width=12_288,
            rope_theta=1_000_000.0,
            norm_epsilon=1e-6,
            qk_norm="head",
            tied_head=False,
        ),
        data=DataConfig(paths=("chats.jsonl",), content="chat"),
        training=TrainingConfig(steps=steps, batch_size=64, accumulation=4, sequence_length=4096),
        optimizer=OptimizerConfig(learning_rate=1e-5, weight_decay=0.0),
        schedule=ScheduleConfig(warmup_steps=50, decay_steps=steps),
        mesh=MeshConfig(fsdp=8),
    )
