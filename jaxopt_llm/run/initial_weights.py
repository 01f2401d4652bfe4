"""Initial weights that a run's own checkpoints do not hold: a pretrained model, an adapter, or a frozen base."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface.model_folder import ModelFolder
from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.checkpoint.peft.adapter_folder import AdapterFolder
from jaxopt_llm.checkpoint.run_weights import AVERAGE, RunWeights, describe_average, find_trained_tree, is_run_directory
from jaxopt_llm.config import Config, cli
from jaxopt_llm.core import hub, json_files
from jaxopt_llm.core.errors import CheckpointError, InputError
from jaxopt_llm.distributed.process_group import Processes
from jaxopt_llm.step.program import Program


@dataclass(frozen=True)
class InitialWeights:
    """Weights that a run reads in addition to its own checkpoints.

    Attributes:
        weights: for a new run, the pretrained model; for a resumed run, the frozen base that its checkpoints do not
            hold; None if there are none.
        adapter: adapter of `lora.pretrained`, for a new run.
        base_sha256: digest of the Hugging Face folder that the run started from; None if it started from no folder.
    """

    weights: ModelFolder | RunWeights | None
    adapter: AdapterFolder | None
    base_sha256: str | None


def open_initial_weights(
    config: Config, program: Program, start: int, say: Callable[[str], None], processes: Processes
) -> InitialWeights:
    """Open the weights that a run needs in addition to its own checkpoint of step `start` (0: no checkpoint).

    Args:
        say: see `open_pretrained`.

    Raises:
        InputError, CheckpointError: the weights cannot be used.
    """
    directory = Path(config.run.directory)
    if start:
        needs_base = jax.tree.leaves(program.specs.frozen) and not program.specs.keep_frozen
        base = open_frozen_base(directory, config) if needs_base else None
        return InitialWeights(base, None, read_base_digest(directory))
    weights = open_pretrained(config, say, processes) if config.model.pretrained else None
    base = weights if isinstance(weights, ModelFolder) else None
    adapter = pretrained.open_pretrained_adapter(config) if config.lora.pretrained else None
    if adapter is not None:
        adapter.check_base(base)
        if adapter.whole.stored:
            if base is None:
                raise InputError(
                    f"lora.pretrained={adapter.path}: it also has whole weights (modules_to_save), which need the "
                    "Hugging Face folder of the model; name that with --model.pretrained"
                )
            weights = adapter.whole.replace_in(base, adapter.model)
    return InitialWeights(weights, adapter, base.sha256 if base else None)


def open_pretrained(config: Config, say: Callable[[str], None], processes: Processes) -> ModelFolder | RunWeights:
    """Open the weights that `model.pretrained` names: a Hugging Face folder, or a run, whose last checkpoint is used.

    Args:
        say: receives one line for each damaged checkpoint of that run, and one if an average is used.

    Raises:
        CheckpointError: the run has no usable checkpoint.
    """
    path = hub.find_folder(config.model.pretrained, "model.pretrained=")
    if not is_run_directory(path):
        return huggingface.open_model_folder(path).for_model(config.model)
    with Checkpoints(path / "checkpoints", None, say, processes) as checkpoints:
        step = checkpoints.latest_verified_step()
    if step is None:
        raise CheckpointError(f"model.pretrained={path}: the run has no checkpoint; train it, or name another")
    if find_trained_tree(path / "checkpoints" / str(step)) == AVERAGE:
        say(describe_average(path, step))
    run_config = cli.load_run_config(path, "model.pretrained=")
    base = open_frozen_base(path, run_config) if run_config.training.trainable else None
    base = base and base.for_model(config.model)
    return RunWeights(path, path / "checkpoints" / str(step), run_config.model, config.model, base)


def stores_frozen_weights(config: Config) -> bool:
    """Return whether checkpoints also hold frozen parameters. Those of a Hugging Face folder are not copied."""
    return not config.model.pretrained or is_run_directory(Path(config.model.pretrained))


def read_base_digest(directory: Path) -> str | None:
    """Return the digest of the Hugging Face folder that a run started from, or None if there is no folder."""
    digest: str | None = _read_identity(directory, "base_sha256", "base model")
    return digest


def read_tokenizer_digest(directory: Path) -> str:
    """Return `Tokenizer.sha256` of the tokenizer that a run was trained with."""
    digest: str = _read_identity(directory, "tokenizer_sha256", "tokenizer")
    return digest


def _read_identity(directory: Path, key: str, what: str) -> Any:
    try:
        return json_files.parse(json_files.read_bytes(directory / "corpus.json"))[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{directory}: corpus.json does not name the {what} ({error!r}); restore it") from error


def find_frozen_base(directory: Path, config: Config) -> Path | None:
    """Return the folder with the frozen weights that a run's checkpoints do not hold; None: they hold all weights.

    Raises:
        InputError: the folder is missing.
    """
    trains_all = not config.lora.rank and not config.training.trainable
    if trains_all or read_base_digest(directory) is None:
        return None
    path = hub.find_folder(config.model.pretrained, "model.pretrained=")
    if not path.is_dir():
        raise InputError(
            f"model.pretrained={path}: the folder does not exist, but the checkpoints of {directory} do not hold its "
            "frozen weights: restore it, or name its new location with --base"
        )
    return path


def open_frozen_base(directory: Path, config: Config) -> ModelFolder | None:
    """Open the folder with the frozen weights that a run's checkpoints do not hold.

    Returns None if the checkpoints hold all weights.

    Raises:
        InputError: the folder is missing, or its weights differ from those that the run started from.
    """
    path = find_frozen_base(directory, config)
    if path is None:
        return None
    folder = huggingface.open_model_folder(path)
    if folder.sha256 != read_base_digest(directory):
        raise InputError(
            f"model.pretrained={config.model.pretrained}: its weights differ from those that {directory} started from, "
            "and the checkpoints of that run hold only adapters: restore the original weights, or name their "
            "revision of a hub id, org/name@commit"
        )
    return folder.for_model(config.model)
