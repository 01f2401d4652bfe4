"""The trace of a block: what a layer computes, read off the model's own code.

A block is traced abstractly, for one row on one device. Its equations are the one source of the names that
`remat.policy` selects, of the sizes of intermediates, and of the products with weights. The planner divides them over
devices by the tables of logical axes (parallel/axes.py).

A value is active if it depends on the input of the block. A backward reads an active value if an operation is not
linear in it, or if it is multiplied with a trained weight. The backward computes what it reads again, from the
intermediates that the policy keeps.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core import Literal as Constant

from jaxopt_llm.config import MeshConfig, PrecisionConfig, RematConfig, ShardingConfig
from jaxopt_llm.config.precision import Float
from jaxopt_llm.core import tree
from jaxopt_llm.core.intermediate import Intermediate
from jaxopt_llm.core.jaxpr import find_called, typeof
from jaxopt_llm.execution.segments import (
    LocalSegment,
    PeriodRunner,
    attach_non_layer,
    model_segments,
    mtp_segments,
    no_perturbations,
)
from jaxopt_llm.model import param
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.linear.leaves import unwrap_specs
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.mesh import make_abstract_mesh
from jaxopt_llm.parallel.placement import Placement

TOKENS = 128  # of the traced row
# Operations that are linear in their active operands, if those are not indices.
LINEAR = {
    *("add", "add_any", "sub", "neg", "convert_element_type", "copy", "reduce_precision", "optimization_barrier"),
    *("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "concatenate", "slice", "split", "pad"),
    *("rev", "reduce_sum", "cumsum", "name", "sharding_constraint", "reshard", "mesh_cast", "device_put", "real"),
    *("all_gather", "psum", "psum2", "psum_invariant", "reduce_scatter", "all_to_all", "ppermute", "pvary", "pcast"),
}
# Operations that are linear in some operands, the first or all but one, and select by the others.
SELECTORS: Mapping[str, Callable[[int], Sequence[int]]] = {
    "select_n": lambda count: range(1),
    "gather": lambda count: range(1, count),
    "dynamic_slice": lambda count: range(1, count),
    "dynamic_update_slice": lambda count: range(2, count),
    "scatter": lambda count: range(1, 2),
    "scatter-add": lambda count: range(1, 2),
}
PRODUCTS = ("dot_general", "ragged_dot_general")
# Operations that bring an array into another form, without computing.
VIEWS = {
    "convert_element_type",
    "reshape",
    "transpose",
    "squeeze",
    "expand_dims",
    "sharding_constraint",
    "name",
    "copy",
}


@dataclass(frozen=True, eq=False)
class Mark:
    """An intermediate of a block, with its shape and dtype in the trace."""

    name: Intermediate
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, eq=False)
class Product:
    """A product with weights.

    weights: the weights that it multiplies with, by path within the block.
    multiplied: numbers that a token is multiplied with. Of experts, these are the matrices that a token uses.
    size: numbers that it makes for a token.
    trained: whether the weights have gradients.
    reads: the intermediate that it multiplies; None if it multiplies something that has no name.
    result: the intermediate that it makes, or helps to make; None if that has no name.
    """

    weights: Mapping[str, ParamSpec]
    multiplied: float
    size: float
    trained: bool
    reads: Mark | None
    result: Mark | None

    @property
    def module(self) -> str:
        """The part of the block that has the weights."""
        return next(iter(self.weights)).split("/")[0]

    @property
    def of_experts(self) -> bool:
        return any(spec.expert_dims for spec in self.weights.values())

    @property
    def returns_tokens(self) -> bool:
        """True for the product of experts that makes what goes back to the tokens."""
        return self.of_experts and self.result is not None and "expert_rows" not in self.result.name.axes

    @property
    def is_whole(self) -> bool:
        """False for the first factor of an adapter, which makes less than the result."""
        return self.result is not None and self.size * TOKENS >= math.prod(self.result.shape)


@dataclass(frozen=True, eq=False)
class Operation:
    """Equation of the trace, with the values that it reads and makes; only active values count.

    bytes: of each value that it makes.
    needs: the values that its backward reads.
    marks: the intermediates that it names.
    product: index of the product that it is; None if it is no product.
    trains: whether it reads trained weights.
    is_view: whether it brings an array into another form, and computes nothing.
    """

    primitive: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    bytes: tuple[int, ...]
    needs: tuple[int, ...]
    marks: tuple[Mark, ...]
    product: int | None
    trains: bool
    is_view: bool


@dataclass(frozen=True)
class Backward:
    """The part of a block's forward that its backward reads.

    saved: intermediates that it reads as they were kept.
    recomputed: intermediates that it computes again.
    products: indices of the products that it computes again.
    values: all values that it computes again.
    """

    saved: tuple[Mark, ...]
    recomputed: tuple[Mark, ...]
    products: frozenset[int]
    values: frozenset[int]


@dataclass(frozen=True, eq=False)
class BlockTrace:
    """Operations of a block, in order."""

    operations: tuple[Operation, ...]
    products: tuple[Product, ...]

    @functools.cached_property
    def marks(self) -> tuple[Mark, ...]:
        return tuple(mark for operation in self.operations for mark in operation.marks)

    def follow_backward(self, is_kept: Callable[[Intermediate], bool]) -> Backward:
        """Return what a backward reads if the forward keeps the input of the block and these intermediates."""
        makers = {value: operation for operation in self.operations for value in operation.outputs}
        waiting = [value for operation in self.operations for value in operation.needs]
        seen: set[int] = set()
        saved, again = set[Operation](), set[Operation]()
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            maker = makers[value]
            if maker.marks and (value in self.inputs or is_kept(maker.marks[0].name)):
                saved.add(maker)
            else:
                again.add(maker)
                waiting.extend(maker.inputs)
        return Backward(
            saved=tuple(mark for each in self.operations if each in saved for mark in each.marks),
            recomputed=tuple(mark for each in self.operations if each in again for mark in each.marks),
            products=frozenset(each.product for each in again if each.product is not None),
            values=frozenset(value for each in again for value in each.outputs),
        )

    @functools.cached_property
    def read_whole(self) -> frozenset[Mark]:
        """The intermediates that the backwards of products and of attention read, themselves or in another form."""
        makers = {value: operation for operation in self.operations for value in operation.outputs}
        found: set[Mark] = set()
        for operation in self.operations:
            if operation.product is None and (not operation.marks or operation.primitive == "name"):
                continue
            for value in operation.needs:
                maker = makers[value]
                while maker.is_view and not maker.marks:
                    maker = makers[maker.inputs[0]]
                found.update(maker.marks)
        return frozenset(found)

    @functools.cached_property
    def inputs(self) -> frozenset[int]:
        """The input of the block, which has the first name."""
        first = next(operation for operation in self.operations if operation.marks)
        return frozenset(first.outputs)


def trace_blocks(model: Model, trained: Params, compute_dtype: Float) -> list[tuple[BlockTrace, int]]:
    """Trace each kind of block of a model once. Return the traces, each with its number of layers.

    trained: specs of the trained parameters.
    """
    found: dict[Any, list[Any]] = {}
    modules = mtp_segments(model)
    for name, segment in (model_segments(model) | modules).items():
        for position, kind in enumerate(segment.kinds):
            block = f"block_{position}"
            specs = param.period_specs(segment.specs[block])
            paths = {path for path, _ in tree.leaves_with_path(trained.get(name, {}).get(block, {}))}
            leaves = tree.leaves_with_path(specs)
            key = (kind, frozenset(paths), *((path, spec.shape, spec.dtype) for path, spec in leaves))
            if key in found:
                found[key][1] += segment.periods
            else:
                trace = _trace_block(model, segment, position, specs, paths, compute_dtype, name in modules)
                found[key] = [trace, segment.periods]
    return [(trace, layers) for trace, layers in found.values()]


def list_intermediates(model: Model) -> list[Intermediate]:
    """Return the names that `remat.policy` can give for a model, in the order in which blocks make them."""
    traces = trace_blocks(model, {}, "float32")
    return list(dict.fromkeys(mark.name for trace, _ in traces for mark in trace.marks))


def _trace_block(
    model: Model,
    segment: LocalSegment,
    position: int,
    specs: Params,
    trained: set[str],
    compute_dtype: Float,
    is_module: bool,
) -> BlockTrace:
    placement = Placement(
        make_abstract_mesh(MeshConfig()), ShardingConfig(zero_stage=0), PrecisionConfig(compute_dtype=compute_dtype)
    )
    ids, mask = (jax.ShapeDtypeStruct((1, TOKENS), dtype) for dtype in (jnp.int32, jnp.bool))
    batch = Batch(tokens=ids, targets=ids, loss_mask=mask, segment_ids=ids, positions=ids)
    outside = {"non_layer": model.specs["non_layer"]}
    weights, non_layer = (
        jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), each) for each in (specs, outside)
    )
    x = jax.ShapeDtypeStruct((1, TOKENS, _find_width(model)), compute_dtype)

    def make_context(outside: Params, x: jax.Array, batch: Batch) -> Context:
        context = model.make_context(batch, placement)
        placed = attach_non_layer(model.specs, outside, no_perturbations(model.specs), placement)
        context = model.add_layer_inputs(placed, batch.tokens, x, context)
        kinds = set(segment.kinds) if segment.keys == "taken" else set()
        caches = {kind: model.make_cache(kind, 1, TOKENS, compute_dtype, placement) for kind in kinds}
        return replace(context, caches=caches)

    def run(x: jax.Array, weights: Params, context: Context) -> jax.Array:
        inputs, context = context.layer_inputs, replace(context, layer_inputs=None)
        local = segment if inputs is None else segment.with_inputs(inputs)
        local = local.with_embeddings(jnp.zeros_like(x)) if is_module else local
        runner = PeriodRunner(model, local, context, RematConfig("none"), checkpoints=False, is_apart=False)
        constants = {name: values[0] for name, values in local.per_layer.items()}
        block = runner.make_block(position, constants)
        return block(x, weights, no_perturbations(specs), None)[0]

    closed = jax.make_jaxpr(run)(x, weights, jax.eval_shape(make_context, non_layer, x, batch))
    of_weights = [(path, spec, path in trained) for path, spec in tree.leaves_with_path(specs)]
    return _Reader(of_weights).read(closed)


def _find_width(model: Model) -> int:
    """Return the width of the residual stream: that of the embedding, which may have an adapter."""
    width: int = unwrap_specs(model.specs["non_layer"]["embedding"])["table"].shape[-1]
    return width


@dataclass(frozen=True)
class _Value:
    """A value of the trace.

    number: of an active value; None of any other.
    weights: the weights that a value which is not active is made of, by their index.
    origin: the mark that names it, itself or in another form.
    """

    number: int | None = None
    weights: frozenset[int] = frozenset()
    origin: Mark | None = None


@dataclass
class _Reader:
    """Reads the equations of a block in order. The equations of an inner call stand in place of the call.

    weights: path and spec of each weight, and whether it is trained.
    """

    weights: Sequence[tuple[str, ParamSpec, bool]]
    operations: list[Operation] = field(default_factory=list)
    products: list[Callable[[Mark | None], Product]] = field(default_factory=list)  # by the result
    count: int = 0

    def read(self, closed: ClosedJaxpr) -> BlockTrace:
        """Read the jaxpr of a function of x, the weights and other inputs."""
        values = [self._make_active()]
        values += [_Value(weights=frozenset({index})) for index in range(len(self.weights))]
        values += [_Value()] * (len(closed.jaxpr.invars) - len(values))
        self._read(closed.jaxpr, [_Value()] * len(closed.jaxpr.constvars), values)
        results = self._find_results()
        products = (make(results.get(index)) for index, make in enumerate(self.products))
        return BlockTrace(tuple(self.operations), tuple(products))

    def _make_active(self, origin: Mark | None = None) -> _Value:
        self.count += 1
        return _Value(self.count, origin=origin)

    def _read(self, jaxpr: Jaxpr, constants: Sequence[_Value], arguments: Sequence[_Value]) -> list[_Value]:
        values: dict[Any, _Value] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))
        for eqn in jaxpr.eqns:
            inputs = [_Value() if isinstance(atom, Constant) else values[atom] for atom in eqn.invars]
            values |= zip(eqn.outvars, self._read_equation(eqn, inputs), strict=True)
        return [_Value() if isinstance(atom, Constant) else values[atom] for atom in jaxpr.outvars]

    def _read_equation(self, eqn: JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        if inner := find_called(eqn):
            marks = _list_marks(inner)
            if any(mark.name.role == "attention" for mark in marks):
                return self._add(eqn, inputs, inputs, marks)
            if product := _find_grouped_product(inner):
                operands: dict[Any, _Value] = dict(zip(inner.invars, inputs, strict=True))
                eqn, inputs = product, [operands[var] for var in product.invars]
            else:
                return self._read(inner, [], inputs)
        name = eqn.primitive.name
        active = [each for each in inputs if each.number is not None]
        if not active:
            merged = frozenset[int]().union(*(each.weights for each in inputs))
            return [_Value(weights=merged)] * len(eqn.outvars)
        if name == "name" and isinstance(eqn.params["name"], Intermediate):
            return self._add(eqn, inputs, [], [_mark(eqn)])
        if name in PRODUCTS and (weights := inputs[1].weights | inputs[0].weights):
            self.products.append(self._describe_product(eqn, inputs, weights))
            return self._add(eqn, inputs, self._list_needed(eqn, inputs), product=len(self.products) - 1)
        return self._add(eqn, inputs, self._list_needed(eqn, inputs))

    def _describe_product(
        self, eqn: JaxprEqn, inputs: Sequence[_Value], indices: frozenset[int]
    ) -> Callable[[Mark | None], Product]:
        """Return a function of the result that makes the product."""
        operand = inputs[0] if inputs[1].weights else inputs[1]
        weights = {self.weights[index][0]: self.weights[index][1] for index in sorted(indices)}
        size = math.prod(typeof(eqn.outvars[0]).shape) / TOKENS
        summed = math.prod(typeof(eqn.invars[1]).shape[dim] for dim in list_contracted(eqn)[1])
        fields = (weights, size * summed, size, self._is_trained(inputs), operand.origin)
        return functools.partial(Product, *fields)

    def _is_trained(self, inputs: Sequence[_Value]) -> bool:
        return any(self.weights[index][2] for each in inputs for index in each.weights)

    def _list_needed(self, eqn: JaxprEqn, inputs: Sequence[_Value]) -> Sequence[_Value]:
        """Return the active operands that the backward of an equation reads."""
        if not any(jnp.issubdtype(typeof(var).dtype, jnp.floating) for var in eqn.outvars):
            return []  # it has no gradient
        name = eqn.primitive.name
        if name in LINEAR:
            return []
        if name in SELECTORS:
            return [inputs[index] for index in SELECTORS[name](len(inputs))]
        if name == "div" and inputs[1].number is None:
            return []
        if name in ("mul", *PRODUCTS) and None in (inputs[0].number, inputs[1].number) and not self._is_trained(inputs):
            return inputs[2:]
        return inputs

    def _add(
        self,
        eqn: JaxprEqn,
        inputs: Sequence[_Value],
        needed: Sequence[_Value],
        marks: Sequence[Mark] = (),
        product: int | None = None,
    ) -> list[_Value]:
        origin = marks[0] if marks else None
        is_view = _is_view(eqn)
        if not marks and is_view:
            origin = next((each.origin for each in inputs if each.number is not None), None)
        outputs = [self._make_active(origin) for _ in eqn.outvars]
        numbers = tuple(each.number for each in outputs if each.number is not None)
        needs = tuple(each.number for each in needed if each.number is not None)
        if product is None and marks and eqn.primitive.name != "name":
            needs += numbers  # the backward of attention reads its result, too
        needs = tuple(dict.fromkeys(needs))
        reads = tuple(each.number for each in inputs if each.number is not None)
        sizes = tuple(math.prod(typeof(var).shape) * typeof(var).dtype.itemsize for var in eqn.outvars)
        trains = self._is_trained(inputs)
        self.operations.append(
            Operation(eqn.primitive.name, reads, numbers, sizes, needs, tuple(marks), product, trains, is_view)
        )
        return outputs

    def _find_results(self) -> dict[int, Mark]:
        """Return the intermediate that each product makes: the first one on the way from its result."""
        results: dict[int, Mark] = {}
        after: dict[int, set[int]] = {}  # the products that a value comes from, since the last intermediate
        for operation in self.operations:
            products = set().union(*(after.get(value, set()) for value in operation.inputs))
            if operation.product is not None:
                products.add(operation.product)
            if operation.marks:
                results |= {product: operation.marks[0] for product in products if product not in results}
                products = set()
            after |= {value: products for value in operation.outputs}
        return results


def _find_grouped_product(jaxpr: Jaxpr) -> JaxprEqn | None:
    """Return the product of a call that multiplies groups of rows; the call also hides the rows of no group."""
    return next((eqn for eqn in jaxpr.eqns if eqn.primitive.name == "ragged_dot_general"), None)


def _list_marks(jaxpr: Jaxpr) -> list[Mark]:
    return [
        _mark(eqn)
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "name" and isinstance(eqn.params["name"], Intermediate)
    ]


def _mark(eqn: JaxprEqn) -> Mark:
    shape = typeof(eqn.invars[0])
    return Mark(eqn.params["name"], shape.shape, shape.dtype)


def _is_view(eqn: JaxprEqn) -> bool:
    """Return whether an equation brings an array into another form, without computing."""
    if eqn.primitive.name not in ("broadcast_in_dim", "slice"):
        return eqn.primitive.name in VIEWS
    return typeof(eqn.invars[0]).size == typeof(eqn.outvars[0]).size


def list_contracted(eqn: JaxprEqn) -> tuple[Sequence[int], Sequence[int]]:
    """Return the dimensions of both operands of a product that it sums over; of a convolution, those of its kernel."""
    if eqn.primitive.name == "conv_general_dilated":
        return (), eqn.params["dimension_numbers"].rhs_spec[1:]
    dims = eqn.params.get("dimension_numbers") or eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    left, right = dims[0]
    return left, right
