"""Attention over a sequence split over simulated devices, compared with attention to all keys on one device."""

import functools
from types import SimpleNamespace
from typing import Any

import cudnn_emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import AxisType, PartitionSpec

from jaxopt_llm.kernels import attention_cudnn, attention_pallas, attention_xla
from jaxopt_llm.kernels.attention_types import (
    AttentionParameters,
    AttentionResiduals,
    KeyRanges,
    Tile,
    Tiles,
    make_document_ranges,
)
from jaxopt_llm.kernels.attention_wrappers import AllToAll
from jaxopt_llm.kernels.ring import Ring, to_zigzag

pytestmark = pytest.mark.core

DEVICES, LENGTH, PARAMETERS = 4, 24, AttentionParameters(0.5)


def assert_matches_one_device(
    exchange: Any, kernel: Any, key_ranges: KeyRanges, parameters: AttentionParameters = PARAMETERS
) -> list[jax.Array]:
    """Compare `exchange` with the kernel, on random arrays, with xla on one device.

    Returns out, log_sum and the gradients.
    """
    random, (rows, length) = np.random.default_rng(0), key_ranges.first.shape
    q, k, v, gradient = (random.normal(size=(rows, length, heads, 4)).astype(np.float32) for heads in (8, 4, 4, 8))

    def both(kernel: Any, *arrays: Any) -> tuple[jax.Array, ...]:
        q, k, v, gradient, key_ranges = arrays
        out, log_sum = kernel.forward(parameters, q, k, v, key_ranges)
        residuals = AttentionResiduals(q, k, v, key_ranges, log_sum)
        if kernel.reads_out:
            residuals = residuals._replace(out=out)
        else:
            residuals = residuals._replace(delta=jnp.einsum("BSHK,BSHK->BHS", gradient, out))
        return out, log_sum, *kernel.backward(parameters, residuals, gradient)

    order = to_zigzag(jnp.arange(length)[None], DEVICES)[0] if exchange is Ring else jnp.arange(length)
    arrays = q, k, v, gradient, key_ranges
    mesh = jax.make_mesh((DEVICES,), ("context",), (AxisType.Auto,), devices=jax.devices("cpu")[:DEVICES])
    rows, sums = PartitionSpec(None, "context"), PartitionSpec(None, None, "context")
    on_devices = jax.shard_map(
        functools.partial(both, exchange(kernel, "context")),
        mesh=mesh,
        in_specs=rows,
        out_specs=(rows, sums, rows, rows, rows),
        check_vma=False,
    )
    found = jax.jit(on_devices)(*jax.tree.map(lambda x: x[:, order], arrays))
    natural = jnp.argsort(order)
    found = [x[:, :, natural] if index == 1 else x[:, natural] for index, x in enumerate(found)]
    for got, want in zip(found, both(attention_xla, *arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)
    return found


@pytest.mark.parametrize("exchange", [Ring, AllToAll])
def test_any_key_ranges_match_one_device_and_empty_ones_give_zero(exchange: Any) -> None:
    random = np.random.default_rng(0)
    first = random.integers(-3, LENGTH, (2, LENGTH)).astype(np.int32)
    key_ranges = KeyRanges(first, first + random.integers(-4, 12, first.shape).astype(np.int32))
    blind = ~np.asarray(key_ranges.make_mask(jnp.arange(LENGTH))).any(axis=-1)
    assert 3 < blind.sum() < LENGTH
    found = assert_matches_one_device(exchange, attention_xla, key_ranges)
    assert not found[0][blind].any() and np.isinf(np.swapaxes(found[1], 1, 2)[blind]).all()


@pytest.mark.parametrize("exchange", [Ring, AllToAll])
def test_a_flash_kernel_on_each_device(exchange: Any) -> None:
    """Run Pallas's kernel, interpreted, on packed documents and a window that begins and ends within a part."""
    tile = Tile(4, 4, 4, 2)
    settings: Any = {"blocks": Tiles(tile, tile, tile), "interpret": True}
    kernel = SimpleNamespace(
        reads_out=attention_pallas.reads_out,
        skips_keys=attention_pallas.skips_keys,
        forward=functools.partial(attention_pallas.forward, **settings),
        backward=functools.partial(attention_pallas.backward, **settings),
    )
    ids = toy.packed(rows=2, length=LENGTH).segment_ids
    assert (ids[:, -1] > 1).all()
    assert_matches_one_device(exchange, kernel, make_document_ranges(jnp.asarray(ids)).limit_to_window(7))


# Lengths of the documents of each row. A chunk has 6 rows: documents of several chunks, of parts of two, of a whole
# one, within one, and from the first chunk to the last.
DOCUMENTS = {
    "one document": [[48], [48]],
    "several": [[7, 1, 20, 9, 11], [6, 6, 30, 4, 2]],
    "many": [[5, 3, 2, 4, 10, 8, 6, 7, 1, 2], [47, 1]],
}


def documents(name: str) -> jax.Array:
    """Return the segment ids [2, 48]."""
    return jnp.stack([jnp.repeat(jnp.arange(len(row)), jnp.array(row)) for row in DOCUMENTS[name]])


@pytest.mark.parametrize("name", list(DOCUMENTS))
@pytest.mark.parametrize("by", ["xla", "cudnn"])
def test_a_causal_ring_of_a_kernel_that_skips_no_keys(by: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own part in a causal call, the others in rectangles: with cuDNN without a mask, or by lengths."""
    kernel, most = {"xla": attention_xla, "cudnn": attention_cudnn}[by], max(map(len, DOCUMENTS[name]))
    directions = cudnn_emulator.emulate(monkeypatch)
    parameters = AttentionParameters(0.5, keys_after=0, segments=most)
    assert_matches_one_device(Ring, kernel, make_document_ranges(documents(name)), parameters)
    assert ({*directions} == {"forward", "backward"}) == (by == "cudnn")


def test_a_causal_ring_of_xla_with_a_window() -> None:
    parameters = AttentionParameters(0.5, keys_before=8, keys_after=0, window=9)
    assert_matches_one_device(
        Ring, attention_xla, make_document_ranges(documents("several")).limit_to_window(9), parameters
    )


def test_rectangles_form_half_of_the_scores_of_another_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 × 6 rows of a part and as many keys, and all those of its own."""
    calls: list[tuple[int, ...]] = []
    forward = attention_xla.forward

    def record(parameters: AttentionParameters, q: jax.Array, k: jax.Array, *of: Any) -> Any:
        calls.append((q.shape[0] * q.shape[1] * k.shape[1], parameters.keys_after, parameters.rectangles))
        return forward(parameters, q, k, *of)

    monkeypatch.setattr(attention_xla, "forward", record)
    parameters = AttentionParameters(0.5, keys_after=0)
    mesh = jax.sharding.AbstractMesh((DEVICES,), ("context",), axis_types=(AxisType.Auto,))
    ring, rows = Ring(attention_xla, "context"), PartitionSpec(None, "context")
    run = jax.shard_map(
        functools.partial(ring.forward, parameters),
        mesh=mesh,
        in_specs=rows,
        out_specs=(rows, PartitionSpec(None, None, "context")),
        check_vma=False,
    )
    x, row = jax.ShapeDtypeStruct((1, 48, 2, 4), jnp.float32), jax.ShapeDtypeStruct((1, 48), jnp.int32)
    jax.eval_shape(run, x, x, x, KeyRanges(row, row))
    assert calls == [(144, 0, False), (72, None, True), (72, None, True)]


def test_each_device_of_a_ring_has_the_same_work_at_every_step() -> None:
    """Count visible pairs of queries and keys under the causal mask, for the device's own part and every other."""
    row = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    rows = to_zigzag(row, DEVICES).reshape(DEVICES, 1, -1)
    parts = [rows[owner] for owner in range(DEVICES)]

    def count_visible(device: int, owner: int) -> int:
        return int((parts[owner][:, None, :] <= parts[device][:, :, None]).sum())

    own_parts = {count_visible(device, device) for device in range(DEVICES)}
    other_parts = {count_visible(a, b) for a in range(DEVICES) for b in range(DEVICES) if a != b}
    assert len(own_parts) == len(other_parts) == 1
    assert other_parts == {(LENGTH // DEVICES) ** 2 // 2}
