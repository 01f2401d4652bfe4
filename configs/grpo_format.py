"""Decoder with 0.2M parameters that writes sums as text, with random results: the start of grpo.py.

    python scripts/sums.py runs/sums
    python -m jaxopt_llm.train --config grpo_format.py

Hardware: 2 CPU cores. Expected: 10% of its sums are right, as many as by chance.
"""

from jaxopt_llm.config import (
    Config,
    DataConfig,
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
    return Config(
        run=RunConfig(directory="runs/grpo_format"),
        model=ModelConfig(width=64, layers=2, heads=2, kv_heads=2, mlp_width=256, vocabulary_size=258),
        data=DataConfig(paths=("runs/sums/format.jsonl",), long_documents="cut"),
        training=TrainingConfig(steps=150, batch_size=8, sequence_length=128),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        schedule=ScheduleConfig(warmup_steps=20),
        precision=PrecisionConfig(compute_dtype="float32"),  # for CPUs without bf16
        evaluation=EvaluationConfig(every=0),
        logging=LoggingConfig(every=50),
    )
