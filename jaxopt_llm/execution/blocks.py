"""Blocks of a loss that was not written as a loop: equations that read the parameters of one layer of a list.

A model that calls equal layers one after the other is traced to one long jaxpr. The parameters of a layer have a tag,
the name of their block. The equations from the first to the last one that reads a tag make up the block. The cuts
between blocks are where the fewest bytes are live, because a rematerialised block keeps what enters it.
"""

import itertools
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core.primitives import remat_p

from jaxopt_llm.core.jaxpr import typeof


@dataclass(frozen=True)
class Block:
    """The equations [start, stop) of a jaxpr.

    Attributes:
        moves: those of them that only cast or transpose weights that are read after the block.
        equations: the others.
        entering: variables that they read and do not make.
        leaving: variables that they make and that are read after the block.
    """

    start: int
    stop: int
    moves: list[JaxprEqn]
    equations: list[JaxprEqn]
    entering: list[Any]
    leaving: list[Any]


def find_blocks(jaxpr: Jaxpr, tags: Sequence[str | None]) -> list[Block]:
    """Return the blocks, in order and disjoint.

    A layer that is called twice, with others in between, is two blocks. One whose equations are rematerialised already
    is none.

    Args:
        tags: for each argument the block of this parameter, "" for one of no block, and None for no parameter.
    """
    weights = _follow_weights(jaxpr, tags)
    readers = _list_readers(jaxpr, weights)
    places = [-1, *readers, len(jaxpr.eqns)]
    before = dict(zip(readers, places[:-2], strict=True))
    after = dict(zip(readers, places[2:], strict=True))
    live = count_live_bytes(jaxpr, weights)

    def cut(after: int, until: int) -> int:
        """Return the last place with the fewest live bytes after an equation and up to another one."""
        return min(range(until, after, -1), key=live.__getitem__)

    of_blocks = [(index, tag) for index, tag in readers.items() if tag]
    runs = [[index for index, _ in run] for _, run in itertools.groupby(of_blocks, key=lambda reader: reader[1])]
    return [
        _make_block(jaxpr, cut(before[run[0]], run[0]), cut(run[-1], after[run[-1]]), weights)
        for run in runs
        if any(jaxpr.eqns[index].primitive is not remat_p for index in run)
    ]


def _make_block(jaxpr: Jaxpr, start: int, stop: int, weights: Container[Any]) -> Block:
    later = {var for eqn in jaxpr.eqns[stop:] for var in _list_variables(eqn.invars)}
    later |= {*_list_variables(jaxpr.outvars)}
    moves: list[JaxprEqn] = []
    equations: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns[start:stop]):
        if any(var in weights and var in later for var in eqn.outvars):
            moves.insert(0, eqn)
            later |= {*_list_variables(eqn.invars)}  # an earlier move of the same weight
        else:
            equations.insert(0, eqn)
    made = dict.fromkeys(var for eqn in equations for var in eqn.outvars)
    read = dict.fromkeys(var for eqn in equations for var in _list_variables(eqn.invars))
    return Block(
        start,
        stop,
        moves,
        equations,
        entering=[var for var in read if var not in made],
        leaving=[var for var in made if var in later],
    )


def _follow_weights(jaxpr: Jaxpr, tags: Sequence[str | None]) -> dict[Any, str]:
    """Return the tag of each variable that is a parameter, or is made of one parameter alone, as by a cast."""
    weights = {var: tag for var, tag in zip(jaxpr.invars, tags, strict=True) if tag is not None}
    for eqn in jaxpr.eqns:
        if (read := _list_variables(eqn.invars)) and len(read) == len(eqn.outvars) == 1 and read[0] in weights:
            weights[eqn.outvars[0]] = weights[read[0]]
    return weights


def _list_readers(jaxpr: Jaxpr, weights: Mapping[Any, str]) -> dict[int, str]:
    """Return the tag by equation of those that read weights and something else, in order.

    It is "" for those that read weights of no or of several blocks.
    """
    readers: dict[int, str] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        tags = {weights[var] for var in _list_variables(eqn.invars) if var in weights}
        if tags and not all(var in weights for var in eqn.outvars):
            readers[index] = tags.pop() if len(tags) == 1 else ""
    return readers


def count_live_bytes(jaxpr: Jaxpr, weights: Container[Any] = ()) -> list[int]:
    """Return, for the place before each equation and after the last one, the bytes that are made before and read after.

    Arguments of the jaxpr and these weights do not count.
    """
    made = {var: index for index, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars if var not in weights}
    last: dict[Any, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        last |= {atom: index for atom in eqn.invars if not isinstance(atom, Literal) and atom in made}
    last |= {atom: len(jaxpr.eqns) for atom in jaxpr.outvars if not isinstance(atom, Literal) and atom in made}
    change = [0] * (len(jaxpr.eqns) + 2)
    for var, index in last.items():
        size = math.prod(typeof(var).shape) * typeof(var).dtype.itemsize
        change[made[var] + 1] += size
        change[index + 1] -= size
    return list(itertools.accumulate(change[:-1]))


def _list_variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]
