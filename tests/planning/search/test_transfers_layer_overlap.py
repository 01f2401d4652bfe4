"""Kernels next to which the transfers of a layer run, by arithmetic and by the compiler."""

import dataclasses
from typing import Any

import jax
import pytest

from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.config import Config, RematConfig, cli, fields
from jaxopt_llm.planning.search.block_cost import BlockCost
from jaxopt_llm.planning.search.passes import Passes
from jaxopt_llm.planning.search.ranking import Candidate, estimate
from jaxopt_llm.planning.search.roofline import Cluster, Transfer, seconds_on_link
from jaxopt_llm.planning.search.state_sizes import compute_state_sizes
from jaxopt_llm.planning.search.transfers import LayerOverlap, find_layer_overlap
from jaxopt_llm.planning.step_plan import make_plan

RECIPE = cli.load_recipe("llama3_8b.py")
CHIP = CHIPS["h100"]


def overlap_of(config: Config) -> LayerOverlap:
    return find_layer_overlap(config, CHIP, BlockCost.from_config(config), Passes.from_config(config))


def test_each_pass_waits_for_its_first_weights_and_its_last_gradient() -> None:
    query, mlp, key = 4096 * 4096, 4096 * 14_336, 4096 * 1024
    whole = 2 * query + 2 * key + 3 * mlp
    kept = overlap_of(dataclasses.replace(RECIPE, remat=RematConfig("none")))
    assert kept.gathered_alone == pytest.approx((query + mlp) / (2 * whole))  # forward: queries; backward: MLP's output
    again = overlap_of(dataclasses.replace(RECIPE, remat=RematConfig("full")))
    assert again.gathered_alone == pytest.approx(query / whole)
    assert kept.reduced_alone == again.reduced_alone == pytest.approx(query / whole)


def test_reductions_run_next_to_the_last_gradients_of_weights() -> None:
    products = 2 * 8192 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 14_336)  # two rows on each GPU, of attention, MLP
    seconds = 32 * 2 * 2 * products / (0.75 * CHIP.peak_flops["bfloat16"])
    for accumulation in (1, 2):
        changes = {"training.batch_size": 16 * accumulation, "training.accumulation": accumulation}
        found = overlap_of(fields.replace_fields(RECIPE, changes))
        assert found.reducing == pytest.approx(seconds * accumulation / 2)


def test_no_gather_of_a_layer_with_experts_is_hidden() -> None:
    assert overlap_of(cli.load_recipe("mixtral_8x7b.py")).gathered_alone == 1


def estimate_on_hosts(changes: dict[str, Any], hosts: int) -> Candidate:
    config = fields.replace_fields(RECIPE, {"training.attention": "cudnn", "remat.policy": "none"} | changes)
    state = compute_state_sizes(config)
    assert state is not None
    return estimate(config, Cluster("h100", hosts, 8), state)


def exposed_seconds(transfers: tuple[Transfer, ...], axis: str) -> float:
    return sum(seconds_on_link(each) * (1 - each.overlapped) for each in transfers if axis in each.axes)


def test_more_microbatches_expose_more_between_hosts() -> None:
    """Check that a layer's reductions count as hidden only while the last matmuls of its backward run."""
    shares = {}
    for accumulation in (1, 2, 4, 8):
        changes = {"mesh.fsdp": 64, "training.batch_size": 512, "training.accumulation": accumulation}
        work = estimate_on_hosts(changes, 8).work
        reductions = [each for each in work.transfers if each.kind == "reduce-scatter"]
        shares[accumulation] = 1 - reductions[0].overlapped
    assert shares[1] == shares[2] == shares[4] < shares[8]  # with one row, reductions take longer than the matmuls


PROGRAMS: dict[str, tuple[int, dict[str, Any]]] = {
    "one host": (1, {"mesh.fsdp": 8, "training.batch_size": 32}),
    "eight hosts": (8, {"mesh.fsdp": 64, "training.batch_size": 256}),
    "all of a layer again": (8, {"mesh.fsdp": 64, "training.batch_size": 256, "remat.policy": "full"}),
    "replicas": (8, {"mesh.data": 8, "training.batch_size": 256}),
}


needs_newer_xla = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="XLA of jax 0.10 exposes more: docs/sharding.md"
)
FEW_LAYERS = {"model.layers": 8, "model.vocabulary_size": 32_000, "training.accumulation": 4}  # of one row each


@pytest.mark.core
@pytest.mark.slow
@needs_newer_xla
@pytest.mark.parametrize("program", PROGRAMS)
def test_exposed_transfers_match_the_compiler(program: str) -> None:
    """Check loops over eight layers, in which 2 to 5% of the step are exposed."""
    hosts, changes = PROGRAMS[program]
    found = estimate_on_hosts(FEW_LAYERS | {"training.unroll": "none"} | changes, hosts)
    plan = make_plan(found.config, "h100", hosts, 8)
    estimated, compiled = (exposed_seconds(each, "fsdp") for each in (found.work.transfers, plan.collectives))
    assert estimated == pytest.approx(compiled, abs=0.01 * plan.speed.step_seconds)


@pytest.mark.core
@pytest.mark.slow
@needs_newer_xla
@pytest.mark.parametrize("program", ["one host", "eight hosts"])
def test_unrolled_layers_reduce_their_gradients_next_to_other_layers(program: str) -> None:
    """If all weights got their gradients at the end of a backward, 4.9% and 7% of the step would be exposed."""
    hosts, changes = PROGRAMS[program]
    config = estimate_on_hosts(FEW_LAYERS | {"training.unroll": "all"} | changes, hosts).config
    plan = make_plan(config, "h100", hosts, 8)
    assert exposed_seconds(plan.collectives, "fsdp") < 0.04 * plan.speed.step_seconds
