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

Letters: B batch, S queries of a device, T its keys, H heads, G key-value heads, K head size.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxopt_llm.kernels.attention_mask import KeyRanges
from jaxopt_llm.kernels.attention_types import AttentionParameters, AttentionResiduals

Part = tuple[jax.Array, jax.Array]  # keys and values [B, T, G, K], or their gradients
# Output [B, S, H, K] and log of the softmax sum [B, H, S], which is -inf if no key is visible; float32.
Result = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Ring:
    """Implementation of attention, called on each device's own arrays, for a sequence in zigzag order.

    The key ranges are those of each device's queries, but in rows of the whole sequence in its own order.

    kernel: implementation that attends to a part; axis: mesh axis that splits the sequence.
    """

    kernel: Any
    axis: str
    reads_out: ClassVar[bool] = False  # all parts share `delta`

    def forward(
        self, parameters: AttentionParameters, q: jax.Array, k: jax.Array, v: jax.Array, key_ranges: KeyRanges
    ) -> tuple[jax.Array, jax.Array]:
        def attend(step: Any, part: Part) -> Result:
            ranges = self._ranges_in_part(key_ranges, step, q.shape[1])
            out, log_sum = self.kernel.forward(_without_bounds(parameters), q, *part, ranges)
            return out.astype(jnp.float32), jnp.where(log_sum == jnp.inf, -jnp.inf, log_sum)

        def visit(step: Any, carry: tuple[Part, Result]) -> tuple[Part, Result]:
            part, result = carry
            return self._send(part), _merge(result, attend(step, part))

        local_part, last = (k, v), jax.lax.axis_size(self.axis) - 1
        part, result = jax.lax.fori_loop(1, last, visit, (self._send(local_part), attend(0, local_part)))
        out, log_sum = _merge(result, attend(last, part))
        return out.astype(q.dtype), jnp.where(log_sum == -jnp.inf, jnp.inf, log_sum)

    def backward(
        self, parameters: AttentionParameters, residuals: AttentionResiduals, gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = residuals.q, residuals.k, residuals.v

        def attend(step: Any, part: Part) -> tuple[jax.Array, Part]:
            ranges = self._ranges_in_part(residuals.key_ranges, step, q.shape[1])
            part_residuals = residuals._replace(k=part[0], v=part[1], key_ranges=ranges)
            gradients = self.kernel.backward(_without_bounds(parameters), part_residuals, gradient)
            d_q, *d_part = (x.astype(jnp.float32) for x in gradients)
            return d_q, tuple(d_part)

        def add(a: Part, b: Part) -> Part:
            return a[0] + b[0], a[1] + b[1]

        def visit(step: Any, carry: tuple[Part, jax.Array, Part]) -> tuple[Part, jax.Array, Part]:
            # The gradient of the previous part is sent while the gradient of this part is computed.
            part, d_q, d_previous = carry
            d_q_step, d_part = attend(step, part)
            return self._send(part), d_q + d_q_step, add(self._send(d_previous), d_part)

        local_part, last = (k, v), jax.lax.axis_size(self.axis) - 1
        part, d_q, d_previous = jax.lax.fori_loop(1, last, visit, (self._send(local_part), *attend(0, local_part)))
        d_q_step, d_part = attend(last, part)
        d_k, d_v = self._send(add(self._send(d_previous), d_part))  # back to the device that has the keys
        return (d_q + d_q_step).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)

    def _ranges_in_part(self, key_ranges: KeyRanges, step: Any, rows: int) -> KeyRanges:
        """Return the key ranges in the rows of the part that this device holds after `step` steps."""
        devices = jax.lax.axis_size(self.axis)
        return _to_part_rows(key_ranges, (jax.lax.axis_index(self.axis) - step) % devices, devices, rows)

    def _send(self, arrays: Any) -> Any:
        """Send arrays to the next device of the ring."""
        count = jax.lax.axis_size(self.axis)
        return jax.lax.ppermute(arrays, self.axis, [(i, (i + 1) % count) for i in range(count)])


def to_zigzag(x: jax.Array, devices: int) -> jax.Array:
    """Reorder a sequence, [B, S], to zigzag order: chunks i and 2 × devices - 1 - i for device i.

    2 × devices must divide S.
    """
    early, late = jnp.split(x.reshape(x.shape[0], 2 * devices, -1), 2, axis=1)
    return jnp.stack([early, jnp.flip(late, axis=1)], axis=2).reshape(x.shape)


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


def _merge(a: Result, b: Result) -> Result:
    total = jnp.logaddexp(a[1], b[1])
    finite = jnp.where(total == -jnp.inf, 0.0, total)
    out = sum(out * jnp.swapaxes(jnp.exp(log_sum - finite), 1, 2)[..., None] for out, log_sum in (a, b))
    return jnp.asarray(out), total
