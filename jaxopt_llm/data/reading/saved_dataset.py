"""Folders that `save_to_disk` of the library `datasets` writes.

The folder of a Dataset has state.json, which lists its Arrow files in order, and dataset_info.json. Its other Arrow
files are caches of later computations. The folder of a DatasetDict has one such folder per split, and
dataset_dict.json with the names of the splits.
"""

from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

from jaxopt_llm.core.errors import InputError

_STATE, _SPLITS = "state.json", "dataset_dict.json"
DESCRIPTIONS = {_STATE, _SPLITS, "dataset_info.json"}
_TRAIN = "train"


def select(
    paths: Sequence[PurePath], read: Callable[[PurePath], dict[str, Any]], describe: Callable[[PurePath], str]
) -> list[PurePath]:
    """Return the paths without descriptions, caches and splits other than `train`.

    Args:
        paths: files below a folder.
        read: returns the JSON object in a file.
        describe: returns the name of a file or folder for messages.

    Raises:
        InputError: there are several splits and none is named train, or a file that a description lists is missing.
    """
    kept = set(paths)
    for path in paths:
        if path.name == _SPLITS:
            kept -= _find_other_splits(path.parent, read(path), kept, describe)
    for path in paths:
        if path.name == _STATE and path in kept and path.with_name("dataset_info.json") in kept:
            kept -= _find_caches(path.parent, read(path), kept, describe)
    return [path for path in paths if path in kept and path.name not in DESCRIPTIONS]


def _find_other_splits(
    folder: PurePath, description: dict[str, Any], paths: set[PurePath], describe: Callable[[PurePath], str]
) -> set[PurePath]:
    splits = description.get("splits")
    if not isinstance(splits, list) or not splits:
        return set()
    if len(splits) > 1 and _TRAIN not in splits:
        listed = ", ".join(map(str, splits))
        raise InputError(f"{describe(folder)}: has the splits {listed}, and no {_TRAIN}; name the folder of a split")
    chosen = _TRAIN if _TRAIN in splits else splits[0]
    others = {folder / str(split) for split in splits if split != chosen}
    return {path for path in paths if others.intersection(path.parents)}


def _find_caches(
    folder: PurePath, description: dict[str, Any], paths: set[PurePath], describe: Callable[[PurePath], str]
) -> set[PurePath]:
    files = description.get("_data_files")
    if not isinstance(files, list):  # not the description of a data set
        return set()
    if description.get("_indices_data_files"):  # of a selection of rows, as versions before 1.16 wrote it
        raise InputError(f"{describe(folder)}: a selection of rows, saved by an old version of datasets; save it again")
    listed = [folder / str(file.get("filename")) for file in files if isinstance(file, dict)]
    if missing := [path for path in listed if path not in paths]:
        raise InputError(f"{describe(missing[0])}: listed in {_STATE}, but there is no such file; copy it too")
    return {path for path in paths if path.parent == folder and path.suffix == ".arrow"} - {*listed}
