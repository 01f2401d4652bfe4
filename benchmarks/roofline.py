"""Show where a training step spends its time, by the roofline that `plan` prints, for several recipes.

    python benchmarks/roofline.py [--only NAME ...] [--json FILE]

Each case is a recipe compiled for its GPUs. The columns of a part are milliseconds of a step; they add up to `step`.
`hidden` are collectives next to which kernels run, `B/param` the bytes that the optimizer's kernels move for each
trained parameter of a GPU, `launches` the kernels of a step, `recomputed` the FLOPs beyond those that the model needs.
No GPU is needed, as nothing runs: `measured` are the milliseconds of the same step in results/nvidia-h200-steps.json,
which a GPU has seen; most steps have run on none. With --only, the other cases keep their rows of FILE.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from cases import run_cases

from jaxopt_llm.config import Config, cli, fields
from jaxopt_llm.core import errors
from jaxopt_llm.core.files import replace_durably
from jaxopt_llm.planning import breakdown
from jaxopt_llm.planning.free_memory import GIB
from jaxopt_llm.planning.search.state_sizes import compute_state_sizes
from jaxopt_llm.planning.step_plan import Plan, make_plan
from jaxopt_llm.step.validation import validate

HERE = Path(__file__).parent
MEASURED = HERE / "results" / "nvidia-h200-steps.json"


@dataclass(frozen=True)
class Case:
    """Recipe on GPUs of one kind, with changed fields.

    measured: name of the same step in MEASURED; "" if it never ran.
    """

    name: str
    recipe: str
    gpu: str
    hosts: int = 1
    gpus_per_host: int = 8
    changes: dict[str, Any] = field(default_factory=dict)
    measured: str = ""

    def load(self) -> Config:
        return fields.replace_fields(cli.load_recipe(self.recipe), self.changes)


LOOP: dict[str, Any] = {"training.unroll": "none"}
FULL: dict[str, Any] = {"remat.policy": "full"}
ONE_DOCUMENT: dict[str, Any] = {"data.documents_per_row": 1}


def own_recipe(name: str) -> str:
    return str(HERE / "recipes" / name)


CASES = (
    Case("8b xla, loop", own_recipe("llama_8b.py"), "h200", 1, 1, {"training.attention": "xla"} | LOOP),
    Case("8b pallas, loop", own_recipe("llama_8b.py"), "h200", 1, 1, {"training.attention": "pallas"} | LOOP),
    Case("8b loop", own_recipe("llama_8b.py"), "h200", 1, 1, LOOP, "llama_8b, a document in each row, loop"),
    Case("8b", own_recipe("llama_8b.py"), "h200", 1, 1, measured="llama_8b, unrolled"),
    Case(
        "8b fp8, loop", own_recipe("llama_8b_fp8.py"), "h200", 1, 1, LOOP, "llama_8b_fp8, a document in each row, loop"
    ),
    Case("8b fp8", own_recipe("llama_8b_fp8.py"), "h200", 1, 1, measured="llama_8b_fp8, unrolled"),
    Case("8b lora, loop", own_recipe("llama_8b_lora.py"), "h200", 1, 1, LOOP),
    Case("8b lora", own_recipe("llama_8b_lora.py"), "h200", 1, 1, measured="llama_8b_lora, unrolled"),
    Case("1b loop", own_recipe("llama_1b.py"), "h200", 1, 1, LOOP),
    Case("1b", own_recipe("llama_1b.py"), "h200", 1, 1, measured="llama_1b, unrolled"),
    Case("8b fsdp 8, full", "llama3_8b.py", "h100", changes=FULL | ONE_DOCUMENT),
    Case("8b fsdp 8", "llama3_8b.py", "h100", changes=ONE_DOCUMENT),
    Case("8b fsdp 8, h200", "llama3_8b.py", "h200", changes=ONE_DOCUMENT),
    Case("10b fsdp 8, full", "10b.py", "h100", changes=FULL | ONE_DOCUMENT),
    Case("10b fsdp 8", "10b.py", "h100", changes=ONE_DOCUMENT),
    Case("mixtral", "mixtral_8x7b.py", "h200", changes=ONE_DOCUMENT),
    Case("qwen3 30b a3b", "qwen3_30b_a3b.py", "h200", changes=ONE_DOCUMENT),
    Case("deepseek v2 lite", "deepseek_v2_lite.py", "h200", changes=ONE_DOCUMENT),
    Case("70b", "llama2_70b.py", "h100", 16, changes=ONE_DOCUMENT),
    Case("8b 128k", "llama3_8b_128k.py", "h200", changes=ONE_DOCUMENT),
    Case("8b 128k, ring", "llama3_8b_128k.py", "h200", changes={"sharding.context_exchange": "ring"} | ONE_DOCUMENT),
    Case("8b 1m", "llama3_8b_1m.py", "h200", 8, changes=ONE_DOCUMENT),
)
# Columns of the table and the parts that they add up. All other parts are transfers.
PARTS = {
    "matmuls": breakdown.MATMULS,
    "attention": breakdown.ATTENTION,
    "others": breakdown.ELEMENTWISE,
    "casts": breakdown.CASTS,
    "stacks": breakdown.STACKS,
    "copies": breakdown.COPIES,
    "update": breakdown.OPTIMIZER,
}


def count_trained(config: Config) -> int:
    """Return the trained parameters of a GPU."""
    sizes = compute_state_sizes(config)
    assert sizes is not None, "`validate` rejects such a configuration"
    return sizes.layers.masters + sizes.non_layer.masters


def find_measured(case: Case) -> float | None:
    """Return the seconds of a step that a GPU has measured; None if it never ran."""
    rows = json.loads(MEASURED.read_text())["rows"] if case.measured else []
    return next((row["step_seconds"] for row in rows if row["case"] == case.measured), None)


def make_row(case: Case, config: Config, plan: Plan) -> dict[str, Any]:
    parts = {part.name: part for part in plan.speed.breakdown}
    kernels = {column: parts[name] for column, name in PARTS.items() if name in parts}
    transfers = [part for name, part in parts.items() if name not in PARTS.values()]
    update = kernels["update"].bytes / count_trained(config)
    return {
        "case": case.name,
        "recipe": Path(case.recipe).name,
        "changes": dict(case.changes),
        "chosen": plan.chosen,
        "gpus": f"{case.hosts * case.gpus_per_host} {plan.gpu}",
        "peak_bytes": plan.memory.peak,
        "fits": plan.spare >= 0,
        "step_seconds": plan.speed.step_seconds,
        "measured_seconds": find_measured(case),
        "tokens_per_second": plan.speed.tokens_per_second,
        "mfu": plan.speed.mfu,
        "milliseconds": {column: 1e3 * part.seconds for column, part in kernels.items()},
        "exposed_milliseconds": 1e3 * sum(part.seconds for part in transfers),
        "hidden_milliseconds": 1e3 * sum(part.hidden_seconds for part in transfers),
        "bytes": {column: part.bytes for column, part in kernels.items()},
        "update_bytes_per_parameter": update,
        "launches": sum(part.runs for part in kernels.values()),
        "flops": plan.flops,
        "recomputed_share": plan.flops / plan.model_flops - 1,
        "compile_seconds": plan.compile_seconds,
        "assumptions": list(plan.speed.assumptions),
    }


HEADER = (
    f"{'case':16} {'GPUs':>14} {'peak GiB':>8} | {'step ms':>9} {'measured':>8} {'MFU':>6} | "
    + " ".join(f"{column:>9}" for column in PARTS)
    + f" {'exposed':>9} {'hidden':>9} | {'B/param':>7} {'launches':>8} {'recomputed':>10}"
)


def format_row(row: Mapping[str, Any]) -> str:
    columns = (*(row["milliseconds"].get(column, 0.0) for column in PARTS), row["exposed_milliseconds"])
    measured = f"{1e3 * row['measured_seconds']:.1f}" if row["measured_seconds"] else "-"
    return (
        f"{row['case']:16} {row['gpus']:>14} {row['peak_bytes'] / GIB:8.2f} | {1e3 * row['step_seconds']:9.1f} "
        f"{measured:>8} {row['mfu']:6.1%} | {' '.join(f'{value:9.1f}' for value in columns)} "
        f"{row['hidden_milliseconds']:9.1f} | {row['update_bytes_per_parameter']:7.1f} {row['launches']:8,} "
        f"{row['recomputed_share']:10.1%}" + ("" if row["fits"] else "  does not fit")
    )


def save(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    report = {"jax": jax.__version__, "rows": rows}
    replace_durably(file, json.dumps(report, indent=2) + "\n")
    assumptions = dict.fromkeys(
        line for row in rows for line in row["assumptions"][:-1]
    )  # the last is what is left out
    lines = [
        f"by a roofline of the compiled programs, jax {jax.__version__}; `measured` is of one H200, where it has run",
        *assumptions,
        HEADER,
    ]
    replace_durably(file.with_suffix(".txt"), "\n".join([*lines, *map(format_row, rows), ""]))


def measure(case: Case) -> dict[str, Any]:
    config = case.load()
    validate(config)
    return make_row(case, config, make_plan(config, case.gpu, case.hosts, case.gpus_per_host))


def main() -> int:
    cases = {case.name: functools.partial(measure, case) for case in CASES}
    return run_cases(__doc__, cases, HEADER, format_row, save)


if __name__ == "__main__":
    errors.run_command(main)
