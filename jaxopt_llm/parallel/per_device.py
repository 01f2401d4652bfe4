"""Kernels of attention over a mesh: each device calls the kernel with its own rows and heads."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxopt_llm.kernels.attention import Implementation
from jaxopt_llm.kernels.attention_mask import KeyRanges
from jaxopt_llm.kernels.attention_types import AttentionParameters, AttentionResiduals
from jaxopt_llm.parallel.placement import Placement


@dataclass(frozen=True)
class PerDevice:
    """Kernel in a region that is manual over the mesh: each device calls it with its own rows and heads.

    XLA cannot partition a kernel, and would gather its operands instead.

    divides_heads: whether `tensor` divides the heads; otherwise each device along it computes all of them.
    """

    kernel: Implementation
    placement: Placement
    divides_heads: bool = True

    @property
    def reads_out(self) -> bool:
        return self.kernel.reads_out

    def forward(
        self, parameters: AttentionParameters, q: jax.Array, k: jax.Array, v: jax.Array, key_ranges: KeyRanges
    ) -> tuple[jax.Array, jax.Array]:
        heads, kv_heads, rows, sums = self._specs()
        run = self.placement.shard_map(
            functools.partial(self.kernel.forward, parameters), (heads, kv_heads, kv_heads, rows), (heads, sums)
        )
        return run(q, k, v, key_ranges)

    def backward(
        self, parameters: AttentionParameters, residuals: AttentionResiduals, gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        heads, kv_heads, rows, sums = self._specs()
        residual_specs: dict[str, Any] = {"q": heads, "k": kv_heads, "v": kv_heads, "key_ranges": rows, "log_sum": sums}
        residual_specs |= {"out": heads} if self.reads_out else {"delta": sums}
        run = self.placement.shard_map(
            functools.partial(self.kernel.backward, parameters),
            (AttentionResiduals(**residual_specs), heads),
            (heads, kv_heads, kv_heads),
        )
        return run(residuals, gradient)

    def _specs(self) -> tuple[PartitionSpec, ...]:
        """Return the specs of q, of k and v, of the key ranges, and of arrays with one value per query and head."""
        spec = self.placement.activation
        heads, kv_heads = ("heads", "kv_heads") if self.divides_heads else (None, None)
        return (
            spec("batch", "sequence", heads, None).spec,
            spec("batch", "sequence", kv_heads, None).spec,
            spec("batch", "sequence").spec,
            spec("batch", heads, "sequence").spec,
        )
