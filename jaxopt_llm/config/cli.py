"""Command line of a configuration: `--config FILE [--section.field VALUE ...]`.

FILE is a Python file that defines `get_config() -> Config`, or the config.json of a run. Every setting has a flag. A
file that defines `model`, `loss` and `data` trains that model: see engine/fit.py.
"""

import argparse
import contextlib
import dataclasses
import difflib
import io
import os
import re
import runpy
import sys
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxopt_llm.config import fields
from jaxopt_llm.config import unread as unread_settings
from jaxopt_llm.config.data import TEMPLATE_FILE, TOKENIZER_FOLDER
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.config.run import Config
from jaxopt_llm.config.training import choose_accumulation
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import ArgumentParser, InputError, describe_error, report_error

_PACKAGE = Path(__file__).parent.parent
# The recipes of this package. A wheel has them in the package; a clone has them next to it.
RECIPES = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"

OWN_MODEL = {"model", "loss"}  # names that make a recipe one of a model of its own

# Settings by the names that other trainers and papers use; the names that are ours are found without this table.
KNOWN_AS = {
    "training.epochs": ("num_train_epochs", "num_epochs", "n_epochs"),
    "training.steps": ("max_steps", "train_steps", "num_steps", "train_iters", "iterations"),
    "training.batch_size": ("global_batch_size", "train_batch_size", "bs"),
    "training.sequence_length": (
        "seq_len",
        "seq_length",
        "max_seq_len",
        "max_seq_length",
        "sequence_len",
        "max_length",
    ),
    "training.accumulation": ("gradient_accumulation_steps", "grad_accum", "microbatches", "num_microbatches"),
    "optimizer.learning_rate": ("lr", "peak_lr", "max_lr"),
    "optimizer.weight_decay": ("wd",),
    "optimizer.clip_norm": ("clip_grad", "grad_clip", "max_grad_norm", "max_norm", "gradient_clipping"),
    "optimizer.name": ("optim",),
    "schedule.warmup_steps": ("warmup", "warmup_iters", "lr_warmup_steps", "warmup_ratio"),
    "schedule.kind": ("lr_scheduler", "lr_scheduler_type", "scheduler", "lr_decay_style"),
    "lora.rank": ("r", "lora_r", "lora_rank"),
    "lora.alpha": ("lora_alpha",),
    "lora.targets": ("target_modules", "lora_target_modules"),
    "lora.dropout": ("lora_dropout",),
    "model.pretrained": ("model_name_or_path", "base_model", "checkpoint", "load"),
    "model.width": ("hidden_size", "d_model", "dim", "n_embd"),
    "model.layers": ("num_layers", "num_hidden_layers", "n_layers", "n_layer"),
    "model.heads": ("num_heads", "num_attention_heads", "n_heads", "n_head"),
    "model.kv_heads": ("num_key_value_heads", "n_kv_heads", "num_query_groups"),
    "model.mlp_width": ("intermediate_size", "ffn_hidden_size", "d_ff"),
    "data.paths": ("dataset", "datasets", "data_path", "train_data", "train_file", "data_files", "dataset_path"),
    "data.tokenizer": ("tokenizer_path", "tokenizer_name", "tokenizer_model"),
    "run.directory": ("output_dir", "out_dir", "save", "save_dir", "run_dir"),
    "run.seed": ("random_seed",),
    "checkpoint.every": ("save_steps", "save_interval", "checkpoint_interval"),
    "evaluation.every": ("eval_steps", "eval_interval"),
    "evaluation.patience": ("early_stopping_patience", "early_stopping"),
    "logging.every": ("logging_steps", "log_interval", "log_every"),
    "logging.wandb_project": ("wandb", "report_to"),
    "mesh.tensor": ("tp", "tensor_parallel", "tensor_model_parallel_size", "tensor_parallel_degree"),
    "mesh.pipeline": ("pp", "pipeline_parallel", "pipeline_model_parallel_size", "pipeline_parallel_degree"),
    "mesh.context": ("cp", "context_parallel", "context_parallel_size", "sequence_parallel_degree"),
    "mesh.expert": ("ep", "expert_parallel", "expert_model_parallel_size"),
    "mesh.fsdp": ("fsdp_size", "dp_shard", "data_parallel_shard_degree"),
    "mesh.data": ("dp", "data_parallel", "dp_replicate", "data_parallel_replicate_degree"),
    "sharding.zero_stage": ("zero", "deepspeed", "stage"),
    "precision.compute_dtype": ("dtype", "bf16", "fp16", "mixed_precision", "torch_dtype"),
    "remat.policy": ("gradient_checkpointing", "activation_checkpointing", "recompute_activations", "ac_mode"),
    "training.attention": ("flash_attention", "use_flash_attn", "attn_implementation", "attention_backend"),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Recipe as it was read.

    names: all names that the file defines, without modules; empty for JSON.
    flags: settings that the command line gives.
    """

    config: Config
    path: Path
    names: Mapping[str, Any]
    flags: frozenset[str] = frozenset()

    @property
    def has_model(self) -> bool:
        """True if the recipe trains a model of its own, and not the decoder of this package."""
        return self.names.keys() >= OWN_MODEL


def load_recipe(path: str) -> Config:
    """Load a recipe of the decoder.

    Raises:
        InputError: see `run_recipe`; or the recipe has a model of its own.
    """
    return _read_decoder(run_recipe(path))


def _read_decoder(recipe: Recipe) -> Config:
    if recipe.has_model:
        raise InputError(
            f"--config {recipe.path}: it defines a model of its own, which only the commands train and plan (without "
            "--search) take"
        )
    return recipe.config


def run_recipe(path: str) -> Recipe:
    """Run a recipe by its path, or by its name in ./configs or among the recipes of this package.

    `.py` may be left out.

    Raises:
        InputError: the file does not exist, fails to run, or does not return a valid Config.
    """
    file = _find_recipe(path)
    names: dict[str, Any] = {}
    try:
        if file.suffix == ".json":  # --print-config writes this format, and every run directory has such a file
            return Recipe(fields.from_json(json_files.read_bytes(file)), file, names)
        # Absolute, because a recipe may derive paths from its __file__, and other commands may start elsewhere.
        found = runpy.run_path(str(file.absolute()))
        names = {name: value for name, value in found.items() if not isinstance(value, types.ModuleType)}
        if callable(names.get("model")) and "data" in names and "loss" not in names:
            raise InputError(f"--config {file}: it defines a model and data, and lacks a loss: loss(model, batch)")
        get_config = names.get("get_config", Config if names.keys() >= OWN_MODEL else None)
        if get_config is None:
            raise InputError(f"--config {file}: must define get_config() -> Config, or model, loss and data")
        config = get_config()
    except (Exception, SystemExit) as error:
        line = _find_line(error, file)
        if isinstance(error, InputError) and not line:
            raise
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        raise InputError(f"--config {file}{line}: {kind}{describe_error(error)}") from error
    if not isinstance(config, Config):
        raise InputError(f"--config {file}: get_config() returned {type(config).__name__}, not Config")
    if wrong := fields.wrong_types(config):
        raise InputError(f"--config {file}: {'; '.join(wrong)}")
    return Recipe(config, file, names)


def _find_recipe(path: str) -> Path:
    folders = (Path(), Path("configs"), RECIPES)
    found = next(filter(Path.is_file, (folder / name for folder in folders for name in (path, f"{path}.py"))), None)
    if found is not None:
        return found
    names = [str(recipe) for recipe in sorted(Path("configs").glob("*.py"))]
    names += sorted(recipe.name for recipe in RECIPES.glob("*.py"))
    near = difflib.get_close_matches(path, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the recipes are {', '.join(names)}"
    raise InputError(f"--config {path}: no such file, here, in ./configs or among the recipes; {hint}")


def _find_line(error: BaseException, recipe: Path) -> str:
    """Return ", line N" for the line of a recipe that caused an error, or "" if none did. Syntax errors name theirs."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(recipe.absolute())]
    return f", line {lines[-1]}" if lines else ""


def parse_config(arguments: list[str], program: str) -> Config:
    """Return the configuration of a command line for the decoder: `--config FILE [--section.field VALUE ...]`.

    Prints the help and exits with 0 for --help.

    Raises:
        InputError: the command line is invalid. The message is one line.
    """
    return _read_decoder(parse_recipe(arguments, program))


def parse_recipe(arguments: list[str], program: str) -> Recipe:
    """Return the recipe of a command line, as `parse_config` does, which may have a model of its own."""
    parser = ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--config", nargs="?", const="")
    known, overrides = parser.parse_known_args(arguments)
    path = known.config
    if path == "":
        raise InputError("--config: give the path of a recipe after it")
    if path is None and not asks_for_help(arguments):
        raise InputError(f"no recipe is given; try: {program} --config quickstart.py")
    recipe = Recipe(Config(), Path(), {}) if path is None else run_recipe(path)
    flags = frozenset(map(_name_flag, overrides)) & {*fields.FIELDS}
    config = _follow_batch_size(override_config(recipe.config, overrides, program), recipe.config, flags)
    return dataclasses.replace(recipe, config=config, flags=flags)


def _follow_batch_size(config: Config, recipe: Config, flags: frozenset[str]) -> Config:
    """Return the configuration with as many rows at a time as the recipe has, if only the batch size is given.

    A recipe without accumulation does not limit the rows at a time. With a mesh of the user or of the recipe, the
    accumulation belongs to the mesh, and stays.
    """
    training, shards = recipe.training, config.mesh.batch_shards
    follows = "training.batch_size" in flags and "training.accumulation" not in flags and training.accumulation > 1
    if not follows or config.mesh.fsdp != AUTO or shards < 1 or config.training.batch_size % shards:
        return config
    most = training.batch_size // (training.accumulation * recipe.mesh.batch_shards)
    least = min(training.accumulation, config.mesh.pipeline)
    count = choose_accumulation(config.training.batch_size // shards, most, least)
    return fields.replace_fields(config, {"training.accumulation": max(count, 1)})


def asks_for_help(arguments: list[str]) -> bool:
    """Return whether a command line has --help or -h."""
    return "--help" in arguments or "-h" in arguments


def answer_help(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Print the help of a command and exit, if its arguments ask for it."""
    if asks_for_help(arguments):
        try:
            parser.parse_known_args(arguments)
        except InputError as error:
            sys.exit(report_error(error))


def print_help(arguments: list[str], program: str) -> int:
    """Print every flag, with the values of the recipe of `--config` as defaults."""
    with contextlib.suppress(SystemExit):  # the parser's own end after it has printed the help
        parse_recipe(arguments, program)
    return 0


def load_run_config(directory: Path, prefix: str) -> Config:
    """Load the configuration that a run directory was trained with, which names its own copies of the tokenizer.

    prefix: text before the path in the error message, such as "--checkpoint " or "model.pretrained=".

    Raises:
        InputError: the directory is not a run directory.
    """
    try:
        config = fields.from_json(json_files.read_bytes(directory / "config.json"))
    except (InputError, OSError, ValueError, TypeError) as error:
        raise InputError(f"{prefix}{directory}: not a run directory ({explain_no_run(directory, error)})") from error
    # The files that the user named may have moved or changed since.
    kept = {"tokenizer": directory / TOKENIZER_FOLDER, "chat_template": directory / TEMPLATE_FILE}
    found = {f"data.{name}": os.path.abspath(path) for name, path in kept.items() if path.exists()}
    return fields.replace_fields(config, found)


def explain_no_run(directory: Path, error: BaseException) -> str:
    """Return why a directory is not a run directory, or which of the runs in it the user may mean."""
    inside = min((file.parent for file in directory.glob("*/corpus.json")), default=None)
    return f"it holds runs: name one of them, such as {inside}" if inside else describe_error(error)


def override_config(config: Config, overrides: list[str], program: str, own: Sequence[str] = ()) -> Config:
    """Return the configuration with the fields `--section.field VALUE ...` replaced.

    Prints the help and exits with 0 for --help.

    own: names of other flags of the command, which a message may propose.

    Raises:
        InputError: a flag or a value is invalid. The message is one line.
    """
    _refuse_unknown(overrides, own)
    if not overrides:
        return config
    given = set(map(_name_flag, overrides))
    either = {"training.steps", "training.epochs"}  # a flag for one of them replaces the recipe's value of the other
    if len(given & either) == 1:
        config = fields.replace_fields(config, dict.fromkeys(either - given, 0))
    import tyro  # imported here, because loading a recipe does not need it: see scripts/gpu_check

    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            changed = tyro.cli(
                Config,
                args=overrides,
                default=config,
                prog=program,
                description=f"{program} --config FILE [--section.field VALUE ...]\n\n"
                "FILE is a path, or the name of a recipe in ./configs or of this package. Its values are the defaults "
                "below. With --print-config, the command checks the whole configuration, prints it as JSON and stops.",
                config=(tyro.conf.FlagConversionOff,),
            )
        return _leave_out_unread(changed, config, given)
    except SystemExit as stop:
        if stop.code == 0:
            raise
        hint = "; separate the values of one field by spaces" * any("," in argument for argument in overrides)
        raise InputError(_describe_value(_first_paragraph(errors.getvalue()), overrides) + hint) from stop


def _leave_out_unread(config: Config, recipe: Config, given: set[str]) -> Config:
    """Return the configuration in which settings that a flag made ineffective have their defaults.

    The user of a recipe did not give them, and is not told that they do nothing.

    given: names of the settings that have a flag.
    """
    if config.model.find_out_of_range():  # the checks, which follow, refuse such a number of layers
        return config
    unread = unread_settings.find_without_effect(config).keys() - unread_settings.find_without_effect(recipe).keys()
    defaults = Config()
    return fields.replace_fields(config, {name: fields.get_field(defaults, name) for name in unread - given})


def _refuse_unknown(overrides: list[str], own: Sequence[str]) -> None:
    for argument in overrides:
        flag, name = argument.split("=")[0], _name_flag(argument)
        if argument.startswith("--") and flag != "--help" and name not in fields.FIELDS:
            near = difflib.get_close_matches(name, own, n=1, cutoff=0.8) or find_settings(name)
            hint = f"did you mean {' or '.join(f'--{each}' for each in near)}?" if near else "--help lists all fields"
            raise InputError(f"{flag}: no such field; {hint}")


def _name_flag(argument: str) -> str:
    """Return the name of a setting as its flag gives it, with or without a value."""
    return argument.split("=")[0].removeprefix("--").replace("-", "_")


def find_settings(name: str) -> list[str]:
    """Return the settings that an unknown name may mean: by a name in KNOWN_AS, the last part or the spelling."""
    return find_namesakes(name) or difflib.get_close_matches(name, fields.FIELDS, n=1, cutoff=0.5)


def find_namesakes(name: str) -> list[str]:
    """Return the settings that a name means by a name in KNOWN_AS or by the last part, if these are few."""
    last = name.rpartition(".")[2].lower()
    known = [setting for setting, names in KNOWN_AS.items() if last in names]
    same = [setting for setting in fields.FIELDS if setting.rpartition(".")[2] == last]
    return known or (same if len(same) <= 6 else [])


def _describe_value(message: str, overrides: list[str]) -> str:
    """Return tyro's message about a value with the values that are allowed, in words and in the order of their type."""
    found = re.match(r"Error parsing (--[\w.-]+): |invalid choice .* for argument '(--[\w.-]+)'", message)
    if found is None:
        return message
    flag = found[1] or found[2]
    given: list[str] = []
    is_given = False
    for argument in overrides:
        name, _, value = argument.partition("=")
        if name.startswith("--"):
            is_given, argument = name.replace("_", "-") == flag, value
        if is_given and argument:
            given.append(argument)
    hint = next(hint for name, hint, _ in fields.walk_fields(Config) if f"--{name.replace('_', '-')}" == flag)
    return f"{flag} {' '.join(given)}: must be {fields.describe_type(hint, 'values')}"


def _first_paragraph(box: str) -> str:
    """Return tyro's message without its title, box, rulers and advice, drawn in Unicode or in ASCII."""
    lines = [line.strip("│╭╮╰╯ \n") for line in box.splitlines()[1:]]
    paragraphs = re.split(r"^(?:─+|-{3,})$", "\n".join(lines), flags=re.MULTILINE)
    first = next(paragraph for paragraph in paragraphs if paragraph.strip())
    return " ".join(line for line in first.splitlines() if line)
