"""Cost of attention, compared with figures by hand."""

import dataclasses
from typing import Any

import pytest

from jaxopt_llm.config import Config, MeshConfig, ShardingConfig, cli
from jaxopt_llm.kernels.attention_auto import Measurement
from jaxopt_llm.planning.search import attention_cost
from jaxopt_llm.planning.search.attention_cost import AttentionCost, resolve_attention
from jaxopt_llm.planning.search.ranking import Candidate, estimate
from jaxopt_llm.planning.search.roofline import Cluster
from jaxopt_llm.planning.search.state_sizes import compute_state_sizes

RECIPE = cli.load_recipe("llama3_8b_128k.py")  # 32 heads, 8 key-value heads


def recipe(length: int = 131_072, by: str = "pallas", exchange: Any = "ring", **axes: int) -> Config:
    training = dataclasses.replace(RECIPE.training, sequence_length=length, attention=by)
    sharding = ShardingConfig(context_exchange=exchange)
    return dataclasses.replace(RECIPE, training=training, sharding=sharding, mesh=MeshConfig(**axes))


@pytest.mark.parametrize("axes", [{}, {"context": 8}])
def test_a_kernel_computes_visible_scores_and_stores_none(axes: dict[str, int]) -> None:
    found = AttentionCost.from_config(recipe(**axes))
    assert (found.count_scored_keys("global"), found.live_scores) == ((131_072 + 1) / 2, 0)
    window = dataclasses.replace(recipe(**axes), model=dataclasses.replace(RECIPE.model, window=1024))
    assert AttentionCost.from_config(window).count_scored_keys("sliding") == pytest.approx(1024, rel=0.01)


def test_xla_computes_half_of_the_scores_of_another_part_and_holds_part_of_a_block() -> None:
    alone, ring, heads = (
        AttentionCost.from_config(recipe(by="xla", exchange=exchange, **axes))
        for exchange, axes in (("ring", {}), ("ring", {"context": 8}), ("all_to_all", {"context": 8}))
    )
    formed = [each.count_scored_keys("global") / 131_072 for each in (alone, ring, heads)]
    assert formed == [5 / 8, 1 / 8 * 5 / 8 + 7 / 8 * 1 / 2, 5 / 8]
    assert alone.live_scores == 32 * 512 * 131_072
    assert ring.live_scores == heads.live_scores == alone.live_scores / 8


def test_shared_key_value_heads_are_repeated() -> None:
    def kv_heads(exchange: str, **axes: int) -> float:
        return AttentionCost.from_config(recipe(exchange=exchange, **axes)).kv_heads

    assert [kv_heads("ring", context=4, tensor=tensor) for tensor in (1, 2, 8, 16)] == [8, 4, 1, 1]
    assert [kv_heads("all_to_all", context=context) for context in (4, 8, 16)] == [8, 8, 16]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use measurements on compute capability 9.0: xla is fastest for long calls, pallas for shorter ones."""
    rows = [
        Measurement("9.0", "bfloat16", 128, 131_072, 1, "", "", {"xla": 1.0, "pallas": 2.0}),
        Measurement("9.0", "bfloat16", 128, 16_384, 1, "", "", {"xla": 2.0, "pallas": 1.0}),
    ]
    monkeypatch.setattr("jaxopt_llm.kernels.attention_auto.read_table", lambda file: rows)
    without_cache = attention_cost._find_fastest.__wrapped__
    monkeypatch.setattr(attention_cost, "_find_fastest", without_cache)


@pytest.mark.usefixtures("measured")
def test_auto_resolves_to_the_fastest_measured_implementation() -> None:
    def taken(capability: tuple[int, int] | None, **of: Any) -> str:
        return resolve_attention(recipe(**{"by": "auto", **of}), capability).training.attention

    assert taken((9, 0)) == taken((9, 0), context=8, exchange="all_to_all") == "xla"
    assert taken((9, 0), context=8) == "pallas", "a ring sees a part of the keys at a time"
    assert taken((8, 0), context=8) == "pallas", "no measurement: the order for the compute capability"
    assert taken(None, context=8) == "xla"
    assert taken((8, 0), by="triton") == "triton"


@pytest.mark.usefixtures("measured")
def test_estimates_use_the_implementation_of_auto() -> None:
    def found(by: str) -> Candidate:
        config = recipe(by=by, context=8)
        rests = compute_state_sizes(config)
        assert rests is not None
        return estimate(config, Cluster("h200", 1, 8), rests)

    auto, pallas, xla = map(found, ("auto", "pallas", "xla"))
    assert (auto.footprint, auto.time) == (pallas.footprint, pallas.time) != (xla.footprint, xla.time)
    assert auto.config.training.attention == "auto"


def test_kernels_pad_values_to_the_size_of_keys() -> None:
    lite = cli.load_recipe("deepseek_v2_lite.py")
    flash = dataclasses.replace(lite, training=dataclasses.replace(lite.training, attention="pallas"))
    assert [AttentionCost.from_config(each).head_sizes for each in (lite, flash)] == [(192, 128), (256, 256)]


def test_layers_with_heads_of_another_size_have_no_kernel() -> None:
    """As in Gemma 4: the kernel is chosen for the size of most layers."""
    model = dataclasses.replace(RECIPE.model, pattern=("sliding", "sliding", "global"), global_head_dim=512)
    config = dataclasses.replace(recipe(), model=dataclasses.replace(model, global_kv_heads=2))
    sliding, of_global = (AttentionCost.from_config(config, kind) for kind in ("sliding", "global"))
    assert (sliding.implementation, sliding.head_sizes, sliding.kv_size) == ("pallas", (128, 128), 8 * 128)
    assert (of_global.implementation, of_global.head_sizes, of_global.kv_size) == ("xla", (512, 512), 2 * 512)
    assert attention_cost.describe_attention(config).head_dim == 128
