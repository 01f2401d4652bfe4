"""What a step of a user's model holds and moves, read off programs compiled for eight H200s."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from marks import slow

import jaxopt_llm
from jaxopt_llm.compiler import hlo, topology
from jaxopt_llm.config import Config
from jaxopt_llm.engine.program import EngineProgram, make_engine_program
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.offload import count_resting_bytes

pytestmark = pytest.mark.core

WIDTH, VOCABULARY, LAYERS, SMALL = 512, 4096, 4, 2**17
RANK = 8
ADAPTERS = RANK * (2 * 5 * WIDTH * LAYERS + WIDTH + VOCABULARY)  # values of the adapters of all products
ROWS, LENGTH = 16, 128
COMBINED = 2e-3  # XLA moves biases and norm scales together with matrices
BLOCK = 2 * 4 * WIDTH * WIDTH  # values of the matrices of a block
TABLES = 2 * VOCABULARY * WIDTH  # values of embedding and head


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    """Blocks in a loop over a stack, or in a list; rematerialised or not."""

    def __init__(self, listed: bool, remat: bool, layers: int, *, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)
        self.remat = remat
        if listed:
            self.blocks: Any = nnx.List([Block(rngs=rngs) for _ in range(layers)])
            return

        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> Block:
            return Block(rngs=rngs)

        self.blocks = make(rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        def run(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        run = nnx.remat(run) if self.remat else run
        x = self.embedding(ids)
        if isinstance(self.blocks, nnx.List):
            for block in self.blocks:
                x = run(x, block)
        else:
            x = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        return self.head(x)


def loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["ids"]).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]))


@dataclass(frozen=True)
class Step:
    program: EngineProgram
    memory: hlo.Memory
    collectives: tuple[hlo.Collective, ...]
    text: str

    def moved(self, kind: str, dtype: str, axes: tuple[str, ...] = ("fsdp",)) -> int:
        """Bytes of the arrays on which collectives of a kind work, without small ones such as norms and sums."""
        return sum(
            each.array_bytes * each.times
            for each in self.collectives
            if (each.kind, each.dtypes, each.axes) == (kind, (dtype,), axes) and each.array_bytes >= SMALL
        )

    @property
    def others(self) -> set[tuple[str, tuple[str, ...]]]:
        """Kind and dtypes of the large collectives that are neither gathers in 16 bits nor reductions in 32."""
        known = {("all-gather", ("bf16",)), ("reduce-scatter", ("f32",))}
        return {(each.kind, each.dtypes) for each in self.collectives if each.array_bytes >= SMALL} - known


@functools.cache
def compiled(stage: int = 3, listed: bool = False, remat: bool = True, layers: int = LAYERS, **sections: Any) -> Step:
    given = {name: dict(value) for name, value in sections.items()}
    config = Config(**({"mesh": {"fsdp": 8}, "sharding": {"zero_stage": stage}} | given))
    batch = {name: jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32) for name in ("ids", "next")}
    engine = jaxopt_llm.initialize(lambda: Model(listed, remat, layers, rngs=nnx.Rngs(0)), loss, batch, config)
    mesh = make_mesh(config.mesh, topology.gpu_topology("h200", 1, 8))
    program = make_engine_program(engine._job, mesh)
    step = topology.compile_without_gpu(topology.lower_without_gpu(program.step, program.state, program.batch))
    text = str(step.as_text())
    return Step(program, hlo.read_memory(step), hlo.list_collectives(text, mesh), text)


@pytest.mark.parametrize(("stage", "expected"), [(0, 12.0), (1, 3.5), (2, 3.5), (3, 1.5)])
def test_bytes_at_rest_per_parameter(stage: int, expected: float) -> None:
    state = compiled_state(stage)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.masters))
    assert count_resting_bytes(state) / parameters == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("stage", "more"), [(0, 4.0), (1, 0.5), *slow((2, 0.5)), (3, 0.5)])
def test_an_average_takes_4_bytes_per_parameter_divided_as_the_moments(stage: int, more: float) -> None:
    with_average, without = (compiled(stage, **sections) for sections in ({"training": (("ema_decay", 0.999),)}, {}))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(without.program.state.masters))
    found = count_resting_bytes(with_average.program.state) - count_resting_bytes(without.program.state)
    assert found / parameters == pytest.approx(more, rel=1e-3)
    assert with_average.memory.arguments - without.memory.arguments == pytest.approx(found, rel=1e-3)
    # The update holds no second average.
    assert with_average.memory.temporaries <= without.memory.temporaries + 0.01 * found


def compiled_state(stage: int) -> Any:
    config = Config(mesh={"fsdp": 8}, sharding={"zero_stage": stage})  # type: ignore[arg-type]
    batch = {name: jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32) for name in ("ids", "next")}
    engine = jaxopt_llm.initialize(lambda: Model(False, True, LAYERS, rngs=nnx.Rngs(0)), loss, batch, config)
    return make_engine_program(engine._job, make_mesh(config.mesh, topology.gpu_topology("h200", 1, 8))).state


@pytest.mark.parametrize(("listed", "remat"), [(False, True), *slow((False, False), (True, True), (True, False))])
def test_zero_3_gathers_16_bits_and_reduces_32_once(listed: bool, remat: bool) -> None:
    step = compiled(3, listed, remat)
    # Every matrix is gathered in the forward and in the backward. The backward of a lookup reads no table.
    gathered = 2 * (2 * LAYERS * BLOCK + TABLES // 2 + TABLES // 2 * 2)
    assert step.moved("all-gather", "bf16") == pytest.approx(gathered, rel=COMBINED)
    assert step.moved("reduce-scatter", "f32") == pytest.approx(4 * (LAYERS * BLOCK + TABLES), rel=COMBINED)
    assert not step.others
    # The gradients of biases and norm scales, too.
    assert {each.dtypes for each in step.collectives if "reduce" in each.kind} == {("f32",)}


def test_a_layer_more_holds_no_gathered_weights() -> None:
    """With remat, a layer keeps its input and its share of the gradients."""
    more, fewer = compiled(3, layers=2 * LAYERS), compiled(3, layers=LAYERS)
    per_layer = (more.memory.temporaries - fewer.memory.temporaries) / LAYERS
    kept, gradient = 2 * ROWS // 8 * LENGTH * WIDTH, 4 * BLOCK // 8
    assert per_layer < 1.1 * (kept + gradient), (per_layer, kept, gradient)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_gather_the_compute_copy_once(stage: int) -> None:
    step = compiled(stage)
    assert step.moved("all-gather", "bf16") == pytest.approx(2 * (LAYERS * BLOCK + TABLES), rel=COMBINED)
    assert step.moved("reduce-scatter", "f32") == pytest.approx(4 * (LAYERS * BLOCK + TABLES), rel=COMBINED)


CODED = {"int8": 1 + 4 / 128, "int4": 0.5 + 4 / 128}  # bytes of a value: its code, and its share of a block's scale
HOSTS = (("data", 2), ("fsdp", 4))


def list_moved(step: Step, least: int) -> dict[tuple[str, tuple[str, ...]], float]:
    """Bytes of the arrays of at least this size on which collectives work, by kind and mesh axes."""
    found: dict[tuple[str, tuple[str, ...]], float] = {}
    for each in step.collectives:
        if each.array_bytes >= least:
            key = each.kind, each.axes
            found[key] = found.get(key, 0) + each.array_bytes * each.times
    return found


@pytest.mark.parametrize(
    ("mesh", "sharding", "expected"),
    [
        (
            (("fsdp", 8),),
            {"int8_gathers": ("fsdp",), "fsdp_gradients": "int8"},
            # Two gathers of each matrix, one of the embedding; each gradient once.
            {("all-gather", ("fsdp",)): ("int8", 2, 1), ("all-to-all", ("fsdp",)): ("int8", 1, 1)},
        ),
        *slow(
            (
                HOSTS,
                {
                    "int8_gathers": ("data", "fsdp"),
                    "fsdp_gradients": "int4",
                    "data_gradients": "int4",
                    "optimizer_over_data": True,
                },
                {
                    ("all-gather", ("fsdp",)): ("int8", 2, 1),
                    ("all-gather", ("data",)): ("int8", 1 / 4, 1 / 4),  # of the part of a device
                    ("all-to-all", ("fsdp",)): ("int4", 1, 1),
                    ("all-to-all", ("data",)): ("int4", 1 / 4, 1 / 4),
                },
            ),
            (
                HOSTS,
                {"data_gradients": "int8"},
                {
                    ("all-gather", ("fsdp",)): (2.0, 2, 1),
                    ("reduce-scatter", ("fsdp",)): (4.0, 1, 1),
                    ("all-to-all", ("data",)): ("int8", 1 / 4, 1 / 4),
                    ("all-gather", ("data",)): ("int8", 1 / 4, 1 / 4),
                },
            ),
        ),
    ],
)
def test_weights_and_gradients_move_as_codes(
    mesh: tuple[tuple[str, int], ...],
    sharding: dict[str, Any],
    expected: dict[tuple[str, tuple[str, ...]], tuple[Any, float, float]],
) -> None:
    """All matrices do, and the tables outside of the loop; biases and norm scales move exactly."""
    step = compiled(3, mesh=mesh, sharding=(("zero_stage", 3), *sharding.items()))
    values = {
        key: (CODED.get(form, form) * (matrices * (LAYERS * BLOCK + TABLES // 2) + embedding * TABLES // 2))
        for key, (form, matrices, embedding) in expected.items()
    }
    assert list_moved(step, 2**14).keys() == values.keys()
    found = list_moved(step, 2**12)  # with the scales of a matrix
    assert {key: found[key] for key in values} == pytest.approx(values, rel=0.01)


def test_adapters_form_no_gradient_of_their_base() -> None:
    step = compiled(3, lora=(("rank", RANK),))
    assert step.moved("reduce-scatter", "f32") == 4 * ADAPTERS
    whole, adapters = compiled(3), 3 * 2 * ADAPTERS * ROWS * LENGTH / 8
    # Forward, recomputed forward and the activations' gradient; no gradient of a matrix.
    flops = hlo.count_dot_flops(step.text)
    gradients = 2 * ROWS * LENGTH // 8 * (LAYERS * BLOCK + TABLES // 2)
    assert flops == pytest.approx(hlo.count_dot_flops(whole.text) - gradients + adapters, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("base", "per_value"), [("int8", 1.0), ("nf4", 0.5 + 4 / 64)])
def test_a_quantised_base_is_gathered_as_codes(base: str, per_value: float) -> None:
    step = compiled(3, lora=(("rank", RANK), ("base", base)))
    codes = per_value * (2 * LAYERS * BLOCK + 2 * TABLES // 2)
    embedding, adapters = 2 * TABLES // 2, 2 * 2 * ADAPTERS
    gathered = sum(each.array_bytes * each.times for each in step.collectives if each.kind == "all-gather")
    assert gathered == pytest.approx(codes + embedding + adapters, rel=0.01)


@pytest.mark.parametrize("clips", [False, True])
def test_an_offloaded_state_is_on_the_device_in_parts(clips: bool) -> None:
    """Of any optax transformation, also of one that computes a norm over all gradients."""
    steps = optax.adamw(1e-3)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), steps) if clips else steps
    held, offloaded = (peak_with(optimizer, offload) for offload in (False, True))
    moments = 8 * (LAYERS * BLOCK + TABLES) // 8
    largest = 8 * LAYERS * 4 * WIDTH * WIDTH // 8  # both moments of one stack of matrices
    assert held - offloaded > moments - largest
    assert held - offloaded <= moments * 1.01


def test_an_offloaded_average_is_on_the_device_in_parts() -> None:
    optimizer = optax.adamw(1e-3)
    largest = 4 * LAYERS * 4 * WIDTH * WIDTH // 8  # the average of one stack of matrices
    assert peak_with(optimizer, True, 0.999) - peak_with(optimizer, True) <= 1.01 * largest


@functools.cache
def peak_with(optimizer: optax.GradientTransformation, offload: bool, ema_decay: float = 0.0) -> int:
    config = Config(mesh={"fsdp": 8}, offload={"optimizer": offload}, training={"ema_decay": ema_decay})  # type: ignore[arg-type]
    batch = {name: jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32) for name in ("ids", "next")}
    model = functools.partial(Model, False, True, LAYERS)
    engine = jaxopt_llm.initialize(lambda: model(rngs=nnx.Rngs(0)), loss, batch, config, optimizer)
    return engine.plan("h200").memory.peak
