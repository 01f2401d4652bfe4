"""LoRA of the model that `model.pretrained` names, on conversations.

    python -m jaxopt_llm.train --config finetune.py --model.pretrained FOLDER --data.paths chats.jsonl

FOLDER is a downloaded Hugging Face model with its tokenizer and chat template, or a run of this program. It has the
sizes, so the recipe has none. Without --data.paths it reads chats.jsonl in the working directory: see docs/chat.md. To
see whether it fits, run

    python -m jaxopt_llm.plan --config finetune.py --model.pretrained FOLDER --gpu 4090

Data sets for fine-tuning are small: the held-out loss is measured every 20 steps, and the checkpoint with the lowest is
kept for `--step best`. If you set `--evaluation.every`, set `--checkpoint.every` to a multiple of it.

With `--lora.base nf4` the base takes a quarter of the memory (QLoRA). All matrices of the blocks have adapters and
alpha is twice the rank, as Biderman et al. advise (2024, arXiv:2405.09673).
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
        run=RunConfig(directory="runs/finetune"),
        model=ModelConfig(pretrained="FOLDER"),
        data=DataConfig(paths=("chats.jsonl",), content="chat"),
        training=TrainingConfig(steps=0, epochs=3.0, batch_size=16, accumulation=16, sequence_length=2048),
        lora=LoraConfig(rank=16, alpha=32.0),
        optimizer=OptimizerConfig(learning_rate=2e-4, beta2=0.999, weight_decay=0.01),
        schedule=ScheduleConfig(warmup_steps=0.1),
        checkpoint=CheckpointConfig(every=20, keep_best=1),
        evaluation=EvaluationConfig(every=20, samples=2),
    )
