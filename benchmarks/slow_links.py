"""Compare held-out losses of settings for slow links, and the bytes that each sends between hosts.

    python benchmarks/slow_links.py [--steps 800] [--points 1] [--seeds 0] [--replicas 4] [--fsdp 1] [--cases NAME ...]
                                    [--plan 10b.py] [--json FILE]

Loss: on held-out text after --steps steps of the quickstart with --replicas groups of --fsdp devices, and the ratio to
that of the first case. All cases read the same tokens. With --points, the loss is measured at so many steps at equal
distances, and the table has the largest ratio of them.
Bytes: `--plan RECIPE` compiles the step for 4 × 8 H100s, fsdp inside hosts and data between them, and reads the bytes
that each GPU sends to other hosts in a step, and the time of a step with a network of 10 Gb/s for each host. It is by
the roofline of `plan`, not measured. `--steps 0` trains nothing.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import held_out
import jax

OVER_DATA = ("--sharding.optimizer-over-data", "True")
GATHERS, INT8, INT4 = (
    ("--sharding.int8-gathers", "data"),
    ("--sharding.data-gradients", "int8"),
    ("--sharding.data-gradients", "int4"),
)
OVER_FSDP = ("--sharding.int8-gathers", "fsdp")
LOCAL = ("--training.local-steps", "20")
LESS, DILOCO = (
    (*LOCAL, "--optimizer.outer-learning-rate", "0.7", "--optimizer.outer-momentum", momentum)
    for momentum in ("0.6", "0.9")
)
HALF = ("--optimizer.learning-rate", "2.5e-3")  # of the recipe's
CASES: dict[str, tuple[str, ...]] = {
    "exact": (),
    "exact, half the rate": HALF,
    "optimizer over data": OVER_DATA,
    "gradients int8": (*OVER_DATA, *INT8),
    "gradients int4": (*OVER_DATA, *INT4),
    "gathers int8": (*OVER_DATA, *GATHERS),
    "both int8": (*OVER_DATA, *GATHERS, *INT8),
    "gathers int8, gradients int4": (*OVER_DATA, *GATHERS, *INT4),
    "over fsdp, both int8": (*OVER_FSDP, "--sharding.fsdp-gradients", "int8"),
    "over fsdp, int8 and int4": (*OVER_FSDP, "--sharding.fsdp-gradients", "int4"),
    "20 local steps": LOCAL,
    "20 local steps, int8": (*LOCAL, *INT8),
    "20 local steps, int4": (*LOCAL, *INT4),
    "20 local steps, half the rate": (*LOCAL, *HALF),
    "20 local steps, half, int8": (*LOCAL, *HALF, *INT8),
    "20 local steps, 0.7 and 0.6": LESS,
    "20 local steps, 0.7 and 0.9": DILOCO,
    "20 local steps, 0.7, 0.9, int8": (*DILOCO, *INT8),
}
HOSTS = ("--gpu", "h100", "--hosts", "4", "--gpus-per-host", "8", "--mesh.data", "4", "--network", "10")
GIB = 2**30

Curves = dict[str, dict[int, dict[int, float]]]  # held-out losses by case, seed and step


def plan(recipe: str, settings: tuple[str, ...]) -> dict[str, float]:
    """Return the figures of a step between hosts."""
    arguments = ("--config", recipe, "--json", *HOSTS, *settings)
    done = subprocess.run(
        [sys.executable, "-m", "jaxopt_llm.plan", *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout)
    return {
        "sent_gib": sum(each["bytes"] for each in found["collectives"] if each["link"] == "network") / GIB,
        "step_seconds": found["step_seconds"],
        "network_share": found["network_seconds"] / found["step_seconds"],
        "peak_gib": found["memory"]["peak"] / GIB,
    }


def format_plans(recipe: str, plans: dict[str, dict[str, float]]) -> list[str]:
    """Return the lines of the table of bytes and times."""
    exact = next(iter(plans.values()))["sent_gib"]
    lines = [
        f"{recipe} on 4 x 8 H100s, network of 10 Gb/s for each host, by roofline, jax {jax.__version__}",
        f"{'case':30} {'sent GiB':>9} {'ratio':>6} {'s/step':>8} {'network':>8} {'peak GiB':>9}",
    ]
    for name, each in plans.items():
        sent = f"{each['sent_gib']:9.3f} {each['sent_gib'] / exact:6.3f}"
        lines.append(
            f"{name:30} {sent} {each['step_seconds']:8.3f} {each['network_share']:8.1%} {each['peak_gib']:9.2f}"
        )
    return lines


def train_cases(options: argparse.Namespace) -> Curves:
    """Return the held-out losses of the cases, by case, seed and step."""
    curves: Curves = {name: {} for name in options.cases}
    mesh = ("--mesh.data", str(options.replicas), "--mesh.fsdp", str(options.fsdp))
    for seed in options.seeds:
        for name in options.cases:
            curves[name][seed] = held_out.train_curve(options.steps, seed, (*mesh, *CASES[name]), options.points)
            print(f"seed {seed}, {name}: {curves[name][seed]}", flush=True)
    return curves


def format_curves(curves: Curves) -> list[str]:
    """Return the lines of the table of curves: means over the seeds, and the largest ratio to the first case."""
    means = {
        name: {step: statistics.mean(curve[step] for curve in found.values()) for step in next(iter(found.values()))}
        for name, found in curves.items()
    }
    first = next(iter(means.values()))
    lines = ["", f"{'held-out loss at step':30} " + " ".join(f"{step:>8}" for step in first) + "  largest ratio"]
    for name, curve in means.items():
        largest = max(loss / first[step] for step, loss in curve.items())
        lines.append(f"{name:30} " + " ".join(f"{loss:8.4f}" for loss in curve.values()) + f" {largest:14.4f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--points", type=int, default=1, help="number of losses of a run")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--fsdp", type=int, default=1, help="devices of a replica")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES], metavar="NAME")
    parser.add_argument("--plan", metavar="RECIPE", help="recipe to compile for 4 x 8 H100s")
    parser.add_argument("--json", type=Path, help="file for the figures; the table goes to a .txt beside it")
    options = parser.parse_args()
    if options.steps % int(LOCAL[1]):
        parser.error(f"--steps {options.steps}: must be a multiple of {LOCAL[1]}, so that an outer step is the last")
    if options.points < 1 or options.steps % options.points:
        parser.error(f"--points {options.points}: must divide --steps {options.steps}")
    told: dict[str, Any] = {"jax": jax.__version__, "steps": options.steps, "replicas": options.replicas}
    lines: list[str] = []
    if options.steps:
        curves = train_cases(options)
        losses: held_out.Losses = {
            name: {seed: curve[options.steps] for seed, curve in found.items()} for name, found in curves.items()
        }
        told |= {"fsdp": options.fsdp, "held_out_loss": losses, "curves": curves}
        lines += held_out.table(f"{options.replicas} replicas of {options.fsdp}", losses, options.steps)
        if options.points > 1:
            lines += format_curves(curves)
    if options.plan:
        plans = {name: plan(options.plan, CASES[name]) for name in options.cases}
        told["plan"] = {"recipe": options.plan, **plans}
        lines += format_plans(options.plan, plans)
    print("\n".join(lines))
    if options.json:
        options.json.write_text(json.dumps(told, indent=2) + "\n")
        options.json.with_suffix(".txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
