"""Measure what `engine.step` adds to a step that plain JAX runs.

    python benchmarks/engine_step.py [--runs 7] [--steps 200] [--json FILE]

A small MLP trains on one device, so that most of a step is work of the host. Batches are NumPy arrays. The ways
alternate; a figure is the median over the runs of the median of a run's steps, and each step is waited for:

- plain: one jitted function of Flax and optax, which donates its state
- compiled: the engine's compiled step alone, for a batch that is already on the device
- engine: `engine.step`

Columns: milliseconds of a step, the difference from plain, and the same two for the processor time of the calling
thread, which other load on the machine changes less. What compiled adds is what the engine's program computes besides:
the norm of the gradients and the check that they are finite. The rest is the engine's work on the host.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxopt_llm
from jaxopt_llm.config import Config, MeshConfig

ROWS, INPUTS, WIDTH = 8, 16, 64
OPTIMIZER = optax.adamw(1e-3)
WARMUP = 20  # steps before those that are measured


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(INPUTS, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))[:, 0]


def compute_loss(model: Mlp, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def make_batch() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {"x": random.standard_normal((ROWS, INPUTS), np.float32), "y": random.standard_normal(ROWS, np.float32)}


def make_ways() -> dict[str, Callable[[], Any]]:
    """Return functions that take one step each, and return what to wait for."""
    batch = make_batch()
    graph, parameters = nnx.split(Mlp(nnx.Rngs(0)))
    plain_state = [(parameters, OPTIMIZER.init(parameters))]

    @jax.jit(donate_argnums=0)
    def update(state: Any, batch: Any) -> Any:
        parameters, optimizer = state
        loss, gradients = jax.value_and_grad(lambda each: compute_loss(nnx.merge(graph, each), batch))(parameters)
        updates, optimizer = OPTIMIZER.update(gradients, optimizer, parameters)
        return (optax.apply_updates(parameters, updates), optimizer), loss

    def step_plainly() -> Any:
        plain_state[0], loss = update(plain_state[0], batch)
        return loss

    engines = [
        jaxopt_llm.initialize(lambda: Mlp(nnx.Rngs(0)), compute_loss, batch, Config(mesh=MeshConfig(fsdp=1)), OPTIMIZER)
        for _ in range(2)
    ]
    placed, compiled_state = engines[0].place(batch), [engines[0].state]

    def step_compiled() -> Any:
        compiled_state[0], metrics = engines[0].run_step(compiled_state[0], placed)
        return metrics

    return {"plain": step_plainly, "compiled": step_compiled, "engine": lambda: engines[1].step(batch)}


def time_steps(step: Callable[[], Any], steps: int) -> tuple[float, float]:
    """Return the median seconds of a step, and those of the calling thread's processor time."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(steps):
        started = time.perf_counter(), time.thread_time()
        jax.block_until_ready(step())
        for each, clock, begin in zip(taken, (time.perf_counter, time.thread_time), started, strict=True):
            each.append(clock() - begin)
    wall, thread = map(statistics.median, taken)
    return wall, thread


def make_table(medians: dict[str, tuple[float, float]]) -> list[str]:
    lines = [f"{'':8} {'ms a step':>9} {'added':>7} {'ms thread':>9} {'added':>7}"]
    for name, figures in medians.items():
        pairs = zip(figures, medians["plain"], strict=True)
        lines.append(f"{name:8} " + " ".join(f"{1e3 * own:9.3f} {1e3 * (own - base):7.3f}" for own, base in pairs))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200, help="steps of a run (default: 200)")
    parser.add_argument("--json", type=Path, help="file for the figures; the table goes to a .txt beside it")
    options = parser.parse_args()
    ways = make_ways()
    for step in ways.values():
        time_steps(step, WARMUP)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(options.runs):
        for name, step in ways.items():
            seconds[name].append(time_steps(step, options.steps))
    medians = {}
    for name, each in seconds.items():
        wall, thread = (statistics.median(column) for column in zip(*each, strict=True))
        medians[name] = wall, thread
    device = jax.devices()[0].device_kind
    lines = [f"MLP of {ROWS} rows on one device ({device}), jax {jax.__version__}, median of {options.runs} runs"]
    lines += make_table(medians)
    print("\n".join(lines))
    if options.json:
        told: dict[str, Any] = {"jax": jax.__version__, "device": device, "steps": options.steps, "seconds": seconds}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
        options.json.with_suffix(".txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
