"""Grouped matmul by both implementations against float64: products, both gradients and rejected calls.

Pallas's kernels run in its interpreter. Tests of the kernels only are in tests/kernels/test_grouped_matmul_pallas.py.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxopt_llm.kernels import grouped_matmul_pallas
from jaxopt_llm.kernels.grouped_matmul import OneByOne, XlaProducts, lax, multiply_groups
from jaxopt_llm.kernels.grouped_matmul_pallas import Blocks

pytestmark = pytest.mark.core

NAMES = ("y", "dx", "dw")
ROWS, INPUTS, OUTPUTS = 45, 19, 21  # not multiples of any block


@dataclass(frozen=True)
class Interpreted:
    """Pallas's kernels in the interpreter, for any device."""

    blocks: Blocks

    @property
    def forward(self) -> Any:
        return functools.partial(grouped_matmul_pallas.forward, blocks=self.blocks, interpret=True)

    @property
    def weight_gradient(self) -> Any:
        return functools.partial(grouped_matmul_pallas.weight_gradient, blocks=self.blocks, interpret=True)


IMPLEMENTATIONS = {"xla": XlaProducts(), "one by one": OneByOne(), "pallas": Interpreted(Blocks(8, 16, 8, 4, 2))}

SIZES = {
    "cut blocks": (10, 22, 13),
    "whole blocks": (16, 8, 21),
    "an empty one first": (0, 20, 25),
    "two empty ones between": (20, 0, 0, 25),
    "empty ones last": (20, 25, 0, 0),
    "all rows in one": (0, 45, 0),
    "one group": (45,),
    "one row each": (1,) * 45,
    "one row left": (20, 24),
    "a block left": (5, 0, 32),
    "none": (0, 0, 0),
}


@functools.cache
def run(implementation: Any, dtype: Any = None) -> Any:
    """Return a function of (x, w, dy, sizes) with the results in NAMES. dtype: of the product, x's by default."""
    whole = functools.partial(forward_and_backward, implementation, dtype)
    return jax.jit(whole, compiler_options=toy.QUICK_COMPILE)


def forward_and_backward(implementation: Any, dtype: Any, x: Any, w: Any, dy: Any, sizes: Any) -> tuple[jax.Array, ...]:
    y, pull = jax.vjp(lambda x, w: multiply_groups(implementation, dtype or x.dtype, x, w, sizes), x, w)
    return y, *pull(dy.astype(y.dtype))


def arrays(
    sizes: tuple[int, ...], rows: int = ROWS, inputs: int = INPUTS, outputs: int = OUTPUTS, dtype: Any = np.float32
) -> list[np.ndarray]:
    """Make x, w, dy and sizes, with NaN after the last group."""
    random = np.random.default_rng(rows)
    shapes = (rows, inputs), (len(sizes), inputs, outputs), (rows, outputs)
    x, w, dy = (random.normal(size=shape).astype(dtype) for shape in shapes)
    x[sum(sizes) :], dy[sum(sizes) :] = np.nan, np.nan
    return [x, w, dy, np.array(sizes, np.int32)]


def expected(x: np.ndarray, w: np.ndarray, dy: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, ...]:
    """Compute the results in NAMES in float64."""
    x, w, dy = (each.astype(np.float64) for each in (x, w, dy))
    y, dx, dw = np.zeros((len(x), w.shape[2])), np.zeros_like(x), np.zeros_like(w)
    ends = np.cumsum(sizes)
    for group, rows in enumerate(map(slice, ends - sizes, ends)):
        y[rows], dx[rows], dw[group] = x[rows] @ w[group], dy[rows] @ w[group].T, x[rows].T @ dy[rows]
    return y, dx, dw


def assert_equal(found: Any, case: Any, tolerance: float = 1e-5) -> None:
    left = slice(case[-1].sum(), None)
    for name, got, want in zip(NAMES, found, expected(*case), strict=True):
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=name)
        assert name == "dw" or not got[left].any()
        assert name != "dw" or not got[case[-1] == 0].any()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_product_and_gradients_match_the_reference(name: str, sizes: str) -> None:
    case = arrays(SIZES[sizes])
    assert_equal(run(IMPLEMENTATIONS[name])(*case), case)


@pytest.mark.parametrize(
    "sizes, rows, inputs, outputs",
    [
        pytest.param((1,), 1, 1, 1, id="one row of one number"),
        pytest.param((0, 0, 1, 0), 1, 19, 21, id="one row"),
        pytest.param((0, 0), 1, 19, 21, id="one row of no group"),
        pytest.param((0, 0), 0, 19, 21, id="no row"),
        pytest.param((9, 0, 150, 2), 170, 40, 72, id="more tiles than a band"),
        pytest.param((16, 16), 32, 16, 32, id="whole blocks of everything"),
    ],
)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_shapes(name: str, sizes: tuple[int, ...], rows: int, inputs: int, outputs: int) -> None:
    case = arrays(sizes, rows, inputs, outputs)
    assert_equal(run(IMPLEMENTATIONS[name])(*case), case, tolerance=3e-5)


@pytest.mark.parametrize("seed", range(4))
def test_random_shapes(seed: int) -> None:
    random = np.random.default_rng(seed)
    groups = int(random.integers(2, 9))
    sizes = random.multinomial(random.integers(0, 90), random.dirichlet(np.full(groups, 0.3)))
    rows, inputs, outputs = sizes.sum() + random.integers(1, 20), *random.integers(1, 50, 2)
    case = arrays(tuple(map(int, sizes)), int(rows), int(inputs), int(outputs))
    for implementation in IMPLEMENTATIONS.values():
        assert_equal(run(implementation)(*case), case, tolerance=3e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_rounds_no_more_than_xla(dtype: Any) -> None:
    """Allow 1.2 times xla's distance from float64, from the same operands.

    There are many blocks, whose sums must stay in float32.
    """
    case = arrays((230, 0, 66), rows=300, inputs=200, outputs=260, dtype=dtype)
    found, others = (run(each)(*case) for each in (Interpreted(Blocks(64, 128, 16, 4, 2)), XlaProducts()))
    for name, got, other, want in zip(NAMES, found, others, expected(*case), strict=True):
        assert got.dtype == other.dtype == dtype
        assert toy.distance(got, want) <= 1.2 * toy.distance(other, want), name


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_wider_result_is_not_rounded_before(name: str) -> None:
    """Check the product, and a weight gradient in the dtype of the gradient reduction."""
    case = x, _, dy, sizes = arrays(SIZES["cut blocks"], inputs=100, dtype=jnp.bfloat16)
    y, dx, dw = run(IMPLEMENTATIONS[name], jnp.float32)(*case)
    wide = IMPLEMENTATIONS[name].weight_gradient(*map(jnp.asarray, (x, dy, sizes)), jnp.float32)
    assert (y.dtype, dx.dtype, dw.dtype, wide.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16, jnp.float32)
    want, _, want_wide = expected(*case)
    assert toy.distance(y, want) < 1e-6 and toy.distance(wide, want_wide) < 1e-6


def test_rows_after_the_last_group_may_be_undefined_in_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate an XLA that leaves these rows of the product undefined, and sums over them."""
    product = lax.ragged_dot_general

    def other(x: Any, y: Any, sizes: Any, *rest: Any, **more: Any) -> Any:
        out = product(x, y, sizes, *rest, **more)
        if out.ndim == 2:
            return jnp.where(jnp.arange(len(out))[:, None] < jnp.sum(sizes), out, jnp.nan)
        return out + 0 * jnp.sum(x) + 0 * jnp.sum(y)

    monkeypatch.setattr(lax, "ragged_dot_general", other)
    case = arrays(SIZES["a block left"])
    assert_equal(run.__wrapped__(XlaProducts())(*case), case)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_devices_that_keep_their_own_gradients(name: str) -> None:
    """Multiply several sorted batches, each with its own sizes, by one set of matrices, inside a shard_map."""
    cases = [
        arrays((*SIZES[each], 0)[:4]) for each in ("cut blocks", "all rows in one", "none", "two empty ones between")
    ]
    x, dy, sizes = (np.stack([case[i] for case in cases]) for i in (0, 2, 3))
    w = cases[0][1]
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("data",), axis_types=(AxisType.Auto,))
    region = jax.shard_map(
        functools.partial(forward_and_backward, IMPLEMENTATIONS[name], None),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    batched = jax.vmap(region, in_axes=(0, None, 0, 0), spmd_axis_name="data")
    found = jax.jit(batched, compiler_options=toy.QUICK_COMPILE)(x, w, dy, sizes)
    assert found[0].sharding.spec[:1] == ("data",)
    for i in range(len(cases)):
        assert_equal([each[i] for each in found], (x[i], w, dy[i], sizes[i]))
