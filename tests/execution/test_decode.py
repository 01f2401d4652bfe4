"""Token-by-token generation: sampling, the cache, and sharding."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.execution import decode, scan
from jaxopt_llm.execution.by_layer import split_layers
from jaxopt_llm.execution.decode import Sampling, TokenGenerator, choose_slots, filter_logits, sample_tokens
from jaxopt_llm.kernels.attention_types import make_document_ranges
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import parameter_sharding

pytestmark = pytest.mark.core

PARTS = Decoder(toy.CONFIG)
PARAMS = toy.params(PARTS.specs)
BY_LAYER = toy.by_layer(PARAMS)
PLACEMENT = toy.placement()
SIZE = toy.CONFIG.vocabulary_size
GREEDY = Sampling()
PROMPTS = [np.array(ids, np.int32) for ids in ([256, 7, 9, 30, 2, 11], [256, 5], [256, 40, 41, 42])]


def written(
    prompts: Sequence[np.ndarray],
    count: int,
    sampling: Sampling = GREEDY,
    placement: Placement = PLACEMENT,
) -> np.ndarray:
    """[B, count]"""
    length = max(prompt.size for prompt in prompts) + count
    generator = TokenGenerator(PARTS, BY_LAYER, placement, SIZE, sampling, len(prompts), length)
    return np.stack([*generator(prompts, count)], axis=1)


@pytest.fixture(scope="module")
def greedy() -> np.ndarray:
    return written(PROMPTS, 6)


def test_greedy_selects_the_most_likely_real_token(greedy: np.ndarray) -> None:
    prompt = PROMPTS[2]
    row = np.concatenate([prompt, greedy[2]])
    positions = np.arange(row.size, dtype=np.int32)[None]
    logits = scan.forward(
        PARTS, PARAMS, row[None], Context(positions, make_document_ranges(jnp.ones_like(positions)), PLACEMENT)
    )[0][0]
    chosen = np.s_[prompt.size - 1 : -1]
    np.testing.assert_array_equal(greedy[2], logits[chosen, :SIZE].argmax(axis=-1))
    assert (logits[chosen].argmax(axis=-1) >= SIZE).any()  # padding rows of the table have the largest logits
    assert len(set(greedy[2])) > 2


def test_a_continuation_does_not_depend_on_other_prompts(greedy: np.ndarray) -> None:
    for prompt, expected in zip(PROMPTS, greedy, strict=True):
        np.testing.assert_array_equal(written([prompt], 6)[0], expected)


def test_learned_positions_begin_at_a_prompts_first_token() -> None:
    """Rotary positions would not reveal an offset."""
    parts = Decoder(dataclasses.replace(toy.UNIFORM, positions="learned", max_positions=16))
    params = toy.by_layer(toy.params(parts.specs))

    def continued(prompts: list[np.ndarray]) -> np.ndarray:
        generator = TokenGenerator(parts, params, PLACEMENT, SIZE, GREEDY, len(prompts), 12)
        return np.stack([*generator(prompts, 6)], axis=1)

    for prompt, expected in zip(PROMPTS, continued(PROMPTS), strict=True):
        np.testing.assert_array_equal(continued([prompt])[0], expected)


def by_length(scaling: str) -> Decoder:
    """Return a decoder whose frequencies depend on the length of a document, from 8 tokens on."""
    pairs = toy.CONFIG.head_dim // 2
    factors = {"rope.short_factors": (1.0,) * pairs, "rope.long_factors": (4.0,) * pairs}
    own = factors if scaling == "longrope" else {"rope.factor": 4.0}
    return Decoder(replace_fields(toy.CONFIG, {"rope.scaling": scaling, "rope.original_length": 8} | own))


def generate_with(parts: Decoder, prompts: Sequence[np.ndarray], count: int) -> TokenGenerator:
    return TokenGenerator(parts, BY_LAYER, PLACEMENT, SIZE, GREEDY, len(prompts), 24)


def test_keys_are_rotated_again_when_a_row_outgrows_its_short_factors() -> None:
    """Compare with tokens that are chosen without a cache. Each row outgrows them at another time, or not at all."""
    parts, count = by_length("longrope"), 6
    forward = jax.jit(functools.partial(scan.forward, parts))

    def choose(ids: list[int]) -> int:
        row = np.array([ids + [0] * (16 - len(ids))], np.int32)
        positions = np.arange(16, dtype=np.int32)[None]
        context = Context(
            positions, make_document_ranges(jnp.ones_like(positions)), PLACEMENT, lengths=jnp.full((1, 16), len(ids))
        )
        return int(forward(PARAMS, row, context)[0][0, len(ids) - 1, :SIZE].argmax())

    expected = []
    for prompt in PROMPTS:
        ids = prompt.tolist()
        for _ in range(count):
            ids.append(choose(ids))
        expected.append(ids[prompt.size :])
    found = np.stack([*generate_with(parts, PROMPTS, count)(PROMPTS, count)], axis=1)
    np.testing.assert_array_equal(found, expected)
    plain = np.stack([*generate_with(PARTS, PROMPTS, count)(PROMPTS, count)], axis=1)
    assert (found != plain).any(axis=1).tolist() == [True, False, True]


@pytest.mark.parametrize("scaling", ["longrope", "dynamic"])
def test_a_longer_prompt_does_not_reuse_keys_of_other_frequencies(scaling: str) -> None:
    parts = by_length(scaling)
    first, longer = PROMPTS[0], np.concatenate([PROMPTS[0], np.array([17, 4, 99, 23, 56, 78], np.int32)])
    generator = generate_with(parts, [first], 2)
    [*generator([first], 2)]
    again = np.stack([*generator([longer], 6)], axis=1)
    np.testing.assert_array_equal(again, np.stack([*generate_with(parts, [longer], 6)([longer], 6)], axis=1))


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"tensor": 2}, {"fsdp": 2, "tensor": 2}, {"tensor": 4}], ids=str)
def test_sharded_parameters_and_cache_give_the_same_tokens(axes: dict[str, int], greedy: np.ndarray) -> None:
    placement = toy.placement(3, **axes)
    params = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, parameter_sharding(spec, placement)), PARAMS, PARTS.specs
    )
    tables = params["non_layer"]["embedding"]["table"], params["segment_0"]["block_0"]["mlp"]["up"]
    assert all(part.data.size * placement.mesh.size == leaf.size for leaf in tables for part in leaf.addressable_shards)
    generator = TokenGenerator(PARTS, split_layers(params), placement, SIZE, GREEDY, len(PROMPTS), 12)
    np.testing.assert_array_equal(np.stack([*generator(PROMPTS, 6)], axis=1), greedy)
    split, rows = axes.get("tensor", 1), axes.get("fsdp", 1)
    heads = toy.CONFIG.kv_heads // split or toy.CONFIG.kv_heads  # fewer heads than devices: each device has all of them
    for cache in jax.tree.leaves(generator._caches):
        batch = cache.shape[0]
        assert batch >= len(PROMPTS) and batch % rows == 0
        shape = (batch // rows, heads, 12, toy.CONFIG.head_dim)
        assert {part.data.shape for part in cache.addressable_shards} == {shape}


@pytest.mark.parametrize("axes", [{"expert": 4, "fsdp": 2}, {"expert": 2, "tensor": 2}], ids=str)
def test_sharded_experts_give_the_same_tokens(axes: dict[str, int]) -> None:
    """This also holds if training would drop choices, and send each choice only to the device of its expert."""
    config = replace_fields(
        toy.CONFIG,
        {
            "moe.experts": 8,
            "moe.experts_per_token": 3,
            "moe.expert_width": 24,
            "moe.shared_expert_width": 8,
            "moe.capacity_factor": 1.0,
        },
    )
    parts = Decoder(config)
    params, placement = toy.params(parts.specs), toy.placement(3, **axes)
    placement = dataclasses.replace(
        placement, sharding=dataclasses.replace(placement.sharding, expert_exchange="all_to_all")
    )

    def answered(placement: Placement) -> np.ndarray:
        placed = jax.tree.map(
            lambda leaf, spec: jax.device_put(leaf, parameter_sharding(spec, placement)), params, parts.specs
        )
        ups = placed["segment_0"]["block_0"]["mlp"]["up"]
        assert ups.addressable_shards[0].data.size * placement.mesh.size == ups.size
        generator = TokenGenerator(parts, split_layers(placed), placement, SIZE, GREEDY, len(PROMPTS), 12)
        return np.stack([*generator(PROMPTS, 6)], axis=1)

    alone = answered(toy.placement())
    np.testing.assert_array_equal(answered(placement), alone)
    assert len({*alone.ravel()}) > 3


# ---- Tokens in the cache are not computed again.


class Watched(TokenGenerator):
    """Generator that records the slots computed in each call of the program."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.computed: list[tuple[int, int]] = []

    def _advance(self, tokens: Any, padding: Any, first: int, last: int) -> Any:
        self.computed.append((first, tokens.shape[1]))
        return super()._advance(tokens, padding, first, last)


def watched(rows: int = 1, length: int = 80, sampling: Sampling = GREEDY) -> Watched:
    return Watched(PARTS, BY_LAYER, PLACEMENT, SIZE, sampling, rows, length)


def generate(generator: TokenGenerator, prompts: Sequence[np.ndarray], count: int) -> np.ndarray:
    return np.stack([*generator(prompts, count)], axis=1)


@functools.cache
def unwatched(rows: int) -> TokenGenerator:
    return watched(rows)


def afresh(prompts: Sequence[np.ndarray]) -> np.ndarray:
    """Return four tokens, computed with an empty cache."""
    generator = unwatched(len(prompts))
    generator._cached_ids = generator._cached_ids[:, :0]
    return generate(generator, prompts, 4)


LONG = np.random.default_rng(0).integers(0, 256, 70).astype(np.int32)


def test_only_new_tokens_of_a_prompt_are_computed() -> None:
    generator = watched()
    first = generate(generator, [LONG[:20]], 4)[0]
    assert generator.computed == [(0, 32), (20, 1), (21, 1), (22, 1)]
    # The cache holds the generated tokens except the last one. New tokens follow; prompts can also be shorter again.
    for prompt, begin, size in (
        (np.concatenate([LONG[:20], first, LONG[30:35]]), 23, 16),
        (np.concatenate([LONG[:18], LONG[40:58]]), 18, 32),
        (LONG[:18], 17, 16),
        (LONG[:70], 18, 64),  # would extend beyond the 80 slots, so it begins at 16
        (LONG[1:6], 0, 16),
    ):
        generator.computed.clear()
        found = generate(generator, [prompt], 4)
        assert generator.computed[0] == (min(begin, 80 - size), size)
        np.testing.assert_array_equal(found, afresh([prompt]))
    assert generator._step._cache_size() == 4  # programs: of 1, 16, 32 and 64 tokens


def test_an_interrupted_answer_is_continued() -> None:
    generator = watched()
    steps = generator([LONG[:20]], 30)
    begun = [int(next(steps)[0]) for _ in range(3)]
    prompt = np.array([*LONG[:20], *begun, 7, 8], np.int32)
    generator.computed.clear()
    found = generate(generator, [prompt], 4)
    assert generator.computed[0] == (23, 16)
    np.testing.assert_array_equal(found, afresh([prompt]))


def test_rows_share_a_common_prefix() -> None:
    generator = watched(rows=3)
    generate(generator, PROMPTS, 2)
    # The second time each row gets another number of tokens, so all rows shift, except for one common padding slot.
    for added, begin in (([9, 8], [9, 8], [9, 8]), 6), (([], [3], [3]), 1):
        prompts = [np.array([*p, *more], np.int32) for p, more in zip(PROMPTS, added, strict=True)]
        generator.computed.clear()
        found = generate(generator, prompts, 4)
        assert generator.computed[0] == (begin, 16)
        np.testing.assert_array_equal(found, afresh(prompts))


# ---- The cache grows with the text.


@pytest.mark.parametrize(
    ("needed", "slots"), [(1, 256), (256, 256), (257, 384), (385, 512), (513, 768), (3000, 3072), (3073, 4000)]
)
def test_a_cache_has_at_most_half_more_slots_than_needed(needed: int, slots: int) -> None:
    assert choose_slots(needed, 4000) == slots


@pytest.mark.parametrize("axes", [{}, {"tensor": 2}, {"fsdp": 2}, {"fsdp": 2, "tensor": 4}], ids=str)
def test_a_growing_cache_gives_the_same_tokens(axes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    placement, prompts = toy.placement(3, **axes), [LONG[:9], LONG[20:24], LONG[30:39], LONG[40:42]]
    params = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, parameter_sharding(spec, placement)), PARAMS, PARTS.specs
    )
    by_layer = split_layers(params)

    def make() -> TokenGenerator:
        return TokenGenerator(PARTS, by_layer, placement, SIZE, GREEDY, len(prompts), 50)

    expected = generate(make(), prompts, 30)
    monkeypatch.setattr(decode, "SMALLEST_CACHE", 8)
    monkeypatch.setattr(decode, "SMALL_SHARE", 0)
    generator = make()
    tokens, slots = [], []
    for token in generator(prompts, 30):
        tokens.append(token)
        slots.append(jax.tree.leaves(generator._caches)[0].shape[2])
    np.testing.assert_array_equal(np.stack(tokens, axis=1), expected)
    # The first token and the next step are on their way when the first one is yielded; the last one needs no step.
    assert slots == [choose_slots(9 + written, 50) for written in [*range(1, 30), 29]]
    assert {*slots} == {12, 16, 24, 32, 48}
    # What is in the cache is used again after it has grown, and by the next call.
    longer = [np.concatenate([prompt, row[:-1]]) for prompt, row in zip(prompts, expected, strict=True)]
    np.testing.assert_array_equal(generate(generator, longer, 4), generate(make(), longer, 4))
    assert jax.tree.leaves(generator._caches)[0].shape[2] == 48


def test_weights_that_are_read_anyway_allow_for_a_larger_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below an eighth of their bytes, the slots of a cache take no time to speak of."""
    monkeypatch.setattr(decode, "SMALLEST_CACHE", 2)
    weights = sum(x.nbytes for x in jax.tree.leaves(BY_LAYER))
    generator = TokenGenerator(PARTS, BY_LAYER, PLACEMENT, SIZE, GREEDY, 1, 100_000)
    caches = jax.tree.leaves(generator._caches)
    cache, slots = sum(x.nbytes for x in caches), caches[0].shape[2]
    assert weights / 8 * (1 - 1 / slots) < cache < 1.5 * weights / 8


def test_sampling_continues_between_calls() -> None:
    generator = watched(sampling=Sampling(temperature=2.0))
    assert (generate(generator, [LONG[:5]], 6) != generate(generator, [LONG[:5]], 6)).any()


def test_samples_are_a_function_of_seed_row_and_index() -> None:
    drawn = written([PROMPTS[0]] * 3, 6, Sampling(temperature=1.0, seed=1))
    assert len({tuple(row) for row in drawn}) == 3
    np.testing.assert_array_equal(written([PROMPTS[0]], 6, Sampling(temperature=1.0, seed=1)), drawn[:1])
    assert (written([PROMPTS[0]], 6, Sampling(temperature=1.0, seed=2)) != drawn[:1]).any()
    even = jnp.zeros((1, 1000))
    at = [int(sample_tokens(even, Sampling(temperature=1.0), jnp.uint32(1), jnp.int32(index))[0]) for index in range(3)]
    assert len(set(at)) == 3


def test_samples_follow_the_softmax_at_the_temperature() -> None:
    logits = jnp.log(jnp.array([0.1, 0.2, 0.7]))
    draws = sample_tokens(jnp.tile(logits, (4096, 1)), Sampling(temperature=2.0), jnp.uint32(0), jnp.int32(0))
    expected = np.sqrt([0.1, 0.2, 0.7])
    np.testing.assert_allclose(np.bincount(draws) / 4096, expected / expected.sum(), atol=0.03)


@pytest.mark.parametrize(
    ("sampling", "stay"),
    [
        (Sampling(1.0), {0, 1, 2, 3, 4}),
        (Sampling(1.0, top_k=2), {1, 3}),
        (Sampling(1.0, top_k=9), {0, 1, 2, 3, 4}),
        (Sampling(1.0, top_p=0.4), {1}),  # at least one token
        (Sampling(1.0, top_p=0.41), {1, 3}),
        (Sampling(1.0, top_p=0.9), {0, 1, 3}),
        (Sampling(0.1, top_p=0.9), {1}),  # probabilities are those at this temperature
        (Sampling(1.0, top_k=2, top_p=0.5), {1}),  # relative to the tokens that top_k keeps: 4/7
    ],
)
def test_filter_logits(sampling: Sampling, stay: set[int]) -> None:
    logits = jnp.log(jnp.array([[0.2, 0.4, 0.04, 0.3, 0.06]]))
    kept = filter_logits(logits, sampling)[0]
    assert set(np.flatnonzero(np.isfinite(kept))) == stay
    chosen = np.array(sorted(stay))
    np.testing.assert_allclose(kept[chosen], logits[0, chosen] / sampling.temperature, rtol=1e-6)
