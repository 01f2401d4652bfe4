"""The training step of any recipe: tokens/s, seconds to the first step, peak memory, FLOPs.

    python benchmarks/train_step.py --config quickstart.py [--runs 3] [--steps 10] [--json FILE] [--section.field VALUE]

Every run is a process of its own. The first compiles everything (cold); the others find XLA's compilation cache as it
left it (warm). Figures are medians over the runs; a table goes to standard output, JSON to --json.
"""

import argparse
import dataclasses
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RUNS_BY_ITSELF = "--measure-since"  # how this file starts itself: seconds since the epoch, then the recipe's arguments


def measure(started: float, steps: int, arguments: list[str]) -> dict[str, Any]:
    """One process: from its start to the first step, then `steps` steps by themselves."""
    import jax
    import numpy as np

    from jaxopt_llm import config as configuration
    from jaxopt_llm.model import leaves
    from jaxopt_llm.parallel import hlo
    from jaxopt_llm.parallel.mesh import make_mesh, simulate_cpu_devices
    from jaxopt_llm.parallel.sharding import Placement
    from jaxopt_llm.parallel.topology import CHIPS
    from jaxopt_llm.training import state as training_state
    from jaxopt_llm.training.program import make_program

    config = configuration.parse(arguments, "benchmarks/train_step.py")
    configuration.validate(config)
    simulate_cpu_devices(config.mesh)
    placement = Placement(make_mesh(config.mesh), config.sharding.zero_stage, config.precision)
    program = make_program(
        config.model, config.training, config.optimizer, config.schedule, config.remat, config.lora, placement
    )
    lowering = time.time()
    compiled = program.step.lower(program.state, program.batch).compile()
    compile_seconds = time.time() - lowering
    state = training_state.initialize(program.specs, program.optimizers, config.run.seed, placement)
    random = np.random.default_rng(0)
    shape = program.batch.tokens.shape
    batch = jax.device_put(
        dataclasses.replace(
            program.batch,
            tokens=random.integers(0, config.model.vocabulary_size, shape, np.int32),
            targets=random.integers(0, config.model.vocabulary_size, shape, np.int32),
            loss_mask=np.ones(shape, bool),
            segment_ids=np.ones(shape, np.int32),
            positions=np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape),
        ),
        program.rows,
    )
    state, metrics = compiled(state, batch)
    jax.block_until_ready(metrics)
    first_step = time.time() - started

    seconds = []
    for _ in range(steps):
        before = time.perf_counter()
        state, metrics = compiled(state, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - before)
    step_seconds = statistics.median(seconds)

    device = jax.devices()[0]
    tokens = config.training.batch_size * config.training.sequence_length
    flops = hlo.dot_flops(str(compiled.as_text())) * placement.mesh.size
    memory = hlo.memory(compiled)
    chip = next((chip for name, chip in CHIPS.items() if name in device.device_kind.lower()), None)
    statistics_of_device = device.memory_stats() or {}
    return {
        "jax": jax.__version__,
        "device": f"{placement.mesh.size} × {device.device_kind}",
        "parameters": leaves.count(program.parts.specs),
        "tokens_per_step": tokens,
        "flops_per_step": flops,
        "planned_peak_bytes": memory.peak,
        # Of the device where it counts, else of the process on the host.
        "measured_peak_bytes": statistics_of_device.get(
            "peak_bytes_in_use", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        ),
        "compile_seconds": compile_seconds,
        "first_step_seconds": first_step,
        "step_seconds": step_seconds,
        "tokens_per_second": tokens / step_seconds,
        "flops_per_second": flops / step_seconds,
        "share_of_peak_flops": None
        if chip is None
        else flops / step_seconds / placement.mesh.size / chip.peak_flops[config.precision.compute_dtype],
    }


def run_processes(runs: int, steps: int, arguments: list[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        results = []
        for _ in range(runs):
            command = [sys.executable, __file__, RUNS_BY_ITSELF, str(time.time()), str(steps), *arguments]
            finished = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
            if finished.returncode:
                sys.exit(finished.returncode)
            results.append(json.loads(finished.stdout.splitlines()[-1]))
        return results


def summarise(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the processes; the first alone was cold."""
    cold, *warm = results
    report = {"command": sys.argv, "python": platform.python_version(), **cold}
    for name in ("step_seconds", "tokens_per_second", "flops_per_second", "measured_peak_bytes"):
        report[name] = statistics.median(result[name] for result in results)
    report["first_step_seconds"] = {
        "cold": cold["first_step_seconds"],
        "warm": statistics.median(result["first_step_seconds"] for result in warm) if warm else None,
    }
    report["runs"] = results
    return report


def show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    first = report["first_step_seconds"]
    warm = "-" if first["warm"] is None else f"{first['warm']:.1f}"
    share = report["share_of_peak_flops"]
    table = Table(title=f"{report['parameters']:,} parameters on {report['device']}, jax {report['jax']}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in {
        "tokens/s": f"{report['tokens_per_second']:,.0f}",
        "step seconds": f"{report['step_seconds']:.4f}",
        "seconds to first step, cold / warm": f"{first['cold']:.1f} / {warm}",
        "TFLOP per step (matmuls, as compiled)": f"{report['flops_per_step'] / 1e12:.4f}",
        "TFLOP/s": f"{report['flops_per_second'] / 1e12:.3f}" + ("" if share is None else f" ({share:.0%} of peak)"),
        "peak memory, planned per device": f"{report['planned_peak_bytes'] / 2**20:,.0f} MiB",
        "peak memory, measured": f"{report['measured_peak_bytes'] / 2**20:,.0f} MiB",
    }.items():
        table.add_row(name, value)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="processes; the first is cold (default: 3)")
    parser.add_argument("--steps", type=int, default=10, help="steps timed in each (default: 10)")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    own, arguments = parser.parse_known_args()
    if own.runs < 1 or own.steps < 1:
        parser.error("--runs and --steps must be at least 1")
    if own.json and not own.json.parent.is_dir():
        parser.error(f"--json {own.json}: there is no folder {own.json.parent}")
    report = summarise(run_processes(own.runs, own.steps, arguments))
    show(report)
    if own.json:
        own.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == [RUNS_BY_ITSELF]:
        from jaxopt_llm import errors

        def measure_and_print() -> int:
            print(json.dumps(measure(float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])))
            return 0

        errors.run(measure_and_print)
    main()
