"""Reading and writing of adapter_config.json, PEFT's description of a folder of adapters.

PEFT selects modules, such as model.layers.0.self_attn.q_proj, by the ends of their names or by regular expressions.

Most adapters belong to a module. Experts are bare parameters in these classes, one for all experts of a layer; PEFT
adds adapters to those by `target_parameters`. In a model with experts, the matrices of its other MLPs, and others whose
modules have the same name, are targeted as parameters, too, because PEFT takes their modules for experts.

The adapter of a parameter belongs to the module that holds it. If several parameters of a module have one, PEFT nests
them in the order of the parameters: that of the last one has the plain name, and the others are in `base_layer`.
"""

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

from jaxopt_llm.checkpoint.huggingface import safetensors
from jaxopt_llm.checkpoint.huggingface.family import Family
from jaxopt_llm.checkpoint.huggingface.tensor_layout import TensorLayout, TensorPiece, list_tensor_layouts
from jaxopt_llm.config import ModelConfig
from jaxopt_llm.core import hub
from jaxopt_llm.core.errors import InputError

FILE = "adapter_config.json"
OF_SCORES = "SEQ_CLS"  # type of the task of an adapter of a model with scores of documents
ROWS_ALONE = "TRAINABLE_TOKENS"  # type of an adapter that is only rows of tables
# Fields that do not affect what a saved adapter computes.
IGNORED_FIELDS = (
    *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "lora_dropout"),
    *("fan_in_fan_out", "megatron_core", "qalora_group_size", "runtime_config", "init_weights"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # for initialisation: see init_lora_weights
)
# Fields with a fixed set of supported values.
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA", ROWS_ALONE),
    "task_type": (None, "CAUSAL_LM", OF_SCORES),
    "bias": (None, "none"),
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal", "mica"),  # others also change the base
}
_MERGED = "merge the adapter with PEFT (merge_and_unload, then save_pretrained), and use the merged model"
_PLAIN = (
    "not supported; an adapter must be LoRA or DoRA of matrices, with modules_to_save and trainable_token_indices; "
    f"{_MERGED}"
)
ALL_LINEAR = "all-linear"


def _end_pattern(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _layer_pattern(pattern: str) -> str:
    return rf"(?:^|.*?\.){pattern}\.(?P<layer>\d+)\."


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _is_list_of(kind: type, value: Any) -> bool:
    return type(value) is list and all(type(each) is kind for each in value)


def _is_pattern(value: Any, expand: Callable[[str], str] = str) -> bool:
    try:
        return isinstance(value, str) and bool(re.compile(expand(value)))
    except (re.error, RecursionError):
        return False


def _maps_patterns_to(is_valid: Callable[[Any], bool], value: Any) -> bool:
    return type(value) is dict and all(_is_pattern(key, _end_pattern) and is_valid(value[key]) for key in value)


def _is_ids(value: Any) -> bool:
    return _is_list_of(int, value) and all(each >= 0 for each in value) and len({*value}) == len(value)


Check = tuple[str, Callable[[Any], bool]]  # description of the valid values of a field, and whether a value is one
RANK: Check = ("a whole number of at least 1", _is_rank)
ALPHA: Check = ("a number above 0", _is_alpha)
MODULES: Check = ("a list of names or a pattern", lambda value: _is_pattern(value) or _is_list_of(str, value))
NAMES: Check = ("a list of names", functools.partial(_is_list_of, str))
LAYERS: Check = ("a whole number or a list of them", lambda value: type(value) is int or _is_list_of(int, value))
LAYERS_PATTERN: Check = (
    "a pattern or a list of them",
    lambda value: all(_is_pattern(each, _layer_pattern) for each in (value if type(value) is list else [value])),
)
SWITCH: Check = ("true or false", lambda value: type(value) is bool)
IDS: Check = (
    "a list of different token ids, or a map from names to such lists",
    lambda value: (
        all(type(key) is str and _is_ids(value[key]) for key in value) if type(value) is dict else _is_ids(value)
    ),
)
RANKS: Check = (
    "a map from patterns to whole numbers of at least 1",
    functools.partial(_maps_patterns_to, _is_rank),
)
ALPHAS: Check = ("a map from patterns to numbers above 0", functools.partial(_maps_patterns_to, _is_alpha))


@dataclass(frozen=True)
class PeftConfig:
    """Fields that determine what an adapter computes, with PEFT's names and the checks of their values in a file."""

    r: Annotated[int, RANK]
    lora_alpha: Annotated[float, ALPHA]
    target_modules: Annotated[list[str] | str, MODULES] = field(default_factory=list)
    target_parameters: Annotated[list[str] | None, NAMES] = None
    exclude_modules: Annotated[list[str] | str | None, MODULES] = None
    layers_to_transform: Annotated[list[int] | int | None, LAYERS] = None
    layers_pattern: Annotated[list[str] | str | None, LAYERS_PATTERN] = None
    rank_pattern: Annotated[dict[str, int], RANKS] = field(default_factory=dict)
    alpha_pattern: Annotated[dict[str, float], ALPHAS] = field(default_factory=dict)
    use_rslora: Annotated[bool, SWITCH] = False
    use_dora: Annotated[bool, SWITCH] = False
    ensure_weight_tying: Annotated[bool, SWITCH] = False
    modules_to_save: Annotated[list[str] | None, NAMES] = None
    trainable_token_indices: Annotated[list[int] | dict[str, list[int]] | None, IDS] = None

    def rank(self, module: str) -> int:
        return _first_match(self.rank_pattern, module, self.r)

    def alpha(self, module: str) -> float:
        return _first_match(self.alpha_pattern, module, self.lora_alpha)

    def scale(self, module: str) -> float:
        """Return the factor of A·B: alpha / rank, or alpha / sqrt(rank) with rank stabilisation (rsLoRA)."""
        rank = self.rank(module)
        return self.alpha(module) / (math.sqrt(rank) if self.use_rslora else rank)

    def selects_parameter(self, name: str) -> bool:
        """Return whether a parameter, such as model.layers.0.mlp.experts.down_proj, has an adapter."""
        return any(f".{name}".endswith(f".{target}") for target in self.target_parameters or ())

    def selects(self, module: str, in_block: bool) -> bool:
        """Return whether a module has an adapter. in_block: whether it is in a block, as all-linear requires."""

        def matches_end(names: Collection[str]) -> bool:
            return any(f".{module}".endswith(f".{name}") for name in names)

        targets, excluded, layers = self.target_modules, self.exclude_modules, self.layers_to_transform
        if excluded and (re.fullmatch(excluded, module) if isinstance(excluded, str) else matches_end(excluded)):
            return False
        if isinstance(targets, str):
            return in_block if targets.lower() == ALL_LINEAR else re.fullmatch(targets, module) is not None
        if module in targets or not matches_end(targets) or layers is None or layers == []:
            return matches_end(targets)
        names = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern
        patterns = [_layer_pattern(each) for each in names or ()] or [r".*?\.[^.]*\.(?P<layer>\d+)\."]
        match = next((match for each in patterns if (match := re.match(each, module))), None)
        return match is not None and int(match["layer"]) in ([layers] if isinstance(layers, int) else layers)


def _first_match(patterns: dict[str, Any], module: str, default: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(_end_pattern(key), module)), default)


def find_endings(
    selected: Collection[str], names: Collection[str], separator: str = ".", whole_words: bool = True
) -> list[str]:
    """Return the shortest name ends, in whole words, that together match exactly the selected ones among all names.

    whole_words: whether an end matches only whole words of a name. Otherwise `norm` also matches input_layernorm.
    """
    before = separator if whole_words else ""
    others = [before + name for name in names if name not in selected]
    endings: dict[str, None] = {}
    for name in selected:
        words = name.split(separator)
        candidates = (separator.join(words[-count:]) for count in range(1, len(words) + 1))
        endings[next(each for each in candidates if not any(other.endswith(before + each) for other in others))] = None
    return list(endings)


# --- reading


def read_peft_config(folder: Path, scores: bool = True) -> PeftConfig:
    """Read the adapter_config.json of a folder.

    scores: whether the model has scores of documents.

    Raises:
        InputError: the folder has no LoRA adapter, or a field has a value that is not supported.
    """
    file, settings = folder / FILE, safetensors.read_json(folder, FILE, "PEFT adapter")
    for name, values in SUPPORTED_VALUES.items():
        value = settings.get(name)
        if not any(type(value) is type(each) and value == each for each in values):
            supported = ", ".join(repr(each) for each in values if each is not None)
            undo = "it changes the base: save with path_initial_model_for_weight_conversion, which undoes that"
            more = f"; {undo if name == 'init_lora_weights' else _MERGED}"
            raise InputError(f"{file}: {name}={value!r}: only {supported} is supported{more}")
    if settings.get("task_type") == OF_SCORES and not scores:
        raise InputError(
            f"{file}: task_type={OF_SCORES!r}: the adapter belongs to a model with scores of documents, and this model "
            "predicts tokens; set --model.scores in training, or merge the adapter with PEFT"
        )
    if settings["peft_type"] == ROWS_ALONE:
        settings = _describe_without_lora(settings)
    hints = get_type_hints(PeftConfig, include_extras=True)
    checks: dict[str, Check] = {name: hint.__metadata__[0] for name, hint in hints.items()}
    given = {name: value for name, value in settings.items() if value is not None and name not in SUPPORTED_VALUES}
    for name, value in given.items():
        if name not in (*checks, *IGNORED_FIELDS) and value not in (False, [], {}, ""):
            raise InputError(f"{file}: {name}={value!r}: {_PLAIN}")
    needed = None if given.get("target_parameters") else "target_modules"
    for name, (description, is_valid) in checks.items():
        if name in given and not is_valid(given[name]):
            raise InputError(f"{file}: {name}={given[name]!r}: must be {description}")
        if name not in given and (name in ("r", "lora_alpha") or name == needed):
            raise InputError(f"{file}: {name} is missing")
    return PeftConfig(**{name: value for name, value in given.items() if name in checks})


def _describe_without_lora(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an adapter that is only rows of tables, as a LoRA of no matrix with these rows."""
    given, ids = settings.get("target_modules"), settings.get("token_indices")
    targets = list(map(str, given if isinstance(given, list) else [given]))
    kept = {name: value for name, value in settings.items() if name not in ("target_modules", "token_indices")}
    return kept | {
        "r": 1,
        "lora_alpha": 1,
        "target_modules": [],
        "trainable_token_indices": dict.fromkeys(targets, ids),
    }


def describe_other_base(folder: Path, model: str) -> str:
    """Return a warning if the adapters of a folder were trained over another model; empty if not.

    Names are compared, because a folder of adapters does not identify the weights of its base.

    Args:
        folder: a folder that `read_peft_config` accepts.
        model: path or hub id of the model that the adapters are added to.
    """
    base = safetensors.read_json(folder, FILE, "PEFT adapter").get("base_model_name_or_path")
    if not isinstance(base, str) or hub.model_name(base).lower() == hub.model_name(model).lower():
        return ""
    return f"the adapters {folder} were trained over {base}, and the model is {model}; check that its weights are equal"


# --- writing


def write_peft_config(folder: Path, config: PeftConfig, input_first: bool, base: str, scores: bool) -> None:
    """Write the adapter_config.json of a folder.

    Args:
        folder: an existing folder.
        config: the fields that determine what the adapter computes.
        input_first: whether the matrices of the adapted modules are [in, out].
        base: the path or name under which PEFT finds the base model; empty: none.
        scores: whether the model has scores of documents.
    """
    content = {
        "peft_type": "LORA",
        "task_type": OF_SCORES if scores else "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "inference_mode": True,
        "bias": "none",
        "fan_in_fan_out": input_first,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        **asdict(config),
    }
    (folder / FILE).write_text(json.dumps(content, indent=2) + "\n")


PREFIX = "base_model.model."
HEAD = "lm_head"  # in every family
EMBEDDING = "non_layer/embedding/table"
MLP = "/mlp/"
EMBEDDING_TABLES = (EMBEDDING, "non_layer/positions/table")  # their modules look up rows; factors have other names

LINEAR_FACTORS = ("lora_A.weight", "lora_B.weight")  # [rank, in], [out, rank]; experts: [E * rank, in], [out, rank * E]
EMBEDDING_FACTORS = ("lora_embedding_B", "lora_embedding_A")  # [width, rank], [rank, rows]
MAGNITUDE = "lora_magnitude_vector"  # [out]
BASE = "base_layer.weight"  # the base model's table, which PEFT may save together with an adapter of it
KINDS = (*LINEAR_FACTORS, *EMBEDDING_FACTORS, MAGNITUDE, BASE)


class PeftModule(NamedTuple):
    """Module or parameter that can have an adapter.

    Attributes:
        name: its name, which PEFT compares with targets and patterns.
        layouts: of its weight; of stacked experts, one for each expert.
        is_embedding: whether it looks up rows of a table.
        is_parameter: whether PEFT targets it as a parameter.
        is_swapped: whether A belongs to its outputs, and B to its inputs.
    """

    name: str
    layouts: tuple[TensorLayout, ...]
    is_embedding: bool = False
    is_parameter: bool = False
    is_swapped: bool = False

    @property
    def layout(self) -> TensorLayout:
        return self.layouts[0]

    @property
    def experts(self) -> int:
        """The number of experts that it holds; 0 for a parameter without experts."""
        spec = self.layout.pieces[0].spec
        if spec.expert_dims:
            return math.prod(spec.shape[dim] for dim in spec.expert_dims)
        return len(self.layouts) if self.is_parameter and self.layout.is_expert else 0

    @property
    def inputs(self) -> int:
        return self.layout.pieces[0].spec.fan_in

    @property
    def outputs(self) -> int:
        return sum(piece.width for piece in self.layout.pieces)

    @property
    def in_block(self) -> bool:
        return self.layout.pieces[0].layer is not None

    def shapes(self, rank: int, dora: bool) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its adapter's tensors by kind."""
        if self.is_embedding:
            return {EMBEDDING_FACTORS[0]: (self.inputs, rank), EMBEDDING_FACTORS[1]: (rank, self.outputs)}
        rows = rank * max(1, self.experts)
        inputs, outputs = (self.outputs, self.inputs) if self.is_swapped else (self.inputs, self.outputs)
        factors = {LINEAR_FACTORS[0]: (rows, inputs), LINEAR_FACTORS[1]: (outputs, rows)}
        return factors | ({MAGNITUDE: (self.outputs,)} if dora else {})


def find_table(family: Family) -> str:
    """Return the module of the embedding table."""
    return next(name for name, path in family.names.items() if path == EMBEDDING).removesuffix(".weight")


def find_modules(family: Family, config: ModelConfig) -> dict[str, PeftModule]:
    """Return what can have an adapter that PEFT adds to the classes of transformers 5, by name, in layer order.

    Routers are not among them, because ours have no adapters.
    """
    modules, layouts = {}, list_tensor_layouts(family, config)
    of_mlps = _name_projections(layouts) if config.moe.experts else set()
    renamed = {
        published.format(layer): name.format(layer)
        for layer, (name, published) in itertools.product(range(config.layers), family.in_memory_names.items())
        if published.count("{}") == 1
    }
    for tensor_name, layout in layouts.items():
        name, first = tensor_name.removesuffix(".weight"), layout.pieces[0]
        if not first.spec.contracting or layout.is_expert or is_router(layout):
            continue
        if first.spec.expert_dims:
            name = renamed.get(tensor_name, tensor_name)
            modules[name] = PeftModule(name, (layout,), is_parameter=True, is_swapped=family.swaps_expert_factors)
            continue
        if name.rpartition(".")[2] in of_mlps:
            modules[tensor_name] = PeftModule(tensor_name, (layout,), is_parameter=True)
            continue
        modules[name] = PeftModule(name, (layout,), first.path in EMBEDDING_TABLES)
        if first.path == EMBEDDING and config.table_is_head:
            modules[HEAD] = PeftModule(HEAD, (layout,))
    for layer, (in_memory, published) in itertools.product(range(config.layers), family.in_memory_names.items()):
        parts = [name for name in published.split() if name.count("{}") == 2]
        if not parts or parts[0].format(layer, 0) not in layouts:
            continue
        experts = range(config.moe.experts)
        joined = tuple(_join(layouts[part.format(layer, expert)] for part in parts) for expert in experts)
        modules[in_memory.format(layer)] = PeftModule(in_memory.format(layer), joined, is_parameter=True)
    return modules


def find_separate_modules(family: Family, config: ModelConfig) -> dict[str, PeftModule]:
    """Return the modules of a model with experts in the classes of transformers 4: each matrix of its MLPs is one."""
    layouts = list_tensor_layouts(family, config)
    of_mlps = _name_projections(layouts) if config.moe.experts else set()
    return {
        (module := name.removesuffix(".weight")): PeftModule(module, (layout,))
        for name, layout in layouts.items()
        if name.endswith(".weight") and name.split(".")[-2] in of_mlps and not layout.pieces[0].spec.expert_dims
    }


def _name_projections(layouts: Mapping[str, TensorLayout]) -> set[str]:
    """Return the last words of the names of all modules that are a matrix of an MLP."""
    return {
        name.removesuffix(".weight").rpartition(".")[2]
        for name, layout in layouts.items()
        if MLP in layout.pieces[0].path and layout.pieces[0].spec.contracting and not is_router(layout)
    }


def is_router(layout: TensorLayout) -> bool:
    return layout.pieces[0].path.endswith(("/router", "/router_of_shared"))


def _join(layouts: Iterable[TensorLayout]) -> TensorLayout:
    """Return the layout of several matrices next to each other along their outputs."""
    pieces: list[TensorPiece] = []
    for layout in layouts:
        (piece,) = layout.pieces
        pieces.append(piece._replace(begin=sum(each.width for each in pieces)))
    return TensorLayout(tuple(pieces), input_first=False)


def name_stems(modules: Mapping[str, PeftModule]) -> dict[str, str]:
    """Return for each module that has an adapter the start of its tensors' names, without `PREFIX`."""
    stems, inside = {}, dict[str, int]()
    for name, module in reversed([*modules.items()]):
        owner = name.rpartition(".")[0] if module.is_parameter else name
        depth = inside[owner] = inside.get(owner, -1) + 1
        stems[name] = owner + ".base_layer" * depth
    return stems
