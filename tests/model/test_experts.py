"""Mixtures of experts against a reference in float64 that computes every expert on every token."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import toy

from jaxopt_llm import tree
from jaxopt_llm.execution import scan
from jaxopt_llm.execution.stacks import RematConfig, no_taps
from jaxopt_llm.model import experts, router
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.decoder import Params, make_parts
from jaxopt_llm.parallel.precision import PrecisionConfig
from jaxopt_llm.parallel.sharding import Placement

pytestmark = pytest.mark.core

CONFIG = replace(toy.UNIFORM, experts=4, experts_per_token=2, expert_width=12)
CONFIGS = {
    "mixtral": CONFIG,
    "switch": replace(CONFIG, experts_per_token=1, router_renormalises=False, router_z_loss=1e-3, mlp="gelu"),
    "qwen": replace(CONFIG, experts=6, experts_per_token=3, layers=4, expert_every=2, router_renormalises=False),
    "deepseek": replace(
        CONFIG, layers=4, dense_layers=1, router="sigmoid", router_scale=2.5, shared_expert_width=8, balance_loss=0.1
    ),
    "deepseek_v2": replace(CONFIG, experts=6, experts_per_token=3, router_groups=3, router_groups_per_token=2),
    "deepseek_v3": replace(
        CONFIG,
        experts=9,
        experts_per_token=4,
        router="sigmoid",
        router_groups=3,
        router_groups_per_token=2,
        router_bias=True,
    ),
    "capacity": replace(CONFIG, expert_capacity=1.0),
}
EXPERTS = {
    *("experts", "experts_per_token", "expert_width", "shared_expert_width", "dense_layers", "expert_every", "router"),
    *("router_renormalises", "router_scale", "balance_loss", "router_z_loss", "expert_capacity"),
    *("router_groups", "router_groups_per_token", "router_bias"),
}
ROWS, LENGTH = 4, 24


def run(config: ModelConfig, params: Params, placement: Placement, accumulation: int = 1) -> tuple[Any, ...]:
    """Loss, auxiliary sums and gradients."""
    batch = toy.microbatches(toy.packed(ROWS, LENGTH), accumulation)
    loss, tokens, auxiliary, gradients = program(config, placement)(params, batch)
    return float(loss / tokens), auxiliary, gradients


@functools.cache
def program(config: ModelConfig, placement: Placement) -> Callable[..., Any]:
    parts = make_parts(config)

    def both(params: Params, batch: Any) -> Any:
        cotangent = 1 / jnp.sum(batch.loss_mask).astype(jnp.float32)
        frozen = no_taps(parts.specs)
        return scan.loss_and_gradients(parts, params, frozen, batch, cotangent, placement, RematConfig("none"))

    return jax.jit(both)


def found(config: ModelConfig, params: Params) -> tuple[float, Params]:
    loss, _, gradients = run(config, params, toy.placement())
    return loss, gradients


def assert_as_reference(config: ModelConfig, params: Params) -> None:
    loss, gradients = found(config, params)
    expected_loss, expected = toy.reference_mean(config, params, toy.packed(ROWS, LENGTH))
    assert loss == pytest.approx(expected_loss, rel=1e-6)

    whole = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(expected)))

    def check(path: str, a: np.ndarray, b: np.ndarray) -> None:
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) + 1e-7 * whole, path

    tree.map_with_path(check, gradients, expected)


def test_every_switch_of_theirs_is_on_somewhere() -> None:
    for name in EXPERTS:
        assert any(getattr(each, name) != getattr(toy.UNIFORM, name) for each in CONFIGS.values()), name


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_every_chosen_expert_on_every_token(name: str) -> None:
    assert_as_reference(CONFIGS[name], toy.params(make_parts(CONFIGS[name]).specs))


@pytest.mark.parametrize("per_token", [1, 2])
def test_of_equals_the_first_has_all_and_the_last_has_nobody(per_token: int) -> None:
    config = replace(CONFIG, experts_per_token=per_token)
    params = tree.map_with_path(
        lambda path, leaf: np.zeros_like(leaf) if path.endswith("router") else leaf,
        toy.params(make_parts(config).specs),
    )
    assert_as_reference(config, params)
    _, gradients = found(config, params)
    used = [np.any(gradients["segment_0"]["block_0"]["mlp"]["up"][:, expert]) for expert in range(4)]
    assert used == [expert < per_token for expert in range(4)]


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("levels", [[0.0], [-800.0, 0.0], [-1.0, 0.0, 1.0]], ids=str)
def test_of_equal_groups_the_first_is_chosen(name: str, levels: list[float]) -> None:
    """-800: a sigmoid of 0, where nothing of a group that is not chosen may come before it."""
    config, random = CONFIGS[name], np.random.default_rng(0)
    logits = random.choice(levels, size=(2, 40, config.experts))
    bias = random.choice([-0.5, 0.0, 0.25], size=config.experts) if config.router_bias else np.zeros(config.experts)
    choice = router.choose(jnp.asarray(logits, jnp.float32), jnp.asarray(bias), None, None, config, toy.placement())
    if config.router == "sigmoid":
        scores = np.exp(logits) / (1 + np.exp(logits))
    else:
        shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
        scores = shifted / shifted.sum(axis=-1, keepdims=True)
    expected = reference.choose(scores + bias, toy.reference_config(config))
    chosen = np.any(np.asarray(choice.experts)[..., None] == np.arange(config.experts), axis=2)
    np.testing.assert_array_equal(chosen, expected)
    assert np.all(chosen.sum(axis=-1) == config.experts_per_token)


@pytest.mark.parametrize("matmul", ["int8", "fp8"])
def test_operands_in_fewer_bits_are_the_same_on_any_mesh(matmul: Any) -> None:
    params, precision = toy.params(make_parts(CONFIG).specs), PrecisionConfig(compute_dtype="float32", matmul=matmul)
    one, many = (replace(toy.placement(**mesh), precision=precision) for mesh in ({}, {"expert": 2, "tensor": 2}))
    (loss, _, gradients), (loss_of_many, _, gradients_of_many) = (run(CONFIG, params, each) for each in (one, many))
    assert loss_of_many == pytest.approx(loss, rel=1e-6)
    assert toy.distance(gradients_of_many, gradients) < 1e-5


def test_what_is_seen_of_routers() -> None:
    config = CONFIGS["capacity"]
    params = toy.params(make_parts(config).specs)
    for placement, accumulation in ((toy.placement(), 2), (toy.placement(1, data=2, expert=2), 1)):
        said = experts.seen(run(config, params, placement, accumulation)[1].statistics)
        assert said["expert_load"].shape == (4,)
        assert float(jnp.mean(said["expert_load"])) == pytest.approx(1, rel=1e-6)
        assert 1 < float(jnp.max(said["expert_load"])) <= float(said["expert_imbalance"]) < 4
        assert 0.5 < float(said["router_entropy"]) < np.log(4)
        assert 0 < float(said["dropped"]) < 0.5
    # By hand: two layers with experts of three, of two experts each.
    load = jnp.asarray([[6.0, 2.0], [0.0, 0.0], [3.0, 5.0]])
    sums = {"expert_load": load, "router_tokens": jnp.float32(8), "router_entropy": jnp.float32(4)}
    said = experts.seen({**sums, "dropped": jnp.float32(4), "exchanges": jnp.float32(2), "rounds": jnp.float32(5)})
    np.testing.assert_allclose(said["expert_load"], [(6 / 4 + 3 / 4) / 2, (2 / 4 + 5 / 4) / 2])
    assert (said["expert_imbalance"], said["router_entropy"], said["dropped"]) == (1.5, 0.5, 0.25)
    assert said["expert_rounds"] == 2.5
    assert experts.seen({}) == {}


def test_a_router_whose_scores_are_all_0_in_float32_gives_no_nan() -> None:
    config = replace(CONFIGS["deepseek"], shared_expert_width=0)
    choice = router.choose(jnp.full((1, 3, 4), -110.0), None, None, None, config, toy.placement())
    assert np.isfinite(choice.weights).all()

    def loss(logits: jax.Array) -> jax.Array:
        choice = router.choose(logits, None, None, None, config, toy.placement())
        return router.balance_loss(choice, jnp.ones((1, 3), bool), config) + jnp.sum(choice.weights)

    assert np.isfinite(jax.grad(loss)(jnp.full((1, 3, 4), -88.0))).all()


def test_with_a_cache_nothing_is_dropped() -> None:
    config = CONFIGS["capacity"]
    logits = jnp.zeros((1, 6, 4))
    assert not router.choose(logits, None, jnp.arange(6)[None], None, config, toy.placement()).kept.all()
    assert router.choose(logits, None, None, None, config, toy.placement()).kept.all()


def test_a_capacity_beyond_all_tokens_drops_none() -> None:
    config = replace(CONFIG, expert_capacity=1e30)
    assert router.choose(jnp.zeros((1, 6, 4)), None, jnp.arange(6)[None], None, config, toy.placement()).kept.all()


def test_padding_takes_no_place_from_a_token() -> None:
    """Tokens choose second what padding chooses first, and first choices come before second ones."""
    real = jnp.arange(8)[None] < 4
    logits = jnp.where(real[..., None], jnp.array([4.0, 3.0, 0.0, 0.0]), jnp.array([0.0, 4.0, 3.0, 0.0]))
    choice = router.choose(logits, None, jnp.arange(8)[None], real, CONFIGS["capacity"], toy.placement())
    assert choice.kept[:, :4].all()
    assert not choice.kept[:, 4:].any() and not choice.weights[:, 4:].any()
