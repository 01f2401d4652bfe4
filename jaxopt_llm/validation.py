"""What a configuration gets wrong, field by field and between its sections."""

import dataclasses
from typing import Any

from jax.sharding import AbstractMesh

from jaxopt_llm.config import CHECKPOINT_IS_SHAPED_BY, FIELDS, TrainConfig, get, underscored, wrong_types
from jaxopt_llm.errors import InputError
from jaxopt_llm.execution import stages
from jaxopt_llm.model import quantised
from jaxopt_llm.model.decoder import layout, make_parts, param_specs
from jaxopt_llm.parallel.mesh import AXES
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.training import lora, moments, optimizer, shapes


def validate(config: TrainConfig) -> None:
    """Raises one InputError that names everything wrong, before any device is touched or array allocated."""
    found = wrong_types(config)
    if found:
        raise InputError("; ".join(found))
    found = [
        *config.model.problems(),
        *config.data.problems(),
        *config.training.problems(),
        *config.lora.problems(),
        *config.optimizer.problems(),
        *config.schedule.problems(),
        *config.precision.problems(),
        *config.sharding.problems(),
        *config.profile.problems(),
        *config.distributed.problems(),
        *config.checkpoint.problems(),
        *config.remat.problems(),
        *config.xla.problems(),
        *(config.pipeline.problems() if config.mesh.pipeline > 1 else []),
    ]
    at_least_one = (
        *(f"mesh.{axis}" for axis in AXES),
        *("checkpoint.every", "checkpoint.keep", "evaluation.every", "evaluation.batches", "logging.every"),
    )
    found += [f"{name}={get(config, name)}: must be at least 1" for name in at_least_one if get(config, name) < 1]
    allowed = underscored(config.run.allow_change)
    found += [f"run.allow_change: {name}: no such field" for name in allowed if name not in FIELDS]
    found += [
        f"run.allow_change: {name} shapes what a checkpoint holds: no resume can change it"
        for name in allowed
        if name in CHECKPOINT_IS_SHAPED_BY
    ]
    if (
        config.checkpoint.keep_best
        and config.evaluation.every > 0
        and config.checkpoint.every % config.evaluation.every
    ):
        found.append(
            f"checkpoint.keep_best={config.checkpoint.keep_best} chooses among checkpoints that were evaluated: "
            f"checkpoint.every={config.checkpoint.every} must be a multiple of "
            f"evaluation.every={config.evaluation.every}"
        )
    if config.profile.start_step > config.training.steps:
        found.append(
            f"profile.start_step={config.profile.start_step} comes after the last of "
            f"training.steps={config.training.steps}"
        )
    if not config.run.directory:
        found.append("run.directory is empty: name a directory")
    if config.model.positions == "learned" and config.training.sequence_length > config.model.max_positions:
        longest = config.model.max_positions
        mend = f"set --model.max-positions to that at least (it is {longest})"
        if config.model.pretrained:  # whose table it is
            mend = f"set --training.sequence-length {longest} at most"
        found.append(
            f"training.sequence_length={config.training.sequence_length} is longer than the table of learned "
            f"positions: {mend}"
        )
    if config.run.seed < 0:
        found.append(f"run.seed={config.run.seed}: must be at least 0")
    if not found:
        found = [
            *lora.problems(param_specs(config.model), config.lora, config.training.trainable),
            *shapes.problems(config.model, config.training, config.mesh, config.sharding),
            *(stages.problems(layout(config.model), config.mesh.pipeline, config.pipeline) or _unequal_groups(config)),
            *_waits_for_all_gradients(config),
            *_unquantisable(config),
        ]
    if not found:
        _, trained, _ = lora.adapt(make_parts(config.model), config.lora, config.precision, config.training.trainable)
        mesh = AbstractMesh(dataclasses.astuple(config.mesh), AXES)
        placement = Placement(mesh, config.sharding, config.precision)
        found = [
            *optimizer.group_problems(config.optimizer, trained),
            *moments.problems(config.optimizer.state_dtype, trained, placement),
            *quantised.problems(config.precision.matmul, trained, placement),
        ]
    if found:
        raise InputError("; ".join(found))


def _unequal_groups(config: TrainConfig) -> list[str]:
    """Layers that are run again together: those of a segment, or of a run's part of it, must be in whole groups."""
    every, period = config.remat.every, config.model.period
    if every == 1:
        return []
    if every % period:
        return [f"remat.every={every}: must be a multiple of the {period} layers after which kinds of them repeat"]
    segments = layout(config.model)
    places = stages.split(segments, config.mesh.pipeline, config.pipeline)
    virtual, count, _ = places[0].shape
    of_run = f" in each of {count} stages" if count > 1 else ""
    of_run = f" in each of the {virtual} runs of {count} stages" if virtual > 1 else of_run
    slots = [each.shape[-1] for each in places]
    return [
        f"remat.every={every} does not divide the {repeats * len(segment.kinds)} layers{of_run}: choose one of "
        + ", ".join(str(size * len(segment.kinds)) for size in range(1, repeats + 1) if repeats % size == 0)
        for segment, repeats in zip(segments, slots, strict=True)
        if repeats % config.remat.group(len(segment.kinds), repeats)
    ]


def _unquantisable(config: TrainConfig) -> list[str]:
    """What precision.matmul and its exempt layers do not go with."""
    matmul, exempt, layers = config.precision.matmul, config.precision.compute_dtype_layers, config.model.layers
    found = []
    if config.precision.quantises and config.lora.rank:
        found.append(
            f"precision.matmul={matmul} is for weights that are trained whole, not for adapters over a frozen base: "
            "set --precision.matmul compute_dtype"
        )
    name = f"precision.compute_dtype_layers={exempt}"
    if exempt and 2 * exempt >= layers:
        found.append(f"{name} at each end exempts all of model.layers={layers}: set at most {(layers - 1) // 2}")
    if exempt and config.mesh.pipeline > 1:
        found.append(
            f"{name} does not go with mesh.pipeline={config.mesh.pipeline}, whose stages run one program: set 0"
        )
    if exempt and config.remat.every > 1:
        found.append(f"{name} does not go with remat.every={config.remat.every}: set one of them to 0 and 1")
    return found


# What an optimizer in the backward wants: what else these do waits for all gradients, or is not there with it.
WITH_IN_BACKWARD: dict[str, Any] = {
    "optimizer.clip_norm": 0,
    "training.skip_outliers": 0,
    "training.skip_limit": 1,
    "training.accumulation": 1,
    "precision.loss_scaling": "none",
    "precision.compute_dtype_layers": 0,
    "mesh.pipeline": 1,
    "remat.policy": "full",
    "remat.every": 1,
    "remat.offload": (),
}


def _waits_for_all_gradients(config: TrainConfig) -> list[str]:
    if not config.optimizer.in_backward:
        return []
    changes = [
        f"--{name.replace('_', '-')} {'' if value == () else value} (it is {get(config, name)})"
        for name, value in WITH_IN_BACKWARD.items()
        if get(config, name) != value
    ]
    if not changes:
        return []
    return [
        "optimizer.in_backward=True updates and forgets a layer before the gradients of others exist, and runs it from "
        f"its input alone: set {', '.join(changes)}, or --optimizer.in-backward False"
    ]
