"""The settings that a search walks, and which of them are legal."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from jaxopt_llm import config as configuration
from jaxopt_llm.config import TrainConfig
from jaxopt_llm.execution import stages
from jaxopt_llm.execution.schedules import PipelineConfig
from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.kernels.attention import KERNELS
from jaxopt_llm.model.decoder import layout
from jaxopt_llm.parallel.axes import STORAGE_AXES
from jaxopt_llm.parallel.mesh import MeshConfig
from jaxopt_llm.parallel.sharding import ShardingConfig
from jaxopt_llm.search.attention import ALL_TO_ALL, RING
from jaxopt_llm.search.roofline import Cluster
from jaxopt_llm.training import shapes
from jaxopt_llm.validation import WITH_IN_BACKWARD

# From what keeps most to what keeps least.
REMAT = (
    RematConfig("none"),
    RematConfig("none", offload=("query", "mlp_gate", "mlp_up")),
    RematConfig(("query", "key", "attention", "mlp_gate", "mlp_up")),
    RematConfig(("attention", "mlp_gate", "mlp_up")),
    RematConfig("save_qkv"),
    RematConfig("save_attention"),
    RematConfig("full"),
    RematConfig("full", offload=("block_input",)),
)
# Tokens of a device's part of a sequence, at least. Keys and values of fewer take longer to go round than a kernel
# takes to attend to them: by the rates of roofline.py on an H100, over NVLink, with as many key-value heads as heads.
PART = 2048
# What is walked only where the user allows it: what alters what is learnt, values from wide to narrow; and attention's
# kernels, none of which has been measured. An optimizer in the backward comes with what it wants: no clip, no skipped
# step.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "training.attention": tuple(KERNELS),
    "optimizer.state_dtype": ("float32", "bfloat16", "int8"),
    "precision.reduce_dtype": ("float32", "bfloat16"),
    "precision.compute_dtype": ("float32", "bfloat16"),
    "optimizer.in_backward": (False, True),
}


def walk(
    config: TrainConfig, mesh: MeshConfig, allowed: tuple[str, ...] = (), lean: bool = False
) -> Iterator[TrainConfig]:
    """Every legal setting of the recipe's model, data and global batch on this mesh; none where `mesh_problems` names
    any. lean: those alone that need least: without replicas, in the most runs of layers, of a layer its input, of the
    fewest rows."""
    if mesh_problems(config, mesh) or (lean and mesh.data > 1):
        return
    # A stage of a pipeline runs its layers again at once: there is nothing to move to the host in between.
    remats = [each for each in REMAT if not (each.offload and mesh.pipeline > 1)]
    accumulations = divisors(config.training.batch_size // mesh.batch_shards)
    pipelines = pipelines_of(config, mesh)
    if lean:
        remats, accumulations, pipelines = remats[-1:], accumulations[-1:], pipelines[-1:]
    for variant in variants(config, allowed):
        ways = itertools.product(remats, accumulations)
        if variant.optimizer.in_backward:  # which goes with nothing else
            ways = itertools.product([RematConfig("full")], [1] * (mesh.pipeline == 1))
        shardings = [(each, offloads) for offloads in (False, True) for each in _shardings(config, mesh, offloads)]
        for (sharding, offloads), pipeline, (remat, accumulation) in itertools.product(shardings, pipelines, [*ways]):
            if not _divides_sequences(config, mesh, accumulation):
                continue
            yield replace(
                variant,
                mesh=mesh,
                sharding=sharding,
                pipeline=pipeline,
                remat=remat,
                offload=replace(config.offload, optimizer=offloads),
                training=replace(variant.training, accumulation=accumulation),
            )


def _divides_sequences(config: TrainConfig, mesh: MeshConfig, accumulation: int) -> bool:
    """Whether there is a reason to: where its rows have a divisor in common with `context`, `fsdp` by as much more
    leaves a device as many tokens, and less is exchanged."""
    return math.gcd(config.training.batch_size // (mesh.batch_shards * accumulation), mesh.context) == 1


def meshes(config: TrainConfig, cluster: Cluster) -> Iterator[MeshConfig]:
    """Of all these GPUs, `tensor` within a host: it exchanges activations in every layer."""
    experts = config.model.experts
    for tensor in divisors(cluster.gpus_per_host):
        for context in divisors(cluster.devices // tensor):
            if context > 1 and config.training.sequence_length < context * PART:
                break
            for expert in divisors(math.gcd(experts, cluster.devices // (tensor * context)) if experts else 1):
                for fsdp in divisors(cluster.devices // (tensor * context * expert)):
                    for data in divisors(cluster.devices // (tensor * context * expert * fsdp)):
                        stages = cluster.devices // (tensor * context * expert * fsdp * data)
                        yield MeshConfig(stages, data, fsdp, expert, context, tensor)


def mesh_problems(config: TrainConfig, mesh: MeshConfig) -> list[str]:
    """Why no setting on this mesh is legal."""
    at_once, whole = (
        replace(config.training, accumulation=1),
        [ShardingConfig(context_exchange=each) for each in _exchanges(config, mesh)],
    )
    found = min((shapes.problems(config.model, at_once, mesh, each) for each in whole), key=len)
    found += stages.problems(layout(config.model), mesh.pipeline, PipelineConfig())
    if mesh.pipeline > 1 and config.optimizer.in_backward:
        found.append(f"mesh.pipeline={mesh.pipeline} does not go with optimizer.in_backward")
    return found


def pipelines_of(config: TrainConfig, mesh: MeshConfig) -> list[PipelineConfig]:
    """The recipe's schedule and split where the layers can be so split over these stages, else 1f1b; and interleaved
    with the fewest and with the most runs of a stage that its layers divide into. On one stage, which has none, the
    recipe's alone."""
    if mesh.pipeline == 1:
        return [config.pipeline]

    def fits(pipeline: PipelineConfig) -> bool:
        return not stages.problems(layout(config.model), mesh.pipeline, pipeline)

    own = config.pipeline if fits(config.pipeline) else PipelineConfig()
    periods = sum(segment.repeats for segment in layout(config.model))
    interleaved = (PipelineConfig("interleaved", runs) for runs in range(2, periods // mesh.pipeline + 1))
    others = [each for each in interleaved if fits(each)]
    return list(dict.fromkeys([own, *others[:1], *others[-1:]]))


def variants(config: TrainConfig, allowed: tuple[str, ...]) -> list[TrainConfig]:
    """The configuration with each combination of the values that are allowed, its own or narrower, and legal."""
    found = [config]
    for name in allowed:
        found = [configuration.changed(each, {name: value}) for each in found for value in _narrower(each, name)]
    found = [configuration.changed(each, WITH_IN_BACKWARD) if each.optimizer.in_backward else each for each in found]
    return [each for each in found if not each.precision.problems() + each.optimizer.problems()]


def _narrower(config: TrainConfig, name: str) -> tuple[Any, ...]:
    """A field's own value, and those after it; attention's kernels have no order."""
    own, values = configuration.get(config, name), ALLOWED[name]
    if name == "training.attention":
        return tuple(dict.fromkeys((own, *values)))
    return values[values.index(own) :] if own in values else (own,)


def _shardings(config: TrainConfig, mesh: MeshConfig, offloads: bool) -> Iterator[ShardingConfig]:
    """With `fsdp` or `expert`, stage 0 is `data` by another name; with `context`, stages 0 and 1 sum whole gradients in
    every layer, for nothing. With none of them there is nothing to divide; but stage 1 has masters beside what the
    blocks read, which can rest on the host."""
    zero_stages: tuple[Literal[0, 1, 2, 3], ...] = (0, 1) if offloads else (0,)
    if any(getattr(mesh, axis) > 1 for axis in STORAGE_AXES):
        zero_stages = (2, 3) if mesh.context > 1 else (1, 2, 3)
    stage: Literal[0, 1, 2, 3]
    for stage, exchange in itertools.product(zero_stages, _exchanges(config, mesh)):
        for sequence_parallel in (False, True) if mesh.tensor > 1 else (False,):
            sharding = replace(
                config.sharding, zero_stage=stage, sequence_parallel=sequence_parallel, context_exchange=exchange
            )
            if not shapes.problems(config.model, replace(config.training, accumulation=1), mesh, sharding):
                yield sharding


def _exchanges(config: TrainConfig, mesh: MeshConfig) -> Sequence[Literal["ring", "all_to_all"]]:
    return (RING, ALL_TO_ALL) if mesh.context > 1 else (config.sharding.context_exchange,)


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
