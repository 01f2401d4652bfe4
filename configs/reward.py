"""Reward model: scores of answers, learnt from pairs of a chosen and a rejected answer, by LoRA and a new head.

    python -m jaxopt_llm.train --config reward.py --model.pretrained FOLDER --data.paths preferences.jsonl

FOLDER is a downloaded Hugging Face model with its tokenizer and chat template. A row of the data has `prompt`, `chosen`
and `rejected`, or two whole conversations (docs/chat.md). Without --data.paths it reads preferences.jsonl in the
working directory. To see whether it fits, run

    python -m jaxopt_llm.plan --config reward.py --model.pretrained FOLDER --gpu 4090

The score is that of the last token of a conversation (docs/rewards.md). With `--lora.rank 0` all parameters train; then
take a lower rate. `convert merge` writes a folder that transformers loads as `AutoModelForSequenceClassification`. To
learn classes, set `--training.objective classify --model.scores CLASSES --data.content text --data.label-field label`.
"""

from jaxopt_llm.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(directory="runs/reward"),
        model=ModelConfig(pretrained="FOLDER", scores=1),
        data=DataConfig(paths=("preferences.jsonl",), content="preference"),
        training=TrainingConfig(
            steps=0, epochs=1.0, batch_size=16, accumulation=16, sequence_length=2048, objective="reward"
        ),
        lora=LoraConfig(rank=16, alpha=32.0),
        optimizer=OptimizerConfig(learning_rate=1e-4, beta2=0.999, weight_decay=0.0),
        schedule=ScheduleConfig(warmup_steps=0.1),
        checkpoint=CheckpointConfig(every=20, keep_best=1),
        evaluation=EvaluationConfig(every=20),
    )
