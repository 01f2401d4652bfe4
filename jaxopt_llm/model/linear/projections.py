"""Projections of one input by several weights, whose adapters share products.

Letters: T tokens, D width of the input, F width of all outputs, R rank of all adapters. `einsum_all` takes the first of
these ways that the weights allow:

stacked: W = [W_q W_k W_v], A = [A_q A_k A_v], and B has scale · B_q, scale · B_k and scale · B_v on its diagonal.

    low [T, R] = x · A
    y [T, F] = [x low] · [W Bᵀ]ᵀ      if D <= F: base and adapters in one product
             = x · W + low · Bᵀ       otherwise; cuBLAS adds the second product to the first (beta = 1)
    dlow [T, R] = dy · B
    dx [T, D] = [dy dlow] · [W A]ᵀ    if F <= D
              = dy · Wᵀ + dlow · Aᵀ   otherwise

    [x low] is a copy of x, and a second product reads and writes y again: the narrower side is copied. [W Bᵀ]ᵀ is a
    copy of W. In a loop over layers it replaces the copy out of the stack, and over codes it is where they are
    dequantised. In other cases it pays from about as many tokens on as the narrower side is wide. All this is for
    training with weights that a device holds whole.

shared A: low = x · A, and all other products weight by weight. Devices divide the weights, there are few tokens, or the
products with the base have rounded operands (`precision.matmul`).

apart: weight by weight. Dropout gives each adapter an input of its own.
"""

import functools
import itertools
import math
import operator
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.model.linear import weights
from jaxopt_llm.model.linear.leaves import LoraWeight, QuantisedWeight
from jaxopt_llm.model.linear.weights import Weight, gather_weight, shardings_of
from jaxopt_llm.parallel.gathering import PlacedWeight, WeightShardings, reduce_gradient, split_perturbations

LOW_RANK_NAME = "product with A"  # jax.checkpoint's name for x · A: small, and it costs a reading of x
# Ranks are padded to a multiple of this: in 16 bits, the rows of [x low] must begin at multiples of 16 bytes.
RANK_MULTIPLE = 8


def einsum_all(subscripts: Sequence[str], x: jax.Array, matrices: Sequence[Weight]) -> list[jax.Array]:
    """Compute `weights.einsum(subscripts[i], x, matrices[i])` for each i."""
    results: dict[int, jax.Array] = {}
    adapted = {i: each for i, each in enumerate(matrices) if isinstance(each, LoraWeight) and each.noise is None}
    stackable = [i for i, weight in adapted.items() if _is_stackable(subscripts[i], x, weight)]
    if stackable:
        stack = tuple(adapted.pop(i) for i in stackable)
        for i, weight, y in zip(stackable, stack, _multiply_stack(x, stack), strict=True):
            results[i] = weights.scale_to_magnitude(subscripts[i], y, weight)
    for group in _group_by_shardings(adapted):
        lows = _multiply_shared(subscripts[group[0]], x, [adapted[i].lora_a for i in group])
        for i, low in zip(group, lows, strict=True):
            results[i] = weights.add_adapter(subscripts[i], x, low, adapted[i])
    others = {i: weights.einsum(subscripts[i], x, each) for i, each in enumerate(matrices) if i not in results}
    return [(results | others)[i] for i in range(len(matrices))]


# --- shared A


def _group_by_shardings(adapted: Mapping[int, LoraWeight]) -> Iterator[list[int]]:
    """Group the adapters whose A can be joined along the ranks: alike, and no device boundary along the ranks."""
    groups: dict[Any, list[int]] = {}
    for i, weight in adapted.items():
        shardings = weight.lora_a.shardings
        joins = not (shardings.resting.spec[-1] or shardings.gradient.spec[-1])
        groups.setdefault(shardings if joins else i, []).append(i)
    yield from groups.values()


def _multiply_shared(subscripts: str, x: jax.Array, factors: Sequence[PlacedWeight]) -> list[jax.Array]:
    """Return x · A for each A. They are joined at rest: one product, one gather, and the gradient of each is a part."""
    joined = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, -1), *factors)
    low = weights.einsum(weights.low_rank_subscripts(subscripts)[0], x, joined)
    return jnp.split(low, _ends([factor.array.shape[-1] for factor in factors]), -1)


# --- stacked


def _is_stackable(subscripts: str, x: jax.Array, weight: LoraWeight) -> bool:
    left, right, result = weights.split_subscripts(subscripts)
    summed = "".join(axis for axis in right if axis not in result)
    shardings = [shardings_of(part) for part in (weight.base, weight.lora_a, weight.lora_b)]
    outputs, inputs = (math.prod(factor.array.shape[:-1]) for factor in (weight.lora_b, weight.lora_a))
    # Weights that are whole have gradient groups over `data` and `fsdp`: x is the part of one group.
    mesh = shardings[0].resting.mesh
    tokens = x.size // inputs // (mesh.shape["expert"] * mesh.shape["context"])
    return (
        weight.lora_b.perturbation is not None  # training
        and left.endswith(summed)
        and right.startswith(summed)
        and (isinstance(weight.base, QuantisedWeight) or tokens >= min(inputs, outputs))
        and all(_is_whole(each) and jnp.dtype(each.compute_dtype) == x.dtype for each in shardings)
    )


def _is_whole(shardings: WeightShardings) -> bool:
    """Return whether a device holds the whole weight and its gradient, and products take the weight as it is."""
    everywhere = (shardings.resting, shardings.gathered, shardings.gradient)
    return shardings.matmul == "compute_dtype" and all(each.is_fully_replicated for each in everywhere)


def _multiply_stack(x: jax.Array, stack: tuple[LoraWeight, ...]) -> list[jax.Array]:
    """Return the products with base + scale × A·B of each weight, without magnitudes."""
    ys = _stacked(x, *split_perturbations(tuple(replace(weight, magnitude=None) for weight in stack)))
    return [y.reshape(*y.shape[:-1], *weight.lora_b.array.shape[:-1]) for y, weight in zip(ys, stack, strict=True)]


def _read_stack(stack: Sequence[LoraWeight]) -> tuple[list[jax.Array], jax.Array, list[jax.Array]]:
    """Return W [D, F] of each weight, A [D, R] of all, and B [F, R] of each: scaled, and 0 at the ranks of others."""
    ranks = [weight.lora_a.array.shape[-1] for weight in stack]
    *starts, total = itertools.accumulate(ranks, initial=0)
    padding = -total % RANK_MULTIPLE
    ws, factors, bs = [], [], []
    for weight, rank, start in zip(stack, ranks, starts, strict=True):
        a, b = (gather_weight(factor).reshape(-1, rank) for factor in (weight.lora_a, weight.lora_b))
        ws.append(gather_weight(weight.base).reshape(len(a), len(b)))
        factors.append(a)
        bs.append(jnp.pad(b * jnp.asarray(weight.scale, b.dtype), ((0, 0), (start, total + padding - start - rank))))
    return ws, jnp.pad(jnp.concatenate(factors, 1), ((0, 0), (0, padding))), bs


def _flatten_inputs(x: jax.Array, stack: Sequence[LoraWeight]) -> jax.Array:
    """Merge the contracted dimensions of x."""
    return x.reshape(*x.shape[: x.ndim - stack[0].lora_a.array.ndim + 1], -1)


def _ends(sizes: Sequence[int]) -> list[int]:
    """Return where to split an array into parts of these sizes."""
    return list(itertools.accumulate(sizes))[:-1]


def _product(subscripts: str, x: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x, matrix, preferred_element_type=x.dtype)


def _sum_of_products(subscripts: str, xs: Sequence[jax.Array], matrices: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, map(functools.partial(_product, subscripts), xs, matrices))


@jax.custom_vjp
def _stacked(x, stack, perturbations):
    return _stacked_forward(x, stack, perturbations)[0]


def _stacked_forward(x, stack, perturbations):
    ws, a, bs = _read_stack(stack)
    w, b, inputs = jnp.concatenate(ws, 1), jnp.concatenate(bs, 0), _flatten_inputs(x, stack)
    low = checkpoint_name(_product("...D,DR->...R", inputs, a), LOW_RANK_NAME)
    if w.shape[0] <= w.shape[1]:
        y = _product("...D,DF->...F", jnp.concatenate([inputs, low], -1), jnp.concatenate([w, b.T], 0))
    else:
        y = _product("...D,DF->...F", inputs, w) + _product("...R,FR->...F", low, b)
    # x as it came: reshaped, it would be another array, which a loop over layers would keep as well (8B: 2 GiB).
    return jnp.split(y, _ends([len(b) for b in bs]), -1), (x, low, stack)


def _stacked_backward(residuals, dys):
    x, low, stack = residuals
    ws, a, bs = _read_stack(stack)
    sizes = [len(b) for b in bs]
    # Joining the parts of dy copies F values of each token; every product that it saves reads and writes D.
    joined = sum(sizes) <= (len(sizes) - 1) * len(a)
    if joined:
        dys, ws, bs = ([jnp.concatenate(parts, dim)] for parts, dim in ((dys, -1), (ws, 1), (bs, 0)))
    d_low = _sum_of_products("...F,FR->...R", dys, bs)
    if sum(sizes) <= len(a):  # then all parts are one
        dx = _product("...F,DF->...D", jnp.concatenate([*dys, d_low], -1), jnp.concatenate([*ws, a], 1))
    else:
        dx = _sum_of_products("...F,DF->...D", dys, ws) + _product("...R,DR->...D", d_low, a)
    da = _factor_gradient(_flatten_inputs(x, stack), d_low, stack[0].lora_a.shardings)
    dbs = [_factor_gradient(dy, low, stack[0].lora_b.shardings) for dy in dys]
    dbs = jnp.split(dbs[0], _ends(sizes), 0) if joined else dbs
    return dx.reshape(x.shape), None, _split_gradients(stack, da, dbs)


def _factor_gradient(wide: jax.Array, low: jax.Array, shardings: WeightShardings) -> jax.Array:
    """Return wideᵀ · low, the gradient of factors that are joined along the ranks."""
    rows = string.ascii_uppercase[: wide.ndim - 1]
    matrix = replace(shardings, gradient=NamedSharding(shardings.gradient.mesh, PartitionSpec(None, None)))
    return weights.form_gradient(f"{rows}w", f"{rows}r", "wr", wide, low, matrix)


def _split_gradients(stack: Sequence[LoraWeight], da: jax.Array, dbs: Sequence[jax.Array]) -> tuple[LoraWeight, ...]:
    """Return the cotangents of the perturbations.

    da: [D, R] of all weights. dbs: [F, R] of each, without the ranks of other weights.
    """
    gradients, start = [], 0
    for weight, db in zip(stack, dbs, strict=True):
        end = start + weight.lora_a.array.shape[-1]
        ranks, start = slice(start, end), end
        nothing = jax.tree.map(lambda _: None, weight, is_leaf=lambda leaf: isinstance(leaf, PlacedWeight))
        factors = {"lora_a": da[:, ranks], "lora_b": weight.scale * db[:, ranks]}
        for name, gradient in factors.items():
            factor = getattr(weight, name)
            factors[name] = reduce_gradient(gradient.reshape(factor.array.shape), factor.shardings)
        gradients.append(replace(nothing, **factors))
    return tuple(gradients)


_stacked.defvjp(_stacked_forward, _stacked_backward)
