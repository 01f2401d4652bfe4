"""Weights as codes, against the packages that write them. Those are not in the environment of the tests."""

from pathlib import Path
from typing import Any

import codes
import numpy as np
import pytest

from jaxopt_llm.checkpoint.huggingface import safetensors
from jaxopt_llm.checkpoint.huggingface.quantised import methods

torch = pytest.importorskip("torch")
save = pytest.importorskip("safetensors.torch")

COMPRESSED = [
    name
    for name, kind in codes.KINDS.items()
    if kind.quantise is codes.compressed and name != "int4 in act-order"  # which present versions do not read
]


def read(folder: Path, options: dict[str, Any]) -> np.ndarray:
    return methods.join_codes(safetensors.open_folder(folder), {"quantization_config": options})["a.weight"].read()


@pytest.mark.parametrize("name", COMPRESSED)
def test_values_are_those_of_compressed_tensors(name: str, tmp_path: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    kind = codes.KINDS[name]
    tensors, _ = kind.quantise(np.random.default_rng(0).normal(size=(96, 160)), kind.options)
    codes.write_tensors(tmp_path, {f"a{end}": array for end, array in tensors.items()})
    stored = {key.removeprefix("a."): value for key, value in save.load_file(tmp_path / "model.safetensors").items()}
    scheme = quantization.QuantizationConfig.model_validate(kind.options).config_groups["group_0"]
    compressor = compressors.BaseCompressor.get_value_from_registry(kind.options["format"])
    expected = compressor.decompress(stored, scheme)["weight"]
    np.testing.assert_array_equal(read(tmp_path, kind.options), expected.float().numpy())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("size", [64, 128])
def test_values_of_4_bits_are_those_of_bitsandbytes(
    dtype: str, kind: str, nested: bool, size: int, tmp_path: Path
) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    packed, state = functional.quantize_4bit(weight, blocksize=size, compress_statistics=nested, quant_type=kind)
    tensors = {f"a.weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    save.save_file({"a.weight": packed, **tensors}, tmp_path / "model.safetensors")
    found = read(tmp_path, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    np.testing.assert_array_equal(found, functional.dequantize_4bit(packed, state).float().numpy())


def test_values_of_8_bits_are_those_of_bitsandbytes(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, scales, _ = functional.int8_vectorwise_quant(torch.randn(96, 160).half())
    save.save_file({"a.weight": packed, "a.SCB": scales}, tmp_path / "model.safetensors")
    found = read(tmp_path, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    np.testing.assert_array_equal(found, functional.int8_vectorwise_dequant(packed, scales).numpy())
