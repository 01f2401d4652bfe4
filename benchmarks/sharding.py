"""Compare memory and communication of each placement on 2 to 512 GPUs, as compiled, with the formulas of the README.

    python benchmarks/sharding.py [--config 10b.py] [--gpu h200] [--devices 2 4 8 64 512] [--json FILE]

For every number of GPUs: ZeRO stages 0 to 3 over `fsdp`, then stage 3 with `tensor` 2, 4 and 8 inside a host. Every GPU
has as many rows as in the recipe's own mesh, in one microbatch. Bytes are of one GPU and one step. No GPU is needed. A
row of the table is exact even if it does not fit into the memory of the GPU.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.config import Config, MeshConfig, cli
from jaxopt_llm.core import errors
from jaxopt_llm.model import param
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.planning.step_plan import make_plan
from jaxopt_llm.step.validation import validate

HOST = 8  # GPUs per host
GIB = 2**30


def placements(devices: int) -> Iterator[tuple[int, int]]:
    """Yield (ZeRO stage, tensor)."""
    yield from ((stage, 1) for stage in range(4))
    yield from ((3, tensor) for tensor in (2, 4, 8) if devices % tensor == 0)


def placed(config: Config, devices: int, stage: int, tensor: int) -> Config:
    rows = config.training.batch_size // config.training.accumulation // config.mesh.batch_shards
    mesh = MeshConfig(fsdp=devices // tensor, tensor=tensor)
    return dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, batch_size=rows * mesh.batch_shards, accumulation=1),
        mesh=mesh,
        sharding=dataclasses.replace(config.sharding, zero_stage=stage),  # type: ignore[arg-type]
    )


def formula(config: Config) -> dict[str, float]:
    """Return bytes of one GPU by the formulas: at rest, moved over `fsdp`, moved over `tensor`.

    For AdamW, bf16 compute, float32 reductions, and remat full. Stage 3 gathers the tables once a step and all other
    weights twice. Tensor parallelism reduces five activations per layer, one of them recomputed.
    """
    n, tensor, stage = config.mesh.batch_shards, config.mesh.tensor, config.sharding.zero_stage
    specs = param_specs(config.model)
    non_layer = param.count_parameters(specs["non_layer"]) / tensor
    parameters = param.count_parameters(specs) / tensor
    share = (n - 1) / n
    gradient, gather = 4 * share * parameters, 2 * share * parameters
    moved = {
        0: 2 * gradient,
        1: gradient + gather,
        2: gradient + gather,
        3: gradient + 2 * gather - 2 * share * non_layer,
    }
    rows = config.training.batch_size // n
    activation = 2 * rows * config.training.sequence_length * config.model.width
    reductions = 5 * config.model.layers * 2 * (tensor - 1) / tensor * activation
    rest = {0: 12.0, 1: 2 + 12 / n, 2: 2 + 12 / n, 3: 12 / n}
    return {"resting": rest[stage] * parameters, "moved_fsdp": moved[stage], "moved_tensor": reductions}


def measure(config: Config, gpu: str, devices: int, stage: int, tensor: int) -> dict[str, Any]:
    one = placed(config, devices, stage, tensor)
    validate(one)
    plan = make_plan(one, gpu, max(devices // HOST, 1), min(devices, HOST))
    moved = {axis: sum(each.bytes for each in plan.collectives if each.axes == (axis,)) for axis in ("fsdp", "tensor")}
    kinds: dict[str, int] = {}
    for each in plan.collectives:
        kinds[each.kind] = kinds.get(each.kind, 0) + each.bytes
    return {
        "devices": devices,
        "zero_stage": stage,
        "tensor": tensor,
        "memory": dataclasses.asdict(plan.memory) | {"peak": plan.memory.peak},
        "fits": plan.spare >= 0,
        "resting": plan.memory.parameters + plan.memory.optimizer,
        "moved_fsdp": moved["fsdp"],
        "moved_tensor": moved["tensor"],
        "moved_by_kind": kinds,
        "formula": formula(one),
        "compile_seconds": plan.compile_seconds,
    }


HEADER = (
    f"{'N':>4} {'stage':>5} {'tensor':>6} | {'params':>7} {'grads':>7} {'optim':>7} {'activ':>7} {'gathered':>8} "
    f"{'other':>6} {'peak':>7} {'fits':>4} | {'rest':>7} {'formula':>7} | {'fsdp':>7} {'formula':>7} {'tensor':>7} "
    f"{'formula':>7} | {'compile':>7}"
)


def line(row: dict[str, Any]) -> str:
    def gib(size: float, width: int = 7) -> str:
        return f"{size / GIB:{width}.2f}"

    memory, expected = row["memory"], row["formula"]
    kinds = [gib(memory[name]) for name in ("parameters", "gradients", "optimizer", "activations")]
    sizes = [gib(row["resting"]), gib(expected["resting"])]
    moved = [gib(each[name]) for name in ("moved_fsdp", "moved_tensor") for each in (row, expected)]
    return (
        f"{row['devices']:4} {row['zero_stage']:5} {row['tensor']:6} | {' '.join(kinds)} "
        f"{gib(memory['gathered_weights'], 8)} {gib(memory['other'], 6)} {gib(memory['peak'])} "
        f"{'yes' if row['fits'] else 'no':>4} | {' '.join(sizes)} | {' '.join(moved)} | {row['compile_seconds']:5.1f} s"
    )


def main() -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="10b.py", help="recipe (default: 10b.py)")
    parser.add_argument("--gpu", default="h200", choices=sorted(CHIPS), help="GPU to compile for (default: h200)")
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8, 64, 512], metavar="N", help="GPUs")
    parser.add_argument("--json", type=Path, help="file for the figures; the table is written next to it as .txt")
    asked = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    config = cli.load_recipe(asked.config)
    rows: list[dict[str, Any]] = []
    said = [f"{asked.config} on {CHIPS[asked.gpu].name}, jax {jax.__version__}; GiB of one GPU and one step", HEADER]
    print("\n".join(said), flush=True)
    for devices in asked.devices:
        for stage, tensor in placements(devices):
            rows.append(measure(config, asked.gpu, devices, stage, tensor))
            said.append(line(rows[-1]))
            print(said[-1], flush=True)
            if asked.json:  # after each row, so that an interrupted run keeps its rows
                report = {"config": asked.config, "gpu": asked.gpu, "jax": jax.__version__, "rows": rows}
                asked.json.write_text(json.dumps(report, indent=2) + "\n")
                asked.json.with_suffix(".txt").write_text("\n".join(said) + "\n")
    return 0


if __name__ == "__main__":
    errors.run_command(main)
