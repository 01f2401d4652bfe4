"""Attention of a sequence that devices divide: each takes some of the heads, of all the sequence, and gives them back.

Before attention and after it, in the forward and in the backward, devices exchange what they have of the sequence for
what they attend to of the heads (Jacobs et al. 2023, arXiv:2309.14509). It sends less than a ring does, all of it in
one go, and any kernel sees the whole sequence; but there are no more devices than heads.

Letters: B batch, S queries of a device, H heads, G key-value heads, K head size.
"""

from dataclasses import dataclass
from typing import Any

import jax

from jaxopt_llm.kernels.spans import Form, Spans


@dataclass(frozen=True)
class AllToAll:
    """An attention.Implementation, called on each device's own arrays, of a sequence in its order.

    kernel: the implementation that attends; axis: of the mesh, which divides the sequence. It divides G.
    """

    kernel: Any
    axis: str

    def forward(
        self, form: Form, q: jax.Array, k: jax.Array, v: jax.Array, spans: Spans
    ) -> tuple[jax.Array, jax.Array]:
        out, log_sum = self.kernel.forward(form, *map(self._of_heads, (q, k, v)), self._whole(spans))
        return self._of_rows(out), self._exchange(log_sum, split=2, join=1)

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
        q, k, v, gradient = map(self._of_heads, (q, k, v, gradient))
        log_sum, mean = (self._exchange(each, split=1, join=2) for each in (log_sum, mean))
        d_q, d_k, d_v = self.kernel.backward(form, q, k, v, self._whole(spans), log_sum, mean, gradient)
        return self._of_rows(d_q), self._of_rows(d_k), self._of_rows(d_v)

    def _of_heads(self, x: jax.Array) -> jax.Array:
        """[B, S, H, K] of this device's part of the sequence -> all of it, of this device's part of the heads."""
        return self._exchange(x, split=2, join=1)

    def _of_rows(self, x: jax.Array) -> jax.Array:
        """`_of_heads` undone."""
        return self._exchange(x, split=1, join=2)

    def _exchange(self, x: jax.Array, split: int, join: int) -> jax.Array:
        return jax.lax.all_to_all(x, self.axis, split, join, tiled=True)

    def _whole(self, spans: Spans) -> Spans:
        return jax.lax.all_gather(spans, self.axis, axis=1, tiled=True)
