"""The run that a directory holds, which another start of the command continues."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxopt_llm.config import Config, fields
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError

DEVICE_FILE = "device.json"  # kind of the devices, which decides what `auto` means


@dataclass(frozen=True)
class Started:
    """Settings and device of the run that its directory holds."""

    config: Config
    device: str


def read_started(directory: Path) -> Started | None:
    """Return the settings of the run in a directory, and its device, or None if no run has started there."""
    if not has_checkpoint(directory):
        return None
    try:
        config = fields.from_json(json_files.read_bytes(directory / "config.json"))
    except (InputError, ValueError, TypeError, OSError):
        return None  # `check_run_directory` reports it
    file = directory / DEVICE_FILE  # earlier versions did not write it
    return Started(config, json_files.parse(json_files.read_bytes(file))["kind"] if file.exists() else "")


def has_checkpoint(directory: Path) -> bool:
    """Return whether there is something to continue from: otherwise an earlier run left only its log."""
    checkpoints = directory / "checkpoints"
    return checkpoints.exists() and any(checkpoints.iterdir())


def find_changes(started: Started, config: Config, device: Any) -> str:
    """Return what changed since the start of a run, of all that decides what `auto` means; "" if nothing did.

    Args:
        config: the configuration with which the run continues.
        device: the first device of its mesh.
    """
    if started.device != device.device_kind:
        return f"the device was {started.device or 'unknown'} and is {device.device_kind}"
    return "the mesh changed" if started.config.mesh != config.mesh else ""
