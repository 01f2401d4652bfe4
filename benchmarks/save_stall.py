"""Measure for how long a save of a checkpoint holds the steps back, against a copy of the state to host memory.

    python benchmarks/save_stall.py [--megabytes 64 256 1024] [--directory DIR] [--json FILE] [--name NAME]

It makes the calls of the training loop: a step, a record in metrics.jsonl, and a save with the fsync of the records.
Three saves follow each other, one after each step, so that the second and the third begin while the ones before are
being written. Columns, in seconds:

- copy: a plain copy of what is saved to host memory
- step: a step without a save before it
- save 1, 2, 3: the stall in each save
- step after: the longest of the three steps that follow these saves
- whole: a save until it is on disk, without another one

On a CPU the state is in host memory already. A save keeps the arrays instead of copying them, and the next step writes
its result into new memory: the copy then shows as a part of `step after`.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxopt_llm
from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.config import CheckpointConfig, Config, MeshConfig, PrecisionConfig
from jaxopt_llm.observe.dashboards import MetricsLog

ARRAYS = 8
SAVES = 3
STATE_BYTES = 12  # of each parameter: the master weight and two moments, float32


def make_engine(megabytes: int) -> jaxopt_llm.Engine:
    """Return an engine whose checkpoint has so many megabytes of numbers that do not compress well."""
    size = megabytes * 2**20 // STATE_BYTES // ARRAYS

    def initialize() -> dict[str, jax.Array]:
        return {str(index): jax.random.normal(jax.random.key(index), (size,)) for index in range(ARRAYS)}

    def loss(model: Any, batch: jax.Array) -> jax.Array:
        return sum((jnp.mean(each**2) for each in model.values()), jnp.mean(batch))

    config = Config(mesh=MeshConfig(fsdp=jax.device_count()), precision=PrecisionConfig(compute_dtype="float32"))
    return jaxopt_llm.initialize(initialize, loss, make_batch(), config, optax.adam(1e-3))


def make_batch() -> np.ndarray:
    return np.ones((jax.device_count(), 1), np.float32)


def time_step(engine: jaxopt_llm.Engine) -> float:
    began = time.perf_counter()
    engine.step(make_batch())
    jax.block_until_ready(engine.state)
    return time.perf_counter() - began


def time_copy(engine: jaxopt_llm.Engine) -> float:
    trees = engine.to_checkpoint(engine.state)
    began = time.perf_counter()
    copies = [np.array(shard.data, copy=True) for leaf in jax.tree.leaves(trees) for shard in leaf.addressable_shards]
    seconds = time.perf_counter() - began
    assert copies
    return seconds


def measure(engine: jaxopt_llm.Engine, directory: Path) -> dict[str, Any]:
    """Return the columns of a row."""
    log = MetricsLog(directory / "metrics.jsonl", 0, print)
    lines: list[str] = []
    step = 0

    def save(writer: Checkpoints, last: bool = False) -> float:
        nonlocal step
        step += 1
        log.write({"step": step})
        began = time.perf_counter()
        trees = engine.to_checkpoint(engine.state)
        (writer.save_last if last else writer.save)(step, trees, {}, log.sync)
        return time.perf_counter() - began

    with Checkpoints(directory / "checkpoints", CheckpointConfig(keep=1), lines.append) as writer:
        save(writer, last=True)  # imports modules
        whole = save(writer, last=True)
        time_step(engine)  # compiles
        plain = float(np.median([time_step(engine) for _ in range(3)]))
        copy = time_copy(engine)
        stalls, after = zip(*((save(writer), time_step(engine)) for _ in range(SAVES)), strict=True)
        writer.latest_saved_step()
    log.close()
    left_out = sum("is not saved" in line for line in lines)
    return {
        "copy": copy,
        "step": plain,
        "saves": list(stalls),
        "step_after": max(after),
        "whole": whole,
        "left_out": left_out,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=(64, 256, 1024))
    parser.add_argument("--directory", type=Path, help="where to write; default: the folder for temporary files")
    parser.add_argument("--json", type=Path, help="file for the figures; those of other names in it stay")
    parser.add_argument("--name", default="now", help="name of these figures in the file")
    options = parser.parse_args()
    rows = []
    names = ("copy", "step", *(f"save {number}" for number in range(1, SAVES + 1)), "step after", "whole")
    print(f"{options.name}: {jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"{'MB':>6} " + " ".join(f"{name:>10}" for name in names) + "  left out")
    for megabytes in options.megabytes:
        engine = make_engine(megabytes)
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            row = measure(engine, Path(directory))
        rows.append({"megabytes": megabytes, **row})
        numbers = (row["copy"], row["step"], *row["saves"], row["step_after"], row["whole"])
        print(f"{megabytes:6} " + " ".join(f"{each:10.3f}" for each in numbers) + f"{row['left_out']:10}", flush=True)
        del engine
    if options.json:
        found = json.loads(options.json.read_text()) if options.json.exists() else {}
        device = jax.devices()[0].device_kind
        found[options.name] = {"jax": jax.__version__, "device": device, "rows": rows}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
