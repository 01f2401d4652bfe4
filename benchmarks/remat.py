"""Measure what each remat policy keeps of a layer, and what it recomputes and gathers again, as compiled.

    python benchmarks/remat.py [--config llama2_7b.py] [--gpu h200] [--rows 1] [--json FILE]

The recipe is compiled with all of its layers and with half of them. The gathers of a layer and its bytes on the host
come from the difference. Its activations are those buffers at the peak that have half the size with half of the layers,
divided by the number of layers, less the gradient of a layer. FLOPs are of all matmuls of a step. All figures are of
one GPU, and no GPU is needed.
"""

import argparse
import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh

from jaxopt_llm.compiler import hlo
from jaxopt_llm.compiler.buffers import Buffer, find_peak
from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.compiler.topology import gpu_topology
from jaxopt_llm.config import Config, RematConfig, cli, fields
from jaxopt_llm.core import errors
from jaxopt_llm.model import layers, param, self_attention
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import gradient_sharding
from jaxopt_llm.step.program import make_program

MIB = 2**20
AUTODIFF = "autodiff alone, nothing recomputed"
HALF = ("query", "mlp_gate", "mlp_up")  # at least half of the bytes that a Llama layer keeps
SETTINGS = (
    RematConfig("none"),
    RematConfig(("query", "key", "attention", "mlp_gate", "mlp_up")),  # the most that 5% of extra FLOPs save
    RematConfig("dots"),
    RematConfig(("attention", "mlp_gate", "mlp_up")),
    RematConfig("save_qkv"),
    RematConfig("save_attention"),
    RematConfig("full"),
    RematConfig("full", every=4),
    RematConfig("none", offload=HALF),
    RematConfig("full", offload=("block_input",)),
)


@dataclasses.dataclass(frozen=True)
class Kept:
    """Figures of one GPU.

    activations, host: bytes that a layer keeps from its forward to its backward, on the GPU and in host memory; bytes
    on the host are moved there and back once. gathered: number of gathers of the weights of a layer. temporaries: bytes
    of the whole step. flops: of the matmuls of the step.
    """

    activations: float
    host: float
    gathered: float
    temporaries: int
    flops: int


def measure(config: Config, remat: RematConfig, gpu: str = "h200") -> Kept:
    """Compile the step with all layers and with half of them, on one host with the GPUs of the recipe's mesh."""
    depth = config.model.layers
    mesh = make_mesh(config.mesh, gpu_topology(gpu, 1, config.mesh.devices))
    placement = Placement(mesh, config.sharding, config.precision)
    deep, shallow = (_compile(config, remat, mesh, placement, count) for count in (depth, depth // 2))
    per_layer = jax.tree.leaves(param.period_specs(param_specs(config.model)["segment_0"]))
    width = np.dtype(config.precision.reduce_dtype).itemsize
    gradient = sum(width * math.prod(gradient_sharding(spec, placement).shard_shape(spec.shape)) for spec in per_layer)
    gathered = 2 * sum(math.prod(spec.shape) for spec in per_layer)

    def difference(of: Any) -> float:
        return (of(deep) - of(shallow)) / (depth - depth // 2)

    held = _of_all_layers(deep.alive, shallow.alive, {depth, depth // remat.every})
    return Kept(
        activations=held / depth - gradient,
        host=difference(lambda each: each.memory.host),
        gathered=difference(lambda each: each.gathered) / gathered,
        temporaries=deep.memory.temporaries,
        flops=deep.flops,
    )


@dataclasses.dataclass(frozen=True)
class _Compiled:
    memory: hlo.Memory
    alive: tuple[Buffer, ...]
    gathered: int
    flops: int


def _compile(config: Config, remat: RematConfig, mesh: Mesh, placement: Placement, depth: int) -> _Compiled:
    program = make_program(
        dataclasses.replace(fields.replace_fields(config, {"model.layers": depth}), remat=remat), placement
    )
    peak = find_peak(program.step.lower(program.state, program.batch))
    text = str(peak.compiled.as_text())
    gathers = [each for each in hlo.list_collectives(text, mesh) if each.kind == "all-gather"]
    gathered = sum(each.array_bytes * each.times for each in gathers)
    return _Compiled(peak.memory, peak.temporaries, gathered, hlo.count_dot_flops(text))


def _of_all_layers(deep: Sequence[Buffer], shallow: Sequence[Buffer], counts: set[int]) -> int:
    """Return the bytes of the temporaries that are half as large with half of the layers.

    The other buffers that are alive at the peak differ between the two programs, because XLA schedules each separately.
    counts: the number of layers, and of groups of layers that are recomputed together.
    """
    there = {(each.dtype, each.shape) for each in shallow}

    def halves(each: Buffer) -> bool:
        return any(
            size in counts and (each.dtype, (*each.shape[:i], size // 2, *each.shape[i + 1 :])) in there
            for i, size in enumerate(each.shape)
        )

    return sum(each.bytes for each in deep if halves(each))


@contextlib.contextmanager
def autodiff_alone() -> Iterator[None]:
    """Make blocks also keep elementwise results, as plain JAX autodiff does."""
    with contextlib.ExitStack() as patched:
        for module in (layers, self_attention):
            patched.enter_context(mock.patch.object(module, "recomputed", lambda function: function))
        yield


def name(remat: RematConfig) -> str:
    said = remat.policy if isinstance(remat.policy, str) else " ".join(remat.policy)
    said += f", every {remat.every}" if remat.every > 1 else ""
    return said + (f", offload {' '.join(remat.offload)}" if remat.offload else "")


HEADER = (
    f"{'policy':40} | {'MiB a layer':>11} {'off':>4} {'host MiB':>8} {'gathers':>7} | {'step GiB':>8} {'PFLOP':>6} "
    f"{'extra':>6}"
)


def line(policy: str, kept: Kept, none: Kept) -> str:
    return (
        f"{policy:40} | {kept.activations / MIB:11.1f} {1 - kept.activations / none.activations:4.0%} "
        f"{kept.host / MIB:8.1f} {kept.gathered:7.2f} | {kept.temporaries / 2**30:8.2f} {kept.flops / 1e15:6.3f} "
        f"{kept.flops / none.flops - 1:6.1%}"
    )


def main() -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama2_7b.py", help="recipe (default: llama2_7b.py)")
    parser.add_argument("--gpu", default="h200", choices=sorted(CHIPS), help="GPU to compile for (default: h200)")
    parser.add_argument("--rows", type=int, default=1, metavar="N", help="sequences on each GPU (default: 1)")
    parser.add_argument("--json", type=Path, help="file for the figures; the table is written next to it as .txt")
    asked = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    config = cli.load_recipe(asked.config)
    training = dataclasses.replace(config.training, batch_size=asked.rows * config.mesh.batch_shards, accumulation=1)
    config = dataclasses.replace(config, training=training)
    rows: dict[str, Kept] = {}
    said = [f"{asked.config} on {config.mesh.devices} {CHIPS[asked.gpu].name}, jax {jax.__version__}", HEADER]
    print("\n".join(said), flush=True)
    with autodiff_alone():
        autodiff = measure(config, RematConfig("none"), asked.gpu)
    for remat in SETTINGS:
        rows[name(remat)] = measure(config, remat, asked.gpu)
        said.append(line(name(remat), rows[name(remat)], rows["none"]))
        print(said[-1], flush=True)
    rows[AUTODIFF] = autodiff
    said.append(line(AUTODIFF, autodiff, rows["none"]))
    print(said[-1], flush=True)
    if asked.json:
        report = {"config": asked.config, "gpu": asked.gpu, "jax": jax.__version__}
        figures = {policy: dataclasses.asdict(kept) for policy, kept in rows.items()}
        asked.json.write_text(json.dumps(report | {"rows": figures}, indent=2) + "\n")
        asked.json.with_suffix(".txt").write_text("\n".join(said) + "\n")
    return 0


if __name__ == "__main__":
    errors.run_command(main)
