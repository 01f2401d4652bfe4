"""Methods of quantisation that a config.json can name, and the weights of a folder that is stored so.

A weight is found by its tensor of codes, and takes the other tensors with its name. What is left of the names that a
format has is an error, so that nothing is read without its scales.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxopt_llm.checkpoint.huggingface.codecs import CORRECT, Settings, unsupported
from jaxopt_llm.checkpoint.huggingface.quantised import formats
from jaxopt_llm.checkpoint.huggingface.quantised.codes import AGAIN, Parts
from jaxopt_llm.checkpoint.huggingface.quantised.formats import FIELD, USE_ORIGINAL, Format, Options
from jaxopt_llm.checkpoint.huggingface.safetensors import FLOAT_DTYPES, StoredTensor
from jaxopt_llm.core.errors import InputError

# Ends of the names of scales of activations and of caches, which are computed in 16 or 32 bits.
OF_ACTIVATIONS = (
    *(".activation_scale", ".input_scale", ".input_zero_point", ".input_global_scale"),
    *(".output_scale", ".output_zero_point", ".q_scale", ".k_scale", ".v_scale"),
)


class Method(NamedTuple):
    """Method of quantisation. check: raises Unsupported for options that are not read; some methods have none."""

    formats: tuple[Format, ...]
    check: Callable[[Options], None] = lambda options: None


def _require(options: Options, name: str, known: tuple[Any, ...], default: Any = None) -> None:
    value = options.get(name, default)
    if value not in known or isinstance(value, bool) != isinstance(known[0], bool):
        wanted = " or ".join(map(repr, known))
        raise unsupported(f"{FIELD}.{name}={value!r}", f"only {wanted} is read", USE_ORIGINAL)


def _check_float8(options: Options) -> None:
    if options.get("weight_block_size") is not None:
        formats.check_block(f"{FIELD}.weight_block_size", options["weight_block_size"])


def _check_group_size(options: Options) -> None:
    group = options.get("group_size")
    if type(group) is not int or (group < 1 and group != -1):
        raise unsupported(f"{FIELD}.group_size={group!r}", "must be a whole number above 0, or -1", CORRECT)


def _check_gptq(options: Options) -> None:
    _require(options, "bits", (2, 4, 8))
    _require({"checkpoint_format": formats.name_version(options)}, "checkpoint_format", formats.GPTQ_VERSIONS)
    _check_group_size(options)


def _check_awq(options: Options) -> None:
    _require(options, "bits", (4,))
    _require(options, "zero_point", (True,), True)
    _require({"version": str(options.get("version") or options.get("format") or "gemm").lower()}, "version", ("gemm",))
    _check_group_size(options)


def _check_bitsandbytes(options: Options) -> None:
    _require(options, "bnb_4bit_quant_storage", ("uint8",), "uint8")


METHODS = {
    "fp8": Method((formats.FLOAT8,), _check_float8),
    "mxfp4": Method((formats.MXFP4,)),
    "compressed-tensors": Method((formats.PACKED, formats.PLAIN), formats.check),
    "gptq": Method((formats.GPTQ,), _check_gptq),
    "awq": Method((formats.AWQ,), _check_awq),
    "bitsandbytes": Method((formats.FOUR_BITS, formats.EIGHT_BITS), _check_bitsandbytes),
}


def check_method(settings: Settings) -> None:
    """Raise Unsupported if a config.json has weights as codes that are not read."""
    if (method := _find_method(settings)) is not None:
        method.check(settings[FIELD])


def _find_method(settings: Settings) -> Method | None:
    options = settings.get(FIELD)
    if not options:
        return None
    if not isinstance(options, dict):
        raise unsupported(f"{FIELD}={options!r}", "must be the fields of a method", CORRECT)
    name = options.get("quant_method")
    if name is None and (options.get("load_in_4bit") or options.get("load_in_8bit")):
        name = "bitsandbytes"
    if not isinstance(name, str) or name not in METHODS:
        problem = f"of weights as codes, only those of {', '.join(METHODS)} are read"
        raise unsupported(f"{FIELD}.quant_method={name!r}", problem, USE_ORIGINAL)
    return METHODS[name]


def join_codes(stored: Mapping[str, StoredTensor], settings: Settings) -> dict[str, StoredTensor]:
    """Return the tensors with one for each weight that is stored as codes, under the weight's own name.

    Raises:
        InputError: a tensor of a weight is missing or has another shape, or one is left that belongs to no weight.
    """
    method = _find_method(settings)
    if method is None:
        return dict(stored)
    options, dtype = settings[FIELD], _find_dtype(settings)
    joined: dict[str, StoredTensor] = {}
    used: set[str] = set()
    for form in method.formats:
        for name, tensor in stored.items():
            if not name.endswith(form.codes) or tensor.array.dtype not in form.dtypes:
                continue
            parts = _collect(name, form, stored)
            weight = parts.stem + form.weight
            if weight in joined or (weight != name and weight in stored):
                raise InputError(f"{tensor.file}: tensor {name!r} is there next to {weight!r}; {AGAIN}")
            codes = form.read(parts, options, dtype)
            joined[weight] = StoredTensor(tensor.source, codes.array, codes)
            used |= {parts.stem + end for end in parts.tensors}
    rest = {name: each for name, each in stored.items() if name not in used and not name.endswith(OF_ACTIVATIONS)}
    _check_rest(rest, method)
    return rest | joined


def _find_dtype(settings: Settings) -> np.dtype:
    """Return the dtype that config.json has for the model: that of parameters whose weights are codes."""
    return formats.DTYPES.get(str(settings.get("dtype") or settings.get("torch_dtype")), FLOAT_DTYPES["BF16"])


def _collect(name: str, form: Format, stored: Mapping[str, StoredTensor]) -> Parts:
    """Return the tensors of a weight. name: that of its codes."""
    stem = name.removesuffix(form.codes)
    for end in form.required:
        if stem + end not in stored:
            raise InputError(f"{stored[name].file}: tensor {name!r} has no {stem + end!r}; {AGAIN}")
    ends = (form.codes, *form.required, *form.optional)
    return Parts(stem, {end: stored[stem + end] for end in ends if stem + end in stored})


def _check_rest(rest: Mapping[str, StoredTensor], method: Method) -> None:
    """Raise InputError for a tensor that belongs to codes, without these."""
    ends = tuple(end for form in method.formats for end in (*form.required, *form.optional))
    if name := next((name for name in sorted(rest) if name.endswith(ends)), None):
        raise InputError(f"{rest[name].file}: tensor {name!r} belongs to no tensor of codes; {AGAIN}")
