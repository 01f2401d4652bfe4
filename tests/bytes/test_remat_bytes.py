"""What rematerialisation keeps, and where, read off programs compiled for H200s."""

import dataclasses
import re
from collections import defaultdict

import jax
import programs
import pytest
import remat
from compiled_steps import FSDP, ROWS, SEQUENCE, VOCABULARY, WIDTH, Compiled, assert_read_from_the_last, compiled

from jaxopt_llm.config import MeshConfig, RematConfig, cli
from jaxopt_llm.model import param
from jaxopt_llm.planning.step_plan import make_plan

LAYERS, MLP = 8, 4 * WIDTH
HOST = "5"  # XLA's number of the memory space


def spaces(step: Compiled) -> dict[str, set[str]]:
    """By shape, as in bf16[8,128], the memories of the arrays that a program writes row by row; "" is the device's."""
    found = defaultdict(set)
    for shape, layout in re.findall(r" = (\w+\[[\d,]+\])\{([^}]*)\} dynamic-update-slice\(", step.text):
        space = re.search(r"S\((\d)\)", layout)
        found[shape].add(space[1] if space else "")
    return found


def test_offloaded_intermediates_wait_in_host_memory_alone() -> None:
    step = compiled(LAYERS, FSDP, 3, "save_attention", remat_offload=("block_input", "mlp_up"))
    rows = ROWS // FSDP.fsdp
    assert step.memory.host == LAYERS * rows * SEQUENCE * (WIDTH + MLP) * 2
    for size in (WIDTH, MLP):
        assert spaces(step)[f"bf16[{LAYERS},{rows},{SEQUENCE},{size}]"] == {HOST}
    assert_read_from_the_last(step.text)

    # A layer is gathered for each pass, as without, and a table for each of its uses; no layer is kept gathered.
    specs = step.program.specs.masters["segment_0"]
    gathered = sum(each.array_bytes * each.times for each in step.collectives if each.kind == "all-gather")
    assert gathered == pytest.approx(2 * 2 * (param.count_parameters(specs) + VOCABULARY * WIDTH), rel=0.01)
    whole = {spec.shape for spec in jax.tree.leaves(specs) if len(spec.shape) > 2}
    assert not whole & {each.shape for each in programs.list_array_shapes(step.text)}


@pytest.mark.slow
def test_a_stage_of_a_pipeline_offloads() -> None:
    step = compiled(LAYERS, MeshConfig(pipeline=2, fsdp=4), 3, accumulation=4, remat_offload=("block_input",))
    assert spaces(step)[f"bf16[{LAYERS // 2},2,{SEQUENCE},{WIDTH}]"] == {HOST}


@pytest.mark.slow
def test_a_plan_counts_what_is_offloaded_on_the_host_alone() -> None:
    recipe = cli.load_recipe("llama2_7b.py")
    kept, moved = (
        make_plan(dataclasses.replace(recipe, remat=RematConfig("full", offload=names)), "h200", 1, 8)
        for names in ((), ("block_input",))
    )
    rows = 4 * 4096  # on a GPU
    activation = 2 * rows * recipe.model.width
    inputs = recipe.model.layers * activation
    assert (kept.host_bytes, moved.host_bytes) == (0, inputs)
    assert moved.pcie_bytes == 2 * inputs
    of_all_layers = [
        {held.name: held.bytes for held in each.largest if held.name.endswith(" of all layers")}
        for each in (kept, moved)
    ]
    assert of_all_layers == [{"block_input of all layers": inputs}, {}]
    # While the backward of a layer runs, the layer's input is on the GPU.
    assert kept.memory.activations - moved.memory.activations == pytest.approx(inputs - activation, rel=1e-3)
    assert moved.memory.other >= 0


@pytest.mark.slow
def test_savings_on_llama2_7b_with_4096_tokens() -> None:
    recipe = cli.load_recipe("llama2_7b.py")
    recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, batch_size=8))
    none, full, offloaded = (
        remat.measure(recipe, each)
        for each in (RematConfig("none"), RematConfig("full"), RematConfig("none", offload=remat.HALF))
    )
    activation = 4096 * 4096 * 2
    assert none.activations == pytest.approx((1 + 3 + 1 + 1 + 2 * 11_008 / 4096 + 1 / 64) * activation, rel=1e-3)
    assert full.activations == pytest.approx(activation, rel=1e-3)
    assert full.flops < 1.28 * none.flops
    assert offloaded.activations == pytest.approx(none.activations - offloaded.host, rel=1e-3)
    assert offloaded.host == (1 + 2 * 11_008 / 4096) * activation > 0.5 * none.activations
    assert offloaded.flops == none.flops
    assert {round(each.gathered, 1) for each in (none, full, offloaded)} == {2}


@pytest.mark.slow
def test_a_single_layer_keeps_no_more_than_its_input() -> None:
    """XLA replaces a loop over one layer by its body, and must not merge the two forwards."""
    switches = (("moe.experts", 4), ("moe.expert_width", 2048))
    dense_first, alike = (
        compiled(LAYERS, FSDP, 3, "full", switches=(*switches, ("moe.dense_layers", dense)), shape=(16, 512))
        for dense in (1, 0)
    )
    assert dense_first.memory.temporaries <= 1.02 * alike.memory.temporaries
