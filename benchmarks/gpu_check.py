"""What needs a GPU, in one command of under 8 minutes.

    scripts/gpu_check [--output FOLDER] [--only PART] [--on-cpu]

Every part is a process of its own with a limit on its time. A part that fails is recorded with its error and does not
stop the others; one whose packages are missing is skipped by name. Writes FOLDER/<gpu>-<date>.json with everything and
.txt with what was printed, and what attention took into the table by which it is chosen, to be committed
(jaxopt_llm/kernels/attention_measured.json). Exit code: 0, or 1 where a part failed, or 2 where no GPU is visible.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import re
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
from xml.etree import ElementTree

from jaxopt_llm import errors
from jaxopt_llm.errors import InputError

ROOT = Path(__file__).parent.parent
SECONDS = 465  # for all of it: a part gets what those before it have left, at most its own limit
GIB = 2**30

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
    arguments: list[str]  # of Python; the path of the report that it writes comes behind them
    report: Callable[[Path], dict[str, Any]]  # reads that file
    summary: Callable[[dict[str, Any]], str]  # says it in a line
    seconds: int  # limit
    needs: tuple[str, ...] = ()  # packages that the rest does without
    gigabytes: tuple[int, int] = (0, 1000)  # at least, and below: of memory that XLA may use, on a GPU


def parts(on_cpu: bool) -> list[Part]:
    """What would be missed most comes first: a call may be the only one, and end early."""

    def recipe(name: str, tiny: str = "tiny") -> str:
        return f"benchmarks/recipes/{tiny if on_cpu else name}.py"

    def figures(case: str, seconds: int, runs: int = 1, gigabytes: tuple[int, int] = (0, 1000)) -> Part:
        cases = ["--only", f"llama_{case}", "--runs", str(runs), *(["--on-cpu"] if on_cpu else [])]
        arguments = ["benchmarks/gpu_figures.py", *cases, "--json"]
        return Part(case.replace("_", "-"), arguments, read_figures, describe_figures, seconds, gigabytes=gigabytes)

    small = ["benchmarks/train_step.py", "--config", recipe("llama_small"), "--runs"]
    filled = ["benchmarks/fill_gpu.py", "--config", recipe("llama_1b"), *(["--gigabytes", "0.004"] if on_cpu else [])]
    # Only the files that have such tests: what others import may be missing here.
    having = (path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text())
    tests = sorted(str(path.relative_to(ROOT)) for path in having)
    table = [] if on_cpu else ["--lengths", "8192", "--write-table"]
    attention = ["benchmarks/attention.py", "--runs", "3", *table, "--json"]
    even = [] if on_cpu else ["--loads", "even"]
    grouped = ["benchmarks/grouped_matmul.py", "--runs", "3", "--only", "pallas", "dense", *even, "--json"]
    experts = ["benchmarks/experts.py", "--config", recipe("experts_1b", "tiny_experts"), "--runs", "1", "--json"]
    # On a CPU attention's kernels are interpreted, for minutes: the others show that the part works.
    few = ["--gpu-tests-on-cpu", "-k", "grouped or cross_entropy"] if on_cpu else []
    pytest = ["-m", "pytest", "-q", "-m", "gpu", *few]
    hot_path = ["benchmarks/hot_path.py", "--json"]
    peer = [*small, "1", "--peer", "hf-torch", "--json"]
    return [
        figures("8b", seconds=150, gigabytes=(115, 1000)),
        figures("8b_80gb", seconds=150, gigabytes=(70, 115)),
        Part("attention", attention, read_json, describe_attention, seconds=120),
        Part("grouped-matmul", grouped, read_json, describe_grouped, seconds=90, gigabytes=(45, 1000)),
        Part("tests", [*pytest, *tests, "--junit-xml"], read_junit, describe_tests, seconds=150),
        figures("1b", seconds=110, runs=2),
        Part("experts", experts, read_json, describe_experts, seconds=180, gigabytes=(76, 1000)),
        Part("hot-path", hot_path, read_json, describe_hot_path, seconds=40),
        figures("8b_fp8", seconds=150, gigabytes=(115, 1000)),
        figures("1b_fp8", seconds=110),
        figures("8b_lora", seconds=110, gigabytes=(45, 1000)),
        figures("8b_two_rows", seconds=130, gigabytes=(130, 1000)),
        figures("1b_lora", seconds=80),
        Part("train-step", [*small, "2", "--json"], read_step, describe_step, seconds=100),
        Part("filled", [*filled, "--json"], read_step, describe_filled, seconds=180),
        Part("peer", peer, read_step, describe_peer, seconds=180, needs=("torch", "transformers")),
    ]


def read_step(path: Path) -> dict[str, Any]:
    """What train_step.py says, without its command, which names a temporary file."""
    report = json.loads(path.read_text())
    return {name: value for name, value in report.items() if name != "command"}


def read_figures(path: Path) -> dict[str, Any]:
    """The one case's."""
    (row,) = json.loads(path.read_text())["rows"]
    return {name: value for name, value in row.items() if name != "command"}


def read_json(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def read_junit(path: Path) -> dict[str, Any]:
    """Seconds of the tests that passed, and the messages of the others, by name."""
    report: dict[str, dict[str, Any]] = {"passed": {}, "failed": {}, "skipped": {}}
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if outcome is None:
            report["passed"][name] = float(case.get("time", 0))
        else:
            report["skipped" if outcome.tag == "skipped" else "failed"][name] = outcome.get("message")
    return report


def describe_tests(report: dict[str, Any]) -> str:
    return ", ".join(f"{len(tests)} {outcome}" for outcome, tests in report.items() if tests)


def describe_attention(report: dict[str, Any]) -> str:
    said = []
    for row in report["rows"]:
        name = f"{row['name']} at head_dim {row['head_dim']}"
        figures = "unavailable" if "unavailable" in row else f"{row['forward_tflops']:.0f}/{row['backward_tflops']:.0f}"
        said.append(f"{name} {figures}")
    return "TFLOP/s forward/backward: " + ", ".join(said)


def describe_grouped(report: dict[str, Any]) -> str:
    said = []
    for row in report["rows"]:
        figures = "unavailable" if "unavailable" in row else f"{row['tflops']['all']:.0f}"
        said.append(f"{row['name']} of {row['groups']} groups {figures}")
    return "TFLOP/s of three legs: " + ", ".join(said)


def describe_experts(report: dict[str, Any]) -> str:
    rates = [
        f"{name} {row['measured'].get('unavailable') or format(row['measured']['tokens_per_second'], ',.0f')}"
        for name, row in report["rows"].items()
    ]
    verdicts = [f"{'PASS' if bar['holds'] else 'FAIL'} {bar['said']}: {bar['found']}" for bar in report["bars"]]
    return "; ".join([*verdicts, "tokens/s: " + ", ".join(rates)])


def describe_hot_path(report: dict[str, Any]) -> str:
    rates = (f"{row['name']} {row['bytes_per_second'] / 1e9:.0f}" for row in report["rows"])
    return "GB/s of the least bytes: " + ", ".join(rates)


def describe_figures(report: dict[str, Any]) -> str:
    planned = report["predicted"].get("peak_bytes")
    predicted = "nothing" if planned is None else f"{planned / GIB:.2f} GiB"
    if why := report.get("unavailable") or report.get("failed"):
        return f"{why}; predicted without the GPU {predicted}"
    first = report["first_step_seconds"]
    return (
        (f"MFU {report['mfu']:.1%}, attention whole {report['mfu_full_attention']:.1%}; " if "mfu" in report else "")
        + f"{describe_step(report)}; predicted without the GPU {predicted}; first step after {first['cold']:.0f} s"
        + ("" if first["warm"] is None else f", warm {first['warm']:.0f}")
    )


def describe_step(report: dict[str, Any]) -> str:
    planned, measured = report["planned_peak_bytes"], report["measured_peak_bytes"]
    share = report["share_of_peak_flops"]
    return (
        f"{report['step_seconds']:.3f} s, {report['tokens_per_second']:,.0f} tokens/s"
        + ("" if share is None else f", {share:.0%} of peak")
        + f"; peak {measured / GIB:.2f} GiB, {measured / planned:.2f} × the planned {planned / GIB:.2f}; "
        f"compiled in {report['compile_seconds']:.0f} s"
    )


def describe_filled(report: dict[str, Any]) -> str:
    planned, limit = report["planned_peak_bytes"], report["limit_bytes"]
    return f"{report['layers']} layers, planned for {planned / limit:.0%} of the memory: {describe_step(report)}"


def describe_peer(report: dict[str, Any]) -> str:
    said = [f"ours {report['tokens_per_second']:,.0f} tokens/s"]
    for mode, peer in report["peer"].items():
        why = peer.get("unavailable")
        said.append(f"{mode} {why or format(peer['tokens_per_second'], ',.0f')}")
    return "; torch ".join(said)


def run(part: Part, environment: dict[str, str], seconds: float, limit_bytes: int | None) -> dict[str, Any]:
    """One part's status, the seconds that it took of those given, its report, its output and its error.

    limit_bytes: of the GPU's memory, that XLA may use; None where there is no GPU.
    """
    missing = [name for name in part.needs if version(name) is None]
    if missing:
        return {"status": "skipped", "seconds": 0.0, "error": f"not installed: {', '.join(missing)}"}
    least, below = part.gigabytes
    if limit_bytes is not None and not least <= limit_bytes / 1e9 < below:
        has = f"this GPU gives {limit_bytes / 1e9:.0f} GB"
        return {"status": "skipped", "seconds": 0.0, "error": f"for {least} to {below} GB of memory, {has}"}
    if seconds < part.seconds / 2:
        return {"status": "skipped", "seconds": 0.0, "error": f"{seconds:.0f} s are left; --only {part.name} runs it"}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        output, error = execute([*part.arguments, str(report)], environment, min(part.seconds, seconds))
        return {
            "status": "failed" if error else "passed",
            "seconds": time.monotonic() - started,
            "arguments": part.arguments,
            "error": error,
            "report": part.report(report) if report.exists() else None,
            "output": output,
        }


def execute(arguments: list[str], environment: dict[str, str], seconds: float) -> tuple[str, str | None]:
    """Runs Python in the repository: its standard output, and what went wrong with the end of its complaints."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # to be killed with what it starts itself, which would keep the GPU
    )
    try:
        output, complaints = process.communicate(timeout=seconds)
        error = f"exit code {process.returncode}" if process.returncode else None
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, complaints = process.communicate()
        error = f"stopped after {seconds:.0f} s"
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return output, error and f"{error}\n{complaints[-4000:]}".strip()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def packages() -> dict[str, str | None]:
    """The version of each package that jaxopt_llm depends on, None where it is missing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[^A-Za-z0-9_.-]", each)[0] for each in project["dependencies"]]
    return {name: version(name) for name in [*names, "pytest", "torch", "transformers"]}


def look(environment: dict[str, str], platform: str) -> dict[str, Any]:
    """The device that JAX uses. Raises InputError where it finds none of the platform."""
    output, error = execute(["-c", LOOK], {**environment, "JAX_PLATFORMS": platform}, seconds=60)
    if error:
        raise InputError(
            f"no device to run on in {sys.executable} ({error.splitlines()[-1]}); this command wants an NVIDIA GPU and "
            "JAX with CUDA; --on-cpu tries it out without"
        )
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def headline(results: dict[str, Any]) -> str:
    machine, missing = results["machine"], [name for name, found in results["packages"].items() if found is None]
    lines = [
        f"{machine['device']}, jax {machine['jax']}, Python {results['python']}, {results['date']}",
        f"missing: {', '.join(missing)} (pip install {' '.join(missing)})" if missing else "no package is missing",
    ]
    if machine["platform"] == "cpu":
        lines.append("on the CPU, with a tiny model: no figure means anything")
    return "\n".join(lines)


def line(part: Part, result: dict[str, Any]) -> str:
    said = [part.summary(result["report"])] if result.get("report") else []
    if result["error"]:
        said += [result["error"].splitlines()[0], result["error"].splitlines()[-1]]
    return f"{part.name:14} {result['status']:8} {result['seconds']:6.1f} s  {'; '.join(dict.fromkeys(said))}"


def main() -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    parser.add_argument("--only", choices=[part.name for part in parts(on_cpu=False)], help="one part alone")
    parser.add_argument("--on-cpu", action="store_true", help="try this command out without a GPU, on a tiny model")
    asked = parser.parse_args()
    if not asked.output.is_dir():
        raise InputError(f"--output {asked.output}: no such folder")

    if version("jax") is None:
        raise InputError(f"{sys.executable} has no jax: install jaxopt_llm for it, or name another by PYTHON")
    from jaxopt_llm.parallel.runtime import MEMORY_FRACTION  # which imports jax

    platforms = ("cpu",) if asked.on_cpu else ("cuda", "cpu")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": ",".join(platforms),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the GPU may have other users
    }
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in environment:  # JAX takes one of the two
        environment.setdefault("XLA_CLIENT_MEM_FRACTION", MEMORY_FRACTION)
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
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
        if asked.only not in (None, part.name):
            continue
        limit = results["machine"].get("memory_limit_bytes")
        result = run(part, environment, SECONDS - (time.monotonic() - started), limit)
        results["parts"][part.name] = result
        said.append(line(part, result))
        print(said[-1], flush=True)
        # After each part: what is known stays known if the machine goes away.
        results["seconds"] = time.monotonic() - started
        file.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")
        outputs = [f"\n---- {name}\n{each.get('output', '')}" for name, each in results["parts"].items()]
        file.with_suffix(".txt").write_text("\n".join([*said, *outputs]))
    print(f"{results['seconds']:.0f} s; {file}.json and .txt")
    return int(any(result["status"] == "failed" for result in results["parts"].values()))


if __name__ == "__main__":
    errors.run(main)
