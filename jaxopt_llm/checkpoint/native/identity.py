"""Identity of a run: its random id, and the hashes of its configurations and of its corpus.

`run.json` in the run directory holds the identity, and the record of every checkpoint names it. A run that continues
refuses a checkpoint that names another one, such as one that was copied from another run directory. Readers that only
want weights read any checkpoint.
"""

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxopt_llm.checkpoint.native import step_directories
from jaxopt_llm.config import Config, fields
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import CheckpointError, InputError
from jaxopt_llm.core.files import replace_durably
from jaxopt_llm.distributed.process_group import Processes

RUN_FILE = "run.json"


@dataclass(frozen=True)
class Identity:
    """Identity of a run.

    Attributes:
        run: random id, drawn at the first start.
        configurations: SHA-256 of each configuration that a start of the run had; the last one is the current one.
        corpus: SHA-256 of the corpus; None if the bytes of the data are not known, as with `fit`.
    """

    run: str
    configurations: tuple[str, ...]
    corpus: str | None = None

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint records."""
        return {"run": self.run, "config_sha256": self.configurations[-1], "corpus_sha256": self.corpus}

    def check(self, checkpoint: Path, record: Mapping[str, Any]) -> None:
        """Raise CheckpointError if the record of a checkpoint names another run."""
        found = record.get("identity", {})
        if found.get("run") != self.run:
            other = f"run {found['run']}" if found else "no run"
            problem = f"belongs to {other}, and its directory to run {self.run}"
        elif found["corpus_sha256"] != self.corpus:
            problem = f"of run {self.run} was trained on another corpus (SHA-256 {found['corpus_sha256']})"
        elif found["config_sha256"] not in self.configurations:
            digest = found["config_sha256"]
            problem = f"of run {self.run} has a configuration (SHA-256 {digest}) that no start of the run had"
        else:
            return
        raise CheckpointError(
            f"checkpoint {checkpoint} {problem}; move it away to continue from the one before, or start from its "
            "weights with --model.pretrained and another --run.directory"
        )


def hash_config(config: Config) -> str:
    """Return the SHA-256 of the settings that a resume must not change on its own."""
    fixed = {name: fields.get_field(config, name) for name in fields.FIELDS if fields.METADATA[name].resume != "freely"}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()


def new_identity(config: Config, processes: Processes, corpus: str | None = None) -> Identity:
    """Return the identity of a new run, the same one in all processes."""
    run = processes.channel("run id").exchange(secrets.token_hex(8))[0]
    return Identity(run, (hash_config(config),), corpus)


def identify_run(directory: Path, config: Config, processes: Processes, corpus: str | None = None) -> Identity:
    """Return the identity of the run that a directory holds, with this configuration as its current one.

    A directory that holds no checkpoint begins a new run. Nothing is written.

    Raises:
        CheckpointError: there are checkpoints, but no valid `run.json`.
    """
    checkpoints = directory / "checkpoints"
    is_new = not checkpoints.is_dir() or not any(checkpoints.iterdir())
    if json_files.parse(processes.channel("new run").exchange(json.dumps(is_new))[0]):
        return new_identity(config, processes, corpus)
    return replace(continue_identity(read_identity(directory), config), corpus=corpus)


def continue_identity(identity: Identity, config: Config) -> Identity:
    """Return the identity with this configuration as the current one."""
    digest = hash_config(config)
    earlier = tuple(each for each in identity.configurations if each != digest)
    return replace(identity, configurations=(*earlier, digest))


def read_identity(directory: Path) -> Identity:
    """Return the identity in a run directory.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    try:
        found = json_files.parse((directory / RUN_FILE).read_text())
        return Identity(found["run"], tuple(found["configurations"]), found["corpus"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{directory / RUN_FILE} does not name the run of the checkpoints beside it ({type(error).__name__}); "
            "restore the file from the run's directory, or choose another directory"
        ) from error


def write_identity(directory: Path, identity: Identity) -> None:
    """Write `run.json`. It must be there before the first checkpoint of the run."""
    content = {"run": identity.run, "configurations": identity.configurations, "corpus": identity.corpus}
    replace_durably(directory / RUN_FILE, json.dumps(content, indent=1) + "\n")


def claim_directory(directory: Path, identity: Identity) -> None:
    """Write the identity into a directory for checkpoints that are saved one by one.

    Raises:
        CheckpointError: the directory holds checkpoints of another run.
        InputError: it is a file, or within one.
    """
    if step_directories.find_checkpoints(directory / "checkpoints"):
        found = read_identity(directory)
        if found.run != identity.run:
            raise CheckpointError(
                f"{directory} holds checkpoints of run {found.run}, and this is run {identity.run}; restore that run "
                "first, or give another directory"
            )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(f"{directory}: {error}; give another directory") from error
    write_identity(directory, identity)
