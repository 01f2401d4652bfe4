"""The scan executor with the optimizer in its backward: gradients never exist whole (Lv et al. 2023, LOMO,
arXiv:2306.09782).

The backward is written out. It goes through the layers from the last to the first: it runs a layer again from its
input, differentiates that, sums the layer's gradient over devices, gives it to the optimizer and is done with it. The
state is the loop's carry, which XLA updates in place, so that a layer is read before it is written. What is outside the
stacks is updated last; the head's gradient waits for the embedding's, which a tied table adds to it.

Nothing can wait for all gradients: neither a clip by their norm nor a decision to skip the step.

Letters: G gradient groups, R repeats of a segment's period, B batch, S sequence, D width.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm import tree
from jaxopt_llm.execution.gradients import each_group, in_groups, sum_of_squares
from jaxopt_llm.execution.stacks import RematConfig, Stack, layer_of, model_stacks, no_taps, run_period
from jaxopt_llm.model import param
from jaxopt_llm.model.auxiliary import Auxiliary
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Params, Parts
from jaxopt_llm.parallel.sharding import Placement

FORWARD = "forward"  # the scope under which a compiled program and a profile name it

# What the optimizer keeps of a section, parameters included: stacked as these are, and known to the two alone.
State = tree.Tree
Read = Callable[[State], Params]  # what the model reads of it
Update = Callable[[str, State, Params], State]  # of a section, by its name: of one layer, or of all outside the stacks


def loss_and_update(
    parts: Parts,
    state: dict[str, State],
    frozen: Params,
    batch: Batch,
    cotangent: jax.Array,
    placement: Placement,
    read: Read,
    update: Update,
) -> tuple[jax.Array, jax.Array, Auxiliary, dict[str, State]]:
    """The loss summed over real tokens, the sum of squares of all gradients, the auxiliary sums, and the state after
    the update.

    Arguments as in executor.py, but for the trainable parameters, which are in the state. batch: fields [1, B, S].
    """
    inside = placement.group()
    trainable = {name: read(section) for name, section in state.items()}
    specs, params = tree.restrict(parts.specs, trainable), tree.merge(trainable, frozen)
    microbatch = in_groups(jax.tree.map(lambda x: x[0], batch), placement)  # fields [G, B / G, S]

    def placed_outer(taps: Params) -> Params:
        return inside.place(parts.specs["outer"], params["outer"], taps, keep=True)

    def embed(taps: Params, batch: Batch) -> jax.Array:
        return parts.embed(placed_outer(taps), batch.tokens, parts.make_context(batch, inside))

    def period(
        stack: Stack, weights: Params, taps: Params, per_layer: Any, x: jax.Array, batch: Batch, remat: RematConfig
    ) -> tuple[jax.Array, Auxiliary]:
        context = parts.make_context(batch, inside)
        x, _, auxiliary = run_period(parts, stack, weights, taps, per_layer, x, context, remat)
        return x, auxiliary

    @jax.named_scope(FORWARD)
    def forward(name: str, stack: Stack, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Auxiliary]]:
        """x after a stack, and of each period its input, [R, G, B / G, S, D], and its auxiliary sums, [R, G, ...]."""
        taps, once = no_taps(param.layer_specs(stack.specs)), RematConfig("none")

        def one(x: jax.Array, layer: Any) -> tuple[jax.Array, tuple[jax.Array, Auxiliary]]:
            def run(x: jax.Array, batch: Batch) -> tuple[jax.Array, Auxiliary]:
                return period(stack, layer[0], taps, layer[1], x, batch, once)

            y, auxiliary = each_group(run, placement)(x, microbatch)
            return y, (x, auxiliary)

        return jax.lax.scan(one, x, (params[name], stack.per_layer))

    def head(x: jax.Array, batch: Batch) -> tuple[jax.Array, Params, jax.Array]:
        def objective(taps: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            context = parts.make_context(batch, inside)
            return parts.head_loss(placed_outer(taps), x, batch, context, cotangent)

        _, pull, loss = jax.vjp(objective, inside.taps(specs["outer"]), x, has_aux=True)
        return loss, *pull(jnp.float32(1))

    def backward(
        name: str, stack: Stack, inputs: jax.Array, dx: jax.Array, squares: jax.Array
    ) -> tuple[jax.Array, jax.Array, State]:
        """dx before a stack, the sum of squares with its gradients', and its state after their update; None for a stack
        of which nothing is trained: what is kept of that is not stacked."""
        layer_specs = param.layer_specs(specs[name])
        trains = bool(jax.tree.leaves(layer_specs))

        def one(steps: jax.Array, carry: Any) -> Any:
            dx, squares, state = carry
            number = inputs.shape[0] - 1 - steps
            x, per_layer, others = layer_of((inputs, stack.per_layer, frozen[name]), number)
            own = layer_of(state, number)
            weights = tree.merge(read(own) if trains else trainable[name], others)

            def back(x: jax.Array, dy: jax.Array, batch: Batch) -> tuple[Params, jax.Array]:
                def run(taps: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
                    y, auxiliary = period(stack, weights, taps, per_layer, x, batch, RematConfig("full"))
                    return y, cotangent * auxiliary.loss

                return jax.vjp(run, inside.taps(layer_specs), x)[1]((dy, jnp.float32(1)))

            gradients, dx = each_group(back, placement)(x, dx, microbatch)
            if trains:
                gradients = jax.tree.map(placement.reduce_groups, layer_specs, gradients)
                squares = squares + sum_of_squares(gradients, layer_specs)
                new = update(name, own, gradients)
                state = jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, number, 0), state, new)
            return dx, squares, state

        return jax.lax.fori_loop(0, inputs.shape[0], one, (dx, squares, state[name] if trains else None))

    def embed_back(dx: jax.Array, outer: Params, batch: Batch) -> Params:
        """The gradients of what is outside the stacks: the head's, `outer`, and the embedding's."""
        _, pull = jax.vjp(lambda taps: embed(taps, batch), inside.taps(specs["outer"]))
        return jax.tree.map(jnp.add, outer, *pull(dx))

    stacks, inputs, auxiliary = model_stacks(parts), {}, parts.zero_auxiliary()
    x = each_group(lambda batch: embed(no_taps(parts.specs["outer"]), batch), placement)(microbatch)
    for name, stack in stacks.items():
        x, (inputs[name], added) = forward(name, stack, x)
        groups = (0, 1) if placement.gradient_groups else (0,)
        auxiliary = auxiliary + jax.tree.map(lambda sums, groups=groups: jnp.sum(sums, axis=groups), added)
    loss, outer, dx = each_group(head, placement)(x, microbatch)
    squares, new = jnp.float32(0), dict(state)
    for name, stack in reversed(stacks.items()):
        dx, squares, trained = backward(name, stack, inputs[name], dx, squares)
        new[name] = update(name, state[name], specs[name]) if trained is None else trained
    outer = each_group(embed_back, placement)(dx, outer, microbatch)
    outer = jax.tree.map(placement.reduce_groups, specs["outer"], outer)
    new["outer"] = update("outer", state["outer"], outer)
    return jnp.sum(loss), squares + sum_of_squares(outer, specs["outer"]), auxiliary, new
