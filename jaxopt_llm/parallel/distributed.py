"""Several processes as one job: their start, what they tell each other, and which rows of a batch each holds."""

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.distributed import global_state  # its key-value store has no public name
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxopt_llm.errors import InputError, Preempted
from jaxopt_llm.parallel.launchers import Job

_DAY = 24 * 3600 * 1000  # ms: who is only slow is waited for, and who is gone ends the job otherwise


def check_divides(devices: int, job: Job) -> None:
    """Raises InputError unless every process can have as many of the mesh's devices."""
    if devices % job.processes:
        raise InputError(
            f"mesh: {devices} device(s) do not divide over {job.processes} processes, one per host; change --mesh.* or "
            "--distributed.processes"
        )


def initialize(job: Job, timeout_seconds: int) -> None:
    """JAX's own start. Must run before JAX touches a backend."""
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    # On CPUs two programs would run side by side, and Gloo take the messages of one for those of the other.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.distributed.initialize(
        job.coordinator,
        job.processes,
        job.index,
        # Else JAX would give a process of SLURM or Open MPI one device of its host, and any other all.
        cluster_detection_method="deactivate",
        coordinator_bind_address=job.coordinator,  # else all interfaces
        initialization_timeout=timeout_seconds,
        heartbeat_timeout_seconds=timeout_seconds,
        shutdown_timeout_seconds=timeout_seconds,
    )


@contextlib.contextmanager
def joined(job: Job, timeout_seconds: int) -> Iterator["Processes"]:
    """The processes of the job, of which none leaves before the others. Must be entered before JAX opens a device."""
    if job.processes == 1:
        yield ALONE
        return
    if job.index:  # only the first prints: Gloo would, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    initialize(job, timeout_seconds)
    try:
        yield Processes(job)
    except Preempted as stopped:
        if job.index:
            sys.exit(stopped.exit_code)  # the first says so
        raise


class Processes:
    """What the processes of a job tell each other. All make the same calls, each in the same order."""

    def __init__(self, job: Job) -> None:
        self.index, self.count = job.index, job.processes

    @property
    def first(self) -> bool:
        """Whether this is the one that prints, and writes what is not sharded."""
        return self.index == 0

    def channel(self, name: str) -> "Channel":
        return Channel(name, self.index, self.count)

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
        store, call = global_state.client, f"{self._name}/{next(self._calls)}"
        assert store is not None
        store.key_value_set(f"{call}/{self._index}", told)
        return [store.blocking_key_value_get(f"{call}/{index}", _DAY) for index in range(self._count)]


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
