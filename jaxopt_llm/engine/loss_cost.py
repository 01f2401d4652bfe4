"""Cost of a user's loss and its gradients, read off their trace: FLOPs, and the bytes that kernels move and hold.

What rows add to a value is found by a second trace with twice as many rows. Weights and their gradients do not grow, so
that they cost nothing here: ZeRO decides where they are (search.py counts them).

An array is in memory if a product, a reduction or a loop makes it, or if one of these reads it. XLA fuses everything
else into the kernels that read it, which compute it from the arrays before it; only where several equations read a
value and it is smaller than these arrays, it is kept itself. The most that these arrays hold at any moment is less than
XLA holds, which schedules for time. So the figure may discard no setting that fits.
"""

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxopt_llm.core.jaxpr import split_scan, typeof
from jaxopt_llm.execution.trace import VIEWS
from jaxopt_llm.kernels.attention import SCOPE

# Operations, as prefixes of their names, that make an array of their own.
MAKERS = (
    *("dot_general", "ragged_dot_general", "conv_general_dilated", "reduce_", "argm", "cum", "sort", "top_k", "fft"),
    *("dynamic_update_slice", "select_and_", "random_", "threefry", "pallas_call", "custom_call"),
    *("cholesky", "triangular_solve", "eigh", "svd", "qr", "lu"),
)
PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")
CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "body_jaxpr")


@dataclass(frozen=True)
class LossCost:
    """Cost of the loss and its gradients of a whole batch on one device.

    flops: of products and convolutions.
    moved: bytes that the kernels between them read and write.
    held: bytes of the arrays at the moment when most are alive.
    summed: bytes of the products that contract a dimension which `tensor` divides: it sums them over its devices.
    """

    flops: float
    moved: float
    held: float
    summed: float


def count_cost(closed: ClosedJaxpr, doubled: ClosedJaxpr, divided: Sequence[frozenset[int]]) -> LossCost:
    """Return the cost of a function of a batch.

    Args:
        closed: its jaxpr.
        doubled: that for twice as many rows. If its equations are others, nothing is known of the bytes.
        divided: the dimensions of each argument that `tensor` divides.
    """
    growth = dict(_pair_sizes(closed.jaxpr, doubled.jaxpr)) if _are_alike(closed.jaxpr, doubled.jaxpr) else {}
    walk = _Walk(growth)
    arguments = [
        replace(walk.make(growth.get(var, 0)), divided=dims)
        for var, dims in zip(closed.jaxpr.invars, divided, strict=True)
    ]
    for value in walk.run(closed.jaxpr, arguments):
        walk.read(value)
    return LossCost(walk.flops, walk.moved, walk.find_most_held(), walk.summed)


def _list_inner(eqn: JaxprEqn) -> list[Jaxpr]:
    found = [value for name in CALLS if (value := eqn.params.get(name)) is not None] or eqn.params.get("branches", ())
    return [each.jaxpr if isinstance(each, ClosedJaxpr) else each for each in found]


def _are_alike(one: Jaxpr, other: Jaxpr) -> bool:
    """Return whether two jaxprs have the same equations, whatever their shapes."""
    pairs = [*zip(one.eqns, other.eqns, strict=False)]
    return (len(one.eqns), len(one.invars)) == (len(other.eqns), len(other.invars)) and all(
        first.primitive.name == second.primitive.name
        and len(first.outvars) == len(second.outvars)
        and all(map(_are_alike, _list_inner(first), _list_inner(second)))
        for first, second in pairs
    )


def _pair_sizes(one: Jaxpr, other: Jaxpr) -> Iterator[tuple[Any, int]]:
    """Yield the variables of a jaxpr, with the bytes by which they are larger in one that is alike."""
    yield from zip(one.invars, map(_count_growth, one.invars, other.invars), strict=True)
    for first, second in zip(one.eqns, other.eqns, strict=True):
        yield from zip(first.outvars, map(_count_growth, first.outvars, second.outvars), strict=True)
        for inner, larger in zip(_list_inner(first), _list_inner(second), strict=True):
            yield from _pair_sizes(inner, larger)


def _count_growth(var: Any, larger: Any) -> int:
    return max(_count_bytes(larger) - _count_bytes(var), 0)


def _count_bytes(atom: Any) -> int:
    aval = typeof(atom)
    return math.prod(getattr(aval, "shape", ())) * getattr(getattr(aval, "dtype", None), "itemsize", 0)


@dataclass(eq=False)
class _Array:
    """An array in memory. born, read: the moments when it is made, and when it is read last. held: its bytes then."""

    bytes: float
    held: float
    born: int
    last: int


@dataclass(frozen=True)
class _Value:
    """A value: the arrays that it is computed from.

    is_array: whether it is one of them, in some form.
    divided: its dimensions that `tensor` divides, if it is a parameter.
    """

    arrays: frozenset[_Array] = frozenset()
    is_array: bool = True
    divided: frozenset[int] = frozenset()

    @property
    def bytes(self) -> float:
        return sum(each.bytes for each in self.arrays)


@dataclass
class _Walk:
    """Walks the equations of a jaxpr in order, those of inner calls in place of the calls.

    growth: bytes of each variable that count.
    times: how often the current equation runs.
    """

    growth: Mapping[Any, float]
    flops: float = 0.0
    moved: float = 0.0
    summed: float = 0.0
    now: int = 0
    times: int = 1
    arrays: list[_Array] = field(default_factory=list)

    def make(self, size: float, held: float | None = None) -> _Value:
        """Return a new array."""
        self.arrays.append(_Array(size, size if held is None else held, self.now, self.now))
        return _Value(frozenset(self.arrays[-1:]) if size else frozenset())

    def read(self, value: _Value) -> None:
        for each in value.arrays:
            each.last = max(each.last, self.now)

    def write(self, value: _Value, size: float) -> _Value:
        """Return a value as an array, which a kernel writes if it is not in memory."""
        self.read(value)
        if value.is_array or not size:
            return value
        self.moved += self.times * (size + value.bytes)
        return self.make(size)

    def find_most_held(self) -> float:
        changes: dict[int, float] = collections.defaultdict(float)
        for each in self.arrays:
            changes[each.born] += each.held
            changes[each.last + 1] -= each.held
        alive = most = 0.0
        for moment in sorted(changes):
            alive += changes[moment]
            most = max(most, alive)
        return most

    def run(self, jaxpr: Jaxpr, arguments: Sequence[_Value]) -> list[_Value]:
        """Return the results of a jaxpr."""
        values: dict[Any, _Value] = dict(zip(jaxpr.invars, arguments, strict=True))
        readers = collections.Counter(
            atom for eqn in jaxpr.eqns for atom in {*map(_as_key, eqn.invars)} if atom is not None
        )
        for eqn in jaxpr.eqns:
            self.now += 1
            inputs = [_Value() if isinstance(atom, Literal) else values.get(atom, _Value()) for atom in eqn.invars]
            for var, value in zip(eqn.outvars, self._apply(eqn, inputs), strict=True):
                size = self.growth.get(var, 0)
                is_shared = readers[var] > 1 and value.bytes > size
                values[var] = self.write(value, size) if is_shared else value
        return [_Value() if isinstance(atom, Literal) else values.get(atom, _Value()) for atom in jaxpr.outvars]

    def _apply(self, eqn: JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        name = eqn.primitive.name
        sizes = [self.growth.get(var, 0) for var in eqn.outvars]
        if name == "scan":
            return self._scan(eqn, inputs, sizes)
        inner = _list_inner(eqn)
        if inner and len(inner[-1].outvars) == len(sizes) and len(inner[-1].invars) <= len(inputs):
            return self.run(inner[-1], inputs[len(inputs) - len(inner[-1].invars) :])  # a condition comes first
        if name in PRODUCTS:
            self.flops += self.times * _count_flops(eqn)
            contracted = zip(inputs, _list_contracted(eqn), strict=False)
            self.summed += self.times * sum(sizes) * any(value.divided & {*dims} for value, dims in contracted)
            inputs = [
                self.write(value, self.growth.get(_as_key(atom), 0))
                for atom, value in zip(eqn.invars, inputs, strict=True)
            ]
        elif name.startswith(MAKERS) and name != "reduce_precision":
            self.moved += self.times * (sum(sizes) + sum(value.bytes for value in inputs))
        else:
            arrays = frozenset[_Array]().union(*(value.arrays for value in inputs))
            is_array = name in VIEWS and all(value.is_array for value in inputs) and len(arrays) == 1
            divided = _follow_dimensions(eqn, inputs[0].divided) if inputs else frozenset()
            return [_Value(arrays if size else frozenset(), is_array, divided) for size in sizes]
        for value in inputs:
            self.read(value)
        in_kernel = SCOPE in str(eqn.source_info.name_stack).split("/")
        return [self.make(0 if in_kernel else size) for size in sizes]

    def _scan(self, eqn: JaxprEqn, inputs: list[_Value], sizes: list[float]) -> list[_Value]:
        """Run the body of a loop once. What it carries and stacks is in memory while the loop runs."""
        (body,), (constants, carried) = _list_inner(eqn), split_scan(eqn)
        inputs = [
            self.write(value, self.growth.get(_as_key(atom), 0)) for atom, value in zip(eqn.invars, inputs, strict=True)
        ]
        results = [self.make(size) for size in sizes]
        slices = [
            replace(self.make(self.growth.get(var, 0), held=0), divided=frozenset(dim - 1 for dim in stack.divided))
            for var, stack in zip(body.invars[constants + carried :], inputs[constants + carried :], strict=True)
        ]
        self.times *= eqn.params["length"]
        made = self.run(body, [*inputs[:constants], *results[:carried], *slices])
        for var, value in zip(body.outvars, made, strict=True):  # written to where they are carried and stacked
            self.read(value)
            self.moved += self.times * (not value.is_array) * (self.growth.get(_as_key(var), 0) + value.bytes)
        self.times //= eqn.params["length"]
        for value in (*inputs, *results):
            self.read(value)
        return results


def _as_key(atom: Any) -> Any:
    return None if isinstance(atom, Literal) else atom


def _count_flops(eqn: JaxprEqn) -> float:
    """Return the FLOPs of a product or a convolution, without those of zeros between the values of a dilated input."""
    right, result = typeof(eqn.invars[1]).shape, math.prod(typeof(eqn.outvars[0]).shape)
    zeros = math.prod(eqn.params.get("lhs_dilation", ()))
    return 2 * result * math.prod(right[dim] for dim in _list_contracted(eqn)[1]) / zeros


def _list_contracted(eqn: JaxprEqn) -> tuple[Sequence[int], Sequence[int]]:
    """Return the dimensions of both operands of a product that it sums over; of a convolution, those of its kernel."""
    if eqn.primitive.name == "conv_general_dilated":
        return (), eqn.params["dimension_numbers"].rhs_spec[1:]
    if "ragged_dot_dimension_numbers" in eqn.params:
        left, right = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0]
    else:
        left, right = eqn.params["dimension_numbers"][0]
    return left, right


def _follow_dimensions(eqn: JaxprEqn, dims: frozenset[int]) -> frozenset[int]:
    """Return where dimensions of the first operand are in the result; nothing if the equation changes the shape."""
    if dims and eqn.primitive.name == "transpose":
        return frozenset(position for position, dim in enumerate(eqn.params["permutation"]) if dim in dims)
    is_same = dims and typeof(eqn.invars[0]).shape == typeof(eqn.outvars[0]).shape
    return dims if is_same else frozenset()
