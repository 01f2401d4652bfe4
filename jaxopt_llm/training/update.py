"""The layer-wise update: the optimizer sees one layer's leaves at a time.

That bounds what the update holds to one layer, is where moments can be streamed from the host, and gives optimizers
that work on matrices real matrices. A section is "outer", updated once, or a segment, looped over; every layer has its
own optimizer state, step count included, stacked as the parameters are.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxopt_llm import tree
from jaxopt_llm.model import param
from jaxopt_llm.model.decoder import Params
from jaxopt_llm.model.param import LAYERS, ParamSpec
from jaxopt_llm.parallel.sharding import Placement

Optimizers = dict[str, optax.GradientTransformation]  # by section


def make_optimizers(make: Callable[[tree.Tree], optax.GradientTransformation], specs: Params) -> Optimizers:
    """One transformation a section, made for the specs of one of its layers."""
    return {
        section: make(leaves if param.repeats(leaves) is None else param.layer_specs(leaves))
        for section, leaves in specs.items()
    }


def init(optimizers: Optimizers, specs: Params, masters: Params) -> Params:
    """The optimizer state of every section."""

    def of(section: str, optimizer: optax.GradientTransformation) -> tree.Tree:
        each = optimizer.init if param.repeats(specs[section]) is None else jax.vmap(optimizer.init)
        return each(masters[section])

    return {section: of(section, optimizer) for section, optimizer in optimizers.items()}


def state_specs(optimizers: Optimizers, specs: Params) -> Params:
    """A ParamSpec for every leaf of the state: a moment has its parameter's axes, a count only the stack's."""

    def other(leaf: jax.ShapeDtypeStruct) -> ParamSpec:
        return ParamSpec(leaf.shape, ((LAYERS,) if leaf.ndim else ()) + (None,) * (leaf.ndim - 1), dtype=leaf.dtype)

    def moment(leaf: jax.ShapeDtypeStruct, spec: ParamSpec) -> ParamSpec:
        return ParamSpec(spec.shape, spec.axes, spec.contracting, dtype=leaf.dtype)

    abstract = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)
    state = jax.eval_shape(lambda masters: init(optimizers, specs, masters), abstract)
    return {
        section: optax.tree.map_params(optimizer, moment, state[section], specs[section], transform_non_params=other)
        for section, optimizer in optimizers.items()
    }


def global_norm(gradients: Params) -> jax.Array:
    """The Euclidean norm over all leaves, float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(gradients)))


def apply(
    optimizers: Optimizers,
    specs: Params,
    state: tuple[Params, Params, Params | None],
    gradients: Params,
    scale: jax.Array,
    placement: Placement,
) -> tuple[Params, Params, Params | None]:
    """New (masters, moments, compute copy or None).

    scale: multiplies every gradient; the global clip, taken outside optax because inside it would be per layer.
    """

    def update(
        optimizer: optax.GradientTransformation, specs: tree.Tree, state: tuple[tree.Tree, ...], gradients: tree.Tree
    ) -> tuple[tree.Tree, ...]:
        masters, moments, compute = state
        gradients = jax.tree.map(lambda x: x * scale, gradients)
        updates, moments = optimizer.update(gradients, moments, masters)
        masters = optax.apply_updates(masters, updates)
        return masters, moments, None if compute is None else placement.compute_parameters(specs, masters)

    def every_layer(
        optimizer: optax.GradientTransformation, specs: tree.Tree, state: tuple[tree.Tree, ...], gradients: tree.Tree
    ) -> tuple[tree.Tree, ...]:
        layer_specs = param.layer_specs(specs)

        def one(index: jax.Array, carry: tuple[tree.Tree, ...]) -> tuple[tree.Tree, ...]:
            def layer(stack: tree.Tree) -> tree.Tree:
                return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), stack)

            new = update(optimizer, layer_specs, layer(carry), layer(gradients))
            return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, index, 0), carry, new)

        # A carry, not a scan's xs and ys: XLA for GPUs updates only a carry in place.
        return jax.lax.fori_loop(0, param.repeats(specs), one, state)

    masters, moments, compute = state
    new = {}
    for section, optimizer in optimizers.items():
        run = update if param.repeats(specs[section]) is None else every_layer
        section_state = (masters[section], moments[section], None if compute is None else compute[section])
        new[section] = run(optimizer, specs[section], section_state, gradients[section])
    masters, moments, copies = ({section: parts[i] for section, parts in new.items()} for i in range(3))
    return masters, moments, None if compute is None else copies
