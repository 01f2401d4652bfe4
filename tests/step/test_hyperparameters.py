"""Tests of the hyperparameters that are arguments of the compiled step."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy

from jaxopt_llm.config import Config, OptimizerConfig, ScheduleConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.model.param import ParamSpec, normal
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step.hyperparameters import read_hyperparameters
from jaxopt_llm.step.optimizer import make_optimizer
from jaxopt_llm.step.program import Program, make_program
from jaxopt_llm.step.state import initialize_state

SMALL = {"training.batch_size": 8, "training.sequence_length": 16, "training.steps": 20, "schedule.warmup_steps": 4}
OTHER = {
    "optimizer.learning_rate": 0.7,
    "optimizer.beta1": 0.3,
    "optimizer.beta2": 0.4,
    "optimizer.momentum": 0.6,
    "optimizer.epsilon": 0.01,
    "optimizer.weight_decay": 0.0,
    "schedule.warmup_steps": 0,
    "schedule.decay_steps": 300,
    "schedule.final_share": 0.6,
    "schedule.cooldown_steps": 7,
    "training.steps": 200,
}
PATHS: dict[str, dict[str, Any]] = {
    "loop": {},
    "no loop": {"training.unroll": "all", "remat.policy": "none"},
    "pipeline": {"mesh.pipeline": 2, "training.accumulation": 2},
    "in the backward": {"optimizer.in_backward": True, "optimizer.clip_norm": 0.0},
    "offload": {"offload.optimizer": True},
    "local steps": {"mesh.data": 2, "training.local_steps": 2},
    "adapters": {"lora.rank": 2, "lora.dropout": 0.1},
    "int8": {"optimizer.state_dtype": "int8"},
    "muon": {"optimizer.name": "muon", "schedule.kind": "linear"},
    "lion": {"optimizer.name": "lion", "schedule.kind": "inverse_sqrt"},
    "sgd": {"optimizer.name": "sgd", "schedule.kind": "wsd"},
    "adafactor": {"optimizer.name": "adafactor", "schedule.kind": "constant"},
}


def program(settings: dict[str, Any]) -> Program:
    config = replace_fields(Config(model=toy.UNIFORM), {**SMALL, **settings})
    mesh = make_mesh(config.mesh, jax.devices()[: config.mesh.devices])
    return make_program(config, Placement(mesh, config.sharding, config.precision, config.offload))


@pytest.mark.core
@pytest.mark.parametrize("path", PATHS)
def test_one_program_serves_all_of_them(path: str) -> None:
    first, second = (program(PATHS[path] | other) for other in ({}, OTHER))
    assert first.step.hyperparameters != second.step.hyperparameters
    texts = [each.step.lower(each.state, each.batch).as_text() for each in (first, second)]
    assert texts[0] == texts[1]


def test_the_step_reads_them() -> None:
    """A step without weight decay and one with it, a larger rate and other decays, as calls of one program."""
    made = program({})
    state = initialize_state(made.specs, made.optimizers, 0, made.step.placement)
    batch = toy.microbatches(toy.packed(8, 16), 1)
    rates = []
    for settings in ({}, OTHER):
        step = dataclasses.replace(made.step, hyperparameters=program(settings).step.hyperparameters)
        new, metrics = step(jax.tree.map(jnp.copy, state), jax.device_put(batch, made.batch_sharding))
        rates.append(float(metrics["learning_rate"]))
        jax.block_until_ready(new)
    assert rates == pytest.approx([3e-4 / 4, 0.7 * (0.6 + 0.4 * (1 + np.cos(np.pi / 300)) / 2)], rel=1e-6)
    assert made.step.jitted._cache_size() == 1


@pytest.mark.core
@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "sgd"])
def test_an_optimizer_with_traced_numbers_is_that_of_optax_to_the_bit(name: str) -> None:
    """1 - beta is rounded once, from float64: in float32, 1 - 0.999 is wrong by a hundred-thousandth."""
    config = OptimizerConfig(name=name, beta1=0.8, beta2=0.999, momentum=0.99, weight_decay=0.0)  # type: ignore[arg-type]
    specs = {"up": ParamSpec((16, 32), ("embed", "mlp"), (0,), normal())}
    numbers = read_hyperparameters(Config(optimizer=config, schedule=ScheduleConfig())).optimizer
    plain = {
        "adamw": optax.scale_by_adam(0.8, 0.999, 1e-8),
        "lion": optax.scale_by_lion(0.8, 0.999),
        "muon": None,
        "sgd": optax.trace(0.99),
    }[name]
    random = np.random.default_rng(0)
    parameters = {"up": random.normal(size=(16, 32)).astype(np.float32)}
    gradients = random.normal(size=(5, 16, 32)).astype(np.float32)

    def bind(numbers: Any) -> optax.GradientTransformation:
        return make_optimizer(config, lambda count: -1.0, "segment_0", specs, numbers)

    def run(update: Any, state: Any) -> Any:
        for gradient in gradients:
            found, state = update({"up": gradient}, state)
        return found["up"]

    @jax.jit
    def with_numbers(numbers: Any, gradients: Any, state: Any) -> Any:
        return bind(numbers).update(gradients, state, parameters)

    @jax.jit
    def with_constants(gradients: Any, state: Any) -> Any:
        return constant.update(gradients, state, parameters)

    constant = optax.chain(plain, optax.scale_by_learning_rate(-1.0)) if plain else bind(None)
    found = run(functools.partial(with_numbers, numbers), bind(None).init(parameters))
    np.testing.assert_array_equal(found, run(with_constants, constant.init(parameters)))
