"""Gradients on eight devices are those of one device, for all kinds of operations that a loss can contain.

XLA divides each operation by a rule of its own, and a wrong rule gives a wrong gradient in silence. So that the next
one is found here, each operation reads a parameter, which `fsdp` or a rule over `tensor` divides.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.experimental.ode import odeint
from jax.scipy import linalg, special
from marks import slow

import jaxopt_llm
from jaxopt_llm.config import Config

pytestmark = pytest.mark.core

ROWS, D = 16, 8
Function = Callable[..., jax.Array]  # (parameter, rows of vectors or images) -> any array


@dataclass(frozen=True)
class Operation:
    """An operation with a parameter of this shape. image: whether it reads images [B, 6, 6, D], not vectors [B, D]."""

    shape: tuple[int, ...]
    function: Function
    image: bool = False

    def loss(self, parameter: jax.Array, batch: Any) -> jax.Array:
        result = self.function(parameter, batch["image" if self.image else "x"])
        if jnp.iscomplexobj(result):
            result = jnp.stack([result.real, result.imag])
        return jnp.mean((result.astype(jnp.float32) - 0.3) ** 2)


FAMILIES: dict[str, dict[str, Operation]] = {}


def family(name: str, shape: tuple[int, ...], image: bool = False, **functions: Function) -> None:
    """Add operations, with parameters of one shape."""
    known = FAMILIES.setdefault(name, {})
    known |= {key: Operation(shape, function, image) for key, function in functions.items()}


def ids(x: jax.Array, size: int = D) -> jax.Array:
    """Return an index below `size` for each row."""
    return jnp.abs(x[:, 0] * 100).astype(jnp.int32) % size


def positive(w: jax.Array) -> jax.Array:
    return jnp.abs(w) + 0.5


def definite(w: jax.Array) -> jax.Array:
    """Return a symmetric matrix with positive, distinct eigenvalues."""
    return w @ w.T + jnp.diag(1.0 + jnp.arange(w.shape[0]))


# --- products

family(
    "products",
    (D, D),
    matrix=lambda w, x: x @ w,
    left=lambda w, x: (w @ x.T).T,
    highest=lambda w, x: jnp.dot(x, w, precision="highest"),
    outer=lambda w, x: jnp.einsum("ni,jk->nijk", x, w)[:, 0],
    mapped=lambda w, x: jax.vmap(lambda row: w @ row)(x),
    summed_over_rows=lambda w, x: x.T @ (x @ w),
    gram=lambda w, x: (x @ w) @ (x @ w).T,
    contracted_twice=lambda w, x: jnp.einsum("ni,ij,nj->n", x, w, x),
    powers=lambda w, x: x @ jnp.linalg.matrix_power(w, 3),
    kronecker=lambda w, x: jnp.kron(w, x[:2]),
    convolved=lambda w, x: jax.vmap(functools.partial(jnp.convolve, mode="same"))(x, x @ w),
    attention=lambda w, x: jax.nn.dot_product_attention(*([(x @ w).reshape(4, 4, 2, 4)] * 3), is_causal=True),
)
family(
    "products",
    (D, D, D),
    batched=lambda w, x: jnp.einsum("nb,bij,nj->nbi", x, w, x),
    batched_in_highest_precision=lambda w, x: jnp.einsum("nb,bij,nj->nbi", x, w, x, precision="highest"),
    batched_after_a_function=lambda w, x: jnp.einsum("nb,bij,nj->nbi", x, jnp.tanh(w), x),
    batched_last=lambda w, x: jnp.einsum("nb,ijb->nib", x, w),
    bilinear=lambda w, x: jnp.einsum("ni,ijk,nj->nk", x, w, x),
    of_each_row=lambda w, x: jnp.einsum("nij,nj->ni", w[ids(x)], x),
    ragged=lambda w, x: lax.ragged_dot(x, w, jnp.bincount(ids(x), length=D)),
    ragged_uneven=lambda w, x: lax.ragged_dot(x, w, jnp.array([0, 7, 1, 0, 3, 0, 5, 0])),
)

# --- convolutions

NHWC = ("NHWC", "HWIO", "NHWC")


def convolve(x: jax.Array, w: jax.Array, groups: int = 1, **settings: Any) -> jax.Array:
    settings = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC} | settings
    return lax.conv_general_dilated(x, w, feature_group_count=groups, **settings)


def with_own_gradient(function: Function) -> Function:
    """Return a function with a custom gradient, which is twice its gradient."""
    wrapped = jax.custom_vjp(function)
    wrapped.defvjp(
        lambda w, x: jax.vjp(function, w, x), lambda pullback, dy: jax.tree.map(lambda each: 2 * each, pullback(dy))
    )
    return wrapped


def with_own_tangent(function: Function) -> Function:
    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(function, primals, jax.tree.map(lambda each: 2 * each, tangents)))
    return wrapped


def depthwise(w: jax.Array, x: jax.Array) -> jax.Array:
    return convolve(x, w, D)


def penalty(w: jax.Array, x: jax.Array) -> jax.Array:
    """Return the gradient by the images, as in a gradient penalty."""
    return jax.grad(lambda x: jnp.sum(jnp.tanh(depthwise(w, x))))(x)


family(
    "convolutions",
    (4, 3, D, 2 * D),
    image=True,
    plain=lambda w, x: convolve(x, w),
    strided=lambda w, x: convolve(x, w, window_strides=(2, 2), padding="VALID"),
    dilated=lambda w, x: convolve(x, w, rhs_dilation=(2, 1)),
    transposed=lambda w, x: lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=NHWC),
    transposed_kernel=lambda w, x: lax.conv_transpose(
        x, jnp.swapaxes(w, 2, 3), (2, 2), "SAME", dimension_numbers=NHWC, transpose_kernel=True
    ),
    of_each_row=lambda w, x: jax.vmap(lambda x, scale: convolve(x[None], w * scale)[0])(x, x[:, 0, 0, 0]),
    of_rows_in_pairs=lambda w, x: jax.vmap(lambda x, scale: convolve(x, w * scale))(
        x.reshape(8, 2, 6, 6, D), x[:8, 0, 0, 0]
    ),
    two_kernels=lambda w, x: jax.vmap(lambda w: convolve(x, w))(jnp.stack([w, w**2])),
    local=lambda w, x: lax.conv_general_dilated_local(
        x, jnp.tile(w.reshape(1, 1, -1, 2 * D), (6, 6, 1, 1)), (1, 1), "SAME", (4, 3), dimension_numbers=NHWC
    ),
    patches=lambda w, x: (
        lax.conv_general_dilated_patches(x, (4, 3), (1, 1), "SAME", dimension_numbers=NHWC) @ w.reshape(-1, 2 * D)
    ),
)
family(
    "grouped convolutions",
    (4, 3, 4, 2 * D),
    image=True,
    two_groups=lambda w, x: convolve(x, w, 2),
    strided=lambda w, x: convolve(x, w, 2, window_strides=(2, 2), padding="VALID"),
    dilated=lambda w, x: convolve(x, w, 2, rhs_dilation=(1, 2)),
    transposed=lambda w, x: convolve(x, w, 2, lhs_dilation=(2, 2), padding=((2, 2), (1, 2))),
    standardised=lambda w, x: convolve(x, (w - w.mean()) / w.std(), 2),
)
family(
    "grouped convolutions",
    (4, 3, 1, D),
    image=True,
    depthwise=depthwise,
    as_first_dimensions=lambda w, x: lax.conv_general_dilated(
        jnp.moveaxis(x, -1, 1), w.reshape(12, 1, D).T.reshape(D, 1, 4, 3), (1, 1), "SAME", feature_group_count=D
    ),
    jitted=lambda w, x: jax.jit(depthwise)(w * 2, x),
    rematerialised=lambda w, x: jax.checkpoint(depthwise)(w, x),
    in_a_branch=lambda w, x: lax.cond(x[0, 0, 0, 0] > 9, lambda: depthwise(w, x), lambda: depthwise(-w, x)),
    in_a_loop=lambda w, x: lax.fori_loop(0, 2, lambda _, x: depthwise(w, x), x),
    with_own_gradient=with_own_gradient(depthwise),
    with_own_tangent=with_own_tangent(depthwise),
    penalty=penalty,
    row_by_row=lambda w, x: lax.map(lambda row: depthwise(w, row[None])[0], x),
)
family(
    "grouped convolutions",
    (D, 4, 1, D),
    image=True,
    in_a_loop_over_layers=lambda w, x: lax.scan(lambda x, w: (depthwise(w[:, None], x), None), x, w)[0],
    causal_1d=lambda w, x: lax.conv_general_dilated(
        x.reshape(ROWS, 36, D), w[0], (1,), ((3, 0),), dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=D
    ),
    three_dimensions=lambda w, x: lax.conv_general_dilated(
        x.reshape(ROWS, 6, 3, 2, D),
        w[..., None, :],
        (1, 1, 1),
        "SAME",
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        feature_group_count=D,
    ),
    batch_groups=lambda w, x: lax.conv_general_dilated(
        x[..., :1], w[:4, :3], (1, 1), "SAME", dimension_numbers=NHWC, batch_group_count=4
    ),
)

# --- windows and cumulative operations

family(
    "windows",
    (D, D),
    image=True,
    max_pool=lambda w, x: nn.max_pool(x @ w, (2, 2), (2, 2)),
    overlapping_max_pool=lambda w, x: nn.max_pool(x @ w, (3, 3), (2, 2), padding="SAME"),
    min_pool=lambda w, x: -nn.max_pool(-x @ w, (3, 2)),
    avg_pool=lambda w, x: nn.avg_pool(x @ w, (2, 3), (1, 2), padding="SAME"),
    dilated=lambda w, x: lax.reduce_window(
        x @ w, 0.0, lax.add, (1, 2, 2, 2), (1, 1, 1, 2), "SAME", window_dilation=(1, 2, 2, 1)
    ),
    over_rows=lambda w, x: lax.reduce_window(x @ w, 0.0, lax.add, (3, 1, 1, 1), (1, 1, 1, 1), "SAME"),
    resized=lambda w, x: jax.image.resize(x @ w, (x.shape[0], 9, 4, D), "bilinear"),
    cubic=lambda w, x: jax.image.resize(x @ w, (x.shape[0], 9, 9, D), "cubic"),
    sampled=lambda w, x: jax.scipy.ndimage.map_coordinates(x[..., 0] @ jnp.ones((6, 4)), [jnp.ones(8)] * 3, 1) * w,
)
family(
    "cumulative",
    (D, D),
    cumsum=lambda w, x: jnp.cumsum(x @ w, axis=1),
    cumsum_of_rows=lambda w, x: jnp.cumsum(x @ w, axis=0),
    cumsum_of_the_weight=lambda w, x: x @ jnp.cumsum(w, axis=0),
    reverse=lambda w, x: lax.cumsum(x @ w, axis=0, reverse=True),
    cumprod=lambda w, x: jnp.cumprod(1 + 0.1 * x @ w, axis=0),
    cumprod_of_the_weight=lambda w, x: jnp.cumprod(w, axis=0),
    cummax=lambda w, x: lax.cummax(x @ w, axis=0),
    cummin=lambda w, x: lax.cummin(w, axis=1),
    cumlogsumexp=lambda w, x: lax.cumlogsumexp(x @ w, axis=0),
    cumlogsumexp_of_the_weight=lambda w, x: lax.cumlogsumexp(w, axis=0),
    associative_scan=lambda w, x: lax.associative_scan(
        lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (jax.nn.sigmoid(x @ w), x), axis=0
    )[1],
    associative_scan_of_the_weight=lambda w, x: lax.associative_scan(jnp.multiply, w + 1, axis=0),
    differences=lambda w, x: jnp.diff(x @ w, axis=0),
)

# --- order and indices

family(
    "order",
    (D, D),
    sort=lambda w, x: jnp.sort(x @ w, axis=1),
    sort_of_rows=lambda w, x: jnp.sort(x @ w, axis=0) * jnp.arange(ROWS)[:, None],
    sort_of_the_weight=lambda w, x: x @ jnp.sort(w, axis=0),
    sort_by_key=lambda w, x: lax.sort((x, x @ w), dimension=0, num_keys=1)[1] * jnp.arange(ROWS)[:, None],
    argsort=lambda w, x: jnp.take_along_axis(w, jnp.argsort(w, axis=0), axis=0) * jnp.arange(D)[:, None],
    top_k=lambda w, x: lax.top_k(x @ w, 3)[0],
    top_k_of_rows=lambda w, x: lax.top_k((x @ w).T, 3)[0],
    top_k_of_the_weight=lambda w, x: lax.top_k(w, 3)[0],
    approximate=lambda w, x: lax.approx_max_k(x @ w, 3)[0],
    median=lambda w, x: jnp.median(x @ w, axis=0),
    quantile=lambda w, x: jnp.quantile(w, 0.3, axis=0),
    best_expert=lambda w, x: (x @ w) * jax.nn.one_hot(jnp.argmax(x @ w, axis=1), D),
    sort_of_columns=lambda w, x: x[:, jnp.argsort(w[0])] * w[0],
)
family(
    "indices",
    (D, D),
    rows=lambda w, x: w[ids(x)],
    columns=lambda w, x: w[:, ids(x)],
    elements=lambda w, x: w[ids(x), ids(x[:, 1:])],
    out_of_bounds=lambda w, x: jnp.take(w, ids(x, 12), axis=0, mode="fill", fill_value=0.0),
    clipped=lambda w, x: w.at[ids(x, 12)].get(mode="clip"),
    along_an_axis=lambda w, x: jnp.take_along_axis(x @ w, ids(x)[:, None], axis=1),
    rows_of_activations=lambda w, x: (x @ w)[ids(x, ROWS)],
    chosen_by_a_constant=lambda w, x: (x @ w)[jnp.array([5, 5, 1, 3])],
    scatter_set=lambda w, x: w.at[jnp.array([5, 2])].set(x[:2]),
    scatter_of_the_weight=lambda w, x: jnp.zeros((12, D)).at[jnp.array([3, 9, 1, 0, 11, 7, 5, 2])].set(w),
    scatter_add=lambda w, x: w.at[ids(x)].add(x),
    scatter_add_of_rows=lambda w, x: jnp.zeros((D, D)).at[ids(x)].add(x @ w),
    scatter_multiply=lambda w, x: w.at[jnp.array([1, 4])].multiply(2 * x[:2]),
    scatter_max=lambda w, x: w.at[ids(x)].max(x),
    scatter_min_of_rows=lambda w, x: jnp.zeros((D, D)).at[ids(x)].min(x @ w),
    segment_sum=lambda w, x: jax.ops.segment_sum(x @ w, ids(x), D),
    segment_max=lambda w, x: jax.ops.segment_max(x @ w, ids(x, 2), 2),
    segment_softmax=lambda w, x: jnp.exp(x @ w) / jax.ops.segment_sum(jnp.exp(x @ w), ids(x), D)[ids(x)],
    messages=lambda w, x: jax.ops.segment_sum((x @ w)[ids(x, ROWS)], ids(x[:, 1:], ROWS), ROWS),
    dynamic_slice=lambda w, x: lax.dynamic_slice(w, (ids(x)[0], 0), (3, D)),
    dynamic_slice_of_columns=lambda w, x: lax.dynamic_slice_in_dim(w, ids(x)[0], 3, axis=1),
    dynamic_slice_of_rows=lambda w, x: lax.dynamic_slice_in_dim(x @ w, ids(x)[0], 5),
    slices_of_rows=lambda w, x: jax.vmap(lambda row, i: lax.dynamic_slice(row, (i,), (3,)))(x @ w, ids(x)),
    dynamic_update=lambda w, x: lax.dynamic_update_slice(x, w[:3], (ids(x)[0], 0)),
    dynamic_update_of_the_weight=lambda w, x: lax.dynamic_update_slice(w, x[:2, :3], (ids(x)[0], 2)),
    one_hot=lambda w, x: jax.nn.one_hot(ids(x), D) @ w,
    masked=lambda w, x: jnp.where(ids(x)[:, None] > 3, x @ w, w[0]),
    nonzero=lambda w, x: (x @ w)[jnp.nonzero(x[:, 0] > 0, size=4, fill_value=0)[0]],
)
family(
    "shapes",
    (D, D),
    pad=lambda w, x: jnp.pad(w, ((1, 2), (3, 0)), constant_values=0.1),
    pad_of_rows=lambda w, x: jnp.pad(x @ w, ((2, 1), (0, 0)), mode="reflect"),
    negative_pad=lambda w, x: lax.pad(w, 0.0, ((-1, 2, 1), (1, -2, 0))),
    concatenate=lambda w, x: jnp.concatenate([x @ w, w]),
    concatenate_columns=lambda w, x: jnp.concatenate([x @ w, x, w[:1] * x], axis=1),
    rev=lambda w, x: w[::-1] + w[:, ::-1],
    rev_of_rows=lambda w, x: (x @ w)[::-1] * jnp.arange(ROWS)[:, None],
    roll=lambda w, x: jnp.roll(x @ w, 3, axis=0) * jnp.roll(w, 2, axis=1)[0],
    shifted=lambda w, x: (x @ w)[1:] - (x @ w)[:-1],
    strided=lambda w, x: w[1::3, ::2],
    reshape=lambda w, x: w.reshape(4, 2, D).transpose(1, 0, 2).reshape(2, 32),
    rows_in_two=lambda w, x: (x @ w).reshape(4, 4, D).mean(1),
    rows_to_columns=lambda w, x: (x @ w).reshape(4, 4 * D) * jnp.cos(jnp.arange(4 * D)),
    tile=lambda w, x: jnp.tile(w, (2, 3)),
    repeat=lambda w, x: jnp.repeat(w, jnp.array([1, 3, 0, 2, 1, 0, 0, 1]), axis=0, total_repeat_length=8),
    split=lambda w, x: jnp.split(x @ w, [3, 5], axis=1)[1] * jnp.split(w, 2)[1][0, :2],
    triangle=lambda w, x: x @ jnp.tril(w, 1),
    diagonal=lambda w, x: jnp.diagonal(w, 1),
    broadcast=lambda w, x: x[:, None] + w[None],
    clamp=lambda w, x: jnp.clip(x @ w, -0.2, w[0]),
    select=lambda w, x: lax.select_n(ids(x, 3)[:, None] * jnp.ones((1, D), int), x @ w, x, 2 * (x @ w)),
    blocks=lambda w, x: linalg.block_diag(w, w[:3, :2]),
    transposed_rows=lambda w, x: (x @ w).T * jnp.cos(jnp.arange(ROWS)),
    grid=lambda w, x: jnp.stack(jnp.meshgrid(w[0], x[:, 0])),
)

# --- reductions and functions

family(
    "reductions",
    (D, D),
    sum=lambda w, x: jnp.sum(w * 0.1, axis=0) + jnp.sum(x @ w, axis=0),
    prod=lambda w, x: jnp.prod(w, axis=0) + jnp.prod(1 + 0.1 * x @ w, axis=0),
    max=lambda w, x: jnp.max(w, axis=0) + jnp.max(x @ w, axis=0),
    min=lambda w, x: jnp.min(w) + jnp.min(x @ w),
    of_equal_values=lambda w, x: jnp.max(jnp.round(x @ w), axis=0) + jnp.max(jnp.maximum(w, 0.0), axis=0),
    mean=lambda w, x: jnp.mean(x @ w, axis=0, keepdims=True) - x @ w,
    variance=lambda w, x: (x @ w) / jnp.sqrt(jnp.var(x @ w, axis=0) + 0.1),
    norm=lambda w, x: w / jnp.linalg.norm(w, axis=0),
    spectral_norm=lambda w, x: jnp.linalg.norm(w, ord=2),
    logsumexp=lambda w, x: jax.nn.logsumexp(w, axis=0) + jax.nn.logsumexp(x @ w, axis=0),
    softmax=lambda w, x: jax.nn.softmax(x @ w, axis=0) + jax.nn.softmax(w, axis=0)[0],
    cross_entropy=lambda w, x: optax.softmax_cross_entropy_with_integer_labels(x @ w, ids(x)),
    own_monoid=lambda w, x: lax.reduce(x @ w, -1.0, lambda a, b: jnp.maximum(a, b), (0,)),
    contrastive=lambda w, x: optax.softmax_cross_entropy_with_integer_labels((x @ w) @ x.T, jnp.arange(ROWS)),
    ctc=lambda w, x: optax.ctc_loss(
        (x @ w).reshape(2, 8, D), jnp.zeros((2, 8)), ids(x).reshape(2, 8)[:, :3] % 7 + 1, jnp.zeros((2, 3))
    ),
)
family(
    "functions",
    (D, D),
    exp=lambda w, x: jnp.exp(w) + jnp.exp2(x @ w)[:D],
    log=lambda w, x: jnp.log(positive(w)) + jnp.log1p(positive(w)),
    trigonometric=lambda w, x: jnp.sin(w) + jnp.cos(w) + jnp.tan(w),
    inverse_trigonometric=lambda w, x: jnp.arctan2(w, 1 + w**2) + jnp.arcsin(jnp.tanh(w)) + jnp.arccosh(2 + w**2),
    hyperbolic=lambda w, x: jnp.sinh(w) + jnp.cosh(w) + jnp.tanh(w) + jnp.arcsinh(w) + jnp.arctanh(jnp.tanh(w)),
    roots=lambda w, x: jnp.sqrt(positive(w)) + lax.rsqrt(positive(w)) + jnp.cbrt(positive(w)),
    powers=lambda w, x: positive(w) ** 1.7 + w**3 + 2.0**w + jnp.square(w),
    erf=lambda w, x: special.erf(w) + special.erfc(w) ** 2 + special.erfinv(jnp.tanh(w)),
    gamma=lambda w, x: special.gammaln(positive(w)) + special.digamma(positive(w)),
    polygamma=lambda w, x: special.polygamma(1, positive(w)) + special.zeta(2 + positive(w), 1.5),
    incomplete_gamma=lambda w, x: special.gammainc(positive(w), 1.2) + special.gammaincc(1.1, positive(w)),
    incomplete_beta=lambda w, x: special.betainc(2.0, 3.0, jax.nn.sigmoid(w)),
    bessel=lambda w, x: special.i0e(w) + special.i1(w),
    rounded=lambda w, x: w - jnp.floor(w) + jnp.sign(w) * w + jnp.abs(w) + jnp.remainder(w, 0.7),
    activations=lambda w, x: jax.nn.gelu(w) + jax.nn.silu(w) + jax.nn.softplus(w) + jax.nn.elu(w) + jax.nn.relu6(w),
    extremes=lambda w, x: jnp.maximum(x @ w, w[0]) + jnp.minimum(x, w[1]),
    sinc=lambda w, x: jnp.sinc(w) + jnp.logaddexp(w, 0.3) + jnp.hypot(w, 1.0),
    reduced_precision=lambda w, x: lax.reduce_precision(w, 8, 12),
    complex=lambda w, x: jnp.exp(1j * w) * (x[:D] + 1j * w) / (1 + w * 1j) + jnp.angle(w + 2j) + jnp.abs(w + 1j),
    fft=lambda w, x: jnp.fft.fft(x @ w),
    fft_of_rows=lambda w, x: jnp.fft.rfft(x @ w, axis=0),
    fft_of_the_weight=lambda w, x: jnp.fft.fft2(w),
    spectral_filter=lambda w, x: jnp.fft.irfft(jnp.fft.rfft(x, axis=1) * (w[:5, 0] + 1j * w[:5, 1]), n=D, axis=1),
)
family(
    "matrices",
    (D, D),
    cholesky=lambda w, x: jnp.linalg.cholesky(definite(w)),
    solve=lambda w, x: jnp.linalg.solve(definite(w), x.T),
    solve_of_rows=lambda w, x: jnp.linalg.solve(definite(w) + jax.vmap(jnp.diag)(x**2), x[..., None]),
    triangular=lambda w, x: linalg.solve_triangular(jnp.tril(w) + 2 * jnp.eye(D), x.T, lower=True),
    cholesky_solve=lambda w, x: linalg.cho_solve(linalg.cho_factor(definite(w)), x.T),
    inverse=lambda w, x: jnp.linalg.inv(definite(w)),
    determinant=lambda w, x: jnp.linalg.slogdet(definite(w))[1] + jnp.linalg.det(w),
    determinants_of_rows=lambda w, x: jnp.linalg.slogdet(definite(w) + jax.vmap(jnp.diag)(x**2))[1],
    qr=lambda w, x: jnp.linalg.qr(definite(w))[1],
    svd=lambda w, x: jnp.linalg.svd(definite(w), compute_uv=False),
    singular_vectors=lambda w, x: jnp.abs(jnp.linalg.svd(definite(w))[0]),
    eigh=lambda w, x: jnp.linalg.eigh(definite(w))[0],
    eigenvectors=lambda w, x: jnp.abs(jnp.linalg.eigh(definite(w))[1]),
    eigvals_of_rows=lambda w, x: jnp.linalg.eigvalsh(definite(w) + jax.vmap(jnp.diag)(x**2)),
    expm=lambda w, x: linalg.expm(w),
    lstsq=lambda w, x: jnp.linalg.lstsq(x, x @ w)[0],
    pinv=lambda w, x: jnp.linalg.pinv(definite(w)),
    tridiagonal=lambda w, x: lax.linalg.tridiagonal_solve(w[0].at[0].set(0), 3 + w[1], w[2].at[-1].set(0), x.T),
    conjugate_gradients=lambda w, x: jax.scipy.sparse.linalg.cg(definite(w), x[0], maxiter=20)[0],
    lu=lambda w, x: linalg.lu(definite(w))[2],
)

# --- control, derivatives within a loss, and random numbers


def cell(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = jnp.tanh(x @ w)
    return y, jnp.sum(y, axis=-1)


def newton(w: jax.Array, x: jax.Array) -> jax.Array:
    """Return y with y + tanh(y) = x @ w, whose gradient is that of the solution."""
    target = x @ w
    return lax.custom_root(
        lambda y: y + jnp.tanh(y) - target,
        jnp.zeros_like(target),
        lambda f, y: lax.fori_loop(0, 20, lambda _, y: y - f(y) / (2 - jnp.tanh(y) ** 2), y),
        lambda g, y: y / jax.jvp(g, (jnp.zeros_like(y),), (jnp.ones_like(y),))[1],
    )


family(
    "control",
    (D, D),
    scan=lambda w, x: lax.scan(lambda x, _: cell(x, w), x, None, length=3)[1],
    scan_over_rows=lambda w, x: lax.scan(lambda h, row: cell(h + row, w), jnp.zeros(D), x)[0],
    scan_over_rows_of_the_weight=lambda w, x: lax.scan(lambda h, row: (jnp.tanh(h + row * x), None), x, w)[0],
    loop=lambda w, x: lax.fori_loop(0, 3, lambda i, x: cell(x, w)[0], x),
    while_loop=lambda w, x: (
        x @ w + lax.stop_gradient(lax.while_loop(lambda x: jnp.sum(x**2) > 0.1, lambda x: 0.5 * cell(x, w)[0], x))
    ),
    cond=lambda w, x: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w.T),
    cond_of_rows=lambda w, x: jax.vmap(lambda row: lax.cond(row[0] > 0, lambda: row @ w, lambda: row))(x),
    switch=lambda w, x: lax.switch(ids(x, 3)[0], [lambda w: x @ w, lambda w: x - w[0], lambda w: w[1] * x], w),
    mapped=lambda w, x: lax.map(lambda row: row @ w, x, batch_size=4),
    own_gradient=with_own_gradient(lambda w, x: x @ w),
    own_tangent=with_own_tangent(lambda w, x: x @ w),
    rematerialised=lambda w, x: jax.checkpoint(
        lambda w, x: cell(x, w)[0], policy=jax.checkpoint_policies.dots_saveable
    )(w, x),
    straight_through=lambda w, x: x @ (w + lax.stop_gradient(jnp.round(w) - w)),
    jitted=lambda w, x: jax.jit(lambda x, w: cell(x, 2 * w)[0])(x, w),
    gradient=lambda w, x: jax.grad(lambda x: jnp.sum(cell(x, w)[0] ** 2))(x),
    gradient_by_the_weight=lambda w, x: jax.grad(lambda w: jnp.mean(cell(x, w)[0] ** 2))(w),
    inner_step=lambda w, x: cell(x, w - 0.1 * jax.grad(lambda w: jnp.mean(cell(x, w)[0] ** 2))(w))[0],
    jvp=lambda w, x: jax.jvp(lambda x: cell(x, w)[0], (x,), (jnp.ones_like(x),))[1],
    jacobian=lambda w, x: jax.vmap(jax.jacfwd(lambda row: cell(row, w)[0]))(x),
    hessian=lambda w, x: jax.vmap(jax.hessian(lambda row: jnp.sum(cell(row, w)[0])))(x),
    root=newton,
    ode=lambda w, x: odeint(lambda y, t, w: cell(y, w)[0], x, jnp.array([0.0, 0.5]), w, rtol=1e-2)[1],
)
KEY = np.array([0, 1], np.uint32)


def random(function: Function) -> Function:
    return lambda w, x: function(w, x, jax.random.wrap_key_data(KEY))


family(
    "random numbers",
    (D, D),
    dropout=random(lambda w, x, key: jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x @ w, 0.0)),
    dropped_weights=random(lambda w, x, key: x @ (w * jax.random.bernoulli(key, 0.7, w.shape))),
    normal=random(lambda w, x, key: x @ w + jax.random.normal(key, x.shape) * w[0]),
    of_each_row=random(lambda w, x, key: x @ w + jax.vmap(jax.random.normal)(jax.random.split(key, ROWS))[:, None]),
    uniform=random(lambda w, x, key: jax.random.uniform(key, w.shape, minval=w, maxval=w + 1)),
    gumbel=random(lambda w, x, key: jax.nn.softmax(x @ w + jax.random.gumbel(key, x.shape))),
    categorical=random(lambda w, x, key: w[jax.random.categorical(key, x)]),
    permutation=random(lambda w, x, key: jax.random.permutation(key, x @ w) * jnp.arange(ROWS)[:, None]),
    choice=random(lambda w, x, key: jax.random.choice(key, w, (3,), replace=False)),
    gamma=random(lambda w, x, key: jax.random.gamma(key, positive(w))),
    dirichlet=random(lambda w, x, key: jax.random.dirichlet(key, positive(w))),
    truncated=random(lambda w, x, key: jax.random.truncated_normal(key, -1, 1, w.shape) * w),
    randint=random(lambda w, x, key: w[jax.random.randint(key, (5,), 0, D)]),
)


def weight(shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.random.RandomState(len(shape)).randn(*shape) * 0.3, jnp.float32)


def make_batch() -> dict[str, np.ndarray]:
    random = np.random.RandomState(0)
    return {
        "x": random.randn(ROWS, D).astype(np.float32),
        "image": random.randn(ROWS, 6, 6, D).astype(np.float32),
    }


def loss_of(operations: dict[str, Operation]) -> Function:
    def loss(params: Any, batch: Any) -> jax.Array:
        return sum((each.loss(params[name], batch) for name, each in operations.items()), jnp.float32(0))

    return loss


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    """Return the gradients on one device."""
    operations = FAMILIES[name]
    params = {key: weight(each.shape) for key, each in operations.items()}
    found: dict[str, np.ndarray] = jax.device_get(jax.jit(jax.grad(loss_of(operations)))(params, make_batch()))
    return found


def keep_gradients() -> optax.GradientTransformation:
    """Return an optimizer whose state is the gradient of the last step, and that changes nothing."""
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    return optax.GradientTransformation(zeros, lambda gradients, state, params=None: (zeros(gradients), gradients))


MESHES: dict[str, tuple[dict[str, int], int]] = {  # a mesh, and the dimension that `tensor` divides
    "fsdp": ({"fsdp": 8}, 0),
    "tensor": ({"data": 2, "fsdp": 2, "tensor": 2}, 0),
    "tensor of the last dimension": ({"fsdp": 2, "tensor": 4}, -1),
}


QUICK = ("products", "convolutions", "grouped convolutions", "windows", "order", "shapes")
CASES = [(name, mesh) for name in FAMILIES for mesh in MESHES]
IS_QUICK = [mesh == "tensor" and name in QUICK for name, mesh in CASES]


@pytest.mark.parametrize(
    ("name", "mesh"),
    [case if quick else slow(case)[0] for case, quick in zip(CASES, IS_QUICK, strict=True)],
    ids=[f"{name}-{mesh}" for name, mesh in CASES],
)
def test_gradients_are_those_of_one_device(name: str, mesh: str) -> None:
    operations, (axes, dim) = FAMILIES[name], MESHES[mesh]

    def make() -> Any:
        def names(shape: tuple[int, ...]) -> tuple[str | None, ...]:
            divided: list[str | None] = [None] * len(shape)
            if shape[dim] % axes.get("tensor", 1) == 0:
                divided[dim] = "divided"
            return tuple(divided)

        return {key: nn.Partitioned(weight(each.shape), names(each.shape)) for key, each in operations.items()}

    engine = jaxopt_llm.initialize(
        make,
        loss_of(operations),
        make_batch(),
        Config(mesh=axes, precision={"compute_dtype": "float32"}),
        keep_gradients(),
        rules={"divided": "tensor"},
    )
    engine.step(make_batch())
    (gradients,) = jax.device_get(engine.state.moments).values()
    wrong = {key: distance(gradients[key], value) for key, value in reference(name).items()}
    assert {key: value for key, value in wrong.items() if not value <= 1e-5} == {}


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    norm = np.linalg.norm(expected)
    assert norm > 0, "a gradient of zero proves nothing"
    return float(np.linalg.norm(found - expected) / norm)
