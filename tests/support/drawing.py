"""Tiny runs that train on answers which the model, or a server, draws."""

import json
from pathlib import Path
from typing import Any

from jaxopt_llm import train as training
from jaxopt_llm.config import Config, fields
from jaxopt_llm.observe.preemption import Preemption

REWARDS = """
def evenness(prompts, completions, completion_ids, odd, **columns):
    assert len(prompts) == len(completions) == len(completion_ids) == len(odd)
    return [float(sum(ids) % 2 == is_odd) for ids, is_odd in zip(completion_ids, odd)]

def lowness(completion_ids, **columns):
    return [sum(each < 128 for each in ids) / len(ids) for ids in completion_ids]

calls = []
def fails_in_step_4(completion_ids, **columns):
    calls.append(None)
    return [1.0 / (4 - len(calls))] * len(completion_ids)
"""


def make_config(folder: Path, **settings: Any) -> Config:
    """Write prompts and a function that rewards answers; return the configuration of a tiny run."""
    (folder / "mine.py").write_text(REWARDS)
    rows = [{"prompt": "ab"[: n % 2 + 1] + str(n), "odd": n % 2} for n in range(9)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given: dict[str, Any] = {
        **{"run.directory": str(folder / "run"), "data.paths": (str(folder / "prompts.jsonl"),)},
        **{"data.content": "prompt", "data.tokenizer": "bytes", "training.objective": "grpo"},
        **{"rollouts.rewards": (f"{folder / 'mine.py'}:evenness",), "rollouts.prompts": 2, "rollouts.group_size": 4},
        **{"rollouts.max_new_tokens": 6, "training.batch_size": 4, "training.sequence_length": 24},
        **{"model.layers": 2, "model.width": 16, "model.heads": 4, "model.kv_heads": 2, "model.mlp_width": 32},
        **{"model.vocabulary_size": 258, "mesh.fsdp": 1, "precision.compute_dtype": "float32"},
        **{"optimizer.learning_rate": 1e-2, "schedule.kind": "constant", "schedule.warmup_steps": 0},
        **{"training.steps": 6, "checkpoint.every": 3, "evaluation.every": 0, "logging.every": 1},
        "logging.tensorboard": False,
    }
    config: Config = fields.replace_fields(Config(), given | settings)
    assert not config.problems()
    return config


def run(config: Config) -> Path:
    with Preemption() as signals:
        training.train(config, signals)
    return Path(config.run.directory)


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "rollouts.jsonl").read_text().splitlines()]
