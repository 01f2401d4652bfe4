"""Memory of a step on each GPU by arithmetic: the train state exactly, and the temporaries that dominate.

The compiler's figure is the truth. This estimate decides which settings are worth compiling, and which are advised if
memory runs out (docs/plan.md and docs/out_of_memory.md give its accuracy).
"""

import functools
import math
from dataclasses import dataclass

import jax

from jaxopt_llm.checkpoint.pretrained import make_teacher_config
from jaxopt_llm.compiler import xla_options
from jaxopt_llm.config import Config, Kind, RematConfig
from jaxopt_llm.config.model import GATED_DELTA
from jaxopt_llm.kernels.attention_xla import CAUSAL_PARTS
from jaxopt_llm.model.self_attention import most_frequent_kind
from jaxopt_llm.parallel.axes import STORAGE_AXES
from jaxopt_llm.planning.search.attention_cost import RING, AttentionCost
from jaxopt_llm.planning.search.block_cost import BlockCost
from jaxopt_llm.planning.search.delta_cost import DeltaCost
from jaxopt_llm.planning.search.microbatch import (
    BYTES,
    MoECost,
    accumulates_gradients,
    adds_in_place,
    count_table_rows,
    count_tokens,
)
from jaxopt_llm.planning.search.passes import Passes
from jaxopt_llm.planning.search.state_sizes import StateSizes
from jaxopt_llm.step.local_steps import has_groups

# XLA of jax 0.11 brings offloaded state outside the stacks to the device long before the update. Offloaded state in the
# stacks it brings one layer at a time.
FETCHES_NON_LAYER_EARLY = jax.__version_info__ >= (0, 11)

# Share of the sum of gradients over replicas that XLA allocates before the backward: 0.4 to 0.6 in most of the programs
# of tests/test_plan.py.
EARLY_SHARE = 0.5


@dataclass(frozen=True)
class Footprint:
    """Bytes of a step on each GPU.

    working: temporaries of the layer whose backward runs, and what waits from the loss.
    loss: additional bytes while the loss is computed.
    reduction: additional bytes while gradients are summed over devices.
    host: bytes of host memory.
    teacher: inputs of a teacher's head for all tokens of the step.
    """

    parameters: float
    optimizer: float
    gradients: float
    activations: float
    host: float
    working: float = 0.0
    loss: float = 0.0
    reduction: float = 0.0
    teacher: float = 0.0

    @property
    def peak(self) -> float:
        in_layer = self.gradients + self.activations + self.working
        at_loss, in_reduction = self.activations + self.loss, self.gradients + self.reduction
        return self.parameters + self.optimizer + self.teacher + max(in_layer, at_loss, in_reduction)


def compute_footprint(config: Config, state: StateSizes) -> Footprint:
    """Return the memory of a step. Call `resolve_attention` first."""
    block = BlockCost.from_config(config)
    compute, reduced = BYTES[config.precision.compute_dtype], BYTES[config.precision.reduce_dtype]
    passes, tokens = Passes.from_config(config), count_tokens(config)
    on_host = passes.layers * tokens * compute * block.count_offloaded(config.remat)
    return Footprint(
        parameters=state.parameters,
        optimizer=state.optimizer + FETCHES_NON_LAYER_EARLY * state.non_layer_host,
        gradients=_gradients(config, state, passes, reduced),
        activations=tokens * compute * _saved_elements(config, block, passes),
        working=_working(config, state, tokens, block, passes),
        loss=_loss(config, state, tokens, block, passes),
        reduction=4 * (state.layers.masters + state.non_layer.masters) if config.sharding.zero_stage == 1 else 0,
        host=state.host + on_host,
        teacher=_teacher(config, tokens, compute) if config.runs_teacher else 0.0,
    )


def _teacher(config: Config, tokens: int, compute: int) -> float:
    split = config.mesh.tensor if config.sharding.sequence_parallel else 1
    return compute * config.training.accumulation * tokens * make_teacher_config(config).model.width / split


def _gradients(config: Config, state: StateSizes, passes: Passes, reduced: int) -> float:
    """Return the bytes of one microbatch's gradients, of their sum over microbatches, and of their sum over replicas.

    In a pipeline one microbatch's gradients cover one chunk. Gradients that are added where they are formed have
    no arrays of their own. A loop over layers writes the sum over replicas.
    """
    if config.optimizer.in_backward:  # gradients of one layer, whole and divided
        one = (state.layers.trained + state.layers.gradients) / config.model.blocks
        return reduced * (one + state.non_layer.gradients)
    summed = state.layers.gradients + state.non_layer.gradients
    one = state.layers.gradients / passes.chunks + state.non_layer.gradients
    stage, replicas = config.sharding.zero_stage, config.mesh.data > 1 and not has_groups(config)
    by_layer = stage >= 2 or (stage == 0 and config.sharding.optimizer_over_data)  # for stage 1 see `reduction`
    between_replicas = EARLY_SHARE * 4 * state.layers.masters * (replicas and by_layer)
    one = 0 if adds_in_place(config) else one
    return one * reduced + summed * 4 * (accumulates_gradients(config) + passes.unrolled) + between_replicas


def _saved_elements(config: Config, block: BlockCost, passes: Passes) -> float:
    """Return the elements that wait for the backward, per token of a microbatch.

    They are the activations of all layers, and their inputs beside the residual stream. In a pipeline they are those of
    the chunk that runs, and what waits of others.
    """
    per_layer = block.count_saved(config.remat)
    every, tensor = config.remat.every, config.mesh.tensor
    if config.training.unroll == "all":  # XLA keeps the elementwise results that a loop would compute again
        norms = ("attention_input", "mlp_input") if tensor == 1 else ()
        activation = ("mlp_up",) if config.precision.matmul != "fp8" else ()  # fp8: `recomputed_apart` of the model
        per_layer += block.count_elements(*norms, *activation)
    layers = passes.layers * per_layer
    if every > 1:
        layers = passes.layers / every * block.residual + every * per_layer
    chunk_input = config.model.width / (tensor if config.training.sequence_length % tensor == 0 else 1)
    layer_inputs = config.model.layers * config.model.layer_input_size / tensor
    forward = 0.0
    if passes.paired:  # of the chunk before it joins those that wait, or of the layer that runs
        forward = layers if passes.waiting_chunks else block.count_saved(RematConfig("none"))
    return (1 + passes.waiting_chunks) * layers + forward + layer_inputs + passes.waiting_streams * chunk_input


def _loss(config: Config, state: StateSizes, tokens: int, block: BlockCost, passes: Passes) -> float:
    """Return the bytes that are alive while the loss is computed, in addition to the saved activations.

    They are: logits in float32, or the head's gradient, which is formed after the logits are gone; the logits'
    gradients in compute dtype; the head, unless it is stored in the form that matmuls read; the sum of the head's
    gradient; the sum of gradients over microbatches; and for a teacher two more arrays of logits, and its table.
    """
    model, compute = config.model, BYTES[config.precision.compute_dtype]
    rows, gradient = count_table_rows(config), _head_gradient(config, state)
    chunk = min(config.training.logit_tokens or tokens, tokens)
    summed = 4 * (state.layers.gradients + state.non_layer.gradients) if accumulates_gradients(config) else 0
    logits = 4 * rows * chunk + gradient if tokens > chunk else max(4 * rows * chunk, gradient)
    if config.training.distills:  # the teacher's logits, and those of both together
        logits += rows * 2 * 4 * chunk
    if config.runs_teacher:
        logits += rows * compute * make_teacher_config(config).model.width
    # XLA allocates the zeros that the layers' gradients are written into from the beginning.
    has_zeros = not (config.optimizer.in_backward or adds_in_place(config))
    reduced = has_zeros * BYTES[config.precision.reduce_dtype]
    zeros = reduced * state.layers.gradients / passes.chunks
    ahead = 0.0
    if _gathers_ahead(config):
        # Weights of the backward's first layer. The forward's last layer is then outside of the loop.
        last = tokens * compute * _saved_elements(config, block, passes) / passes.layers
        ahead = last + compute * state.layers.weights / (passes.layers * passes.chunks)
    if _gathers_weights(config):
        head = 1.0
    else:  # a copy of the master weights, unless a compute copy is part of the train state
        copied = config.sharding.zero_stage in (0, 3) and not config.sharding.optimizer_over_data
        head = state.non_layer.trained / state.non_layer.weights * copied
    return summed + zeros + ahead + logits + rows * compute * (chunk + head * model.width)


def _head_gradient(config: Config, state: StateSizes) -> float:
    """Return the bytes of the head's gradient, whole and in float32, which waits for its reduction."""
    return 4 * count_table_rows(config) * config.model.width * state.non_layer.trained / state.non_layer.weights


def _working(config: Config, state: StateSizes, tokens: int, block: BlockCost, passes: Passes) -> float:
    """Return the bytes that are alive while the backward is in the attention of a layer, or in its experts.

    This follows XLA's schedule.
    """
    model, compute = config.model, BYTES[config.precision.compute_dtype]
    kinds: list[Kind] = [kind for kind in model.pattern if kind != GATED_DELTA] or [most_frequent_kind(model)]
    costs = [AttentionCost.from_config(config, kind) for kind in kinds]
    cost = max(costs, key=lambda each: (each.live_scores, each.kv_size))
    scores = tokens * config.mesh.context / config.training.sequence_length * cost.live_scores  # of all rows
    # Scores and their gradient, each in float32 and in compute dtype.
    attention = scores * (2 * 4 + 2 * compute)
    if cost.exchange == RING:  # keys and values of two parts, and their gradients in float32
        attention += 2 * tokens * cost.kv_size * 2 * (compute + 4)
    # Without scores XLA holds the arrays before attention and those of the MLP at the same time.
    residual = compute * tokens * (9 if cost.flash else 5) * model.width
    weights = compute * state.layers.weights / (passes.layers * passes.chunks)
    # The four parts of attention see 1/4, 2/4, 3/4 and all of the keys. A ring also has the masks of other parts.
    masks = 4 * scores * ((CAUSAL_PARTS + 1) / 2 + (cost.exchange == RING))
    # Masks are held within attention, then the next layer's weights.
    ahead = max(masks, weights) if _gathers_ahead(config) else 0
    exchanged = MoECost.from_config(config).exchanged * model.width
    waiting, running = (compute * tokens * elements for elements in _count_mlp(block))
    running += compute * tokens * exchanged  # 0 without experts
    delta = DeltaCost.from_config(config, passes).count_working(tokens, compute)
    # While cuDNN's backward works, the MLP is done.
    workspace = cost.workspace * tokens * config.mesh.context / config.training.sequence_length if cost.cudnn else 0.0
    matmuls = max(attention + ahead + waiting, workspace + ahead, delta + ahead + waiting, running) + residual + weights
    matmuls += compute * tokens * _count_late(config, block, passes)
    # After all matmuls of a layer, its gradients are whole and wait for their reduction.
    whole = BYTES[config.precision.reduce_dtype] * state.layers.trained / (passes.layers * passes.chunks)
    layer_end = (config.sharding.zero_stage >= 2) * whole + _gathers_ahead(config) * weights
    # Without ZeRO the head's gradient is already whole among the gradients. In the backward of an MTP module, the
    # gradients of both tables from its own loss and of the head from the loss before wait, too.
    waiting_tables = (config.sharding.zero_stage > 0) + 2 * model.mtp_layers
    return max(matmuls, layer_end) + waiting_tables * _head_gradient(config, state)


def _count_late(config: Config, block: BlockCost, passes: Passes) -> float:
    """Return how many elements per token the arrays grow by that wait for the backward of a chunk without a loop.

    XLA leaves the gradients of the chunk's weights to the end. What a layer saved is gone by then, but what the
    gradients are formed from waits.
    """
    if config.mesh.pipeline == 1 or passes.in_loops:
        return 0.0
    return max(0.0, passes.layers - 1) * max(0.0, block.count_operands() - block.count_saved(config.remat))


@functools.cache
def _count_mlp(block: BlockCost) -> tuple[float, float]:
    """Return the elements of MLP and experts per token, while attention's backward runs and while the experts' runs.

    The layer that has most counts. An MLP has its projections and their gradients. Experts have what the gradients of
    their weights read: their rows, the gradients of their results, the hidden rows, and the gradients of the
    projections. While those gradients are formed, there are also both gradients of the rows, or one of them and a
    projection.
    """
    waiting, running = [], []
    for layer in block.layers:
        marks = layer.trace.marks
        waiting.append(2 * layer.count(tuple(mark for mark in marks if "mlp" in mark.name.axes)))
        if of_experts := [mark for mark in marks if "expert_mlp" in mark.name.axes]:
            rows = layer.count(tuple(mark for mark in marks if mark.name == "expert_rows"))
            one = layer.count((of_experts[0],))
            waiting[-1] += (len(of_experts) + 1) * one + 2 * rows
            running.append(waiting[-1] + rows + max(rows, one))
    return max(waiting), max(running, default=0.0)


def _gathers_ahead(config: Config) -> bool:
    """Return whether XLA gathers the next layer's weights early.

    It then also keeps the masks that attention adds (compiler/xla_options.py).
    """
    ahead = xla_options.pipelines_all_gather(config.mesh.sizes, config.training.accumulation)
    return _gathers_weights(config) and ahead


def _gathers_weights(config: Config) -> bool:
    """Return whether weights are gathered before each use."""
    return config.sharding.zero_stage == 3 and math.prod(config.mesh.size(axis) for axis in STORAGE_AXES) > 1
