"""Several processes as one job: their start, their messages, and their common end."""

import collections
import contextlib
import hashlib
import importlib.metadata
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.distributed import global_state  # its key-value store has no public name
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxopt_llm.config import DistributedConfig
from jaxopt_llm.core import errors
from jaxopt_llm.core.errors import InputError, Preempted, ProcessLost, ProcessMissing
from jaxopt_llm.distributed import aborts, connection, handshake, rendezvous, stacks
from jaxopt_llm.distributed.activity import Activity
from jaxopt_llm.distributed.launchers import Job, find_job
from jaxopt_llm.distributed.rendezvous import Watch

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
    token, shared = handshake.read_token(config, os.environ), {**facts, **_read_versions()}
    coordinator, peers = rendezvous.connect_processes(job, shared, config.timeout_seconds, token)
    watch = Watch(job, peers, config.timeout_seconds)
    if job.index:  # only process 0 prints; Gloo would print in every process
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    stopped: Preempted | SystemExit | None = None
    service = contextlib.ExitStack()
    try:
        service.enter_context(connection.run_service(job, coordinator, config.timeout_seconds))
        connection.connect(job, coordinator, config.timeout_seconds)
        aborts.delay_aborts()
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
        stacks.write_stacks(self._stacks, reason)
        os._exit(errors.report_error(ProcessLost(reason, None)))

    def channel(self, name: str, activity: Activity | None = None) -> "Channel":
        """Return a channel. A second call with the same name returns another channel.

        activity: that of the thread that uses the channel; by default that of the main thread.
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
