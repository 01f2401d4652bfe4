"""4-bit NormalFloat: the published table, two codes per byte, and rounding errors."""

import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxopt_llm.model.linear import quantised

pytestmark = pytest.mark.core


def test_the_table_is_that_of_the_paper() -> None:
    """Section 3 and appendix E: quantiles of a normal distribution, one more above 0 than below, the largest is 1."""
    quantile = statistics.NormalDist().inv_cdf
    above = [quantile(p) for p in np.linspace(0.9677083, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(0.9677083, 0.5, 8)[:-1]]
    expected = np.array(sorted([*above, 0.0, *below])) / max(above)
    np.testing.assert_allclose(quantised.TABLE, expected, atol=2e-7)


def test_two_codes_per_byte_index_the_table() -> None:
    """The values have the codes 0 to 15 in the first half, and 15 to 0 in the second."""
    codes = np.array([i | (15 - i) << 4 for i in range(16)] * 2, np.uint8)
    scales = np.array([2.0, 3.0, 5.0, 7.0], np.float32)
    values = np.concatenate([quantised.TABLE, quantised.TABLE, quantised.TABLE[::-1], quantised.TABLE[::-1]])
    expected = values * np.repeat(scales, 16)
    np.testing.assert_array_equal(quantised.decode(codes, scales, None, -1), expected)
    found, largest, tops = quantised.encode(jnp.tile(expected.reshape(4, 16), (1, 4)).reshape(-1), -1, double=False)
    np.testing.assert_array_equal(
        quantised.decode(found, largest, tops, -1), np.tile(expected.reshape(4, 16), 4).reshape(-1)
    )
    assert found.shape == (128,) and largest.tolist() == scales.tolist()


@pytest.mark.parametrize("dim", [-1, -2, -3])
@pytest.mark.parametrize("double", [False, True])
def test_values_are_rounded_to_the_nearest_value_of_their_block(dim: int, double: bool) -> None:
    random = np.random.default_rng(0)
    array = np.moveaxis(random.normal(size=(3, 4, 256)) * random.uniform(0.01, 100, (3, 4, 1)), -1, dim)
    array = array.astype(np.float32)
    with jax.debug_nans(True):
        parts = quantised.encode(jnp.asarray(array), dim, double)
    found = np.moveaxis(np.asarray(quantised.decode(*parts, dim)), dim, -1).reshape(3, 4, 4, 64)
    blocks = np.moveaxis(array, dim, -1).reshape(3, 4, 4, 64)
    scales = np.moveaxis(np.asarray(parts[1]), dim, -1)[..., None]
    if double:
        assert scales.dtype == np.uint8 and scales.max() == quantised.MAX_CODE
        scales = scales * np.moveaxis(np.asarray(parts[2]), dim, -1)[..., None] / quantised.MAX_CODE
        largest = np.abs(blocks).max(-1, keepdims=True)
        assert np.all(np.abs(scales - largest) <= 1.001 * largest.max(axis=2, keepdims=True) / 2 / quantised.MAX_CODE)
    levels = scales[..., None] * quantised.TABLE  # [3, 4, blocks, 1, 16]
    nearest = np.take_along_axis(levels, np.abs(blocks[..., None] - levels).argmin(-1)[..., None], -1)[..., 0]
    np.testing.assert_allclose(found, nearest, rtol=1e-6)


def error(array: Any, double: bool) -> float:
    found = quantised.decode(*quantised.encode(array, -1, double), -1)
    return float(jnp.linalg.norm(found - array) / jnp.linalg.norm(array))


def test_error_of_normal_values_with_and_without_double_quantisation() -> None:
    array = jax.random.normal(jax.random.key(0), (256, 4096))
    assert error(array, False) == pytest.approx(0.092, abs=0.001)
    assert error(array, True) == pytest.approx(error(array, False), rel=0.01)


def test_zeros_are_exact() -> None:
    """One block is zero, and one whole group of double quantisation."""
    array = np.ones((3, 192), np.float32)
    array[0, :64] = array[2] = 0
    with jax.debug_nans(True):
        found = quantised.decode(*quantised.encode(jnp.asarray(array), -1, True), -1)
    np.testing.assert_allclose(found, array, rtol=1e-6)


@pytest.mark.parametrize("size, values", [(4096, 64), (96, 32), (48, 16), (40, None), (8, None)])
def test_the_block_size_is_the_largest_that_divides(size: int, values: int | None) -> None:
    assert quantised.block_size(size) == values
