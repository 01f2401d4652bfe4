"""Difference of a model's logits between the original weights of its base and the codes that adapters trained over.

A PEFT folder is loaded over the original weights, and a QLoRA run trained its adapters over rounded ones. The weights
are read one period of layers at a time, so that the model need not fit into memory.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.checkpoint.run_weights import StoredLayers
from jaxopt_llm.config import Config, PrecisionConfig, RematConfig
from jaxopt_llm.core import tree
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer
from jaxopt_llm.execution.segments import (
    LocalSegment,
    attach_non_layer,
    model_segments,
    no_perturbations,
    run_segments,
)
from jaxopt_llm.inference import models
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel.placement import Placement

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
    logits = [each[0, :, : config.model.vocabulary_size] for each in compute_logits(config, (trained, original), ids)]
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
    precision = PrecisionConfig(compute_dtype="float32")
    model = Decoder(config.model, grouped_matmul=models.choose_local_grouped_matmul(precision))
    segments = model_segments(model)
    placement = models.make_placement(0, precision)
    computer = _Computer(model, placement, jnp.asarray(ids[None]))
    outside = {"non_layer": model.specs["non_layer"]}
    non_layer = tree.map_with_path(lambda path, spec: sources[0].fetch(path, None, spec.contracting), outside)
    x = jax.jit(computer.embed)(non_layer)
    states = [x for _ in sources]
    for name, segment in segments.items():
        run = jax.jit(functools.partial(computer.run_period, name, segment))
        for row in range(segment.periods):
            constants = {key: values[row : row + 1] for key, values in segment.per_layer.items()}
            for index, source in enumerate(sources):
                states[index] = run(_fetch_period(source, name, segment, row), constants, states[index])
                source.release()
    finish = jax.jit(computer.finish)
    return [np.asarray(finish(non_layer, state)) for state in states]


def _fetch_period(source: StoredLayers, name: str, segment: LocalSegment, row: int) -> Params:
    """Return the parameters of one period of a segment, as a stack of one row."""
    fetched: Params = tree.map_with_path(
        lambda path, spec: np.asarray(source.fetch(path, row, spec.unstack().contracting))[None], {name: segment.specs}
    )
    return fetched


@dataclass(frozen=True, eq=False)
class _Computer:
    """Parts of the forward pass of one model for the tokens [1, S]."""

    model: Decoder
    placement: Placement
    tokens: jax.Array

    def _make_context(self) -> Context:
        ones = jnp.ones_like(self.tokens)
        positions = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None]
        batch = Batch(self.tokens, self.tokens, ones.astype(jnp.bool), segment_ids=ones, positions=positions)
        return self.model.make_context(batch, self.placement)

    def _attach(self, non_layer: Params) -> Params:
        specs = {"non_layer": self.model.specs["non_layer"]}
        return attach_non_layer(specs, non_layer, no_perturbations(specs), self.placement)

    def embed(self, non_layer: Params) -> jax.Array:
        return self.model.embed(self._attach(non_layer), self.tokens, self._make_context())

    def run_period(
        self, name: str, segment: LocalSegment, weights: Params, constants: Mapping[str, Any], x: jax.Array
    ) -> jax.Array:
        specs = jax.tree.map(lambda spec: spec.unstack().stack(1), segment.specs)
        one = {name: LocalSegment(segment.kinds, specs, constants)}
        nothing = no_perturbations({name: specs})
        return run_segments(self.model, one, weights, nothing, x, self._make_context(), RematConfig("none"))[0]

    def finish(self, non_layer: Params, x: jax.Array) -> jax.Array:
        return self.model.logits(self._attach(non_layer), x, self._make_context())
