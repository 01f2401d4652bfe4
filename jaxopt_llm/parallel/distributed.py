"""Several processes as one job: their start, what they tell each other, and which rows of a batch each holds."""

import contextlib
import hashlib
import importlib.metadata
import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.distributed import global_state  # its key-value store has no public name
from jax.errors import JaxRuntimeError
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxopt_llm.errors import InputError, Preempted
from jaxopt_llm.parallel import rendezvous
from jaxopt_llm.parallel.launchers import DistributedConfig, Job
from jaxopt_llm.parallel.rendezvous import Watch

_NEWS = 5  # seconds until the watch knows that a process has died, at most
_DAY = 24 * 3600 * 1000  # ms: who is only slow is waited for, and who is gone ends the job otherwise


def check_divides(devices: int, job: Job) -> None:
    """Raises InputError unless every process can have as many of the mesh's devices."""
    if devices % job.processes:
        raise InputError(
            f"mesh: {devices} device(s) do not divide over {job.processes} processes, one per host; change --mesh.* or "
            "--distributed.processes"
        )


def _initialize(job: Job, coordinator: str, timeout_seconds: int) -> None:
    """JAX's own start. Must run before JAX touches a backend."""
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    # On CPUs two programs would run side by side, and Gloo take the messages of one for those of the other.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.distributed.initialize(
        coordinator,
        job.processes,
        job.index,
        # Else JAX would give a process of SLURM or Open MPI one device of its host, and any other all.
        cluster_detection_method="deactivate",
        coordinator_bind_address=coordinator,  # else all interfaces
        initialization_timeout=timeout_seconds,
        heartbeat_timeout_seconds=2 * timeout_seconds,  # it would abort: the watch comes first
        shutdown_timeout_seconds=timeout_seconds,
    )


@contextlib.contextmanager
def joined(job: Job, config: DistributedConfig, facts: Mapping[str, Any]) -> Iterator["Processes"]:
    """The processes of the job, which leave together. Must be entered before JAX opens a device.

    facts: what must be equal on all, by name. Raises InputError where they do not come together; an error of one after
    that ends all.
    """
    if job.processes == 1:
        yield ALONE
        return
    coordinator, peers = rendezvous.meet(job, {**facts, **_version()}, config.timeout_seconds)
    watch = Watch(job, peers, config.timeout_seconds)
    if job.index:  # only the first prints: Gloo would, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    try:
        _initialize(job, coordinator, config.timeout_seconds)
        yield Processes(job)
    except Preempted as preempted:
        stopped: Preempted | None = preempted
    except JaxRuntimeError as error:
        time.sleep(_NEWS)  # where another process has died, the watch says so, and this ends here
        watch.fail(error)
    except BaseException as error:
        watch.fail(error)
    else:
        stopped = None
    jax.distributed.shutdown()  # waits for all
    watch.leave()
    if stopped:
        if job.index:
            sys.exit(stopped.exit_code)  # the first says so
        raise stopped


def _version() -> dict[str, str]:
    """What the program is that runs: a step that is compiled otherwise would not fit those of the others."""
    package = Path(__file__).parent.parent
    sources = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        sources.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    libraries = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "grain", "orbax-checkpoint")}
    flags = os.environ.get("XLA_FLAGS", "")
    return {**libraries, "XLA_FLAGS": flags, "the code of jaxopt_llm, by its hash,": sources.hexdigest()[:16]}


class Processes:
    """What the processes of a job tell each other. All make the same calls, each in the same order."""

    def __init__(self, job: Job) -> None:
        self.index, self.count = job.index, job.processes

    def __str__(self) -> str:
        return f" of {self.count} processes" if self.count > 1 else ""

    @property
    def first(self) -> bool:
        """Whether this is the one that prints, and writes what is not sharded."""
        return self.index == 0

    def channel(self, name: str) -> "Channel":
        return Channel(name, self.index, self.count)

    def check_same(self, what: str, value: str, mend: str = "all must read the same files") -> None:
        """Raises InputError where another process has something else than the first."""
        values = self.channel(what).exchange(value)
        other = next((index for index, each in enumerate(values) if each != values[0]), None)
        if other is not None:
            raise InputError(f"{what} of process {other} is not that of process 0: {mend}")

    def check_shared(self, directory: Path) -> None:
        """Raises InputError where another process does not see what the first writes into the directory."""
        if self.count == 1:
            return
        channel = self.channel("shared")
        new = f".seen-by-all-{time.time_ns()}"
        if self.first:
            (directory / new).touch()
        seen = channel.exchange(new)[0] in (os.listdir(directory) if directory.is_dir() else ())
        blind = [index for index, sees in enumerate(channel.exchange(str(seen))) if sees != "True"]
        if self.first:
            (directory / new).unlink()
        if blind:
            raise InputError(
                f"run.directory {directory} is not shared: process {blind[0]} does not see what process 0 writes there"
            )

    def vote(self) -> "Vote":
        return Vote(self.count)


ALONE = Processes(Job("", 1, 0))


class Channel:
    """Messages between the processes, for one thread of each."""

    def __init__(self, name: str, index: int, count: int) -> None:
        self._name, self._index, self._count = f"jaxopt_llm/{name}", index, count
        self._calls = itertools.count()

    def exchange(self, told: str) -> list[str]:
        """What each process tells, by their numbers."""
        if self._count == 1:
            return [told]
        store, call = global_state.client, next(self._calls)
        assert store is not None
        store.key_value_set(f"{self._name}/{call}/{self._index}", told)
        values = [store.blocking_key_value_get(f"{self._name}/{call}/{index}", _DAY) for index in range(self._count)]
        if call:  # all have read what was told before
            store.key_value_delete(f"{self._name}/{call - 1}/{self._index}")
        return values


class Vote:
    """Two questions to all processes at each step: whether a stop was asked for, and whether the last save failed."""

    def __init__(self, count: int) -> None:
        self._count = count
        if count == 1:
            return
        # All devices: XLA keeps programs of several in order, and would let one of a single device pass a step on CPUs.
        mesh = Mesh(np.array(jax.devices()), ("devices",), axis_types=(AxisType.Auto,))
        self._said = NamedSharding(mesh, PartitionSpec("devices"))
        self._any = jax.jit(lambda said: jnp.any(said, axis=0), out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._answers = self._ask(False, False)

    def now(self, stop: bool) -> bool:
        """Whether any process asks for a stop. Waits for all."""
        return stop if self._count == 1 else bool(np.asarray(self._ask(stop, False))[0])

    def any(self, stop: bool, failed: bool) -> tuple[bool, bool]:
        """Whether any process said so at the call before, so that no device is waited for; a single process is answered
        at once."""
        if self._count == 1:
            return stop, failed
        answers, self._answers = np.asarray(self._answers), self._ask(stop, failed)
        return bool(answers[0]), bool(answers[1])

    def _ask(self, stop: bool, failed: bool) -> jax.Array:
        own = np.array([[stop, failed]])
        return self._any(jax.make_array_from_callback((jax.device_count(), 2), self._said, lambda _: own))
