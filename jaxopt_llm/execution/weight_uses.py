"""Uses of the parameters of a loss, found in its jaxpr: the loops, products and dtypes by which it reads each."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core.primitives import dot_general_p, jit_p, remat_p, scan_p
from jax.interpreters import partial_eval

from jaxopt_llm.core.jaxpr import follow_values, list_equations, split_scan, typeof
from jaxopt_llm.model.linear import plain_groups

PRODUCT, CONVOLUTION, LOOKUP, OTHER = "product", "convolution", "lookup", "other"


@dataclass(frozen=True)
class Use:
    """One equation that reads a parameter.

    kind: PRODUCT, a matrix product; CONVOLUTION; LOOKUP, rows of a table; or OTHER.
    leading: number of leading dimensions that loops took before.
    contracting: the dimensions of the parameter that a product sums over, or that a row of a table has.
    exact: whether the code asks for a precision of the product. It is then computed as it is written.
    groups: the dimension of the matrices of which each row is multiplied by one, as by that of its expert.
    in_remat: whether it is within a rematerialised function.
    dtype: dtype in which the equation sees it.
    """

    kind: str
    leading: int
    contracting: tuple[int, ...] = ()
    in_remat: bool = False
    dtype: str = ""
    exact: bool = False
    groups: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Traced:
    """A value that is a parameter. dims: for each of its dimensions, that of the parameter; None for one of size 1."""

    parameter: int
    leading: int
    dims: tuple[int | None, ...]


@dataclass
class UseFinder:
    """Walks a jaxpr. uses: found so far, by the index of the parameter among the arguments."""

    uses: dict[int, list[Use]] = field(default_factory=dict)

    def walk(self, jaxpr: Jaxpr, arguments: Sequence[Any], in_remat: bool = False) -> list[Any]:
        """Follow the arguments (`_Traced`, or None for other values) through a jaxpr. Return its results like them."""
        return follow_values(jaxpr, arguments, functools.partial(self._apply, in_remat=in_remat), None)

    def _apply(self, eqn: JaxprEqn, inputs: list[Any], in_remat: bool) -> list[Any]:
        if all(each is None for each in inputs):
            return [None] * len(eqn.outvars)
        if eqn.primitive is jit_p:
            return self.walk(eqn.params["jaxpr"].jaxpr, inputs, in_remat)
        if eqn.primitive is remat_p:
            return self.walk(eqn.params["jaxpr"], inputs, in_remat=True)
        if eqn.primitive is scan_p:
            return self._scan(eqn, inputs, in_remat)
        first = inputs[0]
        if eqn.primitive is jax.lax.transpose_p:
            return [replace(first, dims=tuple(first.dims[dim] for dim in eqn.params["permutation"]))]
        if eqn.primitive is jax.lax.convert_element_type_p:
            return [first]
        for position, traced in enumerate(inputs):
            if traced is not None:
                kind, dims, groups = _classify(eqn, position)
                contracting, groups = (
                    tuple(sorted(traced.dims[dim] for dim in each if traced.dims[dim] is not None))
                    for each in (dims, groups)
                )
                dtype = typeof(eqn.invars[position]).dtype.name
                use = Use(kind, traced.leading, contracting, in_remat, dtype, asks_for_precision(eqn), groups)
                self.uses.setdefault(traced.parameter, []).append(use)
        return [None] * len(eqn.outvars)

    def _scan(self, eqn: JaxprEqn, inputs: list[Any], in_remat: bool) -> list[Any]:
        constants, carried = split_scan(eqn)

        def enter(position: int, traced: Any) -> Any:
            if traced is None or position < constants:
                return traced
            if position >= constants + carried and traced.dims[:1] == (traced.leading,):
                return replace(traced, leading=traced.leading + 1, dims=traced.dims[1:])
            # The loop changes it, or takes another dimension than the first: it reads the whole parameter.
            self.uses.setdefault(traced.parameter, []).append(Use(OTHER, traced.leading, (), in_remat))
            return None

        def leave(position: int, result: Any) -> Any:
            """Return what the stacked results of the iterations are: a parameter, if each returns its own layer."""
            if result is None or position < carried or result not in entered[constants + carried :]:
                return None
            return replace(result, leading=result.leading - 1, dims=(result.leading - 1, *result.dims))

        entered = [enter(position, traced) for position, traced in enumerate(inputs)]
        results = self.walk(eqn.params["jaxpr"].jaxpr, entered, in_remat)
        return [leave(position, result) for position, result in enumerate(results)]


def asks_for_precision(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a product with a precision of its own, as `jax.lax.Precision.HIGHEST`."""
    if eqn.primitive is not dot_general_p:
        return False
    return eqn.params["precision"] not in (None, (jax.lax.Precision.DEFAULT,) * 2)


def _classify(eqn: JaxprEqn, position: int) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return the kind of a use, and the operand's dimensions that are contracted or make up a row, and its groups."""
    if eqn.primitive is dot_general_p:
        return PRODUCT, tuple(eqn.params["dimension_numbers"][0][position]), ()
    if position == 1 and plain_groups.find_grouped_matmul(eqn):
        return PRODUCT, plain_groups.CONTRACTING, plain_groups.GROUPS
    if eqn.primitive.name == "conv_general_dilated" and position == 1:
        return CONVOLUTION, tuple(eqn.params["dimension_numbers"].rhs_spec[1:]), ()
    if eqn.primitive.name == "gather" and position == 0:
        collapsed = eqn.params["dimension_numbers"].collapsed_slice_dims
        return LOOKUP, tuple(dim for dim in range(len(typeof(eqn.invars[0]).shape)) if dim not in collapsed), ()
    return OTHER, (), ()


def find_uses(closed: ClosedJaxpr, parameters: int) -> tuple[list[list[Use]], list[int | None]]:
    """Follow the first `parameters` arguments of a jaxpr.

    Returns:
        The uses of each, an empty list for one that no equation reads; and for each result of the jaxpr the argument
        that it is, unchanged, or None.
    """
    finder, invars = UseFinder(), closed.jaxpr.invars
    traced = [_Traced(index, 0, tuple(range(len(typeof(var).shape)))) for index, var in enumerate(invars[:parameters])]
    results = finder.walk(closed.jaxpr, [*traced, *[None] * (len(invars) - parameters)])
    unchanged = [result.parameter if result in traced else None for result in results]
    return [finder.uses.get(index, []) for index in range(parameters)], unchanged


def depends_on(closed: ClosedJaxpr, result: int, arguments: int) -> bool:
    """Return whether a result of a jaxpr depends on any of its first `arguments`."""
    keep = [index == result for index in range(len(closed.jaxpr.outvars))]
    _, used = partial_eval.dce_jaxpr(drop_callbacks(closed).jaxpr, keep)
    return any(used[:arguments])


def drop_results(closed: ClosedJaxpr, keep: Sequence[bool]) -> ClosedJaxpr:
    """Return the jaxpr with only some of its results, without the equations that only the others need."""
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, list(keep), instantiate=True)
    return ClosedJaxpr(jaxpr, closed.consts)


def drop_callbacks(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the jaxpr without callbacks that return nothing, such as that of `jax.debug.print`.

    No result depends on them, but an elimination of dead code keeps them, with all that they print.
    """
    gone = [eqn for eqn in list_equations(closed.jaxpr) if _is_silent(eqn)]
    effects = frozenset[Any]().union(*(eqn.effects for eqn in gone))

    def drop(value: Any) -> Any:
        if isinstance(value, Jaxpr):
            kept = [
                eqn.replace(
                    params={name: drop(each) for name, each in eqn.params.items()}, effects=eqn.effects - effects
                )
                for eqn in value.eqns
                if not _is_silent(eqn)
            ]
            return value.replace(eqns=kept, effects=value.effects - effects)
        if isinstance(value, ClosedJaxpr):  # in JAX 0.11 they are one type
            return ClosedJaxpr(drop(value.jaxpr), value.consts)
        if isinstance(value, tuple | list) and any(isinstance(each, Jaxpr | ClosedJaxpr) for each in value):
            return type(value)(map(drop, value))
        return value

    dropped: ClosedJaxpr = drop(closed) if gone else closed
    return dropped


def _is_silent(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a callback without a result."""
    return not eqn.outvars and ("callback" in eqn.primitive.name or eqn.primitive.name == "debug_print")
