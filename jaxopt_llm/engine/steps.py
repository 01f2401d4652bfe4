"""Steps of an engine: one for each of its losses and for each set of shapes that its batches have.

A step is made when a batch first needs it, and kept. Those of one engine are programs over the same state.
"""

import functools
import math
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxopt_llm.compiler import hlo
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import CommandError, InputError
from jaxopt_llm.distributed.process_group import Processes
from jaxopt_llm.engine.batches import BatchRows, describe_array
from jaxopt_llm.engine.frontends import LossParts
from jaxopt_llm.engine.microbatches import BatchPlaces, Microbatches, count_rows, find_rows, with_rows
from jaxopt_llm.engine.program import (
    EngineProgram,
    Job,
    compile_fitting,
    find_limit,
    is_open,
    make_engine_program,
    make_placement,
)
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.run.replicas import count_copied_bytes
from jaxopt_llm.step.state import TrainState

StepStages = tuple[jax.stages.Lowered, jax.stages.Compiled]
Shapes = tuple[tuple[int, ...], ...]
WAIT_SECONDS = 60.0  # for the other processes, until a line says what for


class ShapedStep:
    """Step of one loss for batches of the same shapes. It is traced and compiled when it is first read."""

    def __init__(self, job: Job, mesh: Any, processes: Processes) -> None:
        self._job, self._mesh, self._processes = job, mesh, processes

    @functools.cached_property
    def _choice(self) -> tuple[EngineProgram, StepStages | None]:
        """The program, and its compiled step if the choice of a policy has compiled it."""
        limit = find_limit(self._mesh.devices.flat[0])
        program = make_engine_program(self._job, self._mesh)
        if limit is not None:
            limit -= count_copied_bytes(self._job.config.run.check_replicas, program.state)
        if limit is None or not is_open(program, self._job):
            return program, None
        channel = self._processes.channel("remat.policy")
        fitting = compile_fitting(
            self._job,
            program,
            limit,
            compile=_compile_step,
            count_peak=lambda stages: hlo.read_memory(stages[1]).peak,
            agree=lambda fits: all(each == str(True) for each in channel.exchange(str(fits))),
        )
        if self._processes.first:
            print(f"chosen: {fitting.chosen}", file=sys.stderr)
        return fitting.program, fitting.compiled

    @property
    def program(self) -> EngineProgram:
        """Program on the mesh."""
        return self._choice[0]

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        """Step of the program, traced for the state and the batch."""
        program, stages = self._choice
        return _lower_step(program) if stages is None else stages[0]

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """Compiled step of the program: (state, batch, hyperparameters) -> (state, metrics)."""
        stages = self._choice[1]
        return self.lowered.compile() if stages is None else stages[1]


class Steps:
    """The steps of an engine, and the places of its batches on the devices.

    Attributes:
        jobs: the job of each loss, by its name; that of the only loss by "".
    """

    def __init__(self, job: Job, processes: Processes, devices: Sequence[jax.Device] | None) -> None:
        self.jobs = {each.loss_name: each for each in job.losses}
        self._processes, self._devices = processes, devices
        self._steps: dict[tuple[str, Shapes], ShapedStep] = {}
        self._first: dict[str, ShapedStep] = {}  # the steps of the examples, by loss
        self._evaluated: set[tuple[str, Shapes]] = set()
        self._places: dict[tuple[str, Shapes, bool], BatchPlaces] = {}
        self._rows: dict[str, BatchRows] = {}

    @functools.cached_property
    def _mesh(self) -> Any:
        return make_mesh(next(iter(self.jobs.values())).config.mesh, self._devices)

    def find_job(self, loss: str | None) -> Job:
        """Return the job of a loss, which is None if there is one without a name.

        Raises:
            InputError: there is no such loss, or there are several.
        """
        if (name := loss or "") not in self.jobs:
            if "" in self.jobs:
                raise InputError(f"loss={loss}: the engine has one loss, which has no name; leave the argument out")
            found = f"loss={loss} is unknown" if loss else "loss: those of the engine have names"
            raise InputError(f"{found}; give one of {', '.join(self.jobs)}")
        return self.jobs[name]

    def find_first(self, loss: str | None = None) -> ShapedStep:
        """Return the step of a loss for batches of its example's shapes; None is the first loss."""
        job = self.find_job(next(iter(self.jobs)) if loss is None else loss)
        if job.loss_name not in self._first:
            key = job.loss_name, _list_shapes(self._find_places(job, job.example).target)
            self._first[job.loss_name] = self._steps[key] = ShapedStep(job, self._mesh, self._processes)
        return self._first[job.loss_name]

    def has(self, loss: str | None, placed: Microbatches) -> bool:
        """Return whether there is a step for a batch from `place`."""
        return (loss or "", _list_shapes(placed)) in self._steps

    def find(self, loss: str | None, placed: Microbatches) -> ShapedStep:
        """Return the step for a batch from `place`. Print a line on process 0 if its shapes are new.

        Raises:
            InputError: the loss fails with these shapes.
        """
        job = self.find_job(loss)
        key = job.loss_name, _list_shapes(placed)
        if key in self._steps:
            return self._steps[key]
        if (first := self.find_first(job.loss_name)) is self._steps.get(key):
            return first
        step = ShapedStep(replace(job, example=_join_microbatches(placed)), self._mesh, self._processes)
        self._announce(job, "step", placed)
        program = self._trace(job, placed, lambda: step.program)
        if program.state != first.program.state:
            raise InputError(
                f"batch: with {_describe(job, placed)} the loss loops over other parameters than with the example; "
                "make the parameters that it stacks independent of the shapes"
            )
        self._steps[key] = step
        return step

    def evaluate(self, loss: str | None, state: TrainState, placed: Microbatches) -> LossParts:
        """Return the sums of the loss of a batch from `place`. Print a line on process 0 if its shapes are new.

        Raises:
            InputError: the loss fails with these shapes.
        """
        job = self.find_job(loss)
        evaluation = self.find_first(job.loss_name).program.evaluation
        key = job.loss_name, _list_shapes(placed)
        if key not in self._evaluated:
            if key != (job.loss_name, _list_shapes(self._find_places(job, job.example).target)):
                self._announce(job, "evaluation", placed)
            self._trace(job, placed, lambda: evaluation.trace(state, batch=placed))
            self._evaluated.add(key)
        parts: LossParts = evaluation(state, batch=placed)
        return parts

    def rows(self, loss: str | None) -> BatchRows:
        """Return the rows of each batch that this process reads."""
        job = self.find_job(loss)
        if job.loss_name not in self._rows:
            places = self._find_places(job, job.example)
            local = range(1) if places.local_rows is None else places.local_rows.indices
            self._rows[job.loss_name] = BatchRows(job.example, local, job.replicated)
        return self._rows[job.loss_name]

    def place(self, loss: str | None, batch: Any, evaluates: bool = False, lazily: bool = False) -> Microbatches:
        """Return a batch on the devices, as the step takes it, or as the evaluation does.

        lazily: see BatchPlaces.put.

        Raises:
            InputError: its arrays do not fit those of the example, or its rows are not divisible by the microbatches.
        """
        job, rows = self.find_job(loss), self.rows(loss)
        local = rows.take(batch)
        key = job.loss_name, tuple(leaf.shape for leaf in jax.tree.leaves(local)), evaluates
        if key not in self._places:
            shares = rows.shares and not job.in_one_piece
            whole = with_rows(local, count_rows(job.example, job.replicated), job.replicated) if shares else local
            self._places[key] = self._find_places(job, whole, evaluates)
        return self._places[key].put(local, lazily)

    def _find_places(self, job: Job, batch: Any, evaluates: bool = False) -> BatchPlaces:
        """Return the places of a whole batch. An evaluation may have fewer microbatches than a step."""
        microbatches = job.config.training.accumulation
        if evaluates:
            microbatches = math.gcd(microbatches, find_rows(batch, job.replicated) or 1)
        return BatchPlaces(replace(job, example=batch).split(microbatches, make_placement(job.config, self._mesh)))

    def _announce(self, job: Job, what: str, placed: Microbatches) -> None:
        """Say that a program is compiled for a batch, after all processes have come to it with the same shapes."""
        text = _describe(job, placed)
        # A process that knows the shapes of its own batch does not come. It waits in a collective of its step, and this
        # process here: no step could be checked without an exchange at every step.
        warning = f"waits for the other processes: batches of {text} are new to this one; all must have the same shapes"
        timer = threading.Timer(WAIT_SECONDS, lambda: print(warning, file=sys.stderr, flush=True))
        timer.daemon = True
        timer.start()
        try:
            remedy = "all processes must give batches of the same shapes"
            self._processes.check_same("the shapes of a batch", text, remedy)
        finally:
            timer.cancel()
        if self._processes.first:
            print(f"compiles another {what}, for batches of {text}", file=sys.stderr)

    def _trace(self, job: Job, placed: Microbatches, trace: Any) -> Any:
        try:
            return trace()
        except CommandError:
            raise
        except Exception as error:
            if not (other := _describe(job, placed)):  # a loss for evaluation is first traced here
                raise
            message = str(error).strip().splitlines()
            raise InputError(
                f"batch: {other} differs from the example, and the loss fails with it: "
                f"{type(error).__name__}: {message[0] if message else ''}"
            ) from error


def _lower_step(program: EngineProgram) -> jax.stages.Lowered:
    lowered: jax.stages.Lowered = program.step.lower(program.state, program.batch)
    return lowered


def _compile_step(program: EngineProgram) -> StepStages:
    lowered = _lower_step(program)
    return lowered, lowered.compile()


def _list_shapes(placed: Microbatches) -> Shapes:
    return tuple(leaf.shape for leaf in jax.tree.leaves(placed))


def _join_microbatches(placed: Microbatches) -> Any:
    """Return the whole batch as ShapeDtypeStructs."""

    def join(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), leaf.dtype)

    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), placed.join(jax.tree.map(join, placed.rows)))


def _describe(job: Job, placed: Microbatches) -> str:
    """Return the arrays of a batch with other shapes than in the example, at most three."""
    example = dict(tree.leaves_with_path(job.example))
    other = [
        f"{path or 'an array'} {describe_array(leaf)}"
        for path, leaf in tree.leaves_with_path(_join_microbatches(placed))
        if tuple(leaf.shape) != tuple(example[path].shape)
    ]
    return ", ".join(other[:3]) + (f" and {len(other) - 3} more" if len(other) > 3 else "")
