"""Runs the stacks of a model, or of one stage of a pipeline: each segment is a `lax.scan` over its layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxopt_llm import tree
from jaxopt_llm.model import param
from jaxopt_llm.model.config import Kind
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import Auxiliary, Params, Parts


@dataclass(frozen=True)
class RematConfig:
    policy: Literal["none", "full"] = "full"
    """what the backward recomputes: none keeps all but what is elementwise, full keeps each block's input alone"""


@dataclass(frozen=True)
class Stack:
    """A segment's stack as it is scanned.

    specs: of its leaves, [repeats, ...]; per_layer: constants beside them, each [repeats, period, ...].
    live: bool [repeats], False where a slot holds no layer and lets its input pass; None where all do.
    """

    kinds: tuple[Kind, ...]
    specs: Params
    per_layer: Mapping[str, Any]
    live: jax.Array | None = None


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
    auxiliary = parts.zero_auxiliary()
    full = remat.policy == "full"
    new_caches = {}
    for name, stack in stacks.items():
        specs = param.layer_specs(stack.specs)

        def period(carry: Any, layer: Any, stack: Stack = stack, specs: Params = specs) -> tuple[Any, Any]:
            weights, taps, per_layer, live, caches = layer
            x, auxiliary = carry
            written = {}
            for position, kind in enumerate(stack.kinds):
                block = f"block_{position}"

                # The placement is inside the checkpoint: gathered weights are recomputed, not kept.
                def run(x: Any, weights: Any, taps: Any, cache: Any, kind: Any = kind, position: int = position) -> Any:
                    placed = context.placement.place(specs[f"block_{position}"], weights, taps, keep=full)
                    constants = {name: values[position] for name, values in per_layer.items()}
                    return parts.block(kind, placed, x, context, constants, cache)

                if full:
                    run = jax.checkpoint(run, prevent_cse=False)
                x, written[block], added = run(x, weights[block], taps[block], caches[block] if caches else None)
                auxiliary = auxiliary + added
            if live is not None:
                x, auxiliary = jax.tree.map(lambda new, old: jnp.where(live, new, old), (x, auxiliary), carry)
            return (x, auxiliary), written

        layers = (params[name], taps[name], stack.per_layer, stack.live, caches[name] if caches else None)
        (x, auxiliary), new_caches[name] = jax.lax.scan(period, (x, auxiliary), layers)
    return x, new_caches, auxiliary
