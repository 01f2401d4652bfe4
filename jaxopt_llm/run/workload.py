"""Workload: a model and its data as the loop sees them, and the workload of a decoder."""

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.checkpoint.native.identity import Identity
from jaxopt_llm.config import Config
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import CheckpointError
from jaxopt_llm.data.rows.loader import read_ahead
from jaxopt_llm.data.tokens.prepared import Verification
from jaxopt_llm.data.tokens.tokenizer_folder import VOCABULARY
from jaxopt_llm.distributed.process_group import Processes
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.objectives import split_loss
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import abstract_checkpoint
from jaxopt_llm.run import initial_weights
from jaxopt_llm.run.compile import Executables, LossSum, measure_loss
from jaxopt_llm.run.directory import write_run_files
from jaxopt_llm.run.initial_weights import InitialWeights
from jaxopt_llm.run.rollouts import Rollouts
from jaxopt_llm.run.samples import Sampler
from jaxopt_llm.run.setup import Setup
from jaxopt_llm.step import state as training_state
from jaxopt_llm.step.local_steps import (
    abstract_groups,
    begin_groups,
    count_groups,
    initialize_groups,
    merge_groups,
    repeat_specs,
    resize_groups,
)
from jaxopt_llm.step.program import utilisation_per_token
from jaxopt_llm.step.state import GROUP_FIELDS, StateSpecs, TrainState, checkpoint_specs, resume_state
from jaxopt_llm.step.step import Metrics


class Workload(Protocol):
    """A model and its data.

    Attributes:
        unit: the unit in which records count batches: "tokens" or "rows".
        units_per_step: their number in a batch, over all devices.
        utilisation: see Meter.
    """

    @property
    def config(self) -> Config: ...

    @property
    def directory(self) -> Path: ...

    @property
    def processes(self) -> Processes: ...

    @property
    def unit(self) -> str: ...

    @property
    def units_per_step(self) -> int: ...

    @property
    def utilisation(self) -> dict[str, float]: ...

    def restore(self, checkpoints: Checkpoints, start: int, say: Callable[[str], None]) -> TrainState:
        """Return the state of step `start`: from its checkpoint, or for step 0 the initial one."""

    def read_batches(self, start: int, stopping: Callable[[], bool]) -> Generator[tuple[Any, float], None, None]:
        """Yield (batch, seconds waited for it) for the steps after `start`; see loader.read_ahead."""

    def draw(self, state: TrainState, batch: Any) -> tuple[Any, Metrics]:
        """Return what a step trains on, and metrics of it, given what was read for it and the state before it."""

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Run a step on what `draw` returned. The state is donated."""

    def average_groups(self, state: TrainState) -> TrainState:
        """Run an outer step (local_steps.py). The state is donated. Called only with local steps."""

    def measure(self, state: TrainState) -> dict[str, float]:
        """Return the held-out loss as `eval_loss`, and other numbers to record; nothing without held-out data."""

    def sample(self, state: TrainState) -> list[dict[str, str]]:
        """Return records of samples to write at an evaluation."""

    def check_data(self, wait: bool) -> None:
        """Raise InputError if data on the disk has changed since it was prepared.

        Args:
            wait: wait until all data has been checked.
        """

    def explain_oom(self, describe_action: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
        """Replace XLA's out-of-memory error by one that names the largest arrays and what saves memory.

        Args:
            describe_action: returns what was being done; called only after a failure.
        """

    def keep(self, state: TrainState, identity: Identity | None) -> None:
        """Take over the state at the end of the loop.

        Args:
            identity: the identity of the run.
        """

    def to_checkpoint(self, state: TrainState) -> dict[str, tree.Tree]:
        """Return the trees of the state's checkpoint."""

    def write_files(self) -> None:
        """Write the files that identify the run, before it has a checkpoint."""


ExplainOom = Callable[[Callable[[], str]], contextlib.AbstractContextManager[None]]


class DecoderWorkload:
    """A decoder and its documents, with compiled programs."""

    def __init__(
        self,
        setup: Setup,
        programs: Executables,
        initial: InitialWeights,
        verification: Verification,
        explain_oom: ExplainOom,
        measure_tasks: Callable[[TrainState], dict[str, float]] = lambda state: {},
    ) -> None:
        """Take over the setup of a run.

        Args:
            initial: the weights that the run starts from.
            verification: the verification of its prepared data.
            explain_oom: see Workload.
            measure_tasks: returns metrics of tasks to record at an evaluation.
        """
        config = setup.config
        self.config, self.directory, self.processes = config, setup.directory, setup.processes
        self.unit, self.units_per_step = "tokens", config.training.batch_size * config.training.sequence_length
        self.utilisation = utilisation_per_token(config, setup.program, setup.placement)
        self.explain_oom = explain_oom
        self._setup, self._programs, self._initial, self._verification = setup, programs, initial, verification
        self._sampler, self._measure_tasks = Sampler(setup), measure_tasks
        self._rollouts = Rollouts(setup) if config.draws else None

    def restore(self, checkpoints: Checkpoints, start: int, say: Callable[[str], None]) -> TrainState:
        """Return the state of step `start`; see Workload."""
        state, teacher = self._restore_student(checkpoints, start, say), self._initial.teacher
        specs, placement = self._setup.program.specs.teacher, self._setup.placement
        if teacher is None or specs is None:
            return state
        say(f"learns from {teacher.path}")
        if not (teacher.path / VOCABULARY).exists():
            say(f"{teacher.path} has no {VOCABULARY}: its ids are taken to be those of {self.config.data.tokenizer}")
        return replace(state, teacher=initial_weights.read_frozen(teacher, specs, placement))

    def _restore_student(self, checkpoints: Checkpoints, start: int, say: Callable[[str], None]) -> TrainState:
        specs, placement, initial = self._setup.program.specs, self._setup.placement, self._initial
        weights = initial.weights
        if start:
            read_frozen = None
            if weights is not None:
                read_frozen = functools.partial(initial_weights.read_frozen, weights, specs.frozen, placement)
            saved = count_groups(checkpoints.read_record(start)["arrays"])
            groups = placement.size("data") if specs.groups else 0
            if saved != groups:
                say(
                    f"the checkpoint has {saved or 'no'} groups in one program, and this run {groups or 'none'}: see "
                    "training.local_steps in docs/slow_links.md"
                )
            return load_state(checkpoints, start, specs, placement, read_frozen)
        given = None
        if weights is not None:
            given = initial_weights.read_parameters(weights, specs, placement)
            say(f"starts from the weights of {weights.path}")
        if initial.adapter is not None:
            given = initial_weights.add_adapter(given, initial.adapter, specs, placement)
            say(f"starts from the adapters of {initial.adapter.path}")
        optimizers, seed = self._setup.program.optimizers, self.config.run.seed
        return initialize_groups(specs, optimizers, seed, placement, given)

    def read_batches(self, start: int, stopping: Callable[[], bool]) -> Generator[tuple[Any, float], None, None]:
        if self._rollouts is not None:
            return self._rollouts.read_steps(start)
        return read_ahead(self._setup.loader, start, self.config.watchdog.floor_seconds, stopping)

    def draw(self, state: TrainState, batch: Any) -> tuple[Any, Metrics]:
        return (batch, {}) if self._rollouts is None else self._rollouts.make_batch(state, batch)

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        placed = self._setup.local_rows.make_global(batch)
        with self.processes.main.wait():  # on CPUs, the call returns when all processes have finished the step
            new: tuple[TrainState, Metrics] = self._programs.step(state, placed, self._setup.program.step.placed)
        return new

    def average_groups(self, state: TrainState) -> TrainState:
        with self.processes.main.wait():
            new: TrainState = self._programs.outer_step(state)
        return new

    def measure(self, state: TrainState) -> dict[str, float]:
        """Return the mean loss over all validation sets, `eval_loss`, and the loss of each of `evaluation.paths`.

        With an objective over pairs, the metrics of all pairs follow, `eval_rewards/accuracy` and so on.

        Metrics of `evaluation.tasks` come last. With `training.ema_decay`, the average is measured in place of the
        parameters. Of answers that the model draws, see `Rollouts.measure`.
        """
        if self._rollouts is not None:
            return self._rollouts.measure(state, lambda batches: self._name_losses(self._sum_loss(state, batches)))
        total, losses, objective = LossSum(), {}, self._setup.program.model.objective
        of_tasks = self._measure_tasks(state)
        state = training_state.use_average(state, self._setup.program.specs, self._setup.placement)
        for name, batches in self._setup.validation.items():
            loss = self._sum_loss(state, batches)
            total += loss
            if self.config.evaluation.paths:
                losses[f"eval_loss/{name}"] = float(split_loss(objective, loss.mean)[0])
        return self._name_losses(total) | losses | of_tasks

    def _sum_loss(self, state: TrainState, batches: Iterable[Batch]) -> LossSum:
        placed = map(self._setup.local_rows.make_global, batches)
        return measure_loss(self._programs.held_out, state, placed, self.processes.main.wait)

    def _name_losses(self, total: LossSum) -> dict[str, float]:
        """Return the mean loss, `eval_loss`, and the other metrics of the objective."""
        whole, metrics = split_loss(self._setup.program.model.objective, total.mean)
        return {"eval_loss": float(whole)} | {f"eval_{name}": float(value) for name, value in metrics.items()}

    def sample(self, state: TrainState) -> list[dict[str, str]]:
        return self._sampler(state)

    def check_data(self, wait: bool) -> None:
        self._verification.check(wait, self.processes.main.beat)

    def to_checkpoint(self, state: TrainState) -> dict[str, tree.Tree]:
        if self._rollouts is not None:
            self._rollouts.sync()
        return self._setup.program.to_checkpoint(state)

    def keep(self, state: TrainState, identity: Identity | None) -> None:
        """Keep nothing: the command ends with its run."""
        if self._rollouts is not None:
            self._rollouts.close()

    def write_files(self) -> None:
        data, device = self._setup.data, self._setup.placement.mesh.devices.flat[0].device_kind
        initial = self._initial
        teacher = initial.teacher.sha256 if initial.teacher else None
        write_run_files(
            *(self.config, data.corpus, data.tokenizer, device),
            *(self._setup.functions, initial.base_sha256),
            reference=data.reference,
            teacher_sha256=teacher,
        )


def load_state(
    checkpoints: Checkpoints,
    step: int,
    specs: StateSpecs,
    placement: Placement,
    read_frozen: Callable[[], Params] | None = None,
) -> TrainState:
    """Return the state of a checkpoint.

    The run and the checkpoint may have different groups of local steps (local_steps.py). If the checkpoint has another
    number of groups, they are resized. If it has none, all groups begin with its state. If only the checkpoint has
    groups, they are merged.

    Args:
        read_frozen: returns the frozen parameters, if the checkpoint does not hold them.

    Raises:
        CheckpointError: it cannot be read, or is of another model, optimizer or precision.
    """
    arrays = checkpoints.read_record(step)["arrays"]
    saved_groups = count_groups(arrays)
    if specs.one_group is not None and not saved_groups:
        return begin_groups(load_state(checkpoints, step, specs.one_group, placement, read_frozen), specs, placement)
    saved_specs = checkpoint_specs(specs)
    saved = abstract_checkpoint(saved_specs, placement)
    resizes = bool(specs.groups) and saved_groups != placement.size("data")
    merges = saved_groups > 0 and not specs.groups
    unread: set[str] = set()
    if resizes:
        saved["groups"] = abstract_groups(specs.groups, saved_groups, placement)
    elif merges:
        unread = {"masters", "moments"}  # of the outer step
        saved = {name: each for name, each in saved.items() if name not in GROUP_FIELDS}
        saved["groups"] = abstract_groups(repeat_specs(saved_specs, saved_groups), saved_groups, placement)
    if others := sorted(arrays.keys() - saved.keys() - unread):
        raise CheckpointError(
            f"checkpoint {checkpoints.directory / str(step)} also holds {', '.join(others)}, which is not trained "
            "here: it is of another optimizer, precision or training.ema_decay; use the settings that wrote it"
        )
    restored = checkpoints.restore(step, **saved)
    if read_frozen is not None:
        restored["frozen"] = read_frozen()
    if resizes:
        restored["groups"] = resize_groups(restored["groups"], specs.groups, placement)
    elif merges:
        restored |= merge_groups(restored.pop("groups"), saved_specs, placement)
    return resume_state(specs, step, placement, **restored)
