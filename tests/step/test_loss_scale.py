"""Tests of loss scaling: the rules of torch in the jitted step, and the state after an overflow."""

import functools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from test_guard import batch, poisoned, schedule

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.config import CheckpointConfig, OptimizerConfig, PrecisionConfig, RematConfig
from jaxopt_llm.core import tree
from jaxopt_llm.execution import scan
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import abstract_checkpoint
from jaxopt_llm.step import guard, update
from jaxopt_llm.step import state as training_state
from jaxopt_llm.step.guard import HISTORY
from jaxopt_llm.step.optimizer import make_optimizer
from jaxopt_llm.step.state import StateSpecs, TrainState
from jaxopt_llm.step.step import Step, StepSettings

pytestmark = pytest.mark.core

PRECISION = PrecisionConfig("float16", "float16", 8.0, loss_scale_growth_interval=3)


@functools.cache
def program() -> tuple[Step, TrainState, StateSpecs, Placement]:
    """Return the step, the initial state on the host with a history of norms, its specs and its placement."""
    placement = replace(toy.placement(3, fsdp=2), precision=PRECISION)
    parts = Decoder(replace(toy.CONFIG, layers=1, pattern=("global",)))
    optimizers = update.make_optimizers(functools.partial(make_optimizer, OptimizerConfig(), schedule), parts.specs)
    specs = training_state.make_state_specs(*tree.partition(parts.specs, lambda path: True), optimizers, PRECISION)
    executor = poisoned(scan.make_executor(RematConfig("none")))
    settings = StepSettings(clip_norm=1.0, skip_outliers=10.0)
    step = toy.make_step(parts, specs, optimizers, schedule, executor, placement, settings)
    initial = jax.tree.map(np.asarray, training_state.initialize_state(specs, optimizers, 0, placement))
    known = {**initial.guard, "updates": np.int32(HISTORY), "norms": np.ones(HISTORY, np.float32)}
    return step, replace(initial, step=np.int32(HISTORY), guard=known), specs, placement


def begin(scale: float, finite_steps: int = 0) -> TrainState:
    _, initial, specs, placement = program()
    state = replace(initial, loss_scale={"scale": np.float32(scale), "finite_steps": np.int32(finite_steps)})
    return jax.device_put(state, training_state.state_shardings(specs, placement))


# Fault of a step, and the scale and growth tracker of torch's GradScaler(init_scale=8, growth_interval=3) after it.
TABLE: list[tuple[str | None, float, int]] = [
    (None, 8, 1),
    (None, 8, 2),
    (None, 16, 0),
    (None, 16, 1),
    ("gradient", 8, 0),
    ("gradient", 4, 0),
    (None, 4, 1),
    ("large gradient", 4, 2),  # an outlier: the guard skips it, but its gradients are finite
    ("loss", 8, 0),  # finite gradients, too
    (None, 8, 1),
    (None, 8, 2),
    ("gradient", 4, 0),  # otherwise this would have been the third finite step
    (None, 4, 1),
]


def test_the_step_does_what_torchs_table_says_and_an_overflow_leaves_all_else_to_the_bit() -> None:
    step, *_ = program()
    state = begin(8.0)
    in_a_row = 0
    for number, (poison, scale, finite_steps) in enumerate(TABLE):
        before = jax.tree.map(np.asarray, state)
        state, metrics = step(state, batch(number, poison))
        after = jax.tree.map(np.asarray, state)
        assert after.loss_scale == {"scale": scale, "finite_steps": finite_steps}, number
        assert metrics["loss_scale"] == scale
        assert bool(metrics["overflow"]) == (poison == "gradient") == (not np.isfinite(metrics["grad_norm"]))
        # An overflow does not change the count of the guard's limit.
        in_a_row = 0 if poison is None else in_a_row + (poison != "gradient")
        assert metrics["skipped_in_a_row"] == in_a_row
        if poison is None:
            assert after.guard["updates"] == before.guard["updates"] + 1
            assert toy.distance(after.masters, before.masters) > 0
        else:
            guard = {**before.guard, "skipped_in_a_row": np.int32(in_a_row)}
            same = replace(before, step=before.step + 1, guard=guard, loss_scale=after.loss_scale)
            jax.tree.map(np.testing.assert_array_equal, after, same)


def test_a_scale_too_large_for_float16_is_halved_until_it_fits_and_changes_no_bit_of_the_step() -> None:
    """Check real overflows: the backward sees scaled gradients, and the update unscaled ones."""
    step, *_ = program()
    state, overflow = begin(2.0**40), True
    while overflow:
        scale = float(state.loss_scale["scale"])
        state, metrics = step(state, batch(0))
        overflow = bool(metrics["overflow"])
        assert metrics["loss_scale"] == (scale / 2 if overflow else scale)
    assert 1 < scale < 2**35
    direct, same = step(begin(scale), batch(0))
    for name in ("masters", "moments", "guard", "loss_scale"):
        jax.tree.map(np.testing.assert_array_equal, getattr(state, name), getattr(direct, name))
    for name in ("loss", "grad_norm", "learning_rate"):
        assert metrics[name] == same[name]


def test_it_is_in_the_checkpoint_and_goes_on_equal_to_the_bit(tmp_path: Path) -> None:
    step, _, specs, placement = program()
    to_checkpoint = training_state.make_checkpoint_converter(specs, placement)
    state, _ = step(begin(2.0**7, finite_steps=1), batch(0))
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, to_checkpoint(state), {})
    whole, _ = step(state, batch(1))
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(1, **abstract_checkpoint(training_state.checkpoint_specs(specs), placement))
    resumed = training_state.resume_state(specs, HISTORY + 1, placement, **restored)
    assert jax.tree.map(float, resumed.loss_scale) == {"scale": 128, "finite_steps": 2}
    resumed, _ = step(resumed, batch(1))
    assert float(resumed.loss_scale["scale"]) == 256
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)


def test_where_nothing_is_scaled_the_state_holds_nothing() -> None:
    assert guard.loss_scale_specs(PrecisionConfig()) == guard.initialize_loss_scale(PrecisionConfig()) == {}
    assert guard.adjust_loss_scale({}, jnp.bool(False), 1) == {}
    _, _, specs, _ = program()
    without = replace(specs, loss_scale={})
    assert "loss_scale" in training_state.checkpoint_specs(specs)
    assert "loss_scale" not in training_state.checkpoint_specs(without)


def test_it_is_torchs_grad_scaler() -> None:
    """Compare step by step over random overflows, up to the largest scale of float32."""
    torch = pytest.importorskip("torch")
    settings: list[dict[str, Any]] = [
        {"init_scale": 2.0**16, "growth_interval": 5},
        {"init_scale": 1000.0, "growth_interval": 2},
        {"init_scale": 2.0**125, "growth_interval": 1},
    ]
    adjust = jax.jit(guard.adjust_loss_scale, static_argnums=2)
    draw = random.Random(0)
    for each in settings:
        scaler = torch.amp.GradScaler("cpu", **each)
        weight = torch.nn.Parameter(torch.zeros(()))
        sgd = torch.optim.SGD([weight], lr=1.0)
        state = {"scale": jnp.float32(each["init_scale"]), "finite_steps": jnp.int32(0)}
        for _ in range(200):
            overflow, before = draw.random() < 0.1, weight.item()
            weight.grad = scaler.scale(torch.tensor(float("inf" if overflow else 1.0)))
            scaler.step(sgd)
            scaler.update()
            state = adjust(state, jnp.bool(overflow), each["growth_interval"])
            assert scaler.get_scale() == state["scale"] and scaler._get_growth_tracker() == state["finite_steps"]
            assert (weight.item() == before) == overflow
    defaults, ours = torch.amp.GradScaler("cpu"), PrecisionConfig()
    assert (defaults._init_scale, defaults.get_growth_interval()) == (
        ours.initial_loss_scale,
        ours.loss_scale_growth_interval,
    )
    assert (defaults.get_growth_factor(), defaults.get_backoff_factor()) == (guard.GROWTH, guard.BACKOFF)
