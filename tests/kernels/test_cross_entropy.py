"""Cross-entropy over a padded vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxopt_llm.kernels.cross_entropy import cross_entropy

pytestmark = pytest.mark.core

VOCABULARY, PADDED = 5, 8
TARGETS = np.array([[0, 4, 2], [3, 3, 1]])


def logits(scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(0).normal(size=(2, 3, PADDED))).astype(np.float32)


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def assert_log_softmax(logits: np.ndarray, targets: np.ndarray, vocabulary: int) -> None:
    """Losses and gradients are those of log softmax over the real columns."""
    losses, backward = jax.vjp(lambda x: cross_entropy(x, targets, vocabulary), logits)
    assert losses.devices() == {jax.config.jax_default_device}
    expected = log_probabilities(logits[..., :vocabulary])
    one_hot = targets[..., None] == np.arange(vocabulary)
    np.testing.assert_allclose(losses, -np.sum(one_hot * expected, axis=-1), rtol=1e-6, atol=1e-6)
    (gradient,) = backward(jnp.ones_like(losses))
    np.testing.assert_allclose(gradient[..., :vocabulary], np.exp(expected) - one_hot, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_losses_and_gradients_are_those_of_log_softmax_over_the_real_columns(scale: float) -> None:
    assert_log_softmax(logits(scale), TARGETS, VOCABULARY)


@pytest.mark.gpu
def test_a_gpus_losses_and_gradients_are_those_of_log_softmax(gpu: jax.Device) -> None:
    random = np.random.default_rng(0)
    logits = 3 * random.normal(size=(2, 100, 32_128)).astype(np.float32)
    assert_log_softmax(logits, random.integers(32_000, size=(2, 100)), 32_000)


@pytest.mark.parametrize("value", [1e30, np.inf, np.nan])
def test_padded_columns_get_no_probability_and_no_gradient(value: float) -> None:
    loss_and_gradient = jax.value_and_grad(lambda x: jnp.sum(cross_entropy(x, TARGETS, VOCABULARY)))
    x = logits()
    loss, gradient = loss_and_gradient(x)
    x[..., VOCABULARY:] = value
    other_loss, other_gradient = loss_and_gradient(x)
    assert other_loss == loss
    np.testing.assert_array_equal(other_gradient, gradient)
    assert not other_gradient[..., VOCABULARY:].any()


def test_the_backward_keeps_one_array_of_the_logits_size() -> None:
    _, backward = jax.vjp(lambda x: cross_entropy(x, TARGETS, VOCABULARY), logits())
    assert [leaf.shape for leaf in jax.tree.leaves(backward) if leaf.size >= logits().size] == [logits().shape]
