"""Parser of the text of a compiled program: its instructions, and the number of times that each of them runs.

The terms are XLA's: a module has computations, and a computation has instructions. The notations are those that jax
0.10.2 and 0.11.2 print for CPU and GPU.
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
    layout: str = ""  # for example {1,0}; {1,0:S(5)} in host memory

    @property
    def bytes(self) -> int:
        if self.dtype == "pred":
            return math.prod(self.shape)
        bits = re.search(r"\d+", self.dtype)  # the first number in bf16, s4, f8e4m3fn; token and opaque have no number
        return (math.prod(self.shape) * int(bits[0] if bits else 0) + 7) // 8


@dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]  # names in the same computation; for a constant, its value
    attributes: str
    is_root: bool

    def find(self, pattern: str) -> str | None:
        """Return the first group of a pattern's match in the attributes, or None if it does not match."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else None

    @property
    def source(self) -> str:
        """JAX operation that the instruction comes from, with its named scopes; "" if XLA does not name it."""
        return self.find(r'op_name="([^"]*)"') or ""


Computation = Mapping[str, Instruction]
Module = Mapping[str, Computation]  # in the order of the text: callees before callers; the entry is named ENTRY

_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) .*\{$")  # %name (parameters) -> type {
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = ")  # %name = type opcode(operands), attributes
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?")  # f32[8,<=16]{1,0}


def parse_module(text: str) -> Module:
    """Return the computations of an HLO module by name.

    Raises:
        ValueError: the text is not an HLO module.
    """
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
    type_end = _find_closing(text, 0) if text.startswith("(") else text.index(" ")
    opcode_end = text.index("(", type_end)
    operands_end = _find_closing(text, opcode_end)
    operands = re.sub(r"/\*.*?\*/", "", text[opcode_end:operands_end])  # drop comments: /*index=5*/
    return Instruction(
        name=name,
        opcode=text[type_end:opcode_end].strip(),
        results=tuple(
            Array(dtype, tuple(parse_integers(shape)), layout)
            for dtype, shape, layout in _ARRAY.findall(text[:type_end])
        ),
        operands=tuple(re.findall(r"[\w.-]+", operands)),
        attributes=text[operands_end:],
        is_root=is_root,
    )


def _find_closing(text: str, start: int) -> int:
    """Return the index after the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    raise ValueError(f"unbalanced parentheses in the HLO text at {text[start : start + 80]!r}")


def parse_integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


# ---- Number of runs of a computation.


@dataclass(frozen=True)
class Execution:
    """Executions of a computation, over all its callers.

    Attributes:
        times: number of runs; None if a loop has no fixed trip count.
        fused: whether the computation is inside a fusion.
    """

    times: int | None = 0
    fused: bool = False


def taken_scope_name(taken: int, times: int) -> str:
    """Return the name of a scope that records how often a branch or a loop's body runs.

    The text of a program does not contain this number. Around a `jax.lax.cond`, the condition holds in `taken` of
    `times` runs. Around a `jax.lax.while_loop`, the body runs `taken` times in `times` runs of the loop.
    """
    return f"{taken}_of_{times}_times"


def walk_instructions(text: str) -> Iterator[tuple[Computation, Instruction, Execution]]:
    """Yield every instruction that can run, with its computation and that computation's executions."""
    yield from walk_module(parse_module(text))


def walk_module(module: Module) -> Iterator[tuple[Computation, Instruction, Execution]]:
    """Yield the instructions of a module as `walk_instructions` does."""
    executions = count_executions(module)
    for name, computation in module.items():
        if executions[name].times != 0:
            yield from ((computation, instruction, executions[name]) for instruction in computation.values())


def count_executions(module: Module) -> Mapping[str, Execution]:
    """Return the executions of every computation of a module."""
    executions = dict.fromkeys(module, Execution()) | {"ENTRY": Execution(times=1)}
    for name, computation in reversed(list(module.items())):  # callers first
        caller = executions[name]
        for instruction in computation.values():
            is_loop = instruction.opcode == "while" and caller.times != 0
            trips = _find_trip_count(module, computation, instruction) if is_loop else 1
            for callee in list_callees(instruction):
                past = executions[callee]
                times = None
                if past.times is not None and caller.times is not None and trips is not None:
                    times = past.times + _count_calls(instruction, callee, caller.times * trips)
                executions[callee] = Execution(
                    times=times,
                    fused=past.fused or caller.fused or instruction.opcode.startswith("fusion"),
                )
    return executions


def list_callees(instruction: Instruction) -> list[str]:
    """Return the names of the computations that an instruction calls or applies."""
    attributes = instruction.attributes.partition(", metadata=")[0]
    names = re.findall(r"\b(?:calls|to_apply|condition|body|\w+_computations?)=(\{[^}]*\}|[%\w.-]+)", attributes)
    return re.findall(r"[\w.-]+", " ".join(names))


def _count_calls(instruction: Instruction, callee: str, times: int) -> int:
    """Return how often a computation is called in `times` runs of the instruction that calls it.

    Every branch of a conditional counts as called each time, unless the conditional is in a scope that
    `taken_scope_name` named.
    """
    share = instruction.find(r'op_name="(?:[^"]*[/(])?(\d+_of_\d+)_times\)*/cond"')
    if instruction.opcode != "conditional" or share is None:
        return times
    taken, total = parse_integers(share)
    # A conditional names its true computation, or it selects by index: 0 is the first branch, 1 the second.
    taken_branch = instruction.find(r"\b(?:true_computation=%?|branch_computations=\{[^,]*, %?)([\w.-]+)")
    return times * (taken if callee == taken_branch else total - taken) // total


def _find_trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Return the trip count that XLA states in a compiled program or that a scope of `taken_scope_name` states.

    If neither exists, read it off a loop that counts by 1 up to a constant; None for other loops.
    """
    if known := loop.find(r'"known_trip_count":\{"n":"(\d+)"\}'):
        return int(known)
    if share := loop.find(r'op_name="(?:[^"]*[/(])?(\d+_of_\d+)_times\)*/while"'):
        taken, total = parse_integers(share)
        return taken // total
    condition, body = (module[loop.find(rf"\b{part}=%?([\w.-]+)") or ""] for part in ("condition", "body"))
    initial, update = computation[loop.operands[0]], _find_root(body)
    test = _trace_scalar(module, condition, _find_root(condition).name)
    if (initial.opcode, update.opcode) != ("tuple", "tuple") or not isinstance(test, tuple) or test[0] != "LT":
        return None
    _, counter, limit = test
    if not isinstance(counter, tuple) or counter[0] != "element":
        return None
    start = _trace_scalar(module, computation, initial.operands[counter[1]])
    step = _trace_scalar(module, body, update.operands[counter[1]])
    counts = step in (("add", counter, 1), ("add", 1, counter))
    return limit - start if counts and isinstance(start, int) and isinstance(limit, int) else None


_Scalar = Any  # an integer, ("element", index into the loop's state), ("add" or "LT", _Scalar, _Scalar), or None


def _trace_scalar(module: Module, computation: Computation, name: str, arguments: Sequence[_Scalar] = ()) -> _Scalar:
    """Return the expression of a scalar that a loop counts with, through the copies and fusions around it.

    Args:
        arguments: operands of the fusion whose computation this is.
    """
    instruction = computation[name]

    def operands() -> list[_Scalar]:
        return [_trace_scalar(module, computation, operand, arguments) for operand in instruction.operands]

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
            callee = module[list_callees(instruction)[0]]
            return _trace_scalar(module, callee, _find_root(callee).name, operands())
        case "add":
            return "add", *operands()
        case "compare":
            return (instruction.find(r"direction=(\w+)"), *operands())
    return None


def _find_root(computation: Computation) -> Instruction:
    return next(instruction for instruction in computation.values() if instruction.is_root)


def count_runs(instruction: Instruction, execution: Execution) -> int:
    """Return how often an instruction runs.

    Raises:
        ValueError: it is in a loop without a fixed trip count.
    """
    if execution.times is None:
        raise ValueError(f"{instruction.name} ({instruction.source}) is in a loop without a fixed trip count")
    return execution.times
