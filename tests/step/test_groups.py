"""Tests of the parameter groups of weight decay and learning rate."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import toy

from jaxopt_llm.config import OptimizerConfig
from jaxopt_llm.core import tree
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.step import update
from jaxopt_llm.step.optimizer import group_problems, make_optimizer

pytestmark = pytest.mark.core

SPECS = Decoder(toy.CONFIG).specs


def changes(**fields: Any) -> dict[str, set[float]]:
    """Return by path the shares of its values that a parameter loses in a step of rate 1 without a gradient."""
    config = OptimizerConfig(name="sgd", weight_decay=0.5, **fields)
    optimizers = update.make_optimizers(lambda *of: make_optimizer(config, lambda count: 1.0, *of), SPECS)
    masters = jax.tree.map(lambda spec: np.ones(spec.shape, np.float32), SPECS)
    state = update.Updatable(masters, update.initialize_moments(optimizers, SPECS, masters))
    gradients = jax.tree.map(np.zeros_like, masters)

    @jax.jit
    def step(state: Any, gradients: Params) -> Params:
        return update.apply_gradients(optimizers, SPECS, state, gradients, update.Scalars(), toy.placement()).masters

    found: dict[str, set[float]] = {}
    tree.map_with_path(
        lambda path, new: found.update({path: set((1 - np.ravel(new)).tolist())}), step(state, gradients)
    )
    return found


def test_by_default_matrices_and_tables_decay_and_scales_do_not() -> None:
    for path, change in changes().items():
        assert change == {0.0 if path.endswith("scale") else 0.5}, path


def test_a_bias_by_heads_is_no_matrix() -> None:
    specs = Decoder(replace(toy.UNIFORM, biases="qkv")).specs["segment_0"]["block_0"]
    specs = jax.tree.map(ParamSpec.unstack, specs)
    ones, zeros = (jax.tree.map(lambda spec, x=x: np.full(spec.shape, x, np.float32), specs) for x in (1, 0))
    config = OptimizerConfig(name="sgd", weight_decay=0.5)
    optimizer = make_optimizer(config, lambda count: 1.0, "segment_0", {"block_0": specs})
    step = optimizer.update({"block_0": zeros}, optimizer.init({"block_0": ones}), {"block_0": ones})[0]["block_0"]
    assert step["attention"]["key_bias"].ndim == 2
    assert not np.any(step["attention"]["key_bias"]) and np.all(step["attention"]["key"] == -0.5)


def test_the_first_pattern_that_fits_decides_both_factors() -> None:
    found = changes(
        decay_groups=("*/mlp/up=0.5", "*/mlp/*=0", "*=1"), rate_groups=("segment_1/*=0.25", "*/table=0", "*=1")
    )
    for path, change in found.items():
        decay = 0.25 if path.endswith("mlp/up") else 0.0 if "/mlp/" in path else 0.5
        rate = 0.25 if path.startswith("segment_1") else 0.0 if path.endswith("table") else 1.0
        assert change == {decay * rate}, path


def test_the_factor_of_the_rate_is_of_the_gradients_step_too() -> None:
    config = OptimizerConfig(name="sgd", weight_decay=0, rate_groups=("*scale=3", "*=1"))
    optimizer = make_optimizer(config, lambda count: 1.0, "non_layer", SPECS["non_layer"])
    ones = jax.tree.map(lambda spec: np.ones(spec.shape, np.float32), SPECS["non_layer"])
    steps, _ = optimizer.update(ones, optimizer.init(ones), ones)
    assert np.unique(steps["final_norm"]["scale"]) == [-3] and np.unique(steps["embedding"]["table"]) == [-1]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (("*/attention/*=1", "*/mlp/*=1"), "no pattern matches non_layer/embedding/table; end with *=1"),
        (("*/mpl/*=0", "*=1"), "*/mpl/* matches no parameter; correct or remove it"),
        (
            ("*/mlp/*=0", "*/up=2", "*=1"),
            "*/up has no effect, because earlier patterns match all its parameters; move it",
        ),
        (("*=0", "*=1"), "* has no effect, because earlier patterns match all its parameters; move it"),
    ],
)
def test_parameters_uncovered_and_patterns_idle_are_named(groups: tuple[str, ...], message: str) -> None:
    for name in ("decay_groups", "rate_groups"):
        (problem,) = group_problems(OptimizerConfig(**{name: groups}), SPECS)  # type: ignore[arg-type]
        assert problem.startswith(f"optimizer.{name}: {message}") and "non_layer/embedding/table" in problem
    assert group_problems(OptimizerConfig(), SPECS) == []


@pytest.mark.parametrize("group", ["*", "*=", "=1", "*=many", "*=-1", "*=nan", "*=inf"])
def test_what_is_no_group_is_named(group: str) -> None:
    for name in ("decay_groups", "rate_groups"):
        (problem,) = OptimizerConfig(**{name: (group,)}).problems()  # type: ignore[arg-type]
        assert problem.startswith(f"optimizer.{name}: {group}: must be PATTERN=NUMBER")
