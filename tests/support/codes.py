"""Weights as codes, written from the published description of each format, and the values that they have.

Values are computed here for a whole matrix, in float64 where the format says no more, from the numbers that are packed
afterwards. `write` makes a folder of a model in a format.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxopt_llm.checkpoint.huggingface import safetensors
from jaxopt_llm.checkpoint.huggingface.safetensors import TensorSpec

Tensors = dict[str, np.ndarray]  # by the end of the name
Quantised = tuple[Tensors, np.ndarray]  # and the values, in float64
BF16, F16, E4M3 = (np.dtype(each) for each in (jnp.bfloat16, np.float16, jnp.float8_e4m3fn))
GROUP = 32
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
FP4 = [0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25]
FP4 += [-each for each in FP4]


class Kind(NamedTuple):
    """Format, with settings.

    options: quantization_config. quantise: (a weight, options) -> its tensors. weights: end of the names of the weights
        that are quantised.
    """

    options: dict[str, Any]
    quantise: Callable[[np.ndarray, dict[str, Any]], Quantised]
    weights: str = "_proj.weight"


def pack(numbers: np.ndarray, bits: int, axis: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """Return words of 32 bits. order: the number that each of a word's fields has, from the lowest bits on."""
    per_word = 32 // bits
    numbers = np.moveaxis(numbers, axis, -1).astype(np.int64)
    numbers = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, -numbers.shape[-1] % per_word)])
    fields = numbers.reshape(*numbers.shape[:-1], -1, per_word)[..., list(order) or slice(None)]
    words = sum(fields[..., place] << (bits * place) for place in range(per_word))
    return np.ascontiguousarray(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis))


def spread(table: np.ndarray, shape: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    """Return the number of each value's block."""
    return np.asarray(table, np.float64).repeat(block[0], 0)[: shape[0]].repeat(block[1], 1)[:, : shape[1]]


def find_scales(weight: np.ndarray, block: tuple[int, int], largest: float, dtype: Any) -> np.ndarray:
    rows, columns = weight.shape
    counts = -(-rows // block[0]), -(-columns // block[1])
    whole = np.zeros((counts[0] * block[0], counts[1] * block[1]))
    whole[:rows, :columns] = np.abs(weight)
    return (whole.reshape(counts[0], block[0], counts[1], block[1]).max((1, 3)) / largest).astype(dtype)


def find_points(rng: np.random.Generator, counts: tuple[int, ...], bits: int) -> np.ndarray:
    """Return zero-points: any but 0, which the first version of GPTQ cannot store."""
    return rng.integers(1, 2**bits, counts)


def _list_blocks(weights: Mapping[str, Any], shape: tuple[int, int]) -> tuple[int, int]:
    block: tuple[int, int] = {
        "tensor": shape,
        "channel": (1, shape[1]),
        "group": (1, weights.get("group_size")),
        "block": tuple(weights.get("block_structure", ())),
    }[weights["strategy"]]
    return block


def fp8(weight: np.ndarray, options: dict[str, Any]) -> Quantised:
    block = tuple(options["weight_block_size"])
    scales = find_scales(weight, block, 448, np.float32)
    codes = (weight / spread(scales, weight.shape, block)).astype(E4M3)
    values = codes.astype(np.float32) * spread(scales, weight.shape, block).astype(np.float32)
    return {".weight": codes, ".weight_scale_inv": scales}, values


def compressed(weight: np.ndarray, options: dict[str, Any]) -> Quantised:
    """Integers or E4M3 of compressed-tensors, packed or not, with act-order or not."""
    weights = options["config_groups"]["group_0"]["weights"]
    bits, shape, is_packed = weights["num_bits"], weight.shape, options["format"] == "pack-quantized"
    block, rng = _list_blocks(weights, shape), np.random.default_rng(1)
    scales = find_scales(weight, block, 448 if weights["type"] == "float" else 2 ** (bits - 1) - 1, BF16)
    tensors = {".weight_scale": scales.reshape(-1) if weights["strategy"] == "tensor" else scales}
    by_value = spread(scales, shape, block)
    points = np.zeros(shape)
    if not weights["symmetric"]:
        few = find_points(rng, scales.shape, bits) - 2 ** (bits - 1)
        points = spread(few, shape, block)
        packed_points = pack(few + 2 ** (bits - 1), bits, 0)
        tensors[".weight_zero_point"] = packed_points if is_packed else few.astype(np.int8)
    if weights.get("actorder") == "group":
        groups = rng.permutation(np.arange(shape[1]) // weights["group_size"]).astype(np.int32)
        tensors[".weight_g_idx"] = groups
        by_value, points = (each[:, groups * weights["group_size"]] for each in (by_value, points))
    elif "actorder" in weights:
        tensors[".weight_g_idx"] = np.full(shape[1], -1, np.int32)
    if weights["type"] == "float":
        codes = (weight / by_value).astype(E4M3)
    else:
        codes = np.clip(np.rint(weight / by_value + points), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1).astype(np.int8)
    values = ((codes.astype(np.float64) - points) * by_value).astype(BF16)
    if not is_packed:
        return tensors | {".weight": codes}, values.astype(np.float64)
    packed = pack(codes.astype(np.int64) + 2 ** (bits - 1), bits, 1)
    sizes = np.array(shape, np.int64)
    return tensors | {".weight_packed": packed, ".weight_shape": sizes}, values.astype(np.float64)


def gptq(weight: np.ndarray, options: dict[str, Any]) -> Quantised:
    bits, weight, rng = options["bits"], weight.T, np.random.default_rng(2)  # [in, out]
    group = weight.shape[0] if options["group_size"] == -1 else options["group_size"]
    scales = find_scales(weight, (group, 1), 2 ** (bits - 1), F16)
    points = find_points(rng, scales.shape, bits)
    groups = np.arange(len(weight)) // group
    if options["desc_act"]:
        groups = rng.permutation(groups)
    codes = np.clip(np.rint(weight / scales[groups].astype(np.float64) + points[groups]), 0, 2**bits - 1)
    values = ((codes - points[groups]) * scales[groups].astype(np.float64)).astype(F16)
    tensors = {
        ".qweight": pack(codes, bits, 0),
        ".qzeros": pack(points - (options["checkpoint_format"] == "gptq"), bits, 1),
        ".scales": scales,
        ".g_idx": groups.astype(np.int32),
    }
    return tensors, values.T.astype(np.float64)


def awq(weight: np.ndarray, options: dict[str, Any]) -> Quantised:
    weight, rng, group, order = weight.T, np.random.default_rng(3), options["group_size"], (0, 2, 4, 6, 1, 3, 5, 7)
    scales = find_scales(weight, (group, 1), 8, F16)
    points = find_points(rng, scales.shape, 4)
    by_value, by_point = (spread(each, weight.shape, (group, 1)) for each in (scales, points))
    codes = np.clip(np.rint(weight / by_value + by_point), 0, 15)
    tensors = {".qweight": pack(codes, 4, 1, order), ".qzeros": pack(points, 4, 1, order), ".scales": scales}
    return tensors, ((codes - by_point) * by_value).astype(F16).T.astype(np.float64)


def four_bits(weight: np.ndarray, options: dict[str, Any]) -> Quantised:
    """NF4 and FP4 of bitsandbytes, in blocks that run on from row to row; with codes of their scales or not."""
    kind, size, flat = options["bnb_4bit_quant_type"], 64, weight.reshape(-1)
    table = np.array(NF4 if kind == "nf4" else FP4, np.float32)
    padded = np.pad(flat, (0, -len(flat) % size)).reshape(-1, size)
    largest = np.abs(padded).max(1).astype(np.float32)
    state = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors: Tensors = {".weight.quant_map": table}
    if options["bnb_4bit_use_double_quant"]:
        inner = np.linspace(-1, 1, 256, dtype=np.float32)
        offset = np.float32(largest.mean())
        padded_largest = np.pad(largest - offset, (0, -len(largest) % 256)).reshape(-1, 256)
        factors = np.abs(padded_largest).max(1).astype(np.float32)
        relative = padded_largest / factors[:, None]
        inner_codes = np.abs(relative[..., None] - inner).argmin(-1).reshape(-1)[: len(largest)].astype(np.uint8)
        largest = inner[inner_codes] * factors[np.arange(len(largest)) // 256] + offset
        tensors |= {".weight.nested_absmax": factors, ".weight.nested_quant_map": inner}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
    tensors[".weight.absmax"] = inner_codes if options["bnb_4bit_use_double_quant"] else largest
    by_value = largest[np.arange(len(flat)) // size]
    codes = np.abs((flat / by_value)[:, None] - table).argmin(1)
    tensors[".weight"] = ((codes[::2] << 4) | codes[1::2]).astype(np.uint8)[:, None]
    tensors[f".weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return tensors, (table[codes] * by_value).astype(BF16).reshape(weight.shape).astype(np.float64)


def eight_bits(weight: np.ndarray, options: dict[str, Any]) -> Quantised:
    largest = np.abs(weight).max(1).astype(np.float32)
    codes = np.rint(weight * 127 / largest[:, None]).astype(np.int8)
    values = codes.astype(np.float32) * largest[:, None] * np.float32(1 / 127)
    return {".weight": codes, ".SCB": largest, ".weight_format": np.array(0, np.uint8)}, values


def mxfp4(weight: np.ndarray, options: dict[str, Any]) -> Quantised:
    """Matrices of experts [E, in, out] of gpt-oss."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    blocks = weight.swapaxes(1, 2).reshape(len(weight), weight.shape[2], -1, 32)  # [E, out, block, 32]
    exponents = np.ceil(np.log2(np.abs(blocks).max(-1) / 6))
    powers = 2.0 ** exponents[..., None]
    codes = np.abs(blocks[..., None] / powers[..., None] - table).argmin(-1)
    tensors = {"_blocks": (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)}
    values = (table[codes] * powers).reshape(*blocks.shape[:2], -1).swapaxes(1, 2)
    return tensors | {"_scales": (exponents + 127).astype(np.uint8)}, values


def _scheme(form: str, bits: int, strategy: str, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "float" if form == "float-quantized" else "int", "strategy": strategy}
    weights |= {"symmetric": symmetric, "dynamic": False, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        **{"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"},
        **{"config_groups": {"group_0": group}, "ignore": ["lm_head"]},
    }


def _gptq(bits: int, group: int, form: str, desc_act: bool = False) -> dict[str, Any]:
    sizes = {"bits": bits, "group_size": group, "sym": False, "lm_head": False}
    return {"quant_method": "gptq", "checkpoint_format": form, "desc_act": desc_act, **sizes}


def _bitsandbytes(kind: str = "", nested: bool = False) -> dict[str, Any]:
    given = {"quant_method": "bitsandbytes", "load_in_4bit": bool(kind), "load_in_8bit": not kind}
    return given | {"bnb_4bit_quant_type": kind or "fp4", "bnb_4bit_use_double_quant": nested}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [GROUP, GROUP]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
KINDS = {
    "fp8": Kind(FP8, fp8),
    "int4 in groups": Kind(_scheme("pack-quantized", 4, "group", group_size=GROUP), compressed),
    "int4 with zero-points": Kind(_scheme("pack-quantized", 4, "group", False, group_size=GROUP), compressed),
    "int4 in act-order": Kind(
        _scheme("pack-quantized", 4, "group", False, group_size=GROUP, actorder="group"), compressed
    ),
    "int4 without act-order": Kind(
        _scheme("pack-quantized", 4, "group", group_size=GROUP, actorder="weight"), compressed
    ),
    "packed int8": Kind(_scheme("pack-quantized", 8, "channel"), compressed),
    "int8 by rows": Kind(_scheme("int-quantized", 8, "channel"), compressed),
    "int8 by rows with zero-points": Kind(_scheme("int-quantized", 8, "channel", False), compressed),
    "int8": Kind(_scheme("int-quantized", 8, "tensor"), compressed),
    "float8": Kind(_scheme("float-quantized", 8, "tensor"), compressed),
    "float8 by rows": Kind(_scheme("float-quantized", 8, "channel"), compressed),
    "float8 in blocks": Kind(_scheme("float-quantized", 8, "block", block_structure=[48, 40]), compressed),
    "gptq": Kind(_gptq(4, GROUP, "gptq"), gptq),
    "gptq in act-order": Kind(_gptq(4, GROUP, "gptq", desc_act=True), gptq),
    "gptq of 8 bits": Kind(_gptq(8, -1, "gptq_v2"), gptq),
    "gptq of 2 bits": Kind(_gptq(2, GROUP, "gptq"), gptq),
    "awq": Kind(AWQ, awq),
    "nf4": Kind(_bitsandbytes("nf4"), four_bits),
    "nf4 with codes of scales": Kind(_bitsandbytes("nf4", nested=True), four_bits),
    "fp4": Kind(_bitsandbytes("fp4"), four_bits),
    "int8 of bitsandbytes": Kind(_bitsandbytes(), eight_bits),
}
MXFP4 = Kind({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4, "_proj")


def write_tensors(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    specs = {name: TensorSpec(array.dtype, array.shape) for name, array in tensors.items()}
    safetensors.write_file(folder / safetensors.SINGLE, specs, tensors.__getitem__)


def quantise_folder(source: Path, target: Path, kind: Kind) -> dict[str, np.ndarray]:
    """Write the folder of a model again with weights as codes. Return the values of all tensors."""
    stored = {name: each.read() for name, each in safetensors.open_folder(source).items()}
    values, tensors = dict(stored), dict(stored)
    for name in [name for name in stored if name.endswith(kind.weights)]:
        stem = name.removesuffix(".weight")
        found, values[name] = kind.quantise(tensors.pop(name).astype(np.float64), kind.options)
        tensors |= {stem + end: array for end, array in found.items()}
    target.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    settings = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(settings | {"quantization_config": kind.options}))
    write_tensors(target, tensors)
    return values
