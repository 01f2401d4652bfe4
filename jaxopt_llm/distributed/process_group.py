"""Several processes as one job: their start, their messages, what they must agree on, and their common end.

The processes of a job find each other through JAX's coordination service. JAX aborts every process that loses the
service. If the service ran in process 0, as JAX places it, a death of process 0 would abort all others before they
could say why. It therefore has a process of its own (jax_service.py), which outlives process 0 for as long as the
others need to notice the death and to end with an exit code.
"""

import collections
import contextlib
import ctypes
import hashlib
import importlib.metadata
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.distributed import global_state  # its key-value store has no public name
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxlib import _jax

from jaxopt_llm.config import Config, DistributedConfig
from jaxopt_llm.core import errors, json_files, stop_signals
from jaxopt_llm.core.errors import CommandError, InputError, Preempted, ProcessLost, ProcessMissing
from jaxopt_llm.distributed import rendezvous, runtime, wire
from jaxopt_llm.distributed.activity import Activity, write_stacks
from jaxopt_llm.distributed.launchers import Job, find_job
from jaxopt_llm.distributed.rendezvous import Watch, describe_differences

_SERVICE = Path(__file__).with_name("jax_service.py")


@contextlib.contextmanager
def run_service(job: Job, address: str, timeout_seconds: int) -> Iterator[None]:
    """Run the service beside process 0. Other processes do nothing.

    Args:
        address: host:port on which it listens.

    Raises:
        ProcessMissing: it did not start. The port is a free one, which another program may have taken since.
    """
    if job.index:
        yield
        return
    # -P: the folder of the script is no place to import modules from.
    program = [sys.executable, "-P", str(_SERVICE), address, str(job.processes), str(timeout_seconds)]
    with tempfile.TemporaryFile() as log:
        # A session of its own: Ctrl-C in the terminal is for process 0.
        child = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        assert child.stdout is not None
        try:
            if child.stdout.readline() != "ready\n":
                log.seek(0)
                reason = (log.read().decode(errors="replace").strip().splitlines() or ["it ended"])[-1]
                raise ProcessMissing(
                    f"distributed.coordinator={job.coordinator}: JAX's coordination service did not start on {address} "
                    f"({reason}); run again"
                )
            yield
        finally:
            child.kill()
            child.wait()


def connect(job: Job, address: str, timeout_seconds: int) -> None:
    """Connect this process to the service. Must run before JAX uses a backend."""
    jax.config.update("jax_enable_preemption_service", False)  # it would replace our SIGTERM handler
    # On CPUs two programs would run at the same time, and Gloo would mix up their messages.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    client = _jax.get_distributed_runtime_client(
        address,
        job.index,
        init_timeout=timeout_seconds,
        heartbeat_timeout=2 * timeout_seconds,  # JAX would abort, so the watch must come first
        shutdown_timeout=timeout_seconds,
        use_compression=True,
    )
    client.connect()
    global_state.client, global_state.coordinator_address = client, address
    global_state.process_id, global_state.num_processes = job.index, job.processes


def delay_aborts() -> None:
    """Let a thread that aborts this process sleep for 6 seconds first.

    If a process dies in a collective, native code of another one may call `abort()`: Gloo's does if it receives data of
    the wrong collective. The news of the death arrives at about the same time, and ends that process with an exit code
    and one line. So the thread that aborts sleeps first, while the other threads go on.

    The handler is libc's `sleep` itself, whose argument is then the number of the signal: SIGABRT is 6. Python code
    cannot run there. When the handler returns, `abort()` goes on, so that an abort never becomes a hang.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


_DEATH_NOTICE_SECONDS = 5  # maximum until the watch knows that a process has died
# Errors that no death of another process causes, or that already say so. Any other one may be its first symptom: a
# collective can end with garbage, which then diverges, or a checkpoint cannot be written together.
_OWN_ERRORS = (InputError, ProcessLost, ProcessMissing, KeyboardInterrupt)
_DAY_MILLISECONDS = 24 * 3600 * 1000  # a slow process is waited for; a lost process ends the job through the watch


@contextlib.contextmanager
def join_job(job: Job, config: DistributedConfig, facts: Mapping[str, Any]) -> Iterator["Processes"]:
    """Connect this process to the other processes of the job, and leave the context together with them.

    Must be entered before JAX opens a device. After the start, an error of one process ends all of them.

    Args:
        facts: values that must be equal in all processes, by name.

    Raises:
        ProcessMissing: the processes do not connect in time.
        InputError: their facts differ.
    """
    global _joined
    if job.processes == 1:
        yield SINGLE_PROCESS
        return
    token, shared = wire.read_token(os.environ), {**facts, **_read_versions()}
    coordinator, peers = rendezvous.connect_processes(job, shared, config.timeout_seconds, token)
    watch = Watch(job, peers, config.timeout_seconds)
    if job.index:  # only process 0 prints; Gloo would print in every process
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    stopped: Preempted | SystemExit | None = None
    service = contextlib.ExitStack()
    try:
        service.enter_context(run_service(job, coordinator, config.timeout_seconds))
        connect(job, coordinator, config.timeout_seconds)
        delay_aborts()
        _joined = Processes(job, watch)
        yield _joined
    except Preempted as preempted:
        stopped = preempted
    except SystemExit as end:
        if end.code not in (None, 0):
            watch.fail(end)
        stopped = end
    except BaseException as error:
        if not isinstance(error, _OWN_ERRORS):
            time.sleep(_DEATH_NOTICE_SECONDS)  # if a process has died, the watch ends this one here
        watch.fail(error)
    _joined = None
    jax.distributed.shutdown()  # waits for all
    watch.leave()
    service.close()  # after the others have left it: JAX aborts a process that loses the service
    if stopped:
        if job.index and isinstance(stopped, Preempted):
            sys.exit(stopped.exit_code)  # process 0 prints the message
        raise stopped


def _read_versions() -> dict[str, str]:
    """Return the versions of everything that decides how a step compiles: the steps of all processes must match."""
    package = Path(__file__).parent.parent
    sources = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        sources.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    libraries = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "grain", "orbax-checkpoint")}
    flags = os.environ.get("XLA_FLAGS", "")
    return {**libraries, "XLA_FLAGS": flags, "hash of the jaxopt_llm sources": sources.hexdigest()[:16]}


class Processes:
    """Processes of a job, and the communication between them.

    All processes must make the same calls in the same order.
    """

    def __init__(self, job: Job, watch: Watch | None = None) -> None:
        self.index, self.count = job.index, job.processes
        self._watch = watch
        self.main, self.saving = Activity(), Activity()  # of the main thread, and of the save in the background
        self._channels: collections.Counter[str] = collections.Counter()

    def __str__(self) -> str:
        return f" of {self.count} processes" if self.count > 1 else ""

    @property
    def first(self) -> bool:
        """True for process 0, which prints and writes everything that is not sharded."""
        return self.index == 0

    def note_checkpoint(self, step: int) -> None:
        """Note the step of the run's last checkpoint, 0 if there is none: it is named if a process is lost."""
        if self._watch is not None:
            self._watch.checkpoint_step = step

    def publish(self, report: Callable[[], dict[str, Any]], stacks_path: Path) -> None:
        """Send a report to process 0 with each heartbeat, and write the stacks of this process there if the job hangs.

        Process 0 forgets what it has received before.
        """
        self._stacks = stacks_path
        if self._watch is not None:
            self._watch.publish(report, stacks_path)

    def received(self) -> dict[int, dict[str, Any]]:
        """Return the last reports of the other processes by index. Only process 0 receives them."""
        return dict(self._watch.reports) if self._watch is not None else {}

    @property
    def judges(self) -> bool:
        """True for a process that decides that the job hangs: process 0, or each one that receives no reports."""
        return self.first or self._watch is None

    @property
    def reporting(self) -> int:
        """Number of processes whose reports this one has, once all of them have reported."""
        return 1 if self._watch is None else self.count

    def end_hung(self, reason: str) -> NoReturn:
        """End all processes because one of them makes no progress. Each writes its stacks."""
        if self._watch is not None:
            self._watch.end_hung(reason)
        write_stacks(self._stacks, reason)
        os._exit(errors.report_error(ProcessLost(reason, None)))

    def channel(self, name: str, activity: Activity | None = None) -> "Channel":
        """Return a channel. A second call with the same name returns another channel.

        activity: activity of the thread that uses the channel; by default of the main thread.
        """
        self._channels[name] += 1
        return Channel(f"{name}/{self._channels[name]}", self.index, self.count, activity or self.main)

    def check_same(self, name: str, value: str, remedy: str = "all processes must read the same files") -> None:
        """Raise InputError if a process has another value than process 0."""
        values = self.channel(name).exchange(value)
        other = next((index for index, each in enumerate(values) if each != values[0]), None)
        if other is not None:
            raise InputError(f"{name} differs between process 0 and process {other}; {remedy}")

    def check_shared(self, directory: Path, setting: str = "run.directory") -> None:
        """Raise InputError if a process does not see a file that process 0 writes into the directory.

        setting: name of the directory in the message.
        """
        if self.count == 1:
            return
        channel = self.channel("shared")
        probe = f".seen-by-all-{time.time_ns()}"
        if self.first:
            (directory / probe).touch()
        is_visible = channel.exchange(probe)[0] in (os.listdir(directory) if directory.is_dir() else ())
        blind = [index for index, answer in enumerate(channel.exchange(str(is_visible))) if answer != "True"]
        if self.first:
            (directory / probe).unlink()
        if blind:
            raise InputError(
                f"{setting}={directory} is not shared: process {blind[0]} does not see the files of process 0; set it "
                "to a directory that all hosts share"
            )

    def vote(self) -> "Vote":
        return Vote(self.count, self.main)


SINGLE_PROCESS = Processes(Job("", 1, 0))
_joined: Processes | None = None  # the processes of the job that this process has joined


def find_processes(environment: Mapping[str, str], config: DistributedConfig) -> Processes:
    """Return the processes of the job that this process has joined, by `join_job` or by `jax.distributed.initialize`.

    Raises:
        InputError: a launcher's variables describe a job of several processes, and this process has not joined it.
    """
    global _joined
    if _joined is None and jax.distributed.is_initialized():
        _joined = Processes(Job("", jax.process_count(), jax.process_index()))
    if _joined is not None:
        return _joined
    job = find_job(config, environment)
    if job.processes > 1:
        raise InputError(
            f"this is process {job.index} of a job of {job.processes} processes, which it has not joined: put the "
            "script into a function main, and end the script with jaxopt_llm.run_job(main)"
        )
    return SINGLE_PROCESS


class Channel:
    """Messages between the processes. In each process only one thread may use a channel."""

    def __init__(self, name: str, index: int, count: int, activity: Activity) -> None:
        self._name, self._index, self._count = f"jaxopt_llm/{name}", index, count
        self._activity = activity
        self._calls = itertools.count()

    def exchange(self, message: str) -> list[str]:
        """Return the messages of all processes, in the order of their indices."""
        if self._count == 1:
            return [message]
        store, call = global_state.client, next(self._calls)
        assert store is not None
        store.key_value_set(f"{self._name}/{call}/{self._index}", message)
        keys = [f"{self._name}/{call}/{index}" for index in range(self._count)]
        with self._activity.wait():
            messages = [store.blocking_key_value_get(key, _DAY_MILLISECONDS) for key in keys]
        if call:  # all processes have read the message of the call before
            store.key_value_delete(f"{self._name}/{call - 1}/{self._index}")
        return messages

    def share(self, make: Callable[[], Any]) -> Any:
        """Return, in all processes, what process 0 makes: a value that JSON can hold. Only there `make` is called.

        A CommandError that it raises there is raised in all processes.
        """
        if self._count == 1:
            return make()
        made, head = b"", ""
        if self._index == 0:
            try:
                made = json.dumps(make()).encode()
                head = json.dumps({"bytes": len(made)})
            except CommandError as error:
                head = json.dumps({"error": type(error).__name__, "message": str(error)})
        found = json_files.parse(self.exchange(head)[0])
        if "error" in found:
            raise getattr(errors, found["error"])(found["message"])
        # By the devices, because the store is no place for megabytes. Few sizes need few programs.
        padded = np.zeros(1 << max(found["bytes"] - 1, 0).bit_length(), np.uint8)
        padded[: len(made)] = np.frombuffer(made, np.uint8)
        with self._activity.wait():
            sent = np.asarray(multihost_utils.broadcast_one_to_all(padded))
        return json_files.parse(sent[: found["bytes"]].tobytes())


class Vote:
    """Vote of all processes at each step on two questions: was a stop requested, and did the last save fail?"""

    def __init__(self, count: int, activity: Activity) -> None:
        self._count, self._activity = count, activity
        if count == 1:
            return
        # Use all devices: XLA runs programs of several devices in order, but on CPUs a program of a single device could
        # overtake a step.
        mesh = Mesh(np.array(jax.devices()), ("devices",), axis_types=(AxisType.Auto,))
        self._sharding = NamedSharding(mesh, PartitionSpec("devices"))
        self._any = jax.jit(lambda votes: jnp.any(votes, axis=0), out_shardings=NamedSharding(mesh, PartitionSpec()))
        with activity.wait():
            self._answers = self._start(False, False)

    def cast(self, stop: bool, failed: bool) -> tuple[bool, bool]:
        """Cast this step's votes, and return whether any process voted yes at the call before.

        The answers are one call late, so that no device is waited for. With a single process they are not late.
        """
        if self._count == 1:
            return stop, failed
        with self._activity.wait():
            answers, self._answers = np.asarray(self._answers), self._start(stop, failed)
        return bool(answers[0]), bool(answers[1])

    def _start(self, stop: bool, failed: bool) -> jax.Array:
        votes = np.array([[stop, failed]])
        return self._any(jax.make_array_from_callback((jax.device_count(), 2), self._sharding, lambda _: votes))


# Settings of JAX that change no program, and may differ between hosts: caches, dumps, logs, tracebacks, addresses and
# the names of devices.
_PER_HOST = re.compile(
    r"cache|dump|log|traceback|frames|source_url|color|address|visible_devices|default_device|hlo_source"
)


def check_same_programs(processes: Processes, lower: Callable[[], Any], hyperparameters: Any) -> None:
    """Raise InputError if the settings of JAX, the lowered step or its hyperparameters differ between the processes.

    lower: returns the lowered step. With a single process it is not called.
    """
    if processes.count == 1:
        return
    facts = {name: str(value) for name, value in jax.config.values.items() if not _PER_HOST.search(name)}
    text = lower().as_text()  # without the locations in source files, which contain paths of this host
    facts["hash of the lowered step"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    facts["hyperparameters"] = str(hyperparameters)
    answers = processes.channel("programs").exchange(json.dumps(facts))
    first, *others = map(json_files.parse, answers)
    for index, each in enumerate(others, 1):
        if found := describe_differences(index, each, first):
            raise InputError(f"{found}; start all processes in the same environment")


# ---- A user's script.


def run_job(main: Callable[[], object], distributed: DistributedConfig | Mapping[str, Any] | None = None) -> NoReturn:
    """Run the main function of a script as one process of a job, and exit.

    torchrun, srun, mpirun or Kubernetes starts the script once on each host, and sets the variables from which the
    processes find each other. A single process runs `main` alone. An error of this package, of a disk or of a network
    is one line on standard error, and the exit codes are the same as for `jaxopt-llm train`: 2 for wrong input, 3 for a
    loss that diverged, 4 for checkpoints, 5 if another process was lost or is missing, 74 for a disk or a network, 75
    after a signal. An error of one process ends all. Only process 0 writes to standard output.

    SIGTERM, SIGINT and SIGHUP stop the script. `fit` saves first; elsewhere they end the process at once. If the script
    has set its own handler for one of them before, that handler stays, except during `fit`. The handlers of `run_job`
    stay until the process has ended.

    Args:
        main: function without arguments. No device of JAX may be open before it runs, so arrays are made in it.
        distributed: the job, as `Config.distributed`; by default it is read from the launcher's variables.

    Raises:
        SystemExit: always, with the exit code.
    """
    errors.run_command(lambda: _run_main(main, distributed))


def _run_main(main: Callable[[], object], distributed: DistributedConfig | Mapping[str, Any] | None) -> int:
    if threading.current_thread() is not threading.main_thread():
        raise InputError("run_job: it is called in a thread; call it in the main thread, which receives the signals")
    stop_signals.end_at_signals()
    stop_signals.listen()
    given = dict(distributed) if isinstance(distributed, Mapping) else distributed
    config = Config(distributed=given or DistributedConfig()).distributed  # type: ignore[arg-type]
    if found := config.problems():
        raise InputError("; ".join(found))
    job = find_job(config, os.environ)
    if job.processes > 1:
        runtime.check_no_device("the script before run_job")
    runtime.prepare_devices()
    with join_job(job, config, {}):
        main()
    return 0
