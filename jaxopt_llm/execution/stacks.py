"""Runs the stacks of a model, or of one stage of a pipeline: each segment is a `lax.scan` over its layers, and what the
backward finds of each layer is said here.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm import tree
from jaxopt_llm.model import param
from jaxopt_llm.model.auxiliary import Auxiliary
from jaxopt_llm.model.config import Kind
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import Params, Parts, Segment
from jaxopt_llm.model.dropout import with_noise
from jaxopt_llm.model.intermediates import Intermediate, tag
from jaxopt_llm.parallel import offload
from jaxopt_llm.parallel.precision import Matmul

Policy = Literal["none", "full", "dots", "save_attention", "save_qkv"]

QKV: tuple[Intermediate, ...] = ("query_latent", "latent", "rotary_key", "query", "key", "value")
PROJECTIONS: tuple[Intermediate, ...] = (
    *QKV,
    "attention_output",
    "mlp_gate",
    "mlp_up",
    "mlp_output",
)
# What each policy keeps of a layer beside the block's input. Under any, what is elementwise is computed again, and no
# gathered weight is kept: it has none of these names.
KEPT_BY: dict[str, tuple[Intermediate, ...]] = {
    "none": (*PROJECTIONS, "attention"),
    "dots": PROJECTIONS,
    "save_qkv": (*QKV, "attention"),
    "save_attention": ("attention",),
    "full": (),
}


@dataclass(frozen=True)
class RematConfig:
    policy: Policy | tuple[Intermediate, ...] = "full"
    """what the backward finds of each block beside its input; the rest it computes again. none: all but what is
    elementwise; dots: all products with weights, not attention; save_qkv: queries, keys, values and what attention
    gives; save_attention: that alone; full: nothing; or a list of intermediates, see model/intermediates.py"""
    every: int = 1
    """layers that the backward runs again from the first one's input, and then by `policy`: the forward keeps nothing
    of the layers in between; 1 keeps by `policy` alone"""
    offload: tuple[Intermediate, ...] = ()
    """intermediates that wait for the backward in pinned host memory, whether `policy` keeps them or not"""

    @property
    def checkpoints(self) -> bool:
        """Whether blocks are rematerialised. Without, JAX keeps what `none` says by itself."""
        return self.policy != "none" or bool(self.offload)

    def saveable(self) -> Any:
        """The policy as `jax.checkpoint` takes it."""
        kept = KEPT_BY[self.policy] if isinstance(self.policy, str) else self.policy
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[name for name in kept if name not in self.offload],
            names_which_can_be_offloaded=list(self.offload),
            offload_src="device",
            offload_dst="pinned_host",
        )

    def problems(self) -> list[str]:
        found = []
        if not self.policy:
            found.append(
                "remat.policy: name an intermediate or more, or one policy; full keeps each block's input alone"
            )
        if self.every < 1:
            found.append(f"remat.every={self.every}: must be at least 1")
        if self.every > 1 and self.offload:
            found.append(
                f"remat.every={self.every} keeps nothing between forward and backward that remat.offload could move: "
                "choose one of the two"
            )
        return found

    def group(self, kinds: int, repeats: int) -> int:
        """How many repeats of a period of so many kinds are run again together."""
        return min(max(self.every // kinds, 1), repeats)


@dataclass(frozen=True)
class Stack:
    """A segment's stack as it is scanned.

    specs: of its leaves, [repeats, ...]; per_layer: constants beside them, each [repeats, period, ...].
    live: bool [repeats], False where a slot holds no layer and lets its input pass; None where all do.
    numbers: int [repeats], the rows of the weights that are run, where they have more; None where these are all.
    """

    kinds: tuple[Kind, ...]
    specs: Params
    per_layer: Mapping[str, Any]
    live: jax.Array | None = None
    numbers: jax.Array | None = None


def model_stacks(parts: Parts) -> dict[str, Stack]:
    """The stacks of a whole model, by section."""
    sections = {f"segment_{number}": segment for number, segment in enumerate(parts.layout)}
    return {name: Stack(each.kinds, parts.specs[name], each.per_layer) for name, each in sections.items()}


def no_taps(specs: Params) -> Params:
    """In place of `Placement.taps`, where no gradient is wanted."""
    return jax.tree.map(lambda spec: None, specs)


def run_stacks(
    parts: Parts,
    stacks: Mapping[str, Stack],
    params: Params,
    taps: Params,
    x: jax.Array,
    context: Context,
    remat: RematConfig,
    caches: tree.Tree = None,
) -> tuple[jax.Array, tree.Tree, Auxiliary]:
    """Runs x [B, S, D] through every stack; gives the caches with what was written, and the auxiliary sums."""
    auxiliary, new_caches = parts.zero_auxiliary(), {}
    exempt, depth = context.placement.precision.compute_dtype_layers, sum(map(_depth, parts.layout))
    for name, stack in stacks.items():
        runs = _runs_alike(stack, exempt, depth)
        # Caches are carried, and each layer writes to its place in them: what a loop takes and gives layer by layer it
        # has twice.
        carry = (x, auxiliary, caches[name] if caches else None)
        rows = jnp.arange(runs[-1].stop) if stack.numbers is None else stack.numbers
        beside = (taps[name], stack.per_layer, stack.live, rows if caches else None)
        by_number = remat.every > 1 or len(runs) > 1 or stack.numbers is not None
        # Kept for the backward, every layer that was picked by its number would be a copy, and every one that was
        # brought in from the host be on the device.
        picked = len(runs) > 1 or stack.numbers is not None
        again = not remat.checkpoints and (picked or offload.any_on_host(params[name]))
        of_stack = replace(remat, policy=KEPT_BY["none"]) if again else remat
        period = functools.partial(_period, parts, stack, context, of_stack, params[name] if by_number else None)
        if remat.every > 1:
            period = functools.partial(period, runs[0].quantised)
            carry = _scan_groups(period, remat.group(len(stack.kinds), runs[0].stop), carry, (rows, *beside))
        elif len(runs) > 1:
            carry = _scan_runs(period, runs, carry, beside)
        else:
            period = functools.partial(period, runs[0].quantised)
            carry, _ = jax.lax.scan(period, carry, (rows if by_number else params[name], *beside))
        x, auxiliary, new_caches[name] = carry
    return x, new_caches, auxiliary


Carry = tuple[jax.Array, Auxiliary, tree.Tree]  # x, the auxiliary sums, and the stack's caches


def _period(
    parts: Parts,
    stack: Stack,
    context: Context,
    remat: RematConfig,
    stacked: Params | None,
    quantised: tuple[bool, ...],
    carry: Carry,
    layer: Any,
) -> tuple[Carry, None]:
    """One repeat of a stack. layer: its weights, or its number in `stacked`, and what is beside them.

    quantised: for each block, whether its products are formed as `precision.matmul` says, or in compute dtype.
    """
    weights, taps, per_layer, live, number = layer
    x, auxiliary, caches = carry
    context = replace(context, cache_layer=number)
    if live is not None and context.real is not None:
        # A place without a layer has a router of zeros, by which all tokens would go to the first experts.
        context = replace(context, real=context.real & live)
    x, caches, added = run_period(
        parts, stack, weights, taps, per_layer, x, context, remat, caches, stacked=stacked, quantised=quantised
    )
    auxiliary = auxiliary + added
    if live is not None:
        x, auxiliary = jax.tree.map(lambda new, old: jnp.where(live, new, old), (x, auxiliary), carry[:2])
    return (x, auxiliary, caches), None


def run_period(
    parts: Parts,
    stack: Stack,
    weights: Any,
    taps: Params,
    per_layer: Mapping[str, Any],
    x: jax.Array,
    context: Context,
    remat: RematConfig,
    caches: tree.Tree = None,
    *,
    stacked: Params | None = None,
    quantised: tuple[bool, ...] | None = None,
) -> tuple[jax.Array, tree.Tree, Auxiliary]:
    """Runs x [B, S, D] through one period of a stack: as `run_stacks`.

    weights, taps, per_layer: the period's; where `stacked` is given, weights are the period's number in it.
    caches: the stack's, of which `context.cache_layer` says the period's place; they are given back whole.
    quantised: for each block, whether its products are formed as `precision.matmul` says, or in compute dtype; None for
        all.
    """
    specs, auxiliary = param.layer_specs(stack.specs), parts.zero_auxiliary()
    matmul: Matmul = context.placement.precision.matmul
    written = {}
    for position, kind in enumerate(stack.kinds):
        block = f"block_{position}"
        products: Matmul = matmul if quantised is None or quantised[position] else "compute_dtype"

        # What brings weights in, from the host and from other devices, is inside the checkpoint: they are brought in
        # again, not kept. So is the input's name: given one outside, it would be kept as it is, whatever happens to
        # the name.
        def run(
            x: Any,
            weights: Any,
            taps: Any,
            cache: Any,
            kind: Any = kind,
            position: int = position,
            block: str = block,
            products: Matmul = products,
        ) -> Any:
            x = tag(x, "block_input")
            if stacked is not None:
                weights = layer_of(stacked[block], weights)
            # A slice that nothing but this reads: of anything else XLA would make a computation on the host.
            weights = offload.fetch(weights)
            placed = context.placement.place(specs[block], weights, taps, remat.checkpoints, products)
            constants = {name: values[position] for name, values in per_layer.items()}
            placed = with_noise(placed, context.noise, constants["index"])
            return parts.block(kind, placed, x, context, constants, cache)

        if remat.checkpoints:
            run = _checkpoint(run, policy=remat.saveable())
        own = weights[block] if stacked is None else weights
        x, written[block], added = run(x, own, taps[block], caches[block] if caches else None)
        auxiliary = auxiliary + added
    return x, written if caches else None, auxiliary


_checkpoint = functools.partial(jax.checkpoint, prevent_cse=False)  # within a scan XLA merges nothing


def _scan_groups(period: Any, size: int, carry: Carry, layers: Any) -> Carry:
    """Repeats in groups of `size` that the backward runs again together.

    layers: as `_period` takes them, their weights by number: as an operand of the loop over a group they would be
        copied.
    """
    groups = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), layers)
    return jax.lax.scan(_checkpoint(functools.partial(jax.lax.scan, period)), carry, groups)[0]


@dataclass(frozen=True)
class _Run:
    """Repeats of a stack, from `start` up to `stop`, whose blocks are alike in what `_period` calls quantised."""

    start: int
    stop: int
    quantised: tuple[bool, ...]


def _runs_alike(stack: Stack, exempt: int, depth: int) -> list[_Run]:
    """exempt: the first and as many last of the model's `depth` layers."""
    if not exempt:
        return [_Run(0, jax.tree.leaves(stack.specs)[0].shape[0], (True,) * len(stack.kinds))]
    numbers = np.asarray(stack.per_layer["index"])  # no tracer: validation.validate exempts none in a pipeline
    quantised = (numbers >= exempt) & (numbers < depth - exempt)
    starts = [0, *(1 + np.flatnonzero(np.any(quantised[1:] != quantised[:-1], axis=1)))]
    return [
        _Run(int(start), int(stop), tuple(map(bool, quantised[start])))
        for start, stop in zip(starts, [*starts[1:], len(quantised)], strict=True)
    ]


def _depth(segment: Segment) -> int:
    return segment.repeats * len(segment.kinds)


def _scan_runs(period: Any, runs: list[_Run], carry: Carry, beside: Any) -> Carry:
    """One loop for each run, over weights by number and taps that the loops hand on."""
    taps, *others = beside
    layers = (jnp.arange(runs[-1].stop), *others)
    for run in runs:

        def one(carry: Any, layer: Any, run: _Run = run) -> tuple[Any, None]:
            carry, taps = carry
            number, *others = layer
            taps, own = _pick(taps, number)
            carry, _ = period(run.quantised, carry, (number, own, *others))
            return (carry, taps), None

        part = jax.tree.map(lambda x, run=run: x[run.start : run.stop], layers)
        (carry, taps), _ = jax.lax.scan(one, (carry, taps), part)
    return carry


@jax.custom_vjp
def _pick(stacked: Params, number: jax.Array) -> tuple[Params, Params]:
    """The stack to go on with, and one layer of it, which may be picked once.

    For taps, whose cotangents are the gradients: each layer's is written to its place in one stack. Of parts of a
    stack, autodiff would make whole ones and add them up.
    """
    return stacked, layer_of(stacked, number)


def _pick_forward(stacked: Params, number: jax.Array) -> tuple[tuple[Params, Params], jax.Array]:
    return _pick(stacked, number), number


def _pick_backward(number: jax.Array, cotangents: tuple[Params, Params]) -> tuple[Params, None]:
    write = functools.partial(jax.lax.dynamic_update_index_in_dim, index=number, axis=0)
    return jax.tree.map(write, *cotangents), None


_pick.defvjp(_pick_forward, _pick_backward)


def layer_of(stacked: tree.Tree, number: jax.Array) -> tree.Tree:
    """The leaves of one layer, or period, of a stack."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), stacked)
