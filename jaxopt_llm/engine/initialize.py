"""Construction of an engine from a model, a loss, an example of a batch and settings, with all checks."""

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxopt_llm.config import Config, OptimizerConfig
from jaxopt_llm.config.fields import shared_fields
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.jaxpr import hash_jaxpr
from jaxopt_llm.distributed import process_group
from jaxopt_llm.distributed.process_group import Processes
from jaxopt_llm.engine import deepspeed
from jaxopt_llm.engine.batches import read_arrays
from jaxopt_llm.engine.checks import (
    EngineWarning,
    check_config,
    check_devices,
    check_optimizer,
    find_hidden_settings,
    find_unread,
)
from jaxopt_llm.engine.engine import Engine
from jaxopt_llm.engine.frontends import Frontend, Loss, make_frontend
from jaxopt_llm.engine.given_weights import Weights, check_weights
from jaxopt_llm.engine.microbatches import check_arrays, count_rows, find_rows
from jaxopt_llm.engine.program import EngineProgram, GivenLoss, Job, Optimizer, make_engine_program, make_placement
from jaxopt_llm.engine.row_coupling import LossOver, check_loss_over
from jaxopt_llm.parallel.mesh import make_abstract_mesh, visible_devices

# --- Losses, each with an optimizer and parameters of its own


def read_losses(
    loss: Loss | Mapping[str, Loss],
    evaluation_loss: Loss | Mapping[str, Loss] | None,
    example: Any,
    optimizer: Optimizer | Mapping[str, Optimizer] | None,
    trains: Mapping[str, str | Sequence[str]] | None,
) -> list[GivenLoss]:
    """Return the losses that the arguments of `initialize` describe.

    Raises:
        InputError: a mapping lacks a loss or names another one, or a loss or an optimizer is none.
    """
    names = [*loss] if isinstance(loss, Mapping) else [""]
    for name in names:
        if not isinstance(name, str) or (isinstance(loss, Mapping) and not name):
            raise InputError(f"loss: {name!r} is no name of a loss; give a string that is not empty")
    if not names:
        raise InputError("loss: the mapping is empty; give at least one loss")
    if trains is not None and not isinstance(loss, Mapping):
        raise InputError(
            "trains: it is for several losses, loss={'name': ...}; training.trainable selects parameters for one"
        )

    def choose(argument: str, value: Any, name: str, default: Any = None) -> Any:
        """Return the part of an argument that belongs to a loss: one for all, or a mapping by name."""
        if value is None:
            return default
        if not isinstance(value, Mapping):
            return value
        if not isinstance(loss, Mapping):
            raise InputError(f"{argument}: there is one loss, which has no name; give one {argument} and no mapping")
        if found := {*value} ^ {*names}:
            raise InputError(
                f"{argument}: the losses are {', '.join(names)}, and it names {', '.join(map(str, value))}; "
                f"give one for each ({', '.join(sorted(map(str, found)))} differs)"
            )
        return value[name]

    by_loss = isinstance(loss, Mapping) and isinstance(example, Mapping) and {*example} == {*names}
    given = []
    for name in names:
        own = loss[name] if isinstance(loss, Mapping) else loss
        evaluated = choose("evaluation_loss", evaluation_loss, name, own)
        for each in (own, evaluated):
            if not callable(each):
                raise InputError(f"loss: {each!r} is no function; give one of (model, batch) that returns a mean loss")
        if (own_optimizer := choose("optimizer", optimizer, name)) is not None:
            check_optimizer(own_optimizer)
        patterns = choose("trains", trains, name, name or "*")
        given.append(
            GivenLoss(
                loss_name=name,
                loss=own,
                evaluation_loss=evaluated,
                example=example[name] if by_loss else example,
                optimizer=own_optimizer,
                trains=(patterns,) if isinstance(patterns, str) else tuple(patterns),
            )
        )
    return given


def join_losses(losses: Sequence[GivenLoss]) -> tuple[Loss, Any]:
    """Return a loss that calls all of these, and an example of its batch: what initialises a module of Linen."""
    if len(losses) == 1:
        return losses[0].loss, losses[0].example

    def call_all(model: Any, batches: Sequence[Any]) -> list[Any]:
        return [each.loss(model, batch) for each, batch in zip(losses, batches, strict=True)]

    return call_all, [each.example for each in losses]


# --- Engines


def initialize(
    model: Any,
    loss: Loss | Mapping[str, Loss],
    example: Any,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    rules: Mapping[str, str | None] | None = None,
    evaluation_loss: Loss | Mapping[str, Loss] | None = None,
    weights: Weights | None = None,
    *,
    replicated: Sequence[str] = (),
    trains: Mapping[str, str | Sequence[str]] | None = None,
    devices: Sequence[jax.Device] | None = None,
    loss_over: LossOver | None = None,
) -> Engine:
    """Return an engine that trains a model.

    Args:
        model: function without arguments that makes an NNX module or a pytree of arrays; or a Linen module.
        loss: (model, batch) -> mean loss, (sum, count), or one of them and a dict of metrics. A metric is a scalar,
            which is averaged as the loss is, a pair (sum, count), `jaxopt_llm.Sum(x)` or `jaxopt_llm.Max(x)`. Several
            losses are a mapping by name; `engine.step(batch, loss=name)` then trains the parameters of one.
        example: a batch: any pytree (dicts, dataclasses of flax.struct, NamedTuples, None) of arrays, tensors of torch
            or `jax.ShapeDtypeStruct`s. The first dimension of each array are the rows, except for scalars and
            `replicated` arrays. If these dimensions differ, the batch is one piece without rows. With several losses, a
            mapping by the names of all of them gives each its own example.
        config: settings; or a DeepSpeed configuration, as the path of its JSON file or as a dict, whose mapping is
            printed. By default all visible devices divide the state (ZeRO-3).
        optimizer: optax transformation, or an OptimizerConfig; by default `config.optimizer`. With several losses, each
            has an optimizer of its own: this one, or the one that a mapping gives.
        rules: names of dimensions, as in `nnx.with_partitioning`, to the mesh axis `tensor`, or None.
        evaluation_loss: loss of `evaluate`, by default `loss`. An NNX model is in evaluation mode in either.
        weights: arrays that replace the initial parameters: a mapping by the paths of `engine.parameters`, whole or
            nested by their parts, or a function of the path. Each is a NumPy or JAX array, a memory map, a dataset of
            HDF5, a slice of safetensors, or whatever has a shape and is indexed alike. Each device reads its own part
            before the first step. None, for a path or for all paths below it, keeps the initial values.
        replicated: patterns of the paths of the batch's arrays without rows, such as tables. Every device and every
            microbatch gets them whole.
        trains: patterns of the paths of the parameters that each of several losses trains, by the name of the loss. By
            default these are the parameters whose path has its name, such as `critic/first/kernel`.
        devices: the devices of the mesh, exactly as many as it has; by default the first ones that are visible. Engines
            on other devices train side by side, such as on `jax.devices()[:4]` and on `jax.devices()[4:]`.
        loss_over: "rows" accepts that the loss of a step is the mean of the losses of its microbatches
            (`training.accumulation`); "batch" refuses accumulation. By default accumulation is refused only if the loss
            compares rows with each other, as a contrastive loss does.

    Raises:
        InputError: something does not fit together.
    """
    losses = read_losses(loss, evaluation_loss, read_arrays(example), optimizer, trains)
    check_arrays([each.example for each in losses], replicated)
    rows = count_rows(losses[0].example, replicated)
    settings, processes = _resolve_settings(config, rows, losses, devices)
    frontend = make_frontend(model, *join_losses(losses), settings.run.seed)
    jobs = [_make_job(each, settings, frontend, rules, tuple(replicated), loss_over) for each in losses]
    job = replace(jobs[0], others=tuple(jobs[1:]))
    if weights is not None:
        check_weights(weights, frontend.parameters)
    _check_programs(job, processes)
    return Engine(job, processes, weights, devices)


def _resolve_settings(
    given: Config | Mapping[str, Any] | str | Path | None,
    rows: int,
    losses: Sequence[GivenLoss],
    devices: Sequence[jax.Device] | None,
) -> tuple[Config, Processes]:
    """Return the settings, with a number of devices for each axis of the mesh, and the processes of the job."""
    visible = len(devices or visible_devices())
    config = _resolve_config(given, rows, [each.optimizer for each in losses], visible)
    processes = process_group.find_processes(os.environ, config.distributed)
    if config.mesh.fsdp == AUTO:
        config = replace(config, mesh=replace(config.mesh, fsdp=max(visible // config.mesh.devices, 1)))
    if devices is not None:
        check_devices(devices, config.mesh, processes.count)
    hidden = find_hidden_settings(given) if isinstance(given, Config) else []
    if hidden and all(each.transformation is not None for each in losses):
        verb = "has" if len(hidden) == 1 else "have"
        text = f"{', '.join(hidden)} {verb} no effect beside an optax transformation, which is the whole optimizer"
        warnings.warn(text, EngineWarning, stacklevel=3)  # the caller of `initialize`
    return config, processes


def _check_programs(job: Job, processes: Processes) -> None:
    """Make the programs on an abstract mesh: all errors and warnings appear now, and nothing is allocated."""
    mesh = make_abstract_mesh(job.config.mesh)
    oddities: dict[str, None] = {}
    for one in job.losses:
        one.check_division(make_placement(job.config, mesh))
        program = make_engine_program(one, mesh)
        check_loss_over(one.loss_over, job.config.training.accumulation, program.model, one.have_rows)
        oddities |= dict.fromkeys(program.model.oddities)
        _check_same_job(one, program, processes)
    for oddity in oddities:
        warnings.warn(oddity, EngineWarning, stacklevel=3)  # the caller of `initialize`


def _make_job(
    given: GivenLoss,
    config: Config,
    frontend: Frontend,
    rules: Mapping[str, str | None] | None,
    replicated: tuple[str, ...],
    loss_over: LossOver | None,
) -> Job:
    """Return the job of a loss, with its own optimizer in the settings.

    Raises:
        InputError: a setting is wrong, or an engine does not read it.
    """
    if isinstance(given.optimizer, OptimizerConfig):
        config = replace(config, optimizer=given.optimizer)
    rows = count_rows(given.example, replicated)
    check_config(config, rows)
    config = replace(config, training=replace(config.training, batch_size=rows))
    return Job(
        **vars(given),
        config=config,
        frontend=frontend,
        rules=dict(rules or {}),
        replicated=replicated,
        in_one_piece=find_rows(given.example, replicated) is None,
        loss_over=loss_over,
    )


def _resolve_config(
    config: Config | Mapping[str, Any] | str | Path | None, rows: int, optimizers: Sequence[Any], devices: int
) -> Config:
    """Return the settings that `initialize` was given, in whatever form."""
    if isinstance(config, str | Path | Mapping):
        config = _read_deepspeed(config, rows, optimizers, devices)
    config = Config() if config is None else config
    if not isinstance(config, Config):
        raise InputError(
            f"config: {type(config).__name__} is neither a Config, as in Config(mesh=dict(fsdp=8)), nor a DeepSpeed "
            "configuration, as a path or a dict"
        )
    return config


def _check_same_job(job: Job, program: EngineProgram, processes: Processes) -> None:
    """Raise InputError if the processes of a job would train different programs, or from different values."""
    if processes.count == 1:
        return
    remedy = "all processes must run the same script with the same settings and seeds"
    processes.check_same("config", repr(shared_fields(job.config)), remedy)
    processes.check_same("the loss or the example", hash_jaxpr(program.model.traced), remedy)
    initial = hash_jaxpr(jax.make_jaxpr(job.frontend.make)())
    processes.check_same("the model that the function makes", initial, remedy)


def _read_deepspeed(
    given: Mapping[str, Any] | str | Path, found: int, optimizers: Sequence[Any], devices: int
) -> Config:
    """Return the settings of a DeepSpeed configuration. Print on process 0 what became of its keys.

    Args:
        found: rows of the example.
        devices: number of devices.
    """
    read = (
        deepspeed.read_dict(given, devices, found)
        if isinstance(given, Mapping)
        else deepspeed.read_file(Path(given), devices, found)
    )
    rows = read.config.training.batch_size
    if found != rows:
        raise InputError(
            f"example: it has {found} rows, and the batch sizes of {read.source} make {rows} for all devices and "
            "microbatches together; give a whole batch, or change the file"
        )
    unread = find_unread(read.config)
    if keys := [each.key for each in read.mapped if each.setting in unread]:
        raise InputError(
            f"{read.source}: {', '.join(keys)}: only the decoder of this package has an equivalent; remove it, or "
            "write a recipe of the decoder with jaxopt-llm import-config"
        )
    replaced = {"optimizer": "optimizer.name", "gradient_clipping": "optimizer.clip_norm"}
    if not any(isinstance(each, OptimizerConfig) for each in optimizers):
        replaced["scheduler"] = "schedule.kind"
    names = [name for name, setting in replaced.items() if read.has(setting)]
    lines = [f"replaced by initialize(optimizer=...): {', '.join(names)}"] if all(optimizers) and names else []
    if jax.process_index() == 0:
        print("\n".join([*read.lines(), *lines]), file=sys.stderr)
    return read.config
