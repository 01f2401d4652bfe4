"""Jaxprs: the programs that JAX traces."""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.core.primitives import jit_p


def inline_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a jaxpr that computes the same without calls of jitted functions."""

    def run(jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))
        for eqn in jaxpr.eqns:
            inputs = [atom.val if isinstance(atom, Literal) else values[atom] for atom in eqn.invars]
            if eqn.primitive is jit_p:
                inner = eqn.params["jaxpr"]
                results = run(inner.jaxpr, inner.consts, inputs)
            else:
                with eqn.ctx.manager:
                    results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
                results = results if eqn.primitive.multiple_results else [results]
            values |= zip(eqn.outvars, results, strict=True)
        return [atom.val if isinstance(atom, Literal) else values[atom] for atom in jaxpr.outvars]

    arguments = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *arguments: run(closed.jaxpr, closed.consts, arguments))(*arguments)


def list_constants(closed: ClosedJaxpr) -> list[Any]:
    """Return the constants of a jaxpr and of those inside of its equations, also scalars."""
    found: dict[int, Any] = {}

    def visit(jaxpr: Jaxpr, constants: Sequence[Any]) -> None:
        found.update((id(each), each) for each in constants)
        for eqn in jaxpr.eqns:
            found.update((id(atom.val), atom.val) for atom in eqn.invars if isinstance(atom, Literal))
            for value in eqn.params.values():
                for part in value if isinstance(value, tuple | list) else (value,):
                    if isinstance(part, ClosedJaxpr):
                        visit(part.jaxpr, part.consts)
                    elif isinstance(part, Jaxpr):
                        visit(part, ())

    visit(closed.jaxpr, closed.consts)
    return [*found.values()]


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
