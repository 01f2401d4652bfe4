"""Kernels between the products of a block: what XLA fuses them into, and what they read and write.

A kernel writes one array that a product, attention or another kernel reads from memory: the operand of a product, or
a value whose sharding is pinned. It computes everything between that array and those before it, so that only these
are read. A reduction joins the kernel that makes its operand, and costs nothing, unless a product makes it.

In the backward, a kernel whose array is needed runs again. Its gradient reads the gradient of the array, and the
arrays before it if it is not linear in them, and writes their gradients. A reduction inside it needs a pass of its own
over the same arrays, since the gradient depends on a sum of them, and trained weights need another one for theirs. A
sum passes its gradient on, and needs no kernel; the kernels of other gradients of the same array add it.
"""

import functools
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from jaxopt_llm.execution.trace import BlockTrace, Mark, Operation

SUMS = {"add", "add_any", "sub", "copy", "optimization_barrier"}
SELECTS = ("gather",)
PINS = ("sharding_constraint", "name")


@dataclass(frozen=True)
class Kernel:
    """Kernel that makes an array.

    array: the value that it makes.
    reads: the arrays that it reads.
    needs: those of them that its backward reads.
    is_sum: whether it only adds arrays.
    reduced: those that it sums over a dimension.
    gathered: those of which it selects rows, each with the bytes of these rows.
    trains: whether it reads trained weights.
    """

    array: int
    reads: frozenset[int]
    needs: frozenset[int] = frozenset()
    is_sum: bool = True
    reduced: frozenset[int] = frozenset()
    gathered: frozenset[tuple[int, int]] = frozenset()
    trains: bool = False

    def join(self, other: "Kernel") -> "Kernel":
        """Return the kernel that also computes what the other one makes."""
        return replace(
            self,
            reads=self.reads | other.reads,
            needs=self.needs | other.needs,
            is_sum=self.is_sum and other.is_sum,
            reduced=self.reduced | other.reduced,
            gathered=self.gathered | other.gathered,
            trains=self.trains or other.trains,
        )


@dataclass(frozen=True, eq=False)
class Elementwise:
    """The kernels between the products of a block.

    marks: the intermediate that an array is, if it has a name.
    bytes: of each array, for the traced row.
    made: the arrays that products make.
    grouped: for each array that products of groups read, the number of these products.
    rows: the arrays that such products make.
    """

    kernels: tuple[Kernel, ...]
    marks: Mapping[int, Mark]
    bytes: Mapping[int, int]
    made: Set[int]
    grouped: Mapping[int, int]
    rows: Set[int]

    def count_forward(self, sizes: Mapping[int, float], again: frozenset[int] | None = None) -> float:
        """Return what the kernels read and write in a forward; of a second one, those that make these values again.

        Args:
            sizes: of each array.
        """
        return sum(
            sizes[kernel.array] + self._count_read(kernel, sizes)
            for kernel in self.kernels
            if again is None or kernel.array in again
        )

    def count_gradients(self, sizes: Mapping[int, float], again: frozenset[int]) -> float:
        """Return what the kernels of the gradients read and write.

        Args:
            again: values that the backward computes again. Such a kernel and its gradient read their arrays once,
                together, unless a sum comes in between.
        """
        moved = 0.0
        for kernel in self.kernels:
            gradient = max(sizes[each] for each in (kernel.array, *self._list_selected(kernel)))
            passes = (not kernel.is_sum) + bool(self._list_normed(kernel)) + kernel.trains
            moved += passes * (gradient + sum(sizes[each] for each in kernel.needs))
            moved += (not kernel.is_sum) * sum(sizes[each] for each in kernel.reads)
            if kernel.array in again and not kernel.reduced:
                moved -= sum(sizes[each] for each in kernel.needs & kernel.reads)
        # A product adds to the result of another one, but no grouped product does.
        readers = Counter(each for kernel in self.kernels for each in kernel.reads) + Counter(self.grouped)
        return moved + sum((count - 1) * sizes[array] for array, count in readers.items())

    def _count_read(self, kernel: Kernel, sizes: Mapping[int, float]) -> float:
        selected = self._list_selected(kernel)
        whole = sum(max(sizes[each], sizes[kernel.array] * (each in selected)) for each in kernel.reads)
        return whole + sum(sizes[each] for each in self._list_normed(kernel) if each in self.made)

    def _list_normed(self, kernel: Kernel) -> list[int]:
        """Return the arrays that a kernel sums first, and then reads again with the sums."""
        return [each for each in kernel.reduced & kernel.needs if self.bytes[each] >= self.bytes[kernel.array]]

    def _list_selected(self, kernel: Kernel) -> list[int]:
        """Return the arrays of which a kernel selects as many rows as it makes, or more."""
        return [array for array, size in kernel.gathered if size >= self.bytes[kernel.array]]


@functools.cache
def find_kernels(trace: BlockTrace) -> Elementwise:
    """Return the kernels of a block's forward, in order."""
    finder = _Finder()
    for operation in trace.operations:
        finder.read(operation)
    finder.write(trace.operations[-1].outputs[0])
    products = [each for each in trace.operations if each.primitive == "ragged_dot_general"]
    return Elementwise(
        *(tuple(finder.kernels.values()), finder.marks, finder.bytes, finder.made),
        grouped=Counter(finder.arrays[each.inputs[0]] for each in products),
        rows={each.outputs[0] for each in products},
    )


class _Finder:
    """Collects kernels, operation by operation.

    arrays: for each value that is in memory, the value under which its array is known.
    parts: for each other value, what computes it from arrays.
    made: arrays that products make.
    """

    def __init__(self) -> None:
        self.arrays: dict[int, int] = {}
        self.parts: dict[int, Kernel] = {}
        self.kernels: dict[int, Kernel] = {}
        self.made: set[int] = set()
        self.marks: dict[int, Mark] = {}
        self.bytes: dict[int, int] = {}

    def read(self, operation: Operation) -> None:
        self.bytes |= zip(operation.outputs, operation.bytes, strict=True)
        if operation.product is not None or (operation.marks and operation.primitive != "name"):
            for value in operation.inputs:
                self.write(value)
            self.arrays |= {value: value for value in operation.outputs}
            self.made |= {*operation.outputs}
        elif operation.primitive in PINS or (operation.is_view and operation.inputs[0] in self.arrays):
            self.write(operation.inputs[0])
            self.arrays |= {value: self.arrays[operation.inputs[0]] for value in operation.outputs}
        else:
            self.parts |= {value: self._compute(value, operation) for value in operation.outputs}
        if operation.marks:
            self.marks[self.arrays[operation.outputs[0]]] = operation.marks[0]

    def write(self, value: int) -> None:
        """Bring a value into memory, if it is not there."""
        if value in self.arrays:
            return
        self.arrays[value] = value
        part = self.parts.get(value)
        if part is None:  # the input of the block
            self.bytes[value] = self.bytes[min(self.bytes)]
        elif part.is_sum and part.reads <= self.made:  # a product adds biases, and results of other products
            self.made.add(value)
        else:
            self.kernels[value] = part

    def _compute(self, value: int, operation: Operation) -> Kernel:
        own = Kernel(
            value,
            reads=frozenset(self.arrays[each] for each in operation.inputs if each in self.arrays),
            needs=frozenset(self.arrays[each] for each in operation.needs if each in self.arrays),
            is_sum=operation.is_view or operation.primitive in SUMS,
            trains=operation.trains,
        )
        for each in operation.inputs:
            if each not in self.arrays:
                part = self.parts[each]
                own = own.join(replace(part, needs=part.reads) if each in operation.needs else part)
        if operation.primitive.startswith("reduce_"):
            own = replace(own, reduced=own.reads)
        if operation.primitive in SELECTS and operation.inputs[0] in self.arrays:
            selected = self.arrays[operation.inputs[0]]
            own = replace(own, gathered=frozenset({(selected, operation.bytes[0])}))
        return own
