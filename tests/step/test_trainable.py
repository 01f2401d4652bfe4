"""Tests of parameters that train whole next to frozen ones, and of dropout."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import toy
from test_lora import paths, run

from jaxopt_llm.config import (
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RematConfig,
    ScheduleConfig,
    TrainingConfig,
)
from jaxopt_llm.core import tree
from jaxopt_llm.execution import scan
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.decoder_specs import list_segments
from jaxopt_llm.model.linear import dropout
from jaxopt_llm.model.linear.leaves import LoraWeight
from jaxopt_llm.model.model import OBJECTIVE
from jaxopt_llm.step import lora
from jaxopt_llm.step import state as training_state

PARTS = Decoder(toy.CONFIG)


def selected(model: ModelConfig, config: LoraConfig, *trainable: str) -> set[str]:
    return paths(lora.adapt_model(Decoder(model), config, PrecisionConfig(), trainable)[1])


def test_patterns_choose_what_trains() -> None:
    scales = {path for path in paths(PARTS.specs) if path.endswith("/scale")}
    assert selected(toy.CONFIG, LoraConfig(), "*/scale") == scales
    adapters = selected(toy.CONFIG, LoraConfig(rank=2))
    assert selected(toy.CONFIG, LoraConfig(rank=2, base="nf4"), "*/scale") == scales | adapters
    # The pattern applies to the path of the parameter, not to those of its codes, which have scales, too.
    assert not {path for path in adapters if path.endswith(("scales", "base"))}
    assert selected(toy.CONFIG, LoraConfig(rank=2, base="nf4"), "*/final_norm/*", "*/base") == adapters | {
        "non_layer/final_norm/scale"
    }


def test_the_last_layers_are_a_stack_of_their_own() -> None:
    """Check 5 layers, alternately sliding and global, of which the last 3 start with a sliding one."""
    model = replace(toy.CONFIG, last_layers=3)
    found = [(each.kinds, each.repeats, each.per_layer["index"].ravel().tolist()) for each in list_segments(model)]
    assert found == [
        (("sliding", "global"), 1, [0, 1]),
        (("sliding", "global"), 1, [2, 3]),
        (("sliding",), 1, [4]),
    ]
    assert [each.repeats for each in list_segments(replace(toy.UNIFORM, last_layers=2))] == [1, 2]


def test_the_same_model_is_computed_of_its_stacks_in_two() -> None:
    whole, parted = toy.UNIFORM, replace(toy.UNIFORM, last_layers=1)
    values = toy.params(Decoder(whole).specs)
    of_parts = {
        "non_layer": values["non_layer"],
        "segment_0": jax.tree.map(lambda x: x[:2], values["segment_0"]),
        "segment_1": jax.tree.map(lambda x: x[2:], values["segment_0"]),
    }
    placement, batch = toy.placement(), toy.microbatches(toy.packed(2, 16), 1)
    losses = [
        float(scan.make_executor(RematConfig("none")).loss(Decoder(model), params, batch, placement)[OBJECTIVE])
        for model, params in ((whole, values), (parted, of_parts))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_no_backward_runs_below_what_trains() -> None:
    """A forward costs half of a backward. Frozen weights need half of it, and none below the last trained layer."""

    def operations(layers: int, trainable: tuple[str, ...]) -> float:
        training = TrainingConfig(batch_size=2, sequence_length=16, trainable=trainable)
        model = replace(toy.UNIFORM, layers=layers, last_layers=1, width=64, mlp_width=256)
        rest = (OptimizerConfig(), ScheduleConfig(1, 10), RematConfig("none"), LoraConfig(), toy.placement())
        program = toy.make_program(model, training, *rest)
        # The compiler counts the body of a loop once. Loops over one layer are unrolled, and counted completely.
        return program.step.lower(program.state, program.batch).compile().cost_analysis()["flops"]

    of_last, of_all = operations(2, ("segment_1/*",)), operations(2, ())
    assert of_last < 0.75 * of_all


def test_steps_change_what_the_patterns_choose_alone() -> None:
    (before, _, second), _ = run(LoraConfig(), ("*/scale",))
    jax.tree.map(np.testing.assert_array_equal, second.frozen, before.frozen)
    changed = tree.map_with_path(lambda path, a, b: path if np.any(a != b) else None, before.masters, second.masters)
    assert paths(second.masters) == set(jax.tree.leaves(changed)) == selected(toy.UNIFORM, LoraConfig(), "*/scale")
    assert {path for path in paths(second.moments) if path.endswith("query")} == set()


# ---- Dropout.


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    noise = jax.random.bits(jax.random.key(0), (64, 64), np.uint32)
    dropped = np.asarray(dropout.apply_dropout(np.ones((64, 64, 4, 8), np.float32), noise, 0.25))
    assert set(np.unique(dropped)) == {0.0, np.float32(1 / 0.75)}
    for axes in ((0, 1), (2, 3)):  # for every feature, and for every token
        share = (dropped == 0).mean(axis=axes)
        assert share.mean() == pytest.approx(0.25, abs=0.005) and np.abs(share - 0.25).max() < 0.3
    flat = (dropped == 0).reshape(64 * 64, 32)
    assert np.abs(np.corrcoef(flat.T) - np.eye(32)).max() < 0.08 and np.abs(np.corrcoef(flat[:50])).mean() < 0.2


def test_each_adapter_layer_and_step_drops_something_else() -> None:
    """Check also that nothing is dropped in an evaluation."""
    specs = lora.adapt_model(PARTS, LoraConfig(rank=2, dropout=0.5), PrecisionConfig())[0].specs["segment_0"]["block_0"]
    steps = [jax.random.bits(jax.random.key(step), (2, 8), np.uint32) for step in range(2)]
    drawn = [
        leaf.noise
        for noise in steps
        for layer in (0, 1)
        for leaf in jax.tree.leaves(
            dropout.with_noise(specs, noise, np.int32(layer)), is_leaf=lambda leaf: isinstance(leaf, LoraWeight)
        )
        if isinstance(leaf, LoraWeight)
    ]
    assert len(drawn) == 2 * 2 * 7 and len({np.asarray(noise).tobytes() for noise in drawn}) == len(drawn)
    assert dropout.with_noise(specs, None, np.int32(0)) == specs


@pytest.mark.slow
def test_steps_drop_and_evaluations_do_not() -> None:
    with_dropout, without = (run(LoraConfig(rank=2, dropout=rate)) for rate in (0.5, 0.0))
    assert with_dropout[1][0]["loss"] == without[1][0]["loss"]  # B is still zero
    assert with_dropout[1][0]["grad_norm"] != pytest.approx(float(without[1][0]["grad_norm"]), rel=0.05)
    parts = lora.adapt_model(Decoder(toy.UNIFORM), LoraConfig(rank=2, dropout=0.5), PrecisionConfig())[0]
    state, placement = with_dropout[0][-1], toy.placement()
    batch = toy.microbatches(toy.packed(2, 16), 1)
    noise = jax.random.bits(jax.random.key(0), batch.tokens.shape, np.uint32)
    evaluated, dropped, alike = (
        scan.make_executor(RematConfig("none")).loss(of, tree.merge(state.compute, state.frozen), each, placement)[
            OBJECTIVE
        ]
        for of, each in ((parts, batch), (parts, replace(batch, noise=noise)), (parts, replace(batch, noise=noise)))
    )
    assert dropped == alike != evaluated


@pytest.mark.slow
def test_what_is_dropped_is_a_function_of_seed_and_step() -> None:
    arguments = TrainingConfig(batch_size=2, sequence_length=16), OptimizerConfig(), ScheduleConfig(), RematConfig()
    model, placement = replace(toy.UNIFORM, layers=1), toy.placement()

    def norms(seed: int, *steps: int) -> list[float]:
        program = toy.make_program(model, *arguments, LoraConfig(rank=2, dropout=0.5), placement, seed)
        batch = jax.device_put(toy.microbatches(toy.packed(2, 16), 1), program.batch_sharding)
        states = (training_state.initialize_state(program.specs, program.optimizers, 0, placement) for _ in steps)
        return [
            float(program.step(replace(state, step=np.int32(step)), batch)[1]["grad_norm"])
            for state, step in zip(states, steps, strict=True)
        ]

    first, second, again = norms(0, 0, 1, 0)
    assert first == again and len({first, second, *norms(1, 0)}) == 3
