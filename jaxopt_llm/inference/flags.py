"""Flags of the commands that load a model. This module does not import JAX, so that --help is immediate."""

import argparse
from pathlib import Path


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name the model of a command."""
    models = "training run, or folder or hub id of a Hugging Face model"
    adapters = "PEFT folder or hub id of LoRA adapters of the model"
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help=models)
    parser.add_argument("--adapter", type=Path, metavar="FOLDER", help=adapters)
