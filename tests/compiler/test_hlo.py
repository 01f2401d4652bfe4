"""FLOPs, bytes and collectives of programs for which they are known by construction."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxopt_llm.compiler import hlo, topology
from jaxopt_llm.compiler.instructions import taken_scope_name
from jaxopt_llm.compiler.topology import gpu_topology
from jaxopt_llm.kernels.attention_types import attention_scope

CUBLAS = {"xla_gpu_enable_triton_gemm": False}


def mesh_of(devices: list[jax.Device]) -> Mesh:
    return Mesh(np.array(devices).reshape(2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def gpus() -> Mesh:
    return mesh_of(gpu_topology("h200"))


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    return mesh_of(jax.devices("cpu") if request.param == "cpu" else gpu_topology("h200"))


def array(mesh: Mesh, shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def compiled_text(function: Callable[..., Any], *arguments: Any, options: Mapping[str, Any] = {}) -> str:
    text = topology.compile_without_gpu(jax.jit(function).lower(*arguments), options).as_text()
    assert text is not None
    return text


def manual(mesh: Mesh, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


# ---- Matmuls.


@pytest.mark.parametrize("options", [{}, CUBLAS], ids=["triton", "cublas"])
def test_flops_of_a_batched_matmul(gpus: Mesh, options: dict[str, Any]) -> None:
    x, w = array(gpus, (8, 64, 32), dtype=jnp.bfloat16), array(gpus, (8, 48, 32), dtype=jnp.bfloat16)
    text = compiled_text(lambda x, w: jnp.einsum("bik,bjk->bij", x, w), x, w, options=options)
    assert ("__cublas$lt$matmul" in text) == (options is CUBLAS)
    assert hlo.count_dot_flops(text) == 2 * 8 * 64 * 32 * 48


def test_flops_of_a_batched_matmul_on_cpu() -> None:
    text = compiled_text(lambda x, w: jnp.einsum("bik,bjk->bij", x, w), jnp.ones((8, 64, 32)), jnp.ones((8, 48, 32)))
    assert hlo.count_dot_flops(text) == 2 * 8 * 64 * 32 * 48


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_flops_of_8_bit_matmuls(gpus: Mesh, dtype: Any) -> None:
    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        if dtype == jnp.int8:
            return lax.dot(x, w, preferred_element_type=jnp.int32)
        return x.astype(jnp.bfloat16) * 2 @ (w.astype(jnp.bfloat16) * 2)

    x, w = array(gpus, (256, 512), dtype=dtype), array(gpus, (512, 128), dtype=dtype)
    text = compiled_text(multiply, x, w, options=CUBLAS)
    assert "__cublas$lt$matmul" + ("" if dtype == jnp.int8 else "$f8") + '"' in text
    assert hlo.count_dot_flops(text) == 2 * 256 * 512 * 128


@pytest.mark.parametrize("window, parts, visible", [(None, 1, 64.5), (32, 1, 28.125), (32, 4, 28.125), (None, 4, 64.5)])
def test_flops_of_an_attention_kernel(window: int | None, parts: int, visible: float) -> None:
    """Check that all calls together count each key that a query sees once.

    The program is the forward over 128 keys in `parts` calls. visible: keys that a query sees on average.
    """
    rows = 128 // parts
    k, q = f"bf16[2,{rows},4,64]", f"bf16[2,{rows},8,64]"

    def step(x: jax.Array) -> jax.Array:
        with attention_scope(window, parts):
            return jnp.sin(x)

    (source,) = re.findall(r'"(jit\(step\)/.*)sin"', jax.jit(step).lower(0.0).as_text(debug_info=True))
    call = f'custom-call(%q, %k, %v), custom_call_target="__gpu$xla.gpu.triton", metadata={{op_name="{source}call"}}'
    text = f"""HloModule step

ENTRY %main (q: {q}, k: {k}, v: {k}) -> {q} {{
  %q = {q} parameter(0)
  %k = {k} parameter(1)
  %v = {k} parameter(2)
  ROOT %out = {q} {call}
}}
"""
    assert parts * hlo.count_dot_flops(text) == 2 * 2 * (2 * rows * 8 * 64) * visible


def layers(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def test_flops_in_a_loop_and_a_loop_in_a_loop(mesh: Mesh) -> None:
    w, x = array(mesh, (3, 64, 64)), array(mesh, (32, 64))
    once = 2 * 32 * 64 * 64
    assert hlo.count_dot_flops(compiled_text(layers, w, x)) == 3 * once

    def nested(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 5, lambda i, x: layers(w, x), x)

    assert hlo.count_dot_flops(compiled_text(nested, w, x)) == 15 * once


def test_flops_of_a_gradient_with_rematerialisation(mesh: Mesh) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        block = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jnp.sum(lax.scan(block, x, w)[0] ** 2)

    w, x = array(mesh, (6, 64, 64)), array(mesh, (32, 64))
    text = compiled_text(jax.grad(loss, argnums=(0, 1)), w, x)
    # Forward, forward again in the backward, gradient of x, gradient of w.
    assert hlo.count_dot_flops(text) == 4 * 6 * 2 * 32 * 64 * 64


def test_flops_are_those_of_one_device(mesh: Mesh) -> None:
    x, w = array(mesh, (256, 128), "x", None), array(mesh, (128, 512), None, "y")
    assert hlo.count_dot_flops(compiled_text(jnp.matmul, x, w)) == 2 * 256 * 128 * 512 // 8


def test_every_branch_counts_once(mesh: Mesh) -> None:
    def branch(flag: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.cond(flag > 0, lambda x: x @ w, lambda x: jnp.tanh(x @ w) @ w, x)

    text = compiled_text(branch, array(mesh, (), dtype=jnp.int32), array(mesh, (64, 64)), array(mesh, (32, 64)))
    assert hlo.count_dot_flops(text) == 3 * 2 * 32 * 64 * 64


@pytest.mark.parametrize("by_index", [False, True], ids=["of a condition", "of an index"])
def test_a_branch_in_a_loop_counts_by_its_scope(mesh: Mesh, by_index: bool) -> None:
    def step(x: jax.Array, flag: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope(taken_scope_name(3, 12)):
            taken, other = (lambda x: jnp.tanh(x @ w) @ w), (lambda x: x @ w)
            return lax.switch(flag, [other, taken], x) if by_index else lax.cond(flag > 0, taken, other, x)

    def loop(flags: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, flag: (step(x, flag, w), None), x, flags)[0]

    text = compiled_text(loop, array(mesh, (12,), dtype=jnp.int32), array(mesh, (64, 64)), array(mesh, (32, 64)))
    assert hlo.count_dot_flops(text) == (3 * 2 + 9 * 1) * 2 * 32 * 64 * 64


def test_a_scope_counts_in_a_derivative(mesh: Mesh) -> None:
    """JAX writes jvp(3_of_12_times)/cond for it."""

    def step(x: jax.Array, flag: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope(taken_scope_name(3, 12)):
            return lax.cond(flag > 0, lambda x: jnp.tanh(x @ w), lambda x: x, x)

    def loop(flags: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
        def add(total: jax.Array, flag: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.vjp(lambda x: step(x, flag, w), total)[1](total)[0], None

        return lax.scan(add, x, flags)[0]

    text = compiled_text(loop, array(mesh, (12,), dtype=jnp.int32), array(mesh, (64, 64)), array(mesh, (32, 64)))
    assert hlo.count_dot_flops(text) == 3 * 2 * 2 * 32 * 64 * 64


def test_trip_count_of_an_uncompiled_loop_comes_from_its_condition() -> None:
    text = jax.jit(layers).lower(jnp.ones((7, 64, 64)), jnp.ones((32, 64))).as_text(dialect="hlo")
    assert "known_trip_count" not in text
    assert hlo.count_dot_flops(text) == 7 * 2 * 32 * 64 * 64


def test_a_function_that_is_called_twice_counts_twice() -> None:
    multiply = jax.jit(lambda x, w: x @ w)
    twice = jax.jit(lambda x, w: multiply(multiply(x, w), w))
    text = twice.lower(jnp.ones((32, 64)), jnp.ones((64, 64))).as_text(dialect="hlo")
    assert text.count(" dot(") == 1
    assert hlo.count_dot_flops(text) == 2 * 2 * 32 * 64 * 64


@pytest.mark.parametrize(
    ("start", "step", "stop"), [(0, 2, lambda i: i < 8), (0, 1, lambda i: i <= 8), (0, 1, lambda i: i < i + 1)]
)
def test_other_uncompiled_loops_are_not_guessed(start: int, step: int, stop: Callable[[Any], Any]) -> None:
    def loop(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda c: stop(c[0]), lambda c: (c[0] + step, c[1] @ w), (start, x))[1]

    text = jax.jit(loop).lower(jnp.ones((64, 64)), jnp.ones((32, 64))).as_text(dialect="hlo")
    with pytest.raises(ValueError, match="without a fixed trip count"):
        hlo.count_dot_flops(text)


def test_a_loop_without_a_fixed_trip_count_is_an_error(mesh: Mesh) -> None:
    def loop(trips: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, trips, lambda i, x: x @ w, x)

    trips, w, x = array(mesh, (), dtype=jnp.int32), array(mesh, (64, 64)), array(mesh, (32, 64))
    with pytest.raises(ValueError, match="without a fixed trip count"):
        hlo.count_dot_flops(compiled_text(loop, trips, w, x))


def test_only_loops_around_a_matmul_need_a_trip_count(mesh: Mesh) -> None:
    def loop(trips: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, trips, lambda i, x: jnp.sin(x), x) @ w

    text = compiled_text(loop, array(mesh, (), dtype=jnp.int32), array(mesh, (64, 64)), array(mesh, (32, 64)))
    assert hlo.count_dot_flops(text) == 2 * 32 * 64 * 64


# ---- Collectives. Every device holds [64, 128] float32, 32 KiB, of the [128, 512] array.

SHARD = 64 * 128 * 4
RING = [(i, (i + 1) % 4) for i in range(4)]
CASES = {
    # name: (function of a shard, output spec, kind, array bytes, wire bytes, group size, axes)
    "psum x": (lambda a: lax.psum(a, "x"), P(None, "y"), "all-reduce", SHARD, SHARD, 2, ("x",)),
    "psum y": (lambda a: lax.psum(a, "y"), P("x"), "all-reduce", SHARD, SHARD * 6 // 4, 4, ("y",)),
    "psum xy": (lambda a: lax.psum(a, ("x", "y")), P(), "all-reduce", SHARD, SHARD * 14 // 8, 8, ("x", "y")),
    "all_gather x": (lambda a: lax.all_gather(a, "x"), P(None, None, "y"), "all-gather", 2 * SHARD, SHARD, 2, ("x",)),
    "all_gather y": (lambda a: lax.all_gather(a, "y"), P(None, "x"), "all-gather", 4 * SHARD, 3 * SHARD, 4, ("y",)),
    "psum_scatter": (
        lambda a: lax.psum_scatter(a, "y", scatter_dimension=1, tiled=True),
        P("x", "y"),
        "reduce-scatter",
        SHARD,
        SHARD * 3 // 4,
        4,
        ("y",),
    ),
    "all_to_all x": (
        lambda a: lax.all_to_all(a, "x", 0, 1, tiled=True),
        P("x", "y"),
        "all-to-all",
        SHARD,
        SHARD // 2,
        2,
        ("x",),
    ),
    "all_to_all y": (
        lambda a: lax.all_to_all(a, "y", 0, 1, tiled=True),
        P("x", "y"),
        "all-to-all",
        SHARD,
        SHARD * 3 // 4,
        4,
        ("y",),
    ),
    "ppermute x": (
        lambda a: lax.ppermute(a, "x", [(0, 1)]),
        P("x", "y"),
        "collective-permute",
        SHARD,
        SHARD,
        2,
        ("x",),
    ),
    "ppermute y": (lambda a: lax.ppermute(a, "y", RING), P("x", "y"), "collective-permute", SHARD, SHARD, 2, ("y",)),
}


@pytest.mark.parametrize("case", CASES)
def test_collectives(mesh: Mesh, case: str) -> None:
    function, out_spec, kind, array_bytes, wire_bytes, group_size, axes = CASES[case]
    text = compiled_text(manual(mesh, function, P("x", "y"), out_spec), array(mesh, (128, 512), "x", "y"))
    (collective,) = hlo.list_collectives(text, mesh)
    assert (collective.kind, collective.dtypes, collective.times) == (kind, ("f32",), 1)
    assert (collective.array_bytes, collective.wire_bytes) == (array_bytes, wire_bytes)
    assert (collective.axes, collective.group_size) == (axes, group_size)
    primitive = {"psum_scatter": "reduce_scatter"}.get(case, case.split()[0])
    assert collective.source.endswith(primitive)


def test_ragged_all_to_all(gpus: Mesh) -> None:
    def exchange(*arguments: jax.Array) -> jax.Array:
        return lax.ragged_all_to_all(*arguments, axis_name="y")

    rows, sizes = array(gpus, (64, 128), "y", dtype=jnp.bfloat16), array(gpus, (16,), "y", dtype=jnp.int32)
    text = compiled_text(manual(gpus, exchange, (P("y"),) * 6, P("y")), rows, rows, sizes, sizes, sizes, sizes)
    (collective,) = hlo.list_collectives(text, gpus)
    assert (collective.kind, collective.dtypes, collective.axes) == ("ragged-all-to-all", ("bf16",), ("y",))
    assert (collective.array_bytes, collective.wire_bytes) == (16 * 128 * 2, 12 * 128 * 2)


def test_axes_follow_the_mesh_and_not_the_device_ids(mesh: Mesh) -> None:
    """Check that ids in the program are positions in the mesh, in any order of the devices."""
    shuffled = Mesh(mesh.devices.T[::-1].reshape(2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    for axis, spec in (("x", P(None, "y")), ("y", P("x", None))):
        function = manual(shuffled, lambda a, axis=axis: lax.psum(a, axis), P("x", "y"), spec)
        (collective,) = hlo.list_collectives(compiled_text(function, array(shuffled, (128, 512), "x", "y")), shuffled)
        assert collective.axes == (axis,)


def test_collectives_of_automatic_sharding(mesh: Mesh) -> None:
    x, w = array(mesh, (256, 128), "x", "y"), array(mesh, (128, 64), "y", None)
    (collective,) = hlo.list_collectives(compiled_text(jnp.matmul, x, w), mesh)
    assert (collective.kind, collective.axes, collective.array_bytes) == ("all-reduce", ("y",), 128 * 64 * 4)


def test_a_reshard_along_parts_of_axes(mesh: Mesh) -> None:
    def transpose(a: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(a * 1, NamedSharding(mesh, P("y", "x")))

    found = hlo.list_collectives(compiled_text(transpose, array(mesh, (128, 512), "x", "y")), mesh)
    assert [(c.kind, c.axes, c.group_size, c.array_bytes) for c in found] == [
        ("all-to-all", ("y",), 2, SHARD),
        ("collective-permute", ("x", "y"), 2, SHARD),
    ]


def test_times_is_the_product_of_the_loops(mesh: Mesh) -> None:
    def turn(a: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 9, lambda i, a: lax.ppermute(a, "y", RING) * 2, a)

    def turns(a: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 5, lambda i, a: jnp.sin(turn(a)), lax.ppermute(a, "x", [(0, 1), (1, 0)]))

    text = compiled_text(manual(mesh, turns, P("x", "y"), P("x", "y")), array(mesh, (128, 512), "x", "y"))
    assert sorted((c.axes, c.times) for c in hlo.list_collectives(text, mesh)) == [(("x",), 1), (("y",), 45)]


def test_combined_collectives_sum_their_bytes(mesh: Mesh) -> None:
    def reduce(a: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.psum(a, "y"), lax.psum(a[:1] * 3, "y")

    text = compiled_text(manual(mesh, reduce, P("x", "y"), P("x")), array(mesh, (128, 512), "x", "y"))
    (collective,) = hlo.list_collectives(text, mesh)
    assert collective.array_bytes == SHARD + 128 * 4


def test_an_asynchronous_collective_is_listed_once(gpus: Mesh) -> None:
    def overlap(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        gathered = lax.all_gather(a, "y", axis=1, tiled=True)
        other = jnp.tanh(b @ b) @ b  # can run while the gather is under way
        return gathered @ gathered.T + other.sum(), other

    function = manual(gpus, overlap, (P("x", "y"), P()), (P("x"), P()))
    text = compiled_text(function, array(gpus, (128, 512), "x", "y"), array(gpus, (256, 256)))
    (collective,) = hlo.list_collectives(text, gpus)
    assert "all-gather-start" in text
    assert (collective.kind, collective.array_bytes, collective.axes) == ("all-gather", 4 * SHARD, ("y",))


def test_a_mesh_of_another_size_is_an_error(mesh: Mesh) -> None:
    text = compiled_text(lambda a: a + 1, array(mesh, (128, 512), "x", "y"))
    half = Mesh(mesh.devices[:1], ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match="for 8 devices, the mesh has 4"):
        hlo.list_collectives(text, half)


def module(body: str, computations: str = "") -> str:
    entry = f"ENTRY %main (p: f32[16]) -> f32[16] {{\n{body}\n}}\n"
    return f"HloModule written_here, num_partitions=8\n\n{computations}\n{entry}"


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("{}", ("x", "y"), 8),
        ("{{0,1,2,3},{4,5,6,7}}", ("y",), 4),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("x",), 2),
        ("{{0,5},{1,4},{2,7},{3,6}}", ("x", "y"), 2),
        ("[2,4]<=[8]", ("y",), 4),
        ("[4,2]<=[8]", ("y",), 2),
        ("[4,2]<=[2,4]T(1,0)", ("x",), 2),
        ("[1,8]<=[8]", ("x", "y"), 8),
        ("[2,4]<=[2,2,2]T(1,0,2)", ("x", "y"), 4),
        ("mesh['x'=2,'y'=4] {'x'}", ("x",), 2),
        ("mesh['x'=2,'y'=4] {'x','y'}", ("x", "y"), 8),
        ("mesh['x'=2,'y'=4] {'y':(2)2}", ("y",), 2),
        ("mesh['a'=8] {'a':(1)2}", ("x",), 2),
        ("mesh['a'=8] {'a':(2)4}", ("y",), 4),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ("x", "y"), 4),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", ("y",), 4),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("x",), 2),
        ("mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'b'}", ("x",), 2),
    ],
)
def test_notations_of_replica_groups(groups: str, axes: tuple[str, ...], size: int) -> None:
    reduce = "  ROOT %r = f32[16]{0} all-reduce(%p), channel_id=1, replica_groups=" + groups
    text = module("  %p = f32[16]{0} parameter(0)\n" + reduce + ", use_global_device_ids=true")
    (collective,) = hlo.list_collectives(text, mesh_of(jax.devices("cpu")))
    assert (collective.axes, collective.group_size) == (axes, size)


def test_an_unknown_notation_is_an_error() -> None:
    text = module("  %p = f32[16]{0} parameter(0)\n  ROOT %r = f32[16]{0} all-reduce(%p), replica_groups=?")
    with pytest.raises(ValueError, match="cannot read the devices of r"):
        hlo.list_collectives(text, mesh_of(jax.devices("cpu")))


WRAPPED = """%wrapped (w: f32[16], v: bf16[16]) -> (f32[4], bf16[4]) {
  %w = f32[16]{0:T(256)} parameter(0)
  %v = bf16[16]{0} parameter(1)
  ROOT %rs = (f32[4]{0}, /*index=1*/bf16[4]{0}) reduce-scatter(%w, /*index=1*/%v), replica_groups=[2,4]<=[8]
}
"""
STARTED = """  %p = f32[16]{0} parameter(0)
  %c = bf16[16]{0} convert(%p)
  %s = ((f32[16]{0}, bf16[16]{0}), (f32[4]{0}, bf16[4]{0}), u32[]) async-start(%p, %c), calls=%wrapped
  %d = (f32[4]{0}, bf16[4]{0}) async-done(%s)
  ROOT %r = f32[16]{0} copy(%p)"""


def test_a_wrapped_collective_of_several_types() -> None:
    (collective,) = hlo.list_collectives(module(STARTED, WRAPPED), mesh_of(jax.devices("cpu")))
    assert (collective.kind, collective.dtypes) == ("reduce-scatter", ("f32", "bf16"))
    assert (collective.array_bytes, collective.wire_bytes) == (96, 72)


def test_computations_that_nothing_calls_do_not_count() -> None:
    text = module("  ROOT %p = f32[16]{0} parameter(0)", WRAPPED)
    assert hlo.list_collectives(text, mesh_of(jax.devices("cpu"))) == ()
    assert len(list(programs.list_array_shapes(text))) == 1
    assert programs.count_instructions(text) == 4


# ---- Memory and arrays.


def test_memory_per_device(mesh: Mesh) -> None:
    def step(state: jax.Array, x: jax.Array) -> jax.Array:
        return state + x

    a = array(mesh, (512, 1024), "x", "y")
    assert hlo.read_memory(jax.jit(step).lower(a, a).compile()) == hlo.Memory(2 << 18, 1 << 18, 0, 0, 0)
    donated = hlo.read_memory(jax.jit(step, donate_argnums=0).lower(a, a).compile())
    assert donated == hlo.Memory(2 << 18, 1 << 18, 1 << 18, 0, 0)
    assert donated.peak == 2 << 18


def test_memory_counts_temporaries(mesh: Mesh) -> None:
    a = array(mesh, (256, 256))
    found = hlo.read_memory(jax.jit(lambda a: jnp.tanh(a @ a) @ a).lower(a).compile())
    assert found.temporaries >= 256 * 256 * 4
    assert found.peak == 2 * 256 * 256 * 4 + found.temporaries


def test_memory_on_the_host(gpus: Mesh) -> None:
    def step(host: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        updated = jax.device_put(host, jax.memory.Space.Device) * 2
        return jax.device_put(updated, jax.memory.Space.Host), x + 1

    device = NamedSharding(gpus, P("x", "y"))
    shardings = (device.with_memory_kind("pinned_host"), device)
    jitted = jax.jit(step, in_shardings=shardings, out_shardings=shardings, donate_argnums=0)
    a = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    found = hlo.read_memory(jitted.lower(a, a).compile())
    assert (found.host, found.arguments) == (1 << 18, 1 << 18)


def test_host_traffic(gpus: Mesh) -> None:
    """Move eight matrices to the device, one after the other, and one back. Each device moves its eighth of each."""

    def step(stack: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, None]:
            return x + jax.device_put(weights, jax.memory.Space.Device), None

        return lax.scan(layer, x, stack)[0], jax.device_put(2 * x, jax.memory.Space.Host)

    split = NamedSharding(gpus.abstract_mesh, P(None, "x", "y"), memory_kind="pinned_host")
    stack = jax.ShapeDtypeStruct((8, 512, 256), jnp.float32, sharding=split)
    x = array(gpus, (512, 256), "x", "y")
    lowered = topology.lower_without_gpu(jax.jit(step, out_shardings=(x.sharding, x.sharding)), stack, x)
    assert hlo.count_host_bytes(topology.compile_without_gpu(lowered).as_text()) == 9 * 512 * 256 * 4 // 8


def test_array_shapes_in_memory_and_in_fusions(gpus: Mesh) -> None:
    """Check that the inner array of a fusion, which is computed piece by piece, is not listed as in memory."""

    def forward(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.exp(jnp.sin(x)[:, None, :] * jnp.cos(w)[None, :, :]), axis=(0, 1))

    x, w = array(gpus, (128, 256)), array(gpus, (96, 256))
    shapes = list(programs.list_array_shapes(compiled_text(forward, x, w)))
    cube = 128 * 96 * 256 * 4
    assert any(s.bytes == cube and s.fused for s in shapes)
    assert not any(s.bytes == cube and not s.fused for s in shapes)
    assert {(s.dtype, s.shape) for s in shapes if s.opcode == "parameter" and not s.fused} >= {
        ("f32", (128, 256)),
        ("f32", (96, 256)),
    }


NESTED_FUSIONS = """%inner (i: f32[7]) -> f32[7] {
  ROOT %i = f32[7]{0} parameter(0)
}
%outer (o: f32[7]) -> f32[7] {
  %o = f32[7]{0} parameter(0)
  ROOT %n = f32[7]{0} call(%o), to_apply=%inner
}
"""


def test_computations_that_a_fusion_calls_are_fused() -> None:
    body = "  %p = f32[16]{0} parameter(0)\n  ROOT %f = f32[7]{0} fusion(%p), kind=kLoop, calls=%outer"
    shapes = programs.list_array_shapes(module(body, NESTED_FUSIONS))
    assert [s.fused for s in shapes] == [True, True, True, False, False]


def test_the_largest_result_of_a_gather(mesh: Mesh) -> None:
    function = manual(mesh, lambda a: lax.all_gather(a, "y", axis=0, tiled=True), P("x", "y"), P(None, "x"))
    text = compiled_text(function, array(mesh, (128, 512), "x", "y"))
    gathers = [s for s in programs.list_array_shapes(text) if s.opcode.startswith("all-gather")]
    assert max(s.bytes for s in gathers) == 4 * SHARD
    assert all(s.source.endswith("all_gather") and s.dtype == "f32" for s in gathers)


def test_bytes_of_types() -> None:
    arrays = "pred[3], s4[5]{0:E(4)}, f8e4m3fn[2,2]{1,0}, bf16[3]{0}, c64[], f32[<=8]{0}, token[], u2[9]"
    text = module(f"  ROOT %p = ({arrays}) parameter(0)")
    assert [shape.bytes for shape in programs.list_array_shapes(text)] == [3, 3, 4, 6, 8, 32, 0, 3]


def test_instruction_count() -> None:
    assert programs.count_instructions(module(STARTED, WRAPPED)) == 8


def test_instruction_count_of_a_scan_does_not_grow_with_its_length(mesh: Mesh) -> None:
    def count(length: int) -> int:
        return programs.count_instructions(compiled_text(layers, array(mesh, (length, 64, 64)), array(mesh, (32, 64))))

    assert count(16) == count(8) > 10


def test_other_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="not the text of an HLO module"):
        programs.count_instructions("module @jit_f {\n}\n")
