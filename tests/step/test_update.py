"""Tests of the update by period against optax on the whole tree, and of the clip."""

import functools
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy

from jaxopt_llm.config import OptimizerConfig, RematConfig
from jaxopt_llm.core import tree
from jaxopt_llm.execution.scan import make_executor
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import Params
from jaxopt_llm.step import guard, update
from jaxopt_llm.step.optimizer import is_elementwise, make_optimizer
from jaxopt_llm.step.state import TrainState, make_state_specs
from jaxopt_llm.step.step import StepSettings

pytestmark = pytest.mark.core

PARTS = Decoder(toy.CONFIG)
SPECS = PARTS.specs
CONFIG = OptimizerConfig(epsilon=1e-3, weight_decay=0.3)
PLACEMENT = toy.placement(zero_stage=1, compute_dtype="bfloat16")  # there is a compute copy in addition to the masters
STEPS = 3

jit = functools.partial(jax.jit, compiler_options=toy.QUICK_COMPILE)
DEFAULT_CODE: dict[str, Any] = (  # XLA's default code generator for CPUs, which conftest.py disables
    {"xla_backend_extra_options": ""} if jax.__version_info__ >= (0, 11) else {"xla_cpu_use_fusion_emitters": True}
)


def schedule(count: jax.Array) -> jax.Array:
    return 0.01 * (count + 1)


OPTIMIZERS = update.make_optimizers(functools.partial(make_optimizer, CONFIG, schedule), SPECS)
apply = jit(functools.partial(update.apply_gradients, OPTIMIZERS, SPECS, placement=PLACEMENT))


def random_gradients(step: int) -> Params:
    random = np.random.default_rng(step)
    return jax.tree.map(lambda spec: random.normal(size=spec.shape).astype(np.float32), SPECS)


@functools.cache
def initial() -> update.Updatable:
    masters = toy.params(SPECS)
    moments = jit(lambda masters: update.initialize_moments(OPTIMIZERS, SPECS, masters))(masters)
    return update.Updatable(masters, moments, jax.tree.map(lambda master: master.astype(jnp.bfloat16), masters))


@functools.cache
def updated() -> update.Updatable:
    state = initial()
    for step in range(STEPS):
        state = apply(state, random_gradients(step), update.Scalars(0.5))
    return state


def test_the_update_is_that_of_optax_on_the_whole_tree() -> None:
    decays = tree.map_with_path(lambda path, spec: not path.endswith("scale"), SPECS)
    whole = optax.adamw(
        schedule, CONFIG.beta1, CONFIG.beta2, CONFIG.epsilon, weight_decay=CONFIG.weight_decay, mask=decays
    )

    @jit
    def step(masters: Params, moments: Any, gradients: Params) -> tuple[Params, Any]:
        updates, moments = whole.update(jax.tree.map(lambda x: 0.5 * x, gradients), moments, masters)
        return optax.apply_updates(masters, updates), moments

    expected = initial().masters
    moments = whole.init(expected)
    for index in range(STEPS):
        expected, moments = step(expected, moments, random_gradients(index))
    masters, layer_moments, compute, *_ = updated()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    jax.tree.map(close, masters, expected)
    for moment in ("mu", "nu"):
        by_group = {group: optax.tree.get(layer_moments[group], moment) for group in SPECS}
        jax.tree.map(close, by_group, optax.tree.get(moments, moment))
    jax.tree.map(
        lambda copy, master: np.testing.assert_array_equal(copy, master.astype(jnp.bfloat16)), compute, masters
    )


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_all_periods_at_once_are_those_of_the_loop_to_the_bit(name: Any, state_dtype: Any) -> None:
    """Also if a step is skipped, and in bfloat16, whose moments are rounded at random.

    The code generator that other tests use for its speed fuses a product and a sum in other places, and rounds apart.
    """
    config = replace(CONFIG, name=name, state_dtype=state_dtype)
    assert is_elementwise(config)
    optimizers = update.make_optimizers(functools.partial(make_optimizer, config, schedule), SPECS)

    def run(elementwise: bool) -> Any:
        step = jax.jit(
            functools.partial(update.apply_gradients, optimizers, SPECS, placement=PLACEMENT, elementwise=elementwise),
            compiler_options=DEFAULT_CODE,
        )
        masters = initial().masters
        state = update.Updatable(masters, update.initialize_moments(optimizers, SPECS, masters))
        for index, good in enumerate((True, False, True)):
            state = step(state, random_gradients(index), update.Scalars(0.5, good))
        return state

    chex.assert_trees_all_equal(run(True), run(False))


@pytest.mark.parametrize("changes", [{"name": "muon"}, {"name": "adafactor"}, {"state_dtype": "int8"}], ids=str)
def test_what_is_not_elementwise_is_updated_period_by_period(changes: dict[str, Any]) -> None:
    assert not is_elementwise(replace(CONFIG, **changes))


def test_every_layer_counts_its_steps() -> None:
    for group, repeats in (("non_layer", ()), ("segment_0", (2,)), ("segment_1", (1,))):
        counts = [count for _, count in optax.tree.get_all_with_path(updated().moments[group], "count")]
        assert len(counts) == 2  # those of Adam and of the schedule
        for count in counts:
            np.testing.assert_array_equal(count, np.full(repeats, STEPS))


# Layers [virtual, stages, slots] of two segments, with two periods and with one.
PLACES = {
    "one chunk": {"segment_0": [[[0, -1], [1, -1]]], "segment_1": [[[-1], [0]]]},
    "two chunks": {"segment_0": [[[-1, 0], [-1, -1]], [[-1, -1], [1, -1]]], "segment_1": [[[-1], [-1]], [[-1], [0]]]},
}


@pytest.mark.parametrize("chunks", PLACES)
def test_stages_update_their_slots_as_layers_are_updated(chunks: str) -> None:
    """The optimizer sees matrices as on one stage, and a slot without a layer stays zero."""
    places = {section: np.array(each) for section, each in PLACES[chunks].items()}
    staged = {"non_layer": SPECS["non_layer"]} | {
        section: jax.tree.map(lambda spec, section=section: spec.unstack().stack(places[section]), SPECS[section])
        for section in places
    }
    placement = toy.placement(zero_stage=1, compute_dtype="bfloat16", pipeline=2)
    optimizers = update.make_optimizers(functools.partial(make_optimizer, CONFIG, schedule), staged)
    masters = toy.on_stages(staged, initial().masters)
    moments = update.initialize_moments(optimizers, staged, masters)
    state = update.Updatable(masters, moments, toy.on_stages(staged, initial().compute))
    step = jit(functools.partial(update.apply_gradients, optimizers, staged, placement=placement))
    for index in range(STEPS):
        state = step(state, toy.on_stages(staged, random_gradients(index)), update.Scalars(0.5))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    jax.tree.map(close, state.masters, toy.on_stages(staged, updated().masters))
    counts = [count for _, count in optax.tree.get_all_with_path(state.moments["segment_0"], "count")]
    assert {count.shape for count in counts} == {places["segment_0"].shape}
    assert all((np.asarray(count) == STEPS).all() for count in counts)


@pytest.mark.parametrize("clip_norm", [0.1, 100.0])
def test_the_step_clips_by_the_norm_over_all_leaves(clip_norm: float) -> None:
    """Check also that a gradient with a smaller norm does not change."""
    rate = 10.0
    batch, before = toy.packed(rows=2, length=16), toy.params(SPECS)
    # Plain SGD shows the clipped gradient as the difference of the masters.
    optimizers = update.make_optimizers(lambda section, specs: optax.sgd(rate), SPECS)
    placement = toy.placement()
    specs = make_state_specs(*tree.partition(SPECS, lambda path: True), optimizers, placement.precision)
    executor, settings = make_executor(RematConfig("none")), StepSettings(clip_norm)
    step = toy.make_step(PARTS, specs, optimizers, schedule, executor, placement, settings)
    moments = update.initialize_moments(optimizers, SPECS, before)
    state = TrainState(jnp.int32(0), before, moments, None, specs.frozen, guard.initialize_guard(), loss_scale={})
    microbatches = toy.microbatches(batch, 1)
    after, metrics = step.lower(state, microbatches).compile(toy.QUICK_COMPILE)(state, microbatches, step.placed)

    loss, gradients = toy.reference_mean(toy.CONFIG, before, batch)
    norm = np.sqrt(sum(np.sum(gradient**2) for gradient in jax.tree.leaves(gradients)))
    assert 2 * 0.1 < norm < 100 / 2
    clip = min(1, clip_norm / norm)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert after.step == 1

    def check(new: jax.Array, old: np.ndarray, gradient: np.ndarray) -> None:
        expected = rate * clip * gradient
        # The difference rounds as the masters do. The float32 error of a gradient is relative to its whole leaf: an
        # element near zero is a sum of larger terms, and processors add them in different orders.
        error = max(1e-6, 5e-6 * np.abs(expected).max())
        np.testing.assert_allclose(old - new, expected, rtol=1e-4, atol=error)

    jax.tree.map(check, after.masters, before, gradients)
