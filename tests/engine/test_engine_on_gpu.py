"""Tests of an engine on a real GPU: a user's transformer with `jaxopt_llm.attention`, and a state in host memory."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxopt_llm
from jaxopt_llm.compiler import hlo
from jaxopt_llm.config import Config
from jaxopt_llm.parallel import offload

pytestmark = pytest.mark.gpu

ROWS, LENGTH, WIDTH, LAYERS, WORDS = 8, 256, 256, 2, 512


def attend(query: jax.Array, key: jax.Array, value: jax.Array, is_causal: bool = False, **_: Any) -> jax.Array:
    return jaxopt_llm.attention(query, key, value, causal=is_causal)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, attention_fn=attend, decode=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.attention(self.norm(x), is_causal=True)


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.words = nnx.Embed(WORDS, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.vmap(Block)(rngs.split(LAYERS))
        self.head = nnx.Linear(WIDTH, WORDS, rngs=rngs)

    def __call__(self, words: jax.Array) -> jax.Array:
        run = nnx.scan(nnx.remat(lambda x, block: block(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(run(self.words(words), self.blocks))


def loss(model: Transformer, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["words"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean()


def make_batch(step: int) -> dict[str, np.ndarray]:
    words = np.random.default_rng(step).integers(WORDS, size=(ROWS, LENGTH), dtype=np.int32)
    return {"words": words, "next": (words + 1) % WORDS}


def make_engine(attention: str = "auto", offloads: bool = False) -> jaxopt_llm.Engine:
    config = Config(
        training=dict(attention=attention),  # type: ignore[arg-type]
        offload=dict(optimizer=offloads),  # type: ignore[arg-type]
    )
    return jaxopt_llm.initialize(lambda: Transformer(nnx.Rngs(0)), loss, make_batch(0), config, optax.adamw(3e-3))


def test_a_kernel_trains_a_users_model_as_xla_does(gpu: jax.Device) -> None:
    chosen, plain = make_engine(), make_engine("xla")
    for step in range(5):
        found, expected = (jax.device_get(engine.step(make_batch(step))) for engine in (chosen, plain))
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=0.01)
        np.testing.assert_allclose(found["grad_norm"], expected["grad_norm"], rtol=0.03)
    names = {choice.name for choice in chosen.program.model.attention.choices.values()}
    assert names and (gpu.platform != "gpu" or "xla" not in names)


def test_it_learns_with_its_state_on_the_host_and_continues(gpu: jax.Device, tmp_path: Path) -> None:
    engine = make_engine(offloads=True)
    losses = [float(engine.step(make_batch(step))["loss"]) for step in range(40)]
    assert losses[-1] < losses[0] / 2
    if gpu.platform == "gpu":
        assert offload.any_on_host(engine.state.moments)
    engine.save(tmp_path)
    again = make_engine(offloads=True)
    assert again.restore(tmp_path) == 40
    assert float(again.step(make_batch(40))["loss"]) == float(engine.step(make_batch(40))["loss"])


def test_the_peak_is_the_planned_one(gpu: jax.Device) -> None:
    counts = gpu.memory_stats()
    if counts is None:
        pytest.skip(f"JAX does not count the memory of a {gpu.platform} device")
    engine = make_engine()
    program = engine.program
    planned = hlo.read_memory(program.step.lower(program.state, program.batch).compile()).peak
    if counts["peak_bytes_in_use"] > counts["bytes_in_use"] + planned:
        pytest.skip("an earlier test of this process used more memory")
    engine.step(make_batch(0))["loss"].block_until_ready()
    # Blocks of the allocator are not split if they are at most 128 MiB larger than what is asked for.
    assert (gpu.memory_stats() or {})["peak_bytes_in_use"] - counts["bytes_in_use"] < planned + 2**27
