"""Update of a whole tree whose state is in host memory, part by part, with any optax transformation.

If a program copied the whole state to the device, it would need as much memory as without offload. The update is
therefore traced to a jaxpr, and its results are grouped by the host arrays that they need: for Adam a group is the two
moments of one parameter. The groups follow one another. Each is copied to the device, updated and copied back. What
depends on no host array, such as the global norm of the gradients, is computed once before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxopt_llm.compiler.instructions import taken_scope_name
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.jaxpr import inline_calls, typeof
from jaxopt_llm.parallel import offload


@dataclass
class _Evaluation:
    """Values of a jaxpr's variables so far, from the inputs that are known. Equations are evaluated when needed."""

    jaxpr: Jaxpr
    inputs: dict[Any, Any]

    def __post_init__(self) -> None:
        self.values = dict(self.inputs)
        self.makers = {var: eqn for eqn in self.jaxpr.eqns for var in eqn.outvars}

    def list_equations(self, atoms: Sequence[Any]) -> list[JaxprEqn]:
        """Return the equations that these values need."""
        needed = {atom for atom in atoms if not isinstance(atom, Literal)}
        equations = []
        for eqn in reversed(self.jaxpr.eqns):
            if needed & {*eqn.outvars}:
                equations.append(eqn)
                needed |= {atom for atom in eqn.invars if not isinstance(atom, Literal)}
        return equations

    def can_read(self, atom: Any) -> bool:
        """Return whether a value needs only the inputs that are known."""
        needed = self.list_equations([atom])
        made = {var for eqn in needed for var in eqn.outvars}
        read = [each for eqn in needed for each in eqn.invars if not isinstance(each, Literal)]
        return all(each in made or each in self.inputs for each in read)

    def read(self, atom: Any) -> Any:
        if isinstance(atom, Literal):
            return atom.val
        wanted = [atom]
        while wanted:  # a loop, because a chain of equations can be longer than Python's stack
            var = wanted[-1]
            if var in self.values:
                wanted.pop()
                continue
            eqn = self.makers[var]
            missing = [each for each in eqn.invars if not isinstance(each, Literal) and each not in self.values]
            if missing:
                wanted += missing
                continue
            inputs = [each.val if isinstance(each, Literal) else self.values[each] for each in eqn.invars]
            with eqn.ctx.manager:
                results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
            self.values |= zip(eqn.outvars, results if eqn.primitive.multiple_results else [results], strict=True)
        return self.values[atom]


def update_by_parts(
    function: Callable[[tree.Tree, tree.Tree], tree.Tree],
    state: tree.Tree,
    gradients: tree.Tree,
    good: jax.Array | bool,
) -> tree.Tree:
    """Return the next state, `function(state, gradients)`. Some leaves of the state are in host memory.

    The function sees all leaves on the device. Results rest where the leaves of the state do.

    Args:
        good: bool, whether the state changes at all.

    Raises:
        InputError: every result needs all host arrays, so that parts would save nothing.
    """
    flat, structure = jax.tree.flatten(state)
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in flat]

    def update(flat: list[jax.Array], gradients: tree.Tree) -> list[jax.Array]:
        return jax.tree.leaves(function(jax.tree.unflatten(structure, flat), gradients))

    closed = inline_calls(jax.make_jaxpr(update)(shapes, gradients))
    jaxpr, hosted = closed.jaxpr, {index for index, leaf in enumerate(flat) if offload.is_on_host(leaf)}
    groups = group_results(jaxpr, sorted(hosted))
    if len(jax.tree.leaves(gradients)) > 1 and len(groups) <= 2:
        raise InputError(
            "offload.optimizer: this optax transformation computes something over the whole optimizer state, such as a "
            "norm of all steps, so the whole state would be on the device at once; leave out what couples the "
            "parameters, or set offload.optimizer=False"
        )
    inputs = [leaf for index, leaf in enumerate(flat) if index not in hosted] + jax.tree.leaves(gradients)
    names = [var for index, var in enumerate(jaxpr.invars) if index not in hosted]
    known = dict(zip([*jaxpr.constvars, *names], [*closed.consts, *inputs], strict=True))
    outside = _Evaluation(jaxpr, known)
    leaves = dict(enumerate(flat))
    leaves |= {index: outside.read(jaxpr.outvars[index]) for index in groups[0]}
    for group in groups[1:]:
        leaves |= _update_group(outside, group, {index: leaves[index] for index in group}, good)
    return jax.tree.unflatten(structure, [leaves[index] for index in range(len(flat))])


def _update_group(
    outside: _Evaluation, group: Sequence[int], leaves: dict[int, jax.Array], good: jax.Array | bool
) -> dict[int, jax.Array]:
    """Return the next leaves of a group, by their indices.

    The part is a loop that runs once. XLA schedules each loop by itself, so that no part is on the device before its
    turn. It would dissolve a loop that runs once for certain. This one runs twice if nothing changes.
    """
    jaxpr = outside.jaxpr
    # Scalars are computed outside; arrays inside, so that no copy of the gradients exists before.
    scalars = {
        var: outside.read(var)
        for eqn in outside.list_equations([jaxpr.outvars[index] for index in group])
        for var in eqn.outvars
        if not typeof(var).shape and outside.can_read(var)
    }

    def update(carry: tuple[jax.Array, dict[int, jax.Array]]) -> tuple[jax.Array, dict[int, jax.Array]]:
        count, leaves = carry
        fetched = offload.fetch_to_device(leaves)
        known = outside.inputs | scalars | {jaxpr.invars[index]: leaf for index, leaf in fetched.items()}
        inside = _Evaluation(jaxpr, known)
        return count + 1, offload.store_like({index: inside.read(jaxpr.outvars[index]) for index in leaves}, leaves)

    runs = jnp.where(good, jnp.int32(1), jnp.int32(2))
    with jax.named_scope(taken_scope_name(1, 1)):
        return jax.lax.while_loop(lambda carry: carry[0] < runs, update, (jnp.int32(0), leaves))[1]


def group_results(jaxpr: Jaxpr, hosted: Sequence[int]) -> list[list[int]]:
    """Return the results in groups, by their indices. The first group needs no argument in host memory.

    Results that need a common argument are in one group.

    Args:
        hosted: indices of the arguments in host memory.
    """
    needs: dict[Any, frozenset[int]] = {jaxpr.invars[index]: frozenset((index,)) for index in hosted}
    nothing: frozenset[int] = frozenset()
    for eqn in jaxpr.eqns:
        together = nothing.union(*(needs.get(atom, nothing) for atom in eqn.invars if not isinstance(atom, Literal)))
        if together:
            needs |= dict.fromkeys(eqn.outvars, together)
    free: list[int] = []
    groups: list[tuple[frozenset[int], list[int]]] = []
    for index, atom in enumerate(jaxpr.outvars):
        needed = nothing if isinstance(atom, Literal) else needs.get(atom, nothing)
        if not needed:
            free.append(index)
            continue
        joined = [group for group in groups if group[0] & needed]
        groups = [group for group in groups if not group[0] & needed]
        members = [member for group in joined for member in group[1]]
        groups.append((needed.union(*(group[0] for group in joined)), [*members, index]))
    return [free, *(sorted(group[1]) for group in groups)]
