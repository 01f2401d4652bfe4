"""Generation with a key/value cache, with the same blocks as training.

A generator has a number of rows. Each row holds the cache of one request: its prompt and the tokens drawn after it.
When a request ends, the next one takes its row, while the other rows go on (continuous batching, Yu et al. 2022, Orca).
Two programs do the work: one draws a token in every row, the other fills rows with prompts. Keys that some row holds
already are copied, so that a prompt, or a beginning that several prompts share, is computed once.

Letters: B rows, S tokens per call, V vocabulary, N rows that are filled, G groups of devices that divide the rows.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from numpy.typing import NDArray

from jaxopt_llm.compiler.xla_options import compiler_options
from jaxopt_llm.config import BATCH_AXES
from jaxopt_llm.core import tree
from jaxopt_llm.core.tree import Leaf
from jaxopt_llm.execution import scan
from jaxopt_llm.execution.sampling import Draws, Sampling, draw_tokens, make_draws
from jaxopt_llm.kernels.attention_types import KeyRanges
from jaxopt_llm.model import cache
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.parallel.placement import Placement

MIN_FILL = 16  # minimum tokens of a row that are filled at once; fewer would not be cheaper
MAX_FILL_TOKENS = 8192  # of all rows that are filled at once; more need memory, and are not faster
# A step reads all slots of the cache, so the cache grows with the text. Each of its sizes needs a program of its own:
# the sizes are SMALLEST_CACHE times 1, 1.5, 2, 3, 4, 6 and so on, and begin where the cache has this share of the
# weights' bytes. Below it there is little to save.
SMALLEST_CACHE = 256
SMALL_SHARE = 1 / 8
MAX_ROWS = 256  # of a generator for many prompts
MAX_MOST_LIKELY = 20  # tokens that are returned with a drawn one


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt to continue.

    Attributes:
        prompt: its ids, int32 [P], at least one.
        count: maximum number of tokens to draw.
        sampling: how they are drawn.
        number: number of the request. The random numbers are a function of the seed, this number, and the number of
            tokens drawn before: neither other requests nor the rows change them.
        most_likely: number of the most likely tokens to return with each drawn one, at most MAX_MOST_LIKELY.
    """

    prompt: NDArray[np.int32]
    count: int
    sampling: Sampling = field(default_factory=Sampling)
    number: int = 0
    most_likely: int = 0


@dataclass(frozen=True)
class Drawn:
    """A token drawn for a request.

    Attributes:
        request: the request.
        token: its id.
        log_probability: log-probability of the token by the model, before any setting of sampling.
        most_likely: the most likely tokens and their log-probabilities, highest first.
    """

    request: Request
    token: int
    log_probability: float
    most_likely: tuple[tuple[int, float], ...] = ()


@struct.dataclass
class Rows:
    """The rows on the devices, each field [B].

    Attributes:
        tokens: int32, the last token of each row, whose keys are not in the cache.
        slots: int32, number of filled slots of the cache; the last token goes to this slot.
        draws: settings and random numbers of each row.
    """

    tokens: Leaf
    slots: Leaf
    draws: Draws


@struct.dataclass
class Filling:
    """The content of N rows to fill. They are divided over the devices as the rows of the cache are.

    Attributes:
        row, source: int32 [N], the row to fill and the row whose cache it begins with, counted in their group of
            devices. None if all rows are filled, each from its own cache.
        is_new: bool [N], False for places of groups without a row to fill, and with all rows for those that stay.
        tokens: int32 [N, S].
        first: int32 [N], slot of the first of these tokens. last: int32 [N], index in them of the last token.
        draws: of the new rows.
    """

    row: Leaf
    source: Leaf
    is_new: Leaf
    tokens: Leaf
    first: Leaf
    last: Leaf
    draws: Draws


def empty_rows(rows: int) -> Rows:
    """Return rows that hold nothing."""
    none = np.zeros(rows, np.int32)
    return Rows(none, none, make_draws([Sampling()] * rows, none.tolist(), none.tolist()))


def choose_slots(needed: int, most: int) -> int:
    """Return the smallest size of a cache with at least `needed` slots; at most `most`."""
    size = SMALLEST_CACHE  # a power of two
    while size < needed:
        # 2^n -> 3 · 2^(n - 1) -> 2^(n + 1)
        size = size * 4 // 3 if size % 3 == 0 else size * 3 // 2
    return min(size, most)


@dataclass(frozen=True, eq=False)
class Programs:
    """The compiled functions of generation. Both donate the caches, whose shardings stay as they are.

    Attributes:
        step: (params, caches, rows, is_active [B]) -> (caches, rows, what `draw_tokens` returns). It draws a token in
            each row. Rows that are not active stay where they are, and their tokens have no meaning.
        fill: (params, caches, rows, filling) -> (caches, rows, what `draw_tokens` returns for N rows). It writes the
            keys of the tokens, and draws the token after them.
    """

    step: Any
    fill: Any


def make_programs(model: Model, placement: Placement, vocabulary_size: int, caches: tree.Tree) -> Programs:
    """Return the programs of a model.

    vocabulary_size: V, without padding. caches: those of the calls, or abstract ones, with their shardings.
    """
    groups = placement.size(*BATCH_AXES)

    def run(
        params: Params, caches: Any, tokens: jax.Array, first: jax.Array, count: jax.Array, draws: Draws
    ) -> tuple[tuple[jax.Array, ...], Any]:
        positions = first[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        key_ranges, lengths = KeyRanges(jnp.zeros_like(positions), positions), (first + count)[:, None]
        last = jnp.maximum(count - 1, 0)
        context = Context(positions, key_ranges, placement, cache_index=first, lengths=lengths)
        logits, caches = scan.forward(model, params, tokens, context, caches, only=last)
        return draw_tokens(logits[:, 0, :vocabulary_size], draws), caches

    def step(params: Params, caches: Any, rows: Rows, is_active: jax.Array) -> tuple[Any, Rows, tuple[jax.Array, ...]]:
        count = is_active.astype(jnp.int32)
        drawn, caches = run(params, caches, rows.tokens[:, None], rows.slots, count, rows.draws)
        after = Rows(drawn[0], rows.slots + 1, rows.draws.add(drawn[0]))
        after = jax.tree.map(lambda new, old: _select(is_active, new, old), after, rows)
        return caches, after, drawn

    def fill(params: Params, caches: Any, rows: Rows, new: Filling) -> tuple[Any, Rows, tuple[jax.Array, ...]]:
        begun = caches if new.row is None else jax.tree.map(lambda x: _take(x, new.source, groups), caches)
        drawn, written = run(params, begun, new.tokens, new.first, new.last + 1, new.draws)
        after = Rows(drawn[0], new.first + new.last + 1, new.draws.add(drawn[0]))
        if new.row is None:
            return written, jax.tree.map(lambda x, old: _select(new.is_new, x, old), after, rows), drawn

        def put(old: jax.Array, new_rows: jax.Array) -> jax.Array:
            kept = _take(old, new.row, groups)
            return _put(old, new.row, _select(new.is_new, new_rows, kept), groups)

        return jax.tree.map(put, caches, written), jax.tree.map(put, rows, after), drawn

    # Fixed output shardings: an output whose sharding differs from the input's would cause a recompilation. Every
    # process of a job reads all tokens.
    replicated = placement.replicated
    results = jax.tree.map(lambda x: x.sharding, caches), replicated, replicated
    options = compiler_options(placement.mesh)
    return Programs(
        *(jax.jit(f, donate_argnums=1, out_shardings=results, compiler_options=options) for f in (step, fill))
    )


def _select(is_new: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Select rows of two arrays [N, ...]."""
    return jnp.where(is_new.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def _take(x: jax.Array, rows: jax.Array, groups: int) -> jax.Array:
    """Return rows of x [B, ...], int32 [N], counted in each of the groups of devices that divide them."""
    taken = jax.vmap(lambda x, rows: x[rows])(*(each.reshape(groups, -1, *each.shape[1:]) for each in (x, rows)))
    return taken.reshape(-1, *x.shape[1:])


def _put(x: jax.Array, rows: jax.Array, new: jax.Array, groups: int) -> jax.Array:
    """Write rows of x [B, ...]; see `_take`. Rows that are named several times get equal values."""
    divided = (each.reshape(groups, -1, *each.shape[1:]) for each in (x, rows, new))
    return jax.vmap(lambda x, rows, new: x.at[rows].set(new))(*divided).reshape(x.shape)


@dataclass(eq=False)
class _Row:
    """A row as the host knows it.

    Attributes:
        ids: ids whose keys are in its cache, and after them, if it has a request, the ids that follow.
        request: the request that it holds; None if it is free.
        turn: number of requests that it has had.
        launched: number of tokens of the request whose computation has begun.
        read: number of those that were read.
        left: slots that its last request has filled. Every step writes keys to the slot after them.
        most: slots that the texts have filled, at most, whose cache it continues. A later text may be shorter.
    """

    ids: list[int] = field(default_factory=list)
    request: Request | None = None
    turn: int = 0
    launched: int = 0
    read: int = 0
    left: int = 0
    most: int = 0

    @property
    def peak(self) -> int:
        """Slots that were filled at most since the row was filled from its first slot."""
        return max(self.most, self.length)

    @property
    def length(self) -> int:
        """Number of slots that are filled when all computations that have begun are done."""
        return self.left if self.request is None else len(self.ids) - 1 + self.launched - self.read

    @property
    def is_active(self) -> bool:
        """True if more tokens of the request are to be computed."""
        return self.request is not None and self.launched < self.request.count

    def hold(self, request: Request, prompt: list[int], most: int) -> None:
        """Take a request. most: the peak of the row whose cache it continues; 0 for none."""
        self.request, self.ids, self.launched, self.read, self.most = request, prompt, 0, 0, most
        self.turn += 1

    def release(self) -> None:
        """Give up the request; the ids whose keys are in the cache stay."""
        if self.request is not None:
            self.most, self.left, self.ids = self.peak, self.length, self.ids[: self.length]
        self.request = None


class TokenGenerator:
    """Generator of tokens after prompts.

    Keys and values of prompts and of tokens stay in the cache after a request, until its row is needed. A prompt that
    begins as some row does begins with a copy of its cache. The cache grows with the text, up to `length` slots.

    Args:
        model: the model.
        params: its parameters by layer.
        placement: shardings of parameters and cache.
        vocabulary_size: V, without padding.
        rows: requests at a time.
        length: maximum slots of the cache, enough for the longest prompt and the tokens drawn after it.
    """

    def __init__(
        self, model: Model, params: Params, placement: Placement, vocabulary_size: int, rows: int, length: int
    ) -> None:
        self._groups = placement.size(*BATCH_AXES)  # of devices, which divide the rows
        self._replicated = placement.replicated
        self._rope, self._vocabulary_size, self._length = model.rope, vocabulary_size, length
        self._row_count, dtype = rows + -rows % self._groups, placement.precision.compute_dtype
        self._make_caches = jax.jit(
            lambda slots: scan.make_caches(model, self._row_count, slots, dtype, placement), static_argnums=0
        )
        # Devices divide the rows of the cache. The weights are gathered.
        weights = sum(x.nbytes for x in {id(x): x for x in jax.tree.leaves(params)}.values())
        self._small = self._choose_slots(SMALL_SHARE * weights * self._groups)
        # A row with as many tokens as the smallest ring has slots may have lost the key of its first one.
        self._ring, self._rewind = cache.describe_rings(self._shape_caches(length))
        self._samples = self._filters = self._penalises = self._ranks = False  # whether any request did so far
        self.load(params)
        self._programs = make_programs(model, placement, vocabulary_size, self._caches)

    def load(self, params: Params) -> None:
        """Use these parameters from now on, with an empty cache. Requests that have not ended are dropped."""
        self._params = params
        self._waiting: deque[Request] = deque()
        # Of the computations that have begun, oldest first: row and turn of each token, and what was drawn.
        self._begun: deque[tuple[list[tuple[_Row, int] | None], tuple[jax.Array, ...]]] = deque()
        self._rows = [_Row() for _ in range(self._row_count)]
        self._slots = choose_slots(self._small, self._length)
        self._caches: tree.Tree = self._make_caches(self._slots)
        # On the devices, as the programs return it: otherwise they would be compiled again after their first call.
        self._state = jax.tree.map(self._replicate, empty_rows(self._row_count))

    def _shape_caches(self, slots: int) -> tree.Tree:
        return jax.eval_shape(functools.partial(self._make_caches, slots))

    def _choose_slots(self, least: float) -> int:
        """Return the slots of the smallest cache of at least so many bytes, or of the largest cache."""
        slots = choose_slots(1, self._length)
        while slots < self._length and _count_bytes(self._shape_caches(slots)) < least:
            slots = choose_slots(slots + 1, self._length)
        return slots

    def unload(self) -> None:
        """Free the cache and the parameters, until `load` is called. The compiled programs stay."""
        self._params, self._caches = {}, None

    def run(self, requests: Iterable[Request], has_ended: Callable[[Request], bool]) -> Iterator[Drawn]:
        """Yield the tokens of requests, each in order. A request ends with its count, or when `has_ended` says so.

        `has_ended` is called after each token of a request. The computation of the next tokens has begun by then.
        """
        for request in requests:
            self.add(request)
        try:
            while self.is_busy:
                for drawn in self.advance():
                    yield drawn
                    if has_ended(drawn.request):
                        self.end(drawn.request)
        finally:
            self.clear()

    def add(self, request: Request) -> None:
        """Let a request wait for a row."""
        assert request.prompt.size and request.count > 0
        assert request.prompt.size + request.count <= self._length and request.most_likely <= MAX_MOST_LIKELY
        sampling = request.sampling
        self._samples |= sampling.temperature > 0
        self._filters |= sampling.filters
        self._penalises |= sampling.repetition_penalty != 1
        self._ranks |= request.most_likely > 0
        self._waiting.append(request)

    def end(self, request: Request) -> None:
        """End a request before its count. Tokens of it whose computation has begun are dropped."""
        if request in self._waiting:
            self._waiting.remove(request)
        for row in self._rows:
            if row.request is request:
                row.release()

    def clear(self) -> None:
        """End all requests."""
        self._waiting.clear()
        for row in self._rows:
            row.release()

    @property
    def is_busy(self) -> bool:
        """True if some request has not ended."""
        return bool(self._waiting) or any(row.request is not None for row in self._rows)

    def advance(self) -> list[Drawn]:
        """Return the next tokens: of the computation that began first, after another one has begun."""
        while len(self._begun) < 2 and self._begin():
            pass
        return self._read() if self._begun else []

    def _begin(self) -> bool:
        """Begin a computation. Return False if there is none to begin now."""
        if outgrown := [row for row in self._rows if self._outgrows(row)]:
            if self._begun:  # their ids are not known yet
                return False
            self._fill([_Place(row, row, 0) for row in outgrown])
        elif self._waiting and any(row.request is None for row in self._rows):
            self._fill(self._choose_places())
        elif any(row.is_active for row in self._rows):
            self._step()
        else:
            return False
        return True

    def _outgrows(self, row: _Row) -> bool:
        """Return whether the next token changes the frequencies of a row's keys, so that they are rotated again.

        As in transformers, this is so when a document outgrows its short factors. With dynamic scaling, the frequencies
        change with every token, and keys stay as they were rotated.
        """
        if self._rope.scaling != "longrope" or not row.is_active or not row.launched:
            return False
        return not self._rope.same_frequencies(row.length, row.length + 1)

    def _step(self) -> None:
        """Draw a token in each active row."""
        self._reserve(1 + max(row.length for row in self._rows))
        is_active = np.array([row.is_active for row in self._rows])
        self._state = self._fit_state()
        self._caches, self._state, drawn = self._programs.step(self._params, self._caches, self._state, is_active)
        self._record([row if row.is_active else None for row in self._rows], drawn)

    def _fit_state(self) -> Rows:
        draws = self._fit(self._state.draws)
        if draws.seen is not self._state.draws.seen:
            draws = replace(draws, seen=self._replicate(draws.seen))
        return replace(self._state, draws=draws)

    def _replicate(self, array: NDArray[Any]) -> jax.Array:
        """Return an array on all devices. All processes have the same values."""
        return jax.make_array_from_callback(array.shape, self._replicated, lambda index: array[index])

    def _fit(self, draws: Draws, rows: Iterable[_Row | None] = ()) -> Draws:
        """Return draws for programs with the features that requests need. rows: those that the draws are of."""
        if self._penalises and draws.seen is None:
            seen = np.zeros((draws.index.shape[0], self._vocabulary_size), np.bool_)
            for place, row in enumerate(rows):
                if row is not None:
                    seen[place, row.ids] = True
            draws = replace(draws, seen=seen)
        most_likely = min(MAX_MOST_LIKELY, self._vocabulary_size) if self._ranks else 0
        return replace(draws, samples=self._samples, filters=self._filters, most_likely=most_likely)

    def _record(self, rows: list[_Row | None], drawn: tuple[jax.Array, ...]) -> None:
        """Record that a token of each of these rows is on its way. drawn: what `draw_tokens` returns.

        A row that comes again only completes a group.
        """
        begun: list[tuple[_Row, int] | None] = []
        seen = set[int]()
        for row in rows:
            if row is None or id(row) in seen:
                begun.append(None)
            else:
                seen.add(id(row))
                row.launched += 1
                begun.append((row, row.turn))
        self._begun.append((begun, drawn))

    def _read(self) -> list[Drawn]:
        """Return the tokens of the computation that began first."""
        rows, arrays = self._begun.popleft()
        found = []
        for place, token, log_probability, *highest in zip(
            rows, *(np.asarray(x).tolist() for x in arrays), strict=True
        ):
            if place is None:
                continue
            row, request = place[0], place[0].request
            if request is None or row.turn != place[1]:  # the request has ended
                continue
            row.ids.append(token)
            row.read += 1
            if row.read == request.count:
                row.release()
            most_likely = tuple(zip(*highest, strict=True))[: request.most_likely]
            found.append(Drawn(request, token, log_probability, most_likely))
        return found

    def _choose_places(self) -> list["_Place"]:
        """Give waiting requests rows, and choose whose caches they begin with.

        A request waits on if it shares a beginning with one that is given a row now: it will be copied from there.
        """
        places: list[_Place] = []
        postponed: deque[Request] = deque()
        longest = 0
        while self._waiting:
            request = self._waiting[0]
            prompt = request.prompt.tolist()
            place = self._find_place(prompt)
            if place is None:
                break
            filled = [max(each.row.most, len(each.row.ids)) for each in places]
            shared = max(
                (
                    self._count_shared(each.row.ids, prompt, by_then)
                    for each, by_then in zip(places, filled, strict=True)
                ),
                default=0,
            )
            if shared >= place.begin + MIN_FILL:
                postponed.append(self._waiting.popleft())
                continue
            size = _fill_size(max(longest, len(prompt) - place.begin))
            slots = choose_slots(max(self._slots, len(prompt), *(len(each.row.ids) for each in places)), self._length)
            if not place.fits(size, slots):
                place = _Place(place.row, place.row, 0)
                size = _fill_size(max(longest, len(prompt)))
            is_full = size * (len(places) + 1) > MAX_FILL_TOKENS or len(places) == self._count_copied()
            if places and (is_full or not all(each.fits(size, slots) for each in places)):
                break
            longest = max(longest, len(prompt) - place.begin)
            places.append(place)
            place.row.hold(self._waiting.popleft(), prompt, place.source.peak if place.begin else 0)
        self._waiting.extendleft(reversed(postponed))
        return places

    def _count_copied(self) -> int:
        """Return the maximum number of rows to fill at once. If not all rows are filled, these are copied.

        The copies take at most as many bytes as a small cache, unless all rows are free.
        """
        if all(row.request is None or not row.launched for row in self._rows):
            return len(self._rows)
        return max(self._small * len(self._rows) // self._slots, self._groups)

    def _find_place(self, prompt: list[int]) -> "_Place | None":
        """Return the free row whose group of devices holds the longest beginning of a prompt; None: no row is free."""
        size = self._row_count // self._groups
        best: _Place | None = None
        best_key: tuple[int, int] | None = None
        for group in range(self._groups):
            rows = self._rows[group * size : (group + 1) * size]
            free = [row for row in rows if row.request is None]
            if not free:
                continue
            begins = {id(row): self._count_cached(row, prompt) for row in rows}
            source = max(rows, key=lambda row: (begins[id(row)], row.request is None))
            row = source if source.request is None else min(free, key=lambda row: len(row.ids))
            key = begins[id(source)], len(free)
            if best_key is None or key > best_key:
                best, best_key = _Place(row, source, begins[id(source)], self._count_lost(source.peak)), key
        return best

    def _count_cached(self, row: _Row, prompt: list[int]) -> int:
        """Return the number of first tokens of a prompt whose keys a row holds; at least one token is left out."""
        if row.request is not None and not row.launched:  # it is filled together with this prompt
            return 0
        cached = row.ids if row.request is None else row.ids[: row.length]
        same = self._count_shared(cached, prompt, row.peak)
        return same if self._rope.same_frequencies(len(row.ids), len(prompt)) else 0

    def _count_shared(self, cached: list[int], prompt: list[int], filled: int) -> int:
        """Return the number of first tokens of a prompt that need not be computed again.

        cached: the ids that a row holds. filled: its peak by then.
        """
        same = min(_common_prefix(cached, prompt), len(prompt) - 1)
        return same if same >= self._count_lost(filled) else 0

    def _count_lost(self, filled: int) -> int:
        """Return the number of first slots after which a row cannot be continued, given its peak.

        Later tokens have taken the slots of keys that the next query would see, also those of a longer text before, or
        have changed a recurrent state.
        """
        return 0 if filled < self._ring else filled - self._rewind

    def _fill(self, places: list["_Place"]) -> None:
        """Fill rows with the ids that the host knows of them, and draw the token after them."""
        self._reserve(max(len(place.row.ids) for place in places))
        size = min(_fill_size(max(len(place.row.ids) - place.begin for place in places)), self._slots)
        filled = [place.row for place in places]
        is_whole = (
            2 * len(places) > len(self._rows)
            and all(place.source is place.row for place in places)
            and all(row in filled or row.request is None for row in self._rows)
        )
        if is_whole:
            table = [next((place for place in places if place.row is row), None) for row in self._rows]
            for row in self._rows:  # the other rows are overwritten
                row.ids = row.ids if row in filled else []
        else:
            table = self._divide(places)
        filling, self._state = self._make_filling(table, size, is_whole), self._fit_state()
        self._caches, self._state, drawn = self._programs.fill(self._params, self._caches, self._state, filling)
        self._record([None if place is None else place.row for place in table], drawn)

    def _divide(self, places: list["_Place"]) -> list["_Place | None"]:
        """Return places by group of devices. Each group has the same number of them, and repeats its first if need be.

        The number is a power of 2, because each needs a program of its own.
        """
        size = len(self._rows) // self._groups
        by_group: list[list[_Place | None]] = [[] for _ in range(self._groups)]
        for place in places:
            by_group[self._rows.index(place.row) // size].append(place)
        count = 1 << (max(map(len, by_group)) - 1).bit_length()
        return [
            place for group in by_group for place in (*group, *(group[:1] or [None]) * (min(count, size) - len(group)))
        ]

    def _make_filling(self, table: list["_Place | None"], size: int, is_whole: bool) -> Filling:
        """Return what rows are filled with. size: S."""
        empty = _Place(_Row(), _Row(), 0)
        places = [empty if place is None else place for place in table]
        per_group = len(self._rows) // self._groups
        numbers = {id(row): number % per_group for number, row in enumerate(self._rows)}
        tokens, first, last = np.zeros((len(places), size), np.int32), [], []
        for ids, place in zip(tokens, places, strict=True):
            begin = place.first(size, self._slots)
            rest = place.row.ids[begin:]
            ids[: len(rest)] = rest
            first.append(begin)
            last.append(max(len(rest) - 1, 0))
        nothing = Request(np.zeros(1, np.int32), 1)
        requests = [place.row.request or nothing for place in places]
        draws = make_draws(
            [request.sampling for request in requests],
            [request.number for request in requests],
            [place.row.launched for place in places],
        )
        row, source = (
            np.array([numbers.get(id(getattr(place, name)), 0) for place in places], np.int32)
            for name in ("row", "source")
        )
        return Filling(
            row=None if is_whole else row,
            source=None if is_whole else source,
            is_new=np.array([place is not None for place in table]),
            tokens=tokens,
            first=np.array(first, np.int32),
            last=np.array(last, np.int32),
            draws=self._fit(draws, [place.row for place in places]),
        )

    def _reserve(self, slots: int) -> None:
        """Let the cache grow until it has this number of slots."""
        if slots > self._slots:
            self._slots = choose_slots(slots, self._length)
            larger = jax.tree.leaves(self._shape_caches(self._slots))
            # Array by array, so that only one is there twice. No ring that grows has come round.
            arrays, structure = jax.tree.flatten(self._caches)
            self._caches = None
            for i, (x, shape) in enumerate(zip(arrays, larger, strict=True)):
                arrays[i] = _grow(x.sharding)(x, shape.shape[2])
            self._caches = jax.tree.unflatten(structure, arrays)


@dataclass(frozen=True, eq=False)
class _Place:
    """A row that is filled.

    Attributes:
        row: the row.
        source: the row whose cache it begins with.
        begin: number of slots that are taken from there.
        lost: see `_count_lost` of the source.
    """

    row: _Row
    source: _Row
    begin: int
    lost: int = 0

    def first(self, size: int, slots: int) -> int:
        """Return the slot of the first of `size` tokens: before `begin`, if they would extend beyond the cache."""
        return max(min(self.begin, slots - size), 0)

    def fits(self, size: int, slots: int) -> bool:
        """Return whether so many tokens can be computed with the keys that the source still has."""
        return self.begin == 0 or self.first(size, slots) >= self.lost


@functools.cache
def _grow(sharding: jax.sharding.Sharding) -> Callable[[jax.Array, int], jax.Array]:
    """Return a function that gives an array of a cache more slots."""

    def grow(x: jax.Array, slots: int) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, 0), (0, slots - x.shape[2]), (0, 0)))

    return jax.jit(grow, static_argnums=1, out_shardings=sharding)


def _count_bytes(arrays: tree.Tree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def _fill_size(tokens: int) -> int:
    """Return the number of tokens that are computed for a row with this number of new ones.

    Each needs a program of its own, so they are powers of two. The slots after the last token are overwritten before a
    query attends to them.
    """
    return max(MIN_FILL, 1 << (tokens - 1).bit_length())


def _common_prefix(ids: list[int], others: list[int]) -> int:
    """Return the number of first ids that are equal."""
    low, high = 0, min(len(ids), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if ids[low:middle] == others[low:middle] else (low, middle - 1)
    return low
