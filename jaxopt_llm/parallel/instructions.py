"""The text of a compiled program as instructions, and how often each of them runs.

XLA's terms are kept: a module has computations, a computation has instructions. The notations are those that jax 0.10.2
and 0.11.2 print for CPU and GPU.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# ---- Text to instructions.


@dataclass(frozen=True)
class Array:
    dtype: str
    shape: tuple[int, ...]
    layout: str = ""  # {1,0}; {1,0:S(5)} in host memory

    @property
    def bytes(self) -> int:
        if self.dtype == "pred":
            return math.prod(self.shape)
        bits = re.search(r"\d+", self.dtype)  # the first number of bf16, s4, f8e4m3fn; token and opaque have none
        return (math.prod(self.shape) * int(bits[0] if bits else 0) + 7) // 8


@dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]  # names in the same computation; of a constant, its value
    attributes: str
    is_root: bool

    def find(self, pattern: str) -> str | None:
        match = re.search(pattern, self.attributes)
        return match[1] if match else None

    @property
    def source(self) -> str:
        return self.find(r'op_name="([^"]*)"') or ""


Computation = Mapping[str, Instruction]
Module = Mapping[str, Computation]  # in the order of the text, callees before callers; the entry is named ENTRY

_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) .*\{$")  # %name (parameters) -> type {
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = ")  # %name = type opcode(operands), attributes
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?")  # f32[8,<=16]{1,0}


def parse(text: str) -> Module:
    module: dict[str, dict[str, Instruction]] = {}
    computation: dict[str, Instruction] = {}
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            computation[match[2]] = _parse_instruction(match[2], line[match.end() :], is_root=bool(match[1]))
        elif match := _HEADER.match(line):
            computation = module["ENTRY" if match[1] else match[2]] = {}
    if "ENTRY" not in module:
        raise ValueError("this is not the text of an HLO module: it has no ENTRY computation")
    return module


def _parse_instruction(name: str, text: str, is_root: bool) -> Instruction:
    type_end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    opcode_end = text.index("(", type_end)
    operands_end = _closing(text, opcode_end)
    operands = re.sub(r"/\*.*?\*/", "", text[opcode_end:operands_end])  # /*index=5*/
    return Instruction(
        name=name,
        opcode=text[type_end:opcode_end].strip(),
        results=tuple(
            Array(dtype, tuple(integers(shape)), layout) for dtype, shape, layout in _ARRAY.findall(text[:type_end])
        ),
        operands=tuple(re.findall(r"[\w.-]+", operands)),
        attributes=text[operands_end:],
        is_root=is_root,
    )


def _closing(text: str, start: int) -> int:
    """The index past the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    raise ValueError(f"unbalanced parentheses in the HLO text at {text[start : start + 80]!r}")


def integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


# ---- How often a computation runs.


@dataclass(frozen=True)
class Run:
    times: int | None = 0  # over all its callers; None where a loop has no fixed trip count
    fused: bool = False
    asynchronous: bool = False


def sometimes(taken: int, times: int) -> str:
    """The name of a scope around a `jax.lax.cond` or `jax.lax.while_loop`, to say in how many of a loop's rounds it
    holds, or how many times it goes round in so many runs: a program's text does not tell."""
    return f"{taken}_of_{times}_times"


def walk(text: str) -> Iterator[tuple[Computation, Instruction, Run]]:
    """Every instruction that can run, with the computation that it is in."""
    module = parse(text)
    runs = _runs(module)
    for name, computation in module.items():
        if runs[name].times != 0:
            yield from ((computation, instruction, runs[name]) for instruction in computation.values())


def _runs(module: Module) -> Mapping[str, Run]:
    runs = dict.fromkeys(module, Run()) | {"ENTRY": Run(times=1)}
    for name, computation in reversed(list(module.items())):  # callers first
        run = runs[name]
        for instruction in computation.values():
            trips = _trip_count(module, computation, instruction) if instruction.opcode == "while" else 1
            for callee in _called(instruction):
                past = runs[callee]
                times = None
                if past.times is not None and run.times is not None and trips is not None:
                    times = past.times + _taken(instruction, callee, run.times * trips)
                runs[callee] = Run(
                    times=times,
                    fused=past.fused or run.fused or instruction.opcode.startswith("fusion"),
                    asynchronous=past.asynchronous or run.asynchronous or instruction.opcode.endswith("-start"),
                )
    return runs


def _called(instruction: Instruction) -> list[str]:
    attributes = instruction.attributes.partition(", metadata=")[0]
    names = re.findall(r"\b(?:calls|to_apply|condition|body|\w+_computations?)=(\{[^}]*\}|[%\w.-]+)", attributes)
    return re.findall(r"[\w.-]+", " ".join(names))


def _taken(instruction: Instruction, callee: str, times: int) -> int:
    """How often a computation is called in so many runs of its caller's instruction: every branch of a conditional each
    time, but of one that says how often it is taken."""
    said = instruction.find(r'op_name="(?:[^"]*/)?(\d+_of_\d+)_times/cond"')  # see sometimes
    if instruction.opcode != "conditional" or said is None:
        return times
    taken, of = integers(said)
    # A condition's two, or by its index the first and the second.
    runs_it = instruction.find(r"\b(?:true_computation=%?|branch_computations=\{[^,]*, %?)([\w.-]+)")
    return times * (taken if callee == runs_it else of - taken) // of


def _trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """What XLA states in a compiled program; else read off a loop that counts by 1 up to a constant."""
    if known := loop.find(r'"known_trip_count":\{"n":"(\d+)"\}'):
        return int(known)
    if said := loop.find(r'op_name="(?:[^"]*/)?(\d+_of_\d+)_times/while"'):  # see sometimes
        taken, of = integers(said)
        return taken // of
    condition, body = (module[loop.find(rf"\b{part}=%?([\w.-]+)") or ""] for part in ("condition", "body"))
    initial, update = computation[loop.operands[0]], _root(body)
    test = _scalar(module, condition, _root(condition).name)
    if (initial.opcode, update.opcode) != ("tuple", "tuple") or not isinstance(test, tuple) or test[0] != "LT":
        return None
    _, counter, limit = test
    if not isinstance(counter, tuple) or counter[0] != "element":
        return None
    start, step = (
        _scalar(module, where, each.operands[counter[1]]) for where, each in ((computation, initial), (body, update))
    )
    counts = step in (("add", counter, 1), ("add", 1, counter))
    return limit - start if counts and isinstance(start, int) and isinstance(limit, int) else None


_Scalar = Any  # an integer, ("element", index) of the loop's state, ("add" or "LT", _Scalar, _Scalar), or None


def _scalar(module: Module, computation: Computation, name: str, arguments: Sequence[_Scalar] = ()) -> _Scalar:
    """What a loop counts with, through the copies and fusions that XLA wraps it in. arguments: of a fusion."""
    instruction = computation[name]

    def operands() -> list[_Scalar]:
        return [_scalar(module, computation, each, arguments) for each in instruction.operands]

    match instruction.opcode:
        case "constant":
            text = instruction.operands[0]
            return int(text) if text.isdigit() else None
        case "get-tuple-element":
            return "element", int(instruction.find(r"\bindex=(\d+)") or -1)
        case "parameter":
            return arguments[int(instruction.operands[0])] if arguments else None
        case "copy":
            return operands()[0]
        case "fusion":
            callee = module[_called(instruction)[0]]
            return _scalar(module, callee, _root(callee).name, operands())
        case "add":
            return "add", *operands()
        case "compare":
            return (instruction.find(r"direction=(\w+)"), *operands())
    return None


def _root(computation: Computation) -> Instruction:
    return next(instruction for instruction in computation.values() if instruction.is_root)


def times(instruction: Instruction, run: Run) -> int:
    if run.times is None:
        raise ValueError(f"{instruction.name} ({instruction.source}) is in a loop without a fixed trip count")
    return run.times
