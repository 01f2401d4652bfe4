"""GRPO: the model answers prompts, a function rewards the answers, and what is above the mean of its group is learned.

    python scripts/sums.py runs/sums
    python -m jaxopt_llm.train --config grpo_format.py
    python -m jaxopt_llm.train --config grpo.py

The second command makes a model that writes sums with random results. The third one teaches it to add from rewards
alone (docs/grpo.md). For a model and a task of your own, name a model, rows with `prompt` and other columns, and a
function of these columns; adapters (--lora.rank) save memory, and real models want a rate of about 1e-6, or 1e-5 with
adapters:

    python -m jaxopt_llm.train --config grpo.py --model.pretrained FOLDER --data.paths prompts.jsonl \\
        --rollouts.rewards mine.py:is_right --optimizer.learning-rate 1e-6

Hardware: 2 CPU cores. Expected: from 10% of the sums right to 85 to 100%, by the seed.
"""

from jaxopt_llm.config import (
    Config,
    DataConfig,
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
    """Return 1 for each answer that is the expected text, and 0 for the others."""
    pairs = zip(completions, answer, strict=True)
    return [float(given == expected) for given, expected in pairs]


def get_config() -> Config:
    return Config(
        run=RunConfig(directory="runs/grpo"),
        model=ModelConfig(pretrained="runs/grpo_format"),
        data=DataConfig(paths=("runs/sums/prompts.jsonl",), content="prompt"),
        training=TrainingConfig(steps=300, batch_size=28, sequence_length=96, objective="grpo"),
        rollouts=RolloutsConfig(rewards=(f"{__file__}:is_right",), prompts=14, group_size=32, max_new_tokens=2),
        optimizer=OptimizerConfig(learning_rate=1e-3, beta2=0.99, weight_decay=0.0),
        schedule=ScheduleConfig(warmup_steps=20, kind="wsd"),
        precision=PrecisionConfig(compute_dtype="float32"),  # for CPUs without bf16
        evaluation=EvaluationConfig(every=0),
        logging=LoggingConfig(every=25),
    )
