"""A Linen model: `nn.scan` over layers, `nn.remat`, dropout, and another loss for the evaluation.

Run it with `python linen.py`. The loss calls the model as a module that is bound to its variables. Linen has no mode of
evaluation, so `evaluation_loss` is the loss without dropout. The model learns to find the largest of eight numbers.
"""

import functools

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jaxopt_llm

WIDTH, LAYERS, CHOICES, ROWS = 64, 3, 8, 64


class Layer(nn.Module):
    train: bool

    @nn.compact
    def __call__(self, x, _):
        hidden = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        hidden = nn.Dropout(0.1, deterministic=not self.train)(hidden)
        return x + nn.Dense(WIDTH)(hidden), None


class Network(nn.Module):
    @nn.compact
    def __call__(self, numbers, train):
        rngs = {"params": True, "dropout": True}  # other ones in each layer
        layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs=rngs, length=LAYERS)
        x, _ = layers(train, name="layers")(nn.Dense(WIDTH)(numbers), None)
        return nn.Dense(CHOICES)(nn.LayerNorm()(x))


def loss(model, batch, train):
    logits = model(batch["numbers"].astype(jnp.bfloat16), train).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["largest"])
    return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["largest"]).mean()}


def make_batch(step):
    numbers = np.random.default_rng(step).normal(size=(ROWS, CHOICES)).astype(np.float32)
    return {"numbers": numbers, "largest": numbers.argmax(1).astype(np.int32)}


def main(steps=300, directory="runs/linen"):
    config = jaxopt_llm.Config(optimizer=dict(learning_rate=3e-3), schedule=dict(warmup_steps=20))
    learn, measure = functools.partial(loss, train=True), functools.partial(loss, train=False)
    engine = jaxopt_llm.initialize(Network(), learn, make_batch(0), config, evaluation_loss=measure)
    jaxopt_llm.fit(engine, make_batch, steps, directory)
    return engine.evaluate(make_batch(10**6 + index) for index in range(4))


if __name__ == "__main__":
    print("held out:", main())
