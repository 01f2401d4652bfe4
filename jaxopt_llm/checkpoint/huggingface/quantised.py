"""Quantised weights of Hugging Face folders: FP8 codes with scales, multiplied where they are read.

A weight has codes in E4M3 and a tensor `weight_scale_inv` with the factor of each block (DeepSeek-V3, Qwen3,
MiniMax-M2), or one factor (Ministral 3). Products are float32, and are rounded to the dtype of the parameter that they
fill.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxopt_llm.checkpoint.huggingface.codecs import CORRECT, Settings, Unsupported, unsupported
from jaxopt_llm.checkpoint.huggingface.safetensors import CODE_DTYPES, StoredTensor
from jaxopt_llm.core.errors import InputError

FIELD, SCALE = "quantization_config", "_scale_inv"  # of config.json; end of the name of a weight's scales
OF_ACTIVATIONS = ("activation_scale", "input_scale")  # not read: activations are computed in 16 or 32 bits
AGAIN = "download the folder again"


def check_method(settings: Settings) -> None:
    """Raise Unsupported if a config.json has weights as codes that are not read."""
    given = settings.get(FIELD)
    if not given or _get(given, "quant_method") == "fp8":
        return
    raise unsupported(
        f"{FIELD}.quant_method={_get(given, 'quant_method')!r}",
        "of weights as codes, only 'fp8' is read",
        "use the model with its original weights, and --lora.base nf4 or int8 to hold them as codes in training",
    )


def _get(given: Any, name: str) -> Any:
    return given.get(name) if isinstance(given, dict) else given


def join_scales(stored: Mapping[str, StoredTensor], settings: Settings) -> dict[str, StoredTensor]:
    """Return the tensors with the scales of each weight in it.

    Raises:
        InputError: a weight has no scales, or scales of another shape; or scales have no weight.
    """
    codes = {name for name, tensor in stored.items() if tensor.array.dtype in CODE_DTYPES.values()}
    scales = {name.removesuffix(SCALE): tensor for name, tensor in stored.items() if name.endswith(f"weight{SCALE}")}
    if missing := sorted(codes - scales.keys()):
        raise InputError(f"{stored[missing[0]].file}: tensor {missing[0]!r} has no scales, {SCALE}; {AGAIN}")
    if missing := sorted(scales.keys() - codes):
        raise InputError(f"{scales[missing[0]].file}: tensor {missing[0] + SCALE!r} scales no tensor of codes; {AGAIN}")
    if not codes:
        return dict(stored)
    block = _read_block(settings)
    joined = {name: _join(name, stored[name], scales[name], block) for name in codes}
    kept = {name: tensor for name, tensor in stored.items() if not name.endswith((f"weight{SCALE}", *OF_ACTIVATIONS))}
    return kept | joined


def _read_block(settings: Settings) -> tuple[int, int] | None:
    """Return the rows and columns of a block; None: a weight has one scale."""
    block = _get(settings.get(FIELD, {}), "weight_block_size")
    if block is None:
        return None
    if not (isinstance(block, list) and len(block) == 2 and all(type(each) is int and each > 0 for each in block)):
        raise Unsupported(f"{FIELD}.weight_block_size={block!r}: must be two sizes; {CORRECT}")
    return block[0], block[1]


def _join(name: str, codes: StoredTensor, scales: StoredTensor, block: tuple[int, int] | None) -> StoredTensor:
    rows, columns = codes.array.shape if codes.array.ndim == 2 else (0, 0)
    expected = tuple(map(math.ceil, np.divide((rows, columns), block))) if block and scales.array.size > 1 else None
    if codes.array.ndim != 2 or (scales.array.shape != expected if expected else scales.array.size != 1):
        shape, wanted = list(scales.array.shape), list(expected or ())
        problem = f"has shape {shape}, but the weight {list(codes.array.shape)} needs {wanted}"
        raise InputError(f"{scales.file}: tensor {name + SCALE!r} {problem}; {AGAIN}")
    return codes._replace(scaled=_make_multiplier(name, codes.array, scales, block if expected else None))


def _make_multiplier(name: str, codes: np.ndarray, scales: StoredTensor, block: tuple[int, int] | None) -> Any:
    """Return a function (what was read of a view of the codes, the view) -> float32 values."""

    def multiply(found: np.ndarray, view: np.ndarray) -> np.ndarray:
        grid = np.asarray(scales.read(), np.float32)
        if not (np.isfinite(grid) & (grid >= 0)).all():
            raise InputError(f"{scales.file}: tensor {name + SCALE!r} has scales below 0 or not finite; {AGAIN}")
        values = found.astype(np.float32)
        if block is None:
            return values * grid.reshape(())
        rows, columns = codes.shape
        whole = grid.repeat(block[0], 0)[:rows].repeat(block[1], 1)[:, :columns].reshape(-1)
        # The view's elements of `whole`: one code is one byte, so that strides in bytes count elements.
        first = view.__array_interface__["data"][0] - codes.__array_interface__["data"][0]
        strides = [whole.itemsize * stride for stride in view.strides]
        return values * np.lib.stride_tricks.as_strided(whole[first:], view.shape, strides, writeable=False)

    return multiply
