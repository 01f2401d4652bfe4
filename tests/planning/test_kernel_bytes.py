"""Bytes that kernels read and write, on fusions written by hand and on programs compiled for an H200."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxopt_llm.compiler import topology
from jaxopt_llm.compiler.instructions import parse_module
from jaxopt_llm.compiler.topology import gpu_topology
from jaxopt_llm.planning import kernel_bytes

FLOAT32, BFLOAT16 = 4 * 4 * 1024, 2 * 4 * 1024  # bytes of a stack of four layers


def count(text: str) -> int:
    """Return the bytes that the kernels of a program move."""
    module = parse_module(text)
    return sum(
        times * kernel_bytes.count_kernel_bytes(module, computation, kernel)
        for computation, kernel, times in kernel_bytes.walk_kernels(module)
    )


@pytest.mark.parametrize(
    ("body", "result", "moved"),
    [
        ("ROOT %y = bf16[4,1024]{1,0} convert(%x)", "bf16[4,1024]", FLOAT32 + BFLOAT16),
        (
            "%y = bf16[4,1024]{1,0} convert(%x)\n  ROOT %z = bf16[4096]{0} bitcast(%y)",
            "bf16[4096]",
            FLOAT32 + BFLOAT16,
        ),
        (
            "%y = f32[4096]{0} bitcast(%x)\n  ROOT %z = bf16[4096]{0} convert(%y)",
            "bf16[4096]",
            FLOAT32 + BFLOAT16,
        ),
        ("ROOT %y = f32[4096]{0} reshape(%x)", "f32[4096]", 2 * FLOAT32),
        (
            "%y = bf16[4,1024]{1,0} convert(%x)\n  ROOT %z = (bf16[4,1024]{1,0}) tuple(%y)",
            "(bf16[4,1024])",
            FLOAT32 + BFLOAT16,
        ),
        (  # The cast of the whole stack with one layer replaced: nothing is in place.
            "%y = bf16[4,1024]{1,0} convert(%x)\n  %layer = bf16[1,1024]{1,0} constant({...})\n"
            "  %i = s32[] constant(1)\n"
            "  ROOT %z = bf16[4,1024]{1,0} dynamic-update-slice(%y, %layer, %i, %i)",
            "bf16[4,1024]",
            FLOAT32 + BFLOAT16,
        ),
        (
            "%y = bf16[4,1024]{1,0} convert(%x)\n  ROOT %z = bf16[1,1024]{1,0} slice(%y), slice={[2:3], [0:1024]}",
            "bf16[1,1024]",
            (FLOAT32 + BFLOAT16) // 4,
        ),
        (  # What finds the largest magnitude of one layer's weights.
            "%y = f32[4,1024]{1,0} abs(%x)\n  ROOT %z = f32[1,1024]{1,0} slice(%y), slice={[2:3], [0:1024]}",
            "f32[1,1024]",
            2 * FLOAT32 // 4,
        ),
    ],
    ids=[
        "cast",
        "cast, viewed",
        "view, cast",
        "view",
        "cast in a tuple",
        "cast, updated",
        "layer of a cast",
        "layer of magnitudes",
    ],
)
def test_a_fusion_reads_what_its_results_need(body: str, result: str, moved: int) -> None:
    text = f"""HloModule m

%fused (x: f32[4,1024]) -> {result} {{
  %x = f32[4,1024]{{1,0}} parameter(0)
  {body}
}}

ENTRY %main (x: f32[4,1024]) -> {result} {{
  %x = f32[4,1024]{{1,0}} parameter(0)
  ROOT %y = {result} fusion(%x), kind=kLoop, calls=%fused
}}
"""
    assert count(text) == moved


def compile_for_h200(function: Any, *shapes: tuple[tuple[int, ...], Any]) -> str:
    mesh = Mesh(np.array(gpu_topology("h200", gpus_per_host=1)), ("x",), axis_types=(AxisType.Auto,))
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P())) for shape, dtype in shapes]
    # Kernels in Pallas ask the mesh for which GPU they are.
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    lowered = topology.lower_without_gpu(jax.jit(mapped), *arrays)
    return str(topology.compile_without_gpu(lowered).as_text())


def test_a_compiled_cast_reads_all_that_it_casts() -> None:
    """That of a model's embedding table, which XLA puts into a fusion of its own."""
    text = compile_for_h200(lambda table: table.astype(jnp.bfloat16), ((128_256, 4096), jnp.float32))
    assert "wrapped_convert" in text
    assert count(text) == (4 + 2) * 128_256 * 4096
