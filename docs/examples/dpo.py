"""Direct preference optimisation (Rafailov et al. 2023) as a loss: a policy is trained, its reference is frozen.

Run it with `python dpo.py`. One module holds both models, and `training.trainable` selects the policy by its path. The
reference then has no gradient and no moments, and rests in the compute dtype, divided over all devices. The model is a
small one of this example with random weights; another model goes where `Pair` makes the two.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxopt_llm

VOCABULARY, LENGTH, PROMPT, WIDTH, ROWS, BETA = 32, 16, 8, 64, 64, 0.1


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.mlp = nnx.Sequential(nnx.Linear(WIDTH, 256, rngs=rngs), nnx.gelu, nnx.Linear(256, WIDTH, rngs=rngs))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        """Return the log-probability of each answer: of the tokens after the prompt."""
        x = self.tokens(tokens) + self.positions(jnp.arange(LENGTH))
        x += self.attention(x, mask=jnp.tril(jnp.ones((LENGTH, LENGTH), bool)))
        logits = self.tokens.attend(self.norm(x + self.mlp(x)))[:, PROMPT - 1 : -1].astype(jnp.float32)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, PROMPT:, None], 2).sum((1, 2))


class Pair(nnx.Module):
    def __init__(self):
        self.policy, self.reference = Transformer(nnx.Rngs(0)), Transformer(nnx.Rngs(0))


def loss(pair, batch):
    chosen, rejected = (pair.policy(batch[name]) - pair.reference(batch[name]) for name in ("chosen", "rejected"))
    margin = BETA * (chosen - rejected)
    return -jax.nn.log_sigmoid(margin).mean(), {"accuracy": (margin > 0).mean(), "margin": margin.mean()}


def make_batch(step):
    """Return prompts with two answers: the chosen one counts upwards from the prompt, the rejected one downwards."""
    prompt = np.random.default_rng(step).integers(VOCABULARY, size=(ROWS, 1))
    change = np.maximum(np.arange(LENGTH) - PROMPT + 1, 0)
    return {"chosen": np.int32((prompt + change) % VOCABULARY), "rejected": np.int32((prompt - change) % VOCABULARY)}


def main(steps=100, directory="runs/dpo"):
    config = jaxopt_llm.Config(training=dict(trainable=("*/policy/*",)), schedule=dict(warmup_steps=10))
    engine = jaxopt_llm.initialize(Pair, loss, make_batch(0), config)
    jaxopt_llm.fit(engine, make_batch, steps, directory)
    return engine.evaluate(make_batch(10**6 + index) for index in range(4))


if __name__ == "__main__":
    print("held out:", main())
