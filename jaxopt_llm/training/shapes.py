"""Sizes that do not divide over the mesh, each with the nearest that do, known before anything is compiled."""

import math

from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.decoder import VOCABULARY_MULTIPLE, padded_vocabulary
from jaxopt_llm.parallel.mesh import BATCH_AXES, MeshConfig
from jaxopt_llm.parallel.sharding import ShardingConfig
from jaxopt_llm.training.step import TrainingConfig


def problems(model: ModelConfig, training: TrainingConfig, mesh: MeshConfig, sharding: ShardingConfig) -> list[str]:
    """Of the rows of a microbatch, of the sequence, and of what mesh.tensor splits."""
    batch = {"training.accumulation": training.accumulation} | {f"mesh.{a}": getattr(mesh, a) for a in BATCH_AXES}
    over = " × ".join(f"{name}={size}" for name, size in batch.items())
    shards = math.prod(batch.values())
    found = _unless_multiple(f"training.batch_size={training.batch_size}", training.batch_size, shards, over)

    length = training.sequence_length
    dealt = mesh.context > 1 and sharding.context_exchange == "ring"
    parts, over_context = (2 if dealt else 1) * mesh.context, f"{'2 × ' * dealt}mesh.context={mesh.context}"
    found += _unless_multiple(f"training.sequence_length={length}", length, parts, over_context)
    found += _heads_problems(model, mesh) if mesh.context > 1 and not dealt else []

    if model.experts:
        over_expert = f"mesh.expert={mesh.expert}"
        found += _unless_multiple(f"model.experts={model.experts}", model.experts, mesh.expert, over_expert)

    def over_tensor(tensor: int) -> list[str]:
        return tensor_problems(model, length, sharding.sequence_parallel, tensor, mesh.context)

    if split := over_tensor(mesh.tensor):
        fewer = next(tensor for tensor in range(mesh.tensor - 1, 0, -1) if not over_tensor(tensor))
        found += [*split, f"or mesh.tensor={fewer}, which divides them as they are"]
    return found


def _heads_problems(model: ModelConfig, mesh: MeshConfig) -> list[str]:
    """Of all-to-all over `context`, which divides the heads that `tensor` leaves a device."""
    if model.heads % (mesh.tensor * mesh.context) == 0:
        return []
    over = f"mesh.context={mesh.context}" + f" × mesh.tensor={mesh.tensor}" * (mesh.tensor > 1)
    return [
        f"sharding.context_exchange=all_to_all gives each device some of the heads, and model.heads={model.heads} does "
        f"not divide by {over}: take ring, which divides none, or fewer devices along them"
    ]


def tensor_problems(
    model: ModelConfig, sequence_length: int, sequence_parallel: bool, tensor: int, context: int = 1
) -> list[str]:
    """Of every logical axis that the placement's tables lay over `tensor`."""
    over, heads, kv_heads = f"mesh.tensor={tensor}", model.heads, model.kv_heads
    padded = padded_vocabulary(model.vocabulary_size)
    dense = not all(map(model.has_experts, range(model.layers)))
    widths = ["mlp_width"] * dense + ["expert_width", "shared_expert_width"] * bool(model.experts)
    vocabulary = f"model.vocabulary_size={model.vocabulary_size}, padded to {padded},"
    found = [
        *_unless_multiple(f"model.heads={heads}", heads, tensor, over, step=kv_heads),
        *(
            each
            for name in widths
            for each in _unless_multiple(f"model.{name}={getattr(model, name)}", getattr(model, name), tensor, over)
        ),
        *_unless_multiple(vocabulary, padded, tensor, over, step=VOCABULARY_MULTIPLE),
    ]
    # Fewer than `tensor` are replicated, as Placement.replicates says.
    if kv_heads > tensor and kv_heads % tensor:
        works = [n for n in range(1, heads + 1) if heads % n == 0 and (n < tensor or n % tensor == 0)]
        below, above = [n for n in works if n < kv_heads], [n for n in works if n > kv_heads]
        found.append(_sentence(f"model.kv_heads={kv_heads}", over, [*below[-1:], *above[:1]]))
    if sequence_parallel:
        length = f"training.sequence_length={sequence_length}, which sharding.sequence_parallel splits,"
        over = f"mesh.context={context} × {over}" if context > 1 else over
        found += _unless_multiple(length, sequence_length, context * tensor, over)
    return found


def _unless_multiple(what: str, size: int, divisor: int, over: str, step: int = 1) -> list[str]:
    """step: what the size must be a multiple of anyway."""
    if size % divisor == 0:
        return []
    step = math.lcm(divisor, step)
    below = size // step * step
    return [_sentence(what, over, [near for near in (below, below + step) if near])]


def _sentence(what: str, over: str, nearest: list[int]) -> str:
    return f"{what} does not divide by {over} (nearest that do: {' and '.join(map(str, nearest))})"
