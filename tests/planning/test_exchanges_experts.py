"""The exchange that `auto` takes: the one whose bytes on the link and whose rows take less time."""

from dataclasses import replace
from typing import Any

import pytest

from jaxopt_llm.config import Config, MeshConfig, ShardingConfig, cli
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.planning.exchanges import estimate_seconds, resolve_expert_exchange
from jaxopt_llm.planning.search.roofline import Cluster

RECIPES = ("mixtral_8x7b.py", "qwen3_30b_a3b.py", "deepseek_v2_lite.py")
HOST = Cluster("h200", 1, 8)


def choose(config: Config, cluster: Cluster) -> Any:
    return resolve_expert_exchange(config, cluster).sharding.expert_exchange


@pytest.mark.core
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gpu", ["h100", "h200", "a100", "b200"])
def test_recipes_send_choices_over_nvlink(recipe: str, gpu: str) -> None:
    """`gather` has rows for four to eight times the choices. Six or eight experts a token send more bytes than it."""
    assert choose(cli.load_recipe(recipe), replace(HOST, gpu=gpu)) == "all_to_all"


@pytest.mark.core
def test_few_devices_gather_the_tokens_of_many_choices() -> None:
    """With eight experts a token, two devices would be sent five times as much, and have no fewer than 5/8 the rows."""
    qwen = cli.load_recipe("qwen3_30b_a3b.py")
    found = {expert: choose(replace_fields(qwen, {"mesh.expert": expert}), HOST) for expert in (2, 4, 8)}
    assert found == {2: "gather", 4: "all_to_all", 8: "all_to_all"}


@pytest.mark.core
def test_a_slow_link_decides_for_fewer_bytes() -> None:
    qwen = replace_fields(cli.load_recipe("qwen3_30b_a3b.py"), {"mesh.expert": 4})
    hosts = Cluster("h200", 4, 1)
    assert (choose(qwen, replace(HOST, gpus_per_host=4)), choose(qwen, hosts)) == ("all_to_all", "gather")


@pytest.mark.core
def test_kinds_of_attention_change_nothing() -> None:
    """As in gpt-oss and Llama 4, whose layers with experts differ in attention."""
    mixtral = cli.load_recipe("mixtral_8x7b.py")
    mixed = replace_fields(mixtral, {"model.pattern": ("chunked", "global_nope")})
    assert choose(mixed, HOST) == choose(mixtral, HOST) == "all_to_all"


@pytest.mark.core
def test_bytes_and_rows_add_up() -> None:
    """For a token: four crossings of each vector at the link's rate, and what 11 and 9 arrays of rows take."""
    mixtral = replace_fields(cli.load_recipe("mixtral_8x7b.py"), {"remat.policy": "full"})
    width, inner, link, memory = 4096, 14336, 0.8 * 450e9, 0.875 * 4.8e12
    of_row, room = 2 * (11 * inner + 9 * width), ShardingConfig().expert_room
    found, expected = [], []
    for exchange, vectors, rows in (("gather", 7, 8), ("all_to_all", 2 * room * 7 / 8, 2 * room)):
        config = replace(mixtral, sharding=ShardingConfig(expert_exchange=exchange))  # type: ignore[arg-type]
        found.append(estimate_seconds(config, HOST))
        expected.append(4 * vectors * 2 * width / link + rows * of_row / memory)
    assert found[0] - found[1] == pytest.approx(expected[0] - expected[1])


@pytest.mark.core
@pytest.mark.parametrize(
    "changes", [{"sharding.expert_exchange": "gather"}, {"mesh": MeshConfig(fsdp=8)}, {"model.moe.experts": 0}]
)
def test_what_is_not_open_stays(changes: dict[str, Any]) -> None:
    config = replace_fields(cli.load_recipe("mixtral_8x7b.py"), changes)
    assert resolve_expert_exchange(config, HOST) is config
