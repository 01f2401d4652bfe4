"""Measure what 16-bit and 8-bit moments cost in loss: the quickstart with AdamW in each dtype, over several seeds.

    python benchmarks/moments.py [--steps 500] [--seeds 0 1 2] [--dtypes float32 bfloat16 int8] [--json FILE]
                                 [--section.field VALUE ...]

The ratio is the mean loss over seeds divided by that of float32.
"""

import argparse
import json
from pathlib import Path

import jax
from held_out import compare, table

FIELD = "optimizer.state_dtype"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16", "int8"))
    parser.add_argument("--json", type=Path, help="file for the figures")
    options, overrides = parser.parse_known_args()
    losses = compare(FIELD, options.dtypes, options.seeds, options.steps, overrides)
    lines = table(FIELD, losses, options.steps)
    print("\n".join(lines))
    if options.json:
        told = {"jax": jax.__version__, "steps": options.steps, "overrides": overrides, "held_out_loss": losses}
        options.json.write_text(json.dumps(told, indent=2) + "\n")
        options.json.with_suffix(".txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
