"""Moments that rest in 16 or 8 bits: around any optimizer, which is given a layer's in float32 and never learns it.

Eight bits are Dettmers et al.'s (2022, arXiv:2110.02861): codes in small blocks, each relative to its block's largest
value, on a map that is finer near zero. Theirs is a table; this one is the square of a code, which is arithmetic and
loses less (see docs/moments.md). Means of squares are rounded at random: to the nearest, one that should shrink by a
thousandth a step would stay, in either dtype, because half of what tells two values apart is more. Blocks lie along the
last dimension and never straddle what two devices hold, so that codes and scales are divided as their parameter is, and
nothing is moved between devices.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxopt_llm import hashing, tree
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.axes import PARAMETER_AXES
from jaxopt_llm.parallel.sharding import Placement

StateDtype = Literal["float32", "bfloat16", "int8"]
SIGNED, SQUARES = ("mu", "trace"), ("nu",)  # in optax's states: means of gradients, and of their squares
BLOCKS = range(128, 15, -8)  # values that share a scale, the best first: of 128 it costs 1/32 of a byte for each
ENOUGH = 64  # values, of which it costs 1/16
SHARES = (8, 4, 2, 1)  # of a last dimension that mesh.tensor splits: most first, while they hold blocks large enough
SMALLEST, LARGEST = 2.0**-126, 2.0**126  # scales: what lies beyond, or its reciprocal, processors may take for zero


@struct.dataclass
class Codes:
    """codes [..., N], int8 of what has a sign, uint8 of squares; scales float32 [..., N / block]: the largest magnitude
    of each block, of squares their root's. It is kept whole: 16 bits would not follow a decay of a thousandth."""

    codes: tree.Leaf
    scales: tree.Leaf


def block(spec: ParamSpec) -> int | None:
    """How many values of this leaf of one layer share a scale; None for what stays in float32: scales and biases, which
    are few, and matrices whose last dimension no block divides. The shape alone decides, so that a checkpoint has one
    layout whatever the mesh."""
    if not spec.contracting:
        return None
    size, axis = spec.shape[-1], spec.axes[-1]
    shares = SHARES if axis and PARAMETER_AXES[axis] else (1,)
    found = [values for share in shares for values in BLOCKS if size % (share * values) == 0]
    return next((values for values in found if values >= ENOUGH), max(found, default=None))


def in_no_blocks(specs: tree.Tree) -> list[str]:
    """Paths of the matrices and tables whose moments stay in float32."""
    wide = tree.map_with_path(lambda path, spec: path if spec.contracting and not block(spec.layer()) else None, specs)
    return jax.tree.leaves(wide)


def problems(dtype: StateDtype, specs: tree.Tree, placement: Placement) -> list[str]:
    """Blocks that would straddle what two devices hold. specs: of what is trained."""

    def straddles(path: str, spec: ParamSpec) -> str | None:
        values, held = block(spec.layer()), placement.masters(spec).shard_shape(spec.shape)[-1]
        if not values or held % values == 0:
            return None
        return (
            f"optimizer.state_dtype=int8: each device would hold {held} of the {spec.shape[-1]} of {path}'s last "
            f"dimension, which are no blocks of {values}: use bfloat16, or a smaller mesh.tensor or mesh.fsdp (and a "
            "larger mesh.data)"
        )

    return jax.tree.leaves(tree.map_with_path(straddles, specs))[:1] if dtype == "int8" else []


def encode(x: jax.Array, values: int, squares: bool, random: jax.Array | None = None) -> Codes:
    """x: float32 [..., N], N a multiple of `values`, the size of a block; not negative where these are squares.

    random: bits to round by, uint32 of x's shape; None: to the nearest code. A magnitude a, up to 2^126, in a block
    whose largest is s then comes back within s/L (√(a/s) + 1/L), with L codes above zero, 127 or 255; of squares their
    root does. No square becomes zero that was not: moments are divided by its root.
    """
    dtype = jnp.uint8 if squares else jnp.int8
    most = jnp.iinfo(dtype).max
    blocks = x.reshape(*x.shape[:-1], -1, values)  # [..., N / values, values]
    magnitudes = jnp.minimum(jnp.sqrt(blocks) if squares else jnp.abs(blocks), LARGEST)
    scales = jnp.max(magnitudes, axis=-1, keepdims=True)
    scales = jnp.where(scales < SMALLEST, 0, scales)
    share = jnp.where(scales > 0, magnitudes / jnp.where(scales > 0, scales, 1), 0)
    carry = 0.5 if random is None else (random >> 8).reshape(blocks.shape).astype(jnp.float32) * 2.0**-24  # in [0, 1)
    codes = jnp.minimum(jnp.floor(most * jnp.sqrt(share) + carry), most)
    codes = jnp.where(share > 0, jnp.maximum(codes, 1), 0) if squares else jnp.sign(blocks) * codes
    return Codes(codes.astype(dtype).reshape(x.shape), scales[..., 0])


def decode(moment: Codes) -> jax.Array:
    """float32 [..., N]."""
    codes = moment.codes.reshape(*moment.scales.shape, -1).astype(jnp.float32) / jnp.iinfo(moment.codes.dtype).max
    values = moment.scales[..., None] * codes * jnp.abs(codes)
    squares = moment.codes.dtype == jnp.uint8
    return (jnp.square(values) if squares else values).reshape(moment.codes.shape)


def random_bits(shape: tuple[int, ...], count: jax.Array) -> jax.Array:
    """uint32, to round this step's values by: a hash of place and step. Not of the values: those differ in their last
    bits from one mesh to another."""
    return hashing.mix(hashing.places(shape) ^ (count.astype(jnp.uint32) * jnp.uint32(hashing.GOLDEN)))


def to_bfloat16(x: jax.Array, random: jax.Array) -> jax.Array:
    """float32, rounded up or down so that the mean over random bits, uint32, is x."""
    up = jnp.where(jnp.isfinite(x), random >> 16, 0)
    return jax.lax.bitcast_convert_type(
        (jax.lax.bitcast_convert_type(x, jnp.uint32) + up >> 16).astype(jnp.uint16), jnp.bfloat16
    )


def stored(
    optimizer: optax.GradientTransformation, dtype: StateDtype, specs: tree.Tree
) -> optax.GradientTransformation:
    """The optimizer with its moments at rest in this dtype. specs: of the parameters of one layer."""
    if dtype == "float32":
        return optimizer
    blocks: dict[str, int | None] = {}
    tree.map_with_path(lambda path, spec: blocks.update({path: block(spec)}), specs)

    def narrow(count: jax.Array, path: str, leaf: jax.Array) -> jax.Array | Codes:
        for field in SIGNED + SQUARES:
            for parameter, values in blocks.items():
                if not f"/{path}".endswith(f"/{field}/{parameter}"):
                    continue
                random = random_bits(leaf.shape, count) if field in SQUARES else None
                if dtype == "bfloat16":
                    return leaf.astype(jnp.bfloat16) if random is None else to_bfloat16(leaf, random)
                return leaf if values is None else encode(leaf, values, field in SQUARES, random)
        return leaf

    def wide(leaf: jax.Array | Codes) -> jax.Array:
        if isinstance(leaf, Codes):
            return decode(leaf)
        return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf

    def narrowed(state: tree.Tree) -> tree.Tree:
        # Alike, where there are several; none with SGD, which keeps no squares.
        counts = [count for _, count in optax.tree.get_all_with_path(state, "count")]
        count = counts[0] if counts else jnp.int32(0)
        return tree.map_with_path(functools.partial(narrow, count), state)

    def init(params: tree.Tree) -> tree.Tree:
        return narrowed(optimizer.init(params))

    def update(updates: tree.Tree, state: tree.Tree, params: tree.Tree = None) -> tuple[tree.Tree, tree.Tree]:
        moments = jax.tree.map(wide, state, is_leaf=lambda leaf: isinstance(leaf, Codes))
        updates, moments = optimizer.update(updates, moments, params)
        return updates, narrowed(moments)

    return optax.GradientTransformation(init, update)
