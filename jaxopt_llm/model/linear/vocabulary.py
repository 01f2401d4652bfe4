"""Operations on tables of the vocabulary: embedding look-up, and the head with its cross-entropy loss.

`tensor` divides the rows of these tables (vocabulary parallelism), and so do the stages of a pipeline. The
docstring of `__init__.py` explains the design.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.core import tree
from jaxopt_llm.kernels import cross_entropy as kernel
from jaxopt_llm.kernels.cross_entropy import Classifier, Losses, MakeLoss, Tokens
from jaxopt_llm.kernels.divergence import DistilledChunk, Divergence
from jaxopt_llm.model.linear import weights
from jaxopt_llm.model.linear.leaves import LoraWeight
from jaxopt_llm.model.linear.weights import BaseWeight, Weight, einsum, gather_weight, shardings_of, split_perturbation
from jaxopt_llm.parallel.activations import sent_sharding
from jaxopt_llm.parallel.codes import order_as_storage
from jaxopt_llm.parallel.gathering import reduce_gradient, reduce_parts, sum_parts
from jaxopt_llm.parallel.placement import Placement


def look_up(table: Weight | jax.Array, ids: jax.Array, placement: Placement) -> jax.Array:
    """Return the rows of a table with these ids. table: [V, D]; ids: [...] -> [..., D].

    Ids must be below V; the host checks them.
    """
    if isinstance(table, jax.Array):
        return table[ids]
    if isinstance(table, LoraWeight):
        assert table.magnitude is None, "only weights of blocks have magnitudes: lora.problems refuses others"
        axes = "BST"[: ids.ndim]  # rows and sequence first, as the sums of gradients expect
        low = table.scale * look_up(table.lora_b, ids, placement)
        return look_up(table.base, ids, placement) + einsum(f"{axes}r,Dr->{axes}D", low, table.lora_a)
    if shardings_of(table).pipeline_stage_rows:
        return _look_up_staged(placement, *split_perturbation(table), ids)
    return _look_up(*split_perturbation(table), ids)


@struct.dataclass
class TeacherLogits:
    """The operands of a teacher's logits: its head's input [B, S, D], and the table [V, D]. They have no gradient."""

    x: tree.Leaf
    table: tree.Leaf
    divergence: Divergence = struct.field(pytree_node=False)

    def gather(self) -> "TeacherLogits":
        """Return the operands with the whole table, or this device's rows of it."""
        return replace(self, table=gather_weight(split_perturbation(self.table)[0]))

    def find_specs(self, specs: "_TableSpecs") -> "TeacherLogits":
        """Return the PartitionSpecs of the gathered operands."""
        return replace(self, x=specs.xs, table=shardings_of(self.table).gathered.spec)

    def bind(self, tokens: Tokens) -> tuple[MakeLoss, Tokens]:
        """Return the loss of a chunk on a device, and what it reads of each token."""
        return functools.partial(DistilledChunk.make, self.divergence, self.table), (*tokens, self.x)


@struct.dataclass
class StoredLogProbabilities:
    """The most likely tokens of a teacher, int32 [B, S, K], and their log-probabilities with the rest's, [B, S, K + 1].

    Methods as of TeacherLogits.
    """

    ids: tree.Leaf
    log_probabilities: tree.Leaf
    divergence: Divergence = struct.field(pytree_node=False)

    def gather(self) -> "StoredLogProbabilities":
        return self

    def find_specs(self, specs: "_TableSpecs") -> "StoredLogProbabilities":
        return replace(self, ids=specs.tokens, log_probabilities=specs.tokens)

    def bind(self, tokens: Tokens) -> tuple[MakeLoss, Tokens]:
        stored = functools.partial(DistilledChunk.from_stored, self.divergence)
        return stored, (*tokens, self.ids, self.log_probabilities)


TeacherOperands = TeacherLogits | StoredLogProbabilities


def cross_entropy(
    x: jax.Array,
    table: Weight,
    tokens: Tokens,
    loss_weight: jax.Array,
    classifier: Classifier,
    placement: Placement,
    teacher: TeacherOperands | None = None,
) -> Losses:
    """Return loss_weight × objective, and the cross-entropy, both summed over the tokens that count.

    With a teacher, the objective is the divergence from it, with a part of the cross-entropy, and the sums are those of
    the divergence and of the cross-entropy.

    The logits are x · tableᵀ. Only the objective has gradients, with respect to x and to the table. The table is
    gathered once, and its gradient reduced once (see kernels/cross_entropy.py).

    x: [B, S, D], with all positions of the device's sequence; table: [V, D].
    loss_weight: float32 scalar. It is an argument because the forward computes the gradients in 16 bits: scaled only
        afterwards, small gradients would underflow in float16, and scaling would need a second array of the table's
        size.

    In a pipeline, `table` has the rows of one stage. x is the same on all stages, and so are the losses. The gradients
    are those of the stage's rows, and the part of x's gradient that these rows contribute.
    """
    xs, tables = zip(*_list_terms(x, table), strict=True)
    tables, perturbations = zip(*map(split_perturbation, tables), strict=True)
    loss_weight = jax.lax.stop_gradient(jnp.asarray(loss_weight, jnp.float32))
    teacher = jax.lax.stop_gradient(teacher)
    objective, *sums = _cross_entropy(classifier, placement, xs, tables, perturbations, tokens, loss_weight, teacher)
    return objective, *jax.lax.stop_gradient(sums)


def read_targets(
    x: jax.Array, table: Weight, targets: jax.Array, classifier: Classifier, placement: Placement
) -> tuple[jax.Array, jax.Array]:
    """Return the log-probability of each target, float32 [B, S], and whether no token is more likely, bool [B, S].

    They have no gradients.

    Arguments are as in `cross_entropy`; targets: int [B, S].
    """
    xs, tables = zip(*_list_terms(*jax.lax.stop_gradient((x, table))), strict=True)
    arrays = tuple(gather_weight(split_perturbation(table)[0]) for table in tables)
    specs = _TableSpecs.make(placement, tables)
    run = placement.shard_map(
        functools.partial(kernel.read_targets, classifier, axes=specs.vocabulary),
        (specs.xs, specs.tables, specs.tokens),
        specs.tokens,
    )
    return run(xs, arrays, targets)


def read_most_likely(
    x: jax.Array, table: Weight, count: int, classifier: Classifier, placement: Placement
) -> tuple[jax.Array, jax.Array]:
    """Return the `count` most likely tokens and their log-probabilities with the rest's; see kernels/cross_entropy.py.

    They have no gradients. Arguments are as in `cross_entropy`.
    """
    xs, tables = zip(*_list_terms(*jax.lax.stop_gradient((x, table))), strict=True)
    arrays = tuple(gather_weight(split_perturbation(table)[0]) for table in tables)
    specs = _TableSpecs.make(placement, tables)

    def on_device(xs, tables):
        return kernel.read_most_likely(classifier, xs, tables, count, specs.vocabulary)

    return placement.shard_map(on_device, (specs.xs, specs.tables), specs.tokens)(xs, arrays)


def _list_terms(x: jax.Array, table: Weight) -> list[tuple[jax.Array, BaseWeight]]:
    """Return the terms of x · tableᵀ: pairs of an input and the matrix that it multiplies."""
    if not isinstance(table, LoraWeight):
        return [(x, table)]
    assert table.magnitude is None, "only weights of blocks have magnitudes: lora.problems refuses others"
    low = table.scale * einsum("BSD,Dr->BSr", x, table.lora_a)
    return [*_list_terms(x, table.base), (low, table.lora_b)]


# In each operation the table itself has no cotangent (None): its gradient is that of the perturbation.


@jax.custom_vjp
def _look_up(table, perturbation, ids):
    return gather_weight(table)[ids]


def _look_up_forward(table, perturbation, ids):
    return _look_up(table, perturbation, ids), (table, ids)


def _look_up_backward(residuals, dy):
    table, ids = residuals
    shardings = shardings_of(table)
    if not shardings.trainable:
        return None, None, None

    @jax.named_scope(weights.GRADIENT)
    def form_gradient(ids, dy):
        # In float32: a frequent token's row sums over thousands of positions.
        return jnp.zeros(table.array.shape, jnp.float32).at[ids].add(dy.astype(jnp.float32))

    if coded := shardings.coded_sum:
        parts = jax.vmap(form_gradient)(coded.split_tokens(ids), coded.split_tokens(dy))
        return None, reduce_parts(parts, coded.axes, shardings), None
    # Constrained to whole rows first: with divided rows XLA gathers every device's positions instead of reducing rows.
    gradient = jax.lax.with_sharding_constraint(form_gradient(ids, dy), shardings.gathered)
    return None, reduce_gradient(gradient, shardings), None


_look_up.defvjp(lambda table, perturbation, ids: (_look_up(table, perturbation, ids), (table, ids)), _look_up_backward)


# In a pipeline, stages and `tensor` divide a table's rows. Each device looks up its own rows, and the sums are written
# out: XLA's partitioner aborts on look-ups, and on their gradients, in a region that is manual over `pipeline`.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _look_up_staged(placement, table, perturbation, ids):
    """Look up rows of the whole table; every stage gets them, in the sharding of `stages.constrain_sent`."""
    specs, sent = _TableSpecs.make(placement, (table,)), sent_sharding(ids.shape[1], placement)

    def on_device(table, ids):
        row, is_local = _local_rows(ids, table.shape[0], specs.vocabulary)
        found = jnp.where(is_local[..., None], table[jnp.where(is_local, row, 0)], 0)
        if not _divides_sequence(sent):
            return jax.lax.psum(found, specs.vocabulary)
        return jax.lax.psum(jax.lax.psum_scatter(found, "tensor", scatter_dimension=1, tiled=True), "pipeline")

    return placement.shard_map(on_device, (specs.tables[0], specs.tokens), sent.spec)(gather_weight(table), ids)


def _look_up_staged_forward(placement, table, perturbation, ids):
    return _look_up_staged(placement, table, perturbation, ids), (table, ids)


def _look_up_staged_backward(placement, residuals, dy):
    table, ids = residuals
    shardings = shardings_of(table)
    if not shardings.trainable:
        return None, None, None
    specs, sent = _TableSpecs.make(placement, (table,)), sent_sharding(ids.shape[1], placement)
    count = table.array.shape[0] // placement.size("tensor")

    def on_device(dy, ids):
        row, is_local = _local_rows(ids, count, specs.vocabulary)
        dy = jax.lax.psum(dy, "pipeline")
        dy = jax.lax.all_gather(dy, "tensor", axis=1, tiled=True) if _divides_sequence(sent) else dy
        # In float32: a frequent token's row sums over thousands of positions.
        rows = jnp.zeros((count, dy.shape[-1]), jnp.float32)
        return rows.at[jnp.where(is_local, row, count)].add(dy.astype(jnp.float32), mode="drop")[None]

    with jax.named_scope(weights.GRADIENT):
        parts = PartitionSpec(specs.rows, *specs.tables[0])
        gradient = placement.shard_map(on_device, (sent.spec, specs.tokens), parts)(dy, ids)
        gradient = gradient.astype(shardings.reduce_dtype)
    return None, reduce_parts(gradient, specs.rows, shardings), None


_look_up_staged.defvjp(_look_up_staged_forward, _look_up_staged_backward)


def _local_rows(ids: jax.Array, count: int, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Return the index of each id in this device's `count` rows, and whether the device has that row."""
    row = ids - jax.lax.axis_index(axes) * count
    return row, (row >= 0) & (row < count)


def _divides_sequence(sent: NamedSharding) -> bool:
    return "tensor" in jax.tree.leaves(sent.spec[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(classifier, placement, xs, tables, perturbations, tokens, loss_weight, teacher):
    specs = _TableSpecs.make(placement, tables)

    def on_device(xs, tables, tokens, teacher):
        make_loss, tokens = (None, tokens) if teacher is None else teacher.bind(tokens)
        return kernel.compute_losses(classifier, xs, tables, tokens, specs.vocabulary, make_loss)

    run = placement.shard_map(
        on_device, (specs.xs, specs.tables, specs.tokens, teacher and teacher.find_specs(specs)), specs.tokens
    )
    return _sum_losses(run(xs, tuple(map(gather_weight, tables)), tokens, teacher and teacher.gather()), loss_weight)


def _cross_entropy_forward(classifier, placement, xs, tables, perturbations, tokens, loss_weight, teacher):
    specs = _TableSpecs.make(placement, tables)
    trainable = tuple(shardings_of(table).trainable for table in tables)

    def on_device(xs, tables, tokens, loss_weight, teacher):
        make_loss, tokens = (None, tokens) if teacher is None else teacher.bind(tokens)
        losses, *gradients = kernel.compute_losses_and_gradients(
            classifier, xs, tables, trainable, tokens, loss_weight, specs.vocabulary, make_loss
        )
        return losses, *jax.tree.map(lambda part: part[None], gradients)

    # Gradients leave the manual region as each device's partial sums: outside, XLA reduces them to their shardings.
    run = placement.shard_map(
        on_device,
        (specs.xs, specs.tables, specs.tokens, PartitionSpec(), teacher and teacher.find_specs(specs)),
        (
            specs.tokens,
            PartitionSpec(specs.tensor, *specs.xs),
            tuple(PartitionSpec(specs.rows, *spec) for spec in specs.tables),
        ),
    )
    losses, d_xs, d_tables = run(
        xs, tuple(map(gather_weight, tables)), tokens, loss_weight, teacher and teacher.gather()
    )
    return _sum_losses(losses, loss_weight), (d_xs, d_tables, tables)


def _cross_entropy_backward(classifier, placement, residuals, cotangents):
    d_xs, d_tables, tables = residuals
    scale = cotangents[0]  # 1 if the executor differentiates nothing else: XLA then removes the multiplication
    d_xs = tuple(sum_parts(_scale(parts, scale, parts.dtype)) for parts in d_xs)
    rows = _TableSpecs.make(placement, tables).rows

    @jax.named_scope(weights.GRADIENT)
    def perturbation_gradient(table, gradient):
        shardings = shardings_of(table)
        if not shardings.trainable:
            return None
        return reduce_parts(_scale(gradient, scale, shardings.reduce_dtype), rows, shardings)

    return d_xs, None, tuple(map(perturbation_gradient, tables, d_tables)), None, None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _sum_losses(losses: Losses, loss_weight: jax.Array) -> Losses:
    objective, *sums = map(jnp.sum, losses)
    return loss_weight * objective, *sums


def _scale(parts: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    return (parts.astype(jnp.float32) * scale).astype(dtype)


@dataclass(frozen=True)
class _TableSpecs:
    """PartitionSpecs of the operands of a look-up or a cross-entropy."""

    xs: PartitionSpec
    tokens: PartitionSpec
    tables: tuple[PartitionSpec, ...]
    staged: bool

    @classmethod
    def make(cls, placement: Placement, tables: tuple[BaseWeight, ...]) -> "_TableSpecs":
        return cls(
            xs=placement.activation("batch", "sequence", "embed").spec,
            tokens=placement.activation("batch", "sequence").spec,
            tables=tuple(shardings_of(table).gathered.spec for table in tables),
            staged=shardings_of(tables[0]).pipeline_stage_rows,
        )

    @property
    def tensor(self) -> str | None:
        """Mesh axis that divides the tables' rows within a stage, if any."""
        return self.tables[0][0]

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Mesh axes that divide the tables' rows."""
        return ("pipeline",) * self.staged + ((self.tensor,) if self.tensor else ())

    @property
    def rows(self) -> tuple[str, ...]:
        """Mesh axes that divide batch and sequence."""
        return order_as_storage(jax.tree.leaves(tuple(self.tokens)))
