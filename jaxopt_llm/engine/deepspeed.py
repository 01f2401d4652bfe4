"""DeepSpeed configurations: reading a file as a `Config`, by the tables of deepspeed_keys.py."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxopt_llm.config import Config, fields
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine.deepspeed_keys import FP16, KEYS, OPTIMIZERS, SCHEDULERS, Ignored, Keys
from jaxopt_llm.engine.deepspeed_reader import ABSENT, AUTO, Mapped, Reader, get_section, normalise_type


@dataclass(frozen=True)
class Imported:
    """A DeepSpeed configuration as settings of this package.

    Attributes:
        source: name of the file.
        ignored: the reason by key.
    """

    source: str
    config: Config
    mapped: tuple[Mapped, ...]
    ignored: dict[str, str]

    def has(self, setting: str) -> bool:
        """Return whether the file gives a value to a setting."""
        return any(each.setting == setting and each.value not in (ABSENT, AUTO) for each in self.mapped)

    def lines(self) -> list[str]:
        """Return the mapping as a table, and the ignored keys by reason."""
        settings: dict[tuple[str, str], list[str]] = {}
        for each in self.mapped:
            settings.setdefault((_describe(each), each.note), []).append(f"{each.setting} = {_show(each.ours)}")
        rows = [(key, ", ".join(ours), note) for (key, note), ours in settings.items()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        table = [f"  {key:<{widths[0]}}  {ours:<{widths[1]}}  {note}".rstrip() for key, ours, note in rows]
        by_reason: dict[str, list[str]] = {}
        for key, reason in self.ignored.items():
            by_reason.setdefault(reason, []).append(key)
        ignored = [f"  {', '.join(keys)}: {reason}" for reason, keys in by_reason.items()]
        return [f"{self.source}:", *table, *(["ignored:", *ignored] if ignored else [])]


def _describe(each: Mapped) -> str:
    return f"{each.key} absent" if each.value is ABSENT else f"{each.key} = {json.dumps(each.value)}"


def _show(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def read_file(path: Path, devices: int | None = None, rows: int | None = None) -> Imported:
    """Read a DeepSpeed configuration from a JSON file. See read_deepspeed.

    Raises:
        InputError: the file is not JSON, or repeats a key.
    """
    settings = json_files.read(path, "give DeepSpeed's configuration without comments and repeated keys")
    return read_deepspeed(settings, path.name, devices, rows)


def read_dict(settings: Mapping[str, Any], devices: int | None = None, rows: int | None = None) -> Imported:
    """Read a DeepSpeed configuration from a dict, as a file with the same content. See read_deepspeed.

    Raises:
        InputError: a value cannot be written in JSON.
    """
    try:
        copied = json_files.parse_settings(json.dumps(dict(settings)))
    except (TypeError, ValueError) as error:
        raise InputError(f"config: {error}; give a dict of strings, numbers, lists and dicts") from error
    return read_deepspeed(copied, "config", devices, rows)


def read_deepspeed(settings: Any, source: str, devices: int | None = None, rows: int | None = None) -> Imported:
    """Read a DeepSpeed configuration.

    Args:
        settings: the parsed JSON.
        source: name of the file, for messages.
        devices: number of devices, of which those of no other axis become mesh.fsdp. None: mesh.fsdp stays 1.
        rows: rows of a batch, which stand for batch sizes that the file leaves open. None: not known.

    Raises:
        InputError: a key is unknown or has no equivalent, or values contradict each other. The message names all.
    """
    if not isinstance(settings, dict):
        raise InputError(f"{source}: not an object of keys and values; give DeepSpeed's configuration")
    settings = _replace_old_forms(settings)
    reader = Reader(_choose_keys(settings), devices, rows)
    reader.walk(settings)
    reader.fill_automatic()
    reader.read_parallelism()
    reader.read_codes()
    reader.read_precision()
    reader.read_optimizer()
    reader.read_wandb()
    reader.map_keys()
    reader.read_scheduler()  # after the optimizer, whose rate it replaces
    config = fields.replace_fields(Config(), {each.setting: each.ours for each in reader.mapped})
    if problems := reader.problems or config.problems():
        raise InputError(f"{source}: {'; '.join(problems)}")
    return Imported(source, config, tuple(reader.mapped), reader.ignored)


def _replace_old_forms(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with old spellings replaced: `bfloat16`, and `zero_optimization` as a boolean."""
    replaced = {("bf16" if key == "bfloat16" else key): value for key, value in settings.items()}
    zero = replaced.get("zero_optimization")
    return {**replaced, "zero_optimization": {"stage": int(zero)}} if isinstance(zero, bool) else replaced


def _choose_keys(settings: dict[str, Any]) -> Keys:
    """Return the known keys: `KEYS`, and those of the file's optimizer, scheduler and precision."""
    keys = dict(KEYS)
    for section, kinds in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        parameters = kinds.get(normalise_type(section, get_section(settings, section).get("type")))
        unknown = {} if parameters is not None else {f"{section}.params": Ignored(f"the {section} is refused")}
        keys |= unknown | {f"{section}.params.{name}": entry for name, entry in (parameters or {}).items()}
    on = get_section(settings, "fp16").get("enabled") is True
    return keys | (FP16 if on else dict.fromkeys(FP16, Ignored("fp16 is off")))
