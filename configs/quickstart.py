"""A 0.8M-parameter decoder on the source of Python's standard library: text on a laptop in minutes.

    python -m jaxopt_llm.train --config quickstart.py

Hardware: 2 CPU cores, or one GPU. Expected: below 1.5 nats per byte on held-out files.
"""

from jaxopt_llm.config import RunConfig, TrainConfig
from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.observe.metrics import LoggingConfig
from jaxopt_llm.parallel.precision import PrecisionConfig
from jaxopt_llm.training.evaluation import EvaluationConfig
from jaxopt_llm.training.optimizer import OptimizerConfig
from jaxopt_llm.training.schedule import ScheduleConfig
from jaxopt_llm.training.step import TrainingConfig


def get_config() -> TrainConfig:
    steps = 800
    return TrainConfig(
        run=RunConfig(directory="runs/quickstart"),
        model=ModelConfig(
            width=128,
            layers=4,
            heads=2,
            kv_heads=1,
            head_dim=64,
            mlp_width=384,
            pattern=("sliding", "global"),
            window=128,
        ),
        training=TrainingConfig(steps=steps, batch_size=8, sequence_length=256),
        optimizer=OptimizerConfig(learning_rate=5e-3),
        schedule=ScheduleConfig(warmup_steps=50, decay_steps=steps),
        precision=PrecisionConfig(compute_dtype="float32"),  # CPUs are slow in 16 bits
        remat=RematConfig(policy="none"),
        evaluation=EvaluationConfig(every=200, batches=100),
        logging=LoggingConfig(every=50),
    )
