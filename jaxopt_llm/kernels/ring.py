"""Attention of a sequence that devices divide: keys and values go round, and each device's queries meet them all.

Each device keeps its queries, and at every step has the keys and values of another, to which it attends while it sends
them on (Liu et al. 2023, arXiv:2310.01889). A part of the keys is spans in other rows, and what the parts give is
merged by the logs of their softmaxes' sums. In the backward the gradients of keys and values go round behind them.
Nothing is larger than a device's own part, and no more than two parts are there at once: steps are a loop's, since of
steps one after the other XLA sends all first, and attends to none meanwhile.

Of a sequence in 2N chunks the i-th of N devices has chunk i and chunk 2N-1-i, one from either end: so dealt, each has
the same to do at every step under the causal order (Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2). What a
query sees is one run of a part's rows all the same: the two chunks are in the sequence's order.

Letters: B batch, S queries of a device, T its keys, H heads, G key-value heads, K head size.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.kernels.spans import Form, Spans

Part = tuple[jax.Array, jax.Array]  # keys and values [B, T, G, K], or their gradients
Result = tuple[jax.Array, jax.Array]  # [B, S, H, K] and the log of the softmax's sum [B, H, S], -inf of none; float32


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
        def attend(step: Any, part: Part) -> Result:
            out, log_sum = self.kernel.forward(_of_a_part(form), q, *part, self._seen(spans, step, q.shape[1]))
            return out.astype(jnp.float32), jnp.where(log_sum == jnp.inf, -jnp.inf, log_sum)

        def meet(step: Any, carry: tuple[Part, Result]) -> tuple[Part, Result]:
            part, result = carry
            return self._send(part), _merge(result, attend(step, part))

        own, last = (k, v), jax.lax.axis_size(self.axis) - 1
        part, result = jax.lax.fori_loop(1, last, meet, (self._send(own), attend(0, own)))
        out, log_sum = _merge(result, attend(last, part))
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
        def attend(step: Any, part: Part) -> tuple[jax.Array, Part]:
            seen = self._seen(spans, step, q.shape[1])
            found = self.kernel.backward(_of_a_part(form), q, *part, seen, log_sum, mean, gradient)
            d_q, *d_part = (each.astype(jnp.float32) for each in found)
            return d_q, tuple(d_part)

        def add(a: Part, b: Part) -> Part:
            return a[0] + b[0], a[1] + b[1]

        def meet(step: Any, carry: tuple[Part, jax.Array, Part]) -> tuple[Part, jax.Array, Part]:
            # The gradient of the part before is sent while that of this one is formed.
            part, d_q, d_before = carry
            more, d_part = attend(step, part)
            return self._send(part), d_q + more, add(self._send(d_before), d_part)

        own, last = (k, v), jax.lax.axis_size(self.axis) - 1
        part, d_q, d_before = jax.lax.fori_loop(1, last, meet, (self._send(own), *attend(0, own)))
        more, d_part = attend(last, part)
        d_k, d_v = self._send(add(self._send(d_before), d_part))  # home
        return (d_q + more).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)

    def _seen(self, spans: Spans, step: Any, rows: int) -> Spans:
        """Of the part that came with so many steps, in its rows."""
        devices = jax.lax.axis_size(self.axis)
        return _in_part(spans, (jax.lax.axis_index(self.axis) - step) % devices, devices, rows)

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


def _merge(a: Result, b: Result) -> Result:
    total = jnp.logaddexp(a[1], b[1])
    finite = jnp.where(total == -jnp.inf, 0.0, total)
    out = sum(out * jnp.swapaxes(jnp.exp(log_sum - finite), 1, 2)[..., None] for out, log_sum in (a, b))
    return jnp.asarray(out), total
