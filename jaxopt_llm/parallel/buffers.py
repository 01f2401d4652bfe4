"""What a GPU program holds at the moment when it holds most, buffer by buffer.

`memory_analysis()` gives sums alone. Which buffers they are, XLA writes down where it is asked to dump what it compiles
(`xla_dump_to`): the buffers with their allocations, and from when to when each is
alive. The notation is that of the jaxlibs of jax 0.10.2 and 0.11.2.
"""

import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxopt_llm.parallel import topology

HOST = "color 5,"  # how XLA writes that an allocation is in host memory


@dataclass(frozen=True)
class Buffer:
    """A temporary on the device: no argument, no output, no constant."""

    bytes: int
    dtype: str  # in XLA's names: "f32", "bf16"
    shape: tuple[int, ...]
    opcode: str
    source: str  # the JAX operation that it comes from, with its named scopes; a loop carries its own; "" if unknown


def compile_and_list(
    lowered: jax.stages.Lowered, compile: Callable[..., jax.stages.Compiled] = topology.compile
) -> tuple[jax.stages.Compiled, tuple[Buffer, ...]]:
    """Compiles a program, by default one lowered for a topology, and lists the temporaries that are alive at its peak.

    Their sum is less than `hlo.Memory.temporaries` by what lies unused between them.

    compile: takes the lowered program, and options for the compiler.
    """
    with tempfile.TemporaryDirectory() as folder, topology.without_cache():  # which dumps nothing
        compiled = compile(lowered, {"xla_dump_to": folder})
        return compiled, tuple(
            _alive_at_peak(*(_read(Path(folder), name) for name in ("live-range", "buffer-assignment", "values")))
        )


def _read(folder: Path, name: str) -> str:
    """The dump of this name of the one module that has it."""
    found = [*folder.glob(f"*{name}.txt")]
    if len(found) != 1:
        raise ValueError(f"XLA dumped {len(found)} files *{name}.txt, expected one")
    return found[0].read_text()


_RANGE = re.compile(r"^ +(\S+?)(?:\{([\d,]*)\})?:(\d+)-(\d+)$", re.MULTILINE)  # name{index}:first-last
_VALUE = re.compile(
    r"^ value: <\d+ (\S+?)(?:\{([\d,]*)\})? .*?\(size=(\d+),offset=(\d+)\): ([a-z]\w*)\[([\d,]*)\]", re.MULTILINE
)  # a tuple, which is a table of pointers, is none
_DEFINITION = re.compile(r"^ from instruction: (?:ROOT )?%?(\S+) = (.*)$", re.MULTILINE)

_Key = tuple[str, str]  # an instruction, and the index in its result where that is a tuple


@dataclass(frozen=True)
class _Temporary:
    bytes: int
    offset: int
    dtype: str
    shape: tuple[int, ...]


def _alive_at_peak(live_ranges: str, assignment: str, values: str) -> Iterator[Buffer]:
    """The moments are XLA's: positions in its schedule, bodies of loops before the loops. (Of the peak that it names
    itself, what outer loops carry is left out.)"""
    temporaries = dict(_temporaries(assignment))
    ranges = [
        (int(first), int(last), temporaries[name, index], name)
        for name, index, first, last in _RANGE.findall(live_ranges)
        if (name, index) in temporaries
    ]

    def alive(moment: int) -> list[tuple[_Temporary, str]]:
        """Of those at one place, an operand and a result that is written over it, the first alone."""
        found = ((each, name) for first, last, each, name in ranges if first <= moment <= last)
        return list({each.offset: (each, name) for each, name in found}.values())

    moments = {first for first, *_ in ranges}
    most = max(map(alive, moments), key=lambda found: sum(each.bytes for each, _ in found), default=[])
    instructions = dict(_definitions(values))
    # The parameter of a loop's body has no source; the loop has, and its result lies at the same place.
    sources = {each: instructions[name][1] for *_, each, name in ranges if instructions.get(name, ("", ""))[1]}
    for each, name in most:
        opcode, source = instructions.get(name, ("", ""))
        inherited = sources.get(each, "") if opcode == "parameter" else ""
        yield Buffer(each.bytes, each.dtype, each.shape, opcode, source or inherited)


def _temporaries(assignment: str) -> Iterator[tuple[_Key, _Temporary]]:
    """Every array in what XLA allocates by itself on the device, with its place there."""
    for allocation in re.split(r"^allocation ", assignment, flags=re.MULTILINE)[1:]:
        kind = allocation.partition("\n")[0]
        if "preallocated-temp" in kind and HOST not in kind:
            for name, index, size, offset, dtype, shape in _VALUE.findall(allocation):
                dimensions = tuple(map(int, re.findall(r"\d+", shape)))
                yield (name, index), _Temporary(int(size), int(offset), dtype, dimensions)


def _definitions(values: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Name, opcode and source of every instruction that gives a value."""
    for name, text in _DEFINITION.findall(values):
        opcode = re.search(r"(?:^|[\s)}])([a-z][\w-]*)\(", text)
        source = re.search(r'op_name="([^"]*)"', text)
        yield name, (opcode[1] if opcode else "", source[1] if source else "")
