"""Continuing prompts: what is chosen, and of what it depends."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.execution import scan
from jaxopt_llm.execution.decode import Decoder, Sampling, candidates, choose
from jaxopt_llm.kernels.spans import of_documents
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
    logits = scan.forward(
        PARTS, PARAMS, row[None], Context(positions, of_documents(jnp.ones_like(positions)), PLACEMENT)
    )[0][0]
    chosen = np.s_[prompt.size - 1 : -1]
    np.testing.assert_array_equal(greedy[2], logits[chosen, :SIZE].argmax(axis=-1))
    assert (logits[chosen].argmax(axis=-1) >= SIZE).any()  # padding rows of the table would win
    assert len(set(greedy[2])) > 2


def test_a_prompt_is_continued_the_same_beside_others(greedy: np.ndarray) -> None:
    for prompt, expected in zip(PROMPTS, greedy, strict=True):
        np.testing.assert_array_equal(written([prompt], 6)[0], expected)


def test_learned_positions_begin_at_a_prompts_first_token() -> None:
    """Rotary ones would not show where they begin."""
    parts = make_parts(dataclasses.replace(toy.UNIFORM, positions="learned", max_positions=16))
    params = toy.params(parts.specs)

    def continued(prompts: list[np.ndarray]) -> np.ndarray:
        decoder = Decoder(parts, params, PLACEMENT, SIZE, GREEDY, 0, len(prompts), 12)
        return np.stack([*decoder(prompts, 6)], axis=1)

    for prompt, expected in zip(PROMPTS, continued(PROMPTS), strict=True):
        np.testing.assert_array_equal(continued([prompt])[0], expected)


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"tensor": 2}, {"fsdp": 2, "tensor": 2}, {"tensor": 4}], ids=str)
def test_it_is_the_same_on_devices_that_divide_parameters_and_cache(axes: dict[str, int], greedy: np.ndarray) -> None:
    placement = toy.placement(3, **axes)
    params = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, placement.parameters(spec)), PARAMS, PARTS.specs)
    tables = params["outer"]["embedding"]["table"], params["segment_0"]["block_0"]["mlp"]["up"]
    assert all(part.data.size * placement.mesh.size == leaf.size for leaf in tables for part in leaf.addressable_shards)
    decoder = Decoder(PARTS, params, placement, SIZE, GREEDY, 0, len(PROMPTS), 12)
    np.testing.assert_array_equal(np.stack([*decoder(PROMPTS, 6)], axis=1), greedy)
    split, rows = axes.get("tensor", 1), axes.get("fsdp", 1)
    heads = toy.CONFIG.kv_heads // split or toy.CONFIG.kv_heads  # fewer than devices: each has all
    for cache in jax.tree.leaves(decoder._caches):
        layers, batch, *_ = cache.shape
        assert batch >= len(PROMPTS) and batch % rows == 0
        shape = (layers, batch // rows, heads, 12, toy.CONFIG.head_dim)
        assert {part.data.shape for part in cache.addressable_shards} == {shape}


@pytest.mark.parametrize("axes", [{"expert": 4, "fsdp": 2}, {"expert": 2, "tensor": 2}], ids=str)
def test_experts_answer_the_same_wherever_they_are(axes: dict[str, int]) -> None:
    """Also where training would drop choices, and send each to its expert's device alone."""
    config = dataclasses.replace(
        toy.CONFIG, experts=8, experts_per_token=3, expert_width=24, shared_expert_width=8, expert_capacity=1.0
    )
    parts = make_parts(config)
    params, placement = toy.params(parts.specs), toy.placement(3, **axes)
    placement = dataclasses.replace(
        placement, sharding=dataclasses.replace(placement.sharding, expert_exchange="all_to_all")
    )

    def answered(placement: Placement) -> np.ndarray:
        placed = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, placement.parameters(spec)), params, parts.specs)
        ups = placed["segment_0"]["block_0"]["mlp"]["up"]
        assert ups.addressable_shards[0].data.size * placement.mesh.size == ups.size
        decoder = Decoder(parts, placed, placement, SIZE, GREEDY, 0, len(PROMPTS), 12)
        return np.stack([*decoder(PROMPTS, 6)], axis=1)

    alone = answered(toy.placement())
    np.testing.assert_array_equal(answered(placement), alone)
    assert len({*alone.ravel()}) > 3


# ---- What the cache has is not computed again.


class Watched(Decoder):
    """Which slots were computed in each call of the program."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.computed: list[tuple[int, int]] = []

    def _advance(self, tokens: Any, padding: Any, first: int, last: int) -> Any:
        self.computed.append((first, tokens.shape[1]))
        return super()._advance(tokens, padding, first, last)


def watched(rows: int = 1, length: int = 80, sampling: Sampling = GREEDY) -> Watched:
    return Watched(PARTS, PARAMS, PLACEMENT, SIZE, sampling, 0, rows, length)


def of(decoder: Decoder, prompts: Sequence[np.ndarray], count: int) -> np.ndarray:
    return np.stack([*decoder(prompts, count)], axis=1)


@functools.cache
def unwatched(rows: int) -> Decoder:
    return watched(rows)


def afresh(prompts: Sequence[np.ndarray]) -> np.ndarray:
    """Four tokens, with nothing in the cache that could be used again."""
    decoder = unwatched(len(prompts))
    decoder._held = decoder._held[:, :0]
    return of(decoder, prompts, 4)


LONG = np.random.default_rng(0).integers(0, 256, 70).astype(np.int32)


def test_of_a_prompt_that_goes_on_only_the_rest_is_computed() -> None:
    decoder = watched()
    first = of(decoder, [LONG[:20]], 4)[0]
    assert decoder.computed == [(0, 32), (20, 1), (21, 1), (22, 1)]
    # What was written, but its last token, which nobody has read; then what follows; and it goes back as well.
    for prompt, begin, size in (
        (np.concatenate([LONG[:20], first, LONG[30:35]]), 23, 16),
        (np.concatenate([LONG[:18], LONG[40:58]]), 18, 32),
        (LONG[:18], 17, 16),
        (LONG[:70], 18, 64),  # would reach beyond the 80 slots: begins at 16
        (LONG[1:6], 0, 16),
    ):
        decoder.computed.clear()
        found = of(decoder, [prompt], 4)
        assert decoder.computed[0] == (min(begin, 80 - size), size)
        np.testing.assert_array_equal(found, afresh([prompt]))
    assert decoder._step._cache_size() == 4  # programs: of 1, 16, 32 and 64 tokens


def test_what_was_broken_off_is_gone_on_with() -> None:
    decoder = watched()
    steps = decoder([LONG[:20]], 30)
    begun = [int(next(steps)[0]) for _ in range(3)]
    prompt = np.array([*LONG[:20], *begun, 7, 8], np.int32)
    decoder.computed.clear()
    found = of(decoder, [prompt], 4)
    assert decoder.computed[0] == (23, 16)
    np.testing.assert_array_equal(found, afresh([prompt]))


def test_rows_go_on_together() -> None:
    decoder = watched(rows=3)
    of(decoder, PROMPTS, 2)
    # The second time each by another number: but for a slot before all of them, each row is elsewhere.
    for added, begin in (([9, 8], [9, 8], [9, 8]), 6), (([], [3], [3]), 1):
        prompts = [np.array([*p, *more], np.int32) for p, more in zip(PROMPTS, added, strict=True)]
        decoder.computed.clear()
        found = of(decoder, prompts, 4)
        assert decoder.computed[0] == (begin, 16)
        np.testing.assert_array_equal(found, afresh(prompts))


def test_draws_go_on_from_call_to_call() -> None:
    decoder = watched(sampling=Sampling(temperature=2.0))
    assert (of(decoder, [LONG[:5]], 6) != of(decoder, [LONG[:5]], 6)).any()


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
