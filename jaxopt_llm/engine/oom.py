"""Advice for an engine whose step does not fit into the memory of its devices."""

import functools
from collections.abc import Iterator
from dataclasses import replace

import jax

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.config import RematConfig
from jaxopt_llm.engine.engine import Engine
from jaxopt_llm.parallel.offload import count_resting_bytes
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.planning.memory import KnownShapes
from jaxopt_llm.planning.oom import OomExplainer
from jaxopt_llm.planning.units import choose_unit
from jaxopt_llm.step.state import abstract_state


def make_explainer(engine: Engine, checkpoints: Checkpoints) -> OomExplainer:
    """Return the explainer of an engine's run."""
    program = engine.program
    list_shapes = functools.partial(KnownShapes.from_specs, program.specs, program.placement, RematConfig("none"))
    return OomExplainer(
        program.state,
        list_shapes,
        lambda lacking, resumes: ["settings that save memory", *_list_savings(engine, resumes)],
        checkpoints,
    )


def _list_savings(engine: Engine, resumes: bool) -> Iterator[str]:
    """Yield a line for each setting that is not used yet. The bytes of the state are exact.

    Args:
        resumes: whether the run continues from a checkpoint; then settings that change the run are left out.
    """
    config, placement = engine.config, engine.program.placement
    if config.run.check_replicas:
        yield f"  run.check_replicas={config.run.check_replicas}: leave it out; a check may hold the state twice"
    zero = replace(placement, sharding=replace(config.sharding, zero_stage=3))
    if saved := _count_saved(engine, zero):
        yield f"  sharding.zero_stage=3: {_format_bytes(saved)} less of the state per device"
    if engine.program.model.keeps_layers or config.remat.policy == "save_attention":
        yield "  remat.policy=full: the backward computes each layer again, and keeps only its input"
    accumulation = config.training.accumulation
    parts = 2 * accumulation * config.mesh.batch_shards
    if config.training.batch_size % parts == 0:
        yield f"  training.accumulation={2 * accumulation}: half of the activations; the batch stays the same"
    offloaded = replace(placement, offload=replace(config.offload, optimizer=True))
    if jax.default_backend() != "cpu" and (saved := _count_saved(engine, offloaded)):
        yield f"  offload.optimizer=True: {_format_bytes(saved)} of the state moves to the host"
    if engine.has_schedule and not resumes and config.optimizer.state_dtype != "int8":
        yield "  optimizer.state_dtype=int8: moments of 8 bits"
    yield "  more devices: engine.plan(gpus=N) shows the memory of a step on N GPUs, and allocates nothing"


def _count_saved(engine: Engine, placement: Placement) -> int:
    """Return the bytes of the state that leave each device with another placement."""
    before, after = engine.program.state, abstract_state(engine.program.specs, placement)
    return count_resting_bytes(before) - count_resting_bytes(after)


def _format_bytes(count: int) -> str:
    name, unit = choose_unit(count)
    return f"{count / unit:.2f} {name}"
