"""Share of right answers of GRPO's recipe over its steps, for several seeds.

    python benchmarks/grpo_sums.py [--seeds 0 1 2] [--json FILE]

It makes the data (scripts/sums.py) and, for each seed, trains configs/grpo_format.py and then configs/grpo.py. A line
of the table has the mean of 20 steps, and names the first of them.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
WINDOW = 20  # steps of a line of the table


def train(recipe: str, *flags: object) -> None:
    command = [sys.executable, "-m", "jaxopt_llm.train", "--config", ROOT / "configs" / recipe, *flags]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)


def measure(seed: int, folder: Path) -> list[float]:
    """Return the share of right answers of each step. folder: holds the data."""
    start, run = folder / f"format-{seed}", folder / f"grpo-{seed}"
    train("grpo_format.py", "--run.seed", seed, "--run.directory", start, "--data.paths", folder / "format.jsonl")
    settings = {"run.seed": seed, "run.directory": run, "data.paths": folder / "prompts.jsonl"}
    settings |= {"model.pretrained": start, "logging.every": 1}
    train("grpo.py", *(text for name, value in settings.items() for text in (f"--{name}", value)))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [round(record["rewards/mean"], 4) for record in records]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, ROOT / "scripts" / "sums.py", folder], check=True, stdout=subprocess.DEVNULL)
        curves = {str(seed): measure(seed, folder) for seed in arguments.seeds}
    print("step  " + "  ".join(f"seed {seed}" for seed in curves))
    for first in range(0, len(next(iter(curves.values()))), WINDOW):
        means = [statistics.mean(curve[first : first + WINDOW]) for curve in curves.values()]
        print(f"{first + 1:4}  " + "  ".join(f"{mean:6.1%}" for mean in means))
    if arguments.json:
        lines = (f'  "{seed}": {json.dumps(curve)}' for seed, curve in curves.items())
        arguments.json.write_text('{"right": {\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()
