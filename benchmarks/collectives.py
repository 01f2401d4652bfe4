"""Show how much time a training step waits for its collectives, by the schedule of the compiled program.

    python benchmarks/collectives.py [--only NAME ...] [--json FILE]

Each case is a recipe compiled for its GPUs. `collectives` is the time of all collectives at the rates that `plan`
assumes, `exposed` the part of it in which no kernel runs next to them (planning/links.py). The lines below a case are
the collectives with the most exposed time. The option xla_gpu_memory_limit_slop_factor=150 keeps XLA from
rematerialising on its own near full memory. No GPU is needed; nothing runs, so no time is measured. With --only, the
other cases keep their rows of FILE.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from cases import run_cases

from jaxopt_llm.compiler import hlo, topology
from jaxopt_llm.compiler.buffers import find_peak
from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.config import Config, cli, fields
from jaxopt_llm.core import errors
from jaxopt_llm.core.files import replace_durably
from jaxopt_llm.distributed.runtime import MEMORY_FRACTION
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.planning.breakdown import break_down_step
from jaxopt_llm.planning.free_memory import GIB
from jaxopt_llm.planning.links import TimedCollective, sum_traffic, time_collectives
from jaxopt_llm.planning.search.roofline import LINK_EFFICIENCY
from jaxopt_llm.run.directory import stores_frozen_weights
from jaxopt_llm.step.program import make_program
from jaxopt_llm.step.validation import validate

GPU, GPUS_PER_HOST = "h100", 8
LISTED = 5  # collectives per case
OPTIONS = ("xla_gpu_memory_limit_slop_factor=150",)


@dataclass(frozen=True)
class Case:
    """Recipe on H100s, with changed fields."""

    name: str
    recipe: str
    hosts: int
    changes: dict[str, Any] = field(default_factory=dict)

    def load(self) -> Config:
        common = {"training.attention": "cudnn", "data.documents_per_row": 1, "xla.options": OPTIONS}
        return fields.replace_fields(cli.load_recipe(self.recipe), common | self.changes)


NO_REMAT = {"remat.policy": "none"}
ON_64 = NO_REMAT | {"mesh.fsdp": 64, "training.batch_size": 128}
BF16_SUMS = {"precision.reduce_dtype": "bfloat16"}
CASES = (
    Case("8b on 8", "llama3_8b.py", 1, NO_REMAT),
    Case("8b on 8, bf16 sums", "llama3_8b.py", 1, NO_REMAT | BF16_SUMS),
    Case("10b on 8", "10b.py", 1, NO_REMAT),
    Case("8b on 64", "llama3_8b.py", 8, ON_64),
    Case("8b on 64, bf16 sums", "llama3_8b.py", 8, ON_64 | BF16_SUMS),
    Case("8b on 8 x 8, HSDP", "llama3_8b.py", 8, ON_64 | {"mesh.fsdp": 8, "mesh.data": 8}),
    Case("70b", "llama2_70b_pipeline.py", 16),
    Case("70b, ZeRO-3", "llama2_70b.py", 16, {"remat.policy": "full"}),
)


def measure(case: Case) -> dict[str, Any]:
    config, chip = case.load(), CHIPS[GPU]
    validate(config)
    mesh = make_mesh(config.mesh, topology.gpu_topology(GPU, case.hosts, GPUS_PER_HOST))
    placement = Placement(mesh, config.sharding, config.precision, config.offload)
    program = make_program(config, placement, stores_frozen_weights(config))
    peak = find_peak(topology.lower_without_gpu(program.step, program.state, program.batch))
    text = str(peak.compiled.as_text())
    collectives = hlo.list_collectives(text, mesh)
    timed = time_collectives(collectives, mesh, chip, GPUS_PER_HOST)
    traffic = tuple(sum_traffic(collectives, mesh, chip, GPUS_PER_HOST))
    return {
        "case": case.name,
        "recipe": case.recipe,
        "changes": dict(case.changes),
        "gpus": case.hosts * GPUS_PER_HOST,
        "peak_bytes": peak.memory.peak,
        "fits": peak.memory.peak <= chip.memory_bytes * float(MEMORY_FRACTION),
        "step_milliseconds": 1e3 * sum(part.seconds for part in break_down_step(text, traffic, chip)),
        "milliseconds": sum(map(count_milliseconds, timed)),
        "exposed_milliseconds": sum(count_milliseconds(each) * each.exposed for each in timed),
        "most_exposed": list_most_exposed(timed),
    }


def count_milliseconds(timed: TimedCollective) -> float:
    return 1e3 * timed.seconds / LINK_EFFICIENCY[timed.link]


def list_most_exposed(timed: Sequence[TimedCollective]) -> list[dict[str, Any]]:
    by_time = sorted(timed, key=lambda each: -count_milliseconds(each) * each.exposed)
    return [
        {
            "kind": each.collective.kind,
            "axes": list(each.collective.axes),
            "link": each.link,
            "array_bytes": each.collective.array_bytes,
            "dtypes": list(each.collective.dtypes),
            "times": each.collective.times,
            "milliseconds": count_milliseconds(each),
            "exposed_milliseconds": count_milliseconds(each) * each.exposed,
            "source": each.collective.source,
        }
        for each in by_time[:LISTED]
    ]


HEADER = (
    f"{'case':20} {'H100s':>5} {'peak GiB':>8} | {'step ms':>9} {'collectives':>11} {'exposed':>9} {'share':>6} "
    f"{'of step':>7}"
)


def format_row(row: Mapping[str, Any]) -> str:
    whole, exposed, step = (row[name] for name in ("milliseconds", "exposed_milliseconds", "step_milliseconds"))
    lines = [
        f"{row['case']:20} {row['gpus']:5} {row['peak_bytes'] / GIB:8.2f} | {step:9.1f} {whole:11.1f} {exposed:9.1f} "
        f"{exposed / whole:6.1%} {exposed / step:7.1%}" + ("" if row["fits"] else "  does not fit")
    ]
    for each in row["most_exposed"]:
        array = f"{each['array_bytes'] / 1e6:,.0f} MB {' '.join(each['dtypes'])}"
        direction = "backward" if "transpose(" in each["source"] else "forward"
        product = each["source"].rsplit("/", 2)[-2:]
        lines.append(
            f"    {each['exposed_milliseconds']:9.1f} of {each['milliseconds']:9.1f} ms: {each['times']:5} × "
            f"{each['kind']} over {' × '.join(each['axes'])}, {array}, {direction}: {'/'.join(product)}"
        )
    return "\n".join(lines)


def save(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    report = {"jax": jax.__version__, "options": OPTIONS, "rows": rows}
    replace_durably(file, json.dumps(report, indent=2) + "\n")
    heading = f"by the schedule of the compiled programs at the rates of `plan`, jax {jax.__version__}; not measured"
    replace_durably(file.with_suffix(".txt"), "\n".join([heading, HEADER, *map(format_row, rows), ""]))


def main() -> int:
    cases = {case.name: functools.partial(measure, case) for case in CASES}
    return run_cases(__doc__, cases, HEADER, format_row, save)


if __name__ == "__main__":
    errors.run_command(main)
