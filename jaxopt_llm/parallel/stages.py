"""The stages of a pipeline: what each of them holds, and the residual stream between them."""

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.parallel.axes import PARAMETER_AXES, SPLIT_OVER_STAGES
from jaxopt_llm.parallel.placement import Placement, Spec
from jaxopt_llm.parallel.sequence import gather_positions, scatter_positions


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
