"""Estimated collectives of a step."""

import dataclasses

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
    """Check that weights over `fsdp` are hidden, also where `expert` divides them as well."""
    recipe = "mixtral_8x7b.py" if axis == "expert" else "llama3_8b.py"
    config = fields.replace_fields(cli.load_recipe(recipe), {"training.batch_size": 64, "training.accumulation": 8})
    config = dataclasses.replace(config, mesh=MESHES[axis], pipeline=PipelineConfig())
    state = compute_state_sizes(config)
    assert state is not None
    transfers = estimate_work(config, state, Cluster("h100", 1, 8)).transfers
    over_axis = [each.overlapped for each in transfers if each.axes == (axis,)]
    weights = [each.overlapped for each in transfers if "fsdp" in each.axes and each.kind != "all-to-all"]
    assert over_axis and not any(over_axis)
    assert weights and all(share == 1 for share in weights)
