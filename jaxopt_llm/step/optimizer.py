"""Optimizers of one period of a segment (see update.py), composed from optax transformations.

Every optimizer steps by -rate × (direction + decay × parameter), and only the direction depends on the optimizer. The
schedule, the decoupled weight decay and the groups of both therefore mean the same for all of them. The router bias,
which has no gradient of the loss, steps by the sign of its gradient with every optimizer.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxopt_llm.config import OptimizerConfig
from jaxopt_llm.config.training import parse_group
from jaxopt_llm.core import tree
from jaxopt_llm.model import param
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.step import moments
from jaxopt_llm.step.hyperparameters import OptimizerNumbers, read_optimizer_numbers

# Adafactor keeps row and column means of a matrix if its smaller side has at least this size, as in optax and T5X.
MIN_FACTORED_SIZE = 128
MIN_WEIGHT_RMS = 1e-3  # lower bound of a weight's RMS in Adafactor's step: the paper's epsilon 2
MUON_RMS = 0.2  # RMS of an entry of Muon's step, about that of Adam's, so that both use the same learning rate


def group_problems(config: OptimizerConfig, specs: tree.Tree) -> list[str]:
    """Find problems in the groups of weight decay and learning rate.

    Args:
        specs: specs of the trained parameters.
    """
    specs = param.select_learned(specs, specs)
    if not jax.tree.leaves(specs):
        return []
    problems = _pattern_problems("optimizer.rate_groups", config.rate_groups, specs)
    if config.decay_groups:
        problems += _pattern_problems("optimizer.decay_groups", config.decay_groups, specs)
    return problems


def is_elementwise(config: OptimizerConfig) -> bool:
    """Return whether the step of an element depends only on its own gradient, moments and value.

    Moments in 8 bits share a scale with their neighbours.
    """
    return config.name in ("adamw", "sgd", "lion") and config.state_dtype != "int8"


def make_optimizer(
    config: OptimizerConfig,
    schedule: optax.Schedule,
    section: str,
    specs: tree.Tree,
    numbers: OptimizerNumbers | None = None,
) -> optax.GradientTransformation:
    """Make the optimizer of one period of a segment, or of "non_layer".

    Args:
        specs: specs of that period, not stacked.
        numbers: arguments of a compiled program that replace the numbers in `config`.
    """
    numbers = numbers or read_optimizer_numbers(config)

    def decay_factor(path: str, spec: ParamSpec) -> float:
        assert not spec.leading
        if config.decay_groups:
            return _find_group_value(config.decay_groups, f"{section}/{path}")
        # The rank does not tell matrices: a bias per head has two dimensions.
        return 1.0 if spec.is_multiplied else 0.0

    def rate_factor(path: str, spec: ParamSpec) -> float:
        return _find_group_value(config.rate_groups, f"{section}/{path}")

    learned = param.select_learned(specs, specs)
    decays, factors = tree.map_with_path(decay_factor, learned), tree.map_with_path(rate_factor, learned)

    def add_decay(direction: tree.Tree, params: tree.Tree) -> tree.Tree:
        def leaf(decay: float, factor: float, x: jax.Array, param: jax.Array) -> jax.Array:
            return factor * (x + decay * numbers.weight_decay * param if decay else x)

        return jax.tree.map(leaf, decays, factors, direction, params)

    made = _make_direction(config.name, numbers, section, learned)
    direction = moments.compress_moments(made, config.state_dtype, learned)
    steps = optax.chain(direction, optax.stateless(add_decay), optax.scale_by_learning_rate(schedule))
    return _with_sign_updates(steps, specs)


def _with_sign_updates(optimizer: optax.GradientTransformation, specs: tree.Tree) -> optax.GradientTransformation:
    """Return the optimizer, extended by sign updates for the parameters that have no gradient of the loss.

    The optimizer itself never receives these parameters: they have no moments, no decay and no schedule, and the clip
    does not change a sign.
    """
    learned = functools.partial(param.select_learned, specs)

    def update(gradients: tree.Tree, state: tree.Tree, params: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        steps, state = optimizer.update(learned(gradients), state, learned(params))
        signs = jax.tree.map(
            lambda spec, x: None if spec.sign_rate is None else -spec.sign_rate * jnp.sign(x), specs, gradients
        )
        return tree.merge(steps, signs), state

    return optax.GradientTransformation(lambda params: optimizer.init(learned(params)), update)


def _make_direction(
    name: str, numbers: OptimizerNumbers, section: str, specs: tree.Tree
) -> optax.GradientTransformation:
    # optax calls a decay an array, and a `Decay` is none. It has the arithmetic that these transformations need.
    beta1, beta2, momentum = cast(tuple[Any, Any, Any], (numbers.beta1, numbers.beta2, numbers.momentum))
    # Adam as in Loshchilov & Hutter 2019 (arXiv:1711.05101).
    adam = optax.scale_by_adam(beta1, beta2, numbers.epsilon)
    if name == "sgd":
        return optax.trace(momentum)
    if name == "lion":
        return optax.scale_by_lion(beta1, beta2)  # Chen et al. 2023 (arXiv:2302.06675)
    if name == "adafactor":
        return _adafactor(specs)
    if name == "muon":
        in_blocks = section != "non_layer"
        labels = jax.tree.map(lambda spec: "muon" if in_blocks and _matrix_dims(spec) else "adamw", specs)
        return optax.partition({"muon": _muon(momentum, specs, labels), "adamw": adam}, labels)
    assert name == "adamw", f"optimizer.name={name} has no direction"
    return adam


def _matrix_dims(spec: ParamSpec) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the dimensions that a matmul contracts and the other ones, the two sides of a matrix.

    Dimensions of experts belong to neither side: each expert has its own matrix. Returns None if the parameter is not a
    matrix.
    """
    others = tuple(dim for dim in range(len(spec.shape)) if dim not in (*spec.contracting, *spec.expert_dims))
    return (tuple(spec.contracting), others) if spec.contracting and others else None


def _matrix_shape(spec: ParamSpec) -> tuple[int, int]:
    """Return the sizes of the two sides of a matrix."""
    dims = _matrix_dims(spec)
    assert dims is not None
    rows, columns = (math.prod(spec.shape[dim] for dim in side) for side in dims)
    return rows, columns


def _muon(momentum: Any, specs: tree.Tree, labels: tree.Tree) -> optax.GradientTransformation:
    """Return Muon: orthogonalised Nesterov momentum (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    It has optax's bias correction. The step is scaled to the size of Adam's, by 0.2 √(the larger side) (Liu et al.
    2025, arXiv:2502.16982).
    """

    def map_matrices(make: Callable[[ParamSpec], Any]) -> tree.Tree:
        return jax.tree.map(lambda spec, label: make(spec) if label == "muon" else optax.MaskedNode(), specs, labels)

    dimensions = map_matrices(lambda spec: MuonDimensionNumbers(*_matrix_dims(spec)))  # type: ignore[misc]  # not None
    scales = map_matrices(lambda spec: MUON_RMS * math.sqrt(max(_matrix_shape(spec))))
    return optax.chain(
        scale_by_muon(beta=momentum, weight_dimension_numbers=dimensions),
        optax.stateless(lambda updates, params: jax.tree.map(jnp.multiply, updates, scales)),
    )


def _adafactor(specs: tree.Tree) -> optax.GradientTransformation:
    """Return Adafactor (Shazeer & Stern 2018, arXiv:1804.04235), algorithm 4 without momentum.

    The second moment of a matrix is stored as means of its rows and of its columns. The RMS of the step is bounded, and
    the step is relative to the RMS of the weight, which is also bounded.
    """

    def matrix_view(spec: ParamSpec) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return (order of dimensions, shape) of a weight whose moment is factored, otherwise None.

        optax factors the two largest dimensions. If there are more experts than rows or columns, nothing is factored.
        """
        dims = _matrix_dims(spec)
        if dims is None:
            return None
        experts = tuple(spec.shape[dim] for dim in spec.expert_dims)
        if min(_matrix_shape(spec)) < max((MIN_FACTORED_SIZE, *experts)):
            return None
        return (*spec.expert_dims, *dims[0], *dims[1]), (*experts, *_matrix_shape(spec))

    def to_matrix(spec: ParamSpec, x: jax.Array) -> jax.Array:
        view = matrix_view(spec)
        return x.transpose(view[0]).reshape(view[1]) if view else x

    def from_matrix(spec: ParamSpec, x: jax.Array) -> jax.Array:
        view = matrix_view(spec)
        if not view:
            return x
        inverse = sorted(range(len(view[0])), key=view[0].__getitem__)
        return x.reshape([spec.shape[dim] for dim in view[0]]).transpose(inverse)

    # Without these views, optax would factor the two largest dimensions of a projection [D, heads, head_dim], which are
    # not the sides of its matrix.
    factored_rms = optax.scale_by_factored_rms(min_dim_size_to_factor=MIN_FACTORED_SIZE)

    def init(params: tree.Tree) -> tree.Tree:
        return factored_rms.init(jax.tree.map(to_matrix, specs, params))

    def update(updates: tree.Tree, state: tree.Tree, params: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        matrices, parameters = jax.tree.map(to_matrix, specs, updates), jax.tree.map(to_matrix, specs, params)
        matrices, state = factored_rms.update(matrices, state, parameters)
        return jax.tree.map(from_matrix, specs, matrices), state

    def bound(updates: tree.Tree, params: tree.Tree) -> tree.Tree:
        def bound_leaf(spec: ParamSpec, step: jax.Array, x: jax.Array) -> jax.Array:
            dims = tuple(dim for dim in range(len(spec.shape)) if dim not in spec.expert_dims)

            def rms(array: jax.Array) -> jax.Array:
                return jnp.sqrt(jnp.mean(jnp.square(array), axis=dims, keepdims=True))

            return step / jnp.maximum(rms(step), 1.0) * jnp.maximum(rms(x), MIN_WEIGHT_RMS)

        return jax.tree.map(bound_leaf, specs, updates, params)

    return optax.chain(optax.GradientTransformation(init, update), optax.stateless(bound))


def _find_group_value(groups: Sequence[str], path: str) -> float:
    """Return the number of the first group whose pattern matches the path."""
    return next(value for pattern, value in map(parse_group, groups) if tree.first_match(path, (pattern,)))


def _pattern_problems(name: str, groups: Sequence[str], specs: tree.Tree) -> list[str]:
    """Find parameters that no pattern matches, and patterns without effect.

    Args:
        name: field of the groups, for the message.
        specs: specs of the trained parameters.
    """
    patterns = [parse_group(group)[0] for group in groups]
    paths = [path for path, _ in tree.leaves_with_path(specs)]
    first = {path: tree.first_match(path, patterns) for path in paths}
    problems = [f"no pattern matches {path}; end with *=1" for path, pattern in first.items() if pattern is None][:1]
    for index, pattern in enumerate(patterns):
        if pattern in first.values() and pattern not in patterns[:index]:
            continue
        matches = any(tree.first_match(path, (pattern,)) for path in paths)
        problems.append(
            f"{pattern} has no effect, because earlier patterns match all its parameters; move it forward or remove it"
            if matches
            else f"{pattern} matches no parameter; correct or remove it"
        )
    trained = f" (trained: {paths[0]} and {len(paths) - 1} more)" if paths else ""
    return [f"{name}: {'; '.join(problems)}{trained}"] if problems else []
