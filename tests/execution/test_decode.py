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
from jaxopt_llm.execution.decode import Drawn, Request, TokenGenerator, choose_slots
from jaxopt_llm.execution.sampling import Draws, Sampling, draw_tokens, make_draws
from jaxopt_llm.kernels import attention_check, attention_xla
from jaxopt_llm.kernels.attention_types import AttentionParameters, make_document_ranges
from jaxopt_llm.model import cache, self_attention
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
GREEDY, generate = Sampling(), toy.continue_prompts
PROMPTS = [np.array(ids, np.int32) for ids in ([256, 7, 9, 30, 2, 11], [256, 5], [256, 40, 41, 42])]


def written(
    prompts: Sequence[np.ndarray],
    count: int,
    sampling: Sampling = GREEDY,
    placement: Placement = PLACEMENT,
) -> np.ndarray:
    """[B, count]"""
    length = max(prompt.size for prompt in prompts) + count
    return generate(TokenGenerator(PARTS, BY_LAYER, placement, SIZE, len(prompts), length), prompts, count, sampling)


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


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_wrong_kernel_draws_no_token(
    factor: float, greedy: np.ndarray, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called = list[Any]()

    class Kernel:
        @staticmethod
        def forward(parameters: AttentionParameters, *of: Any) -> Any:
            called.append(isinstance(of[0], jax.core.Tracer) and of[0].shape[0] == len(PROMPTS))
            out, log_sum = attention_xla.forward(parameters, *of)
            return out * factor, log_sum

    monkeypatch.setattr(self_attention, "select_for_ring", lambda *of: Kernel)
    monkeypatch.setattr(attention_check, "_verdicts_file", lambda: None)
    np.testing.assert_array_equal(written(PROMPTS, 6), greedy)
    assert any(called) == (factor == 1), "the program has the kernel if it is right"
    assert ("pallas is wrong on this GPU" in caplog.text) == (factor != 1)


def test_learned_positions_begin_at_a_prompts_first_token() -> None:
    """Rotary positions would not reveal an offset."""
    parts = Decoder(dataclasses.replace(toy.UNIFORM, positions="learned", max_positions=16))
    params = toy.by_layer(toy.params(parts.specs))

    def continued(prompts: list[np.ndarray]) -> np.ndarray:
        return generate(TokenGenerator(parts, params, PLACEMENT, SIZE, len(prompts), 12), prompts, 6)

    for prompt, expected in zip(PROMPTS, continued(PROMPTS), strict=True):
        np.testing.assert_array_equal(continued([prompt])[0], expected)


def by_length(scaling: str) -> Decoder:
    """Return a decoder whose frequencies depend on the length of a document, from 8 tokens on."""
    pairs = toy.CONFIG.head_dim // 2
    factors = {"rope.short_factors": (1.0,) * pairs, "rope.long_factors": (4.0,) * pairs}
    own = factors if scaling == "longrope" else {"rope.factor": 4.0}
    return Decoder(replace_fields(toy.CONFIG, {"rope.scaling": scaling, "rope.original_length": 8} | own))


def make_generator(parts: Decoder, rows: int) -> TokenGenerator:
    return TokenGenerator(parts, BY_LAYER, PLACEMENT, SIZE, rows, 24)


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
    for rows in (3, 2):  # with two, a prompt waits for a row
        found = generate(make_generator(parts, rows), PROMPTS, count)
        np.testing.assert_array_equal(found, expected)
    plain = generate(make_generator(PARTS, 3), PROMPTS, count)
    assert (found != plain).any(axis=1).tolist() == [True, False, True]


@pytest.mark.parametrize("scaling", ["longrope", "dynamic"])
def test_a_longer_prompt_does_not_reuse_keys_of_other_frequencies(scaling: str) -> None:
    parts = by_length(scaling)
    first, longer = PROMPTS[0], np.concatenate([PROMPTS[0], np.array([17, 4, 99, 23, 56, 78], np.int32)])
    generator = make_generator(parts, 1)
    generate(generator, [first], 2)
    again = generate(generator, [longer], 6)
    np.testing.assert_array_equal(again, generate(make_generator(parts, 1), [longer], 6))


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"tensor": 2}, {"fsdp": 2, "tensor": 2}, {"tensor": 4}], ids=str)
def test_sharded_parameters_and_cache_give_the_same_tokens(axes: dict[str, int], greedy: np.ndarray) -> None:
    placement = toy.placement(3, **axes)
    params = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, parameter_sharding(spec, placement)), PARAMS, PARTS.specs
    )
    tables = params["non_layer"]["embedding"]["table"], params["segment_0"]["block_0"]["mlp"]["up"]
    assert all(part.data.size * placement.mesh.size == leaf.size for leaf in tables for part in leaf.addressable_shards)
    generator = TokenGenerator(PARTS, split_layers(params), placement, SIZE, len(PROMPTS), 12)
    np.testing.assert_array_equal(generate(generator, PROMPTS, 6), greedy)
    split, rows = axes.get("tensor", 1), axes.get("fsdp", 1)
    heads = toy.CONFIG.kv_heads // split or toy.CONFIG.kv_heads  # fewer heads than devices: each device has all of them
    for array in jax.tree.leaves(generator._caches):
        batch = array.shape[0]
        assert batch >= len(PROMPTS) and batch % rows == 0
        shape = (batch // rows, heads, 12, toy.CONFIG.head_dim)
        assert {part.data.shape for part in array.addressable_shards} == {shape}


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
        generator = TokenGenerator(parts, split_layers(placed), placement, SIZE, len(PROMPTS), 12)
        return generate(generator, PROMPTS, 6)

    alone = answered(toy.placement())
    np.testing.assert_array_equal(answered(placement), alone)
    assert len({*alone.ravel()}) > 3


# ---- Tokens in the cache are not computed again.


class Watched(TokenGenerator):
    """Generator that records the first slot and the number of tokens of each row that is filled."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.filled: list[tuple[int, int]] = []

    def _make_filling(self, *given: Any) -> Any:
        filling = super()._make_filling(*given)
        self.filled += [(int(first), filling.tokens.shape[1]) for first in filling.first[filling.is_new]]
        return filling


def watched(rows: int = 1, length: int = 80) -> Watched:
    return Watched(PARTS, BY_LAYER, PLACEMENT, SIZE, rows, length)


@functools.cache
def unwatched(rows: int) -> TokenGenerator:
    return watched(rows)


def afresh(prompts: Sequence[np.ndarray]) -> np.ndarray:
    """Return four tokens, computed with an empty cache."""
    generator = unwatched(len(prompts))
    generator.load(BY_LAYER)
    return generate(generator, prompts, 4)


LONG = np.random.default_rng(0).integers(0, 256, 70).astype(np.int32)


def test_only_new_tokens_of_a_prompt_are_computed() -> None:
    generator = watched()
    first = generate(generator, [LONG[:20]], 4)[0]
    assert generator.filled == [(0, 32)]
    # The cache holds the generated tokens except the last one. New tokens follow; prompts can also be shorter again.
    for prompt, begin, size in (
        (np.concatenate([LONG[:20], first, LONG[30:35]]), 23, 16),
        (np.concatenate([LONG[:18], LONG[40:58]]), 18, 32),
        (LONG[:18], 17, 16),
        (LONG[:70], 18, 64),  # would extend beyond the 80 slots, so it begins at 16
        (LONG[1:6], 0, 16),
    ):
        generator.filled.clear()
        found = generate(generator, [prompt], 4)
        assert generator.filled == [(min(begin, 80 - size), size)]
        np.testing.assert_array_equal(found, afresh([prompt]))
    assert generator._programs.fill._cache_size() == 3  # programs: of 16, 32 and 64 tokens
    assert generator._programs.step._cache_size() == 1


def test_an_interrupted_answer_is_continued() -> None:
    generator, begun = watched(), list[int]()
    for drawn in generator.run([Request(LONG[:20], 30)], lambda request: len(begun) == 3):
        begun.append(drawn.token)
    prompt = np.array([*LONG[:20], *begun, 7, 8], np.int32)
    generator.filled.clear()
    found = generate(generator, [prompt], 4)
    assert generator.filled == [(23, 16)]
    np.testing.assert_array_equal(found, afresh([prompt]))


def test_a_row_that_has_ended_keeps_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step writes keys in every row. In one that has ended, they stand after its last slot, also in a full cache."""
    monkeypatch.setattr(decode, "SMALLEST_CACHE", 8)
    monkeypatch.setattr(decode, "SMALL_SHARE", 0)
    generator = watched(rows=2, length=64)
    requests = [Request(LONG[:28], 5), Request(LONG[40:42], 8)]  # the first one fills all of 32 slots
    drawn = [each.token for each in generator.run(requests, lambda request: False) if each.request is requests[0]]
    prompt = np.array([*LONG[:28], *drawn, 7], np.int32)
    generator.filled.clear()
    found = generate(generator, [prompt], 4)
    assert generator.filled == [(32, 16)]
    np.testing.assert_array_equal(found, afresh([prompt]))


def test_a_request_that_comes_again_gets_no_token_of_its_first_turn() -> None:
    generator, request = watched(), Request(LONG[:20], 9)
    first = next(generator.run([request], lambda request: False))
    again = [each.token for each in generator.run([request], lambda request: False)]
    assert again[0] == first.token
    np.testing.assert_array_equal(again, alone(LONG[:20]))


def test_a_beginning_is_computed_once() -> None:
    """Prompts that begin alike get copies of it, also from a row that another request uses."""
    prompts = [np.concatenate([LONG[:30], LONG[40 + row : 44 + row]]) for row in range(3)] + [LONG[50:55]]
    generator = watched(rows=4)
    found = generate(generator, prompts, 4)
    assert sorted(generator.filled) == [(0, 64), (0, 64), (30, 16), (30, 16)]
    expected = np.concatenate([afresh([prompt]) for prompt in prompts])
    np.testing.assert_array_equal(found, expected)
    generator.filled.clear()
    again = [np.concatenate([prompts[2], [5]]), prompts[3], prompts[0], prompts[1]]
    found = generate(generator, [np.asarray(prompt, np.int32) for prompt in again], 4)
    np.testing.assert_array_equal(found[1:], expected[[3, 0, 1]])
    assert all(size == 16 for _, size in generator.filled)


@pytest.mark.parametrize(("small", "sizes"), [(40, [1, 2, 1]), (0, [1, 1, 1, 1]), (80, [1, 3])])
def test_rows_that_are_filled_next_to_others_take_the_memory_of_a_small_cache(small: int, sizes: list[int]) -> None:
    """Copies of rows take as many slots as a small cache of all rows; at least one row is filled."""
    generator, places = watched(rows=4), list[int]()
    generator._small, fill = small, generator._fill
    generator._fill = lambda chosen: (places.append(len(chosen)), fill(chosen))[1]  # type: ignore[method-assign]
    first, *others = [Request(LONG[begin : begin + 5], 9, number=begin) for begin in range(4)]
    generator.add(first)
    drawn = generator.advance()
    for request in others:
        generator.add(request)
    while generator.is_busy:
        drawn += generator.advance()
    assert places == sizes
    np.testing.assert_array_equal([each.token for each in drawn if each.request is others[2]], alone(LONG[3:8]))


def alone(prompt: np.ndarray) -> np.ndarray:
    """Return nine tokens, computed with an empty cache."""
    unwatched(1).load(BY_LAYER)
    return generate(unwatched(1), [prompt], 9)[0]


@pytest.mark.parametrize(
    ("axes", "rewind"), [({}, 0), ({}, 128), ({"fsdp": 2}, 4), ({"fsdp": 2, "tensor": 2}, 4)], ids=str
)
def test_a_request_takes_the_row_of_one_that_ended(
    axes: dict[str, int], rewind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request gets the tokens that it gets alone, whichever rows it shares the devices with.

    Its layers with a window have rings of 3 slots and `rewind`, which are written several times over.
    """
    expected = functools.cache(lambda begin: alone(LONG[begin : begin + 3 + 4 * begin]))
    expected(0)  # by a generator with larger rings
    monkeypatch.setattr(cache, "REWIND", rewind)
    placement = toy.placement(3, **axes)
    params = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, parameter_sharding(spec, placement)), PARAMS, PARTS.specs
    )
    generator = TokenGenerator(PARTS, split_layers(params), placement, SIZE, 2, 80)
    counts, ends = [9, 2, 5, 1, 7, 3, 4], {4: 2}
    prompts = [LONG[begin : begin + 3 + 4 * begin] for begin in range(len(counts))]
    requests = [
        Request(prompt, count, number=row) for row, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
    ]
    drawn: list[list[Drawn]] = [[] for _ in counts]
    for each in generator.run(requests, lambda request: len(drawn[request.number]) == ends.get(request.number)):
        drawn[each.request.number].append(each)
    assert [len(each) for each in drawn] == [9, 2, 5, 1, 2, 3, 4]
    for begin, found in enumerate(drawn):
        np.testing.assert_array_equal([each.token for each in found], expected(begin)[: len(found)])


@pytest.fixture
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of 7 slots."""
    unwatched(1), unwatched(4)  # with whole caches
    monkeypatch.setattr(cache, "REWIND", 4)


@pytest.mark.usefixtures("small_rings")
def test_a_ring_is_continued_near_its_end_only() -> None:
    generator = watched()
    first = generate(generator, [LONG[:20]], 4)[0]
    assert {x.shape[2] for x in jax.tree.leaves(generator._caches)} == {7, 80}
    for prompt, filled in (
        (np.concatenate([LONG[:20], first, LONG[30:35]]), (23, 16)),
        (np.concatenate([LONG[:20], first, LONG[30:34], LONG[:4]]), (28, 16)),  # 4 of 32 slots are written again
        (np.concatenate([LONG[:20], first, LONG[40:46]]), (0, 32)),  # 11 of 35: keys that 24 would see are lost
        (LONG[:6], (0, 16)),
        (LONG[:59], (6, 64)),
        (np.concatenate([LONG[:59], LONG[:17]]), (0, 80)),  # 32 from 59 on extend beyond the cache, and 48 is lost
    ):
        generator.filled.clear()
        found = generate(generator, [prompt], 4)
        assert generator.filled == [filled]
        np.testing.assert_array_equal(found, afresh([prompt]))


@pytest.mark.usefixtures("small_rings")
def test_a_ring_lacks_what_a_longer_text_has_overwritten() -> None:
    """A text of 26 slots, then its first 23 again: the ring still lacks what the last three had overwritten."""
    generator = watched()
    generate(generator, [LONG[:23]], 4)
    generate(generator, [LONG[:23]], 1)
    assert generator.filled[-1] == (22, 16)
    prompt = np.concatenate([LONG[:20], LONG[40:44]])
    np.testing.assert_array_equal(generate(generator, [prompt], 4), afresh([prompt]))
    assert generator.filled[-1] == (0, 32)


@pytest.mark.usefixtures("small_rings")
@pytest.mark.parametrize(("rest", "filled"), [(4, [(0, 64), (30, 16), (30, 16)]), (9, [(0, 64)] * 3)])
def test_a_beginning_is_copied_if_the_ring_still_has_its_end(rest: int, filled: list[tuple[int, int]]) -> None:
    """Otherwise the prompts are computed whole, and together."""
    prompts = [np.concatenate([LONG[:30], LONG[40 + row : 40 + row + rest]]) for row in range(3)]
    generator = watched(rows=4)
    found = generate(generator, prompts, 4)
    assert generator.filled == filled
    np.testing.assert_array_equal(found, np.concatenate([afresh([prompt]) for prompt in prompts]))


def test_log_probabilities_are_those_of_the_model() -> None:
    prompt, sampling = PROMPTS[0], Sampling(temperature=2.0, top_k=5, repetition_penalty=1.5, seed=3)
    generator = watched()
    drawn = [*generator.run([Request(prompt, 6, sampling)], lambda request: False)]
    row = np.concatenate([prompt, [each.token for each in drawn]]).astype(np.int32)
    positions = np.arange(row.size, dtype=np.int32)[None]
    context = Context(positions, make_document_ranges(jnp.ones_like(positions)), PLACEMENT)
    logits = scan.forward(PARTS, PARAMS, row[None], context)[0][0, prompt.size - 1 : -1, :SIZE]
    expected = jax.nn.log_softmax(logits)[np.arange(6), row[prompt.size :]]
    np.testing.assert_allclose([each.log_probability for each in drawn], expected, rtol=1e-4)


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
        return TokenGenerator(PARTS, by_layer, placement, SIZE, len(prompts), 50)

    expected = generate(make(), prompts, 30)
    monkeypatch.setattr(decode, "SMALLEST_CACHE", 8)
    monkeypatch.setattr(decode, "SMALL_SHARE", 0)
    monkeypatch.setattr(cache, "REWIND", 17)  # rings of 20 slots: they grow, and then come round
    generator = make()
    tokens: list[list[int]] = [[] for _ in prompts]
    slots = []
    for each in generator.run([Request(prompt, 30, number=row) for row, prompt in enumerate(prompts)], lambda _: False):
        tokens[each.request.number].append(each.token)
        if each.request.number == 0:
            slots.append(count_slots(generator))
    np.testing.assert_array_equal(tokens, expected)
    # The first token and the next step are on their way when the first one is yielded; the last one needs no step.
    assert slots == [choose_slots(9 + written, 50) for written in [*range(1, 30), 29]]
    assert {*slots} == {12, 16, 24, 32, 48}
    # What is in the cache is used again after it has grown, and by the next call.
    longer = [np.concatenate([prompt, row[:-1]]) for prompt, row in zip(prompts, expected, strict=True)]
    np.testing.assert_array_equal(generate(generator, longer, 4), generate(make(), longer, 4))
    assert count_slots(generator) == 48
    assert {x.shape[2] for x in jax.tree.leaves(generator._caches)} == {20, 48}


def count_slots(generator: TokenGenerator) -> int:
    """Return the slots of the layers without a window."""
    return max(x.shape[2] for x in jax.tree.leaves(generator._caches))


def test_weights_that_are_read_anyway_allow_for_a_larger_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below an eighth of their bytes, the slots of a cache take no time to speak of."""
    monkeypatch.setattr(decode, "SMALLEST_CACHE", 2)
    weights = sum(x.nbytes for x in jax.tree.leaves(BY_LAYER))
    generator = TokenGenerator(PARTS, BY_LAYER, PLACEMENT, SIZE, 1, 100_000)
    held, slots = sum(x.nbytes for x in jax.tree.leaves(generator._caches)), count_slots(generator)
    assert weights / 8 * (1 - 1 / slots) < held < 1.5 * weights / 8


def test_requests_with_other_numbers_draw_other_tokens() -> None:
    generator, sampling = watched(), Sampling(temperature=2.0)

    def draw(number: int) -> list[int]:
        return [each.token for each in generator.run([Request(LONG[:5], 6, sampling, number)], lambda request: False)]

    assert draw(0) == draw(0) != draw(1)


def test_samples_are_a_function_of_seed_number_and_index() -> None:
    drawn = written([PROMPTS[0]] * 3, 6, Sampling(temperature=1.0, seed=1))
    assert len({tuple(row) for row in drawn}) == 3
    np.testing.assert_array_equal(written([PROMPTS[0]], 6, Sampling(temperature=1.0, seed=1)), drawn[:1])
    assert (written([PROMPTS[0]], 6, Sampling(temperature=1.0, seed=2)) != drawn[:1]).any()
    even = jnp.zeros((3, 1000))
    draws = make_draws([Sampling(temperature=1.0, seed=1)] * 3, [0] * 3, [0, 1, 2])
    assert len({*draw_tokens(even, draws.replace(samples=True))[0].tolist()}) == 3


def test_rows_keep_their_own_settings() -> None:
    """A greedy request beside one that samples, filters and penalises draws what it draws alone, and so does that."""
    settings = [GREEDY, Sampling(1.5, top_k=3, seed=4), Sampling(repetition_penalty=2.0), Sampling(0.7, min_p=0.1)]

    def draw(rows: int) -> list[list[int]]:
        drawn: list[list[int]] = [[] for _ in settings]
        requests = [Request(PROMPTS[0], 6, sampling, number) for number, sampling in enumerate(settings)]
        for each in TokenGenerator(PARTS, BY_LAYER, PLACEMENT, SIZE, rows, 12).run(requests, lambda request: False):
            drawn[each.request.number].append(each.token)
        return drawn

    together = draw(4)
    assert together == draw(1)
    np.testing.assert_array_equal(together[:1], written(PROMPTS[:1], 6))
    assert len({*map(tuple, together)}) == 4


def test_the_most_likely_tokens_come_with_a_drawn_one() -> None:
    """Of the model, before any setting of sampling, as many as each request asks for."""
    settings = ((0, GREEDY), (3, Sampling(9.0, seed=1, repetition_penalty=2.0)), (20, GREEDY))
    requests = [Request(PROMPTS[0], 4, sampling, most_likely=count) for count, sampling in settings]
    drawn = [*TokenGenerator(PARTS, BY_LAYER, PLACEMENT, SIZE, 3, 12).run(requests, lambda request: False)]
    for request in requests:
        own = [each for each in drawn if each.request is request]
        row = np.array([*request.prompt, *(each.token for each in own)], np.int32)
        context = Context(np.arange(row.size)[None], make_document_ranges(jnp.ones((1, row.size), int)), PLACEMENT)
        logits = scan.forward(PARTS, PARAMS, row[None], context)[0][0, request.prompt.size - 1 : -1, :SIZE]
        found = jax.nn.log_softmax(logits)
        for each, expected in zip(own, found, strict=True):
            best = np.argsort(-expected)[: request.most_likely].tolist()
            assert [token for token, _ in each.most_likely] == best
            np.testing.assert_allclose(
                [value for _, value in each.most_likely], expected[np.array(best, int)], atol=1e-5
            )
            assert each.log_probability == pytest.approx(float(expected[each.token]), abs=1e-5)


def test_a_penalty_divides_positive_logits_and_multiplies_negative_ones() -> None:
    logits, seen = jnp.array([[2.0, 1.5, -1.0, -1.5]]), np.array([[True, False, True, False]])
    draws = make_draws([Sampling(repetition_penalty=2.0)], [0], [0]).replace(seen=seen)
    token, found, *_ = draw_tokens(logits, draws)
    assert int(token[0]) == 1  # 1, 1.5, -2, -1.5
    assert float(found[0]) == pytest.approx(float(jax.nn.log_softmax(logits)[0, 1]))
    assert draws.add(token).seen.tolist() == [[True, True, True, False]]


def sampled(logits: jax.Array, sampling: Sampling, rows: int) -> np.ndarray:
    draws: Draws = make_draws([sampling] * rows, range(rows), [0] * rows)
    draws = draws.replace(samples=True, filters=sampling.filters)
    return np.asarray(draw_tokens(jnp.tile(logits, (rows, 1)), draws)[0])


def test_samples_follow_the_softmax_at_the_temperature() -> None:
    draws = sampled(jnp.log(jnp.array([0.1, 0.2, 0.7])), Sampling(temperature=2.0), 4096)
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
        (Sampling(1.0, min_p=0.4), {0, 1, 3}),
        (Sampling(1.0, min_p=0.6), {1, 3}),
        (Sampling(1.0, top_k=3, min_p=0.6), {1, 3}),
    ],
)
def test_tokens_outside_the_filters_are_not_sampled(sampling: Sampling, stay: set[int]) -> None:
    logits = jnp.log(jnp.array([0.2, 0.4, 0.04, 0.3, 0.06]))
    draws = sampled(logits, sampling, 4096)
    assert {*draws.tolist()} == stay
    chosen = np.array(sorted(stay))
    expected = np.asarray(jax.nn.softmax(logits[chosen] / sampling.temperature))
    np.testing.assert_allclose(np.bincount(draws, minlength=5)[chosen] / 4096, expected, atol=0.03)
