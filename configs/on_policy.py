"""On-policy distillation: a teacher's probabilities at each token of the answers that the student draws itself.

    python scripts/sums.py runs/sums
    python -m jaxopt_llm.train --config grpo_format.py
    python -m jaxopt_llm.train --config grpo_format.py --data.paths runs/sums/right.jsonl --run.directory runs/teacher
    python -m jaxopt_llm.convert export --checkpoint runs/teacher --to runs/teacher_exported
    python -m jaxopt_llm.train --config on_policy.py

The second command makes a student that writes sums with random results, and the third one a teacher that adds. The last
one teaches the student to add (docs/distillation.md). For models of your own, name rows with `prompt`, and no functions
that measure answers; adapters (--lora.rank) save memory, and real models want a rate of about 1e-5, or 1e-4 with
adapters:

    python -m jaxopt_llm.train --config on_policy.py --model.pretrained STUDENT --distillation.teacher TEACHER \\
        --data.paths prompts.jsonl --optimizer.learning-rate 1e-5 --rollouts.rewards --rollouts.max-new-tokens 512 \\
        --training.sequence-length 1024 --training.batch-size 56 --training.accumulation 7

Hardware: 2 CPU cores. Expected: from 10% of the sums right to 90 to 100%, by the seed.
"""

from jaxopt_llm.config import (
    Config,
    DataConfig,
    DistillationConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RolloutsConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)


def is_right(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """Return 1 for each answer that is the expected text, and 0 for the others. Nothing is learned from it."""
    pairs = zip(completions, answer, strict=True)
    return [float(given == expected) for given, expected in pairs]


def get_config() -> Config:
    return Config(
        run=RunConfig(directory="runs/on_policy"),
        model=ModelConfig(pretrained="runs/grpo_format"),
        data=DataConfig(paths=("runs/sums/prompts.jsonl",), content="prompt"),
        training=TrainingConfig(steps=200, batch_size=4, sequence_length=96, objective="distill"),
        distillation=DistillationConfig(teacher="runs/teacher_exported", beta=0.5),
        rollouts=RolloutsConfig(rewards=(f"{__file__}:is_right",), prompts=14, group_size=4, max_new_tokens=2),
        optimizer=OptimizerConfig(learning_rate=2e-3, beta2=0.99, weight_decay=0.0),
        schedule=ScheduleConfig(warmup_steps=10, kind="wsd"),
        precision=PrecisionConfig(compute_dtype="float32"),  # for CPUs without bf16
        evaluation=EvaluationConfig(every=0),
        logging=LoggingConfig(every=20),
    )
