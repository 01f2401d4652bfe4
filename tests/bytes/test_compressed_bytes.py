"""Bytes between replicas, on programs for 8 × 8 GPUs: the optimizer divided over them, blocks of codes, local steps.

`data` is between hosts and `fsdp` inside them.
"""

import json
from typing import Any

import pytest
from commands import ROOT
from compiled_steps import Compiled, compiled, layer_parameters, per_layer
from marks import slow

from jaxopt_llm.compiler import hlo, topology
from jaxopt_llm.compiler.chips import LinkRates
from jaxopt_llm.config import (
    Config,
    MeshConfig,
    ModelConfig,
    PrecisionConfig,
    RematConfig,
    ShardingConfig,
    TrainingConfig,
    cli,
)
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.model import param
from jaxopt_llm.parallel.codes import BLOCK_SIZES
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.planning.step_plan import make_plan
from jaxopt_llm.step.program import Program, make_program

HOSTS = MeshConfig(data=8, fsdp=8)
SHARE = 7 / 8  # of an array, sent by each device of a ring of 8
ROWS = (64, 128)
CODED = {"int8": 1 + 4 / BLOCK_SIZES[0], "int4": 0.5 + 4 / BLOCK_SIZES[0]}  # bytes of a value: a scale per block


def between_hosts(step: Compiled) -> float:
    return step.wire_bytes("data")


def measure(sharded: dict[str, Any], stage: int = 3, accumulation: int = 1) -> float:
    """Return the bytes between hosts, per parameter of a layer that a device of a host holds."""
    settings = {"accumulation": accumulation, "sharded": tuple(sharded.items()), "shape": ROWS}
    return per_layer(between_hosts, HOSTS, stage, **settings) / (layer_parameters() / 8)


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.parametrize(
    ("sharded", "expected"),
    [
        ({}, 2 * 4),
        ({"optimizer_over_data": True}, 4 + 2),
        ({"data_gradients": "int8"}, CODED["int8"] + CODED["int8"]),
        ({"optimizer_over_data": True, "int8_gathers": ("data",), "data_gradients": "int4"}, sum(CODED.values())),
    ],
)
def test_bytes_between_hosts(sharded: dict[str, Any], expected: float) -> None:
    """Gradients are summed, and new weights gathered, once a step, whatever the number of microbatches."""
    assert measure(sharded, accumulation=3) == pytest.approx(SHARE * expected, rel=0.02)


def test_a_dense_step_sends_about_a_quarter_between_hosts() -> None:
    """All of a step, its tables and norms included: ZeRO++'s factor of 4, and more with 4 bits."""
    exact, int8, int4 = (
        between_hosts(compiled(8, HOSTS, 3, sharded=sharded, shape=ROWS))
        for sharded in (
            (),
            *(
                (("optimizer_over_data", True), ("int8_gathers", ("data",)), ("data_gradients", bits))
                for bits in ("int8", "int4")
            ),
        )
    )
    assert int8 <= 0.28 * exact
    assert int4 <= 0.21 * exact


def test_the_page_has_the_results_of_five_speeds_and_of_long_runs() -> None:
    page = (ROOT / "docs" / "slow_links.md").read_text()
    results = ROOT / "benchmarks" / "results"
    for found in json.loads((results / "slow-links-networks.json").read_text())["networks"]:
        best = found["ranked"][0]
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {found['network']:.0f} Gb/s |"))
        seconds, share = (cell.strip() for cell in row.split("|")[3:5])
        assert float(seconds) == pytest.approx(best["step_seconds"], rel=0.01)
        assert share == f"{best['network_share']:.1%}"
    curves = json.loads((results / "slow-links-3200-steps.json").read_text())["curves"]
    for of_seeds in curves.values():
        means = [
            sum(losses) / len(losses) for losses in zip(*(each.values() for each in of_seeds.values()), strict=True)
        ]
        assert " | ".join(f"{mean:.4f}" for mean in means) in page


@pytest.mark.slow
@pytest.mark.parametrize("found_by", ["without local steps", "with local steps"])
def test_the_settings_that_a_search_found_wait_for_the_network_as_the_page_says(found_by: str) -> None:
    """The fastest settings for `10b.py` on 4 × 8 H100s with 10 Gb/s, at the recipe's batch, from their own programs."""
    page = (ROOT / "docs" / "slow_links.md").read_text()
    result = json.loads((ROOT / "benchmarks" / "results" / "slow-links-search.json").read_text())
    best = result[found_by]["ranked"][0]
    config = replace_fields(cli.load_recipe("10b.py"), best["settings"])
    assert config.training.batch_size == cli.load_recipe("10b.py").training.batch_size
    assert config.training.local_steps == (20 if found_by == "with local steps" else 1)
    plan = make_plan(config, "h100", hosts=4, gpus_per_host=8, rates=LinkRates(network=10))
    share = plan.network_seconds / plan.speed.step_seconds
    assert share == pytest.approx(best["network_share"], abs=0.02)
    assert (share < 0.5) == (config.training.local_steps > 1)
    assert plan.spare > 0
    assert f"{best['step_seconds']:.2f} s" in page and f"{best['network_share']:.1%}" in page


@pytest.mark.slow
def test_gathers_of_layers_stay_inside_the_host_and_send_codes() -> None:
    """Forward and backward each gather a layer, in int8; only the reduce-scatter of gradients is exact there."""
    sharded = (("optimizer_over_data", True), ("int8_gathers", ("fsdp",)))
    inside = per_layer(lambda step: step.wire_bytes("fsdp"), HOSTS, 3, sharded=sharded, shape=ROWS)
    assert inside == pytest.approx(SHARE * (4 + 2 * CODED["int8"]) * layer_parameters(), rel=0.02)


@pytest.mark.parametrize(
    ("sharded", "mesh"),
    [
        ({"fsdp_gradients": "int8"}, MeshConfig(fsdp=8)),
        *slow(
            ({"fsdp_gradients": "int8", "int8_gathers": ("fsdp",)}, HOSTS),
            ({"fsdp_gradients": "int8"}, MeshConfig(fsdp=2, expert=2, context=2)),
        ),
    ],
)
def test_gradients_are_reduced_over_fsdp_as_codes(sharded: dict[str, Any], mesh: MeshConfig) -> None:
    """Forward and backward each gather a layer. Each value of a device's part of the gradient is sent once, coded."""

    def count_bytes(step: Compiled) -> float:  # keys and values of attention go around over context alone
        return sum(each.wire_bytes * each.times for each in step.collectives if {"fsdp", "expert"} & {*each.axes})

    sent = per_layer(count_bytes, mesh, 3, sharded=tuple(sharded.items()), shape=ROWS)
    gathers = 2 * (CODED["int8"] if "int8_gathers" in sharded else 2)
    assert sent == pytest.approx(SHARE * (gathers + CODED[sharded["fsdp_gradients"]]) * layer_parameters(), rel=0.02)


def test_a_step_over_slow_fsdp_sends_less_than_half() -> None:
    """All of a step, its tables and norms included: 8 bytes per parameter become 3.1."""

    def measure_step(**sharded: Any) -> float:
        model = {"sharded": tuple(sharded.items()), "tied": False, "shape": ROWS}
        return compiled(8, MeshConfig(fsdp=8), 3, **model).wire_bytes("fsdp")

    exact, coded = measure_step(), measure_step(fsdp_gradients="int8", int8_gathers=("fsdp",))
    assert coded <= 0.39 * exact


@pytest.mark.slow
def test_the_optimizer_over_data_rests_on_all_devices() -> None:
    """2 bytes of a compute copy inside each host, and 12 of masters and moments over all of them."""
    sharded = (("optimizer_over_data", True),)
    resting = per_layer(lambda step: step.memory.arguments, HOSTS, 3, sharded=sharded, shape=ROWS)
    assert resting == pytest.approx((2 / 8 + 12 / 64) * layer_parameters(), rel=0.02)


def make_local(format: Any) -> tuple[Program, Placement]:
    """format: of `sharding.data_gradients`, or bfloat16, the `precision.reduce_dtype` of exact changes."""
    narrow = format == "bfloat16"
    config = Config(
        model=ModelConfig(width=1024, layers=2, heads=8, kv_heads=8, head_dim=128, mlp_width=4096),
        training=TrainingConfig(batch_size=64, sequence_length=128, local_steps=20, attention="xla"),
        sharding=ShardingConfig(data_gradients="exact" if narrow else format),
        precision=PrecisionConfig(reduce_dtype="bfloat16" if narrow else "float32"),
        remat=RematConfig("full"),
        mesh=HOSTS,
    )
    placement = Placement(
        make_mesh(HOSTS, topology.gpu_topology("h100", hosts=8)), config.sharding, config.precision, config.offload
    )
    return make_program(config, placement), placement


@pytest.mark.core
@pytest.mark.parametrize(
    ("format", "expected"),
    [("int8", 2 * CODED["int8"]), *slow(("exact", 4 + 4), ("bfloat16", 2 + 2))],
)
def test_groups_exchange_their_changes_in_outer_steps_alone(format: Any, expected: float) -> None:
    """In a local step a few numbers go between the groups, for the records. In an outer step each value of the masters
    goes there and back once, so that the mean over `local_steps` steps is their share of it."""
    program, placement = make_local(format)

    def count_bytes(step: Any, *arguments: Any) -> float:
        executable = topology.compile_without_gpu(topology.lower_without_gpu(step, *arguments))
        sent = hlo.list_collectives(str(executable.as_text()), placement.mesh)
        assert all(each.axes == ("data",) for each in sent if "data" in each.axes)
        return sum(each.wire_bytes * each.times for each in sent if "data" in each.axes)

    assert count_bytes(program.step, program.state, program.batch) < 64
    values = param.count_parameters(program.specs.masters) / HOSTS.fsdp
    assert count_bytes(program.outer_step, program.state) == pytest.approx(SHARE * expected * values, rel=0.02)
