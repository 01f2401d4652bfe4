"""Training on one device with JAX and optax alone, which the engine must equal, of models of each kind."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

from jaxopt_llm.core import tree

ROWS, STEPS = 24, 5
Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A model to train.

    model, loss, optimizer, rules, loss_over: arguments of `initialize`.
    batch: makes a batch of ROWS rows.
    plain_optimizer: the optax transformation that `optimizer` must equal, if that is an OptimizerConfig.
    """

    model: Any
    loss: Callable[[Any, Any], Any]
    batch: Callable[[np.random.RandomState], Batch]
    optimizer: Any
    rules: dict[str, str | None] = field(default_factory=dict)
    plain_optimizer: Any = None
    loss_over: Literal["rows", "batch"] | None = None

    def batches(self, steps: int = STEPS) -> list[Batch]:
        return [self.batch(np.random.RandomState(step)) for step in range(steps)]


@dataclass(frozen=True)
class Plain:
    """A model as pure functions of pytrees.

    make: () -> (parameters, variables).
    call: (parameters, variables, batch) -> (loss, the parameters and variables after what the loss assigned to them).
    """

    make: Callable[[], tuple[Any, Any]]
    call: Callable[[Any, Any, Any], tuple[Any, tuple[Any, Any]]]


@dataclass(frozen=True)
class Trained:
    """Losses, metrics of the last step, and all arrays of a model by path."""

    losses: list[float]
    metrics: dict[str, float]
    arrays: dict[str, np.ndarray]


def list_arrays(model: Any) -> dict[str, np.ndarray]:
    """Return the arrays of an NNX module, of Linen's variables or of a pytree, by path; keys as their data."""
    if isinstance(model, nnx.Module):
        pairs = [
            ("/".join(map(str, keys)), leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf)
            for keys, leaf in nnx.to_flat_state(nnx.split(model)[1])
        ]
    else:
        pairs = tree.leaves_with_path(linen.meta.unbox(model))
    is_key = {path: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for path, leaf in pairs}
    return {path: np.asarray(jax.random.key_data(leaf) if is_key[path] else leaf) for path, leaf in pairs}


def plain(case: Case) -> tuple[Plain, Callable[[Any, Any], Any]]:
    """Return a case's model as pure functions, and the function from its pytrees to the user's kind of model."""
    if isinstance(case.model, linen.Module):
        return _plain_linen(case)
    with nnx.use_eager_sharding(False):
        made = case.model()
    if not isinstance(made, nnx.Module):
        return Plain(
            lambda: (made, {}), lambda params, _, batch: (case.loss(params, batch), (params, {}))
        ), lambda params, _: params
    graph, template, variables = nnx.split(made, nnx.Param, ...)

    def rebuild(params: Any, variables: Any) -> Any:
        state = jax.tree.map(lambda x: x, template)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state, variables, copy=True)

    def call(params: Any, variables: Any, batch: Any) -> tuple[Any, Any]:
        with nnx.use_eager_sharding(False):
            model = rebuild(params, variables)
            output = case.loss(model, batch)
        _, after, variables = nnx.split(model, nnx.Param, ...)
        return output, (nnx.to_pure_dict(after), variables)

    return Plain(lambda: (nnx.to_pure_dict(template), variables), call), rebuild


def _plain_linen(case: Case) -> tuple[Plain, Callable[[Any, Any], Any]]:
    """The draws of a call are those of the stream "params", with a key for each microbatch since the start."""

    def make() -> tuple[Any, Any]:
        example = case.batches(1)[0]
        # Jitted, since operation by operation it takes minutes for some models.
        init = jax.jit(lambda: case.model.init(jax.random.key(0), example, method=case.loss))
        variables = linen.meta.unbox(init())
        params = variables.pop("params")
        return params, (variables, 0)

    def call(params: Any, variables: Any, batch: Any) -> tuple[Any, Any]:
        others, count = variables
        rngs = {"params": jax.random.fold_in(jax.random.key(0), count)}
        collections = {"params": params, **others}
        output, changed = case.model.apply(collections, batch, method=case.loss, mutable=[*others], rngs=rngs)
        return output, (params, (dict(changed), count + 1))

    return Plain(make, call), lambda params, variables: {"params": params, **variables[0]}


def split_output(output: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return the sum, the count and the metrics of what a loss returned."""
    value, metrics = output if isinstance(output, tuple) and isinstance(output[1], dict) else (output, {})
    total, count = value if isinstance(value, tuple) else (value, 1.0)
    return total, jnp.float32(count), metrics


def train_plainly(case: Case, accumulation: int, steps: int = STEPS) -> Trained:
    """Train. All microbatches of a step start from the same parameters; the update, from what the last one assigned."""
    model, rebuild = plain(case)
    optimizer = case.plain_optimizer or case.optimizer
    params, variables = model.make()
    state = optimizer.init(params)

    @jax.jit
    def differentiate(params: Any, variables: Any, batch: Any) -> Any:
        def objective(params: Any) -> Any:
            output, after = model.call(params, variables, batch)
            total, count, metrics = split_output(output)
            return total, (count, metrics, after)

        return jax.value_and_grad(objective, has_aux=True)(params)

    @jax.jit
    def update(gradients: Any, count: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(jax.tree.map(lambda x: x / count, gradients), state, params)
        return optax.apply_updates(params, updates), state

    losses, means = [], {}
    for batch in case.batches(steps):
        results = []
        for part in range(accumulation):
            rows = jax.tree.map(lambda x, part=part: np.split(x, accumulation)[part], batch)
            (total, (count, metrics, after)), gradients = differentiate(params, variables, rows)
            assigned, variables = after
            results.append((total, count, {name: value * count for name, value in metrics.items()}, gradients))
        total, count, metrics, gradients = functools.reduce(functools.partial(jax.tree.map, jnp.add), results)
        params, state = update(gradients, count, state, assigned)
        losses.append(float(total / count))
        means = {name: float(value / count) for name, value in metrics.items()}
    return Trained(losses, means, list_arrays(rebuild(params, variables)))
