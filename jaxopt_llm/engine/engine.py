"""Engine: the training of any model in Flax NNX, in Linen or as plain functions, by the settings of a `Config`."""

import functools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

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
from jaxopt_llm.config import ScheduleConfig
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.distributed.process_group import SINGLE_PROCESS, Processes
from jaxopt_llm.engine.batches import BatchRows
from jaxopt_llm.engine.frontends import ArrayInfo, LossParts
from jaxopt_llm.engine.given_weights import Weights, read_weights
from jaxopt_llm.engine.gradients import replace_zero
from jaxopt_llm.engine.plan import GPUS_PER_HOST, EnginePlan, plan_engine
from jaxopt_llm.engine.program import EngineProgram, Job, make_engine_program
from jaxopt_llm.engine.remat_choice import compile_fitting, find_limit, is_open
from jaxopt_llm.engine.user_model import nest_variables
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.rows import LocalRows
from jaxopt_llm.training import saved_state
from jaxopt_llm.training import state as training_state
from jaxopt_llm.training.hyperparameters import Hyperparameters, place_hyperparameters, read_hyperparameters
from jaxopt_llm.training.replicas import count_copied_bytes
from jaxopt_llm.training.restore import load_state
from jaxopt_llm.training.state import TrainState
from jaxopt_llm.training.step import Metrics

StepStages = tuple[jax.stages.Lowered, jax.stages.Compiled]


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
        self._lent: list[jax.Array] = []  # arrays of the state that `model` returned
        self._running: Metrics | None = None  # of the last step that `step` started

    @property
    def example(self) -> Any:
        """A batch as ShapeDtypeStructs, or with arrays."""
        return self._job.example

    @property
    def parameters(self) -> list[ArrayInfo]:
        """Path and shape of each parameter."""
        return self._frontend.parameters

    @functools.cached_property
    def _choice(self) -> tuple[EngineProgram, StepStages | None]:
        """The program, and its compiled step if the choice of a policy has compiled it."""
        mesh = make_mesh(self.config.mesh)
        limit = find_limit(mesh.devices.flat[0])
        program = make_engine_program(self._job, mesh)
        if limit is not None:
            limit -= count_copied_bytes(self.config.run.check_replicas, program.state)
        if limit is None or not is_open(program, self._job):
            return program, None
        channel = self.processes.channel("remat.policy")
        fitting = compile_fitting(
            self._job,
            program,
            limit,
            compile=_compile_step,
            count_peak=lambda stages: hlo.read_memory(stages[1]).peak,
            agree=lambda fits: all(each == str(True) for each in channel.exchange(str(fits))),
        )
        if self.processes.first:
            print(f"chosen: {fitting.chosen}", file=sys.stderr)
        return fitting.program, fitting.compiled

    @property
    def program(self) -> EngineProgram:
        """Program on the visible devices."""
        return self._choice[0]

    @functools.cached_property
    def lowered_step(self) -> jax.stages.Lowered:
        """Step of the program, traced for the state and the batch."""
        program, stages = self._choice
        return _lower_step(program) if stages is None else stages[0]

    @functools.cached_property
    def compiled_step(self) -> jax.stages.Compiled:
        """Compiled step of the program: (state, batch, hyperparameters) -> (state, metrics)."""
        stages = self._choice[1]
        return self.lowered_step.compile() if stages is None else stages[1]

    @property
    def hyperparameters(self) -> Hyperparameters | None:
        """The arguments of the step that `config` sets, on the host; None with an optax transformation."""
        return read_hyperparameters(self._job.config) if self.has_schedule else None

    @functools.cached_property
    def _placed_hyperparameters(self) -> Hyperparameters | None:
        return place_hyperparameters(self.hyperparameters, self.program.placement.replicated)

    def run_step(self, state: TrainState, placed: Any) -> tuple[TrainState, Metrics]:
        """Return the state and the metrics after a step. placed: a batch from `place`. The state is donated."""
        new: tuple[TrainState, Metrics] = self.compiled_step(state, placed, self._placed_hyperparameters)
        for leaf in self._lent:
            leaf.delete()  # without this, a compiled function that gets a donated array aborts the process in jax 0.10
        self._lent = []
        return new

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
        self._state, metrics = self.run_step(self.state, self.place(batch))
        # Simulated devices share the threads of one machine. Many steps in flight starve those that wait in a
        # collective, and XLA aborts the process after 40 s. The loop of `fit` also reads one step late.
        if self._running is not None and self.program.placement.mesh.devices.flat[0].platform == "cpu":
            with self.processes.main.wait():
                jax.block_until_ready(self._running)
        self._running = metrics
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
        each = [self._evaluate_batch(state, self.place(batch)) for batch in batches]
        if not each:
            raise InputError("evaluate: there is no batch; give at least one")
        sums: LossParts = jax.tree.map(lambda *values: sum(map(float, values)), *each)
        totals = {"loss": sums.total, **sums.metrics}
        count = float(replace_zero(sums.count))
        return {name: float(value) / count for name, value in totals.items()}

    def _evaluate_batch(self, state: TrainState, placed: Any) -> LossParts:
        with self.processes.main.wait():
            parts: LossParts = jax.device_get(self.program.evaluation(state, batch=placed))
        return parts

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

        Adapters are merged into their bases, and codes are dequantised. The other arrays are those of the state, so
        that they take no memory, and the next step deletes them: JAX then raises `RuntimeError: Array has been deleted`
        where they are used. `jax.tree.map(jnp.copy, engine.model())` keeps them. In a job of several processes all of
        them call it, and the arrays are divided over the devices of all.

        An NNX module is in the mode in which it was made; `model.eval()` turns dropout off, as `evaluate` does.

        Args:
            ema: with `training.ema_decay`, give the average of the parameters; False for the parameters themselves.
                Variables that are no parameters are never averaged.
        """
        state, model = self.state, self.program.model
        masters = state.averaged_masters if ema else state.masters
        variables = dict(tree.leaves_with_path(state.variables))
        merged = jax.tree.map(_merge_weight, model.specs, tree.merge(masters, state.frozen), is_leaf=leaves.is_wrapped)
        arrays = model.flatten(merged), [variables[info.path] for info in self._frontend.variables]
        own = {id(leaf) for leaf in jax.tree.leaves(state)}
        self._lent += [array for array in jax.tree.leaves(arrays) if id(array) in own]
        return self._frontend.rebuild(*arrays)

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
        self._state, self._lent, program = None, [], self.program
        self._lost = f"the restore of step {step} failed, and the engine has no state now: restore again"
        state = load_state(checkpoints, step, program.specs, program.placement)
        self._lost = ""
        return state

    def to_checkpoint(self, state: TrainState) -> dict[str, Any]:
        """Return the trees of a state's checkpoint."""
        return {name: getattr(state, name) for name in saved_state.checkpoint_specs(self.program.specs)}

    @property
    def has_schedule(self) -> bool:
        """True if `config.schedule` decides the learning rate; False with an optax transformation."""
        return self._job.transformation is None

    def set_schedule(self, schedule: ScheduleConfig) -> None:
        """Use other numbers in the schedule of the learning rate than those of `config`, and no other kind."""
        config = self._job.config
        assert schedule.kind == config.schedule.kind, "the compiled step computes the kind"
        self._job = replace(self._job, config=replace(config, schedule=schedule))
        self.__dict__.pop("_placed_hyperparameters", None)

    def take_state(self, state: TrainState, identity: Identity | None) -> None:
        """Continue with this state, as a part of this run."""
        self._state, self._identity = state, identity


def _lower_step(program: EngineProgram) -> jax.stages.Lowered:
    lowered: jax.stages.Lowered = program.step.lower(program.state, program.batch)
    return lowered


def _compile_step(program: EngineProgram) -> StepStages:
    lowered = _lower_step(program)
    return lowered, lowered.compile()


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
