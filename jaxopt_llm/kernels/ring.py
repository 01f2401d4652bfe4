"""Ring attention over a sequence that is split over devices.

Each device keeps its queries. Keys and values move around the ring: at every step a device attends to the part of the
keys that it holds, while it sends this part to the next device (Liu et al. 2023, arXiv:2310.01889). Key ranges become
ranges in the rows of each part, and the outputs of the parts are merged by the logs of their softmax sums. In the
backward, the gradients of keys and values follow behind them around the ring. A device holds no more than two parts at
a time, and nothing larger than its own part. The steps are a loop: if they were unrolled, XLA would send all parts
first, and attend to none in the meantime.

The sequence is in zigzag order: it is cut into 2N chunks, and the i-th of N devices has chunk i and chunk 2N-1-i, one
from either end. Under a causal mask, each device then has the same work at every step (Grattafiori et al. 2024,
arXiv:2407.21783, section 3.3.2). The keys that a query sees in a part are still one range of the part's rows, because
the two chunks are in the order of the sequence.

A kernel that skips the keys that a query does not see gets a part as a whole. Others get the device's own part in a
causal call, and of every other part two pairs of a chunk of queries and a chunk of keys (`_Pairs`). These are the half
of the part that is visible: in a pair, every query comes after every key, so that it sees all keys of its document.

Letters: B batch, S queries of a device, T its keys, H heads, G key-value heads, K head size, C = S / 2 rows of a chunk.
"""

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxopt_llm.kernels.attention_types import AttentionParameters, AttentionResiduals, KeyRanges, attention_scope
from jaxopt_llm.kernels.attention_wrappers import Wrapper

KeyPart = tuple[jax.Array, jax.Array]  # keys and values [B, T, G, K], or their gradients
# Output [B, S, H, K] and log of the softmax sum [B, H, S], which is -inf if no key is visible; float32.
Result = tuple[jax.Array, jax.Array]
OWN = 0  # the step at which a device holds its own part


@dataclass(frozen=True)
class Ring(Wrapper):
    """Implementation of attention, called on each device's own arrays, for a sequence in zigzag order.

    The key ranges are for each device's queries, but in rows of the whole sequence in its own order.

    kernel: implementation that attends to a part; axis: mesh axis that splits the sequence.
    """

    axis: str

    def forward(
        self, parameters: AttentionParameters, q: jax.Array, k: jax.Array, v: jax.Array, key_ranges: KeyRanges
    ) -> tuple[jax.Array, jax.Array]:
        def attend(step: Any, part: KeyPart) -> list[Result]:
            call, pairs = self._choose_call(parameters, step)
            if pairs is None:
                ranges = self._ranges_in_part(key_ranges, step, q.shape[1])
                return [_to_result(*self.kernel.forward(call, q, *part, ranges))]
            operands = pairs.take_queries(q), *map(pairs.take_keys, part), pairs.take_ranges(key_ranges)
            with attention_scope(None, causal=False):
                result = self.kernel.forward(call, *operands)
            return pairs.split_result(*_to_result(*result))

        def visit(step: Any, carry: tuple[KeyPart, Result]) -> tuple[KeyPart, Result]:
            part, result = carry
            return self._send(part), _merge(result, *attend(step, part))

        local_part, last = (k, v), jax.lax.axis_size(self.axis) - 1
        part, result = jax.lax.fori_loop(1, last, visit, (self._send(local_part), *attend(OWN, local_part)))
        out, log_sum = _merge(result, *attend(last, part))
        return out.astype(q.dtype), jnp.where(log_sum == -jnp.inf, jnp.inf, log_sum)

    def backward(
        self, parameters: AttentionParameters, residuals: AttentionResiduals, gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = residuals.q, residuals.k, residuals.v

        def attend(step: Any, part: KeyPart) -> tuple[jax.Array, KeyPart]:
            call, pairs = self._choose_call(parameters, step)
            if pairs is None:
                ranges = self._ranges_in_part(residuals.key_ranges, step, q.shape[1])
                of_part = residuals._replace(k=part[0], v=part[1], key_ranges=ranges)
                gradients = self.kernel.backward(call, of_part, gradient)
                d_q, d_k, d_v = (x.astype(jnp.float32) for x in gradients)
                return d_q, (d_k, d_v)
            operands = pairs.take_residuals(residuals, part), pairs.take_queries(gradient)
            with attention_scope(None, causal=False):
                d_q, d_k, d_v = self.kernel.backward(call, *operands)
            return pairs.sum_of_queries(d_q), (pairs.sum_of_keys(d_k), pairs.sum_of_keys(d_v))

        def add(a: KeyPart, b: KeyPart) -> KeyPart:
            return a[0] + b[0], a[1] + b[1]

        def visit(step: Any, carry: tuple[KeyPart, jax.Array, KeyPart]) -> tuple[KeyPart, jax.Array, KeyPart]:
            # The gradient of the previous part is sent while the gradient of this part is computed.
            part, d_q, d_previous = carry
            d_q_step, d_part = attend(step, part)
            return self._send(part), d_q + d_q_step, add(self._send(d_previous), d_part)

        local_part, last = (k, v), jax.lax.axis_size(self.axis) - 1
        part, d_q, d_previous = jax.lax.fori_loop(1, last, visit, (self._send(local_part), *attend(OWN, local_part)))
        d_q_step, d_part = attend(last, part)
        d_k, d_v = self._send(add(self._send(d_previous), d_part))  # back to the device that has the keys
        return (d_q + d_q_step).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)

    def _choose_call(self, parameters: AttentionParameters, step: Any) -> tuple[AttentionParameters, "_Pairs | None"]:
        """Return the parameters of the kernel's call of a step, and its pairs of chunks; None for a whole part."""
        if self.kernel.skips_keys or parameters.keys_after != 0:
            return _without_bounds(parameters), None
        if isinstance(step, int) and step == OWN:
            return parameters, None  # in the rows of the own part, no query is farther from a key than in the sequence
        device, devices = jax.lax.axis_index(self.axis), jax.lax.axis_size(self.axis)
        pairs = _Pairs(device, self._find_owner(step), devices)
        return replace(_without_bounds(parameters), rectangles=parameters.window is None), pairs

    def _find_owner(self, step: Any) -> jax.Array:
        """Return the index of the device whose part this device holds after `step` steps."""
        return (jax.lax.axis_index(self.axis) - step) % jax.lax.axis_size(self.axis)

    def _ranges_in_part(self, key_ranges: KeyRanges, step: Any, rows: int) -> KeyRanges:
        """Return the key ranges in the rows of the part that this device holds after `step` steps."""
        return _to_part_rows(key_ranges, self._find_owner(step), jax.lax.axis_size(self.axis), rows)

    def _send(self, arrays: Any) -> Any:
        """Send arrays to the next device of the ring."""
        count = jax.lax.axis_size(self.axis)
        return jax.lax.ppermute(arrays, self.axis, [(i, (i + 1) % count) for i in range(count)])


class _Pairs(NamedTuple):
    """The two pairs of a chunk of queries and a chunk of keys, of a device and a part of another one.

    The late queries see the early keys. If the owner comes before the device, the early queries see the early keys too,
    otherwise the late queries see the late keys. This pair comes first, the pair of late queries and early keys second;
    they are rows of a batch, [2B, C, ...]. So every device has two pairs at every step: the same work.
    """

    device: jax.Array
    owner: jax.Array
    devices: int

    @property
    def owner_is_before(self) -> jax.Array:
        return self.owner < self.device

    def take_queries(self, x: jax.Array) -> jax.Array:
        """Return the chunks of queries of an array [B, S, ...]."""
        early, late = _split_chunks(x)
        return _stack(jnp.where(self.owner_is_before, early, late), late)

    def take_keys(self, x: jax.Array) -> jax.Array:
        """Return the chunks of keys of an array of the part, [B, S, ...]."""
        early, late = _split_chunks(x)
        return _stack(jnp.where(self.owner_is_before, early, late), early)

    def take_ranges(self, key_ranges: KeyRanges) -> KeyRanges:
        """Return the key ranges of the chunks of queries, in rows of their chunks of keys."""
        rows = key_ranges.first.shape[1] // 2
        early, late = self.owner * rows, (2 * self.devices - 1 - self.owner) * rows
        begins = jnp.stack([jnp.where(self.owner_is_before, early, late), early])[:, None]

        def take(x: jax.Array) -> jax.Array:
            return (self.take_queries(x).reshape(-1, 2, rows) - begins).reshape(-1, rows)

        return KeyRanges(*map(take, key_ranges))

    def take_residuals(self, residuals: AttentionResiduals, part: KeyPart) -> AttentionResiduals:
        """Return the residuals of the pairs. The statistics and the output are over all keys."""

        def take_statistics(x: jax.Array) -> jax.Array:
            return jnp.swapaxes(self.take_queries(jnp.swapaxes(x, 1, 2)), 1, 2)

        q, _, _, key_ranges, *statistics, out = residuals
        log_sum, delta = jax.tree.map(take_statistics, statistics)
        k, v = map(self.take_keys, part)
        out = jax.tree.map(self.take_queries, out)
        return AttentionResiduals(self.take_queries(q), k, v, self.take_ranges(key_ranges), log_sum, delta, out)

    def split_result(self, out: jax.Array, log_sum: jax.Array) -> list[Result]:
        """Return the result of the pairs as two results of all queries. out: [2B, C, H, K]; log_sum: [2B, H, C]."""
        (first, second), (log_first, log_second) = map(_unstack, (out, log_sum))
        unseen = jnp.full_like(log_first, -jnp.inf)
        early = jnp.concatenate([jnp.where(self.owner_is_before, log_first, unseen), log_second], axis=2)
        late = jnp.concatenate([unseen, jnp.where(self.owner_is_before, unseen, log_first)], axis=2)
        return [(_join_chunks(first, second), early), (_join_chunks(first, first), late)]

    def sum_of_queries(self, gradient: jax.Array) -> jax.Array:
        """Return the gradient of all queries, [B, S, ...] in float32, from the gradient of the pairs, [2B, C, ...]."""
        first, second = _unstack(gradient.astype(jnp.float32))
        early = jnp.where(self.owner_is_before, first, 0.0)
        return _join_chunks(early, second + jnp.where(self.owner_is_before, 0.0, first))

    def sum_of_keys(self, gradient: jax.Array) -> jax.Array:
        """Return the gradient of the keys or values of the part, as `sum_of_queries`."""
        first, second = _unstack(gradient.astype(jnp.float32))
        early = second + jnp.where(self.owner_is_before, first, 0.0)
        return _join_chunks(early, jnp.where(self.owner_is_before, 0.0, first))


def _split_chunks(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split an array of a part, [B, S, ...], into its two chunks [B, C, ...]."""
    chunks = x.reshape(x.shape[0], 2, -1, *x.shape[2:])
    return chunks[:, 0], chunks[:, 1]


def _join_chunks(early: jax.Array, late: jax.Array) -> jax.Array:
    return jnp.concatenate([early, late], axis=1)


def _stack(first: jax.Array, second: jax.Array) -> jax.Array:
    """Stack two arrays [B, ...] as rows of a batch, [2B, ...]."""
    return jnp.stack([first, second], axis=1).reshape(-1, *first.shape[1:])


def _unstack(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Invert `_stack`."""
    pairs = x.reshape(-1, 2, *x.shape[1:])
    return pairs[:, 0], pairs[:, 1]


def to_zigzag(x: jax.Array, devices: int) -> jax.Array:
    """Reorder a sequence, [B, S, ...], to zigzag order: chunks i and 2 × devices - 1 - i for device i.

    2 × devices must divide S.
    """
    early, late = jnp.split(x.reshape(x.shape[0], 2 * devices, -1, *x.shape[2:]), 2, axis=1)
    return jnp.stack([early, jnp.flip(late, axis=1)], axis=2).reshape(x.shape)


def from_zigzag(x: jax.Array, devices: int) -> jax.Array:
    """Reorder a sequence in zigzag order, [B, S, ...], to its own order."""
    chunk = x.shape[1] // (2 * devices)
    early, late = jnp.split(x.reshape(x.shape[0], devices, 2, chunk, *x.shape[2:]), 2, axis=2)
    return jnp.concatenate([early, jnp.flip(late, axis=1)], axis=1).reshape(x.shape)


def _to_part_rows(key_ranges: KeyRanges, owner: jax.Array, devices: int, rows: int) -> KeyRanges:
    """Convert ranges in rows of the sequence to rows of the part of device `owner`, which has `rows` rows."""
    chunk = rows // 2
    begins = owner * chunk, (2 * devices - 1 - owner) * chunk

    def count_before(row: jax.Array) -> jax.Array:
        """Count the rows of the part that come before this row of the sequence."""
        early, late = (jnp.clip(row - begin, 0, chunk) for begin in begins)
        return early + late

    return KeyRanges(count_before(key_ranges.first), count_before(key_ranges.last + 1) - 1)


def _without_bounds(parameters: AttentionParameters) -> AttentionParameters:
    """Drop the static bounds of the key ranges, which do not hold in the rows of a part."""
    return replace(parameters, keys_before=None, keys_after=None)


def _to_result(out: jax.Array, log_sum: jax.Array) -> Result:
    """Convert what a kernel returns for a part to a result that can be merged."""
    return out.astype(jnp.float32), jnp.where(log_sum == jnp.inf, -jnp.inf, log_sum)


def _merge(*results: Result) -> Result:
    total = reduce(jnp.logaddexp, (log_sum for _, log_sum in results))
    finite = jnp.where(total == -jnp.inf, 0.0, total)
    out = sum(out * jnp.swapaxes(jnp.exp(log_sum - finite), 1, 2)[..., None] for out, log_sum in results)
    return jnp.asarray(out), total
