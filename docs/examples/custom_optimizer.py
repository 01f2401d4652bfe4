"""An optimizer written by hand: descent by the sign of a momentum, for the matrices only, with a schedule.

Run it with `python custom_optimizer.py`. Any optax transformation works; an engine divides its state over the devices
like the parameters (ZeRO). `optax.multi_transform` gives each parameter one of several transformations by its path.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxopt_llm

ROWS, INPUTS = 64, 16


def sign_descent(schedule, decay=0.9):
    """Return a transformation that moves every number by the learning rate, against the sign of its momentum."""

    def init(parameters):
        return jnp.int32(0), jax.tree.map(jnp.zeros_like, parameters)

    def update(gradients, state, parameters=None):
        count, momentum = state
        momentum = jax.tree.map(lambda m, g: decay * m + (1 - decay) * g, momentum, gradients)
        return jax.tree.map(lambda m: -schedule(count) * jnp.sign(m), momentum), (count + 1, momentum)

    return optax.GradientTransformation(init, update)


def choose(parameters):
    """Return "sign" for each matrix and "adam" for each bias, as a tree like the parameters."""
    return jax.tree.map_with_path(lambda path, _: "adam" if path[-1].key == "bias" else "sign", parameters)


def loss(model, batch):
    return ((model(batch["x"].astype(jnp.bfloat16)).astype(jnp.float32) - batch["y"]) ** 2).mean()


def make_model():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(INPUTS, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 1, rngs=rngs))


def make_batch(step):
    x = np.random.default_rng(step).normal(size=(ROWS, INPUTS)).astype(np.float32)
    return {"x": x, "y": np.abs(x).mean(1, keepdims=True)}


def main(steps=200, directory="runs/custom_optimizer"):
    rules = {"sign": sign_descent(optax.cosine_decay_schedule(3e-3, steps)), "adam": optax.adam(1e-2)}
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.multi_transform(rules, choose))
    engine = jaxopt_llm.initialize(make_model, loss, make_batch(0), optimizer=chain)
    jaxopt_llm.fit(engine, make_batch, steps, directory)
    return engine.evaluate(make_batch(10**6 + index) for index in range(4))


if __name__ == "__main__":
    print("held out:", main())
