"""Measure memory bandwidth of RMSNorm, RoPE and SwiGLU as the model computes them.

    python benchmarks/hot_path.py [--runs 5] [--tokens 32768] [--json FILE]
    python benchmarks/hot_path.py --compiled [--gpu h200] [--tokens 8192]

The shapes are those of Llama 3 8B in bf16; forward and backward are measured separately. The least bytes count every
operand read once and every result written once; GB/s are the least bytes divided by the time. They are compared with a
copy of as many bytes as RMSNorm moves. The runs alternate; figures are medians. The calls run in a row in one program,
so that its launch is not measured. The difference from the copy is the most that a kernel of our own could save; 10%
and more are marked.

--compiled needs no GPU: it lists the kernels that XLA makes of each operation and the bytes that they read and write,
next to the least bytes. On a CPU the sizes are tiny, so the rates mean nothing.
"""

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.compiler import instructions, topology
from jaxopt_llm.compiler.chips import CHIPS, chip_of
from jaxopt_llm.compiler.instructions import Computation, Instruction
from jaxopt_llm.config import MeshConfig, ModelConfig, PrecisionConfig, ShardingConfig, cli
from jaxopt_llm.core import errors
from jaxopt_llm.model import layers
from jaxopt_llm.model.rotary import Rotary
from jaxopt_llm.parallel.gathering import attach_shardings
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement

CALLS = 20  # calls in a row per measurement
# Measurements use more tokens, so that the kernel that counts the calls takes a negligible time.
TOKENS, COMPILED_TOKENS = 32_768, 8192
WINS = 0.1  # share of the time that a kernel of our own would have to save
TOY = ModelConfig(width=64, heads=4, kv_heads=2, head_dim=16, mlp_width=128)
# Opcodes that are not kernels.
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")

Pass = tuple[Callable[..., Any], tuple[Any, ...]]  # a function, and the shapes of its operands


def passes(model: ModelConfig, tokens: int, device: jax.Device) -> dict[str, Pass]:
    """Return the passes by name. A backward takes the residuals of its forward and the gradients of the results."""

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    rotary = Rotary.from_config(model, "global")
    placement = Placement(make_mesh(MeshConfig(), [device]), ShardingConfig(), PrecisionConfig())
    specs = layers.norm_specs("rms", False, (model.width,), ("embed",))

    def norm(scale: jax.Array, x: jax.Array, perturbation: jax.Array) -> jax.Array:
        """Compute RMSNorm. The gradient of the scale is that of its perturbation (see PlacedWeight)."""
        weights = attach_shardings(specs, {"scale": scale}, {"scale": perturbation}, placement, keep_gathered=False)
        return layers.norm(weights, x, kind="rms", epsilon=model.norm_epsilon, zero_centered=False)

    def turn(positions: jax.Array, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rotary(q, positions), rotary(k, positions)

    def activate(gate: jax.Array, up: jax.Array) -> jax.Array:
        return layers.recomputed(layers.ACTIVATIONS["swiglu"])(gate, up)

    heads = (array(1, tokens, count, model.head_dim) for count in (model.heads, model.kv_heads))
    scale, wide = array(model.width, dtype=jnp.float32), array(1, tokens, model.mlp_width)
    # (function, operands, number of leading operands without a gradient)
    operations: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
        "RMSNorm": (norm, (scale, array(1, tokens, model.width), scale), 1),
        "rotary": (turn, (array(1, tokens, dtype=jnp.int32), *heads), 1),
        "SwiGLU": (activate, (wide, wide), 0),
    }
    found: dict[str, Pass] = {}
    for name, (function, operands, fixed) in operations.items():

        def both(*operands: Any, function: Any = function, fixed: int = fixed) -> Any:
            return jax.vjp(functools.partial(function, *operands[:fixed]), *operands[fixed:])

        results, pull = jax.eval_shape(both, *operands)
        found[f"{name} forward"] = (function, operands)
        found[f"{name} backward"] = (lambda pull, gradients: pull(gradients), (pull, results))
    return found


def least_bytes(function: Callable[..., Any], operands: tuple[Any, ...]) -> int:
    arrays = jax.tree.leaves((operands, jax.eval_shape(function, *operands)))
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in arrays)


# ---- As compiled.


def compiled_text(function: Callable[..., Any], operands: tuple[Any, ...], device: jax.Device) -> str:
    sharding = NamedSharding(make_mesh(MeshConfig(), [device]), PartitionSpec())
    arguments = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding), operands)
    return str(topology.compile_without_gpu(jax.jit(function).lower(*arguments)).as_text())


def kernels_of(computation: Computation) -> list[Instruction]:
    return [each for each in computation.values() if each.opcode not in FREE]


def as_compiled(function: Callable[..., Any], operands: tuple[Any, ...], device: jax.Device) -> tuple[int, int]:
    """Return the number of kernels, and the bytes that they read and write."""
    entry = instructions.parse_module(compiled_text(function, operands, device))["ENTRY"]
    kernels = kernels_of(entry)
    moved = sum(
        sum(array.bytes for array in (*each.results, *(x for name in each.operands for x in entry[name].results)))
        for each in kernels
    )
    return len(kernels), moved


def compiled_row(name: str, of: Pass, device: jax.Device) -> dict[str, Any]:
    kernels, moved = as_compiled(*of, device)
    return {"name": name, "kernels": kernels, "bytes": moved, "least_bytes": least_bytes(*of)}


def compiled_line(row: dict[str, Any]) -> str:
    least, moved = row["least_bytes"], row["bytes"]
    return f"{row['name']:17} {row['kernels']:7} {moved / 1e6:9.1f} {least / 1e6:9.1f} {moved / least:7.3f}"


# ---- On a GPU.


def in_a_row(function: Callable[..., Any], calls: int = CALLS) -> Callable[..., Any]:
    """Return a program that calls the function repeatedly. The barrier keeps XLA from moving a call out of the loop."""

    def run(*operands: Any) -> Any:
        def again(_: jax.Array, results: Any) -> Any:
            return function(*jax.lax.optimization_barrier((operands, results))[0])

        return jax.lax.fori_loop(1, calls, again, function(*operands))

    return run


def seconds(run: Callable[[], Any]) -> float:
    """Return the seconds of one of the calls in a row."""
    clock = time.perf_counter()
    jax.block_until_ready(run())
    return (time.perf_counter() - clock) / CALLS


def random_arrays(shapes: Any) -> Any:
    random = np.random.default_rng(0)

    def one(each: jax.ShapeDtypeStruct) -> jax.Array:
        if each.dtype == jnp.int32:
            return jnp.broadcast_to(jnp.arange(each.shape[-1], dtype=jnp.int32), each.shape)
        return jnp.asarray(random.standard_normal(each.shape, np.float32), each.dtype)

    return jax.tree.map(one, shapes)


def measure(model: ModelConfig, tokens: int, runs: int) -> list[dict[str, Any]]:
    copied = jax.ShapeDtypeStruct((1, tokens, model.width), jnp.bfloat16)
    ways: dict[str, Pass] = {"copy": (lambda x: -x, (copied,)), **passes(model, tokens, jax.devices()[0])}
    prepared = {
        name: functools.partial(jax.jit(in_a_row(function)), *random_arrays(operands))
        for name, (function, operands) in ways.items()
    }
    for run in prepared.values():
        jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in prepared}
    for _ in range(runs):
        for name, run in prepared.items():
            times[name].append(seconds(run))
    rows: list[dict[str, Any]] = []
    for name, taken in times.items():
        least, median = least_bytes(*ways[name]), statistics.median(taken)
        rows.append({"name": name, "least_bytes": least, "seconds": median, "bytes_per_second": least / median})
    for row in rows[1:]:
        row["could_save"] = 1 - row["bytes_per_second"] / rows[0]["bytes_per_second"]
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
    parser.add_argument(
        "--tokens", type=int, help=f"tokens (default: {TOKENS} if measured, {COMPILED_TOKENS} with --compiled)"
    )
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each operation (default: 5)")
    parser.add_argument("--compiled", action="store_true", help="show the kernels of XLA, without a GPU")
    parser.add_argument("--gpu", default="h200", choices=sorted(CHIPS), help="GPU to compile for (default: h200)")
    parser.add_argument("--json", type=Path, help="file for the figures; the table is written next to it as .txt")
    asked = parser.parse_args()
    toy = on_cpu and not asked.compiled
    model = TOY if toy else cli.load_recipe("llama3_8b.py").model
    tokens = asked.tokens or (64 if toy else COMPILED_TOKENS if asked.compiled else TOKENS)
    report: dict[str, Any] = {"jax": jax.__version__, "tokens": tokens}
    if asked.compiled:
        (gpu,) = topology.gpu_topology(asked.gpu, gpus_per_host=1)
        rows = [compiled_row(name, of, gpu) for name, of in passes(model, tokens, gpu).items()]
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
    errors.run_command(main)
