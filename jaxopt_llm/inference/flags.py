"""Flags of the commands that load a model. This module does not import JAX, so that --help is immediate."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from jaxopt_llm.core.errors import InputError, describe_install

Step = int | Literal["best"] | None  # checkpoint of a run: of a step, with the lowest held-out loss, or the newest

# Flags in place of settings, for messages.
OWN_FLAGS = {
    "lora.base": "--quantise",
    "model.family": "--family",
    "precision.outlier_threshold": "--outlier-threshold",
}


@dataclass(frozen=True)
class Quantisation:
    """Format of the matrices of the blocks, and the outlier threshold of their products (PrecisionConfig); 0: none."""

    base: Literal["int8", "nf4"]
    outlier_threshold: float = 0.0


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name the model of a command."""
    models = "training run, or folder or hub id of a Hugging Face model"
    adapters = "PEFT folder or hub id of LoRA adapters of the model"
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help=models)
    add_step_flag(parser)
    parser.add_argument("--adapter", type=Path, metavar="FOLDER", help=adapters)
    add_base_flag(parser)
    add_family_flag(parser)
    codes = "format of the matrices of a Hugging Face model's blocks (default: that of the folder)"
    parser.add_argument("--quantise", choices=("int8", "nf4"), help=codes)
    outliers = "with --quantise int8: multiply integers, except for columns of the inputs with larger magnitudes, as "
    outliers += "LLM.int8() does with 6 (default: multiply dequantised weights)"
    parser.add_argument("--outlier-threshold", type=float, default=0.0, metavar="X", help=outliers)


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
