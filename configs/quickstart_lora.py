"""LoRA over the quickstart's model: told a function's signature, it says what the function does.

    scripts/finetune_quickstart

makes the conversations (scripts/summaries.py), trains on them and shows what that changed. Hardware: 2 CPU cores, or one
GPU.
"""

from pathlib import Path

from jaxopt_llm.config import RunConfig, TrainConfig
from jaxopt_llm.data.config import DataConfig
from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.observe.metrics import LoggingConfig
from jaxopt_llm.parallel.precision import PrecisionConfig
from jaxopt_llm.training.evaluation import EvaluationConfig
from jaxopt_llm.training.lora import LoraConfig
from jaxopt_llm.training.optimizer import OptimizerConfig
from jaxopt_llm.training.schedule import ScheduleConfig
from jaxopt_llm.training.step import TrainingConfig


def get_config() -> TrainConfig:
    steps = 600
    return TrainConfig(
        run=RunConfig(directory="runs/quickstart_lora"),
        model=ModelConfig(pretrained="runs/quickstart"),
        data=DataConfig(
            paths=("runs/summaries/train.jsonl",),
            content="chat",
            chat_template=str(Path(__file__).with_name("quickstart_chat.jinja")),
        ),
        training=TrainingConfig(steps=steps, batch_size=8, sequence_length=256),
        lora=LoraConfig(rank=16, alpha=32.0),
        optimizer=OptimizerConfig(learning_rate=5e-3, weight_decay=0.0),
        schedule=ScheduleConfig(warmup_steps=50, decay_steps=steps),
        precision=PrecisionConfig(compute_dtype="float32"),  # CPUs are slow in 16 bits
        remat=RematConfig(policy="none"),
        evaluation=EvaluationConfig(every=200, batches=20),
        logging=LoggingConfig(every=50),
    )
