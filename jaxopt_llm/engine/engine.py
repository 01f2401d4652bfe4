"""Engine: the training of any model in Flax NNX, in Linen or as plain functions, by the settings of a `Config`."""

import functools
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxopt_llm.checkpoint.native import step_directories
from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.checkpoint.native.identity import (
    Identity,
    claim_directory,
    continue_identity,
    new_identity,
    read_identity,
)
from jaxopt_llm.compiler import hlo
from jaxopt_llm.config import Config, OptimizerConfig, ScheduleConfig
from jaxopt_llm.config.fields import shared_fields
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.jaxpr import hash_jaxpr
from jaxopt_llm.distributed import process_group
from jaxopt_llm.distributed.process_group import SINGLE_PROCESS, Processes
from jaxopt_llm.engine import deepspeed
from jaxopt_llm.engine.batches import BatchRows, count_rows
from jaxopt_llm.engine.checks import EngineWarning, check_config, check_optimizer, find_hidden_settings, find_unread
from jaxopt_llm.engine.frontends import ArrayInfo, Loss, LossParts, make_frontend
from jaxopt_llm.engine.given_weights import Weights, check_weights, read_weights
from jaxopt_llm.engine.gradients import replace_zero
from jaxopt_llm.engine.plan import GPUS_PER_HOST, EnginePlan, plan_engine
from jaxopt_llm.engine.program import EngineProgram, Job, make_engine_program
from jaxopt_llm.engine.remat_choice import compile_fitting, find_limit, is_open
from jaxopt_llm.engine.user_model import nest_variables
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.parallel.mesh import make_abstract_mesh, make_mesh, visible_devices
from jaxopt_llm.parallel.rows import LocalRows
from jaxopt_llm.training import state as training_state
from jaxopt_llm.training.restore import load_state
from jaxopt_llm.training.state import TrainState
from jaxopt_llm.training.step import Metrics


class Engine:
    """A model under training. `initialize` makes it.

    Nothing is allocated before the first call of `step`, `evaluate`, `model`, `save` or `restore`.
    """

    def __init__(self, job: Job, processes: Processes = SINGLE_PROCESS, weights: Weights | None = None) -> None:
        self.config, self.processes, self._weights = job.config, processes, weights
        self._job, self._frontend = job, job.frontend
        self._state: TrainState | None = None
        self._identity: Identity | None = None  # that of its run, once there is one
        self._lost = ""  # why there is no state, after a restore that failed

    @property
    def example(self) -> Any:
        """A batch as ShapeDtypeStructs, or with arrays."""
        return self._job.example

    @property
    def parameters(self) -> list[ArrayInfo]:
        """Path and shape of each parameter."""
        return self._frontend.parameters

    @functools.cached_property
    def program(self) -> EngineProgram:
        """Program on the visible devices."""
        mesh = make_mesh(self.config.mesh)
        limit = find_limit(mesh.devices.flat[0])
        program = make_engine_program(self._job, mesh)
        if limit is None or not is_open(program, self._job):
            return program
        channel = self.processes.channel("remat.policy")
        fitting = compile_fitting(
            self._job,
            program,
            limit,
            compile=lambda program: program.step.lower(program.state, program.batch).compile(),
            count_peak=lambda compiled: hlo.read_memory(compiled).peak,
            agree=lambda fits: all(each == str(True) for each in channel.exchange(str(fits))),
        )
        if self.processes.first:
            print(f"chosen: {fitting.chosen}", file=sys.stderr)
        return fitting.program

    @functools.cached_property
    def _placed_rows(self) -> LocalRows:
        first = jax.tree.leaves(self.program.batch)[0]
        return LocalRows(first.shape[:2], first.sharding)

    @property
    def rows(self) -> BatchRows:
        """Rows of each batch that this process reads: all of them, unless the job has several processes."""
        return BatchRows(self.example, self._placed_rows.indices)

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics that the loss returns."""
        return sorted(jax.eval_shape(self.program.evaluation, self.program.state, self.program.batch).metrics)

    @property
    def state(self) -> TrainState:
        if self._lost:
            raise InputError(self._lost)
        if self._state is None:
            program = self.program

            def make_values() -> tuple[Any, Any]:
                parameters, variables = self._frontend.make()
                arrays = program.model.nest([leaf.astype(jnp.float32) for leaf in parameters])
                whole = leaves.wrap_arrays(program.model.specs, arrays, self.config.run.seed)
                return whole, nest_variables(self._frontend, variables)

            given = None if self._weights is None else read_weights(self._weights, program)
            self._state = training_state.initialize_state(
                program.specs, program.optimizers, self.config.run.seed, program.placement, given, make_values
            )
            self._weights = None  # they may be arrays in the host's memory
        return self._state

    def step(self, batch: Any) -> Metrics:
        """Train on one batch: arrays of the example's shapes. Return the metrics, which are on the device.

        In a job of several processes each gives a whole batch, or its own rows of it (`rows.local`).

        The metrics are `loss`, `grad_norm`, `skipped` (number of skipped steps so far), `skipped_in_a_row`, `overflow`,
        with a schedule of ours `learning_rate`, with a loss scale `loss_scale`, and those of the loss. The state is
        updated in place.
        """
        self._state, metrics = self.program.step(self.state, self.place(batch))
        return metrics

    def evaluate(self, batches: Iterable[Any], ema: bool = True) -> dict[str, float]:
        """Return the mean loss and metrics over batches. Nothing is updated.

        Args:
            batches: at least one.
            ema: with `training.ema_decay`, use the average of the parameters; False for the parameters themselves.
        """
        return self.evaluate_state(self.state, batches, ema)

    def evaluate_state(self, state: TrainState, batches: Iterable[Any], ema: bool = True) -> dict[str, float]:
        """Return what `evaluate` returns, of a given state."""
        if isinstance(batches, Mapping):
            raise InputError("evaluate: this is one batch; give a list of batches")
        if ema:
            state = training_state.use_average(state, self.program.specs, self.program.placement)
        each = [jax.device_get(self.program.evaluation(state, batch=self.place(batch))) for batch in batches]
        if not each:
            raise InputError("evaluate: there is no batch; give at least one")
        sums: LossParts = jax.tree.map(lambda *values: sum(map(float, values)), *each)
        totals = {"loss": sums.total, **sums.metrics}
        count = float(replace_zero(sums.count))
        return {name: float(value) / count for name, value in totals.items()}

    def place(self, batch: Any) -> Any:
        """Return a batch [rows, ...] as the step takes it: on the devices, [M, B, ...].

        Args:
            batch: a whole batch, or in a job of several processes the rows of this one: `rows.local`.

        Raises:
            InputError: its arrays do not fit those of the example.
        """
        local = self.rows.take(batch)
        on_device = jax.tree.map(lambda x, target: x.astype(target.dtype, copy=False), local, self.program.batch)
        return self._placed_rows.make_global(on_device)

    def plan(
        self, gpu: str = "h200", gpus: int | None = None, gpus_per_host: int = GPUS_PER_HOST, rows: int | None = None
    ) -> EnginePlan:
        """Return memory, collectives and time of a step on GPUs that this machine need not have.

        Nothing is allocated. The step is compiled for these GPUs, which takes seconds to minutes.

        Args:
            gpu: one of the chips of `plan`, such as "h100".
            gpus: number of GPUs, by default those of the mesh. Another number changes `mesh.fsdp`.
            rows: rows of the batch over all GPUs, by default those of the example.

        Raises:
            InputError: the GPU is unknown, or the batch or the mesh does not divide.
        """
        return plan_engine(self._job, gpu, gpus, gpus_per_host, rows)

    def model(self, ema: bool = True) -> Any:
        """Return the user's model with the trained parameters: an NNX module, Linen's variables, or the pytree.

        Adapters are merged into their bases, and codes are dequantised. The other arrays are those of the state, which
        the next step replaces. In a job of several processes all of them call it, and the arrays are divided over the
        devices of all.

        An NNX module is in the mode in which it was made; `model.eval()` turns dropout off, as `evaluate` does.

        Args:
            ema: with `training.ema_decay`, give the average of the parameters; False for the parameters themselves.
                Variables that are no parameters are never averaged.
        """
        state, model = self.state, self.program.model
        masters = state.averaged_masters if ema else state.masters
        variables = dict(tree.leaves_with_path(state.variables))
        merged = jax.tree.map(_merge_weight, model.specs, tree.merge(masters, state.frozen), is_leaf=leaves.is_wrapped)
        return self._frontend.rebuild(
            model.flatten(merged), [variables[info.path] for info in self._frontend.variables]
        )

    def save(self, directory: str | Path) -> None:
        """Write a checkpoint of the state, with the hashes of its files and the identity of the run.

        Raises:
            CheckpointError: the directory holds checkpoints of another run, or the save failed.
        """
        if self._identity is None:
            self._identity = new_identity(self.config, self.processes)
        if self.processes.first:
            claim_directory(Path(directory), self._identity)
        path, settings = Path(directory) / "checkpoints", self.config.checkpoint
        with Checkpoints(path, settings, processes=self.processes, identity=self._identity) as checkpoints:
            checkpoints.save_last(int(self.state.step), self.to_checkpoint(self.state), {})

    def restore(self, directory: str | Path) -> int:
        """Restore the newest intact checkpoint, which any mesh may have written. Return its step.

        Args:
            directory: that of `save`, or the run directory of `fit`.

        Raises:
            InputError: there is no checkpoint.
            CheckpointError: none is intact, or it is of another run, model or optimizer.
        """
        path = Path(directory) / "checkpoints"
        identity = read_identity(Path(directory)) if step_directories.find_checkpoints(path) else None
        with Checkpoints(path, processes=self.processes, identity=identity) as checkpoints:
            step = checkpoints.latest_verified_step()
            if step is None or identity is None:
                raise InputError(f"restore: {directory} has no checkpoint")
            self._state = self.load(checkpoints, step)
        self._identity = continue_identity(identity, self.config)
        return step

    def load(self, checkpoints: Checkpoints, step: int) -> TrainState:
        """Return the state of a checkpoint. The engine's own state is freed first."""
        self._state, program = None, self.program
        self._lost = f"the restore of step {step} failed, and the engine has no state now: restore again"
        state = load_state(checkpoints, step, program.specs, program.placement)
        self._lost = ""
        return state

    def to_checkpoint(self, state: TrainState) -> dict[str, Any]:
        """Return the trees of a state's checkpoint."""
        return {name: getattr(state, name) for name in training_state.checkpoint_specs(self.program.specs)}

    @property
    def has_schedule(self) -> bool:
        """True if `config.schedule` decides the learning rate; False with an optax transformation."""
        return isinstance(self._job.optimizer, OptimizerConfig)

    def set_schedule(self, schedule: ScheduleConfig) -> None:
        """Use another schedule of the learning rate than that of `config`. The next step is then compiled anew."""
        config = self._job.config
        if schedule != config.schedule:
            self._job = replace(self._job, config=replace(config, schedule=schedule))
            self.__dict__.pop("program", None)

    def take_state(self, state: TrainState, identity: Identity | None) -> None:
        """Continue with this state, as a part of this run."""
        self._state, self._identity = state, identity


def _merge_weight(spec: Any, weight: Any) -> jax.Array:
    """Return a parameter as one array in device memory, with its adapter if it has one."""
    weight = jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind("device")), weight)
    if not leaves.is_wrapped(spec):
        return weight
    bare = leaves.unwrap_specs(spec)
    merge = functools.partial(leaves.merge_to_array, contracting=bare.unstack().contracting)
    for _ in range(bare.leading):
        merge = jax.vmap(merge)
    return jax.jit(merge)(weight)


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
        example: a batch as arrays or `jax.ShapeDtypeStruct`s. The first dimension of each array are the rows.
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
    config = _resolve_config(config, example, optimizer)
    processes = process_group.find_processes(os.environ, config.distributed)
    if config.mesh.devices == 1:
        config = replace(config, mesh=replace(config.mesh, fsdp=len(visible_devices())))
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
        optimizer=optimizer or config.optimizer,
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
