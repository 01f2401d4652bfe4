"""The optimizers: optax, per layer (see update.py).

All of them step by -rate × (direction + decay × parameter), with a direction that is the optimizer's own, so that the
schedule, decoupled weight decay and the groups of both mean the same whichever is chosen. What no loss teaches, a
router's bias, steps by the sign of its gradient whichever is chosen.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxopt_llm import tree
from jaxopt_llm.model import param
from jaxopt_llm.model.experts import ROUTER
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.training import groups, moments
from jaxopt_llm.training.moments import StateDtype

FACTORED_FROM = 128  # the smaller side of a matrix from which Adafactor keeps row and column means, as in optax and T5X
LEAST_RMS = 1e-3  # of a weight, in Adafactor's steps: the paper's epsilon 2
MUON_RMS = 0.2  # of an entry of Muon's step: about that of Adam's, so that both take one learning rate


@dataclass(frozen=True)
class OptimizerConfig:
    learning_rate: float = 3e-4
    """peak of the schedule; adafactor's is relative to the RMS of each weight"""
    beta1: float = 0.9
    """decay of the first moment, per step, of adamw; of lion the share of it in a step"""
    beta2: float = 0.95
    """decay of the second moment, per step, of adamw; of lion that of its momentum"""
    epsilon: float = 1e-8
    """added to the root of the second moment of adamw"""
    weight_decay: float = 0.1
    """decoupled: a step takes this times the learning rate off a parameter; see decay_groups"""
    clip_norm: float = 1.0
    """largest global norm of the gradient; larger ones are scaled down to it; 0: none are"""
    in_backward: bool = False
    """whether a layer is updated as soon as the backward has its gradient, which is then freed: gradients never exist
    whole (LOMO; torchtune's optimizer_in_bwd). Without clip, accumulation, loss scaling, skipped steps or a pipeline"""
    name: Literal["adamw", "sgd", "lion", "adafactor", "muon"] = "adamw"
    """muon: the matrices of the blocks, adamw all else"""
    state_dtype: StateDtype = "float32"
    """in which the moments of matrices and tables rest, all but adafactor's: 8, 4 or 2.06 bytes per parameter of adamw;
    int8 is codes in blocks along the last dimension, each with a scale"""
    momentum: float = 0.95
    """decay of the momentum, per step, of sgd and of muon's matrices"""
    decay_groups: tuple[str, ...] = ()
    """factors of weight_decay as PATTERN=NUMBER, as in "*norm/*=0" "*=1": globs of paths, where * also fits slashes.
    The first that fits a path decides; together they must fit all that is trained, and each decide something. None
    given: 1 for matrices and tables, 0 for norm scales and biases"""
    rate_groups: tuple[str, ...] = ("*=1",)
    """factors of the learning rate, written as decay_groups are"""

    def problems(self) -> list[str]:
        found = [
            f"optimizer.{name}={getattr(self, name)}: must be above 0"
            for name in ("learning_rate", "epsilon")
            if not getattr(self, name) > 0
        ]
        found += [
            f"optimizer.{name}={getattr(self, name)}: must be at least 0"
            for name in ("clip_norm", "weight_decay")
            if getattr(self, name) < 0
        ]
        found += [
            f"optimizer.{name}={getattr(self, name)}: must lie in [0, 1)"
            for name in ("beta1", "beta2", "momentum")
            if not 0 <= getattr(self, name) < 1
        ]
        if self.name == "adafactor" and self.state_dtype != "float32":
            found.append(
                f"optimizer.state_dtype={self.state_dtype} is not for optimizer.name=adafactor, whose moments are few: "
                "leave it float32"
            )
        if not self.rate_groups:
            found.append("optimizer.rate_groups: must fit every parameter; *=1 does")
        for name in ("decay_groups", "rate_groups"):
            found += groups.syntax_problems(f"optimizer.{name}", getattr(self, name))
        return found


def group_problems(config: OptimizerConfig, specs: tree.Tree) -> list[str]:
    """specs: of what is trained."""
    specs = param.learned(specs, specs)
    if not jax.tree.leaves(specs):
        return []
    found = groups.problems("optimizer.rate_groups", config.rate_groups, specs)
    if config.decay_groups:
        found += groups.problems("optimizer.decay_groups", config.decay_groups, specs)
    return found


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, section: str, specs: tree.Tree
) -> optax.GradientTransformation:
    """For the parameters of one layer of a section, or those outside the stacks.

    specs: of one layer.
    """

    def decay(path: str, spec: ParamSpec) -> float:
        assert not spec.leading
        if config.decay_groups:
            return config.weight_decay * groups.number(config.decay_groups, f"{section}/{path}")
        # Not by rank: a bias by heads has two dimensions.
        return config.weight_decay if spec.contracting or path.endswith(ROUTER) else 0.0

    own = param.learned(specs, specs)
    decays = tree.map_with_path(decay, own)
    factors = tree.map_with_path(lambda path, spec: groups.number(config.rate_groups, f"{section}/{path}"), own)

    def step(direction: tree.Tree, params: tree.Tree) -> tree.Tree:
        return jax.tree.map(
            lambda decay, factor, x, param: factor * (x + decay * param if decay else x),
            decays,
            factors,
            direction,
            params,
        )

    direction = moments.stored(_direction(config, section, own), config.state_dtype, own)
    steps = optax.chain(direction, optax.stateless(step), optax.scale_by_learning_rate(schedule))
    return _beside_signs(steps, specs)


def _beside_signs(optimizer: optax.GradientTransformation, specs: tree.Tree) -> optax.GradientTransformation:
    """The optimizer, which is never given what no loss teaches: that has no moments, no decay and no schedule, and to a
    sign the clip is nothing."""

    def init(params: tree.Tree) -> tree.Tree:
        return optimizer.init(param.learned(specs, params))

    def update(gradients: tree.Tree, state: tree.Tree, params: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        steps, state = optimizer.update(param.learned(specs, gradients), state, param.learned(specs, params))
        signs = jax.tree.map(
            lambda spec, x: None if spec.sign_rate is None else -spec.sign_rate * jnp.sign(x), specs, gradients
        )
        return tree.merge(steps, signs), state

    return optax.GradientTransformation(init, update)


def _direction(config: OptimizerConfig, section: str, specs: tree.Tree) -> optax.GradientTransformation:
    # Adam of Loshchilov & Hutter 2019 (arXiv:1711.05101).
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    if config.name == "sgd":
        return optax.trace(config.momentum)
    if config.name == "lion":
        return optax.scale_by_lion(config.beta1, config.beta2)  # Chen et al. 2023 (arXiv:2302.06675)
    if config.name == "adafactor":
        return _adafactor(specs)
    if config.name == "muon":
        in_blocks = section != "outer"
        labels = jax.tree.map(lambda spec: "muon" if in_blocks and _sides(spec) else "adamw", specs)
        return optax.partition({"muon": _muon(config.momentum, specs, labels), "adamw": adam}, labels)
    return adam


def _sides(spec: ParamSpec) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The dimensions that a product sums over and the others, the sides of a matrix, or of each of several; None for
    what is none."""
    others = tuple(dim for dim in range(len(spec.shape)) if dim not in (*spec.contracting, *spec.numbered))
    return (tuple(spec.contracting), others) if spec.contracting and others else None


def _lengths(spec: ParamSpec) -> tuple[int, int]:
    """Of a matrix's sides."""
    sides = _sides(spec)
    assert sides is not None
    rows, columns = (math.prod(spec.shape[dim] for dim in side) for side in sides)
    return rows, columns


def _muon(momentum: float, specs: tree.Tree, labels: tree.Tree) -> optax.GradientTransformation:
    """Nesterov momentum, orthogonalised (Jordan et al. 2024, kellerjordan.github.io/posts/muon), with optax's bias
    correction; scaled to Adam's size, 0.2 √(the larger side) (Liu et al. 2025, arXiv:2502.16982)."""

    def of_matrices(function: Callable[[ParamSpec], Any]) -> tree.Tree:
        return jax.tree.map(
            lambda spec, label: function(spec) if label == "muon" else optax.MaskedNode(), specs, labels
        )

    dimensions = of_matrices(lambda spec: MuonDimensionNumbers(*_sides(spec)))  # type: ignore[misc]  # a matrix has sides
    scales = of_matrices(lambda spec: MUON_RMS * math.sqrt(max(_lengths(spec))))
    return optax.chain(
        scale_by_muon(beta=momentum, weight_dimension_numbers=dimensions),
        optax.stateless(lambda updates, params: jax.tree.map(jnp.multiply, updates, scales)),
    )


def _adafactor(specs: tree.Tree) -> optax.GradientTransformation:
    """Shazeer & Stern 2018 (arXiv:1804.04235), algorithm 4 without momentum: the second moment of a matrix is kept as
    means of rows and of columns, and both the step's RMS and its share of the weight's own are bounded."""

    def matrix(spec: ParamSpec) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """(the order of dimensions, the shape) of a weight whose moment is factored. optax takes the two largest
        dimensions for a matrix's: of more experts than that none is."""
        sides = _sides(spec)
        if sides is None:
            return None
        numbers = tuple(spec.shape[dim] for dim in spec.numbered)
        if min(_lengths(spec)) < max((FACTORED_FROM, *numbers)):
            return None
        return (*spec.numbered, *sides[0], *sides[1]), (*numbers, *_lengths(spec))

    def to_matrix(spec: ParamSpec, x: jax.Array) -> jax.Array:
        view = matrix(spec)
        return x.transpose(view[0]).reshape(view[1]) if view else x

    def from_matrix(spec: ParamSpec, x: jax.Array) -> jax.Array:
        view = matrix(spec)
        if not view:
            return x
        inverse = sorted(range(len(view[0])), key=view[0].__getitem__)
        return x.reshape([spec.shape[dim] for dim in view[0]]).transpose(inverse)

    # optax alone would factor the two largest dimensions, of a projection [D, heads, head_dim] not those of its matrix.
    rms = optax.scale_by_factored_rms(min_dim_size_to_factor=FACTORED_FROM)

    def init(params: tree.Tree) -> tree.Tree:
        return rms.init(jax.tree.map(to_matrix, specs, params))

    def update(updates: tree.Tree, state: tree.Tree, params: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        matrices, parameters = (jax.tree.map(to_matrix, specs, each) for each in (updates, params))
        matrices, state = rms.update(matrices, state, parameters)
        return jax.tree.map(from_matrix, specs, matrices), state

    def bound(updates: tree.Tree, params: tree.Tree) -> tree.Tree:
        def one(spec: ParamSpec, step: jax.Array, x: jax.Array) -> jax.Array:
            dims = tuple(dim for dim in range(len(spec.shape)) if dim not in spec.numbered)

            def rms(array: jax.Array) -> jax.Array:
                return jnp.sqrt(jnp.mean(jnp.square(array), axis=dims, keepdims=True))

            return step / jnp.maximum(rms(step), 1.0) * jnp.maximum(rms(x), LEAST_RMS)

        return jax.tree.map(one, specs, updates, params)

    return optax.chain(optax.GradientTransformation(init, update), optax.stateless(bound))
