"""The training step of 1B and 8B Llamas on one GPU, in bf16 and fp8, whole and by adapters: a table of train_step.py's
figures.

    python benchmarks/gpu_figures.py [--only NAME ...] [--runs 2] [--steps 5] [--json FILE] [--on-cpu]

Each case is a recipe of benchmarks/recipes. Beside what it takes stands what `plan` predicts, compiled for that GPU
without it, on the CPU while the GPU works. MFU counts causal attention at half, and whole. Bytes a parameter are those
of what rests; where, and what is computed again, is in the table, and all settings are in the JSON. What the GPU has no
memory for is named. --on-cpu runs a tiny model in their place, whose figures mean nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxopt_llm import errors
from jaxopt_llm.parallel.topology import CHIPS

CASES = tuple(
    f"llama_{name}" for name in ("1b", "1b_fp8", "1b_lora", "8b", "8b_two_rows", "8b_fp8", "8b_lora", "8b_80gb")
)
HERE = Path(__file__).parent
GIB = 2**30


def recipe(case: str, on_cpu: bool) -> Path:
    return HERE / "recipes" / f"{'tiny' if on_cpu else case}.py"


def start_plan(path: Path, gpu: str, gpus: int = 1) -> subprocess.Popen[str]:
    command = ["-m", "jaxopt_llm.plan", "--config", str(path), "--gpu", gpu, "--hosts", "1"]
    command += ["--gpus-per-host", str(gpus)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    return subprocess.Popen(
        [sys.executable, *command, "--json"],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def predicted(plan: subprocess.Popen[str]) -> dict[str, Any]:
    """What of a plan is compared; or why there is none."""
    said, complaints = plan.communicate()
    if plan.returncode:
        return {"unavailable": (complaints.strip().splitlines() or ["no reason given"])[-1]}
    found = json.loads(said)
    names = ("parameters", "active_parameters", "host_bytes", "flops", "model_flops")
    return {"peak_bytes": found["memory"]["peak"]} | {name: found[name] for name in names}


def measure(case: str, asked: argparse.Namespace, gpu: str) -> dict[str, Any]:
    path = recipe(case, asked.on_cpu)
    plan = start_plan(path, gpu)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [str(HERE / "train_step.py"), "--config", str(path), "--runs", str(asked.runs)]
        command += ["--steps", str(asked.steps), "--json", str(file)]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
        complaint = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        report = json.loads(file.read_text()) if file.exists() else {"failed": complaint}
    return {"case": case, **report, "predicted": predicted(plan)}


HEAD = (
    f"{'':17} {'tokens/s':>9} {'step s':>7} {'MFU ½':>6} {'MFU':>6} {'peak':>6} {'run':>6} {'plan':>6} "
    f"{'cold s':>6} {'warm s':>6} {'B/param':>7}  rests; computed again"
)


def line(row: dict[str, Any]) -> str:
    name, plan = row["case"], row["predicted"]
    expected = f"{plan['peak_bytes'] / GIB:.1f}" if "peak_bytes" in plan else "-"
    if why := row.get("unavailable") or row.get("failed"):
        return f"{name:17} {'not run' if 'unavailable' in row else 'failed'} ({why}); plan {expected} GiB"

    def share(name: str) -> str:
        return f"{row[name]:.1%}" if name in row and row[name] is not None else "-"

    settings, first = row["settings"], row["first_step_seconds"]
    rests = "on the host" if settings["offload.optimizer"] else "on the GPU"
    return (
        f"{name:17} {row['tokens_per_second']:9,.0f} {row['step_seconds']:7.3f} {share('mfu'):>6} "
        f"{share('mfu_full_attention'):>6} {share('share_of_peak_flops'):>6} {row['measured_peak_bytes'] / GIB:6.1f} "
        f"{expected:>6} {first['cold']:6.1f} {first['warm'] or float('nan'):6.1f} "
        f"{row['state_bytes'] / row['parameters']:7.1f}  {settings['optimizer.state_dtype']} moments {rests}; remat "
        f"{settings['remat.policy']}"
    )


def chip_name(kind: str) -> str:
    """As `plan` calls it; an H200, where there is no GPU that it knows."""
    return next((name for name in CHIPS if name in kind.lower()), "h200")


def device_kind() -> str:
    """Asked in a process of its own, which gives the GPU back."""
    asks = "import jax; print(jax.devices()[0].device_kind)"
    return subprocess.run([sys.executable, "-c", asks], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def main() -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--runs", type=int, default=2, help="processes of each; the first is cold (default: 2)")
    parser.add_argument("--steps", type=int, default=5, help="steps timed in each (default: 5)")
    parser.add_argument("--json", type=Path, help="file to write the figures to, after each case")
    parser.add_argument("--on-cpu", action="store_true", help="try this command out, on a tiny model")
    asked = parser.parse_args()
    kind = device_kind()
    gpu = chip_name(kind)
    print(f"{kind}; peak: share of it that runs; GiB run and planned\n{HEAD}", flush=True)
    rows = []
    for case in asked.only:
        rows.append(measure(case, asked, gpu))
        print(line(rows[-1]), flush=True)
        if asked.json:
            asked.json.write_text(json.dumps({"device": kind, "planned_for": gpu, "rows": rows}, indent=2) + "\n")
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    errors.run(main)
