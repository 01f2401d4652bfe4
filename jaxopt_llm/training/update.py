"""The layer-wise update: the optimizer sees one layer's leaves at a time.

That bounds what the update holds to one layer, is where moments can be streamed from the host, and gives optimizers
that work on matrices real matrices. A section is "outer", updated once, or a segment, looped over; every layer has its
own optimizer state, step count included, stacked as the parameters are. Of a pipeline's segment every stage updates its
own layer at once, slot by slot: indexing the axis that is split over the stages would gather it.
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
from jaxopt_llm.parallel.sharding import Placement

Optimizers = dict[str, optax.GradientTransformation]  # by section
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
    """A ParamSpec for every leaf of the state: a moment has its parameter's axes, anything else only the stack's, and
    so what ZeRO finds to divide of it."""

    def of(section: str, state: tree.Tree) -> tree.Tree:
        layers = param.layers(specs[section])
        leading = 0 if layers is None else layers.ndim
        parameters = [
            (tree.path_string(path), spec) for path, spec in jax.tree_util.tree_leaves_with_path(specs[section])
        ]

        def leaf(path: str, leaf: jax.ShapeDtypeStruct) -> ParamSpec:
            # The path of a moment ends with its parameter's. Adafactor's rows and columns have other shapes.
            for name, spec in parameters:
                if path.endswith(f"/{name}") and leaf.shape == spec.shape:
                    return replace(spec, dtype=leaf.dtype)
            spec = ParamSpec(leaf.shape[leading:], (None,) * (leaf.ndim - leading), dtype=leaf.dtype)
            return spec if layers is None else spec.stack(layers)

        return tree.map_with_path(leaf, state)

    abstract = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)
    state = jax.eval_shape(lambda masters: init(optimizers, specs, masters), abstract)
    return {section: of(section, state[section]) for section in optimizers}


def global_norm(gradients: Params) -> jax.Array:
    """The Euclidean norm over all leaves, float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(gradients)))


@jax.named_scope(UPDATE)
def apply(
    optimizers: Optimizers,
    specs: Params,
    state: tuple[Params, Params, Params | None],
    gradients: Params,
    scale: jax.Array,
    good: jax.Array,
    placement: Placement,
) -> tuple[Params, Params, Params | None]:
    """New (masters, moments, compute copy or None).

    scale: multiplies every gradient; the global clip, taken outside optax because inside it would be per layer.
    good: bool; where it is False, masters and moments stay as they are, to the bit.
    """

    def update(
        optimizer: optax.GradientTransformation, specs: tree.Tree, state: tuple[tree.Tree, ...], gradients: tree.Tree
    ) -> tuple[tree.Tree, ...]:
        masters, moments, compute = state
        gradients = jax.tree.map(lambda x: x * scale, gradients)
        updates, new_moments = optimizer.update(gradients, moments, masters)
        new = optax.apply_updates(masters, updates), new_moments
        # Here, where it is a layer's: of whole stacks it would hold the old beside the new.
        masters, moments = jax.tree.map(functools.partial(jnp.where, good), new, (masters, moments))
        return masters, moments, None if compute is None else placement.compute_parameters(specs, masters)

    def every_layer(
        optimizer: optax.GradientTransformation, specs: tree.Tree, state: tuple[tree.Tree, ...], gradients: tree.Tree
    ) -> tuple[tree.Tree, ...]:
        layer_specs, layers = param.layer_specs(specs), param.layers(specs)
        assert layers is not None
        axis = layers.ndim - 1
        each = functools.partial(update, optimizer, layer_specs)
        if axis:
            each = jax.vmap(jax.vmap(each, spmd_axis_name="pipeline"))  # over [virtual, stages]

        def one(index: jax.Array, carry: tuple[tree.Tree, ...]) -> tuple[tree.Tree, ...]:
            def layer(stack: tree.Tree) -> tree.Tree:
                return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False), stack)

            new = each(layer(carry), layer(gradients))
            return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, index, axis), carry, new)

        # A carry, not a scan's xs and ys: XLA for GPUs updates only a carry in place.
        return jax.lax.fori_loop(0, layers.shape[-1], one, state)

    masters, moments, compute = state
    new = {}
    for section, optimizer in optimizers.items():
        run = update if param.layers(specs[section]) is None else every_layer
        section_state = (masters[section], moments[section], None if compute is None else compute[section])
        new[section] = run(optimizer, specs[section], section_state, gradients[section])
    masters, moments, copies = ({section: parts[i] for section, parts in new.items()} for i in range(3))
    return masters, moments, None if compute is None else copies
