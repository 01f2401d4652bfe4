"""Training of all parameters of the model that `model.pretrained` names, on conversations.

    python -m jaxopt_llm.train --config finetune_full.py --model.pretrained FOLDER --data.paths chats.jsonl

FOLDER is a downloaded Hugging Face model with its tokenizer and chat template, or a run of this program. It has the
sizes, so the recipe has none. Without --data.paths it reads chats.jsonl in the working directory: see docs/chat.md. A
parameter takes 16 bytes with its gradient and moments, eight times as much as under the adapters of finetune.py. To see
whether it fits, and which settings make it fit, run

    python -m jaxopt_llm.plan --config finetune_full.py --model.pretrained FOLDER --gpu h100 --search

The learning rate is a twentieth of the one for adapters, and there is no weight decay, because the weights are good
already. The held-out loss is measured every 20 steps, and the checkpoint with the lowest is kept for `--step best`. If
you set `--evaluation.every`, set `--checkpoint.every` to a multiple of it.
"""

from jaxopt_llm.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(directory="runs/finetune_full"),
        model=ModelConfig(pretrained="FOLDER"),
        data=DataConfig(paths=("chats.jsonl",), content="chat"),
        training=TrainingConfig(steps=0, epochs=3.0, batch_size=16, accumulation=16, sequence_length=2048),
        optimizer=OptimizerConfig(learning_rate=1e-5, beta2=0.999, weight_decay=0.0),
        schedule=ScheduleConfig(warmup_steps=0.1),
        checkpoint=CheckpointConfig(every=20, keep_best=1),
        evaluation=EvaluationConfig(every=20, samples=2),
    )
