"""Train under supervisors while faults are injected, and compare the end with that of an undisturbed run.

    python benchmarks/chaos.py [--faults 48] [--hours H] [--processes 4] [--seed 0] [--bursts 0.5] [--only KIND ...]
                               [--json FILE [--add]]
    python benchmarks/chaos.py --only peers [--faults 100]
    python benchmarks/chaos.py --only elastic [--faults 24] [--processes 3]

Each process has its own supervisor, as on a host of its own; this program starts supervisors again that die, as SLURM
or Kubernetes does. As root on Linux, the processes are on hosts of their own: network namespaces, which some faults cut
off; and the run directory is on a file system of its own, which some faults fill or make read-only.

The faults are spread over the steps of the run. Their kinds come in turn; victims and delays are drawn from the seed.
With the probability --bursts, a fault is followed by another one while the job starts again: in the imports, the
rendezvous, the compilation or the first steps. After --hours no more faults are injected. At the end, parameters and
moments must be equal to the bit, and no fault may have cost more steps than those since the last whole checkpoint.
With --add, the figures are added to those that the file has. `--only peers` and `--only elastic` are other experiments:
see chaos_peers.py and chaos_elastic.py.
"""

import argparse
import contextlib
import itertools
import json
import math
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import chaos_elastic
import chaos_faults
import chaos_peers
import jax
from chaos_disk import Disk
from chaos_job import LONGEST, ChaosJob, Watcher, read_state, train_undisturbed
from chaos_network import Network

STEPS_PER_BURST = 20
LULL_STEPS, LULL_SECONDS = 50, 6.0  # of a fault that does not end the run: the steps that last so long, at least 50
SECONDS_PER_FAULT = 15  # about, on two cores
CHECKPOINT_EVERY = 10
PEERS, ELASTIC = "peers", "elastic"
LONGEST_PAUSE = 20.0  # seconds between two faults of a burst: about the time in which the job starts again
TRAINING, RESTART = "training", "restart"


@dataclass(frozen=True)
class PlannedFault:
    """A fault to inject. pause: seconds after the step, or after the fault before it, at which it is injected."""

    kind: str
    victim: int
    pause: float


@dataclass(frozen=True)
class Outcome:
    """A fault and its consequences.

    when: "restart" for the second and later faults of a burst, otherwise "training".
    followed: another fault of the burst came after it.
    detected: seconds from the fault until the first program ended; None if none did.
    resumed: seconds until the next step; None: not within LONGEST.
    repeated: steps that ran again; 0 if the fault was followed, or if it does not make the job start again.
    allowed: steps since the last whole checkpoint, which the fault may cost.
    codes: exit codes of the programs that ended before the next fault, as a shell counts them.
    """

    kind: str
    victim: int
    step: int
    when: str
    followed: bool
    detected: float | None
    resumed: float | None
    repeated: int
    allowed: int
    codes: list[int]


def plan_bursts(
    kinds: Sequence[str], faults: int, processes: int, chance: random.Random, probability: float
) -> list[list[PlannedFault]]:
    """Draw the faults of a run, in bursts. The kinds come in turn, and so do those that follow another fault.

    probability: with which another fault is added to a burst, if its first one makes the job start again.
    """
    following = [kind for kind in kinds if chaos_faults.KINDS[kind].may_follow]
    first_kinds, following_kinds = itertools.cycle(kinds), itertools.cycle(following)
    bursts: list[list[PlannedFault]] = []
    for _ in range(faults):
        restarts = bool(bursts) and chaos_faults.KINDS[bursts[-1][0].kind].may_be_followed
        extends = restarts and bool(following) and chance.random() < probability
        pause = chance.uniform(0, LONGEST_PAUSE if extends else 0.2)
        fault = PlannedFault(next(following_kinds if extends else first_kinds), chance.randrange(processes), pause)
        if extends:
            bursts[-1].append(fault)
        else:
            bursts.append([fault])
    return bursts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int)
    parser.add_argument("--hours", type=float, help="inject no more faults after this time")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bursts", type=float, default=0.5, help="probability that another fault follows a fault")
    parser.add_argument("--only", nargs="+", choices=[*chaos_faults.KINDS, PEERS, ELASTIC])
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--add", action="store_true", help="add the figures to those of the file")
    options = parser.parse_args()
    if not 0 <= options.bursts <= 1:
        parser.error(f"--bursts {options.bursts:g}: must be from 0 to 1")
    # Programs started by nohup ignore SIGHUP. Networks and mounts are removed at the end, also at these signals.
    for signum in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, lambda number, frame: sys.exit(128 + number))
    if {PEERS, ELASTIC} & {*(options.only or ())}:
        run_experiment(parser, options)
        return
    old = read_old(parser, options)
    choose_kinds(parser, options)
    of_hours = round(3600 * (options.hours or 0) / SECONDS_PER_FAULT)
    options.faults = options.faults or of_hours or 2 * len(options.only)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        told = run(folder, options)
    except BaseException:
        print(f"the run and the output of its supervisors are left in {folder}")
        raise
    if is_good(told):
        shutil.rmtree(folder)
    else:
        print(f"the run and the output of its supervisors are left in {folder}")
    told = add_figures(old, told) if old else told
    lines = make_table(told)
    print("\n".join(lines))
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")
        options.json.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    if not is_good(told):
        raise SystemExit(1)


def run_experiment(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Run the experiment that --only names."""
    name, *others = options.only
    if others or options.add or (options.hours and name == PEERS):
        parser.error(f"--only {' '.join(options.only)}: other kinds, --add, and --hours of {PEERS} do not go with it")
    if name == PEERS:
        chaos_peers.main(options.faults or 100, options.processes, options.seed, options.json)
    else:
        chaos_elastic.main(options.faults or 24, options.processes, options.seed, options.json, options.hours)


def choose_kinds(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Find out what is possible here, and set --only to the kinds that it allows if it is not given."""
    options.network, options.disk = Network.is_possible(), Disk.is_possible()
    lacking = {
        name: "network namespaces" if fault.needs_network and not options.network else "mounts"
        for name, fault in chaos_faults.KINDS.items()
        if (fault.needs_network and not options.network) or (fault.needs_disk and not options.disk)
    }
    needs = "of Linux, which need root and the programs ip and mount"
    for name in options.only or ():
        if name in lacking:
            parser.error(f"--only {name}: this needs {lacking[name]} {needs}")
    if lacking and not options.only:
        print(f"left out: {', '.join(lacking)}: {' and '.join({*lacking.values()})} {needs}", flush=True)
    options.only = options.only or [name for name in chaos_faults.KINDS if name not in lacking]


def is_good(told: dict[str, Any]) -> bool:
    """Return whether the job survived every fault."""
    return bool(told["equal"] and not told["hangs"] and not told["uncoded"] and not list_losses(told["faults"]))


def list_losses(faults: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the faults that cost more steps than those since the last whole checkpoint."""
    return [each for each in faults if each["repeated"] > each["allowed"]]


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
    bursts = plan_bursts(
        [*options.only], options.faults, options.processes, random.Random(options.seed), options.bursts
    )
    lulls = sum(not chaos_faults.KINDS[each.kind].restarts for burst in bursts for each in burst)
    steps = STEPS_PER_BURST * (len(bursts) + 1) + LULL_STEPS * lulls
    flags = {"training.steps": steps, "checkpoint.every": CHECKPOINT_EVERY, "checkpoint.keep": 3}
    flags |= {"run.check_replicas": 5, "mesh.data": options.processes, "schedule.decay_steps": steps}
    seconds = train_undisturbed(folder / "whole", options.processes, flags)
    if longer := math.ceil(max(0.0, LULL_SECONDS * steps / seconds - LULL_STEPS)) * lulls:  # a fast machine
        seconds *= (steps + longer) / steps
        flags["training.steps"] = steps = steps + longer
        train_undisturbed(folder / "whole", options.processes, flags)
    print(f"undisturbed: {steps} steps in {seconds:.0f} s", flush=True)
    outcomes = list[Outcome]()
    began = time.monotonic()
    with contextlib.ExitStack() as scope:
        network = scope.enter_context(Network(options.processes)) if options.network else None
        needs_disk = any(chaos_faults.KINDS[kind].needs_disk for kind in options.only)
        disk = scope.enter_context(Disk(folder / "run")) if needs_disk else None
        job = scope.enter_context(ChaosJob(folder / "run", options.processes, flags, network, disk=disk))
        watcher = Watcher(job)
        for number, burst in enumerate(bursts):
            watcher.wait_for_step(STEPS_PER_BURST * (number + 1) - CHECKPOINT_EVERY // 2)
            if options.hours and time.monotonic() > began + 3600 * options.hours:
                break
            if any(chaos_faults.KINDS[each.kind].damages for each in burst):
                watcher.wait_for_spare_checkpoint()
            if watcher.last_step() > steps - CHECKPOINT_EVERY:
                print(f"the run is at its end before fault {len(outcomes) + 1} of {options.faults}", flush=True)
                break
            outcomes += inject(burst, job, watcher)
            print(*outcomes[-len(burst) :], sep="\n", flush=True)
            if outcomes[-1].resumed is None:
                break
        code = job.wait() if all(each.resumed is not None for each in outcomes) else None
    equal = code == 0 and read_state(folder / "run", steps) == read_state(folder / "whole", steps)
    away = sum(each.resumed or 0.0 for each in outcomes if each.when == TRAINING)
    return {
        "jax": jax.__version__,
        "processes": options.processes,
        "seeds": [options.seed],
        "bursts": [options.bursts],
        "steps": steps,
        "undisturbed_seconds": round(seconds),
        "seconds": round(time.monotonic() - began),
        "away_seconds": round(away),
        "exit_codes": [code],
        "equal": equal,
        "hangs": sum(each.resumed is None for each in outcomes if not each.followed),
        "uncoded": sum(code not in chaos_faults.CODED for each in outcomes for code in each.codes),
        "faults": [asdict(each) for each in outcomes],
    }


def inject(burst: Sequence[PlannedFault], job: ChaosJob, watcher: Watcher) -> list[Outcome]:
    """Inject the faults of a burst, and wait until the run goes on."""
    # Of each fault: time, last step, steps that it may cost, ends before it, processes that it ended.
    injected: list[tuple[float, int, int, int, set[int]]] = []
    detected: list[float | None] = []
    with contextlib.ExitStack() as scope:
        for number, planned in enumerate(burst):
            if number:
                watcher.wait_for_resume(planned.pause)  # a job that is back by then is hit in its first steps
                detected.append(watcher.detected)
            else:
                time.sleep(planned.pause)
            fault = chaos_faults.KINDS[planned.kind]
            watcher.begin(fault.restarts, in_burst=number > 0)
            allowed = watcher.count_unsaved(sum(chaos_faults.KINDS[each.kind].damages for each in burst[: number + 1]))
            step, ended, began = watcher.last_step(), watcher.count_ends(), time.monotonic()
            injected.append((began, step, allowed, ended, fault.inject(job, planned.victim, scope)))
        resumed_at = watcher.wait_for_resume(LONGEST)
        detected.append(watcher.detected)
    outcomes = []
    ends = [*(each[3] for each in injected[1:]), watcher.count_ends()]
    for number, (planned, (began, step, allowed, ended, killed), end) in enumerate(
        zip(burst, injected, ends, strict=True)
    ):
        # The journal gets the end of a program when all have ended, which may be after the next fault.
        killed_before = set[int]().union(*(each[4] for each in injected[:number]))
        codes = [
            code
            for index, code in watcher.ends_between(ended, end)
            if index not in killed and not (index in killed_before and code not in chaos_faults.CODED)
        ]
        is_last = number + 1 == len(burst)
        outcomes.append(
            Outcome(
                *(planned.kind, planned.victim, step),
                when=RESTART if number else TRAINING,
                followed=not is_last,
                detected=detected[number],
                resumed=None if resumed_at is None else round(resumed_at - began, 1),
                repeated=watcher.repeated if is_last and resumed_at is not None else 0,
                allowed=allowed,
                codes=codes,
            )
        )
    return outcomes


def make_table(told: dict[str, Any]) -> list[str]:
    faults: list[dict[str, Any]] = told["faults"]
    restarting = [each for each in faults if each["when"] == RESTART]
    lines = list_kinds("while it trains", [each for each in faults if each["when"] == TRAINING])
    if restarting:
        lines += ["", *list_kinds("while it starts again", restarting)]
    training = told["undisturbed_seconds"]
    lines += [
        "",
        f"{len(faults)} faults in {told['seconds']} s over {told['steps']} steps of {told['processes']} processes",
        f"goodput {training / told['seconds']:.0%} (undisturbed: {training} s)",
        f"hangs {told['hangs']}, uncoded exits {told['uncoded']}, faults that cost more than the steps since the last "
        f"whole checkpoint {len(list_losses(faults))}, final parameters and moments "
        f"{'equal to the bit' if told['equal'] else 'NOT EQUAL'}",
    ]
    return lines


def list_kinds(title: str, faults: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a table with the largest figures of each kind; a fault that was followed has no times."""
    lines = [
        f"{'fault ' + title:34}{'times':>6}{'detected s':>12}{'next step s':>13}{'repeated':>10}   codes of the others"
    ]
    for kind in dict.fromkeys(str(each["kind"]) for each in faults):
        of_kind = [each for each in faults if each["kind"] == kind]

        def largest(name: str, of_kind: list[dict[str, Any]] = of_kind) -> str:
            values = [each[name] for each in of_kind if each[name] is not None and not each["followed"]]
            return f"{max(values):.1f}" if values else "-"

        codes = sorted({code for each in of_kind for code in each["codes"]})
        repeated = max(each["repeated"] for each in of_kind)
        lines.append(
            f"{kind:34}{len(of_kind):6}{largest('detected'):>12}{largest('resumed'):>13}{repeated:>10}   "
            f"{', '.join(map(str, codes)) or '-'}"
        )
    return lines


if __name__ == "__main__":
    main()
