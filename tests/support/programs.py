"""Arrays and number of instructions of a compiled program, read off its text."""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxopt_llm.compiler.instructions import parse_module, walk_instructions


@dataclass(frozen=True)
class ArrayShape:
    """Array that is a result of an instruction. fused: the instruction is inside a fusion, so that the array need not
    exist in memory."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    opcode: str
    fused: bool
    source: str


def list_array_shapes(text: str) -> Iterator[ArrayShape]:
    """Yield every array that is a result of an instruction. A result that is a tuple gives each of its arrays.

    The same memory can appear several times, in tuples and under other shapes (`bitcast`). So look for sizes rather
    than shapes, and take maxima rather than sums.
    """
    for _, instruction, execution in walk_instructions(text):
        for array in instruction.results:
            yield ArrayShape(
                array.dtype, array.shape, array.bytes, instruction.opcode, execution.fused, instruction.source
            )


def count_instructions(text: str) -> int:
    """Return the number of instructions in all computations: the size of the program that XLA compiled.

    An instruction counts once, however often it runs.
    """
    return sum(len(computation) for computation in parse_module(text).values())
