"""Construction of an engine from a model, a loss, an example of a batch and settings, with all checks."""

import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import optax

from jaxopt_llm.config import Config, OptimizerConfig
from jaxopt_llm.config.fields import shared_fields
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.jaxpr import hash_jaxpr
from jaxopt_llm.distributed import process_group
from jaxopt_llm.distributed.process_group import Processes
from jaxopt_llm.engine import deepspeed
from jaxopt_llm.engine.batches import count_rows, read_arrays
from jaxopt_llm.engine.checks import EngineWarning, check_config, check_optimizer, find_hidden_settings, find_unread
from jaxopt_llm.engine.engine import Engine
from jaxopt_llm.engine.frontends import Loss, make_frontend
from jaxopt_llm.engine.given_weights import Weights, check_weights
from jaxopt_llm.engine.program import EngineProgram, Job, make_engine_program
from jaxopt_llm.parallel.mesh import make_abstract_mesh, visible_devices


def initialize(
    model: Any,
    loss: Loss,
    example: Any,
    config: Config | str | Path | None = None,
    optimizer: optax.GradientTransformation | OptimizerConfig | None = None,
    rules: Mapping[str, str | None] | None = None,
    evaluation_loss: Loss | None = None,
    weights: Weights | None = None,
) -> Engine:
    """Return an engine that trains a model.

    Args:
        model: function without arguments that makes an NNX module or a pytree of arrays; or a Linen module.
        loss: (model, batch) -> mean loss, (sum, count), or one of them and a dict of metrics; scalars.
        example: a batch: any pytree (dicts, dataclasses of flax.struct, NamedTuples, None) of arrays, tensors of torch
            or `jax.ShapeDtypeStruct`s. The first dimension of each array are the rows.
        config: settings, or the path of a DeepSpeed configuration in JSON, whose mapping is printed; by default all
            visible devices divide the state (ZeRO-3).
        optimizer: optax transformation, or an OptimizerConfig; by default `config.optimizer`.
        rules: names of dimensions, as in `nnx.with_partitioning`, to the mesh axis `tensor`, or None.
        evaluation_loss: loss of `evaluate`, by default `loss`. An NNX model is in evaluation mode in either.
        weights: arrays that replace the initial parameters: a mapping by the paths of `engine.parameters`, whole or
            nested by their parts, or a function of the path. Each is a NumPy or JAX array, a memory map, a dataset of
            HDF5, a slice of safetensors, or whatever has a shape and is indexed alike. Each device reads its own part
            before the first step. None, for a path or for all paths below it, keeps the initial values.

    Raises:
        InputError: something does not fit together.
    """
    given = config if isinstance(config, Config) else None
    example = read_arrays(example)
    config = _resolve_config(config, example, optimizer)
    processes = process_group.find_processes(os.environ, config.distributed)
    if config.mesh.fsdp == AUTO:
        others = config.mesh.devices
        config = replace(config, mesh=replace(config.mesh, fsdp=max(len(visible_devices()) // others, 1)))
    check_config(config, count_rows(example))
    if optimizer is not None:
        check_optimizer(optimizer)
    if given and optimizer and not isinstance(optimizer, OptimizerConfig) and (hidden := find_hidden_settings(given)):
        verb = "has" if len(hidden) == 1 else "have"
        text = f"{', '.join(hidden)} {verb} no effect beside an optax transformation, which is the whole optimizer"
        warnings.warn(text, EngineWarning, stacklevel=2)
    frontend = make_frontend(model, loss, example, config.run.seed)
    job = Job(
        config=config,
        frontend=frontend,
        loss=loss,
        evaluation_loss=evaluation_loss or loss,
        example=example,
        transformation=None if isinstance(optimizer, OptimizerConfig) else optimizer,
        rules=dict(rules or {}),
    )
    if weights is not None:
        check_weights(weights, frontend.parameters)
    # The program on an abstract mesh: all errors and warnings appear now, and nothing is allocated.
    program = make_engine_program(job, make_abstract_mesh(config.mesh))
    for oddity in program.model.oddities:
        warnings.warn(oddity, EngineWarning, stacklevel=2)
    _check_same_job(job, program, processes)
    return Engine(job, processes, weights)


def _resolve_config(config: Config | str | Path | None, example: Any, optimizer: Any) -> Config:
    """Return the settings that `initialize` was given, in whatever form."""
    if isinstance(config, str | Path):
        config = _read_deepspeed(Path(config), example, optimizer)
    config = Config() if config is None else config
    if not isinstance(config, Config):
        raise InputError(
            f"config: {type(config).__name__} is neither a Config, as in Config(mesh=dict(fsdp=8)), nor the path of a "
            "DeepSpeed configuration"
        )
    return replace(config, optimizer=optimizer) if isinstance(optimizer, OptimizerConfig) else config


def _check_same_job(job: Job, program: EngineProgram, processes: Processes) -> None:
    """Raise InputError if the processes of a job would train different programs, or from different values."""
    if processes.count == 1:
        return
    remedy = "all processes must run the same script with the same settings and seeds"
    processes.check_same("config", repr(shared_fields(job.config)), remedy)
    processes.check_same("the loss or the example", hash_jaxpr(program.model.traced), remedy)
    initial = hash_jaxpr(jax.make_jaxpr(job.frontend.make)())
    processes.check_same("the model that the function makes", initial, remedy)


def _read_deepspeed(path: Path, example: Any, optimizer: Any) -> Config:
    """Return the settings of a DeepSpeed file. Print on process 0 what became of its keys."""
    read = deepspeed.read_file(path, len(visible_devices()))
    rows, found = read.config.training.batch_size, count_rows(example)
    if read.has("training.batch_size") and found != rows:
        raise InputError(
            f"example: it has {found} rows, and the batch sizes of {path.name} make {rows} for all devices and "
            "microbatches together; give a whole batch, or change the file"
        )
    unread = find_unread(read.config)
    if keys := [each.key for each in read.mapped if each.setting in unread]:
        raise InputError(
            f"{path.name}: {', '.join(keys)}: only the decoder of this package has an equivalent; remove it, or write "
            "a recipe of the decoder with jaxopt-llm import-config"
        )
    replaced = {"optimizer": "optimizer.name", "gradient_clipping": "optimizer.clip_norm"}
    if not isinstance(optimizer, OptimizerConfig):
        replaced["scheduler"] = "schedule.kind"
    names = [name for name, setting in replaced.items() if read.has(setting)]
    lines = [f"replaced by initialize(optimizer=...): {', '.join(names)}"] if optimizer is not None and names else []
    if jax.process_index() == 0:
        print("\n".join([*read.lines(), *lines]), file=sys.stderr)
    return read.config
