"""Tests of the router bias: it follows Wang et al. 2024 (arXiv:2408.15664, algorithm 1) with all executors."""

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.config import (
    CheckpointConfig,
    LoraConfig,
    OptimizerConfig,
    PrecisionConfig,
    RematConfig,
    ScheduleConfig,
    TrainingConfig,
)
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.execution import scan
from jaxopt_llm.execution.segments import no_perturbations
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.moe import experts
from jaxopt_llm.model.param import ParamSpec, normal, zeros
from jaxopt_llm.parallel.zero import abstract_checkpoint, master_sharding
from jaxopt_llm.step import state as training_state
from jaxopt_llm.step.lora import adapt_model
from jaxopt_llm.step.optimizer import group_problems, make_optimizer
from jaxopt_llm.step.program import Program
from jaxopt_llm.step.state import TrainState

# Only one layer has experts, so that its loads are the ones in the metrics.
MODEL = replace_fields(
    toy.UNIFORM,
    {
        "layers": 2,
        "moe.dense_layers": 1,
        "moe.experts": 8,
        "moe.expert_width": 8,
        "moe.router": "sigmoid",
        "moe.router_groups": 2,
        "moe.router_groups_per_token": 2,
        "moe.router_bias": True,
        "moe.router_bias_rate": 0.01,
        "moe.balance_loss": 0.0,
    },
)
ROWS, LENGTH, STEPS = 16, 16, 3
FLOAT32, BFLOAT16 = PrecisionConfig("float32"), PrecisionConfig("bfloat16", "bfloat16")
ADAMW = OptimizerConfig(learning_rate=1e-3)
IN_BACKWARD = OptimizerConfig(in_backward=True, clip_norm=0, state_dtype="int8")


@dataclass(frozen=True)
class Case:
    """Case of a test. zero: ZeRO stage; axes: sizes of the mesh axes."""

    zero: int = 0
    axes: tuple[tuple[str, int], ...] = ()
    accumulation: int = 1
    precision: PrecisionConfig = FLOAT32
    optimizer: OptimizerConfig = ADAMW

    def __str__(self) -> str:
        axes = "-".join(f"{axis}{size}" for axis, size in self.axes)
        optimizer = self.optimizer.name + "-in_backward" * self.optimizer.in_backward
        return f"zero{self.zero}-{axes}-accumulate{self.accumulation}-{self.precision.compute_dtype}-{optimizer}"


@functools.cache
def program(case: Case, biased: bool = True) -> tuple[Program, Any]:
    placement = replace(toy.placement(case.zero, **dict(case.axes)), precision=case.precision)
    training = TrainingConfig(batch_size=ROWS, sequence_length=LENGTH, accumulation=case.accumulation)
    model = replace_fields(MODEL, {"moe.router_bias": biased})
    of = (model, training, case.optimizer, ScheduleConfig(1, 100), RematConfig("full"), LoraConfig())
    return toy.make_program(*of, placement), placement


def begin(case: Case, biased: bool = True, given: Any = None) -> TrainState:
    of, placement = program(case, biased)
    return training_state.initialize_state(of.specs, of.optimizers, 0, placement, given)


def step(case: Case, state: TrainState, seed: int, biased: bool = True) -> tuple[TrainState, dict[str, Any]]:
    of, _ = program(case, biased)
    batch = toy.microbatches(toy.packed(ROWS, LENGTH, seed), case.accumulation)
    state, metrics = of.step(state, jax.device_put(batch, of.batch_sharding))
    return state, jax.tree.map(np.asarray, metrics)


def bias(case: Case, state: TrainState) -> np.ndarray:
    """Return the bias, [E]."""
    masters = program(case)[0].to_checkpoint(state)["masters"]
    return np.asarray(masters["segment_1"]["block_0"]["mlp"]["router_bias"])[0]


def rule(before: np.ndarray, metrics: dict[str, Any]) -> np.ndarray:
    return before + np.float32(MODEL.moe.router_bias_rate) * np.sign(1 - metrics["expert_load"])


@functools.cache
def norm_without() -> float:
    return float(step(Case(), begin(Case(), biased=False), 0, biased=False)[1]["grad_norm"])


def slow(case: Case) -> Any:
    return pytest.param(case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(), marks=pytest.mark.core),
        Case(3, (("fsdp", 2),), optimizer=IN_BACKWARD),
        slow(Case(2, (("expert", 2), ("fsdp", 2)), 4, BFLOAT16, OptimizerConfig(name="muon"))),
        slow(Case(1, (("pipeline", 2),), 2, optimizer=OptimizerConfig(name="adafactor"))),
        slow(Case(0, (("data", 2), ("tensor", 2)), 2, optimizer=OptimizerConfig(name="sgd", momentum=0.0))),
        slow(Case(3, (("expert", 2), ("fsdp", 2)), 4, optimizer=OptimizerConfig(state_dtype="int8"))),
        slow(Case(3, (("pipeline", 2), ("fsdp", 2), ("expert", 2)), 4, BFLOAT16)),
        slow(Case(1, (("expert", 2), ("context", 2)), optimizer=replace(IN_BACKWARD, state_dtype="bfloat16"))),
    ],
    ids=str,
)
def test_it_steps_by_the_sign_of_what_its_expert_lacks(case: Case) -> None:
    state, before = begin(case), np.zeros(MODEL.moe.experts, np.float32)
    for seed in range(STEPS):
        state, metrics = step(case, state, seed)
        assert np.ptp(metrics["expert_load"]) > 0.1, f"seed {seed}"
        if seed == 0:  # the norm excludes the bias, whose gradient is in the hundreds
            share = 1e-5 if case.precision.compute_dtype == "float32" else 2e-2
            assert metrics["grad_norm"] == pytest.approx(norm_without(), rel=share)
        found, before = bias(case, state), rule(before, metrics)
        np.testing.assert_array_equal(found, before, err_msg=f"seed {seed}")


def test_a_step_that_overflows_leaves_it() -> None:
    precision = PrecisionConfig(compute_dtype="float16", reduce_dtype="float16", initial_loss_scale=2.0**40)
    case = Case(1, precision=precision)
    state, metrics = step(case, begin(case), 0)
    assert metrics["overflow"]
    np.testing.assert_array_equal(bias(case, state), 0)
    scale = {**state.loss_scale, "scale": jnp.full_like(state.loss_scale["scale"], 2.0**8)}
    state, metrics = step(case, replace(state, loss_scale=scale), 0)
    assert not metrics["overflow"]
    np.testing.assert_array_equal(bias(case, state), rule(np.zeros(MODEL.moe.experts, np.float32), metrics))


def test_it_is_read_in_float32_from_a_compute_copy_in_16_bits() -> None:
    """Two experts have the largest bias, by a difference to 1 that bfloat16 cannot represent; the scores are equal."""
    case = Case(2, (("expert", 2), ("fsdp", 2)), 4, BFLOAT16, OptimizerConfig(name="muon"))
    of, placement = program(case)

    def given(path: Any, spec: ParamSpec) -> jax.Array | None:
        name = jax.tree_util.keystr(path, simple=True, separator="/").rsplit("/", 1)[-1]
        values = {"router": np.zeros(spec.shape), "router_bias": 1 + 1e-3 * np.arange(MODEL.moe.experts)[None]}.get(
            name
        )
        return None if values is None else jax.device_put(values.astype(np.float32), master_sharding(spec, placement))

    _, metrics = step(case, begin(case, given=jax.tree_util.tree_map_with_path(given, of.specs.masters)), 0)
    np.testing.assert_array_equal(metrics["expert_load"], [0, 0, 0, 0, 0, 0, 4, 4])


def test_its_gradient_is_whole_counts_in_reductions_of_16_bits() -> None:
    """Check counts above 256, which bfloat16 cannot all represent."""
    parts, batch = Decoder(MODEL), toy.microbatches(toy.packed(ROWS, LENGTH), 1)
    placement = replace(toy.placement(data=2, expert=2), precision=replace(FLOAT32, reduce_dtype="bfloat16"))

    def of(params: Params) -> Any:
        cotangent, frozen = jnp.float32(1 / 7), no_perturbations(parts.specs)
        return scan.loss_and_gradients(parts, params, frozen, batch, cotangent, placement, RematConfig("none"))

    sums, gradients = jax.jit(of)(toy.params(parts.specs))
    load = np.asarray(sums["expert_load"])[1]
    assert np.max(np.abs(MODEL.moe.experts * load - np.sum(load))) > 256
    found = gradients["segment_1"]["block_0"]["mlp"]["router_bias"]
    np.testing.assert_array_equal(found, [MODEL.moe.experts * load - np.sum(load)])


def test_it_rests_in_float32_where_it_is_frozen() -> None:
    _, trained, frozen = adapt_model(Decoder(MODEL), LoraConfig(rank=4), BFLOAT16)
    of = frozen["segment_1"]["block_0"]["mlp"]
    assert [of[name].dtype for name in ("router_bias", "router")] == [jnp.float32] * 2
    assert trained["segment_1"]["block_0"]["mlp"]["router_bias"] is None


@pytest.mark.core
def test_a_load_that_is_even_in_uneven_parts_leaves_it() -> None:
    parts = np.array([[3, 0, 4, 1, 5, 2], [1, 9, 0, 4, 2, 7], [6, 1, 6, 5, 3, 1]], np.float32)
    assert np.ptp(parts.sum(axis=0)) == 0
    each = [jax.grad(lambda bias, load: experts.bias_update_loss(bias, load) / 7)(jnp.zeros(6), load) for load in parts]
    np.testing.assert_array_equal(sum(each), 0)
    np.testing.assert_array_equal(each[0], 6 * parts[0] - 15)


def test_it_evens_the_load() -> None:
    state, loads = begin(Case()), []
    for seed in range(24):
        state, metrics = step(Case(), state, seed % 4)
        loads.append(metrics["expert_load"])
    first, last = (np.ptp(np.mean(each, axis=0)) for each in (loads[:4], loads[-4:]))
    assert last < first / 4


def test_resumed_it_goes_on_equal_to_the_bit(tmp_path: Path) -> None:
    case = Case()
    of, placement = program(case)
    state, _ = step(case, begin(case), 0)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, of.to_checkpoint(state), {})
    whole = bias(case, step(case, state, 1)[0])
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(1, **abstract_checkpoint(training_state.checkpoint_specs(of.specs), placement))
    resumed = step(case, training_state.resume_state(of.specs, 1, placement, **restored), 1)[0]
    assert np.any(whole)
    np.testing.assert_array_equal(bias(case, resumed), whole)


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "state_dtype"),
    [
        *((name, "float32") for name in get_args(get_type_hints(OptimizerConfig)["name"])),
        *(("adamw", "int8"), ("muon", "int8"), ("lion", "bfloat16")),
    ],
)
def test_no_optimizer_sees_it(name: Any, state_dtype: Any) -> None:
    specs = {
        "up": ParamSpec((16, 128), ("embed", "mlp"), (0,), normal()),
        "router_bias": ParamSpec((4,), (None,), init=zeros, exact=True, sign_rate=0.5),
    }
    config = OptimizerConfig(name=name, state_dtype=state_dtype, rate_groups=("*/up=1",), decay_groups=("*/up=1",))
    assert group_problems(config, {"segment_0": specs}) == []
    (problem,) = group_problems(replace(config, decay_groups=("*bias=1", "*=1")), {"segment_0": specs})
    assert "*bias matches no parameter" in problem
    assert group_problems(OptimizerConfig(), {"segment_0": {"router_bias": specs["router_bias"]}}) == []
    optimizer = make_optimizer(config, lambda count: 0.0, "segment_0", specs)
    params = {"up": jnp.ones((16, 128)), "router_bias": jnp.full(4, 100.0)}
    state = optimizer.init(params)
    gradients = {"up": jnp.ones((16, 128)), "router_bias": jnp.array([1e-9, -7.0, 0.0, 3e5])}
    for _ in range(2):
        steps, state = optimizer.update(gradients, state, params)
        np.testing.assert_array_equal(steps["router_bias"], [-0.5, 0.5, 0, -0.5])
    assert not any(leaf.shape == (4,) for leaf in jax.tree.leaves(state))
