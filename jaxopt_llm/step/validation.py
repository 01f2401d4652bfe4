"""Validation of a configuration, including the rules that need the model, the mesh or JAX."""

import functools
from typing import get_args

from jaxopt_llm.config import Config, ModelConfig
from jaxopt_llm.config.fields import METADATA, WITH_IN_BACKWARD, get_field, normalize_names, wrong_types
from jaxopt_llm.config.memory import Policy
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.execution import stage_layout, trace
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.decoder_specs import list_segments, param_specs
from jaxopt_llm.model.linear import quantised
from jaxopt_llm.parallel.mesh import make_abstract_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step import lora, moments, optimizer, shapes


def validate(config: Config) -> None:
    """Raise one InputError that names all problems, before any device is used or any array allocated."""
    found = wrong_types(config) or [*config.problems(), *_allow_change_problems(config)]
    if not found:
        found = [
            *lora.problems(param_specs(config.model), config.lora, config.training.trainable),
            *shapes.problems(config.model, config.training, config.mesh, config.sharding),
            *(
                stage_layout.split_problems(list_segments(config.model), config.mesh.pipeline, config.pipeline)
                or _remat_group_problems(config)
            ),
            *_remat_name_problems(config),
            *_in_backward_problems(config),
            *_quantisation_problems(config),
        ]
    if not found:
        decoder = Decoder(config.model)
        trained = lora.adapt_model(decoder, config.lora, config.precision, config.training.trainable)[1]
        mesh = make_abstract_mesh(config.mesh)
        placement = Placement(mesh, config.sharding, config.precision)
        found = [
            *optimizer.group_problems(config.optimizer, trained),
            *moments.problems(config.optimizer.state_dtype, trained, placement),
            *quantised.problems(config.precision.matmul, decoder.specs, placement),
        ]
    if found:
        raise InputError("; ".join(found))


def _allow_change_problems(config: Config) -> list[str]:
    allowed = normalize_names(config.run.allow_change)
    fixed = [name for name in allowed if name in METADATA and METADATA[name].resume == "never"]
    return [
        *(f"run.allow_change: {name}: no such field" for name in allowed if name not in METADATA),
        *(f"run.allow_change: {name} shapes the checkpoint, so no resume can change it" for name in fixed),
    ]


def _remat_group_problems(config: Config) -> list[str]:
    """Check that the layers of a segment, or of its part in one chunk, form whole groups of remat.every layers."""
    every, period = config.remat.every, config.model.period
    if every == 1:
        return []
    if every % period:
        remedy = f"set --remat.every to a multiple of {period}, the number of layers of a period"
        return [f"remat.every={every} does not divide into periods: {remedy}"]
    segments = list_segments(config.model)
    layouts = stage_layout.split_periods(segments, config.mesh.pipeline, config.pipeline)
    chunks, stages, _ = layouts[0].shape
    where = f" in each of {stages} stages" if stages > 1 else ""
    where = f" in each of the {chunks} chunks of {stages} stages" if chunks > 1 else where
    slots = [layout.shape[-1] for layout in layouts]
    return [
        f"remat.every={every} does not divide the {repeats * len(segment.kinds)} layers{where}: choose one of "
        + ", ".join(str(size * len(segment.kinds)) for size in range(1, repeats + 1) if repeats % size == 0)
        for segment, repeats in zip(segments, slots, strict=True)
        if repeats % config.remat.group_size(len(segment.kinds), repeats)
    ]


def _remat_name_problems(config: Config) -> list[str]:
    """Check the names of intermediates against those that the model has."""
    remat = config.remat
    given = {"remat.policy": () if isinstance(remat.policy, str) else remat.policy, "remat.offload": remat.offload}
    if not any(given.values()):
        return []
    known = _list_intermediates(config.model)
    policies = {"remat.policy": f"one of {', '.join(get_args(Policy))}, or to ", "remat.offload": ""}
    return [
        f"{setting}: {name} is no intermediate of this model: set --{setting} to {policies[setting]}some of "
        + ", ".join(known)
        for setting, names in given.items()
        for name in names
        if name not in known
    ]


@functools.cache
def _list_intermediates(model: ModelConfig) -> list[str]:
    return [*trace.list_intermediates(Decoder(model))]


def _quantisation_problems(config: Config) -> list[str]:
    """Check precision.matmul and its exempt layers against the other settings."""
    exempt, layers, found = config.precision.compute_dtype_layers, config.model.layers, []
    threshold = config.precision.outlier_threshold
    if threshold and config.model.moe.experts:
        found.append(
            f"precision.outlier_threshold={threshold} does not support experts: set --precision.outlier-threshold 0"
        )
    name, remedy = f"precision.compute_dtype_layers={exempt}", "set --precision.compute-dtype-layers 0"
    if exempt and 2 * exempt >= layers:
        found.append(f"{name} at each end exempts all of model.layers={layers}: set at most {(layers - 1) // 2}")
    if exempt and config.mesh.pipeline > 1:
        found.append(f"{name} does not support mesh.pipeline={config.mesh.pipeline}: {remedy}")
    if exempt and config.remat.every > 1:
        found.append(f"{name} does not support remat.every={config.remat.every}: {remedy} or --remat.every 1")
    return found


def _in_backward_problems(config: Config) -> list[str]:
    if not config.optimizer.in_backward:
        return []
    changes = [
        f"--{name.replace('_', '-')} {'' if value == () else value} (it is {get_field(config, name)})"
        for name, value in WITH_IN_BACKWARD.items()
        if get_field(config, name) not in (value, AUTO)
    ]
    if not changes:
        return []
    return [
        "optimizer.in_backward=True updates a layer and frees its gradients before those of other layers exist, "
        f"and runs each layer again from only its input: set {', '.join(changes)}, or --optimizer.in-backward False"
    ]
