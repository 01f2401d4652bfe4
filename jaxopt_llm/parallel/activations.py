"""Activations over devices: the residual stream, its sequence, what a pipeline's stages send, and attention by device.

Sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) replaces the all-reduces of tensor parallelism by an
all-gather where a product begins and a reduce-scatter where it ends. Each is the other's transpose. A layer's 4
all-reduces become 4 reduce-scatters and 6 all-gathers; the last 2 all-gathers of the backward bring back the inputs of
the products for the gradients of the weights. With full rematerialisation its 5 all-reduces become 5 and 8.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.kernels import ring
from jaxopt_llm.kernels.attention_types import AttentionParameters, AttentionResiduals, KeyRanges
from jaxopt_llm.kernels.attention_wrappers import Wrapper
from jaxopt_llm.parallel.axes import PARAMETER_AXES, SPLIT_OVER_STAGES
from jaxopt_llm.parallel.placement import Placement, Spec

# ---- Sequence parallelism.


def all_gather_sequence(x: jax.Array, placement: Placement) -> jax.Array:
    """Gather all positions of the residual stream [B, S, D] for a product that `tensor` splits.

    Without sequence parallelism, x is returned as it is.
    """
    return gather_positions(x, *_residual_shardings(placement)) if _splits_residual(placement) else x


def reduce_scatter_sequence(y: jax.Array, placement: Placement) -> jax.Array:
    """Sum a product [B, S, D] over `tensor` and divide its positions, as it joins the residual stream.

    It is `all_gather_sequence` transposed. Without sequence parallelism, y is returned as it is.
    """
    return scatter_positions(y, *_residual_shardings(placement)) if _splits_residual(placement) else y


def _splits_residual(placement: Placement) -> bool:
    return placement.sharding.sequence_parallel and placement.size("tensor") > 1


def _residual_shardings(placement: Placement) -> tuple[NamedSharding, NamedSharding]:
    split, whole = (placement.activation("batch", axis, "embed") for axis in ("residual_sequence", "sequence"))
    return split, whole


# The backwards are written out, because the backward of a sharding constraint is the same constraint, which would sum
# first and split afterwards.


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_positions(x: jax.Array, split: NamedSharding, whole: NamedSharding) -> jax.Array:
    """Bring x from the sharding `split` to the sharding `whole`; the backward is `scatter_positions`."""
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(x, split), whole)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def scatter_positions(y: jax.Array, split: NamedSharding, whole: NamedSharding) -> jax.Array:
    """Bring y to the sharding `split`; the backward is `gather_positions`."""
    return jax.lax.with_sharding_constraint(y, split)


gather_positions.defvjp(
    lambda x, split, whole: (gather_positions(x, split, whole), None),
    lambda split, whole, _, dy: (scatter_positions(dy, split, whole),),
)
scatter_positions.defvjp(
    lambda y, split, whole: (scatter_positions(y, split, whole), None),
    lambda split, whole, _, dy: (gather_positions(dy, split, whole),),
)


# ---- Context parallelism: attention over `context`.


def uses_zigzag(placement: Placement) -> bool:
    """Return whether the devices of a ring hold the positions in zigzag order, instead of in their own order."""
    return placement.size("context") > 1 and placement.sharding.has_ring


def to_device_order(tokens: jax.Array, placement: Placement) -> jax.Array:
    """Return [B, S] values of tokens in the order in which the devices hold the positions.

    Zigzag order first brings all of them to all devices. They are small compared to any activation of the model.
    """
    if not uses_zigzag(placement):
        return placement.constrain(tokens, "batch", "sequence")
    whole = placement.constrain(tokens, "batch", None)
    return placement.constrain(ring.to_zigzag(whole, placement.size("context")), "batch", "sequence")


def count_key_parts(placement: Placement) -> int:
    """Return the number of parts in which attention gets the keys: one call of its kernel for each part."""
    return placement.size("context") if uses_zigzag(placement) else 1


def count_head_shards(placement: Placement) -> int:
    """Return the number of parts into which attention divides the heads."""
    return placement.size("tensor") * (1 if placement.sharding.has_ring else placement.size("context"))


# ---- Attention by device.


@dataclass(frozen=True)
class PerDevice(Wrapper):
    """Kernel in a region that is manual over the mesh: each device calls it with its own rows and heads.

    XLA cannot partition a kernel, and would gather its operands instead.

    divides_heads: whether `tensor` divides the heads; otherwise each device along it computes all of them.
    """

    placement: Placement
    divides_heads: bool = True

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


# ---- Stages of a pipeline.


def stage_partition_spec(spec: Spec) -> PartitionSpec:
    """Return what each stage gets of a parameter, where it enters a region that is manual over `pipeline`."""
    by = (PARAMETER_AXES[axis] if axis else () for axis in spec.axes)
    return PartitionSpec(*("pipeline" if "pipeline" in axes else None for axes in by))


def is_split_over_stages(spec: Spec) -> bool:
    """Return whether each stage holds its own rows of this parameter, which is outside the segments."""
    return spec.axes[0] in SPLIT_OVER_STAGES


def count_stage_rows(axis: str | None, size: int, placement: Placement) -> int:
    """Return the part of a dimension that one stage holds, padded if the stages do not divide the dimension."""
    if axis not in SPLIT_OVER_STAGES:
        return size
    by_tensor = placement.size("tensor")
    return -(-size // (placement.size("pipeline") * by_tensor)) * by_tensor


# A stage's layers read and write the residual stream [B, S, D] as on one stage. On its way between stages `tensor` also
# divides it. Both sides are pinned, and so are their gradients: otherwise XLA would divide the sums of the layers
# themselves as the array that is sent, and gather each of them.


def sent_sharding(sequence: int, placement: Placement) -> NamedSharding:
    """Return the sharding of the residual stream [B, S, D] between stages, S = `sequence`.

    `tensor` also divides it, if it divides S, so that no two devices send the same values (Narayanan et al. 2021,
    arXiv:2104.04473, section 4.1).
    """
    divides = sequence % placement.size("context", "tensor") == 0
    return placement.activation("batch", "sent_sequence" if divides else "residual_sequence", "embed")


def constrain_sent(x: jax.Array, placement: Placement) -> jax.Array:
    """Pin the residual stream [B, S, D] as it is sent, summed over stages, and kept."""
    return jax.lax.with_sharding_constraint(x, sent_sharding(x.shape[1], placement))


def gather_stage_input(x: jax.Array, placement: Placement) -> jax.Array:
    """Gather [B, S, D] that was sent, as the layers of a stage read it."""
    whole = placement.activation("batch", "residual_sequence", "embed")
    x = gather_positions(x, sent_sharding(x.shape[1], placement), whole)
    return jax.lax.with_sharding_constraint(x, whole)


def scatter_stage_output(y: jax.Array, placement: Placement) -> jax.Array:
    """Divide the output [B, S, D] of a stage's layers as it is sent: `gather_stage_input` transposed."""
    whole = placement.activation("batch", "residual_sequence", "embed")
    y = jax.lax.with_sharding_constraint(y, whole)
    return scatter_positions(y, sent_sharding(y.shape[1], placement), whole)
