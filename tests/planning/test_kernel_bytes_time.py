"""Time of the kernels of experts, in a program compiled for an H200."""

import jax
import jax.numpy as jnp
import pytest
from test_kernel_bytes import compile_for_h200

from jaxopt_llm.compiler import hlo
from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.compiler.instructions import parse_module
from jaxopt_llm.kernels.grouped_matmul import KERNELS, multiply_groups
from jaxopt_llm.planning.kernel_bytes import estimate_kernel, list_fused, walk_kernels
from jaxopt_llm.planning.search import grouped_rate, roofline

H200 = CHIPS["h200"]
ROWS, EXPERTS, WIDTH, INNER = 16_384, 8, 2048, 4096
FILLED = ROWS // 2  # of the rows that there is room for


def test_grouped_matmuls_take_what_was_measured() -> None:
    def loss(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        with hlo.filled_rows_scope(FILLED, ROWS):
            y = multiply_groups(KERNELS["pallas"], x.dtype, x, w, sizes)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    text = compile_for_h200(
        jax.grad(loss, argnums=(0, 1)),
        ((ROWS, WIDTH), jnp.bfloat16),
        ((EXPERTS, WIDTH, INNER), jnp.bfloat16),
        ((EXPERTS,), jnp.int32),
    )
    module = parse_module(text)
    flops = 2 * FILLED * WIDTH * INNER
    # Rows that are filled are read, and all rows are written.
    matrices, read, written = EXPERTS * WIDTH * INNER, (FILLED * WIDTH, FILLED * INNER), (ROWS * WIDTH, ROWS * INNER)
    elements = {
        "forward": read[0] + matrices + written[1],
        "dx": read[1] + matrices + written[0],
        "dw": sum(read) + matrices,
    }
    found = {}
    for computation, kernel, times in walk_kernels(module):
        if grouped := hlo.grouped_matmul(computation, kernel):
            cost = estimate_kernel(module, computation, kernel, list_fused(module, kernel), H200)
            assert (cost.flops, grouped.groups, times) == (flops, EXPERTS, 1)
            assert cost.bytes == pytest.approx(2 * elements[grouped.leg], rel=1e-3)  # and the list of tiles
            found[grouped.leg] = cost.seconds
    groups = grouped_rate.Groups(FILLED / EXPERTS, WIDTH, INNER)
    expected = {leg: grouped_rate.find_efficiency(H200, leg, groups) for leg in grouped_rate.LEGS}
    assert max(expected.values()) < 0.85 * roofline.MATMUL_EFFICIENCY and len(set(expected.values())) == 3
    peak = H200.peak_flops["bfloat16"]
    assert found == pytest.approx({leg: flops / (share * peak) for leg, share in expected.items()})
