"""Blocks of codes: rounding, and moves between devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.compiler import hlo
from jaxopt_llm.config import MeshConfig
from jaxopt_llm.parallel.codes import Bits, decode, encode, find_block_size, move_blocks
from jaxopt_llm.parallel.mesh import make_mesh


def round_to_blocks(array: np.ndarray, values: int, bits: int) -> np.ndarray:
    """Round to the nearest of the codes of each block, in NumPy."""
    split = array.reshape(*array.shape[:-1], -1, values)
    scale = np.abs(split).max(-1, keepdims=True) / (2 ** (bits - 1) - 1)
    return (np.round(split / np.where(scale > 0, scale, 1)) * scale).reshape(array.shape)


@pytest.mark.core
@pytest.mark.parametrize("bits", [8, 4])
def test_each_value_is_rounded_to_the_nearest_code_of_its_block(bits: Bits) -> None:
    array = np.random.default_rng(0).normal(size=(3, 128)).astype(np.float32)
    array[0] *= 1e3  # a block of its own scale
    array[1, :32] = 0
    codes, scales = encode(jnp.asarray(array), 32, bits)
    assert (codes.dtype, codes.shape) == ((jnp.int8, (3, 128)) if bits == 8 else (jnp.uint8, (3, 64)))
    assert (scales.dtype, scales.shape) == (jnp.float32, (3, 4))
    found = np.asarray(decode(codes, scales, bits))
    np.testing.assert_allclose(found, round_to_blocks(array, 32, bits), rtol=1e-6)
    assert not np.any(found[1, :32])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_block_that_is_not_finite_becomes_nan(bits: Bits, value: float) -> None:
    array = np.ones((2, 64), np.float32)
    array[1, 40] = value
    found = np.asarray(decode(*encode(jnp.asarray(array), 32, bits), bits))
    np.testing.assert_array_equal(np.isnan(found).any(-1), [False, True])
    np.testing.assert_allclose(found[1, :32], 1)


def test_block_sizes_divide_the_part_of_each_device() -> None:
    mesh = jax.sharding.AbstractMesh((2, 3), ("a", "b"))

    def find(size: int, *specs: PartitionSpec) -> int | None:
        return find_block_size((6, size), *(NamedSharding(mesh, spec) for spec in specs))

    assert find(256, PartitionSpec("a"), PartitionSpec()) == 128
    assert find(192, PartitionSpec(None, "a"), PartitionSpec()) == 32  # 96 values on each device
    assert find(192, PartitionSpec("a"), PartitionSpec(None, "b")) == 64
    assert find(48, PartitionSpec("a"), PartitionSpec()) is None


@pytest.mark.core
@pytest.mark.parametrize("bits", [8, 4])
def test_a_move_sends_only_codes_and_scales(bits: Bits) -> None:
    mesh = make_mesh(MeshConfig(data=4, fsdp=2), jax.devices("cpu")[:8])
    specs = PartitionSpec("data", None, "fsdp"), PartitionSpec(None, "data", "fsdp")
    before, after = (NamedSharding(mesh, spec) for spec in specs)
    array = np.random.default_rng(0).normal(size=(4, 16, 256)).astype(np.float32)
    values = find_block_size(array.shape, before, after)
    assert values == 128
    placed, move = jax.device_put(array, before), jax.jit(move_blocks, static_argnums=(1, 2, 3, 4))
    moved = move(placed, before, after, values, bits)
    assert moved.sharding.is_equivalent_to(after, 3)
    np.testing.assert_allclose(np.asarray(moved), round_to_blocks(array, values, bits), rtol=1e-6)
    text = str(move.lower(placed, before, after, values, bits).compile().as_text())
    sent = hlo.list_collectives(text, mesh)
    assert {each.axes for each in sent} == {("data",)}
    coded = array.size // 8 * (bits / 8 + 4 / values)  # bytes of a device's part
    assert sum(each.wire_bytes * each.times for each in sent) == 3 / 4 * coded
