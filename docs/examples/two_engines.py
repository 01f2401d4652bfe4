"""Two engines in turn on the same devices: co-teaching (Han et al. 2018), which learns in spite of wrong data.

Run it with `python two_engines.py`. A dense language model and one with experts choose the rows that the other learns
from: those that they find most likely themselves, since wrong rows are learned last. The log-probabilities of `predict`
stay on the devices, and reach the other engine in its batch. Each engine compiles its programs once, however often the
two change places.
"""

import jax.numpy as jnp
import numpy as np

import jaxopt_llm

VOCABULARY, LENGTH, ROWS, WRONG = 32, 16, 64, 0.4
SIZES = dict(vocabulary_size=VOCABULARY, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp_width=128)
EXPERTS = dict(experts=4, experts_per_token=2, expert_width=64)


class Student:
    def __init__(self, seed, **settings):
        self.model = jaxopt_llm.LanguageModel(SIZES | settings)
        config = jaxopt_llm.Config(schedule=dict(warmup_steps=10), optimizer=dict(learning_rate=3e-3))
        example = {"tokens": make_tokens(0), "chosen": np.ones(ROWS, np.float32)}
        self.engine = jaxopt_llm.initialize(lambda: self.model.initialize(seed), self.loss, example, config)

    def loss(self, parameters, batch):
        hidden, balance = self.model.hidden_with_balance(parameters, batch["tokens"])
        found = self.model.log_probabilities(parameters, batch["tokens"], hidden=hidden).mean(1)
        return -(found * batch["chosen"]).sum() / batch["chosen"].sum() + balance

    def score(self, parameters, tokens):
        return self.model.log_probabilities(parameters, tokens).mean(1)

    def choose(self, tokens):  # 1 for the rows that it finds most likely, 0 for as many as are wrong
        scores = self.engine.predict(self.score, tokens)
        return (scores > jnp.quantile(scores, WRONG)).astype(jnp.float32)


def make_tokens(step, wrong=WRONG):
    """Return rows that count upwards. A share of them is random instead."""
    random = np.random.default_rng(step)
    rows = (random.integers(VOCABULARY, size=(ROWS, 1)) + np.arange(LENGTH)) % VOCABULARY
    noise = random.integers(VOCABULARY, size=rows.shape)
    return np.where(random.random((ROWS, 1)) < wrong, noise, rows).astype(np.int32)


def main(steps=60):
    students = Student(0), Student(1, moe=EXPERTS)
    for step in range(steps):
        tokens = make_tokens(step)
        chosen = [student.choose(tokens) for student in students]
        for student, of_other in zip(students, reversed(chosen), strict=True):
            student.engine.step({"tokens": tokens, "chosen": of_other})
    clean = [{"tokens": make_tokens(10**6, wrong=0), "chosen": np.ones(ROWS, np.float32)}]
    return [student.engine.evaluate(clean)["loss"] for student in students]


if __name__ == "__main__":
    print("held out:", main())
