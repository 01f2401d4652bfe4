"""Tests of the trained parameters: the patterns select adapters and whole parameters, and nothing else changes."""

import functools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
import toy

from jaxopt_llm.config import (
    LoraConfig,
    Matmul,
    OptimizerConfig,
    PrecisionConfig,
    RematConfig,
    ScheduleConfig,
    TrainingConfig,
)
from jaxopt_llm.core import tree
from jaxopt_llm.model import param
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.linear import quantised
from jaxopt_llm.step import lora
from jaxopt_llm.step import state as training_state

pytestmark = pytest.mark.core

PARTS = Decoder(toy.CONFIG)
MATRICES = {"query", "key", "value", "output", "gate", "up", "down"}


def paths(leaves: tree.Tree) -> set[str]:
    return set(jax.tree.leaves(tree.map_with_path(lambda path, leaf: path, leaves)))


def adapted(config: LoraConfig) -> set[str]:
    """Return the paths of the weights that have adapters."""
    _, trained, _ = lora.adapt_model(PARTS, config, PrecisionConfig())
    return {path.rsplit("/", 1)[0] for path in paths(trained)}


# ---- Selection by patterns.


def test_by_default_every_matrix_of_the_blocks_is_adapted_and_nothing_else() -> None:
    products = {path for path in paths(PARTS.specs) if path.rsplit("/", 1)[-1] in MATRICES}
    assert adapted(LoraConfig(rank=2)) == products
    assert lora.problems(PARTS.specs, LoraConfig(rank=2)) == []


def test_a_pattern_selects_the_weights_that_it_fits() -> None:
    config = LoraConfig(rank=2, targets=("segment_1/*/query", "non_layer/*"))
    assert adapted(config) == {"segment_1/block_0/attention/query", "non_layer/embedding/table"}


def test_all_linear_is_a_target_beside_others() -> None:
    config = LoraConfig(rank=2, targets=("non_layer/*", "all-linear"))
    assert adapted(config) == adapted(LoraConfig(rank=2)) | {"non_layer/embedding/table"}


@pytest.mark.parametrize(
    "targets, problem",
    [
        (
            ("*/mlp/*", "*/mpl/*"),
            "*/mpl/* matches no parameter; correct or remove it (examples: non_layer/embedding/table, ",
        ),
        (("*norm/scale", "*"), "*norm/scale matches no matrix, only non_layer/final_norm/scale"),
        (("*/mlp/*", "*/up"), "*/up has no effect, because earlier patterns match all its parameters; correct or"),
        (("all-linear", "*/up"), "*/up has no effect, because earlier patterns match all its parameters; correct or"),
    ],
)
def test_a_pattern_that_decides_no_weight_is_named(targets: tuple[str, ...], problem: str) -> None:
    (found,) = lora.problems(PARTS.specs, LoraConfig(rank=2, targets=targets))
    assert problem in found
    assert lora.problems(PARTS.specs, LoraConfig(rank=0, targets=targets)) == []


def test_a_head_of_its_own_is_among_what_exists() -> None:
    specs = Decoder(replace(toy.CONFIG, tied_head=False)).specs
    (found,) = lora.problems(specs, LoraConfig(rank=2, targets=("*/mpl/*",)))
    assert "(examples: non_layer/embedding/table, non_layer/head/table, segment_0/block_0/attention/key, " in found


def test_what_a_configuration_gets_wrong_by_itself() -> None:
    assert LoraConfig().problems() == LoraConfig(rank=2, base="int8").problems() == []
    for wrong, problem in (
        (LoraConfig(rank=-1), "lora.rank=-1"),
        (LoraConfig(rank=2, alpha=0.0), "lora.alpha=0.0"),
        (LoraConfig(alpha=8.0), "lora.alpha=8.0 has no effect with lora.rank=0"),
        (LoraConfig(rank=2, targets=()), "lora.targets"),
        (
            LoraConfig(base="int8"),
            "lora.base=int8 has no effect with lora.rank=0, which trains no adapters: set --lora.rank",
        ),
        (LoraConfig(dora=True), "lora.dora=True has no effect with lora.rank=0"),
        (LoraConfig(rslora=True), "lora.rslora=True has no effect with lora.rank=0"),
        (LoraConfig(dropout=0.1), "lora.dropout=0.1 has no effect with lora.rank=0"),
        (LoraConfig(targets=("*/mlp/*",)), "lora.targets=('*/mlp/*',) has no effect with lora.rank=0"),
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
            "training.trainable: */bais matches no parameter; correct or remove it (examples: non_layer/embedding",
        ),
        (
            LoraConfig(rank=2),
            ("*/mlp/up",),
            "mlp/up is in training.trainable and in lora.targets: remove it from one of them",
        ),
        (LoraConfig(rank=2, dora=True, targets=("*",)), (), "lora.dora=True supports only matrices of blocks"),
        (
            LoraConfig(rank=2, dropout=0.1, targets=("non_layer/*",)),
            (),
            "lora.dropout=0.1 has no effect on non_layer/",
        ),
        (LoraConfig(rank=17), (), "lora.rank=17 is above 8, the largest possible rank of segment_"),
    ],
)
def test_settings_that_do_not_go_together(config: LoraConfig, trainable: tuple[str, ...], problem: str) -> None:
    found = lora.problems(PARTS.specs, config, trainable)
    assert [problem in each for each in found] == [True], found


def test_blocks_of_4_bits_divide_the_width() -> None:
    specs = Decoder(replace(toy.CONFIG, width=24)).specs
    (found,) = lora.problems(specs, LoraConfig(rank=2, base="nf4"))
    assert "model.width=24 is not a multiple of 16" in found
    assert not lora.problems(specs, LoraConfig(rank=2, base="int8"))


def test_an_adapters_product_counts_by_its_rank() -> None:
    assert LoraConfig(rank=16, alpha=8).scale == 0.5 and LoraConfig(rank=16, alpha=8, rslora=True).scale == 2.0
    parts, _, _ = lora.adapt_model(PARTS, LoraConfig(rank=4, alpha=8, rslora=True), PrecisionConfig())
    assert parts.specs["segment_0"]["block_0"]["mlp"]["up"].scale == 4.0


# ---- Dtypes of the frozen parameters.


def test_without_adapters_everything_is_trained() -> None:
    parts, trained, frozen = lora.adapt_model(PARTS, LoraConfig(), PrecisionConfig())
    assert parts.specs == trained == PARTS.specs and not jax.tree.leaves(frozen)


@pytest.mark.parametrize("base", ["float", "int8", "nf4"])
def test_the_base_rests_in_the_compute_dtype_or_as_codes(base: Any) -> None:
    config = LoraConfig(rank=2, targets=("*/attention/*", "non_layer/*"), base=base)
    _, trained, frozen = lora.adapt_model(PARTS, config, PrecisionConfig(compute_dtype="bfloat16"))
    assert {spec.dtype.name for spec in jax.tree.leaves(trained)} == {"float32"}

    def check(path: str, spec: param.ParamSpec) -> None:
        # The MLPs have no adapters here, but their weights are quantised too.
        in_codes = base != "float" and MATRICES & set(path.split("/"))
        codes = {"int8": "int8", "nf4": "uint8"}.get(base)
        expected = {"codes": codes, "scales": "float32"}[path.rsplit("/", 1)[-1]] if in_codes else "bfloat16"
        assert spec.dtype.name == expected, path

    tree.map_with_path(check, frozen)


# ---- Only adapters train.


@functools.cache
def run(adapters: LoraConfig, trainable: tuple[str, ...] = ()) -> tuple[list[Any], list[Any]]:
    """Return the states on the host before and after each of two steps, and the metrics of the steps."""
    training, schedule = TrainingConfig(batch_size=4, sequence_length=16, trainable=trainable), ScheduleConfig(1, 10)
    optimizer = OptimizerConfig(clip_norm=1e3, weight_decay=0)  # only a gradient changes a value
    placement = toy.placement(2, fsdp=2)
    program = toy.make_program(toy.UNIFORM, training, optimizer, schedule, RematConfig("none"), adapters, placement)
    state = training_state.initialize_state(program.specs, program.optimizers, 0, placement)
    states, recorded = [jax.tree.map(np.asarray, state)], []
    for seed in range(2):
        state, metrics = program.step(
            state, jax.device_put(toy.microbatches(toy.packed(4, 16, seed), 1), program.batch_sharding)
        )
        states.append(jax.tree.map(np.asarray, state))
        recorded.append(metrics)
    return states, recorded


@pytest.mark.parametrize("base, dora", [("float", False), ("nf4", True)])
def test_steps_change_the_adapters_alone(base: Any, dora: bool) -> None:
    (before, first, second), metrics = run(LoraConfig(rank=2, base=base, dora=dora))
    jax.tree.map(np.testing.assert_array_equal, second.frozen, before.frozen)
    # B is zero at first, so A has no gradient before the second step.
    changed = tree.map_with_path(lambda path, a, b: path if np.any(a != b) else None, before.masters, second.masters)
    assert paths(second.masters) == set(jax.tree.leaves(changed))
    # Only the adapters have moments and count in the norm.
    for moment in ("mu", "nu"):
        by_group = {group: optax.tree.get(state, moment) for group, state in first.moments.items()}
        assert paths(by_group) == paths(before.masters)
    mu = jax.tree.leaves({group: optax.tree.get(state, "mu") for group, state in first.moments.items()})
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in mu)) / (1 - OptimizerConfig().beta1)
    assert metrics[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_adapters_change_nothing_until_they_have_learnt() -> None:
    losses = [float(run(config)[1][0]["loss"]) for config in (LoraConfig(), LoraConfig(rank=2))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


# ---- Rounded bases.


@pytest.mark.parametrize("matmul", ["int8_qat", "int4_qat"])
def test_a_base_is_rounded_and_its_adapters_are_not(matmul: Matmul) -> None:
    """Two steps of quantisation-aware training are those over a base that was rounded before."""
    training = TrainingConfig(batch_size=4, sequence_length=16)
    sections = training, OptimizerConfig(), ScheduleConfig(1, 10), RematConfig("none"), LoraConfig(rank=2)
    config = replace(toy.UNIFORM, width=32, heads=2, kv_heads=2, head_dim=32, mlp_width=64)  # whole groups of int4

    def train(matmul: Matmul, base: Any = None) -> tuple[Any, Any]:
        precision = PrecisionConfig(compute_dtype="float32", matmul=matmul)
        placement = replace(toy.placement(3, fsdp=2), precision=precision)
        program = toy.make_program(config, *sections, placement)
        state = training_state.initialize_state(program.specs, program.optimizers, 0, placement)
        base = base or jax.tree.map(round_matrix, program.specs.frozen, state.frozen)
        if matmul == "compute_dtype":
            sharded = jax.tree.map(lambda array, old: jax.device_put(array, old.sharding), base, state.frozen)
            state = replace(state, frozen=sharded)
        for seed in range(2):
            batch = toy.microbatches(toy.packed(4, 16, seed), 1)
            state, metrics = program.step(state, jax.device_put(batch, program.batch_sharding))
        return base, (state.masters, metrics["loss"])

    def round_matrix(spec: param.ParamSpec, array: jax.Array) -> np.ndarray:
        if spec.layers is None or not spec.contracting:
            return np.asarray(array)
        rows = [
            quantised.dequantise(quantised.quantise_weight(matmul, row, spec.unstack().contracting), "float32")
            for row in array
        ]
        return np.stack(rows)

    base, found = train(matmul)
    assert toy.distance(found, train("compute_dtype", base)[1]) < 1e-6
