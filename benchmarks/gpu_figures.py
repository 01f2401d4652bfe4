"""Measure the training step of 1B and 8B Llamas on one GPU: bf16 and fp8, all parameters and adapters.

    python benchmarks/gpu_figures.py [--only NAME ...] [--runs 2] [--steps 5] [--json FILE] [--on-cpu]
                                     [--profile FOLDER]

Each case is a recipe in benchmarks/recipes, measured by train_step.py. The table also shows the memory that `plan`
predicts; it compiles for the GPU on the CPU while the GPU works. MFU is given twice: causal attention at half, and
whole. Bytes per parameter count the training state; the table names where the state is stored and what is recomputed,
and the JSON has all settings. Bars for the measured cases come last. --on-cpu runs a tiny model instead, whose figures
mean nothing.

Exit codes: 0; 1 if a case failed; 6 if a case does not fit into the memory of the GPU. The case is named.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from outcomes import NOT_MEASURED, Verdict, cause

from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.core import errors
from jaxopt_llm.core.errors import DoesNotFit
from jaxopt_llm.core.files import replace_durably

CASES = tuple(
    f"llama_{name}"
    for name in (
        *("1b", "1b_fp8", "1b_lora", "1b_offload", "1b_offload_streams"),
        *("8b", "8b_two_rows", "8b_fp8", "8b_lora", "8b_80gb"),
    )
)
MFU_BARS = {"llama_1b": 0.48, "llama_8b": 0.52, "llama_8b_two_rows": 0.52}  # on an H200; causal attention counts half
FP8_BAR = 1.3  # tokens/s divided by those of bf16
HERE = Path(__file__).parent
GIB = 2**30
WHOLE = {"JAX_TRACEBACK_FILTERING": "off"}  # otherwise JAX adds notes on filtered frames behind an error


def recipe(case: str, on_cpu: bool) -> Path:
    return HERE / "recipes" / f"{'tiny' if on_cpu else case}.py"


def start_plan(path: Path, gpu: str, gpus: int = 1) -> subprocess.Popen[str]:
    command = ["-m", "jaxopt_llm.plan", "--config", str(path), "--gpu", gpu, "--hosts", "1"]
    command += ["--gpus-per-host", str(gpus)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", **WHOLE}
    return subprocess.Popen(
        [sys.executable, *command, "--json"],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def predicted(plan: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the figures of a plan that are compared, or why there are none."""
    said, complaints = plan.communicate()
    if plan.returncode not in (0, DoesNotFit.exit_code):
        return {"unavailable": cause(complaints)}
    found = json.loads(said)
    names = ("parameters", "active_parameters", "host_bytes", "flops", "model_flops")
    return {"peak_bytes": found["memory"]["peak"]} | {name: found[name] for name in names}


def measure(case: str, asked: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Measure a case. If interrupted, as by gpu_check, the row has the finished runs and "interrupted"."""
    with tempfile.TemporaryDirectory() as folder:
        path = recipe(case, asked.on_cpu)
        plan = start_plan(path, chip_name(kind))
        file = Path(folder) / "report.json"
        command = [str(HERE / "train_step.py"), "--config", str(path), "--runs", str(asked.runs)]
        command += ["--steps", str(asked.steps), "--json", str(file)]
        command += ["--profile", str(asked.profile / case)] if asked.profile else []
        row: dict[str, Any] = {"case": case}
        try:
            environment = {**os.environ, **WHOLE}
            done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
            sys.stderr.write(done.stderr)
            if done.returncode:
                row |= {"failed": cause(done.stderr), "complaints": done.stderr.splitlines()[-40:]}
        except KeyboardInterrupt:
            row["interrupted"] = True
        if file.exists():
            row |= json.loads(file.read_text())
        return row | {"predicted": predicted(plan)}


def bars(rows: Mapping[str, dict[str, Any]]) -> Iterator[Verdict]:
    """Yield the bars of the measured rows, given by case; none for a device with unknown peak FLOP/s."""
    rows = {case: row for case, row in rows.items() if row.get("mfu") is not None}
    for case, bar in MFU_BARS.items():
        if case in rows:
            yield Verdict(f"{case}: MFU at least {bar:.0%}", rows[case]["mfu"] >= bar, f"{rows[case]['mfu']:.1%}")
    for case in rows:
        if (fp8 := f"{case}_fp8") in rows:
            ratio = rows[fp8]["tokens_per_second"] / rows[case]["tokens_per_second"]
            yield Verdict(f"{fp8}: at least {FP8_BAR} × the tokens/s of bf16", ratio >= FP8_BAR, f"{ratio:.2f} ×")


HEAD = (
    f"{'':17} {'tokens/s':>9} {'step s':>7} {'MFU ½':>6} {'MFU':>6} {'peak':>6} {'run':>6} {'plan':>6} "
    f"{'cold s':>6} {'warm s':>6} {'B/param':>7}  rests; computed again"
)


def problem(row: dict[str, Any]) -> str | None:
    """Return why a row lacks figures, or None."""
    stopped = "interrupted before its first run finished" if "step_seconds" not in row else None
    return row.get("unavailable") or row.get("failed") or stopped


def line(row: dict[str, Any]) -> str:
    name, plan = row["case"], row["predicted"]
    expected = f"{plan['peak_bytes'] / GIB:.1f}" if "peak_bytes" in plan else "-"
    if why := problem(row):
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
        f"{settings['remat.policy']}; attention {row['attention']}"
    )


def chip_name(kind: str) -> str:
    """Return the chip to plan for by its name in `plan`: h100 for an H100 PCIe, for example; h200 without a GPU."""
    return next((name for name in CHIPS if name in kind.lower()), "h200")


def device_kind() -> str:
    """Return the kind of the first device. A separate process asks JAX, so that the GPU is released."""
    asks = "import jax; print(jax.devices()[0].device_kind)"
    return subprocess.run([sys.executable, "-c", asks], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def main() -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--runs", type=int, default=2, help="processes per case; the first is cold (default: 2)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per process (default: 5)")
    parser.add_argument("--json", type=Path, help="file for the figures, written after each case")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="folder for a trace of two steps of each case")
    parser.add_argument("--on-cpu", action="store_true", help="try this command out on a tiny model")
    asked = parser.parse_args()
    kind = device_kind()
    print(f"{kind}; peak: share of it that runs; GiB run and planned\n{HEAD}", flush=True)
    report: dict[str, Any] = {"device": kind, "planned_for": chip_name(kind), "rows": []}
    rows = report["rows"]
    for case in asked.only:
        rows.append(measure(case, asked, kind))
        print(line(rows[-1]), flush=True)
        if asked.json:
            replace_durably(asked.json, json.dumps(report, indent=2) + "\n")
        if "interrupted" in rows[-1]:
            raise KeyboardInterrupt
    print("\n".join(verdict.line() for verdict in bars({row["case"]: row for row in rows})))
    if any("failed" in row for row in rows):
        return 1
    return NOT_MEASURED if any("unavailable" in row for row in rows) else 0


if __name__ == "__main__":
    errors.run_command(main)
