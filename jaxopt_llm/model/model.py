"""A model as the executors, the state, the update, the checkpoints and the planner see it.

A model computes on global arrays, as for one device. It names logical axes and passes the placement on; it does not
know the loop that runs it. Decoder (decoder.py) is one.
Letters: B batch, S sequence, D width, V vocabulary (padded).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import numpy as np

from jaxopt_llm.config import Kind, RopeConfig
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.objectives import Objective
from jaxopt_llm.parallel.placement import Placement

Params = dict[str, Any]
# What the parts of a model report, by name: float32 sums over tokens, from which a step makes its metrics. What is
# differentiated comes apart, except for AUXILIARY_LOSS.
Sums = dict[str, jax.Array]
OBJECTIVE = "objective"  # what `Objective.compute` reports of the head
AUXILIARY_LOSS = "auxiliary_loss"  # of routers, already weighted; it has the same denominator as the main loss
Keys = Literal["own", "given", "taken"]
TEACHER_HEAD = "teacher_head"  # name outside the segments of the table that gives the logits of a teacher


@dataclass(frozen=True)
class Segment:
    """Period of block kinds, repeated. Its leaves are stacked [repeats, ...].

    per_layer: constants that are scanned with the weights, each [repeats, period, ...]; `index` is the layer's index in
        the model.
    experts: for each block of the period, whether it is an MoE layer.
    keys: of its layers: their own; "given": also to layers of later segments; "taken": keys of earlier segments. A
        segment that gives has one repeat.
    """

    kinds: tuple[Kind, ...]
    repeats: int
    per_layer: dict[str, np.ndarray]
    experts: tuple[bool, ...]
    keys: Keys = "own"


def name_segments(layout: Sequence[Segment]) -> dict[str, Segment]:
    """Return segments by their names in the parameters."""
    return {f"segment_{index}": segment for index, segment in enumerate(layout)}


def name_mtp_modules(layout: Sequence[Segment]) -> dict[str, Segment]:
    """Return modules of multi-token prediction by their names in the parameters."""
    return {f"mtp_{index}": segment for index, segment in enumerate(layout)}


class Model(Protocol):
    """Methods that compute parts of the forward pass; an executor decides how they are combined.

    specs: {"non_layer": embedding, head and final norm, "segment_0": stacked parameters by block, ...}, all ParamSpecs.
    layout: the segments, in order.
    mtp_layout: the modules of multi-token prediction, each a segment of one block; see execution/mtp.py.
    mtp_weight: weight of the mean loss of these modules.
    objective: what the model learns.
    rope: settings of the rotary positions of the keys in a cache.
    """

    @property
    def specs(self) -> Params: ...

    @property
    def rope(self) -> RopeConfig: ...

    @property
    def layout(self) -> tuple[Segment, ...]: ...

    @property
    def mtp_layout(self) -> tuple[Segment, ...]: ...

    @property
    def mtp_weight(self) -> float: ...

    @property
    def objective(self) -> Objective: ...

    def with_specs(self, specs: Params) -> "Model":
        """Return the same model over other parameters: adapted, quantised or stacked by pipeline stage."""

    def make_context(self, batch: Batch, placement: Placement) -> Context:
        """Return the context of the tokens of one microbatch, which every block reads; its fields are [B, S]."""

    def embed(self, non_layer: Params, tokens: jax.Array, context: Context) -> jax.Array:
        """Return the residual stream [B, S, D] of tokens, int32 [B, S]."""

    def add_layer_inputs(self, non_layer: Params, tokens: jax.Array, x: jax.Array, context: Context) -> Context:
        """Return the context with the inputs of the layers, given tokens [B, S] and their residual stream x."""

    def block(
        self, kind: Kind, params: Params, x: jax.Array, context: Context, layer: dict[str, jax.Array], cache: Any
    ) -> tuple[jax.Array, Any, Sums]:
        """Run one block on x [B, S, D]. Return its output, its cache (None without one) and its sums.

        layer: the segment's `per_layer` constants of this layer, and its `input`: where the context has some, or in an
            MTP module the embeddings [B, S, D].
        cache: None, a cache, or NewCache.
        """

    def normalise(self, non_layer: Params, x: jax.Array) -> jax.Array:
        """Return the last block's output x [B, S, D] with the final norm, as the first MTP module reads it."""

    def mtp_loss(
        self, non_layer: Params, x: jax.Array, batch: Batch, context: Context, loss_weight: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return what `loss` does, for the output x [B, S, D] of an MTP module, which has a final norm of its own."""

    def logits(self, non_layer: Params, x: jax.Array, context: Context) -> jax.Array:
        """Return the logits, float32 [B, S, V], of the last block's output x [B, S, D]."""

    def loss(
        self, non_layer: Params, x: jax.Array, batch: Batch, context: Context, loss_weight: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return what `objective.compute` does: what is differentiated, and sums to report, float32."""

    def log_probabilities(self, non_layer: Params, x: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """Return the log-probability of each target, float32 [B, S], of the last block's output x [B, S, D]."""

    def read_targets(
        self, non_layer: Params, x: jax.Array, batch: Batch, context: Context
    ) -> tuple[jax.Array, jax.Array]:
        """Return what the last block's output x [B, S, D] says of the targets, without gradients.

        These are the log-probability of each, float32 [B, S], and whether no token is more likely, bool [B, S].
        """

    def read_most_likely(
        self, non_layer: Params, x: jax.Array, batch: Batch, context: Context, count: int
    ) -> tuple[jax.Array, jax.Array]:
        """Return what the last block's output x [B, S, D] says of the next tokens, without gradients.

        These are the `count` most likely ones, int32 [B, S, K], and float32 [B, S, K + 1], their log-probabilities and
        that of all others together.
        """

    def head_input(self, non_layer: Params, x: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """Return what the head's table multiplies, [B, S, D] as the residual stream, of the last block's output x."""

    def make_cache(self, kind: Kind, batch: int, slots: int, dtype: Any, placement: Placement) -> Any:
        """Return the empty cache of a layer of this kind, for `batch` sequences of up to `slots` tokens.

        Its arrays are [batch, heads, T, size], where T is `slots`, or less in a layer with a window; see cache.py.
        """

    def zero_auxiliary(self) -> Sums:
        """Return the sums of a block that adds nothing to them; those of all kinds of block have the same names."""


def add_sums(one: Sums, other: Sums) -> Sums:
    """Return the sums of two parts of a model together."""
    return one | {name: one[name] + added if name in one else added for name, added in other.items()}
