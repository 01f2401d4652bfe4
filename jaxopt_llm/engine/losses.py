"""The losses that `initialize` is given: one, or several by name, each with an optimizer and parameters of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import optax

from jaxopt_llm.config import OptimizerConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine.checks import check_optimizer
from jaxopt_llm.engine.frontends import Loss

Optimizer: TypeAlias = optax.GradientTransformation | OptimizerConfig


@dataclass(frozen=True)
class GivenLoss:
    """A loss as the user gives it.

    Attributes:
        name: "" if there is only one loss.
        optimizer: None for `config.optimizer`.
        trains: patterns of the parameters that it trains.
    """

    name: str
    loss: Loss
    evaluation_loss: Loss
    example: Any
    optimizer: Optimizer | None
    trains: tuple[str, ...]

    @property
    def transformation(self) -> optax.GradientTransformation | None:
        """The optax transformation; None for an OptimizerConfig."""
        return None if isinstance(self.optimizer, OptimizerConfig) else self.optimizer


def read_losses(
    loss: Loss | Mapping[str, Loss],
    evaluation_loss: Loss | Mapping[str, Loss] | None,
    example: Any,
    optimizer: Optimizer | Mapping[str, Optimizer] | None,
    trains: Mapping[str, str | Sequence[str]] | None,
) -> list[GivenLoss]:
    """Return the losses that the arguments of `initialize` describe.

    Raises:
        InputError: a mapping lacks a loss or names another one, or an optimizer is none.
    """
    names = [*loss] if isinstance(loss, Mapping) else [""]
    for name in names:
        if not isinstance(name, str) or (isinstance(loss, Mapping) and not name):
            raise InputError(f"loss: {name!r} is no name of a loss; give a string that is not empty")
    if not names:
        raise InputError("loss: the mapping is empty; give at least one loss")
    if trains is not None and not isinstance(loss, Mapping):
        raise InputError(
            "trains: it is for several losses, loss={'name': ...}; training.trainable selects parameters for one"
        )

    def choose(argument: str, value: Any, name: str, default: Any = None) -> Any:
        """Return the part of an argument that belongs to a loss: one for all, or a mapping by name."""
        if value is None:
            return default
        if not isinstance(value, Mapping):
            return value
        if not isinstance(loss, Mapping):
            raise InputError(f"{argument}: there is one loss, which has no name; give one {argument} and no mapping")
        if found := {*value} ^ {*names}:
            raise InputError(
                f"{argument}: the losses are {', '.join(names)}, and it names {', '.join(map(str, value))}; "
                f"give one for each ({', '.join(sorted(map(str, found)))} differs)"
            )
        return value[name]

    by_loss = isinstance(loss, Mapping) and isinstance(example, Mapping) and {*example} == {*names}
    given = []
    for name in names:
        own = loss[name] if isinstance(loss, Mapping) else loss
        own_optimizer = choose("optimizer", optimizer, name)
        if own_optimizer is not None:
            check_optimizer(own_optimizer)
        patterns = choose("trains", trains, name, name or "*")
        given.append(
            GivenLoss(
                name=name,
                loss=own,
                evaluation_loss=choose("evaluation_loss", evaluation_loss, name, own),
                example=example[name] if by_loss else example,
                optimizer=own_optimizer,
                trains=(patterns,) if isinstance(patterns, str) else tuple(patterns),
            )
        )
    return given


def join_losses(losses: Sequence[GivenLoss]) -> tuple[Loss, Any]:
    """Return a loss that calls all of these, and an example of its batch: what initialises a module of Linen."""
    if len(losses) == 1:
        return losses[0].loss, losses[0].example

    def call_all(model: Any, batches: Sequence[Any]) -> list[Any]:
        return [each.loss(model, batch) for each, batch in zip(losses, batches, strict=True)]

    return call_all, [each.example for each in losses]
