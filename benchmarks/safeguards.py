"""Measure what the safeguards that are off by default add to a training step.

    python benchmarks/safeguards.py [--runs 5] [--steps 30] [--json FILE] [-- FLAG ...]

It trains the quickstart on two devices, and each safeguard acts in every step, which is more often than a run would set
it. The cases run in turn, each `--runs` times. A figure is the median over the runs of the median of a run's steps. The
flags after -- are those of `train`, for all cases. Columns:

- s a step: with the safeguard in every step
- added: the difference from the first case of the same mesh, in percent of its step
- every 100: the same if the safeguard acts in every hundredth step; one that acts in all steps by its nature has none
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

WINDOW = 5  # steps of a record


@dataclass(frozen=True)
class Case:
    """A setting of `train`.

    Attributes:
        mesh: flags of the mesh. The first case of a mesh is the base of the others.
        has_interval: the safeguard acts every so many steps.
    """

    mesh: str
    flags: tuple[str, ...] = ()
    has_interval: bool = False


DATA, FSDP = "--mesh.data=2", "--mesh.fsdp=2"
CASES = {
    "data 2": Case(DATA),
    "data 2, check_replicas: copies are compared": Case(DATA, ("--run.check-replicas=1",), has_interval=True),
    "data 2, replicate_every: own part": Case(DATA, ("--checkpoint.replicate-every=1",), has_interval=True),
    "data 2, on_spike skip": Case(DATA, ("--training.on-spike=skip",)),
    "data 2, on_spike rollback": Case(DATA, ("--training.on-spike=rollback",)),
    "fsdp 2": Case(FSDP),
    "fsdp 2, check_replicas: the step runs twice": Case(FSDP, ("--run.check-replicas=1",), has_interval=True),
    "fsdp 2, replicate_every: own part and a neighbour's": Case(
        FSDP, ("--checkpoint.replicate-every=1",), has_interval=True
    ),
}


def time_steps(case: Case, steps: int, flags: list[str]) -> float:
    """Train, and return the median seconds of a step, without the first record."""
    with tempfile.TemporaryDirectory() as directory:
        settings = {
            "config": "quickstart.py",
            "run.directory": directory,
            "training.steps": steps,
            "logging.every": WINDOW,
            "evaluation.every": steps,
            "evaluation.batches": 1,
            "checkpoint.every": steps,
        }
        arguments = [f"--{name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-m", "jaxopt_llm.train", *arguments, case.mesh, *case.flags, *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        records = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(record["step_seconds"] for record in records[1:])


def make_table(medians: dict[str, float]) -> list[str]:
    width = max(map(len, CASES))
    lines = [f"{'':{width}} {'s a step':>9} {'added':>8} {'every 100':>10}"]
    bases: dict[str, float] = {}
    for name, case in CASES.items():
        base = bases.setdefault(case.mesh, medians[name])
        added = medians[name] / base - 1
        every_100 = f"{added / 100:.2%}" if case.has_interval else "-"
        lines.append(f"{name:{width}} {medians[name]:9.4f} {added:8.1%} {every_100:>10}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path, help="file for the figures; the table goes to a .txt beside it")
    parser.add_argument("flags", nargs="*", help="flags of train, after --")
    options = parser.parse_args()
    if options.steps < 2 * WINDOW:
        parser.error(f"--steps {options.steps}: must be at least {2 * WINDOW}")
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(options.runs):
        for name, case in CASES.items():
            seconds[name].append(time_steps(case, options.steps, options.flags))
            print(f"{name}: {seconds[name][-1]:.4f} s a step", flush=True)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    device = jax.devices()[0].device_kind
    told: dict[str, Any] = {"jax": jax.__version__, "device": device, "runs": options.runs, "seconds": seconds}
    lines = [f"quickstart on two devices ({device}), jax {jax.__version__}, median of {options.runs} runs"]
    lines += make_table(medians)
    print("\n".join(lines))
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")
        options.json.with_suffix(".txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
