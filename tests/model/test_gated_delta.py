"""Gated DeltaNet: chunks, documents, states and devices against a loop over the tokens."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import toy

from jaxopt_llm.compiler import hlo
from jaxopt_llm.config import Config, RematConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.execution import scan
from jaxopt_llm.execution.decode import Request, TokenGenerator
from jaxopt_llm.execution.sampling import Sampling
from jaxopt_llm.kernels.attention_types import KeyRanges
from jaxopt_llm.model import gated_delta
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import Params
from jaxopt_llm.step.validation import validate

CONFIG = replace_fields(
    toy.UNIFORM,
    {
        "pattern": ("gated_delta", "gated_delta", "global"),
        "attention_gate": "element",
        "delta.key_head_dim": 6,
        "delta.value_head_dim": 5,
        "delta.kernel": 3,
    },
)
PLACEMENT = toy.placement()
LENGTH = 45


def slow_params(model: Decoder, slowest: float = -3.0) -> Params:
    """Return parameters whose states last for many tokens."""

    def slow(path: str, leaf: np.ndarray) -> np.ndarray:
        return np.linspace(slowest, 0, leaf.size, dtype=leaf.dtype).reshape(leaf.shape) if "_rate" in path else leaf

    return tree.map_with_path(slow, toy.params(model.specs))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several groups of chunks in a row, the last of which is not full."""
    monkeypatch.setattr(gated_delta, "CHUNK", 8)
    monkeypatch.setattr(gated_delta, "GROUP", 2)


@pytest.mark.parametrize("alike", [0.0, 0.95])
def test_chunks_compute_what_a_loop_over_the_tokens_does(alike: float) -> None:
    """Documents begin within chunks, with them and twice in one. Keys that are nearly equal lose no digits."""
    random, chunk, shape = np.random.default_rng(0), 8, (3, 48, 2)  # three rows, two heads of keys
    begins = [[0], [0, 8, 10, 23, 32], [0, 44]]
    first = np.array([[max(b for b in row if b <= t) for t in range(shape[1])] for row in begins])
    query, key = (random.normal(size=(*shape, 4)) for _ in range(2))
    key = (1 - alike) * key + alike * random.normal(size=(shape[0], 1, 2, 4))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value, share = random.normal(size=(*shape, 3, 5)), random.uniform(0.5, 1, (*shape, 3))
    log, gradient = -random.uniform(0, 0.3, (*shape, 3)), random.normal(size=(*shape, 3, 5))
    arrays = query, key, value, share, log
    age = np.moveaxis((np.arange(shape[1]) - first).reshape(3, -1, chunk), 1, 0)

    def to_chunks(x: Any) -> Any:  # [B, S, G, ...] -> [N, B, G, ..., C, last]
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), (1, 3), (0, 2))

    @jax.jit
    def run(query: Any, key: Any, *others: Any) -> Any:
        others = (jnp.moveaxis(to_chunks(x), 4, 3) for x in others)
        state = jnp.zeros((3, 2, 3, 4, 5))
        out = gated_delta._run_chunks(jnp.asarray(age), state, to_chunks(query), to_chunks(key), *others)[1]
        return jnp.moveaxis(out, (1, 4), (0, 2)).reshape(gradient.shape)

    found, pull_back = jax.vjp(run, *(jnp.asarray(x, jnp.float32) for x in arrays))
    expected, d_expected = np.zeros_like(gradient), [np.zeros_like(x) for x in arrays]
    for b, g, r in np.ndindex(3, 2, 3):
        of_head = value[b, :, g, r], share[b, :, g, r], np.exp(log[b, :, g, r]), first[b] == np.arange(shape[1])
        expected[b, :, g, r], backward = reference.remember(query[b, :, g], key[b, :, g], *of_head)
        d_query, d_key, *others, d_left = backward(gradient[b, :, g, r])
        d_expected[0][b, :, g] += d_query
        d_expected[1][b, :, g] += d_key
        for d, each in zip(d_expected[2:], (*others, d_left * of_head[2]), strict=True):
            d[b, :, g, r] = each
    for one, other in zip(
        [found, *pull_back(jnp.asarray(gradient, jnp.float32))], [expected, *d_expected], strict=True
    ):
        assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max()


@pytest.mark.usefixtures("small_chunks")
def test_a_packed_row_is_its_documents_alone() -> None:
    """Loss and gradients, with states that last longer than the documents."""
    model, batch = Decoder(CONFIG), toy.packed(rows=2, length=40)
    values, alone = slow_params(model), toy.one_document_per_row(batch)

    @functools.partial(jax.jit, compiler_options=toy.QUICK_COMPILE)
    @jax.value_and_grad
    def run(params: Params, batch: Batch) -> jax.Array:
        return scan.microbatch_loss(model, params, batch, jnp.float32(1), PLACEMENT, RematConfig("full"))[0]

    (loss, gradients), (expected_loss, expected) = run(values, batch), run(values, alone)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)

    def check(path: str, found: jax.Array, expected: jax.Array) -> None:
        assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected), path

    tree.map_with_path(check, gradients, expected)


def context_of(first: int, count: int, padding: int) -> Context:
    positions = first + np.broadcast_to(np.arange(count + padding, dtype=np.int32), (2, count + padding))
    begin = jnp.full(2, first, jnp.int32)
    ranges = KeyRanges(jnp.zeros_like(positions), jnp.asarray(positions))
    return Context(jnp.asarray(positions), ranges, PLACEMENT, begin, lengths=jnp.full((2, 1), first + count, jnp.int32))


@pytest.mark.usefixtures("small_chunks")
def test_blocks_of_a_prompt_with_padding_leave_the_state_of_its_tokens() -> None:
    """Blocks are longer and shorter than the convolution; what a row held before is forgotten."""
    model, tokens = Decoder(CONFIG), toy.packed(rows=2, length=LENGTH).tokens
    params = toy.by_layer(slow_params(model))
    forward = jax.jit(functools.partial(scan.forward, model), compiler_options=toy.QUICK_COMPILE)
    empty = scan.make_caches(model, 2, 64, jnp.float32, PLACEMENT)
    whole, expected = forward(params, tokens, context_of(0, LENGTH, 0), empty)
    caches = jax.tree.map(lambda x: x + 1, empty)  # of another text
    first, pieces = 0, []
    for count, padding in ((20, 3), (1, 0), (1, 7), (23, 9)):
        block = np.pad(tokens[:, first : first + count], ((0, 0), (0, padding)), constant_values=7)
        piece, caches = forward(params, block, context_of(first, count, padding), caches)
        pieces.append(piece[:, :count])
        first += count
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, rtol=1e-4, atol=1e-5)
    states, others = (jax.tree.leaves(each["segment_0"][0]["block_0"]) for each in (caches, expected))
    for found, other in zip(states, others, strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-5)


def generate(generator: TokenGenerator, prompts: list[np.ndarray], counts: list[int]) -> list[list[int]]:
    requests = [Request(*each, Sampling(), number) for number, each in enumerate(zip(prompts, counts, strict=True))]
    drawn: list[list[int]] = [[] for _ in prompts]
    for each in generator.run(requests, lambda request: False):
        drawn[each.request.number].append(each.token)
    return drawn


@pytest.mark.parametrize("axes", [{}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_requests_that_share_rows_draw_what_each_draws_alone(axes: dict[str, int]) -> None:
    """Rows end at different times and are taken by other prompts, some of which begin as the row's text does."""
    model, random, placement = Decoder(CONFIG), np.random.default_rng(0), toy.placement(**axes)
    own = toy.by_layer(jax.tree.map(jnp.asarray, slow_params(model)))
    new = functools.partial(TokenGenerator, model, own, placement, CONFIG.vocabulary_size)
    first = [random.integers(3, 250, size).astype(np.int32) for size in (5, 19, 33, 7, 30)]
    shared, counts = np.concatenate([first[2], first[0]]), [3, 17, 9, 5, 12]
    prompts = [*first, shared, first[2][:12]]
    counts += [6, 6]
    alone = [
        generate(new(rows=1, length=64), [prompt], [count])[0] for prompt, count in zip(prompts, counts, strict=True)
    ]
    together = new(rows=2, length=64)
    assert generate(together, prompts, counts) == alone
    # A dialogue goes on after its answer; another one after only a part of it.
    answered = np.concatenate([first[1], alone[1][:16], first[3]]).astype(np.int32)
    again = [answered, np.concatenate([first[1], alone[1][:4]]).astype(np.int32)]
    expected = [generate(new(rows=1, length=64), [prompt], [8])[0] for prompt in again]
    assert generate(together, again, [8, 8]) == expected


def test_a_dialogue_continues_from_its_state() -> None:
    """Only the tokens after the state are computed, also if other rows went on; a beginning of the text is not held."""
    model, prompt = Decoder(CONFIG), np.arange(3, 43, dtype=np.int32)
    params = toy.by_layer(jax.tree.map(jnp.asarray, slow_params(model)))
    generator = TokenGenerator(model, params, PLACEMENT, CONFIG.vocabulary_size, rows=2, length=128)
    filled: list[int] = []
    fill = generator._programs.fill

    def record(params: Any, caches: Any, rows: Any, new: Any) -> Any:
        filled.append(int(np.max(new.first)))
        return fill(params, caches, rows, new)

    object.__setattr__(generator._programs, "fill", record)
    answer, _ = generate(generator, [prompt, prompt[::-1]], [5, 20])
    state = len(prompt) + 4  # the last token that was drawn is not in it
    going_on = np.concatenate([prompt, answer, [7, 8, 9]]).astype(np.int32)
    alone = TokenGenerator(model, params, PLACEMENT, CONFIG.vocabulary_size, rows=1, length=128)

    def list_log_probabilities(generator: TokenGenerator) -> list[float]:
        return [each.log_probability for each in generator.run([Request(going_on, 9)], lambda request: False)]

    np.testing.assert_allclose(list_log_probabilities(generator), list_log_probabilities(alone), rtol=1e-5)
    generate(generator, [prompt], [1])
    assert filled == [0, state, 0]


def test_the_backward_computes_all_but_the_projections_again() -> None:
    """The projections of a long row and their gradients, in several forms, and no state of every token or chunk."""
    model, length = Decoder(replace_fields(CONFIG, {"layers": 1, "pattern": ("gated_delta",)})), 8192
    delta, random = CONFIG.delta, np.random.default_rng(0)
    params = {name: leaf[0] for name, leaf in toy.params(model.specs)["segment_0"]["block_0"]["delta"].items()}
    shapes = {name: params[name].shape[1:] for name in gated_delta.PRODUCTS if name != "gate"}
    projected = [random.normal(size=(1, length, *shape)).astype(np.float32) for shape in shapes.values()]
    learned = [
        params[name] for name in (*(f"{name}_kernel" for name in gated_delta.CONVOLVED), "decay_offset", "decay_rate")
    ]
    age = np.arange(length, dtype=np.int32)[None]

    def run(*operands: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(gated_delta.mix(age, *operands)))

    everything = jax.grad(run, argnums=tuple(range(10)))
    compiled = jax.jit(everything).lower(*projected, *learned).compile()
    operands = sum(each.nbytes for each in projected)
    of_chunks = length // gated_delta.CHUNK * 4 * delta.value_heads * gated_delta.CHUNK**2  # one array of scores
    found = hlo.read_memory(compiled).temporaries
    assert found < 4 * operands + of_chunks


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"model.delta.value_heads": 5}, "model.delta.value_heads=5: must be a multiple of model.delta.key_heads=2"),
        ({"model.delta.kernel": 1}, "model.delta.kernel=1: must be at least 2"),
        ({"model.shared_key_layers": 1}, "model.shared_key_layers=1: must be 0 with gated_delta in model.pattern"),
        ({"mesh.context": 2}, "mesh.context=2: a gated_delta layer (model.pattern) passes its state from token to"),
        ({"mesh.tensor": 4}, "model.delta.key_heads=2 is not divisible by mesh.tensor=4"),
    ],
)
def test_what_is_not_supported_is_said(changes: dict[str, Any], start: str) -> None:
    config = Config(model=replace_fields(CONFIG, {"vocabulary_size": 258}))
    validate(config)
    with pytest.raises(InputError) as raised:
        validate(replace_fields(config, changes))
    assert str(raised.value).startswith(start)
