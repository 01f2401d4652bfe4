"""Tables that are read with more rows than the folder or run has: `model.resize_vocabulary`."""

from dataclasses import replace
from typing import Any

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.checkpoint.run_weights import RunWeights
from jaxopt_llm.config import CheckpointConfig
from jaxopt_llm.core import tree
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel.zero import parameter_sharding
from jaxopt_llm.run.initial_weights import Weights

pytestmark = pytest.mark.core

STORED = folders.CONFIG  # its head is not tied: there are two tables
ROWS = STORED.vocabulary_size
LARGER = replace(STORED, vocabulary_size=ROWS + 200)
TABLES = ("non_layer/embedding/table", "non_layer/head/table")


@pytest.fixture(scope="module", params=["folder", "run", "run with a frozen head"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    path = tmp_path_factory.mktemp("source")
    folder = huggingface.open_model_folder(folders.folder(path / "folder", STORED)).for_model(LARGER)
    if request.param == "folder":
        return folder
    trained, _ = tree.partition(
        jax.device_put(folders.params(STORED), toy.placement().replicated),
        lambda name: request.param == "run" or "head" not in name,
    )
    with Checkpoints(path / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(3, {"masters": trained}, {})
    return RunWeights(path, path / "checkpoints/3", STORED, LARGER, folder)


def grown(dtype: Any) -> Params:
    """Return the parameters with the added rows and, after them, the padding."""

    def grow(path: str, values: np.ndarray, spec: Any) -> np.ndarray:
        if path not in TABLES:
            return values.astype(dtype)
        out = np.zeros(spec.shape, dtype)
        out[:ROWS] = values[:ROWS]
        out[ROWS : LARGER.vocabulary_size] = values[:ROWS].astype(np.float64).mean(axis=0)
        return out

    return tree.map_with_path(grow, folders.params(STORED), param_specs(LARGER))


@pytest.mark.parametrize(
    ("axes", "dtype"),
    [({}, np.float32), ({"zero_stage": 3, "fsdp": 4, "tensor": 2}, np.float32), ({"tensor": 4}, jnp.bfloat16)],
)
def test_added_rows_are_the_mean_on_every_mesh(source: Weights, axes: dict[str, Any], dtype: Any) -> None:
    placement = toy.placement(**axes)
    specs = jax.tree.map(lambda spec: replace(spec, dtype=np.dtype(dtype)), param_specs(LARGER))
    found = tree.map_with_path(lambda path, spec: source.read(path, spec, parameter_sharding(spec, placement)), specs)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), y), found, grown(dtype))
