"""Written folders that are read back and compared with their source, and breaks that this finds."""

import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import adapters
import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxopt_llm import convert
from jaxopt_llm.checkpoint.huggingface import safetensors, text_part
from jaxopt_llm.checkpoint.run_weights import StoredLayers
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.inference import proof
from jaxopt_llm.inference.proof import Proof
from jaxopt_llm.inference.streamed import Layer, StreamedModel

CONFIG = replace(folders.CONFIG, layers=3)
EXPERTS = replace_fields(
    CONFIG, {"biases": "none", "qk_norm": "head", "pattern": ("global",), "moe.experts": 4, "moe.expert_width": 8}
)
BROKEN = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_sources(tmp_path_factory.mktemp("sources"), CONFIG, "attention/query mlp/down head/table")


def write_sources(path: Path, config: Any, targets: str, dtype: Any = np.float32) -> tuple[Path, Path]:
    base = folders.folder(path / "base", config, dtype)
    return base, adapters.write_adapters(path / "adapter", adapters.add_adapters(config, targets), config)


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[Proof]:
    found: list[Proof] = []

    def keep(*arguments: Any) -> Proof:
        found.append(proof.check_folder(*arguments))
        return found[-1]

    monkeypatch.setattr(convert, "check_folder", keep)
    return found


def test_a_sound_folder_has_the_loss_of_its_source(
    sources: tuple[Path, Path], tmp_path: Path, proofs: list[Proof], capsys: pytest.CaptureFixture[str]
) -> None:
    for dtype, within in ((None, 1e-6), ("bfloat16", 1e-2)):
        convert.merge_folders(*sources, tmp_path / str(dtype), dtype, 10**9)
        assert proofs[-1].written == pytest.approx(proofs[-1].source, rel=within)
        assert f"the loss of 2 rows of random tokens is {proofs[-1].written:.5f}" in capsys.readouterr().out
    assert proofs[1].written != proofs[1].source
    assert proofs[0].source == proofs[1].source


def test_a_folder_of_experts_is_compared(tmp_path: Path, proofs: list[Proof]) -> None:
    base, adapter = write_sources(tmp_path, EXPERTS, "attention/query attention/output", jnp.bfloat16)
    convert.merge_folders(base, adapter, tmp_path / "merged", None, 10**9)
    assert proofs[0].written == pytest.approx(proofs[0].source, rel=1e-2)


@pytest.mark.parametrize("targets", ["attention/query", "mlp/gate mlp/down"])
def test_a_layer_of_experts_is_held_once(targets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the dtype of the folder, also while it is multiplied; in float32 it is twice as large."""
    config = replace_fields(EXPERTS, {"layers": 2, "width": 128, "moe.experts": 24, "moe.expert_width": 1024})
    layer = 2 * 3 * 24 * 128 * 1024  # bytes of the experts in bfloat16
    base, adapter = write_sources(tmp_path, config, targets, jnp.bfloat16)
    held, temporary = list[int](), list[int]()
    compare, run = proof._Comparison._compare_values, StreamedModel.run

    def count() -> None:
        held.append(sum(each.nbytes for each in jax.live_arrays()) + tracemalloc.get_traced_memory()[1])

    def compare_and_count(*arguments: Any) -> None:
        compare(*arguments)
        count()

    def run_and_count(stream: StreamedModel, layer: Layer, weights: Any, x: Any) -> Any:
        count()
        runner = stream._runners(layer.segment, layer.block, layer.kind, layer.keys)
        compiled: Any = runner.lower(weights, np.int32(0), x).compile()  # type: ignore[attr-defined]
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
        return run(stream, layer, weights, x)

    monkeypatch.setattr(proof._Comparison, "_compare_values", compare_and_count)
    monkeypatch.setattr(StreamedModel, "run", run_and_count)
    before = sum(each.nbytes for each in jax.live_arrays())
    check_folder = proof.check_folder

    def check_traced(*arguments: Any) -> Proof:
        tracemalloc.start()
        try:
            return check_folder(*arguments)
        finally:
            tracemalloc.stop()

    monkeypatch.setattr(convert, "check_folder", check_traced)
    convert.merge_folders(base, adapter, tmp_path / "merged", None, 10**9)
    assert max(held) - before < 1.8 * layer
    assert max(temporary) < 0.4 * layer


def test_layers_read_what_earlier_ones_give(tmp_path: Path, proofs: list[Proof]) -> None:
    base, adapter = write_sources(tmp_path, folders.SHARED_KEYS, "attention/query attention/key input_mlp/gate")
    convert.merge_folders(base, adapter, tmp_path / "merged", None, 10**9)
    assert proofs[0].written == pytest.approx(proofs[0].source, rel=1e-6)


def break_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge one layer's adapter with another scale."""
    merge = StoredLayers.merge

    def merge_wrongly(self: StoredLayers, path: str, leaf: Any, layer: int | None) -> np.ndarray:
        wrong = path.endswith("attention/query") and layer == 0 and "segment_1" in path
        return merge(self, path, replace(leaf, scale=1.001 * leaf.scale) if wrong else leaf, layer)

    monkeypatch.setattr(StoredLayers, "merge", merge_wrongly)


def break_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change one bit of one tensor in the file."""
    write = safetensors.write_folder

    def write_wrongly(folder: Path, *arguments: Any) -> None:
        write(folder, *arguments)
        stored = safetensors.open_folder(folder)[BROKEN]
        content = bytearray(stored.file.read_bytes())
        content[stored.array.__array_interface__["data"][0] - stored.source.bytes.__array_interface__["data"][0]] ^= 1
        stored.file.write_bytes(content)

    monkeypatch.setattr(safetensors, "write_folder", write_wrongly)


def break_config(monkeypatch: pytest.MonkeyPatch) -> None:
    write = text_part.write_text
    monkeypatch.setattr(text_part, "write_text", lambda *given: write(*given) | {"rope_theta": 77.0})


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (
            break_scale,
            "layer 2: segment_1/block_0/attention/query, with its adapters merged, differs from base plus adapter by ",
        ),
        (break_tensor, rf"layer 1: tensor '{BROKEN}' reads back with other values than the source's, rounded to float"),
        (break_config, r"its config.json reads back without model.rope.theta=100.0"),
    ],
    ids=["scale", "tensor", "config"],
)
def test_a_folder_that_differs_is_removed(
    break_it: Callable[[pytest.MonkeyPatch], None],
    said: str,
    sources: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_it(monkeypatch)
    base, adapter = sources
    with pytest.raises(InputError, match=said) as error:
        convert.merge_folders(base, adapter, tmp_path / "merged", "float32", 10**9)
    assert str(error.value).startswith(f"{tmp_path / 'merged'}: ") and str(error.value).endswith("--no-check")
    assert not any(tmp_path.iterdir())

    arguments = ("merge", "--base", base, "--adapter", adapter, "--to", tmp_path / "merged", "--no-check")
    monkeypatch.setattr(sys, "argv", ["convert", *map(str, arguments)])
    assert convert.main() == 0
    assert (tmp_path / "merged" / "config.json").is_file()
