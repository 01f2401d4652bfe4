"""Cost of a block."""

import math
from typing import Any

import jax
import pytest
import toy

from jaxopt_llm.config import Config, MeshConfig, RematConfig, ShardingConfig, TrainingConfig
from jaxopt_llm.config.fields import METADATA, replace_fields
from jaxopt_llm.model import param
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.planning.memory import Activations
from jaxopt_llm.planning.search.block_cost import BlockCost, keep_existing


def config_of(tensor: int = 1, expert: int = 1, exchange: Any = "auto", **switches: Any) -> Config:
    model = replace_fields(toy.CONFIG, {"layers": 4, **switches})
    mesh, sharding = MeshConfig(expert=expert, tensor=tensor), ShardingConfig(expert_exchange=exchange)
    return Config(model=model, mesh=mesh, sharding=sharding, training=TrainingConfig(batch_size=1, sequence_length=8))


def block(*arguments: Any, **switches: Any) -> BlockCost:
    return BlockCost.from_config(config_of(*arguments, **switches))


def multiplied_for(cost: BlockCost, name: str) -> float:
    """Return the numbers that a token is multiplied with to make an intermediate."""
    return cost.count_multiplied(lambda layer, index: layer.trace.products[index].result.name == name)


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
    assert mixed.count_elements("mlp_up") == dense.count_elements("mlp_up") != block(tensor).count_elements("mlp_up")
    router = 3 / 4 * toy.CONFIG.width * 8
    assert mixed.count_multiplied() - router == dense.count_multiplied()
    assert multiplied_for(mixed, "router_logits") == router
    of_experts = mixed.count_multiplied(lambda layer, index: layer.trace.products[index].of_experts)
    assert of_experts == 3 / 4 * 3 * 3 * toy.CONFIG.width * 10 / tensor


def test_expert_rows_of_each_exchange() -> None:
    """Check the room for all choices that can arrive (gather), or for the first round of them (all_to_all).

    Matmuls are those of an even load.
    """
    switches = {"moe.experts": 8, "moe.experts_per_token": 3, "moe.expert_width": 10}

    def rows(exchange: str) -> dict[int, float]:
        found = {expert: block(expert=expert, exchange=exchange, **switches) for expert in (1, 2, 4, 8)}
        assert all(each.count_multiplied() == found[1].count_multiplied() for each in found.values())
        return {expert: pytest.approx(each.count_elements("mlp_up") / 10) for expert, each in found.items()}

    assert rows("gather") == {1: 3, 2: 2 * 3, 4: 4 * 2, 8: 8 * 1}
    room = ShardingConfig().expert_room * 3
    assert rows("all_to_all") == {1: 3, 2: room, 4: room, 8: room}


def test_few_key_value_heads_are_whole_on_each_device() -> None:
    assert toy.CONFIG.kv_heads == 2
    whole = toy.CONFIG.kv_heads * toy.CONFIG.head_dim
    for tensor, keys in ((1, whole), (2, whole / 2), (4, whole)):
        found = block(tensor)
        assert found.count_elements("key") == found.count_elements("value") == keys
        assert multiplied_for(found, "key") == toy.CONFIG.width * keys
        assert found.count_elements("query") == 2 * whole / tensor


def test_no_policy_saves_what_a_router_decides() -> None:
    mixed, own = block(**{"moe.experts": 8}), {"router_logits", "expert_rows"}
    for remat in (RematConfig("dots"), RematConfig("full"), RematConfig("none", offload=("query",))):
        assert not mixed.list_saved(remat) & own
        assert multiplied_for(mixed, "router_logits") <= mixed.count_recomputed(remat)
    assert mixed.list_saved(RematConfig("none")) >= own
    assert not mixed.count_recomputed(RematConfig("none"))


def test_only_a_norm_after_the_mlp_reads_its_result() -> None:
    for placement, extra in (("pre", 0), ("post", 1), ("both", 1)):
        cost = block(norm_placement=placement)
        assert ("mlp_output" in cost.list_saved(RematConfig("dots"))) == bool(extra)
        down = multiplied_for(cost, "mlp_output")
        assert cost.count_recomputed(RematConfig("full")) == cost.count_multiplied() - (1 - extra) * down


def test_names_that_a_model_does_not_have_are_left_out() -> None:
    config = config_of(mlp="gelu")
    remat = RematConfig(("query", "mlp_gate"), offload=("mlp_gate", "mlp_up"))
    assert keep_existing(remat, config) == RematConfig(("query",), offload=("mlp_up",))
    assert keep_existing(RematConfig(("mlp_gate",)), config) == RematConfig("full")
    assert keep_existing(remat, config_of()) == remat


LATENT = {"kv_heads": 4, "head_dim": 10, "mla.kv_rank": 8, "mla.rotary_head_dim": 4, "mla.value_head_dim": 3}
# A switch with a matrix or an intermediate of its own is on in one of these models.
SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no gate": {"mlp": "gelu"},
    "gated attention": {"attention_gate": "element"},
    "learned activation": {"mlp": "xielu"},
    "parallel": {"parallel_block": True},
    "layer inputs": {"layer_input_size": 6},
    "gated delta": {"pattern": ("gated_delta",)},
    "latent": LATENT,
    "latent queries": LATENT | {"mla.query_rank": 6},
}


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_a_block_counts_the_matrices_of_the_model(switches: dict[str, Any]) -> None:
    layer = param_specs(replace_fields(toy.UNIFORM, {"layers": 1, **switches}))["segment_0"]
    matrices = [spec for spec in jax.tree.leaves(layer) if spec.contracting]
    assert block(**switches).count_multiplied() == param.count_parameters(matrices)


def test_a_gated_delta_layer_names_what_its_backward_reads() -> None:
    """The projections and the result, by the roles of those of attention: a policy keeps both alike."""
    cost = block(pattern=("gated_delta",))
    projections, delta = {"query", "key", "value", "beta", "decay"}, config_of().model.delta
    assert cost.list_saved(RematConfig("save_attention")) == {"block_input", "attention"}
    assert cost.list_saved(RematConfig("save_qkv")) == {"block_input", "attention", *projections}
    assert cost.list_saved(RematConfig("full")) == {"block_input"}
    assert cost.list_saved(RematConfig("none")) > {"attention_gate", "attention", *projections}
    assert cost.recomputes_attention(RematConfig("full")) and not cost.recomputes_attention(RematConfig("save_qkv"))
    values = delta.value_heads * delta.value_head_dim
    assert cost.count_elements("attention") == cost.count_elements("attention_gate") == values
    assert block(tensor=2, pattern=("gated_delta",)).count_elements("attention", "beta") == (values + 4) / 2


def test_adapters_are_counted_and_only_they_are_trained() -> None:
    config = replace_fields(config_of(), {"lora.rank": 2, "lora.targets": ("query", "down")})
    cost, model = BlockCost.from_config(config), config.model
    trained = cost.count_multiplied(lambda layer, index: layer.trace.products[index].trained)
    heads = model.heads * model.head_dim
    assert trained == 2 * (model.width + heads) + 2 * (model.mlp_width + model.width)
    assert cost.count_multiplied() - trained == block().count_multiplied()


def test_adapters_of_tables_change_no_block() -> None:
    tables = replace_fields(config_of(), {"lora.rank": 2, "lora.targets": ("non_layer/*/table",)})
    assert BlockCost.from_config(tables).count_multiplied() == block().count_multiplied()


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_the_report_of_memory_has_the_same_sizes(switches: dict[str, Any], tensor: int) -> None:
    """The report has the shape of one device's part, the search its numbers per token."""
    config = config_of(tensor, **switches)
    activations = Activations(config, toy.placement(tensor=tensor))
    for layer in BlockCost.from_config(config).layers:
        for mark, size in zip(layer.trace.marks, layer.elements, strict=True):
            found = math.prod(activations.local_shape(mark)) * mark.dtype.itemsize
            assert found == 2 * 8 * size, mark.name  # bfloat16, 8 tokens


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
    switches = LATENT | {"mla.query_rank": 6}
    whole, halves = (block(tensor, **switches) for tensor in (1, 2))
    names = {mark.name for mark in whole.layers[0].trace.marks}
    divided = {name for name in names if halves.count_elements(name) != whole.count_elements(name)}
    assert divided == {"query", "key", "value", "attention", "mlp_gate", "mlp_up"}
    assert [whole.count_elements(name) for name in ("latent", "rotary_key", "key", "value")] == [8, 4, 4 * 6, 4 * 3]
