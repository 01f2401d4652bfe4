"""Training by the engine on eight devices is that of plain optax on one: losses, metrics, parameters and variables."""

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
import zoo_attention
import zoo_functions
import zoo_images
import zoo_published
import zoo_sequences
from plain_training import Trained, list_arrays, train_plainly

import jaxopt_llm
from jaxopt_llm.config import Config
from jaxopt_llm.engine.engine import Engine

ZOOS = (zoo_images, zoo_sequences, zoo_functions, zoo_attention, zoo_published)
CASES = {name: case for zoo in ZOOS for name, case in zoo.CASES.items()}
FSDP, BOTH, TENSOR = {"fsdp": 8}, {"data": 2, "fsdp": 4}, {"data": 2, "fsdp": 2, "tensor": 2}
# A ZeRO stage, a mesh and a number of microbatches. Each model takes the next two of them.
SETTINGS = [
    (3, FSDP, 1),
    (1, BOTH, 3),
    (3, TENSOR, 3),
    (0, TENSOR, 1),
    (2, FSDP, 3),
    (3, BOTH, 3),
    (2, TENSOR, 1),
    (0, BOTH, 3),
    (1, FSDP, 1),
]
# Of which these take the first alone: models that others resemble, and published ones, which take longest to compile.
ONCE = {"vit", "lm1b_remat", "scanned_remat", "wmt", "bert", "gemma", "encoder", *zoo_published.CASES}


@dataclass(frozen=True)
class Setting:
    name: str
    stage: int
    mesh: dict[str, int]
    accumulation: int

    def __str__(self) -> str:
        mesh = "-".join(f"{axis}{size}" for axis, size in self.mesh.items())
        return f"{self.name}-zero{self.stage}-{mesh}-{self.accumulation}"


def choose_settings() -> list[Setting]:
    following = itertools.cycle(SETTINGS)
    pairs = [(Setting(name, *next(following)), Setting(name, *next(following))) for name in CASES]
    chosen = [each for first, second in pairs for each in ([first] if first.name in ONCE else [first, second])]
    # `tensor` needs a rule.
    return [each if CASES[each.name].rules or each.mesh is not TENSOR else replace(each, mesh=BOTH) for each in chosen]


@functools.cache
def reference(name: str, accumulation: int) -> Trained:
    return train_plainly(CASES[name], accumulation)


def make_engine(setting: Setting, **sections: Any) -> Engine:
    case = CASES[setting.name]
    sections = {
        "mesh": setting.mesh,
        "sharding": {"zero_stage": setting.stage},
        "precision": {"compute_dtype": "float32"},
        "training": {"accumulation": setting.accumulation},
        "schedule": {"kind": "constant", "warmup_steps": 0},
    } | sections
    example, config = case.batches(1)[0], Config(**sections)
    return jaxopt_llm.initialize(
        case.model, case.loss, example, config, case.optimizer, case.rules, loss_over=case.loss_over
    )


@pytest.mark.parametrize("setting", choose_settings(), ids=str)
def test_training_is_that_of_optax(setting: Setting) -> None:
    assert_equal_to_optax(setting)


def assert_equal_to_optax(setting: Setting, **sections: Any) -> None:
    expected, engine = reference(setting.name, setting.accumulation), make_engine(setting, **sections)
    steps = [jax.device_get(engine.step(batch)) for batch in CASES[setting.name].batches()]
    np.testing.assert_allclose([step["loss"] for step in steps], expected.losses, rtol=1e-5, atol=1e-5)
    assert steps[-1]["skipped"] == 0
    for name, value in expected.metrics.items():
        np.testing.assert_allclose(steps[-1][name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    arrays = list_arrays(engine.model())
    assert arrays.keys() == expected.arrays.keys()
    for path, array in arrays.items():
        np.testing.assert_allclose(array, expected.arrays[path], rtol=1e-5, atol=1e-5, err_msg=path)
