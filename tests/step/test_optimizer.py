"""Tests of every optimizer: against the formula of its paper in NumPy, with several placements, and resumed."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.config import (
    CheckpointConfig,
    Config,
    LoraConfig,
    OffloadConfig,
    OptimizerConfig,
    RematConfig,
    ScheduleConfig,
    TrainingConfig,
)
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.config.unread import find_unread
from jaxopt_llm.core import tree
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.param import ParamSpec, normal
from jaxopt_llm.parallel.offload import HOST
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import abstract_checkpoint
from jaxopt_llm.step import optimizer as optimizer_module
from jaxopt_llm.step import state as training_state
from jaxopt_llm.step import update
from jaxopt_llm.step.optimizer import make_optimizer
from jaxopt_llm.step.program import Program
from jaxopt_llm.step.state import TrainState

SPECS = Decoder(toy.CONFIG).specs
RATE, DECAY, STEPS = 0.01, 0.3, 4
MIN_FACTORED_SIZE = 16  # with it, some matrices of the toy model are factored and some are not


@pytest.fixture(autouse=True)
def factor_small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "MIN_FACTORED_SIZE", MIN_FACTORED_SIZE)


def config(name: str) -> OptimizerConfig:
    # With this epsilon, rounding noise of a zero gradient does not become a full step.
    return OptimizerConfig(
        learning_rate=RATE, weight_decay=DECAY, epsilon=1e-3, momentum=0.8, clip_norm=0.5, name=name  # type: ignore[arg-type]
    )  # fmt: skip


# ---- The papers' formulas: from the gradient g of step t, counted from 1, to the direction. `memory` is the state.


def adamw(x: np.ndarray, g: np.ndarray, t: int, memory: dict[str, Any], sides: Any) -> np.ndarray:
    memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    memory["v"] = 0.95 * memory.get("v", 0) + 0.05 * g**2
    return memory["m"] / (1 - 0.9**t) / (np.sqrt(memory["v"] / (1 - 0.95**t)) + 1e-3)


def sgd(x: np.ndarray, g: np.ndarray, t: int, memory: dict[str, Any], sides: Any) -> np.ndarray:
    memory["m"] = 0.8 * memory.get("m", 0) + g
    return memory["m"]


def lion(x: np.ndarray, g: np.ndarray, t: int, memory: dict[str, Any], sides: Any) -> np.ndarray:
    momentum = memory.get("m", np.zeros_like(g))
    memory["m"] = 0.95 * momentum + 0.05 * g
    return np.sign(0.9 * momentum + 0.1 * g)


def adafactor(x: np.ndarray, g: np.ndarray, t: int, memory: dict[str, Any], sides: Any) -> np.ndarray:
    """Algorithm 4, with ρ the learning rate, ε1 = 1e-30, ε2 = 1e-3, d = 1 and β2 = 1 - t^-0.8."""
    beta = 1 - t**-0.8
    if sides and min(sides) >= MIN_FACTORED_SIZE:
        squares = g.reshape(sides) ** 2 + 1e-30
        memory["rows"] = beta * memory.get("rows", 0) + (1 - beta) * squares.sum(axis=1)
        memory["columns"] = beta * memory.get("columns", 0) + (1 - beta) * squares.sum(axis=0)
        v = (np.outer(memory["rows"], memory["columns"]) / memory["rows"].sum()).reshape(g.shape)
    else:
        v = memory["v"] = beta * memory.get("v", 0) + (1 - beta) * (g**2 + 1e-30)
    u = g / np.sqrt(v)
    rms = lambda array: np.sqrt(np.mean(array**2))  # noqa: E731
    return max(1e-3, rms(x)) * u / max(1, rms(u))


def muon(x: np.ndarray, g: np.ndarray, t: int, memory: dict[str, Any], sides: Any) -> np.ndarray:
    """Orthogonalise a Nesterov momentum by Jordan's Newton-Schulz iteration.

    The bias correction is that of NAdam (Dozat 2016), the scale that of Liu et al. 2025.
    """
    memory["m"] = 0.8 * memory.get("m", 0) + 0.2 * g
    matrix = (0.8 * memory["m"] / (1 - 0.8 ** (t + 1)) + 0.2 * g / (1 - 0.8**t)).reshape(sides)
    matrix = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        square = matrix @ matrix.T
        matrix = 3.4445 * matrix + (-4.7750 * square + 2.0315 * square @ square) @ matrix
    return 0.2 * np.sqrt(max(sides)) * matrix.reshape(g.shape)


FORMULAS: dict[str, Callable[..., np.ndarray]] = {
    "adamw": adamw,
    "sgd": sgd,
    "lion": lion,
    "adafactor": adafactor,
    "muon": muon,
}
# Rows and columns of the matrices; the rows of a table are its tokens.
SIDES = {
    **dict.fromkeys(("query",), (16, 16)),
    **dict.fromkeys(("key", "value"), (16, 8)),
    **dict.fromkeys(("output",), (16, 16)),
    **dict.fromkeys(("gate", "up"), (16, 24)),
    "down": (24, 16),
    "table": (384, 16),
}


def expected(name: str, path: str, spec: ParamSpec, start: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    sides = SIDES.get(path.rsplit("/", 1)[-1])
    in_blocks = spec.leading > 0
    formula = FORMULAS["adamw" if name == "muon" and not (in_blocks and sides) else name]
    decay = DECAY if sides else 0.0

    def layer(x: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
        memory: dict[str, Any] = {}
        for t, g in enumerate(gradients, 1):
            x = x - RATE * t * (formula(x, g, t, memory, sides) + decay * x)
        return x

    if not in_blocks:
        return layer(start, gradients)
    return np.stack([layer(start[i], [gradient[i] for gradient in gradients]) for i in range(len(start))])


def random_gradients(step: int) -> Params:
    random = np.random.default_rng(step)
    return jax.tree.map(lambda spec: random.normal(size=spec.shape), SPECS)


@pytest.mark.parametrize("name", FORMULAS)
def test_steps_are_those_of_the_formula(name: str) -> None:
    def rate(count: jax.Array) -> jax.Array:
        return RATE * (count + 1)

    optimizers = update.make_optimizers(functools.partial(make_optimizer, config(name), rate), SPECS)
    apply = jax.jit(functools.partial(update.apply_gradients, optimizers, SPECS, placement=toy.placement()))
    start = toy.params(SPECS)
    state = update.Updatable(start, update.initialize_moments(optimizers, SPECS, start))
    gradients = [random_gradients(step) for step in range(STEPS)]
    for each in gradients:
        state = apply(state, jax.tree.map(jnp.float32, each), update.Scalars())

    def check(path: str, spec: ParamSpec, start: np.ndarray, found: jax.Array, *gradients: np.ndarray) -> None:
        start = start.astype(np.float64)
        wanted = expected(name, path, spec, start, list(gradients))
        assert toy.distance(np.float64(found) - start, wanted - start) < 1e-4, path

    tree.map_with_path(check, SPECS, start, state.masters, *gradients)


@pytest.mark.parametrize("name", FORMULAS)
def test_the_start_names_the_fields_that_it_does_not_read(name: str) -> None:
    specs = {
        "matrix": ParamSpec((20, 20), ("embed", "mlp"), (0,), normal()),
        "scale": ParamSpec((20,), ("embed",), (), normal()),
    }
    params = jax.tree.map(lambda spec: jnp.ones(spec.shape), specs)

    def program(**fields: float) -> str:
        optimizer = make_optimizer(replace(config(name), **fields), lambda count: RATE, "segment_0", specs)
        return str(jax.make_jaxpr(lambda state: optimizer.update(params, state, params))(optimizer.init(params)))

    changes = {"beta1": 0.7, "beta2": 0.8, "epsilon": 0.01, "momentum": 0.3}
    unread = {field for field, value in changes.items() if program(**{field: value}) == program()}
    named = find_unread(Config(optimizer=replace(config(name), **changes)))
    assert {f"optimizer.{field}" for field in unread} == {field for field in named if field.startswith("optimizer.")}


@pytest.mark.parametrize("name", FORMULAS)
def test_state_specs_are_those_of_the_state(name: str) -> None:
    optimizers = update.make_optimizers(functools.partial(make_optimizer, config(name), lambda count: RATE), SPECS)
    specs = update.moment_specs(optimizers, SPECS)
    state = jax.eval_shape(lambda masters: update.initialize_moments(optimizers, SPECS, masters), toy.params(SPECS))
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    moments = 0
    for (path, spec), leaf in zip(items(specs), jax.tree.leaves(state), strict=True):
        assert (spec.shape, spec.dtype, spec.leading) == (
            leaf.shape,
            leaf.dtype,
            0 if path.startswith("non_layer") else 1,
        )
        if set(spec.axes) - {"layers", None}:
            assert any(path.endswith(of.split("/", 1)[1]) and spec.axes == each.axes for of, each in items(SPECS)), path
            moments += 1
    small, matrices, all_of = (
        sum(wanted(path, spec) for path, spec in items(SPECS))
        for wanted in (
            lambda path, spec: min(SIDES.get(path.rsplit("/", 1)[-1], (0,))) < MIN_FACTORED_SIZE,
            lambda path, spec: spec.leading and not path.endswith("scale"),
            lambda path, spec: True,
        )
    )
    # Moments with the shape of a parameter: all except Adafactor's row and column means.
    expected = {"adamw": 2 * all_of, "sgd": all_of, "lion": all_of, "muon": 2 * all_of - matrices, "adafactor": small}
    assert moments == expected[name]


@pytest.mark.parametrize("name", [name for name in FORMULAS if name != "adafactor"])  # its moments are small
def test_int8_makes_the_state_smaller(name: str) -> None:
    def size(dtype: Any) -> int:
        make = functools.partial(make_optimizer, replace(config(name), state_dtype=dtype), lambda count: RATE)
        specs = Decoder(replace(toy.UNIFORM, width=128, mlp_width=128, head_dim=32, vocabulary_size=384)).specs
        state = update.moment_specs(update.make_optimizers(make, specs), specs)
        return sum(math.prod(spec.shape) * spec.dtype.itemsize for _, spec in items(state))

    assert size("int8") < 0.35 * size("float32")


def items(specs: Any) -> list[tuple[str, ParamSpec]]:
    return [(tree.path_string(path), spec) for path, spec in jax.tree_util.tree_leaves_with_path(specs)]


# ---- The real step.

MODEL = replace(toy.CONFIG, layers=3, pattern=("global",))  # a pipeline of two stages has a slot without a layer
PLACED: dict[str, dict[str, Any]] = {
    "one device": {},
    "zero1": {"zero_stage": 1, "fsdp": 2},
    "zero3": {"zero_stage": 3, "fsdp": 2, "tensor": 2},
    "pipeline": {"zero_stage": 1, "pipeline": 2, "fsdp": 2},
}


@functools.cache
def program(name: str, placed: str) -> tuple[Program, Placement]:
    where, offloaded, _ = placed.partition(" offloaded")
    placement = replace(toy.placement(**PLACED[where]), offload=OffloadConfig(optimizer=bool(offloaded)))
    accumulation = 2 if where == "pipeline" else 1
    training = TrainingConfig(batch_size=8, sequence_length=16, accumulation=accumulation)
    arguments = (RematConfig("none"), LoraConfig(), placement)
    return toy.make_program(MODEL, training, config(name), ScheduleConfig(1, 10), *arguments), placement


def run(name: str, placed: str, state: TrainState, *seeds: int) -> TrainState:
    step, _ = program(name, placed)
    for seed in seeds:
        batch = toy.microbatches(toy.packed(8, 16, seed), step.batch.tokens.shape[0])
        state, _ = step.step(state, jax.device_put(batch, step.batch_sharding))
    return state


def begin(name: str, placed: str) -> TrainState:
    of, placement = program(name, placed)
    return training_state.initialize_state(of.specs, of.optimizers, 0, placement)


@functools.cache
def trained(name: str, placed: str) -> Any:
    """Return the checkpoint trees after two steps."""
    state = run(name, placed, begin(name, placed), 0, 1)
    return jax.tree.map(np.asarray, program(name, placed)[0].to_checkpoint(state))


@pytest.mark.parametrize(
    ("name", "placed"),
    [
        ("adafactor", "zero3"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("adafactor", "pipeline"), ("muon", "zero3"), ("muon", "pipeline"))
        ),
    ],
)
@pytest.mark.slow
def test_placement_changes_no_step(name: str, placed: str) -> None:
    start = jax.tree.map(np.asarray, begin(name, "one device").masters)
    found, wanted = (trained(name, each) for each in (placed, "one device"))
    assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, wanted)

    def check(path: str, start: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
        assert toy.distance(a - start, b - start) < 1e-3, path

    tree.map_with_path(check, start, found["masters"], wanted["masters"])


@pytest.mark.core
@pytest.mark.parametrize("placed", ["zero3", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_on_the_host_the_optimizers_state_is_the_same_to_the_bit(placed: str) -> None:
    """With ZeRO stage 1 the masters are in host memory, too, because only the update reads them."""
    offloaded = f"{placed} offloaded"
    jax.tree.map(np.testing.assert_array_equal, trained("adamw", offloaded), trained("adamw", placed))
    state = run("adamw", offloaded, begin("adamw", offloaded), 0)
    large = [each for each in jax.tree.leaves(state.moments) if each.size > MODEL.layers + 1]
    assert {each.sharding.memory_kind for each in large} == {HOST}
    masters = {each.sharding.memory_kind for each in jax.tree.leaves(state.masters)}
    assert masters == {"device" if placed == "zero3" else HOST}


@pytest.mark.parametrize(
    ("name", "placed"),
    [
        *((name, "one device") for name in FORMULAS if name not in ("adafactor", "muon")),
        *(("adafactor", "zero3"), ("adamw", "zero1 offloaded")),
        pytest.param("muon", "pipeline", marks=pytest.mark.slow),
    ],
)
def test_resumed_it_goes_on_equal_to_the_bit(name: str, placed: str, tmp_path: Path) -> None:
    of, placement = program(name, placed)
    state = run(name, placed, begin(name, placed), 0, 1)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(2, of.to_checkpoint(state), {})
    whole = of.to_checkpoint(run(name, placed, state, 2))
    with Checkpoints(tmp_path) as checkpoints:
        saved = abstract_checkpoint(training_state.checkpoint_specs(of.specs), placement)
        restored = checkpoints.restore(2, **saved)
    resumed = run(name, placed, training_state.resume_state(of.specs, 2, placement, **restored), 2)
    assert resumed.step == 3
    jax.tree.map(np.testing.assert_array_equal, of.to_checkpoint(resumed), whole)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_each_expert_is_a_matrix_of_its_own(name: Any) -> None:
    """The experts have weights of different sizes, on which the step of Adafactor depends."""
    random, (experts, width, inner) = np.random.default_rng(0), (3, 128, 160)
    start, gradient = (random.normal(size=(experts, width, inner)).astype(np.float32) for _ in range(2))
    start *= np.array([1, 0.1, 0.01], np.float32)[:, None, None]
    one = ParamSpec((width, inner), ("embed", "mlp"), (0,), normal())
    all_of = ParamSpec((experts, width, inner), ("experts", "embed", "expert_mlp"), (1,), normal())

    def update(spec: ParamSpec, start: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        optimizer = make_optimizer(OptimizerConfig(name=name), lambda count: RATE, "segment_0", {"up": spec})
        return optimizer.update({"up": gradient}, optimizer.init({"up": start}), {"up": start})[0]["up"]

    found = update(all_of, start, gradient)
    for expert in range(experts):
        np.testing.assert_allclose(found[expert], update(one, start[expert], gradient[expert]), rtol=1e-4, atol=1e-7)


def test_a_router_decays_as_a_matrix() -> None:
    specs = Decoder(replace_fields(toy.UNIFORM, {"moe.experts": 2, "moe.expert_width": 8})).specs["segment_0"][
        "block_0"
    ]
    specs = jax.tree.map(ParamSpec.unstack, specs)
    params, nothing = (jax.tree.map(lambda spec, x=x: np.full(spec.shape, x, np.float32), specs) for x in (1, 0))
    optimizer = make_optimizer(OptimizerConfig(weight_decay=DECAY), lambda count: RATE, "segment_0", {"block_0": specs})
    state = optimizer.init({"block_0": params})
    step = optimizer.update({"block_0": nothing}, state, {"block_0": params})[0]["block_0"]
    assert step["mlp"]["router"] == pytest.approx(-RATE * DECAY)
    assert not np.any(step["mlp_norm"]["scale"])
