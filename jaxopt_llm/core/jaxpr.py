"""Jaxprs: the programs that JAX traces."""

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.core.primitives import jit_p

T = TypeVar("T")
Apply = Callable[[JaxprEqn, list[Any]], Iterable[Any]]  # (equation, its inputs) -> its results


def run_jaxpr(
    jaxpr: Jaxpr,
    constants: Sequence[Any],
    arguments: Sequence[Any],
    apply: Apply,
) -> list[Any]:
    """Evaluate a jaxpr: `apply` returns the results of each equation, of its inputs."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))
    run_equations(jaxpr.eqns, values, apply)
    return read_atoms(jaxpr.outvars, values)


def run_equations(equations: Sequence[JaxprEqn], values: dict[Any, Any], apply: Apply) -> None:
    """Evaluate equations, and add their results to the values by variable."""
    for eqn in equations:
        stack = str(eqn.source_info.name_stack)
        with jax.named_scope(stack) if stack else contextlib.nullcontext(), eqn.ctx.manager:
            results = apply(eqn, read_atoms(eqn.invars, values))
        values |= zip(eqn.outvars, results, strict=True)


def read_atoms(atoms: Sequence[Any], values: Mapping[Any, Any]) -> list[Any]:
    """Return the values of inputs of equations, or of results of a jaxpr."""
    return [atom.val if isinstance(atom, Literal) else values[atom] for atom in atoms]


def follow_values(jaxpr: Jaxpr, arguments: Sequence[T], apply: Apply, unknown: T) -> list[T]:
    """Follow descriptions of values through a jaxpr, which computes nothing. Return those of its results.

    Args:
        arguments: descriptions of the arguments.
        apply: returns the descriptions of the results of an equation, of those of its inputs.
        unknown: description of literals and constants.
    """
    values: dict[Any, T] = dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atoms: Sequence[Any]) -> list[T]:
        return [unknown if isinstance(atom, Literal) else values.get(atom, unknown) for atom in atoms]

    for eqn in jaxpr.eqns:
        values |= zip(eqn.outvars, apply(eqn, read(eqn.invars)), strict=True)
    return read(jaxpr.outvars)


def bind_equation(eqn: JaxprEqn, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """Apply an equation to arrays."""
    results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def inline_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a jaxpr that computes the same without calls of jitted functions."""

    def apply(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
        if eqn.primitive is jit_p:
            return run_jaxpr(eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts, inputs, apply)
        return bind_equation(eqn, inputs)

    return trace_like(closed.jaxpr, lambda *arguments: run_jaxpr(closed.jaxpr, closed.consts, arguments, apply))


def trace_like(jaxpr: Jaxpr, function: Callable[..., Any]) -> ClosedJaxpr:
    """Trace a function of arguments of the same shapes and dtypes as a jaxpr's."""
    return jax.make_jaxpr(function)(*(_abstract(var) for var in jaxpr.invars))


def _abstract(var: Any) -> jax.ShapeDtypeStruct:
    aval = typeof(var)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def list_constants(closed: ClosedJaxpr) -> list[Any]:
    """Return the constants of a jaxpr and of those inside of its equations, also scalars."""
    found: dict[int, Any] = {}

    def visit(jaxpr: Jaxpr, constants: Sequence[Any]) -> None:
        found.update((id(each), each) for each in constants)
        for eqn in jaxpr.eqns:
            found.update((id(atom.val), atom.val) for atom in eqn.invars if isinstance(atom, Literal))
            for inner, own in list_inner(eqn):
                visit(inner, own)

    visit(closed.jaxpr, closed.consts)
    return [*found.values()]


def list_inner(eqn: JaxprEqn) -> Iterator[tuple[Jaxpr, Sequence[Any]]]:
    """Yield the jaxprs inside of an equation, each with its constants."""
    for value in eqn.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, ClosedJaxpr):
                yield part.jaxpr, part.consts
            elif isinstance(part, Jaxpr):
                yield part, ()


def find_called(eqn: JaxprEqn) -> Jaxpr | None:
    """Return what an equation calls once with its own inputs, as jit, remat and custom_vjp_call do; None for others."""
    if eqn.primitive.name in ("scan", "while", "cond", "reduce", "reduce_window"):
        return None
    sizes = len(eqn.invars), len(eqn.outvars)
    return next((inner for inner, _ in list_inner(eqn) if (len(inner.invars), len(inner.outvars)) == sizes), None)


def list_equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield all equations, also those inside of others."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner, _ in list_inner(eqn):
            yield from list_equations(inner)


def hash_jaxpr(closed: ClosedJaxpr) -> str:
    """Return a hash that is equal in two processes if they trace the same program over the same constants."""
    text = re.sub(r"0x[0-9a-f]+", "", str(closed))  # addresses of functions
    digest = hashlib.sha256(text.encode())
    for constant in list_constants(closed):
        is_key = isinstance(constant, jax.Array) and jnp.issubdtype(constant.dtype, jax.dtypes.prng_key)
        digest.update(np.asarray(jax.random.key_data(constant) if is_key else constant).tobytes())
    return digest.hexdigest()


def typeof(atom: Any) -> jax.core.ShapedArray:
    """Return the shape and the dtype of an input or a result of an equation."""
    found: jax.core.ShapedArray = atom.aval
    return found


def split_scan(eqn: JaxprEqn) -> tuple[int, int]:
    """Return the numbers of constants and of carried values of a scan. JAX 0.11 lists them in another parameter."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    constants, carry, _ = eqn.params["ft_in"].unpack()
    return len(constants), len(carry)
