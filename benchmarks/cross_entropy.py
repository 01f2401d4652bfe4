"""Compare the loss in chunks of tokens with the plain loss of whole logits: seconds of loss and gradients, and memory.

    python benchmarks/cross_entropy.py [--tokens 2048] [--vocabulary 32000] [--width 256] [--chunk 1024] [--runs 9]
                                       [--dtype float32] [--json FILE]

Runs on the first device. The two losses run in alternation, so that other load on the machine affects both. The ratio
is the median of the ratios of neighbouring runs. Memory is the compiler's figure for temporaries; it includes neither
the embedding table nor its gradient.
"""

import argparse
import functools
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm.compiler import hlo
from jaxopt_llm.config import MeshConfig, ModelConfig, PrecisionConfig, ShardingConfig
from jaxopt_llm.core import errors
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.parallel.gathering import attach_shardings, make_perturbations
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def plain_cross_entropy(logits: jax.Array, targets: jax.Array, vocabulary: int) -> jax.Array:
    """Return -log softmax(logits)[target], [B, S]. The backward keeps the logits and no second array of their size."""
    return _plain_forward(logits, targets, vocabulary)[0]


def _plain_forward(logits: jax.Array, targets: jax.Array, vocabulary: int) -> tuple[jax.Array, Any]:
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    real = logits if logits.shape[-1] == vocabulary else jnp.where(column < vocabulary, logits, -jnp.inf)
    log_sum = jax.nn.logsumexp(real, axis=-1)
    label = jnp.sum(jnp.where(column == targets[..., None], logits, 0.0), axis=-1)
    return log_sum - label, (logits, targets, log_sum)


def _plain_backward(vocabulary: int, residuals: Any, gradient: jax.Array) -> tuple[jax.Array, None]:
    logits, targets, log_sum = residuals
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    probability = jnp.where(column < vocabulary, jnp.exp(logits - log_sum[..., None]), 0.0)
    return gradient[..., None] * (probability - (column == targets[..., None])), None


plain_cross_entropy.defvjp(_plain_forward, _plain_backward)


def plain_head_loss(
    parts: Model, vocabulary: int, non_layer: Params, x: jax.Array, batch: Batch, context: Any, loss_weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Compute `Model.loss` from whole logits."""
    losses = plain_cross_entropy(parts.logits(non_layer, x, context), batch.targets, vocabulary)
    loss = jnp.sum(jnp.where(batch.loss_mask, losses, 0.0))
    return loss_weight * loss, loss


def contender(asked: argparse.Namespace, plain: bool) -> tuple[Any, tuple[Any, ...]]:
    """Return the compiled loss with gradients by table and input, and its arguments."""
    placement = Placement(
        make_mesh(MeshConfig(), jax.devices()[:1]), ShardingConfig(), PrecisionConfig(compute_dtype=asked.dtype)
    )
    model = ModelConfig(vocabulary_size=asked.vocabulary, width=asked.width)
    parts = Decoder(model, asked.chunk)
    head_loss = functools.partial(plain_head_loss, parts, asked.vocabulary) if plain else parts.loss
    specs = parts.specs["non_layer"]

    def loss_and_gradients(params: Params, x: jax.Array, batch: Batch) -> Any:
        context = parts.make_context(batch, placement)

        def objective(perturbations: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            non_layer = attach_shardings(specs, params, perturbations, placement, keep_gathered=True)
            return head_loss(non_layer, x, batch, context, jnp.float32(1 / asked.tokens))

        return jax.grad(objective, argnums=(0, 1), has_aux=True)(make_perturbations(specs, placement), x)

    random = np.random.default_rng(0)
    shape = (1, asked.tokens)
    ids = jnp.asarray(random.integers(0, asked.vocabulary, shape, np.int32))
    batch = Batch(tokens=ids, targets=ids, loss_mask=jnp.ones(shape, bool), segment_ids=ids, positions=ids)
    params = jax.tree.map(lambda spec: jnp.asarray(0.02 * random.normal(size=spec.shape), asked.dtype), specs)
    x = jnp.asarray(random.normal(size=(*shape, asked.width)), asked.dtype)
    arguments = params, x, batch
    return jax.jit(loss_and_gradients).lower(*arguments).compile(), arguments


def seconds(run: Any, arguments: tuple[Any, ...]) -> float:
    clock = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    return time.perf_counter() - clock


def main() -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=1024, help="tokens whose logits exist at a time")
    parser.add_argument("--runs", type=int, default=9, help="timed runs of each loss (default: 9)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="compute dtype")
    parser.add_argument("--json", type=Path, help="file for the figures; the table is written next to it as .txt")
    asked = parser.parse_args()
    contenders = {name: contender(asked, plain=name == "plain") for name in ("plain", "chunks")}
    for each in contenders.values():
        seconds(*each)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(asked.runs):
        for name, each in contenders.items():
            times[name].append(seconds(*each))
    ratio = statistics.median(b / a for a, b in zip(*times.values(), strict=True))
    report = {
        **{name: getattr(asked, name) for name in ("tokens", "vocabulary", "width", "chunk", "dtype")},
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "seconds": times,
        "temporaries": {name: hlo.read_memory(run).temporaries for name, (run, _) in contenders.items()},
        "ratio": ratio,
    }
    table = "\n".join(
        [
            f"{asked.tokens:,} tokens × {asked.vocabulary:,} × {asked.width}, {asked.dtype}, {report['device']}, jax "
            f"{jax.__version__}",
            f"{'':8} {'seconds':>8} {'MiB':>8}",
            *(
                f"{name:8} {statistics.median(each):8.3f} {report['temporaries'][name] / 2**20:8.1f}"
                for name, each in times.items()
            ),
            f"chunks / plain: {ratio:.3f}",
        ]
    )
    print(table)
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=2) + "\n")
        asked.json.with_suffix(".txt").write_text(table + "\n")
    return 0


if __name__ == "__main__":
    errors.run_command(main)
