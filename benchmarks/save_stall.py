"""Measure for how long a save of a checkpoint blocks the steps, against the time that it takes to reach the disk.

    python benchmarks/save_stall.py [--megabytes 64 256 1024] [--saves 3] [--directory DIR] [--json FILE]

Each save begins as soon as the one before has returned, so the one before is still being written. `pending` is the
number of saves that may be written at the same time: with 1, each save waits for the one before. `copy` is the time of
a plain copy of the arrays to host memory.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm.checkpoint.native import checkpoints
from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.config import CheckpointConfig

ARRAYS = 8


def make_arrays(megabytes: int) -> dict[str, jax.Array]:
    """Return arrays of random numbers, which do not compress well."""
    size = megabytes * 2**20 // 4 // ARRAYS
    made = {str(index): jax.random.normal(jax.random.key(index), (size,), jnp.float32) for index in range(ARRAYS)}
    return jax.block_until_ready(made)


def measure(arrays: dict[str, jax.Array], pending: int, saves: int, directory: Path) -> dict[str, float]:
    """Return seconds: the stall of the first save, the mean of the others, and a save until it is on disk."""
    checkpoints.MAX_PENDING = pending
    with Checkpoints(directory, CheckpointConfig(keep=1)) as writer:
        first, *others = (writer.save(step, {"arrays": arrays}, {}) for step in range(1, saves + 1))
        writer.latest_saved_step()
        began = time.perf_counter()
        writer.save_last(saves + 1, {"arrays": arrays}, {})
        return {"first": first, "next": float(np.mean(others)), "whole": time.perf_counter() - began}


def time_copy(arrays: dict[str, jax.Array]) -> float:
    began = time.perf_counter()
    for array in arrays.values():
        np.array(array, copy=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=(64, 256, 1024))
    parser.add_argument("--saves", type=int, default=2, help="saves that follow each other")
    parser.add_argument("--directory", type=Path, help="where to write; default: the folder for temporary files")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    rows = []
    print(f"{'MB':>6} {'pending':>8} {'copy s':>8} {'first s':>8} {'next s':>8} {'whole s':>8}")
    for megabytes in options.megabytes:
        arrays = make_arrays(megabytes)
        copy = time_copy(arrays)
        for pending in (1, 2):
            with tempfile.TemporaryDirectory(dir=options.directory) as directory:
                found = measure(arrays, pending, options.saves, Path(directory))
            rows.append({"megabytes": megabytes, "pending": pending, "copy": copy, **found})
            numbers = " ".join(f"{value:8.3f}" for value in (copy, *found.values()))
            print(f"{megabytes:6} {pending:8} {numbers}", flush=True)
    if options.json:
        device = jax.devices()[0].device_kind
        options.json.write_text(json.dumps({"jax": jax.__version__, "device": device, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
