"""The layer-wise update: the optimizer sees one layer's leaves at a time.

That bounds what the update holds to one layer, on the device too where the optimizer's state rests on the host, and
gives optimizers that work on matrices real matrices. A section is "outer", updated once, or a segment, looped over;
every layer has its own optimizer state, step count included, stacked as the parameters are. Of a pipeline's segment
every stage updates a layer of its own at once, chunk by chunk and slot by slot: indexing the axis that is split over
the stages would gather it.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax

from jaxopt_llm import tree
from jaxopt_llm.model import param
from jaxopt_llm.model.decoder import Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel import offload
from jaxopt_llm.parallel.sharding import Placement

Optimizers = dict[str, optax.GradientTransformation]  # by section
# Masters, moments, and the compute copy or None: of all sections, of one, or of one of its layers.
State = tuple[tree.Tree, tree.Tree, tree.Tree]
UPDATE = "update"  # the scope under which a compiled program and a profile name it


def make_optimizers(make: Callable[[str, tree.Tree], optax.GradientTransformation], specs: Params) -> Optimizers:
    """One transformation a section, made for its name and the specs of one of its layers."""
    return {
        section: make(section, leaves if param.layers(leaves) is None else param.layer_specs(leaves))
        for section, leaves in specs.items()
    }


def init(optimizers: Optimizers, specs: Params, masters: Params) -> Params:
    """The optimizer state of every section."""

    def of(section: str, optimizer: optax.GradientTransformation) -> tree.Tree:
        layers = param.layers(specs[section])
        each = optimizer.init
        for _ in range(0 if layers is None else layers.ndim):
            each = jax.vmap(each)
        return each(masters[section])

    return {section: of(section, optimizer) for section, optimizer in optimizers.items()}


def state_specs(optimizers: Optimizers, specs: Params) -> Params:
    """A ParamSpec for every leaf of the state: a moment has its parameter's axes, in 8 bits codes and scales alike,
    anything else only the stack's, and so what ZeRO finds to divide of it."""

    def of(section: str, state: tree.Tree) -> tree.Tree:
        layers = param.layers(specs[section])
        leading = 0 if layers is None else layers.ndim
        parameters = [
            (tree.path_string(path), spec) for path, spec in jax.tree_util.tree_leaves_with_path(specs[section])
        ]

        def leaf(path: str, leaf: jax.ShapeDtypeStruct) -> ParamSpec:
            # The path of a moment ends with its parameter's, but for what 8 bits add. Adafactor's rows and columns have
            # other shapes.
            for name, spec in parameters:
                if path.endswith((f"/{name}", f"/{name}/codes")) and leaf.shape == spec.shape:
                    return replace(spec, dtype=leaf.dtype)
                if path.endswith(f"/{name}/scales"):
                    return replace(spec, shape=leaf.shape, dtype=leaf.dtype)
            spec = ParamSpec(leaf.shape[leading:], (None,) * (leaf.ndim - leading), dtype=leaf.dtype)
            return spec if layers is None else spec.stack(layers)

        return tree.map_with_path(leaf, state)

    abstract = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)
    state = jax.eval_shape(lambda masters: init(optimizers, specs, masters), abstract)
    return {section: of(section, state[section]) for section in optimizers}


def by_section(state: State) -> dict[str, State]:
    masters, moments, compute = state
    return {name: (masters[name], moments[name], compute and compute[name]) for name in masters}


def of_all(sections: dict[str, State]) -> State:
    """The inverse of `by_section`."""
    masters, moments, copies = ({name: state[i] for name, state in sections.items()} for i in range(3))
    return masters, moments, copies if jax.tree.leaves(copies) else None


def apply(
    optimizers: Optimizers,
    specs: Params,
    state: State,
    gradients: Params,
    factor: jax.Array,
    good: jax.Array,
    placement: Placement,
) -> State:
    """The state after a step. factor, good: see `update_layer`."""

    def every_layer(section: str, state: State) -> State:
        layers = param.layers(specs[section])
        each = functools.partial(update_layer, optimizers[section], param.layer_specs(specs[section]), placement)
        if layers is None:
            return each(state, gradients[section], factor, good)
        on_stages = layers.ndim > 1
        if on_stages:
            each = jax.vmap(each, (0, 0, None, None), spmd_axis_name="pipeline")

        def one(index: jax.Array, carry: State) -> State:
            chunk, slot = jnp.divmod(index, layers.shape[-1])
            at = (chunk, None, slot) if on_stages else (slot,)
            read, write = (functools.partial(jax.tree.map, functools.partial(f, at)) for f in (_read, _write))
            return write(carry, each(read(carry), read(gradients[section]), factor, good))

        # A carry, not a scan's xs and ys: XLA for GPUs updates only a carry in place.
        return jax.lax.fori_loop(0, layers.size // (layers.shape[1] if on_stages else 1), one, state)

    return of_all({section: every_layer(section, own) for section, own in by_section(state).items()})


At = tuple[jax.Array | None, ...]  # a place of the first axes, None for all of one


def _read(at: At, stack: jax.Array) -> jax.Array:
    sizes = [size if index is None else 1 for index, size in zip(at, stack.shape, strict=False)]
    part = jax.lax.dynamic_slice(stack, _start(at, stack), (*sizes, *stack.shape[len(at) :]))
    return jnp.squeeze(part, _axes(at))


def _write(at: At, stack: jax.Array, part: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(stack, jnp.expand_dims(part, _axes(at)), _start(at, stack))


def _start(at: At, stack: jax.Array) -> list[jax.Array | int]:
    return [0 if index is None else index for index in at] + [0] * (stack.ndim - len(at))


def _axes(at: At) -> tuple[int, ...]:
    return tuple(axis for axis, index in enumerate(at) if index is not None)


@jax.named_scope(UPDATE)
def update_layer(
    optimizer: optax.GradientTransformation,
    specs: tree.Tree,
    placement: Placement,
    state: State,
    gradients: tree.Tree,
    factor: jax.Array | float = 1.0,
    good: jax.Array | bool = True,
) -> State:
    """The state of one layer, or of what is outside the stacks, after a step.

    factor: multiplies every gradient; the global clip, taken outside optax because inside it would be per layer, and
        what undoes a loss scale.
    good: bool; where it is False, masters and moments stay as they are, to the bit.
    """
    masters, moments = offload.fetch(state[:2])
    gradients = jax.tree.map(lambda x: x * factor, gradients)
    updates, new_moments = optimizer.update(gradients, moments, masters)
    new = optax.apply_updates(masters, updates), new_moments
    # Here, where it is a layer's: of whole stacks it would hold the old beside the new.
    masters, moments = jax.tree.map(functools.partial(jnp.where, good), new, (masters, moments))
    copy = None if state[2] is None else placement.compute_parameters(specs, masters)
    return offload.store((masters, moments, copy), state)
