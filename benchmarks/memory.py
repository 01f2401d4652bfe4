"""Measure what each memory setting saves on Llama 2 7B, as compiled: alone and together.

    python benchmarks/memory.py [--only NAME ...] [--json FILE]

Every GPU has one sequence of 4096 tokens. The baseline "off" is float32, ZeRO-0, no recomputation, whole logits, and
AdamW in float32. Bytes are of one GPU at its peak, FLOPs of its matmuls in a step, traffic of a step. No GPU is needed;
nothing runs, so no time is measured. Bars, which pass or fail, come last; claims.py settles published claims. With
--only, the rows or tables with these names are measured and the others are read from FILE.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import remat
from outcomes import Verdict

from jaxopt_llm.compiler.chips import CHIPS, LinkRates
from jaxopt_llm.config import Config, cli
from jaxopt_llm.core import errors
from jaxopt_llm.distributed.runtime import MEMORY_FRACTION
from jaxopt_llm.planning.free_memory import GIB
from jaxopt_llm.planning.step_plan import make_plan
from jaxopt_llm.step.validation import validate

ROOMY = 2**40  # memory of a GPU, in bytes, that has room for anything

# ---- What is measured.


@dataclass(frozen=True)
class Technique:
    """Memory technique: a name, and settings as on the command line, which follow those of its table."""

    name: str
    settings: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of one recipe on the same GPUs; the others are compared with the first.

    machines: GPU, hosts, GPUs per host. roomy: compile as if the GPUs had room for anything; otherwise XLA itself
    recomputes what is too large for them.
    """

    name: str
    recipe: str
    machines: tuple[str, int, int]
    settings: str
    rows: tuple[Technique, ...]
    roomy: bool = True

    @property
    def title(self) -> str:
        gpu, hosts, gpus_per_host = self.machines
        return f"{self.name}: {self.recipe} on {hosts * gpus_per_host} × {CHIPS[gpu].name}"


def adding_up(*techniques: Technique) -> tuple[Technique, ...]:
    """Return techniques that each add their settings to those of the techniques before them."""
    return tuple(
        Technique(each.name, " ".join(other.settings for other in techniques[: number + 1]).strip())
        for number, each in enumerate(techniques)
    )


OFF = (
    "--precision.compute-dtype float32 --sharding.zero-stage 0 --remat.policy none --training.loss-chunk 0 "
    "--training.batch-size 8 --training.accumulation 1 --training.unroll none"
)
BASE = Technique("off")
PLAIN = Technique("off, plain autodiff")  # the blocks also keep elementwise results: see benchmarks/remat.py
BF16 = Technique("bf16", "--precision.compute-dtype bfloat16")
BF16_GRADIENTS = Technique("bf16 gradients", "--precision.reduce-dtype bfloat16")
FULL = Technique("remat full", "--remat.policy full")
CHUNKS = Technique("loss in chunks", "--training.loss-chunk 1024")
ZERO_3 = Technique("ZeRO-3", "--sharding.zero-stage 3")
INT8_MOMENTS = Technique("8-bit moments", "--optimizer.state-dtype int8")
OFFLOAD = Technique("offload.optimizer", "--offload.optimizer True")
# With stages 1 and 2 the master weights are in host memory, too.
OFFLOAD_ALL = Technique("offload.optimizer, stage 1", "--offload.optimizer True --sharding.zero-stage 1")
OFFLOAD_PARAMETERS = Technique("offload.parameters", "--offload.parameters True")
IN_BACKWARD = Technique("optimizer in backward", "--optimizer.in-backward True --optimizer.clip-norm 0")
LORA = Technique("LoRA, rank 16", "--lora.rank 16")
QLORA = Technique("LoRA over int8", "--lora.rank 16 --lora.base int8")

INSTEAD = "instead: {}"  # not added to the rows before it
ONE_GPU = "--mesh.fsdp 1 --training.batch-size 1"
TABLES = (
    Table(
        "alone",
        "llama2_7b.py",
        ("h200", 1, 8),
        OFF,
        # Here each row is one technique; in the table below each row adds one.
        rows=(
            BASE,
            PLAIN,
            BF16,
            Technique("bf16, gradients too", f"{BF16.settings} {BF16_GRADIENTS.settings}"),
            Technique("fp16", "--precision.compute-dtype float16"),
            Technique("bf16, products in fp8", f"{BF16.settings} --precision.matmul fp8"),
            Technique("remat dots", "--remat.policy dots"),
            Technique("remat save_qkv", "--remat.policy save_qkv"),
            Technique("remat save_attention", "--remat.policy save_attention"),
            FULL,
            Technique("remat full, every 4", "--remat.policy full --remat.every 4"),
            Technique("offload of three names", "--remat.offload query mlp_gate mlp_up"),
            Technique("remat full, offload inputs", "--remat.policy full --remat.offload block_input"),
            CHUNKS,
            Technique("ZeRO-1", "--sharding.zero-stage 1"),
            Technique("ZeRO-2", "--sharding.zero-stage 2"),
            ZERO_3,
            Technique("tensor 8", "--mesh.fsdp 1 --mesh.tensor 8"),
            Technique("tensor 8, sequence", "--mesh.fsdp 1 --mesh.tensor 8 --sharding.sequence-parallel True"),
            Technique("bf16 moments", "--optimizer.state-dtype bfloat16"),
            INT8_MOMENTS,
            OFFLOAD,
            OFFLOAD_PARAMETERS,
            Technique("remat full, in backward", f"{FULL.settings} {IN_BACKWARD.settings}"),
            LORA,
            QLORA,
        ),
    ),
    Table(
        "together",
        "llama2_7b.py",
        ("h200", 1, 8),
        OFF,
        rows=adding_up(BASE, BF16, FULL, CHUNKS, ZERO_3, INT8_MOMENTS, OFFLOAD, IN_BACKWARD),
    ),
    Table(
        "one of 24 GB",
        "llama2_7b.py",
        ("4090", 1, 1),
        f"{OFF} {ONE_GPU}",
        rows=(
            *adding_up(BASE, BF16, FULL, CHUNKS, OFFLOAD_ALL, BF16_GRADIENTS, IN_BACKWARD, OFFLOAD_PARAMETERS),
            *(
                Technique(INSTEAD.format(each.name), adding_up(BF16, FULL, CHUNKS, each)[-1].settings)
                for each in (LORA, QLORA)
            ),
        ),
        roomy=False,
    ),
    Table(
        "eight of 24 GB",
        "llama2_7b.py",
        ("4090", 1, 8),
        f"{OFF} {ZERO_3.settings}",
        rows=adding_up(BASE, BF16, FULL, CHUNKS, INT8_MOMENTS),
        roomy=False,
    ),
    Table(
        "GPT-3",
        "gpt3_175b.py",
        ("h100", 12, 8),
        "--precision.compute-dtype float32 --remat.policy none --training.loss-chunk 0",
        rows=(BASE, PLAIN, *adding_up(BF16, FULL, CHUNKS)),
    ),
)

Row = dict[str, Any]  # as `measured` returns it and as it is written
Rows = Mapping[str, Mapping[str, Row]]  # by table and technique


def measured(table: Table, technique: Technique) -> Row:
    """Return bytes and FLOPs of one GPU."""
    recipe = cli.load_recipe(table.recipe)
    settings = f"{table.settings} {technique.settings}".strip()
    config = cli.override_config(recipe, shlex.split(settings), "benchmarks/memory.py")
    validate(config)
    return {"settings": technique.settings} | compile_step(config, *table.machines, table.roomy, technique == PLAIN)


@functools.cache
def compile_step(
    config: Config,
    gpu: str,
    hosts: int,
    gpus_per_host: int,
    roomy: bool = True,
    plain: bool = False,
    network: float | None = None,
) -> Row:
    """Return bytes, FLOPs and seconds of one GPU.

    Args:
        roomy: see Table.
        plain: let the blocks keep elementwise results, as plain autodiff does.
        network: rate of the network of a host, Gb/s; None for the usual one.
    """
    chip = CHIPS[gpu]
    limit = int(chip.memory_bytes * float(MEMORY_FRACTION))
    with contextlib.ExitStack() as patched:
        if roomy:
            patched.enter_context(mock.patch.dict(CHIPS, {gpu: dataclasses.replace(chip, memory_bytes=ROOMY)}))
        if plain:
            patched.enter_context(remat.autodiff_alone())
        plan = make_plan(config, gpu, hosts, gpus_per_host, LinkRates(network=network))
    return {
        "memory": dataclasses.asdict(plan.memory) | {"peak": plan.memory.peak},
        "fits": plan.memory.peak <= limit,
        "parameters": plan.parameters,
        "host": plan.host_bytes,
        "pcie": plan.pcie_bytes,
        "sent": sum(each.bytes for each in plan.collectives),
        "flops": plan.flops,
        "step_seconds": plan.speed.step_seconds,
        "network_seconds": plan.network_seconds,
    }


# ---- Bars.


def saved(row: Row, base: Row, kind: str = "peak") -> float:
    """Return the share of the base's bytes of this kind that the row saves."""
    return 1 - row["memory"][kind] / base["memory"][kind]


def extra_flops(row: Row, base: Row) -> float:
    return row["flops"] / base["flops"] - 1


def bars(rows: Rows) -> Iterator[Verdict]:
    alone, small = rows["alone"], rows["one of 24 GB"]
    off, plain = alone[BASE.name], alone[PLAIN.name]

    def of_both(row: Row) -> str:
        return (
            f"{saved(row, plain, 'activations'):.0%} of plain autodiff's, {saved(row, off, 'activations'):.0%} of what "
            f"`none` keeps, {extra_flops(row, plain):+.1%} FLOPs"
        )

    full = alone[FULL.name]
    yield Verdict(
        "remat full: at least 70% of activation bytes off", saved(full, off, "activations") >= 0.7, of_both(full)
    )
    yield Verdict(
        "selective: at least 50% for under 5% more FLOPs, which `none` is",
        saved(off, plain, "activations") >= 0.5 and extra_flops(off, plain) < 0.05,
        of_both(off),
    )
    states = [
        (row["memory"]["parameters"] + row["memory"]["optimizer"]) / row["parameters"]
        for row in (off, alone[INT8_MOMENTS.name])
    ]
    yield Verdict(
        "8-bit moments: 12 -> 6 bytes of state per parameter",
        round(states[1], 1) <= 6.1,
        f"{states[0]:.2f} -> {states[1]:.2f}",
    )
    moments, of_off = alone[OFFLOAD.name]["memory"]["optimizer"], off["memory"]["optimizer"]
    yield Verdict(
        "offload.optimizer: no moments at rest on the GPU",
        moments < 1e-6 * of_off,
        f"{moments:,} bytes, which are step counts, of {of_off / GIB:.1f} GiB",
    )
    fitting = {name: row for name, row in small.items() if row["fits"] and not name.startswith(INSTEAD.format(""))}
    yield Verdict(
        "all of 7B trains with AdamW on one GPU of 24 GB",
        bool(fitting),
        f"of {float(MEMORY_FRACTION) * CHIPS['4090'].memory_bytes / GIB:.1f} GiB that XLA may use, it takes "
        + (" or ".join(f"{row['memory']['peak'] / GIB:.1f} with {name}" for name, row in fitting.items()) or "more"),
    )


# ---- Output.

HEADER = (
    f"{'':26} | {'params':>7} {'grads':>6} {'optim':>6} {'activ':>6} {'gathered':>8} {'other':>6} | {'peak':>7} "
    f"{'saved':>5} | {'host':>6} {'PCIe':>6} {'sent':>6} | {'PFLOP':>6} {'extra':>6} | fits"
)


def line(name: str, row: Row, base: Row) -> str:
    def gib(size: float, width: int = 6) -> str:
        return f"{size / GIB:{width}.2f}"

    memory = row["memory"]
    kinds = [gib(memory[kind]) for kind in ("gradients", "optimizer", "activations")]
    return (
        f"{name:26} | {gib(memory['parameters'], 7)} {' '.join(kinds)} {gib(memory['gathered_weights'], 8)} "
        f"{gib(memory['other'])} | {gib(memory['peak'], 7)} {saved(row, base):5.0%} | {gib(row['host'])} "
        f"{gib(row['pcie'])} {gib(row['sent'])} | {row['flops'] / 1e15:6.3f} {extra_flops(row, base):6.1%} | "
        f"{'yes' if row['fits'] else 'no'}"
    )


def show(rows: Rows) -> str:
    said = [f"GiB of one GPU and one step, jax {jax.__version__}"]
    for table in TABLES:
        found = rows[table.name]
        lines = [line(each.name, found[each.name], _base(table, found)) for each in table.rows if each.name in found]
        said += ["", table.title, HEADER, *lines]
    if all(len(rows[table.name]) == len(table.rows) for table in TABLES):
        said += ["", "bars", *(each.line() for each in bars(rows))]
    return "\n".join(said)


def _base(table: Table, found: Mapping[str, Row]) -> Row:
    """Return the row to compare with: the first one that has been measured."""
    return next(found[each.name] for each in table.rows if each.name in found)


def main() -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows or tables to measure (default: all)")
    parser.add_argument("--json", type=Path, help="file for the figures; the tables are written next to it as .txt")
    asked = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    known = json.loads(asked.json.read_text())["tables"] if asked.only and asked.json and asked.json.exists() else {}
    rows = {
        table.name: {each.name: before[each.name] for each in table.rows if each.name in before}
        for table in TABLES
        for before in [known.get(table.name, {})]
    }
    for table in TABLES:
        for each in table.rows:
            if asked.only and not {each.name, table.name} & {*asked.only}:
                continue
            found = rows[table.name]
            found[each.name] = measured(table, each)
            print(f"{table.name:14}", line(each.name, found[each.name], _base(table, found)), flush=True)
            if asked.json:  # after each row, so that an interrupted run keeps its rows
                asked.json.write_text(json.dumps({"jax": jax.__version__, "tables": rows}, indent=2) + "\n")
                asked.json.with_suffix(".txt").write_text(show(rows) + "\n")
    print(show(rows))
    return 0


if __name__ == "__main__":
    errors.run_command(main)
