"""Attention of a sequence that devices divide: keys and values go round, and each device's queries meet them all.

Each device keeps its queries, and at every step has the keys and values of another, to which it attends while it sends
them on (Liu et al. 2023, arXiv:2310.01889). A part of the keys is spans in other rows, and what the parts give is
merged by the logs of their softmaxes' sums. In the backward the gradients of keys and values go round with them.
Nothing is larger than a device's own part.

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
    """An attention.Implementation, called on each device's own arrays. Spans are in rows of the whole sequence.

    kernel: the implementation that attends to a part; axis: of the mesh, which divides the sequence in its order.
    """

    kernel: Any
    axis: str

    def forward(
        self, form: Form, q: jax.Array, k: jax.Array, v: jax.Array, spans: Spans
    ) -> tuple[jax.Array, jax.Array]:
        result: tuple[jax.Array, jax.Array] | None = None
        for row, (k_part, v_part) in self._around(k, v):
            out, log_sum = self.kernel.forward(_of_a_part(form), q, k_part, v_part, spans.from_row(row))
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
        for row, (k_part, v_part) in self._around(k, v):
            found = self.kernel.backward(
                _of_a_part(form), q, k_part, v_part, spans.from_row(row), log_sum, mean, gradient
            )
            d_q, d_k, d_v = (total + each for total, each in zip((d_q, d_k, d_v), found, strict=True))
            d_k, d_v = self._send((d_k, d_v))  # beside what they are of; after the last step, home
        return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)

    def _around(self, k: jax.Array, v: jax.Array) -> Iterator[tuple[jax.Array, tuple[jax.Array, jax.Array]]]:
        """The first row of every part, beginning with the device's own, and its keys and values."""
        count, own, part = jax.lax.axis_size(self.axis), jax.lax.axis_index(self.axis), (k, v)
        for step in range(count):
            following = self._send(part) if step < count - 1 else part  # while this part is attended to
            yield (own - step) % count * k.shape[1], part
            part = following

    def _send(self, arrays: Any) -> Any:
        count = jax.lax.axis_size(self.axis)
        return jax.lax.ppermute(arrays, self.axis, [(i, (i + 1) % count) for i in range(count)])


def _of_a_part(form: Form) -> Form:
    return replace(form, before=None, after=None)


def _merge(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Results [B, S, H, K] and logs of sums [B, H, S], here of -inf where nothing is seen; float32."""
    total = jnp.logaddexp(a[1], b[1])
    finite = jnp.where(total == -jnp.inf, 0.0, total)
    out = sum(out * jnp.swapaxes(jnp.exp(log_sum - finite), 1, 2)[..., None] for out, log_sum in (a, b))
    return jnp.asarray(out), total
