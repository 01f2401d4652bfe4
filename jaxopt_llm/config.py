"""TrainConfig: the whole of a run, composed of the dataclasses that the rooms own.

A recipe is a Python file with `get_config() -> TrainConfig`; every field can be overridden on the command line.
"""

import contextlib
import dataclasses
import difflib
import functools
import io
import json
import os
import re
import runpy
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxopt_llm.checkpoint import huggingface, peft
from jaxopt_llm.checkpoint.peft import Adapter
from jaxopt_llm.checkpoint.policy import CheckpointConfig
from jaxopt_llm.checkpoint.weights import is_run
from jaxopt_llm.data.config import DataConfig
from jaxopt_llm.errors import InputError
from jaxopt_llm.execution.schedules import PipelineConfig
from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.observe.metrics import LoggingConfig
from jaxopt_llm.observe.profile import ProfileConfig
from jaxopt_llm.parallel.launchers import DistributedConfig
from jaxopt_llm.parallel.mesh import MeshConfig
from jaxopt_llm.parallel.offload import OffloadConfig
from jaxopt_llm.parallel.precision import PrecisionConfig
from jaxopt_llm.parallel.sharding import ShardingConfig
from jaxopt_llm.parallel.xla_options import XlaConfig
from jaxopt_llm.training.evaluation import EvaluationConfig
from jaxopt_llm.training.lora import LoraConfig
from jaxopt_llm.training.optimizer import OptimizerConfig
from jaxopt_llm.training.schedule import ScheduleConfig
from jaxopt_llm.training.step import TrainingConfig

UNIONS = (typing.Union, types.UnionType)  # as Python up to 3.13 tells `A | B`, by what A and B are
RECIPES = Path(__file__).parent.parent / "configs"


@dataclass(frozen=True)
class RunConfig:
    directory: str = "runs/default"
    """where config.json, metrics.jsonl and checkpoints/ go; started again, the run continues from there"""
    seed: int = 0
    """of initial values and of the order of the data"""
    allow_change: tuple[str, ...] = ()
    """fields that this resume may change although they alter what is learnt, as in optimizer.learning_rate"""
    deterministic: bool = False
    """on GPUs: the same bits every time, at some speed; the choices of autotuning are kept in the run directory"""


@dataclass(frozen=True)
class TrainConfig:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    remat: RematConfig = field(default_factory=RematConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    xla: XlaConfig = field(default_factory=XlaConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)


def field_names(config_type: Any, prefix: str = "") -> list[str]:
    """Dotted names of every field: training.steps, ..."""
    hints = typing.get_type_hints(config_type)
    names = []
    for each in dataclasses.fields(config_type):
        hint, name = hints[each.name], f"{prefix}{each.name}"
        names += field_names(hint, f"{name}.") if dataclasses.is_dataclass(hint) else [name]
    return names


FIELDS = field_names(TrainConfig)

# What a resumed run may change: how it is placed, logged, saved and measured, and how long it is.
RESUME_MAY_CHANGE = (
    "run.directory",
    "run.allow_change",
    "run.deterministic",
    "data.paths",  # where it lies; that it is the same corpus is looked at
    "data.stall_seconds",
    "model.pretrained",  # where it lies; what is frozen of it is looked at
    "lora.pretrained",
    "training.steps",
    "training.accumulation",
    "training.loss_chunk",
    "training.attention",
    "training.expert_products",
    "training.skip_limit",
    "optimizer.in_backward",
    *(f"{section}.*" for section in ("mesh", "distributed", "sharding", "pipeline", "remat", "offload", "xla")),
    *(f"{section}.*" for section in ("checkpoint", "evaluation", "logging", "profile")),
)

# What shapes the arrays of a checkpoint: no resume can change it, whoever allows it.
CHECKPOINT_IS_SHAPED_BY = (
    *(f"model.{name}" for name in ("vocabulary_size", "width", "layers", "heads", "kv_heads", "head_dim", "mlp_width")),
    *("model.pattern", "model.positions", "model.max_positions", "model.norm", "model.norm_placement"),
    *("model.experts", "model.expert_width", "model.shared_expert_width", "model.dense_layers", "model.expert_every"),
    "model.router_bias",
    *("model.latent_rank", "model.query_rank", "model.rotary_head_dim", "model.value_head_dim"),
    *("model.qk_norm", "model.biases", "model.mlp", "model.tied_head", "lora.rank", "lora.targets", "lora.base"),
    *("lora.double_quantisation", "lora.dora", "training.trainable", "model.last_layers"),
    *("optimizer.name", "optimizer.state_dtype", "precision.loss_scaling"),
)


def load(path: str) -> TrainConfig:
    """A recipe by path, or by its name in configs/."""
    file = next((place for place in (Path(path), RECIPES / path) if place.is_file()), None)
    if file is None:
        names = sorted(recipe.name for recipe in RECIPES.glob("*.py"))
        raise InputError(f"--config {path}: no such file, here or in configs/ (which has {', '.join(names)})")
    try:
        if file.suffix == ".json":  # as --print-config writes it, and each run directory has it
            return from_json(file.read_text())
        get_config = runpy.run_path(str(file)).get("get_config")
        if get_config is None:
            raise InputError(f"--config {file}: must define get_config() -> TrainConfig")
        config = get_config()
    except (Exception, SystemExit) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"--config {file}: {type(error).__name__}: {error}") from error
    if not isinstance(config, TrainConfig):
        raise InputError(f"--config {file}: get_config() returned {type(config).__name__}, not TrainConfig")
    wrong = wrong_types(config)
    if wrong:
        raise InputError(f"--config {file}: {'; '.join(wrong)}")
    return config


def parse(arguments: list[str], program: str) -> TrainConfig:
    """The configuration that a command line asks for: `--config FILE [--section.field VALUE ...]`.

    Prints help and exits 0 for --help. Raises InputError, one line, for anything else that cannot be taken.
    """
    path, overrides = _split_config(arguments)
    asks_help = "--help" in overrides or "-h" in overrides
    if path is None and not asks_help:
        raise InputError(f"which recipe? try: {program} --config quickstart.py")
    return with_pretrained(override(TrainConfig() if path is None else load(path), overrides, program))


def with_pretrained(config: TrainConfig) -> TrainConfig:
    """The configuration with the model that model.pretrained names, and the adapters of that of
    lora.pretrained. Raises InputError where it sets a field of theirs to something else."""
    if config.model.pretrained:
        # Absolute: commands that read this run's directory may be started elsewhere.
        path = Path(os.path.abspath(config.model.pretrained))
        model = pretrained_model(path)
        ours = ("pretrained", "last_layers", "balance_loss", "router_z_loss", "router_bias_rate", "expert_capacity")
        there = {each.name: getattr(model, each.name) for each in dataclasses.fields(model) if each.name not in ours}
        settled = _settled("model", config.model, there)
        config = dataclasses.replace(config, model=dataclasses.replace(settled, pretrained=str(path)))
    if config.lora.pretrained and not config.model.problems():
        lora = dataclasses.replace(config.lora, pretrained=os.path.abspath(config.lora.pretrained))
        config = dataclasses.replace(config, lora=lora)
        config = dataclasses.replace(config, lora=_settled("lora", lora, open_adapter(config).lora))
    return config


def pretrained_model(path: Path) -> ModelConfig:
    """Of a Hugging Face folder, or of a run directory of ours. Raises InputError for what is neither."""
    if not is_run(path):
        return huggingface.read_config(path)[1]
    config = of_run(path, "model.pretrained=")
    if config.lora.rank:
        raise InputError(
            f"model.pretrained={path}: it is a run of adapters; fold them into their base first, as in: python -m "
            f"jaxopt_llm.convert merge --checkpoint {path} --to FOLDER"
        )
    return config.model


def of_run(directory: Path, named: str) -> TrainConfig:
    """What a run directory was trained with. named: what names it, for the line that says that it is none."""
    try:
        return from_json((directory / "config.json").read_text())
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{named}{directory}: not a run directory ({error})") from error


def _settled(name: str, section: Any, there: dict[str, Any]) -> Any:
    """A section with the fields that its folder has."""
    found = [
        f"{name}.{field_name}={ours} (there it is {theirs})"
        for field_name, theirs in there.items()
        if (ours := getattr(section, field_name)) not in (getattr(type(section), field_name), theirs)
    ]
    if found:
        whose = "model's" if name == "model" else "adapter's"
        raise InputError(
            f"{name}.pretrained={section.pretrained} sets the {whose} fields itself: leave out {', '.join(found)}"
        )
    return dataclasses.replace(section, **there)


def source(config: TrainConfig) -> Path | None:
    """The Hugging Face folder that a model came from, by way of other runs maybe; None where it came from none, or
    that is no longer there."""
    path, seen = config.model.pretrained, set[str]()
    while path and is_run(Path(path)) and path not in seen:
        seen.add(path)
        path = of_run(Path(path), "model.pretrained=").model.pretrained
    return Path(path) if path and Path(path).is_dir() else None


def open_adapter(config: TrainConfig) -> Adapter:
    """What lora.pretrained names."""
    path = Path(config.lora.pretrained)
    if is_run(path):
        raise InputError(
            f"lora.pretrained={path}: it is a run; write its adapters first, as in: python -m jaxopt_llm.convert "
            f"export --checkpoint {path} --to FOLDER"
        )
    family = huggingface.family_of(config.model, source(config))
    return peft.open_adapter(path, family, config.model)


def override(config: TrainConfig, overrides: list[str], program: str) -> TrainConfig:
    """A configuration with the fields `--section.field VALUE ...` replaced. Exits and raises as `parse` does."""
    _refuse_unknown(overrides)
    if not overrides:
        return config
    import tyro  # here, because a recipe by itself needs no command line: see scripts/gpu_check

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                TrainConfig,
                args=overrides,
                default=config,
                prog=program,
                description=f"{program} --config FILE [--section.field VALUE ...]\n\n"
                "FILE is a path, or a name looked up in configs/. Its values are the defaults below. With "
                "--print-config the whole configuration is checked and printed as JSON, and nothing is run.",
                config=(tyro.conf.FlagConversionOff,),
            )
    except SystemExit as stop:
        if stop.code == 0:
            raise
        hint = "; values of one field are separated by spaces" * any("," in each for each in overrides)
        raise InputError(_first_paragraph(said.getvalue()) + hint) from stop


def get(config: TrainConfig, name: str) -> Any:
    """The value of a field by its dotted name."""
    return functools.reduce(getattr, name.split("."), config)


def changed(config: TrainConfig, settings: dict[str, Any]) -> TrainConfig:
    """With these fields in place of its own, by dotted name."""
    for name, value in settings.items():
        section, field_name = name.split(".")
        part = dataclasses.replace(getattr(config, section), **{field_name: value})
        config = dataclasses.replace(config, **{section: part})
    return config


def shared(config: TrainConfig) -> dict[str, Any]:
    """What all processes of a job must have alike: every field by its name, but for the process's own number."""
    return {name: get(config, name) for name in FIELDS if name != "distributed.process_id"}


def differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    """What a resume may not change and does."""
    found = []
    for name in FIELDS:
        allowed = {name, name.split(".")[0] + ".*"} & {*RESUME_MAY_CHANGE, *underscored(new.run.allow_change)}
        if not allowed and get(old, name) != get(new, name):
            found.append(f"{name} was {get(old, name)} and is {get(new, name)}")
    return found


def underscored(names: tuple[str, ...]) -> list[str]:
    """Names of fields, which may be spelt with dashes, as flags are."""
    return [name.replace("-", "_") for name in names]


def to_json(config: TrainConfig) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2)


def from_json(text: str) -> TrainConfig:
    """The inverse of `to_json`. Raises TypeError for what is no configuration of this version."""

    def build(config_type: Any, values: Any) -> Any:
        hints = typing.get_type_hints(config_type)
        if not isinstance(values, dict):
            raise TypeError(f"{values!r} is no {config_type.__name__}")
        return config_type(
            **{
                name: build(hints[name], value)
                if dataclasses.is_dataclass(hints.get(name))
                else tuple(value)
                if isinstance(value, list)
                else value
                for name, value in values.items()
            }
        )

    config: TrainConfig = build(TrainConfig, json.loads(text))
    wrong = wrong_types(config)
    if wrong:
        raise TypeError("; ".join(wrong))
    return config


def wrong_types(config: Any, prefix: str = "") -> list[str]:
    """Fields whose value is not of the type that they declare: a recipe is Python, which checks none."""
    found = []
    for name, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(hint):
            is_one = isinstance(value, hint)  # type: ignore[arg-type]
            found += wrong_types(value, f"{name}.") if is_one else [f"{name}={value!r}: must be a {hint.__name__}"]  # type: ignore[union-attr]
        elif not _is_a(value, hint):
            found.append(f"{prefix}{name}={value!r}: must be {_described(hint)}")
    return found


def _is_a(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) in UNIONS:
        return any(_is_a(value, each) for each in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_is_a(each, typing.get_args(hint)[0]) for each in value)
    if hint is int:
        return type(value) is int and abs(value) < 2**31  # what device programs count with
    if hint is float:  # what device programs compute with: 1e-320 would be 0 there
        return type(value) in (int, float) and (value == 0 or 2.0**-126 <= abs(value) < 2.0**128)
    return type(value) is hint


def _described(hint: Any) -> str:
    if typing.get_origin(hint) in UNIONS:
        return ", or ".join(map(_described, typing.get_args(hint)))
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return f"a tuple, each {_described(typing.get_args(hint)[0])}"
    return {int: "a whole number below 2**31", float: "a number that float32 has", bool: "True or False", str: "text"}[
        hint
    ]


def _split_config(arguments: list[str]) -> tuple[str | None, list[str]]:
    path, rest = None, []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--config":
            path = next(remaining, None)
            if path is None:
                raise InputError("--config: which file?")
        elif argument.startswith("--config="):
            path = argument.removeprefix("--config=")
        else:
            rest.append(argument)
    return path, rest


def _refuse_unknown(overrides: list[str]) -> None:
    known = [f"--{name}" for name in FIELDS]
    for argument in overrides:
        name = argument.split("=")[0].replace("-", "_").replace("__", "--", 1)
        if argument.startswith("--") and argument != "--help" and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "--help lists every field"
            raise InputError(f"{argument.split('=')[0]}: no such field; {hint}")


def _first_paragraph(box: str) -> str:
    """tyro's message without its title, box, rulers and advice. Where the terminal is ASCII, so are they."""
    lines = [line.strip("│╭╮╰╯ \n") for line in box.splitlines()[1:]]
    paragraphs = re.split(r"^(?:─+|-{3,})$", "\n".join(lines), flags=re.MULTILINE)
    first = next(each for each in paragraphs if each.strip())
    return " ".join(line for line in first.splitlines() if line)
