"""x"""

from jaxopt_llm.config import RunConfig, TrainConfig
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.parallel.mesh import MeshConfig
from jaxopt_llm.training.optimizer import OptimizerConfig
from jaxopt_llm.training.schedule import ScheduleConfig
from jaxopt_llm.training.step import TrainingConfig


def get_config() -> TrainConfig:
    steps = 95_000
    return TrainConfig(
        run=RunConfig(directory="runs/gpt3_175b"),
        model=ModelConfig(
            vocabulary_size=50_257,
            width=12_288,
            layers=96,
            heads=96,
            kv_heads=96,
            head_dim=128,
            mlp_width=49_152,
            positions="learned",
            max_positions=2048,
            norm="layer",
            biases="all",
            mlp="gelu",
            tied_head=True,
        ),
        training=TrainingConfig(steps=steps, batch_size=48, sequence_length=2048),
        optimizer=OptimizerConfig(learning_rate=0.6e-4),
        schedule=ScheduleConfig(warmup_steps=120, decay_steps=steps),
        mesh=MeshConfig(fsdp=12, tensor=8),
    )
