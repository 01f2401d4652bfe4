"""Networks, NVLink and PCIe of other rates than the usual ones: `plan --network`, `--nvlink`, `--pcie`."""

import json
import sys
from dataclasses import replace
from typing import Literal

import pytest

from jaxopt_llm import plan
from jaxopt_llm.compiler.chips import CHIPS, LinkRates
from jaxopt_llm.config import Config, MeshConfig, ModelConfig, TrainingConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.planning.search.ranking import estimate
from jaxopt_llm.planning.search.roofline import Cluster
from jaxopt_llm.planning.search.setting_space import enumerate_settings
from jaxopt_llm.planning.search.state_sizes import compute_state_sizes
from jaxopt_llm.planning.step_plan import make_plan

CONFIG = Config(
    model=ModelConfig(width=256, layers=2, heads=4, kv_heads=4, head_dim=64, mlp_width=512, vocabulary_size=1024),
    training=TrainingConfig(batch_size=4, sequence_length=256, attention="xla"),
    mesh=MeshConfig(fsdp=4),
)


def test_rates_of_links_replace_those_of_the_gpu() -> None:
    h100, a4090 = CHIPS["h100"], CHIPS["4090"]
    assert LinkRates().apply(h100, 8) == h100
    found = LinkRates(network=100, nvlink=200, pcie=20).apply(h100, 4)
    assert found.network_bytes_per_second == 100e9 / 8 / 4  # its GPUs share the network of a host
    assert (found.peer_link, found.peer_bytes_per_second, found.host_bytes_per_second) == ("nvlink", 200e9, 20e9)
    assert a4090.peer_link == "pcie"
    assert LinkRates(pcie=20).apply(a4090, 8).peer_bytes_per_second == 20e9


def test_a_step_waits_for_a_slow_network() -> None:
    slow, same, fast = (make_plan(CONFIG, "h100", 2, 2, LinkRates(network=each)) for each in (1, 10, 100_000))
    # The rest of the step does not change, and almost nothing of the transfers is hidden.
    without = (each.speed.step_seconds - each.network_seconds for each in (slow, fast))
    assert next(without) == pytest.approx(next(without))
    assert slow.network_seconds == pytest.approx(10 * same.network_seconds, rel=0.2)
    assert fast.network_seconds < 0.01 * slow.network_seconds
    sent = sum(each.bytes for each in slow.collectives if each.link == "network")
    assert slow.network_seconds <= sent / (0.8 * 1e9 / 8)


@pytest.mark.core
def test_the_search_counts_the_network() -> None:
    state = compute_state_sizes(CONFIG)
    assert state is not None
    usual, slow = (
        estimate(CONFIG, Cluster("h100", 2, 2, LinkRates(network=network)), state).time.total for network in (None, 10)
    )
    between = replace(CONFIG, mesh=MeshConfig(data=2, fsdp=2))
    divided = estimate(between, Cluster("h100", 2, 2, LinkRates(network=10)), compute_state_sizes(between) or state)
    assert slow > 5 * usual
    assert divided.time.total < slow  # gathers stay in the host


def test_the_command_takes_rates(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plan, "prepare_jax", lambda: None)
    monkeypatch.setattr(plan.pretrained, "resolve_pretrained", lambda config: CONFIG)
    place = ("--gpu", "h100", "--hosts", "2", "--gpus-per-host", "2")
    monkeypatch.setattr(sys, "argv", ["plan", "--config", "quickstart.py", *place, "--network", "1", "--json"])
    assert plan.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert 0.9 * found["step_seconds"] < found["network_seconds"] < found["step_seconds"]
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-3], "--nvlink", "123", "--pcie", "7"])
    with monkeypatch.context() as patch:
        patch.setattr(plan, "make_plan", lambda *arguments: given.append(arguments[4]) or make_plan(*arguments))
        given: list[LinkRates] = []
        assert plan.main() == 0
    assert given == [LinkRates(nvlink=123, pcie=7)]


@pytest.mark.core
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (("--network", "0"), "--network 0: must be a finite number above 0"),
        (("--nvlink", "inf"), "--nvlink inf: must be a finite number above 0"),
        (("--search", "--network", "1"), "--network has no effect on one host: give --hosts"),
        (("--nvlink", "9", "--gpus-per-host", "1"), "--nvlink has no effect on one GPU: give --gpus-per-host"),
        (("--pcie", "9", "--gpu", "gh200"), "--pcie has no effect: gh200 is linked to its host by NVLink-C2C"),
    ],
)
def test_impossible_rates_are_refused(given: tuple[str, ...], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "prepare_jax", lambda: None)
    monkeypatch.setattr(sys, "argv", ["plan", "--config", "quickstart.py", "--gpu", "h100", *given])
    with pytest.raises(InputError, match=problem):
        plan.main()


LOCAL = replace(CONFIG, mesh=MeshConfig(data=2, fsdp=2), training=replace(CONFIG.training, local_steps=20))


@pytest.mark.parametrize("data_gradients", ["int4", pytest.param("exact", marks=pytest.mark.slow)])
def test_an_outer_step_counts_as_its_share_of_a_step(data_gradients: Literal["int4", "exact"]) -> None:
    """The bytes of an outer step are divided by the local steps, by the compiler and by the search."""
    config = replace(LOCAL, sharding=replace(LOCAL.sharding, data_gradients=data_gradients))
    cluster, state = Cluster("h100", 2, 2, LinkRates(network=10)), compute_state_sizes(config)
    assert state is not None
    plan = make_plan(config, "h100", 2, 2, cluster.links)
    found = estimate(config, cluster, state)
    between = [each for each in plan.collectives if each.link == "network" and each.bytes > 64]
    assert {each.every for each in between} == {20}
    sent = sum(each.bytes for each in between)
    estimated = sum(each.bytes for each in found.work.transfers if each.link == "network")
    assert estimated == pytest.approx(sent, rel=0.03)
    values = state.layers.masters + state.non_layer.masters
    coded = {"int4": 2 * (0.5 + 4 / 128), "exact": 8}[data_gradients]
    assert sent == pytest.approx(values * coded / 2 / 20, rel=0.05)  # norms stay exact
    memory = found.footprint.parameters + found.footprint.optimizer
    assert memory == pytest.approx(plan.memory.parameters + plan.memory.optimizer, abs=256)
    assert plan.network_seconds == pytest.approx(sent / (0.8 * 10e9 / 8 / 2), rel=0.05)


def list_chosen(*allowed: str) -> list[Config]:
    return [*enumerate_settings(CONFIG, MeshConfig(data=2, fsdp=2), allowed)]


@pytest.mark.core
def test_the_search_proposes_what_changes_the_learning_only_if_allowed() -> None:
    """The optimizer over replicas changes nothing that is learnt, and is always tried."""
    usual = list_chosen()
    assert {each.sharding.optimizer_over_data for each in usual} == {False, True}
    assert {
        (each.sharding.int8_gathers, each.sharding.data_gradients, each.training.local_steps) for each in usual
    } == {((), "exact", 1)}
    found = list_chosen("sharding.int8_gathers", "sharding.data_gradients", "training.local_steps")
    assert {each.sharding.data_gradients for each in found} == {"exact", "int8", "int4"}
    assert {each.sharding.int8_gathers for each in found} == {(), ("data",), ("data", "fsdp")}
    local = [each for each in found if each.training.local_steps > 1]
    assert local and not any(each.problems() for each in found)
    assert {each.sharding.zero_stage for each in local} == {3}
    coded = list_chosen("sharding.fsdp_gradients")
    assert {(each.sharding.fsdp_gradients, each.sharding.zero_stage >= 2) for each in coded} == {
        *(("exact", False), ("exact", True), ("int8", True), ("int4", True))
    }
    alone = [*enumerate_settings(CONFIG, MeshConfig(fsdp=4), ("training.local_steps", "sharding.data_gradients"))]
    assert {(each.training.local_steps, each.sharding.data_gradients) for each in alone} == {(1, "exact")}
