"""Models in Flax Linen and as plain functions, small, and their losses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from plain_training import Case
from zoo_images import CLIPPED, MOMENTUM, RULES, WIDTH, classify, images
from zoo_sequences import LAYERS, TOKENS, VOCABULARY, predict_next


def linear(features: int, *names: str) -> nn.Dense:
    return nn.Dense(features, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), names))


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), mask=mask)
        # At the kink of ReLU a difference by rounding turns a unit on or off.
        y = linear(WIDTH, "mlp", "embed")(nn.gelu(linear(2 * WIDTH, "embed", "mlp")(nn.LayerNorm()(x))))
        return x + nn.Dropout(0.1, deterministic=False)(y), None


class LinenDecoder(nn.Module):
    """Blocks under nn.scan and nn.remat, with dropout."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCABULARY, WIDTH)
        scan = nn.scan(
            nn.remat(LinenBlock, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return embed.attend(scan()(embed(tokens), None)[0])


class LinenCnn(nn.Module):
    """Convolutions with BatchNorm, as in flax/examples/imagenet."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (4, 8):
            x = nn.Conv(features, (3, 3), strides=(2, 2), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(x))
        return nn.Dense(8)(jnp.mean(x, axis=(1, 2)))


def make_tree() -> dict[str, Any]:
    random = np.random.RandomState(0)

    def weight(*shape: int) -> jax.Array:
        return jnp.asarray(random.randn(*shape) * 0.3, jnp.float32)

    return {
        "table": weight(VOCABULARY, WIDTH),
        "layers": {"mix": weight(LAYERS, 6, 6), "mlp": [weight(LAYERS, WIDTH, WIDTH), weight(LAYERS, WIDTH)]},
        "head": (weight(WIDTH, VOCABULARY), [jnp.zeros(VOCABULARY)]),
        "temperature": jnp.float32(1.0),
        "unused": weight(5),
    }


def run_tree(params: Any, tokens: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, jax.Array]:
        x = x + jnp.einsum("ts,bsd->btd", jnp.tril(weights["mix"]), x)
        kernel, bias = weights["mlp"]
        x = x + jnp.tanh(x @ kernel + bias)
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True)), jnp.mean(x)

    x, means = jax.lax.scan(layer, params["table"][tokens], params["layers"])
    kernel, (bias,) = params["head"]
    return (x @ kernel + bias) * params["temperature"] + jnp.sum(means)


BIASES = optax.multi_transform(
    {"bias": MOMENTUM, "weight": CLIPPED},
    lambda params: jax.tree.map(lambda leaf: "bias" if leaf.ndim < 2 else "weight", params),
)
CASES = {
    "linen_scan": Case(LinenDecoder(), predict_next, TOKENS, CLIPPED, RULES),
    "linen_batchnorm": Case(LinenCnn(), classify, images(8), MOMENTUM),
    "functions": Case(
        make_tree, lambda params, batch: predict_next(lambda tokens: run_tree(params, tokens), batch), TOKENS, BIASES
    ),
}
