"""How an array is brought to where it is used, and what it gives back: weights whole but for `tensor`, their gradients
divided again, and the sequence of the residual stream. Where to is said by sharding.py.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
from flax import struct
from jax.sharding import NamedSharding

from jaxopt_llm.parallel.precision import Matmul

GATHER = "gather_weight"  # the scope under which a compiled program and a profile name it


@dataclass(frozen=True)
class WeightShardings:
    """How one weight is held at rest, while it is used, and as a gradient, and in which dtypes.

    matmul: in what its products are formed (see PrecisionConfig).
    keep: whether the backward reuses the gathered weight (see Placement.place).
    trainable: whether a gradient is formed.
    grouped: whether a `vmap` over gradient groups is around (see Placement.group).
    staged: whether these are one stage's rows, inside a region that is manual over `pipeline`.
    """

    resting: NamedSharding
    gathered: NamedSharding
    gradient: NamedSharding
    compute_dtype: str
    reduce_dtype: str
    matmul: Matmul
    keep: bool
    trainable: bool
    grouped: bool
    staged: bool


@struct.dataclass
class Placed:
    """A weight as it rests, and how to bring it to where it is used; only `model/weights.py` and
    `tables.py` read it.

    tap: zeros of the weight's shape in the reduction's dtype, which no computation reads: the weight's gradient arrives
        as the tap's cotangent, so that it has its own dtype and placement whatever those of the weight. None where no
        gradient is wanted: then none is formed.
    """

    array: jax.Array
    tap: jax.Array | None
    shardings: WeightShardings = struct.field(pytree_node=False)


@jax.named_scope(GATHER)
def gather(weight: Placed, dtype: Any = None) -> jax.Array:
    """The weight in compute dtype, or in this one, whole but for `tensor`.

    Cast first: a gather of 16 bits moves half of the bytes of one of 32.
    """
    array = weight.array.astype(dtype or weight.shardings.compute_dtype)
    # With one constraint alone XLA sometimes gathers the float32 master and casts after.
    array = jax.lax.with_sharding_constraint(array, weight.shardings.resting)
    return jax.lax.with_sharding_constraint(array, weight.shardings.gathered)


def reduce_gradient(gradient: jax.Array, shardings: WeightShardings) -> jax.Array:
    """Sums a weight's gradient over devices in the reduction's dtype, leaving each its part: `gather` transposed."""
    return jax.lax.with_sharding_constraint(gradient.astype(shardings.reduce_dtype), shardings.gradient)


# Sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) in place of tensor parallelism's all-reduces: a
# gather where a product begins and a reduce-scatter where it ends, each the other's transpose. Their backwards are
# written out, because a constraint's own is the same constraint, which would sum first and split after. A layer's 4
# all-reduces become 4 reduce-scatters and 6 gathers, of which the backward's last 2 bring the products' inputs back
# for the weights' gradients; with full rematerialisation its 5 become 5 and 8.


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_sequence(x: jax.Array, split: NamedSharding, whole: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(x, split), whole)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def scatter_sequence(y: jax.Array, split: NamedSharding, whole: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(y, split)


gather_sequence.defvjp(
    lambda x, split, whole: (gather_sequence(x, split, whole), None),
    lambda split, whole, _, dy: (scatter_sequence(dy, split, whole),),
)
scatter_sequence.defvjp(
    lambda y, split, whole: (scatter_sequence(y, split, whole), None),
    lambda split, whole, _, dy: (gather_sequence(dy, split, whole),),
)
