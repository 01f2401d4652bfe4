"""Attention of a sequence over simulated devices is what one device makes of all keys, of any spans."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import AxisType, PartitionSpec

from jaxopt_llm.kernels import attention_pallas, attention_xla
from jaxopt_llm.kernels.all_to_all import AllToAll
from jaxopt_llm.kernels.attention_pallas_kernels import Tile
from jaxopt_llm.kernels.ring import Ring, deal
from jaxopt_llm.kernels.spans import Form, Spans, of_documents

pytestmark = pytest.mark.core

DEVICES, LENGTH, FORM = 4, 24, Form(0.5)


def assert_is_the_whole(exchange: Any, kernel: Any, spans: Spans) -> list[jax.Array]:
    """What `exchange` makes with the kernel of random arrays is what xla makes of them on one device. Returns the
    results: out, log_sum and gradients."""
    random = np.random.default_rng(0)
    q, k, v, gradient = (random.normal(size=(2, LENGTH, heads, 4)).astype(np.float32) for heads in (8, 4, 4, 8))

    def both(kernel: Any, *arrays: Any) -> tuple[jax.Array, ...]:
        q, k, v, gradient, spans = arrays
        out, log_sum = kernel.forward(FORM, q, k, v, spans)
        mean = jnp.einsum("BSHK,BSHK->BHS", gradient, out)
        return out, log_sum, *kernel.backward(FORM, q, k, v, spans, log_sum, mean, gradient)

    dealt = deal(jnp.arange(LENGTH)[None], DEVICES)[0] if exchange is Ring else jnp.arange(LENGTH)
    arrays = q, k, v, gradient, spans
    mesh = jax.make_mesh((DEVICES,), ("context",), (AxisType.Auto,), devices=jax.devices("cpu")[:DEVICES])
    rows, sums = PartitionSpec(None, "context"), PartitionSpec(None, None, "context")
    around = jax.shard_map(
        functools.partial(both, exchange(kernel, "context")),
        mesh=mesh,
        in_specs=rows,
        out_specs=(rows, sums, rows, rows, rows),
        check_vma=False,
    )
    found = jax.jit(around)(*jax.tree.map(lambda x: x[:, dealt], arrays))
    natural = jnp.argsort(dealt)
    found = [x[:, :, natural] if number == 1 else x[:, natural] for number, x in enumerate(found)]
    for got, want in zip(found, both(attention_xla, *arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)
    return found


@pytest.mark.parametrize("exchange", [Ring, AllToAll])
def test_it_is_the_whole_and_what_sees_nothing_is_zero(exchange: Any) -> None:
    random = np.random.default_rng(0)
    first = random.integers(-3, LENGTH, (2, LENGTH)).astype(np.int32)
    spans = Spans(first, first + random.integers(-4, 12, first.shape).astype(np.int32))
    blind = ~np.asarray(spans.visible(jnp.arange(LENGTH))).any(axis=-1)
    assert 3 < blind.sum() < LENGTH
    found = assert_is_the_whole(exchange, attention_xla, spans)
    assert not found[0][blind].any() and np.isinf(np.swapaxes(found[1], 1, 2)[blind]).all()


@pytest.mark.parametrize("exchange", [Ring, AllToAll])
def test_a_flash_kernel_on_each_device(exchange: Any) -> None:
    """Pallas's, interpreted, over packed documents and a window that begins and ends within a device's part."""
    tile = Tile(4, 4, 4, 2)
    settings: Any = {"blocks": attention_pallas.Blocks(tile, tile, tile), "interpret": True}
    kernel = SimpleNamespace(
        forward=functools.partial(attention_pallas.forward, **settings),
        backward=functools.partial(attention_pallas.backward, **settings),
    )
    ids = toy.packed(rows=2, length=LENGTH).segment_ids
    assert (ids[:, -1] > 1).all()
    assert_is_the_whole(exchange, kernel, of_documents(jnp.asarray(ids)).within(7))


def test_each_device_of_a_ring_has_the_same_to_do_at_every_step() -> None:
    """Under the causal order: queries times keys that they see, of its own part and of every other."""
    row = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    rows = deal(row, DEVICES).reshape(DEVICES, 1, -1)
    parts = [rows[owner] for owner in range(DEVICES)]

    def seen(device: int, owner: int) -> int:
        return int((parts[owner][:, None, :] <= parts[device][:, :, None]).sum())

    own = {seen(device, device) for device in range(DEVICES)}
    others = {seen(a, b) for a in range(DEVICES) for b in range(DEVICES) if a != b}
    assert len(own) == len(others) == 1
    assert others == {(LENGTH // DEVICES) ** 2 // 2}
