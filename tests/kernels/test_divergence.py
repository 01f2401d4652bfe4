"""Chunked divergence from a teacher, against TRL's formula for `generalized_jsd_loss` in float64."""

import dataclasses
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
    read_most_likely,
)
from jaxopt_llm.kernels.divergence import DistilledChunk, Divergence

pytestmark = pytest.mark.core

BATCH, SEQUENCE, WIDTH, TEACHER_WIDTH, PADDED = 2, 6, 4, 7, 8
COTANGENT = 0.25
random = np.random.default_rng(0)
X, TABLE = (random.normal(size=shape).astype(np.float32) for shape in ((BATCH, SEQUENCE, WIDTH), (PADDED, WIDTH)))
TEACHER_X, TEACHER_TABLE = (
    random.normal(size=shape).astype(np.float32)
    for shape in ((BATCH, SEQUENCE, TEACHER_WIDTH), (PADDED, TEACHER_WIDTH))
)
TOKENS = random.integers(5, size=(BATCH, SEQUENCE)), random.random((BATCH, SEQUENCE)) < 0.7
STUDENT, TEACHER = Classifier(6, 2.5, 0.0, 5), Classifier(5, 1.5, 0.0, 5)
# The common classes are 5. Both have a soft-cap.
SETTINGS = {
    "forward": Divergence(0.0, 1.0, 0.0, TEACHER),
    "reverse": Divergence(1.0, 0.7, 0.0, TEACHER),
    "Jensen-Shannon": Divergence(0.3, 1.0, 0.0, TEACHER),
    "with the next token": Divergence(0.5, 2.0, 0.4, TEACHER),
}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def cap(x: np.ndarray, table: np.ndarray, classifier: Classifier) -> np.ndarray:
    logits = x.astype(np.float64) @ table[: classifier.vocabulary_size].astype(np.float64).T
    return classifier.softcap * np.tanh(logits / classifier.softcap)


def expected(settings: Divergence, x: np.ndarray = X, table: np.ndarray = TABLE) -> tuple[np.ndarray, ...]:
    """Return objective, divergence and cross-entropy of each token."""
    targets, counts = TOKENS
    student, teacher = cap(x, table, STUDENT), cap(TEACHER_X, TEACHER_TABLE, TEACHER)
    cross_entropy = -np.take_along_axis(log_softmax(student), targets[..., None], axis=-1)[..., 0]
    log_p, log_q = (log_softmax(each[..., :5] / settings.temperature) for each in (student, teacher))

    def kl(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return np.sum(np.exp(first) * (first - second), axis=-1)

    beta = settings.beta
    if beta in (0, 1):
        divergence = kl(log_p, log_q) if beta else kl(log_q, log_p)
    else:
        mixture = np.log((1 - beta) * np.exp(log_p) + beta * np.exp(log_q))
        divergence = beta * kl(log_q, mixture) + (1 - beta) * kl(log_p, mixture)
    objective = divergence + settings.next_token_weight * cross_entropy
    return objective * counts, divergence * counts, cross_entropy * counts


def differentiate(settings: Divergence, name: str) -> np.ndarray:
    """Return the gradient of COTANGENT × the objective's sum for x or the table, by differences in float64."""
    arrays = {"x": X.astype(np.float64), "table": TABLE.astype(np.float64)}
    gradient, step = np.zeros(arrays[name].shape), 1e-5
    for index in np.ndindex(*gradient.shape):
        sums = []
        for sign in (1, -1):
            moved = {key: value.copy() for key, value in arrays.items()}
            moved[name][index] += sign * step
            sums.append(expected(settings, **moved)[0].sum())
        gradient[index] = COTANGENT * (sums[0] - sums[1]) / (2 * step)
    return gradient


def run(settings: Divergence, table: Any = TABLE, teacher: Any = TEACHER_TABLE, axes: tuple[str, ...] = ()) -> Any:
    make_loss = functools.partial(DistilledChunk.make, settings, teacher)
    return compute_losses_and_gradients(
        STUDENT, (X,), (table,), (True,), (*TOKENS, TEACHER_X), jnp.float32(COTANGENT), axes, make_loss
    )


def assert_near(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=1e-5, atol=1e-5 * np.max(np.abs(wanted)))


@pytest.mark.parametrize("name", SETTINGS)
def test_losses_and_gradients_are_those_of_the_formula(name: str) -> None:
    settings = SETTINGS[name]
    losses, (dx,), (d_table,) = jax.jit(lambda: run(settings))()
    for found, wanted in zip(losses, expected(settings), strict=True):
        assert_near(found, wanted)
    assert_near(dx, differentiate(settings, "x"))
    assert_near(d_table, differentiate(settings, "table"))
    make_loss = functools.partial(DistilledChunk.make, settings, TEACHER_TABLE)
    alone = compute_losses(STUDENT, (X,), (TABLE,), (*TOKENS, TEACHER_X), (), make_loss)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), alone, losses)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_split_vocabulary_gives_the_same(name: str) -> None:
    """Split the tables over four devices: one has a class of the student alone, and one has only padding."""
    mesh, rows, whole = (
        jax.make_mesh((4,), ("v",), (jax.sharding.AxisType.Auto,)),
        PartitionSpec("v"),
        PartitionSpec(),
    )

    def on_device(table: Any, teacher: Any) -> Any:
        losses, (dx,), (d_table,) = run(SETTINGS[name], table, teacher, ("v",))
        return losses, jax.lax.psum(dx, "v"), d_table

    split = jax.shard_map(on_device, mesh=mesh, in_specs=rows, out_specs=(whole, whole, rows), check_vma=False)
    losses, dx, d_table = jax.jit(split)(TABLE, TEACHER_TABLE)
    for found, wanted in zip((*losses, dx, d_table), jax.tree.leaves(run(SETTINGS[name])), strict=True):
        assert_near(found, np.asarray(wanted, np.float64))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_model_does_not_diverge_from_itself(beta: float) -> None:
    make_loss = functools.partial(DistilledChunk.make, Divergence(beta, 1.0, 0.0, STUDENT), TABLE)
    losses, (dx,), _ = compute_losses_and_gradients(
        STUDENT, (X,), (TABLE,), (True,), (*TOKENS, X), jnp.float32(1), (), make_loss
    )
    most = 1e-7 * (beta == 0.5)  # rounding of the mixture
    assert np.max(np.abs(losses[1])) <= most and np.max(np.abs(dx)) <= most


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_large_logits_neither_overflow_nor_lose_the_loss(beta: float) -> None:
    make_loss = functools.partial(DistilledChunk.make, Divergence(beta, 1.0, 0.0, Classifier(5, 0.0, 0.0, 0)), TABLE)
    classifier = Classifier(6, 0.0, 0.0, 5)
    for scale in (1e3, 1e18):
        losses, *gradients = compute_losses_and_gradients(
            classifier, (scale * X,), (TABLE,), (True,), (*TOKENS, -scale * X), jnp.float32(1), (), make_loss
        )
        assert all(np.all(np.isfinite(each)) for each in jax.tree.leaves((losses, gradients)))
        counted = np.asarray(losses[1])[TOKENS[1]]
        assert np.all(counted > 0) and (beta != 0.5 or np.all(counted <= np.log(2) + 1e-6))


def test_only_the_logits_of_a_chunk_exist_and_each_is_computed_once() -> None:
    tokens = BATCH * SEQUENCE
    jitted = jax.jit(lambda table, teacher: run(SETTINGS["Jensen-Shannon"], table, teacher))
    text = str(jitted.lower(TABLE, TEACHER_TABLE).compile().as_text())
    assert hlo.count_dot_flops(text) == 2 * tokens * PADDED * (3 * WIDTH + TEACHER_WIDTH)
    assert all(PADDED not in each.shape or tokens not in each.shape for each in programs.list_array_shapes(text))


# --- Stored log-probabilities of the K most likely tokens


def store(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what is stored of the teacher, whose classes are all but the last of the student's."""
    log_q = log_softmax(cap(TEACHER_X, TEACHER_TABLE, TEACHER))
    ids = np.argsort(-log_q, axis=-1)
    ordered = np.take_along_axis(log_q, ids, axis=-1)
    with np.errstate(divide="ignore"):
        rest = np.log(np.exp(ordered[..., count:]).sum(axis=-1, keepdims=True))
    return ids[..., :count].astype(np.int32), np.concatenate([ordered[..., :count], rest], axis=-1).astype(np.float32)


def run_stored(settings: Divergence, count: int, table: Any = TABLE, axes: tuple[str, ...] = ()) -> Any:
    make_loss, tokens = functools.partial(DistilledChunk.from_stored, settings), (*TOKENS, *store(count))
    return compute_losses_and_gradients(
        STUDENT, (X,), (table,), (True,), tokens, jnp.float32(COTANGENT), axes, make_loss
    )


def expected_of_stored(settings: Divergence, count: int, x: np.ndarray = X, table: np.ndarray = TABLE) -> Any:
    """Return the same as `expected`, between distributions over K tokens and the rest."""
    (targets, counts), (ids, log_q), beta = TOKENS, store(count), settings.beta
    student, q = cap(x, table, STUDENT), np.exp(log_q.astype(np.float64))
    p = np.exp(log_softmax(student[..., :5]))
    kept = np.take_along_axis(p, ids, axis=-1)
    p = np.concatenate([kept, p.sum(axis=-1, keepdims=True) - kept.sum(axis=-1, keepdims=True)], axis=-1)

    def kl(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return np.sum(first * np.log(first / second), axis=-1)

    mixture = (1 - beta) * p + beta * q
    divergence = beta * kl(q, mixture) + (1 - beta) * kl(p, mixture) if 0 < beta < 1 else kl(p, q) if beta else kl(q, p)
    cross_entropy = -np.take_along_axis(log_softmax(student), targets[..., None], axis=-1)[..., 0]
    objective = divergence + settings.next_token_weight * cross_entropy
    return objective * counts, divergence * counts, cross_entropy * counts


OF_STORED = {name: dataclasses.replace(each, temperature=1.0) for name, each in SETTINGS.items()}


@pytest.mark.parametrize("name", OF_STORED)
def test_all_stored_tokens_are_the_teacher(name: str) -> None:
    found, wanted = run_stored(OF_STORED[name], 5), run(OF_STORED[name])
    jax.tree.map(
        assert_near, jax.tree.leaves(found), [np.asarray(each, np.float64) for each in jax.tree.leaves(wanted)]
    )


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", OF_STORED)
def test_some_stored_tokens_and_the_rest_are_those_of_the_formula(name: str, count: int) -> None:
    settings = OF_STORED[name]
    losses, (dx,), (d_table,) = run_stored(settings, count)
    for found, wanted in zip(losses, expected_of_stored(settings, count), strict=True):
        assert_near(found, wanted)
    for found, argument, values in ((dx, "x", X), (d_table, "table", TABLE)):
        for _ in range(3):  # along random directions, by differences in float64
            direction = random.normal(size=values.shape)
            moved = [
                expected_of_stored(settings, count, **{argument: values + sign * 1e-5 * direction})[0].sum()
                for sign in (1, -1)
            ]
            slope = COTANGENT * (moved[0] - moved[1]) / 2e-5
            assert np.sum(found * direction) == pytest.approx(slope, rel=1e-4, abs=1e-6)
    assert np.all(losses[1] <= np.asarray(expected(settings)[1]) + 1e-6)


@pytest.mark.parametrize("name", OF_STORED)
def test_a_split_vocabulary_gives_the_same_of_stored_tokens(name: str) -> None:
    mesh = jax.make_mesh((4,), ("v",), (jax.sharding.AxisType.Auto,))
    rows, whole = PartitionSpec("v"), PartitionSpec()

    def on_device(table: Any) -> Any:
        losses, (dx,), (d_table,) = run_stored(OF_STORED[name], 3, table, ("v",))
        return losses, jax.lax.psum(dx, "v"), d_table

    split = jax.shard_map(on_device, mesh=mesh, in_specs=rows, out_specs=(whole, whole, rows), check_vma=False)
    found, wanted = jax.jit(split)(TABLE), jax.tree.leaves(run_stored(OF_STORED[name], 3))
    for each, other in zip(jax.tree.leaves(found), wanted, strict=True):
        assert_near(each, np.asarray(other, np.float64))


@pytest.mark.parametrize("axes", [(), ("v",)], ids=["one device", "four"])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_the_most_likely_tokens_and_the_rest_are_read(count: int, axes: tuple[str, ...]) -> None:
    def on_device(table: Any) -> Any:
        return read_most_likely(STUDENT, (X,), (table,), count, axes)

    if axes:
        mesh, whole = jax.make_mesh((4,), axes, (jax.sharding.AxisType.Auto,)), PartitionSpec()
        on_device = jax.shard_map(
            on_device, mesh=mesh, in_specs=PartitionSpec(axes), out_specs=(whole, whole), check_vma=False
        )
    ids, found = jax.tree.map(np.asarray, jax.jit(on_device)(TABLE))
    log_p = log_softmax(cap(X, TABLE, STUDENT))
    ordered = -np.sort(-log_p, axis=-1)
    with np.errstate(divide="ignore"):
        rest = np.log(np.exp(ordered[..., count:]).sum(axis=-1))
    np.testing.assert_array_equal(np.take_along_axis(log_p, ids, axis=-1), ordered[..., :count])
    np.testing.assert_allclose(found[..., :-1], ordered[..., :count], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[..., -1], rest, rtol=1e-5)
