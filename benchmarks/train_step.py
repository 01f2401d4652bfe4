"""Measure the training step of any recipe: tokens/s, MFU, seconds to the first step, peak memory, FLOPs.

    python benchmarks/train_step.py --config quickstart.py [--runs 3] [--steps 10] [--json FILE] [--section.field VALUE]
                                    [--peer hf-torch] [--profile FOLDER]

Every run is a separate process. The first compiles everything (cold); the others use the compilation cache that it left
(warm). Figures are medians over the runs. A table is printed; JSON is written to --json after each turn of runs, so
that an interrupted measurement keeps its finished runs. The runs of a peer (eager, then compiled) alternate with ours,
so that other load on the machine affects all; each side uses its best settings. A step that does not fit into the
memory of the GPU is reported and not run.

--profile writes to FOLDER a trace of two steps of each process, after those that are timed, and the compiled step as
HLO text, whose instructions the trace names.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peer_hf_torch

from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.config import cli, fields
from jaxopt_llm.core.files import replace_durably

# First argument when this file starts itself; seconds since the epoch, the number of steps, the folder of the profile
# and the recipe's arguments follow.
RUNS_BY_ITSELF = "--measure-since"
# The README advises this on CPUs. The peer runs without it: eager torch is 6% slower with it.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

MFU = ("mfu", "mfu_full_attention")

# (file that measures, its arguments, additions to the environment)
Contender = tuple[str, list[str], dict[str, str]]


def measure(started: float, steps: int, profile: str, arguments: list[str]) -> dict[str, Any]:
    """Measure one process: the time from its start to the first step, then each of `steps` steps.

    Args:
        profile: folder for a trace of two more steps; "" without one.
    """
    import jax
    import numpy as np

    from jaxopt_llm.compiler import hlo
    from jaxopt_llm.compiler.chips import chip_of, seconds_at_peak
    from jaxopt_llm.distributed import runtime
    from jaxopt_llm.model.linear import leaves
    from jaxopt_llm.parallel.mesh import make_mesh
    from jaxopt_llm.parallel.placement import Placement
    from jaxopt_llm.planning.free_memory import count_usable_bytes
    from jaxopt_llm.planning.search.workload import describe_cluster
    from jaxopt_llm.planning.settings_choice import choose_settings, list_candidates
    from jaxopt_llm.step import state as training_state
    from jaxopt_llm.step.program import Program, make_program, utilisation_per_token
    from jaxopt_llm.step.validation import validate

    config = pretrained.resolve_pretrained(cli.parse_config(arguments, "benchmarks/train_step.py"))
    validate(config)
    runtime.configure_jax(config.mesh.devices, cache=True)
    placement = Placement(make_mesh(config.mesh), config.sharding, config.precision, config.offload)

    def compile_with(config: Any) -> tuple[Program, jax.stages.Compiled]:
        program = make_program(config, placement)
        return program, program.step.lower(program.state, program.batch).compile()

    device, lowering = jax.devices()[0], time.time()
    candidates, _ = list_candidates(
        config, describe_cluster(config.mesh.devices), count_usable_bytes(device), device.platform == "gpu"
    )
    choice = choose_settings(candidates, compile_with, lambda compiled: hlo.read_memory(compiled[1]).peak)
    config, (program, compiled) = choice.config, choice.compiled
    compile_seconds, memory = time.time() - lowering, hlo.read_memory(compiled)
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is not None and memory.peak > limit:
        return {"unavailable": f"needs {memory.peak / 2**30:.1f} GiB, {device.device_kind} has {limit / 2**30:.1f}"}
    state = training_state.initialize_state(program.specs, program.optimizers, config.run.seed, placement)
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
        program.batch_sharding,
    )
    state, metrics = compiled(state, batch, program.step.placed)
    jax.block_until_ready(metrics)
    first_step = time.time() - started

    seconds = []
    for _ in range(steps):
        before = time.perf_counter()
        state, metrics = compiled(state, batch, program.step.placed)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - before)
    step_seconds = statistics.median(seconds)
    if profile:
        with jax.profiler.trace(profile):
            for _ in range(2):
                state, metrics = compiled(state, batch, program.step.placed)
            jax.block_until_ready(metrics)
        (Path(profile) / "step.hlo.txt").write_text(str(compiled.as_text()))

    tokens = config.training.batch_size * config.training.sequence_length
    flops_by_dtype = hlo.count_dot_flops_by_dtype(str(compiled.as_text()))
    flops = sum(flops_by_dtype.values()) * placement.mesh.size
    chip = chip_of(device.device_kind)
    statistics_of_device = device.memory_stats() or {}
    return {
        "jax": jax.__version__,
        "device": f"{placement.mesh.size} × {device.device_kind}",
        "parameters": leaves.count_parameters(program.model.specs),
        "settings": settings(config),
        "attention": program.attention.name,  # the implementation that `training.attention` resolved to
        "state_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.state)),
        "tokens_per_step": tokens,
        "flops_per_step": flops,
        "planned_peak_bytes": memory.peak,
        # Peak of the device if it counts its memory, otherwise of the process on the host.
        "measured_peak_bytes": statistics_of_device.get(
            "peak_bytes_in_use", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        ),
        "compile_seconds": compile_seconds,
        "first_step_seconds": first_step,
        "step_seconds": step_seconds,
        "tokens_per_second": tokens / step_seconds,
        "flops_per_second": flops / step_seconds,
        "share_of_peak_flops": seconds_at_peak(chip, flops_by_dtype) / step_seconds if chip else None,
        # MFU by convention, named as in metrics.jsonl; none if the peak of the chip is unknown.
        **{
            name: seconds * tokens / step_seconds
            for name, seconds in utilisation_per_token(config, program, placement).items()
        },
    }


def settings(config: Any) -> dict[str, Any]:
    """Return the settings that a reader of the figures needs."""
    names = (
        *("training.batch_size", "training.sequence_length", "training.accumulation", "training.attention"),
        *("precision.matmul", "precision.reduce_dtype", "optimizer.state_dtype", "optimizer.in_backward"),
        *("remat.policy", "remat.every", "remat.offload", "offload.optimizer", "offload.parameters", "lora.rank"),
        *("training.unroll", "training.loss_chunk", "xla.own_remat", "xla.options"),
    )
    return {name: fields.get_field(config, name) for name in names}


def import_seconds(runs: int) -> float | None:
    """Return the median import time of jaxopt_llm.train after jax. None if a required package is missing."""
    timed = "import jax, time; clock = time.time(); import jaxopt_llm.train; print(time.time() - clock)"
    finished = [subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True) for _ in range(runs)]
    if any(each.returncode for each in finished):
        return None
    return statistics.median(float(each.stdout) for each in finished)


def run_alternating(runs: int, steps: int, contenders: dict[str, Contender]) -> Iterator[list[list[dict[str, Any]]]]:
    """Run one process of each contender in turn, `runs` times. Yield after each turn all results so far.

    A contender that returns {"unavailable": why} does not run again.
    """
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "TORCHINDUCTOR_CACHE_DIR": cache,
        }
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
        for _ in range(runs):
            for name, (file, arguments, own_environment) in contenders.items():
                if any("unavailable" in result for result in results[name]):
                    continue
                command = [sys.executable, file, RUNS_BY_ITSELF, str(time.time()), str(steps), *arguments]
                finished = subprocess.run(command, env=environment | own_environment, stdout=subprocess.PIPE, text=True)
                if finished.returncode:
                    sys.exit(finished.returncode)
                results[name].append(json.loads(finished.stdout.splitlines()[-1]))
            yield list(results.values())


def summarise(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the processes of one contender. Only the first process was cold."""
    cold, *warm = results
    if "unavailable" in cold:
        return cold
    summary = dict(cold)
    for name in ("step_seconds", "tokens_per_second", "flops_per_second", "measured_peak_bytes", *MFU):
        if name in cold:
            summary[name] = statistics.median(result[name] for result in results)
    summary["first_step_seconds"] = {
        "cold": cold["first_step_seconds"],
        "warm": statistics.median(result["first_step_seconds"] for result in warm) if warm else None,
    }
    summary["runs"] = results
    return summary


def show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    def memory(count: int) -> str:
        return f"{count / 2**20:,.0f} MiB"

    def first_step(seconds: dict[str, float | None]) -> str:
        return " / ".join("-" if each is None else f"{each:.1f}" for each in seconds.values())

    peers = report.get("peer", {})
    columns = {"ours": report} | {name: peer for name, peer in peers.items() if "unavailable" not in peer}
    share = report["share_of_peak_flops"]
    table = Table(title=f"{report['parameters']:,} parameters on {report['device']}, jax {report['jax']}")
    table.add_column("figure")
    for name in columns:
        table.add_column(name, justify="right")
    rows = {
        "tokens/s": [f"{column['tokens_per_second']:,.0f}" for column in columns.values()],
        "step seconds": [f"{column['step_seconds']:.4f}" for column in columns.values()],
        "seconds to first step, cold / warm": [first_step(column["first_step_seconds"]) for column in columns.values()],
        "seconds to import, beyond jax": [
            "-" if report["import_seconds"] is None else f"{report['import_seconds']:.1f}"
        ],
        "peak memory, measured": [memory(column["measured_peak_bytes"]) for column in columns.values()],
        "peak memory, planned per device": [memory(report["planned_peak_bytes"])],
        **{
            figure: [f"{column[name]:.1%}" if name in column else "-" for column in columns.values()]
            for name, figure in zip(MFU, ("MFU, causal attention at half", "MFU, attention whole"), strict=True)
            if name in report
        },
        "state, bytes per parameter": [f"{report['state_bytes'] / report['parameters']:.1f}"],
        "TFLOP per step (matmuls, as compiled)": [f"{report['flops_per_step'] / 1e12:.4f}"],
        "TFLOP/s": [f"{report['flops_per_second'] / 1e12:.3f}" + ("" if share is None else f" ({share:.0%} of peak)")],
    }
    if peers:
        rows["tokens/s, ours / this"] = [f"{column.get('ratio', 1.0):.2f}" for column in columns.values()]
    for figure, values in rows.items():
        table.add_row(figure, *values)
    Console().print(table)
    print(f"ours: jax {report['jax']}, {' '.join('='.join(each) for each in HUGE_PAGES.items())}")
    for name, peer in peers.items():
        print(
            f"{name}: unavailable ({peer['unavailable']})" if "unavailable" in peer else f"{name}: {peer['versions']}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="processes; the first is cold (default: 3)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per process (default: 10)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--peer", choices=["hf-torch"], help="alternate with the same step in another trainer")
    parser.add_argument("--profile", default="", metavar="FOLDER", help="folder for a trace of two steps")
    own, arguments = parser.parse_known_args()
    if own.runs < 1 or own.steps < 1:
        parser.error("--runs and --steps must be at least 1")
    if own.json and not own.json.parent.is_dir():
        parser.error(f"--json {own.json}: the folder {own.json.parent} does not exist; create it")
    contenders: dict[str, Contender] = {"ours": (__file__, [own.profile, *arguments], HUGE_PAGES)}
    if own.peer:
        from jaxopt_llm.step.validation import validate

        config = pretrained.resolve_pretrained(cli.parse_config(arguments, "benchmarks/train_step.py"))
        validate(config)
        contenders |= peer_hf_torch.contenders(config)
    python = {"python": platform.python_version(), "import_seconds": import_seconds(own.runs)}
    report: dict[str, Any] = {"command": sys.argv, **python}
    for results in run_alternating(own.runs, own.steps, contenders):
        ours, *peers = map(summarise, results)
        report |= ours
        if peers:
            report["peer"] = {
                mode: peer
                if "unavailable" in peer
                else peer | {"ratio": ours["tokens_per_second"] / peer["tokens_per_second"]}
                for mode, peer in zip(peer_hf_torch.MODES, peers, strict=True)
            }
        if own.json:
            replace_durably(own.json, json.dumps(report, indent=2) + "\n")
    if "unavailable" in report:
        print(f"not run: {report['unavailable']}")
    else:
        show(report)
    return 0


def measure_and_print() -> int:
    _, _, started, steps, profile, *arguments = sys.argv
    print(json.dumps(measure(float(started), int(steps), profile, arguments)))
    return 0


if __name__ == "__main__":
    from jaxopt_llm.core import errors

    errors.run_command(measure_and_print if sys.argv[1:2] == [RUNS_BY_ITSELF] else main)
