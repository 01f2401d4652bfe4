"""Decoder with 0.8M parameters for the source of Python's standard library: text on a laptop in minutes.

    python -m jaxopt_llm.train --config quickstart.py

Hardware: 2 CPU cores, or one GPU. Expected: below 1.5 nats per byte on held-out files.
"""

from jaxopt_llm.config import (
    Config,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)


def get_config() -> Config:
    steps = 800
    return Config(
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
        precision=PrecisionConfig(compute_dtype="float32"),  # for CPUs without bf16
        evaluation=EvaluationConfig(every=200, batches=100),
        logging=LoggingConfig(every=50),
    )
