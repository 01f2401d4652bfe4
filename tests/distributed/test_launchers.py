"""Jobs that the configuration and the environment describe, and the wait of a program that is ready to train."""

import socket
import time

import pytest

from jaxopt_llm.config import DistributedConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.distributed import launchers
from jaxopt_llm.distributed.launchers import Job

pytestmark = pytest.mark.core

TORCHRUN = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "3"}
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],login",
    "SLURM_STEP_NUM_NODES": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "11", "HOSTNAME": "llm-workers-0-11"}


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, Job("", 1, 0)),
        (TORCHRUN, Job("node7:29500", 4, 3)),
        # torchrun's agent listens on the port itself; a launcher that only sets the variables does not.
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, Job("node7:29501", 4, 3)),
        ({"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}, Job("", 1, 0)),
        (SLURM, Job("gpu07:61441", 5, 2)),
        ({**SLURM, "SLURM_STEP_NODELIST": "a-1,b-[2-5]"}, Job("a-1:61441", 5, 2)),
        ({**SLURM, "SLURM_STEP_NODELIST": "a-1"}, Job("a-1:61441", 5, 2)),
        ({**SLURM, "SLURM_STEP_NODELIST": "rack[0-1]node[3,5]-ib,b1"}, Job("rack0node3-ib:61441", 5, 2)),
        ({"SLURM_JOB_ID": "5", "SLURM_PROCID": "0", "SLURM_NTASKS": "5"}, Job("", 1, 0)),  # no srun
        (OPEN_MPI, Job(f"10.96.0.1:{61440 + (1531576320 >> 12) % 4096}", 2, 1)),
    ],
)
def test_the_environment_describes_the_job(environment: dict[str, str], job: Job) -> None:
    assert launchers.find_job(DistributedConfig(), environment) == job


def test_the_configuration_overrides_the_environment() -> None:
    config = DistributedConfig(coordinator="a:1", processes=8, process_id=0)
    assert launchers.find_job(config, TORCHRUN) == Job("a:1", 8, 0)


def test_a_kubernetes_pod_finds_the_first_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda host: f"{host}.llm.default.svc.cluster.local")
    found = launchers.find_job(DistributedConfig(processes=12), KUBERNETES)
    assert found == Job("llm-workers-0-0.llm.default.svc.cluster.local:8476", 12, 11)
    with pytest.raises(InputError, match="set --distributed.processes to the job's completions"):
        launchers.find_job(DistributedConfig(), KUBERNETES)


@pytest.mark.parametrize(
    ("environment", "option"),
    [
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "--nproc-per-node 1"),
        ({**TORCHRUN, "LOCAL_SIZE": "8"}, "--nproc-per-node 1"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "40"}, "--ntasks-per-node=1"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, "ppr:1:node"),
    ],
)
def test_a_process_per_device_is_refused(environment: dict[str, str], option: str) -> None:
    with pytest.raises(InputError, match=option):
        launchers.find_job(DistributedConfig(), environment)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            DistributedConfig("a:1", processes=2, process_id=2),
            "distributed.process_id=2: must be less than distributed.processes=2; start no more",
        ),
        (DistributedConfig(processes=2), "set --distributed.coordinator"),
    ],
)
def test_an_incomplete_job_is_refused(config: DistributedConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        launchers.find_job(config, {})


def test_variables_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="WORLD_SIZE.*is not a number .*'four'"):
        launchers.find_job(DistributedConfig(), {**TORCHRUN, "WORLD_SIZE": "four"})


def test_the_steps_do_not_begin_before_the_time_that_the_supervisor_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = time.monotonic() + 0.5
    monkeypatch.setenv(launchers.HOLD_VARIABLE, str(begin))
    said: list[str] = []
    launchers.hold_start(lambda: False, said.append)
    assert time.monotonic() >= begin
    assert said[0].startswith("ready; waits ")


def test_a_request_to_stop_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launchers.HOLD_VARIABLE, "1e9")
    asked: list[float] = []

    def is_stopped() -> bool:
        asked.append(time.monotonic())
        return len(asked) > 2

    launchers.hold_start(is_stopped, lambda text: None)
    assert len(asked) == 3


@pytest.mark.parametrize("until", [None, "0.0"])
def test_without_such_a_time_nothing_is_said_and_nothing_waits(
    until: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(launchers.HOLD_VARIABLE, raising=False)
    if until is not None:
        monkeypatch.setenv(launchers.HOLD_VARIABLE, until)
    said: list[str] = []
    launchers.hold_start(lambda: False, said.append)
    assert not said
