"""Reader of the files of a run directory, also while the run writes them or after it died.

Lines that are not records are counted, not refused: half a run is better than no report.
"""

import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.config import cli
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError

EVAL_LOSS, EVAL_TASKS = "eval_loss", "eval_tasks"
EVALUATIONS = "evaluations"  # folder with results in tasks of the lm-evaluation-harness


@dataclass(frozen=True)
class Plot:
    """Plot of a field of the records over the steps.

    Attributes:
        format: of the numbers, in d3's notation.
        log: whether the reader can choose a logarithmic axis.
        from_zero: whether the axis begins at 0.
        held_out: whether the held-out batches have this number too; its field and its plot are named after it.
    """

    field: str
    title: str
    unit: str
    format: str
    log: bool = False
    from_zero: bool = False
    held_out: bool = False

    def list_all(self) -> list["Plot"]:
        """Return this plot, and that of the held-out number if there is one."""
        title = f"Held-out {self.title[0].lower()}{self.title[1:]}"
        more = [replace(self, field=f"eval_{self.field}", title=title, held_out=False)]
        return [self, *(more if self.held_out else [])]


# All plots, in order: the numbers of a record that a report shows. The plot of EVAL_TASKS shows each field that begins
# with it, and that of EVAL_LOSS also those that begin with it.
PLOTS = tuple(
    plot
    for each in (
        Plot("loss", "Training loss", "nats per token, or of the objective per pair", ".4f", log=True),
        Plot(EVAL_LOSS, "Held-out loss", "nats per token, or of the objective per pair", ".4f", log=True),
        Plot(EVAL_TASKS, "Tasks", "metric", ".4f"),
        Plot(
            "rewards/accuracy", "Pairs whose chosen answer is preferred", "share", ".1%", from_zero=True, held_out=True
        ),
        Plot("rewards/margin", "Margin of rewards", "chosen - rejected", ".4~g", held_out=True),
        Plot("kl", "Divergence from the reference", "nats", ".4~g", from_zero=True, held_out=True),
        Plot("rewards/mean", "Mean reward of answers", "mean", ".4~g", held_out=True),
        Plot("rewards/equal_groups", "Groups of answers with equal rewards", "share", ".1%", from_zero=True),
        Plot("answers/length", "Length of answers", "tokens", ",.1f", from_zero=True),
        Plot("entropy", "Entropy of answers", "nats per token", ".4f", from_zero=True),
        Plot("clipped", "Tokens whose gain is clipped", "share", ".2%", from_zero=True),
        Plot("accuracy", "Documents of the right class", "share", ".1%", from_zero=True, held_out=True),
        Plot("divergence", "Divergence from the teacher", "nats per token", ".4f", from_zero=True, held_out=True),
        Plot("grad_norm", "Gradient norm", "before the clip", ".4~g", log=True),
        Plot("learning_rate", "Learning rate", "", ".3~g", from_zero=True),
        Plot("tokens_per_second", "Throughput", "tokens per second", ",.0f", from_zero=True),
        Plot("mfu", "Model FLOP utilisation", "share of the peak", ".1%", from_zero=True),
        Plot("data_wait", "Wait for data", "share of the step", ".1%", from_zero=True),
        Plot("loss_scale", "Loss scale", "", ",.6~g", log=True),
        Plot("skipped", "Skipped steps", "so far", ",d", from_zero=True),
    )
    for plot in each.list_all()
)
# The numbers that are read: those of the plots, and those that other parts of the page need.
FIELDS = {plot.field for plot in PLOTS} | {"tokens", "step_seconds", "data_seconds", "peak_bytes"}


@dataclass(frozen=True)
class Curve:
    """Finite numbers of one field of the records.

    Attributes:
        records: indices of the records that have them, [N].
        values: the numbers, [N].
    """

    records: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class TaskResult:
    """Metric of a task of the lm-evaluation-harness.

    Attributes:
        task: name of the task or group.
        setup: examples in a prompt, and what else changes the task.
        metric: name of the metric, with the name of the filter of the answers.
        step: step of the checkpoint.
        error: standard error; NaN if it is not known.
    """

    task: str
    setup: str
    metric: str
    step: float
    value: float
    error: float


@dataclass(frozen=True)
class Run:
    """Contents of a run directory.

    Attributes:
        name: text that tells this run from the others of the report.
        config: config.json.
        steps: step of each record, [R].
        tokens: tokens that were read up to each step, [R].
        curves: the other numbers of the records, by field.
        events: entries of events.jsonl.
        faults: entries of faults.jsonl that are faults; see `_read_faults`.
        memory: memory.json; None if it is missing or damaged.
        samples: entries of samples.jsonl.
        task_results: contents of the files of `evaluations`, the oldest first.
        notes: what could not be read.
    """

    name: str
    directory: Path
    config: dict[str, Any]
    steps: NDArray[np.float64]
    tokens: NDArray[np.float64]
    curves: dict[str, Curve]
    events: list[dict[str, Any]]
    faults: list[dict[str, Any]]
    memory: dict[str, Any] | None
    samples: list[dict[str, Any]]
    task_results: list[TaskResult]
    notes: list[str]


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """Read run directories.

    Raises:
        InputError: a directory is not a run directory, or is named twice.
    """
    resolved = [directory.resolve() for directory in directories]
    for directory, path in zip(directories, resolved, strict=True):
        if resolved.count(path) > 1:
            raise InputError(f"{directory} is named twice; name each run directory once")
    configs = [_read_config(directory) for directory in directories]
    names = make_names(resolved)
    return [read_run(*each) for each in zip(directories, names, configs, strict=True)]


def make_names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of different paths that differ from each other."""
    for length in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[1:][-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def read_run(directory: Path, name: str, config: dict[str, Any]) -> Run:
    """Read the records, events, memory and samples of a run."""
    notes: list[str] = []
    curves, steps = _read_curves(directory / "metrics.jsonl", notes)
    tokens = np.full(steps.size, np.nan)
    if known := curves.pop("tokens", None):
        tokens[known.records] = known.values
    events = [entry for entry in _read_lines(directory / "events.jsonl", notes) if _is_event(entry)]
    faults = _read_faults(directory / "faults.jsonl", notes)
    samples = [entry for entry in _read_lines(directory / "samples.jsonl", notes) if _is_sample(entry)]
    memory = _read_memory(directory / "memory.json", notes)
    results = list(_read_task_results(directory / EVALUATIONS, notes))
    return Run(name, directory, config, steps, tokens, curves, events, faults, memory, samples, results, notes)


def to_number(value: Any) -> float:
    """Return a number of a JSON file; NaN for anything else."""
    try:
        return float(value) if type(value) in (int, float) else math.nan
    except OverflowError:  # an integer of more than 308 digits
        return math.nan


def _read_curves(path: Path, notes: list[str]) -> tuple[dict[str, Curve], NDArray[np.float64]]:
    """Return the finite numbers of each field, and the step of each record."""
    # Arrays, 16 bytes for each number, because a run may have a million records.
    columns: defaultdict[str, tuple[array[int], array[float]]] = defaultdict(lambda: (array("q"), array("d")))
    steps, unusable = array("d"), 0
    for record in _read_lines(path, notes):
        step = to_number(record.get("step"))
        if not math.isfinite(step):
            unusable += 1
            continue
        numbers = {name: to_number(value) for name, value in record.items() if _is_shown(name)}
        if numbers.get("step_seconds"):
            numbers["data_wait"] = numbers.get("data_seconds", math.nan) / numbers["step_seconds"]
        for name, number in numbers.items():
            if math.isfinite(number):
                records, values = columns[name]
                records.append(len(steps))
                values.append(number)
        steps.append(step)
    if unusable:
        notes.append(f"{path.name}: {unusable:,} lines without a step are left out")
    curves = {name: Curve(np.array(records), np.array(values)) for name, (records, values) in columns.items()}
    return curves, np.array(steps, np.float64)


def _is_shown(name: str) -> bool:
    return name in FIELDS or name.startswith((f"{EVAL_LOSS}/", f"{EVAL_TASKS}/"))


def _read_lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file with one on each line. A last line without a newline is being written."""
    if not path.is_file():
        return
    damaged = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            entry = json_files.parse_object(line)
            if entry is not None:
                yield entry
            else:
                damaged += bool(line.strip())
    if damaged:
        notes.append(f"{path.name}: {damaged:,} damaged lines are left out")


def _read_config(directory: Path) -> dict[str, Any]:
    """Return config.json, which another version may have written."""
    problem = "not a run directory"
    try:
        config = json_files.parse_object((directory / "config.json").read_bytes())
    except OSError as error:
        reason = cli.explain_no_run(directory, error)
        raise InputError(f"{directory}: {problem} ({reason}); name a directory that `train` has written") from error
    if config is None:
        raise InputError(f"{directory}: {problem} (config.json is damaged); name a directory that `train` has written")
    return config


def _read_memory(path: Path, notes: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    memory = json_files.parse_object(path.read_bytes())
    if memory is not None and isinstance(memory.get("kinds"), dict):
        return memory
    notes.append(f"{path.name} is damaged and left out")
    return None


def _read_task_results(folder: Path, notes: list[str]) -> Iterator[TaskResult]:
    """Yield the results of tasks, and of groups in place of the tasks in them."""
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime):
        entry = json_files.parse_object(path.read_bytes())
        if entry is None or not _is_evaluation(entry):
            notes.append(f"{EVALUATIONS}/{path.name} is not what `evaluate` writes and left out")
            continue
        own = entry["jaxopt_llm"]
        for each in list_metrics(entry):
            shots = entry["n-shot"].get(each.task)
            setup = ", ".join([f"{shots} examples"] * (shots is not None) + _describe_task_options(own))
            named = each.metric if each.filter == "none" else f"{each.metric} ({each.filter})"
            yield TaskResult(each.task, setup, named, to_number(own.get("step")), each.value, each.error)


class TaskMetric(NamedTuple):
    """Metric in the results of the harness.

    filter: name of the filter of the answers. error: standard error; NaN if it is not known.
    """

    task: str
    metric: str
    filter: str
    value: float
    error: float


def list_metrics(results: dict[str, Any]) -> Iterator[TaskMetric]:
    """Yield the finite metrics of tasks, and of groups in place of the tasks in them, from the harness's results."""
    within = {name for names in results["group_subtasks"].values() for name in names}
    for task, metrics in results["results"].items():
        for key, value in metrics.items() if task not in within else ():
            metric, _, kind = key.partition(",")
            number = to_number(value)
            if kind and not metric.endswith("_stderr") and math.isfinite(number):
                error = to_number(metrics.get(f"{metric}_stderr,{kind}"))
                yield TaskMetric(task, metric, kind, number, error)


def _describe_task_options(own: dict[str, Any]) -> list[str]:
    """Return what the options of an evaluation change of its tasks."""
    told = ["chat template"] * bool(own.get("apply_chat_template"))
    named = {"system_instruction": "system instruction", "limit": "limit", "adapter": "adapters"}
    return told + [f"{text} {own[name]}" for name, text in named.items() if own.get(name)]


def _read_faults(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the faults that a supervisor has written, each with the seconds that the run was away, if it is back.

    Several faults before the run was back share these seconds: the last of them has them.
    """
    faults: list[dict[str, Any]] = []
    for entry in _read_lines(path, notes):
        if "recovered_after" in entry and faults:
            faults[-1]["away"] = to_number(entry["recovered_after"])
        elif isinstance(entry.get("fault"), str) and all(
            math.isfinite(to_number(entry.get(name))) for name in ("time", "checkpoint", "reached")
        ):
            faults.append(entry | {"away": math.nan})
    return faults


def _is_evaluation(entry: dict[str, Any]) -> bool:
    parts = [entry.get(name) for name in ("results", "jaxopt_llm", "group_subtasks", "n-shot")]
    return (
        all(isinstance(part, dict) for part in parts)
        and all(isinstance(metrics, dict) for metrics in entry["results"].values())
        and all(isinstance(names, list) for names in entry["group_subtasks"].values())
        and math.isfinite(to_number(entry["jaxopt_llm"].get("step")))
    )


def _is_event(entry: dict[str, Any]) -> bool:
    return isinstance(entry.get("event"), str) and all(
        math.isfinite(to_number(entry.get(name))) for name in ("step", "time")
    )


def _is_sample(entry: dict[str, Any]) -> bool:
    texts = (entry.get("prompt"), entry.get("answer"), entry.get("set", ""), entry.get("reference", ""))
    return all(isinstance(text, str) for text in texts) and math.isfinite(to_number(entry.get("step")))
