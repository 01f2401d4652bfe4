"""fit: the loop that `train` runs, for an engine: resume, preemption, records, dashboards and checkpoints."""

import contextlib
import functools
import json
import math
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.checkpoint.native.identity import Identity
from jaxopt_llm.config import Config, RematConfig, ScheduleConfig, fields
from jaxopt_llm.config.cli import Recipe
from jaxopt_llm.core import json_files, tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.files import lock_directory, replace_durably
from jaxopt_llm.data.rows.loader import read_ahead
from jaxopt_llm.distributed.process_group import SINGLE_PROCESS, Processes, check_same_programs
from jaxopt_llm.distributed.watchdog import Watchdog
from jaxopt_llm.engine.batches import Batches, make_batches, read_example
from jaxopt_llm.engine.checks import EngineWarning
from jaxopt_llm.engine.engine import Engine
from jaxopt_llm.engine.initialize import initialize
from jaxopt_llm.observe.preemption import Preemption
from jaxopt_llm.parallel.mesh import visible_devices
from jaxopt_llm.parallel.offload import count_resting_bytes
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.planning.free_memory import format_bytes
from jaxopt_llm.planning.memory import KnownShapes, write_memory
from jaxopt_llm.planning.oom import STEP, OomExplainer
from jaxopt_llm.run.directory import has_checkpoint, read_decay_steps
from jaxopt_llm.run.loop import train_workload
from jaxopt_llm.run.records import Records, open_records
from jaxopt_llm.run.replicas import copies_state
from jaxopt_llm.step.state import TrainState, abstract_state
from jaxopt_llm.step.step import Metrics, is_of_step


@dataclass(frozen=True, eq=False)
class EngineWorkload:
    """An engine and its data, as the loop sees them (run/workload.py).

    Attributes:
        held_out: batches of an evaluation, by the name of the loss, which is "" if there is only one.
    """

    engine: Engine
    config: Config
    batches: Batches
    held_out: Mapping[str, Sequence[Any]]
    explainer: OomExplainer

    unit = "rows"

    @property
    def processes(self) -> Processes:
        return self.engine.processes

    @property
    def directory(self) -> Path:
        return Path(self.config.run.directory)

    @property
    def units_per_step(self) -> int:
        return self.config.training.batch_size

    @property
    def utilisation(self) -> dict[str, float]:
        return {}

    def restore(self, checkpoints: Checkpoints, start: int, say: Callable[[str], None]) -> TrainState:
        if start:
            return self.engine.lend_state(self.engine.load(checkpoints, start))
        if done := int(self.engine.state.step):
            raise InputError(
                f"fit: the engine has trained for {done} step(s), and {self.directory} holds no run that it could "
                "continue; give the directory of its run, or begin with another engine (initialize(weights=...))"
            )
        return self.engine.lend_state(self.engine.state)

    def read_batches(self, start: int, stopping: Callable[[], bool]) -> Generator[tuple[Any, float], None, None]:
        return read_ahead(self.batches, start, self.config.watchdog.floor_seconds, stopping)

    def draw(self, state: TrainState, batch: Any) -> tuple[Any, Metrics]:
        return batch, {}

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        loss, batch = batch if self.engine.losses else (None, batch)
        placed = self.engine.place(batch, loss)
        if not self.engine.steps.has(loss, placed):
            self.processes.main.enter("compile")
            self.engine.steps.find(loss, placed).compiled  # noqa: B018
            self.processes.main.enter("step")
        with self.processes.main.wait():  # on CPUs, the call returns when all processes have finished the step
            state, metrics = self.engine.run_step(state, placed, loss)
        if loss is None:
            return state, metrics
        own = {name if is_of_step(name) else f"{loss}_{name}": each for name, each in metrics.items()}
        return state, own | {f"{loss}_loss": metrics["loss"]}

    def average_groups(self, state: TrainState) -> TrainState:
        raise AssertionError("an engine has no local steps")

    def measure(self, state: TrainState) -> dict[str, float]:
        found: dict[str, float] = {}
        for loss, batches in self.held_out.items():
            means = self.engine.evaluate_state(state, batches, loss=loss or None)
            found |= {f"eval_{loss}_{name}" if loss else f"eval_{name}": value for name, value in means.items()}
        return found

    def sample(self, state: TrainState) -> list[dict[str, str]]:
        return []

    def check_data(self, wait: bool) -> None:
        """Check nothing: the data is the user's."""

    def explain_oom(self, describe_action: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
        return self.explainer.explain_oom(describe_action, lambda: self.engine.lowered_step)

    def keep(self, state: TrainState, identity: Identity | None) -> None:
        self.engine.take_state(state, identity)

    def to_checkpoint(self, state: TrainState) -> dict[str, tree.Tree]:
        return self.engine.to_checkpoint(state)

    def write_files(self) -> None:
        """Write config.json, and parameters.json: the shapes of all parameters."""
        shapes = {info.path: list(info.shape) for info in self.engine.parameters}
        replace_durably(self.directory / "parameters.json", json.dumps(shapes, indent=2))
        replace_durably(self.directory / "config.json", fields.to_json(self.config))


def fit(
    engine: Engine,
    data: Any,
    steps: int | None = None,
    run_directory: str | Path | None = None,
    held_out: Iterable[Any] = (),
) -> Engine:
    """Train until `steps` steps are done, from the last checkpoint of the run directory if it has one.

    The same call continues a run that was stopped, and the result is equal to the bit on the same devices. SIGTERM,
    SIGINT and SIGHUP end it after the current step and its checkpoint; one that comes while it ends is sent to the
    script again, after its end. Records are in metrics.jsonl and in tensorboard/, as those of `train`, with `rows` in
    place of `tokens`; `config.checkpoint`, `config.logging` and `config.evaluation.every` say how often. A schedule of
    `config.schedule` ends at its `decay_steps`, by default the steps of the first call.

    Args:
        data: function step -> batch (the first step is 0), or (step, rows) -> the rows of the batch with these
            indices; dataset with `len` and an index (a Grain MapDataset or data source, Hugging Face datasets, a
            map-style dataset of torch, a list), of batches, or of rows, which are shuffled anew in each epoch; or an
            iterable of batches, such as a Grain IterDataset or torch's DataLoader. An iterable is read again from its
            beginning by a run that continues, so it must give the same batches. In a job of several processes, each
            gives whole batches or its own rows of them, `engine.rows.local`, with several losses
            `engine.rows.by_loss[name].local`; of a function (step, rows) and of a
            dataset of rows each process reads its own only. With several losses, each batch is (name of the loss,
            batch), which decides the loss of the step.
        steps: by default `config.training.steps`.
        run_directory: by default `config.run.directory`.
        held_out: batches whose mean loss is measured at each evaluation, as `eval_loss`; with several losses (name of
            the loss, batch), as `eval_critic_loss` for a loss `critic`.

    Returns:
        The engine, with the state after the last step.

    Raises:
        InputError: the data does not fit, or the directory holds another run.
        Preempted: a signal stopped it. The same call continues the run.
        TrainingDiverged: the loss is not finite for 10 steps in a row.
        CheckpointError: no checkpoint of the run is intact, or the last one could not be written.
        OutOfMemory: the memory of the devices does not suffice.
        StateCorrupted: `run.check_replicas` has found wrong bits.
    """
    train_engine(engine, data, steps, run_directory, held_out).pass_on()
    return engine


def train_engine(
    engine: Engine,
    data: Any,
    steps: int | None = None,
    run_directory: str | Path | None = None,
    held_out: Iterable[Any] = (),
) -> Preemption:
    """Train as `fit` does. Return the record of its signals, such as a stop that came too late for it."""
    directory = Path(run_directory or engine.config.run.directory).absolute()
    config = replace(engine.config, run=replace(engine.config.run, directory=str(directory)))
    with Watchdog(config, engine.processes) as watchdog:
        config = _resolve_config(engine, config, steps)
        if engine.has_schedule:
            engine.set_schedule(config.schedule)
        processes, name = engine.processes, "run_directory"
        batches, measured = make_batches(data, engine.rows, config.run.seed), _take_held_out(engine, held_out)
        if config.evaluation.patience and engine.losses:
            raise InputError(
                f"evaluation.patience={config.evaluation.patience} compares one held-out loss, and the engine has "
                f"several ({', '.join(engine.losses)}); set evaluation.patience=0"
            )
        if config.evaluation.patience and config.evaluation.every and not measured:
            raise InputError(
                f"evaluation.patience={config.evaluation.patience} compares held-out losses, and there is no held_out; "
                "give held-out batches, or set evaluation.patience=0"
            )
        processes.check_same(name, str(directory), "all processes must name the same directory")
        locked = lock_directory(directory, name) if processes.first else contextlib.nullcontext()
        with locked, Preemption() as preemption:
            processes.check_shared(directory, name)
            _check_directory(directory, config)
            shown = engine.metric_names
            with open_records(config, processes, watchdog, engine.program.state, shown) as records:
                explainer = make_explainer(engine, records.checkpoints)
                _run(EngineWorkload(engine, config, batches, measured, explainer), records, preemption)
    return preemption


def _resolve_config(engine: Engine, config: Config, steps: int | None) -> Config:
    """Return the configuration of a run with its steps and the end of its schedule."""
    if steps is not None:
        config = replace(config, training=replace(config.training, steps=steps))
        if wrong := fields.wrong_types(config) or config.training.problems():
            raise InputError(f"fit: {wrong[0]}")
    if not engine.has_schedule:
        return config
    _check_schedule(config.schedule)  # before its end is chosen
    if engine.losses and config.schedule.kind != "constant" and not config.schedule.decay_steps:
        raise InputError(
            f"schedule.decay_steps: each of several losses counts its own steps, so that schedule.kind="
            f"{config.schedule.kind} would not end with the run; set it to the number of steps of one loss"
        )
    # As in `train`, the schedule ends with the steps of the first call, also if a later one trains longer.
    stored = None if config.schedule.decay_steps else read_decay_steps(Path(config.run.directory))
    end = stored or config.schedule.choose_end(config.training.steps)
    config = replace(config, schedule=replace(config.schedule, decay_steps=end))
    _check_schedule(config.schedule)
    steps = config.training.steps
    if 1 < config.schedule.count_warmup(steps) >= steps:
        warmup = config.schedule.describe_warmup(steps)
        text = f"{warmup} reaches the end of the run, step {steps}: the learning rate only rises"
        warnings.warn(text, EngineWarning, stacklevel=4)  # the caller of `fit`
    return config


def _check_schedule(schedule: ScheduleConfig) -> None:
    if found := schedule.problems():
        raise InputError(f"config: {'; '.join(found)}")


def _take_held_out(engine: Engine, held_out: Iterable[Any]) -> dict[str, list[Any]]:
    """Return the process's rows of the held-out batches by loss. They are checked before the first step."""
    if isinstance(held_out, Mapping):
        raise InputError("held_out: this is one batch; give a list of batches")
    if not isinstance(held_out, Iterable):
        raise InputError(f"held_out: {type(held_out).__name__} is no iterable; give a list of batches")
    taken: dict[str, list[Any]] = {}
    for number, batch in enumerate(held_out):
        found = engine.rows.take(batch, f"held_out, batch {number}")
        loss, rows = found if engine.losses else ("", found)
        taken.setdefault(loss, []).append(rows)
        engine.processes.main.beat()
    return taken


def _check_directory(directory: Path, config: Config) -> None:
    """Raise InputError if the directory holds a run that this configuration does not continue."""
    if not has_checkpoint(directory):
        return
    try:
        old = fields.from_json(json_files.read_bytes(directory / "config.json"))
        json_files.parse(json_files.read_bytes(directory / "parameters.json"))
    except (InputError, ValueError, TypeError, OSError) as error:
        raise InputError(
            f"fit: {directory} holds checkpoints that fit did not write, such as those of Engine.save; give another "
            "run_directory"
        ) from error
    if found := fields.forbidden_changes(old, config):
        changed = [change.split()[0] for change in found]
        can_allow = all(fields.can_allow(name, old, config) for name in changed)
        remedy = f", or allow the change by run.allow_change: {' '.join(changed)}" if can_allow else ""
        raise InputError(f"fit: {directory} holds another run: {'; '.join(found)}; give another directory{remedy}")


def _describe(engine: Engine, directory: Path) -> str:
    count = sum(math.prod(info.shape) for info in engine.parameters)
    devices, visible = engine.config.mesh.devices, visible_devices()
    of_all = f" of {len(visible)}" if devices < len(visible) else ""
    return f"{count:,} parameters on {devices}{of_all} {visible[0].device_kind} device(s), run directory {directory}"


def _run(workload: EngineWorkload, records: Records, preemption: Preemption) -> None:
    directory, engine, start, say = workload.directory, workload.engine, records.start, records.progress.say
    say(_describe(engine, directory))
    for choice in dict.fromkeys(engine.program.model.attention.choices.values()):
        if choice.reason:
            say(f"attention: {choice}")
    if records.end:
        say(records.end)
    else:
        workload.processes.main.enter("compile", start)
        copies = copies_state(workload.config.run.check_replicas, engine.program.state)
        for step in [engine.steps.find_first(name) for name in engine.steps.jobs]:
            check_same_programs(workload.processes, lambda step=step: step.lowered, engine.hyperparameters)  # type: ignore[misc]
            with workload.explain_oom(lambda: "compiling"):
                compiled = step.compiled
            workload.explainer.check_fits({STEP: (step.lowered, compiled)}, copies)
        if workload.processes.first:
            write_memory(directory / "memory.json", engine.program.state, engine.compiled_step)
    train_workload(workload, records, preemption)


# --- Advice for a step that does not fit into the memory


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
        yield f"  sharding.zero_stage=3: {format_bytes(saved, digits=2)} less of the state per device"
    if engine.program.model.keeps_layers or config.remat.policy == "save_attention":
        yield "  remat.policy=full: the backward computes each layer again, and keeps only its input"
    accumulation = config.training.accumulation
    parts = 2 * accumulation * config.mesh.batch_shards
    if config.training.batch_size % parts == 0:
        yield f"  training.accumulation={2 * accumulation}: half of the activations; the batch stays the same"
    offloaded = replace(placement, offload=replace(config.offload, optimizer=True))
    if jax.default_backend() != "cpu" and (saved := _count_saved(engine, offloaded)):
        yield f"  offload.optimizer=True: {format_bytes(saved, digits=2)} of the state moves to the host"
    if engine.has_schedule and not resumes and config.optimizer.state_dtype != "int8":
        yield "  optimizer.state_dtype=int8: moments of 8 bits"
    yield "  more devices: engine.plan(gpus=N) shows the memory of a step on N GPUs, and allocates nothing"


def _count_saved(engine: Engine, placement: Placement) -> int:
    """Return the bytes of the state that leave each device with another placement."""
    before, after = engine.program.state, abstract_state(engine.program.specs, placement)
    return count_resting_bytes(before) - count_resting_bytes(after)


# --- Recipes with a model of their own, for `train` and `plan`
#
# Such a recipe defines `model`, `loss` and `data`: arguments of `initialize` and of `fit`. It may define `example`,
# `held_out` and the names of `OPTIONAL`. `get_config` may be left out.


# Arguments of `initialize` that a recipe may define, besides `example`.
OPTIONAL = ("optimizer", "rules", "evaluation_loss", "weights", "replicated", "trains", "loss_over")


def make_engine(recipe: Recipe, processes: Processes = SINGLE_PROCESS) -> Engine:
    """Return the engine of a recipe. Its example is the recipe's, or the first batch of its data.

    Process 0 prints each warning as one line.

    Raises:
        InputError: a name is missing, or something does not fit together.
    """
    check_recipe(recipe)
    names = recipe.names
    given = {name: names[name] for name in OPTIONAL if name in names}
    example = names["example"] if "example" in names else read_example(names["data"], recipe.config.training.batch_size)
    # The devices open when all processes come to them. JAX fails if one comes minutes later, so the wait is here.
    processes.channel("example").exchange("")
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always", EngineWarning)
        engine = initialize(names["model"], names["loss"], example, recipe.config, **given)
    for each in raised if engine.processes.first else ():
        print(f"warning: {each.message}", file=sys.stderr)
    return engine


def check_recipe(recipe: Recipe) -> None:
    """Raise InputError if the data is missing, or a setting of the recipe has a wrong value."""
    if "data" not in recipe.names:
        raise InputError(f"--config {recipe.path}: it defines a model and a loss, and lacks data, as fit takes it")
    if found := fields.wrong_types(recipe.config) or recipe.config.problems():
        raise InputError(f"--config {recipe.path}: {'; '.join(found)}")


def train_recipe(recipe: Recipe, processes: Processes) -> None:
    """Train the model of a recipe to `training.steps`, as `fit` does."""
    with Watchdog(recipe.config, processes):
        engine = make_engine(recipe, processes)
    train_engine(engine, recipe.names["data"], held_out=recipe.names.get("held_out", ()))
