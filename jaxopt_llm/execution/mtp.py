"""Multi-token prediction (MTP): the loss of modules that predict tokens further ahead.

DeepSeek-AI 2024, arXiv:2412.19437, section 2.2. Module k joins two inputs for position i: the hidden state of the
module before it, or of the main model for the first one, and the embedding of the token at i + k. A block follows, and
the head predicts the token at i + k + 1. They share the main model's embedding and head. Hidden states are
those after the final norm of the main model, or of the module, as vLLM and SGLang pass them on.

A prediction counts where the token that it predicts is in the document of position i and the main loss counts it. Other
positions compute values that no counted position reads: they are the last ones of a document.

Letters: B batch, S sequence, D width, K modules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxopt_llm.config import RematConfig
from jaxopt_llm.execution.segments import LocalSegment, run_segment
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.model import OBJECTIVE, Model, Params, Sums, name_mtp_modules
from jaxopt_llm.parallel.activations import to_device_order

STATISTICS = LOSSES, TOKENS = "mtp_losses", "mtp_tokens"  # sums of the cross-entropy and of counted tokens, each [K]


@dataclass(frozen=True)
class Head:
    """The head of a model with its MTP modules.

    modules: the members of `segments` that are not layers, in order; may be empty.
    params, perturbations: as of `segments.run_segments`.
    """

    model: Model
    modules: Mapping[str, LocalSegment]
    params: Params
    perturbations: Params
    remat: RematConfig

    def loss(
        self, non_layer: Params, x: jax.Array, batch: Batch, context: Context, loss_weight: jax.Array
    ) -> tuple[jax.Array, Sums]:
        """Return the objective, without auxiliary losses, and the sums, given the last layer's output x [B, S, D]."""
        value, reported = self.model.loss(non_layer, x, batch, context, loss_weight)
        if not self.modules:
            return value, {OBJECTIVE: reported}
        added, sums = self._module_losses(non_layer, x, batch, context, loss_weight)
        return value + added, sums | {OBJECTIVE: reported}

    def _module_losses(
        self, non_layer: Params, x: jax.Array, batch: Batch, context: Context, loss_weight: jax.Array
    ) -> tuple[jax.Array, Sums]:
        """Return the objective of all modules and their sums.

        The objective is loss_weight × mtp_weight × the mean of their losses. They are sums over tokens, like the main
        loss, and divided by the same number of tokens (equation 24 of the paper).
        """
        model, weight = self.model, loss_weight * self.model.mtp_weight / len(self.modules)
        x, auxiliary = model.normalise(non_layer, x), model.zero_auxiliary()
        total, losses, tokens = jnp.float32(0), [], []
        for depth, (name, segment) in enumerate(self.modules.items(), start=1):
            ahead = look_ahead(batch, depth)
            loss_mask = to_device_order(ahead.loss_mask, context.placement)
            embedded = model.embed(non_layer, ahead.tokens, context)
            (x, auxiliary), _, _ = run_segment(
                model,
                segment.with_embeddings(embedded),
                self.params[name],
                self.perturbations.get(name),
                (x, auxiliary),
                replace(context, loss_mask=loss_mask),
                self.remat,
            )
            objective, loss = model.mtp_loss(non_layer, x, ahead, context, weight)
            total = total + objective
            losses.append(loss)
            tokens.append(jnp.sum(loss_mask, dtype=jnp.float32))
        sums = {LOSSES: jnp.stack(losses), TOKENS: jnp.stack(tokens)}
        return total, auxiliary | jax.lax.stop_gradient(sums)


def split_segments(
    model: Model, segments: Mapping[str, LocalSegment]
) -> tuple[dict[str, LocalSegment], dict[str, LocalSegment]]:
    """Return the layers and the MTP modules of some segments."""
    names = name_mtp_modules(model.mtp_layout)
    layers = {name: segment for name, segment in segments.items() if name not in names}
    return layers, {name: segments[name] for name in segments if name in names}


def look_ahead(batch: Batch, depth: int) -> Batch:
    """Return a batch [B, S] whose position i holds the token at i + depth as token, and the next one as target."""
    same_document = batch.segment_ids == _shift(batch.segment_ids, depth)
    return replace(
        batch,
        tokens=_shift(batch.targets, depth - 1),
        targets=_shift(batch.targets, depth),
        loss_mask=_shift(batch.loss_mask, depth) & same_document,
    )


def _shift(values: jax.Array, count: int) -> jax.Array:
    """Return the values [B, S] of the tokens `count` positions later in the row; 0 where it has ended."""
    return jnp.pad(values[:, count:], ((0, 0), (0, values.shape[1] - values[:, count:].shape[1])))


def make_metrics(statistics: Sums) -> dict[str, jax.Array]:
    """Return the mean loss of each module per token that it counts; {} without modules."""
    if LOSSES not in statistics:
        return {}
    means = statistics[LOSSES] / jnp.maximum(statistics[TOKENS], 1)
    return dict(zip(name_losses(len(means)), means, strict=True))


def name_losses(modules: int) -> list[str]:
    """Return the names of the metrics: `mtp_loss` of the only module, or `mtp_loss/1` and so on of several."""
    return ["mtp_loss"] if modules == 1 else [f"mtp_loss/{module + 1}" for module in range(modules)]
