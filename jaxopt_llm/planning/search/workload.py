"""Work of a step by arithmetic: FLOPs, bytes and transfers of each GPU, without compiling anything.

`predict_footprint` and `predict_seconds` make memory and time of it.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace

import jax

from jaxopt_llm.checkpoint.pretrained import make_teacher_config
from jaxopt_llm.compiler.chips import CHIPS, Chip, chip_of
from jaxopt_llm.compiler.hlo import Leg
from jaxopt_llm.config import Config, RematConfig
from jaxopt_llm.config.training import GRPO
from jaxopt_llm.model.flops import CODE_PRODUCTS, count_quantised_blocks
from jaxopt_llm.planning.search.attention_cost import RING, AttentionCost, count_head_values, list_attention
from jaxopt_llm.planning.search.block_cost import BlockCost
from jaxopt_llm.planning.search.delta_cost import STREAMED, DeltaCost
from jaxopt_llm.planning.search.footprint import Footprint, compute_footprint
from jaxopt_llm.planning.search.grouped_rate import Groups, find_efficiency
from jaxopt_llm.planning.search.microbatch import BYTES, accumulates_gradients, count_table_rows, count_tokens
from jaxopt_llm.planning.search.passes import Passes
from jaxopt_llm.planning.search.roofline import (
    MATMUL_EFFICIENCY,
    MEMORY_EFFICIENCY,
    Cluster,
    GroupedWork,
    Work,
    compute_step_time,
    kernel_efficiency,
)
from jaxopt_llm.planning.search.state_sizes import StateSizes, compute_state_sizes, compute_teacher_sizes
from jaxopt_llm.planning.search.transfers import estimate_transfers

# Bytes that `xla`'s attention reads and writes for each score, counted in a compiled program (jax 0.10.2). Forward:
# scores in float32 are written, read and written masked, and read for the softmax; the softmax in 16 bits is written,
# and read by the matmul with the values. Backward: scores and the softmax's gradient are written and read in float32,
# the results of both are written in 16 bits, and three matmuls read them.
SCORE_BYTES_FORWARD, SCORE_BYTES_BACKWARD = 20, 26
MERGE_BYTES = 12  # bytes per element to add the results or gradients of a ring's part to the others', in float32
PAIR_BYTES = 4  # bytes per element to copy chunks of a part for a kernel that skips no keys
# Bytes that the kernels of the loss read and write per logit: float32 logits are read for their maximum, for the sum of
# exponentials and for the gradient, which is written in 16 bits.
LOGIT_BYTES = 14


def estimate_work(config: Config, state: StateSizes, cluster: Cluster) -> Work:
    """Return the work of one GPU in a step. Call `resolve_attention` first."""
    work = _estimate_passes(config, state, cluster, Passes.from_config(config))
    if not config.runs_teacher:
        return work
    own = make_teacher_config(config)
    forward = Passes.from_config(own).only_forward
    return _add(work, _estimate_passes(own, compute_teacher_sizes(config), cluster, forward))


def _add(work: Work, teacher: Work) -> Work:
    """Return the work of a step with the forward of a teacher, which multiplies no codes.

    What rests on the host counts in `work`, with the rest of the state.
    """
    attention = work.attention_flops + teacher.attention_flops
    seconds = sum(each.attention_flops / each.attention_efficiency for each in (work, teacher))
    return replace(
        work,
        flops=work.flops + teacher.flops + (teacher.grouped.flops if teacher.grouped else 0.0),
        attention_flops=attention,
        attention_bytes=work.attention_bytes + teacher.attention_bytes,
        attention_efficiency=attention / seconds,
        bytes=work.bytes + teacher.bytes,
        transfers=(*work.transfers, *teacher.transfers),
    )


def _estimate_passes(config: Config, state: StateSizes, cluster: Cluster, passes: Passes) -> Work:
    """Return the work of one GPU in these passes, and in the update if there is a backward."""
    model, block = config.model, BlockCost.from_config(config)
    tokens = count_tokens(config)
    layers, compute = passes.layers, BYTES[config.precision.compute_dtype]

    matmuls = _count_multiplied(block, passes, config.remat)
    of_experts = _count_multiplied(block, passes, config.remat, of_experts=True)
    repeated = matmuls["forward"] - passes.first_forwards * block.count_forward()
    grouped = {leg: 2 * layers * tokens * count for leg, count in of_experts.items()}
    of_kernel = sum(grouped.values()) if config.training.grouped_matmul != "xla" else 0.0
    dense = {leg: 2 * layers * tokens * (count - of_experts[leg]) for leg, count in matmuls.items()}
    code_flops = _count_code_flops(config, cluster.chip, dense)

    attention = AttentionCost.from_config(config)
    of_kinds = [(AttentionCost.from_config(config, kind), kind, number) for kind, number in list_attention(passes)]
    scores = [(cost, tokens * cost.heads * number * cost.count_scored_keys(kind)) for cost, kind, number in of_kinds]
    products = sum(count * sum(cost.head_sizes) for cost, count in scores)
    attention_reruns = passes.repeated_forwards + block.recomputes_attention(config.remat) * passes.backwards
    attention_forwards = passes.first_forwards + attention_reruns
    forward_flops = 2 * products * attention_forwards
    backward_flops = 2 * sum(count * _count_backward(cost) for cost, count in scores) * passes.backwards
    in_memory = sum(count for cost, count in scores if not cost.flash)
    score_bytes = SCORE_BYTES_FORWARD * attention_forwards + SCORE_BYTES_BACKWARD * passes.backwards

    delta = DeltaCost.from_config(config, passes)
    deltas = delta.layers * tokens
    delta_flops = attention_forwards * delta.forward.flops + passes.backwards * delta.backward.flops
    delta_bytes = attention_forwards * delta.forward.bytes + passes.backwards * delta.backward.bytes

    logits = passes.microbatches * tokens * count_table_rows(config) * model.losses
    # Objectives over pairs or groups first compute log-probabilities, and so does the forward of their reference.
    training = config.training
    again = training.objective == GRPO or (bool(training.pairs) and not training.reads_scores)
    forwards = 1 + 2 * (passes.backwards > 0) + again + config.runs_reference
    of_head = 2 * forwards * logits * model.width
    offloaded = layers * tokens * compute * block.count_offloaded(config.remat)
    copied = 2 * passes.backwards * offloaded
    return Work(
        flops=2 * layers * tokens * sum(matmuls.values())
        - of_kernel
        - sum(code_flops.values())
        + of_head
        + deltas * delta_flops,
        grouped=_describe_grouped(config, cluster.chip, grouped) if of_kernel else None,
        attention_flops=forward_flops + backward_flops,
        attention_bytes=in_memory * score_bytes,
        attention_efficiency=_attention_efficiency(attention, cluster.chip, forward_flops, backward_flops),
        repeated_flops=2 * layers * tokens * repeated
        + (2 * products + deltas * delta.forward.flops) * attention_reruns,
        bytes=_streamed_bytes(config, state, block, passes, attention, attention_forwards)
        + layers * tokens * compute * _count_waiting(config, cluster.chip, block, passes)
        + deltas * delta_bytes * STREAMED,
        transfers=tuple(estimate_transfers(config, state, cluster, block, passes)),
        pcie_bytes=2 * state.host + copied,
        idle=passes.idle,
        code_flops=code_flops,
    )


def _count_multiplied(
    block: BlockCost, passes: Passes, remat: RematConfig, of_experts: bool = False
) -> dict[Leg, float]:
    """Return the weights that a token is multiplied with in a layer, by leg, in all passes.

    Args:
        of_experts: only those of experts.
    """
    whole, again = block.count_forward(of_experts=of_experts), block.count_recomputed(remat, of_experts)
    return {
        "forward": passes.forwards * whole + passes.backwards * again,
        "dx": passes.backwards * whole,
        "dw": passes.backwards * block.count_forward(trained=True, of_experts=of_experts),
    }


def _count_code_flops(config: Config, chip: Chip, dense: Mapping[Leg, float]) -> dict[str, float]:
    """Return the FLOPs of matmuls of codes, by their dtype. What adapters multiply in compute dtype counts, too.

    Args:
        dense: FLOPs of each leg, without those of experts.
    """
    precision, model = config.precision, config.model
    products, quantised = CODE_PRODUCTS.get(precision.matmul), count_quantised_blocks(model, precision)
    share = quantised / model.blocks
    if products is None or products.dtype not in chip.peak_flops:  # the second is refused when it is compiled
        return {}
    return {products.dtype: share * sum(count for leg, count in dense.items() if leg in products.legs)}


def _count_waiting(config: Config, chip: Chip, block: BlockCost, passes: Passes) -> float:
    """Return the numbers per token in a layer for which products wait. Each leg moves the same arrays."""
    rate = MATMUL_EFFICIENCY * chip.peak_flops[config.precision.compute_dtype]
    per_flop = MEMORY_EFFICIENCY * chip.memory_bytes_per_second / rate
    whole, again, trained = (
        block.count_waiting(*each) for each in ((None, per_flop), (config.remat, per_flop), (None, per_flop, True))
    )
    return passes.forwards * whole + passes.backwards * (again + whole + trained)


def _describe_grouped(config: Config, chip: Chip, flops: Mapping[Leg, float]) -> GroupedWork:
    """Return the grouped matmuls of a step. An even load fills the groups.

    Args:
        flops: FLOPs of each leg.
    """
    moe = config.model.moe
    rows = count_tokens(config) * moe.experts_per_token * config.mesh.expert / moe.experts
    groups = Groups(rows, config.model.width, moe.expert_width // config.mesh.tensor)
    whole = sum(flops.values())
    slowed = sum(count / find_efficiency(chip, leg, groups) for leg, count in flops.items())
    return GroupedWork(whole, whole / slowed, groups)


def _count_backward(attention: AttentionCost) -> float:
    """Return the multiplications of attention's backward for each score.

    Heads of the size of keys: scores, and the gradients of queries and keys. Heads of the size of values: the gradients
    of the softmax and of values. Our kernels compute scores and the softmax's gradient twice.
    """
    keys, values = attention.head_sizes
    twice = attention.flash and not attention.cudnn
    return 4 * keys + 3 * values if twice else 3 * keys + 2 * values


def _attention_efficiency(attention: AttentionCost, chip: Chip, forward_flops: float, backward_flops: float) -> float:
    """Return the share of the peak that the matmuls of attention attain, forward and backward together."""
    if not attention.flash or not forward_flops:  # or no layer attends
        return MATMUL_EFFICIENCY
    forward, backward = (kernel_efficiency(chip, attention.implementation, each) for each in ("forward", "backward"))
    return (forward_flops + backward_flops) / (forward_flops / forward + backward_flops / backward)


def _streamed_bytes(
    config: Config,
    state: StateSizes,
    block: BlockCost,
    passes: Passes,
    attention: AttentionCost,
    attention_forwards: int,
) -> float:
    """Return the bytes that everything other than matmuls and attention's scores reads and writes."""
    tokens, layers = count_tokens(config), passes.layers
    compute, reduced = BYTES[config.precision.compute_dtype], BYTES[config.precision.reduce_dtype]
    queries, keys = (tokens * values for values in count_head_values(config, passes))

    forward, backward = block.count_streamed(config.remat)
    streamed = layers * tokens * compute * (passes.forwards * forward + passes.backwards * backward)
    if passes.in_loops:  # each backward follows a forward that saves what it reads
        streamed += layers * tokens * compute * passes.backwards * block.count_stacked(config.remat)
    if passes.waiting_chunks:  # into the buffers and out of them
        saved = layers * tokens * compute * block.count_saved(config.remat)
        streamed += 2 * saved * (passes.forwards + passes.backwards)
    # A layer's weights are cast or copied as they rest, before they are gathered. Its gradients go into their stack as
    # they rest, too.
    share = state.layers.masters / max(state.layers.trained, 1) if config.sharding.zero_stage == 3 else 1.0
    streamed += share * state.layers.weights / passes.chunks * 2 * compute * (passes.forwards + passes.backwards)
    streamed += state.layers.gradients / passes.chunks * 2 * reduced * passes.backwards
    if accumulates_gradients(config):
        streamed += 12 * state.layers.gradients / passes.chunks * passes.backwards
        streamed += 12 * state.non_layer.gradients * passes.microbatches
    if attention.exchange == RING:
        merged = queries * (attention_forwards + passes.backwards) + 2 * keys * passes.backwards
        streamed += (config.mesh.context - 1) * MERGE_BYTES * merged
    if attention.by_pairs:  # queries, keys and values; in the backward also the output and its gradient
        copied = (queries + 2 * keys) * (attention_forwards + passes.backwards) + 2 * queries * passes.backwards
        streamed += (config.mesh.context - 1) * PAIR_BYTES * copied
    rows = count_table_rows(config)
    streamed += LOGIT_BYTES * passes.microbatches * tokens * rows * config.model.losses
    if not passes.backwards:
        return streamed
    # The update reads and writes the train state, and reads the gradients twice: first for their norm.
    streamed += 2 * (state.parameters + state.optimizer + state.host)
    streamed += 8 * (state.layers.masters + state.non_layer.masters)
    return streamed


STAND_IN = "h100"  # GPU by whose rates a run on other devices is estimated


@functools.cache
def predict_footprint(config: Config) -> Footprint:
    """Return the memory of a step by arithmetic."""
    return compute_footprint(config, _find_state(config))


@functools.cache
def predict_seconds(config: Config, cluster: Cluster) -> float:
    """Return the time of a step by the arithmetic with which `plan --search` ranks settings."""
    return compute_step_time(predict_work(config, cluster), cluster.chip, config.precision.compute_dtype).total


def predict_work(config: Config, cluster: Cluster) -> Work:
    """Return the work of one GPU in a step; see `estimate_work`."""
    return estimate_work(config, _find_state(config), cluster)


def _find_state(config: Config) -> StateSizes:
    state = compute_state_sizes(config)
    assert state is not None, "`validate` refuses such moments"
    return state


def describe_cluster(devices: int) -> Cluster:
    """Return the GPUs of this run; for devices without figures, GPUs whose rates have similar proportions.

    devices: number of devices in all processes.
    """
    chip, hosts = chip_of(jax.devices()[0].device_kind), jax.process_count()
    name = next((name for name, known in CHIPS.items() if known is chip), STAND_IN)
    return Cluster(name, hosts, devices // hosts)
