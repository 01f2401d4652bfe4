"""Runs the layers of a model, or of one stage of a pipeline: one `lax.scan` for each segment.

Without training, the layers rest apart (by_layer.py) and run one after the other, without a loop. XLA copies what a
loop selects from a stack before it uses it: two more times the bytes of all weights and caches, for every token.

For some segments one plain scan is not enough: the backward recomputes groups of periods together (`remat.every`), or
spans of periods have products of different precisions (`precision.compute_dtype_layers`).

Words of this folder:

segment: consecutive layers whose parameters are stacked: a period, repeated R times (see model.Segment).
period:  the blocks that repeat, such as one with a window and one without. Row r of a segment's leaves [R, ...] is its
         r-th period.
chunk:   consecutive periods that a stage of a pipeline runs as one unit (see schedules.py).
slot:    a row of a chunk's leaves. It holds a period, or it is empty in chunks that are shorter than the longest one
         (see stage_layout.py).

Letters: R periods of a segment, B batch, S sequence, D width.

`remat.policy` says which intermediates of a block are kept for the backward.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm.compiler.xla_options import Recomputed
from jaxopt_llm.config import Kind, Matmul, RematConfig
from jaxopt_llm.core import tree
from jaxopt_llm.core.intermediate import Intermediate, Role
from jaxopt_llm.execution.by_layer import read_rows, select_period
from jaxopt_llm.model import param
from jaxopt_llm.model.context import Context, NewCache
from jaxopt_llm.model.linear.dropout import with_noise
from jaxopt_llm.model.linear.leaves import adapter_paths, join_scaled
from jaxopt_llm.model.model import Keys, Model, Params, Segment, Sums, add_sums, name_mtp_modules, name_segments
from jaxopt_llm.parallel import offload
from jaxopt_llm.parallel.gathering import attach_shardings
from jaxopt_llm.parallel.placement import Placement, mark

# The roles whose intermediates each policy keeps of a block in addition to its input. Under every policy, elementwise
# results are computed again, and no gathered weight is kept, because it is no intermediate.
ROLES_BY_POLICY: dict[str, frozenset[Role]] = {
    "none": frozenset({"projection", "attention", "product"}),
    "dots": frozenset({"projection", "product"}),
    "save_qkv": frozenset({"projection", "attention"}),
    "save_attention": frozenset({"attention"}),
    "full": frozenset(),
    "auto": frozenset(),  # until a policy is chosen (planning/settings_choice.py)
}

checkpoint = functools.partial(jax.checkpoint, prevent_cse=False)  # XLA merges no recomputation within a scan


def keeps_inputs_only(remat: RematConfig) -> bool:
    """Return whether `remat.policy` keeps nothing of a block but its input."""
    return isinstance(remat.policy, str) and not ROLES_BY_POLICY[remat.policy]


def is_kept(remat: RematConfig, intermediate: Intermediate) -> bool:
    """Return whether `remat.policy` keeps an intermediate, on the device or, by `remat.offload`, on the host."""
    if isinstance(remat.policy, str):
        return intermediate.role in ROLES_BY_POLICY[remat.policy] or intermediate in remat.offload
    return intermediate in remat.policy or intermediate in remat.offload


def name_recomputed(remat: RematConfig) -> Recomputed:
    """Return what the backward computes again of each layer, apart from elementwise operations."""
    if remat.policy == "none":
        return "nothing"
    return "layers" if keeps_inputs_only(remat) else "a part"


def checkpoint_policy(remat: RematConfig) -> Any:
    """Return the policy as `jax.checkpoint` takes it."""
    by_name = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["saved"],
        names_which_can_be_offloaded=["offloaded"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def policy(primitive: Any, *shapes: Any, **params: Any) -> Any:
        name = params.get("name")
        if isinstance(name, Intermediate) and is_kept(remat, name):
            params["name"] = "offloaded" if name in remat.offload else "saved"
        return by_name(primitive, *shapes, **params)

    return policy


# Most layers of a segment that a pipeline's chunk runs without a loop. XLA does not mix two loops, so only without them
# the collectives of a forward run next to the matmuls of a backward. Five layers of 70B compile in 27 instead of 12 s.
LARGEST_UNROLLED_CHUNK = 16

T = TypeVar("T")
Scanned = Any  # leaves [R, ...], one entry for each period
ScanBody = Callable[[Any, Scanned], tuple[Any, None]]  # the body of a `lax.scan` over periods


def scan_groups(scan_body: ScanBody, group_size: int, carry: Any, scanned: Scanned) -> Any:
    """Scan over groups of periods; the backward recomputes the periods of a group together.

    scanned: has the rows of the weights, not the weights. As an operand of the loop over a group, weights would be
        copied.
    """
    groups = jax.tree.map(lambda x: x.reshape(-1, group_size, *x.shape[1:]), scanned)
    return jax.lax.scan(checkpoint(functools.partial(jax.lax.scan, scan_body)), carry, groups)[0]


@dataclass(frozen=True)
class PrecisionSpan:
    """Periods of a segment from `start` to `stop` (exclusive) whose products have the same precisions.

    quantised: for each block of the period, whether its products are computed as `precision.matmul` says; otherwise in
        the compute dtype.
    """

    start: int
    stop: int
    quantised: tuple[bool, ...]


def find_precision_spans(layer_index: np.ndarray, exempt: int, layers: int) -> list[PrecisionSpan]:
    """Return the spans of a segment in their order.

    layer_index: the index in the model of each block, [R, period]. exempt: this number of layers at either end of the
        model's `layers` computes all products in the compute dtype.
    """
    quantised = (layer_index >= exempt) & (layer_index < layers - exempt)
    starts = [0, *(1 + np.flatnonzero(np.any(quantised[1:] != quantised[:-1], axis=1)))]
    return [
        PrecisionSpan(int(start), int(stop), tuple(map(bool, quantised[start])))
        for start, stop in zip(starts, [*starts[1:], len(quantised)], strict=True)
    ]


def scan_spans(
    scan_bodies: Sequence[ScanBody],
    spans: Sequence[PrecisionSpan],
    carry: Any,
    perturbations: Params,
    others: tuple[Any, ...],
) -> Any:
    """Scan over the periods of each span, one loop after the other.

    scan_bodies: of each span; they take (row, perturbations, *others) of a period. The loops carry the perturbations
        from one to the next.
    """
    scanned = (jnp.arange(spans[-1].stop), *others)
    for scan_body, span in zip(scan_bodies, spans, strict=True):

        def pick_and_run(carry: Any, period: Any, scan_body: ScanBody = scan_body) -> tuple[Any, None]:
            carry, perturbations = carry
            row, *others = period
            perturbations, picked = _pick_period(perturbations, row)
            carry, _ = scan_body(carry, (row, picked, *others))
            return (carry, perturbations), None

        part = jax.tree.map(lambda x, span=span: x[span.start : span.stop], scanned)
        (carry, perturbations), _ = jax.lax.scan(pick_and_run, (carry, perturbations), part)
    return carry


@jax.custom_vjp
def _pick_period(stacked: Params, row: jax.Array) -> tuple[Params, Params]:
    """Return the stacked leaves, for the next periods, and the leaves of one period. Pick each period once.

    The leaves are perturbations, and their cotangents are the gradients: the backward writes the gradient of a period
    to its row of one array. For slices of an array, autodiff would make whole arrays and add them up.
    """
    return stacked, select_period(stacked, row)


def _pick_period_backward(row: jax.Array, cotangents: tuple[Params, Params]) -> tuple[Params, None]:
    write = functools.partial(jax.lax.dynamic_update_index_in_dim, index=row, axis=0)
    return jax.tree.map(write, *cotangents), None


_pick_period.defvjp(lambda stacked, row: (_pick_period(stacked, row), row), _pick_period_backward)


Carry = tuple[jax.Array, Sums]  # x and the auxiliary sums


@dataclass(frozen=True)
class LocalSegment:
    """The periods of a segment that one loop runs: all of them, or the periods of one chunk of a stage.

    specs: of the leaves, [R, ...].
    per_layer: constants that are scanned with the weights, each [R, period, ...].
    occupied: bool [R], False for an empty slot, which returns its input; None if no slot is empty.
    rows: int [R], the rows of these periods in weights that also hold others; None if the weights hold no others.
    unrolled: run the periods without a loop. The backward then reads what the forward kept where it was written, while
        a loop copies it into stacks and back.
    adds_in_place: JAX adds the gradients to references (scan.loss_and_gradients).
    keys: see model.Segment.
    checkpoints: the blocks keep what `remat` says, also where JAX itself would keep the activations of policy `none`.
    waits: what the blocks keep waits for the backward, which another tick of a pipeline runs.
    """

    kinds: tuple[Kind, ...]
    specs: Params
    per_layer: Mapping[str, Any]
    occupied: jax.Array | None = None
    rows: jax.Array | None = None
    unrolled: bool = False
    adds_in_place: bool = False
    keys: Keys = "own"
    checkpoints: bool = False
    waits: bool = False

    @property
    def periods(self) -> int:
        return int(jax.tree.leaves(self.specs)[0].shape[0])

    @functools.cached_property
    def giving(self) -> dict[Kind, str]:
        """The block of each kind whose keys later segments read."""
        return {kind: f"block_{index}" for index, kind in enumerate(self.kinds)} if self.keys == "given" else {}

    def with_inputs(self, layer_inputs: jax.Array) -> "LocalSegment":
        """Return the segment with the inputs of its layers as constants. layer_inputs: [layers, ...], of the model."""
        index = self.per_layer["index"]  # consecutive layers
        own = jax.lax.dynamic_slice_in_dim(layer_inputs, index[0, 0], index.size)
        return replace(self, per_layer={**self.per_layer, "input": own.reshape(*index.shape, *layer_inputs.shape[1:])})

    def with_embeddings(self, embedded: jax.Array) -> "LocalSegment":
        """Return an MTP module with the embeddings [B, S, D] that its block reads."""
        return replace(self, per_layer={**self.per_layer, "input": embedded[None, None]})


def needs_loop(layers: int, remat: RematConfig) -> bool:
    """Return whether a chunk of a pipeline runs so many layers of a segment in a loop.

    XLA moves intermediates to the host only where a loop writes them into a stack.
    """
    return layers > LARGEST_UNROLLED_CHUNK or bool(remat.offload)


def run_segments(
    model: Model,
    segments: Mapping[str, LocalSegment],
    params: Params,
    perturbations: Params,
    x: jax.Array,
    context: Context,
    remat: RematConfig,
    caches: tree.Tree = None,
) -> tuple[jax.Array, tree.Tree, Sums]:
    """Run x [B, S, D] through every segment. Return x, the caches with what was written, and the auxiliary sums.

    params: stacked, or by layer, which have no gradient. Only those by layer can have caches.
    """
    carry, written = (x, model.zero_auxiliary()), {}
    for name, segment in segments.items():
        cache = caches[name] if caches else None
        carry, written[name], context = run_segment(
            model, segment, params[name], perturbations.get(name), carry, context, remat, cache
        )
    return carry[0], written if caches else None, carry[1]


def run_segment(
    model: Model,
    segment: LocalSegment,
    params: Any,
    perturbations: Any,
    carry: Carry,
    context: Context,
    remat: RematConfig,
    caches: Sequence[tree.Tree] | None = None,
) -> tuple[Carry, Sequence[tree.Tree], Context]:
    """Run one segment. Return x and the sums, the caches with what was written, and the context of later segments."""
    assert isinstance(params, tuple) or not caches, "caches need parameters by layer"
    inside = context
    if context.layer_inputs is not None:
        segment, inside = segment.with_inputs(context.layer_inputs), replace(context, layer_inputs=None)
    written: Sequence[tree.Tree]
    if isinstance(params, tuple):
        carry, written = _run_by_layer(model, segment, params, carry, inside, remat, caches)
    elif segment.giving:
        carry, written = _run_giving(model, segment, params, perturbations, carry, inside, remat)
    else:
        carry, written = _run_segment(model, segment, params, perturbations, carry, inside, remat), ()
    if segment.giving:
        given = {kind: written[0][block] for kind, block in segment.giving.items()}
        context = replace(context, caches=context.caches | given)
    return carry, written, context


def _run_by_layer(
    model: Model,
    segment: LocalSegment,
    periods: Sequence[Params],
    carry: Carry,
    context: Context,
    remat: RematConfig,
    caches: Sequence[tree.Tree] | None,
) -> tuple[Carry, tuple[tree.Tree, ...]]:
    """Run the periods of a segment one after the other, each with its own arrays. Return x, the sums and the caches."""
    nothing = no_perturbations(segment.specs)

    # All periods of the same precisions are one function, which JAX traces and lowers once.
    @functools.partial(jax.jit, static_argnums=0)
    def run_period(
        quantised: tuple[bool, ...],
        weights: Params,
        constants: Mapping[str, Any],
        carry: Carry,
        cache: Any,
        context: Any,
    ) -> tuple[Carry, tree.Tree]:
        runner = PeriodRunner(model, segment, context, remat, remat.enabled, is_apart=False, quantised=quantised)
        x, cache, added = runner.run(weights, nothing, constants, carry[0], cache)
        return (x, add_sums(carry[1], added)), cache

    written, before = [], carry
    for span in _precision_spans(model, segment, context):
        for row in range(span.start, span.stop):
            # Otherwise XLA gathers the weights of all layers first. A layer may be gathered while the one before runs.
            weights, before = jax.lax.optimization_barrier((read_rows(periods[row]), before))[0], carry
            constants = {name: values[row] for name, values in segment.per_layer.items()}
            cache = caches[row] if caches else None
            carry, cache = run_period(span.quantised, weights, constants, carry, cache, context)
            written.append(cache)
    return carry, tuple(written)


def _run_giving(
    model: Model,
    segment: LocalSegment,
    weights: Params,
    perturbations: Params,
    carry: Carry,
    context: Context,
    remat: RematConfig,
) -> tuple[Carry, Sequence[tree.Tree]]:
    """Run the only period of a segment without a loop. Return x, the sums and the caches that it gives."""
    (span,) = _precision_spans(model, segment, context)
    checkpoints = remat.enabled or offload.any_on_host(weights)
    runner = PeriodRunner(model, segment, context, remat, checkpoints, False, weights, span.quantised)
    row = jnp.int32(0)  # the body selects the weights by it, so that they are copied from the host within a checkpoint
    perturbations, constants = jax.tree.map(lambda stack: stack[0], (perturbations, dict(segment.per_layer)))
    x, written, added = runner.run(row, perturbations, constants, carry[0])
    return (x, add_sums(carry[1], added)), (written,)


def _run_segment(
    model: Model,
    segment: LocalSegment,
    weights: Params,
    perturbations: Params,
    carry: Carry,
    context: Context,
    remat: RematConfig,
) -> Carry:
    """Scan over the periods of a segment.

    Usually the weights are scanned, so that the scan body gets those of its period. In the other cases the body selects
    them by their row in the whole weights.
    """
    spans = _precision_spans(model, segment, context)
    selects_periods = len(spans) > 1 or segment.rows is not None
    # Without `jax.checkpoint`, JAX would keep a copy of each period that was selected, and keep on the device each
    # period that came from the host.
    checkpoints = segment.checkpoints or remat.enabled or selects_periods or offload.any_on_host(weights)
    rows = jnp.arange(segment.periods) if segment.rows is None else segment.rows
    others = (segment.per_layer, segment.occupied)
    stacked, by_period = (weights, rows) if selects_periods or remat.every > 1 else (None, weights)
    scanned = (by_period, perturbations, *others)

    def make_scan_body(span: PrecisionSpan, is_apart: bool) -> ScanBody:
        return PeriodRunner(model, segment, context, remat, checkpoints, is_apart, stacked, span.quantised).scan_body

    if remat.every > 1:
        group_size = remat.group_size(len(segment.kinds), segment.periods)
        return scan_groups(make_scan_body(spans[0], group_size > 1), group_size, carry, scanned)
    if len(spans) > 1:
        bodies = [make_scan_body(span, span.stop - span.start > 1) for span in spans]
        return scan_spans(bodies, spans, carry, perturbations, others)
    if segment.checkpoints and not needs_loop(segment.periods * len(segment.kinds), remat):
        return _run_apart(make_scan_body(spans[0], segment.waits), carry, scanned, segment.periods)
    scan_body = make_scan_body(spans[0], segment.periods > 1)
    if segment.adds_in_place:
        # The body selects its period's perturbations. XLA then reads and writes a period's row of the sums in the
        # kernel that adds the gradient; a row that the loop itself reads and writes, it copies out first.
        def select_and_run(carry: Carry, each: Any) -> tuple[Carry, None]:
            by_period, row, *others = each
            return scan_body(carry, (by_period, _read_rows(perturbations, row), *others))

        return jax.lax.scan(select_and_run, carry, (by_period, jnp.arange(segment.periods), *others))[0]
    unroll = segment.periods if segment.unrolled else 1
    # Without `fsdp` the backward of a layer reduces nothing. With replicas, XLA sums their gradients last, and hides
    # more by the matmuls that it leaves to the end (docs/gpu.md).
    if unroll == 1 or context.placement.size("fsdp") == 1 or context.placement.size("data") > 1:
        return jax.lax.scan(scan_body, carry, scanned, unroll=unroll)[0]
    return _run_unrolled(scan_body, carry, scanned, segment.periods)


def _run_unrolled(scan_body: ScanBody, carry: Carry, scanned: Scanned, periods: int) -> Carry:
    """Run all periods without a loop.

    The backward of a period ends when the gradients of the period above are reduced. Otherwise XLA leaves most
    gradients of weights to the end of the backward. What they are formed from then waits in memory, and little is left
    to hide their reductions (docs/gpu.md).

    scanned: as of `PeriodRunner.scan_body`.
    """
    by_period, perturbations, *others = scanned
    own = jax.tree.map(lambda stack: stack[0], perturbations)
    above = jax.tree.map(lambda stack: jnp.roll(stack, -1, axis=0), perturbations)  # the last period has none above

    def run(carry: tuple[Carry, Params], each: Any) -> tuple[tuple[Carry, Params], None]:
        ((x, auxiliary), own), (by_period, above, *others) = carry, each
        x, above = _end_together((x, above))
        result, _ = scan_body((x, auxiliary), (by_period, own, *others))
        return (result, above), None

    return jax.lax.scan(run, (carry, own), (by_period, above, *others), unroll=periods)[0][0]


def _run_apart(scan_body: ScanBody, carry: Carry, scanned: Scanned, periods: int) -> Carry:
    """Run the periods of a chunk without a loop. What the backward reads of a period is in arrays of its own.

    scanned: as of `PeriodRunner.scan_body`.
    """
    by_period, perturbations, *others = scanned
    for row, own in enumerate(_unstack(perturbations, periods)):
        by_row, *others_of_row = jax.tree.map(lambda stack, row=row: stack[row], [by_period, *others])
        carry, _ = scan_body(carry, (by_row, own, *others_of_row))
    return carry


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _unstack(stacked: Params, rows: int) -> tuple[Params, ...]:
    """Return the leaves of each row. Stack their gradients: autodiff would make whole arrays and add them up."""
    return tuple(jax.tree.map(lambda stack, row=row: stack[row], stacked) for row in range(rows))


_unstack.defvjp(
    lambda stacked, rows: (_unstack(stacked, rows), None),
    lambda rows, _, gradients: (jax.tree.map(lambda *each: jnp.stack(each), *gradients),),
)


@jax.custom_vjp
def _end_together(values: T) -> T:
    """Return the values. Their gradients exist only when all of them do."""
    return values


_end_together.defvjp(lambda values: (values, None), lambda _, gradients: (jax.lax.optimization_barrier(gradients),))


def _read_rows(stacked: tree.Tree, row: jax.Array) -> tree.Tree:
    """Return a row of stacked leaves [R, ...]. It exists: an index without a test for negative values fuses."""

    def read(leaf: jax.Array) -> jax.Array:
        start = (row, *(jnp.zeros_like(row),) * (leaf.ndim - 1))
        return jax.lax.dynamic_slice(leaf, start, (1, *leaf.shape[1:]))[0]

    return jax.tree.map(read, stacked)


def _precision_spans(model: Model, segment: LocalSegment, context: Context) -> list[PrecisionSpan]:
    exempt = context.placement.precision.compute_dtype_layers
    if not exempt:
        return [PrecisionSpan(0, segment.periods, (True,) * len(segment.kinds))]
    layers = sum(each.repeats * len(each.kinds) for each in model.layout)
    layer_index = np.asarray(segment.per_layer["index"])  # not a tracer: validation exempts no layer in a pipeline
    return find_precision_spans(layer_index, exempt, layers)


@dataclass(frozen=True, eq=False)
class PeriodRunner:
    """Runs one period of a segment.

    checkpoints: whether the blocks keep what `remat` says, by `jax.checkpoint`; otherwise they keep what JAX does.
    is_apart: whether the backward is apart from the forward: in a loop of its own, or in another tick of a pipeline.
        XLA replaces a loop over one period by its body.
    stacked: the weights of the whole segment if each period's are selected by their row; otherwise None.
    quantised: for each block, whether its products are computed as `precision.matmul` says, or in the compute dtype;
        None: all are.
    """

    model: Model
    segment: LocalSegment
    context: Context
    remat: RematConfig
    checkpoints: bool
    is_apart: bool
    stacked: Params | None = None
    quantised: tuple[bool, ...] | None = None

    def scan_body(self, carry: Carry, scanned: Any) -> tuple[Carry, None]:
        """Run a period as the body of a scan.

        scanned: the period's weights (or their row in `stacked`), perturbations, constants, and whether its slot is
            occupied.
        """
        weights, perturbations, per_layer, occupied = scanned
        x, auxiliary = carry
        context = self.context
        if occupied is not None and context.token_mask is not None:
            # The router of an empty slot is all zeros and would send every token to the first experts.
            context = replace(context, token_mask=context.token_mask & occupied)
        runner = replace(self, context=context)
        x, _, added = runner.run(weights, perturbations, per_layer, x)
        auxiliary = add_sums(auxiliary, added)
        if occupied is not None:
            x, auxiliary = jax.tree.map(lambda new, old: jnp.where(occupied, new, old), (x, auxiliary), carry)
        return (x, auxiliary), None

    def run(
        self, weights: Any, perturbations: Params, per_layer: Mapping[str, Any], x: jax.Array, caches: tree.Tree = None
    ) -> tuple[jax.Array, tree.Tree, Sums]:
        """Run x [B, S, D] through a period. Return x, the caches and the auxiliary sums.

        weights: the period's, or its row in `stacked`. perturbations, per_layer, caches: the period's.
        """
        auxiliary, written = self.model.zero_auxiliary(), {}
        for position in range(len(self.segment.kinds)):
            block = f"block_{position}"
            run_block = self.make_block(position, per_layer)
            if self.checkpoints:
                # Next to the backward and without barriers, XLA would merge what the backward computes again with the
                # forward, and keep it.
                merges, kept = self.remat.enabled and not self.is_apart, checkpoint_policy(self.remat)
                run_block = checkpoint(run_block, policy=kept, prevent_cse=merges)
            block_weights = weights[block] if self.stacked is None else weights
            new = NewCache() if block in self.segment.giving.values() else None
            cache = caches[block] if caches else new
            x, written[block], added = run_block(x, block_weights, perturbations[block], cache)
            auxiliary = add_sums(auxiliary, added)
        return x, written if caches or self.segment.giving else None, auxiliary

    def make_block(self, position: int, per_layer: Mapping[str, Any]) -> Callable[..., Any]:
        """Return the function that runs the block at this position of the period."""
        block, context = f"block_{position}", self.context
        is_quantised = self.quantised is None or self.quantised[position]
        matmul: Matmul = context.placement.precision.matmul if is_quantised else "compute_dtype"
        specs = param.period_specs(self.segment.specs[block])

        # The copies of the weights from the host and from other devices are inside the checkpoint, so that they are
        # made again and not kept. So is the name of the input: an input that got its name outside would be kept
        # whether or not the policy keeps the name.
        def run(x: Any, weights: Any, perturbations: Any, cache: Any) -> Any:
            x = mark(x, "block_input", "input", "batch", "residual_sequence", "embed")
            if self.stacked is not None:
                weights = select_period(self.stacked[block], weights)
            # Only this reads the slice. From a slice with other readers, XLA would make a computation on the host.
            weights = offload.fetch_to_device(weights)
            placed = attach_shardings(
                specs,
                weights,
                perturbations,
                context.placement,
                keep_gathered=self.checkpoints,
                matmul=matmul,
                in_compute_dtype=adapter_paths(specs),
            )
            constants = {name: values[position] for name, values in per_layer.items()}
            placed = with_noise(join_scaled(placed), context.noise, constants["index"])
            return self.model.block(self.segment.kinds[position], placed, x, context, constants, cache)

        return run


def model_segments(model: Model, unrolled: bool = False, adds_in_place: bool = False) -> dict[str, LocalSegment]:
    """Return all segments of a model, by their names in its parameters."""
    return _make_segments(model, name_segments(model.layout), unrolled, adds_in_place)


def mtp_segments(model: Model, unrolled: bool = False, adds_in_place: bool = False) -> dict[str, LocalSegment]:
    """Return the MTP modules of a model, by their names in its parameters."""
    return _make_segments(model, name_mtp_modules(model.mtp_layout), unrolled, adds_in_place)


def _make_segments(
    model: Model, named: Mapping[str, Segment], unrolled: bool, adds_in_place: bool
) -> dict[str, LocalSegment]:
    return {
        name: LocalSegment(
            segment.kinds,
            model.specs[name],
            segment.per_layer,
            unrolled=unrolled,
            adds_in_place=adds_in_place,
            keys=segment.keys,
        )
        for name, segment in named.items()
    }


def attach_non_layer(specs: Params, params: Params, perturbations: Params, placement: Placement) -> Params:
    """Attach the shardings of the parameters outside the segments.

    Only the gathered adapters of tables are kept for the backward: look_up and cross_entropy gather nothing there.
    """
    specs, params, perturbations = (each["non_layer"] for each in (specs, params, perturbations))
    return attach_shardings(specs, params, perturbations, placement, keep_gathered=True)


def no_perturbations(specs: Params) -> Params:
    """Return the perturbations where no gradient is formed: None for every parameter."""
    return jax.tree.map(lambda spec: None, specs)
