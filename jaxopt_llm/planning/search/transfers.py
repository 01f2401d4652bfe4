"""Collectives of a step by arithmetic: bytes that each GPU sends, and the time that they take.

A layer's weights are gathered, and its gradients reduced, next to kernels. Layers run in a loop, and a transfer runs
next to the kernels of its own trip. XLA therefore leaves the first gather and the last reduction of a trip next to no
kernel. Between them it has little for the reductions: it forms the gradients of weights at the end of a backward, and
takes these matmuls for so long (docs/sharding.md) that a single one of the MLP seems to hide all reductions. They begin
next to the last of the MLP; the gradients of attention's weights follow.

In a layer with experts the gathers of their weights are the longest. XLA begins them first, and the first matmul of the
layer waits until they have ended, because its own weights come after them.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from jaxopt_llm.compiler.chips import Chip
from jaxopt_llm.config import Config, MeshConfig, RematConfig
from jaxopt_llm.config.unread import divides_gradients
from jaxopt_llm.parallel.axes import STORAGE_AXES
from jaxopt_llm.parallel.codes import BLOCK_SIZES
from jaxopt_llm.parallel.mesh import make_abstract_mesh
from jaxopt_llm.planning import links
from jaxopt_llm.planning.search.attention_cost import ALL_TO_ALL, RING, AttentionCost, count_head_values
from jaxopt_llm.planning.search.block_cost import BlockCost, LayerCost
from jaxopt_llm.planning.search.microbatch import BYTES, MoECost, count_tokens
from jaxopt_llm.planning.search.passes import Passes
from jaxopt_llm.planning.search.roofline import LINK_EFFICIENCY, Cluster, Transfer, seconds_of_matmuls
from jaxopt_llm.planning.search.state_sizes import ParameterCounts, StateSizes
from jaxopt_llm.step.local_steps import has_groups


@dataclass(frozen=True)
class LayerOverlap:
    """Overlap of the transfers of layers in a step.

    gathered_alone, reduced_alone: shares of the gathers and of the reductions that move next to no kernel.
    reducing: seconds of the kernels next to which the other reductions move.
    """

    gathered_alone: float
    reduced_alone: float
    reducing: float


def find_layer_overlap(config: Config, chip: Chip, block: BlockCost, passes: Passes) -> LayerOverlap:
    """Return the overlap of the transfers of layers."""
    first, first_of_backward, beside = _count_at_ends(block, config.remat)
    whole = block.count_forward()
    alone = passes.forwards * first + passes.backwards * first_of_backward
    flops = 2 * count_tokens(config) * beside * passes.layers * passes.backwards
    return LayerOverlap(
        gathered_alone=1.0 if config.model.moe.experts else alone / (whole * (passes.forwards + passes.backwards)),
        reduced_alone=first / whole,
        reducing=seconds_of_matmuls(flops, chip, config.precision.compute_dtype),
    )


@functools.cache
def _count_at_ends(block: BlockCost, remat: RematConfig) -> tuple[float, float, float]:
    """Return the sizes of the first weights of a forward, of a backward, and of those next to which reductions run."""

    def runs_again(layer: LayerCost, index: int) -> bool:
        return _is_first(layer, index) and index in layer.follow_backward(remat).products

    first, last = block.count_multiplied(_is_first), block.count_multiplied(_is_last)
    attention = block.count_multiplied(lambda layer, index: layer.trace.products[index].module == "attention")
    # A backward begins with the last weights, unless it first runs the layer again from its beginning.
    first_of_backward = block.count_multiplied(runs_again) or last
    return first, first_of_backward, last + attention


def _is_first(layer: LayerCost, index: int) -> bool:
    """Return whether a product makes the first result of a layer; its gradients are the last of a backward."""
    return _get_result(layer, index) == _get_result(layer, 0)


def _is_last(layer: LayerCost, index: int) -> bool:
    return _get_result(layer, index) == _get_result(layer, -1)


def _get_result(layer: LayerCost, index: int) -> str | None:
    result = layer.trace.products[index].result
    return None if result is None else result.name


# Axes whose transfers the next matmul waits for, because it reads their result: XLA may schedule a kernel next to such
# a transfer, but none that takes long. The same holds for the heads that an all-to-all brings, and for transfers over
# only `expert`: tokens on the way to their experts and back.
BLOCKING_AXES = {"tensor", "pipeline"}
# Bytes of a value in blocks of codes (parallel/codes.py): its code and its share of a float32 scale.
CODE_BYTES = {"int8": 1 + 4 / BLOCK_SIZES[0], "int4": 0.5 + 4 / BLOCK_SIZES[0]}


def list_transfer(
    mesh: MeshConfig,
    cluster: Cluster,
    axes: tuple[str, ...],
    kind: str,
    array_bytes: float,
    rounds: int = 1,
    alone: float = 0.0,
    beside: float = math.inf,
) -> Iterator[Transfer]:
    """Yield a transfer, unless a single device or no bytes take part.

    Args:
        rounds: times that a ring moves the array: 2 for an all-reduce, which reduces and gathers.
        alone: share of the bytes that move next to no kernel.
        beside: seconds of the kernels next to which the others move.
    """
    axes = tuple(axis for axis in axes if mesh.size(axis) > 1)
    if not axes or not array_bytes:
        return
    group = math.prod(mesh.size(axis) for axis in axes)
    moved = rounds * array_bytes * (1 if kind == "collective-permute" else (group - 1) / group)
    link, rate = find_link_over(axes, kind, mesh, cluster)
    waited_for = BLOCKING_AXES & {*axes} or axes == ("expert",) or kind == "all-to-all"
    hidden = min(1 - alone, beside * LINK_EFFICIENCY[link] * rate / moved)
    yield Transfer(axes, link, kind, moved, moved / rate, 0.0 if waited_for else hidden)


@functools.cache
def find_link_over(axes: tuple[str, ...], kind: str, mesh: MeshConfig, cluster: Cluster) -> tuple[str, float]:
    return links.find_link(axes, kind, make_abstract_mesh(mesh), cluster.chip, cluster.gpus_per_host)


def estimate_transfers(
    config: Config, state: StateSizes, cluster: Cluster, block: BlockCost, passes: Passes
) -> Iterator[Transfer]:
    """Yield the collectives of a step."""
    step = _Step(config, cluster, block, passes)
    # `expert` divides experts. For parameters that all tokens pass it divides rows and storage, as `fsdp` does.
    yield from step.transfer_weights(state.blocks, state.non_layer, ("expert",))
    yield from step.transfer_weights(state.experts, ParameterCounts(0, 0, 0, 0), ())
    yield from step.transfer_tokens()
    yield from step.transfer_over_tensor()
    yield from step.transfer_over_pipeline()
    yield from step.transfer_over_context()


@dataclass(frozen=True)
class _Step:
    config: Config
    cluster: Cluster
    block: BlockCost
    passes: Passes

    @property
    def compute_bytes(self) -> int:
        return BYTES[self.config.precision.compute_dtype]

    @functools.cached_property
    def divided(self) -> dict[str, int]:
        """Sizes of the mesh axes with more than one device."""
        return {axis: size for axis, size in self.config.mesh.sizes.items() if size > 1}

    @functools.cached_property
    def residual(self) -> int:
        """Bytes of the residual stream of a microbatch."""
        return self.compute_bytes * count_tokens(self.config) * self.config.model.width

    @functools.cached_property
    def overlap(self) -> LayerOverlap:
        return find_layer_overlap(self.config, self.cluster.chip, self.block, self.passes)

    @functools.cached_property
    def moe(self) -> MoECost:
        return MoECost.from_config(self.config)

    def count_runs(self, layer: LayerCost, products: Collection[int]) -> int:
        """Return the number of forwards of a layer in which these products run, or some of them."""
        recomputed = layer.follow_backward(self.config.remat).products
        return self.passes.forwards + (not recomputed.isdisjoint(products)) * self.passes.backwards

    def count_dispatches(self, layer: LayerCost) -> int:
        """Return the number of forwards of a layer in which it sends rows to its experts; 0 without experts."""
        if all(mark.name != "expert_rows" for mark in layer.trace.marks):
            return 0
        recomputed = layer.follow_backward(self.config.remat).recomputed
        return self.passes.forwards + any(mark.name == "expert_rows" for mark in recomputed) * self.passes.backwards

    @property
    def transfer(self) -> Callable[..., Iterator[Transfer]]:
        """`list_transfer` of this mesh and these GPUs."""
        return functools.partial(list_transfer, self.config.mesh, self.cluster)

    def transfer_weights(
        self, layers: ParameterCounts, non_layer: ParameterCounts, expert: tuple[str, ...]
    ) -> Iterator[Transfer]:
        """Yield gathers of weights and reductions of gradients.

        Args:
            expert: ("expert",) if that axis divides the storage of these parameters, otherwise ().
        """
        config, passes, mesh = self.config, self.passes, self.config.mesh
        stage, reduced = config.sharding.zero_stage, BYTES[config.precision.reduce_dtype]
        on_stages = mesh.pipeline > 1
        storage = tuple(axis for axis in STORAGE_AXES if axis != "expert" or expert)
        # Number of times that parameters outside the stacks are read, and their gradients formed. On stages a table
        # that is both embedding and head is used in two places.
        non_layer_uses = passes.microbatches * (1 + config.model.table_is_head) if on_stages else passes.backwards
        non_layer_uses *= config.model.losses
        if stage < 2:
            # Gradients are whole. Devices that share a sequence, or lie along `expert`, sum theirs in each layer.
            summed = layers.trained / passes.chunks * passes.backwards + non_layer.trained
            yield from self.transfer((*expert, "context"), "all-reduce", reduced * summed, 2)
        if stage == 0:
            sharding, whole = config.sharding, reduced * (layers.trained + non_layer.trained)
            exact = config.sharding.data_gradients == "exact" and not has_groups(config)
            together = exact and not sharding.optimizer_over_data
            groups = ("data", "fsdp") if together else ("fsdp",)
            yield from self.transfer(groups, "all-reduce", whole, 2, alone=1.0)
            if not together:
                yield from self._transfer_over_data(layers.masters + non_layer.masters)
            return
        if stage == 1:  # XLA does not scatter gradients that it has already summed over other axes
            summed_before = not self.divided.keys().isdisjoint((*expert, "context"))
            kind, rounds = ("all-reduce", 2) if summed_before else ("reduce-scatter", 1)
            whole = reduced * (layers.trained + non_layer.trained)
            yield from self.transfer(("fsdp",), kind, whole, rounds, alone=1.0)
        else:  # no loop follows on the gradients of embedding and head
            formed = layers.trained / passes.chunks * passes.backwards
            moved = formed + non_layer.trained * non_layer_uses
            alone = 1 - (1 - self.overlap.reduced_alone) * formed / max(moved, 1)
            kind, value_bytes = "reduce-scatter", float(reduced)
            if config.sharding.fsdp_gradients != "exact" and divides_gradients(config):
                kind, value_bytes = "all-to-all", CODE_BYTES[config.sharding.fsdp_gradients]
            yield from self.transfer(storage, kind, value_bytes * moved, 1, alone, self.overlap.reducing)
        yield from self._transfer_over_data(layers.masters + non_layer.masters)
        if config.sharding.optimizer_over_data and stage < 3:
            storage = ("data", *storage)
        read, alone = float(layers.weights + non_layer.weights), 1.0
        if stage == 3:
            non_layer_uses *= 1 if on_stages else 2  # gathered within the loop over layers, and again around it
            gathered = layers.weights / passes.chunks * (passes.forwards + passes.backwards)
            read = gathered + non_layer.weights * non_layer_uses
            alone = self.overlap.gathered_alone * gathered / max(read, 1)
        yield from self.transfer(storage, "all-gather", self._gathered_bytes(storage) * read, 1, alone)

    def _transfer_over_data(self, masters: int) -> Iterator[Transfer]:
        """Yield the transfers of gradients and weights over `data` alone. masters: number of them on a device."""
        if has_groups(self.config):
            yield from self._exchange_changes(masters)
            return
        yield from self._reduce_over_data(masters)
        if self.config.sharding.optimizer_over_data and self.config.sharding.zero_stage in (0, 3):
            copies = masters * self.config.mesh.data  # the compute copy, once per step
            yield from self.transfer(("data",), "all-gather", self._gathered_bytes(("data",)) * copies, alone=1.0)

    def _reduce_over_data(self, masters: int) -> Iterator[Transfer]:
        """Yield the sum of gradients over replicas.

        masters: number of master weights of a device.
        """
        sharding, axes = self.config.sharding, ("data",)
        values = masters * (self.config.mesh.data if sharding.optimizer_over_data else 1)
        if sharding.data_gradients != "exact":
            coded = values * CODE_BYTES[sharding.data_gradients]
            yield from self.transfer(axes, "all-to-all", coded, alone=1.0)
            if not sharding.optimizer_over_data:
                yield from self.transfer(axes, "all-gather", values * CODE_BYTES["int8"], alone=1.0)
            return
        reduced = BYTES[self.config.precision.reduce_dtype]
        kind, rounds = ("reduce-scatter", 1) if sharding.optimizer_over_data else ("all-reduce", 2)
        yield from self.transfer(axes, kind, reduced * values, rounds, alone=1.0)

    def _exchange_changes(self, masters: int) -> Iterator[Transfer]:
        """Yield the transfers of an outer step, divided by the local steps. masters: number of them on a device."""
        data_gradients, axes = self.config.sharding.data_gradients, ("data",)
        per_step, reduced = masters / self.config.training.local_steps, BYTES[self.config.precision.reduce_dtype]
        if data_gradients == "exact":
            yield from self.transfer(axes, "reduce-scatter", reduced * per_step, alone=1.0)
            yield from self.transfer(axes, "all-gather", reduced * per_step, alone=1.0)
        else:
            yield from self.transfer(axes, "all-to-all", CODE_BYTES[data_gradients] * per_step, alone=1.0)
            yield from self.transfer(axes, "all-gather", CODE_BYTES[data_gradients] * per_step, alone=1.0)

    def _gathered_bytes(self, axes: tuple[str, ...]) -> float:
        """Return the bytes of a weight in a gather over these axes."""
        in_codes = self.divided.keys() & {*axes} & {*self.config.sharding.int8_gathers}
        return CODE_BYTES["int8"] if in_codes else self.compute_bytes

    def transfer_tokens(self) -> Iterator[Transfer]:
        """Yield the transfers of tokens to their experts and back. In a backward, the gradients go the other way."""
        if "expert" not in self.divided:
            return

        def count_combines(layer: LayerCost) -> int:
            last = [index for index, product in enumerate(layer.trace.products) if product.returns_tokens]
            return self.count_runs(layer, last) if last else 0

        moved, back = self.passes.layers * self.residual * self.moe.exchanged, self.moe.share * self.passes.backwards
        for kind, count in ((self.moe.dispatch, self.count_dispatches), (self.moe.combine, count_combines)):
            yield from self.transfer(("expert",), kind, moved * (self.block.average(count) + back))

    def transfer_over_tensor(self) -> Iterator[Transfer]:
        """Yield the transfers of tensor parallelism."""
        if "tensor" not in self.divided:
            return
        config, passes = self.config, self.passes
        layers, residual, axes = passes.layers, self.residual, ("tensor",)

        def count_sums(layer: LayerCost) -> int:
            # Forward: of results. Backward: of the gradients of what divided weights read.
            return sum(self.count_runs(layer, [each]) for each in layer.summed) + len(layer.shared) * passes.backwards

        def count_gathers(layer: LayerCost) -> int:
            # Forward: of what divided weights read; a backward gathers it again for their gradients, and once more to
            # compute their products again. It also gathers the gradients of results. Experts get rows instead.
            inputs = [products for mark, products in layer.shared.items() if mark.name != "expert_rows"]
            gathers = sum(self.count_runs(layer, products) + passes.backwards for products in inputs)
            return gathers + self.count_dispatches(layer) + len(layer.summed) * passes.backwards

        sums = self.block.average(count_sums)
        ends = 2 * passes.microbatches * config.model.losses  # loss and embedding
        if config.sharding.sequence_parallel:
            gathers = self.block.average(count_gathers)
            yield from self.transfer(axes, "all-gather", residual * (layers * gathers + ends))
            yield from self.transfer(axes, "reduce-scatter", residual * (layers * sums + ends))
        elif self._stage_split > 1:  # a chunk gathers its input; so do the head and the embedding's gradient
            gathers = passes.forwards + passes.backwards + ends
            yield from self.transfer(axes, "all-reduce", residual * (layers * sums + passes.microbatches), 2)
            yield from self.transfer(axes, "all-gather", residual * gathers)
            yield from self.transfer(axes, "reduce-scatter", residual * passes.microbatches)
        else:
            yield from self.transfer(axes, "all-reduce", residual * (layers * sums + ends), 2)

    @property
    def _stage_split(self) -> int:
        """Model into which `tensor` divides the activations between pipeline stages, if it can."""
        tensor = self.config.mesh.tensor
        return tensor if self.config.mesh.pipeline > 1 and self.config.training.sequence_length % tensor == 0 else 1

    def transfer_over_pipeline(self) -> Iterator[Transfer]:
        """Yield the transfers between pipeline stages.

        Each chunk's activation and its gradient go to a neighbour. The embedding's result and the head's input are
        sums over the stages, in forward and backward.
        """
        passes, activation = self.passes, self.residual / self._stage_split
        ticks = passes.first_forwards + passes.backwards
        yield from self.transfer(("pipeline",), "collective-permute", activation * ticks)
        yield from self.transfer(("pipeline",), "all-reduce", activation * 4 * passes.microbatches, 2)

    def transfer_over_context(self) -> Iterator[Transfer]:
        """Yield the transfers of attention over a divided sequence."""
        if "context" not in self.divided:
            return
        config, passes, compute = self.config, self.passes, self.compute_bytes
        attention = AttentionCost.from_config(config)
        queries, keys = (count_tokens(config) * values for values in count_head_values(config, passes))
        reruns = passes.backwards * self.block.recomputes_attention(config.remat)
        if attention.exchange == RING:
            # Keys and values; a forward that runs again takes the first part from its backward. Their gradients are
            # float32, except on the last way home and if there is only one neighbour.
            others = config.mesh.context - 1
            parts = others * (passes.forwards + passes.backwards) + (others - 1) * reruns
            narrow = 1 if others > 1 else 2
            gradients = (narrow * compute + (config.mesh.context - narrow) * 4) * passes.backwards
            yield from self.transfer(("context",), "collective-permute", 2 * keys * (compute * parts + gradients))
        elif attention.exchange == ALL_TO_ALL:
            # Forward: queries, keys, values and the result, which the weights of the output need again if it is
            # recomputed. Backward: all of those and their gradients.
            of_queries = queries * (2 * passes.forwards + reruns + 3 * passes.backwards)
            of_keys = 2 * keys * (passes.forwards + 2 * passes.backwards)
            yield from self.transfer(("context",), "all-to-all", compute * (of_queries + of_keys))
