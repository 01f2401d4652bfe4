"""The scan executor: one program runs all layers, without pipeline stages, and JAX differentiates it.

Letters: M microbatches, G gradient groups, B batch, S sequence, V vocabulary (padded).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.config import RematConfig
from jaxopt_llm.core import tree
from jaxopt_llm.execution import mtp
from jaxopt_llm.execution.executor import (
    Executor,
    ReadTokens,
    Totals,
    add_totals,
    constrain_gradients,
    join_periods,
    split_periods,
    sum_over_groups,
    zero_totals,
)
from jaxopt_llm.execution.segments import (
    LocalSegment,
    attach_non_layer,
    model_segments,
    mtp_segments,
    no_perturbations,
    run_segments,
)
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.cache import keep_rings
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.model import (
    AUXILIARY_LOSS,
    Model,
    Params,
    Segment,
    Sums,
    add_sums,
    name_segments,
)
from jaxopt_llm.parallel.activations import uses_zigzag
from jaxopt_llm.parallel.gathering import make_perturbations
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import inside_gradient_group

Objective = Callable[[Params, Batch], tuple[jax.Array, Sums]]  # (perturbations, microbatch) -> (the objective, sums)


def make_executor(remat: RematConfig, unrolled: bool = False) -> Executor:
    """Return the executor. unrolled: without loops over the layers; the loss alone always has them."""
    return Executor(
        loss_and_gradients=functools.partial(loss_and_gradients, remat=remat, unrolled=unrolled),
        loss=functools.partial(loss, remat=remat),
        read_tokens=functools.partial(read_tokens, remat=remat),
    )


def loss_and_gradients(
    model: Model,
    trainable: Params,
    frozen: Params,
    batch: Batch,
    loss_weight: jax.Array,
    placement: Placement,
    remat: RematConfig,
    unrolled: bool = False,
) -> Totals:
    """Return sums and gradients; see executor.py."""
    inside = inside_gradient_group(placement)
    specs = tree.restrict(model.specs, trainable)
    params = tree.merge(trainable, frozen)
    is_sum = batch.tokens.shape[0] > 1
    adds_in_place = is_sum and not unrolled and _are_float32(specs, inside)
    segments = model_segments(model, unrolled, adds_in_place) | mtp_segments(model, unrolled, adds_in_place)

    def objective(perturbations: Params, microbatch: Batch) -> tuple[jax.Array, Sums]:
        return microbatch_loss(model, params, microbatch, loss_weight, inside, remat, perturbations, segments)

    def one_microbatch(microbatch: Batch) -> Totals:  # fields [B / G, S]
        gradients, sums = jax.grad(objective, has_aux=True)(make_perturbations(specs, inside), microbatch)
        return sums, gradients

    def one_group(batch: Batch) -> Totals:  # fields [M, B / G, S]
        if not is_sum:  # in the reduction's dtype: a sum of one needs no float32 accumulator
            return one_microbatch(jax.tree.map(lambda x: x[0], batch))
        if adds_in_place:
            return _sum_in_place(objective, batch, specs, inside)
        return _sum_microbatches(one_microbatch, batch, specs, inside, by_period=unrolled)

    return sum_over_groups(one_group, batch, specs, placement)


def _sum_microbatches(
    one_microbatch: Callable[[Batch], Totals], batch: Batch, specs: Params, inside: Placement, by_period: bool
) -> Totals:
    """Return the sums over microbatches, fields [M, B, S]. by_period: sum the periods apart; see `split_periods`."""
    split = functools.partial(split_periods, specs) if by_period else lambda leaves: leaves
    summed_specs = split(specs)

    def to_add(microbatch: Batch) -> Totals:
        sums, gradients = one_microbatch(microbatch)
        return sums, split(gradients)

    def accumulate(total: Totals, microbatch: Batch) -> tuple[Totals, None]:
        return add_totals(total, to_add(microbatch), summed_specs, inside), None

    shapes = jax.eval_shape(to_add, jax.tree.map(lambda x: x[0], batch))
    sums, gradients = jax.lax.scan(accumulate, zero_totals(shapes, summed_specs, inside), batch)[0]
    return sums, join_periods(gradients) if by_period else gradients


def _sum_in_place(objective: Objective, batch: Batch, specs: Params, inside: Placement) -> Totals:
    """Return the sums over microbatches, fields [M, B, S]. Each gradient is added to its sum where it is formed.

    A microbatch's own stacks of gradients would be filled with zeros, written, and added as a whole.
    """
    perturbations = make_perturbations(specs, inside)
    shapes = jax.eval_shape(objective, perturbations, jax.tree.map(lambda x: x[0], batch))[1]
    reported, zeros = zero_totals((shapes, perturbations), specs, inside)
    # Tables may be read twice, by the look-up and by the head. JAX adds such gradients before they are reduced, once.
    tables, tables_specs = ({"non_layer": each["non_layer"]} for each in (zeros, specs))
    sums = {name: jax.tree.map(jax.new_ref, part) for name, part in zeros.items() if name not in tables}

    def accumulate(total: Totals, microbatch: Batch) -> tuple[Totals, None]:
        pull_back: Any
        perturbations = make_perturbations(specs, inside)
        _, pull_back, added = jax.vjp(lambda each: objective(each, microbatch), perturbations, has_aux=True)
        returned = jax.tree.map(lambda _: jax.ad.GradValue(), tables)  # type: ignore[attr-defined]
        (gradients,) = pull_back.with_refs(sums | returned)(jnp.float32(1))
        of_tables = {name: gradients[name] for name in tables}
        return add_totals(total, (added, of_tables), tables_specs, inside), None

    reported, tables = jax.lax.scan(accumulate, (reported, tables), batch)[0]
    gradients = {name: jax.tree.map(jax.freeze, part) for name, part in sums.items()} | tables
    return reported, constrain_gradients({name: gradients[name] for name in specs}, specs, inside)


def _are_float32(specs: Params, placement: Placement) -> bool:
    """Return whether all gradients are float32. JAX adds to references only in their own dtype."""
    gradients = jax.eval_shape(lambda: make_perturbations(specs, placement))
    return all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradients))


def loss(model: Model, params: Params, batch: Batch, placement: Placement, remat: RematConfig) -> Sums:
    """Return the sums; see executor.py."""

    def one_microbatch(batch: Batch) -> Sums:
        return microbatch_loss(model, params, batch, jnp.float32(1), placement, remat)[1]

    return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(one_microbatch, batch))


def read_tokens(
    read: ReadTokens, model: Model, params: Params, batch: Batch, placement: Placement, remat: RematConfig
) -> Any:
    """Return what `read` returns of each token; see executor.py."""
    nothing = no_perturbations(model.specs)

    def one_microbatch(batch: Batch) -> Any:
        context = model.make_context(batch, placement)
        non_layer = attach_non_layer(model.specs, params, nothing, placement)
        x = model.embed(non_layer, batch.tokens, context)
        context = model.add_layer_inputs(non_layer, batch.tokens, x, context)
        x, _, _ = run_segments(model, model_segments(model), params, nothing, x, context, remat)
        return read(non_layer, x, batch, context)

    return jax.lax.map(one_microbatch, batch)


def microbatch_loss(
    model: Model,
    params: Params,
    batch: Batch,
    loss_weight: jax.Array,
    placement: Placement,
    remat: RematConfig,
    perturbations: Params | None = None,
    segments: Mapping[str, LocalSegment] | None = None,
) -> tuple[jax.Array, Sums]:
    """Return the objective and the sums of one microbatch, fields [B, S].

    The objective is differentiated: the loss with the z-loss and the auxiliary losses, times `loss_weight`. Both
    include MTP modules if they are among the segments.

    perturbations: `make_perturbations` of the parameters with a gradient, and None for the others; by default for all.
    segments: by default `model_segments(model)`.
    """
    segments = model_segments(model) if segments is None else segments
    perturbations = no_perturbations(model.specs) if perturbations is None else perturbations
    context = model.make_context(batch, placement)
    non_layer = attach_non_layer(model.specs, params, perturbations, placement)
    x = model.embed(non_layer, batch.tokens, context)
    context = model.add_layer_inputs(non_layer, batch.tokens, x, context)
    layers, modules = mtp.split_segments(model, segments)
    x, _, sums = run_segments(model, layers, params, perturbations, x, context, remat)
    head = mtp.Head(model, modules, params, perturbations, remat)
    objective, added = head.loss(non_layer, x, batch, context, loss_weight)
    sums = add_sums(sums, added)
    return objective + loss_weight * sums[AUXILIARY_LOSS], sums


def forward(
    model: Model,
    params: Params,
    tokens: jax.Array,
    context: Context,
    caches: tree.Tree = None,
    only: jax.Array | None = None,
) -> tuple[jax.Array, tree.Tree]:
    """Return the logits of tokens [B, S], float32 [B, S, V], and the caches with these tokens written.

    params: stacked, or by layer. caches: see `make_caches`; they need parameters by layer.
    only: int32 [B], a position of each row; only the logits at these positions are computed, [B, 1, V].
    """
    assert not uses_zigzag(context.placement), "logits would be in zigzag order"
    perturbations = no_perturbations(model.specs)
    non_layer = attach_non_layer(model.specs, params, perturbations, context.placement)
    x = model.embed(non_layer, tokens, context)
    context = model.add_layer_inputs(non_layer, tokens, x, context)
    x, caches, _ = run_segments(
        model, model_segments(model), params, perturbations, x, context, RematConfig("none"), caches
    )
    if only is not None:
        x = jnp.take_along_axis(x, only[:, None, None], axis=1)
    return model.logits(non_layer, x, context), keep_rings(caches)


def make_caches(model: Model, batch: int, slots: int, dtype: Any, placement: Placement) -> tree.Tree:
    """Return the empty cache of each layer for `batch` sequences of up to `slots` tokens, as parameters by layer."""

    def make_period(segment: Segment) -> tree.Tree:
        takes_keys = segment.keys == "taken"
        return {
            f"block_{position}": None if takes_keys else model.make_cache(kind, batch, slots, dtype, placement)
            for position, kind in enumerate(segment.kinds)
        }

    return {
        name: tuple(make_period(segment) for _ in range(segment.repeats))
        for name, segment in name_segments(model.layout).items()
    }
