"""The run directory: the run that it holds, and whether a configuration continues that run."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxopt_llm.checkpoint.pretrained import TEACHER, make_teacher_config
from jaxopt_llm.checkpoint.run_weights import is_run_directory
from jaxopt_llm.config import Config, cli, fields
from jaxopt_llm.config.training import GRPO
from jaxopt_llm.core import errors, hub, json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.files import replace_durably
from jaxopt_llm.core.functions import hash_sources
from jaxopt_llm.data.tokens.corpus import Corpus
from jaxopt_llm.data.tokens.pieces import StoredLogProbabilities
from jaxopt_llm.data.tokens.prepared import find_prepared
from jaxopt_llm.data.tokens.tokenizer import Tokenizer, load_tokenizer
from jaxopt_llm.data.tokens.tokenizer_files import describe_bytes, keep_tokenizer
from jaxopt_llm.data.tokens.tokenizer_folder import VOCABULARY

# Kinds of files in a run, in the folder of a model or of adapters, in a corpus, and in a prepared corpus.
_FILES = ("*.json", "*.jsonl", "*.safetensors", "*.txt", "*.csv", "*.parquet", "*.bin", "*.npy")
# Files that are written before config.json. A start that hung leaves the stacks.
_WRITTEN_FIRST = re.compile(
    r"(memory|corpus|device|run)\.json|(metrics|samples|events)(\.\d+)?\.jsonl"
    r"|faults\.jsonl|stacks\.\d+\..*\.txt"
)
FUNCTIONS_SHA256 = "functions_sha256"  # in corpus.json: of functions of the user, by the name of their setting
TEACHER_SHA256 = "teacher_sha256"  # in corpus.json, if there is a teacher
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
    """Return the change since the start of a run that gives `auto` another meaning; "" if there is none.

    Args:
        config: the configuration with which the run continues.
        device: the first device of its mesh.
    """
    if started.device != device.device_kind:
        return f"the device was {started.device or 'unknown'} and is {device.device_kind}"
    return "the mesh changed" if started.config.mesh != config.mesh else ""


def read_decay_steps(directory: Path) -> int | None:
    """Return the `schedule.decay_steps` of the run in a directory, or None if no run has started there."""
    started = read_started(directory)
    return started.config.schedule.decay_steps if started else None


def stores_frozen_weights(config: Config) -> bool:
    """Return whether checkpoints also hold frozen parameters. Those of a Hugging Face folder are not copied."""
    return not config.model.pretrained or is_run_directory(Path(config.model.pretrained))


def read_base_digest(directory: Path) -> str | None:
    """Return the digest of the Hugging Face folder that a run started from, or None if there is no folder."""
    digest: str | None = _read_identity(directory, "base_sha256", "base model")
    return digest


def read_teacher_digest(directory: Path) -> str | None:
    """Return the digest of the folder of the teacher that a run learns from, or None without a teacher."""
    digest: str | None = _read_identity(directory, TEACHER_SHA256, "teacher", needed=False)
    return digest


def read_tokenizer_digest(directory: Path) -> str:
    """Return `Tokenizer.sha256` of the tokenizer that a run was trained with."""
    digest: str = _read_identity(directory, "tokenizer_sha256", "tokenizer")
    return digest


def _read_identity(directory: Path, key: str, what: str, needed: bool = True) -> Any:
    try:
        description = dict(json_files.parse(json_files.read_bytes(directory / "corpus.json")))
        return description[key] if needed else description.get(key)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{directory}: corpus.json does not name the {what} ({error!r}); restore it") from error


def check_directory_is_free(directory: Path) -> None:
    """Raise InputError if the run directory holds files that are not of a run, which the run would overwrite."""
    names = sorted(path.name for pattern in _FILES for path in directory.glob(pattern))
    if has_checkpoint(directory) or {"config.json", "corpus.json"} <= {*names}:
        return
    foreign = [name for name in names if not _WRITTEN_FIRST.fullmatch(name)]
    if foreign:
        raise InputError(
            f"run.directory={directory} holds {foreign[0]}, which no run wrote there: set another --run.directory"
        )


def check_tokenizer_of_run(config: Config, tokenizer: Tokenizer) -> None:
    """Raise InputError if the tokenizer differs from the tokenizer of the run that `model.pretrained` names.

    With `model.resize_vocabulary` it may have additional tokens.
    """
    source, name = Path(config.model.pretrained), config.data.tokenizer
    if tokenizer.sha256 == read_tokenizer_digest(source):
        return
    if not config.model.resize_vocabulary:
        raise InputError(
            f"data.tokenizer={name}: its ids, BOS or EOS differ from those that {source} was trained with; leave out "
            "--data.tokenizer, --data.bos and --data.eos to use the tokenizer of that run, or set "
            "--model.resize-vocabulary for a tokenizer with additional tokens"
        )
    original = load_tokenizer(cli.load_run_config(source, "model.pretrained=").data)
    if not original.vocabulary or not original.vocabulary.items() <= tokenizer.vocabulary.items():
        raise InputError(
            f"data.tokenizer={name}: it does not have every token of {source} under the same id; name a tokenizer that "
            "only adds tokens"
        )


def check_tokenizer_of_teacher(config: Config, tokenizer: Tokenizer) -> None:
    """Raise InputError unless the teacher of a distillation reads the ids of the tokenizer.

    Special tokens may have other names. A teacher without a tokenizer can only be checked for its number of ids.
    """
    name = f"{TEACHER}={config.distillation.teacher}"
    remedy = "distillation compares the models id by id, so name a teacher with the same tokenizer"
    if tokenizer.vocabulary_size > (size := make_teacher_config(config).model.vocabulary_size):
        raise InputError(
            f"{name} has {size} token ids, and the tokenizer {config.data.tokenizer} {tokenizer.vocabulary_size}: "
            + remedy
        )
    folder = hub.find_folder(config.distillation.teacher, f"{TEACHER}=", weights=False)
    if not (folder / VOCABULARY).exists():
        return
    if config.data.uses_bytes:
        found, own = json_files.parse((folder / VOCABULARY).read_bytes()), describe_bytes()
        if any(found.get(part) != own[part] for part in ("model", "added_tokens")):  # an export may add a BOS to texts
            raise InputError(f"{name} has a tokenizer, and data.tokenizer is bytes: {remedy}")
        return
    other = load_tokenizer(replace(config.data, tokenizer=str(folder), bos="", eos=""))
    special = {*tokenizer.special_tokens, *other.special_tokens}
    ours, theirs = (
        {token: index for token, index in each.vocabulary.items() if token not in special}
        for each in (tokenizer, other)
    )
    if ours != theirs:
        example = min({token for token, _ in ours.items() ^ theirs.items()})
        ids = [f"{each[example]}" if example in each else "no id" for each in (ours, theirs)]
        raise InputError(
            f"{name}: its tokenizer differs from {config.data.tokenizer}, which gives {example!r} {ids[0]}, and the "
            f"teacher's {ids[1]}: {remedy}"
        )


def hash_functions(config: Config) -> dict[str, str]:
    """Return hashes of the user's functions from which a run learns, by the name of their setting.

    Raises:
        InputError: a file cannot be read.
    """
    function, rewards = config.preference.function, config.rollouts.rewards
    learned = {
        "preference.function": (function,) if function else (),
        "rollouts.rewards": rewards if config.training.objective == GRPO else (),
    }
    return {name: hash_sources(functions) for name, functions in learned.items() if functions}


def check_run_directory(config: Config, corpus: Corpus, tokenizer: Tokenizer, functions: Mapping[str, str]) -> None:
    """Raise InputError if the run directory holds another run, which this configuration does not continue.

    functions: see `hash_functions`.
    """
    directory = Path(config.run.directory)
    if config.model.pretrained and directory.absolute() == Path(config.model.pretrained):
        raise InputError(
            f"model.pretrained={config.model.pretrained} is also run.directory, and a run cannot start from itself: "
            "set another --run.directory, or continue the run with its original --model.pretrained"
        )
    if not has_checkpoint(directory):
        return
    try:
        old = fields.from_json(json_files.read_bytes(directory / "config.json"))
        description = json_files.parse(json_files.read_bytes(directory / "corpus.json"))
        old_name, old_corpus = description["name"], description["sha256"]
        old_functions = description.get(FUNCTIONS_SHA256, {})
    except (InputError, ValueError, KeyError, TypeError, OSError) as error:
        problem = f"this version cannot continue the run there ({errors.describe_error(error)})"
        raise InputError(f"run.directory={directory}: {problem}; set another --run.directory") from error
    changes = [*fields.forbidden_changes(old, config), *_changes_of_held_out(old, config)]
    changes += _changes_of_functions(old_functions, functions, config)
    changed = [change.split()[0] for change in changes]
    can_allow = all(fields.can_allow(name, old, config) for name in changed)
    if read_tokenizer_digest(directory) != tokenizer.sha256:
        changes.append(f"data.tokenizer {config.data.tokenizer} gives other ids, BOS or EOS than {old.data.tokenizer}")
        can_allow = False
    if changes:
        names = [*config.run.allow_change, *changed]
        allow = f", or allow the change with --run.allow-change {' '.join(names)}" if can_allow else ""
        raise InputError(
            f"run.directory={directory} holds another run: {'; '.join(changes)}; set another --run.directory{allow}"
        )
    if (read_base_digest(directory) is None) != stores_frozen_weights(config):
        raise InputError(
            f"the run in {directory} {'started' if stores_frozen_weights(config) else 'did not start'} from a Hugging "
            "Face folder: set --model.pretrained to what it started from"
        )
    if old_corpus != corpus.sha256:
        raise InputError(_describe_other_data(old, config, old_name, corpus.name))


def _describe_other_data(old: Config, config: Config, old_name: str, name: str) -> str:
    """Return why a run on one corpus does not continue on another, and what to do. The names are of the corpora."""
    directory, paths = config.run.directory, " ".join(old.data.paths)
    if old_name == name:
        version = "that version" if paths else "the Python that started the run, with its standard library"
        problem = f"another version of the corpus {name}: restore {version}"
    else:
        problem = f"{old_name}, not on {name}: {f'set --data.paths {paths}' if paths else 'leave out --data.paths'}"
    begins = directory
    if config.lora.rank:
        begins = f"FOLDER, which {errors.program_name('convert')} merge --checkpoint {directory} --to FOLDER writes,"
    return (
        f"the run in {directory} was trained on {problem}; to go on with other data, start a new run with "
        f"--model.pretrained {begins} and another --run.directory"
    )


def _changes_of_held_out(old: Config, new: Config) -> list[str]:
    """List the change of `evaluation.every` if other documents are then trained on than before."""
    before, after = old.evaluation, new.evaluation
    same_paths = before.paths == after.paths  # otherwise that change is named
    if before.holds_out == after.holds_out or not same_paths:
        return []
    if "evaluation.every" in fields.normalize_names(new.run.allow_change):
        return []
    effect = "holds documents out" if after.holds_out else "also trains on the documents that were held out"
    return [f"evaluation.every was {before.every} and is {after.every}, which {effect}"]


def _changes_of_functions(old: Mapping[str, str], new: Mapping[str, str], config: Config) -> list[str]:
    """List the functions whose sources are not those with which the run started."""
    found = []
    for name in sorted({*old, *new} - {*fields.normalize_names(config.run.allow_change)}):
        if old.get(name) != new.get(name):
            named = fields.get_field(config, name)
            listed = named if isinstance(named, str) else " ".join(named)
            found.append(f"{name} names {listed or 'no function'}, whose source differs from the run's")
    return found


def write_run_files(
    config: Config,
    corpus: Corpus,
    tokenizer: Tokenizer,
    device: str,
    functions: Mapping[str, str],
    base_sha256: str | None,
    reference: StoredLogProbabilities | None = None,
    teacher_sha256: str | None = None,
) -> None:
    """Write config.json and corpus.json, which identify the run before it has a checkpoint, and device.json.

    The tokenizer and its chat template are copied too.

    Args:
        device: kind of the devices.
        functions: see `hash_functions`.
        base_sha256: see `InitialWeights`.
        reference: the reference whose log-probabilities the corpus holds; None: it holds none, or they are not used.
        teacher_sha256: digest of the teacher's folder; None without a teacher.
    """
    directory = Path(config.run.directory)
    description: dict[str, Any] = {
        "name": corpus.name,
        "summary": str(corpus),
        "sha256": corpus.sha256,
        "tokenizer_sha256": tokenizer.sha256,
        "base_sha256": base_sha256,
    }
    if functions:
        description[FUNCTIONS_SHA256] = {**functions}
    if reference:
        description["reference"] = {"model": reference.model, "sha256": reference.sha256}
    keep_tokenizer(config.data, tokenizer, directory, find_prepared(corpus.files))
    if teacher_sha256:
        description[TEACHER_SHA256] = teacher_sha256
    replace_durably(directory / DEVICE_FILE, json.dumps({"kind": device}))
    replace_durably(directory / "corpus.json", json.dumps(description))
    replace_durably(directory / "config.json", fields.to_json(config))
