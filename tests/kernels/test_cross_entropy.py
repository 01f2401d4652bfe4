"""Chunked cross-entropy over a padded vocabulary, against float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import PartitionSpec

from jaxopt_llm.compiler import hlo
from jaxopt_llm.kernels.cross_entropy import (
    Classifier,
    compute_losses,
    compute_losses_and_gradients,
    read_targets,
)

pytestmark = pytest.mark.core

BATCH, SEQUENCE, WIDTHS = 2, 6, (4, 3)  # an input and a table of each width
VOCABULARY, PADDED = 5, 8
COTANGENT = 0.25

random = np.random.default_rng(0)
XS = tuple(random.normal(size=(BATCH, SEQUENCE, width)).astype(np.float32) for width in WIDTHS)
TABLES = tuple(random.normal(size=(PADDED, width)).astype(np.float32) for width in WIDTHS)
TOKENS = random.integers(VOCABULARY, size=(BATCH, SEQUENCE)), random.random((BATCH, SEQUENCE)) < 0.7


def expected(classifier: Classifier, xs: Any, tables: Any, tokens: Any = TOKENS) -> tuple[Any, Any, Any]:
    """Compute losses and gradients in float64, with a hand-written gradient of the capped logits."""
    (targets, counts), size = tokens, classifier.vocabulary_size
    wide_xs, wide_tables = ([each.astype(np.float64) for each in arrays] for arrays in (xs, tables))
    logits = sum(x @ table[:size].T for x, table in zip(wide_xs, wide_tables, strict=True))
    capped = classifier.softcap * np.tanh(logits / classifier.softcap) if classifier.softcap else logits
    peak = capped.max(axis=-1, keepdims=True)
    log_sum = peak + np.log(np.exp(capped - peak).sum(axis=-1, keepdims=True))
    one_hot = targets[..., None] == np.arange(size)
    loss = (log_sum - capped.max(axis=-1, keepdims=True, where=one_hot, initial=-np.inf))[..., 0]
    objective = loss + classifier.z_loss * log_sum[..., 0] ** 2
    gradient = np.exp(capped - log_sum) * (1 + 2 * classifier.z_loss * log_sum) - one_hot
    gradient *= COTANGENT * counts[..., None]
    if classifier.softcap:
        gradient *= 1 - (capped / classifier.softcap) ** 2
    d_xs = [gradient @ table[:size] for table in wide_tables]
    d_tables = [np.einsum("BSV,BSD->VD", gradient, x) for x in wide_xs]
    padding = [(0, len(tables[0]) - size), (0, 0)]
    return (objective * counts, loss * counts), d_xs, [np.pad(each, padding) for each in d_tables]


def assert_near(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=tolerance, atol=tolerance * np.max(np.abs(b)))


def run(classifier: Classifier, xs: Any = XS, tables: Any = TABLES, axes: tuple[str, ...] = ()) -> Any:
    return compute_losses_and_gradients(classifier, xs, tables, (True, True), TOKENS, jnp.float32(COTANGENT), axes)


@pytest.mark.parametrize(
    "chunk, softcap, z_loss",  # there are 12 tokens
    [
        *((0, *settings) for settings in ((0.0, 0.0), (1.5, 0.1))),
        (4, 1.5, 0.0),
        (5, 0.0, 0.1),
        (1, 1.5, 0.1),
        (100, 0.0, 0.0),
    ],
)
def test_losses_and_gradients_match_log_softmax(chunk: int, softcap: float, z_loss: float) -> None:
    classifier = Classifier(VOCABULARY, softcap, z_loss, chunk)
    found, alone = jax.jit(lambda: (run(classifier), compute_losses(classifier, XS, TABLES, TOKENS)))()
    assert_near(found, expected(classifier, XS, TABLES))
    assert_near(alone, found[0], 1e-6)


@pytest.mark.gpu
def test_losses_and_gradients_on_a_gpu_match_log_softmax(gpu: jax.Device) -> None:
    classifier = Classifier(32_000, 0.0, 0.0, 64)
    x, table = (random.normal(size=shape).astype(np.float32) for shape in ((2, 100, 64), (32_128, 64)))
    tokens = random.integers(32_000, size=(2, 100)), np.ones((2, 100), bool)
    with jax.default_matmul_precision("highest"):
        found = compute_losses_and_gradients(classifier, (x,), (table,), (True,), tokens, jnp.float32(COTANGENT))
    assert_near(found, expected(classifier, (x,), (table,), tokens), 1e-4)


@pytest.mark.parametrize("scale", [1e4, 1e18])
def test_large_logits_neither_overflow_nor_lose_the_loss(scale: float) -> None:
    classifier, xs = Classifier(VOCABULARY, 0.0, 0.0, 4), tuple(np.float32(scale) * x for x in XS)
    assert_near(jax.jit(functools.partial(run, classifier))(xs), expected(classifier, xs, TABLES))


def test_padded_rows_get_no_probability_and_no_gradient() -> None:
    classifier = Classifier(VOCABULARY, 0.0, 0.1, 4)
    tables = tuple(np.where(np.arange(PADDED)[:, None] < VOCABULARY, table, np.float32(1e30)) for table in TABLES)
    gradients = jax.jit(lambda tables: run(classifier, tables=tables))
    jax.tree.map(np.testing.assert_array_equal, gradients(tables), gradients(TABLES))


@pytest.mark.parametrize("chunk, softcap", [(0, 0.0), (5, 1.5)])
def test_a_split_vocabulary_gives_the_same(chunk: int, softcap: float) -> None:
    """Split the tables over four devices: one has a class and padding, and one has only padding."""
    classifier, mesh = (
        Classifier(VOCABULARY, softcap, 0.1, chunk),
        jax.make_mesh((4,), ("v",), (jax.sharding.AxisType.Auto,)),
    )
    rows = PartitionSpec("v")

    def on_device(tables: Any) -> Any:
        found, d_xs, d_tables = run(classifier, tables=tables, axes=("v",))
        return found, jax.lax.psum(d_xs, "v"), d_tables

    whole = PartitionSpec()
    split = jax.shard_map(on_device, mesh=mesh, in_specs=rows, out_specs=(whole, whole, rows), check_vma=False)
    assert_near(jax.jit(split)(TABLES), expected(classifier, XS, TABLES))


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("chunk, softcap", [(0, 0.0), (5, 1.5)])
def test_a_target_is_read_and_compared_with_all_tokens(chunk: int, softcap: float, devices: int) -> None:
    """Some targets are the most likely tokens. Padding would be more likely, and so would tokens of other devices."""
    classifier = Classifier(VOCABULARY, softcap, 0.0, chunk)
    logits = sum(x @ table[:VOCABULARY].T for x, table in zip(XS, TABLES, strict=True))
    best = logits.argmax(axis=-1)
    targets = np.where(np.arange(SEQUENCE) % 2, best, TOKENS[0])
    padded = tuple(np.where(np.arange(PADDED)[:, None] < VOCABULARY, table, np.float32(1e3)) for table in TABLES)
    mesh = jax.make_mesh((devices,), ("v",), (jax.sharding.AxisType.Auto,))
    rows, whole = PartitionSpec("v"), PartitionSpec()
    run = functools.partial(read_targets, classifier, XS, targets=targets, axes=("v",))
    found, most_likely = jax.jit(
        jax.shard_map(lambda tables: run(tables=tables), mesh=mesh, in_specs=rows, out_specs=whole, check_vma=False)
    )(padded)
    (_, loss), *_ = expected(classifier, XS, TABLES, (targets, np.ones(targets.shape, bool)))
    assert_near(found, -loss)
    np.testing.assert_array_equal(most_likely, targets == best)
    assert 0 < most_likely.sum() < most_likely.size


def test_only_the_logits_of_a_chunk_exist_and_each_is_computed_once() -> None:
    classifier, tokens = Classifier(VOCABULARY, 1.5, 0.1, 3), BATCH * SEQUENCE

    def compiled(function: Any, *arguments: Any) -> str:
        return str(jax.jit(functools.partial(function, classifier)).lower(XS, TABLES, *arguments).compile().as_text())

    forward = compiled(compute_losses, TOKENS)
    everything = compiled(lambda classifier, xs, tables: run(classifier, xs, tables))
    one_matmul = 2 * tokens * PADDED * sum(WIDTHS)
    assert hlo.count_dot_flops(forward) == one_matmul
    assert hlo.count_dot_flops(everything) == 3 * one_matmul  # the logits, and the gradients of both operands
    for text in (forward, everything):
        assert all(PADDED not in each.shape or tokens not in each.shape for each in programs.list_array_shapes(text))
        assert max(np.prod(each.shape) for each in programs.list_array_shapes(text)) < tokens * PADDED


def test_a_table_without_a_gradient_costs_none() -> None:
    def frozen() -> Any:
        classifier = Classifier(VOCABULARY, 0.0, 0.0, 4)
        return compute_losses_and_gradients(classifier, XS, TABLES, (False, True), TOKENS, jnp.float32(COTANGENT))

    assert_near(frozen()[2][1:], expected(Classifier(VOCABULARY, 0.0, 0.0, 4), XS, TABLES)[2][1:])
    assert frozen()[2][0] is None
    text = str(jax.jit(frozen).lower().compile().as_text())
    assert hlo.count_dot_flops(text) == 2 * BATCH * SEQUENCE * PADDED * (2 * WIDTHS[0] + 3 * WIDTHS[1])
