"""Direct preference optimisation (Rafailov et al. 2023) as a loss over the package's decoder; the reference is frozen.

Run it with `python dpo.py`. Policy and reference are two calls of one `LanguageModel`, with other parameters.
`training.trainable` selects the policy by its path. The reference has no gradient and no moments, and rests in the
compute dtype, divided over all devices. The model here is small and random. One of a Hugging Face folder is
`LanguageModel("path/of/folder")`, with `weights={"policy": MODEL.weights, "reference": MODEL.weights}`.
"""

import jax
import numpy as np

import jaxopt_llm

VOCABULARY, LENGTH, PROMPT, ROWS, BETA = 32, 16, 8, 64, 0.1
MODEL = jaxopt_llm.LanguageModel(
    dict(vocabulary_size=VOCABULARY, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp_width=128)
)


def make_pair():
    return {"policy": MODEL.initialize(0), "reference": MODEL.initialize(0)}


def loss(pair, batch):
    tokens = batch["answers"].reshape(-1, LENGTH)
    policy, reference = (MODEL.log_probabilities(pair[name], tokens) for name in ("policy", "reference"))
    answers = (policy - reference)[:, PROMPT - 1 :].sum(1)  # entry s belongs to token s + 1
    chosen, rejected = answers.reshape(-1, 2).T
    margin = BETA * (chosen - rejected)
    return -jax.nn.log_sigmoid(margin).mean(), {"accuracy": (margin > 0).mean(), "margin": margin.mean()}


def make_batch(step):
    """Return prompts with two answers: the chosen one counts upwards from the prompt, the rejected one downwards."""
    prompt = np.random.default_rng(step).integers(VOCABULARY, size=(ROWS, 1, 1))
    change = np.maximum(np.arange(LENGTH) - PROMPT + 1, 0)
    return {"answers": np.int32((prompt + np.stack([change, -change])) % VOCABULARY)}  # [rows, 2, length]


def main(steps=100, directory="runs/dpo"):
    config = jaxopt_llm.Config(training=dict(trainable=("*/policy/*",)), schedule=dict(warmup_steps=10))
    engine = jaxopt_llm.initialize(make_pair, loss, make_batch(0), config)
    jaxopt_llm.fit(engine, make_batch, steps, directory)
    return engine.evaluate(make_batch(10**6 + index) for index in range(4))


if __name__ == "__main__":
    print("held out:", main())
