"""Gated DeltaNet in the arithmetic of memory and time, for one layer on one device: read off the trace of its function.

Its products are small: what they read and write takes longer than their FLOPs. Between them are elementwise kernels.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxopt_llm.config import Config
from jaxopt_llm.config.model import GATED_DELTA, DeltaConfig
from jaxopt_llm.core.jaxpr import typeof
from jaxopt_llm.model import gated_delta
from jaxopt_llm.planning.search.passes import Passes

# Counted in a compiled program (jax 0.10.2; heads of 128, 8,192 tokens of a GPU in rows of 1,024) whose layers
# alternate with attention. There XLA holds parts of both at once: with layers of this kind alone, COPIES would be 4.
STREAMED = 2.2  # bytes that all kernels move for each byte that the products read and write
ALIVE = 0.17  # share of the bytes that the products of a group read and write in its backward that is alive at once
COPIES = 20  # of the projections that are alive in a block: other forms and gradients, many of them in float32


@dataclass(frozen=True)
class Pass:
    """A forward or a backward of a layer: FLOPs of its products, and bytes that they read and write, of one token."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class DeltaCost:
    """Cost of the Gated DeltaNets of a model on one device; 0 without any.

    layers: number of them in a chunk.
    projected: numbers of the projections of a token.
    share: share of a row that a group has.
    """

    layers: float
    forward: Pass
    backward: Pass
    projected: float
    share: float

    @classmethod
    def from_config(cls, config: Config, passes: Passes) -> "DeltaCost":
        layers, delta = sum(number for kind, number in passes.kinds if kind == GATED_DELTA), config.model.delta
        if not layers:
            return cls(0.0, Pass(0.0, 0.0), Pass(0.0, 0.0), 0.0, 0.0)
        heads = max(delta.key_heads // config.mesh.tensor, 1)
        dtype, length = config.precision.compute_dtype, config.training.sequence_length
        forward, backward = _trace(delta, heads, length, dtype)
        values = delta.value_heads // delta.key_heads * (delta.value_head_dim + 2)
        share = min(gated_delta.GROUP * gated_delta.CHUNK / length, 1.0)
        return cls(layers, forward, backward, heads * (2 * delta.key_head_dim + values), share)

    def count_working(self, tokens: int, compute: int) -> float:
        """Return the bytes that are alive in the backward of a layer: copies of the projections, and one group."""
        return tokens * (COPIES * compute * self.projected + ALIVE * self.share * self.backward.bytes)


@functools.cache
def _trace(delta: DeltaConfig, heads: int, length: int, dtype: str) -> tuple[Pass, Pass]:
    """Return the costs of a forward and of a backward. heads: of keys, on a device."""
    shared, sizes = delta.value_heads // delta.key_heads, (delta.key_head_dim, delta.value_head_dim)
    by_name = {"query": (heads, sizes[0]), "key": (heads, sizes[0]), "value": (heads, shared, sizes[1])}
    kernels = [jax.ShapeDtypeStruct((*shape, delta.kernel), jnp.float32) for shape in by_name.values()]
    shapes = [*by_name.values(), *[(heads, shared)] * 2]
    projected = [jax.ShapeDtypeStruct((1, length, *shape), dtype) for shape in shapes]
    rates = [jax.ShapeDtypeStruct((heads * shared,), jnp.float32)] * 2
    age, operands = jax.ShapeDtypeStruct((1, length), jnp.int32), (*projected, *kernels, *rates)
    forward = jax.make_jaxpr(gated_delta.mix)(age, *operands)
    gradient = jax.eval_shape(gated_delta.mix, age, *operands)

    def run_backward(age: jax.Array, gradient: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(functools.partial(gated_delta.mix, age), *operands)[1](gradient)

    whole = _count(jax.make_jaxpr(run_backward)(age, gradient, *operands).jaxpr)
    of_forward = _count(forward.jaxpr)
    # The trace of a backward has the forward before it.
    each = of_forward, Pass(whole.flops - of_forward.flops, whole.bytes - of_forward.bytes)
    first, second = (Pass(found.flops / length, found.bytes / length) for found in each)
    return first, second


def _count(jaxpr: Jaxpr) -> Pass:
    """Return the FLOPs of the products of a program, and the bytes that they read and write."""
    flops = moved = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            operands = [typeof(each) for each in (*eqn.invars, *eqn.outvars)]
            contracted = eqn.params["dimension_numbers"][0][0]
            flops += 2 * operands[-1].size * math.prod(operands[0].shape[dim] for dim in contracted)
            moved += sum(each.size * each.dtype.itemsize for each in operands)
            continue
        for value in eqn.params.values():
            if isinstance(value, (ClosedJaxpr, Jaxpr)):
                found = _count(value.jaxpr if isinstance(value, ClosedJaxpr) else value)
                trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
                flops, moved = flops + trips * found.flops, moved + trips * found.bytes
    return Pass(flops, moved)
