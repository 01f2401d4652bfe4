"""Parameters of a run, read into other meshes and stacks than it had."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.checkpoint.run_weights import RunWeights, is_run_directory
from jaxopt_llm.config import CheckpointConfig
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import CheckpointError, InputError
from jaxopt_llm.execution.stage_layout import stack_by_stage
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel.zero import checkpoint_sharding, parameter_sharding

pytestmark = pytest.mark.core

SPECS = param_specs(toy.CONFIG)  # five layers: two of each kind, and one
PARAMS = toy.params(SPECS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run written by four devices, whose last block was not trained and is stored in 16 bits."""
    directory = tmp_path_factory.mktemp("run")
    placement = toy.placement(zero_stage=3, fsdp=2, tensor=2)
    arrays = jax.tree.map(lambda spec, x: jax.device_put(x, checkpoint_sharding(spec, placement)), SPECS, PARAMS)
    frozen, masters = tree.partition(arrays, lambda path: path.startswith("segment_1/"))
    frozen = jax.tree.map(lambda x: x.astype(jnp.bfloat16), frozen)
    with Checkpoints(directory / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(3, {"masters": masters, "frozen": frozen, "moments": masters}, {})
    return directory


def open_weights(run: Path, last_layers: int = 0) -> RunWeights:
    return RunWeights(run, run / "checkpoints/3", toy.CONFIG, replace(toy.CONFIG, last_layers=last_layers))


def rounded_params() -> Params:
    """Return the parameters as the run stores them."""
    return tree.map_with_path(
        lambda path, x: x.astype(jnp.bfloat16).astype(np.float32) if path.startswith("segment_1/") else x, PARAMS
    )


def assert_equal(found: Params, expected: Params) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), y), found, expected)


@pytest.mark.parametrize("axes", [{"zero_stage": 3, "fsdp": 4, "tensor": 2}, {"pipeline": 2, "fsdp": 2}])
def test_a_run_is_read_into_any_mesh(axes: dict[str, Any], run: Path) -> None:
    placement, specs, expected = toy.placement(**axes), SPECS, rounded_params()
    if placement.size("pipeline") > 1:
        specs = stack_by_stage(Decoder(toy.CONFIG), 2).specs
        expected = toy.on_stages(specs, expected)
    source = open_weights(run)
    found = tree.map_with_path(lambda path, spec: source.read(path, spec, parameter_sharding(spec, placement)), specs)
    assert_equal(found, expected)
    jax.tree.map(lambda x, spec: np.testing.assert_equal(x.sharding, parameter_sharding(spec, placement)), found, specs)


def test_layers_come_from_other_stacks_than_they_go_to(run: Path) -> None:
    """With the last two layers in a separate segment, layers 3 to 5 of the run end up in other stacks."""
    source, placement = open_weights(run, last_layers=2), toy.placement()
    specs = param_specs(source.config)
    found = tree.map_with_path(lambda path, spec: source.read(path, spec, parameter_sharding(spec, placement)), specs)
    run_params = rounded_params()
    first, second, last = (
        run_params["segment_0"]["block_0"],
        run_params["segment_0"]["block_1"],
        run_params["segment_1"],
    )
    assert_equal(found["non_layer"], run_params["non_layer"])
    assert_equal(found["segment_0"]["block_0"], jax.tree.map(lambda x: x[:1], first))
    assert_equal(found["segment_1"]["block_0"], jax.tree.map(lambda x: x[1:], first))
    assert_equal(found["segment_2"]["block_0"], jax.tree.map(lambda x: x[1:], second))
    assert_equal(found["segment_2"]["block_1"], last["block_0"])


def test_one_layer_and_the_stored_dtypes(run: Path) -> None:
    source, placement = open_weights(run), toy.placement()
    assert source.dtype("non_layer/embedding/table") == source.dtype("segment_0/block_1/mlp/down") == np.float32
    assert source.dtype("segment_1/block_0/mlp/down") == jnp.bfloat16
    spec = SPECS["segment_0"]["block_1"]["mlp"]["down"]
    one = spec.unstack().stack(np.array([1]))
    (row,) = source.read("segment_0/block_1/mlp/down", one, parameter_sharding(one, placement))
    np.testing.assert_array_equal(row, PARAMS["segment_0"]["block_1"]["mlp"]["down"][1])


def test_parameters_missing_from_a_checkpoint_are_read_from_its_base(tmp_path: Path) -> None:
    """The last three layers were trained; the stacks to read mix them with layers of the base."""
    config = replace(folders.CONFIG, pattern=("global",), layers=5)
    folder = huggingface.open_model_folder(folders.folder(tmp_path / "folder", config))
    run_config, placement = replace(config, last_layers=3), toy.placement()
    trained = jax.tree.map(lambda spec: jax.device_put(np.full(spec.shape, 2.0, np.float32)), param_specs(run_config))
    masters, _ = tree.partition(trained, lambda path: path.startswith("segment_1/"))
    with Checkpoints(tmp_path / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(3, {"masters": masters}, {})
    source = RunWeights(tmp_path, tmp_path / "checkpoints/3", run_config, config, folder)
    path, expected = "segment_0/block_0/mlp/down", folders.params(config)["segment_0"]["block_0"]["mlp"]["down"]
    spec = param_specs(config)["segment_0"]["block_0"]["mlp"]["down"]
    expected[2:] = 2
    np.testing.assert_array_equal(source.read(path, spec, parameter_sharding(spec, placement)), expected)
    assert source.dtype(path) == np.float32
    with pytest.raises(CheckpointError, match="lacks parameters"):
        replace(source, base=None).dtype("non_layer/embedding/table")


def test_values_that_overflow_the_dtype_are_refused(tmp_path: Path) -> None:
    large = jax.tree.map(lambda x: jax.device_put(1e6 * x, toy.placement().replicated), PARAMS)
    with Checkpoints(tmp_path / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(3, {"masters": large}, {})
    spec = replace(SPECS["non_layer"]["final_norm"]["scale"], dtype=np.dtype(np.float16))
    with pytest.raises(InputError, match="non_layer/final_norm/scale has values that are not finite in float16"):
        open_weights(tmp_path).read("non_layer/final_norm/scale", spec, parameter_sharding(spec, toy.placement()))


@pytest.mark.parametrize("name", ["run", "a run, 50% #2?"])
def test_a_relative_path_and_any_name(name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(run, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    path, sharding = "non_layer/embedding/table", toy.placement().replicated
    expected = open_weights(run).read(path, SPECS["non_layer"]["embedding"]["table"], sharding)
    found = open_weights(Path(name)).read(path, SPECS["non_layer"]["embedding"]["table"], sharding)
    assert_equal(found, expected)


def test_is_run_directory(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert is_run_directory(run)
    assert not is_run_directory(tmp_path) and not is_run_directory(tmp_path / "nowhere")


def test_a_parameter_of_another_shape_is_not_filled_with_zeros(run: Path) -> None:
    path, placement = "non_layer/final_norm/scale", toy.placement()
    spec = replace(SPECS["non_layer"]["final_norm"]["scale"], shape=(toy.CONFIG.width + 4,))
    with pytest.raises(CheckpointError, match=rf"belongs to another model: {path} has shape \(16,\), not \(20,\)"):
        open_weights(run).read(path, spec, parameter_sharding(spec, placement))
