"""Compare an MoE model with two dense models: one has as many active parameters, one as many total parameters.

    python benchmarks/experts.py [--config FILE] [--gpu h200] [--compiled] [--runs 3] [--steps 5] [--json FILE]

The dense models are the recipe's model with one MLP in every layer. Its width is that of the experts that process a
token, or of all experts together; all else is the same. FLOPs and bytes are of one GPU in a step, exact as compiled for
that GPU, which need not be present; with --compiled nothing else is reported. Tokens/s are measured by train_step.py,
with one process of each model in turn; the ratio of two models is the median of the ratios within a turn. If the peak
FLOP/s of the device are known, a bar passes or fails. On a CPU, XLA multiplies every row by the matrices of all experts
(docs/experts.md), so CPU times do not show what experts save.
"""

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from fill_gpu import write_recipe
from gpu_figures import GIB, HERE, chip_name, device_kind, predicted, start_plan
from outcomes import Verdict
from train_step import HUGE_PAGES, run_alternating, summarise

from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.config import ModelConfig, cli
from jaxopt_llm.core import errors
from jaxopt_llm.core.errors import InputError

EXPERTS, ACTIVE, TOTAL = "experts", "dense, as active", "dense, as in all"
CLAIMED = 0.8  # share that sparse activation is claimed to save
BAR = 0.7  # share of the MFU of the dense model with as many active parameters

Row = dict[str, Any]  # one model: "compiled" and, where steps ran, "measured", with each process in "runs"
Rows = Mapping[str, Row]


def models(model: ModelConfig) -> dict[str, dict[str, Any]]:
    """Return the settings that each model changes in the recipe."""

    def dense(experts: int) -> dict[str, Any]:
        """Return the settings of a dense model. The width of its MLPs is the mean over the recipe's layers."""
        mixed = sum(map(model.moe.has_experts, range(model.layers)))
        of_mixed = experts * model.moe.expert_width + model.moe.shared_expert_width
        width = (mixed * of_mixed + (model.layers - mixed) * model.mlp_width) / model.layers
        return {"model.moe.experts": 0, "model.mlp_width": round(width)}

    return {EXPERTS: {}, ACTIVE: dense(model.moe.experts_per_token), TOTAL: dense(model.moe.experts)}


def compiled(recipes: Mapping[str, Path], gpu: str, gpus: int) -> dict[str, Row]:
    """Return the planned figures for one of these GPUs. No GPU is needed."""
    plans = {name: start_plan(path, gpu, gpus) for name, path in recipes.items()}
    return {name: predicted(plan) for name, plan in plans.items()}


def measured(recipes: Mapping[str, Path], runs: int, steps: int) -> dict[str, Row]:
    step = str(HERE / "train_step.py")
    without_profile = ""
    contenders = {name: (step, [without_profile, "--config", str(path)], HUGE_PAGES) for name, path in recipes.items()}
    *_, results = run_alternating(runs, steps, contenders)
    return dict(zip(recipes, map(summarise, results), strict=True))


# ---- Report.


def beside(rows: Rows, other: str, figure: str) -> float | None:
    """Return the MoE model's figure divided by the other model's, the median over turns.

    None if one of them has not run or lacks the figure.
    """
    turns = [rows[name].get("measured", {}).get("runs", []) for name in (EXPERTS, other)]
    if not all(turns) or any(run.get(figure) is None for runs in turns for run in runs):
        return None
    return statistics.median(ours[figure] / theirs[figure] for ours, theirs in zip(*turns, strict=True))


def claims(rows: Rows) -> Iterator[Verdict]:
    ours, theirs = (rows[name]["compiled"] for name in (EXPERTS, TOTAL))
    if "flops" not in ours or "flops" not in theirs:
        return
    flops = 1 - ours["flops"] / theirs["flops"]
    passed = 1 - ours["active_parameters"] / ours["parameters"]
    found = (
        f"{passed:.0%} of parameters are inactive, which saves {flops:.0%} of the FLOPs of a dense model as large, and "
        f"{1 - ours['peak_bytes'] / theirs['peak_bytes']:.0%} of its memory: all parameters are stored"
    )
    if beside(rows, TOTAL, "mfu") and (faster := beside(rows, TOTAL, "tokens_per_second")):
        found += f"; a step takes {1 - 1 / faster:.0%} less time"
    yield Verdict("sparse activation saves up to 80%", flops >= CLAIMED, found)


def bars(rows: Rows) -> Iterator[Verdict]:
    share = beside(rows, ACTIVE, "mfu")
    if share is not None:
        ours, theirs = (rows[name]["measured"]["mfu"] for name in (EXPERTS, ACTIVE))
        yield Verdict(
            f"at least {BAR:.0%} of the MFU of the dense model with as many active parameters",
            share >= BAR,
            f"{share:.0%}: {ours:.1%} and {theirs:.1%}",
        )


def table(rows: Rows) -> Iterator[str]:
    def line(figure: str, said: list[str]) -> str:
        return f"{figure:32}" + "".join(f"{each:>18}" for each in said)

    def said(kind: str, name: str, unit: float, form: str) -> list[str]:
        found = [each.get(kind, {}).get(name) for each in rows.values()]
        return ["-" if each is None else format(each / unit, form) for each in found]

    def ratios(figure: str) -> list[str]:
        found = [beside(rows, name, figure) for name in rows]
        return ["-" if each is None else f"{each:.2f}" for each in found]

    yield line("", list(rows))
    yield line("parameters, in millions", said("compiled", "parameters", 1e6, ",.1f"))
    yield line("  active", said("compiled", "active_parameters", 1e6, ",.1f"))
    yield line("TFLOP of a step, for the GPU", said("compiled", "flops", 1e12, ",.3f"))
    yield line("  that the model needs", said("compiled", "model_flops", 1e12, ",.3f"))
    yield line("GiB at the peak, for the GPU", said("compiled", "peak_bytes", GIB, ",.3f"))
    if any("measured" in each for each in rows.values()):
        yield line("tokens/s", said("measured", "tokens_per_second", 1, ",.0f"))
        yield line("  the experts' by this", ratios("tokens_per_second"))
        if beside(rows, EXPERTS, "mfu"):
            yield line("MFU, causal attention at half, %", said("measured", "mfu", 0.01, ".1f"))
            yield line("  the experts' by this", ratios("mfu"))
        yield line("TFLOP of a step, as it ran", said("measured", "flops_per_step", 1e12, ",.3f"))
        yield line("GiB at the peak, as it ran", said("measured", "measured_peak_bytes", GIB, ",.3f"))
        yield line("  planned", said("measured", "planned_peak_bytes", GIB, ",.3f"))
    for name, each in rows.items():
        for kind, figures in each.items():
            if "unavailable" in figures:
                yield f"{name}: not {kind} ({figures['unavailable']})"


def show(report: dict[str, Any]) -> str:
    ran = f"run on {report['device']}, load {report['load']:.1f}" if "load" in report else "nothing run"
    lines = [f"{report['config']}, compiled for {report['gpu']}, {ran}; jax {report['jax']}", *table(report["rows"])]
    lines += [Verdict(**each).line("holds", "fails") for each in report["claims"]]
    lines += [Verdict(**each).line() for each in report["bars"]]
    return "\n".join(lines)


def main() -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--config", help="recipe with experts (default: experts_1b.py in benchmarks/recipes; on a CPU experts_small.py)"
    )
    add("--gpu", choices=sorted(CHIPS), help="GPU to compile for (default: the GPU of this machine, or h200)")
    add("--compiled", action="store_true", help="compile only; needs no GPU")
    add("--runs", type=int, default=3, help="processes of each model (default: 3)")
    add("--steps", type=int, default=5, help="steps timed in each (default: 5)")
    add("--json", type=Path, help="file for the figures; the table is written next to it as .txt")
    asked = parser.parse_args()
    device = "" if asked.compiled else device_kind()
    path = asked.config or str(HERE / "recipes" / f"experts_{'small' if device == 'cpu' else '1b'}.py")
    config = cli.load_recipe(path)
    if not config.model.moe.experts:
        raise InputError(f"--config {path}: model.moe.experts=0: no experts to compare; give a recipe with experts")
    report: dict[str, Any] = {"config": Path(path).name, "jax": jax.__version__, "gpu": asked.gpu or chip_name(device)}
    with tempfile.TemporaryDirectory() as folder:
        recipes = {
            name: write_recipe(Path(folder) / f"model_{number}.py", path, settings)
            for number, (name, settings) in enumerate(models(config.model).items())
        }
        found = compiled(recipes, report["gpu"], config.mesh.devices)
        rows: dict[str, Row] = {name: {"compiled": each} for name, each in found.items()}
        if not asked.compiled:
            report |= {"device": device, "load": os.getloadavg()[0]}  # other load on the machine
            for name, ran in measured(recipes, asked.runs, asked.steps).items():
                rows[name]["measured"] = ran
    report["rows"] = rows
    report |= {"claims": [*map(dataclasses.asdict, claims(rows))], "bars": [*map(dataclasses.asdict, bars(rows))]}
    print(show(report))
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=2) + "\n")
        asked.json.with_suffix(".txt").write_text(show(report) + "\n")
    return 0


if __name__ == "__main__":
    errors.run_command(main)
