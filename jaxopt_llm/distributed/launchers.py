"""Launchers, which start this process, and what they say: the job that it belongs to, and when its steps may begin.

torchrun, SLURM, Open MPI and Kubernetes describe the job in environment variables. A job has one process per host, so
variables that count the GPUs of a host are never read. JAX's own detection (`jax.distributed.initialize`) is not used:
it starts a process for each GPU, does not know torchrun, needs a library and permissions in Kubernetes, and would make
the supervisor import JAX.
"""

import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxopt_llm.config import DistributedConfig
from jaxopt_llm.config.parallel import find_address_problem
from jaxopt_llm.core.errors import InputError

KUBERNETES_PORT = 8476
# Time before which the steps of the program may not begin, by the monotonic clock, which all processes of a host share.
# The supervisor sets it.
HOLD_VARIABLE = "JAXOPT_LLM_HOLD_UNTIL"
_LOOK_SECONDS = 0.1  # between two looks whether a stop is requested


@dataclass(frozen=True)
class Job:
    """Job of several processes, as one of its processes sees it.

    Attributes:
        coordinator: host:port of process 0.
        processes: number of processes; 0 if unknown.
        index: index of this process.
    """

    coordinator: str
    processes: int
    index: int


def find_job(config: DistributedConfig, environment: Mapping[str, str]) -> Job:
    """Return the job from the configuration, and from a launcher's variables for fields that are not configured.

    Of several launchers, the first one in LAUNCHERS whose variables are set counts.

    Raises:
        InputError: the job is incomplete or contradictory.
    """
    found = Job("", 1, 0)
    for read_job, names in LAUNCHERS.items():
        if all(name in environment for name in names):
            try:
                found = read_job(environment, *(environment[name] for name in names))
            except ValueError as error:
                raise InputError(
                    f"a variable of the launcher ({', '.join(names)}, ...) is not a number ({error}); correct it"
                ) from error
            break
    job = Job(
        config.coordinator or found.coordinator,
        config.processes or found.processes,
        found.index if config.process_id < 0 else config.process_id,
    )
    if job.processes == 0:
        problem = "Kubernetes tells a pod its index, but not the number of pods"
        raise InputError(f"{problem}; set --distributed.processes to the job's completions")
    if job.index >= job.processes:
        raise InputError(
            f"distributed.process_id={job.index}: must be less than distributed.processes={job.processes}; start no "
            "more than --distributed.processes processes, one per host"
        )
    if job.processes > 1 and not job.coordinator:
        remedy = "set --distributed.coordinator to host:port of process 0"
        raise InputError(f"a job of {job.processes} processes has no coordinator; {remedy}")
    if job.processes > 1 and (why := find_address_problem(job.coordinator)):
        remedy = "correct --distributed.coordinator, or the launcher's variables"
        raise InputError(f"coordinator of the job, {job.coordinator}: {why}; {remedy}")
    return job


def _torchrun(environment: Mapping[str, str], address: str, port: str, processes: str, index: str) -> Job:
    # LOCAL_SIZE is of the launcher `deepspeed`.
    of_host = environment.get("LOCAL_WORLD_SIZE", environment.get("LOCAL_SIZE", 1))
    _check_one_per_host(int(of_host) == 1, "torchrun --nproc-per-node 1")
    # torchrun's agent itself listens on MASTER_PORT.
    taken = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Job(f"{address}:{int(port) + taken}", int(processes), int(index))


def _slurm(_: Mapping[str, str], job_id: str, hosts: str, host_count: str, processes: str, index: str) -> Job:
    """Return the job of a SLURM step, which srun creates. A batch script without srun is a single process."""
    _check_one_per_host(host_count == processes, "--ntasks-per-node=1")
    # a1,b1 or a[1-2],b1 or a[01,03] or a[0-1]b[2,3]-c: each bracket stands for several numbers
    first = re.sub(r",.*", "", re.sub(r"\[(\w+)[^\]]*\]", r"\1", hosts))
    return Job(f"{first}:{_choose_port(int(job_id))}", int(processes), int(index))


def _open_mpi(environment: Mapping[str, str], processes: str, index: str, local_size: str) -> Job:
    _check_one_per_host(int(local_size) == 1, "--map-by ppr:1:node")
    # Host of mpirun, up to version 4: 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
    mpirun = re.match(r"([0-9]+)\.[0-9]+;tcp6?://(\[?[^,\]:]+)", environment.get("OMPI_MCA_orte_hnp_uri", ""))
    coordinator = f"{mpirun[2]}:{_choose_port(int(mpirun[1]) >> 12)}" if mpirun else ""
    return Job(coordinator, int(processes), int(index))


def _kubernetes(_: Mapping[str, str], index: str, host: str) -> Job:
    """Return the job of a pod of an Indexed Job. Pods are named JOB-0, JOB-1 ... and do not know their number."""
    domain = socket.getfqdn(host).removeprefix(host)
    return Job(f"{host.removesuffix(index)}0{domain}:{KUBERNETES_PORT}", 0, int(index))


# For each launcher, the variables that it always sets.
LAUNCHERS: dict[Callable[..., Job], list[str]] = {
    _torchrun: ["MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"],
    _slurm: [f"SLURM_{name}" for name in ("JOB_ID", "STEP_NODELIST", "STEP_NUM_NODES", "STEP_NUM_TASKS", "PROCID")],
    _open_mpi: ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"],
    _kubernetes: ["JOB_COMPLETION_INDEX", "HOSTNAME"],
}


def _check_one_per_host(is_one: bool, option: str) -> None:
    if not is_one:
        raise InputError(f"several processes run on one host, but one drives all its devices; launch with {option}")


def _choose_port(job_id: int) -> int:
    """Return one of the last 4096 ports, so that two jobs on a host rarely get the same one."""
    return 61440 + job_id % 4096


def hold_start(is_stopped: Callable[[], bool], say: Callable[[str], None]) -> None:
    """Wait until the steps may begin, or until a stop is requested.

    An elastic job waits for missing hosts before it goes on without them. Meanwhile its supervisor starts the program
    on the hosts that are there: it compiles its step, restores the state, and waits here for the end of that time.
    """
    begin = float(os.environ.get(HOLD_VARIABLE, 0))
    if (seconds := begin - time.monotonic()) > 0:
        say(f"ready; waits {seconds:.0f} s more for hosts that are missing")
    while time.monotonic() < begin and not is_stopped():
        time.sleep(_LOOK_SECONDS)
