"""The parameters of a run, read into other places than it had them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm import tree
from jaxopt_llm.checkpoint.native import Checkpoints
from jaxopt_llm.checkpoint.policy import CheckpointConfig
from jaxopt_llm.checkpoint.weights import RunWeights, is_run
from jaxopt_llm.errors import InputError
from jaxopt_llm.execution.stages import rest_on_stages
from jaxopt_llm.model.decoder import Params, make_parts, param_specs

pytestmark = pytest.mark.core

SPECS = param_specs(toy.CONFIG)  # five layers: two of each kind, and one
PARAMS = toy.params(SPECS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by four devices; the last block was not trained, and rests in 16 bits."""
    directory = tmp_path_factory.mktemp("run")
    placement = toy.placement(zero_stage=3, fsdp=2, tensor=2)
    arrays = jax.tree.map(lambda spec, x: jax.device_put(x, placement.saved(spec)), SPECS, PARAMS)
    frozen, masters = tree.partition(arrays, lambda path: path.startswith("segment_1/"))
    frozen = jax.tree.map(lambda x: x.astype(jnp.bfloat16), frozen)
    with Checkpoints(directory / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(3, {"masters": masters, "frozen": frozen, "moments": masters}, {})
    return directory


def weights(run: Path, last_layers: int = 0) -> RunWeights:
    return RunWeights(run, run / "checkpoints/3", toy.CONFIG, replace(toy.CONFIG, last_layers=last_layers))


def rounded() -> Params:
    """As the run has them."""
    return tree.map_with_path(
        lambda path, x: x.astype(jnp.bfloat16).astype(np.float32) if path.startswith("segment_1/") else x, PARAMS
    )


def assert_equal(found: Params, expected: Params) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), y), found, expected)


@pytest.mark.parametrize("axes", [{"zero_stage": 3, "fsdp": 4, "tensor": 2}, {"pipeline": 2, "fsdp": 2}])
def test_a_run_is_read_into_any_mesh(axes: dict[str, Any], run: Path) -> None:
    placement, specs, expected = toy.placement(**axes), SPECS, rounded()
    if placement.size("pipeline") > 1:
        specs = rest_on_stages(make_parts(toy.CONFIG), 2).specs
        expected = toy.on_stages(specs, expected)
    source = weights(run)
    found = tree.map_with_path(lambda path, spec: source.read(path, spec, placement.parameters(spec)), specs)
    assert_equal(found, expected)
    jax.tree.map(lambda x, spec: np.testing.assert_equal(x.sharding, placement.parameters(spec)), found, specs)


def test_layers_come_from_other_stacks_than_they_go_to(run: Path) -> None:
    """With the last two layers apart the run's third and fifth are the ends of stacks, its fourth of two."""
    source, placement = weights(run, last_layers=2), toy.placement()
    specs = param_specs(source.config)
    found = tree.map_with_path(lambda path, spec: source.read(path, spec, placement.parameters(spec)), specs)
    theirs = rounded()
    first, second, last = (theirs["segment_0"]["block_0"], theirs["segment_0"]["block_1"], theirs["segment_1"])
    assert_equal(found["outer"], theirs["outer"])
    assert_equal(found["segment_0"]["block_0"], jax.tree.map(lambda x: x[:1], first))
    assert_equal(found["segment_1"]["block_0"], jax.tree.map(lambda x: x[1:], first))
    assert_equal(found["segment_2"]["block_0"], jax.tree.map(lambda x: x[1:], second))
    assert_equal(found["segment_2"]["block_1"], last["block_0"])


def test_a_layer_at_a_time_and_in_its_dtype(run: Path) -> None:
    source, placement = weights(run), toy.placement()
    assert source.dtype("outer/embedding/table") == source.dtype("segment_0/block_1/mlp/down") == np.float32
    assert source.dtype("segment_1/block_0/mlp/down") == jnp.bfloat16
    spec = SPECS["segment_0"]["block_1"]["mlp"]["down"]
    one = spec.layer().stack(np.array([1]))
    (row,) = source.read("segment_0/block_1/mlp/down", one, placement.parameters(one))
    np.testing.assert_array_equal(row, PARAMS["segment_0"]["block_1"]["mlp"]["down"][1])


def test_values_that_its_dtype_does_not_have_are_refused(tmp_path: Path) -> None:
    large = jax.tree.map(lambda x: jax.device_put(1e6 * x, toy.placement().replicated), PARAMS)
    with Checkpoints(tmp_path / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(3, {"masters": large}, {})
    spec = replace(SPECS["outer"]["final_norm"]["scale"], dtype=np.dtype(np.float16))
    with pytest.raises(InputError, match="outer/final_norm/scale has values that are not finite in float16"):
        weights(tmp_path).read("outer/final_norm/scale", spec, toy.placement().parameters(spec))


def test_which_folder_is_a_run(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert is_run(run) and not is_run(tmp_path) and not is_run(tmp_path / "nowhere")
