"""Run all measurements and tests that need a GPU, with one command in under 8 minutes.

    scripts/gpu_check [--output FOLDER] [--only PART ...] [--seconds 465] [--on-cpu]

Every part runs in its own process with a time limit. A part that fails is recorded with its error and does not stop the
others; a part whose packages are missing is skipped and named. Attention comes first, because the training steps use
the fastest measured implementation. The command writes all results to FOLDER/<gpu>-<date>-<time>.json and the printed
text to .txt. It also writes the seconds of attention into the table that chooses the implementation,
jaxopt_llm/kernels/attention_measured.json, which is to be committed; a copy is left in FOLDER.

Exit codes: 0 if everything was measured that fits into the memory of this GPU; 1 if a part failed; 2 if no GPU is
visible or an argument is wrong; 6 if nothing failed but something was not measured, for example for lack of time or
packages. It is named.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_reports import (
    describe_attention,
    describe_experts,
    describe_figures,
    describe_filled,
    describe_grouped,
    describe_hot_path,
    describe_peer,
    describe_step,
    describe_tests,
    read_figures,
    read_json,
    read_junit,
    read_step,
    unavailable,
)
from outcomes import NOT_MEASURED, cause

from jaxopt_llm.core import errors
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.files import replace_durably

ROOT = Path(__file__).parent.parent
SECONDS = 465  # default of --seconds; the first look at the device and the reports take the rest of 8 minutes
GRACE = 5  # seconds that an interrupted part has to report what it has measured
# package that only some parts need: what is not measured without it
OPTIONAL = {
    "jax-triton": "our triton attention",
    "triton": "our triton attention",
    "tokamax": "tokamax's attention beside ours",
    "torch": "the step in torch beside ours",
    "transformers": "the step in torch beside ours",
}

LOOK = """
import json, jax
device = jax.devices()[0]
print(json.dumps({
    "platform": device.platform, "device": device.device_kind, "devices": len(jax.devices()), "jax": jax.__version__,
    "runtime": device.client.platform_version, "memory_limit_bytes": (device.memory_stats() or {}).get("bytes_limit"),
}))
"""


@dataclass(frozen=True)
class Part:
    name: str
    arguments: list[str]  # arguments of Python; the path of the report file is appended
    report: Callable[[Path], dict[str, Any]]  # reads the report file
    summary: Callable[[dict[str, Any]], str]  # describes the report in one line
    seconds: int  # time limit
    needs: tuple[str, ...] = ()  # packages that only this part needs
    gigabytes: tuple[int, int] = (0, 1000)  # memory that XLA may use on a GPU: at least, and below


def parts(on_cpu: bool) -> list[Part]:
    """Return the parts, the most important first: this may be the only call on a GPU, and it may end early.

    Attention comes before the training steps, which use the implementation that it measured as the fastest.
    """

    def recipe(name: str, tiny: str = "tiny") -> str:
        return f"benchmarks/recipes/{tiny if on_cpu else name}.py"

    def figures(case: str, seconds: int, runs: int = 1, gigabytes: tuple[int, int] = (0, 1000)) -> Part:
        cases = ["--only", f"llama_{case}", "--runs", str(runs), *(["--on-cpu"] if on_cpu else [])]
        arguments = ["benchmarks/gpu_figures.py", *cases, "--json"]
        return Part(case.replace("_", "-"), arguments, read_figures, describe_figures, seconds, gigabytes=gigabytes)

    small = ["benchmarks/train_step.py", "--config", recipe("llama_small"), "--runs"]
    filled = ["benchmarks/fill_gpu.py", "--config", recipe("llama_1b"), *(["--gigabytes", "0.004"] if on_cpu else [])]
    # Only files with GPU tests: packages that other files import may be missing here.
    having = (path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text())
    tests = sorted(str(path.relative_to(ROOT)) for path in having)
    table = [] if on_cpu else ["--lengths", "8192", "--write-table"]
    attention = ["benchmarks/attention.py", "--runs", "3", *table, "--json"]
    even = [] if on_cpu else ["--loads", "even", "--write-table"]
    grouped = ["benchmarks/grouped_matmul.py", "--runs", "3", "--only", "pallas", "dense", *even, "--json"]
    experts = ["benchmarks/experts.py", "--config", recipe("experts_1b", "tiny_experts"), "--runs", "1", "--json"]
    # On a CPU the attention kernels are interpreted, which takes minutes; the other tests show that the part works.
    few = ["--gpu-tests-on-cpu", "-k", "grouped or cross_entropy"] if on_cpu else []
    # Compiling takes most of the time, so several processes share the GPU. -v prints each test as it passes.
    workers = ["-n", "12"] if version("pytest-xdist") else []
    pytest = ["-m", "pytest", "-v", "-m", "gpu", *workers, *few]
    hot_path = ["benchmarks/hot_path.py", "--json"]
    peer = [*small, "1", "--peer", "hf-torch", "--json"]
    return [
        Part("attention", attention, read_json, describe_attention, seconds=120),
        figures("8b", seconds=180, runs=2, gigabytes=(115, 1000)),
        figures("8b_80gb", seconds=180, runs=2, gigabytes=(70, 115)),
        Part("grouped-matmul", grouped, read_json, describe_grouped, seconds=90, gigabytes=(45, 1000)),
        Part("tests", [*pytest, *tests, "--junit-xml"], read_junit, describe_tests, seconds=150),
        figures("1b", seconds=110, runs=2),
        Part("experts", experts, read_json, describe_experts, seconds=180, gigabytes=(76, 1000)),
        Part("hot-path", hot_path, read_json, describe_hot_path, seconds=40),
        figures("8b_fp8", seconds=150, gigabytes=(115, 1000)),
        figures("1b_fp8", seconds=110),
        figures("8b_lora", seconds=110, gigabytes=(45, 1000)),
        figures("8b_two_rows", seconds=130, gigabytes=(130, 1000)),
        figures("1b_offload", seconds=80),
        figures("1b_offload_streams", seconds=80),
        figures("1b_lora", seconds=80),
        Part("train-step", [*small, "2", "--json"], read_step, describe_step, seconds=100),
        Part("filled", [*filled, "--json"], read_step, describe_filled, seconds=180),
        Part("peer", peer, read_step, describe_peer, seconds=180, needs=("torch", "transformers")),
    ]


def run(part: Part, environment: dict[str, str], seconds: float, limit_bytes: int | None) -> dict[str, Any]:
    """Run a part for at most these seconds. Return its status, the seconds it took, its report, output and error.

    limit_bytes: GPU memory that XLA may use; None without a GPU.
    """
    missing = [name for name in part.needs if version(name) is None]
    if missing:
        return {"status": "skipped", "seconds": 0.0, "error": f"not installed: {', '.join(missing)}"}
    least, below = part.gigabytes
    if limit_bytes is not None and not least <= limit_bytes / 1e9 < below:
        has = f"this GPU has {limit_bytes / 1e9:.0f} GB"
        return {"status": "not here", "seconds": 0.0, "error": f"needs {least} to {below} GB of memory, {has}"}
    if seconds < part.seconds / 2:
        return {"status": "skipped", "seconds": 0.0, "error": f"{seconds:.0f} s left; run it with --only {part.name}"}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        output, error = execute([*part.arguments, str(report)], environment, min(part.seconds, seconds))
        found = part.report(report) if report.exists() else None
        return {
            "status": "failed" if error else "partly" if any(unavailable(found, part.name)) else "passed",
            "seconds": time.monotonic() - started,
            "arguments": part.arguments,
            "error": error,
            "report": found,
            "output": output,
        }


def not_measured(parts: dict[str, Any]) -> list[str]:
    """Return the names of what was skipped or reported as unavailable."""
    skipped = [name for name, result in parts.items() if result["status"] == "skipped"]
    return [*skipped, *(each for name, result in parts.items() for each in unavailable(result.get("report"), name))]


def execute(arguments: list[str], environment: dict[str, str], seconds: float) -> tuple[str, str | None]:
    """Run Python in the repository. Return its standard output and its error, or None.

    The error has the cause in its first line, followed by the end of standard error.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that its own children, which would keep the GPU, can be killed, too
    )
    try:
        output, complaints = process.communicate(timeout=seconds)
        through = process.returncode in (0, NOT_MEASURED)
        error = None if through else f"exit code {process.returncode}; {cause(complaints)}"
    except subprocess.TimeoutExpired:
        output, complaints = stop(process)
        error = f"stopped after {seconds:.0f} s"
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return output, error and f"{error}\n{complaints[-4000:]}".strip()


def stop(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Interrupt a process, so that it reports what it knows (pytest: failures); then kill it and its children."""
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def packages() -> dict[str, str | None]:
    """Return the version of each dependency and each measured package; None if it is missing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[^A-Za-z0-9_.-]", each)[0] for each in project["dependencies"]]
    return {name: version(name) for name in [*names, "pytest", *OPTIONAL]}


def look(environment: dict[str, str], platform: str) -> dict[str, Any]:
    """Return the device that JAX uses. Raises InputError if there is no device of the platform."""
    output, error = execute(["-c", LOOK], {**environment, "JAX_PLATFORMS": platform}, seconds=60)
    if error:
        raise InputError(
            f"no device to run on in {sys.executable} ({error.splitlines()[0]}); use an NVIDIA GPU and JAX with CUDA, "
            "or try the command out with --on-cpu"
        )
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def headline(results: dict[str, Any]) -> str:
    machine, packages = results["machine"], results["packages"]
    missing = [name for name, found in packages.items() if found is None and name not in OPTIONAL]
    lines = [
        f"{machine['device']}, jax {machine['jax']}, Python {results['python']}, {results['date']}",
        f"missing: {', '.join(missing)} (pip install {' '.join(missing)})" if missing else "no package is missing",
    ]
    without = {name: what for name, what in OPTIONAL.items() if packages[name] is None}
    lines += [f"without {name}: {what} is not measured" for name, what in without.items()]
    if machine["platform"] == "cpu":
        lines.append("on the CPU with a tiny model: the figures mean nothing")
    return "\n".join(lines)


def line(part: Part, result: dict[str, Any]) -> str:
    said = [part.summary(result["report"])] if result.get("report") else []
    if result["error"]:
        said.append(result["error"].splitlines()[0])
    return f"{part.name:14} {result['status']:8} {result['seconds']:6.1f} s  {'; '.join(said)}"


def main() -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    names = [part.name for part in parts(on_cpu=False)]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    parser.add_argument(
        "--seconds",
        type=int,
        default=SECONDS,
        help="time for all parts: each gets what the earlier ones have left, at most its own limit (default: 465)",
    )
    parser.add_argument("--on-cpu", action="store_true", help="try this command out without a GPU, on a tiny model")
    asked = parser.parse_args()
    if not asked.output.is_dir():
        raise InputError(f"--output {asked.output}: no such folder; create it, or name another")
    # A shell starts background processes with SIGINT ignored. The parts would inherit that; SIGINT must stop them.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    if version("jax") is None:
        raise InputError(f"{sys.executable} has no jax: install jaxopt_llm into it, or name another with PYTHON")
    from gpu_figures import bars  # imports jax, as the modules below do

    from jaxopt_llm.distributed.runtime import MEMORY_FRACTION
    from jaxopt_llm.kernels.attention_auto import TABLE

    platforms = ("cpu",) if asked.on_cpu else ("cuda", "cpu")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": ",".join(platforms),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        "JAX_TRACEBACK_FILTERING": "off",  # otherwise JAX adds notes on filtered frames behind an error
        "PYTHONUNBUFFERED": "1",  # the output of a part is kept, however it ends
    }
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in environment:  # JAX accepts only one of the two
        environment.setdefault("XLA_CLIENT_MEM_FRACTION", MEMORY_FRACTION)  # preallocated, as in `train`
    results: dict[str, Any] = {
        "date": datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S"),  # no run overwrites the results of another
        "machine": look(environment, platforms[0]),
        "python": sys.version.split()[0],
        "packages": packages(),
        "parts": {},
    }
    said = [headline(results)]
    print(said[0], flush=True)
    slug = re.sub(r"[^a-z0-9]+", "-", results["machine"]["device"].lower()).strip("-")
    file = asked.output / f"{slug}-{results['date']}"
    for part in parts(asked.on_cpu):
        if part.name not in asked.only:
            continue
        limit = results["machine"].get("memory_limit_bytes")
        result = run(part, environment, asked.seconds - (time.monotonic() - started), limit)
        results["parts"][part.name] = result
        said.append(line(part, result))
        print(said[-1], flush=True)
        # Written after each part, so that results survive if the machine goes away.
        results["seconds"] = time.monotonic() - started
        write(file, results, said)
        if part.name == "attention" and not asked.on_cpu:
            shutil.copyfile(TABLE, file.with_name(f"{file.name}-attention_measured.json"))
    ran = {name: each["report"] for name, each in results["parts"].items() if each.get("report")}
    rows = {report["case"]: report for report in ran.values() if "case" in report}
    said += [verdict.line() for verdict in bars(rows)]
    missed = not_measured(results["parts"])
    failed = [name for name, result in results["parts"].items() if result["status"] == "failed"]
    said += [f"{what}: {', '.join(names)}" for what, names in (("failed", failed), ("not measured", missed)) if names]
    print("\n".join([*said[1 + len(results["parts"]) :], f"{results['seconds']:.0f} s; {file}.json and .txt"]))
    results |= {"failed": failed, "not_measured": missed}
    write(file, results, said)
    return 1 if failed else NOT_MEASURED if missed else 0


def write(file: Path, results: dict[str, Any], said: list[str]) -> None:
    replace_durably(file.with_suffix(".json"), json.dumps(results, indent=2) + "\n")
    outputs = [f"\n---- {name}\n{each.get('output', '')}" for name, each in results["parts"].items()]
    file.with_suffix(".txt").write_text("\n".join([*said, *outputs]))


if __name__ == "__main__":
    errors.run_command(main)
