"""Progress of a run or of a search for people: a live line on a terminal, plain lines elsewhere."""

import contextlib
import datetime
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column


class ProgressLine:
    """Progress of a run: on a terminal a line that is rewritten after every step, elsewhere a line for each record.

    A context manager. The line has the step, the loss, the speed and the remaining time, and the lines of records have
    the other numbers, too. The first step has a line, so that the first numbers need not wait for the first record.
    """

    def __init__(self, steps: int, visible: bool = True, shown: Sequence[str] = ()) -> None:
        """Prepare the line.

        Args:
            visible: whether this process prints anything.
            shown: metrics to show besides those that every run has.
        """
        self._steps, self._visible, self._shown = steps, visible, shown
        self._console = Console(highlight=False, soft_wrap=True, quiet=not visible)
        text = TextColumn("{task.description}", markup=False)
        columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(20), text
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._progress.add_task("compiling", total=steps)
        self._first, self._clock, self._has_shown = 0, 0.0, False
        self._has_ended = False

    def __enter__(self) -> "ProgressLine":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop rewriting the line. Later lines appear below it."""
        if not self._has_ended:
            self._has_ended = True
            self._progress.stop()

    def say(self, line: str) -> None:
        """Print a line. A full disk or a closed pipe does not end the run: metrics.jsonl contains the same numbers."""
        with contextlib.suppress(OSError):
            self._console.print(line, markup=False)

    def name_step(self, step: int) -> str:
        """Return the beginning of a line about a step."""
        return f"step {step:>{len(str(self._steps))}}/{self._steps}"

    def advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def start_training(self, step: int) -> None:
        """Measure the remaining time from step `step` on, and say "training" until the first numbers."""
        self._first, self._clock, self._has_shown = step, time.perf_counter(), False
        self._progress.update(self._task, description="training")

    @property
    def shows_steps(self) -> bool:
        """True if the next step is shown although it has no record."""
        return self._visible and (self._console.is_terminal or not self._has_shown)

    def show_step(self, numbers: dict[str, Any]) -> None:
        """Show a step that has no record. numbers: the fields of a record."""
        self._show(numbers, prints=not self._console.is_terminal)

    def show(self, record: dict[str, Any]) -> None:
        """Show a record of metrics.jsonl."""
        self._show(record, prints=not self._console.is_terminal or "eval_loss" in record)

    def _show(self, record: dict[str, Any], prints: bool) -> None:
        self._has_shown = True
        step, loss = record["step"], f"loss {_decimals(record['loss'], 4)}"
        unit = next(name for name in ("tokens", "rows") if f"{name}_per_second" in record)
        speed = f"{record[f'{unit}_per_second']:,.0f} {unit}/s{self._describe_rest(step)}"
        self._progress.update(self._task, description=f"{loss}  {speed}")
        if prints:
            self.say("  ".join((self.name_step(step), loss, *self._list_numbers(record), speed)))

    def _list_numbers(self, record: dict[str, Any]) -> Iterator[str]:
        """Yield the numbers of a record that are not in the line of a terminal."""
        if "eval_loss" in record:
            sets = [
                f"{name.removeprefix('eval_loss/')} {value:.4f}"
                for name, value in record.items()
                if name.startswith("eval_loss/")
            ]
            yield f"held-out {record['eval_loss']:.4f}" + (f" ({', '.join(sets)})" if len(sets) > 1 else "")
        if "eval_rewards/accuracy" in record:  # of an objective over pairs
            yield f"prefers {record['eval_rewards/accuracy']:.0%}"
        if "eval_accuracy" in record:  # of classes
            yield f"right {record['eval_accuracy']:.0%}"
        for name in record:
            if name.startswith("eval_tasks/"):
                yield f"{name.removeprefix('eval_tasks/')} {_decimals(record[name], 4)}"
        for name in filter(record.__contains__, self._shown):  # a loss of several may not have had a step yet
            held_out = f" (held-out {_decimals(record[f'eval_{name}'], 4)})" if f"eval_{name}" in record else ""
            yield f"{name} {_decimals(record[name], 4)}{held_out}"
        if "learning_rate" in record:  # not with an optimizer of the user
            yield f"lr {record['learning_rate']:.1e}"
        yield f"grad norm {_decimals(record['grad_norm'], 3)}"

    def _describe_rest(self, step: int) -> str:
        """Return the time that the remaining steps take, evaluations and saves included, if there are any."""
        if step >= self._steps or step <= self._first:
            return ""
        seconds = (time.perf_counter() - self._clock) / (step - self._first) * (self._steps - step)
        return f"  {datetime.timedelta(seconds=round(seconds))} left"


class CompileLine:
    """Line on stderr with the number of programs that a search has compiled. A context manager."""

    def __init__(self, most: int) -> None:
        """Prepare the line. most: programs that the search may compile."""
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        count = TextColumn("{task.completed} of at most {task.total} compiled")
        text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
        columns = count, BarColumn(20), TimeElapsedColumn(), text
        hidden = not self._console.is_terminal
        self._progress = Progress(*columns, console=self._console, disable=hidden, transient=True)
        self._task, self._most, self._announced = self._progress.add_task("estimating", total=most), most, 0

    def __enter__(self) -> "CompileLine":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def announce(self, settings: Sequence[str]) -> None:
        """Say which settings are compiled from now on."""
        self._progress.update(self._task, description="compiling " + "; ".join(settings))
        for setting in settings:
            self._announced += 1
            self._most = max(self._most, self._announced)  # if nothing fits, a search compiles one more
            if not self._console.is_terminal:
                line = f"compiling {self._announced} of at most {self._most}: {setting}"
                self._console.print(line, markup=False)

    def advance(self) -> None:
        """Count one program as compiled."""
        self._progress.advance(self._task)


def _decimals(value: float | None, places: int) -> str:
    return "not finite" if value is None else f"{value:z.{places}f}"
