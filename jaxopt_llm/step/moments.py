"""Moments in 16 or 8 bits: a wrapper around any optimizer, which itself works in float32.

The 8-bit format follows Dettmers et al. (2022, arXiv:2110.02861): codes in small blocks, relative to the largest value
of their block, on a map that is finer near zero. Their map is a table. This one is the square of the code, which is
plain arithmetic and loses less (see docs/moments.md). Means of squares are rounded stochastically: with rounding to
nearest, a value that should shrink by a thousandth per step would not change in either dtype, because half the distance
between two codes is larger. Blocks lie along the last dimension and never straddle two devices, so that codes and
scales are sharded as their parameter is, and no communication is needed.
"""

import functools
from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxopt_llm.config import StateDtype
from jaxopt_llm.core import hashing, tree
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.axes import PARAMETER_AXES
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import master_sharding

SIGNED, SQUARES = ("mu", "trace"), ("nu",)  # fields of optax's states: means of gradients, and of their squares
Keys = tuple[Any, ...]  # path of a leaf, as `jax.tree_util` gives it
BLOCK_SIZES = range(128, 15, -8)  # values per scale, best first: 128 values cost 1/32 byte per value
SUFFICIENT_BLOCK_SIZE = 64  # costs 1/16 byte per value
DEVICE_COUNTS = (8, 4, 2, 1)  # devices that may split the last dimension, from most to fewest
# Bounds of the scales: processors may flush values beyond them, or their reciprocals, to zero.
MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**126


@struct.dataclass
class Codes:
    """Array in 8 bits.

    Attributes:
        codes: [..., N], int8 for signed values, uint8 for squares.
        scales: float32 [..., N / block size], the largest magnitude of each block; for squares, the root of it. It is
            not compressed: 16 bits could not follow a decay by a thousandth.
    """

    codes: tree.Leaf
    scales: tree.Leaf


def choose_block_size(spec: ParamSpec) -> int | None:
    """Return the number of values that share a scale, or None for a leaf that stays in float32.

    Norm scales and biases, which are small, and matrices whose last dimension is not a multiple of any block size stay
    in float32. Only the shape decides, so that a checkpoint has the same layout for every mesh.

    Args:
        spec: spec of one layer.
    """
    if not spec.contracting:
        return None
    size, axis = spec.shape[-1], spec.axes[-1]
    device_counts = DEVICE_COUNTS if axis and PARAMETER_AXES[axis] else (1,)
    sizes = [values for devices in device_counts for values in BLOCK_SIZES if size % (devices * values) == 0]
    return next((values for values in sizes if values >= SUFFICIENT_BLOCK_SIZE), max(sizes, default=None))


def find_uncompressed(specs: tree.Tree) -> list[str]:
    """Return the paths of the matrices and tables whose moments stay in float32 with `int8`."""
    matrices = ((path, spec) for path, spec in tree.leaves_with_path(specs) if spec.contracting)
    return [path for path, spec in matrices if not choose_block_size(spec.unstack())]


def problems(dtype: StateDtype, specs: tree.Tree, placement: Placement) -> list[str]:
    """Find a block that would straddle two devices.

    Args:
        specs: specs of the trained parameters.
    """
    for path, spec in tree.leaves_with_path(specs) if dtype == "int8" else ():
        values = choose_block_size(spec.unstack())
        local_size = master_sharding(spec, placement).shard_shape(spec.shape)[-1]
        if values and local_size % values:
            return [
                f"optimizer.state_dtype=int8: each device would hold {local_size} of the {spec.shape[-1]} values in "
                f"the last dimension of {path}, which is not a multiple of the block size {values}: set "
                "--optimizer.state-dtype bfloat16, or a smaller --mesh.tensor or --mesh.fsdp (and a larger --mesh.data)"
            ]
    return []


def encode(x: jax.Array, values: int, squares: bool, random: jax.Array | None = None) -> Codes:
    """Encode float32 values as 8-bit codes and scales.

    Let s be the largest magnitude of a block and L the number of codes above zero, 127 or 255. A magnitude a, up to
    2^126, is decoded with an error of at most s/L (√(a/s) + 1/L). For squares the bound holds for their roots. A
    nonzero square never becomes zero, because steps are divided by its root.

    Args:
        x: float32 [..., N], N a multiple of `values`; not negative for squares.
        values: block size.
        random: uint32, shape of x: bits for stochastic rounding; None to round to the nearest code.
    """
    dtype = jnp.uint8 if squares else jnp.int8
    most = jnp.iinfo(dtype).max
    blocks = x.reshape(*x.shape[:-1], -1, values)  # [..., N / values, values]
    magnitudes = jnp.minimum(jnp.sqrt(blocks) if squares else jnp.abs(blocks), MAX_SCALE)
    scales = jnp.max(magnitudes, axis=-1, keepdims=True)
    scales = jnp.where(scales < MIN_SCALE, 0, scales)
    share = jnp.where(scales > 0, magnitudes / jnp.where(scales > 0, scales, 1), 0)
    carry = 0.5 if random is None else (random >> 8).reshape(blocks.shape).astype(jnp.float32) * 2.0**-24  # in [0, 1)
    codes = jnp.minimum(jnp.floor(most * jnp.sqrt(share) + carry), most)
    codes = jnp.where(share > 0, jnp.maximum(codes, 1), 0) if squares else jnp.sign(blocks) * codes
    return Codes(codes.astype(dtype).reshape(x.shape), scales[..., 0])


def decode(moment: Codes) -> jax.Array:
    """Return the float32 values [..., N]."""
    codes = moment.codes.reshape(*moment.scales.shape, -1).astype(jnp.float32) / jnp.iinfo(moment.codes.dtype).max
    values = moment.scales[..., None] * codes * jnp.abs(codes)
    squares = moment.codes.dtype == jnp.uint8
    return (jnp.square(values) if squares else values).reshape(moment.codes.shape)


def random_bits(shape: tuple[int, ...], count: jax.Array) -> jax.Array:
    """Return uint32 bits for stochastic rounding: a hash of the index of an element and the step.

    It is not a hash of the values, whose last bits differ from one mesh to another.
    """
    return hashing.mix_bits(hashing.linear_indices(shape) ^ (count.astype(jnp.uint32) * jnp.uint32(hashing.GOLDEN)))


def round_to_bfloat16(x: jax.Array, random: jax.Array) -> jax.Array:
    """Round float32 stochastically to bfloat16: the mean over uniformly random uint32 bits is x."""
    up = jnp.where(jnp.isfinite(x), random >> 16, 0)
    return jax.lax.bitcast_convert_type(
        (jax.lax.bitcast_convert_type(x, jnp.uint32) + up >> 16).astype(jnp.uint16), jnp.bfloat16
    )


def find_parameter(keys: Keys, parameters: Container[Keys]) -> Keys | None:
    """Return the keys of the parameter to which a leaf of an optimizer's state belongs, or None.

    The keys of a moment end with the keys of its parameter. A parameter may have the name of a field of the state, such
    as `mu`: the parameter then has a key of a dict, and the field a key of an attribute.

    Args:
        keys: the path of the leaf, as `jax.tree_util` gives it.
        parameters: the keys of all parameters.
    """
    return next((keys[start:] for start in range(len(keys) + 1) if keys[start:] in parameters), None)


def _find_field(keys: Keys, parameter: Keys | None) -> str | None:
    """Return the name of the field of the state that holds the moments of this parameter."""
    before = keys[: len(keys) - len(parameter or ())]
    return getattr(before[-1], "name", None) if before else None


def compress_moments(
    optimizer: optax.GradientTransformation, dtype: StateDtype, specs: tree.Tree
) -> optax.GradientTransformation:
    """Return the optimizer with its moments stored in `dtype`.

    Args:
        specs: specs of the parameters of one period.
    """
    if dtype == "float32":
        return optimizer
    blocks = {keys: choose_block_size(spec) for keys, spec in jax.tree_util.tree_leaves_with_path(specs)}

    def compress_leaf(count: jax.Array, keys: Keys, leaf: jax.Array) -> jax.Array | Codes:
        parameter = find_parameter(keys, blocks)
        field = _find_field(keys, parameter)
        if parameter is None or field not in SIGNED + SQUARES:
            return leaf
        random = random_bits(leaf.shape, count) if field in SQUARES else None
        if dtype == "bfloat16":
            return leaf.astype(jnp.bfloat16) if random is None else round_to_bfloat16(leaf, random)
        values = blocks[parameter]
        return leaf if values is None else encode(leaf, values, field in SQUARES, random)

    def decompress_leaf(leaf: jax.Array | Codes) -> jax.Array:
        if isinstance(leaf, Codes):
            return decode(leaf)
        return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf

    def compress(state: tree.Tree) -> tree.Tree:
        # If there are several counts, they are equal. SGD has none, because it keeps no squares.
        counts = [count for _, count in optax.tree.get_all_with_path(state, "count")]
        count = counts[0] if counts else jnp.int32(0)
        return jax.tree_util.tree_map_with_path(functools.partial(compress_leaf, count), state)

    def update(updates: tree.Tree, state: tree.Tree, params: tree.Tree = None) -> tuple[tree.Tree, tree.Tree]:
        moments = jax.tree.map(decompress_leaf, state, is_leaf=lambda leaf: isinstance(leaf, Codes))
        updates, moments = optimizer.update(updates, moments, params)
        return updates, compress(moments)

    def init(params: tree.Tree) -> tree.Tree:
        state = optimizer.init(params)
        paths = [keys for keys, _ in jax.tree_util.tree_leaves_with_path(state)]
        moments = {keys: parameter for keys in paths if (parameter := find_parameter(keys, blocks)) is not None}
        fields = {_find_field(*pair) for pair in moments.items()}
        unknown = fields - {*SIGNED, *SQUARES}
        assert not unknown, f"fields of the state that are neither in SIGNED nor in SQUARES: {unknown}"
        has_count = bool(optax.tree.get_all_with_path(state, "count"))
        assert has_count or fields.isdisjoint(SQUARES), "SQUARES need a `count` in the state"
        return compress(state)

    return optax.GradientTransformation(init, update)
