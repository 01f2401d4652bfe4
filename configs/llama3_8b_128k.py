"""Llama 3.1 8B."""

from jaxopt_llm.config import RunConfig, TrainConfig
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.parallel.mesh import MeshConfig
from jaxopt_llm.training.optimizer import OptimizerConfig
from jaxopt_llm.training.schedule import ScheduleConfig
from jaxopt_llm.training.step import TrainingConfig


def get_config() -> TrainConfig:
    steps = 800
    return TrainConfig(
        run=RunConfig(directory="runs/llama3_8b_128k"),
        model=ModelConfig(
            vocabulary_size=128_256,
            width=4096,
            layers=32,
            heads=32,
            kv_heads=8,
            head_dim=128,
            mlp_width=14_336,
            rope_theta=500_000.0,
            rope_factor=8.0,
            tied_head=False,
        ),
        training=TrainingConfig(steps=steps, batch_size=8, accumulation=8, sequence_length=131_072, attention="pallas"),
        optimizer=OptimizerConfig(learning_rate=1e-5),
        schedule=ScheduleConfig(warmup_steps=50, decay_steps=steps),
        mesh=MeshConfig(context=8),
    )
