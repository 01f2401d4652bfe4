"""The sequence over devices: sequence parallelism over `tensor`, and context parallelism over `context`.

Sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) replaces the all-reduces of tensor parallelism by an
all-gather where a product begins and a reduce-scatter where it ends. Each is the other's transpose. A layer's 4
all-reduces become 4 reduce-scatters and 6 all-gathers; the last 2 all-gathers of the backward bring back the inputs of
the products for the gradients of the weights. With full rematerialisation its 5 all-reduces become 5 and 8.
"""

import functools

import jax
from jax.sharding import NamedSharding

from jaxopt_llm.kernels import ring
from jaxopt_llm.parallel.placement import Placement


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


# --- context parallelism: attention over `context`


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
