"""Model folders by name: a path, or the id of a model on the Hugging Face hub."""

import functools
import os
import re
import sys
from pathlib import Path

from jaxopt_llm.core.errors import InputError, one_line
from jaxopt_llm.core.files import measure_files
from jaxopt_llm.core.pulse import UNWATCHED, Pulse

# org/name or org/name@revision. The name of a JSON file is a path.
_ID = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?(?<!\.json)")
_URL = re.compile(r"[a-z][a-z0-9+.-]*:/+", re.IGNORECASE)
_SETTINGS = ("*.json", "*.jinja", "merges.txt", "tokenizer.model", "README.md")
_WEIGHTS = ("*.safetensors",)
# Files in subfolders except templates, and the second copy of all weights that Mistral publishes, are not read.
_UNREAD = (*(f"*/{name}" for name in (*_SETTINGS, *_WEIGHTS) if name != "*.jinja"), "consolidated*")


def is_hub_id(name: str | Path) -> bool:
    """Return whether a name is an id of the hub. A path that exists is not."""
    return _ID.fullmatch(str(name)) is not None and not Path(name).exists()


def absolute_name(name: str | Path) -> str:
    """Return a name that is valid in every working directory: the absolute path, or the id of the hub as it is."""
    return str(name) if is_hub_id(name) or _URL.match(str(name)) else os.path.abspath(name)


def repository(name: str) -> str:
    """Return an id without its revision, and a path as it is."""
    return name.partition("@")[0] if is_hub_id(name) else name


def model_name(name: str | Path) -> str:
    """Return the name of a model without its organization, its revision and the folders that it lies in."""
    path = Path(repository(str(name)))
    if path.parent.name == "snapshots":  # in the cache of the hub: models--ORGANIZATION--NAME/snapshots/COMMIT
        return path.parent.parent.name.rpartition("--")[2]
    return path.name


def find_folder(name: str | Path, setting: str, weights: bool = True, pulse: Pulse = UNWATCHED) -> Path:
    """Return the folder on this machine that a name stands for. A model of the hub is downloaded into its cache.

    A process reads one revision of a model, even if the hub receives another one meanwhile.

    Args:
        name: a path, also of a file; or an id of the hub.
        setting: text before the name in error messages, such as "model.pretrained=".
        weights: whether the weights are needed, in addition to the configuration and the tokenizer.
        pulse: notes the progress of the download, even if another process of this machine does it.

    Raises:
        InputError: the model cannot be downloaded, and the cache of the hub does not hold it; or the name looks like a
            mistyped path.
    """
    if not is_hub_id(name):
        if _URL.match(str(name)):
            problem = "models and tokenizers are not read from this storage"
            raise InputError(f"{setting}{name}: {problem}; copy it here and name the folder, or name a hub id")
        return Path(name)
    found = _ID.fullmatch(str(name))
    assert found is not None
    if found["revision"] is None and (parent := Path(name).parent).is_dir():
        problem = f"no such folder in {parent}"
        raise InputError(f"{setting}{name}: {problem}; correct the name, or for a model of the hub write {name}@main")
    try:
        folder = _download(found["repository"], found["revision"])
        if weights:
            with pulse.follow(functools.partial(_measure_cache, found["repository"])):
                folder = _download(found["repository"], folder.name, weights)
    except Exception as error:  # the library and its transports raise no common type
        raise InputError(f"{setting}{name}: {_explain(error, found['repository'])}") from error
    if weights and not any(folder.glob("*.safetensors")):
        problem = f"its files in {folder} have no weights in safetensors"
        remedy = f"run hf download {found['repository']} --local-dir DIR, and name DIR"
        raise InputError(f"{setting}{name}: {problem}; {remedy}")
    return folder


@functools.cache
def _download(repository: str, revision: str | None, weights: bool = False) -> Path:
    """Return the snapshot of a model in the hub's cache, whose name is the commit. Raises errors of the library.

    The library locks each file, so that one process per machine downloads it.
    """
    import huggingface_hub  # imported here, because a run on local files does not need it
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    patterns = [*_SETTINGS, *(_WEIGHTS if weights else ())]
    return Path(
        huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=patterns, ignore_patterns=list(_UNREAD)
        )
    )


def _measure_cache(repository: str) -> tuple[int, int, int]:
    """Return a value that changes while a file of a model is downloaded into the hub's cache."""
    from huggingface_hub import constants

    return measure_files([Path(constants.HF_HUB_CACHE, f"models--{repository.replace('/', '--')}", "blobs")])


def _explain(error: Exception, repository: str) -> str:
    """Return the problem and the remedy of a failed download."""
    from huggingface_hub import constants, errors

    page, cause = f"{constants.ENDPOINT}/{repository}", one_line(error.__cause__ or error)
    if isinstance(error, errors.GatedRepoError):
        return f"access to this model must be granted; request it at {page}, then run hf auth login (or set HF_TOKEN)"
    if isinstance(error, errors.RepositoryNotFoundError):
        problem = "neither a folder here nor a model on the Hugging Face hub that you may read"
        return f"{problem}; correct the name, or for a private model run hf auth login (or set HF_TOKEN)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the model has no such revision; choose a branch, tag or commit of {page}/tree/main"
    if isinstance(error, errors.LocalEntryNotFoundError):
        problem = (
            f"neither a folder here nor complete in the Hugging Face cache, and the hub does not send it ({cause})"
        )
        return f"{problem}; run hf download {repository} where there is a network, or name a folder"
    problem = f"cannot be downloaded ({type(error).__name__}: {cause})"
    return f"{problem}; check the network and the disk, and run again to continue the download"
