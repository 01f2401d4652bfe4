"""Check that sizes are divisible by the mesh. Each problem suggests the nearest sizes that are."""

import math

from jaxopt_llm.config import BATCH_AXES, MeshConfig, ModelConfig, ShardingConfig, TrainingConfig
from jaxopt_llm.config.fields import get_field
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.model.decoder_specs import VOCABULARY_MULTIPLE, pad_vocabulary_size


def problems(model: ModelConfig, training: TrainingConfig, mesh: MeshConfig, sharding: ShardingConfig) -> list[str]:
    """Check the rows of a microbatch, the sequence, the experts, and the sizes that mesh.tensor splits."""
    batch = {"training.accumulation": training.accumulation} | {f"mesh.{axis}": mesh.size(axis) for axis in BATCH_AXES}
    over = " × ".join(f"{name}={size}" for name, size in batch.items() if size > 1)
    found = _divisibility_problems(
        f"training.batch_size={training.batch_size}", training.batch_size, math.prod(batch.values()), over
    )
    fewer = _choose_accumulation(training, mesh.batch_shards)
    if found and fewer:
        found = [f"{found[0]}; or set --training.accumulation {fewer}"]

    length = training.sequence_length
    exchanges = ("ring", "all_to_all") if sharding.context_exchange == AUTO else (sharding.context_exchange,)
    by_exchange = [_context_problems(model, length, mesh, each) for each in exchanges]
    fewest = min(by_exchange, key=len)
    found += fewest

    if experts := model.moe.experts:
        over_expert = f"mesh.expert={mesh.expert}"
        found += _divisibility_problems(f"model.moe.experts={experts}", experts, mesh.expert, over_expert)

    def over_tensor(tensor: int) -> list[str]:
        return tensor_problems(model, length, sharding.sequence_parallel, tensor, mesh.context)

    if split := over_tensor(mesh.tensor):
        fewer = next(tensor for tensor in range(mesh.tensor - 1, 0, -1) if not over_tensor(tensor))
        found += [*split, f"or set mesh.tensor={fewer}, which divides all of these sizes"]
    return found


def _choose_accumulation(training: TrainingConfig, shards: int) -> int:
    """Return the largest accumulation, up to the configured one, with which the batch divides; 0 if none does.

    shards: number of devices that the batch is split over.
    """
    most = training.accumulation
    return next((each for each in range(most, 0, -1) if training.batch_size % (each * shards) == 0), 0)


def _context_problems(model: ModelConfig, length: int, mesh: MeshConfig, exchange: str) -> list[str]:
    """Check the sequence that `context` splits, and what an exchange of attention requires."""
    zigzag = mesh.context > 1 and exchange == "ring"
    parts, over = (2 if zigzag else 1) * mesh.context, f"{'2 × ' * zigzag}mesh.context={mesh.context}"
    found = _divisibility_problems(f"training.sequence_length={length}", length, parts, over)
    return found + (_heads_problems(model, mesh) if mesh.context > 1 and not zigzag else [])


def _heads_problems(model: ModelConfig, mesh: MeshConfig) -> list[str]:
    """Check that the all-to-all over `context` can split the heads of a device along `tensor`."""
    if model.heads % (mesh.tensor * mesh.context) == 0:
        return []
    over = f"mesh.context={mesh.context}" + f" × mesh.tensor={mesh.tensor}" * (mesh.tensor > 1)
    return [
        f"sharding.context_exchange=all_to_all splits the heads, and model.heads={model.heads} is not divisible by "
        f"{over}: set --sharding.context-exchange ring, or use fewer devices along these axes"
    ]


def tensor_problems(
    model: ModelConfig, sequence_length: int, sequence_parallel: bool, tensor: int, context: int = 1
) -> list[str]:
    """Check the sizes of all logical axes that the placement's tables map to `tensor`."""
    over, heads, kv_heads = f"mesh.tensor={tensor}", model.heads, model.kv_heads
    padded = pad_vocabulary_size(model.vocabulary_size)
    dense = not all(map(model.moe.has_experts, range(model.layers)))
    names = ["mlp_width"] * dense + ["moe.expert_width", "moe.shared_expert_width"] * bool(model.moe.experts)
    widths = {f"model.{name}={get_field(model, name)}": get_field(model, name) for name in names}
    vocabulary = f"model.vocabulary_size={model.vocabulary_size}, padded to {padded},"
    found = _divisibility_problems(f"model.heads={heads}", heads, tensor, over, step=kv_heads)
    for name, width in widths.items():
        found += _divisibility_problems(name, width, tensor, over)
    found += _divisibility_problems(vocabulary, padded, tensor, over, step=VOCABULARY_MULTIPLE)
    # Fewer key-value heads than `tensor` are replicated; see Placement.replicates.
    if kv_heads > tensor and kv_heads % tensor:
        valid = [n for n in range(1, heads + 1) if heads % n == 0 and (n < tensor or n % tensor == 0)]
        below, above = [n for n in valid if n < kv_heads], [n for n in valid if n > kv_heads]
        found.append(_message(f"model.kv_heads={kv_heads}", over, [*below[-1:], *above[:1]]))
    if sequence_parallel:
        length = f"training.sequence_length={sequence_length}, which sharding.sequence_parallel splits,"
        over = f"mesh.context={context} × {over}" if context > 1 else over
        found += _divisibility_problems(length, sequence_length, context * tensor, over)
    return found


def _divisibility_problems(name: str, size: int, divisor: int, over: str, step: int = 1) -> list[str]:
    """Check that a size is divisible.

    Args:
        over: description of the divisor.
        step: number of which the size must be a multiple in any case.
    """
    if size % divisor == 0:
        return []
    step = math.lcm(divisor, step)
    below = size // step * step
    return [_message(name, over, [near for near in (below, below + step) if near])]


def _message(name: str, over: str, nearest: list[int]) -> str:
    return f"{name} is not divisible by {over} (nearest that are: {' and '.join(map(str, nearest))})"
