"""A ring on simulated devices computes what one device does with all keys, of any spans."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxopt_llm.kernels import attention_xla
from jaxopt_llm.kernels.ring import Ring
from jaxopt_llm.kernels.spans import Form, Spans

pytestmark = pytest.mark.core

DEVICES, LENGTH, FORM = 4, 24, Form(0.5)


def test_a_ring_is_the_whole_and_what_sees_nothing_is_zero() -> None:
    random = np.random.default_rng(0)
    q, k, v, gradient = (random.normal(size=(2, LENGTH, heads, 4)).astype(np.float32) for heads in (4, 2, 2, 4))
    first = random.integers(-3, LENGTH, (2, LENGTH)).astype(np.int32)
    spans = Spans(first, first + random.integers(-4, 12, first.shape).astype(np.int32))
    blind = ~np.asarray(spans.visible(jnp.arange(LENGTH))).any(axis=-1)
    assert 3 < blind.sum() < LENGTH

    def both(kernel: Any, *arrays: Any) -> tuple[jax.Array, ...]:
        q, k, v, gradient, spans = arrays
        out, log_sum = kernel.forward(FORM, q, k, v, spans)
        mean = jnp.einsum("BSHK,BSHK->BHS", gradient, out)
        return out, log_sum, *kernel.backward(FORM, q, k, v, spans, log_sum, mean, gradient)

    mesh = jax.make_mesh((DEVICES,), ("context",), (AxisType.Auto,), devices=jax.devices("cpu")[:DEVICES])
    rows, sums = PartitionSpec(None, "context"), PartitionSpec(None, None, "context")
    around = jax.shard_map(
        functools.partial(both, Ring(attention_xla, "context")),
        mesh=mesh,
        in_specs=rows,
        out_specs=(rows, sums, rows, rows, rows),
        check_vma=False,
    )
    found, expected = jax.jit(around)(q, k, v, gradient, spans), both(attention_xla, q, k, v, gradient, spans)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)
    assert not found[0][blind].any() and np.isinf(np.swapaxes(found[1], 1, 2)[blind]).all()
