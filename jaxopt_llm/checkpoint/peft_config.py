"""adapter_config.json: what PEFT says of a folder of adapters, read and written.

PEFT names modules, as in model.layers.0.self_attn.q_proj, by their endings or by patterns.
"""

import json
import math
import re
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from jaxopt_llm.checkpoint import safetensors
from jaxopt_llm.errors import InputError

FILE = "adapter_config.json"
# Fields that say nothing of what a saved adapter computes.
SAYS_NOTHING = (
    *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "lora_dropout"),
    *("fan_in_fan_out", "megatron_core", "qalora_group_size", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # of initial values: see init_lora_weights
)
# Fields of which these values alone are known here.
KNOWN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": (None, "none"),
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),  # the others change the base, too
}
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class PeftConfig:
    """The fields that say what an adapter computes, by PEFT's names."""

    r: int
    lora_alpha: float
    target_modules: list[str] | str
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    ensure_weight_tying: bool = False

    def rank(self, module: str) -> int:
        return _first_fit(self.rank_pattern, module, self.r)

    def alpha(self, module: str) -> float:
        return _first_fit(self.alpha_pattern, module, self.lora_alpha)

    def scale(self, module: str) -> float:
        rank = self.rank(module)
        return self.alpha(module) / (math.sqrt(rank) if self.use_rslora else rank)

    def selects(self, module: str, in_block: bool) -> bool:
        """Whether a module has an adapter. in_block: what all-linear selects."""

        def ends(names: Collection[str]) -> bool:
            return any(f".{module}".endswith(f".{name}") for name in names)

        targets, excluded, layers = self.target_modules, self.exclude_modules, self.layers_to_transform
        if excluded and (re.fullmatch(excluded, module) if isinstance(excluded, str) else ends(excluded)):
            return False
        if isinstance(targets, str):
            return in_block if targets.lower() == ALL_LINEAR else re.fullmatch(targets, module) is not None
        if module in targets or not ends(targets) or layers is None or layers == []:
            return ends(targets)
        lists = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern
        patterns = [_layer_in(each) for each in lists or ()] or [r".*?\.[^.]*\.(?P<layer>\d+)\."]
        found = next((match for each in patterns if (match := re.match(each, module))), None)
        return found is not None and int(found["layer"]) in ([layers] if isinstance(layers, int) else layers)


def _first_fit(patterns: dict[str, Any], module: str, otherwise: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(_ending_in(key), module)), otherwise)


def _ending_in(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _layer_in(pattern: str) -> str:
    return rf"(?:^|.*?\.){pattern}\.(?P<layer>\d+)\."


def endings(chosen: Collection[str], names: Collection[str], separator: str = ".") -> list[str]:
    """The shortest endings, of whole words, that of all names the chosen alone have."""
    found: dict[str, None] = {}
    for name in chosen:
        words = name.split(separator)
        every = (separator.join(words[-count:]) for count in range(1, len(words) + 1))
        found[next(each for each in every if _with_ending(names, each, separator) <= set(chosen))] = None
    return list(found)


def _with_ending(names: Collection[str], ending: str, separator: str) -> set[str]:
    return {name for name in names if f"{separator}{name}".endswith(separator + ending)}


# --- reading


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in kinds


def _list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and all(type(each) is kind for each in value)


def _is_pattern(value: Any, within: Callable[[str], str] = str) -> bool:
    try:
        return isinstance(value, str) and bool(re.compile(within(value)))
    except (re.error, RecursionError):
        return False


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _patterns_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        type(value) is dict and all(_is_pattern(key, _ending_in) and holds(each) for key, each in value.items())
    )


# What a field must be, in words, and whether a value is.
MUST_BE: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "r": ("a whole number of at least 1", _is_rank),
    "lora_alpha": ("a number above 0", _is_alpha),
    "rank_pattern": ("whole numbers of at least 1 by patterns", _patterns_of(_is_rank)),
    "alpha_pattern": ("numbers above 0 by patterns", _patterns_of(_is_alpha)),
    "target_modules": ("names or a pattern", lambda value: _is_pattern(value) or _list_of(str)(value)),
    "exclude_modules": ("names or a pattern", lambda value: _is_pattern(value) or _list_of(str)(value)),
    "layers_to_transform": ("whole numbers", lambda value: type(value) is int or _list_of(int)(value)),
    "layers_pattern": (
        "patterns",
        lambda value: all(_is_pattern(each, _layer_in) for each in (value if type(value) is list else [value])),
    ),
    **dict.fromkeys(("use_rslora", "use_dora", "ensure_weight_tying"), ("true or false", _is(bool))),
}


def read(folder: Path) -> PeftConfig:
    """Raises InputError where a folder is none of a LoRA adapter, or its file says what is not known here."""
    file = folder / FILE
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; download it first, as in: hf download NAME --local-dir DIR")
    if not file.is_file():
        raise InputError(f"{folder}: no folder of a PEFT adapter: it has no {FILE}")
    settings = safetensors.parse_json(file.read_bytes(), file)
    for name, values in KNOWN.items():
        value = settings.get(name)
        if not any(type(value) is type(each) and value == each for each in values):
            known = ", ".join(repr(each) for each in values if each is not None)
            changes = "; it changes the base: save with path_initial_model_for_weight_conversion, which undoes that"
            why = changes if name == "init_lora_weights" else ""
            raise InputError(f"{file}: {name}={value!r}: only {known} is known here{why}")
    given = {name: value for name, value in settings.items() if value is not None and name not in KNOWN}
    for name, value in given.items():
        if name not in (*MUST_BE, *SAYS_NOTHING) and value not in (False, [], {}, ""):
            raise InputError(f"{file}: {name}={value!r}: not known here, where an adapter is LoRA's A·B or DoRA's")
    for each in fields(PeftConfig):
        name = each.name
        words, holds = MUST_BE[name]
        if name in given and not holds(given[name]):
            raise InputError(f"{file}: {name}={given[name]!r}: must be {words}")
        if name not in given and name in ("r", "lora_alpha", "target_modules"):
            raise InputError(f"{file}: {name} is not there")
    return PeftConfig(**{name: value for name, value in given.items() if name in MUST_BE})


# --- writing


def write(folder: Path, config: PeftConfig, input_first: bool, base: str) -> None:
    """input_first: whether the model's matrices are [in, out]; base: where PEFT finds the model, or empty."""
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "inference_mode": True,
        "bias": "none",
        "fan_in_fan_out": input_first,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        **asdict(config),
    }
    (folder / FILE).write_text(json.dumps(said, indent=2) + "\n")
