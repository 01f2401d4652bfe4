"""Schemes of compressed-tensors: which modules have codes, of which kind, and in which blocks."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxopt_llm.checkpoint.huggingface.codecs import CORRECT, shorten, unsupported

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
