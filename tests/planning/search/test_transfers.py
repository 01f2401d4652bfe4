"""Estimated collectives of a step."""

import dataclasses
from typing import Literal

import pytest

from jaxopt_llm.config import MeshConfig, PipelineConfig, cli, fields
from jaxopt_llm.planning.search.roofline import Cluster
from jaxopt_llm.planning.search.state_sizes import compute_state_sizes
from jaxopt_llm.planning.search.workload import estimate_work

MESHES = {
    "tensor": MeshConfig(fsdp=4, tensor=2),
    "pipeline": MeshConfig(fsdp=4, pipeline=2),
    "expert": MeshConfig(fsdp=4, expert=2),
}


@pytest.mark.parametrize("axis", MESHES)
def test_transfers_that_the_next_matmul_reads_are_exposed(axis: str) -> None:
    """Check that a part of the reductions over `fsdp` is hidden, also where `expert` divides the weights as well."""
    recipe = "mixtral_8x7b.py" if axis == "expert" else "llama3_8b.py"
    config = fields.replace_fields(cli.load_recipe(recipe), {"training.batch_size": 64, "training.accumulation": 8})
    config = dataclasses.replace(config, mesh=MESHES[axis], pipeline=PipelineConfig())
    state = compute_state_sizes(config)
    assert state is not None
    transfers = estimate_work(config, state, Cluster("h100", 1, 8)).transfers
    over_axis = [each.overlapped for each in transfers if each.axes == (axis,)]
    reductions = [each.overlapped for each in transfers if "fsdp" in each.axes and each.kind == "reduce-scatter"]
    assert over_axis and not any(over_axis)
    assert reductions and all(0 < share < 1 for share in reductions)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_what_is_outside_the_loop_over_layers_is_exposed(zero_stage: Literal[0, 1, 2, 3]) -> None:
    """Check what is reduced and gathered once a step, and the gradients of embedding and head in each microbatch."""
    layer = {"model.layers": 1, "model.mlp_width": 64, "training.batch_size": 64, "training.accumulation": 4}
    config = fields.replace_fields(cli.load_recipe("llama3_8b.py"), layer | {"sharding.zero_stage": zero_stage})
    state = compute_state_sizes(config)
    assert state is not None
    transfers = estimate_work(config, state, Cluster("h100", 1, 8)).transfers
    for each in transfers:
        # Nearly all of the parameters of such a model are embedding and head.
        in_layers = zero_stage == 3 and each.kind == "all-gather"
        assert each.overlapped == pytest.approx(1.0 if in_layers else 0.0, abs=0.1)
