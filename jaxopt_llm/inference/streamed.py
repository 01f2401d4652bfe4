"""Forward pass in float32 of a model whose parameters are in files: one layer is in memory at a time."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.config import Kind, ModelConfig, PrecisionConfig, RematConfig
from jaxopt_llm.core import tree
from jaxopt_llm.execution.segments import LocalSegment, attach_non_layer, no_perturbations, run_segment
from jaxopt_llm.inference import models
from jaxopt_llm.kernels.grouped_matmul import ONE_BY_ONE
from jaxopt_llm.model import decoder_specs
from jaxopt_llm.model.batch import rows_of_documents
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import Keys, Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.placement import Placement

Read = Callable[[str, int | None], tree.Leaf]  # (path of a parameter, index in its stack) -> one layer's leaf
Runner = Callable[[Params, np.int32, "State"], "State"]  # (weights, index of the layer, state) -> state
BLOCK = "block_0"  # of the segment that a layer is by itself


class State(NamedTuple):
    """Input of a layer: x [B, S, D], and the context with what earlier parts of the model added to it."""

    x: jax.Array
    context: Context


class Layer(NamedTuple):
    """Place of a layer: its segment, the block of the segment's period, its row in the stacks, its number in the model.

    kind: of its attention. keys: see model.Segment.
    """

    segment: str
    block: str
    row: int
    number: int
    kind: Kind
    keys: Keys


@dataclass(frozen=True, eq=False)
class StreamedModel:
    """A model and tokens, int32 [B, S]. Its weights are passed to each part of the forward pass.

    bare: specs of the parameters, without codes and adapters.
    """

    model: Decoder
    bare: Params
    placement: Placement
    tokens: jax.Array

    @functools.cached_property
    def layers(self) -> list[Layer]:
        return self._blocks[: self.model.config.layers]

    @functools.cached_property
    def modules(self) -> list[Layer]:
        """The blocks of the modules of multi-token prediction."""
        return self._blocks[self.model.config.layers :]

    @functools.cached_property
    def _blocks(self) -> list[Layer]:
        segments = decoder_specs.name_modules(self.model.config)
        blocks = []
        for prefix, row, number in decoder_specs.locate_layers(self.model.config):
            name, block, _ = prefix.split("/")
            kind = segments[name].kinds[int(block.removeprefix("block_"))]
            blocks.append(Layer(name, block, row, number, kind, segments[name].keys))
        return blocks

    def read_outside(self, read: Read) -> Params:
        """Return the parameters outside the layers."""
        outside = {"non_layer": self.bare["non_layer"]}
        found: Params = tree.map_with_path(lambda path, spec: read(path, None), outside)
        return found

    def read_layer(self, read: Read, layer: Layer) -> Params:
        """Return the parameters of a layer."""
        prefix = f"{layer.segment}/{layer.block}"

        def read_leaf(path: str, spec: ParamSpec) -> tree.Leaf:
            leaf = read(f"{prefix}/{path}", layer.row)
            return jax.tree.map(_to_bits, leaf) if spec.expert_dims and spec.contracting else leaf

        found: Params = tree.map_with_path(read_leaf, self.bare[layer.segment][layer.block])
        return found

    def embed(self, outside: Params) -> State:
        """Return the input of the first layer."""
        return self._embed(outside)

    def run(self, layer: Layer, weights: Params, state: State) -> State:
        """Run a layer. Return the input of the next one."""
        run = self._runners(layer.segment, layer.block, layer.kind, layer.keys)
        return run(weights, np.int32(layer.number), state)

    def logits(self, outside: Params, state: State) -> NDArray[np.float32]:
        """Return the logits [B, S, V] of what the last layer returns."""
        return np.asarray(self._logits(outside, state.x))[..., : self.model.config.vocabulary_size]

    def _make_context(self) -> Context:
        return self.model.make_context(rows_of_documents(self.tokens), self.placement)

    def _attach(self, outside: Params) -> Params:
        specs = {"non_layer": self.model.specs["non_layer"]}
        return attach_non_layer(specs, outside, no_perturbations(specs), self.placement)

    @functools.cached_property
    def _embed(self) -> Callable[[Params], State]:
        def embed(outside: Params) -> State:
            non_layer, context = self._attach(outside), self._make_context()
            x = self.model.embed(non_layer, self.tokens, context)
            return State(x, self.model.add_layer_inputs(non_layer, self.tokens, x, context))

        return jax.jit(embed)

    @functools.cached_property
    def _logits(self) -> Callable[[Params, jax.Array], jax.Array]:
        return jax.jit(lambda outside, x: self.model.logits(self._attach(outside), x, self._make_context()))

    @functools.cached_property
    def _runners(self) -> Callable[[str, str, Kind, Keys], Runner]:
        return functools.cache(self._make_runner)  # the layers of a stack are one function, which is compiled once

    def _make_runner(self, segment: str, block: str, kind: Kind, keys: Keys) -> Runner:
        specs = jax.tree.map(lambda spec: spec.unstack().stack(1), self.model.specs[segment][block])

        def run(weights: Params, index: np.int32, state: State) -> State:
            alone = LocalSegment((kind,), {BLOCK: specs}, {"index": jnp.full((1, 1), index)}, keys=keys)
            by_layer = ({BLOCK: weights},)
            nothing, carry = no_perturbations({BLOCK: specs}), (state.x, self.model.zero_auxiliary())
            remat = RematConfig("none")
            (x, _), _, context = run_segment(self.model, alone, by_layer, nothing, carry, state.context, remat)
            return State(x, context)

        return jax.jit(run)


def _to_bits(matrices: np.ndarray | jax.Array) -> jax.Array:
    """Return bfloat16 matrices of experts as `OneByOne` reads them."""
    is_cast = matrices.dtype == jnp.bfloat16
    return jnp.asarray(np.asarray(matrices).view(np.uint16) if is_cast else matrices)


def open_stream(
    config: ModelConfig, ids: NDArray[np.int32], specs: Mapping[str, tree.Leaf] | None = None
) -> StreamedModel:
    """Return a model that computes on ids [B, S].

    specs: of the parameters by path, with codes and adapters; None: there are none.
    """
    precision = PrecisionConfig(compute_dtype="float32")
    model = Decoder(config, grouped_matmul=ONE_BY_ONE)
    bare = model.specs
    if specs is not None:
        model = model.with_specs(tree.map_with_path(lambda path, spec: specs[path], bare))
    return StreamedModel(model, bare, models.make_placement(0, precision), jnp.asarray(ids))
