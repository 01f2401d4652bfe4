"""Tables of the vocabulary meet computation: `take` looks tokens up, `cross_entropy` classifies. See weights.py.

Their rows are what `tensor` divides, and the stages of a pipeline.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.kernels import cross_entropy as kernel
from jaxopt_llm.kernels.cross_entropy import Classifier, Losses, Tokens
from jaxopt_llm.model.leaves import LoraWeight
from jaxopt_llm.model.weights import GRADIENT, Weight, Whole, einsum, gather_whole, shardings_of, split_tap
from jaxopt_llm.parallel.gathering import reduce_gradient
from jaxopt_llm.parallel.sharding import Placement


def take(table: Weight, ids: jax.Array, placement: Placement) -> jax.Array:
    """Rows of a table: weight [V, D], ids [...] -> [..., D]. Ids must be within the table: the host checks them."""
    if isinstance(table, LoraWeight):
        assert table.magnitude is None, "magnitudes are of the blocks: lora.problems refuses others"
        rows = "XYZ"[: ids.ndim]
        low = table.scale * take(table.lora_b, ids, placement)
        return take(table.base, ids, placement) + einsum(f"{rows}r,Dr->{rows}D", low, table.lora_a)
    if shardings_of(table).staged:
        return _take_staged(placement, *split_tap(table), ids)
    return _take(*split_tap(table), ids)


def cross_entropy(
    x: jax.Array, table: Weight, tokens: Tokens, cotangent: jax.Array, form: Classifier, placement: Placement
) -> Losses:
    """cotangent × objective, and the cross-entropy, of logits x · tableᵀ, each summed over the tokens that count.

    x: [B, S, D] with all its positions; table: [V, D]. Only the former is differentiated, by x and table.
    cotangent: float32 scalar. It is wanted here because the gradients are formed with the loss, in 16 bits: scaled
        afterwards, small ones would be lost in float16, and a second array of the table's size be needed.
    The table is gathered once, and its gradient reduced once (see kernels/cross_entropy.py).

    On a stage of a pipeline the table is the stage's rows, x of the whole the same on all stages, and so are the
    losses; gradients are of these rows, and the one by x what they add to it.
    """
    xs, tables = zip(*_terms(x, table), strict=True)
    tables, taps = zip(*map(split_tap, tables), strict=True)
    cotangent = jax.lax.stop_gradient(jnp.asarray(cotangent, jnp.float32))
    objective, loss = _cross_entropy(form, placement, xs, tables, taps, tokens, cotangent)
    return objective, jax.lax.stop_gradient(loss)


def _terms(x: jax.Array, table: Weight) -> list[tuple[jax.Array, Whole]]:
    """What x · tableᵀ is the sum of: inputs, each with the array that it multiplies."""
    if not isinstance(table, LoraWeight):
        return [(x, table)]
    assert table.magnitude is None, "magnitudes are of the blocks: lora.problems refuses others"
    low = table.scale * einsum("BSD,Dr->BSr", x, table.lora_a)
    return [*_terms(x, table.base), (low, table.lora_b)]


# In each operation the table itself has no cotangent (None): its gradient is the tap's.


@jax.custom_vjp
def _take(table, tap, ids):
    return gather_whole(table)[ids]


def _take_forward(table, tap, ids):
    return _take(table, tap, ids), (table, ids)


def _take_backward(residuals, dy):
    table, ids = residuals
    shardings = shardings_of(table)
    if not shardings.trainable:
        return None, None, None
    # In float32: a frequent token's row sums over thousands of positions.
    with jax.named_scope(GRADIENT):
        gradient = jnp.zeros(table.array.shape, jnp.float32).at[ids].add(dy.astype(jnp.float32))
    # Whole rows first: asked for divided rows, XLA gathers every device's positions instead of reducing the rows.
    gradient = jax.lax.with_sharding_constraint(gradient, shardings.gathered)
    return None, reduce_gradient(gradient, shardings), None


_take.defvjp(_take_forward, _take_backward)


# Where the stages of a pipeline divide a table's rows, with `tensor`, each device looks up its own, and the sums are
# written out: XLA's partitioner aborts on look-ups, and on their gradients, in a region that is manual over `pipeline`.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take_staged(placement, table, tap, ids):
    """Rows of the whole table, on every stage as `Placement.between_stages` has them."""
    where, sent = _Where.of(placement, (table,)), placement.sent(ids.shape[1])

    def on_device(table, ids):
        row, own = _own_rows(ids, table.shape[0], where.vocabulary)
        found = jnp.where(own[..., None], table[jnp.where(own, row, 0)], 0)
        if not _divides_sequence(sent):
            return jax.lax.psum(found, where.vocabulary)
        return jax.lax.psum(jax.lax.psum_scatter(found, "tensor", scatter_dimension=1, tiled=True), "pipeline")

    return placement.on_each_device(on_device, (where.tables[0], where.tokens), sent.spec)(gather_whole(table), ids)


def _take_staged_forward(placement, table, tap, ids):
    return _take_staged(placement, table, tap, ids), (table, ids)


def _take_staged_backward(placement, residuals, dy):
    table, ids = residuals
    shardings = shardings_of(table)
    if not shardings.trainable:
        return None, None, None
    where, sent = _Where.of(placement, (table,)), placement.sent(ids.shape[1])
    count = table.array.shape[0] // placement.size("tensor")

    def on_device(dy, ids):
        row, own = _own_rows(ids, count, where.vocabulary)
        dy = jax.lax.psum(dy, "pipeline")
        dy = jax.lax.all_gather(dy, "tensor", axis=1, tiled=True) if _divides_sequence(sent) else dy
        # In float32: a frequent token's row sums over thousands of positions.
        rows = jnp.zeros((count, dy.shape[-1]), jnp.float32)
        return rows.at[jnp.where(own, row, count)].add(dy.astype(jnp.float32), mode="drop")[None]

    with jax.named_scope(GRADIENT):
        parts = PartitionSpec(where.rows, *where.tables[0])
        gradient = placement.on_each_device(on_device, (sent.spec, where.tokens), parts)(dy, ids)
        gradient = _sum_parts(gradient, jnp.float32(1), shardings.reduce_dtype)
    return None, reduce_gradient(gradient, shardings), None


_take_staged.defvjp(_take_staged_forward, _take_staged_backward)


def _own_rows(ids: jax.Array, count: int, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Rows by their number on this device, which has so many, and whether it has them."""
    row = ids - jax.lax.axis_index(axes) * count
    return row, (row >= 0) & (row < count)


def _divides_sequence(sent: NamedSharding) -> bool:
    return "tensor" in jax.tree.leaves(sent.spec[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(form, placement, xs, tables, taps, tokens, cotangent):
    where = _Where.of(placement, tables)
    run = placement.on_each_device(
        functools.partial(kernel.losses, form, axes=where.vocabulary),
        (where.xs, where.tables, where.tokens),
        where.tokens,
    )
    return _sum_losses(run(xs, tuple(map(gather_whole, tables)), tokens), cotangent)


def _cross_entropy_forward(form, placement, xs, tables, taps, tokens, cotangent):
    where = _Where.of(placement, tables)
    wanted = tuple(shardings_of(each).trainable for each in tables)

    def on_device(xs, tables, tokens, cotangent):
        found = kernel.losses_and_gradients(form, xs, tables, wanted, tokens, cotangent, where.vocabulary)
        losses, *gradients = found
        return losses, *jax.tree.map(lambda part: part[None], gradients)

    # Gradients leave the region as each device's part of their sums: outside, XLA reduces them to where they go.
    run = placement.on_each_device(
        on_device,
        (where.xs, where.tables, where.tokens, PartitionSpec()),
        (
            where.tokens,
            PartitionSpec(where.by_tensor, *where.xs),
            tuple(PartitionSpec(where.rows, *spec) for spec in where.tables),
        ),
    )
    losses, d_xs, d_tables = run(xs, tuple(map(gather_whole, tables)), tokens, cotangent)
    return _sum_losses(losses, cotangent), (d_xs, d_tables, tables)


def _cross_entropy_backward(form, placement, residuals, cotangents):
    d_xs, d_tables, tables = residuals
    scale = cotangents[0]  # 1, where the executor differentiates this alone: XLA then leaves the product out
    d_xs = tuple(_sum_parts(each, scale, each.dtype) for each in d_xs)

    @jax.named_scope(GRADIENT)
    def of_tap(table, gradient):
        shardings = shardings_of(table)
        if not shardings.trainable:
            return None
        return reduce_gradient(_sum_parts(gradient, scale, shardings.reduce_dtype), shardings)

    return d_xs, None, tuple(map(of_tap, tables, d_tables)), None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _sum_losses(losses: Losses, cotangent: jax.Array) -> Losses:
    objective, loss = map(jnp.sum, losses)
    return cotangent * objective, loss


def _sum_parts(parts: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """[devices, ...] -> [...], times scale."""
    scaled = (parts.astype(jnp.float32) * scale).astype(dtype)
    # Not jnp.sum: it would widen 16-bit values to float32, and so the bytes between devices.
    return jax.lax.reduce(scaled, jnp.zeros((), dtype), jax.lax.add, (0,))


@dataclass(frozen=True)
class _Where:
    """How the operands of a cross-entropy are divided. vocabulary: the axes that split the tables' rows; by_tensor: the
    one of them that does so within a stage, if any; rows: the axes that split batch and sequence."""

    xs: PartitionSpec
    tokens: PartitionSpec
    tables: tuple[PartitionSpec, ...]
    staged: bool

    @classmethod
    def of(cls, placement: Placement, tables: tuple[Whole, ...]) -> "_Where":
        return cls(
            xs=placement.activation("batch", "sequence", "embed").spec,
            tokens=placement.activation("batch", "sequence").spec,
            tables=tuple(shardings_of(each).gathered.spec for each in tables),
            staged=shardings_of(tables[0]).staged,
        )

    @property
    def by_tensor(self) -> str | None:
        return self.tables[0][0]

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return ("pipeline",) * self.staged + ((self.by_tensor,) if self.by_tensor else ())

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(jax.tree.leaves(tuple(self.tokens)))
