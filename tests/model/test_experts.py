"""Mixtures of experts against a reference in float64 that computes every expert on every token."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm import tree
from jaxopt_llm.execution import scan
from jaxopt_llm.execution.stacks import RematConfig, no_taps
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.decoder import Params, make_parts

pytestmark = pytest.mark.core

CONFIG = replace(toy.UNIFORM, experts=4, experts_per_token=2, expert_width=12)
CONFIGS = {
    "mixtral": CONFIG,
    "switch": replace(CONFIG, experts_per_token=1, router_renormalises=False, router_z_loss=1e-3, mlp="gelu"),
    "qwen": replace(CONFIG, experts=6, experts_per_token=3, layers=4, expert_every=2, router_renormalises=False),
    "deepseek": replace(
        CONFIG, layers=4, dense_layers=1, router="sigmoid", router_scale=2.5, shared_expert_width=8, balance_loss=0.1
    ),
    "capacity": replace(CONFIG, expert_capacity=1.0),
}
EXPERTS = {
    *("experts", "experts_per_token", "expert_width", "shared_expert_width", "dense_layers", "expert_every", "router"),
    *("router_renormalises", "router_scale", "balance_loss", "router_z_loss", "expert_capacity"),
}
ROWS, LENGTH = 4, 24


def found(config: ModelConfig, params: Params) -> tuple[float, Params]:
    parts, batch = make_parts(config), toy.packed(ROWS, LENGTH)

    def run(params: Params, batch: Any) -> Any:
        placement, cotangent = toy.placement(), 1 / jnp.sum(batch.loss_mask).astype(jnp.float32)
        frozen = no_taps(parts.specs)
        return scan.loss_and_gradients(parts, params, frozen, batch, cotangent, placement, RematConfig("none"))

    loss, tokens, _, gradients = jax.jit(run)(params, toy.microbatches(batch, 1))
    return float(loss / tokens), gradients


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
