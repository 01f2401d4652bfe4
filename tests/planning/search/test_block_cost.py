"""Cost of a block."""

import math
from typing import Any, get_args

import jax
import pytest
import toy

from jaxopt_llm.config import Config, Intermediate, MeshConfig, RematConfig, ShardingConfig, TrainingConfig
from jaxopt_llm.config.fields import METADATA, replace_fields
from jaxopt_llm.model import param
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.planning.activations import Activations
from jaxopt_llm.planning.search.block_cost import MOE_RESULTS, BlockCost, list_existing, list_recomputed, list_saved


def block(tensor: int = 1, expert: int = 1, exchange: Any = "auto", **switches: Any) -> BlockCost:
    model = replace_fields(toy.CONFIG, {"layers": 4, **switches})
    mesh, sharding = MeshConfig(expert=expert, tensor=tensor), ShardingConfig(expert_exchange=exchange)
    return BlockCost.from_config(Config(model=model, mesh=mesh, sharding=sharding))


MIXED = {
    "moe.experts": 8,
    "moe.experts_per_token": 3,
    "moe.expert_width": 10,
    "moe.shared_expert_width": 6,
    "moe.dense_layers": 1,
}


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_moe_block_counts_the_experts_that_a_token_uses(tensor: int) -> None:
    """Check the mean over layers that differ."""
    mixed = block(tensor, **MIXED)
    dense = block(tensor, mlp_width=(toy.CONFIG.mlp_width + 3 * (3 * 10 + 6)) // 4)
    assert mixed.elements["mlp_up"] == dense.elements["mlp_up"] != block(tensor).elements["mlp_up"]
    assert mixed.weights | {"router": 0} == dense.weights
    assert mixed.weights["router"] == 3 / 4 * toy.CONFIG.width * 8 and dense.weights["router"] == 0


def test_expert_rows_of_each_exchange() -> None:
    """Check the room for all choices that can arrive (gather), or for the first round of them (all_to_all, ragged).

    Matmuls are those of an even load.
    """
    switches = {"moe.experts": 8, "moe.experts_per_token": 3, "moe.expert_width": 10}

    def rows(exchange: str) -> dict[int, float]:
        found = {expert: block(expert=expert, exchange=exchange, **switches) for expert in (1, 2, 4, 8)}
        assert all(each.weights == found[1].weights for each in found.values())
        return {expert: pytest.approx(each.elements["mlp_up"] / 10) for expert, each in found.items()}

    assert rows("gather") == {1: 3, 2: 2 * 3, 4: 4 * 2, 8: 8 * 1}
    room = ShardingConfig().expert_room * 3
    assert rows("all_to_all") == rows("ragged") == {1: 3, 2: room, 4: room, 8: room}


def test_few_key_value_heads_are_whole_on_each_device() -> None:
    assert toy.CONFIG.kv_heads == 2
    whole = toy.CONFIG.kv_heads * toy.CONFIG.head_dim
    for tensor, keys in ((1, whole), (2, whole / 2), (4, whole)):
        found = block(tensor)
        assert found.elements["key"] == found.elements["value"] == keys
        assert found.weights["key"] == toy.CONFIG.width * keys
        assert found.elements["query"] == 2 * whole / tensor


def test_no_policy_saves_moe_results() -> None:
    model, own = replace_fields(toy.CONFIG, {"moe.experts": 8}), {"router", "expert_rows"}
    for remat in (RematConfig("dots"), RematConfig("full"), RematConfig("none", offload=("query",))):
        assert list_recomputed(remat, model) >= own and not list_saved(remat, model) & own
    assert list_saved(RematConfig("none"), model) >= own
    assert not list_recomputed(RematConfig("none"), model)
    assert not list_recomputed(RematConfig("full"), toy.CONFIG) & own


LATENT = {"kv_heads": 4, "head_dim": 10, "mla.kv_rank": 8, "mla.rotary_head_dim": 4, "mla.value_head_dim": 3}
# A switch with a matrix or an intermediate of its own is on in one of these models.
SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no gate": {"mlp": "gelu"},
    "latent": LATENT,
    "latent queries": LATENT | {"mla.query_rank": 6},
}


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_a_block_counts_the_matrices_of_the_model(switches: dict[str, Any]) -> None:
    layer = param_specs(replace_fields(toy.UNIFORM, {"layers": 1, **switches}))["segment_0"]
    matrices = [spec for spec in jax.tree.leaves(layer) if spec.contracting]
    assert sum(block(**switches).weights.values()) == param.count_parameters(matrices)


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_a_block_has_a_size_for_the_intermediates_of_the_model(switches: dict[str, Any]) -> None:
    elements = block(**switches).elements
    assert elements.keys() == {*get_args(Intermediate)} | MOE_RESULTS
    assert {name for name, size in elements.items() if size} == {*list_existing(replace_fields(toy.CONFIG, switches))}


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_the_report_of_memory_has_the_same_sizes(switches: dict[str, Any], tensor: int) -> None:
    """The report reads the axes of model/intermediates.py; the search has formulas."""
    model = replace_fields(toy.CONFIG, {"layers": 4, **switches})
    training, elements = TrainingConfig(batch_size=1, sequence_length=8), block(tensor, **switches).elements
    activations = Activations(model, training, toy.placement(tensor=tensor))
    for name in list_existing(model):
        assert [math.prod(shape) for shape in activations.local_shapes(name)] == [8 * elements[name]], name


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_a_resumed_run_may_not_change_what_shapes_parameters(switches: dict[str, Any]) -> None:
    for name in switches:
        one, other = (
            param_specs(replace_fields(toy.UNIFORM, {**each})) for each in (switches, _without(switches, name))
        )
        assert one == other or METADATA[f"model.{name}"].resume == "never", name


def _without(switches: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in switches.items() if key != name}


def test_latents_are_whole_on_each_device() -> None:
    switches = LATENT
    halves, whole = (block(tensor, **switches, **{"mla.query_rank": 6}).elements for tensor in (2, 1))
    divided = {name for name in whole if halves[name] != whole[name]}
    assert divided == {"query", "key", "value", "attention", "mlp_gate", "mlp_up"}
    assert (whole["latent"], whole["rotary_key"], whole["key"], whole["attention"]) == (8, 4, 4 * 6, 4 * 3)
