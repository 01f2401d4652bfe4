"""Flags of the commands that load a model. This module does not import JAX, so that --help is immediate."""

import argparse
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from jaxopt_llm.config import ModelConfig
from jaxopt_llm.config.data import find_argument_problems
from jaxopt_llm.core.errors import InputError, describe_install

MAX_TOKENS = 100_000  # of a text; the KV cache holds all of them
DEFAULT_CONTEXT = 4096  # tokens of a conversation, or of a request to the server

Step = int | Literal["best"] | None  # checkpoint of a run: of a step, with the lowest held-out loss, or the newest

# Flags in place of settings, for messages.
OWN_FLAGS = {
    "lora.base": "--quantise",
    "model.family": "--family",
    "precision.outlier_threshold": "--outlier-threshold",
}
TOKENIZER_FLAGS = {
    "data.tokenizer": "--tokenizer",
    "data.chat_template": "--chat-template",
    "data.template_arguments": "--template-arguments",
}


@dataclass(frozen=True)
class Quantisation:
    """Format of the matrices of the blocks, and the outlier threshold of their products (PrecisionConfig); 0: none."""

    base: Literal["int8", "nf4"]
    outlier_threshold: float = 0.0


def add_model_flags(parser: argparse.ArgumentParser, named_adapters: bool = False) -> None:
    """Add the flags that name the model of a command.

    named_adapters: whether the command takes several adapters, with names.
    """
    models = "training run, or folder or hub id of a Hugging Face model"
    adapters = "PEFT folder or hub id of LoRA adapters of the model"
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help=models)
    add_step_flag(parser)
    if named_adapters:
        adapters += ", and the name by which requests select them; can be given several times"
        add_named = functools.partial(parser.add_argument, action="append", default=[], type=_parse_named)
        add_named("--adapter", metavar="NAME=FOLDER", help=adapters)
    else:
        parser.add_argument("--adapter", type=Path, metavar="FOLDER", help=adapters)
    add_base_flag(parser)
    add_family_flag(parser)
    codes = "format of the matrices of a Hugging Face model's blocks (default: the folder's)"
    parser.add_argument("--quantise", choices=("int8", "nf4"), help=codes)
    outliers = "with --quantise int8: multiply integers, except for columns of the inputs with larger magnitudes, as "
    outliers += "LLM.int8() does with 6 (default: multiply dequantised weights)"
    parser.add_argument("--outlier-threshold", type=float, default=0.0, metavar="X", help=outliers)


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of commands that generate: devices, tokenizer, chat template and context."""
    add = parser.add_argument
    add("--tensor", type=int, default=1, metavar="N", help="devices that split all weights and heads (default: 1)")
    add(
        "--tokenizer",
        default="",
        metavar="PATH",
        help="tokenizer.json, or folder or hub id with one (default: the model's)",
    )
    template = "file with a Jinja chat template, or name of one of the tokenizer's (default: the tokenizer's)"
    add("--chat-template", default="", metavar="FILE", help=template)
    variables = (
        "variables of the chat template, with values in JSON or as text: enable_thinking=false (default: the run's)"
    )
    add("--template-arguments", nargs="+", default=[], metavar="NAME=VALUE", help=variables)
    context = f"default: {DEFAULT_CONTEXT}, or the model's learned positions"
    add("--context", type=int, metavar="N", help=f"maximum tokens of a conversation ({context})")


def check_tokenizer_flags(arguments: argparse.Namespace) -> None:
    """Raise InputError for values of `add_tokenizer_flags` that no model takes."""
    context = arguments.context
    if context is not None and not 2 <= context <= MAX_TOKENS:
        raise InputError(f"--context {context}: must lie between 2 and {MAX_TOKENS:,}")
    if problems := find_argument_problems("--template-arguments", tuple(arguments.template_arguments)):
        raise InputError("; ".join(problems))


def resolve_context(given: int | None, model: ModelConfig) -> int:
    """Return the maximum number of tokens of a conversation. Raises InputError if the model has fewer positions."""
    limit = model.max_positions if model.positions == "learned" else MAX_TOKENS
    if given is None:
        return min(limit, DEFAULT_CONTEXT)
    if given > limit:
        raise InputError(f"--context {given}: must be at most the model's {limit} learned positions")
    return given


def read_quantisation(arguments: argparse.Namespace) -> Quantisation | None:
    """Return the format that the flags name; None for the format of the folder.

    Raises:
        InputError: the threshold is negative, or has no effect.
    """
    threshold = arguments.outlier_threshold
    if not 0 <= threshold < math.inf:
        raise InputError(f"--outlier-threshold {threshold}: must be a finite number of at least 0")
    if threshold and arguments.quantise != "int8":
        raise InputError(f"--outlier-threshold {threshold} has no effect without --quantise int8: add it")
    return Quantisation(arguments.quantise, threshold) if arguments.quantise else None


def add_step_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names the checkpoint of a run."""
    steps = "checkpoint of the run: its step, or best for the lowest held-out loss (default: the newest)"
    parser.add_argument("--step", type=_parse_step, metavar="N", help=steps)


def add_base_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names the base model of a run with adapters."""
    bases = "new location of the model whose adapters the run trains, if its folder was moved"
    parser.add_argument("--base", type=Path, metavar="FOLDER", help=bases)


def add_family_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names the family of a Hugging Face folder."""
    families = "model_type of the family that a Hugging Face model is read as, if its own is not known"
    parser.add_argument("--family", default="", metavar="NAME", help=families)


def _parse_named(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"{text}: must be a name and a folder, such as mine=adapters/mine")
    return name, Path(folder)


def _parse_step(text: str) -> Step:
    if text == "best":
        return "best"
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: must be the step of a checkpoint, or best")
    return int(text)


def import_harness() -> ModuleType:
    """Return the module `harness`. Raises InputError if the package lm_eval is missing."""
    try:
        from jaxopt_llm.inference import harness
    except ModuleNotFoundError as error:
        install = describe_install("lm-eval")
        raise InputError(f"evaluation.tasks requires the package lm_eval ({error}); run: {install}") from error
    return harness
