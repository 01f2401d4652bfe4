"""Metrics that a loss returns beside its value, and how the metrics of several parts become metrics of the whole.

The parts are the microbatches of a step, the batches of an evaluation or the steps of a record. All of this works on
NumPy arrays as on JAX arrays.
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Metric(abc.ABC):
    """A metric that says how its parts are combined.

    Attributes:
        value: scalar; for N parts an array [N, ...].
    """

    value: Any

    @abc.abstractmethod
    def join(self) -> "Metric":
        """Return the metric of the whole. This object holds the values of its N parts, [N, ...]."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sum(Metric):
    """Metric that adds up, such as a number of tokens: `return loss, {"tokens": jaxopt_llm.Sum(mask.sum())}`.

    A step reports the sum over its microbatches, an evaluation that over its batches, and a record of `fit` the total
    of the steps since the previous record.

    Args:
        value: scalar of the rows that the loss got. It becomes float32.
    """

    def join(self) -> "Sum":
        return Sum(self.value.sum(axis=0))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Max(Metric):
    """Metric that keeps the largest value, such as the largest logit: `{"logit": jaxopt_llm.Max(logits.max())}`.

    Args:
        value: scalar of the rows that the loss got. It becomes float32.
    """

    def join(self) -> "Max":
        return Max(self.value.max(axis=0))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean(Metric):
    """Mean with its own count: a loss returns the pair (sum, count).

    Attributes:
        value: the mean; 0 if nothing counts.
        count: how much it counts.
    """

    count: Any

    def join(self) -> "Mean":
        total, count = (self.value.T * self.count).sum(axis=-1), self.count.sum(axis=0)
        return Mean(total / replace_zero(count), count)


def replace_zero(count: Any) -> Any:
    """Return a count, and 1 in place of 0: what counts nothing has the mean 0 and the gradient 0, not NaN."""
    return count + (count == 0)


def join_metrics(metrics: Mapping[str, Any], counts: Any) -> dict[str, Any]:
    """Return the metrics of the whole from the metrics of its N parts, [N, ...].

    Args:
        counts: [N], how much the plain metrics of each part count.
    """
    return {
        name: each.join() if isinstance(each, Metric) else Mean(each, counts).join().value
        for name, each in metrics.items()
    }


def read_value(metric: Any) -> Any:
    """Return the number of a metric, which may be a plain one."""
    return metric.value if isinstance(metric, Metric) else metric
