"""Networks, NVLink and PCIe of other rates than the usual ones: `plan --network`, `--nvlink`, `--pcie`."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from jaxopt_llm import plan
from jaxopt_llm.compiler.chips import CHIPS, LinkRates
from jaxopt_llm.config import Config, MeshConfig, ModelConfig, TrainingConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.planning import step_plan
from jaxopt_llm.planning.breakdown import Part
from jaxopt_llm.planning.free_memory import GIB
from jaxopt_llm.planning.search import report
from jaxopt_llm.planning.search.ranking import Candidate, SearchResult, estimate, search_networks
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
    found = make_plan(CONFIG, "h100", 2, 2, LinkRates(network=10), networks=(1, 10, 100_000))
    slow, same, fast = found.networks
    assert same.step_seconds == pytest.approx(found.speed.step_seconds)
    assert [each.gigabits for each in found.networks] == [1, 10, 100_000]
    # The rest of the step does not change, and almost nothing of the transfers is hidden.
    assert slow.step_seconds - slow.network_seconds == pytest.approx(fast.step_seconds - fast.network_seconds)
    assert slow.network_seconds == pytest.approx(10 * same.network_seconds, rel=0.2)
    assert fast.network_seconds < 0.01 * slow.network_seconds
    sent = sum(each.bytes for each in found.collectives if each.link == "network")
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


def test_the_command_prints_a_line_for_each_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "prepare_jax", lambda: None)
    monkeypatch.setattr(plan.pretrained, "resolve_pretrained", lambda config: CONFIG)
    place = ("--gpu", "h100", "--hosts", "2", "--gpus-per-host", "2")
    monkeypatch.setattr(sys, "argv", ["plan", "--config", "quickstart.py", *place, "--network", "1", "400"])
    assert plan.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].split()[:5] == ["network", "of", "a", "host,", "Gb/s"]
    assert [line.split()[0] for line in lines[-2:]] == ["1", "400"]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--json"])
    assert plan.main() == 0
    assert [each["gigabits"] for each in json.loads(capsys.readouterr().out)["networks"]] == [1, 400]
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-4], "--nvlink", "123", "--pcie", "7"])
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
        (("--network", "10", "-1"), "--network -1: must be a finite number above 0"),
        (("--nvlink", "inf"), "--nvlink inf: must be a finite number above 0"),
        (
            ("--search", "--hosts", "2", "--network", "1", "10", "--write", "new.py"),
            "--write saves the settings for one",
        ),
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
    plan = make_plan(config, "h100", 2, 2, cluster.links, networks=(10,))
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
    assert plan.networks[0].network_seconds == pytest.approx(sent / (0.8 * 10e9 / 8 / 2), rel=0.05)


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


def search_fake(networks: Sequence[float]) -> tuple[list[SearchResult], list[Config]]:
    """Search with a compiler that returns the estimates. Return the results and the configurations it compiled."""
    clusters = [Cluster("h100", 2, 2, LinkRates(network=network)) for network in networks]
    compiled: list[Config] = []

    def compile_all(some: Sequence[Config]) -> Iterator[list[FakePlan]]:
        compiled.extend(some)
        for config in some:
            state = compute_state_sizes(config)
            assert state is not None
            yield [make_fake_plan(estimate(config, cluster, state)) for cluster in clusters]

    return search_networks(CONFIG, clusters, GIB, (), compile_all), compiled


@dataclass(frozen=True)
class FakePlan:
    collectives: Sequence[Any]
    speed: SimpleNamespace
    idle: float = 0.0
    spare: int = 1
    limit: int = 10  # of which 5% stay free
    memory: None = None
    model_flops: float = 1.0


def make_fake_plan(found: Candidate) -> FakePlan:
    parts = (
        Part("matmuls", found.time.total - found.time.links, 0.0, 1, 1, 1),
        Part("collectives", found.time.links, 0.0, 1, 1, 1),
    )
    return FakePlan(found.work.transfers, SimpleNamespace(breakdown=parts))


def test_a_search_for_several_networks_compiles_each_program_once() -> None:
    """The winner on each network is at least as fast as that of a search for this network alone."""
    (slow, fast), compiled = search_fake((1, 3200))
    assert len(compiled) == len(set(compiled)) and compiled[0] == CONFIG
    assert {each.config for each in slow.compiled} == {each.config for each in fast.compiled} == set(compiled)
    alone = {network: search_fake((network,)) for network in (1, 3200)}
    assert len(compiled) < sum(len(some) for _, some in alone.values()), "the recipe is compiled for both"
    for result, network in ((slow, 1), (fast, 3200)):
        ((only,), _) = alone[network]
        assert result.cluster == only.cluster and result.winner and only.winner
        assert result.winner.time.total <= only.winner.time.total
        times = [each.time.total for each in result.compiled]
        assert times == sorted(times)
    assert slow.winner and fast.winner and slow.winner.network_share > fast.winner.network_share
    assert slow.winner.time.total > fast.winner.time.total


def test_the_table_has_a_line_for_each_network() -> None:
    results, compiled = search_fake((1, 3200))
    heading, _, titles, *lines = report.format_networks(results, 12.3).splitlines()
    assert heading.endswith(f", {len(compiled)} compiled for 2 networks, in 12 s")
    for line, flags, result in zip(lines[:2], lines[-2:], results, strict=True):
        winner = result.winner
        assert winner
        gigabits, seconds, tokens, share, *setting = line.split()
        assert gigabits == f"{result.cluster.links.network:,.6g}"
        assert (seconds, share) == (f"{winner.time.total:,.4g}", f"{winner.network_share:.1%}")
        assert tokens == f"{4 * 256 / winner.time.total:,.0f}"
        assert " ".join(setting) == report.describe_setting(winner.config, CONFIG)
        assert flags.strip() == f"{gigabits} Gb/s: {report.format_flags(winner.config, CONFIG) or 'the recipe'}"
    assert titles.split()[-7:] == ["waits", "for", "the", "network", "fastest", "that", "fits"]


def test_plans_for_several_networks_come_from_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    find_peak = step_plan.find_peak
    monkeypatch.setattr(step_plan, "find_peak", lambda lowered: compiled.append(lowered) or find_peak(lowered))
    clusters = [Cluster("h100", 2, 2, LinkRates(network=network)) for network in (10, None)]
    plans = step_plan.make_plans(CONFIG, clusters)
    assert len(compiled) == 1
    for found, cluster in zip(plans, clusters, strict=True):
        alone = make_plan(CONFIG, "h100", 2, 2, cluster.links)
        assert found.collectives == alone.collectives and found.speed == alone.speed
        network = cluster.links.network
        assert [each.gigabits for each in found.networks] == ([] if network is None else [network])
        assert all(each.step_seconds == pytest.approx(found.speed.step_seconds) for each in found.networks)
    assert plans[0].speed.step_seconds > plans[1].speed.step_seconds


def test_the_command_searches_for_several_networks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "prepare_jax", lambda: None)
    monkeypatch.setattr(plan, "MAX_COMPILES", 1)  # starts no processes
    monkeypatch.setattr(plan.ranking, "MAX_COMPILED", 1)
    monkeypatch.setattr(plan.pretrained, "resolve_pretrained", lambda config: CONFIG)
    place = ("--gpu", "h100", "--hosts", "2", "--gpus-per-host", "2")
    monkeypatch.setattr(
        sys, "argv", ["plan", "--config", "quickstart.py", "--search", *place, "--network", "1", "400", "--explain"]
    )
    assert plan.main() == 0
    output = capsys.readouterr().out
    assert ", 1 compiled for 2 networks, in " in output
    assert [line.split()[0] for line in output.splitlines()[3:5]] == ["1", "400"]
    assert output.count("\nmesh\n") == 2 and "\nwith 400 Gb/s:\ndecisions, " in output
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "--json"])
    assert plan.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert found["next_steps"] == [] and [each["network"] for each in found["networks"]] == [1, 400]
    slow, fast = (each["ranked"][0] for each in found["networks"])
    assert slow["step_seconds"] > fast["step_seconds"] and slow["network_share"] > fast["network_share"]
    assert [each["gigabits"] for each in fast["plan"]["networks"]] == [400]
