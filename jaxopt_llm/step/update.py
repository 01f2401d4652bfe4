"""Update by period: the optimizer receives the leaves of one period of a segment.

A section is "non_layer", which is updated once, or a segment. Every period of a segment has its own optimizer state,
including its step count, stacked as the parameters are. If there is a compute copy (zero.has_compute_copy), the new
masters are then cast and gathered into it.

An elementwise optimizer whose state is on the device, without a compute copy, updates all periods of a segment at once:
XLA makes one kernel for each leaf, which reads and writes everything in place. In a loop over periods it would make one
kernel for each result, and copy the old slice for each (8B on one H200: 314 instead of 147 GB a step).

Otherwise a loop updates one period at a time. It then holds only one period in addition to the state, also on the
device if the optimizer state is in host memory, and the temporaries of an optimizer that works on matrices are those of
one period. In a pipeline all stages update one of their periods at the same time, chunk by chunk and slot by slot: an
index into the axis that is sharded over the stages would make XLA gather it.

A whole tree whose state is in host memory is updated part by part, with any optax transformation. If a program copied
the whole state to the device, it would need as much memory as without offload. The update is therefore traced to a
jaxpr, and its results are grouped by the host arrays that they need: for Adam a group is the two moments of one
parameter. The groups follow one another. Each is copied to the device, updated and copied back. What depends on no host
array, such as the global norm of the gradients, is computed once before.
"""

import functools
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxopt_llm.compiler.instructions import taken_scope_name
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.jaxpr import bind_equation, inline_calls, read_atoms, run_equations, typeof
from jaxopt_llm.model import param
from jaxopt_llm.model.linear.quantised import find_largest
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel import offload
from jaxopt_llm.parallel.gathering import cast_masters
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step.moments import Codes, Keys, find_parameter


@dataclass
class _Evaluation:
    """Values of a jaxpr's variables so far, from the inputs that are known. Equations are evaluated when needed."""

    jaxpr: Jaxpr
    inputs: dict[Any, Any]

    def __post_init__(self) -> None:
        self.values = dict(self.inputs)

    def list_equations(self, atoms: Sequence[Any], known: Container[Any] = ()) -> list[JaxprEqn]:
        """Return the equations that these values need, in order, given the known ones."""
        needed = {atom for atom in atoms if not isinstance(atom, Literal) and atom not in known}
        equations: list[JaxprEqn] = []
        for eqn in reversed(self.jaxpr.eqns):
            if needed & {*eqn.outvars}:
                equations.append(eqn)
                needed |= {atom for atom in eqn.invars if not isinstance(atom, Literal) and atom not in known}
        return equations[::-1]

    def can_read(self, atom: Any) -> bool:
        """Return whether a value needs only the inputs that are known."""
        needed = self.list_equations([atom])
        made = {var for eqn in needed for var in eqn.outvars}
        read = [each for eqn in needed for each in eqn.invars if not isinstance(each, Literal)]
        return all(each in made or each in self.inputs for each in read)

    def read(self, atom: Any) -> Any:
        run_equations(self.list_equations([atom], self.values), self.values, bind_equation)
        return read_atoms([atom], self.values)[0]


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


T = TypeVar("T")
WHOLE = "whole"  # the only key of the moments of a WholeOptimizer
UPDATE = "update"  # the named scope of the update in compiled programs and profiles


class Updatable(NamedTuple):
    """State that the update changes, of all sections, of one section, or of one period.

    compute: compute copy of the masters; None if there is none.
    average: average of the masters (see `move_average`); None if there is none.
    largest: largest magnitudes of the masters (TrainState); None if there are none.
    """

    masters: tree.Tree
    moments: tree.Tree
    compute: tree.Tree = None
    average: tree.Tree = None
    largest: tree.Tree = None


class Scalars(NamedTuple):
    """Scalars of a step that the update of every period needs.

    factor: multiplies every gradient: the global clip divided by the loss scale. The clip is outside optax, because
        inside it would use the norm of one period.
    good: bool; if False, masters, moments and average stay bitwise unchanged.
    weight: weight of the new parameters in the average, 1 - decay.
    loss: mean loss of the batch, which a WholeOptimizer passes on.
    """

    factor: jax.Array | float = 1.0
    good: jax.Array | bool = True
    weight: jax.Array | float = 0.0
    loss: jax.Array | float = 0.0


@dataclass(frozen=True)
class WholeOptimizer:
    """An optax transformation that gets all parameters at once, as the tree that its user knows.

    Its masks and labels see that tree, and a number such as a global norm is computed over all parameters.

    to_tree, from_tree: between the sections and that tree.
    """

    transformation: optax.GradientTransformation
    to_tree: Callable[[Params], tree.Tree]
    from_tree: Callable[[tree.Tree], Params]

    def initialize(self, masters: Params) -> Params:
        return {WHOLE: self.transformation.init(self.to_tree(masters))}

    def compute(
        self, masters: Params, gradients: Params, moments: Params, loss: jax.Array | float
    ) -> tuple[Params, Params]:
        """Return the masters and the moments after a step.

        A transformation that takes extra arguments gets `value`, the mean loss of the batch, and `grad`, the gradients.
        """
        parameters, given = self.to_tree(masters), self.to_tree(gradients)
        update = optax.with_extra_args_support(self.transformation).update
        updates, after = update(given, moments[WHOLE], parameters, value=loss, grad=given)
        return self.from_tree(optax.apply_updates(parameters, updates)), {WHOLE: after}

    def update(
        self, state: Updatable, gradients: Params, scalars: Scalars, specs: Params, placement: Placement
    ) -> Updatable:
        """Return the state after a step; see `update_period`."""

        def settle(state: Updatable, gradients: Params) -> Updatable:
            scaled = jax.tree.map(lambda x: x * scalars.factor, gradients)
            return _settle(state, *self.compute(state.masters, scaled, state.moments, scalars.loss), scalars)

        with jax.named_scope(UPDATE):
            without_copy = state._replace(compute=None)
            if offload.any_on_host(without_copy):
                new = update_by_parts(settle, without_copy, gradients, scalars.good)
            else:
                new = settle(without_copy, gradients)
            if state.compute is not None:
                new = new._replace(compute=cast_masters(specs, new.masters, placement))
            return offload.store_like(new, state)


SectionOptimizers = dict[str, optax.GradientTransformation]  # by section
LossOptimizer = SectionOptimizers | WholeOptimizer  # the optimizer of one loss


@dataclass(frozen=True)
class Share:
    """Parameters that one of several losses trains, and its optimizer.

    trained: specs of its parameters, with None for all others.
    """

    trained: Params
    optimizer: LossOptimizer


Shares = dict[str, Share]  # by the name of the loss; see program.py
Optimizers = LossOptimizer | Shares


def has_shares(optimizers: Optimizers) -> TypeGuard[Shares]:
    """Return whether there are several losses, with an optimizer each."""
    return isinstance(optimizers, dict) and any(isinstance(each, Share) for each in optimizers.values())


def for_each_loss(optimizers: Optimizers, make: Callable[[], T]) -> T | dict[str, T]:
    """Return `make()`. With several losses, call it once for each of them, and return the results by name."""
    return {name: make() for name in optimizers} if has_shares(optimizers) else make()


def make_optimizers(make: Callable[[str, tree.Tree], optax.GradientTransformation], specs: Params) -> SectionOptimizers:
    """Make the optimizer of every section.

    Args:
        make: (name of a section, specs of one of its periods) -> optimizer.
    """
    return {section: make(section, param.period_specs(leaves)) for section, leaves in specs.items()}


def initialize_moments(optimizers: Optimizers, specs: Params, masters: Params) -> Params:
    """Return the initial optimizer state of every section, with several losses by the name of the loss."""
    if has_shares(optimizers):
        return {
            name: initialize_moments(share.optimizer, share.trained, tree.restrict(masters, share.trained))
            for name, share in optimizers.items()
        }
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
    if has_shares(optimizers):
        return {name: moment_specs(share.optimizer, share.trained) for name, share in optimizers.items()}

    def section_specs(specs: tree.Tree, layers: np.ndarray | None, state: tree.Tree) -> tree.Tree:
        leading = 0 if layers is None else layers.ndim
        parameters = dict(jax.tree_util.tree_leaves_with_path(specs))

        def leaf_spec(keys: Keys, leaf: jax.ShapeDtypeStruct | Codes) -> ParamSpec | Codes:
            parameter = find_parameter(keys, parameters)
            if isinstance(leaf, Codes):
                assert parameter is not None, f"codes of no parameter: {keys}"
                of = parameters[parameter]
                return Codes(*(replace(of, shape=x.shape, dtype=x.dtype) for x in (leaf.codes, leaf.scales)))
            # Adafactor's row and column means have other shapes than their parameter.
            if parameter is not None and leaf.shape == parameters[parameter].shape:
                return replace(parameters[parameter], dtype=leaf.dtype)
            spec = ParamSpec(leaf.shape[leading:], (None,) * (leaf.ndim - leading), dtype=leaf.dtype)
            return spec if layers is None else spec.stack(layers)

        return jax.tree_util.tree_map_with_path(leaf_spec, state, is_leaf=lambda leaf: isinstance(leaf, Codes))

    abstract = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)
    state = jax.eval_shape(lambda masters: initialize_moments(optimizers, specs, masters), abstract)
    if isinstance(optimizers, WholeOptimizer):
        return section_specs(optimizers.to_tree(specs), None, state)
    return {
        section: section_specs(specs[section], param.layer_indices(specs[section]), state[section])
        for section in optimizers
    }


def split_sections(state: Updatable) -> dict[str, Updatable]:
    """Split the state of all sections into the states of the sections, by name."""
    return {name: Updatable(*(part and part[name] for part in state)) for name in state.masters}


def join_sections(sections: dict[str, Updatable]) -> Updatable:
    """Join the states of the sections; the inverse of `split_sections`."""
    masters, moments, *others = (
        {name: state[i] for name, state in sections.items()} for i in range(len(Updatable._fields))
    )
    return Updatable(masters, moments, *(part if jax.tree.leaves(part) else None for part in others))


def apply_gradients(
    optimizers: LossOptimizer,
    specs: Params,
    state: Updatable,
    gradients: Params,
    scalars: Scalars,
    placement: Placement,
    elementwise: bool = False,
) -> Updatable:
    """Return the state of all sections after a step.

    Args:
        elementwise: whether the optimizers are elementwise (optimizer.is_elementwise).
    """
    if isinstance(optimizers, WholeOptimizer):
        return optimizers.update(state, gradients, scalars, specs, placement)

    def update_section(section: str, state: Updatable) -> Updatable:
        periods = param.layer_indices(specs[section])
        update = functools.partial(update_period, optimizers[section], param.period_specs(specs[section]), placement)
        if periods is None:
            return update(state, gradients[section], scalars)
        on_stages = periods.ndim > 1
        # XLA 0.11.2 would hold the new masters of all periods next to their gathered compute copy.
        has_copy = state.compute is not None
        if elementwise and not on_stages and not has_copy and not offload.any_on_host(state):
            return _update_stacks(update, state, gradients[section], scalars)
        if on_stages:
            update = jax.vmap(update, (0, 0, None), spmd_axis_name="pipeline")

        def update_row(index: jax.Array, carry: Updatable) -> Updatable:
            # Without a pipeline, slot = index and the loop runs over all rows.
            chunk, slot = jnp.divmod(index, periods.shape[-1])
            position = (chunk, None, slot) if on_stages else (slot,)
            new = update(_read(position, carry), _read(position, gradients[section]), scalars)
            return _write(position, carry, new)

        # The state is a carry, not xs and ys of a scan: XLA for GPUs updates only a carry in place.
        with jax.named_scope(UPDATE):
            return jax.lax.fori_loop(0, periods.size // (periods.shape[1] if on_stages else 1), update_row, state)

    sections = split_sections(state)
    return join_sections({section: update_section(section, part) for section, part in sections.items()})


def _update_stacks(
    update: Callable[..., Updatable], state: Updatable, gradients: tree.Tree, scalars: Scalars
) -> Updatable:
    """Update all periods of a segment at once. There is no compute copy.

    Counts of steps, [L], are equal in all periods. They enter as scalars, as in a loop, because XLA rounds a division
    by an array in another way than a division by a scalar.
    """
    counts = jax.tree.map(lambda leaf: None if _is_count(leaf) else 0, state.moments)
    moments = jax.tree.map(lambda leaf: leaf[0] if _is_count(leaf) else leaf, state.moments)
    axes = Updatable(0, counts, None, 0, 0)
    new = jax.vmap(update, (axes, 0, None), axes)(state._replace(moments=moments), gradients, scalars)
    return new._replace(
        moments=jax.tree.map(lambda leaf, old: jnp.broadcast_to(leaf, old.shape), new.moments, state.moments)
    )


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
    scalars: Scalars,
) -> Updatable:
    """Return the state of one period, or of "non_layer", after a step."""
    fetched = offload.fetch_to_device(state._replace(compute=None, largest=None))
    gradients = jax.tree.map(lambda x: x * scalars.factor, gradients)
    updates, moments = optimizer.update(gradients, fetched.moments, fetched.masters)
    # The selection is per period: for whole stacks the device would hold the old state in addition to the new one.
    new = _settle(fetched, optax.apply_updates(fetched.masters, updates), moments, scalars)
    if state.compute is not None:
        new = new._replace(compute=cast_masters(specs, new.masters, placement))
    if state.largest is not None:  # here the kernel that writes the masters has them at hand
        masters = tree.restrict(new.masters, state.largest)
        new = new._replace(largest=jax.tree.map(find_largest, masters))
    return offload.store_like(new, state)


def _settle(old: Updatable, masters: tree.Tree, moments: tree.Tree, scalars: Scalars) -> Updatable:
    """Return the new masters and moments if the step is good, otherwise the old ones, with the average."""
    select = functools.partial(jnp.where, scalars.good)
    masters, moments = jax.tree.map(select, (masters, moments), (old.masters, old.moments))
    return Updatable(masters, moments, average=move_average(old.average, masters, scalars.weight, scalars.good))


def new_weight(decay: float, updates: jax.Array) -> jax.Array:
    """Return the weight of the new parameters in the average, float32.

    The average starts as the initial parameters. So that they do not dominate it for the first 1 / (1 - decay) updates,
    the decay of update n, from 0, is at most (1 + n) / (10 + n). This is the warm-up of
    `tf.train.ExponentialMovingAverage` (with `num_updates`) and of `diffusers.EMAModel`.

    Args:
        updates: number of updates before this one.
    """
    # 1 - decay is rounded once: float32 has only three or four digits of 1 - 0.9999.
    return jnp.maximum(jnp.float32(1 - decay), 9 / (10 + updates.astype(jnp.float32)))


def move_average(
    average: Params | None, masters: Params, weight: jax.Array | float, good: jax.Array | bool
) -> Params | None:
    """Return the average after an update that gave these masters: (1 - weight) × average + weight × masters.

    Returns None if there is no average.

    Args:
        weight: weight of the masters.
        good: bool; if False, the average stays bitwise unchanged.
    """

    def move(average: jax.Array, master: jax.Array) -> jax.Array:
        return jnp.where(good, average + weight * (master - average), average)

    return None if average is None else jax.tree.map(move, average, masters)
