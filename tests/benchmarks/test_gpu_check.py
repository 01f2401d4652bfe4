"""scripts/gpu_check without a GPU: what it says, records and ends with."""

import datetime
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_check
import outcomes
import pytest
from commands import ROOT
from gpu_check import Part

from jaxopt_llm.distributed import runtime
from jaxopt_llm.kernels import attention_auto


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


@pytest.mark.slow
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
    def part(name: str, program: str, seconds: int = 200, needs: tuple[str, ...] = ()) -> Part:
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
    results = json.loads(written.read_text())
    assert results["failed"] == ["broken", "slow"] and results["not_measured"] == ["lacking"]
    found: dict[str, Any] = results["parts"]
    assert {name: each["status"] for name, each in found.items()} == {
        "broken": "failed",
        "slow": "failed",
        "lacking": "skipped",
        "fine": "passed",
    }
    assert found["broken"]["error"].startswith("exit code 1; a reason\n")
    assert "stopped after 1 s" in found["slow"]["error"]
    assert "no-such-package" in found["lacking"]["error"]
    assert "a table" in written.with_suffix(".txt").read_text()


def part(name: str, program: str, seconds: int = 200, gigabytes: tuple[int, int] = (0, 1000)) -> Part:
    """Which writes its report to report()."""
    whole = f"import json, sys, time\ndef report(said): open(sys.argv[1], 'w').write(json.dumps(said))\n{program}"
    return Part(name, ["-c", whole], lambda path: json.loads(path.read_text()), str, seconds, gigabytes=gigabytes)


@pytest.fixture
def on_h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, Any]]]:
    """(part, ...) -> the exit code and the newest results."""
    machine = {"platform": "gpu", "device": "NVIDIA H200", "jax": "0", "memory_limit_bytes": 140e9}
    monkeypatch.setattr(gpu_check, "look", lambda *arguments: machine)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--output", str(tmp_path)])

    seconds = map(functools.partial(datetime.datetime, 2026, 1, 1, 12, 0), itertools.count())
    monkeypatch.setattr(gpu_check, "datetime", SimpleNamespace(datetime=SimpleNamespace(now=seconds.__next__)))

    def run(*parts: Part) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(gpu_check, "parts", lambda on_cpu: parts)
        known = {*tmp_path.glob("*.json")}
        code = gpu_check.main()
        (written,) = {each for each in tmp_path.glob("nvidia-h200-*.json") if "attention" not in each.name} - known
        return code, json.loads(written.read_text())

    return run


def test_only_the_named_parts_run_in_the_given_time(
    on_h200: Callable[..., tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [part("first", "report({})", 2), part("second", "report({})"), part("long", "", seconds=10_000)]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--only", "first", "long", "--seconds", "600"])
    code, results = on_h200(*parts)
    assert code == 6 and results["not_measured"] == ["long"]
    assert {name: each["status"] for name, each in results["parts"].items()} == {"first": "passed", "long": "skipped"}
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "0"])
    assert on_h200(*parts)[1]["not_measured"] == ["first", "long"]


def test_a_part_that_is_stopped_says_what_it_knows(
    on_h200: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some when they are interrupted, as pytest does; others are killed, and what they had said and written is left."""
    heard: dict[int, list[float | None]] = {}

    class Ready(subprocess.Popen[str]):
        """Whose time is up as soon as it is ready for that; who is deaf has no more of it."""

        def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
            waits = heard.setdefault(self.pid, [])
            waits.append(timeout)
            if timeout == 1:
                ready = tmp_path / f"ready-{len(heard)}"
                deadline = time.monotonic() + 120
                while not ready.exists():
                    assert self.poll() is None and time.monotonic() < deadline, f"part {len(heard)} is not ready"
                    time.sleep(0.002)
                raise subprocess.TimeoutExpired(self.args, timeout)
            if timeout is not None and len(heard) == 2:
                raise subprocess.TimeoutExpired(self.args, timeout)
            return super().communicate(input, 120)

    monkeypatch.setattr(gpu_check.subprocess, "Popen", Ready)
    monkeypatch.setattr(gpu_check, "GRACE", 2)

    def ready(number: int) -> str:
        return f"open({str(tmp_path / f'ready-{number}')!r}, 'w').close()"

    interrupted = f"try: {ready(1)}; time.sleep(600)\nexcept KeyboardInterrupt: report({{'found': 1}})"
    deaf = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); report({'found': 2}); print('some', flush=True)"
    )
    code, results = on_h200(part("hears", interrupted, 1), part("deaf", f"{deaf}\n{ready(2)}; time.sleep(600)", 1))
    hears, deaf = results["parts"]["hears"], results["parts"]["deaf"]
    assert code == 1 and hears["status"] == deaf["status"] == "failed"
    assert hears["report"] == {"found": 1} and deaf["report"] == {"found": 2}
    assert deaf["output"] == "some\n" and "stopped after 1 s" in deaf["error"]
    assert [*heard.values()] == [[1, 2, None]] * 2


def test_what_was_not_measured_is_named_and_ends_with_a_code_of_its_own(
    on_h200: Callable[..., tuple[int, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    fine, elsewhere = part("fine", "report({})"), part("8b-80gb", "", gigabytes=(70, 115))
    code, results = on_h200(fine, elsewhere)
    assert code == 0 and results["parts"]["8b-80gb"]["status"] == "not here"

    rows = "report({'rows': [{'name': 'triton', 'head_dim': 128, 'unavailable': 'why'}, {'name': 'xla'}]})"
    figure = "report({'case': 'llama_8b', 'unavailable': 'needs 200 GiB'}); sys.exit(6)"
    code, results = on_h200(part("rows", rows), part("8b", figure), part("late", "", seconds=10_000))
    assert code == 6
    assert {name: each["status"] for name, each in results["parts"].items()} == {
        "rows": "partly",
        "8b": "partly",
        "late": "skipped",
    }
    assert results["not_measured"] == ["late", "rows triton at head_dim 128", "8b"]
    assert "not measured: late, rows triton at head_dim 128, 8b" in capsys.readouterr().out


def test_no_run_writes_over_anothers_results(
    on_h200: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    """And attention's table comes with them."""
    assert on_h200(part("attention", "report({})"))[0] == on_h200(part("fine", "report({})"))[0] == 0
    tables = [*tmp_path.glob("*-attention_measured.json")]
    assert len([*tmp_path.glob("*.txt")]) == 2 and len(tables) == 1
    assert tables[0].read_text() == attention_auto.TABLE.read_text()


def test_steps_run_in_the_memory_that_train_takes(
    on_h200: Callable[..., tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its share at once, as JAX does unless told otherwise."""
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    _, results = on_h200(part("environment", "import os; report(dict(os.environ))"))
    environment = results["parts"]["environment"]["report"]
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in environment
    assert environment["XLA_CLIENT_MEM_FRACTION"] == runtime.MEMORY_FRACTION


def test_packages_that_are_missing_are_named_with_what_they_measure() -> None:
    machine = {"platform": "gpu", "device": "NVIDIA H200", "jax": "0"}
    packages = dict.fromkeys(["numpy", *gpu_check.OPTIONAL]) | {"triton": "3"}
    said = gpu_check.headline({"machine": machine, "python": "3", "date": "", "packages": packages})
    assert "missing: numpy (pip install numpy)" in said
    assert "without tokamax: tokamax's attention" in said and "without jax-triton: our triton attention" in said
    assert "without triton" not in said
    assert gpu_check.packages().keys() >= gpu_check.OPTIONAL.keys()


def test_the_cause_is_the_last_exception_whatever_follows() -> None:
    complaints = (
        "Traceback (most recent call last):\n  File ...\njax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: of memory\n"
        "  buffer 1\n--------------------\nFor simplicity, JAX has removed its internal frames from the traceback."
    )
    assert outcomes.cause(complaints) == "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: of memory"
    assert outcomes.cause("a warning\nerror: model.width=3") == "error: model.width=3"
    assert outcomes.cause("killed\n") == "killed" and outcomes.cause("") == "no reason given"


def test_attention_says_why_something_is_unavailable() -> None:
    row = {"name": "triton", "head_dim": 128, "documents": 6, "unavailable": "ModuleNotFoundError: jax_triton"}
    said = gpu_check.describe_attention({"rows": [row]})
    assert "triton at head_dim 128, 6 documents ModuleNotFoundError: jax_triton" in said
