"""Objectives over pairs of answers to one prompt: a chosen one and a rejected one.

An objective is a function of the log-probabilities of the tokens, which the head computes in chunks. Its derivative
gives each token a weight, and the head's gradient is that of the cross-entropy with these weights. So no logits wait
for the sums of the documents: their chunks are computed twice.

A row of a batch holds whole pairs. Its documents 1, 3, 5, ... were chosen, and documents 2, 4, 6, ... rejected. In the
formulas, c and r are the sums of the log-probabilities of a chosen and of a rejected answer, c' and r' those of the
reference model, and |c| and |r| the numbers of tokens that count:

    dpo    -log σ(β·((c - c') - (r - r')))                            Rafailov et al. 2023, arXiv:2305.18290
    ipo    (((c - c')/|c| - (r - r')/|r|) - 1/(2β))²                  Azar et al. 2023, arXiv:2310.12036
    hinge  max(0, 1 - β·((c - c') - (r - r')))                        Zhao et al. 2023, arXiv:2305.10425
    cpo    -log σ(β·(c - r))                                          Xu et al. 2024, arXiv:2401.08417
    simpo  -log σ(β·(c/|c| - r/|r|) - margin)                         Meng et al. 2024, arXiv:2405.14734
    orpo   -β·log σ(log odds(c/|c|) - log odds(r/|r|)) - c/|c|        Hong et al. 2024, arXiv:2403.07691

The odds of a mean log-probability p are exp(p)/(1 - exp(p)). With `label_smoothing` ε, -log σ(h) is replaced by
-(1 - ε)·log σ(h) - ε·log σ(-h). `nll_weight`·(-c/|c|) is added to any of them.

A function of the user can stand in place of the formula of dpo or cpo.

Letters: B batch, S sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxopt_llm.config.training import WITH_REFERENCE, PreferenceConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.functions import describe_failure, load_functions
from jaxopt_llm.core.tree import Leaf
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.head import Head
from jaxopt_llm.model.objectives import weigh_tokens

BY_MEANS = ("simpo", "orpo")  # they compare log-probabilities per token
# What an objective reports, as sums over pairs.
REPORTED = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracy",
    "log_probabilities/chosen",
    "log_probabilities/rejected",
)


class Answer(NamedTuple):
    """An answer of a pair, or of each of many pairs: numbers, or arrays of one shape.

    log_probability: sum over its tokens.
    tokens: their number, float32.
    reference: the sum of their log-probabilities by the reference model; 0 without one.
    """

    log_probability: Leaf
    tokens: Leaf
    reference: Leaf

    @property
    def gain(self) -> Leaf:
        """Log-probability relative to the reference."""
        return self.log_probability - self.reference

    @property
    def mean(self) -> Leaf:
        """Log-probability per token."""
        return self.log_probability / jnp.maximum(self.tokens, 1)


# (chosen, rejected) -> (the loss of each pair, other numbers of each pair by name)
PairLoss = Callable[[Answer, Answer], tuple[jax.Array, dict[str, jax.Array]]]


@dataclass(frozen=True)
class Preference:
    """An objective over pairs.

    name: one of the formulas above. settings: their numbers.
    function: loss in place of the formula. metrics: names of the numbers that it returns beside the loss.
    """

    name: str
    settings: PreferenceConfig
    function: PairLoss | None = None
    metrics: tuple[str, ...] = ()

    @property
    def needs_reference(self) -> bool:
        return self.name in WITH_REFERENCE

    def count(self, batch: Batch) -> jax.Array:
        return count_pairs(batch)

    def compute(self, head: Head, batch: Batch, loss_weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights, reported = weigh_tokens(self.sum_losses, head.log_probabilities(), batch)
        return head.cross_entropy(weights, loss_weight)[0], reported

    def name_metrics(self, means: Any) -> dict[str, Any]:
        own = (f"preference/{name}" for name in self.metrics)
        named = dict(zip((*REPORTED[1:], *own), means[1:], strict=True))
        return named | {"rewards/margin": named["rewards/chosen"] - named["rewards/rejected"]}

    def sum_losses(self, log_probabilities: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Return the objective, and REPORTED with the function's metrics, summed over pairs.

        log_probabilities: of the targets, [B, S]. batch: fields [B, S].
        """
        of_reference = batch.reference if self.needs_reference else jnp.zeros_like(log_probabilities)
        assert of_reference is not None
        values = log_probabilities, jnp.ones_like(log_probabilities), of_reference
        is_end = find_pair_ends(batch)
        # Elsewhere numbers that no formula and none of its derivatives turns into infinity.
        chosen, rejected = (
            Answer(*(jnp.where(is_end, total, fill) for total, fill in zip(side, (-1.0, 1.0, -1.0), strict=True)))
            for side in zip(*(sum_sides(each, batch) for each in values), strict=True)
        )
        losses, metrics = self.function(chosen, rejected) if self.function else (self._lose(chosen, rejected), {})
        losses = losses - self.settings.nll_weight * chosen.mean
        rewards = [
            self.settings.beta * (each.mean if self.name in BY_MEANS else each.gain) for each in (chosen, rejected)
        ]
        is_right = (rewards[0] > rewards[1]).astype(jnp.float32)
        of_sides = chosen.log_probability, rejected.log_probability
        reported = (losses, *rewards, is_right, *of_sides, *(metrics[name] for name in self.metrics))
        sums = jnp.stack([jnp.sum(jnp.where(is_end, each, 0.0)) for each in reported])
        return sums[0], jax.lax.stop_gradient(sums)

    def _lose(self, chosen: Answer, rejected: Answer) -> jax.Array:
        """Return the loss of each pair; see the formulas."""
        beta, smoothing = self.settings.beta, self.settings.label_smoothing
        if self.name == "ipo":
            gains = [each.gain / jnp.maximum(each.tokens, 1) for each in (chosen, rejected)]
            return jnp.square(gains[0] - gains[1] - 1 / (2 * beta))
        margin = beta * (chosen.gain - rejected.gain)
        if self.name == "hinge":
            return jax.nn.relu(1 - margin)
        scale, offset = 1.0, 0.0
        if self.name == "simpo":
            margin = beta * (chosen.mean - rejected.mean) - self.settings.margin
        if self.name == "orpo":
            # A mean of 0 is a probability of 1, whose odds are infinite.
            odds = [each.mean - jnp.log1p(-jnp.exp(jnp.minimum(each.mean, -1e-6))) for each in (chosen, rejected)]
            margin, scale, offset = odds[0] - odds[1], beta, -chosen.mean
        of_sides = (1 - smoothing) * jax.nn.log_sigmoid(margin) + smoothing * jax.nn.log_sigmoid(-margin)
        return offset - scale * of_sides


def make_preference(name: str, settings: PreferenceConfig) -> Preference:
    """Return an objective over pairs, with the function of the user if the settings name one.

    Raises:
        InputError: there is no such function, it fails, or it returns something else than numbers.
    """
    if not settings.function:
        return Preference(name, settings)
    where, number = f"preference.function={settings.function}", jax.ShapeDtypeStruct((), jnp.float32)
    try:
        (function,) = load_functions([settings.function])
        found = jax.eval_shape(function, Answer(number, number, number), Answer(number, number, number))
    except Exception as error:  # functions of the user raise anything
        raise InputError(f"{where}: {describe_failure(error)}") from error
    form = "it must return the loss of a pair, and a dict of numbers by name, as JAX's scalars"
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
        raise InputError(f"{where}: {form}")
    for each, value in {"the loss": found[0], **found[1]}.items():
        shape = getattr(value, "shape", None)
        if not isinstance(each, str) or shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
            got = type(value).__name__ if shape is None else f"{value.dtype}{list(shape)}"
            raise InputError(f"{where}: {form}; {each} is {got}")
    # One pair at a time: a mean over pairs would be over padding, too.
    return Preference(name, settings, jax.vmap(jax.vmap(function)), tuple(found[1]))


def count_pairs(batch: Batch) -> jax.Array:
    """Return the number of pairs of documents in a batch, int32. batch: fields [..., S]."""
    return jnp.sum(jnp.max(batch.segment_ids, axis=-1) // 2)


def find_pair_ends(batch: Batch) -> jax.Array:
    """Return whether each token is the last one of its pair, bool [B, S]."""
    pair = (batch.segment_ids + 1) // 2
    return (pair > 0) & (pair != jnp.pad(pair[:, 1:], ((0, 0), (0, 1))))


def sum_sides(values: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the sums of counted tokens of the first and of the second document of a pair, at the pair's last token.

    values: float32 [B, S], as each result.
    """
    counted, is_first = jnp.where(batch.loss_mask, values, 0.0), batch.segment_ids % 2 == 1
    sides, pair = (jnp.where(is_first, counted, 0.0), jnp.where(is_first, 0.0, counted)), (batch.segment_ids + 1) // 2
    first, second = (sum_up_to(side, pair) for side in sides)
    return first, second


def sum_up_to(values: jax.Array, pair: jax.Array) -> jax.Array:
    """Return for each token the sum of the values of its pair up to it. values: float32 [B, S]; pair: int [B, S].

    Without gathers and scatters, which XLA does not divide inside the stages of a pipeline.
    """
    begins = pair != jnp.pad(pair[:, :-1], ((0, 0), (1, 0)))

    def join(before: tuple[Leaf, Leaf], after: tuple[Leaf, Leaf]) -> tuple[jax.Array, jax.Array]:
        return jnp.where(after[1], after[0], before[0] + after[0]), before[1] | after[1]

    return jax.lax.associative_scan(join, (values, begins), axis=1)[0]
