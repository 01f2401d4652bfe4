"""Distillation: the model that `model.pretrained` names learns the next-token probabilities of a larger one.

    python -m jaxopt_llm.train --config distill.py --model.pretrained STUDENT --distillation.teacher TEACHER \
        --data.paths chats.jsonl

STUDENT and TEACHER are downloaded Hugging Face models with the same tokenizer, such as two sizes of one family. All
parameters of the student are trained; with `--lora.rank 16 --optimizer.learning-rate 2e-4` only adapters. Without
--data.paths it reads conversations from chats.jsonl in the working directory: see docs/chat.md. To see whether both
models fit, run

    python -m jaxopt_llm.plan --config distill.py --model.pretrained STUDENT --distillation.teacher TEACHER --gpu h100

`--distillation.teacher-base nf4` or `int8` holds the teacher in fewer bytes. `--distillation.teacher ''` takes none of
its memory: the data then hold what a teacher says (prepare --teacher). docs/distillation.md has that, and the
divergences of `--distillation.beta`.
"""

from jaxopt_llm.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DistillationConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(directory="runs/distill"),
        model=ModelConfig(pretrained="STUDENT"),
        data=DataConfig(paths=("chats.jsonl",), content="chat"),
        training=TrainingConfig(
            steps=0, epochs=3.0, batch_size=16, accumulation=16, sequence_length=2048, objective="distill"
        ),
        distillation=DistillationConfig(teacher="TEACHER", beta=0.5),
        optimizer=OptimizerConfig(learning_rate=1e-5, beta2=0.999, weight_decay=0.0),
        schedule=ScheduleConfig(warmup_steps=0.1),
        checkpoint=CheckpointConfig(every=20, keep_best=1),
        evaluation=EvaluationConfig(every=20, samples=2),
    )
