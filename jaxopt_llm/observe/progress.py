"""Progress of a run or of a search for people: a live line on a terminal, plain lines elsewhere."""

import contextlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column


class ProgressLine:
    """Line with the number of steps done, the last logged numbers and the remaining time. A context manager."""

    def __init__(self, steps: int, visible: bool = True, shown: Sequence[str] = ()) -> None:
        """Prepare the line.

        Args:
            visible: whether this process prints anything.
            shown: metrics to show besides those that every run has.
        """
        self._shown = shown
        self._console = Console(highlight=False, soft_wrap=True, quiet=not visible)
        texts = TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}")
        hidden = not self._console.is_terminal
        self._progress = Progress(*texts, TimeRemainingColumn(), console=self._console, disable=hidden)
        self._task = self._progress.add_task("compiling", total=steps)

    def __enter__(self) -> "ProgressLine":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        """Print a line. A full disk or a closed pipe does not end the run: metrics.jsonl contains the same numbers."""
        with contextlib.suppress(OSError):
            self._console.print(line, markup=False)

    def advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def start_training(self) -> None:
        """Say "training" instead of "compiling", until the first record."""
        self._progress.update(self._task, description="training")

    def show(self, record: dict[str, Any]) -> None:
        """Show a record of metrics.jsonl."""
        numbers = f"loss {_decimals(record['loss'], 4)}"
        if "eval_loss" in record:
            numbers += f"  held-out {record['eval_loss']:.4f}"
            sets = [
                f"{name.removeprefix('eval_loss/')} {value:.4f}"
                for name, value in record.items()
                if name.startswith("eval_loss/")
            ]
            numbers += f" ({', '.join(sets)})" if len(sets) > 1 else ""
        for name in self._shown:
            held_out = f" (held-out {record[f'eval_{name}']:.4f})" if f"eval_{name}" in record else ""
            numbers += f"  {name} {_decimals(record[name], 4)}{held_out}"
        unit = next(name for name in ("tokens", "rows") if f"{name}_per_second" in record)
        numbers += f"  grad norm {_decimals(record['grad_norm'], 3)}  {record[f'{unit}_per_second']:,.0f} {unit}/s"
        self._progress.update(self._task, description=numbers)
        if not self._console.is_terminal or "eval_loss" in record:
            self.say(f"step {record['step']:>6}  {numbers}")


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
    return "not finite" if value is None else f"{value:.{places}f}"
