"""Continuing prompts: what is chosen, and of what it depends."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.execution import scan
from jaxopt_llm.execution.decode import Decoder, Sampling, candidates, choose
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import make_parts
from jaxopt_llm.parallel.sharding import Placement

pytestmark = pytest.mark.core

PARTS = make_parts(toy.CONFIG)
PARAMS = toy.params(PARTS.specs)
PLACEMENT = toy.placement()
SIZE = toy.CONFIG.vocabulary_size
GREEDY = Sampling()
PROMPTS = [np.array(ids, np.int32) for ids in ([256, 7, 9, 30, 2, 11], [256, 5], [256, 40, 41, 42])]


def written(
    prompts: Sequence[np.ndarray],
    count: int,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    placement: Placement = PLACEMENT,
) -> np.ndarray:
    """[B, count]"""
    length = max(prompt.size for prompt in prompts) + count
    decoder = Decoder(PARTS, PARAMS, placement, SIZE, sampling, seed, len(prompts), length)
    return np.stack([*decoder(prompts, count)], axis=1)


@pytest.fixture(scope="module")
def greedy() -> np.ndarray:
    return written(PROMPTS, 6)


def test_greedy_takes_the_likeliest_token_of_the_real_ones(greedy: np.ndarray) -> None:
    prompt = PROMPTS[2]
    row = np.concatenate([prompt, greedy[2]])
    positions = np.arange(row.size, dtype=np.int32)[None]
    logits = scan.forward(PARTS, PARAMS, row[None], Context(positions, np.ones_like(positions), PLACEMENT))[0][0]
    chosen = np.s_[prompt.size - 1 : -1]
    np.testing.assert_array_equal(greedy[2], logits[chosen, :SIZE].argmax(axis=-1))
    assert (logits[chosen].argmax(axis=-1) >= SIZE).any()  # padding rows of the table would win
    assert len(set(greedy[2])) > 2


def test_a_prompt_is_continued_the_same_beside_others(greedy: np.ndarray) -> None:
    for prompt, expected in zip(PROMPTS, greedy, strict=True):
        np.testing.assert_array_equal(written([prompt], 6)[0], expected)


def test_it_is_the_same_on_devices_that_divide_the_parameters(greedy: np.ndarray) -> None:
    np.testing.assert_array_equal(written(PROMPTS, 6, placement=toy.placement(3, fsdp=8)), greedy)


def test_what_is_drawn_is_a_function_of_seed_row_and_index() -> None:
    drawn = written([PROMPTS[0]] * 3, 6, Sampling(temperature=1.0), seed=1)
    assert len({tuple(row) for row in drawn}) == 3
    np.testing.assert_array_equal(written([PROMPTS[0]], 6, Sampling(temperature=1.0), seed=1), drawn[:1])
    assert (written([PROMPTS[0]], 6, Sampling(temperature=1.0), seed=2) != drawn[:1]).any()
    even = jnp.zeros((1, 1000))
    at = [int(choose(even, Sampling(temperature=1.0), jnp.uint32(1), jnp.int32(index))[0]) for index in range(3)]
    assert len(set(at)) == 3


def test_draws_have_the_softmax_of_the_logits_over_the_temperature() -> None:
    logits = jnp.log(jnp.array([0.1, 0.2, 0.7]))
    draws = choose(jnp.tile(logits, (4096, 1)), Sampling(temperature=2.0), jnp.uint32(0), jnp.int32(0))
    expected = np.sqrt([0.1, 0.2, 0.7])
    np.testing.assert_allclose(np.bincount(draws) / 4096, expected / expected.sum(), atol=0.03)


@pytest.mark.parametrize(
    ("sampling", "stay"),
    [
        (Sampling(1.0), {0, 1, 2, 3, 4}),
        (Sampling(1.0, top_k=2), {1, 3}),
        (Sampling(1.0, top_k=9), {0, 1, 2, 3, 4}),
        (Sampling(1.0, top_p=0.4), {1}),  # one at least
        (Sampling(1.0, top_p=0.41), {1, 3}),
        (Sampling(1.0, top_p=0.9), {0, 1, 3}),
        (Sampling(0.1, top_p=0.9), {1}),  # of the probabilities at the temperature
        (Sampling(1.0, top_k=2, top_p=0.5), {1}),  # of what top_k leaves: 4/7
    ],
)
def test_candidates(sampling: Sampling, stay: set[int]) -> None:
    logits = jnp.log(jnp.array([[0.2, 0.4, 0.04, 0.3, 0.06]]))
    kept = candidates(logits, sampling)[0]
    assert set(np.flatnonzero(np.isfinite(kept))) == stay
    chosen = np.array(sorted(stay))
    np.testing.assert_allclose(kept[chosen], logits[0, chosen] / sampling.temperature, rtol=1e-6)
