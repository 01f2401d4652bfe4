"""A job of several local processes under supervisors, for benchmarks/chaos.py, and what can be seen of it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from chaos_disk import Disk
from chaos_network import Network

ROOT = Path(__file__).parent.parent
Found = TypeVar("Found")
RECIPE = ROOT / "benchmarks/recipes/chaos_model.py"
LOOK_SECONDS = 0.02
LONGEST = 240  # seconds from the last fault of a burst to the next step, after which the run counts as hung
# Limits short enough for a benchmark: a process that does not answer, and one that makes no progress.
SHORT = {"distributed.timeout_seconds": 30, "watchdog.floor_seconds": 15, "watchdog.long_floor_seconds": 120}


def train_command(directory: Path, flags: Mapping[str, object]) -> list[str]:
    settings = [f"--{name}={value}" for name, value in flags.items()]
    return ["train", "--config", str(RECIPE), f"--run.directory={directory}", *settings]


def environment(**own: str) -> dict[str, str]:
    """Return the variables of a program of the job, with `own` ones, for compilations that are quick: a job of several
    processes on CPUs has no cache of programs, so each restart compiles.
    """
    # JAX writes directly into the files of its cache, which a process that is killed would leave damaged.
    cpu = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    # XLA's older code generator for CPUs takes half of the time. Its flag has another name in jax 0.11.
    if jax.__version_info__ < (0, 11):
        cpu["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false"
    else:
        cpu["XLA_FLAGS"] = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    return {**os.environ, "PYTHONPATH": str(ROOT), **cpu, **own}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def join_variables(port: int, count: int, rank: int, address: str = "127.0.0.1") -> dict[str, str]:
    """Return torchrun's variables for a process of a job."""
    job = {"MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": count, "RANK": rank}
    return {name: str(value) for name, value in job.items()}


def train_undisturbed(directory: Path, count: int, flags: Mapping[str, object]) -> float:
    """Train without supervisors and faults. Return the seconds of the steps."""
    port, command = free_port(), [sys.executable, "-m", "jaxopt_llm", *train_command(directory, {**flags, **SHORT})]
    variables = environment(CHAOS_FOLDER=str(directory.parent))
    processes = [
        subprocess.Popen(command, env=variables | join_variables(port, count, rank), stdout=subprocess.DEVNULL)
        for rank in range(count)
    ]
    if codes := [code for process in processes if (code := process.wait())]:
        raise SystemExit(f"the undisturbed run failed, with exit codes {codes}")
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    times = {event["event"]: event["time"] for event in events}
    return float(times["end"] - times["start"])


class ChaosJob:
    """Job whose processes have supervisors. As a context manager it kills what is left at the end.

    Args:
        network: a host for each process; None: all are on this one.
        options: further options of the supervisors.
        disk: that of the run directory; None: it is on that of the folder.
    """

    def __init__(
        self,
        directory: Path,
        count: int,
        flags: Mapping[str, object],
        network: Network | None,
        options: Sequence[str] = (),
        disk: Disk | None = None,
    ) -> None:
        self.directory, self.folder, self.count, self.port = directory, directory.parent, count, free_port()
        self.network, self.disk = network, disk
        self._command = [sys.executable, "-m", "jaxopt_llm", "supervise", "--restarts", "30", "--backoff", "0.2"]
        self._command += [*options, "--"]
        self._command += train_command(directory, {**flags, **SHORT})
        self._variables = environment(CHAOS_FOLDER=str(self.folder))
        self._log = (self.folder / "supervisors.log").open("ab")
        self.supervisors: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._due = dict[int, float]()  # times at which supervisors that are away start again, by index
        self._ended = False

    def __enter__(self) -> "ChaosJob":
        self.supervisors = [self._start(rank) for rank in range(self.count)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._ended = True
        for supervisor in self.supervisors:
            supervisor.kill()  # its program dies with it
            supervisor.wait()
        self._log.close()

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        variables = self._variables | join_variables(self.port, self.count, rank, self.address)
        command = [*self.prefix_command(rank), *self._command]
        return subprocess.Popen(command, env=variables, stdout=self._log, stderr=self._log)

    @property
    def address(self) -> str:
        """Address of the host of process 0."""
        return self.network.find_address(0) if self.network else "127.0.0.1"

    def prefix_command(self, index: int) -> list[str]:
        """Return the words before a command that run it on the host of a process."""
        return self.network.prefix_command(index) if self.network else []

    def wait(self, seconds: float = 600) -> int | None:
        """Wait for the end of the job. Return the exit code of all supervisors, None if they differ or hang."""
        deadline = time.monotonic() + seconds
        try:
            codes = {each.wait(max(deadline - time.monotonic(), 0.1)) for each in self.supervisors}
        except subprocess.TimeoutExpired:
            return None
        return codes.pop() if len(codes) == 1 else None

    def stop(self) -> int | None:
        """Stop the job, which saves. Return the exit code of all supervisors, None if they differ or hang."""
        for supervisor in self.supervisors:
            supervisor.terminate()
        return self.wait()

    def lose(self, index: int) -> None:
        """Kill a supervisor, with which its program dies, until `bring_back`."""
        self.supervisors[index].kill()
        self.supervisors[index].wait()

    def bring_back(self, index: int) -> None:
        """Start the supervisor of a host that was lost."""
        self.supervisors[index] = self._start(index)

    def kill_supervisor(self, index: int, away: float) -> None:
        """Kill a supervisor, and start another one after `away` seconds, counted from its last kill."""
        with self._lock:
            self.supervisors[index].kill()
            self.supervisors[index].wait()
            waits = index in self._due
            self._due[index] = time.monotonic() + away

        def restart() -> None:
            while (seconds := self._due[index] - time.monotonic()) > 0:
                time.sleep(seconds)
            with self._lock:
                del self._due[index]
                if not self._ended:
                    self.supervisors[index] = self._start(index)

        if not waits:
            threading.Thread(target=restart, daemon=True).start()

    def children(self, process: int) -> list[int]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
        return []

    def list_programs(self, index: int) -> list[int]:
        """Return the process id of the program of a host, in a list; [] if none runs.

        A supervisor of an elastic job also has a planner as its child for some time.
        """
        return [child for child in self.children(self.supervisors[index].pid) if not _plans(child)]

    def program(self, index: int) -> int:
        """Wait for the program of a host, and return its process id."""
        return self.wait_for(f"program on host {index}", lambda: self.list_programs(index))[0]

    def services(self) -> list[int]:
        """Wait for the children of the program on host 0 (JAX's coordination service), and return their process ids."""
        return self.wait_for("service of JAX", lambda: self.children(self.program(0)))

    @property
    def garbage_log(self) -> Path:
        """Ports to which garbage was sent."""
        return self.folder / "garbage.log"

    def newest_checkpoint(self) -> int:
        """Return the step of the newest checkpoint; -1 if there is none."""
        return max(self.list_checkpoints(), default=-1)

    def list_checkpoints(self) -> list[int]:
        """Return the steps of the checkpoints that the run knows no damage of."""
        names = (path.name for path in (self.directory / "checkpoints").iterdir())
        return [int(name) for name in names if name.isdigit()]

    def count_failed_saves(self) -> int:
        """Return the number of saves that have failed, by the output of the programs."""
        return (self.folder / "supervisors.log").read_bytes().count(b" could not be saved: ")

    def wait_for(self, name: str, find: Callable[[], Found]) -> Found:
        """Wait until something is found, such as the ids of processes, and return it.

        Raises:
            SystemExit: there is nothing within LONGEST seconds.
        """
        deadline = time.monotonic() + LONGEST
        while not (found := find()):
            if time.monotonic() > deadline:
                raise SystemExit(f"there was no {name} for {LONGEST} s")
            time.sleep(LOOK_SECONDS)
        return found

    def signal_program(self, index: int, signum: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.program(index), signum)


def _plans(process: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return b"fewer_hosts" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False


class Watcher:
    """What the files of a run and the process table say of a job."""

    def __init__(self, job: ChaosJob) -> None:
        self._job = job
        self.detected: float | None = None
        self._began, self._programs = 0.0, set[int]()
        self._reached = self._resumed_from = 0
        self._starts: set[float] | None = None  # times of the starts so far; None: the run needs no further one

    def begin(self, restarts: bool, in_burst: bool) -> None:
        """Begin to measure, just before a fault.

        restarts: the job has to start again; otherwise it goes on by itself.
        in_burst: the fault before this one may not be over yet.
        """
        self._began, self.detected, self._programs = time.monotonic(), None, self._list_programs()
        self._reached = max(self._reached if in_burst else 0, self.last_step())
        if restarts:
            self._starts = {start["time"] for start in self._list_starts()}
        elif not in_burst or self._is_back():
            self._starts = None

    @property
    def repeated(self) -> int:
        """Number of steps that ran again; 0 if the job did not have to start again after the last fault."""
        return 0 if self._starts is None else max(0, self._reached - self._resumed_from)

    def last_step(self) -> int:
        records = read_lines(self._job.directory / "metrics.jsonl")
        return int(records[-1]["step"]) if records else 0

    def count_unsaved(self, damaged: int) -> int:
        """Return the number of steps since the last whole checkpoint. damaged: so many of the newest are not whole."""
        whole = sorted(self._job.list_checkpoints())[: -damaged or None]
        return self._reached - max(whole, default=0)

    def wait_for_step(self, step: int, seconds: float = 600) -> None:
        self._wait_until(lambda: self.last_step() >= step, f"reach step {step}", seconds)

    def _wait_until(self, is_so: Callable[[], bool], purpose: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline:
                raise SystemExit(f"the run did not {purpose} in {seconds:g} s")
            time.sleep(LOOK_SECONDS)

    def wait_for_spare_checkpoint(self, seconds: float = 600) -> None:
        """Wait until the newest checkpoint may be damaged: it is newer than the last start, and not the only one.

        Faults can follow each other without a checkpoint in between. Damage to each one in turn would leave none.
        """

        def has_spare() -> bool:
            whole = self._job.list_checkpoints()
            return len(whole) > 1 and max(whole) > self._resumed_from

        self._wait_until(has_spare, "save another checkpoint", seconds)

    def wait_for_resume(self, seconds: float) -> float | None:
        """Wait for the next step, and return its time by the monotonic clock; None if there is none in time."""
        while (now := time.monotonic()) < self._began + seconds:
            if self.detected is None and not self._programs <= self._list_programs():
                self.detected = round(now - self._began, 2)
            if self._is_back():
                return now
            time.sleep(LOOK_SECONDS)
        return None

    def _is_back(self) -> bool:
        """Return whether the run has made a step since the last fault."""
        if self._starts is None:
            return self.last_step() > self._reached + 2
        new = [start for start in self._list_starts() if start["time"] not in self._starts]
        if not new:
            return False
        self._resumed_from = new[-1]["step"]
        return self.last_step() > self._resumed_from

    def count_ends(self) -> int:
        return len(read_lines(self._job.directory / "faults.jsonl"))

    def ends_between(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return (host, exit code) of the programs that ended, from the entries first to last of the journal.

        Those of hosts that were lost have none.
        """
        entries = read_lines(self._job.directory / "faults.jsonl")[first:last]
        ends = [(int(index), code) for entry in entries for index, code in entry.get("codes", {}).items()]
        return [(index, code) for index, code in ends if code is not None]

    def _list_starts(self) -> list[dict[str, Any]]:
        events = read_lines(self._job.directory / "events.jsonl")
        return [event for event in events if event["event"] in ("start", "resume")]

    def _list_programs(self) -> set[int]:
        return {child for supervisor in self._job.supervisors for child in self._job.children(supervisor.pid)}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a file, without those that are cut."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def read_state(directory: Path, step: int) -> dict[str, bytes]:
    """Return the bytes of all arrays of a checkpoint."""
    return {name: array.tobytes() for name, array in read_arrays(directory, step).items()}


def read_arrays(directory: Path, step: int) -> dict[str, np.ndarray]:
    """Return the masters and the moments of a checkpoint."""
    device = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    items = {name: ocp.args.StandardRestore(fallback_sharding=device) for name in ("masters", "moments")}
    with ocp.CheckpointManager(directory / "checkpoints") as manager:
        state = dict(manager.restore(step, args=ocp.args.Composite(**items)))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
