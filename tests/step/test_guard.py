"""Tests of skipped steps: which steps are skipped, and that they change nothing."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.config import OptimizerConfig, RematConfig
from jaxopt_llm.core import tree
from jaxopt_llm.execution import scan
from jaxopt_llm.execution.executor import Executor
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import OBJECTIVE
from jaxopt_llm.step import guard, update
from jaxopt_llm.step import state as training_state
from jaxopt_llm.step.guard import HISTORY
from jaxopt_llm.step.optimizer import make_optimizer
from jaxopt_llm.step.state import TrainState
from jaxopt_llm.step.step import ModelStep, StepSettings

pytestmark = pytest.mark.core

# Fault of a step -> the value of the batch's first position that causes it.
POISON = {"gradient": -1, "loss": -2, "large gradient": -3}
SLOPE = 0.001  # slope of the learning rate: every step has another rate


def schedule(count: jax.Array) -> jax.Array:
    return SLOPE * (count + 1)


def poisoned(executor: Executor) -> Executor:
    """Return an executor with the fault of the batch: a NaN in one gradient, an infinite loss, or large gradients."""

    def loss_and_gradients(parts: Any, trainable: Any, frozen: Any, batch: Batch, *rest: Any) -> Any:
        mark = batch.positions[0, 0, 0]
        sums, gradients = executor.loss_and_gradients(parts, trainable, frozen, batch, *rest)
        sums[OBJECTIVE] = jnp.where(mark == POISON["loss"], jnp.inf, sums[OBJECTIVE])
        gradients = jax.tree.map(lambda x: x * jnp.where(mark == POISON["large gradient"], 1000.0, 1.0), gradients)
        scale = gradients["non_layer"]["final_norm"]["scale"]
        wrong = jnp.where(mark == POISON["gradient"], jnp.nan, scale[3])
        gradients["non_layer"]["final_norm"]["scale"] = scale.at[3].set(wrong)
        return sums, gradients

    return replace(executor, loss_and_gradients=loss_and_gradients)


@functools.cache
def program() -> tuple[Any, TrainState, TrainState]:
    """Return the step, the initial state on the host, and its shardings, with a compute copy and with Muon."""
    parts, placement = Decoder(toy.UNIFORM), toy.placement(1, compute_dtype="bfloat16", fsdp=2)
    config = OptimizerConfig(name="muon")
    optimizers = update.make_optimizers(functools.partial(make_optimizer, config, schedule), parts.specs)
    specs = training_state.make_state_specs(
        *tree.partition(parts.specs, lambda path: True), optimizers, placement.precision
    )
    executor = poisoned(scan.make_executor(RematConfig("none")))
    settings = StepSettings(clip_norm=1.0, skip_outliers=10.0)
    step = toy.make_step(parts, specs, optimizers, schedule, executor, placement, settings)
    initial = training_state.initialize_state(specs, optimizers, 0, placement)
    return step, jax.tree.map(np.asarray, initial), training_state.state_shardings(specs, placement)


def batch(seed: int, poison: str | None = None) -> Batch:
    made = toy.microbatches(toy.packed(4, 16, seed), 1)
    if poison:
        made.positions[0, 0, 0] = POISON[poison]
    return made


def run(*batches: Batch, remembered: dict[str, Any] | None = None) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the state on the host and the metrics after each step."""
    step, initial, resting = program()
    begin = initial if remembered is None else replace(initial, step=remembered["updates"], guard=remembered)
    state = jax.device_put(begin, resting)
    for each in batches:
        state, metrics = step(state, each)
        yield jax.tree.map(np.asarray, state), metrics


def test_the_step_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state that a step returns has the types of the one that it received; otherwise each run compiles twice."""
    monkeypatch.setattr(ModelStep, "step", chex.assert_max_traces(ModelStep.step, n=1))
    step, initial, resting = program.__wrapped__()
    state = jax.device_put(initial, resting)
    for seed in range(3):
        state, _ = step(state, batch(seed))


def assert_same_but_for(found: TrainState, expected: TrainState, **fields: int) -> None:
    """Assert bitwise equality, except for the step count and the given fields of the guard."""
    assert found.step == expected.step + fields.pop("step")
    changed = replace(expected, step=found.step, guard={**expected.guard, **fields})
    chex.assert_trees_all_equal(found, changed)


@pytest.mark.parametrize("poison", ["gradient", "loss"])
def test_a_step_that_is_not_finite_changes_nothing_to_the_bit(poison: str) -> None:
    (first, _), (skipped, metrics), (again, more) = run(batch(0), batch(1, poison), batch(1, poison))
    assert_same_but_for(skipped, first, step=1, skipped_in_a_row=1)
    assert_same_but_for(again, first, step=2, skipped_in_a_row=2)
    assert not np.isfinite(metrics["loss" if poison == "loss" else "grad_norm"])
    assert (metrics["skipped"], metrics["skipped_in_a_row"]) == (1, 1)
    assert (more["skipped"], more["skipped_in_a_row"]) == (2, 2)


def test_the_schedule_goes_on_where_it_was() -> None:
    *_, (whole, _) = run(batch(0), batch(2))
    steps = list(run(batch(0), batch(1, "gradient"), batch(2)))
    assert_same_but_for(steps[-1][0], whole, step=1, skipped_in_a_row=0)
    np.testing.assert_allclose([metrics["learning_rate"] for _, metrics in steps], SLOPE * np.array([1, 2, 2]))
    assert [int(metrics["skipped"]) for _, metrics in steps] == [0, 1, 1]
    assert [int(metrics["skipped_in_a_row"]) for _, metrics in steps] == [0, 1, 0]


def test_a_gradient_far_above_the_usual_is_skipped_once_there_is_a_history() -> None:
    ((first, metrics),) = run(batch(1, "large gradient"))
    assert metrics["skipped"] == 0 and first.guard["norms"][0] == metrics["grad_norm"] > 100
    _, initial, _ = program()
    known = {**initial.guard, "updates": np.int32(HISTORY), "norms": np.ones(HISTORY, np.float32)}
    ((after, metrics),) = run(batch(1, "large gradient"), remembered=known)
    assert np.isfinite(metrics["grad_norm"]) and metrics["skipped"] == 1
    chex.assert_trees_all_equal(after.masters, initial.masters)


def test_an_outlier_is_told_by_the_median_of_the_last_good_steps() -> None:
    """Compare with a plain list. The norms rise, which the rule follows, and include outliers, NaN and infinity."""
    random = np.random.default_rng(0)
    norms = np.exp(random.normal(scale=0.3, size=600)) * np.linspace(1, 30, 600)
    norms[random.choice(600, 60, replace=False)] *= 50
    norms[random.choice(600, 20, replace=False)] = np.nan
    norms[random.choice(600, 20, replace=False)] = np.inf
    norms[5] = 1e6  # before there is a history; it would dominate a mean
    judge = jax.jit(functools.partial(guard.judge_step, outliers=4.0))
    remembered, history, in_a_row = guard.initialize_guard(), [], 0
    for norm in norms.astype(np.float32):
        good, remembered = judge(remembered, jnp.float32(1), norm, jnp.bool(False))
        usual = np.median(history[-HISTORY:]) if len(history) >= HISTORY else np.inf
        assert bool(good) == bool(np.isfinite(norm) and norm <= 4 * usual)
        history += [norm] if good else []
        in_a_row = 0 if good else in_a_row + 1
        assert (remembered["updates"], remembered["skipped_in_a_row"]) == (len(history), in_a_row)
    assert sorted(remembered["norms"].tolist()) == sorted(history[-HISTORY:])
    assert len(history) < 600 - 70


def test_without_a_rule_any_finite_norm_is_good() -> None:
    known = {**guard.initialize_guard(), "updates": jnp.int32(HISTORY), "norms": jnp.ones(HISTORY)}
    assert guard.judge_step(known, jnp.float32(1), jnp.float32(1e30), jnp.bool(False), 0.0)[0]
