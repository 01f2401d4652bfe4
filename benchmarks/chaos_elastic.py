"""Experiment `chaos.py --only elastic`: hosts stay away so long that the job goes on without them, and come back.

The supervisors run with `--elastic ELASTIC_SECONDS`. Each fault takes hosts away. The job then trains on a smaller mesh
of the hosts that are left, and on all again after the others have come back. Between its faults it trains on all hosts.
Kinds come in turn; hosts and delays are drawn from the seed.

After the last fault the job is stopped, and an undisturbed run on all hosts trains as many steps. Sums over the rows
of a batch have another order on another mesh, so the two differ by rounding, and not by more: see LARGEST_DIFFERENCE.
"""

import contextlib
import json
import math
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from chaos_faults import CODED
from chaos_job import LONGEST, LOOK_SECONDS, ChaosJob, read_arrays, read_lines, train_undisturbed
from chaos_network import Network
from chaos_ports import find_ports

ELASTIC_SECONDS = 12
CHECKPOINT_EVERY = 10
STEPS_BETWEEN = 15  # on all hosts, before the next fault
STRIKES = 2  # kills of the programs of a host; at the third one, an elastic job leaves the host out for a day
# The compute dtype is float32, which rounds a number by up to 6e-8 of itself. 1240 steps with 20 changes of hosts
# differed by 2.5e-7, 1.7e-7 and 1.1e-6; with a batch that is left out, 30 steps differ by 0.7, 0.05 and 0.5.
LARGEST_DIFFERENCE = {"loss": 5e-6, "masters": 5e-6, "moments": 5e-5}
STOPPED = 75


@dataclass(frozen=True)
class Kind:
    """A kind of change of hosts.

    Attributes:
        lost: number of hosts that are away at once.
        has_leader: the host of the leader is one of them, so the supervisor of another one leads.
        returns_early: they come back while the smaller mesh starts, not while it trains.
        kills_smaller: a program is killed while the job trains on fewer hosts.
        kills_growing: a program is killed when the job begins to start on all hosts.
    """

    lost: int = 1
    has_leader: bool = False
    returns_early: bool = False
    kills_smaller: bool = False
    kills_growing: bool = False


KINDS = {
    "host away": Kind(),
    "host of the leader away": Kind(has_leader=True),
    "two hosts away": Kind(lost=2),
    "back while the smaller mesh starts": Kind(returns_early=True),
    "kill on fewer hosts": Kind(kills_smaller=True),
    "kill while the job grows": Kind(kills_growing=True),
}


@dataclass(frozen=True)
class Change:
    """A fault and its consequences.

    hosts: numbers of hosts on which the job went on, by its journal.
    smaller: seconds from the loss until a step on fewer hosts; None: hosts came back before.
    grown: seconds from the return until a step on all hosts; None: not within LONGEST.
    repeated: steps that ran again.
    codes: exit codes of the programs that ended by themselves.
    """

    kind: str
    away: list[int]
    step: int
    hosts: list[int]
    smaller: float | None
    grown: float | None
    repeated: int
    codes: list[int]


def main(count: int, processes: int, seed: int, file: Path | None, hours: float | None) -> None:
    """Inject `count` faults, fewer after some hours, print a table, and write the figures into a file."""
    if processes < 3:
        raise SystemExit(f"error: --only elastic --processes {processes}: two hosts go away at once, so 3 at least")
    folder = Path(tempfile.mkdtemp(prefix="chaos-elastic-"))
    told = run(folder, count, processes, random.Random(seed), 3600 * (hours or math.inf))
    told = {"jax": jax.__version__, "processes": processes, "seed": seed, "elastic": ELASTIC_SECONDS, **told}
    lines = make_table(told)
    print("\n".join(lines))
    if file:
        file.write_text(json.dumps(told, indent=1) + "\n")
        file.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    if not is_good(told):
        print(f"the run and the output of its supervisors are left in {folder}")
        raise SystemExit(1)
    shutil.rmtree(folder)


def run(folder: Path, count: int, processes: int, chance: random.Random, limit: float) -> dict[str, Any]:
    """Run with faults, then without, and return the figures. limit: seconds after which no more faults come."""
    rows = math.lcm(*range(1, processes + 1))  # any number of hosts keeps this batch
    flags: dict[str, object] = {"checkpoint.every": CHECKPOINT_EVERY, "checkpoint.keep": 3}
    flags |= {"mesh.data": processes, "training.batch_size": rows, "precision.compute_dtype": "float32"}
    flags |= {"schedule.kind": "constant"}  # which does not depend on the number of steps
    changes, began = list[Change](), time.monotonic()
    with contextlib.ExitStack() as scope:
        network = scope.enter_context(Network(processes)) if Network.is_possible() else None
        endless = flags | {"training.steps": 10**6}
        job = scope.enter_context(
            ChaosJob(folder / "run", processes, endless, network, ("--elastic", str(ELASTIC_SECONDS)))
        )
        hosts = Hosts(job, chance)
        for number in range(count):
            if hosts.wait_for_training(processes, steps=STEPS_BETWEEN) is None:
                raise SystemExit(f"the run did not train on all hosts within {LONGEST} s; see {folder}")
            changes.append(hosts.inject(tuple(KINDS)[number % len(KINDS)]))
            print(changes[-1], flush=True)
            if changes[-1].grown is None or time.monotonic() > began + limit:
                break
        hosts.wait_for_training(processes, steps=STEPS_BETWEEN)
        code = job.stop()
    seconds = time.monotonic() - began
    steps = read_lines(folder / "run/metrics.jsonl")[-1]["step"]
    undisturbed = train_undisturbed(folder / "whole", processes, flags | {"training.steps": steps})
    return {
        "steps": steps,
        "undisturbed_seconds": round(undisturbed),
        "seconds": round(seconds),
        "exit_code": code,
        "differences": compare(folder / "run", folder / "whole", steps),
        "tracebacks": (folder / "supervisors.log").read_bytes().count(b"Traceback"),
        "hangs": sum(each.grown is None for each in changes),
        "uncoded": sum(code not in CODED for each in changes for code in each.codes),
        "faults": [asdict(each) for each in changes],
    }


def compare(one: Path, other: Path, steps: int) -> dict[str, float]:
    """Return the largest relative difference between two runs: of the losses of a step, and of an array.

    That of an array is the norm of the difference by the norm of the array. Infinite if a run lacks a step.
    """
    losses = [{entry["step"]: entry["loss"] for entry in read_lines(run / "metrics.jsonl")} for run in (one, other)]
    found = dict.fromkeys(LARGEST_DIFFERENCE, 0.0)
    complete = all([*each] == [*range(1, steps + 1)] for each in losses)
    found["loss"] = (
        max(abs(losses[0][step] - loss) / loss for step, loss in losses[1].items()) if complete else float("inf")
    )
    arrays = [read_arrays(run, steps) for run in (one, other)]
    for name, array in arrays[1].items():
        wide = array.astype(np.float64)
        difference = float(np.linalg.norm(arrays[0][name] - wide) / (np.linalg.norm(wide) or 1.0))
        group = next(group for group in found if group in name)
        found[group] = max(found[group], difference)
    return found


def is_good(told: dict[str, Any]) -> bool:
    """Return whether the job changed its hosts at every fault, and trained as the undisturbed run did."""
    agrees = all(told["differences"][name] <= largest for name, largest in LARGEST_DIFFERENCE.items())
    whole = told["exit_code"] == STOPPED and not any(told[name] for name in ("hangs", "uncoded", "tracebacks"))
    return whole and agrees and all(map(has_changed, told["faults"], [told["processes"]] * len(told["faults"])))


def has_changed(fault: dict[str, Any], processes: int) -> bool:
    """Return whether a job's journal shows the numbers of hosts that it should have had during a fault."""
    fewer = processes - len(fault["away"])
    possible = [[fewer, processes]]
    if KINDS[fault["kind"]].returns_early:
        possible.append([])
    if len(fault["away"]) > 1:
        possible.append([fewer, processes - 1, processes])  # one came back before the other
    return fault["hosts"] in possible


class Hosts:
    """The hosts of an elastic job, which go away and come back."""

    def __init__(self, job: ChaosJob, chance: random.Random) -> None:
        self._job, self._chance = job, chance
        self._kills = Counter[int]()
        self._changed_at = 0.0  # time of the last loss, return or kill
        self._killed: set[int] = set()  # the hosts whose programs the fault has killed

    def inject(self, name: str) -> Change:
        """Inject a fault, and wait until the job trains on all hosts again."""
        kind, job, chance = KINDS[name], self._job, self._chance
        leader = self._find_leader()
        away = [leader] if kind.has_leader else []
        away += chance.sample([host for host in range(job.count) if host != leader], kind.lost - len(away))
        seen, step, self._killed = len(self._read_journal()), self._last_step(), set()
        smaller = grown = None
        began = self._note_change()
        for host in away:
            job.lose(host)
        if kind.returns_early:
            time.sleep(chance.uniform(0.75, 2) * ELASTIC_SECONDS)
        else:
            smaller = self.wait_for_training(job.count - len(away))
            if kind.kills_smaller and smaller is not None:
                self._kill([host for host in range(job.count) if host not in away])
                self.wait_for_training(job.count - len(away))
        returned = self._note_change()
        for host in away:
            job.bring_back(host)
        if kind.kills_growing:
            self._wait_for(lambda: self._sizes(seen)[-1:] == [job.count])
            time.sleep(chance.uniform(0, 8))
            self._kill(range(job.count))
        grown = self.wait_for_training(job.count)
        entries = self._read_journal()[seen:]
        faults = [entry for entry in entries if "fault" in entry]
        # The loss of the host that leads is in no line of the journal.
        unjournaled = max(0, step - self._first_start_after(began)) if leader in away and grown is not None else 0
        ends = [(int(host), code) for entry in faults for host, code in entry["codes"].items() if code is not None]
        return Change(
            *(name, away, step, self._sizes(seen)),
            smaller=None if smaller is None else round(smaller - began, 1),
            grown=None if grown is None else round(grown - returned, 1),
            repeated=sum(max(0, entry["reached"] - entry["checkpoint"]) for entry in faults) + unjournaled,
            codes=[code for host, code in ends if host not in self._killed or code in CODED],
        )

    def wait_for_training(self, size: int, steps: int = 3) -> float | None:
        """Wait until the job has started on so many hosts, and has made some steps. Return the time, None if not."""

        def trains() -> bool:
            starts = [event for event in self._read("events.jsonl") if event["event"] in ("start", "resume")]
            if not starts or starts[-1]["time"] < self._changed_at:
                return False
            current = ([self._job.count, *self._sizes(0)])[-1]
            return (
                current == size == sum(map(bool, map(self._job.list_programs, range(self._job.count))))
                and self._last_step() >= starts[-1]["step"] + steps
            )

        return time.time() if self._wait_for(trains) else None

    def _find_leader(self) -> int:
        """Return the host whose supervisor listens on the port that the run directory names."""
        port = json.loads((self._job.directory / "supervisors").read_text())["port"]
        return next(host for host, each in enumerate(self._job.supervisors) if port in find_ports(each.pid))

    def _first_start_after(self, moment: float) -> int:
        """Return the step from which the job went on after a moment."""
        starts = (event for event in self._read("events.jsonl") if event["event"] in ("start", "resume"))
        return int(next(event["step"] for event in starts if event["time"] > moment))

    def _wait_for(self, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + LONGEST
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(5 * LOOK_SECONDS)
        return True

    def _note_change(self) -> float:
        self._changed_at = time.time()
        return self._changed_at

    def _kill(self, hosts: Sequence[int]) -> None:
        """Kill the program on one of some hosts; its supervisor if the program has been killed too often."""
        fewest = min(self._kills[host] for host in hosts)
        host = self._chance.choice([each for each in hosts if self._kills[each] == fewest])
        self._kills[host] += 1
        self._killed.add(host)
        if fewest < STRIKES:
            self._job.signal_program(host, signal.SIGKILL)
        else:
            self._job.kill_supervisor(host, away=1.0)
        self._note_change()

    def _sizes(self, first: int) -> list[int]:
        """Return the numbers of hosts in the entries of the journal from `first` on."""
        return [len(entry["hosts"]) for entry in self._read_journal()[first:] if "hosts" in entry]

    def _last_step(self) -> int:
        return int(next((entry["step"] for entry in reversed(self._read("metrics.jsonl"))), 0))

    def _read_journal(self) -> list[dict[str, Any]]:
        return self._read("faults.jsonl")

    def _read(self, name: str) -> list[dict[str, Any]]:
        return read_lines(self._job.directory / name)


def make_table(told: dict[str, Any]) -> list[str]:
    lines = [f"{'fault':36}{'times':>6}{'on fewer hosts s':>18}{'on all again s':>16}{'repeated':>10}   codes"]
    for kind in dict.fromkeys(fault["kind"] for fault in told["faults"]):
        of_kind = [fault for fault in told["faults"] if fault["kind"] == kind]
        largest = {
            name: max((fault[name] for fault in of_kind if fault[name] is not None), default="-")
            for name in ("smaller", "grown", "repeated")
        }
        codes = sorted({code for fault in of_kind for code in fault["codes"]})
        lines.append(
            f"{kind:36}{len(of_kind):6}{largest['smaller']:>18}{largest['grown']:>16}{largest['repeated']:>10}   "
            f"{', '.join(map(str, codes)) or '-'}"
        )
    changes = sum(len(fault["hosts"]) for fault in told["faults"])
    differences = ", ".join(
        f"{name} {told['differences'][name]:.1e} (at most {largest:g})" for name, largest in LARGEST_DIFFERENCE.items()
    )
    return [
        *lines,
        "",
        f"{len(told['faults'])} faults in {told['seconds']} s over {told['steps']} steps of {told['processes']} "
        f"processes, with --elastic {told['elastic']}; the journal has {changes} changes of hosts",
        f"largest relative differences from the undisturbed run: {differences}",
        f"hangs {told['hangs']}, uncoded exits {told['uncoded']}, tracebacks {told['tracebacks']}, "
        f"{'all is as it should be' if is_good(told) else 'THE JOB OR ITS RESULT IS WRONG'}",
    ]
