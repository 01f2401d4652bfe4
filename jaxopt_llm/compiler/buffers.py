"""Buffers that a GPU program holds at its peak of memory.

`memory_analysis()` reports only sums. XLA lists the buffers themselves in the dump that it writes with the option
`xla_dump_to`: each buffer with its allocation, and the first and last moment at which it is alive. The notation is that
of the jaxlibs of jax 0.10.2 and 0.11.2.
"""

import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxopt_llm.compiler import hlo, topology

_HOST_COLOR = "color 5,"  # XLA's mark of an allocation in host memory


@dataclass(frozen=True)
class Buffer:
    """A temporary on the device: not an argument, an output or a constant.

    Attributes:
        dtype: in XLA's names: "f32", "bf16".
        source: the JAX operation that made it, with its named scopes. A buffer that a loop carries has the source of
            the loop. "" if unknown.
    """

    bytes: int
    dtype: str
    shape: tuple[int, ...]
    opcode: str
    source: str


@dataclass(frozen=True)
class Peak:
    """A compiled program at the moment when it holds most memory.

    Attributes:
        memory: bytes on each device. The temporaries include the workspaces of cuDNN's attention, which a program that
            was compiled without a GPU lacks.
        temporaries: those that are alive. Their sum is less than `memory.temporaries`: the difference is unused space
            between them.
    """

    compiled: jax.stages.Compiled
    memory: hlo.Memory
    temporaries: tuple[Buffer, ...]


def find_peak(
    lowered: jax.stages.Lowered, compile: Callable[..., jax.stages.Compiled] = topology.compile_without_gpu
) -> Peak:
    """Compile a program and find its peak of memory.

    Args:
        compile: function of the lowered program and of options for the compiler. The default is for programs that were
            lowered for a topology.
    """
    with tempfile.TemporaryDirectory() as folder, topology.without_cache():  # a program from the cache dumps nothing
        compiled = compile(lowered, {"xla_dump_to": folder})
        names = "live-range", "buffer-assignment", "values"
        live_ranges, assignment, values = (_read_dump(Path(folder), name) for name in names)
    workspaces = hlo.list_missing_workspaces(str(compiled.as_text()))
    temporaries = tuple(_list_alive_at_peak(live_ranges, assignment, values, workspaces))
    memory = hlo.read_memory(compiled)
    if workspaces:
        without = _list_alive_at_peak(live_ranges, assignment, values, {})
        missing = sum(each.bytes for each in temporaries) - sum(each.bytes for each in without)
        memory = dataclasses.replace(memory, temporaries=memory.temporaries + missing)
    return Peak(compiled, memory, temporaries)


def _read_dump(folder: Path, name: str) -> str:
    """Return the text of the dump with this name. Only one module has such a dump."""
    files = [*folder.glob(f"*{name}.txt")]
    if len(files) != 1:
        raise ValueError(f"XLA dumped {len(files)} files *{name}.txt, expected one")
    return files[0].read_text()


_RANGE = re.compile(r"^ +(\S+?)(?:\{([\d,]*)\})?:(\d+)-(\d+)$", re.MULTILINE)  # name{index}:first-last
# Matches arrays only. A tuple is a table of pointers and does not match.
_VALUE = re.compile(
    r"^ value: <\d+ (\S+?)(?:\{([\d,]*)\})? .*?\(size=(\d+),offset=(\d+)\): ([a-z]\w*)\[([\d,]*)\]", re.MULTILINE
)
_DEFINITION = re.compile(r"^ from instruction: (?:ROOT )?%?(\S+) = (.*)$", re.MULTILINE)

_Key = tuple[str, str]  # name of an instruction; index into its result if that is a tuple, otherwise ""


@dataclass(frozen=True)
class _Temporary:
    bytes: int
    offset: int
    dtype: str
    shape: tuple[int, ...]


def _list_alive_at_peak(
    live_ranges: str, assignment: str, values: str, workspaces: Mapping[str, int]
) -> Iterator[Buffer]:
    """Yield the temporaries that are alive at the moment with the largest sum of bytes.

    workspaces: bytes that a call holds while it runs, in addition to the buffers of the dump.

    Moments are positions in XLA's schedule, in which the body of a loop comes before the loop. The peak that XLA itself
    names is not used: it leaves out the buffers that outer loops carry.
    """
    temporaries = dict(_parse_temporaries(assignment))
    ranges = [
        (int(first), int(last), temporaries[name, index], name)
        for name, index, first, last in _RANGE.findall(live_ranges)
        if (name, index) in temporaries
    ]
    starts = {name: int(first) for name, _, first, _ in _RANGE.findall(live_ranges) if name in workspaces}
    for number, (name, first) in enumerate(starts.items(), 1):
        size = workspaces[name]
        ranges.append((first, first, _Temporary(size, -number, "u8", (size,)), name))  # no other buffer has this offset

    def list_alive(moment: int) -> list[tuple[_Temporary, str]]:
        """List one temporary per offset. An operand and the result that overwrites it share an offset."""
        alive = ((each, name) for first, last, each, name in ranges if first <= moment <= last)
        return list({each.offset: (each, name) for each, name in alive}.values())

    moments = {first for first, *_ in ranges}
    peak = max(map(list_alive, moments), key=lambda alive: sum(each.bytes for each, _ in alive), default=[])
    instructions = dict(_parse_definitions(values))
    # The parameter of a loop's body has no source, but the loop has one, and its result has the same location.
    sources = {each: instructions[name][1] for *_, each, name in ranges if instructions.get(name, ("", ""))[1]}
    for each, name in peak:
        opcode, source = instructions.get(name, ("", ""))
        inherited = sources.get(each, "") if opcode == "parameter" else ""
        yield Buffer(each.bytes, each.dtype, each.shape, opcode, source or inherited)


def _parse_temporaries(assignment: str) -> Iterator[tuple[_Key, _Temporary]]:
    """Yield every array in the device memory that XLA allocates for temporaries, with its offset there."""
    for allocation in re.split(r"^allocation ", assignment, flags=re.MULTILINE)[1:]:
        kind = allocation.partition("\n")[0]
        if "preallocated-temp" in kind and _HOST_COLOR not in kind:
            for name, index, size, offset, dtype, shape in _VALUE.findall(allocation):
                dimensions = tuple(map(int, re.findall(r"\d+", shape)))
                yield (name, index), _Temporary(int(size), int(offset), dtype, dimensions)


def _parse_definitions(values: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the name of every instruction that defines a value, with its opcode and its source."""
    for name, text in _DEFINITION.findall(values):
        opcode = re.search(r"(?:^|[\s)}])([a-z][\w-]*)\(", text)
        source = re.search(r'op_name="([^"]*)"', text)
        yield name, (opcode[1] if opcode else "", source[1] if source else "")
