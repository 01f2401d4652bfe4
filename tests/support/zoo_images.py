"""Models of images and vectors in Flax NNX, small, with the structure of well-known ones, and their losses."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from plain_training import ROWS, Batch, Case

from jaxopt_llm.config import OptimizerConfig

WIDTH, CLASSES = 16, 8
RULES: dict[str, str | None] = {"mlp": "tensor", "embed": None}
HEADS = RULES | {"heads": "tensor"}
MOMENTUM = optax.sgd(0.05, momentum=0.9)
ADAMW = optax.adamw(1e-2, eps=1e-3, weight_decay=0.01)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), ADAMW)


def named(*names: str) -> Any:
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)


def images(size: int, channels: int = 1) -> Callable[[np.random.RandomState], Batch]:
    def batch(random: np.random.RandomState) -> Batch:
        image = random.randn(ROWS, size, size, channels).astype(np.float32)
        return {"image": image, "label": random.randint(0, CLASSES, ROWS)}

    return batch


def classify(model: Any, batch: Any) -> Any:
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return jnp.mean(losses), {"accuracy": jnp.mean(jnp.argmax(logits, -1) == batch["label"])}


class Mlp(nnx.Module):
    def __init__(self, inputs: int, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(inputs, 2 * WIDTH, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, CLASSES, kernel_init=named("mlp", "embed"), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x.reshape(x.shape[0], -1))))


class VitBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(
            2,
            WIDTH,
            kernel_init=named("embed", "heads"),
            dropout_rate=0.1,
            deterministic=False,
            decode=False,
            rngs=rngs,
        )
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, kernel_init=named("mlp", "embed"), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Vit(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.patches = nnx.Conv(1, WIDTH, (4, 4), strides=(4, 4), padding="VALID", rngs=rngs)
        self.cls = nnx.Param(jnp.zeros((1, 1, WIDTH)))
        self.positions = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (1, 5, WIDTH)))
        self.blocks = nnx.List([VitBlock(rngs)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.patches(x).reshape(x.shape[0], 4, WIDTH)
        x = jnp.concatenate([jnp.tile(self.cls[...], (x.shape[0], 1, 1)), x], axis=1) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class ResNetBlock(nnx.Module):
    """Block of flax/examples/imagenet: two convolutions with BatchNorm, and a projection where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, rngs: nnx.Rngs) -> None:
        def conv(inputs: int, size: int, stride: int) -> nnx.Conv:
            return nnx.Conv(inputs, outputs, (size, size), strides=(stride, stride), use_bias=False, rngs=rngs)

        self.convs = nnx.List([conv(inputs, 3, stride), conv(outputs, 3, 1)])
        zeros = nnx.initializers.zeros_init()
        self.norms = nnx.List([nnx.BatchNorm(outputs, rngs=rngs), nnx.BatchNorm(outputs, scale_init=zeros, rngs=rngs)])
        self.project = nnx.List([conv(inputs, 1, stride), nnx.BatchNorm(outputs, rngs=rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norms[0](self.convs[0](x)))
        return nnx.relu(self.norms[1](self.convs[1](y)) + self.project[1](self.project[0](x)))


class ResNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.blocks = nnx.List([ResNetBlock(8, 16, 2, rngs)])
        self.head = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2)))


class Cnn(nnx.Module):
    """Model of flax/examples/mnist: two convolutions, BatchNorm, dropout, pooling and two linear layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.convs = nnx.List([nnx.Conv(1, 4, (3, 3), rngs=rngs), nnx.Conv(4, 8, (3, 3), rngs=rngs)])
        self.norms = nnx.List([nnx.BatchNorm(4, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)])
        self.drops = nnx.List([nnx.Dropout(0.025, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)])
        self.hidden, self.head = nnx.Linear(32, WIDTH, rngs=rngs), nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.avg_pool(nnx.relu(self.norms[0](self.drops[0](self.convs[0](x)))), (2, 2), strides=(2, 2))
        x = nnx.avg_pool(nnx.relu(self.norms[1](self.convs[1](x))), (2, 2), strides=(2, 2))
        return self.head(nnx.relu(self.drops[1](self.hidden(x.reshape(x.shape[0], -1)))))


class Vae(nnx.Module):
    """Model of flax/examples/vae: an encoder of mean and variance, a draw, and a decoder."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden, self.mean = nnx.Linear(64, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 4, rngs=rngs)
        self.log_variance, self.up = nnx.Linear(WIDTH, 4, rngs=rngs), nnx.Linear(4, WIDTH, rngs=rngs)
        self.out, self.rngs = nnx.Linear(WIDTH, 64, rngs=rngs), rngs

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        x = nnx.relu(self.hidden(x))
        mean, log_variance = self.mean(x), self.log_variance(x)
        code = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(self.rngs.noise(), mean.shape)
        return self.out(nnx.relu(self.up(code))), mean, log_variance


def evidence(model: Vae, batch: Any) -> Any:
    x = nnx.sigmoid(batch["image"].reshape(batch["image"].shape[0], -1))
    logits, mean, log_variance = model(x)
    likelihood = jnp.mean(jnp.sum(optax.sigmoid_binary_cross_entropy(logits, x), -1))
    divergence = -0.5 * jnp.mean(jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), -1))
    return 0.1 * (likelihood + divergence), {"likelihood": likelihood, "divergence": divergence}


class UNet(nnx.Module):
    """Denoiser: one level down and up with a skip connection, group norms, and the time as an embedding.

    The window of `up` divides by fsdp 2. XLA divides its gradient wrongly where `tensor` holds copies of the images.
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = named("embed", "mlp")
        self.time = nnx.Sequential(nnx.Linear(8, 8, kernel_init=init, rngs=rngs), nnx.silu, nnx.Linear(8, 8, rngs=rngs))
        self.first, self.down = nnx.Conv(1, 8, (3, 3), rngs=rngs), nnx.Conv(8, 8, (3, 3), strides=(2, 2), rngs=rngs)
        self.middle, self.norm = nnx.Conv(8, 8, (3, 3), rngs=rngs), nnx.GroupNorm(8, num_groups=2, rngs=rngs)
        self.up = nnx.ConvTranspose(8, 8, (2, 2), strides=(2, 2), rngs=rngs)
        self.last, self.rngs = nnx.Conv(16, 1, (3, 3), rngs=rngs), rngs

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        angles = time[:, None] * 2.0 ** jnp.arange(4)
        embedding = self.time(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))[:, None, None]
        skip = nnx.silu(self.first(x) + embedding)
        y = nnx.silu(self.norm(self.middle(nnx.silu(self.down(skip))) + embedding))
        return self.last(jnp.concatenate([skip, self.up(y)], -1))


def denoise(model: UNet, batch: Any) -> jax.Array:
    x = batch["image"]
    time = jax.random.uniform(model.rngs.time(), x.shape[:1])
    noise = jax.random.normal(model.rngs.noise(), x.shape)
    share = time[:, None, None, None]
    return jnp.mean((model(jnp.sqrt(1 - share) * x + jnp.sqrt(share) * noise, time) - noise) ** 2)


class Ensemble(nnx.Module):
    """Four models at once, by nnx.vmap."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        metadata = {nnx.PARTITION_NAME: "members"}
        self.members = nnx.split_rngs(splits=4)(nnx.vmap(lambda rngs: Mlp(16, rngs), transform_metadata=metadata))(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.mean(nnx.vmap(lambda member, x: member(x), in_axes=(0, None))(self.members, x), axis=0)


def with_l2(model: Any, batch: Any) -> Any:
    loss, metrics = classify(model, batch)
    squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return loss + 0.01 * squares, metrics | {"squares": squares}


def with_gradient_penalty(model: Any, batch: Any) -> jax.Array:
    slopes = jax.grad(lambda x: jnp.sum(nnx.logsumexp(model(x), axis=-1)))(batch["image"])
    return classify(model, batch)[0] + 0.5 * jnp.mean((jnp.sum(slopes**2, axis=(1, 2, 3)) - 1) ** 2)


class Clip(nnx.Module):
    """Two towers and a temperature, a scalar parameter."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.image, self.text = Mlp(16, rngs), Mlp(12, rngs)
        self.scale = nnx.Param(jnp.log(10.0))

    def __call__(self, image: jax.Array, text: jax.Array) -> jax.Array:
        left, right = self.image(image), self.text(text)
        left, right = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (left, right))
        return jnp.exp(self.scale[...]) * left @ right.T


def contrast(model: Clip, batch: Any) -> jax.Array:
    logits = model(batch["image"], batch["text"])
    rows = jnp.arange(logits.shape[0])
    each = [optax.softmax_cross_entropy_with_integer_labels(x, rows).mean() for x in (logits, logits.T)]
    return (each[0] + each[1]) / 2


def pairs(random: np.random.RandomState) -> Batch:
    return {"image": random.randn(ROWS, 16).astype(np.float32), "text": random.randn(ROWS, 12).astype(np.float32)}


def mask_norms(params: Any) -> Any:
    """Return True for the parameters that weight decay changes: those that are no bias and no scale of a norm."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ("bias", "scale"), params)


def label(params: Any) -> Any:
    first = jax.tree_util.tree_leaves_with_path(params)[0][0][0].key
    return {name: "first" if name == first else "rest" for name in params}


MASKED = optax.adamw(1e-2, eps=1e-3, weight_decay=0.1, mask=mask_norms)
TWO_RATES = optax.multi_transform({"first": MOMENTUM, "rest": CLIPPED}, label)
LAMB = optax.lamb(1e-2, eps=1e-3, weight_decay=0.01)
SETTINGS = OptimizerConfig(
    learning_rate=1e-2, epsilon=1e-3, weight_decay=0.1, clip_norm=0.5, decay_groups=("*/kernel=1", "*=0")
)
SGD_SETTINGS = OptimizerConfig(name="sgd", learning_rate=0.05, momentum=0.9, weight_decay=0.0, clip_norm=0.0)
PLAIN_SETTINGS = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adamw(
        1e-2,
        b2=0.95,
        eps=1e-3,
        weight_decay=0.1,
        mask=lambda params: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params),
    ),
)

CASES = {
    "mlp": Case(lambda: Mlp(16, nnx.Rngs(0)), classify, images(4), SETTINGS, RULES, PLAIN_SETTINGS),
    "vit": Case(lambda: Vit(nnx.Rngs(0)), classify, images(8), MASKED, HEADS),
    "resnet": Case(lambda: ResNet(nnx.Rngs(0)), classify, images(8, 3), MOMENTUM),
    "mnist": Case(lambda: Cnn(nnx.Rngs(0)), classify, images(8), SGD_SETTINGS, {}, MOMENTUM),
    "vae": Case(lambda: Vae(nnx.Rngs(0, noise=1)), evidence, images(8), TWO_RATES),
    "unet": Case(lambda: UNet(nnx.Rngs(0)), denoise, images(4), CLIPPED, RULES),
    "ensemble": Case(lambda: Ensemble(nnx.Rngs(0)), classify, images(4), LAMB, RULES | {"members": None}),
    "l2": Case(lambda: Mlp(16, nnx.Rngs(0)), with_l2, images(4), CLIPPED, RULES),
    "penalty": Case(lambda: Mlp(16, nnx.Rngs(0)), with_gradient_penalty, images(4), MOMENTUM, RULES),
    "clip": Case(lambda: Clip(nnx.Rngs(0)), contrast, pairs, TWO_RATES, RULES, loss_over="rows"),
}
