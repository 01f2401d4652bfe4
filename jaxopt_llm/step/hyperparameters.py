"""Numbers of the optimizer and of its schedule, as arguments of the compiled step.

Runs that differ only in them share one compiled program, which the compilation cache holds.

An optimizer of the user keeps its learning rates in its state, if it was made with `optax.inject_hyperparams`. Each has
a label, the keys that lead to it: "head" in `optax.partition({"head": ...}, ...)`, "1" for the second part of a chain,
and "" if there are none.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import NamedSharding

from jaxopt_llm.config import Config, OptimizerConfig, ScheduleConfig
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError


@struct.dataclass
class Shape:
    """Numbers of a schedule, float32 scalars, which may be traced.

    Attributes:
        peak: the learning rate after the warm-up.
        warmup: steps of the warm-up, at least 1.
        end: the step with the final rate.
        fall: steps of the fall that ends there.
        final_share: the final rate as a share of the peak.
        fallen_share: 1 - final_share, rounded once.
    initial_share, risen_share: the rate at which the warm-up begins as a share of the peak, and 1 - initial_share.
    """

    peak: jax.Array | np.float32
    warmup: jax.Array | np.float32
    end: jax.Array | np.float32
    fall: jax.Array | np.float32
    final_share: jax.Array | np.float32
    fallen_share: jax.Array | np.float32
    initial_share: jax.Array | np.float32
    risen_share: jax.Array | np.float32


def find_shape(peak: float, config: ScheduleConfig, steps: int) -> Shape:
    """Return the numbers of the schedule of a run of so many steps, at which it ends if `decay_steps` is 0."""
    warmup, end = config.count_warmup(steps), config.choose_end(steps)
    fall = config.cooldown_steps if config.kind == "wsd" else end - warmup
    final, initial = config.final_share, config.initial_share
    return Shape(*map(np.float32, (peak, max(warmup, 1), end, fall, final, 1 - final, initial, 1 - initial)))


def make_schedule(kind: str, shape: Shape, warmup_kind: str) -> optax.Schedule:
    """Return the learning rate as a function of the number of finished steps.

    In step s of a warm-up of W steps, the rate has risen by s / W, or, if `warmup_kind` is `log`, by
    log(s + 1) / log(W), at most 1 (DeepSpeed's WarmupLR). After it, `kind`, the setting `schedule.kind`, is one of:

    - `cosine`: half a cosine (Loshchilov & Hutter 2017, arXiv:1608.03983), then constant.
    - `linear`: a straight line, then constant.
    - `constant`.
    - `wsd`: warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395).
    - `inverse_sqrt`: the inverse square root of the step (Vaswani et al. 2017, arXiv:1706.03762).

    The first step already has a rate above 0. The step with number `shape.end`, counted from 1, has the final rate.
    """

    def rate(count: jax.Array) -> jax.Array:
        step = jnp.asarray(count + 1, jnp.float32)
        if kind == "constant":
            share = jnp.ones(())
        elif kind == "inverse_sqrt":
            share = jnp.maximum(jnp.sqrt(shape.warmup / step), shape.final_share)
        else:
            # 1 until `fall` steps before the end, then a line down to 0.
            fall = jnp.clip((shape.end - step) / shape.fall, 0.0, 1.0)
            if kind == "cosine":
                fall = (1 - jnp.cos(jnp.pi * fall)) / 2
            share = shape.final_share + shape.fallen_share * fall
        risen = step / shape.warmup
        if warmup_kind == "log":
            risen = jnp.minimum(jnp.log(step + 1) / jnp.log(jnp.maximum(shape.warmup, 2.0)), 1.0)
        return shape.peak * jnp.where(step < shape.warmup, shape.initial_share + shape.risen_share * risen, share)

    return rate


Scalar = jax.Array | np.float32


@struct.dataclass
class Decay:
    """A decay rate. optax can compute with it as with a number.

    A program that computed 1 - 0.999 in float32 would be wrong by a hundred-thousandth of the result, so the complement
    is rounded on its own.

    Attributes:
        rate: float32 scalar.
        complement: 1 - rate, float32 scalar.
    """

    rate: Scalar
    complement: Scalar

    def __mul__(self, other: Any) -> Any:
        return self.rate * other

    def __pow__(self, count: Any) -> Any:
        return self.rate**count

    def __rsub__(self, one: float) -> Scalar:
        assert one == 1, f"{one} - decay: only the complement is known"
        return self.complement


@struct.dataclass
class OptimizerNumbers:
    """Settings of `OptimizerConfig` that an optimizer computes with."""

    beta1: Decay
    beta2: Decay
    momentum: Decay
    epsilon: Scalar
    weight_decay: Scalar


@struct.dataclass
class Hyperparameters:
    """Hyperparameters of a training step, float32 scalars: concrete on the host, traced in the step."""

    optimizer: OptimizerNumbers
    schedule: Shape


def read_optimizer_numbers(config: OptimizerConfig) -> OptimizerNumbers:
    """Return the numbers of an optimizer, on the host."""

    def decay(rate: float) -> Decay:
        return Decay(np.float32(rate), np.float32(1 - rate))

    return OptimizerNumbers(
        beta1=decay(config.beta1),
        beta2=decay(config.beta2),
        momentum=decay(config.momentum),
        epsilon=np.float32(config.epsilon),
        weight_decay=np.float32(config.weight_decay),
    )


def read_hyperparameters(config: Config) -> Hyperparameters:
    """Return the hyperparameters of a configuration, on the host."""
    shape = find_shape(config.optimizer.learning_rate, config.schedule, config.training.steps)
    return Hyperparameters(read_optimizer_numbers(config.optimizer), shape)


def place_hyperparameters(values: Hyperparameters | None, sharding: NamedSharding) -> Hyperparameters | None:
    """Return the hyperparameters on all devices. All processes have the same values."""

    def place(value: np.float32) -> jax.Array:
        return jax.make_array_from_callback((), sharding, lambda _: value)

    placed: Hyperparameters | None = jax.tree.map(place, values)
    return placed


RATE = "learning_rate"


def _is_rate(path: tuple[Any, ...], value: Any, field: str = "hyperparams") -> bool:
    """Return whether a part of an optimizer's state belongs to this field of what `optax.inject_hyperparams` keeps."""
    return len(path) > 1 and getattr(path[-2], "name", "") == field


def _make_label(path: tuple[Any, ...]) -> str:
    """Return the label of a rate. The fields of optax's states have no part in it."""
    keys = (getattr(key, "key", getattr(key, "idx", None)) for key in path[:-1])
    return "/".join(str(key) for key in keys if key is not None)


def read_rates(moments: tree.Tree) -> dict[str, Any]:
    """Return the learning rates by label."""
    return {_make_label(path): rate for path, rate in optax.tree.get_all_with_path(moments, RATE, _is_rate)}


def make_rate_metrics(moments: tree.Tree) -> dict[str, jax.Array]:
    """Return the metrics of a step: `learning_rate`, or with several rates `learning_rate/` and the label of each."""
    rates = read_rates(moments)
    several = len(rates) > 1
    return {f"{RATE}/{label}" if several else RATE: jnp.asarray(rate, jnp.float32) for label, rate in rates.items()}


def set_rates(moments: tree.Tree, rates: dict[str, float]) -> tree.Tree:
    """Return the state of an optimizer with these learning rates, by label.

    Raises:
        InputError: a schedule computes one of them.
    """
    of_schedules = functools.partial(_is_rate, field="hyperparams_states")
    scheduled = {_make_label(path) for path, _ in optax.tree.get_all_with_path(moments, RATE, of_schedules)}
    if scheduled & rates.keys():
        raise InputError(
            "learning_rate: a schedule of the optimizer computes it at each step; to set it, give "
            "optax.inject_hyperparams a number in place of the schedule"
        )

    def change(path: tuple[Any, ...], leaf: Any) -> Any:
        is_given = _is_rate(path, leaf) and path[-1].key == RATE and _make_label(path) in rates
        if not is_given:
            return leaf
        value = jnp.full(leaf.shape, rates[_make_label(path)], leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index])

    return jax.tree_util.tree_map_with_path(change, moments)
