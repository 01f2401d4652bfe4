"""Exchanges of expert parallelism: each one computes every choice, for any load."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from test_experts import CONFIG, CONFIGS, LENGTH, ROWS, run

from jaxopt_llm.config import ModelConfig, ShardingConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core import tree
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.moe import dispatch_plan, exchange, experts
from jaxopt_llm.parallel.placement import Placement

ALL_TO_ALL = ShardingConfig(expert_exchange="all_to_all", expert_room=1.0)


def placement(sharding: ShardingConfig = ALL_TO_ALL, **mesh: int) -> Placement:
    return replace(toy.placement(sharding.zero_stage, **mesh), sharding=sharding)


def crowded(config: ModelConfig) -> Params:
    """All tokens go to the first experts."""
    return tree.map_with_path(
        lambda path, leaf: np.zeros_like(leaf) if path.endswith("router") else leaf,
        toy.params(Decoder(config).specs),
    )


@pytest.mark.parametrize(
    ("name", "load", "mesh"),
    [
        pytest.param("mixtral", "random", {"expert": 4}, marks=pytest.mark.core),
        pytest.param("mixtral", "crowded", {"expert": 4}, marks=pytest.mark.core),
        pytest.param("qwen", "crowded", {"expert": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param("deepseek", "random", {"expert": 2, "context": 2}, marks=pytest.mark.slow),
        pytest.param("switch", "crowded", {"expert": 2, "data": 2}, marks=pytest.mark.slow),
        pytest.param("capacity", "crowded", {"expert": 2, "fsdp": 2}, marks=pytest.mark.slow),
    ],
)
def test_rounds_match_one_device(name: str, load: str, mesh: dict[str, int]) -> None:
    config = CONFIGS[name]
    params = crowded(config) if load == "crowded" else toy.params(Decoder(config).specs)
    zero_stage: Any = 1 if "data" in mesh else 3
    loss, _, gradients = run(config, params, toy.placement())
    many = run(config, params, placement(replace(ALL_TO_ALL, zero_stage=zero_stage), **mesh))
    assert many[0] == pytest.approx(loss, rel=1e-6)
    assert toy.distance(many[2], gradients) < 3e-6
    rounds = float(experts.router_metrics(many[1])["expert_rounds"])
    small = 1 / dispatch_plan.LATER_ROOM  # rounds for as many choices as the first one sends
    if load == "random":
        assert 1 < rounds < 1 + 2 * small
    else:  # twice an even load, or an even load after the capacity has dropped the rest
        assert rounds == (1 if name == "capacity" else 1 + small)


@pytest.mark.parametrize("method", ["gather", "all_to_all"])
def test_sequence_parallelism_matches_one_device(method: Any) -> None:
    params = crowded(CONFIG)
    divided = replace(ALL_TO_ALL, expert_exchange=method, sequence_parallel=True, zero_stage=3)
    (loss, _, gradients), many = (
        run(CONFIG, params, each) for each in (toy.placement(), placement(divided, expert=2, tensor=4))
    )
    assert many[0] == pytest.approx(loss, rel=1e-6)
    assert toy.distance(many[2], gradients) < 3e-6


@pytest.mark.core
@pytest.mark.parametrize("asked", ["auto", "gather", "all_to_all"])
def test_the_exchange_of_a_placement(asked: Any) -> None:
    """What no run has chosen has the fewest rows. A single device exchanges nothing."""
    sharding = ShardingConfig(expert_exchange=asked)
    assert exchange.get_exchange(sharding, 4) == ("all_to_all" if asked == "auto" else asked)
    assert exchange.get_exchange(sharding, 1) == "gather"


@pytest.mark.core
@pytest.mark.parametrize("room", [0.5, 1.0, 1.25, 2.0, 5.0])
def test_rounds_take_every_choice(room: float) -> None:
    """Of eight experts on four devices, three a token: a device may send two thirds of its choices to another."""
    config = replace_fields(CONFIG, {"moe.experts": 8, "moe.experts_per_token": 3})
    rounds = dispatch_plan.plan_rounds(config.moe, placement(replace(ALL_TO_ALL, expert_room=room), expert=4), 64)
    even, most = 64 * 3 / 4, 64 * 2
    assert rounds.first == min(room * even, most)
    assert rounds.later == min(even / 4, most - rounds.first)
    for choices in range(most + 1):
        count = int(rounds.count(jnp.int32(choices)))
        assert 1 <= count <= rounds.limit
        sent = rounds.first + (count - 1) * rounds.later
        assert sent >= choices and (count == 1 or sent - rounds.later < choices)
    ends = [rounds.first, *(rounds.begin(index) + rounds.later for index in range(1, rounds.limit))]
    assert ends[-1] >= most and (len(ends) == 1 or ends[-2] < most)


@pytest.mark.core
def test_the_exchange_is_described() -> None:
    expected = "all_to_all over 4 devices, with buffers for 1.5 times an even load"
    assert exchange.describe_exchange(CONFIG.moe, placement(replace(ALL_TO_ALL, expert_room=1.5), expert=4)) == expected
    gather = ShardingConfig(expert_exchange="gather")
    assert exchange.describe_exchange(CONFIG.moe, placement(gather, expert=2)) == "gather over 2 devices"
    assert exchange.describe_exchange(CONFIG.moe, placement(fsdp=2)) == ""
    assert exchange.describe_exchange(toy.CONFIG.moe, placement(expert=2)) == ""


@pytest.mark.core
def test_padding_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """All padding would choose the same experts, so that rows of padding would need more rounds than tokens do."""
    batch = toy.packed(ROWS, LENGTH)
    mostly_padding = jax.tree.map(lambda field: np.where(np.arange(ROWS)[:, None] < 3, field, 0), batch)
    monkeypatch.setattr(toy, "packed", lambda *of: mostly_padding)
    params = toy.params(Decoder(CONFIG).specs)
    loss, _, gradients = run(CONFIG, params, toy.placement())
    room = replace(ALL_TO_ALL, expert_room=1.9, zero_stage=3)
    many = run(CONFIG, params, placement(room, expert=4))
    assert experts.router_metrics(many[1])["expert_rounds"] == 1
    assert many[0] == pytest.approx(loss, rel=1e-6)
    assert toy.distance(many[2], gradients) < 3e-6
