"""Training of all parameters of the model that `model.pretrained` names, on text: continued pretraining.

    python -m jaxopt_llm.train --config pretrain.py --model.pretrained FOLDER --data.paths 'corpus/*.jsonl'

FOLDER is a downloaded Hugging Face model or a run of this program. It has the sizes, so the recipe has none. For a
model of your own, copy a recipe that has sizes. To find the fastest settings that fit, run

    python -m jaxopt_llm.plan --config pretrain.py --model.pretrained FOLDER --gpu h100 --search
"""

from jaxopt_llm.config import (
    Config,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(directory="runs/pretrain"),
        model=ModelConfig(pretrained="FOLDER"),
        training=TrainingConfig(steps=0, epochs=1.0, batch_size=32, accumulation=8, sequence_length=4096),
        optimizer=OptimizerConfig(learning_rate=1e-5),
        schedule=ScheduleConfig(warmup_steps=0.03),
        evaluation=EvaluationConfig(samples=2),
    )
