"""Writing of models that are larger than memory."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import adapters
import folders
import jax
import pytest

from jaxopt_llm import convert, load_pretrained
from jaxopt_llm.checkpoint.native import checkpoints
from jaxopt_llm.checkpoint.run_weights import RunWeights, StoredLayers
from jaxopt_llm.model import param
from jaxopt_llm.model.decoder_specs import param_specs

pytestmark = pytest.mark.core

CONFIG = replace(folders.CONFIG, width=256, mlp_width=2048, layers=16)  # two stacks of eight layers
LAYER_BYTES = 4 * CONFIG.width * CONFIG.mlp_width  # of the largest tensor
MODEL_BYTES = 4 * param.count_parameters(param_specs(CONFIG))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.folder_with_tokenizer(tmp_path_factory.mktemp("base") / "base", CONFIG)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of NumPy, JAX and the cache of a run's slices after each parameter of a layer that is fetched."""
    found: list[int] = []
    fetch = StoredLayers.fetch

    def fetch_and_count(layers: StoredLayers, *arguments: Any) -> Any:
        before = {id(array) for array in jax.live_arrays()}
        array = fetch(layers, *arguments)
        # Rows of a checkpoint are arrays of TensorStore, which tracemalloc does not see.
        cached = sum(each.rows.nbytes for each in layers.run._cache.values()) if layers.run else 0
        new = sum(array.nbytes for array in jax.live_arrays() if id(array) not in before)
        found.append(cached + new + tracemalloc.get_traced_memory()[1])
        return array

    monkeypatch.setattr(StoredLayers, "fetch", fetch_and_count)
    return found


def peak(held: list[int], write: Callable[[], None]) -> int:
    tracemalloc.start()
    try:
        write()
    finally:
        tracemalloc.stop()
    return max(held)


@pytest.mark.parametrize("divided", [True, False], ids=["a chunk for each layer", "one chunk for a stack"])
def test_an_export_holds_a_few_tensors(
    divided: bool, base: Path, held: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint whose stacks are single chunks costs one stack in memory, and is decompressed once to be written."""
    monkeypatch.setattr(checkpoints, "MAX_STACK_CHUNK_BYTES", LAYER_BYTES if divided else 2**40)
    folders.make_run(base, tmp_path / "run")
    reads: list[str] = []
    read_slice = RunWeights._read_slice

    def read_and_count(weights: RunWeights, path: str, *arguments: Any) -> Any:
        count = len(weights._cache)
        rows = read_slice(weights, path, *arguments)
        if len(weights._cache) > count:
            reads.append(path)
        return rows

    monkeypatch.setattr(RunWeights, "_read_slice", read_and_count)
    bound = 6 * LAYER_BYTES if divided else (CONFIG.layers // 2 + 5) * LAYER_BYTES
    most = peak(held, lambda: convert.export_run(tmp_path / "run", tmp_path / "out", None, 10**9, check=False))
    assert most < bound < 0.4 * MODEL_BYTES
    assert len(reads) == len(set(reads))
    assert_same_tensors(tmp_path / "out", base)


def test_a_merge_holds_a_few_tensors(base: Path, held: list[int], tmp_path: Path) -> None:
    adapter = adapters.write_adapters(tmp_path / "adapter", adapters.add_adapters(CONFIG, "query mlp/down"), CONFIG)
    most = peak(held, lambda: convert.merge_folders(base, adapter, tmp_path / "out", None, 10**6))
    assert most < 6 * LAYER_BYTES < 0.15 * MODEL_BYTES
    load_pretrained(base, adapter).save_pretrained(tmp_path / "loaded")
    assert_same_tensors(tmp_path / "out", tmp_path / "loaded")


def assert_same_tensors(one: Path, other: Path) -> None:
    first, second = (convert.safetensors.open_folder(path) for path in (one, other))
    assert first.keys() == second.keys()
    assert all(first[name].array.tobytes() == second[name].array.tobytes() for name in first)
