"""DPO of the model that `model.pretrained` names: learn to prefer chosen answers to rejected ones, by LoRA.

    python -m jaxopt_llm.train --config dpo.py --model.pretrained FOLDER --data.paths preferences.jsonl

FOLDER is an instruct model: a downloaded Hugging Face model with its tokenizer and chat template, or what
`convert merge` made of a fine-tuned one. A row of the data has `prompt`, `chosen` and `rejected`, or two whole
conversations (docs/chat.md). Without --data.paths it reads preferences.jsonl in the working directory. To see whether
it fits, run

    python -m jaxopt_llm.plan --config dpo.py --model.pretrained FOLDER --gpu 4090

The reference is the model without its adapters, so a step needs no memory for a second model. All parameters can be
trained if the data hold log-probabilities by a reference, `prepare --reference` (docs/preferences.md).
`--training.objective` names other objectives, which want other values of `--preference.*`. A row of
`--training.sequence-length` tokens must hold both conversations of a pair; longer pairs are dropped. The rate is ten
times lower than that of `finetune.py`, as is usual for DPO.
"""

from jaxopt_llm.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    PreferenceConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(directory="runs/dpo"),
        model=ModelConfig(pretrained="FOLDER"),
        data=DataConfig(paths=("preferences.jsonl",), content="preference"),
        training=TrainingConfig(
            steps=0, epochs=1.0, batch_size=16, accumulation=16, sequence_length=2048, objective="dpo"
        ),
        preference=PreferenceConfig(beta=0.1),
        lora=LoraConfig(rank=16, alpha=32.0),
        optimizer=OptimizerConfig(learning_rate=2e-5, beta2=0.999, weight_decay=0.0),
        schedule=ScheduleConfig(warmup_steps=0.1),
        checkpoint=CheckpointConfig(every=20, keep_best=1),
        evaluation=EvaluationConfig(every=20, samples=2),
    )
