"""Measure what `precision.matmul` costs in loss and what it saves on GPUs.

    python benchmarks/quantised.py [--steps 500] [--seeds 0] [--matmuls compute_dtype fp8 int8 int8_qat int4_qat]
                                   [--plan llama2_7b.py] [--json FILE] [--section.field VALUE ...]

Loss: on held-out text after --steps steps of the quickstart in bfloat16, and the ratio to that of compute_dtype.
Overrides apply to these runs.
Savings: `--plan RECIPE` compiles the step for 8 H200s with each value and reads from the program the memory of a GPU,
its traffic over NVLink, and the time of its matmuls in seconds at the peaks of the chip. `--steps 0` trains nothing.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import jax
from held_out import compare, table

from jaxopt_llm.config import Matmul
from jaxopt_llm.core.errors import DoesNotFit

FIELD = "precision.matmul"
GIB = 2**30


def plan(recipe: str, matmul: str) -> dict[str, float]:
    """Return the figures of each GPU in a step."""
    arguments = ("--config", recipe, "--json", "--precision.matmul", matmul)
    done = subprocess.run([sys.executable, "-m", "jaxopt_llm.plan", *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode != DoesNotFit.exit_code:
        done.check_returncode()
    told = json.loads(done.stdout)
    sent = {kind: 0 for kind in ("all-gather", "reduce-scatter", "all-reduce")}
    for each in told["collectives"]:
        sent[each["kind"]] = sent.get(each["kind"], 0) + each["bytes"]
    return {
        "peak_gib": told["memory"]["peak"] / GIB,
        "matmul_seconds": told["flops_seconds"],
        "gathered_gib": sent["all-gather"] / GIB,
        "reduced_gib": (sent["reduce-scatter"] + sent["all-reduce"]) / GIB,
        "reductions": sum(each["times"] for each in told["collectives"] if each["kind"] == "all-reduce"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--matmuls", nargs="+", default=get_args(Matmul))
    parser.add_argument("--plan", metavar="RECIPE", help="recipe to compile for 8 H200s")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options, overrides = parser.parse_known_args()
    told: dict[str, Any] = {"jax": jax.__version__, "steps": options.steps, "overrides": overrides}
    lines: list[str] = []
    if options.steps:
        widths = ["--precision.compute-dtype", "bfloat16", *overrides]
        losses = compare(FIELD, options.matmuls, options.seeds, options.steps, widths)
        told["held_out_loss"] = losses
        lines += table(FIELD, losses, options.steps)
    if options.plan:
        plans = {matmul: plan(options.plan, matmul) for matmul in options.matmuls}
        told["plan"] = {"recipe": options.plan, **plans}
        lines.append(f"{options.plan} on 8 H200s, of each GPU in a step")
        columns = next(iter(plans.values()))
        lines.append(f"{'matmul':14} " + " ".join(f"{name:>14}" for name in columns))
        for matmul, figures in plans.items():
            lines.append(f"{matmul:14} " + " ".join(f"{value:14,.3f}" for value in figures.values()))
    print("\n".join(lines))
    if options.json:
        options.json.write_text(json.dumps(told, indent=2) + "\n")
        options.json.with_suffix(".txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
