"""Show what the step that writes one token reads and writes, next to the least that it needs, for several cases.

    python benchmarks/decode_bytes.py [--only NAME ...] [--json FILE]

Each case is a recipe's model in bfloat16 with a full cache, compiled for its GPUs. The least is each weight once, but
for the embedding, of which only rows are looked up, and each slot of the cache once. The time is the roofline of
`plan`, of the kernels alone; on several GPUs the collectives come on top. No GPU is needed; nothing runs, so no time is
measured. With --only, the other cases keep their rows of FILE.
"""

import functools
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import run_cases

from jaxopt_llm.compiler import hlo, topology
from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.compiler.instructions import parse_module
from jaxopt_llm.config import MeshConfig, ModelConfig, PrecisionConfig, ShardingConfig, cli
from jaxopt_llm.core import errors
from jaxopt_llm.core.files import replace_durably
from jaxopt_llm.execution import scan
from jaxopt_llm.execution.decode import empty_rows, make_programs
from jaxopt_llm.model import param
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import parameter_sharding
from jaxopt_llm.planning.kernel_bytes import estimate_kernel, list_fused, walk_kernels


@dataclass(frozen=True)
class Case:
    """Step for `rows` sequences whose cache has `slots` slots, all filled."""

    name: str
    recipe: str
    rows: int
    slots: int
    mesh: Mapping[str, int] = field(default_factory=dict)
    gpu: str = "h100"


CASES = (
    Case("8b, 1", "llama3_8b.py", 1, 4096),
    Case("8b, 32", "llama3_8b.py", 32, 4096),
    Case("8b, 256, h200", "llama3_8b.py", 256, 2048, gpu="h200"),  # does not fit into 80 GB
    Case("8b, 256, tensor 2", "llama3_8b.py", 256, 2048, {"tensor": 2}),
    Case("8b, 32, tensor 8", "llama3_8b.py", 32, 4096, {"tensor": 8}),
    Case("8b, 32, fsdp 8", "llama3_8b.py", 32, 4096, {"fsdp": 8}),
    Case("gemma 27b, 8", "gemma3_27b_lora.py", 8, 8192),  # 5 of 6 layers have a window of 1024
    Case("70b, 32, tensor 8", "llama2_70b.py", 32, 4096, {"tensor": 8}),
)


@dataclass(frozen=True)
class Compiled:
    """The compiled step, the seconds that it took to compile, and the least bytes that a device needs."""

    program: jax.stages.Compiled
    seconds: float
    weights: int
    cache: int


def compile_step(config: ModelConfig, gpu: str, mesh: MeshConfig, rows: int, slots: int) -> Compiled:
    """Compile the step that draws a token in each row, with weights in bfloat16."""
    model, devices = Decoder(config), topology.gpu_topology(gpu, 1, mesh.devices)
    placement = Placement(make_mesh(mesh, devices), ShardingConfig(3), PrecisionConfig(compute_dtype="bfloat16"))
    params = {name: _abstract(name, specs, placement) for name, specs in model.specs.items()}
    heads = None if config.mla.kv_rank else "kv_heads"
    caches = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=placement.activation("batch", heads, None, "head_dim")
        ),
        jax.eval_shape(lambda: scan.make_caches(model, rows, slots, jnp.bfloat16, placement)),
    )
    programs, state = make_programs(model, placement, config.vocabulary_size, caches), empty_rows(rows)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement.replicated),
        (state, np.ones(rows, np.bool_)),
    )
    began = time.perf_counter()
    lowered = topology.lower_without_gpu(programs.step, params, caches, *arguments)
    program = topology.compile_without_gpu(lowered)
    seconds = time.perf_counter() - began
    read = {**params, "non_layer": {**params["non_layer"]}}
    if not config.tied_head:
        del read["non_layer"]["embedding"]
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(read)) // mesh.tensor
    cache = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(caches))
    return Compiled(program, seconds, weights, cache)


def _abstract(name: str, specs: Params, placement: Placement) -> Any:
    def abstract(specs: Params) -> Params:
        return jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16, sharding=parameter_sharding(spec, placement)),
            specs,
        )

    if name == "non_layer":
        return abstract(specs)
    periods = jax.tree.leaves(specs)[0].shape[0]
    return (abstract(param.period_specs(specs)),) * periods


def count_work(program: jax.stages.Compiled, gpu: str) -> tuple[int, float]:
    """Return the bytes that the kernels of a device move, and their seconds by the roofline, without collectives."""
    module, moved, seconds = parse_module(str(program.as_text())), 0, 0.0
    for computation, kernel, runs in walk_kernels(module):
        if kernel.opcode.removesuffix("-start") not in hlo.COLLECTIVES:
            cost = estimate_kernel(module, computation, kernel, list_fused(module, kernel), CHIPS[gpu])
            moved, seconds = moved + runs * cost.bytes, seconds + runs * cost.seconds
    return moved, seconds


def measure(case: Case) -> dict[str, Any]:
    step = compile_step(cli.load_recipe(case.recipe).model, case.gpu, MeshConfig(**case.mesh), case.rows, case.slots)
    moved, seconds = count_work(step.program, case.gpu)
    memory = step.program.memory_analysis()
    assert memory is not None
    return {
        "case": case.name,
        "recipe": case.recipe,
        "gpu": case.gpu,
        "mesh": dict(case.mesh),
        "rows": case.rows,
        "slots": case.slots,
        "weight_bytes": step.weights,
        "cache_bytes": step.cache,
        "bytes": moved,
        "ratio": moved / (step.weights + step.cache),
        "kernel_seconds": seconds,
        "tokens_per_second": None if case.mesh else case.rows / seconds,
        "temporary_bytes": memory.temp_size_in_bytes,
        "compile_seconds": step.seconds,
    }


HEADER = (
    f"{'case':18} {'recipe':14} {'slots':>5} | {'weights GB':>10} {'cache GB':>8} {'moved GB':>8} {'ratio':>5} | "
    f"{'kernels ms':>10} {'tokens/s':>8} | {'temporaries GB':>14} {'compile s':>9}"
)


def format_row(row: Mapping[str, Any]) -> str:
    weights, cache, moved, temporary = (
        row[name] / 1e9 for name in ("weight_bytes", "cache_bytes", "bytes", "temporary_bytes")
    )
    rate = "-" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}"
    return (
        f"{row['case']:18} {row['recipe']:14} {row['slots']:5} | {weights:10.2f} {cache:8.2f} {moved:8.2f} "
        f"{row['ratio']:5.2f} | {1e3 * row['kernel_seconds']:10.2f} {rate:>8} | "
        f"{temporary:14.2f} {row['compile_seconds']:9.1f}"
    )


def save(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    replace_durably(file, json.dumps({"jax": jax.__version__, "rows": rows}, indent=2) + "\n")
    lines = [
        f"by a roofline of the compiled programs, jax {jax.__version__}; nothing is measured",
        "for H100s, or the GPU that a case names; of one device and one token of every row, without collectives",
        HEADER,
    ]
    replace_durably(file.with_suffix(".txt"), "\n".join([*lines, *map(format_row, rows), ""]))


def main() -> int:
    cases = {case.name: functools.partial(measure, case) for case in CASES}
    return run_cases(__doc__, cases, HEADER, format_row, save)


if __name__ == "__main__":
    errors.run_command(main)
