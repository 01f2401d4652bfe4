"""Flags of the commands that load a model. This module does not import JAX, so that --help is immediate."""

import argparse
from pathlib import Path
from typing import Literal

Step = int | Literal["best"] | None  # checkpoint of a run: of a step, with the lowest held-out loss, or the newest


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name the model of a command."""
    models = "training run, or folder or hub id of a Hugging Face model"
    adapters = "PEFT folder or hub id of LoRA adapters of the model"
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help=models)
    add_step_flag(parser)
    parser.add_argument("--adapter", type=Path, metavar="FOLDER", help=adapters)
    add_base_flag(parser)


def add_step_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names the checkpoint of a run."""
    steps = "checkpoint of the run: its step, or best for the lowest held-out loss (default: the newest)"
    parser.add_argument("--step", type=_parse_step, metavar="N", help=steps)


def add_base_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names the base model of a run with adapters."""
    bases = "new location of the model whose adapters the run trains, if its folder was moved"
    parser.add_argument("--base", type=Path, metavar="FOLDER", help=bases)


def _parse_step(text: str) -> Step:
    if text == "best":
        return "best"
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: must be the step of a checkpoint, or best")
    return int(text)
