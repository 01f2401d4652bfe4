"""Cross-entropy in chunks, over a padded vocabulary, against float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxopt_llm.kernels.cross_entropy import Classifier, losses, losses_and_gradients
from jaxopt_llm.parallel import hlo

pytestmark = pytest.mark.core

BATCH, SEQUENCE, WIDTHS = 2, 6, (4, 3)  # an input and a table of each width
VOCABULARY, PADDED = 5, 8
COTANGENT = 0.25

random = np.random.default_rng(0)
XS = tuple(random.normal(size=(BATCH, SEQUENCE, width)).astype(np.float32) for width in WIDTHS)
TABLES = tuple(random.normal(size=(PADDED, width)).astype(np.float32) for width in WIDTHS)
TOKENS = random.integers(VOCABULARY, size=(BATCH, SEQUENCE)), random.random((BATCH, SEQUENCE)) < 0.7


def expected(form: Classifier, xs: Any, tables: Any, tokens: Any = TOKENS) -> tuple[Any, Any, Any]:
    """In float64, the gradient of the bounded logits by hand."""
    (targets, counts), size = tokens, form.vocabulary_size
    wide_xs, wide_tables = ([each.astype(np.float64) for each in arrays] for arrays in (xs, tables))
    logits = sum(x @ table[:size].T for x, table in zip(wide_xs, wide_tables, strict=True))
    capped = form.softcap * np.tanh(logits / form.softcap) if form.softcap else logits
    peak = capped.max(axis=-1, keepdims=True)
    log_sum = peak + np.log(np.exp(capped - peak).sum(axis=-1, keepdims=True))
    one_hot = targets[..., None] == np.arange(size)
    loss = (log_sum - capped.max(axis=-1, keepdims=True, where=one_hot, initial=-np.inf))[..., 0]
    objective = loss + form.z_loss * log_sum[..., 0] ** 2
    gradient = np.exp(capped - log_sum) * (1 + 2 * form.z_loss * log_sum) - one_hot
    gradient *= COTANGENT * counts[..., None]
    if form.softcap:
        gradient *= 1 - (capped / form.softcap) ** 2
    d_xs = [gradient @ table[:size] for table in wide_tables]
    d_tables = [np.einsum("BSV,BSD->VD", gradient, x) for x in wide_xs]
    padding = [(0, len(tables[0]) - size), (0, 0)]
    return (objective * counts, loss * counts), d_xs, [np.pad(each, padding) for each in d_tables]


def assert_near(found: Any, wanted: Any, share: float = 1e-5) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=share, atol=share * np.max(np.abs(b)))


def run(form: Classifier, xs: Any = XS, tables: Any = TABLES, axes: tuple[str, ...] = ()) -> Any:
    return losses_and_gradients(form, xs, tables, (True, True), TOKENS, jnp.float32(COTANGENT), axes)


@pytest.mark.parametrize(
    "chunk, softcap, z_loss",  # of 12 tokens
    [*((0, *both) for both in ((0.0, 0.0), (1.5, 0.1))), (4, 1.5, 0.0), (5, 0.0, 0.1), (1, 1.5, 0.1), (100, 0.0, 0.0)],
)
def test_losses_and_gradients_are_those_of_log_softmax(chunk: int, softcap: float, z_loss: float) -> None:
    form = Classifier(VOCABULARY, softcap, z_loss, chunk)
    found, alone = jax.jit(lambda: (run(form), losses(form, XS, TABLES, TOKENS)))()
    assert_near(found, expected(form, XS, TABLES))
    assert_near(alone, found[0], 1e-6)


@pytest.mark.gpu
def test_a_gpus_losses_and_gradients_are_those_of_log_softmax(gpu: jax.Device) -> None:
    form = Classifier(32_000, 0.0, 0.0, 64)
    x, table = (random.normal(size=shape).astype(np.float32) for shape in ((2, 100, 64), (32_128, 64)))
    tokens = random.integers(32_000, size=(2, 100)), np.ones((2, 100), bool)
    with jax.default_matmul_precision("highest"):
        found = losses_and_gradients(form, (x,), (table,), (True,), tokens, jnp.float32(COTANGENT))
    assert_near(found, expected(form, (x,), (table,), tokens), 1e-4)


@pytest.mark.parametrize("scale", [1e4, 1e18])
def test_large_logits_neither_overflow_nor_lose_the_loss(scale: float) -> None:
    form, xs = Classifier(VOCABULARY, 0.0, 0.0, 4), tuple(np.float32(scale) * x for x in XS)
    assert_near(jax.jit(functools.partial(run, form))(xs), expected(form, xs, TABLES))


def test_padded_rows_get_no_probability_and_no_gradient() -> None:
    form = Classifier(VOCABULARY, 0.0, 0.1, 4)
    tables = tuple(np.where(np.arange(PADDED)[:, None] < VOCABULARY, table, np.float32(1e30)) for table in TABLES)
    gradients = jax.jit(lambda tables: run(form, tables=tables))
    jax.tree.map(np.testing.assert_array_equal, gradients(tables), gradients(TABLES))


@pytest.mark.parametrize("chunk, softcap", [(0, 0.0), (5, 1.5)])
def test_a_split_vocabulary_gives_the_same(chunk: int, softcap: float) -> None:
    """Over four devices, of which one has a class and padding, and one padding alone."""
    form, mesh = Classifier(VOCABULARY, softcap, 0.1, chunk), jax.make_mesh((4,), ("v",), (jax.sharding.AxisType.Auto,))
    rows = PartitionSpec("v")

    def on_device(tables: Any) -> Any:
        found, d_xs, d_tables = run(form, tables=tables, axes=("v",))
        return found, jax.lax.psum(d_xs, "v"), d_tables

    whole = PartitionSpec()
    split = jax.shard_map(on_device, mesh=mesh, in_specs=rows, out_specs=(whole, whole, rows), check_vma=False)
    assert_near(jax.jit(split)(TABLES), expected(form, XS, TABLES))


def test_no_more_logits_exist_than_a_chunks_and_none_twice() -> None:
    form, tokens = Classifier(VOCABULARY, 1.5, 0.1, 3), BATCH * SEQUENCE

    def compiled(function: Any, *arguments: Any) -> str:
        return str(jax.jit(functools.partial(function, form)).lower(XS, TABLES, *arguments).compile().as_text())

    forward = compiled(losses, TOKENS)
    everything = compiled(lambda form, xs, tables: run(form, xs, tables))
    one_product = 2 * tokens * PADDED * sum(WIDTHS)
    assert hlo.dot_flops(forward) == one_product
    assert hlo.dot_flops(everything) == 3 * one_product  # the logits, and the gradients of both their factors
    for text in (forward, everything):
        assert all(PADDED not in each.shape or tokens not in each.shape for each in hlo.array_shapes(text))
        assert max(np.prod(each.shape) for each in hlo.array_shapes(text)) < tokens * PADDED


def test_a_table_without_a_gradient_costs_none() -> None:
    def frozen() -> Any:
        form = Classifier(VOCABULARY, 0.0, 0.0, 4)
        return losses_and_gradients(form, XS, TABLES, (False, True), TOKENS, jnp.float32(COTANGENT))

    assert_near(frozen()[2][1:], expected(Classifier(VOCABULARY, 0.0, 0.0, 4), XS, TABLES)[2][1:])
    assert frozen()[2][0] is None
    text = str(jax.jit(frozen).lower().compile().as_text())
    assert hlo.dot_flops(text) == 2 * BATCH * SEQUENCE * PADDED * (2 * WIDTHS[0] + 3 * WIDTHS[1])
