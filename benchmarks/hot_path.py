"""RMSNorm, rotary positions and SwiGLU as the model computes them: the rate at which they read and write memory.

    python benchmarks/hot_path.py [--runs 5] [--tokens 8192] [--json FILE]
    python benchmarks/hot_path.py --compiled [--gpu h200]

Of Llama 3 8B, in bf16, forward and backward each by itself. The least bytes are every operand read once and every
result written once; GB/s are these by the time, beside those of a copy of as many bytes as RMSNorm moves, in
alternation, medians of the runs. A kernel of our own would win what lies between the two at most: 10% are marked.

--compiled needs no GPU: the kernels that XLA makes of each, and the bytes that they read and write, beside the least.
On a CPU sizes are a toy's, and no rate means anything.
"""

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm import config as configuration
from jaxopt_llm import errors
from jaxopt_llm.model import layers
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.parallel import instructions, topology
from jaxopt_llm.parallel.mesh import MeshConfig, make_mesh
from jaxopt_llm.parallel.precision import PrecisionConfig
from jaxopt_llm.parallel.sharding import Placement, ShardingConfig
from jaxopt_llm.parallel.topology import CHIPS, chip_of

CALLS = 20  # in a row for each time taken: a call alone would measure the host as well
WINS = 0.1  # of the time: what a kernel of our own would have to save
TOY = ModelConfig(width=64, heads=4, kv_heads=2, head_dim=16, mlp_width=128)
# What is no kernel.
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")

Shapes = tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True)
class Operation:
    """function: of arrays of these shapes; those from `fixed` on have no gradient."""

    name: str
    function: Callable[..., Any]
    shapes: Shapes
    fixed: int

    @property
    def forward(self) -> tuple[Callable[..., Any], Shapes]:
        return self.function, self.shapes

    @property
    def backward(self) -> tuple[Callable[..., Any], Shapes]:
        """Of the operands and the gradients of the results."""
        operands, fixed = self.shapes[: self.fixed], self.fixed
        results = jax.tree.leaves(jax.eval_shape(self.function, *self.shapes))

        def run(*arrays: jax.Array) -> Any:
            given, rest, gradients = arrays[:fixed], arrays[fixed : len(self.shapes)], arrays[len(self.shapes) :]
            out, pull = jax.vjp(lambda *given: self.function(*given, *rest), *given)
            return pull(jax.tree.unflatten(jax.tree.structure(out), gradients))

        return run, (*operands, *self.shapes[fixed:], *results)


def operations(model: ModelConfig, tokens: int, device: jax.Device) -> list[Operation]:
    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    frequencies = layers.rotary_frequencies(model)
    placement = Placement(make_mesh(MeshConfig(), [device]), ShardingConfig(), PrecisionConfig())
    specs = layers.norm_specs("rms", False, (model.width,), ("embed",))

    def norm(x: jax.Array, tap: jax.Array, scale: jax.Array) -> jax.Array:
        """The scale's gradient is its tap's (see Placed)."""
        weights = placement.place(specs, {"scale": scale}, {"scale": tap}, keep=False)
        return layers.norm(weights, x, kind="rms", epsilon=model.norm_epsilon, zero_centered=False)

    def turn(q: jax.Array, k: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return layers.rotary(q, positions, frequencies), layers.rotary(k, positions, frequencies)

    heads = (array(1, tokens, count, model.head_dim) for count in (model.heads, model.kv_heads))
    scale, wide = array(model.width, dtype=jnp.float32), array(1, tokens, model.mlp_width)
    return [
        Operation("RMSNorm", norm, (array(1, tokens, model.width), scale, scale), 2),
        Operation("rotary", turn, (*heads, array(1, tokens, dtype=jnp.int32)), 2),
        Operation("SwiGLU", layers.recomputed(layers.HIDDEN["swiglu"]), (wide, wide), 2),
    ]


def passes(model: ModelConfig, tokens: int, device: jax.Device) -> dict[str, tuple[Callable[..., Any], Shapes]]:
    found: dict[str, tuple[Callable[..., Any], Shapes]] = {}
    for each in operations(model, tokens, device):
        found[f"{each.name} forward"], found[f"{each.name} backward"] = each.forward, each.backward
    return found


def least_bytes(function: Callable[..., Any], shapes: Shapes) -> int:
    arrays = (*shapes, *jax.tree.leaves(jax.eval_shape(function, *shapes)))
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in arrays)


# ---- As compiled.


def as_compiled(function: Callable[..., Any], shapes: Shapes, device: jax.Device) -> tuple[int, int]:
    """Kernels, and the bytes that they read and write."""
    sharding = NamedSharding(make_mesh(MeshConfig(), [device]), PartitionSpec())
    arguments = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding) for each in shapes]
    text = str(topology.compile(jax.jit(function).lower(*arguments)).as_text())
    entry = instructions.parse(text)["ENTRY"]
    kernels = [each for each in entry.values() if each.opcode not in FREE]
    moved = sum(
        sum(array.bytes for array in (*each.results, *(x for name in each.operands for x in entry[name].results)))
        for each in kernels
    )
    return len(kernels), moved


def compiled_row(name: str, function: Callable[..., Any], shapes: Shapes, device: jax.Device) -> dict[str, Any]:
    kernels, moved = as_compiled(function, shapes, device)
    return {"name": name, "kernels": kernels, "bytes": moved, "least_bytes": least_bytes(function, shapes)}


def compiled_line(row: dict[str, Any]) -> str:
    least, moved = row["least_bytes"], row["bytes"]
    return f"{row['name']:17} {row['kernels']:7} {moved / 1e6:9.1f} {least / 1e6:9.1f} {moved / least:7.3f}"


# ---- On a GPU.


def seconds(run: Callable[[], Any]) -> float:
    """Of one call."""
    clock = time.perf_counter()
    for _ in range(CALLS):
        last = run()
    jax.block_until_ready(last)
    return (time.perf_counter() - clock) / CALLS


def operands(shapes: Shapes) -> list[jax.Array]:
    random = np.random.default_rng(0)

    def one(each: jax.ShapeDtypeStruct) -> jax.Array:
        if each.dtype == jnp.int32:
            return jnp.broadcast_to(jnp.arange(each.shape[-1], dtype=jnp.int32), each.shape)
        return jnp.asarray(random.standard_normal(each.shape, np.float32), each.dtype)

    return [one(each) for each in shapes]


def measure(model: ModelConfig, tokens: int, runs: int) -> list[dict[str, Any]]:
    copied = jax.ShapeDtypeStruct((1, tokens, model.width), jnp.bfloat16)
    ways = {"copy": (lambda x: -x, (copied,)), **passes(model, tokens, jax.devices()[0])}
    prepared = {name: functools.partial(jax.jit(function), *operands(of)) for name, (function, of) in ways.items()}
    for run in prepared.values():
        jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in prepared}
    for _ in range(runs):
        for name, run in prepared.items():
            times[name].append(seconds(run))
    rows = [
        {"name": name, "least_bytes": least_bytes(*ways[name]), "seconds": statistics.median(taken)}
        for name, taken in times.items()
    ]
    for row in rows:
        row["bytes_per_second"] = row["least_bytes"] / row["seconds"]
    rate = rows[0]["bytes_per_second"]
    for row in rows[1:]:
        row["could_save"] = 1 - row["bytes_per_second"] / rate
    return rows


def measured_line(row: dict[str, Any], peak: float | None) -> str:
    share = "-" if peak is None else f"{row['bytes_per_second'] / peak:.0%}"
    saved = row.get("could_save")
    said = "" if saved is None else f"{saved:10.0%}" + ("  a kernel could win" if saved > WINS else "")
    return (
        f"{row['name']:17} {row['least_bytes'] / 1e6:9.1f} {row['seconds'] * 1e6:9.1f} "
        f"{row['bytes_per_second'] / 1e9:8.0f} {share:>6} {said}"
    )


def main() -> int:
    on_cpu = jax.default_backend() == "cpu"
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, help="in a row (default: 8192)")
    parser.add_argument("--runs", type=int, default=5, help="of each (default: 5)")
    parser.add_argument("--compiled", action="store_true", help="what XLA makes of them, without a GPU")
    parser.add_argument("--gpu", default="h200", choices=sorted(CHIPS), help="to compile for (default: h200)")
    parser.add_argument("--json", type=Path, help="file to write the figures to; the table goes beside it as .txt")
    asked = parser.parse_args()
    toy = on_cpu and not asked.compiled
    model = TOY if toy else configuration.load("llama3_8b.py").model
    tokens = asked.tokens or (64 if toy else 8192)
    report: dict[str, Any] = {"jax": jax.__version__, "tokens": tokens}
    if asked.compiled:
        (gpu,) = topology.gpu_topology(asked.gpu, gpus_per_host=1)
        rows = [compiled_row(name, *of, gpu) for name, of in passes(model, tokens, gpu).items()]
        report |= {"gpu": asked.gpu, "rows": rows}
        said = [
            f"{tokens} tokens of Llama 3 8B in bf16, compiled for {asked.gpu}, jax {jax.__version__}",
            f"{'':17} {'kernels':>7} {'MB':>9} {'least MB':>9} {'ratio':>7}",
            *map(compiled_line, rows),
        ]
    else:
        device = jax.devices()[0].device_kind
        chip = chip_of(device)
        peak = chip.memory_bytes_per_second if chip else None
        rows = measure(model, tokens, asked.runs)
        report |= {"device": device, "peak_bytes_per_second": peak, "rows": rows}
        said = [
            f"{tokens} tokens in bf16, {device}, jax {jax.__version__}",
            f"{'':17} {'least MB':>9} {'µs':>9} {'GB/s':>8} {'peak':>6} {'could save':>10}",
            *(measured_line(row, peak) for row in rows),
        ]
    print("\n".join(said))
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=2) + "\n")
        asked.json.with_suffix(".txt").write_text("\n".join(said) + "\n")
    return 0


if __name__ == "__main__":
    errors.run(main)
