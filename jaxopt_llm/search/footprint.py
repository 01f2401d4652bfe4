"""What a step holds on each GPU by arithmetic: what rests is exact, the temporaries are those that dominate.

The compiler's figure is the truth; this one decides which settings are worth compiling, and which are advised where
memory runs out (docs/plan.md and docs/out_of_memory.md say how close it comes).
"""

import dataclasses
import math
from dataclasses import dataclass

import jax

from jaxopt_llm.config import TrainConfig
from jaxopt_llm.kernels.attention_xla import CAUSAL_PARTS
from jaxopt_llm.parallel import xla_options
from jaxopt_llm.parallel.axes import STORAGE_AXES
from jaxopt_llm.search.attention import RING, Attention
from jaxopt_llm.search.block import Block, kept
from jaxopt_llm.search.mixture import Mixture
from jaxopt_llm.search.passes import Passes
from jaxopt_llm.search.resting import Resting
from jaxopt_llm.search.workload import BYTES, accumulates, classes, tokens

# What is outside the stacks and rests on the host, XLA of jax 0.11 brings to the device long before the update. What is
# in them it brings a layer at a time.
FETCHED_EARLY = jax.__version_info__ >= (0, 11)


@dataclass(frozen=True)
class Footprint:
    """Bytes. working: of the layer whose backward runs, and what waits from the loss. loss, reduction: beside what else
    is there at these moments, while the loss is formed and where gradients are summed over devices. host: of host
    memory."""

    parameters: float
    optimizer: float
    gradients: float
    activations: float
    working: float
    loss: float
    reduction: float
    host: float

    @property
    def peak(self) -> float:
        in_layer = self.gradients + self.activations + self.working
        at_loss, in_reduction = self.activations + self.loss, self.gradients + self.reduction
        return self.parameters + self.optimizer + max(in_layer, at_loss, in_reduction)


def footprint(config: TrainConfig, rests: Resting) -> Footprint:
    block = Block.of(config)
    compute, reduced = BYTES[config.precision.compute_dtype], BYTES[config.precision.reduce_dtype]
    passes, count = Passes.of(config), tokens(config)
    on_host = passes.layers * count * compute * sum(block.elements[name] for name in config.remat.offload)
    return Footprint(
        parameters=rests.parameters,
        optimizer=rests.optimizer + FETCHED_EARLY * rests.outer_host,
        gradients=_gradients(config, rests, passes, reduced),
        activations=count * compute * _kept_elements(config, block, passes),
        working=_working(config, rests, count, passes),
        loss=_loss(config, rests, count, block, passes),
        reduction=4 * (rests.layers.masters + rests.outer.masters) if config.sharding.zero_stage == 1 else 0,
        host=rests.host + on_host,
    )


def _gradients(config: TrainConfig, rests: Resting, passes: Passes, reduced: int) -> float:
    """Of one microbatch, in a pipeline of one chunk, and their sum over microbatches in float32."""
    if config.optimizer.in_backward:  # one layer's, whole and divided
        one = (rests.layers.trained + rests.layers.gradients) / config.model.layers
        return reduced * (one + rests.outer.gradients)
    summed = rests.layers.gradients + rests.outer.gradients
    one = rests.layers.gradients / passes.chunks + rests.outer.gradients
    return one * reduced + summed * 4 * (accumulates(config) + passes.unrolled)


def _kept_elements(config: TrainConfig, block: Block, passes: Passes) -> float:
    """Per token of a microbatch: what waits for the backward in all layers, and in a pipeline, whose backward runs a
    chunk of them again, between the stages."""
    names = kept(config.remat, config.model)
    each = sum(block.elements[name] for name in names)
    if "attention" in names:
        each += 2 * config.model.heads / config.mesh.tensor  # the log of the softmax's sum, in float32
    every, tensor = config.remat.every, config.mesh.tensor
    layers = passes.layers * each
    if every > 1:
        layers = passes.layers / every * block.residual + every * each
    between = config.model.width / (tensor if config.training.sequence_length % tensor == 0 else 1)
    return layers + passes.waiting * between


def _loss(config: TrainConfig, rests: Resting, count: int, block: Block, passes: Passes) -> float:
    """Logits in float32, or the head's gradient that is formed when they are gone, and their gradients as the products
    read them; the head, where it does not rest as they read it; what its gradient is summed up in; and what is summed
    over microbatches."""
    model, compute = config.model, BYTES[config.precision.compute_dtype]
    rows, gradient = classes(config), _head_gradient(config, rests)
    chunk = min(config.training.loss_chunk or count, count)
    summed = 4 * (rests.layers.gradients + rests.outer.gradients) if accumulates(config) else 0
    logits = 4 * rows * chunk + gradient if count > chunk else max(4 * rows * chunk, gradient)
    # The zeros that the layers' gradients are written into, XLA has from the beginning.
    reduced = 0 if config.optimizer.in_backward else BYTES[config.precision.reduce_dtype]
    zeros = reduced * rests.layers.gradients / passes.chunks
    ahead = 0.0
    if _gathers_ahead(config):  # for the backward's first layer; the last of the forward is then outside of the loop
        last = count * compute * _kept_elements(config, block, passes) / passes.layers
        ahead = last + compute * rests.layers.weights / (passes.layers * passes.chunks)
    if _gathers(config):
        head = 1.0
    else:  # a copy of the master, which in stages 1 and 2 rests
        head = rests.outer.trained / rests.outer.weights * (config.sharding.zero_stage in (0, 3))
    return summed + zeros + ahead + logits + rows * compute * (chunk + head * model.width)


def _head_gradient(config: TrainConfig, rests: Resting) -> float:
    """In float32, whole: it waits for its reduction."""
    return 4 * classes(config) * config.model.width * rests.outer.trained / rests.outer.weights


def _working(config: TrainConfig, rests: Resting, count: int, passes: Passes) -> float:
    """What lives while the backward is in the attention of a layer, or in its experts, as XLA schedules it."""
    model, compute = config.model, BYTES[config.precision.compute_dtype]
    of_attention = Attention.of(config)
    scores = _rows(config, count) * of_attention.scores
    # Scores and their gradient in float32, and both as the products read them.
    attention = scores * (2 * 4 + 2 * compute)
    if of_attention.exchange == RING:  # keys and values of two parts, and their gradients in float32
        attention += 2 * count * of_attention.kv_heads * model.head_dim * 2 * (compute + 4)
    # Without scores XLA holds what precedes attention and what the MLP works with together.
    residual = compute * count * (9 if of_attention.flash else 5) * model.width
    weights = compute * rests.layers.weights / (passes.layers * passes.chunks)
    # In attention its masks, and after it the next layer's weights.
    ahead = max(scores * 4 * _masks(of_attention), weights) if _gathers_ahead(config) else 0
    waiting, running = (compute * count * elements for elements in _mlp_elements(config))
    products = max(attention + ahead + waiting, running) + residual + weights
    # When all products of a layer are formed, its gradients wait whole for their reduction.
    whole = BYTES[config.precision.reduce_dtype] * rests.layers.trained / (passes.layers * passes.chunks)
    formed = (config.sharding.zero_stage >= 2) * whole + _gathers_ahead(config) * weights
    return max(products, formed) + _head_gradient(config, rests)


def _mlp_elements(config: TrainConfig) -> tuple[float, float]:
    """Per token, of the layer that has most, while attention's backward runs, and while that of experts does.

    Of an MLP its two projections and their gradients. Of experts what their weights' gradients want: the rows, their
    results' gradients, the hidden rows, and the gradients of both projections; beside those, when they are formed, both
    gradients of the rows, or one and a projection, and what is exchanged."""
    model, mixture, tensor = config.model, Mixture.of(config), config.mesh.tensor
    dense = 4 * (model.mlp_width if mixture.share < 1 else model.shared_expert_width) / tensor
    if not mixture.share:
        return dense, 0.0
    hidden, width, shared = model.expert_width / tensor, model.width, 4 * model.shared_expert_width / tensor
    waiting = mixture.rows * (3 * hidden + 2 * width)
    running = mixture.rows * (3 * hidden + 3 * width + max(hidden, width)) + mixture.exchanged * width
    return max(dense, waiting + shared), running + shared


def _rows(config: TrainConfig, count: int) -> float:
    return count * config.mesh.context / config.training.sequence_length


def _masks(attention: Attention) -> float:
    """Of the scores of all keys: the masks of the four parts of attention, which see 1/4, 2/4, 3/4 and all of them. In
    a ring there are no parts."""
    return 1.0 if attention.exchange == RING else (CAUSAL_PARTS + 1) / 2


def _gathers_ahead(config: TrainConfig) -> bool:
    """Whether XLA gathers the next layer's weights early; it then keeps the masks that attention adds, too (see
    parallel/xla_options.py)."""
    ahead = xla_options.gathers_ahead(dataclasses.asdict(config.mesh), config.training.accumulation)
    return _gathers(config) and ahead


def _gathers(config: TrainConfig) -> bool:
    """Whether weights are gathered where they are used."""
    return config.sharding.zero_stage == 3 and math.prod(getattr(config.mesh, axis) for axis in STORAGE_AXES) > 1
