"""The work of a step by arithmetic: what each GPU computes, reads, sends and copies, without compiling anything.

Letters: M microbatches, S stages, T tokens of a microbatch on one device.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from jax.sharding import AbstractMesh

from jaxopt_llm.config import TrainConfig
from jaxopt_llm.execution import stages
from jaxopt_llm.model.config import Kind, ModelConfig
from jaxopt_llm.model.decoder import layout, padded_vocabulary
from jaxopt_llm.parallel import links
from jaxopt_llm.parallel.mesh import AXES, BATCH_AXES, MeshConfig
from jaxopt_llm.parallel.topology import CHIPS
from jaxopt_llm.search.block import Block, keys_formed, recomputed
from jaxopt_llm.search.resting import Resting
from jaxopt_llm.search.roofline import Cluster, Work

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Bytes that attention's kernels read and write for each score, counted in a compiled program (jax 0.10.2): scores in
# float32 written, read and written masked, read for the softmax; that in 16 bits written, and read by the product with
# the values. In the backward scores and the softmax's gradient written and read in float32, what becomes of both
# written in 16 bits, and read by three products.
SCORE_FORWARD, SCORE_BACKWARD = 20, 26
# Elements of the residual stream, of queries and keys, and of the MLP's width that the kernels between a block's
# products read and write for a token: norms, residual sums; rotary positions; activation function.
FORWARD = {"residual": 10, "heads": 2, "mlp": 3}
BACKWARD = {"residual": 22, "heads": 4, "mlp": 9}  # what is elementwise is computed again first
LOGIT = 22  # bytes read and written for each logit, from its product to those of its gradient

# Shares of what is sent beside which other kernels are scheduled, as programs are compiled: what is gathered or reduced
# in every layer is, what is reduced once a step, after the microbatches, is not.
IN_LAYERS, AT_THE_END = 1.0, 0.0


@dataclass(frozen=True)
class Sent:
    """See roofline.Sent. bytes: on a ring."""

    axes: tuple[str, ...]
    link: str
    bytes: float
    seconds: float
    overlapped: float


@dataclass(frozen=True)
class Passes:
    """How often a device runs its layers forward (recomputation apart) and backward, and the loss, in a step."""

    forward: int
    backward: int
    loss: int

    @classmethod
    def of(cls, config: TrainConfig) -> "Passes":
        microbatches, count = config.training.accumulation, config.mesh.pipeline
        if count > 1:  # the backward runs its stage again
            ticks = microbatches + count - 1
            return cls(2 * ticks, ticks, microbatches)
        again = microbatches if config.remat.every > 1 else 0
        return cls(microbatches + again, microbatches, microbatches)


@functools.cache
def kinds_held(model: ModelConfig, pipeline: int) -> tuple[tuple[Kind, int], ...]:
    """The kinds of layer of one device, with how many of each it runs: what the fullest stage has."""
    segments = layout(model)
    slots = [places.shape[-1] for places in stages.split(segments, pipeline)]
    return tuple((kind, count) for segment, count in zip(segments, slots, strict=True) for kind in segment.kinds)


def layers_held(model: ModelConfig, pipeline: int) -> int:
    return sum(count for _, count in kinds_held(model, pipeline))


def tokens(config: TrainConfig) -> int:
    """Of a microbatch, on one device."""
    training = config.training
    return training.batch_size // (training.accumulation * config.mesh.batch_shards) * training.sequence_length


def workload(config: TrainConfig, rests: Resting, cluster: Cluster) -> Work:
    model, mesh, training = config.model, config.mesh, config.training
    block = Block.of(model, mesh.tensor, config.sharding.sequence_parallel)
    passes, count, again = Passes.of(config), tokens(config), recomputed(config.remat, model)
    held = layers_held(model, mesh.pipeline)
    compute, reduced = BYTES[config.precision.compute_dtype], BYTES[config.precision.reduce_dtype]

    weights = sum(block.weights.values())
    trained = rests.layers.trained / rests.layers.weights
    rerun = passes.backward * sum(block.weights.get(name, 0.0) for name in again)
    products = weights * passes.forward + rerun + weights * passes.backward * (1 + trained)

    kinds = kinds_held(model, mesh.pipeline)
    formed = sum(number * keys_formed(model, kind, training.sequence_length) for kind, number in kinds)
    scores = count * formed * model.heads / mesh.tensor
    attends = passes.forward + ("attention" in again) * passes.backward

    table = padded_vocabulary(model.vocabulary_size) / mesh.tensor * model.width
    logits = passes.loss * count * table / model.width
    chunks = -(-count // training.loss_chunk) if training.loss_chunk else 1

    def between(sizes: dict[str, int]) -> float:
        """Bytes that the kernels between a block's products move for a token."""
        heads, mlp = block.elements["query"] + block.elements["key"], block.elements["mlp_up"]
        return compute * (sizes["residual"] * block.residual + sizes["heads"] * heads + sizes["mlp"] * mlp)

    streamed = held * count * (passes.forward * between(FORWARD) + passes.backward * between(BACKWARD))
    # Weights are cast and written whole for each pass; gradients are written, and read where they are reduced.
    streamed += rests.layers.weights * 2 * compute * (passes.forward + passes.backward)
    streamed += rests.layers.trained * 2 * reduced * passes.backward
    if accumulates(config):
        streamed += (rests.layers.gradients + rests.outer.gradients) * 12 * passes.backward
    streamed += LOGIT * logits + passes.loss * chunks * 8 * table
    # The update reads and writes what rests, and reads the gradients twice: for their norm before.
    streamed += 2 * (rests.parameters + rests.optimizer + rests.host)
    streamed += 8 * (rests.layers.masters + rests.outer.masters)

    kept_on_host = held * count * compute * sum(block.elements[name] for name in config.remat.offload)
    beside = 2 * training.accumulation * kept_on_host
    return Work(
        flops=2 * held * count * products + 6 * logits * model.width,
        attention_flops=2 * model.head_dim * scores * (2 * attends + 5 * passes.backward),
        attention_bytes=scores * (SCORE_FORWARD * attends + SCORE_BACKWARD * passes.backward),
        bytes=streamed,
        sent=tuple(_sent(config, rests, cluster, block, passes)),
        pcie_bytes=2 * rests.host + beside,
        pcie_beside=beside,
        idle=_idle(config),
    )


def accumulates(config: TrainConfig) -> bool:
    """Whether gradients are summed over microbatches in arrays of their own, in float32."""
    return config.training.accumulation > 1 or config.mesh.pipeline > 1


def _idle(config: TrainConfig) -> float:
    """The share of the layers' time that a stage has no microbatch, and places without a layer."""
    microbatches, count = config.training.accumulation, config.mesh.pipeline
    places = layers_held(config.model, count) * count
    return 1 - config.model.layers / places * microbatches / (microbatches + count - 1)


def _sent(config: TrainConfig, rests: Resting, cluster: Cluster, block: Block, passes: Passes) -> Iterator[Sent]:
    mesh, stage = config.mesh, config.sharding.zero_stage
    compute, reduced = BYTES[config.precision.compute_dtype], BYTES[config.precision.reduce_dtype]

    def over(
        axes: tuple[str, ...], kind: str, array_bytes: float, rounds: int, overlapped: float = IN_LAYERS
    ) -> Iterator[Sent]:
        """rounds: in how many a ring moves the array; 2 reduce and gather it."""
        axes = tuple(axis for axis in axes if getattr(mesh, axis) > 1)
        if not axes or not array_bytes:
            return
        group = math.prod(getattr(mesh, axis) for axis in axes)
        moved = rounds * array_bytes * (1 if kind == "collective-permute" else (group - 1) / group)
        name, rate = _link(axes, kind, mesh, cluster.gpu, cluster.gpus_per_host)
        yield Sent(axes, name, moved, moved / rate, overlapped)

    layers, outer = rests.layers, rests.outer
    trained, weights = layers.trained + outer.trained, layers.weights + outer.weights
    if stage == 0:
        yield from over(BATCH_AXES, "all-reduce", reduced * trained, 2, AT_THE_END)
    else:
        each, overlapped = (passes.backward, IN_LAYERS) if stage >= 2 else (1, AT_THE_END)
        yield from over(ZERO_AXES, "reduce-scatter", reduced * trained * each, 1, overlapped)
        yield from over(("data",), "all-reduce", reduced * (layers.masters + outer.masters), 2, AT_THE_END)
        gathers = passes.forward + passes.backward if stage == 3 else 1
        yield from over(ZERO_AXES, "all-gather", compute * weights * gathers, 1, overlapped)

    held, residual = layers_held(config.model, mesh.pipeline), compute * tokens(config) * config.model.width
    again = recomputed(config.remat, config.model)
    # Of a block: each pass forward has two sums over `tensor`, and as many backward; what is recomputed, one more.
    sums = 2 * passes.forward + (2 + len(again & {"attention_output", "mlp_output"})) * passes.backward
    # The loss and the embedding, each once a microbatch.
    ends = 2 * passes.backward
    if config.sharding.sequence_parallel:
        inputs = ({"query", "key", "value"}, {"mlp_gate", "mlp_up"})
        gathers = 2 * passes.forward + (4 + sum(bool(again & names) for names in inputs)) * passes.backward
        yield from over(("tensor",), "all-gather", residual * (held * gathers + ends), 1)
        yield from over(("tensor",), "reduce-scatter", residual * (held * sums + ends), 1)
    else:
        yield from over(("tensor",), "all-reduce", residual * (held * sums + ends), 2)
    ticks = passes.backward * 2  # one activation forward and one gradient backward
    whole = config.model.width / block.residual
    yield from over(("pipeline",), "collective-permute", residual / whole * ticks, 1)


ZERO_AXES = ("fsdp", "expert")


@functools.cache
def _link(axes: tuple[str, ...], kind: str, mesh: MeshConfig, gpu: str, gpus_per_host: int) -> tuple[str, float]:
    return links.link(axes, kind, AbstractMesh(dataclasses.astuple(mesh), AXES), CHIPS[gpu], gpus_per_host)
