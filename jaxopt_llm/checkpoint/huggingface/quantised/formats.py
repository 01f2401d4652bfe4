"""Formats of weights that are stored as codes: which tensors a weight has, and how its values follow from them.

In all formats but those of bitsandbytes, a value is (code - zero) * scale, where blocks of a weight have a zero and a
scale. Products are computed in float32 and rounded as the published implementation of the format rounds them.

Schemes of compressed-tensors: which modules have codes, of which kind, and in which blocks.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxopt_llm.checkpoint.huggingface.codecs import CORRECT, shorten, unsupported
from jaxopt_llm.checkpoint.huggingface.quantised.codes import Codes, Indices, Packing, Part, Parts, blocks_of
from jaxopt_llm.checkpoint.huggingface.safetensors import CODE_DTYPES, FLOAT_DTYPES, MASK_DTYPES
from jaxopt_llm.core import json_files

Scheme = Mapping[str, Any]  # "weights" of a group of modules

FIELD = "quantization_config"
USE_ORIGINAL = "use the model with its original weights, and --lora.base nf4 or int8 to hold them as codes in training"
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense", None)
BITS = {"int": (2, 4, 8), "float": (8,)}


def check(options: Mapping[str, Any]) -> None:
    """Raise Unsupported if a quantization_config of compressed-tensors has weights that are not read."""
    groups = options.get("config_groups")
    if not (isinstance(groups, dict) and all(isinstance(group, dict) for group in groups.values())):
        raise unsupported(f"{FIELD}.config_groups={shorten(groups)}", "must be schemes by their names", CORRECT)
    for format_name in (options.get("format"), *(group.get("format") for group in groups.values())):
        if format_name not in FORMATS:
            known = ", ".join(each for each in FORMATS if each)
            raise unsupported(f"{FIELD}.format={format_name!r}", f"only {known} are read", USE_ORIGINAL)
    for name, is_used in {
        "transform_config": lambda given: bool(given.get("config_groups")),
        "sparsity_config": lambda given: given.get("format", "dense") != "dense",
    }.items():
        if isinstance(given := options.get(name), dict) and is_used(given):
            problem = "the model would need rotations of activations, or sparse weights"
            raise unsupported(f"{FIELD}.{name}={shorten(given)}", problem, USE_ORIGINAL)
    _check_targets("ignore", options.get("ignore"))
    for name, group in groups.items():
        _check_targets(f"config_groups.{name}.targets", group.get("targets"))
        if (scheme := group.get("weights")) is not None:
            _check_scheme(f"{FIELD}.config_groups.{name}", scheme)


def _check_targets(where: str, targets: Any) -> None:
    try:
        for target in targets or ():
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
    except (TypeError, AttributeError, re.error) as error:
        raise unsupported(
            f"{FIELD}.{where}={shorten(targets)}", "must be names, or patterns with re:", CORRECT
        ) from error


def _check_scheme(where: str, scheme: Any) -> None:
    if not isinstance(scheme, dict):
        raise unsupported(f"{where}.weights={shorten(scheme)}", "must be the scheme of the weights", CORRECT)
    kind, bits, group = scheme.get("type", "int"), scheme.get("num_bits", 8), scheme.get("group_size")
    if kind not in tuple(BITS) or bits not in BITS[kind]:
        known = "; ".join(f"{kind} of {', '.join(map(str, bits))} bits" for kind, bits in BITS.items())
        raise unsupported(f"{where}.weights: type={kind!r}, num_bits={bits!r}", f"only {known} are read", USE_ORIGINAL)
    if group is not None and (type(group) is not int or (group < 1 and group != -1)):
        raise unsupported(f"{where}.weights.group_size={group!r}", "must be a whole number above 0, or -1", CORRECT)
    strategy = _name_strategy(scheme)
    if strategy not in ("tensor", "channel", "group", "block") or (strategy == "group" and (group or 0) < 1):
        problem = "only tensor, channel, block, and group with a group_size are read"
        raise unsupported(f"{where}.weights.strategy={strategy!r}", problem, USE_ORIGINAL)
    if strategy == "block":
        check_block(f"{where}.weights.block_structure", scheme.get("block_structure"))


def check_block(where: str, block: Any) -> None:
    """Raise Unsupported unless a value of a config.json is the rows and columns of a block."""
    if not (isinstance(block, list) and len(block) == 2 and all(type(each) is int and each > 0 for each in block)):
        raise unsupported(f"{where}={shorten(block)}", "must be two sizes", CORRECT)


def _name_strategy(scheme: Scheme) -> Any:
    group = scheme.get("group_size")
    return scheme.get("strategy") or ("tensor" if group is None else "channel" if group == -1 else "group")


def find_scheme(module: str, options: Mapping[str, Any], kind: str) -> Scheme | str:
    """Return the scheme of a module that has codes; if there is none, a clause that says why.

    kind: of the codes, int or float.
    """
    if any(_match(module, target) for target in options.get("ignore") or ()):
        return f"has codes, but {FIELD}.ignore names its module"
    # As in the library, a name comes before a pattern, and that before a class of modules.
    schemes = [scheme for rank in _RANKS for scheme in _list_schemes(module, options, rank)]
    if not schemes:
        return f"has codes, but no group of {FIELD}.config_groups has its module as a target"
    if (found := schemes[0].get("type", "int")) != kind:
        return f"has codes of type {kind}, but its scheme in {FIELD}.config_groups has type {found}"
    return schemes[0]


_RANKS = ("name", "pattern", "class")


def _list_schemes(module: str, options: Mapping[str, Any], rank: str) -> Iterator[Scheme]:
    for group in options["config_groups"].values():
        if group.get("weights") and rank in {_match(module, target) for target in group.get("targets") or ()}:
            yield group["weights"]


def _match(module: str, target: str) -> str | None:
    """Return by what a target selects a module; None if it does not. All modules with codes are Linear."""
    if target.startswith("re:"):
        return "pattern" if re.match(target.removeprefix("re:"), module) else None
    return "name" if target == module else "class" if target == "Linear" else None


def list_blocks(scheme: Scheme, shape: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns of a block with one scale."""
    rows, columns = shape
    strategy = _name_strategy(scheme)
    if strategy == "block":
        return scheme["block_structure"][0], scheme["block_structure"][1]
    return {"tensor": (rows, columns), "channel": (1, columns), "group": (1, scheme.get("group_size") or 1)}[strategy]


Options = Mapping[str, Any]  # quantization_config of a config.json
Blocks = tuple[int | np.ndarray, ...]  # for each dimension, the size of a block, or the block of every index
Numbers = Callable[[Part], np.ndarray]

E4M3, INT8, UINT8, INT32 = CODE_DTYPES["F8_E4M3"], CODE_DTYPES["I8"], MASK_DTYPES["U8"], CODE_DTYPES["I32"]
DTYPES = {"float16": FLOAT_DTYPES["F16"], "bfloat16": FLOAT_DTYPES["BF16"], "float32": FLOAT_DTYPES["F32"]}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E4M3_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)  # faster than a conversion of each code
E8M0_BIAS, E8M0_NAN = 127, 255
MXFP4_BLOCK = 32  # values that have one scale
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # column j of the 8 columns of a word has its bits from 4 * AWQ_ORDER[j] on
INT8_FACTOR = np.float32(7.874015718698502e-3)  # 1 / 127, as bitsandbytes has it


class Format(NamedTuple):
    """Tensors of a weight, by the ends of their names.

    codes: the codes. dtypes: their dtypes, which tell them from weights that are stored as they are. required,
        optional: the other tensors. read: returns the weight. weight: end of the weight's own name.
    """

    codes: str
    dtypes: tuple[np.dtype, ...]
    required: tuple[str, ...]
    read: Callable[[Parts, Options, np.dtype], Codes]
    optional: tuple[str, ...] = ()
    weight: str = ".weight"


def _scale(codes: Numbers, scales: Numbers, zeros: Numbers | None = None, rounded: Any = np.float32) -> Numbers:
    """Return the function (part) -> values. rounded: dtype that a product is rounded to."""

    def decode(part: Part) -> np.ndarray:
        values = codes(part).astype(np.float32)
        if zeros is not None:
            values -= zeros(part)
        values *= scales(part)
        return values.astype(rounded, copy=False)

    return decode


def _count(shape: tuple[int, ...], blocks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-size // block) for size, block in zip(shape, blocks, strict=True))


def _find_blocks(part: Part, blocks: Blocks) -> tuple[Indices, ...]:
    return tuple(map(blocks_of, part, blocks))


def _read_scales(parts: Parts, end: str, counts: tuple[int, ...], blocks: Blocks) -> Numbers:
    """Return the function (part) -> the scale of each value. counts: numbers of blocks along the dimensions."""
    table = parts.array(end, counts, *FLOAT_DTYPES.values(), CODE_DTYPES["F8_E8M0"])
    return lambda part: parts.read_finite(end, table, _find_blocks(part, blocks))


def _read_matrix(parts: Parts, end: str) -> tuple[np.ndarray, Numbers]:
    """Return the view of a matrix with one code for each value, and the function (part) -> codes."""
    matrix = parts.matrix(end)
    if matrix.dtype == E4M3:
        return matrix, lambda part: E4M3_VALUES[parts.read(end, matrix, part).view(np.uint8)]
    return matrix, lambda part: parts.read(end, matrix, part)


# --- one code for each value


def _read_float8(parts: Parts, options: Options, dtype: np.dtype) -> Codes:
    """Read E4M3 with the factor of each block, or with one factor."""
    matrix, codes = _read_matrix(parts, ".weight")
    rows, columns = matrix.shape
    block = options.get("weight_block_size") or (rows, columns)
    is_one = parts.tensors[".weight_scale_inv"].array.size == 1
    blocks = (rows, columns) if is_one else (block[0], block[1])
    scales = _read_scales(parts, ".weight_scale_inv", _count((rows, columns), blocks), blocks)
    return Codes((rows, columns), (0, 1), dtype, _scale(codes, scales))


FLOAT8 = Format(".weight", (E4M3,), (".weight_scale_inv",), _read_float8)


def _read_plain(parts: Parts, options: Options, dtype: np.dtype) -> Codes:
    """Read int8 or E4M3 of compressed-tensors."""
    matrix, codes = _read_matrix(parts, ".weight")
    shape = matrix.shape[0], matrix.shape[1]
    scheme = _find_scheme(parts, ".weight", options, "int" if matrix.dtype == INT8 else "float")
    blocks = list_blocks(scheme, shape)
    scales = _read_scales(parts, ".weight_scale", _count(shape, blocks), blocks)
    zeros = _read_zeros(parts, scheme, ".weight", shape, blocks, blocks)
    return Codes(shape, (0, 1), dtype, _scale(codes, scales, zeros, parts.tensors[".weight_scale"].array.dtype))


def _find_scheme(parts: Parts, end: str, options: Options, kind: str) -> Mapping[str, Any]:
    scheme = find_scheme(parts.stem, options, kind)
    if isinstance(scheme, str):
        raise parts.error(end, scheme)
    return scheme


def _read_zeros(
    parts: Parts, scheme: Mapping[str, Any], codes: str, shape: tuple[int, int], size: tuple[int, int], blocks: Blocks
) -> Numbers | None:
    """Return the function (part) -> zero-points of compressed-tensors; None if the scheme has none.

    size: rows and columns of a block. blocks: the same, or with the block of each column.
    """
    end = ".weight_zero_point"
    if end not in parts:
        if not scheme.get("symmetric", True):
            raise parts.error(codes, f"has no zero-points, {parts.stem + end!r}, although its scheme is not symmetric")
        return None
    rows, columns = _count(shape, size)
    if parts.tensors[end].array.dtype != INT32:
        points = parts.array(end, (rows, columns))
        return lambda part: parts.read_finite(end, points, _find_blocks(part, blocks))
    packing = Packing(scheme["num_bits"])
    words = parts.array(end, (_count_words(rows, packing.bits), columns))
    middle = 2 ** (packing.bits - 1)
    return lambda part: (
        parts.read_packed(end, words, _find_blocks(part, blocks), 0, packing).astype(np.float32) - middle
    )


PLAIN = Format(".weight", (E4M3, INT8), (".weight_scale",), _read_plain, (".weight_zero_point",))


# --- codes of 2, 4 or 8 bits in words of 32


def _count_words(codes: int, bits: int) -> int:
    return -(-codes * bits // 32)


def _read_packed(parts: Parts, options: Options, dtype: np.dtype) -> Codes:
    """Read integers of compressed-tensors, packed along the columns, with the middle of their range added."""
    end, scheme = ".weight_packed", _find_scheme(parts, ".weight_packed", options, "int")
    packing = Packing(scheme["num_bits"])
    rows, columns = map(int, _read_integers(parts, ".weight_shape", 2))
    shape = rows, columns
    words = parts.matrix(end)
    if words.shape != (needed := (rows, _count_words(columns, packing.bits))):
        raise parts.error(end, f"has shape {list(words.shape)}, but {parts.stem}.weight_shape needs {list(needed)}")
    size = list_blocks(scheme, shape)
    counts = _count(shape, size)
    blocks: Blocks = size
    if ".weight_g_idx" in parts and (groups := _read_groups(parts, ".weight_g_idx", columns, counts[1])) is not None:
        blocks = size[0], groups
    scales = _read_scales(parts, ".weight_scale", counts, blocks)
    zeros = _read_zeros(parts, scheme, end, shape, size, blocks)

    def codes(part: Part) -> np.ndarray:
        return parts.read_packed(end, words, part, 1, packing).astype(np.float32) - 2 ** (packing.bits - 1)

    return Codes(shape, (0, 1), dtype, _scale(codes, scales, zeros, parts.tensors[".weight_scale"].array.dtype))


def _read_groups(parts: Parts, end: str, inputs: int, count: int) -> np.ndarray | None:
    """Return the group of each input, which act-order gives; None if all are -1: there is no act-order."""
    groups = _read_integers(parts, end, inputs)
    if (groups == -1).all():
        return None
    if not ((groups >= 0) & (groups < count)).all():
        raise parts.error(end, f"names groups from {groups.min()} to {groups.max()}, but there are {count} from 0 on")
    return groups


def _read_integers(parts: Parts, end: str, count: int) -> np.ndarray:
    return parts.tensors[end].read(parts.array(end, (count,), INT32, CODE_DTYPES["I64"]))


PACKED = Format(
    ".weight_packed",
    (INT32,),
    (".weight_scale", ".weight_shape"),
    _read_packed,
    (".weight_zero_point", ".weight_g_idx"),
)


def _read_gptq(parts: Parts, options: Options, dtype: np.dtype) -> Codes:
    """Read [in, out], with codes packed along the inputs and zero-points along the outputs.

    Files of the first version have each zero-point less 1. As in the published implementation, 1 is added to all
    zero-points of a word at once.
    """
    bits, words = options["bits"], parts.matrix(".qweight")
    inputs = len(words) * 32 // bits
    group, count = _count_groups(options, inputs)
    groups = _read_groups(parts, ".g_idx", inputs, count) if ".g_idx" in parts else None
    if groups is None and options.get("desc_act"):
        raise parts.error(".qweight", f"has no groups, {parts.stem + '.g_idx'!r}, which desc_act=True requires")
    added = sum(1 << bit for bit in range(0, 32, bits)) if name_version(options) == GPTQ_VERSIONS[0] else 0
    decode = _scale_groups(
        parts, 0, Packing(bits), Packing(bits, added=added), group if groups is None else groups, count
    )
    return Codes((inputs, words.shape[1]), (1, 0), dtype, decode)


def _count_groups(options: Options, inputs: int) -> tuple[int, int]:
    """Return the inputs of a group, and the number of groups."""
    group: int = inputs if options["group_size"] == -1 else options["group_size"]
    return group, -(-inputs // group)


def _scale_groups(
    parts: Parts, dim: int, packing: Packing, of_zeros: Packing, group: int | np.ndarray, count: int
) -> Numbers:
    """Return the function (part) -> values of a weight [in, out].

    Each group of inputs has a scale and a zero-point for each output.

    Args:
        parts: the tensors.
        dim: dimension along which the codes are packed.
        packing: how they are.
        of_zeros: how zero-points are packed, along the outputs.
        group: number of inputs of a group, or the group of each input.
        count: number of groups.
    """
    words = parts.matrix(".qweight")
    outputs = words.shape[1] * (32 // packing.bits if dim == 1 else 1)
    zeros = parts.array(".qzeros", (count, _count_words(outputs, packing.bits)), INT32)
    return _scale(
        lambda part: parts.read_packed(".qweight", words, part, dim, packing),
        _read_scales(parts, ".scales", (count, outputs), (group, 1)),
        lambda part: parts.read_packed(".qzeros", zeros, (blocks_of(part[0], group), part[1]), 1, of_zeros),
        parts.tensors[".scales"].array.dtype,
    )


GPTQ_VERSIONS = ("gptq", "gptq_v2")


def name_version(options: Options) -> str:
    """Return the version of a folder of GPTQ, as transformers reads it."""
    return str(options.get("checkpoint_format") or options.get("format") or GPTQ_VERSIONS[0]).lower()


GPTQ = Format(".qweight", (INT32,), (".qzeros", ".scales"), _read_gptq, (".g_idx",))


def _read_awq(parts: Parts, options: Options, dtype: np.dtype) -> Codes:
    """Read [in, out], with codes and zero-points packed along the outputs."""
    packing, words = Packing(4, AWQ_ORDER), parts.matrix(".qweight")
    inputs, outputs = len(words), words.shape[1] * 8
    decode = _scale_groups(parts, 1, packing, packing, *_count_groups(options, inputs))
    return Codes((inputs, outputs), (1, 0), dtype, decode)


AWQ = Format(".qweight", (INT32,), (".qzeros", ".scales"), _read_awq)


# --- codes of 4 bits that name a value


def _read_mxfp4(parts: Parts, options: Options, dtype: np.dtype) -> Codes:
    """Read the matrices of all experts, [E, in, out]: blocks of 32 inputs with one power of 2."""
    blocks = parts.tensors["_blocks"].array
    if blocks.ndim != 4 or 2 * blocks.shape[-1] != MXFP4_BLOCK:
        raise parts.error("_blocks", f"has shape {list(blocks.shape)} instead of [experts, rows, groups, 16]")
    experts, rows, groups = blocks.shape[:3]
    pairs = blocks.reshape(experts, rows, -1)
    exponents = parts.array("_scales", (experts, rows, groups), UINT8)

    def scales(part: Part) -> np.ndarray:
        found = parts.read("_scales", exponents, (*part[:2], blocks_of(part[2], MXFP4_BLOCK)))
        if (found == E8M0_NAN).any():
            raise parts.error("_scales", "has values that are not finite")
        return np.ldexp(np.float32(1), found.astype(np.int32) - E8M0_BIAS)

    def codes(part: Part) -> np.ndarray:
        return E2M1[parts.read_packed("_blocks", pairs, part, 2, Packing(4))]

    return Codes((experts, rows, groups * MXFP4_BLOCK), (0, 2, 1), dtype, _scale(codes, scales))


MXFP4 = Format("_blocks", (UINT8,), ("_scales",), _read_mxfp4, weight="")


def _read_4bit(parts: Parts, options: Options, dtype: np.dtype) -> Codes:
    """Read NF4 or FP4 of bitsandbytes, with the high half of a byte first. Blocks run on from row to row."""
    state = _read_state(parts)
    rows, columns = shape = tuple(state["shape"])
    size: int = state["blocksize"]
    pairs = parts.array(".weight", (rows * columns // 2,)).reshape(rows, columns // 2)
    table = _read_table(parts, ".weight.quant_map", 16)
    largest = _read_largest(parts, state, -(-rows * columns // size))

    def codes(part: Part) -> np.ndarray:
        return table[parts.read_packed(".weight", pairs, part, 1, Packing(4, (1, 0)))]

    def scales(part: Part) -> np.ndarray:
        blocks = (columns * np.asarray(part[0])[:, None] + np.asarray(part[1])) // size
        first = int(blocks[0, 0])
        return largest(range(first, int(blocks[-1, -1]) + 1))[blocks - first]

    return Codes(shape, (0, 1), dtype, _scale(codes, scales, rounded=DTYPES[state["dtype"]]))


def _read_state(parts: Parts) -> dict[str, Any]:
    """Return the state of a weight of 4 bits, which is JSON in bytes."""
    end = next((end for end in STATES if end in parts), None)
    if end is None:
        raise parts.error(".weight", f"has no state, {parts.stem + STATES[0]!r}")
    try:
        state = json_files.parse_settings(parts.tensors[end].read().tobytes())
    except ValueError as error:
        raise parts.error(end, "is not JSON") from error
    if not isinstance(state, dict):
        raise parts.error(end, "is no JSON object")

    def is_size(value: Any) -> bool:
        return type(value) is int and value > 0

    shape: Any = state.get("shape")
    nested = ".weight.nested_absmax" in parts
    valid = isinstance(shape, list) and len(shape) == 2 and all(map(is_size, shape))
    sizes = [state.get("blocksize"), *([state.get("nested_blocksize")] if nested else [])]
    if not (valid and all(map(is_size, sizes)) and str(state.get("dtype")) in DTYPES):
        raise parts.error(end, "does not say shape, blocksize and dtype of a matrix")
    if nested and not isinstance(state.get("nested_offset"), float | int):
        raise parts.error(end, "has no nested_offset, which nested scales need")
    if shape[1] % 2:
        raise parts.error(end, f"has shape {shape}: only matrices with an even number of inputs are read")
    return state


def _read_table(parts: Parts, end: str, size: int) -> np.ndarray:
    return parts.read_finite(end, parts.array(end, (size,)), (range(size),))


def _read_largest(parts: Parts, state: Options, count: int) -> Callable[[range], np.ndarray]:
    """Return the function (blocks) -> the scale of each of them. count: number of all blocks."""
    end, inner = ".weight.absmax", ".weight.nested_absmax"
    if inner not in parts:
        if parts.tensors[end].array.dtype == UINT8:
            raise parts.error(end, f"has codes of scales, but there is no {parts.stem + inner!r}")
        scales = parts.array(end, (count,), *FLOAT_DTYPES.values())
        return lambda blocks: parts.read_finite(end, scales, (blocks,))
    array = parts.array(end, (count,), UINT8)
    if ".weight.nested_quant_map" not in parts:
        raise parts.error(inner, f"has no {parts.stem + '.weight.nested_quant_map'!r}")
    table = _read_table(parts, ".weight.nested_quant_map", 256)
    size, offset = state["nested_blocksize"], np.float32(state["nested_offset"])
    factors = parts.array(inner, (-(-count // size),))

    def read(blocks: range) -> np.ndarray:
        factor = parts.read_finite(inner, factors, (blocks_of(blocks, size),))
        return table[parts.read(end, array, (blocks,))] * factor + offset

    return read


STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")
FOUR_BITS = Format(
    ".weight",
    (UINT8,),
    (".weight.absmax", ".weight.quant_map"),
    _read_4bit,
    (".weight.nested_absmax", ".weight.nested_quant_map", *STATES),
)


def _read_8bit(parts: Parts, options: Options, dtype: np.dtype) -> Codes:
    """Read int8 of bitsandbytes, with the largest value of each row."""
    matrix, codes = _read_matrix(parts, ".weight")
    rows, columns = matrix.shape
    if ".weight_format" in parts and parts.tensors[".weight_format"].read().any():
        raise parts.error(".weight_format", "is not 0: only codes in the order of rows are read")
    scale = _scale(codes, _read_scales(parts, ".SCB", (rows, 1), (1, columns)))
    return Codes((rows, columns), (0, 1), dtype, lambda part: scale(part) * INT8_FACTOR)


EIGHT_BITS = Format(".weight", (INT8,), (".SCB",), _read_8bit, (".weight_format",))
