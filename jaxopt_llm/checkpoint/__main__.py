"""python -m jaxopt_llm.checkpoint list|verify RUN_DIR

list: the checkpoints of a run: step, when it was saved, size, held-out loss, why it is kept.
verify: reads every file of every checkpoint and says which is damaged, and how; exit code 4 if any is.
Neither changes anything."""

import os
import sys
import time
from pathlib import Path

from jaxopt_llm import config as configuration
from jaxopt_llm import errors
from jaxopt_llm.checkpoint import integrity, policy, steps
from jaxopt_llm.checkpoint.policy import CheckpointConfig
from jaxopt_llm.errors import CheckpointError, InputError


def show(directory: Path, config: CheckpointConfig) -> None:
    """One line for each checkpoint, and for what was set aside."""
    paths = steps.by_step(directory)
    told = {step: steps.glance(path) for step, path in paths.items()}
    why = policy.reasons({step: loss for step, (loss, _) in told.items()}, config)
    print(f"{'step':>10}  {'saved (UTC)':<19}  {'size':>14}  {'held-out':>8}  kept")
    for step, path in paths.items():
        loss, saved = told[step]
        columns = f"{step:>10}  {(saved or '-')[:19]:<19}  {_mebibytes(path):>14}"
        print(
            f"{columns}  {'-' if loss is None else f'{loss:.4f}':>8}  {', '.join(why[step]) or 'until the next save'}"
        )
    for path in steps.all_set_aside(directory):
        print(f"{path.name}: set aside, {_mebibytes(path)}")


def verify(directory: Path) -> None:
    """Raises CheckpointError where a checkpoint is damaged."""
    paths = steps.by_step(directory)
    megabytes = sum(map(integrity.size, paths.values())) / 1e6
    clock = time.perf_counter()
    damaged = []
    for step, path in paths.items():
        found = steps.damage(path)
        if found is not None and not os.path.lexists(path):
            print(f"{step}: deleted meanwhile by its run")
            continue
        print(f"{step}: {found or 'whole'}")
        if found is not None:
            damaged.append(str(step))
    seconds = time.perf_counter() - clock
    if damaged:
        raise CheckpointError(f"{directory}: {len(damaged)} of {len(paths)} are damaged: {', '.join(damaged)}")
    print(f"{len(paths)} checkpoints, {megabytes:,.1f} MB read at {megabytes / seconds:,.0f} MB/s")


def main() -> int:
    match sys.argv[1:]:
        case ["list" | "verify" as action, run]:
            directory = Path(run) / "checkpoints"
        case ["-h" | "--help"]:
            print(__doc__)
            return 0
        case _:
            raise InputError(f"which? {__doc__.splitlines()[0]}")
    try:
        config = configuration.from_json((Path(run) / "config.json").read_text())
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{run}: not a run directory ({error})") from error
    if action == "list":
        show(directory, config.checkpoint)
    else:
        verify(directory)
    return 0


def _mebibytes(path: Path) -> str:
    return f"{integrity.size(path) / 2**20:,.1f} MiB"


if __name__ == "__main__":
    errors.run(main)
