"""The scripts for SLURM and Kubernetes: which exit codes of a job start it again, and which need a person."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from commands import ROOT

from jaxopt_llm.core import errors
from jaxopt_llm.supervision import faults

NEEDS_A_PERSON = sorted(faults.FINAL - {0})
STARTS_AGAIN = {errors.ProcessLost.exit_code, errors.Preempted.exit_code}

# Stand-ins for SLURM's commands. Each appends its name and its arguments to `calls`.
SRUN = """#!/bin/sh
echo srun "$@" >> calls
printf %s "$JAXOPT_LLM_TOKEN" > token
exit CODE
"""
SCONTROL = """#!/bin/sh
echo scontrol "$@" >> calls
"""


def submit(code: int, folder: Path, **variables: str) -> tuple[int, list[str], str]:
    """Run the batch script with an srun that ends with a code. Return its own code, the calls and the token."""
    for name, text in {"srun": SRUN.replace("CODE", str(code)), "scontrol": SCONTROL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", "PYTHON": "python3"}
    done = subprocess.run(
        ["bash", ROOT / "scripts/slurm.sbatch", "--config", "a b.py"],
        env={name: value for name, value in os.environ.items() if name != "JAXOPT_LLM_TOKEN"} | path | variables,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return done.returncode, (folder / "calls").read_text().splitlines(), (folder / "token").read_text()


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 9, 74, 75, 137, 143])
def test_slurm_puts_a_job_back_into_the_queue_if_a_restart_helps(code: int, tmp_path: Path) -> None:
    ended, calls, _ = submit(code, tmp_path)
    assert ended == code
    assert calls[1:] == ["scontrol requeue 17"] * (code in STARTS_AGAIN)


def test_slurm_starts_a_supervisor_with_the_arguments_and_a_token(tmp_path: Path) -> None:
    _, (call,), token = submit(0, tmp_path, SUPERVISE="--elastic 600")
    assert call.endswith(" python3 -m jaxopt_llm.supervise --elastic 600 -- train --config a b.py")
    assert len(bytes.fromhex(token)) == 32
    assert submit(0, tmp_path)[2] != token
    assert submit(0, tmp_path, JAXOPT_LLM_TOKEN="own")[2] == "own"


def test_kubernetes_starts_a_job_again_unless_it_needs_a_person() -> None:
    jobs = yaml.safe_load((ROOT / "scripts/kubernetes-jobset.yaml").read_text())["spec"]
    (workers,) = jobs["replicatedJobs"]
    job = workers["template"]["spec"]
    pod = job["template"]["spec"]
    # A pod that ends with one of these codes fails its Job with the reason PodFailurePolicy ...
    (container,) = pod["containers"]
    codes = {"containerName": container["name"], "operator": "In", "values": NEEDS_A_PERSON}
    assert job["podFailurePolicy"]["rules"] == [{"action": "FailJob", "onExitCodes": codes}]
    # ... which fails the JobSet. With every other code the Job fails, too, and the JobSet starts all Jobs again.
    (rule,) = jobs["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert jobs["failurePolicy"]["maxRestarts"] == 100
    assert (job["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
