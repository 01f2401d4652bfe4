"""Every placement computes the same: a pairwise cover of the settings that place it, against one device."""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import toy
from matrix import pairwise

from jaxopt_llm import tree
from jaxopt_llm.execution.scan import RematConfig
from jaxopt_llm.model.decoder import Params, make_parts
from jaxopt_llm.parallel.mesh import MeshConfig, make_mesh
from jaxopt_llm.parallel.precision import PrecisionConfig
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.training import state as training_state
from jaxopt_llm.training.optimizer import OptimizerConfig
from jaxopt_llm.training.program import make_program
from jaxopt_llm.training.schedule import ScheduleConfig
from jaxopt_llm.training.state import TrainState
from jaxopt_llm.training.step import TrainingConfig

ROWS, LENGTH = 24, 16
CASES = pairwise(
    {
        "zero": (0, 1, 2, 3),
        "tensor": (1, 2),
        "split": ({"data": 4}, {"fsdp": 4}, {"data": 2, "fsdp": 2}),
        "accumulation": (1, 3),
        "remat": ("none", "full"),
        "tied": (True, False),
    }
)
# Beyond the cover: the third batch axis, and key-value heads fewer than `tensor`, which are repeated.
EXTRAS = [
    {"zero": 1, "tensor": 1, "split": {"fsdp": 2, "expert": 2}, "accumulation": 3, "remat": "full", "tied": True},
    {"zero": 3, "tensor": 4, "split": {"fsdp": 2}, "accumulation": 1, "remat": "none", "tied": True},
]

pytestmark = pytest.mark.core


class Result(NamedTuple):
    loss: float
    norm: float
    gradients: Params
    masters: Params


def compute(placement: Placement, accumulation: int, remat: str, tied: bool) -> Result:
    """The real training step, twice: loss, norm and gradients of the first, and the masters after the second."""
    model = replace(toy.CONFIG, tied_head=tied)
    training = TrainingConfig(batch_size=ROWS, sequence_length=LENGTH, accumulation=accumulation)
    # An epsilon under which rounding noise of a zero gradient does not become a full step; a clip that always acts.
    optimizer = OptimizerConfig(learning_rate=1e-2, epsilon=1e-3, clip_norm=0.5)
    policy = RematConfig(remat)  # type: ignore[arg-type]
    program = make_program(model, training, optimizer, ScheduleConfig(1, 10), policy, placement)
    resting = training_state.kept(training_state.shardings(program.specs, placement))
    state = training_state.resume(program.specs, 0, placement, **jax.device_put(initial(tied), resting))

    first, second = (toy.microbatches(toy.packed(ROWS, LENGTH, seed), accumulation) for seed in range(2))
    state, metrics = program.step(state, jax.device_put(first, program.rows))
    # Adam's first moment after one step from zero is (1 - beta1) × the clipped gradient.
    gradients = {group: moments[0].mu for group, moments in to_host(state.moments).items()}
    state, _ = program.step(state, jax.device_put(second, program.rows))
    assert metrics["grad_norm"] > optimizer.clip_norm
    return Result(float(metrics["loss"]), float(metrics["grad_norm"]), gradients, to_host(state.masters))


@functools.cache
def initial(tied: bool) -> dict[str, Params]:
    """The state before the first step, made on one device."""
    return to_host(training_state.kept(initialize(toy.placement(), tied)))


def initialize(placement: Placement, tied: bool) -> TrainState:
    model = replace(toy.CONFIG, tied_head=tied)
    program = make_program(model, TrainingConfig(), OptimizerConfig(), ScheduleConfig(), RematConfig("none"), placement)
    return training_state.initialize(program.specs, program.optimizers, 0, placement)


def to_host(leaves: Any) -> Any:
    return jax.tree.map(np.asarray, leaves)


@functools.cache
def one_device(tied: bool) -> Result:
    return compute(toy.placement(), 1, "none", tied)


def assert_equal(found: Params, expected: Params, share: float = 1e-5) -> None:
    """The design's sense of equal: each leaf to `share` of itself and a hundredth of it of the whole."""
    whole = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(expected)))

    def check(path: str, a: np.ndarray, b: np.ndarray) -> None:
        error = np.linalg.norm(a - b)
        assert error <= share * (np.linalg.norm(b) + 1e-2 * whole), f"{path}: off by {error}"

    tree.map_with_path(check, found, expected)


def name(case: dict[str, Any]) -> str:
    axes = "-".join(f"{axis}{size}" for axis, size in {**case["split"], "tensor": case["tensor"]}.items())
    head = "tied" if case["tied"] else "untied"
    return f"zero{case['zero']}-{axes}-accumulate{case['accumulation']}-{case['remat']}-{head}"


@pytest.mark.parametrize("case", CASES + EXTRAS, ids=name)
def test_placement_changes_nothing(case: dict[str, Any]) -> None:
    placement = toy.placement(case["zero"], **case["split"], tensor=case["tensor"])
    found = compute(placement, case["accumulation"], case["remat"], case["tied"])
    expected = one_device(case["tied"])
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.norm == pytest.approx(expected.norm, rel=1e-6)
    assert_equal(found.gradients, expected.gradients)
    assert_equal(found.masters, expected.masters)


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype, share", [("float32", 1e-4), ("bfloat16", 4e-2)])
def test_a_gpu_computes_what_the_cpu_does(gpu: jax.Device, compute_dtype: str, share: float) -> None:
    precision = PrecisionConfig(compute_dtype=compute_dtype)  # type: ignore[arg-type]
    with jax.default_matmul_precision("highest"):
        found = compute(Placement(make_mesh(MeshConfig(), [gpu]), 3, precision), 3, "full", True)
    expected = one_device(True)
    assert found.loss == pytest.approx(expected.loss, rel=share / 10)
    assert found.norm == pytest.approx(expected.norm, rel=share)
    assert_equal(found.gradients, expected.gradients, share)
    assert_equal(found.masters, expected.masters, share)


@pytest.mark.parametrize(
    "zero, split", [(0, {"tensor": 2}), (1, {"data": 2, "fsdp": 2}), (3, {"fsdp": 4, "tensor": 2})]
)
def test_initial_values_are_equal_to_the_bit(zero: int, split: dict[str, int]) -> None:
    found = initialize(toy.placement(zero, **split), tied=False)
    jax.tree.map(np.testing.assert_array_equal, to_host(found.masters), initial(tied=False)["masters"])


def test_the_model_and_its_batches_are_heterogeneous() -> None:
    layout = make_parts(toy.CONFIG).layout
    assert len(layout) == 2
    assert {kind for segment in layout for kind in segment.kinds} == {"global", "sliding"}
    assert toy.packed(ROWS, LENGTH).segment_ids.max(axis=1).min() > 1


@pytest.mark.parametrize(
    "zero, reduce_dtype", [(0, "bfloat16"), (1, "float32"), (1, "bfloat16"), (2, "float32"), (3, "bfloat16")]
)
def test_sixteen_bits_stay_close(zero: int, reduce_dtype: str) -> None:
    """bf16 has 8 bits: gradients within 2% as a whole and 4% leaf by leaf of float32's, whatever the placement."""
    precision = PrecisionConfig(compute_dtype="bfloat16", reduce_dtype=reduce_dtype)  # type: ignore[arg-type]
    found = compute(replace(toy.placement(zero, fsdp=2), precision=precision), 1, "full", True)
    expected = one_device(True)
    assert found.loss == pytest.approx(expected.loss, rel=1e-3)
    assert found.norm == pytest.approx(expected.norm, rel=2e-2)
    assert toy.distance(found.gradients, expected.gradients) < 2e-2

    def check(path: str, a: np.ndarray, b: np.ndarray) -> None:
        assert toy.distance(a, b) < 4e-2, path

    tree.map_with_path(check, found.gradients, expected.gradients)
