"""scripts/gpu_check without a GPU: what it says, records and ends with."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_check
import pytest
from commands import ROOT
from gpu_check import Part


def check(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "gpu_check", *map(str, arguments)],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = check(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stderr.startswith("error: no device to run on") and done.stderr.count("\n") == 1
    assert "--on-cpu" in done.stderr


def test_without_jax_it_says_so_in_one_line(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # without what is installed for it
    bare.chmod(0o755)
    done = check("--on-cpu", PYTHON=str(bare))
    assert done.returncode == 2
    assert "has no jax" in done.stderr and done.stderr.count("\n") == 1


def test_a_step_is_measured_without_what_reads_data_and_command_lines(tmp_path: Path) -> None:
    for missing in ("grain", "tyro"):
        (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('{missing}')")
    done = check("--on-cpu", "--only", "1b", "--output", tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = tmp_path.glob("cpu-*.json")
    results = json.loads(written.read_text())
    part = results["parts"]["1b"]
    assert part["status"] == "passed"
    assert part["report"]["planned_peak_bytes"] > 0 and part["report"]["step_seconds"] > 0
    assert part["report"]["predicted"]["peak_bytes"] > 0
    assert results["packages"]["jax"]
    assert "tokens/s" in written.with_suffix(".txt").read_text()


def test_a_part_that_fails_is_recorded_and_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def part(name: str, program: str, seconds: int = 60, needs: tuple[str, ...] = ()) -> Part:
        return Part(name, ["-c", program], lambda path: json.loads(path.read_text()), str, seconds, needs)

    parts = [
        part("broken", "raise SystemExit('a reason')"),
        part("slow", "import time; time.sleep(600)", seconds=1),
        part("lacking", "", needs=("no-such-package",)),
        part("fine", "import sys; open(sys.argv[1], 'w').write('{}'); print('a table')"),
    ]
    machine = {"platform": "gpu", "device": "NVIDIA H200", "jax": "0"}
    monkeypatch.setattr(gpu_check, "parts", lambda on_cpu: parts)
    monkeypatch.setattr(gpu_check, "look", lambda *arguments: machine)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--output", str(tmp_path)])
    assert gpu_check.main() == 1
    (written,) = tmp_path.glob("nvidia-h200-*.json")
    found: dict[str, Any] = json.loads(written.read_text())["parts"]
    assert {name: each["status"] for name, each in found.items()} == {
        "broken": "failed",
        "slow": "failed",
        "lacking": "skipped",
        "fine": "passed",
    }
    assert "a reason" in found["broken"]["error"]
    assert "stopped after 1 s" in found["slow"]["error"]
    assert "no-such-package" in found["lacking"]["error"]
    assert "a table" in written.with_suffix(".txt").read_text()
