"""Engine: the training of any model in Flax NNX, in Linen or as plain functions, by the settings of a `Config`."""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.checkpoint.native import step_directories
from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.checkpoint.native.identity import (
    Identity,
    claim_directory,
    continue_identity,
    new_identity,
    read_identity,
)
from jaxopt_llm.compiler import xla_options
from jaxopt_llm.config import ScheduleConfig
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.metric import read_value
from jaxopt_llm.distributed.process_group import SINGLE_PROCESS, Processes
from jaxopt_llm.engine.batches import BatchRows, LossRows, read_array
from jaxopt_llm.engine.checks import register_engine, register_returned
from jaxopt_llm.engine.frontends import ArrayInfo, LossParts
from jaxopt_llm.engine.given_weights import Weights, read_weights
from jaxopt_llm.engine.microbatches import Microbatches
from jaxopt_llm.engine.plan import EnginePlan, find_cluster, plan_engine
from jaxopt_llm.engine.program import EngineProgram, Job, differentiate_user_model
from jaxopt_llm.engine.search import EngineSearch, search_engine
from jaxopt_llm.engine.steps import Steps
from jaxopt_llm.engine.user_model import nest_variables
from jaxopt_llm.execution.partitioning import correct_partitioning
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.linear.leaves import LoraWeight
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.planning.step_plan import GPUS_PER_HOST
from jaxopt_llm.run.workload import load_state
from jaxopt_llm.step import hyperparameters
from jaxopt_llm.step import state as training_state
from jaxopt_llm.step.hyperparameters import Hyperparameters, make_schedule, place_hyperparameters, read_hyperparameters
from jaxopt_llm.step.program import take_share
from jaxopt_llm.step.state import TrainState, state_shardings
from jaxopt_llm.step.step import Metrics
from jaxopt_llm.step.update import WHOLE, has_shares


class Engine:
    """A model under training. `initialize` makes it.

    Nothing is allocated before the first call of a method that needs the state, such as `step` or `restore`.
    """

    def __init__(
        self,
        job: Job,
        processes: Processes = SINGLE_PROCESS,
        weights: Weights | None = None,
        devices: Sequence[jax.Device] | None = None,
    ) -> None:
        self.config, self.processes, self._weights = job.config, processes, weights
        self.steps, self._frontend = Steps(job, processes, devices), job.frontend
        self._state: TrainState | None = None
        self._identity: Identity | None = None  # of the run, if it belongs to one
        self._gradients: dict[str, Any] = {}  # by loss
        self._predictions: dict[
            tuple[int, int], tuple[weakref.ref[Any], Any]
        ] = {}  # by function, with a reference to it
        self._lost = ""  # why there is no state: a restore that failed, or a `fit` that has it
        self._lent: list[jax.Array] = []  # arrays of the state that `model` returned
        self._running: jax.Array | None = None  # loss of the last step that `step` started
        register_engine(self, lambda engine: jax.tree.leaves(engine._state))

    @property
    def _job(self) -> Job:
        """The job of the first loss."""
        return next(iter(self.steps.jobs.values()))

    @property
    def losses(self) -> list[str]:
        """Names of the losses; empty if there is only one."""
        return [name for name in self.steps.jobs if name]

    @property
    def example(self) -> Any:
        """A batch as ShapeDtypeStructs, or with arrays; with several losses, that of the first one."""
        return self._job.example

    @property
    def parameters(self) -> list[ArrayInfo]:
        """Path and shape of each parameter."""
        return self._frontend.parameters

    @property
    def program(self) -> EngineProgram:
        """Program on the devices, of the first loss and of batches of its example's shapes."""
        return self.steps.find_first().program

    @property
    def lowered_step(self) -> jax.stages.Lowered:
        """Step of the program, traced for the state and the batch."""
        return self.steps.find_first().lowered

    @property
    def compiled_step(self) -> jax.stages.Compiled:
        """Compiled step of the program: (state, batch, hyperparameters) -> (state, metrics)."""
        return self.steps.find_first().compiled

    @property
    def hyperparameters(self) -> dict[str, Hyperparameters]:
        """The arguments of each loss's step that `config` sets, on the host; none with an optax transformation."""
        jobs = self.steps.jobs.items()
        return {name: read_hyperparameters(job.config) for name, job in jobs if job.transformation is None}

    @functools.cached_property
    def _placed_hyperparameters(self) -> dict[str, Hyperparameters | None]:
        replicated = self.program.placement.replicated
        return {name: place_hyperparameters(values, replicated) for name, values in self.hyperparameters.items()}

    @functools.cached_property
    def _on_cpu(self) -> bool:
        platform: str = self.program.placement.mesh.devices.flat[0].platform
        return platform == "cpu"

    def run_step(self, state: TrainState, placed: Microbatches, loss: str | None = None) -> tuple[TrainState, Metrics]:
        """Return the state and the metrics after a step. placed: a batch from `place`. The state is donated."""
        compiled = self.steps.find(loss, placed).compiled
        new: tuple[TrainState, Metrics] = compiled(state, placed, self._placed_hyperparameters.get(loss or ""))
        for leaf in self._lent:
            leaf.delete()  # without this, a compiled function that gets a donated array aborts the process in jax 0.10
        self._lent = []
        return new

    @property
    def rows(self) -> BatchRows | LossRows:
        """Rows of each batch that this process reads: all of them, unless the job has several processes."""
        return LossRows({name: self.steps.rows(name) for name in self.losses}) if self.losses else self.steps.rows(None)

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics of the losses in the records of `fit`, each with the name of its loss if it has one."""
        found = []
        for name in self.steps.jobs:
            program = self.steps.find_first(name).program
            metrics = jax.eval_shape(program.evaluation, program.state, program.batch).metrics
            found += [f"{name}_{each}" for each in ("loss", *metrics)] if name else [*metrics]
        return sorted(found)

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

    def step(self, batch: Any, loss: str | None = None) -> dict[str, jax.Array]:
        """Train on one batch. Return the metrics, which are on the device.

        The first batch whose shapes differ from those of the batches before compiles another step, which is kept. A
        line on standard error says so.

        In a job of several processes each gives a whole batch, or its own rows of it: `rows.local`, and with several
        losses `rows.by_loss[name].local`.

        The metrics are `loss`, `grad_norm`, `skipped` (number of skipped steps so far), `skipped_in_a_row`, `overflow`,
        with a loss scale `loss_scale`, and those of the loss. `learning_rate` is among them with `config.schedule`, and
        with an optax transformation by `optax.inject_hyperparams`; if that has several, they are `learning_rate/` and
        the label of each. The state is updated in place.

        Args:
            batch: arrays with as many dimensions as those of the example. Do not change them before a metric of the
                step has been read: on CPUs JAX may use their memory.
            loss: name of the loss, if the engine has several. It trains its own parameters only.

        Raises:
            InputError: the batch does not fit, or the loss fails with its shapes.
        """
        self._state, metrics = self.run_step(self.state, self.steps.place(loss, batch, lazily=True), loss)
        # Simulated devices share the threads of one machine. Many steps in flight starve those that wait in a
        # collective, and XLA aborts the process after 40 s. The loop of `fit` also reads one step late.
        if self._running is not None and self._on_cpu:
            with self.processes.main.wait():
                self._running.block_until_ready()
        self._running = metrics["loss"]
        return {name: read_value(metric) for name, metric in metrics.items()}

    def evaluate(self, batches: Iterable[Any], ema: bool = True, loss: str | None = None) -> dict[str, float]:
        """Return the mean loss and metrics over batches. Nothing is updated.

        Args:
            batches: at least one.
            ema: with `training.ema_decay`, use the average of the parameters; False for the parameters themselves.
            loss: name of the loss, if the engine has several.
        """
        return self.evaluate_state(self.state, batches, ema, loss)

    def evaluate_state(
        self, state: TrainState, batches: Iterable[Any], ema: bool = True, loss: str | None = None
    ) -> dict[str, float]:
        """Return what `evaluate` returns, of a given state."""
        if isinstance(batches, Mapping):
            raise InputError("evaluate: this is one batch; give a list of batches")
        if ema:
            state = training_state.use_average(state, self.program.specs, self.program.placement)
        each = [self._evaluate_batch(state, batch, loss) for batch in batches]
        if not each:
            raise InputError("evaluate: there is no batch; give at least one")
        stacked: LossParts = jax.tree.map(lambda *values: np.stack(values, dtype=np.float64), *each)
        whole = stacked.join()
        return {"loss": float(whole.mean())} | {name: float(read_value(each)) for name, each in whole.metrics.items()}

    def _evaluate_batch(self, state: TrainState, batch: Any, loss: str | None) -> LossParts:
        placed = self.steps.place(loss, batch, evaluates=True)
        with self.processes.main.wait():
            parts: LossParts = jax.device_get(self.steps.evaluate(loss, state, placed))
        return parts

    def place(self, batch: Any, loss: str | None = None) -> Microbatches:
        """Return a batch as the step takes it: on the devices, arrays with rows as [M, B, ...].

        Args:
            batch: a whole batch, or in a job of several processes the rows of this one; see `step`.
            loss: name of the loss, if the engine has several.

        Raises:
            InputError: its arrays do not fit those of the example.
        """
        return self.steps.place(loss, batch)

    def gradients(self, batch: Any, loss: str | None = None) -> Any:
        """Return the gradients of the mean loss of a batch, float32, as `step` computes them. Nothing is updated.

        They are an `nnx.State`, the tree of Linen's params, or the pytree, and are not clipped. None, and in an
        `nnx.State` no entry, stands for a parameter that is not trained. A parameter with an adapter has a dict of the
        gradients of `lora_a`, `lora_b` and, with `lora.dora`, `magnitude`. The devices divide them as they divide the
        parameters.

        Args:
            batch: as for `step`, with its microbatches.
            loss: name of the loss, if the engine has several.
        """
        job = self.steps.find_job(loss)
        if job.loss_name not in self._gradients:
            self._gradients[job.loss_name] = jit_gradients(job, self.steps.find_first(job.loss_name).program)
        return rebuild_gradients(self.program, self._gradients[job.loss_name](self.state, self.place(batch, loss)))

    def predict(self, function: Callable[[Any, Any], Any], batch: Any, ema: bool = True) -> Any:
        """Return what a function (model, batch) returns for a batch, such as logits. Nothing is updated.

        The function is compiled at its first call, and again for each new shape of the batch. The compiled programs
        live as long as the function, so give the same object each time: a lambda that is written in the call is
        compiled at every call. The devices divide the rows of the batch if their number
        allows it. An NNX model is in evaluation mode, and the parameters are read in `precision.compute_dtype`. In a
        job of several processes all of them call it with the same whole batch, and each gets the whole results.

        Args:
            function: it returns a pytree of arrays.
            batch: pytree of arrays, which need not be like the example.
            ema: with `training.ema_decay`, use the average of the parameters; False for the parameters themselves.
        """
        state, program, kept = self.state, self.program, self._predictions
        if ema:
            state = training_state.use_average(state, program.specs, program.placement)
        # By identity: functions that are equal may compute something else.
        key = id(getattr(function, "__self__", None)), id(getattr(function, "__func__", function))
        if key not in kept:
            make_reference = weakref.WeakMethod if inspect.ismethod(function) else weakref.ref
            reference = make_reference(function, lambda _: kept.pop(key, None))
            whole = program.placement.replicated if self.processes.count > 1 else None
            kept[key] = reference, jit_prediction(self._job, program, reference, whole)
        return kept[key][1](state, place_rows(batch, program.placement))

    @property
    def learning_rate(self) -> float | dict[str, float]:
        """Learning rate of the next step; of several, the rate of each by its label.

        The label is the key of a part of the optimizer. With several losses it begins with the name of the loss and a
        slash. With `config.schedule`, the rate is computed from the step and cannot be set. With an optax
        transformation, the rate is the one that `optax.inject_hyperparams` keeps in the state, as in
        `optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)`. It can be set to a number, as in
        `engine.learning_rate = 1e-4`, or to a dict of numbers by label, and a checkpoint holds it. If a schedule
        computes it there, the value is the rate of the last step.

        Raises:
            InputError: no optimizer keeps its rate there; or, if it is set, a schedule computes it.
        """
        rates = {label: float(rate) for label, (_, _, rate) in self._read_rates().items()}
        return rates if len(rates) > 1 else next(iter(rates.values()))

    @learning_rate.setter
    def learning_rate(self, rate: float | Mapping[str, float]) -> None:
        known = self._read_rates()
        labels = ", ".join(map(repr, known))
        if not isinstance(rate, Mapping) and len(known) > 1:
            raise InputError(f"learning_rate: there are several; give a dict of numbers by label: {labels}")
        rates = dict(rate) if isinstance(rate, Mapping) else dict.fromkeys(known, rate)
        if unknown := [label for label in rates if label not in known]:
            raise InputError(f"learning_rate: there is no rate {unknown[0]!r}; the labels are {labels}")
        moments = self.state.moments
        for name, job in self.steps.jobs.items():
            own = {part: rates[label] for label, (loss, part, _) in known.items() if loss == name and label in rates}
            if own and job.transformation is None:
                raise InputError(
                    f"learning_rate: config.schedule.kind={job.config.schedule.kind} computes it at each step; to set "
                    "it, give initialize an optimizer such as optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)"
                )
            if own:
                of_loss = moments[name] if name else moments
                new = {**of_loss, WHOLE: hyperparameters.set_rates(of_loss[WHOLE], own)}
                moments = {**moments, name: new} if name else new
        self._state = replace(self.state, moments=moments)

    def _read_rates(self) -> dict[str, tuple[str, str, Any]]:
        """Return the loss, the part of its optimizer and the rate, by label."""
        found: dict[str, tuple[str, str, Any]] = {}
        for name, job in self.steps.jobs.items():
            moments, guard = (each[name] if name else each for each in (self.state.moments, self.state.guard))
            if job.transformation is None:
                settings = job.config.schedule
                schedule = make_schedule(settings.kind, self.hyperparameters[name].schedule, settings.warmup_kind)
                rates = {"": schedule(guard["updates"])}
            else:
                rates = hyperparameters.read_rates(moments[WHOLE])
            found |= {"/".join(filter(None, (name, part))): (name, part, rate) for part, rate in rates.items()}
        if not found:
            raise InputError(
                "learning_rate: the optimizer keeps it to itself; give initialize one such as "
                "optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)"
            )
        return found

    def plan(
        self,
        gpu: str = "h200",
        gpus: int | None = None,
        gpus_per_host: int = GPUS_PER_HOST,
        rows: int | None = None,
        loss: str | None = None,
    ) -> EnginePlan:
        """Return memory, collectives and time of a step on GPUs that this machine need not have.

        Nothing is allocated. The step is compiled for these GPUs, which takes seconds to minutes.

        Args:
            gpu: one of the chips of `plan`, such as "h100".
            gpus: number of GPUs, by default those of the mesh. Another number changes `mesh.fsdp`.
            rows: rows of the batch over all GPUs, by default those of the example.
            loss: name of the loss, if the engine has several; by default the first.

        Raises:
            InputError: the GPU is unknown, or the batch or the mesh does not divide.
        """
        job = self._job if loss is None else self.steps.find_job(loss)
        return plan_engine(job, gpu, gpus, gpus_per_host, rows)

    def search(
        self,
        gpu: str = "h200",
        gpus: int | None = None,
        gpus_per_host: int = GPUS_PER_HOST,
        rows: int | None = None,
        loss: str | None = None,
        allow: Sequence[str] = (),
    ) -> EngineSearch:
        """Return the fastest settings with which a step fits GPUs that this machine need not have.

        Nothing is allocated. The settings are the meshes of all GPUs, ZeRO stages, offload, rematerialisation and
        accumulation. Up to twelve are compiled for these GPUs, the fastest by arithmetic first.

        Args:
            gpu: one of the chips of `plan`, such as "h100".
            gpus: number of GPUs, by default those of the mesh.
            rows: rows of the batch over all GPUs, by default those of the example.
            loss: name of the loss, if the engine has several; by default the first.
            allow: fields that may also change to narrower values, as for `plan --search --allow`.

        Raises:
            InputError: the GPU is unknown, no mesh divides the batch, or a field of `allow` changes nothing.
        """
        job = self._job if loss is None else self.steps.find_job(loss)
        cluster = find_cluster(gpu, job.config.mesh.devices if gpus is None else gpus, gpus_per_host)
        return search_engine(job, cluster, rows, allow)

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
        register_returned(jax.tree.leaves(arrays))
        own = {id(leaf) for leaf in jax.tree.leaves(state)}
        self._lent += [array for array in jax.tree.leaves(arrays) if id(array) in own]
        return self._frontend.rebuild(*arrays)

    def save(self, directory: str | Path) -> None:
        """Write a checkpoint of the state, with the hashes of its files and the identity of the run.

        It replaces a checkpoint of the same step of this run.

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
        return {name: getattr(state, name) for name in training_state.checkpoint_specs(self.program.specs)}

    @property
    def has_schedule(self) -> bool:
        """True if `config.schedule` decides the learning rate of a loss; False with optax transformations alone."""
        return any(job.transformation is None for job in self.steps.jobs.values())

    def set_schedule(self, schedule: ScheduleConfig) -> None:
        """Use other numbers in the schedule of the learning rate than those of `config`, and no other kinds."""
        kinds = [(each.kind, each.warmup_kind) for each in (schedule, self.config.schedule)]
        assert kinds[0] == kinds[1], "the compiled step computes the kinds"
        self.steps.jobs = {
            name: replace(job, config=replace(job.config, schedule=schedule)) for name, job in self.steps.jobs.items()
        }
        self.__dict__.pop("_placed_hyperparameters", None)

    def lend_state(self, state: TrainState) -> TrainState:
        """Return a state to `fit`, whose steps donate it. Until `take_state` the engine has none."""
        self._state = None
        self._lost = "fit trains this engine, and nothing else can use its state before fit returns"
        return state

    def take_state(self, state: TrainState, identity: Identity | None) -> None:
        """Continue with this state, as a part of this run."""
        self._state, self._identity, self._lost = state, identity, ""


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


# --- Queries, which change nothing: the gradients of the loss, and any function of the model


def jit_gradients(job: Job, program: EngineProgram) -> Any:
    """Return the jitted (state, batch) -> gradients of the mean loss, float32, placed as the masters."""
    differentiate = differentiate_user_model(program.model, program.placement)
    masters = state_shardings(program.specs, program.placement).masters
    share = program.optimizers[job.loss_name] if has_shares(program.optimizers) else None

    def compute_gradients(state: TrainState, batch: Microbatches) -> Params:
        if share is not None:
            state = take_share(state, job.loss_name, share.trained)
        found = differentiate(state, batch, state.loss_scale.get("scale", 1.0))
        gradients: Params = jax.tree.map(lambda x: x.astype(jnp.float32) / found.divisor, found.gradients)
        return gradients

    if share is not None:
        masters = tree.restrict(masters, share.trained)
    on_device = jax.tree.map(lambda sharding: sharding.with_memory_kind("device"), masters)
    return jax.jit(compute_gradients, out_shardings=on_device, compiler_options=_compiler_options(job, program))


def rebuild_gradients(program: EngineProgram, gradients: Params) -> Any:
    """Return gradients as the user's kind of tree; see Engine.gradients."""

    def rebuild(gradient: Any) -> Any:
        return dict(tree.leaves_with_path(gradient)) if isinstance(gradient, LoraWeight) else gradient

    return program.model.frontend.rebuild_parameters([rebuild(each) for each in program.model.flatten(gradients)])


def jit_prediction(job: Job, program: EngineProgram, reference: Any, out_sharding: NamedSharding | None) -> Any:
    """Return the jitted (state, batch) -> what a function (model, batch) returns in evaluation mode.

    Args:
        reference: weak one to the function, which its compiled programs must not keep alive.
        out_sharding: of its results; None leaves it to XLA.
    """
    model = replace(program.model, frontend=job.frontend.for_evaluation())
    nothing = jax.tree.map(lambda spec: None, model.specs)
    placement = program.placement.for_evaluation()

    @functools.partial(correct_partitioning, placement=placement)
    def predict(state: TrainState, batch: Any) -> Any:
        params = tree.merge(state.trainable, state.frozen)
        return model.run(reference(), params, nothing, state.variables, batch, placement)[0]

    return jax.jit(predict, out_shardings=out_sharding, compiler_options=_compiler_options(job, program))


def _compiler_options(job: Job, program: EngineProgram) -> Any:
    return xla_options.compiler_options(program.placement.mesh, user=job.config.xla)


def place_rows(batch: Any, placement: Placement) -> Any:
    """Return a whole batch on the devices.

    The devices divide the rows of an array, its first dimension, if their number allows it. Otherwise each holds all.
    """
    axes = placement.batch_axes

    def place(leaf: Any) -> jax.Array:
        array = read_array(leaf)
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
        divides = axes and array.ndim and array.shape[0] % placement.size(*axes) == 0
        sharding = NamedSharding(placement.mesh, PartitionSpec(axes) if divides else PartitionSpec())
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(place, batch)
