"""Measure pipeline schedules: idle time and memory from their tables, memory and FLOPs as compiled, simulated steps.

    python benchmarks/pipeline.py [--rounds 5] [--json FILE]

First, the tables: the share of a step in which a stage is idle, by the formula and counted, and the maximum number of
inputs that wait on a stage. Second, Llama 2 70B compiled for 128 H100s; no GPU is needed. Third, a small model on four
simulated CPU devices, compared with the same model without a pipeline; steps alternate. Simulated devices share the
cores, so their seconds measure all work, including work that is recomputed, masked or thrown away, but not idle time.
"""

import argparse
import dataclasses
import json
import os
import platform
import shlex
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxopt_llm.compiler import hlo
from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.config import Config, Schedule, cli
from jaxopt_llm.config.parallel import Residuals
from jaxopt_llm.core import errors
from jaxopt_llm.distributed.runtime import simulate_cpu_devices
from jaxopt_llm.execution.schedules import make_table
from jaxopt_llm.execution.stage_layout import split_periods
from jaxopt_llm.model import flops
from jaxopt_llm.model.decoder_specs import list_segments
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.planning.search.block_cost import BlockCost
from jaxopt_llm.planning.search.microbatch import BYTES, count_tokens
from jaxopt_llm.planning.search.passes import Passes
from jaxopt_llm.planning.step_plan import make_plan
from jaxopt_llm.step import state as training_state
from jaxopt_llm.step.program import make_program
from jaxopt_llm.step.validation import validate

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Way:
    """One way to run a model. settings: as on the command line; they follow those of the table."""

    name: str
    settings: str


def stages(schedule: Schedule, stages: int, chunks: int = 1, residuals: Residuals = "store") -> str:
    return (
        f"--mesh.pipeline {stages} --pipeline.schedule {schedule} --pipeline.virtual-stages {chunks} "
        f"--pipeline.residuals {residuals}"
    )


def configured(recipe: str, *settings: str) -> Config:
    config = cli.override_config(cli.load_recipe(recipe), shlex.split(" ".join(settings)), "benchmarks/pipeline.py")
    validate(config)
    return config


def waiting_bytes(config: Config, slots: int) -> float:
    """Return the bytes on one device of what waits for `slots` chunks, in the compute dtype.

    These are inputs [B, S, D], or the activations of all layers of a chunk.
    """
    mesh, training = config.mesh, config.training
    if config.pipeline.residuals == "store":
        saved = BlockCost.from_config(config).count_saved(config.remat) * Passes.from_config(config).layers
        return slots * BYTES[config.precision.compute_dtype] * count_tokens(config) * saved
    rows = training.batch_size // training.accumulation // mesh.batch_shards
    divided = mesh.context * mesh.tensor
    width = np.dtype(config.precision.compute_dtype).itemsize
    return slots * rows * training.sequence_length * config.model.width * width // divided


# ---- The tables.

SCHEDULES: tuple[tuple[Schedule, int], ...] = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 5))
SIZES = ((4, 6), (4, 8), (4, 32), (16, 16), (16, 64), (16, 256))  # stages, microbatches
LARGE, SMALL = "llama2_70b_pipeline.py", "llama_small.py"
NO_PIPELINE = "--mesh.pipeline 1 --pipeline.schedule 1f1b --pipeline.virtual-stages 1"
WHOLE = f"{NO_PIPELINE} --mesh.fsdp 1 --mesh.tensor 1 --training.batch-size 1 --training.accumulation 1"


def arithmetic() -> Iterator[dict[str, Any]]:
    """Yield figures by the formulas and counted in the tables. Bytes are of one row of the recipe, not divided."""
    inputs = {
        recipe: waiting_bytes(configured(recipe, WHOLE), 1)
        for recipe in (LARGE, str(Path(__file__).parent / "recipes" / SMALL))
    }
    for count, microbatches in SIZES:
        for schedule, chunks in SCHEDULES:
            table = make_table(schedule, count, microbatches, chunks)
            yield {
                "schedule": schedule,
                "stages": count,
                "microbatches": microbatches,
                "chunks": chunks,
                "ticks": len(table.forward.active),
                "idle_by_formula": (count - 1) / (chunks * microbatches + count - 1),
                "idle": table.idle_share,
                "inputs": table.buffers,
                "bytes": {Path(recipe).name: table.buffers * each for recipe, each in inputs.items()},
            }


ARITHMETIC_HEADER = (
    f"{'schedule':11} {'S':>3} {'M':>4} {'V':>2} | {'ticks':>5} {'idle, formula':>13} {'counted':>7} | {'inputs':>6} "
    f"{LARGE.removesuffix('.py'):>14} {SMALL.removesuffix('.py'):>15}"
)


def arithmetic_line(row: dict[str, Any]) -> str:
    large, small = row["bytes"].values()
    return (
        f"{row['schedule']:11} {row['stages']:3} {row['microbatches']:4} {row['chunks']:2} | {row['ticks']:5} "
        f"{row['idle_by_formula']:13.1%} {row['idle']:7.1%} | {row['inputs']:6} {large / GIB:10.2f} GiB "
        f"{small / MIB:11.1f} MiB"
    )


# ---- As compiled.

GPU, HOSTS, GPUS_PER_HOST = "h100", 16, 8
FSDP = (
    f"{NO_PIPELINE} --mesh.tensor 1 --mesh.fsdp 128 --sharding.sequence-parallel False --training.accumulation 4 "
    "--remat.policy full"
)
DEEP = stages("1f1b", HOSTS)
UNEVEN = f"--pipeline.split 6 {'5 ' * (HOSTS - 2)} 4"
COMPILED = (
    Way("no pipeline: ZeRO-3, remat full", FSDP),
    Way("gpipe, recompute", stages("gpipe", HOSTS, residuals="recompute")),
    Way("1f1b, recompute", stages("1f1b", HOSTS, residuals="recompute")),
    Way("1f1b", DEEP),
    Way("1f1b, 64 microbatches", f"{DEEP} --training.batch-size 256 --training.accumulation 64"),
    Way("1f1b, split 6 5 ... 5 4", f"{DEEP} {UNEVEN}"),
    Way("interleaved by 5, recompute", stages("interleaved", HOSTS, 5, "recompute")),
    Way("interleaved by 5", stages("interleaved", HOSTS, 5)),
    Way("interleaved by 5, remat save_qkv", f"{stages('interleaved', HOSTS, 5)} --remat.policy save_qkv"),
    Way("interleaved by 5, remat full", f"{stages('interleaved', HOSTS, 5)} --remat.policy full"),
)


def schedule_of(config: Config) -> dict[str, Any]:
    """Return idle share, waiting inputs and their bytes for a configuration."""
    if config.mesh.pipeline == 1:
        return {"idle": 0.0, "inputs": 0, "waiting": 0}
    chunks = config.pipeline.virtual_stages
    table = make_table(config.pipeline.schedule, config.mesh.pipeline, config.training.accumulation, chunks)
    return {"idle": table.idle_share, "inputs": table.buffers, "waiting": waiting_bytes(config, table.buffers)}


def compile_for_gpus(way: Way) -> dict[str, Any]:
    """Return the figures of one GPU and one step."""
    config = configured(LARGE, way.settings)
    plan = make_plan(config, GPU, HOSTS, GPUS_PER_HOST)
    return {
        "name": way.name,
        "settings": way.settings,
        **schedule_of(config),
        "memory": dataclasses.asdict(plan.memory) | {"peak": plan.memory.peak},
        "network": sum(each.bytes for each in plan.collectives if each.link == "network"),
        "flops": plan.flops,
        "model_flops": plan.model_flops,
        "step_seconds": plan.speed.step_seconds,
        "compile_seconds": plan.compile_seconds,
    }


COMPILED_HEADER = (
    f"{'':32} | {'idle':>5} {'inputs':>6} {'waiting':>7} | {'params':>6} {'grads':>6} {'optim':>6} {'activ':>6} "
    f"{'other':>6} {'peak':>6} | {'network':>7} | {'PFLOP':>6} {'/ model':>7} | {'step':>6} | {'compiled':>8}"
)


def compiled_line(row: dict[str, Any]) -> str:
    memory = row["memory"]
    sizes = [memory[kind] for kind in ("parameters", "gradients", "optimizer", "activations")]
    sizes += [memory["gathered_weights"] + memory["other"], memory["peak"]]
    return (
        f"{row['name']:32} | {row['idle']:5.1%} {row['inputs']:6} {row['waiting'] / GIB:7.2f} | "
        + " ".join(f"{each / GIB:6.2f}" for each in sizes)
        + f" | {row['network'] / GIB:7.1f} | {row['flops'] / 1e15:6.2f} {row['flops'] / row['model_flops']:7.2f}"
        + f" | {row['step_seconds']:4.1f} s | {row['compile_seconds']:6.0f} s"
    )


# ---- On simulated devices.

DEVICES = 4
STEP = (
    "--model.layers 8 --model.pattern global --model.vocabulary-size 2048 --training.sequence-length 128 "
    "--training.batch-size 32 --training.accumulation 8 --remat.policy none"
)
SIMULATED = (
    Way("data 4", "--mesh.data 4 --sharding.zero-stage 0"),
    Way("fsdp 4, ZeRO-3", "--mesh.fsdp 4"),
    Way("1f1b, recompute", stages("1f1b", DEVICES, residuals="recompute")),
    Way("gpipe", stages("gpipe", DEVICES)),
    Way("1f1b", stages("1f1b", DEVICES)),
    Way("1f1b, 32 microbatches", f"{stages('1f1b', DEVICES)} --training.accumulation 32"),
    Way("1f1b, split 3 2 2 1", f"{stages('1f1b', DEVICES)} --pipeline.split 3 2 2 1"),
    Way("interleaved, 2 chunks", stages("interleaved", DEVICES, 2)),
)


def expected_flops(config: Config, model_flops: float) -> float:
    """Return the FLOPs of all devices, with remat none.

    In each tick every stage runs all layer slots of a chunk. The forward is a third of the FLOPs that the model needs;
    the backward adds the other two thirds, and repeats the forward if nothing is stored. The loss is computed once.
    """
    model, training, count = config.model, config.training, config.mesh.pipeline
    if count == 1:
        return model_flops
    (segment,) = list_segments(model)
    (places,) = split_periods((segment,), count, config.pipeline)
    table = make_table(config.pipeline.schedule, count, training.accumulation, config.pipeline.virtual_stages)
    head = 6 * model.vocabulary_size * model.width * training.batch_size * training.sequence_length
    runs = int(np.sum(table.forward.active)) * count * places.shape[-1]
    passes = 1 if config.pipeline.residuals == "store" else 4 / 3
    return head + (model_flops - head) * passes * runs / (training.accumulation * model.layers)


class Contender:
    """Compiled step and its state."""

    def __init__(self, way: Way):
        config = configured("quickstart.py", STEP, way.settings)
        mesh = make_mesh(config.mesh, jax.devices("cpu")[: config.mesh.devices])
        placement = Placement(mesh, config.sharding, config.precision)
        program = make_program(config, placement)
        self.step = program.step.lower(program.state, program.batch).compile()
        self.hyperparameters = program.step.placed
        self.state = training_state.initialize_state(program.specs, program.optimizers, config.run.seed, placement)
        random, shape = np.random.default_rng(0), program.batch.tokens.shape
        ids = random.integers(0, config.model.vocabulary_size, (2, *shape), np.int32)
        positions = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
        batch = dataclasses.replace(
            program.batch,
            tokens=ids[0],
            targets=ids[1],
            loss_mask=np.ones(shape, bool),
            segment_ids=np.ones(shape, np.int32),
            positions=positions,
        )
        self.batch = jax.device_put(batch, program.batch_sharding)
        per_token = flops.count_per_token(
            config.model, program.specs.masters, program.specs.frozen, config.training.sequence_length
        )
        tokens = config.training.batch_size * config.training.sequence_length
        needed = per_token.full * tokens  # on a CPU attention computes all keys
        self.figures = {
            "name": way.name,
            "settings": way.settings,
            **schedule_of(config),
            "temporaries": hlo.read_memory(self.step).temporaries,
            "flops": hlo.count_dot_flops(str(self.step.as_text())) * mesh.size,
            "model_flops": needed,
            "expected_flops": expected_flops(config, needed),
        }

    def seconds(self) -> float:
        clock = time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch, self.hyperparameters)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - clock


def simulate(rounds: int) -> Iterator[dict[str, Any]]:
    """Yield FLOPs of all devices and bytes of one. ratio: median over the rounds of seconds by those of the first."""
    contenders = [Contender(way) for way in SIMULATED]
    for each in contenders:
        each.seconds()
    times = [[each.seconds() for each in contenders] for _ in range(rounds)]
    for number, each in enumerate(contenders):
        ratio = statistics.median(one[number] / one[0] for one in times)
        yield each.figures | {"seconds": [one[number] for one in times], "ratio": ratio}


SIMULATED_HEADER = (
    f"{'':30} | {'idle':>5} {'inputs':>6} {'temporaries':>12} | {'GFLOP':>6} {'/ model':>7} "
    f"{'formula':>7} | {'seconds':>7} "
    f"{'ratio':>5}"
)


def simulated_line(row: dict[str, Any]) -> str:
    needed, seconds = row["model_flops"], statistics.median(row["seconds"])
    return (
        f"{row['name']:30} | {row['idle']:5.1%} {row['inputs']:6} {row['temporaries'] / MIB:8.1f} MiB | "
        f"{row['flops'] / 1e9:6.1f} {row['flops'] / needed:7.2f} {row['expected_flops'] / needed:7.2f} | "
        f"{seconds:7.3f} {row['ratio']:5.2f}"
    )


@dataclass(frozen=True)
class Section:
    title: str
    header: str
    rows: Iterable[dict[str, Any]]
    line: Callable[[dict[str, Any]], str]


def sections(rounds: int) -> dict[str, Section]:
    return {
        "tables": Section(
            "S stages, M microbatches, V chunks per stage. The formula for the idle share holds if S divides M. "
            "Inputs: the most that wait on a stage; their bytes are for rows of the recipe's length on one device.",
            ARITHMETIC_HEADER,
            arithmetic(),
            arithmetic_line,
        ),
        "compiled": Section(
            f"{LARGE} on {HOSTS * GPUS_PER_HOST} {CHIPS[GPU].name}, 16 stages × tensor 8, 256 microbatches of 4 rows, "
            "as compiled. GiB and PFLOP of one GPU and one step; network: GiB that it sends to other hosts; / model: "
            "divided by the FLOPs that the model needs; step: by the roofline of plan. Chunks store what their "
            "backward reads, except where it says recompute.",
            COMPILED_HEADER,
            map(compile_for_gpus, COMPILED),
            compiled_line,
        ),
        "simulated": Section(
            f"A small model on {DEVICES} simulated devices, which share {os.cpu_count()} cores: seconds measure "
            "all work, not idle time. / model: FLOPs divided by those that the model needs; formula: the same ratio "
            "from the schedule and the layer slots. Ratio: seconds divided by those of the first row.",
            SIMULATED_HEADER,
            simulate(rounds),
            simulated_line,
        ),
    }


def main() -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps per way (default: 5)")
    parser.add_argument("--json", type=Path, help="file for the figures; the table is written next to it as .txt")
    asked = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    simulate_cpu_devices(DEVICES)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        print(line, flush=True)

    say(f"jax {jax.__version__}")
    report: dict[str, Any] = {"jax": jax.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    for name, section in sections(asked.rounds).items():
        say(f"\n{textwrap.fill(section.title, 120)}\n{section.header}")
        report[name] = []
        for row in section.rows:
            report[name].append(row)
            say(section.line(row))
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=2) + "\n")
        asked.json.with_suffix(".txt").write_text("\n".join(said) + "\n")
    return 0


if __name__ == "__main__":
    errors.run_command(main)
