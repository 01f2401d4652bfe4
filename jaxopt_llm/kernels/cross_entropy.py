"""Cross-entropy of a linear classifier by chunks of tokens, its gradients formed together with it.

The logits of one chunk exist at a time. Since their gradient wants no more than they themselves, the forward pass forms
it at once, and with it those of the classifier and its input; what is kept for the backward is as large as these two
(Hsu et al. 2024, arXiv:2410.10989).

Letters: B batch, S sequence, T tokens of a chunk, V rows of a table, D its columns.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Tokens = tuple[jax.Array, jax.Array]  # targets, int [B, S]; whether a token counts, bool [B, S]
Losses = tuple[jax.Array, jax.Array]  # objective and cross-entropy, float32 [B, S], 0 where a token does not count


@dataclass(frozen=True)
class Classifier:
    """What is made of logits, and how many at a time.

    vocabulary_size: classes; rows of the tables from there on are padding and have probability 0.
    softcap: bounds the logits, as softcap × tanh(logit / softcap); 0 does not.
    z_loss: times log(Z)², Z being the softmax's sum, is what the objective has beyond the cross-entropy (Chowdhery et
        al. 2022, arXiv:2204.02311).
    chunk: tokens whose logits exist at a time; 0: all.
    """

    vocabulary_size: int
    softcap: float
    z_loss: float
    chunk: int


def losses(
    form: Classifier, xs: Sequence[jax.Array], tables: Sequence[jax.Array], tokens: Tokens, axes: tuple[str, ...] = ()
) -> Losses:
    """Objective and cross-entropy of logits that are the sum of the products of each x with its table.

    xs: [B, S, D], each with a D of its own; tables: [V, D].
    axes: of the mesh, over which the rows of the tables are split; none where they are whole.
    """

    def chunk(_: None, each: Any) -> tuple[None, Losses]:
        xs, tokens = each
        return None, _Chunk.of(form, xs, tables, tokens, axes).losses

    _, found = _over_chunks(form.chunk, chunk, None, (tuple(xs), tokens))
    return found


def losses_and_gradients(
    form: Classifier,
    xs: Sequence[jax.Array],
    tables: Sequence[jax.Array],
    wanted: Sequence[bool],
    tokens: Tokens,
    cotangent: jax.Array,
    axes: tuple[str, ...] = (),
) -> tuple[Losses, tuple[jax.Array, ...], tuple[jax.Array | None, ...]]:
    """`losses`, and the gradients of cotangent × the sum of the objective: by each x, in its dtype, and by each table
    that is wanted, float32 (None for the others). By x they are what this device's rows of the tables add."""

    def chunk(totals: Any, each: Any) -> Any:
        xs, tokens = each
        part = _Chunk.of(form, xs, tables, tokens, axes)
        gradient = part.gradient(cotangent).astype(xs[0].dtype)
        d_xs = tuple(_einsum("TV,VD->TD", gradient, table, table.dtype) for table in tables)
        totals = tuple(
            None if total is None else total + _einsum("TV,TD->VD", gradient, x)
            for total, x in zip(totals, xs, strict=True)
        )
        return totals, (part.losses, d_xs)

    zeros = tuple(
        jnp.zeros(table.shape, jnp.float32) if each else None for table, each in zip(tables, wanted, strict=True)
    )
    d_tables, (found, d_xs) = _over_chunks(form.chunk, chunk, zeros, (tuple(xs), tokens))
    return found, d_xs, d_tables


@dataclass(frozen=True)
class _Chunk:
    """logits: [T, V], -inf in columns of padding; log_sum: of their exponentials, [T], over the whole vocabulary."""

    form: Classifier
    logits: jax.Array
    is_label: jax.Array  # bool [T, V]
    counts: jax.Array  # [T]
    log_sum: jax.Array
    label: jax.Array  # the logit of the label, [T]

    @classmethod
    def of(
        cls,
        form: Classifier,
        xs: Sequence[jax.Array],
        tables: Sequence[jax.Array],
        tokens: Tokens,
        axes: tuple[str, ...],
    ) -> "_Chunk":
        targets, counts = tokens
        products = (_einsum("TD,VD->TV", x, table) for x, table in zip(xs, tables, strict=True))
        logits = functools.reduce(operator.add, products)
        if form.softcap:
            logits = form.softcap * jnp.tanh(logits / form.softcap)
        first = jax.lax.axis_index(axes) * logits.shape[-1]
        column = first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        # Where nothing is padded the comparison would still be computed.
        if form.vocabulary_size < logits.shape[-1] * jax.lax.axis_size(axes):
            logits = jnp.where(column < form.vocabulary_size, logits, -jnp.inf)
        # By comparison: a gather would have every device ask for columns of others.
        is_label = column == targets[:, None]
        peak = jax.lax.pmax(jnp.max(logits, axis=-1), axes)
        sums = jnp.sum(jnp.exp(logits - peak[:, None]), axis=-1), jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
        total, label = jax.lax.psum(sums, axes)
        return cls(form, logits, is_label, counts, peak + jnp.log(total), label)

    @property
    def losses(self) -> Losses:
        loss = self.log_sum - self.label
        objective = loss + self.form.z_loss * jnp.square(self.log_sum) if self.form.z_loss else loss
        return jnp.where(self.counts, objective, 0.0), jnp.where(self.counts, loss, 0.0)

    def gradient(self, cotangent: jax.Array) -> jax.Array:
        """Of cotangent × objective by the logits before they are bounded, float32 [T, V]."""
        each = jnp.where(self.counts, cotangent, 0.0)
        of_sum = each * (1 + 2 * self.form.z_loss * self.log_sum)
        gradient = of_sum[:, None] * jnp.exp(self.logits - self.log_sum[:, None])
        gradient -= jnp.where(self.is_label, each[:, None], 0.0)
        if self.form.softcap:
            slope = 1 - jnp.square(self.logits / self.form.softcap)
            gradient *= jnp.maximum(slope, 0.0)  # where there is padding, -inf
        return gradient


def _over_chunks(size: int, chunk: Any, carry: Any, arrays: Any) -> tuple[Any, Any]:
    """`lax.scan` over [B, S, ...] by chunks of so many tokens: chunk(carry, [T, ...]) -> (carry, [T, ...]).

    The last chunk is padded with zeros: tokens that do not count.
    """
    batch, sequence = jax.tree.leaves(arrays)[0].shape[:2]
    tokens = batch * sequence
    chunks = -(-tokens // size) if size else 1
    rows = -(-tokens // chunks)

    def split(x: jax.Array) -> jax.Array:
        flat = x.reshape(tokens, *x.shape[2:])
        if chunks * rows > tokens:
            flat = jnp.pad(flat, [(0, chunks * rows - tokens)] + [(0, 0)] * (flat.ndim - 1))
        return flat.reshape(chunks, rows, *x.shape[2:])

    def join(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:])[:tokens].reshape(batch, sequence, *x.shape[2:])

    split_arrays = jax.tree.map(split, arrays)
    carry, found = jax.lax.scan(chunk, carry, split_arrays)
    return carry, jax.tree.map(join, found)


def _einsum(subscripts: str, x: jax.Array, y: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=dtype)
