"""Train under supervisors while faults are injected, and compare the end with that of an undisturbed run.

    python benchmarks/chaos.py [--faults 48] [--minutes M] [--processes 4] [--seed 0] [--only KIND ...] [--json FILE]
    python benchmarks/chaos.py --only peers [--faults 100]

Each process has its own supervisor, as on a host of its own; this program starts supervisors again that die, as SLURM
or Kubernetes does. As root on Linux, the processes are on hosts of their own: network namespaces, which some faults cut
off. The faults are spread over the steps of the run. Their kinds come in turn; victims and delays are drawn from the
seed. At the end, parameters and moments must be equal to the bit. With --add, the figures are added to those that the
file has. `--only peers` is another experiment: see chaos_peers.py.
"""

import argparse
import contextlib
import json
import random
import signal
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import chaos_faults
import chaos_peers
import jax
from chaos_job import ChaosJob, Watcher, read_state, train_undisturbed
from chaos_network import Network

STEPS_PER_FAULT = 20
CHECKPOINT_EVERY = 10
PEERS = "peers"
LONGEST = 240  # seconds from a fault to the next step, after which the run counts as hung


@dataclass(frozen=True)
class Outcome:
    """A fault and its consequences.

    detected: seconds from the fault until the first program ended; None if none did.
    resumed: seconds until the next step; None: not within LONGEST.
    repeated: steps that ran again.
    codes: exit codes of the programs that ended, as a shell counts them.
    """

    kind: str
    victim: int
    step: int
    detected: float | None
    resumed: float | None
    repeated: int
    codes: list[int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int)
    parser.add_argument("--minutes", type=float, help="inject no more faults after this time")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=[*chaos_faults.KINDS, PEERS])
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--add", action="store_true", help="add the figures to those of the file")
    options = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # programs started by nohup ignore it
    if options.only and PEERS in options.only:
        if len(options.only) > 1 or options.minutes or options.add:
            parser.error(f"--only {PEERS}: other kinds, --minutes and --add do not go with it")
        chaos_peers.main(options.faults or 100, options.processes, options.seed, options.json)
        return
    old = read_old(parser, options)
    options.network = Network.is_possible()
    possible = [name for name, fault in chaos_faults.KINDS.items() if options.network or not fault.needs_network]
    if impossible := set(options.only or ()) - {*possible}:
        parser.error(f"--only {' '.join(impossible)}: this needs the rights to make network namespaces (root)")
    if not options.only and len(possible) < len(chaos_faults.KINDS):
        left_out = ", ".join(name for name in chaos_faults.KINDS if name not in possible)
        print(f"left out: {left_out}: network namespaces need Linux, root and the program ip", flush=True)
    options.only = options.only or possible
    options.faults = options.faults or 2 * len(options.only)
    with tempfile.TemporaryDirectory() as folder:
        told = run(Path(folder), options)
    told = add_figures(old, told) if old else told
    lines = make_table(told)
    print("\n".join(lines))
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")
        options.json.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    if not told["equal"] or told["hangs"] or told["uncoded"]:
        raise SystemExit(1)


def read_old(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures to which those of this run are added; {} if there are none."""
    if not options.add:
        return {}
    if options.json is None:
        parser.error("--add: name the file with --json")
    old: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    if old and old["processes"] != options.processes:
        parser.error(f"--add: {options.json} is of --processes {old['processes']}")
    return old


def add_figures(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of several runs with the same number of processes."""
    summed = {name: old[name] + new[name] for name in old if name not in ("jax", "processes", "equal", "exit_codes")}
    return new | summed | {"equal": old["equal"] and new["equal"], "exit_codes": old["exit_codes"] + new["exit_codes"]}


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run without and with faults, and return the figures."""
    steps = STEPS_PER_FAULT * (options.faults + 1)
    flags = {"training.steps": steps, "checkpoint.every": CHECKPOINT_EVERY, "checkpoint.keep": 3}
    flags |= {"run.check_replicas": 5, "mesh.data": options.processes}
    seconds = train_undisturbed(folder / "whole", options.processes, flags)
    print(f"undisturbed: {steps} steps in {seconds:.0f} s", flush=True)
    chance, outcomes = random.Random(options.seed), list[Outcome]()
    began = time.monotonic()
    with contextlib.ExitStack() as scope:
        network = scope.enter_context(Network(options.processes)) if options.network else None
        job = scope.enter_context(ChaosJob(folder / "run", options.processes, flags, network))
        watcher = Watcher(job)
        for number in range(options.faults):
            watcher.wait_for_step(STEPS_PER_FAULT * (number + 1) - CHECKPOINT_EVERY // 2)
            if options.minutes and time.monotonic() > began + 60 * options.minutes:
                break
            time.sleep(chance.uniform(0, 0.2))
            kind = options.only[number % len(options.only)]
            outcomes.append(inject(kind, chance.randrange(options.processes), job, watcher))
            print(outcomes[-1], flush=True)
            if outcomes[-1].resumed is None:
                break
        code = job.wait() if all(each.resumed is not None for each in outcomes) else None
    equal = code == 0 and read_state(folder / "run", steps) == read_state(folder / "whole", steps)
    away = sum(each.resumed or 0.0 for each in outcomes)
    return {
        "jax": jax.__version__,
        "processes": options.processes,
        "seeds": [options.seed],
        "steps": steps,
        "undisturbed_seconds": round(seconds),
        "seconds": round(time.monotonic() - began),
        "away_seconds": round(away),
        "exit_codes": [code],
        "equal": equal,
        "hangs": sum(each.resumed is None for each in outcomes),
        "uncoded": sum(code not in chaos_faults.CODED for each in outcomes for code in each.codes),
        "faults": [asdict(each) for each in outcomes],
    }


def inject(kind: str, victim: int, job: ChaosJob, watcher: Watcher) -> Outcome:
    """Inject a fault, and wait until the run goes on."""
    fault = chaos_faults.KINDS[kind]
    step, ended = watcher.last_step(), watcher.count_ends()
    watcher.begin()
    with contextlib.ExitStack() as scope:
        killed = fault.inject(job, victim, scope)
        resumed = watcher.wait_until_resumed(fault.restarts, LONGEST)
    codes = [code for index, code in watcher.ends_since(ended) if index not in killed]
    repeated = max(0, watcher.last_reached - watcher.resumed_from) if fault.restarts and resumed is not None else 0
    return Outcome(kind, victim, step, watcher.detected, resumed, repeated, codes)


def make_table(told: dict[str, Any]) -> list[str]:
    faults: list[dict[str, Any]] = told["faults"]
    lines = [
        f"{'fault':34}{'times':>6}{'detected s':>12}{'next step s':>13}{'repeated':>10}   exit codes of the others"
    ]
    for kind in dict.fromkeys(str(each["kind"]) for each in faults):
        of_kind = [each for each in faults if each["kind"] == kind]

        def largest(name: str, of_kind: list[dict[str, Any]] = of_kind) -> str:
            values = [each[name] for each in of_kind if each[name] is not None]
            return f"{max(values):.1f}" if values else "-"

        codes = sorted({code for each in of_kind for code in each["codes"]})
        repeated = max(each["repeated"] for each in of_kind)
        lines.append(
            f"{kind:34}{len(of_kind):6}{largest('detected'):>12}{largest('resumed'):>13}{repeated:>10}   "
            f"{', '.join(map(str, codes)) or '-'}"
        )
    training = told["undisturbed_seconds"]
    lines += [
        "",
        f"{len(faults)} faults in {told['seconds']} s over {told['steps']} steps of {told['processes']} processes",
        f"goodput {training / told['seconds']:.0%} (undisturbed: {training} s)",
        f"hangs {told['hangs']}, uncoded exits {told['uncoded']}, final parameters and moments "
        f"{'equal to the bit' if told['equal'] else 'NOT EQUAL'}",
    ]
    return lines


if __name__ == "__main__":
    main()
