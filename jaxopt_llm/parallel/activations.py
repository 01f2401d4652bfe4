"""Activations over devices: the residual stream, its sequence, what a pipeline's stages send, and attention by device.

Sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) replaces the all-reduces of tensor parallelism by an
all-gather where a product begins and a reduce-scatter where it ends. Each is the other's transpose. A layer's 4
all-reduces become 4 reduce-scatters and 6 all-gathers; the last 2 all-gathers of the backward bring back the inputs of
the products for the gradients of the weights. With full rematerialisation its 5 all-reduces become 5 and 8.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.kernels import ring
from jaxopt_llm.kernels.attention_types import AttentionParameters, AttentionResiduals, KeyRanges
from jaxopt_llm.kernels.attention_wrappers import Wrapper
from jaxopt_llm.parallel.axes import PARAMETER_AXES, SPLIT_OVER_STAGES
from jaxopt_llm.parallel.placement import Placement, Spec

T = TypeVar("T")

# ---- Sequence parallelism.


def all_gather_sequence(x: jax.Array, placement: Placement) -> jax.Array:
    """Gather the residual stream [B, S, D], in the order of the tokens, for a product that `tensor` splits.

    Without sequence parallelism, x is returned as it is.
    """
    if not _splits_residual(placement):
        return x
    parts = _divide_tokens(x.shape, placement)
    if parts is None:
        return gather_positions(x, *_residual_shardings(placement))
    groups, width = parts[0], x.shape[-1]
    tokens = jnp.swapaxes(x.reshape(*parts, width), 1, 2).reshape(groups, -1, width)
    return gather_positions(tokens, *_token_shardings(placement)).reshape(x.shape)


def reduce_scatter_sequence(y: jax.Array, placement: Placement) -> jax.Array:
    """Sum a product [B, S, D] over `tensor` and divide its positions, as it joins the residual stream.

    It is `all_gather_sequence` transposed. Without sequence parallelism, y is returned as it is.
    """
    if not _splits_residual(placement):
        return y
    parts = _divide_tokens(y.shape, placement)
    if parts is None:
        return scatter_positions(y, *_residual_shardings(placement))
    groups, rows, shards, length = parts
    by_shard = y.reshape(groups, shards, rows, length, *y.shape[2:])
    return jnp.swapaxes(scatter_positions(by_shard, *_token_shardings(placement)), 1, 2).reshape(y.shape)


def multiply_tokens(product: Callable[[jax.Array], T], x: jax.Array, placement: Placement) -> T:
    """Return product(x) for x [B, S, ...]: one array [B, S, ...] or several.

    Where a gather brings consecutive tokens, the product gets the rows of a device as one row. XLA then sees that the
    scatter of its result, or of the gradient of x, is a reduce-scatter.
    """
    parts = _divide_tokens(x.shape, placement)
    if parts is None:
        return product(x)
    results = product(x.reshape(parts[0], -1, *x.shape[2:]))
    return jax.tree.map(lambda y: y.reshape(*x.shape[:2], *y.shape[2:]), results)


def to_residual_order(values: jax.Array, placement: Placement) -> jax.Array:
    """Return values of tokens [B, S, ...] in the order of the tokens in the residual stream.

    If each device along `tensor` held a part of every row, copies would have to join these parts behind every gather,
    and to separate them before every scatter. So it holds consecutive tokens of the rows one after another.
    """
    parts = _divide_tokens(values.shape, placement)
    if parts is None:
        return values
    groups, rows, shards, length = parts
    by_shard = values.reshape(groups, shards, rows, length, *values.shape[2:])
    return jnp.swapaxes(by_shard, 1, 2).reshape(values.shape)


def to_token_order(values: jax.Array, placement: Placement) -> jax.Array:
    """Return values [B, S, ...] of tokens in the residual stream in the order of the tokens."""
    parts = _divide_tokens(values.shape, placement)
    if parts is None:
        return values
    return jnp.swapaxes(values.reshape(*parts, *values.shape[2:]), 1, 2).reshape(values.shape)


def _divide_tokens(shape: tuple[int, ...], placement: Placement) -> tuple[int, int, int, int] | None:
    """Return (groups, rows, shards, length) of the tokens [B, S, ...].

    The devices along `tensor` share a group of rows. Each of these shards holds rows × length consecutive tokens of it.
    None: the residual stream has the order of the tokens. So it is without sequence parallelism, with one row in a
    group, and where `context` also divides the sequence.
    """
    batch, sequence = shape[:2]
    groups, shards = placement.count_batch_parts(), placement.size("tensor")
    is_divided = _splits_residual(placement) and placement.size("context") == 1
    if not is_divided or batch % groups or sequence % shards or batch == groups:
        return None
    return groups, batch // groups, shards, sequence // shards


def _token_shardings(placement: Placement) -> tuple[NamedSharding, NamedSharding]:
    """Return the shardings of tokens, grouped by rows and then by shards, before and behind a gather."""
    (batch,) = placement.activation("batch").spec
    split, whole = PartitionSpec(batch, "tensor"), PartitionSpec(batch)
    return NamedSharding(placement.mesh, split), NamedSharding(placement.mesh, whole)


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
    """Return values of tokens [B, S, ...] in the order in which the devices hold the positions.

    Zigzag order first brings all of them to all devices. They are small compared to any activation of the model.
    """
    others = [None] * (tokens.ndim - 2)
    if not uses_zigzag(placement):
        return placement.constrain(tokens, "batch", "sequence", *others)
    whole = placement.constrain(tokens, "batch", None, *others)
    return placement.constrain(ring.to_zigzag(whole, placement.size("context")), "batch", "sequence", *others)


def to_sequence_order(values: jax.Array, placement: Placement) -> jax.Array:
    """Reorder values of tokens [B, S, ...] from the order of the devices to the order of the sequence.

    Every device gets whole rows.
    """
    whole = placement.constrain(values, "batch", *[None] * (values.ndim - 1))
    return ring.from_zigzag(whole, placement.size("context")) if uses_zigzag(placement) else whole


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
