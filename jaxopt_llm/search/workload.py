"""The work of a step by arithmetic: what each GPU computes, reads, sends and copies, without compiling anything."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jax.sharding import AbstractMesh

from jaxopt_llm.config import TrainConfig
from jaxopt_llm.model.decoder import padded_vocabulary
from jaxopt_llm.parallel import links
from jaxopt_llm.parallel.axes import STORAGE_AXES
from jaxopt_llm.parallel.mesh import AXES, MeshConfig
from jaxopt_llm.parallel.topology import CHIPS
from jaxopt_llm.search.attention import ALL_TO_ALL, RING, Attention
from jaxopt_llm.search.block import Block, recomputed
from jaxopt_llm.search.mixture import Mixture
from jaxopt_llm.search.passes import Passes
from jaxopt_llm.search.resting import Resting, Values
from jaxopt_llm.search.roofline import Cluster, Work

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Bytes that attention's kernels read and write for each score, counted in a compiled program (jax 0.10.2): scores in
# float32 written, read and written masked, read for the softmax; that in 16 bits written, and read by the product with
# the values. In the backward scores and the softmax's gradient written and read in float32, what becomes of both
# written in 16 bits, and read by three products.
SCORE_FORWARD, SCORE_BACKWARD = 20, 26
# Elements of the residual stream, of queries and keys, of the MLP's width, and of rows for experts that the kernels
# between a block's products read and write for a token: norms, residual sums; rotary positions; activation function;
# what is picked of tokens and of rows.
FORWARD = {"residual": 10, "heads": 2, "mlp": 3, "rows": 3}
BACKWARD = {"residual": 22, "heads": 4, "mlp": 9, "rows": 7}  # what is elementwise is computed again first
MERGED = 12  # bytes read and written where one part's results, or gradients, are added to others', in float32
LOGIT = 22  # bytes read and written for each logit, from its product to those of its gradient

# Shares of what is sent beside which other kernels are scheduled, as programs are compiled: what is gathered or reduced
# in every layer is, what is reduced once a step, after the microbatches, is not.
IN_LAYERS, AT_THE_END = 1.0, 0.0


@dataclass(frozen=True)
class Sent:
    """See roofline.Sent. bytes: on a ring."""

    axes: tuple[str, ...]
    link: str
    kind: str
    bytes: float
    seconds: float
    overlapped: float


def tokens(config: TrainConfig) -> int:
    """Of a microbatch, on one device."""
    training = config.training
    rows = training.batch_size // (training.accumulation * config.mesh.batch_shards)
    return rows * training.sequence_length // config.mesh.context


def classes(config: TrainConfig) -> int:
    """Rows of the vocabulary's tables that a device looks up in and forms logits of: stages divide them, too."""
    return -(-padded_vocabulary(config.model.vocabulary_size) // (config.mesh.tensor * config.mesh.pipeline))


def workload(config: TrainConfig, rests: Resting, cluster: Cluster) -> Work:
    model, mesh, training = config.model, config.mesh, config.training
    block = Block.of(config)
    passes, count, again = Passes.of(config), tokens(config), recomputed(config.remat, model)
    compute, reduced = BYTES[config.precision.compute_dtype], BYTES[config.precision.reduce_dtype]

    weights = sum(block.weights.values())
    trained = rests.layers.trained / rests.layers.weights
    rerun = passes.again * weights + passes.backward * sum(block.weights.get(name, 0.0) for name in again)
    products = weights * passes.forward + rerun + weights * passes.backward * (1 + trained)

    attention = Attention.of(config)
    formed = sum(number * attention.keys_formed(kind) for kind, number in passes.kinds)
    scores = count * formed * attention.heads
    attends_again = passes.again + ("attention" in again) * passes.backward
    attends = passes.forward + attends_again
    keys, values = attention.sizes
    # Scores, and the queries' and keys' gradients; results, and the gradients of weights and values. A kernel forms
    # scores and the gradients of weights twice.
    backward = 4 * keys + 3 * values if attention.flash else 3 * keys + 2 * values

    table = classes(config) * model.width
    logits = passes.loss * count * classes(config)
    chunks = -(-count // training.loss_chunk) if training.loss_chunk else 1

    def between(sizes: dict[str, int]) -> float:
        """Bytes that the kernels between a block's products move for a token."""
        elements = {
            "residual": block.residual,
            "heads": block.elements["query"] + block.elements["key"],
            "mlp": block.elements["mlp_up"],
            "rows": block.elements["expert_rows"],
        }
        return compute * sum(sizes[name] * elements[name] for name in elements)

    held = passes.layers
    streamed = held * count * (passes.forwards * between(FORWARD) + passes.backward * between(BACKWARD))
    # Weights are cast and written whole for each pass; gradients are written, and read where they are reduced.
    streamed += rests.layers.weights / passes.chunks * 2 * compute * (passes.forwards + passes.backward)
    streamed += rests.layers.trained / passes.chunks * 2 * reduced * passes.backward
    if accumulates(config):
        streamed += 12 * rests.layers.gradients / passes.chunks * passes.backward
        streamed += 12 * rests.outer.gradients * passes.loss
    if attention.exchange == RING:
        of_queries, of_keys = (count * model.head_dim * heads for heads in (attention.heads, attention.kv_heads))
        summed = of_queries * (attends + passes.backward) + 2 * of_keys * passes.backward
        streamed += held * (mesh.context - 1) * MERGED * summed
    streamed += LOGIT * logits + passes.loss * chunks * 8 * table
    # The update reads and writes what rests, and reads the gradients twice: for their norm before.
    streamed += 2 * (rests.parameters + rests.optimizer + rests.host)
    streamed += 8 * (rests.layers.masters + rests.outer.masters)

    kept_on_host = held * count * compute * sum(block.elements[name] for name in config.remat.offload)
    beside = 2 * passes.backward * kept_on_host
    return Work(
        flops=2 * held * count * products + 6 * logits * model.width,
        attention_flops=2 * scores * ((keys + values) * attends + backward * passes.backward),
        attention_bytes=0 if attention.flash else scores * (SCORE_FORWARD * attends + SCORE_BACKWARD * passes.backward),
        flash=attention.flash,
        repeated_flops=2 * held * count * rerun + 2 * (keys + values) * scores * attends_again,
        bytes=streamed,
        sent=tuple(_sent(config, rests, cluster, block, passes)),
        pcie_bytes=2 * rests.host + beside,
        pcie_beside=beside,
        idle=passes.idle,
    )


def accumulates(config: TrainConfig) -> bool:
    """Whether gradients are summed over microbatches in arrays of their own, in float32."""
    return config.training.accumulation > 1 or config.mesh.pipeline > 1


def _sent(config: TrainConfig, rests: Resting, cluster: Cluster, block: Block, passes: Passes) -> Iterator[Sent]:
    mesh, compute = config.mesh, BYTES[config.precision.compute_dtype]

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
        yield Sent(axes, name, kind, moved, moved / rate, overlapped)

    outer, none = rests.outer, Values(0, 0, 0, 0)
    # `expert` divides experts; of what all tokens pass it divides rows and storage, as `fsdp` does.
    yield from _weights_sent(config, passes, over, rests.blocks, outer, ("expert",))
    yield from _weights_sent(config, passes, over, rests.experts, none, ())

    held, residual = passes.layers, compute * tokens(config) * config.model.width
    again, mixture = recomputed(config.remat, config.model), Mixture.of(config)
    # Tokens go to the experts forward, and again where rows are computed again; their results' gradients backward.
    # Results come back forward, rows' gradients backward.
    of_mixtures = held * mixture.share * residual
    there = passes.forwards + (1 + ("expert_rows" in again)) * passes.backward
    back = passes.forwards + (1 + ("mlp_output" in again)) * passes.backward
    yield from over(("expert",), mixture.there, of_mixtures * mixture.exchanged * there, 1)
    yield from over(("expert",), mixture.back, of_mixtures * mixture.exchanged * back, 1)
    # Attention and an MLP have each a sum over `tensor` in a pass forward, and one backward; what is recomputed, one
    # more. What comes back from experts is summed, too.
    sums: float = passes.forwards + (1 + ("attention_output" in again)) * passes.backward
    sums += block.dense * (passes.forwards + (1 + ("mlp_output" in again)) * passes.backward)
    sums += mixture.share * back
    # The loss and the embedding, each once a microbatch.
    ends = 2 * passes.loss
    # Between stages `tensor` divides activations, too, where it can.
    on_stages = mesh.pipeline > 1
    tensor = mesh.tensor if on_stages and config.training.sequence_length % mesh.tensor == 0 else 1
    if config.sharding.sequence_parallel:
        inputs = ({"query", "key", "value"}, {"mlp_gate", "mlp_up"})
        of_attention, of_mlp = (passes.forwards + (2 + bool(again & names)) * passes.backward for names in inputs)
        gathers = of_attention + block.dense * of_mlp + mixture.share * there
        yield from over(("tensor",), "all-gather", residual * (held * gathers + ends), 1)
        yield from over(("tensor",), "reduce-scatter", residual * (held * sums + ends), 1)
    elif tensor > 1:  # a chunk gathers what it reads, the head and the embedding's gradient, too
        gathers = passes.forwards + passes.backward + ends
        yield from over(("tensor",), "all-reduce", residual * (held * sums + passes.loss), 2)
        yield from over(("tensor",), "all-gather", residual * gathers, 1)
        yield from over(("tensor",), "reduce-scatter", residual * passes.loss, 1)
    else:
        yield from over(("tensor",), "all-reduce", residual * (held * sums + ends), 2)
    # Each chunk's activation and its gradient go to a neighbour; what the embedding gives and what the head takes are
    # sums over the stages, there and back.
    yield from over(("pipeline",), "collective-permute", residual / tensor * (passes.forward + passes.backward), 1)
    yield from over(("pipeline",), "all-reduce", residual / tensor * 4 * passes.loss, 2)
    attention, per_head = Attention.of(config), held * tokens(config) * config.model.head_dim
    queries, keys = per_head * attention.heads, per_head * attention.kv_heads
    attends_again = passes.backward if "attention" in again else 0
    if attention.exchange == RING:
        # Keys and values; run again, a forward has what comes first from its backward. Their gradients in float32, but
        # for what comes home, and all that goes to a single neighbour.
        others = mesh.context - 1
        parts = others * (passes.forwards + passes.backward) + (others - 1) * attends_again
        narrow = 1 if others > 1 else 2
        of_gradients = (narrow * compute + (mesh.context - narrow) * 4) * passes.backward
        yield from over(("context",), "collective-permute", 2 * keys * (compute * parts + of_gradients), 1)
    elif attention.exchange == ALL_TO_ALL:
        # Forward queries, keys, values and the result, which the output's weights want again where it is recomputed;
        # backward all of those and their gradients.
        of_queries = queries * (2 * passes.forwards + attends_again + 3 * passes.backward)
        of_keys = 2 * keys * (passes.forwards + 2 * passes.backward)
        yield from over(("context",), "all-to-all", compute * (of_queries + of_keys), 1)


def _weights_sent(
    config: TrainConfig,
    passes: Passes,
    over: Callable[..., Iterator[Sent]],
    layers: Values,
    outer: Values,
    expert: tuple[str, ...],
) -> Iterator[Sent]:
    """Of what `expert`, if it is named, divides the storage of."""
    mesh, stage = config.mesh, config.sharding.zero_stage
    compute, reduced = BYTES[config.precision.compute_dtype], BYTES[config.precision.reduce_dtype]
    storage = tuple(axis for axis in STORAGE_AXES if axis != "expert" or expert)
    on_stages = mesh.pipeline > 1
    # How often all that is outside the stacks is read, and gradients of it are formed: on stages, a table that is the
    # embedding and the head in two places.
    of_outer = passes.loss * (1 + config.model.tied_head) if on_stages else passes.backward
    if stage < 2:  # gradients are whole: what devices of a sequence, or along `expert`, have is summed in the layers
        summed = layers.trained / passes.chunks * passes.backward + outer.trained
        yield from over((*expert, "context"), "all-reduce", reduced * summed, 2)
    if stage == 0:
        yield from over(("data", "fsdp"), "all-reduce", reduced * (layers.trained + outer.trained), 2, AT_THE_END)
        return
    formed: float = layers.trained + outer.trained
    read: float = layers.weights + outer.weights
    overlapped = IN_LAYERS if stage >= 2 else AT_THE_END
    if stage >= 2:
        formed = layers.trained / passes.chunks * passes.backward + outer.trained * of_outer
    if stage == 3:
        of_outer *= 1 if on_stages else 2  # within a loop over layers and around it they are gathered again
        read = layers.weights / passes.chunks * (passes.forwards + passes.backward) + outer.weights * of_outer
    if stage == 1:  # where they have been summed over others, XLA does not scatter
        summed_before = any(getattr(mesh, axis) > 1 for axis in (*expert, "context"))
        kind, rounds = ("all-reduce", 2) if summed_before else ("reduce-scatter", 1)
        yield from over(("fsdp",), kind, reduced * formed, rounds, overlapped)
    else:
        yield from over(storage, "reduce-scatter", reduced * formed, 1, overlapped)
    yield from over(("data",), "all-reduce", reduced * (layers.masters + outer.masters), 2, AT_THE_END)
    yield from over(storage, "all-gather", compute * read, 1, overlapped)


@functools.cache
def _link(axes: tuple[str, ...], kind: str, mesh: MeshConfig, gpu: str, gpus_per_host: int) -> tuple[str, float]:
    return links.link(axes, kind, AbstractMesh(dataclasses.astuple(mesh), AXES), CHIPS[gpu], gpus_per_host)
