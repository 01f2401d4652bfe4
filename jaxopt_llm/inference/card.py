"""Model cards: the README.md of an exported folder, with the front matter that the Hugging Face hub reads.

A card is made to be published: it has no paths of this machine, only the last parts of their names.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.config import Config
from jaxopt_llm.config.data import PROMPT
from jaxopt_llm.config.fields import METADATA, get_field
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.core import hub
from jaxopt_llm.core.files import read_file
from jaxopt_llm.observe.report.run_files import EVAL_LOSS, read_run

FILE = "README.md"
MAX_CARD_BYTES = 2**24
# Sections whose settings a card lists. The others say where and how fast a run computed, and name hosts and files. Of
# these, a card leaves out what names files and hosts, and what the start of a run chooses for its speed. It names the
# data, the base and the adapters elsewhere.
SECTIONS = (
    *("data", "training", "preference", "distillation", "rollouts", "grpo", "optimizer", "schedule", "lora"),
    "precision",
)
_LICENSE = re.compile(r"^(license(?:_name|_link)?):[ \t]*[\"']?([\w.+:/ -]+?)[\"']?[ \t]*$", re.MULTILINE)
_DATA_SET = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+?)(@[^/]+)?(/.*)?")


def describe_run(
    directory: Path, config: Config, step: int, title: str, notes: Iterable[str] = (), library: str = "transformers"
) -> str:
    """Return the card of a model, or of the adapters, of a run's checkpoint.

    Args:
        directory: the run directory.
        config: its configuration.
        step: step of the checkpoint.
        title: name of the model.
        notes: sentences about this folder.
        library: the library that loads the folder: transformers, or peft for adapters.
    """
    folder = pretrained.find_source_folder(config)
    base = _publish_base(pretrained.find_source_name(config), folder)
    facts = {
        "base": base or "none: trained from random weights",
        "data": ", ".join(map(publish_name, config.data.paths)) or "the standard library of Python",
        "held-out data": ", ".join(name for name, _ in config.evaluation.named_paths()),
        "steps": f"{step:,}",
        **_read_losses(directory, step),
    }
    tags = [name for name, used in _describe_kind(config).items() if used]
    sets = dict.fromkeys(found[1] for path in config.data.paths if (found := _DATA_SET.fullmatch(path)))
    front = _make_front(library, base, folder, tags, [*sets])
    recipe = [f"| `{name}` | `{value}` |" for name, value in list_changes(config).items()]
    table = ["", "Settings that differ from the defaults:", "", "| setting | value |", "|---|---|", *recipe]
    return "\n".join([*front, *_make_text(title, facts, notes), *(table if recipe else []), ""])


def describe_merge(base: str, folder: Path, adapter: str, title: str, notes: Iterable[str] = ()) -> str:
    """Return the card of a base with merged adapters. base, adapter: their names. notes: sentences about the folder."""
    name = _publish_base(base, folder)
    facts = {"base": name, "adapters": publish_name(adapter)}
    note = "The adapters are merged into the weights of the base."
    return "\n".join(
        [*_make_front("transformers", name, folder, ["lora"], []), *_make_text(title, facts, [note, *notes]), ""]
    )


def write(folder: Path, text: str) -> None:
    """Write a card into a folder."""
    (folder / FILE).write_text(text, encoding="utf-8")


def publish_name(name: str) -> str:
    """Return a name without the folders of this machine: the id of the hub, or the last part of a path."""
    if hub.is_hub_id(name) or _DATA_SET.fullmatch(name):
        return name
    return PurePosixPath(name.replace("\\", "/")).name


def list_changes(config: Config) -> dict[str, str]:
    """Return the settings of a training that differ from their defaults, as JSON without the names of files."""
    changes, default = {"run.seed": config.run.seed} if config.run.seed else {}, Config()
    schedule, steps = replace(config.schedule, decay_steps=0), config.training.steps
    if config.schedule.decay_steps == schedule.choose_end(steps):  # the start of the run has set it
        config = replace(config, schedule=schedule)
    if config.model.resize_vocabulary:
        changes["model.resize_vocabulary"] = config.model.resize_vocabulary
    for section in SECTIONS:
        values, defaults = dataclasses.asdict(getattr(config, section)), dataclasses.asdict(getattr(default, section))
        changes |= {f"{section}.{name}": value for name, value in values.items() if value != defaults[name]}
    return {
        name: json.dumps(value, ensure_ascii=False).replace("|", "\\|").replace("`", "'")
        for name, value in changes.items()
        if not (METADATA[name].is_place or _is_for_speed(name))
    }


def _is_for_speed(name: str) -> bool:
    """Return whether the start of a run may choose a setting, and nothing that is learned depends on it."""
    return METADATA[name].resume == "freely" and get_field(Config(), name) == AUTO


def _describe_kind(config: Config) -> dict[str, bool]:
    """Return for each tag whether it fits the training."""
    return {
        "sft": config.data.content not in ("text", PROMPT),
        "lora": bool(config.lora.rank),
        "qlora": bool(config.lora.rank) and config.lora.base != "float",
    }


def _publish_base(name: str, folder: Path | None) -> str:
    """Return the name of a base: its id on the hub if it is known, also of a folder in the hub's cache."""
    if not name:
        return ""
    if hub.is_hub_id(name):
        return hub.repository(name)
    parts = folder.resolve().parts if folder else ()
    cached = next((part for part in parts if part.startswith("models--") and part.count("--") == 2), None)
    return cached.removeprefix("models--").replace("--", "/") if cached else publish_name(name)


def _make_front(library: str, base: str, folder: Path | None, tags: list[str], sets: list[str]) -> list[str]:
    """Return the front matter. The hub accepts only ids as base and as data sets."""
    lines = ["---", f"library_name: {library}", "pipeline_tag: text-generation"]
    if "/" in base:
        lines.append(f"base_model: {base}")
        tags = [*tags, f"base_model:{'adapter' if library == 'peft' else 'finetune'}:{base}"]
    lines += [f"{name}: {json.dumps(value)}" for name, value in _read_license(folder).items()]
    for name, values in (("datasets", sets), ("tags", ["jaxopt_llm", *tags])):
        lines += [f"{name}:", *(f"- {value}" for value in values)] if values else []
    return [*lines, "---", ""]


def _read_license(folder: Path | None) -> dict[str, str]:
    """Return the fields about the license in the card of a base."""
    file = folder / FILE if folder else None
    if file is None or not file.is_file():
        return {}
    text = read_file(file, MAX_CARD_BYTES).decode(errors="replace").replace("\r\n", "\n")
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    return dict(_LICENSE.findall(front[1])) if front else {}


def _make_text(title: str, facts: Mapping[str, Any], notes: Iterable[str]) -> list[str]:
    rows = [f"| {name} | {value} |" for name, value in facts.items() if value]
    version = metadata.version("jaxopt_llm")
    head = [f"# {title}", "", f"Written by jaxopt_llm {version}.", *(line for note in notes for line in ("", note))]
    return [*head, "", "| | |", "|---|---|", *rows]


def _read_losses(directory: Path, step: int) -> dict[str, str]:
    """Return the last losses that a run recorded up to a step."""
    run = read_run(directory, directory.name, {})
    losses = {}
    for field, name in (("loss", "training loss"), (EVAL_LOSS, "held-out loss")):
        if (curve := run.curves.get(field)) is None:
            continue
        steps = run.steps[curve.records]
        if len(reached := np.flatnonzero(steps <= step)):
            losses[name] = f"{curve.values[reached[-1]]:.4f} (step {int(steps[reached[-1]]):,})"
    return losses
