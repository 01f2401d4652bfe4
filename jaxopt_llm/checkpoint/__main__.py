"""Command `checkpoint`: state of the checkpoints of a run.

python -m jaxopt_llm.checkpoint list|verify RUN_DIR

list: print the checkpoints of a run: step, time of the save, size, held-out loss and the reason for which it is kept.
verify: read every file of every checkpoint and print which are damaged, and how. The exit code is 4 if any is damaged.
Neither changes any file.
"""

import os
import sys
import time
from pathlib import Path

from jaxopt_llm.checkpoint.native import integrity, step_directories
from jaxopt_llm.config import CheckpointConfig, cli
from jaxopt_llm.core import errors
from jaxopt_llm.core.errors import CheckpointError, InputError

USAGE = f"{errors.program_name('checkpoint')} list|verify RUN_DIR"


def print_checkpoints(directory: Path, config: CheckpointConfig) -> None:
    """Print one line for each checkpoint, and one for each damaged checkpoint that was set aside."""
    paths = step_directories.find_checkpoints(directory)
    summaries = {step: step_directories.read_summary(path) for step, path in paths.items()}
    why = step_directories.list_reasons_to_keep({step: loss for step, (loss, _) in summaries.items()}, config)
    print(f"{'step':>10}  {'saved (UTC)':<19}  {'size':>14}  {'held-out':>8}  kept")
    for step, path in paths.items():
        loss, saved = summaries[step]
        columns = f"{step:>10}  {(saved or '-')[:19]:<19}  {_mebibytes(path):>14}"
        held_out = "-" if loss is None else f"{loss:.4f}"
        print(f"{columns}  {held_out:>8}  {', '.join(why[step]) or 'until the next save'}")
    for path in step_directories.find_set_aside(directory):
        print(f"{path.name}: set aside, {_mebibytes(path)}")


def verify_checkpoints(directory: Path) -> None:
    """Read all checkpoints and print the state of each.

    Raises:
        CheckpointError: a checkpoint is damaged.
    """
    paths = step_directories.find_checkpoints(directory)
    megabytes = sum(map(integrity.count_bytes, paths.values())) / 1e6
    clock = time.perf_counter()
    damaged = []
    for step, path in paths.items():
        found = step_directories.find_damage(path)
        if found is not None and not os.path.lexists(path):
            print(f"{step}: its run deleted it in the meantime")
            continue
        print(f"{step}: {found or 'intact'}")
        if found is not None:
            damaged.append(str(step))
    seconds = time.perf_counter() - clock
    if damaged:
        count = f"{len(damaged)} of {len(paths)}"
        raise CheckpointError(f"{directory}: {count} checkpoints are damaged: {', '.join(damaged)}")
    print(f"{len(paths)} checkpoints, {megabytes:,.1f} MB read at {megabytes / seconds:,.0f} MB/s")


def main() -> int:
    match sys.argv[1:]:
        case ["list" | "verify" as action, run]:
            directory = Path(run) / "checkpoints"
        case ["-h" | "--help"]:
            print(__doc__)
            return 0
        case _:
            raise InputError(f"the action or the run directory is missing or unknown; usage: {USAGE}")
    config = cli.load_run_config(Path(run), "")
    if action == "list":
        print_checkpoints(directory, config.checkpoint)
    else:
        verify_checkpoints(directory)
    return 0


def _mebibytes(path: Path) -> str:
    return f"{integrity.count_bytes(path) / 2**20:,.1f} MiB"


if __name__ == "__main__":
    errors.run_command(main)
