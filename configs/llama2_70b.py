"""x"""

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
