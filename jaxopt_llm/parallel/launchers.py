"""Which job this process is one of: as configured, or as torchrun, SLURM, Open MPI or Kubernetes left it in the
environment. One process per host, so that what counts the hosts' GPUs is never read."""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from jaxopt_llm.errors import InputError

KUBERNETES_PORT = 8476


@dataclass(frozen=True)
class DistributedConfig:
    coordinator: str = ""
    """host:port of process 0, where it listens; empty: as torchrun, SLURM, Open MPI or Kubernetes tell"""
    processes: int = 0
    """processes of the job, one per host with all of its devices; 0: as found, and else 1"""
    process_id: int = -1
    """which of them this one is, from 0; -1: as found"""
    timeout_seconds: int = 300
    """seconds after which processes that do not come, or do not answer any more, end the job"""

    def problems(self) -> list[str]:
        found = [
            f"distributed.{name}={value}: must be at least {least}"
            for name, value, least in (
                ("processes", self.processes, 0),
                ("process_id", self.process_id, -1),
                ("timeout_seconds", self.timeout_seconds, 1),
            )
            if value < least
        ]
        if self.coordinator and not re.fullmatch(r".+:[0-9]{1,5}", self.coordinator):
            found.append(f"distributed.coordinator={self.coordinator}: must be host:port")
        return found


@dataclass(frozen=True)
class Job:
    """coordinator: host:port; index: of this process."""

    coordinator: str
    processes: int
    index: int


def find(config: DistributedConfig, environment: Mapping[str, str]) -> Job:
    """The job that the configuration tells; where it tells nothing, the first launcher that has left its variables.

    Raises InputError for half of a job."""
    found = next((job for job in (launched(environment) for launched in LAUNCHERS) if job), Job("", 1, 0))
    job = Job(
        config.coordinator or found.coordinator,
        config.processes or found.processes,
        found.index if config.process_id < 0 else config.process_id,
    )
    if job.processes == 0:
        raise InputError("this is a pod of a Kubernetes job: set --distributed.processes to the job's completions")
    if job.index >= job.processes:
        raise InputError(
            f"distributed.process_id={job.index}: of {job.processes} process(es) the last has number "
            f"{job.processes - 1}; start no more than --distributed.processes, one per host"
        )
    if job.processes > 1 and not job.coordinator:
        raise InputError(f"a job of {job.processes} processes: set --distributed.coordinator to host:port of process 0")
    return job


def _torchrun(environment: Mapping[str, str]) -> Job | None:
    values = _all(environment, "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    if values is None:
        return None
    address, port, processes, index = values
    _check_one_per_host(int(environment.get("LOCAL_WORLD_SIZE", 1)) == 1, "--nproc-per-node 1")
    # On MASTER_PORT itself torchrun's agent listens.
    taken = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Job(f"{address}:{int(port) + taken}", int(processes), int(index))


def _slurm(environment: Mapping[str, str]) -> Job | None:
    """Of a step, which srun makes: a batch script by itself is one process."""
    hosts = ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES")
    values = _all(environment, "SLURM_JOB_ID", *hosts, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    if values is None:
        return None
    number, nodes, count, processes, index = values
    _check_one_per_host(count == processes, "--ntasks-per-node=1")
    first = re.match(r"([^,\[]*)(?:\[([^,\]-]*))?", nodes)  # of a1 or a1,b1 or a[1-2],b1 or a[01,03]
    assert first is not None
    return Job(f"{first[1]}{first[2] or ''}:{_port(int(number))}", int(processes), int(index))


def _open_mpi(environment: Mapping[str, str]) -> Job | None:
    values = _all(environment, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    if values is None:
        return None
    processes, index, local = values
    _check_one_per_host(int(local) == 1, "--map-by ppr:1:node")
    # mpirun's own host, up to version 4: 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
    started = re.match(r"([0-9]+)\.[0-9]+;tcp6?://(\[?[^,\]:]+)", environment.get("OMPI_MCA_orte_hnp_uri", ""))
    coordinator = f"{started[2]}:{_port(int(started[1]) >> 12)}" if started else ""
    return Job(coordinator, int(processes), int(index))


def _kubernetes(environment: Mapping[str, str]) -> Job | None:
    """Of an Indexed Job, whose pods are called JOB-0, JOB-1 ...; how many they are is not told."""
    values = _all(environment, "JOB_COMPLETION_INDEX", "HOSTNAME")
    if values is None:
        return None
    index, host = values
    domain = socket.getfqdn(host).removeprefix(host)
    return Job(f"{host.removesuffix(index)}0{domain}:{KUBERNETES_PORT}", 0, int(index))


LAUNCHERS = (_torchrun, _slurm, _open_mpi, _kubernetes)


def _all(environment: Mapping[str, str], *names: str) -> list[str] | None:
    return [environment[name] for name in names] if all(name in environment for name in names) else None


def _check_one_per_host(holds: bool, option: str) -> None:
    if not holds:
        raise InputError(f"one process per host drives all of its devices: launch with {option}")


def _port(job: int) -> int:
    """One of the last 4096, so that two jobs on a host are unlikely to meet."""
    return 61440 + job % 4096
