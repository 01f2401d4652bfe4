"""What a search says: settings in words, the table of those that were compiled, and the same as JSON."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxopt_llm import config as configuration
from jaxopt_llm.config import FIELDS, TrainConfig
from jaxopt_llm.execution.schedules import PipelineConfig
from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.parallel.mesh import AXES, MeshConfig
from jaxopt_llm.search.choose import Choice, Search
from jaxopt_llm.search.walk import ALLOWED
from jaxopt_llm.training.memory import GIB


def mesh_words(mesh: MeshConfig) -> str:
    return " × ".join(f"{axis} {getattr(mesh, axis)}" for axis in AXES if getattr(mesh, axis) > 1) or "one GPU"


def sharding_words(config: TrainConfig) -> list[str]:
    sharding, mesh = config.sharding, config.mesh
    return [
        f"ZeRO-{sharding.zero_stage}",
        *(["sequence parallel"] if sharding.sequence_parallel and mesh.tensor > 1 else []),
        *([sharding.context_exchange.replace("_", "-")] if mesh.context > 1 else []),
    ]


def pipeline_words(pipeline: PipelineConfig) -> str:
    said = pipeline.schedule + (f" by {pipeline.virtual_stages}" if pipeline.virtual_stages > 1 else "")
    return said + (f" of {' '.join(map(str, pipeline.split))} layers" if pipeline.split else "")


def remat_words(remat: RematConfig) -> str:
    said = remat.policy if isinstance(remat.policy, str) else " ".join(remat.policy)
    said += f" every {remat.every}" if remat.every > 1 else ""
    return said + (f", on the host {' '.join(remat.offload)}" if remat.offload else "")


def words(config: TrainConfig, recipe: TrainConfig) -> str:
    """A setting in one line. recipe: what else changed of it is named, too."""
    said = [
        mesh_words(config.mesh),
        *([pipeline_words(config.pipeline)] if config.mesh.pipeline > 1 else []),
        *sharding_words(config),
        f"remat {remat_words(config.remat)}",
        *([f"accumulation {config.training.accumulation}"] if config.training.accumulation > 1 else []),
        *(["optimizer on the host"] if config.offload.optimizer else []),
        *(
            f"{name} {configuration.get(config, name)}"
            for name in ALLOWED
            if configuration.get(config, name) != configuration.get(recipe, name)
        ),
    ]
    return ", ".join(said)


def changed(config: TrainConfig, recipe: TrainConfig) -> dict[str, Any]:
    """The fields that differ from the recipe's."""
    values = {name: configuration.get(config, name) for name in FIELDS}
    return {name: value for name, value in values.items() if value != configuration.get(recipe, name)}


def flags(config: TrainConfig, recipe: TrainConfig) -> str:
    """What to give beside the recipe to get this setting."""
    values = changed(config, recipe).items()
    return " ".join(
        f"--{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}" for name, value in values
    )


COLUMNS = ("params", "grads", "optim", "activ", "gather", "other", "peak", "spare")


def show(search: Search, seconds: float) -> str:
    recipe, cluster = search.recipe, search.cluster
    may_fit = sum(map(search.may_fit, search.candidates))
    lines = [
        f"{len(search.candidates):,} settings on {cluster.hosts} × {cluster.gpus_per_host} {cluster.chip.name}: "
        f"{may_fit:,} fit by arithmetic, {len(search.choices)} compiled, in {seconds:.0f} s",
        "",
        f"{'':5}s/step  MFU  {'binds':16}  {' '.join(f'{name:>6}' for name in COLUMNS)}  (GiB of each GPU)",
    ]
    for number, choice in enumerate(search.choices, 1):
        memory = choice.plan.memory
        kinds = [getattr(memory, field.name) for field in dataclasses.fields(memory)]
        sizes = " ".join(f"{size / GIB:6.2f}" for size in (*kinds, memory.peak, choice.plan.spare))
        mark = " (the recipe)" if choice.config == recipe else ""
        lines += [
            f"{number:3} {choice.time.total:7.3f} {utilisation(choice, search):4.0%}  {choice.time.binds:16}  {sizes}",
            f"{'':4}{words(choice.config, recipe)}{mark}{'' if choice.fits else ': DOES NOT FIT'}",
        ]
    if search.winner:
        lines += ["", f"fastest that fits: {flags(search.winner.config, recipe) or 'the recipe as it is'}"]
    return "\n".join(lines)


def utilisation(choice: Choice, search: Search) -> float:
    """Model FLOPs by what the chip could do in the step's time."""
    peak = search.cluster.chip.peak_flops[choice.config.precision.compute_dtype]
    return choice.plan.model_flops / (peak * choice.time.total)


def to_json(search: Search, seconds: float, plan_json: Callable[[Any], Any]) -> dict[str, Any]:
    """plan_json: of a compiled plan, what `plan --json` says."""
    return {
        "gpu": search.cluster.chip.name,
        "hosts": search.cluster.hosts,
        "gpus_per_host": search.cluster.gpus_per_host,
        "settings": len(search.candidates),
        "fit_by_arithmetic": sum(map(search.may_fit, search.candidates)),
        "seconds": seconds,
        "ranked": [
            {
                "settings": changed(choice.config, search.recipe),
                "is_recipe": choice.config == search.recipe,
                "step_seconds": choice.time.total,
                "binds": choice.time.binds,
                "time": dataclasses.asdict(choice.time),
                "estimated": {
                    "step_seconds": choice.candidate.time.total,
                    "peak": round(choice.candidate.footprint.peak),
                },
                "plan": plan_json(choice.plan),
            }
            for choice in search.choices
        ],
    }
