"""Update by period: the optimizer receives the leaves of one period of a segment.

A section is "non_layer", which is updated once, or a segment. Every period of a segment has its own optimizer state,
including its step count, stacked as the parameters are. With ZeRO stages 1 and 2, the new masters are then cast and
gathered into the compute copy.

An elementwise optimizer whose state is on the device, without a compute copy, updates all periods of a segment at once:
XLA makes one kernel for each leaf, which reads and writes everything in place. In a loop over periods it would make one
kernel for each result, and copy the old slice for each (8B on one H200: 314 instead of 147 GB a step).

Otherwise a loop updates one period at a time. It then holds only one period in addition to the state, also on the
device if the optimizer state is in host memory, and the temporaries of an optimizer that works on matrices are those of
one period. In a pipeline all stages update one of their periods at the same time, chunk by chunk and slot by slot: an
index into the axis that is sharded over the stages would make XLA gather it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxopt_llm.core import tree
from jaxopt_llm.model import param
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel import offload
from jaxopt_llm.parallel.gathering import cast_masters
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.training.host_update import update_by_parts

# Masters, moments, and the compute copy or None: of all sections, of one section, or of one period.
Updatable = tuple[tree.Tree, tree.Tree, tree.Tree]
WHOLE = "whole"  # the only key of the moments of a WholeOptimizer
UPDATE = "update"  # the named scope of the update in compiled programs and profiles


@dataclass(frozen=True)
class WholeOptimizer:
    """An optax transformation that gets all parameters at once, as the tree that its user knows.

    Its masks and labels see that tree, and what it computes over all parameters, such as a global norm, is over all of
    them.

    to_tree, from_tree: between the sections and that tree.
    """

    transformation: optax.GradientTransformation
    to_tree: Callable[[Params], tree.Tree]
    from_tree: Callable[[tree.Tree], Params]

    def initialize(self, masters: Params) -> Params:
        return {WHOLE: self.transformation.init(self.to_tree(masters))}

    def update(
        self,
        state: Updatable,
        gradients: Params,
        factor: jax.Array,
        good: jax.Array,
        specs: Params,
        placement: Placement,
    ) -> Updatable:
        """Return the state after a step; see `update_period`."""
        masters, moments, copy = state

        def settle(state: tuple[Params, Params], gradients: Params) -> tuple[Params, Params]:
            masters, moments = state
            parameters = self.to_tree(masters)
            scaled = self.to_tree(jax.tree.map(lambda x: x * factor, gradients))
            updates, new_moments = self.transformation.update(scaled, moments[WHOLE], parameters)
            new = self.from_tree(optax.apply_updates(parameters, updates)), {WHOLE: new_moments}
            kept: tuple[Params, Params] = jax.tree.map(functools.partial(jnp.where, good), new, (masters, moments))
            return kept

        with jax.named_scope(UPDATE):
            if offload.any_on_host((masters, moments)):
                new = update_by_parts(settle, (masters, moments), gradients, good)
            else:
                new = settle((masters, moments), gradients)
            new_copy = None if copy is None else cast_masters(specs, new[0], placement)
            return offload.store_like((*new, new_copy), state)


SectionOptimizers = dict[str, optax.GradientTransformation]  # by section
Optimizers = SectionOptimizers | WholeOptimizer


def make_optimizers(make: Callable[[str, tree.Tree], optax.GradientTransformation], specs: Params) -> SectionOptimizers:
    """Make the optimizer of every section.

    Args:
        make: (name of a section, specs of one of its periods) -> optimizer.
    """
    return {section: make(section, param.period_specs(leaves)) for section, leaves in specs.items()}


def initialize_moments(optimizers: Optimizers, specs: Params, masters: Params) -> Params:
    """Return the initial optimizer state of every section."""
    if isinstance(optimizers, WholeOptimizer):
        return optimizers.initialize(masters)

    def initialize(section: str, optimizer: optax.GradientTransformation) -> tree.Tree:
        layers = param.layer_indices(specs[section])
        init = optimizer.init
        for _ in range(0 if layers is None else layers.ndim):
            init = jax.vmap(init)
        return init(masters[section])

    return {section: initialize(section, optimizer) for section, optimizer in optimizers.items()}


def moment_specs(optimizers: Optimizers, specs: Params) -> Params:
    """Return a ParamSpec for every leaf of the optimizer state.

    A moment has the axes of its parameter, and in 8 bits both codes and scales have them. Other leaves have only the
    axes of the stack. ZeRO shards the optimizer state along these axes.
    """

    def section_specs(
        parameters: list[tuple[str, ParamSpec]], layers: np.ndarray | None, state: tree.Tree
    ) -> tree.Tree:
        leading = 0 if layers is None else layers.ndim

        def leaf_spec(path: str, leaf: jax.ShapeDtypeStruct) -> ParamSpec:
            # The path of a moment ends with the path of its parameter, followed by /codes or /scales in 8 bits.
            # Adafactor's row and column means have other shapes.
            for name, spec in parameters:
                if path.endswith((f"/{name}", f"/{name}/codes")) and leaf.shape == spec.shape:
                    return replace(spec, dtype=leaf.dtype)
                if path.endswith(f"/{name}/scales"):
                    return replace(spec, shape=leaf.shape, dtype=leaf.dtype)
            spec = ParamSpec(leaf.shape[leading:], (None,) * (leaf.ndim - leading), dtype=leaf.dtype)
            return spec if layers is None else spec.stack(layers)

        return tree.map_with_path(leaf_spec, state)

    abstract = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)
    state = jax.eval_shape(lambda masters: initialize_moments(optimizers, specs, masters), abstract)
    if isinstance(optimizers, WholeOptimizer):
        return section_specs(tree.leaves_with_path(optimizers.to_tree(specs)), None, state)
    return {
        section: section_specs(
            tree.leaves_with_path(specs[section]), param.layer_indices(specs[section]), state[section]
        )
        for section in optimizers
    }


def split_sections(state: Updatable) -> dict[str, Updatable]:
    """Split the state of all sections into the states of the sections, by name."""
    masters, moments, compute = state
    return {name: (masters[name], moments[name], compute and compute[name]) for name in masters}


def join_sections(sections: dict[str, Updatable]) -> Updatable:
    """Join the states of the sections; the inverse of `split_sections`."""
    masters, moments, copies = ({name: state[i] for name, state in sections.items()} for i in range(3))
    return masters, moments, copies if jax.tree.leaves(copies) else None


def apply_gradients(
    optimizers: Optimizers,
    specs: Params,
    state: Updatable,
    gradients: Params,
    factor: jax.Array,
    good: jax.Array,
    placement: Placement,
    elementwise: bool = False,
) -> Updatable:
    """Return the state of all sections after a step.

    Args:
        factor, good: see `update_period`.
        elementwise: whether the optimizers are elementwise (optimizer.is_elementwise).
    """
    if isinstance(optimizers, WholeOptimizer):
        return optimizers.update(state, gradients, factor, good, specs, placement)

    def update_section(section: str, state: Updatable) -> Updatable:
        periods = param.layer_indices(specs[section])
        update = functools.partial(update_period, optimizers[section], param.period_specs(specs[section]), placement)
        if periods is None:
            return update(state, gradients[section], factor, good)
        on_stages = periods.ndim > 1
        # XLA 0.11.2 would hold the new masters of all periods next to their gathered compute copy.
        has_copy = state[2] is not None
        if elementwise and not on_stages and not has_copy and not offload.any_on_host(state):
            return _update_stacks(update, state, gradients[section], factor, good)
        if on_stages:
            update = jax.vmap(update, (0, 0, None, None), spmd_axis_name="pipeline")

        def update_row(index: jax.Array, carry: Updatable) -> Updatable:
            # Without a pipeline, slot = index and the loop runs over all rows.
            chunk, slot = jnp.divmod(index, periods.shape[-1])
            position = (chunk, None, slot) if on_stages else (slot,)
            new = update(_read(position, carry), _read(position, gradients[section]), factor, good)
            return _write(position, carry, new)

        # The state is a carry, not xs and ys of a scan: XLA for GPUs updates only a carry in place.
        with jax.named_scope(UPDATE):
            return jax.lax.fori_loop(0, periods.size // (periods.shape[1] if on_stages else 1), update_row, state)

    sections = split_sections(state)
    return join_sections({section: update_section(section, part) for section, part in sections.items()})


def _update_stacks(
    update: Callable[..., Updatable], state: Updatable, gradients: tree.Tree, factor: jax.Array, good: jax.Array
) -> Updatable:
    """Update all periods of a segment at once. There is no compute copy.

    Counts of steps, [L], are equal in all periods. They enter as scalars, as in a loop, because XLA rounds a division
    by an array in another way than a division by a scalar.
    """
    masters, moments, _ = state
    axes = jax.tree.map(lambda leaf: None if _is_count(leaf) else 0, moments)
    scalars = jax.tree.map(lambda leaf: leaf[0] if _is_count(leaf) else leaf, moments)
    masters, new, _ = jax.vmap(update, ((0, axes, None), 0, None, None), (0, axes, None))(
        (masters, scalars, None), gradients, factor, good
    )
    return masters, jax.tree.map(lambda leaf, old: jnp.broadcast_to(leaf, old.shape), new, moments), None


def _is_count(leaf: jax.Array) -> bool:
    return leaf.ndim == 1 and bool(jnp.issubdtype(leaf.dtype, jnp.integer))


Position = tuple[jax.Array | None, ...]  # an index into each leading axis, None for the whole axis


def _read(position: Position, stacks: tree.Tree) -> tree.Tree:
    """Return the parts of stacks at a position."""

    def read(stack: jax.Array) -> jax.Array:
        sizes = [size if index is None else 1 for index, size in zip(position, stack.shape, strict=False)]
        part = jax.lax.dynamic_slice(stack, _start(position, stack), (*sizes, *stack.shape[len(position) :]))
        return jnp.squeeze(part, _indexed_axes(position))

    return jax.tree.map(read, stacks)


def _write(position: Position, stacks: tree.Tree, parts: tree.Tree) -> tree.Tree:
    """Return the stacks with `parts` at a position."""

    def write(stack: jax.Array, part: jax.Array) -> jax.Array:
        part = jnp.expand_dims(part, _indexed_axes(position))
        return jax.lax.dynamic_update_slice(stack, part, _start(position, stack))

    return jax.tree.map(write, stacks, parts)


def _start(position: Position, stack: jax.Array) -> list[jax.Array | int]:
    return [0 if index is None else index for index in position] + [0] * (stack.ndim - len(position))


def _indexed_axes(position: Position) -> tuple[int, ...]:
    return tuple(axis for axis, index in enumerate(position) if index is not None)


@jax.named_scope(UPDATE)
def update_period(
    optimizer: optax.GradientTransformation,
    specs: tree.Tree,
    placement: Placement,
    state: Updatable,
    gradients: tree.Tree,
    factor: jax.Array | float = 1.0,
    good: jax.Array | bool = True,
) -> Updatable:
    """Return the state of one period, or of "non_layer", after a step.

    Args:
        factor: multiplies every gradient: the global clip divided by the loss scale. The clip is outside optax, because
            inside it would use the norm of one period.
        good: bool; if False, masters and moments stay bitwise unchanged.
    """
    masters, moments = offload.fetch_to_device(state[:2])
    gradients = jax.tree.map(lambda x: x * factor, gradients)
    updates, new_moments = optimizer.update(gradients, moments, masters)
    new = optax.apply_updates(masters, updates), new_moments
    # The selection is per period: for whole stacks the device would hold the old state in addition to the new one.
    masters, moments = jax.tree.map(functools.partial(jnp.where, good), new, (masters, moments))
    copy = None if state[2] is None else cast_masters(specs, masters, placement)
    return offload.store_like((masters, moments, copy), state)
