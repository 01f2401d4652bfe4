"""What attention takes, by hand."""

import dataclasses
from typing import Any

import pytest

from jaxopt_llm import config as configuration
from jaxopt_llm.config import TrainConfig
from jaxopt_llm.kernels.attention_auto import Measured
from jaxopt_llm.parallel.mesh import MeshConfig
from jaxopt_llm.parallel.sharding import ShardingConfig
from jaxopt_llm.search import attention
from jaxopt_llm.search.attention import Attention, settled
from jaxopt_llm.search.choose import Candidate, estimate
from jaxopt_llm.search.resting import resting
from jaxopt_llm.search.roofline import Cluster

RECIPE = configuration.load("llama3_8b_128k.py")  # 32 heads, 8 key-value heads


def recipe(length: int = 131_072, by: str = "pallas", exchange: Any = "ring", **axes: int) -> TrainConfig:
    training = dataclasses.replace(RECIPE.training, sequence_length=length, attention=by)
    sharding = ShardingConfig(context_exchange=exchange)
    return dataclasses.replace(RECIPE, training=training, sharding=sharding, mesh=MeshConfig(**axes))


@pytest.mark.parametrize("axes", [{}, {"context": 8}])
def test_a_kernel_forms_the_scores_that_are_seen_and_keeps_them(axes: dict[str, int]) -> None:
    found = Attention.of(recipe(**axes))
    assert (found.keys_formed("global"), found.scores) == ((131_072 + 1) / 2, 0)
    window = dataclasses.replace(RECIPE, model=dataclasses.replace(RECIPE.model, window=1024))
    assert Attention.of(window).keys_formed("sliding") == pytest.approx(1024, rel=0.01)


def test_xla_forms_all_scores_of_a_ring_and_holds_a_part_of_a_block() -> None:
    alone, ring, heads = (
        Attention.of(recipe(by="xla", exchange=exchange, **axes))
        for exchange, axes in (("ring", {}), ("ring", {"context": 8}), ("all_to_all", {"context": 8}))
    )
    formed = [each.keys_formed("global") / 131_072 for each in (alone, ring, heads)]
    assert formed == [5 / 8, 1, 5 / 8]
    assert alone.scores == 32 * 512 * 131_072
    assert ring.scores == heads.scores == alone.scores / 8


def test_key_value_heads_are_repeated_where_devices_share_them() -> None:
    def kv_heads(exchange: str, **axes: int) -> float:
        return Attention.of(recipe(exchange=exchange, **axes)).kv_heads

    assert [kv_heads("ring", context=4, tensor=tensor) for tensor in (1, 2, 8, 16)] == [8, 4, 1, 1]
    assert [kv_heads("all_to_all", context=context) for context in (4, 8, 16)] == [8, 8, 16]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On compute capability 9.0: of long calls xla is the fastest, of shorter ones pallas."""
    rows = [
        Measured("9.0", "bfloat16", 128, 131_072, "", "", {"xla": 1.0, "pallas": 2.0}),
        Measured("9.0", "bfloat16", 128, 16_384, "", "", {"xla": 2.0, "pallas": 1.0}),
    ]
    monkeypatch.setattr("jaxopt_llm.kernels.attention_auto.read", lambda file: rows)
    monkeypatch.setattr(attention, "_taken", attention._taken.__wrapped__)  # keeps nothing of it


@pytest.mark.usefixtures("measured")
def test_auto_is_what_was_measured_to_be_the_fastest() -> None:
    def taken(capability: tuple[int, int] | None, **of: Any) -> str:
        return settled(recipe(**{"by": "auto", **of}), capability).training.attention

    assert taken((9, 0)) == taken((9, 0), context=8, exchange="all_to_all") == "xla"
    assert taken((9, 0), context=8) == "pallas", "a part of the keys at a time"
    assert taken((8, 0), context=8) == taken(None, context=8) == "xla"
    assert taken((8, 0), by="triton") == "triton"


@pytest.mark.usefixtures("measured")
def test_a_search_reckons_with_what_auto_takes() -> None:
    def found(by: str) -> Candidate:
        config = recipe(by=by, context=8)
        rests = resting(config)
        assert rests is not None
        return estimate(config, Cluster("h200", 1, 8), rests)

    auto, pallas, xla = map(found, ("auto", "pallas", "xla"))
    assert (auto.footprint, auto.time) == (pallas.footprint, pallas.time) != (xla.footprint, xla.time)
    assert auto.config.training.attention == "auto"


def test_values_have_their_own_size_but_for_a_kernel() -> None:
    lite = configuration.load("deepseek_v2_lite.py")
    flash = dataclasses.replace(lite, training=dataclasses.replace(lite.training, attention="pallas"))
    assert [Attention.of(each).sizes for each in (lite, flash)] == [(192, 128), (256, 256)]
