"""Whatever way a loss reads a weight, its value and its gradient are those of the plain loss.

The losses here are those for which an evaluation with weights that are gathered late could go wrong silently.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_training import ROWS, Batch, Case, list_arrays, train_plainly

import jaxopt_llm
from jaxopt_llm.config import Config

pytestmark = pytest.mark.core

D, L = 8, 3
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))
LOSSES: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any]]] = {}


def weight(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.RandomState(seed + sum(shape)).randn(*shape) * 0.3, jnp.float32)


def one() -> dict[str, jax.Array]:
    return {"w": weight(D, D)}


def two() -> dict[str, jax.Array]:
    return {"w": weight(D, D), "v": weight(D, D, seed=7)}


def stack() -> dict[str, jax.Array]:
    return {"w": weight(L, D, D)}


def loss_of(make: Callable[[], Any]) -> Any:
    """Register a function (parameters, x) -> y, whose squares are the loss."""

    def register(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def loss(params: Any, batch: Any) -> jax.Array:
            return jnp.mean((function(params, batch["x"]) - batch["y"]) ** 2)

        LOSSES[function.__name__] = make, loss
        return function

    return register


def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(x @ w), None


# --- loops


@loss_of(stack)
def inside_and_outside_of_a_scan(p: Any, x: Any) -> Any:
    return jax.lax.scan(layer, x, p["w"])[0] + jnp.sum(p["w"] ** 2)


@loss_of(stack)
def in_two_scans(p: Any, x: Any) -> Any:
    return jax.lax.scan(layer, jax.lax.scan(layer, x, p["w"])[0], p["w"], reverse=True)[0]


@loss_of(stack)
def unrolled(p: Any, x: Any) -> Any:
    return jax.lax.scan(layer, x, p["w"], unroll=2)[0]


@loss_of(stack)
def reversed_before(p: Any, x: Any) -> Any:
    return jax.lax.scan(layer, x, p["w"][::-1])[0]


@loss_of(lambda: {"w": weight(L * D, D)})
def reshaped_before(p: Any, x: Any) -> Any:
    return jax.lax.scan(layer, x, p["w"].reshape(L, D, D))[0]


@loss_of(lambda: {"w": weight(D, L, D)})
def over_the_second_dimension(p: Any, x: Any) -> Any:
    return jax.lax.scan(layer, x, jnp.moveaxis(p["w"], 1, 0))[0]


@loss_of(stack)
def transposed_twice_before(p: Any, x: Any) -> Any:
    return jax.lax.scan(layer, x, jnp.swapaxes(jnp.swapaxes(p["w"], 0, 1), 0, 1))[0]


@loss_of(stack)
def transposed_within_the_layer(p: Any, x: Any) -> Any:
    return jax.lax.scan(layer, x, jnp.swapaxes(p["w"], 1, 2))[0]


@loss_of(stack)
def sliced_in_python(p: Any, x: Any) -> Any:
    for index in range(L):
        x, _ = layer(x, p["w"][index])
    return x


@loss_of(stack)
def indexed_in_a_loop(p: Any, x: Any) -> Any:
    return jax.lax.fori_loop(0, L, lambda index, x: layer(x, p["w"][index])[0], x)


@loss_of(one)
def carried(p: Any, x: Any) -> Any:
    (x, w), _ = jax.lax.scan(lambda carry, _: ((layer(*carry)[0], carry[1]), None), (x, p["w"]), None, length=3)
    return x @ w


@loss_of(stack)
def returned_by_the_scan(p: Any, x: Any) -> Any:
    x, w = jax.lax.scan(lambda x, w: (layer(x, w)[0], w), x, p["w"])
    return x @ w[1]


@loss_of(stack)
def mapped(p: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.map(lambda w: jnp.tanh(x @ w), p["w"]), axis=0)


@loss_of(stack)
def multiplied_by_an_associative_scan(p: Any, x: Any) -> Any:
    return x @ jax.lax.associative_scan(jnp.matmul, p["w"])[-1]


@loss_of(lambda: {"w": weight(2, 3, D, D)})
def a_stack_in_a_stack(p: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, group: (jax.lax.scan(layer, x, group)[0], None), x, p["w"])[0]


@loss_of(stack)
def a_scan_in_remat(p: Any, x: Any) -> Any:
    return jax.checkpoint(lambda x, w: jax.lax.scan(layer, x, w)[0])(x, p["w"])


@loss_of(stack)
def remat_with_a_policy(p: Any, x: Any) -> Any:
    return jax.lax.scan(jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable), x, p["w"])[0]


@loss_of(one)
def a_while_loop_without_gradient(p: Any, x: Any) -> Any:
    advance = lambda carry: (carry[0] + 1, layer(carry[1], p["w"])[0])  # noqa: E731
    return jax.lax.stop_gradient(jax.lax.while_loop(lambda carry: carry[0] < 3, advance, (0, x))[1]) @ p["w"]


# --- branches and functions with gradients of their own


@loss_of(two)
def in_a_branch(p: Any, x: Any) -> Any:
    return jax.lax.cond(jnp.sum(x) > 0, lambda: x @ p["w"], lambda: x @ p["v"])


@jax.custom_vjp
def odd_product(x: Any, w: Any) -> Any:
    return x @ w


odd_product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, dy: (2 * dy @ saved[1].T, 3 * saved[0].T @ dy))


@loss_of(two)
def with_a_gradient_of_its_own(p: Any, x: Any) -> Any:
    return odd_product(odd_product(x, p["w"]), p["v"])


@jax.custom_jvp
def odd_sine(w: Any) -> Any:
    return jnp.sin(w)


odd_sine.defjvp(lambda primals, tangents: (odd_sine(*primals), 5 * tangents[0]))


@loss_of(one)
def with_a_tangent_of_its_own(p: Any, x: Any) -> Any:
    return x @ odd_sine(p["w"])


@loss_of(one)
def after_a_gradient_step_of_its_own(p: Any, x: Any) -> Any:
    return x @ (p["w"] - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(p["w"]))


@loss_of(stack)
def differentiated_by_the_input(p: Any, x: Any) -> Any:
    return jax.grad(lambda x: jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, p["w"])[0]))(x)


# --- products


@loss_of(one)
def tied(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["w"]) @ p["w"].T


@loss_of(two)
def a_product_of_weights(p: Any, x: Any) -> Any:
    return x @ (p["w"] @ p["v"]) + jnp.einsum("bi,ij,kj->bk", x, p["w"], p["v"]) + x @ (p["w"] @ p["w"].T)


@loss_of(one)
def the_first_operand(p: Any, x: Any) -> Any:
    return (p["w"] @ x.T).T


@loss_of(lambda: {"w": weight(2, 4, 2, 4)})
def with_dimensions_in_any_order(p: Any, x: Any) -> Any:
    return jnp.einsum("bdh,djih->jbi", x.reshape(-1, 2, 4), p["w"]).transpose(1, 0, 2).reshape(-1, D)


@loss_of(lambda: {"w": weight(4, D, D)})
def over_a_batch_of_weights(p: Any, x: Any) -> Any:
    return jnp.mean(jax.vmap(lambda w: jnp.tanh(x @ w))(p["w"]), axis=0)


@loss_of(one)
def in_highest_precision(p: Any, x: Any) -> Any:
    return jnp.dot(x, p["w"], precision="highest")


# --- casts


@loss_of(one)
def rounded_to_bfloat16_and_back(p: Any, x: Any) -> Any:
    rounded = p["w"].astype(jnp.bfloat16).astype(jnp.float32)
    return x @ (p["w"] + jax.lax.stop_gradient(rounded - p["w"])) + x @ rounded


@loss_of(lambda: {"w": 10 * weight(D, D)})
def rounded_to_integers(p: Any, x: Any) -> Any:
    product = jnp.round(x).astype(jnp.int32) @ p["w"].astype(jnp.int32)
    return 0.1 * (x @ p["w"] + product.astype(jnp.float32) + p["w"].astype(jnp.int32).astype(jnp.float32))[:ROWS]


@loss_of(one)
def complex_products(p: Any, x: Any) -> Any:
    return jnp.abs((1j * x) @ p["w"].astype(jnp.complex64))


# --- shapes of parameters


@loss_of(lambda: {"w": weight(D, D), "scale": jnp.float32(1.5), "unused": weight(5), "unused_scalar": jnp.float32(2)})
def scalars_and_unused_parameters(p: Any, x: Any) -> Any:
    return x @ p["w"] * p["scale"]


@loss_of(lambda: weight(D, D))
def a_bare_array(p: Any, x: Any) -> Any:
    return x @ p


@loss_of(lambda: [weight(D, D), (weight(D), {"b": weight(D, seed=3), "empty": weight(0, D)})])
def lists_and_tuples(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p[0] + p[1][0]) * p[1][1]["b"] + jnp.sum(p[1][1]["empty"])


def batch(random: np.random.RandomState) -> Batch:
    return {name: random.randn(ROWS, D).astype(np.float32) for name in ("x", "y")}


@pytest.mark.filterwarnings("ignore:the loss does not read")
@pytest.mark.parametrize("name", LOSSES)
def test_a_weight_is_read_as_on_one_device(name: str) -> None:
    case = Case(*LOSSES[name], batch, OPTIMIZER)
    config = Config(mesh={"fsdp": 8}, precision={"compute_dtype": "float32"}, training={"accumulation": 3})
    engine = jaxopt_llm.initialize(*LOSSES[name], case.batches(1)[0], config, OPTIMIZER)
    expected = train_plainly(case, 3, 2)
    losses = [float(engine.step(batch)["loss"]) for batch in case.batches(2)]
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
    for path, array in list_arrays(engine.model()).items():
        np.testing.assert_allclose(array, expected.arrays[path], rtol=1e-5, atol=1e-5, err_msg=path)
