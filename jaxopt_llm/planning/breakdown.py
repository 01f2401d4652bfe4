"""Time of a step by kinds of work, read off the compiled program.

Each kernel takes the longer of its matmuls and its memory traffic, at the rates of planning/search/roofline.py. The
parts add up to the step. docs/plan.md states what this leaves out, and how it relates to the estimate of `--search`.
"""

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxopt_llm.compiler import hlo
from jaxopt_llm.compiler.chips import Chip
from jaxopt_llm.compiler.hlo import count_convolution_products
from jaxopt_llm.compiler.instructions import Computation, Instruction, Module, parse_module
from jaxopt_llm.kernels.attention import SCOPE
from jaxopt_llm.planning.kernel_bytes import estimate_kernel, list_fused, walk_kernels
from jaxopt_llm.planning.search import roofline
from jaxopt_llm.step.update import UPDATE

MATMULS, CONVOLUTIONS, ATTENTION = "matmuls", "convolutions", "attention"
ELEMENTWISE = "norms and other elementwise"
CASTS, STACKS, COPIES, OPTIMIZER = "casts", "copies into stacks", "other copies and fills", "optimizer"
COLLECTIVES, HOST_COPIES = "collectives", "copies to the host and back"
# In the order of the table.
KERNELS = (MATMULS, CONVOLUTIONS, ATTENTION, ELEMENTWISE, CASTS, STACKS, COPIES, OPTIMIZER)

# Instructions that move values without computing. An iota or a constant fills an array.
_MOVES = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "reshape", "broadcast", "iota", "copy"),
    *("copy-start", "transpose", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "fusion"),
}


@dataclass
class Part:
    """Part of a step: one kind of kernels, the collectives over the same mesh axes, or the copies to the host.

    Attributes:
        seconds: time that the part adds to the step.
        hidden_seconds: time of transfers next to kernels, which does not add to the step.
        runs: kernels or transfers that run in a step.
        flops: FLOPs of matmuls and convolutions.
        bytes: bytes read and written in GPU memory; of transfers, bytes sent.
    """

    name: str
    seconds: float = 0.0
    hidden_seconds: float = 0.0
    runs: int = 0
    flops: int = 0
    bytes: int = 0


@dataclass
class _Kernels:
    """Sums over the kernels of a program, and its copies to the host and back."""

    chip: Chip
    module: Module
    sums: dict[str, Part] = field(default_factory=lambda: {name: Part(name) for name in KERNELS})
    host: Part = field(default_factory=lambda: Part(HOST_COPIES))
    host_overlapped: int = 0  # bytes of asynchronous copies that run once, with a kernel between start and end

    def add(self, computation: Computation, kernel: Instruction, times: int) -> None:
        fused = list_fused(self.module, kernel)
        inside = [(computation, kernel), *fused]
        if moved := sum(hlo.count_moved_bytes(body, each) for body, each in inside):
            self.host.runs += times
            self.host.bytes += moved * times
            self.host_overlapped += moved * (times == 1 and _is_overlapped(computation, kernel))
            return
        cost = estimate_kernel(self.module, computation, kernel, fused, self.chip)
        total = self.sums[classify(computation, kernel, fused)]
        total.seconds += cost.seconds * times
        total.runs += times
        total.flops += cost.flops * times
        total.bytes += cost.bytes * times


def classify(computation: Computation, kernel: Instruction, fused: Sequence[tuple[Computation, Instruction]]) -> str:
    """Return the kind of a kernel, one of KERNELS. The first rule that matches decides.

    Args:
        fused: the instructions inside it, if it is a fusion.
    """
    inside = [(computation, kernel), *fused]
    if any(hlo.count_attention_products(*each) for each in inside):
        return ATTENTION
    matmuls = [each for body, each in inside if hlo.count_matmul_products(body, each)]
    if matmuls:
        return ATTENTION if all(_is_in_scope(each, SCOPE) for each in matmuls) else MATMULS
    if any(count_convolution_products(*each) for each in inside):
        return CONVOLUTIONS
    if any(_is_in_scope(each, UPDATE) for _, each in inside):
        return OPTIMIZER
    if _is_in_scope(kernel, SCOPE) or (not kernel.source and any(_is_in_scope(each, SCOPE) for _, each in fused)):
        return ATTENTION
    # Scalars are indices into stacks and counters of loops.
    opcodes = {each.opcode for _, each in fused or inside if any(math.prod(array.shape) > 1 for array in each.results)}
    if opcodes <= _MOVES:
        return STACKS if "dynamic-update-slice" in opcodes else COPIES
    return CASTS if opcodes <= _MOVES | {"convert"} else ELEMENTWISE


def _is_in_scope(instruction: Instruction, name: str) -> bool:
    """Return whether an instruction comes from a named scope, also in its derivative: `transpose(jvp(name))`."""
    return any(name == scope.split("(")[-1].rstrip(")") for scope in instruction.source.split("/"))


def _is_overlapped(computation: Computation, copy: Instruction) -> bool:
    """Return whether a kernel is scheduled between the start and the end of a copy. The text is in that order."""
    if not copy.opcode.endswith("-start"):
        return False
    names = list(computation)
    end = next((index for index, name in enumerate(names) if copy.name in computation[name].operands), len(names))
    between = [computation[name].opcode for name in names[names.index(copy.name) + 1 : end]]
    return any(opcode.startswith(("fusion", "custom-call", "while", "dot")) for opcode in between)


def break_down_step(text: str, transfers: Sequence[roofline.Transfer], chip: Chip) -> tuple[Part, ...]:
    """Return the parts of a step that take time; they add up to its seconds.

    Args:
        text: HLO text of the compiled step.
        transfers: its collectives.

    Raises:
        KeyError: the chip has no matmuls in a dtype of the program.
    """
    kernels = _Kernels(chip, parse_module(text))
    for computation, instruction, times in walk_kernels(kernels.module):
        if instruction.opcode.removesuffix("-start") not in hlo.COLLECTIVES:
            kernels.add(computation, instruction, times)
    sums = kernels.sums.values()
    parts = *sums, *_list_links(transfers), _time_host_copies(kernels, transfers, sum(part.seconds for part in sums))
    return tuple(part for part in parts if part.seconds or part.hidden_seconds)


def _list_links(transfers: Sequence[roofline.Transfer]) -> Iterator[Part]:
    groups: Mapping[tuple[str, str], list[roofline.Transfer]] = collections.defaultdict(list)
    for each in transfers:
        groups[" × ".join(each.axes), each.link].append(each)
    for (axes, link), group in groups.items():
        all_seconds = sum(map(roofline.seconds_on_link, group))
        hidden = sum(roofline.seconds_on_link(each) * each.overlapped for each in group)
        runs, sent = (sum(getattr(each, name) for each in group) for name in ("times", "bytes"))
        yield Part(f"{COLLECTIVES} over {axes} ({link})", all_seconds - hidden, hidden, runs, 0, sent)


def _time_host_copies(kernels: _Kernels, transfers: Sequence[roofline.Transfer], seconds: float) -> Part:
    others = max(seconds, roofline.compute_link_time(transfers, seconds, seconds).hidden)
    time = roofline.compute_host_time(kernels.host.bytes, kernels.host_overlapped, kernels.chip, others)
    name = f"{HOST_COPIES} ({kernels.chip.host_link})"
    return replace(kernels.host, name=name, seconds=time.exposed, hidden_seconds=time.hidden)


def sum_by_cause(parts: Sequence[Part], idle: float = 0.0) -> roofline.StepTime:
    """Return the time of a step by cause.

    Args:
        idle: share of the time of its kernels in which a pipeline stage does no useful computation.
    """

    def add(*starts: str) -> float:
        return sum(part.seconds for part in parts if part.name.startswith(starts))

    multiplied, others = (MATMULS, CONVOLUTIONS, ATTENTION), (ELEMENTWISE, CASTS, STACKS, COPIES, OPTIMIZER)
    compute, memory = add(*multiplied), add(*others)
    busy = 1 - idle
    return roofline.StepTime(
        compute=busy * compute,
        memory=busy * memory,
        links=add(COLLECTIVES),
        pcie=add(HOST_COPIES),
        idle=idle * (compute + memory),
    )


def format_breakdown(parts: Sequence[Part]) -> list[str]:
    """Return the lines of the table of a step's time."""
    whole = sum(part.seconds for part in parts)
    width = max((len(part.name) for part in parts), default=0)
    lines = [f"{'where the step goes':{width + 2}} {'ms':>10} {'share':>6} {'hidden ms':>10} {'runs':>8}"]
    for part in parts:
        hidden = f"{part.hidden_seconds * 1e3:.2f}" if part.hidden_seconds else ""
        runs = f"{part.runs:,}" if part.runs else ""
        share = f"{part.seconds * 1e3:10.2f} {part.seconds / whole:6.1%}"
        lines.append(f"  {part.name:{width}} {share} {hidden:>10} {runs:>8}".rstrip())
    return [*lines, f"  {'all':{width}} {whole * 1e3:10.2f}"]
