"""What trains: what the patterns select, of adapters and of whole parameters, and that nothing else changes."""

import functools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
import toy

from jaxopt_llm import tree
from jaxopt_llm.execution import scan
from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.model import dropout, param
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.decoder import layout, make_parts
from jaxopt_llm.model.leaves import LoraWeight
from jaxopt_llm.parallel.precision import PrecisionConfig
from jaxopt_llm.training import lora
from jaxopt_llm.training import state as training_state
from jaxopt_llm.training.lora import LoraConfig
from jaxopt_llm.training.optimizer import OptimizerConfig
from jaxopt_llm.training.program import make_program
from jaxopt_llm.training.schedule import ScheduleConfig
from jaxopt_llm.training.step import TrainingConfig

pytestmark = pytest.mark.core

PARTS = make_parts(toy.CONFIG)
MATRICES = {"query", "key", "value", "output", "gate", "up", "down"}


def paths(leaves: tree.Tree) -> set[str]:
    return set(jax.tree.leaves(tree.map_with_path(lambda path, leaf: path, leaves)))


def adapted(config: LoraConfig) -> set[str]:
    """Paths of the weights that get adapters."""
    _, trained, _ = lora.adapt(PARTS, config, PrecisionConfig())
    return {path.rsplit("/", 1)[0] for path in paths(trained)}


# ---- What the patterns select.


def test_by_default_every_matrix_of_the_blocks_is_adapted_and_nothing_else() -> None:
    products = {path for path in paths(PARTS.specs) if path.rsplit("/", 1)[-1] in MATRICES}
    assert adapted(LoraConfig(rank=2)) == products
    assert lora.problems(PARTS.specs, LoraConfig(rank=2)) == []


def test_a_pattern_selects_the_weights_that_it_fits() -> None:
    config = LoraConfig(rank=2, targets=("segment_1/*/query", "outer/*"))
    assert adapted(config) == {"segment_1/block_0/attention/query", "outer/embedding/table"}


def test_all_linear_is_a_target_beside_others() -> None:
    config = LoraConfig(rank=2, targets=("outer/*", "all-linear"))
    assert adapted(config) == adapted(LoraConfig(rank=2)) | {"outer/embedding/table"}


@pytest.mark.parametrize(
    "targets, problem",
    [
        (("*/mlp/*", "*/mpl/*"), "*/mpl/* fits no parameter (there are outer/embedding/table, segment_0/block_0/"),
        (("*norm/scale", "*"), "*norm/scale fits no matrix, only outer/final_norm/scale"),
        (("*/mlp/*", "*/up"), "*/up comes after patterns that fit all that it fits"),
        (("all-linear", "*/up"), "*/up comes after patterns that fit all that it fits"),
    ],
)
def test_a_pattern_that_decides_no_weight_is_named(targets: tuple[str, ...], problem: str) -> None:
    (found,) = lora.problems(PARTS.specs, LoraConfig(rank=2, targets=targets))
    assert problem in found
    assert lora.problems(PARTS.specs, LoraConfig(rank=0, targets=targets)) == []


def test_what_a_configuration_gets_wrong_by_itself() -> None:
    assert LoraConfig().problems() == LoraConfig(rank=2, base="int8").problems() == []
    for wrong, problem in (
        (LoraConfig(rank=-1), "lora.rank=-1"),
        (LoraConfig(alpha=0.0), "lora.alpha=0.0"),
        (LoraConfig(rank=2, targets=()), "lora.targets"),
        (LoraConfig(base="int8"), "lora.base=int8"),
        (LoraConfig(rank=2, dropout=1.0), "lora.dropout=1.0"),
        (LoraConfig(rank=2, base="int8", double_quantisation=True), "lora.base=int8: set --lora.base nf4"),
    ):
        (found,) = wrong.problems()
        assert problem in found


@pytest.mark.parametrize(
    "config, trainable, problem",
    [
        (
            LoraConfig(),
            ("*/scale", "*/bais"),
            "training.trainable: */bais fits no parameter (there are outer/embedding",
        ),
        (
            LoraConfig(rank=2),
            ("*/mlp/up",),
            "mlp/up is trained whole by training.trainable and adapted by lora.targets",
        ),
        (LoraConfig(rank=2, dora=True, targets=("*",)), (), "lora.dora is for the matrices of the blocks"),
        (LoraConfig(rank=17), (), "lora.rank=17 is above 8"),
    ],
)
def test_settings_that_do_not_go_together(config: LoraConfig, trainable: tuple[str, ...], problem: str) -> None:
    found = lora.problems(PARTS.specs, config, trainable)
    assert [problem in each for each in found] == [True], found


def test_blocks_of_4_bits_divide_the_width() -> None:
    specs = make_parts(replace(toy.CONFIG, width=24)).specs
    (found,) = lora.problems(specs, LoraConfig(rank=2, base="nf4"))
    assert "model.width=24 is no multiple of 16" in found
    assert not lora.problems(specs, LoraConfig(rank=2, base="int8"))


def test_an_adapters_product_counts_by_its_rank() -> None:
    assert LoraConfig(rank=16, alpha=8).scale == 0.5 and LoraConfig(rank=16, alpha=8, rslora=True).scale == 2.0
    parts, _, _ = lora.adapt(PARTS, LoraConfig(rank=4, alpha=8, rslora=True), PrecisionConfig())
    assert parts.specs["segment_0"]["block_0"]["mlp"]["up"].scale == 4.0


# ---- Parameters that train whole.


def selected(model: ModelConfig, config: LoraConfig, *trainable: str) -> set[str]:
    return paths(lora.adapt(make_parts(model), config, PrecisionConfig(), trainable)[1])


def test_patterns_choose_what_trains() -> None:
    scales = {path for path in paths(PARTS.specs) if path.endswith("/scale")}
    assert selected(toy.CONFIG, LoraConfig(), "*/scale") == scales
    adapters = selected(toy.CONFIG, LoraConfig(rank=2))
    assert selected(toy.CONFIG, LoraConfig(rank=2, base="nf4"), "*/scale") == scales | adapters
    # By its own path, not by those of what stands in its place: codes have scales, too.
    assert not {path for path in adapters if path.endswith(("scales", "base"))}
    assert selected(toy.CONFIG, LoraConfig(rank=2, base="nf4"), "*/final_norm/*", "*/base") == adapters | {
        "outer/final_norm/scale"
    }


def test_the_last_layers_are_a_stack_of_their_own() -> None:
    """Of 5 layers, sliding and global in turn, the last 3 begin with a sliding one."""
    model = replace(toy.CONFIG, last_layers=3)
    found = [(each.kinds, each.repeats, each.per_layer["index"].ravel().tolist()) for each in layout(model)]
    assert found == [
        (("sliding", "global"), 1, [0, 1]),
        (("sliding", "global"), 1, [2, 3]),
        (("sliding",), 1, [4]),
    ]
    assert [each.repeats for each in layout(replace(toy.UNIFORM, last_layers=2))] == [1, 2]


def test_the_same_model_is_computed_of_its_stacks_in_two() -> None:
    whole, parted = toy.UNIFORM, replace(toy.UNIFORM, last_layers=1)
    values = toy.params(make_parts(whole).specs)
    of_parts = {
        "outer": values["outer"],
        "segment_0": jax.tree.map(lambda x: x[:2], values["segment_0"]),
        "segment_1": jax.tree.map(lambda x: x[2:], values["segment_0"]),
    }
    placement, batch = toy.placement(), toy.microbatches(toy.packed(2, 16), 1)
    losses = [
        float(scan.make_executor(RematConfig("none")).loss(make_parts(model), params, batch, placement)[0])
        for model, params in ((whole, values), (parted, of_parts))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_no_backward_runs_below_what_trains() -> None:
    """A layer's forward is half of its backward, of which frozen weights want half, and nothing below the last."""

    def operations(layers: int, trainable: tuple[str, ...]) -> float:
        training = TrainingConfig(batch_size=2, sequence_length=16, trainable=trainable)
        model = replace(toy.UNIFORM, layers=layers, last_layers=1, width=64, mlp_width=256)
        rest = (OptimizerConfig(), ScheduleConfig(1, 10), RematConfig("none"), LoraConfig(), toy.placement())
        program = make_program(model, training, *rest)
        # The compiler counts a loop's body once: the difference is of loops unrolled, one layer each.
        return program.step.lower(program.state, program.batch).compile().cost_analysis()["flops"]

    of_last, of_all = operations(2, ("segment_1/*",)), operations(2, ())
    assert of_last < 0.75 * of_all


@functools.cache
def run(adapters: LoraConfig, trainable: tuple[str, ...] = ()) -> tuple[list[Any], list[Any]]:
    """States on the host before and after each of two steps, and the steps' metrics."""
    training, schedule = TrainingConfig(batch_size=4, sequence_length=16, trainable=trainable), ScheduleConfig(1, 10)
    optimizer = OptimizerConfig(clip_norm=1e3, weight_decay=0)  # only a gradient changes a value
    placement = toy.placement(2, fsdp=2)
    program = make_program(toy.UNIFORM, training, optimizer, schedule, RematConfig("none"), adapters, placement)
    state = training_state.initialize(program.specs, program.optimizers, 0, placement)
    states, told = [jax.tree.map(np.asarray, state)], []
    for seed in range(2):
        state, metrics = program.step(state, jax.device_put(toy.microbatches(toy.packed(4, 16, seed), 1), program.rows))
        states.append(jax.tree.map(np.asarray, state))
        told.append(metrics)
    return states, told


def test_steps_change_what_the_patterns_choose_alone() -> None:
    (before, _, second), _ = run(LoraConfig(), ("*/scale",))
    jax.tree.map(np.testing.assert_array_equal, second.frozen, before.frozen)
    changed = tree.map_with_path(lambda path, a, b: path if np.any(a != b) else None, before.masters, second.masters)
    assert paths(second.masters) == set(jax.tree.leaves(changed)) == selected(toy.UNIFORM, LoraConfig(), "*/scale")
    assert {path for path in paths(second.moments) if path.endswith("query")} == set()


# ---- How what is frozen rests.


def test_without_adapters_everything_is_trained() -> None:
    parts, trained, frozen = lora.adapt(PARTS, LoraConfig(), PrecisionConfig())
    assert parts.specs == trained == PARTS.specs and not jax.tree.leaves(frozen)


@pytest.mark.parametrize("base", ["float", "int8", "nf4"])
def test_the_base_rests_in_the_compute_dtype_or_as_codes(base: Any) -> None:
    config = LoraConfig(rank=2, targets=("*/attention/*", "outer/*"), base=base)
    _, trained, frozen = lora.adapt(PARTS, config, PrecisionConfig(compute_dtype="bfloat16"))
    assert {spec.dtype.name for spec in jax.tree.leaves(trained)} == {"float32"}

    def check(path: str, spec: param.ParamSpec) -> None:
        # Whether targeted or not: the MLPs have no adapters here.
        in_codes = base != "float" and MATRICES & set(path.split("/"))
        codes = {"int8": "int8", "nf4": "uint8"}.get(base)
        expected = {"codes": codes, "scales": "float32"}[path.rsplit("/", 1)[-1]] if in_codes else "bfloat16"
        assert spec.dtype.name == expected, path

    tree.map_with_path(check, frozen)


# ---- Nothing but adapters trains.


@pytest.mark.parametrize("base, dora", [("float", False), ("nf4", True)])
def test_steps_change_the_adapters_alone(base: Any, dora: bool) -> None:
    (before, first, second), metrics = run(LoraConfig(rank=2, base=base, dora=dora))
    jax.tree.map(np.testing.assert_array_equal, second.frozen, before.frozen)
    # B is zero at first: A's gradient comes with the second step.
    changed = tree.map_with_path(lambda path, a, b: path if np.any(a != b) else None, before.masters, second.masters)
    assert paths(second.masters) == set(jax.tree.leaves(changed))
    # Moments are the adapters' alone, and so is the norm.
    for moment in ("mu", "nu"):
        by_group = {group: optax.tree.get(state, moment) for group, state in first.moments.items()}
        assert paths(by_group) == paths(before.masters)
    mu = jax.tree.leaves({group: optax.tree.get(state, "mu") for group, state in first.moments.items()})
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in mu)) / (1 - OptimizerConfig().beta1)
    assert metrics[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_adapters_change_nothing_until_they_have_learnt() -> None:
    losses = [float(run(config)[1][0]["loss"]) for config in (LoraConfig(), LoraConfig(rank=2))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


# ---- Dropout.


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    noise = jax.random.bits(jax.random.key(0), (64, 64), np.uint32)
    dropped = np.asarray(dropout.drop(np.ones((64, 64, 4, 8), np.float32), noise, 0.25))
    assert set(np.unique(dropped)) == {0.0, np.float32(1 / 0.75)}
    for axes in ((0, 1), (2, 3)):  # of every feature, and of every token
        share = (dropped == 0).mean(axis=axes)
        assert share.mean() == pytest.approx(0.25, abs=0.005) and np.abs(share - 0.25).max() < 0.3
    flat = (dropped == 0).reshape(64 * 64, 32)
    assert np.abs(np.corrcoef(flat.T) - np.eye(32)).max() < 0.08 and np.abs(np.corrcoef(flat[:50])).mean() < 0.2


def test_each_adapter_layer_and_step_drops_something_else() -> None:
    """And a frozen weight, or an evaluation, nothing."""
    specs = lora.adapt(PARTS, LoraConfig(rank=2, dropout=0.5), PrecisionConfig())[0].specs["segment_0"]["block_0"]
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


def test_steps_drop_and_evaluations_do_not() -> None:
    with_dropout, without = (run(LoraConfig(rank=2, dropout=rate)) for rate in (0.5, 0.0))
    assert with_dropout[1][0]["loss"] == without[1][0]["loss"]  # B is still zero
    assert with_dropout[1][0]["grad_norm"] != pytest.approx(float(without[1][0]["grad_norm"]), rel=0.05)
    parts = lora.adapt(make_parts(toy.UNIFORM), LoraConfig(rank=2, dropout=0.5), PrecisionConfig())[0]
    state, placement = with_dropout[0][-1], toy.placement()
    batch = toy.microbatches(toy.packed(2, 16), 1)
    noise = jax.random.bits(jax.random.key(0), batch.tokens.shape, np.uint32)
    evaluated, dropped, alike = (
        scan.make_executor(RematConfig("none")).loss(of, tree.merge(state.compute, state.frozen), each, placement)[0]
        for of, each in ((parts, batch), (parts, replace(batch, noise=noise)), (parts, replace(batch, noise=noise)))
    )
    assert dropped == alike != evaluated
