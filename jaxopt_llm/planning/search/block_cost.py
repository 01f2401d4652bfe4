"""One block in the arithmetic of memory and time: its trace (execution/trace.py), divided over the devices.

All sizes are those of one token on one device, in numbers of the compute dtype. If layers differ, they are the mean.
Blocks are made once for a model and a way to divide it, and are kept; so are the sums that a search asks for.

Between the products of a block are kernels that XLA makes of elementwise operations. A kernel writes one array that a
product, attention or another kernel reads from memory: the operand of a product, or a value whose sharding is pinned.
It computes everything between that array and those before it, so that only these are read. A reduction joins the kernel
that makes its operand, and costs nothing, unless a product makes it.

In the backward, a kernel whose array is needed runs again. Its gradient reads the gradient of the array, and the
arrays before it if it is not linear in them, and writes their gradients. A reduction inside it needs a pass of its own
over the same arrays, since the gradient depends on a sum of them, and trained weights need another one for theirs. A
sum passes its gradient on, and needs no kernel; the kernels of other gradients of the same array add it.
"""

# ruff: noqa: B019

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from jaxopt_llm.config import Config, LoraConfig, MeshConfig, ModelConfig, PrecisionConfig, RematConfig, ShardingConfig
from jaxopt_llm.execution import segments as policies
from jaxopt_llm.execution.trace import TOKENS, Backward, BlockTrace, Mark, Operation, Product, trace_blocks
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.mesh import make_abstract_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.planning.search.microbatch import BYTES, MoECost
from jaxopt_llm.step.lora import adapt_model

SUMS = {"add", "add_any", "sub", "copy", "optimization_barrier"}
SELECTS = ("gather",)
PINS = ("sharding_constraint", "name")


@dataclass(frozen=True)
class Kernel:
    """Kernel that makes an array.

    array: the value that it makes.
    reads: the arrays that it reads.
    needs: the arrays that its backward reads.
    is_sum: whether it only adds arrays.
    reduced: those that it sums over a dimension.
    gathered: the arrays that it selects rows of, each with the bytes of these rows.
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
        """Return the arrays that a kernel selects rows of, as many as it makes or more."""
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


@dataclass(frozen=True, eq=False)
class LayerCost:
    """One kind of layer on one device.

    share: share of the layers that are of this kind.
    elements: numbers of each mark of the trace.
    multiplied: numbers that each product multiplies a token with.
    """

    trace: BlockTrace
    share: float
    placement: Placement
    elements: tuple[float, ...]
    multiplied: tuple[float, ...]

    def follow_backward(self, remat: RematConfig) -> Backward:
        return follow_backward(self.trace, remat)

    def count(self, marks: tuple[Mark, ...]) -> float:
        """Return the numbers of these marks together."""
        return sum(size for mark, size in zip(self.trace.marks, self.elements, strict=True) if mark in marks)

    @functools.cached_property
    def summed(self) -> tuple[int, ...]:
        """Products that contract a dimension which `tensor` divides: their results are summed over it.

        What adapters add on the way is small, and left out.
        """
        return tuple(
            index
            for index, product in enumerate(self.trace.products)
            if product.is_whole and self._is_divided(product, contracted=True)
        )

    @functools.cached_property
    def shared(self) -> Mapping[Mark, Sequence[int]]:
        """Intermediates that `tensor` does not divide, and the products that read them with weights that it divides.

        Their gradients are summed over `tensor`.
        """
        found: dict[Mark, list[int]] = {}
        for index, product in enumerate(self.trace.products):
            if product.reads and self._is_divided(product, contracted=False):
                found.setdefault(product.reads, []).append(index)
        return found

    @functools.cached_property
    def arrays(self) -> dict[int, float]:
        """Numbers of each array between the products, of one token.

        An array without a name is divided as the largest one that its kernel reads, and rows of experts as those that
        they come from. So is the operand of a product, which may be gathered afterwards.
        """
        unit = BYTES[self.placement.precision.compute_dtype] * TOKENS
        found, sizes = find_kernels(self.trace), dict(zip(self.trace.marks, self.elements, strict=True))
        makers = {kernel.array: kernel for kernel in found.kernels}
        arrays: dict[int, float] = {}
        for array, size in found.bytes.items():
            mark, maker = found.marks.get(array), makers.get(array)
            arrays[array] = size / unit
            if mark and not (maker and mark.name.role == "input"):
                arrays[array] = sizes[mark]
            elif array in found.rows:
                rows = next(mark for mark in self.trace.marks if "expert_rows" in mark.name.axes)
                arrays[array] *= sizes[rows] * TOKENS / math.prod(rows.shape)
            elif maker and maker.reads:
                largest = max(maker.reads, key=found.bytes.__getitem__)
                arrays[array] *= arrays[largest] * unit / found.bytes[largest]
        return arrays

    def count_streamed(self, remat: RematConfig) -> tuple[float, float]:
        """Return the numbers that the kernels between products read and write in a forward, and in a backward."""
        kernels, again = find_kernels(self.trace), self.follow_backward(remat).values
        backward = kernels.count_forward(self.arrays, again) + kernels.count_gradients(self.arrays, again)
        return kernels.count_forward(self.arrays), backward

    def count_stacked(self, remat: RematConfig) -> float:
        """Return the numbers that are read and written for the stacks of what is saved.

        A stack is filled with zeros, and a layer is copied into it. Attention and products read a copy of the layer.
        Other kernels read the stack.
        """
        saved = _list_on_device(self, remat)
        return 3 * self.count(saved) + 2 * self.count(tuple({*saved} & self.trace.read_whole))

    def count_waiting(self, remat: RematConfig | None, bytes_per_flop: float, trained: bool = False) -> float:
        """Return the numbers for which products wait: those that they move beyond what their FLOPs leave time for.

        Only adapters and other thin matrices move so many.

        Args:
            remat: count the products that a backward computes again; None: all.
            trained: only those with trained weights.
        """
        per_number = 2 * bytes_per_flop / BYTES[self.placement.precision.compute_dtype]
        again = self.follow_backward(remat).products if remat else range(len(self.multiplied))
        waiting = 0.0
        for index in again:
            product, multiplied = self.trace.products[index], self.multiplied[index]
            if product.trained or not trained:
                moved = (product.size + product.multiplied / product.size) * multiplied / product.multiplied
                waiting += max(0.0, moved - per_number * multiplied)
        return waiting

    def count_operands(self) -> float:
        """Return the numbers that the gradients of weights are formed from.

        They are what the products read, and the gradients of what they make.
        """
        trained = [product for product in self.trace.products if product.trained]
        read, made = {product.reads for product in trained}, {product.result for product in trained}
        return sum(self.count(tuple(mark for mark in marks if mark)) for marks in (read, made))

    @property
    def has_experts(self) -> bool:
        return any(product.of_experts for product in self.trace.products)

    def _is_divided(self, product: Product, contracted: bool) -> bool:
        return any(
            "tensor" in axes and (dim in spec.contracting) is contracted
            for spec in product.weights.values()
            if spec.contracting  # not the scales of codes
            for dim, axes in enumerate(self.placement.dims(spec))
        )


@dataclass(frozen=True, eq=False)
class BlockCost:
    """The mean block on one device.

    residual: numbers of the residual stream; sequence parallelism divides them.
    """

    layers: tuple[LayerCost, ...]
    residual: float

    @classmethod
    def from_config(cls, config: Config) -> "BlockCost":
        moe, sharding = MoECost.from_config(config), config.sharding
        return _divide_blocks(
            *(config.model, config.lora, config.training.trainable, config.precision),
            *(config.mesh.tensor, sharding.sequence_parallel, moe.rows),
        )

    def average(self, count: Callable[[LayerCost], float]) -> float:
        """Return the mean over all layers of a number of each."""
        return sum(layer.share * count(layer) for layer in self.layers)

    @functools.cache
    def count_elements(self, *names: str) -> float:
        """Return the numbers of these intermediates."""
        return self.average(lambda layer: layer.count(tuple(mark for mark in layer.trace.marks if mark.name in names)))

    @functools.cache
    def count_saved(self, remat: RematConfig) -> float:
        """Return the numbers that are saved on the device for the backward, those of the block's input included."""
        return self.average(lambda layer: layer.count(_list_on_device(layer, remat)))

    @functools.cache
    def count_operands(self) -> float:
        """Return the numbers that the gradients of weights are formed from (LayerCost.count_operands)."""
        return self.average(LayerCost.count_operands)

    @functools.cache
    def count_offloaded(self, remat: RematConfig) -> float:
        """Return the numbers that wait for the backward on the host."""
        return self.average(lambda layer: layer.count(layer.follow_backward(remat).saved)) - self.count_saved(remat)

    def count_multiplied(self, of: Callable[[LayerCost, int], bool] = lambda layer, product: True) -> float:
        """Return the numbers that these products multiply a token with."""
        return self.average(
            lambda layer: sum(number for index, number in enumerate(layer.multiplied) if of(layer, index))
        )

    @functools.cache
    def count_recomputed(self, remat: RematConfig, of_experts: bool = False) -> float:
        """Return the numbers that the products which a backward computes again multiply a token with.

        Args:
            of_experts: only those of experts.
        """

        def is_counted(layer: LayerCost, index: int) -> bool:
            runs_again = index in layer.follow_backward(remat).products
            return runs_again and (not of_experts or layer.trace.products[index].of_experts)

        return self.count_multiplied(is_counted)

    @functools.cache
    def count_forward(self, trained: bool = False, of_experts: bool = False) -> float:
        """Return the numbers that the products of a forward multiply a token with.

        Args:
            trained, of_experts: only those with trained weights, and only those of experts.
        """

        def is_counted(layer: LayerCost, index: int) -> bool:
            product = layer.trace.products[index]
            return (not trained or product.trained) and (not of_experts or product.of_experts)

        return self.count_multiplied(is_counted)

    @functools.cache
    def count_streamed(self, remat: RematConfig) -> tuple[float, float]:
        """Return the numbers that the kernels between products read and write in a forward, and in a backward."""
        forward = self.average(lambda layer: layer.count_streamed(remat)[0])
        return forward, self.average(lambda layer: layer.count_streamed(remat)[1])

    @functools.cache
    def count_stacked(self, remat: RematConfig) -> float:
        """Return the numbers that are read and written for the stacks of what is saved."""
        return self.average(lambda layer: layer.count_stacked(remat))

    @functools.cache
    def count_waiting(self, remat: RematConfig | None, bytes_per_flop: float, trained: bool = False) -> float:
        """Return the numbers for which products wait (LayerCost.count_waiting)."""
        return self.average(lambda layer: layer.count_waiting(remat, bytes_per_flop, trained))

    @functools.cache
    def recomputes_attention(self, remat: RematConfig) -> bool:
        """Return whether a backward computes the scores again."""
        marks = (mark for layer in self.layers for mark in layer.follow_backward(remat).recomputed)
        return any(mark.name.role == "attention" for mark in marks)

    def list_saved(self, remat: RematConfig) -> frozenset[str]:
        """Return the names of what is saved on the device."""
        return frozenset(mark.name for layer in self.layers for mark in _list_on_device(layer, remat))


def _list_on_device(layer: LayerCost, remat: RematConfig) -> tuple[Mark, ...]:
    return tuple(mark for mark in layer.follow_backward(remat).saved if mark.name not in remat.offload)


def keep_existing(remat: RematConfig, config: Config) -> RematConfig:
    """Return the settings without names that the model does not have."""
    names = {mark.name for trace, _ in trace_layers(config) for mark in trace.marks}
    policy, offload = remat.policy, tuple(name for name in remat.offload if name in names)
    if not isinstance(policy, str):
        policy = tuple(name for name in policy if name in names) or "full"
    return replace(remat, policy=policy, offload=offload)


def trace_layers(config: Config) -> list[tuple[BlockTrace, int]]:
    """Return the trace of each kind of layer, with the number of these layers."""
    return _trace_blocks(config.model, config.lora, config.training.trainable, config.precision)


@functools.cache
def follow_backward(trace: BlockTrace, remat: RematConfig) -> Backward:
    """Return what the backward of a layer reads and computes again under a policy."""
    # Without `jax.checkpoint`, JAX also keeps what routing reads.
    return trace.follow_backward(
        lambda name: policies.is_kept(remat, name) or (name.role == "routing" and not remat.enabled)
    )


@functools.cache
def _divide_blocks(
    model: ModelConfig,
    lora: LoraConfig,
    trainable: tuple[str, ...],
    precision: PrecisionConfig,
    tensor: int,
    sequence_parallel: bool,
    rows: float,
) -> BlockCost:
    """Return the blocks of a model on the devices along `tensor`, with this number of expert rows per token."""
    sharding = ShardingConfig(sequence_parallel=sequence_parallel)
    placement = Placement(make_abstract_mesh(MeshConfig(tensor=tensor)), sharding, precision)
    traces = _trace_blocks(model, lora, trainable, precision)
    layers = tuple(
        LayerCost(
            trace,
            count / model.blocks,
            placement,
            tuple(_count_elements(mark, placement, rows) for mark in trace.marks),
            tuple(product.multiplied * _find_share(product, placement) for product in trace.products),
        )
        for trace, count in traces
    )
    return BlockCost(layers, model.width / placement.count_parts("residual_sequence", 0))


@functools.cache
def _trace_blocks(
    model: ModelConfig, lora: LoraConfig, trainable: tuple[str, ...], precision: PrecisionConfig
) -> list[tuple[BlockTrace, int]]:
    adapted, trained, _ = adapt_model(Decoder(model), lora, precision, trainable)
    return trace_blocks(adapted, trained, precision.compute_dtype)


def _count_elements(mark: Mark, placement: Placement, rows: float) -> float:
    """Return the numbers of an intermediate per token, in the compute dtype. rows: of experts, per token."""

    def count(axis: str | None, size: int) -> float:
        if axis in ("batch", "sequence", "devices"):
            return 1.0
        if axis == "residual_sequence":
            return placement.count_parts("sequence", size) / placement.count_parts(axis, size)
        return rows if axis == "expert_rows" else size / placement.count_parts(axis, size)

    size = math.prod(count(axis, size) for axis, size in zip(mark.name.axes, mark.shape, strict=True))
    return size * mark.dtype.itemsize / BYTES[placement.precision.compute_dtype]


def _find_share(product: Product, placement: Placement) -> float:
    """Return the share of the weights of a product that a device multiplies with."""

    def count_parts(spec: ParamSpec) -> int:
        return placement.size(*(axis for axes in placement.dims(spec) for axis in axes))

    sizes = {path: math.prod(spec.shape) for path, spec in product.weights.items()}
    return sum(sizes[path] / count_parts(spec) for path, spec in product.weights.items()) / sum(sizes.values())
