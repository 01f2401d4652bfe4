"""Difference of a model's logits between the original weights of its base and the codes that adapters trained over.

A PEFT folder is loaded over the original weights, and a QLoRA run trained its adapters over rounded ones. The weights
are read one layer at a time, so that the model need not fit into memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.checkpoint.run_weights import StoredLayers
from jaxopt_llm.config import Config
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer
from jaxopt_llm.inference import models
from jaxopt_llm.inference.streamed import open_stream

MAX_TOKENS = 128
# Prose, a list, code and numbers. A change of this text changes the figures that are printed.
TEXT = """\
The river had risen in the night, and by the morning the lower fields lay under water as far as the mill.

To repair the pump:
1. Close the valve and wait for ten minutes.
2. Remove the four screws of the cover, and keep them in order.

def mean(values):
    return sum(values) / len(values)

print(mean([3, 5, 8, 13]))  # 7.25

In 1997 the town had 4,210 inhabitants, 12% more than ten years before. Why did so many people move there? Most of them
said that they had come for the work, and had stayed because of the sea.
"""


@dataclass(frozen=True)
class Difference:
    """Differences of the logits, over all tokens of a text and over the vocabulary.

    Attributes:
        mean, maximum: of the absolute differences.
        divergence: mean Kullback-Leibler divergence of the predictions over the original weights from those over the
            codes, in nats for each token.
        changed: share of the tokens after which another token is the most likely one.
        tokens: number of tokens.
        dtype: dtype of the original weights.
    """

    mean: float
    maximum: float
    divergence: float
    changed: float
    tokens: int
    dtype: str

    def describe(self, base: str) -> str:
        """Return a sentence. base: `lora.base` of the training."""
        return (
            f"The adapters were trained over the base rounded to {base}. Over its {self.dtype} weights the logits "
            f"differ by {self.mean:.3g} on average and {self.maximum:.3g} at most, the predictions by "
            f"{self.divergence:.3g} nats per token, and the most likely token after {self.changed:.1%} of "
            f"{self.tokens} tokens of a fixed text. `convert merge` of the run has no such difference."
        )


def measure(directory: Path, config: Config, step: int) -> Difference:
    """Compare the logits of a fixed text in float32.

    Raises:
        InputError: the original weights are missing or have changed, or the run never had them.
    """
    trained, original = models.open_both_bases(directory, config, step)
    tokenizer = load_tokenizer(config.data)
    ids = np.array([*tokenizer.prefix, *tokenizer.encode([TEXT.encode()])[0]], np.int32)
    limit = config.model.max_positions if config.model.positions == "learned" else MAX_TOKENS
    ids = ids[: min(limit, MAX_TOKENS)]
    logits = [each[0] for each in compute_logits(config, (trained, original), ids)]
    assert original.folder is not None
    return compare(logits[0], logits[1], str(original.folder.dtype("non_layer/embedding/table")))


def compare(trained: NDArray[Any], original: NDArray[Any], dtype: str) -> Difference:
    """Return the differences of logits [S, V] over the codes and over the original weights."""
    first = np.asarray(jax.nn.log_softmax(trained.astype(np.float64)))
    second = np.asarray(jax.nn.log_softmax(original.astype(np.float64)))
    distance = np.abs(trained - original)
    return Difference(
        mean=float(distance.mean()),
        maximum=float(distance.max()),
        divergence=float((np.exp(first) * (first - second)).sum(-1).mean()),
        changed=float((trained.argmax(-1) != original.argmax(-1)).mean()),
        tokens=len(trained),
        dtype=dtype,
    )


def compute_logits(config: Config, sources: Sequence[StoredLayers], ids: NDArray[np.int32]) -> list[NDArray[Any]]:
    """Return the logits, float32 [1, S, V], of ids [S] for each of several parameters of one model.

    Parameters outside the layers come from the first source, because their base is not rounded.
    """
    stream = open_stream(config.model, ids[None])
    outside = stream.read_outside(sources[0].fetch_merged)
    states = [stream.embed(outside) for _ in sources]
    for layer in stream.layers:
        for index, source in enumerate(sources):
            states[index] = stream.run(layer, stream.read_layer(source.fetch_merged, layer), states[index])
            source.release()
    return [stream.logits(outside, state) for state in states]
