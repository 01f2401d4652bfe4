"""Tests of moments in 16 and 8 bits: errors, sharding of codes and scales, and checkpoints."""

import functools
import math
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from commands import command, metrics
from jax.sharding import AbstractMesh

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.config import (
    AXES,
    CheckpointConfig,
    LoraConfig,
    MeshConfig,
    OptimizerConfig,
    RematConfig,
    ScheduleConfig,
    ShardingConfig,
    TrainingConfig,
    cli,
)
from jaxopt_llm.core import tree
from jaxopt_llm.execution.stage_layout import stack_by_stage
from jaxopt_llm.model import param
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import abstract_checkpoint, master_sharding
from jaxopt_llm.step import moments, update
from jaxopt_llm.step import state as training_state
from jaxopt_llm.step.moments import Codes
from jaxopt_llm.step.optimizer import make_optimizer
from jaxopt_llm.step.program import Program
from jaxopt_llm.step.state import TrainState

# ---- Codes.

VALUES = 32  # block size
LEVELS = {False: 127, True: 255}
LARGEST = float(np.finfo(np.float32).max)

encode = jax.jit(moments.encode, static_argnums=(1, 2))
decode = jax.jit(moments.decode)


def hard_blocks() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    sign = random.choice([-1.0, 1.0], VALUES)
    wide = sign * 10 ** random.uniform(-37, 38, (1000, VALUES))  # all magnitudes in one block
    near = random.normal(size=(1000, VALUES)) * 10 ** random.uniform(-30, 30, (1000, 1))
    one = np.zeros(VALUES)
    one[5] = -1
    blocks = {
        "of one size": near,
        "of all sizes": wide,
        "zeros": np.zeros(VALUES),
        "one among zeros": np.stack([one, 1e-30 * one, LARGEST * one]),
        "one among small ones": np.where(one, 1e9, sign),
        "the largest": LARGEST * sign,
        "denormal": sign * 1e-40 * np.arange(VALUES),
        "denormal among normal": np.where(one, -1e-20, sign * 1e-40),
        "the smallest normal": 2.0**-126 * sign,
    }
    return {name: block.astype(np.float32) for name, block in blocks.items()}


@pytest.mark.core
@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("name", hard_blocks())
def test_what_comes_back_is_within_the_bound_of_its_block(name: str, squares: bool) -> None:
    x = hard_blocks()[name]
    x = np.abs(x) if squares else x
    found = np.asarray(decode(encode(x, VALUES, squares)))
    assert np.isfinite(found).all()
    levels, root = LEVELS[squares], np.sqrt if squares else np.abs
    before, after = np.minimum(root(x.astype(np.float64)), 2.0**126), root(found.astype(np.float64))
    largest = before.max(axis=-1, keepdims=True)
    share = before / np.where(largest > 0, largest, 1)
    bound = largest / levels * (np.sqrt(share) + 1 / levels) * (1 + 1e-5)
    assert (np.abs(after - before) <= bound + root(2.0**-126)).all()  # subnormal values may become zero
    assert (np.sign(found) * x >= 0).all(), "a sign has changed"


@pytest.mark.parametrize("squares", [False, True])
def test_a_square_that_is_not_zero_stays_so_and_zero_stays_zero(squares: bool) -> None:
    x = np.abs(hard_blocks()["of all sizes"])
    x[:, ::3] = 0
    found = np.asarray(decode(encode(x, VALUES, squares)))
    largest = x.max(axis=-1, keepdims=True)
    assert (found[x == 0] == 0).all()
    assert not squares or (found[(x > 1e-30 * largest) & (largest > 1e-20)] > 0).all()


@pytest.mark.parametrize("squares", [False, True])
def test_what_came_back_is_coded_as_before(squares: bool) -> None:
    """Otherwise a moment would drift in steps that do not change it."""
    x = hard_blocks()["of one size"]
    first = encode(np.square(x / 1e20) if squares else x, VALUES, squares)
    again = encode(decode(first), VALUES, squares)
    np.testing.assert_array_equal(again.codes, first.codes)
    np.testing.assert_allclose(again.scales, first.scales, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_squares_follow_a_slow_decay(dtype: str) -> None:
    """Check stochastic rounding: to nearest, 1 - 1/1000 of a value is the value again, except for the largest."""
    specs = {"x": ParamSpec((100, VALUES), (None, None), (0,))}
    adam = moments.compress_moments(optax.scale_by_adam(b2=0.999), dtype, specs)  # type: ignore[arg-type]
    start = jnp.asarray(np.random.default_rng(0).uniform(0.2, 0.9, (100, VALUES)), jnp.float32).at[:, 0].set(1.0)
    largest = jnp.zeros_like(start).at[:, 0].set(1.0)  # these do not decay

    def squares(start: jax.Array) -> jax.Array:
        first = {"x": jnp.sqrt(1000 * start)}
        _, state = adam.update(first, adam.init(first))
        _, state = jax.lax.fori_loop(0, 1000, lambda _, each: adam.update({"x": largest}, each[1]), (first, state))
        found = state.nu["x"]
        return moments.decode(found) if is_codes(found) else found.astype(jnp.float32)

    ratio = np.float64(jax.jit(squares)(start) / start / 0.999**1000)[:, 1:]
    assert ratio.mean() == pytest.approx(1, abs=0.02) and ratio.std() < 0.3


def test_rounding_at_random_stays_beside_the_value() -> None:
    x = np.abs(hard_blocks()["of all sizes"])
    random = jax.jit(moments.random_bits, static_argnums=0)(x.shape, jnp.int32(3))
    found = np.float64(jax.jit(moments.round_to_bfloat16)(x, random))
    assert (np.abs(found - x) < 2.0**-7 * x).all()
    codes, near = encode(x, VALUES, True, random).codes, encode(x, VALUES, True).codes
    assert np.abs(np.asarray(codes, int) - near).max() == 1
    assert np.isinf(moments.round_to_bfloat16(jnp.float32(np.inf), random[0, 0]))


# ---- Block sizes and sharding.

RECIPES = ("llama2_7b.py", "llama2_70b.py", "llama3_8b.py", "gpt3_175b.py", "10b.py")


@functools.cache
def specs_of(recipe: str, dtype: str, stages: int = 1) -> tuple[Params, Params]:
    """Return the specs of the parameters and of the optimizer state."""
    parts = Decoder(cli.load_recipe(recipe).model)
    specs = (stack_by_stage(parts, stages) if stages > 1 else parts).specs
    optimizer = OptimizerConfig(state_dtype=dtype)  # type: ignore[arg-type]
    optimizers = update.make_optimizers(functools.partial(make_optimizer, optimizer, lambda count: 1e-3), specs)
    return specs, update.moment_specs(optimizers, specs)


@pytest.mark.parametrize(("dtype", "least", "most"), [("float32", 8, 8), ("bfloat16", 4, 4.01), ("int8", 2, 2.1)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_bytes_per_parameter(recipe: str, dtype: str, least: float, most: float) -> None:
    specs, state = specs_of(recipe, dtype)
    held = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert least <= held / param.count_parameters(specs) <= most + 1e-6


@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(fsdp=8),
        MeshConfig(data=8, fsdp=64),
        MeshConfig(fsdp=4, tensor=4),
        MeshConfig(pipeline=2, fsdp=8, tensor=4),
    ],
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_and_scales_lie_where_their_parameter_does(recipe: str, mesh: MeshConfig) -> None:
    specs, state = specs_of(recipe, "int8", mesh.pipeline)
    placement = Placement(AbstractMesh(astuple(mesh), AXES), ShardingConfig(1), cli.load_recipe(recipe).precision)
    assert not moments.problems("int8", specs, placement)
    assert not moments.find_uncompressed(specs)

    def check(spec: ParamSpec, moment: Any) -> None:
        assert isinstance(moment, Codes) == bool(spec.contracting)
        for leaf in jax.tree.leaves(moment):
            assert master_sharding(leaf, placement) == master_sharding(spec, placement)

    for section in specs:
        adam = state[section][0]
        for kind in (adam.mu, adam.nu):
            jax.tree.map(check, specs[section], kind)


def test_blocks_that_would_straddle_devices_are_refused() -> None:
    specs, _ = specs_of("llama2_7b.py", "int8")
    mesh = AbstractMesh(astuple(MeshConfig(fsdp=1, tensor=8)), AXES)
    placement = Placement(mesh, ShardingConfig(), cli.load_recipe("llama2_7b.py").precision)
    (problem,) = moments.problems("int8", specs, placement)  # 11008 = 8 × 1376, and blocks of 64
    assert "1376 of the 11008" in problem and "mlp" in problem and "block size 64" in problem
    assert not moments.problems("bfloat16", specs, placement)


# ---- Optimizers and the real step.

MODEL = replace(toy.CONFIG, width=32, head_dim=16, mlp_width=128, layers=3, pattern=("global",))
FEW = {  # a table, and two layers of a matrix and a scale
    "non_layer": {"table": ParamSpec((128, 64), ("vocabulary", "embed"), (1,))},
    "segment_0": {
        "up": ParamSpec((64, 128), ("embed", "mlp"), (0,)).stack(2),
        "scale": ParamSpec((64,), ("embed",)).stack(2),
    },
}
STEPS = 4


def config(dtype: str, name: str = "adamw") -> OptimizerConfig:
    return OptimizerConfig(learning_rate=0.01, epsilon=1e-3, name=name, state_dtype=dtype)  # type: ignore[arg-type]


@functools.cache
def stepped(name: str, dtype: str, steps: int = STEPS, **groups: tuple[str, ...]) -> tuple[Params, Params]:
    """Return masters and moments after steps with random gradients, whose scale differs from value to value."""
    make = functools.partial(make_optimizer, replace(config(dtype, name), **groups), lambda count: 0.01)
    optimizers = update.make_optimizers(make, FEW)
    quick = functools.partial(jax.jit, compiler_options=toy.QUICK_COMPILE)
    apply = quick(functools.partial(update.apply_gradients, optimizers, FEW, placement=toy.placement()))
    masters = toy.params(FEW)
    moments = quick(functools.partial(update.initialize_moments, optimizers, FEW))(masters)
    state = update.Updatable(masters, moments)
    random = np.random.default_rng(0)
    sizes = jax.tree.map(lambda spec: 10 ** random.uniform(-2, 0, spec.shape), FEW)
    for _ in range(steps):
        gradients = jax.tree.map(lambda size: np.float32(size * random.normal(size=size.shape)), sizes)
        state = apply(state, gradients, update.Scalars())
    return state.masters, state.moments


def is_codes(leaf: Any) -> bool:
    return isinstance(leaf, Codes)


# Number of compressed leaves: of the table, `up` and the scale. Muon keeps no squares of the blocks' matrices.
NARROW = {"adamw": 2 + 2 + 2, "sgd": 1 + 1 + 1, "lion": 1 + 1 + 1, "muon": 2 + 1 + 2}
FLOAT32_WITH_INT8 = {"adamw": 2, "sgd": 1, "lion": 1, "muon": 2}  # those of the scale


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 0.01), ("int8", 0.03)])
@pytest.mark.parametrize("name", NARROW)
def test_every_optimizer_keeps_its_moments_in_fewer_bits(name: str, dtype: str, error: float) -> None:
    (masters, found), (wanted_masters, wanted) = stepped(name, dtype), stepped(name, "float32")
    leaves = jax.tree.leaves(found, is_leaf=is_codes)
    if dtype == "int8":
        assert sum(map(is_codes, leaves)) == NARROW[name] - FLOAT32_WITH_INT8[name]
    else:
        assert sum(leaf.dtype == jnp.bfloat16 for leaf in leaves) == NARROW[name]
    wide = jax.tree.map(lambda leaf: decode(leaf) if is_codes(leaf) else leaf, found, is_leaf=is_codes)
    assert 0 < toy.distance(wide, wanted) < error
    if name != "lion":  # it steps by signs
        start = toy.params(FEW)
        moved, wanted_moved = (jax.tree.map(np.subtract, each, start) for each in (masters, wanted_masters))
        assert toy.distance(moved, wanted_moved) < error


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_first_step_is_that_of_32_bits(dtype: str) -> None:
    """A step uses the moments before they are compressed."""
    first, wanted = stepped("adamw", dtype, 1)[0], stepped("adamw", "float32", 1)[0]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), first, wanted)


def test_groups_hold_as_with_32_bits() -> None:
    groups = {"rate_groups": ("*/up=0.5", "*=1"), "decay_groups": ("*/up=30", "*=0")}
    (found, _), (wanted, _) = (stepped("adamw", dtype, **groups) for dtype in ("int8", "float32"))
    plain, start = stepped("adamw", "int8")[0]["segment_0"]["up"], toy.params(FEW)["segment_0"]["up"]
    moved, wanted_moved = (each["segment_0"]["up"] - start for each in (found, wanted))
    assert toy.distance(moved, wanted_moved) < 0.03 < toy.distance(plain - start, wanted_moved)


PLACED: dict[str, dict[str, Any]] = {
    "one device": {},
    "zero3": {"zero_stage": 3, "fsdp": 2, "tensor": 2},
    "pipeline": {"zero_stage": 1, "pipeline": 2, "fsdp": 2},
}


@functools.cache
def program(dtype: str, placed: str) -> tuple[Program, Placement]:
    placement = toy.placement(**PLACED[placed])
    accumulation = 2 if placed == "pipeline" else 1
    training = TrainingConfig(batch_size=8, sequence_length=16, accumulation=accumulation)
    arguments = (RematConfig("none"), LoraConfig(), placement)
    return toy.make_program(MODEL, training, config(dtype), ScheduleConfig(1, 10), *arguments), placement


def run(dtype: str, placed: str, state: TrainState, *seeds: int) -> TrainState:
    step, _ = program(dtype, placed)
    for seed in seeds:
        batch = toy.microbatches(toy.packed(8, 16, seed), step.batch.tokens.shape[0])
        state, _ = step.step(state, jax.device_put(batch, step.batch_sharding))
    return state


def begin(dtype: str, placed: str) -> TrainState:
    of, placement = program(dtype, placed)
    return training_state.initialize_state(of.specs, of.optimizers, 0, placement)


def to_checkpoint(dtype: str, placed: str, state: TrainState) -> Any:
    return jax.tree.map(np.asarray, program(dtype, placed)[0].to_checkpoint(state))


@functools.cache
def trained(dtype: str, placed: str) -> Any:
    """Return the checkpoint trees after two steps."""
    return to_checkpoint(dtype, placed, run(dtype, placed, begin(dtype, placed), 0, 1))


@pytest.mark.parametrize("placed", [pytest.param(each, marks=pytest.mark.slow) for each in ("zero3", "pipeline")])
def test_placement_changes_no_more_than_rounding_does(placed: str) -> None:
    found, wanted = (trained("int8", each) for each in (placed, "one device"))
    assert toy.distance(found["masters"], wanted["masters"]) < 1e-5

    def check(path: str, a: np.ndarray, b: np.ndarray) -> None:
        if b.dtype.itemsize > 1:
            assert np.allclose(a, b, rtol=1e-3, atol=1e-6), path
        else:  # rounding noise decides for values between two codes
            assert np.mean(a != b) < 0.01, path

    tree.map_with_path(check, found["moments"], wanted["moments"])


@pytest.mark.core
@pytest.mark.parametrize(
    ("dtype", "placed"), [("int8", "zero3"), pytest.param("bfloat16", "pipeline", marks=pytest.mark.slow)]
)
def test_resumed_it_goes_on_equal_to_the_bit(dtype: str, placed: str, tmp_path: Path) -> None:
    state = run(dtype, placed, begin(dtype, placed), 0, 1)
    save(tmp_path, program(dtype, placed)[0].to_checkpoint(state))
    whole = to_checkpoint(dtype, placed, run(dtype, placed, state, 2))
    resumed = run(dtype, placed, restore(tmp_path, dtype, placed), 2)
    jax.tree.map(np.testing.assert_array_equal, to_checkpoint(dtype, placed, resumed), whole)


def test_a_checkpoint_goes_to_another_mesh_and_a_pipeline_and_back(tmp_path: Path) -> None:
    first = trained("int8", "zero3")
    save(tmp_path / "a", program("int8", "zero3")[0].to_checkpoint(run("int8", "zero3", begin("int8", "zero3"), 0, 1)))
    staged = restore(tmp_path / "a", "int8", "pipeline")
    save(tmp_path / "b", program("int8", "pipeline")[0].to_checkpoint(staged))
    jax.tree.map(np.testing.assert_array_equal, to_checkpoint("int8", "pipeline", staged), first)
    back = restore(tmp_path / "b", "int8", "zero3")
    jax.tree.map(np.testing.assert_array_equal, to_checkpoint("int8", "zero3", back), first)


def save(directory: Path, trees: Any) -> None:
    with Checkpoints(directory, CheckpointConfig()) as checkpoints:
        checkpoints.save(2, trees, {})


def restore(directory: Path, dtype: str, placed: str) -> TrainState:
    of, placement = program(dtype, placed)
    with Checkpoints(directory) as checkpoints:
        restored = checkpoints.restore(2, **abstract_checkpoint(training_state.checkpoint_specs(of.specs), placement))
    return training_state.resume_state(of.specs, 2, placement, **restored)


def test_a_skipped_step_changes_no_bit() -> None:
    state = run("int8", "zero3", begin("int8", "zero3"), 0)
    before = to_checkpoint("int8", "zero3", state)["moments"]
    spoilt = state.replace(masters=jax.tree.map(lambda x: x * jnp.nan, state.masters))
    after = run("int8", "zero3", spoilt, 1)
    assert after.guard["skipped_in_a_row"] == 1
    jax.tree.map(np.testing.assert_array_equal, to_checkpoint("int8", "zero3", after)["moments"], before)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_loss_on_text_is_that_of_32_bits(dtype: str, tmp_path: Path) -> None:
    losses = {}
    for each in ("float32", dtype):
        arguments = ("--training.steps", 150, "--schedule.decay-steps", 150, "--logging.every", 1)
        done = command("train", "--config", "quickstart.py", "--run.directory", tmp_path / each, *arguments,
                       "--evaluation.batches", 8, "--optimizer.state-dtype", each)  # fmt: skip
        assert done.returncode == 0, done.stderr
        losses[each] = metrics(tmp_path / each)[-1]["eval_loss"]
    assert losses[dtype] == pytest.approx(losses["float32"], rel=0.01)


def test_a_state_whose_moments_are_unknown_is_refused() -> None:
    specs = {"weight": ParamSpec((16, 128), ("embed", "mlp"), (0,), param.normal())}
    optimizer = moments.compress_moments(optax.scale_by_rss(), "int8", specs)
    with pytest.raises(AssertionError, match="neither in SIGNED nor in SQUARES"):
        optimizer.init({"weight": jnp.zeros((16, 128))})
