"""What moments in 16 and 8 bits cost in loss: the quickstart's text, by AdamW in each dtype, over several seeds.

    python benchmarks/moments.py [--steps 500] [--seeds 0 1 2] [--dtypes float32 bfloat16 int8] [--json FILE]
                                 [--section.field VALUE ...]

Every run is the training command's own, in a process of its own: of so many steps, with a schedule that ends with them.
The loss is that on held-out text after the last step; a ratio is that to float32 with the same seed.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

SEEDS, DTYPES = (0, 1, 2), ("float32", "bfloat16", "int8")


def train(steps: int, seed: int, dtype: str, overrides: list[str]) -> float:
    """The held-out loss, in nats per token."""
    with tempfile.TemporaryDirectory() as directory:
        recipe = ("--config", "quickstart.py", "--run.directory", directory, "--run.seed", seed)
        length = ("--training.steps", steps, "--schedule.decay-steps", steps, "--evaluation.every", steps)
        arguments = (*recipe, *length, "--optimizer.state-dtype", dtype, *overrides)
        subprocess.run([sys.executable, "-m", "jaxopt_llm.train", *map(str, arguments)], check=True)
        last = (Path(directory) / "metrics.jsonl").read_text().splitlines()[-1]
        return float(json.loads(last)["eval_loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options, overrides = parser.parse_known_args()
    losses: dict[str, dict[int, float]] = {dtype: {} for dtype in options.dtypes}
    for seed in options.seeds:
        for dtype in options.dtypes:
            losses[dtype][seed] = train(options.steps, seed, dtype, overrides)
            print(f"seed {seed}, {dtype}: {losses[dtype][seed]:.4f}", flush=True)
    lines = [f"held-out loss after {options.steps} quickstart steps, jax {jax.__version__} on {platform.machine()}"]
    lines.append(f"{'moments':10} " + " ".join(f"{f'seed {seed}':>8}" for seed in options.seeds) + "     mean    ratio")
    for dtype, found in losses.items():
        mean = statistics.mean(found.values())
        ratio = mean / statistics.mean(losses[options.dtypes[0]].values())
        lines.append(
            f"{dtype:10} " + " ".join(f"{loss:8.4f}" for loss in found.values()) + f" {mean:8.4f} {ratio:8.4f}"
        )
    print("\n".join(lines))
    if options.json:
        told: dict[str, Any] = {"steps": options.steps, "overrides": overrides, "jax": jax.__version__}
        options.json.write_text(json.dumps(told | {"held_out_loss": losses}, indent=2) + "\n")
        options.json.with_suffix(".txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
