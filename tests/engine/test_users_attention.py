"""`jaxopt_llm.attention` in a user's loss: kernels that each device calls with its own rows and heads."""

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cudnn_emulator
import jax
import jax.numpy as jnp
import optax
import pytest
import zoo_attention
from flax import nnx
from marks import slow
from test_equality import FSDP, TENSOR, Setting, assert_equal_to_optax, make_engine
from test_step_bytes import SMALL

import jaxopt_llm
from jaxopt_llm.compiler import hlo, topology
from jaxopt_llm.compiler.chips import CHIPS, seconds_at_peak
from jaxopt_llm.compiler.instructions import count_runs, walk_instructions
from jaxopt_llm.config import Config
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine import user_model
from jaxopt_llm.engine.checks import EngineWarning
from jaxopt_llm.engine.program import EngineProgram, make_engine_program
from jaxopt_llm.kernels.attention_auto import AttentionChoice
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.planning.search.roofline import kernel_efficiency
from jaxopt_llm.run import attention_choice

pytestmark = pytest.mark.core

SHARED = {"fsdp": 2, "tensor": 4}  # twice as many devices as key-value heads


@pytest.mark.parametrize(
    "setting",
    [
        Setting("packed", 3, TENSOR, 3),
        Setting("encoder", 0, SHARED, 1),
        *slow(
            Setting("packed", 0, FSDP, 3),
            Setting("encoder", 3, TENSOR, 3),
        ),
    ],
    ids=str,
)
def test_training_with_a_kernel_is_that_of_optax(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the emulation of cuDNN's primitives, with grouped heads and packed documents."""
    monkeypatch.setattr(user_model, "choose_working", lambda device, asked, *of: AttentionChoice(asked))
    directions = cudnn_emulator.emulate(monkeypatch)
    training = {"accumulation": setting.accumulation, "attention": "cudnn"}
    assert_equal_to_optax(setting, training=training)
    assert {"forward", "backward"} == set(directions)


WIDTH, HEADS, KV_HEADS, SIZE, LAYERS, VOCABULARY, LENGTH = 512, 8, 4, 64, 3, 1024, 256
MATRICES = 2 * WIDTH * (HEADS + KV_HEADS) * SIZE  # values of the matrices of a block


@dataclass(frozen=True)
class Shape:
    """How a model calls attention.

    rows: of the batch. policy: of nnx.remat; None: no remat. setting: remat.policy.
    """

    heads: int = HEADS
    kv_heads: int = KV_HEADS
    listed: bool = False
    causal: bool = True
    rows: int = 16
    policy: Any = None
    softcap: float | None = None
    mapped: bool = False
    setting: str = "none"


ALL_AGAIN = jax.checkpoint_policies.nothing_saveable
BUT_ATTENTION = jax.checkpoint_policies.save_only_these_names("attention")


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, shape: Shape) -> None:
        init = zoo_attention.named
        heads, kv_heads, self.shape = shape.heads * SIZE, shape.kv_heads * SIZE, shape
        self.query, self.key, self.value = (
            nnx.Linear(WIDTH, size, use_bias=False, kernel_init=init("embed", name), rngs=rngs)
            for size, name in ((heads, "heads"), (kv_heads, "kv_heads"), (kv_heads, "kv_heads"))
        )
        self.out = nnx.Linear(heads, WIDTH, use_bias=False, kernel_init=init("heads", "embed"), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (layer(x).reshape(*x.shape[:2], -1, SIZE) for layer in (self.query, self.key, self.value))
        attend = functools.partial(jaxopt_llm.attention, causal=self.shape.causal, softcap=self.shape.softcap)
        if self.shape.mapped:
            out = jax.vmap(lambda *row: attend(*(each[None] for each in row))[0])(q, k, v)
        else:
            out = attend(q, k, v)
        return x + self.out(out.reshape(*x.shape[:2], -1))


class Model(nnx.Module):
    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        make = functools.partial(Block, shape=shape)
        self.embed, self.shape = nnx.Embed(VOCABULARY, WIDTH, dtype=jnp.bfloat16, rngs=rngs), shape
        self.blocks: Any = (
            nnx.List([make(rngs) for _ in range(LAYERS)]) if shape.listed else zoo_attention.stack(make, rngs, LAYERS)
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        def run(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        x, policy = self.embed(tokens), self.shape.policy
        layer = run if policy is None else nnx.remat(run, policy=policy)
        if self.shape.listed:
            return self.embed.attend(functools.reduce(layer, self.blocks, x))
        return self.embed.attend(nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks))


def loss(model: Model, batch: Any) -> jax.Array:
    logits = model(batch["tokens"]).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"]))


def engine(shape: Shape, requested: str = "auto", loss: Callable[..., Any] = loss, **mesh: int) -> jaxopt_llm.Engine:
    sections = {"mesh": mesh or FSDP, "training": {"attention": requested}, "remat": {"policy": shape.setting}}
    config = Config(**sections)  # type: ignore[arg-type]
    batch = {"tokens": jax.ShapeDtypeStruct((shape.rows, LENGTH), jnp.int32)}
    rules = zoo_attention.RULES if "tensor" in mesh and shape.heads % mesh["tensor"] == 0 else {"embed": "tensor"}
    return jaxopt_llm.initialize(lambda: Model(shape, nnx.Rngs(0)), loss, batch, config, rules=rules)


def program(made: jaxopt_llm.Engine, chip: str = "h200") -> EngineProgram:
    devices = topology.gpu_topology(chip, 1, made.config.mesh.devices)
    return make_engine_program(made._job, make_mesh(made.config.mesh, devices))


@dataclass(frozen=True)
class Compiled:
    """A step: runs of attention kernels by direction, shapes of their q and k, and large collectives."""

    runs: Counter[str]
    shapes: set[tuple[tuple[int, ...], ...]]
    collectives: list[hlo.Collective]
    flops: int

    def moved(self, *axes: str) -> set[str]:
        return {each.kind for each in self.collectives if set(each.axes) & {*axes}}


@functools.cache
def compiled(shape: Shape, requested: str = "auto", **mesh: int) -> Compiled:
    made = program(engine(shape, requested, **mesh))
    text = topology.compile_without_gpu(topology.lower_without_gpu(made.step, made.state, made.batch)).as_text()
    runs, shapes, flops = Counter[str](), set(), 0
    for computation, call, execution in walk_instructions(str(text)):
        if kernel := hlo.attention_kernel(computation, call):
            times = count_runs(call, execution)
            runs[kernel[1]] += times
            shapes.add(tuple(computation[name].results[0].shape for name in call.operands[:2]))
            flops += 2 * times * (hlo.count_attention_products(computation, call) or ("", 0))[1]
    found = hlo.list_collectives(str(text), made.placement.mesh)  # type: ignore[arg-type]
    return Compiled(runs, shapes, [each for each in found if each.array_bytes >= SMALL], flops)


@pytest.mark.parametrize(
    ("shape", "forwards"),
    [
        (Shape(policy=ALL_AGAIN), 2),
        (Shape(policy=BUT_ATTENTION), 1),
        (Shape(listed=True, causal=False), 1),
        (Shape(listed=True, setting="save_attention"), 1),
        *slow(
            *((Shape(), 1), (Shape(setting="save_attention"), 1), (Shape(setting="full"), 2)),
        ),
    ],
)
def test_each_device_calls_the_kernel_with_its_rows(shape: Shape, forwards: int) -> None:
    step = compiled(shape, "cudnn")
    assert step.runs == {"forward": forwards * LAYERS, "backward": LAYERS}
    assert step.shapes == {((2, LENGTH, HEADS, SIZE), (2, LENGTH, KV_HEADS, SIZE))}
    gathered = sum(each.array_bytes * each.times for each in step.collectives if each.kind == "all-gather")
    weights = 2 * (2 * LAYERS * MATRICES + 3 * VOCABULARY * WIDTH)
    assert gathered == pytest.approx(weights, rel=0.01)
    assert {each.kind for each in step.collectives} == {"all-gather", "reduce-scatter"}


@pytest.mark.parametrize("shape", [Shape(policy=ALL_AGAIN), *slow(Shape(), Shape(listed=True, causal=False))])
def test_each_device_calls_the_kernel_with_its_heads(shape: Shape) -> None:
    step = compiled(shape, fsdp=2, tensor=4)
    assert step.shapes == {((8, LENGTH, HEADS // 4, SIZE), (8, LENGTH, KV_HEADS // 4, SIZE))}
    assert step.moved("tensor") <= {"all-reduce", "collective-permute"}


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_devices_share_few_key_value_heads(kv_heads: int) -> None:
    step = compiled(Shape(kv_heads=kv_heads, policy=ALL_AGAIN), fsdp=2, tensor=4)
    assert step.shapes == {((8, LENGTH, HEADS // 4, SIZE), (8, LENGTH, 1, SIZE))}
    largest = max(each.array_bytes for each in step.collectives if each.kind == "all-gather" and "tensor" in each.axes)
    assert largest <= 2 * 2 * 8 * LENGTH * kv_heads * SIZE  # keys and values


def test_the_flops_of_a_kernel_are_those_of_its_mask() -> None:
    causal, whole = (compiled(Shape(listed=True, causal=causal), "cudnn") for causal in (True, False))
    products = (2 + 5) * LAYERS * 2 * LENGTH * LENGTH * HEADS * SIZE
    assert whole.flops == 2 * products
    assert causal.flops == products * (LENGTH + 1) // LENGTH


def test_a_plan_names_the_kernel_and_counts_its_time() -> None:
    plan = engine(Shape(policy=ALL_AGAIN)).plan("h100", gpus=16, rows=64)
    (choice,) = plan.attention
    assert choice.name == "cudnn" and f"\nattention: {choice}\n" in str(plan)
    (part,) = (part for part in plan.breakdown if part.name == "attention")
    chip, pairs = CHIPS["h100"], 64 // 16 * LENGTH * (LENGTH + 1) * HEADS * SIZE
    seconds = sum(
        seconds_at_peak(chip, {"bf16": products * pairs}) / kernel_efficiency(chip, "cudnn", direction)
        for products, direction in ((2, "forward"), (2, "forward"), (5, "backward"))
    )
    assert LAYERS * seconds <= part.seconds < 3 * LAYERS * seconds  # other kernels prepare the operands


@pytest.fixture
def h200s(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Make the visible devices H200s. Return how the check of an implementation fails on them; none does."""
    failures: dict[str, str] = {}

    def check(name: str, call: Any, group: int) -> str:
        assert float(jnp.sum(jnp.ones(3))) == 3, "it runs now, also while a loss is traced"
        return failures.get(name, "")

    devices = topology.gpu_topology("h200", 1, 8)
    monkeypatch.setattr(user_model, "visible_devices", lambda: devices)
    monkeypatch.setattr(attention_choice, "check_attention", check)
    return failures


def test_a_kernel_that_does_not_support_a_call_is_refused(h200s: dict[str, str]) -> None:
    with pytest.raises(InputError, match="training.attention=cudnn: softcap=30: cudnn has none"):
        engine(Shape(softcap=30.0), "cudnn")
    (choice,) = program(engine(Shape(softcap=30.0))).model.attention.choices.values()
    assert choice.name in ("triton", "pallas")


def test_a_kernel_that_is_wrong_on_this_gpu_is_not_taken(h200s: dict[str, str]) -> None:
    h200s["cudnn"] = "is wrong on this GPU (the output by 0.3 of its norm)"
    with pytest.warns(EngineWarning, match="attention cudnn is wrong on this GPU"):
        engine(Shape())
    with pytest.raises(InputError, match="training.attention=cudnn is wrong on this GPU"):
        engine(Shape(), "cudnn")


def test_rows_that_the_devices_do_not_divide_are_left_to_xla(h200s: dict[str, str]) -> None:
    with pytest.warns(EngineWarning, match="XLA's operations, because mesh.fsdp=8 does not divide its 1 rows"):
        made = engine(Shape(mapped=True), "cudnn")
    (choice,) = program(made).model.attention.choices.values()
    assert choice.name == "xla" and "does not divide its 1 rows" in choice.reason


def test_heads_that_tensor_does_not_divide_stay_whole(h200s: dict[str, str]) -> None:
    with pytest.warns(EngineWarning, match="mesh.tensor=4 does not divide the 6 heads"):
        step = compiled(Shape(heads=6, kv_heads=3), fsdp=2, tensor=4)
    assert step.shapes == {((8, LENGTH, 6, SIZE), (8, LENGTH, 3, SIZE))}


def test_a_named_kernel_does_not_run_on_cpus() -> None:
    setting = Setting("encoder", 3, FSDP, 1)
    made = make_engine(setting, training={"attention": "pallas"})
    with pytest.raises(InputError, match="training.attention=pallas runs on GPUs only, not on cpu"):
        made.step(zoo_attention.CASES["encoder"].batches(1)[0])


def test_a_setting_without_a_call_is_refused() -> None:
    with pytest.raises(InputError, match="training.attention=cudnn has no effect"):
        make_engine(Setting("mlp", 3, FSDP, 1), training={"attention": "cudnn"})
    with pytest.raises(InputError, match="save_attention keeps what jaxopt_llm.attention computes"):
        make_engine(Setting("lm1b", 3, FSDP, 1), remat={"policy": "save_attention"})


@pytest.mark.parametrize("requested", ["auto", "xla", "pallas"])
def test_nothing_is_odd_about_attention(requested: str, h200s: dict[str, str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", EngineWarning)
        engine(Shape(policy=ALL_AGAIN), requested)
