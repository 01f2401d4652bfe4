"""MoE layers against a reference in float64 that computes every expert on every token."""

import dataclasses
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

from jaxopt_llm.config import ModelConfig, MoEConfig, PrecisionConfig, RematConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core import tree
from jaxopt_llm.execution import scan
from jaxopt_llm.execution.segments import no_perturbations
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import OBJECTIVE, Params
from jaxopt_llm.model.moe import experts
from jaxopt_llm.parallel.placement import Placement

pytestmark = pytest.mark.core

CONFIG = replace_fields(toy.UNIFORM, {"moe.experts": 4, "moe.experts_per_token": 2, "moe.expert_width": 12})
CONFIGS = {
    "mixtral": CONFIG,
    "switch": replace_fields(
        CONFIG, {"moe.experts_per_token": 1, "moe.router_renormalises": False, "moe.router_z_loss": 1e-3, "mlp": "gelu"}
    ),
    "qwen": replace_fields(
        CONFIG,
        {
            "moe.experts": 6,
            "moe.experts_per_token": 3,
            "layers": 4,
            "moe.expert_every": 2,
            "moe.router_renormalises": False,
        },
    ),
    "deepseek": replace_fields(
        CONFIG,
        {
            "layers": 4,
            "moe.dense_layers": 1,
            "moe.router": "sigmoid",
            "moe.router_scale": 2.5,
            "moe.shared_expert_width": 8,
            "moe.balance_loss": 0.1,
        },
    ),
    "deepseek_v2": replace_fields(
        CONFIG, {"moe.experts": 6, "moe.experts_per_token": 3, "moe.router_groups": 3, "moe.router_groups_per_token": 2}
    ),
    "deepseek_v3": replace_fields(
        CONFIG,
        {
            "moe.experts": 9,
            "moe.experts_per_token": 4,
            "moe.router": "sigmoid",
            "moe.router_groups": 3,
            "moe.router_groups_per_token": 2,
            "moe.router_bias": True,
        },
    ),
    "ernie": replace_fields(CONFIG, {"moe.router_bias": True, "moe.shared_expert_width": 6}),
    "llama4": replace_fields(
        CONFIG,
        {
            "moe.experts_per_token": 1,
            "moe.router": "sigmoid",
            "moe.router_renormalises": False,
            "moe.router_weighs": "inputs",
            "moe.shared_expert_width": 12,
        },
    ),
    "two inputs": replace_fields(CONFIG, {"moe.router_weighs": "inputs", "mlp": "gelu"}),
    "qwen2": replace_fields(
        CONFIG,
        {
            "moe.router_renormalises": False,
            "moe.shared_expert_width": 6,
            "moe.shared_expert_gate": True,
            "biases": "qkv",
        },
    ),
    "gemma4": replace_fields(
        CONFIG,
        {
            "norm_placement": "both",
            "moe.shared_expert_width": 8,
            "moe.own_norms": True,
            "moe.expert_scales": True,
            "moe.router_scale": 1.3,
        },
    ),
    "capacity": replace_fields(CONFIG, {"moe.capacity_factor": 1.0}),
    "gpt_oss": replace_fields(CONFIG, {"biases": "all", "mlp": "clamped_swiglu", "moe.router_z_loss": 1e-3}),
    "biases": replace_fields(
        CONFIG, {"biases": "mlp", "mlp": "gelu", "moe.shared_expert_width": 8, "moe.capacity_factor": 1.0}
    ),
}
ROWS, LENGTH = 4, 24


def run(config: ModelConfig, params: Params, placement: Placement, accumulation: int = 1) -> tuple[Any, ...]:
    """Return the loss, the auxiliary sums and the gradients."""
    batch = toy.microbatches(toy.packed(ROWS, LENGTH), accumulation)
    sums, gradients = program(config, placement)(params, batch)
    return float(sums[OBJECTIVE] / jnp.sum(batch.loss_mask)), sums, gradients


@functools.cache
def program(config: ModelConfig, placement: Placement) -> Callable[..., Any]:
    model = Decoder(config)

    def loss_and_gradients(params: Params, batch: Any) -> Any:
        loss_weight = 1 / jnp.sum(batch.loss_mask).astype(jnp.float32)
        frozen = no_perturbations(model.specs)
        return scan.loss_and_gradients(model, params, frozen, batch, loss_weight, placement, RematConfig("none"))

    return jax.jit(loss_and_gradients)


def loss_and_gradients_on_one_device(config: ModelConfig, params: Params) -> tuple[float, Params]:
    loss, _, gradients = run(config, params, toy.placement())
    return loss, gradients


def assert_matches_reference(config: ModelConfig, params: Params) -> None:
    loss, gradients = loss_and_gradients_on_one_device(config, params)
    expected_loss, expected = toy.reference_mean(config, params, toy.packed(ROWS, LENGTH))
    assert loss == pytest.approx(expected_loss, rel=1e-6)

    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(expected)))

    def check(path: str, a: np.ndarray, b: np.ndarray) -> None:
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) + 1e-7 * norm, path

    tree.map_with_path(check, gradients, expected)


def test_every_moe_switch_is_on_in_some_config() -> None:
    for field in dataclasses.fields(MoEConfig):
        if field.name != "router_bias_rate":
            assert any(getattr(each.moe, field.name) != field.default for each in CONFIGS.values()), field.name


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_match_the_reference(name: str) -> None:
    assert_matches_reference(CONFIGS[name], toy.params(Decoder(CONFIGS[name]).specs))


@pytest.mark.parametrize("per_token", [1, 2])
def test_equal_scores_choose_the_first_experts(per_token: int) -> None:
    config = replace_fields(CONFIG, {"moe.experts_per_token": per_token})
    params = tree.map_with_path(
        lambda path, leaf: np.zeros_like(leaf) if path.endswith("router") else leaf,
        toy.params(Decoder(config).specs),
    )
    assert_matches_reference(config, params)
    _, gradients = loss_and_gradients_on_one_device(config, params)
    used = [np.any(gradients["segment_0"]["block_0"]["mlp"]["up"][:, expert]) for expert in range(4)]
    assert used == [expert < per_token for expert in range(4)]


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("levels", [[0.0], [-800.0, 0.0], [-1.0, 0.0, 1.0]], ids=str)
def test_equal_scores_choose_the_first_group(name: str, levels: list[float]) -> None:
    """At -800 a sigmoid is 0 in float32; experts of groups that are not chosen must still come after it."""
    config, random = CONFIGS[name], np.random.default_rng(0)
    logits = random.choice(levels, size=(2, 40, config.moe.experts))
    bias = (
        random.choice([-0.5, 0.0, 0.25], size=config.moe.experts)
        if config.moe.router_bias
        else np.zeros(config.moe.experts)
    )
    routing = experts.choose_experts(
        jnp.asarray(logits, jnp.float32), jnp.asarray(bias), None, None, config.moe, toy.placement()
    )
    if config.moe.router == "sigmoid":
        scores = np.exp(logits) / (1 + np.exp(logits))
    else:
        shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
        scores = shifted / shifted.sum(axis=-1, keepdims=True)
    expected = reference.choose(scores + bias, toy.reference_config(config))
    chosen = np.any(np.asarray(routing.experts)[..., None] == np.arange(config.moe.experts), axis=2)
    np.testing.assert_array_equal(chosen, expected)
    assert np.all(chosen.sum(axis=-1) == config.moe.experts_per_token)


@pytest.mark.parametrize("matmul", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_quantised_matmuls_of_experts_are_the_same_on_any_mesh(matmul: Any) -> None:
    """There is room for all choices in one round: in fp8 each round has its own scale."""
    params, precision = toy.params(Decoder(CONFIG).specs), PrecisionConfig(compute_dtype="float32", matmul=matmul)
    one, many = (replace(toy.placement(**mesh), precision=precision) for mesh in ({}, {"expert": 2, "tensor": 2}))
    many = replace(many, sharding=replace(many.sharding, expert_room=2.0))
    (loss, _, gradients), (loss_of_many, _, gradients_of_many) = (
        run(CONFIG, params, placement) for placement in (one, many)
    )
    assert loss_of_many == pytest.approx(loss, rel=1e-6)
    assert toy.distance(gradients_of_many, gradients) < 1e-5


@pytest.mark.slow
def test_router_metrics() -> None:
    config = CONFIGS["capacity"]
    params = toy.params(Decoder(config).specs)
    for placement, accumulation in ((toy.placement(), 2), (toy.placement(1, data=2, expert=2), 1)):
        metrics = experts.router_metrics(run(config, params, placement, accumulation)[1])
        assert metrics["expert_load"].shape == (4,)
        assert float(jnp.mean(metrics["expert_load"])) == pytest.approx(1, rel=1e-6)
        assert 1 < float(jnp.max(metrics["expert_load"])) <= float(metrics["expert_imbalance"].value) < 4
        assert 0.5 < float(metrics["router_entropy"]) < np.log(4)
        assert 0 < float(metrics["dropped"]) < 0.5
    # By hand: three layers, two of which have experts, with two experts each.
    load = jnp.asarray([[6.0, 2.0], [0.0, 0.0], [3.0, 5.0]])
    sums = {"expert_load": load, "router_tokens": jnp.float32(8), "router_entropy": jnp.float32(4)}
    metrics = experts.router_metrics(
        {**sums, "dropped": jnp.float32(4), "exchanges": jnp.float32(2), "rounds": jnp.float32(5)}
    )
    np.testing.assert_allclose(metrics["expert_load"], [(6 / 4 + 3 / 4) / 2, (2 / 4 + 5 / 4) / 2])
    assert (metrics["expert_imbalance"].value, metrics["router_entropy"], metrics["dropped"]) == (1.5, 0.5, 0.25)
    assert metrics["expert_rounds"] == 2.5
    assert experts.router_metrics({}) == {}


def test_scores_that_underflow_to_0_give_no_nan() -> None:
    config = replace_fields(CONFIGS["deepseek"], {"moe.shared_expert_width": 0})
    routing = experts.choose_experts(jnp.full((1, 3, 4), -110.0), None, None, None, config.moe, toy.placement())
    assert np.isfinite(routing.weights).all()

    def loss(logits: jax.Array) -> jax.Array:
        routing = experts.choose_experts(logits, None, None, None, config.moe, toy.placement())
        return experts.balance_loss(routing, jnp.ones((1, 3), bool), config.moe) + jnp.sum(routing.weights)

    assert np.isfinite(jax.grad(loss)(jnp.full((1, 3, 4), -88.0))).all()


def test_nothing_is_dropped_with_a_cache() -> None:
    config = CONFIGS["capacity"]
    logits = jnp.zeros((1, 6, 4))
    assert not experts.choose_experts(logits, None, jnp.arange(6)[None], None, config.moe, toy.placement()).kept.all()
    assert experts.choose_experts(logits, None, None, None, config.moe, toy.placement()).kept.all()


def test_a_capacity_above_all_tokens_drops_none() -> None:
    config = replace_fields(CONFIG, {"moe.capacity_factor": 1e30})
    assert experts.choose_experts(
        jnp.zeros((1, 6, 4)), None, jnp.arange(6)[None], None, config.moe, toy.placement()
    ).kept.all()


def test_padding_takes_no_capacity_from_tokens() -> None:
    """The second choice of tokens is the first choice of padding, and first choices come before second ones."""
    real = jnp.arange(8)[None] < 4
    logits = jnp.where(real[..., None], jnp.array([4.0, 3.0, 0.0, 0.0]), jnp.array([0.0, 4.0, 3.0, 0.0]))
    routing = experts.choose_experts(logits, None, jnp.arange(8)[None], real, CONFIGS["capacity"].moe, toy.placement())
    assert routing.kept[:, :4].all()
    assert not routing.kept[:, 4:].any() and not routing.weights[:, 4:].any()
