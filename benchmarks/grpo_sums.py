"""Share of right answers over the steps of configs/grpo.py or configs/on_policy.py, for several seeds.

    python benchmarks/grpo_sums.py [--recipe on_policy.py] [--seeds 0 1 2] [--json FILE]

It makes the data (scripts/sums.py) and, for each seed, trains configs/grpo_format.py and then the recipe. One teacher,
trained on right sums, is that of all seeds of on_policy.py. A line of the table has the mean of 20 steps, and names the
first of them.
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


def call(module: str, *arguments: object) -> None:
    command = [sys.executable, "-m", f"jaxopt_llm.{module}", *arguments]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)


def train(recipe: str, **settings: object) -> None:
    flags = (text for name, value in settings.items() for text in (f"--{name.replace('__', '.')}", value))
    call("train", "--config", ROOT / "configs" / recipe, *flags)


def make_teacher(folder: Path) -> Path:
    """Train a model on right sums, and return it as a folder."""
    run, exported = folder / "teacher", folder / "teacher_exported"
    train("grpo_format.py", run__directory=run, data__paths=folder / "right.jsonl")
    call("convert", "export", "--checkpoint", run, "--to", exported)
    return exported


def measure(recipe: str, seed: int, folder: Path, **settings: object) -> list[float]:
    """Return the share of right answers of each step. folder: holds the data."""
    start, run = folder / f"format-{seed}", folder / f"run-{seed}"
    train("grpo_format.py", run__seed=seed, run__directory=start, data__paths=folder / "format.jsonl")
    settings |= {"run__seed": seed, "run__directory": run, "data__paths": folder / "prompts.jsonl"}
    train(recipe, **settings, model__pretrained=start, logging__every=1)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [round(record["rewards/mean"], 4) for record in records]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=("grpo.py", "on_policy.py"), default="grpo.py")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, ROOT / "scripts" / "sums.py", folder], check=True, stdout=subprocess.DEVNULL)
        more = {"distillation__teacher": make_teacher(folder)} if arguments.recipe == "on_policy.py" else {}
        curves = {str(seed): measure(arguments.recipe, seed, folder, **more) for seed in arguments.seeds}
    print("step  " + "  ".join(f"seed {seed}" for seed in curves))
    for first in range(0, len(next(iter(curves.values()))), WINDOW):
        means = [statistics.mean(curve[first : first + WINDOW]) for curve in curves.values()]
        print(f"{first + 1:4}  " + "  ".join(f"{mean:6.1%}" for mean in means))
    if arguments.json:
        lines = (f'  "{seed}": {json.dumps(curve)}' for seed, curve in curves.items())
        arguments.json.write_text('{"right": {\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()
