"""Settings that a search goes through: all legal combinations of mesh, sharding, pipeline, remat and accumulation."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from jaxopt_llm.config import Config, MeshConfig, PipelineConfig, RematConfig, ShardingConfig, fields
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.config.parallel import WITH_CHUNKS, Residuals
from jaxopt_llm.config.unread import find_unread
from jaxopt_llm.execution import stage_layout
from jaxopt_llm.model.decoder_specs import list_segments
from jaxopt_llm.parallel.axes import STORAGE_AXES
from jaxopt_llm.planning.search.attention_cost import ALL_TO_ALL, RING
from jaxopt_llm.planning.search.block_cost import keep_existing
from jaxopt_llm.planning.search.roofline import Cluster
from jaxopt_llm.step.validation import size_problems

# Ordered from the one that saves most activations on the device to the one that saves fewest.
REMATS = (
    RematConfig("none"),
    RematConfig("none", offload=("query", "mlp_gate", "mlp_up")),
    RematConfig(("query", "key", "attention", "mlp_gate", "mlp_up")),
    RematConfig(("attention", "mlp_gate", "mlp_up")),
    RematConfig("save_qkv"),
    RematConfig("save_attention"),
    RematConfig("full"),
    RematConfig("full", offload=("block_input",)),
)
# Smallest number of tokens of a sequence on a device. Keys and values of fewer tokens take longer to go around the ring
# than a kernel takes to attend to them: by the rates of roofline.py on an H100, over NVLink, with as many key-value
# heads as heads.
MIN_CONTEXT_TOKENS = 2048

ZeroStage = Literal[0, 1, 2, 3]


def enumerate_settings(
    config: Config, mesh: MeshConfig, allowed: tuple[str, ...] = (), lean: bool = False
) -> Iterator[Config]:
    """Yield every legal setting of the recipe's model, data and global batch on this mesh.

    Nothing is yielded if `list_mesh_problems` finds a problem.

    Args:
        allowed: fields that may also change (`fields.SEARCHED`).
        lean: yield only the settings that need least memory: no replicas, only the input of each layer saved, the
            smallest microbatch.
    """
    if list_mesh_problems(config, mesh) or (lean and mesh.data > 1):
        return
    remats = [keep_existing(remat, config) for remat in REMATS if not (remat.offload and mesh.pipeline > 1)]
    accumulations = list_divisors(config.training.batch_size // mesh.batch_shards)
    pipelines = list_pipelines(config, mesh)
    if lean:
        remats, accumulations = remats[-1:], accumulations[-1:]
    for variant in list_variants(replace(config, mesh=mesh), allowed):
        shardings = [
            (sharding, offload)
            for offload in (replace(config.offload, optimizer=offloads) for offloads in (False, True))
            for sharding in _enumerate_shardings(variant, mesh, offload.optimizer)
            if not _is_excluded(replace(variant, sharding=sharding, offload=offload), config)
        ]
        choices = itertools.product(remats, accumulations)
        if variant.optimizer.in_backward:  # requires full recomputation, one microbatch and no pipeline
            choices = itertools.product([RematConfig("full")], [1] * (mesh.pipeline == 1))
        for (sharding, offload), pipeline, (remat, accumulation) in itertools.product(shardings, pipelines, choices):
            if _is_context_useful(config, mesh, accumulation) and _is_remat_useful(pipeline, remat):
                training = replace(variant.training, accumulation=accumulation)
                yield replace(
                    variant, sharding=sharding, pipeline=pipeline, remat=remat, offload=offload, training=training
                )


def _is_excluded(setting: Config, recipe: Config) -> bool:
    """Return whether a setting is illegal, or whether the search chose something in it that changes nothing."""
    changed = {name for name in fields.SEARCHED if fields.get_field(setting, name) != fields.get_field(recipe, name)}
    alone = "training.local_steps" in changed and setting.mesh.data == 1
    return alone or bool(changed and changed & find_unread(setting).keys()) or bool(setting.local_step_problems())


def _is_remat_useful(pipeline: PipelineConfig, remat: RematConfig) -> bool:
    """Return False for policies that save little of a chunk that runs again anyway."""
    return pipeline.residuals != "recompute" or remat.policy in ("none", "full")


def _is_context_useful(config: Config, mesh: MeshConfig, accumulation: int) -> bool:
    """Return False if a larger `fsdp` could replace a part of `context`.

    This is the case if the rows of a microbatch and `context` have a common divisor. A larger `fsdp` then leaves each
    device as many tokens, and less is exchanged.
    """
    return math.gcd(config.training.batch_size // (mesh.batch_shards * accumulation), mesh.context) == 1


def enumerate_meshes(config: Config, cluster: Cluster) -> Iterator[MeshConfig]:
    """Yield the meshes that use all GPUs.

    `tensor` stays within a host, because it exchanges activations in every layer.
    """
    experts = config.model.moe.experts
    for tensor in list_divisors(cluster.gpus_per_host):
        for context in list_divisors(cluster.devices // tensor):
            if context > 1 and config.training.sequence_length < context * MIN_CONTEXT_TOKENS:
                break
            for expert in list_divisors(math.gcd(experts, cluster.devices // (tensor * context)) if experts else 1):
                for fsdp in list_divisors(cluster.devices // (tensor * context * expert)):
                    for data in list_divisors(cluster.devices // (tensor * context * expert * fsdp)):
                        stages = cluster.devices // (tensor * context * expert * fsdp * data)
                        yield MeshConfig(stages, data, fsdp, expert, context, tensor)


def list_mesh_problems(config: Config, mesh: MeshConfig) -> list[str]:
    """Return the reasons why no setting on this mesh is legal."""
    training = replace(config.training, accumulation=1)
    found = size_problems(config.model, training, mesh, ShardingConfig())
    found += stage_layout.split_problems(list_segments(config.model), mesh.pipeline, PipelineConfig())
    found += replace(config, mesh=mesh).crossing_problems()
    if mesh.pipeline > 1 and config.optimizer.in_backward:
        found.append(f"mesh.pipeline={mesh.pipeline} cannot be combined with optimizer.in_backward")
    return found


def list_pipelines(config: Config, mesh: MeshConfig) -> list[PipelineConfig]:
    """Return the pipeline schedules to try on this mesh.

    The first is the recipe's schedule and split, or 1f1b if the layers cannot be split like this over these stages. The
    others are the schedules with chunks, with the fewest and with the most chunks per stage that its layers divide
    into. Each comes with both values of `residuals`, if the recipe leaves it open. On a single stage, which has no
    schedule, only the recipe's is returned.
    """
    if mesh.pipeline == 1:
        return [config.pipeline]

    def fits(pipeline: PipelineConfig) -> bool:
        return not stage_layout.split_problems(list_segments(config.model), mesh.pipeline, pipeline)

    first = config.pipeline if fits(config.pipeline) else PipelineConfig()
    periods = sum(segment.repeats for segment in list_segments(config.model))
    found = [first]
    for schedule in WITH_CHUNKS:
        chunked = (PipelineConfig(schedule, chunks) for chunks in range(2, periods // mesh.pipeline + 1))
        fitting = [pipeline for pipeline in chunked if fits(pipeline)]
        found += fitting[:1] + fitting[-1:]
    forms: tuple[Residuals, ...] = (
        ("store", "recompute") if config.pipeline.residuals == AUTO else (config.pipeline.residuals,)
    )
    return [replace(each, residuals=form) for each in dict.fromkeys(found) for form in forms]


def list_variants(config: Config, allowed: tuple[str, ...]) -> list[Config]:
    """Return the configuration with each legal combination of the allowed fields' values, its own or narrower."""
    found = [config]
    for name in allowed:
        found = [fields.replace_fields(each, {name: value}) for each in found for value in list_narrower(each, name)]
    found = [
        fields.replace_fields(variant, fields.WITH_IN_BACKWARD) if variant.optimizer.in_backward else variant
        for variant in found
    ]
    return [
        variant for variant in dict.fromkeys(found) if not variant.precision.problems() + variant.optimizer.problems()
    ]


def list_narrower(config: Config, name: str) -> tuple[Any, ...]:
    """Return a field's current value and those after it; attention kernels have no order, so all of them."""
    current, values = fields.get_field(config, name), fields.SEARCHED[name]
    if name == "training.attention":
        return tuple(dict.fromkeys((current, *values)))
    return values[values.index(current) :] if current in values else (current,)


def _enumerate_shardings(config: Config, mesh: MeshConfig, offloads: bool) -> Iterator[ShardingConfig]:
    """Yield the legal shardings, without ZeRO stages that gain nothing."""
    over_data = (False, True) if mesh.data > 1 else (False,)
    stages = list_zero_stages(mesh, offloads, config.sharding.zero_stage)
    for stage, exchange, divides in itertools.product(stages, _list_exchanges(config, mesh), over_data):
        for sequence_parallel in (False, True) if mesh.tensor > 1 else (False,):
            sharding = replace(
                config.sharding,
                zero_stage=stage,
                optimizer_over_data=divides,
                sequence_parallel=sequence_parallel,
                context_exchange=exchange,
            )
            if not size_problems(config.model, replace(config.training, accumulation=1), mesh, sharding):
                yield sharding


def list_zero_stages(mesh: MeshConfig, offloads: bool, of_recipe: ZeroStage) -> tuple[ZeroStage, ...]:
    """Return the ZeRO stages that gain something on a mesh.

    With `fsdp` or `expert`, stage 0 is the same as `data`. With `context`, stages 0 and 1 sum whole gradients in every
    layer without any benefit. With none of these axes there is nothing to divide, but stage 1 has master weights in
    addition to the compute copy that the blocks read, and the master weights can be offloaded to the host. On one
    device stages 0 and 3 are the same program: a recipe with stage 3 keeps it, and is not compiled twice.

    Args:
        offloads: whether the optimizer's state is on the host.
        of_recipe: the recipe's stage.
    """
    if any(mesh.size(axis) > 1 for axis in STORAGE_AXES):
        return (2, 3) if mesh.context > 1 else (1, 2, 3)
    undivided: ZeroStage = 3 if mesh.devices == 1 and of_recipe == 3 else 0
    return (undivided, 1) if offloads else (undivided,)


def _list_exchanges(config: Config, mesh: MeshConfig) -> Sequence[Literal["auto", "ring", "all_to_all"]]:
    return (RING, ALL_TO_ALL) if mesh.context > 1 else (config.sharding.context_exchange,)


def list_divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
