"""Attention of a sequence that devices divide: keys and values go round, and each device's queries meet them all.

Each device keeps its queries, and at every step has the keys and values of another, to which it attends while it sends
them on (Liu et al. 2023, arXiv:2310.01889). A part of the keys is spans in other rows, and what the parts give is
merged by the logs of their softmaxes' sums. In the backward the gradients of keys and values go round with them.
Nothing is larger than a device's own part.

Of a sequence in 2N chunks the i-th of N devices has chunk i and chunk 2N-1-i, one from either end: so dealt, each has
the same to do at every step under the causal order (Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2). What a
query sees is one run of a part's rows all the same: the two chunks are in the sequence's order.

Letters: B batch, S queries of a device, T its keys, H heads, G key-value heads, K head size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.kernels.spans import Form, Spans


@dataclass(frozen=True)
class Ring:
    """An attention.Implementation, called on each device's own arrays, of a sequence that was dealt to them. Spans are
    of each device's queries, too, but in rows of the whole sequence as it was.

    kernel: the implementation that attends to a part; axis: of the mesh, which divides the sequence.
    """

    kernel: Any
    axis: str

    def forward(
        self, form: Form, q: jax.Array, k: jax.Array, v: jax.Array, spans: Spans
    ) -> tuple[jax.Array, jax.Array]:
        result: tuple[jax.Array, jax.Array] | None = None
        for seen, (k_part, v_part) in self._around(k, v, spans):
            out, log_sum = self.kernel.forward(_of_a_part(form), q, k_part, v_part, seen)
            part = out.astype(jnp.float32), jnp.where(log_sum == jnp.inf, -jnp.inf, log_sum)
            result = part if result is None else _merge(result, part)
        assert result is not None
        out, log_sum = result
        return out.astype(q.dtype), jnp.where(log_sum == -jnp.inf, jnp.inf, log_sum)

    def backward(
        self,
        form: Form,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        spans: Spans,
        log_sum: jax.Array,
        mean: jax.Array,
        gradient: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        d_q, d_k, d_v = (jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
        for seen, (k_part, v_part) in self._around(k, v, spans):
            found = self.kernel.backward(_of_a_part(form), q, k_part, v_part, seen, log_sum, mean, gradient)
            d_q, d_k, d_v = (total + each for total, each in zip((d_q, d_k, d_v), found, strict=True))
            d_k, d_v = self._send((d_k, d_v))  # beside what they are of; after the last step, home
        return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)

    def _around(self, k: jax.Array, v: jax.Array, spans: Spans) -> Iterator[tuple[Spans, tuple[jax.Array, jax.Array]]]:
        """Every part, beginning with the device's own: what is seen of it, in its rows, and its keys and values."""
        count, own, part = jax.lax.axis_size(self.axis), jax.lax.axis_index(self.axis), (k, v)
        for step in range(count):
            following = self._send(part) if step < count - 1 else part  # while this part is attended to
            yield _in_part(spans, (own - step) % count, count, k.shape[1]), part
            part = following

    def _send(self, arrays: Any) -> Any:
        count = jax.lax.axis_size(self.axis)
        return jax.lax.ppermute(arrays, self.axis, [(i, (i + 1) % count) for i in range(count)])


def deal(x: jax.Array, devices: int) -> jax.Array:
    """[B, S] of a sequence, in the order in which the devices of a ring divide it evenly. 2 × devices divide S."""
    early, late = jnp.split(x.reshape(x.shape[0], 2 * devices, -1), 2, axis=1)
    return jnp.stack([early, jnp.flip(late, axis=1)], axis=2).reshape(x.shape)


def _in_part(spans: Spans, owner: jax.Array, devices: int, rows: int) -> Spans:
    """Spans of the sequence in the rows of one device's part of it, of which there are so many."""
    chunk = rows // 2
    begins = owner * chunk, (2 * devices - 1 - owner) * chunk

    def before(row: jax.Array) -> jax.Array:
        """How many of the part's rows come before this one of the sequence."""
        early, late = (jnp.clip(row - begin, 0, chunk) for begin in begins)
        return early + late

    return Spans(before(spans.first), before(spans.last + 1) - 1)


def _of_a_part(form: Form) -> Form:
    return replace(form, before=None, after=None)


def _merge(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Results [B, S, H, K] and logs of sums [B, H, S], here of -inf where nothing is seen; float32."""
    total = jnp.logaddexp(a[1], b[1])
    finite = jnp.where(total == -jnp.inf, 0.0, total)
    out = sum(out * jnp.swapaxes(jnp.exp(log_sum - finite), 1, 2)[..., None] for out, log_sum in (a, b))
    return jnp.asarray(out), total
