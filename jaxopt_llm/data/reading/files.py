"""Files of a corpus: search for them, and streams of their bytes."""

import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.pulse import UNWATCHED, Pulse
from jaxopt_llm.data.reading.storage import LocalStorage, RemoteStorage, Storage, check_backends, is_prepared, is_url

# Folders that `save_to_disk` of the library `datasets` writes. The folder of a Dataset has state.json, which lists its
# Arrow files in order, and dataset_info.json. Its other Arrow files are caches of later computations. The folder of a
# DatasetDict has one such folder per split, and dataset_dict.json with the names of the splits.
_STATE, _SPLITS = "state.json", "dataset_dict.json"
DESCRIPTIONS = {_STATE, _SPLITS, "dataset_info.json"}
_TRAIN = "train"


def _select_saved(
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


# The first or last word of the name of a file or folder that holds a split of a data set: in
# train-00000-of-00002.parquet, chats_test.jsonl, validation/0000.parquet.
_NAMED_SPLITS = {
    **dict.fromkeys(("train", "training"), _TRAIN),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}
_SHARD = re.compile(r"-\d+-of-\d+$")


def _check_one_split(folder: PurePath, paths: Sequence[PurePath], where: str, name: str) -> None:
    """Raise InputError if the names of files of rows say that they belong to several splits.

    Files that name no split are those to train on: chats.jsonl beside val.jsonl.

    Args:
        folder: the folder that has the files.
        paths: the files.
        where: setting and folder, for messages.
        name: what the user calls the folder.
    """
    found: dict[str, str] = {}  # split -> a glob of its files
    unnamed = ""
    for path in paths:
        parts, is_named = path.relative_to(folder).parts, False
        for part in parts:
            words = re.findall("[a-z]+", _SHARD.sub("", part.partition(".")[0].lower()))
            for word in {*words[:1], *words[-1:]} & _NAMED_SPLITS.keys():
                ending, is_named = f"*{word}*" if part == parts[-1] else f"{part}/**", True
                found.setdefault(_NAMED_SPLITS[word], f"{name.rstrip('/')}/**/{ending}")
        unnamed = unnamed if is_named else unnamed or f"{name.rstrip('/')}/{'/'.join(parts)}"
    if unnamed:
        found.setdefault(_TRAIN, unnamed)
    if len(found) > 1:
        listed, example = ", ".join(sorted(found)), found.get(_TRAIN) or min(found.values())
        raise InputError(f"{where}: has files of the splits {listed}; name those of one by a glob, such as '{example}'")


SUFFIXES = {
    **dict.fromkeys((".txt", ".text", ".md"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    **{".json": "json", ".csv": "csv"},
    **{".parquet": "parquet", ".arrow": "arrow", ".npy": "numpy", ".idx": "megatron", ".bin": "megatron"},
}
# Formats of files that often only describe a folder, such as dataset_info.json. So a search of a folder takes them only
# if data.format names them.
_NAMED_FORMATS = {"json", "csv"}
_CARD = "README.md"  # describes the data beside it
COMPRESSED = (".gz", ".bz2", ".zst")


@dataclass(frozen=True)
class File:
    """File or prepared folder to read. Its text is the path or URL that the user knows it by, for messages.

    Attributes:
        name: path relative to the requested folder, with `/` as separator.
        path: path on this machine.
        url: the URL that it was downloaded from; empty for a local file.
    """

    name: str
    path: Path
    format: str
    url: str = ""

    def __str__(self) -> str:
        return self.url or str(self.path)


def find_corpus_files(config: DataConfig, setting: str = "data.paths", pulse: Pulse = UNWATCHED) -> list[list[File]]:
    """Return the files of each of data.paths.

    Args:
        setting: what names the paths, for messages.
        pulse: notes the progress of downloads.

    Raises:
        InputError: `find_files` raises it, or two paths contain the same file.
    """
    check_backends(config.paths, setting)
    found = [find_files(pattern, config, setting, pulse) for pattern in config.paths]
    seen: dict[str, tuple[str, Path]] = {}
    for pattern, files in zip(config.paths, found, strict=True):
        for file in files:
            origin = locate(file)
            other, path = seen.setdefault(origin, (pattern, file.path))
            if (other, path) != (pattern, file.path):
                problem = f"{other} and {pattern} both read {origin}, so its documents would occur twice"
                raise InputError(f"{setting}: {problem}; remove one, or give one a larger weight with data.weights")
    return found


def locate(file: File) -> str:
    """Return the path of a file without symbolic links, or its URL. It is the same for the same file."""
    return file.url or str(file.path.resolve())


@contextmanager
def name_url(file: File) -> Iterator[None]:
    """Name the URL of a file instead of its local copy in the messages of errors."""
    try:
        yield
    except InputError as error:
        folder = file.url.rpartition("/")[0] or str(file.path.parent)
        raise InputError(str(error).replace(str(file.path.parent), folder)) from error


def find_files(pattern: str, config: DataConfig, setting: str = "data.paths", pulse: Pulse = UNWATCHED) -> list[File]:
    """Return the files of one of data.paths, sorted by name.

    A path is a file, a folder (searched recursively) or a glob (with `**`). In a folder, data.format=auto takes all
    files with a known suffix except .json and .csv, text takes all files, and other formats take the files with their
    suffix. A Megatron pair is named by either file or by their common prefix.

    Args:
        setting: the setting that names the path, for messages.
        pulse: notes the progress of downloads.

    Raises:
        InputError: there are no files, or none of a known format.
    """
    storage: Storage = RemoteStorage(pattern, setting) if is_url(pattern) else LocalStorage(pattern)
    path = storage.path
    if storage.is_file(path):
        found, root = [path], path.parent
    elif is_prepared(storage, path):
        return _make_files(storage, {path: (path.name, "prepared")}, pulse)
    elif is_folder := storage.is_folder(path):
        found, root = _select_in_folder(storage, config, setting, pulse), path
    else:
        pair = path.with_name(path.name + ".idx")
        found = [pair] if storage.is_file(pair) else _glob(storage)
        root = PurePath(os.path.commonpath([p.parent for p in found])) if found else path
    files = {}
    for match in found:
        guesses = config.format == "auto" or storage.is_folder(match)
        file_format = _guess_format(storage, match) if guesses else config.format
        if file_format is None:
            shown = storage.url(match) or match
            raise InputError(f"{setting} {shown}: the suffix does not tell the format; set --data.format")
        file = match.with_suffix(".idx") if file_format == "megatron" else match
        files[file] = file.relative_to(root).as_posix(), file_format
    if not files:
        if not is_folder:
            raise InputError(f"{setting} {pattern}: no such file or folder; correct the path")
        problem, remedy = f"the folder has no file of the format {config.format}", "correct the path"
        if config.format == "auto":
            problem = f"the folder has no file with a suffix of {', '.join(SUFFIXES)}"
            remedy = "correct the path, or set --data.format"
            if left := _find_left_out(storage):
                problem = f"a folder's .json and .csv files, such as {left}, are read only if they are named"
                remedy = "name them with a glob, or set --data.format"
        raise InputError(f"{setting} {pattern}: {problem}; {remedy}")
    return _make_files(storage, files, pulse)


def _make_files(storage: Storage, files: dict[PurePath, tuple[str, str]], pulse: Pulse) -> list[File]:
    """Return files sorted by name, copied to this machine. files: name and format of each path."""
    paths = sorted(files, key=lambda path: files[path][0])
    pairs = [(path, path.with_suffix(".bin")) if files[path][1] == "megatron" else (path,) for path in paths]
    local = storage.fetch(pairs, pulse)
    return [
        File(files[path][0], copy, files[path][1], storage.url(path)) for path, copy in zip(paths, local, strict=True)
    ]


def _select_in_folder(storage: Storage, config: DataConfig, setting: str, pulse: Pulse) -> list[PurePath]:
    formats = {*SUFFIXES.values(), "prepared"} - _NAMED_FORMATS if config.format == "auto" else {config.format}
    paths = [
        path
        for path in storage.walk(storage.path)
        if ("arrow" in formats and path.name in DESCRIPTIONS)
        or (config.format == "text" and storage.is_file(path))
        or _guess_format(storage, path) in formats
    ]
    if config.format == "auto" and any(_guess_format(storage, path) not in ("text", None) for path in paths):
        paths = [path for path in paths if path.name != _CARD]

    def read(path: PurePath) -> dict[str, Any]:
        (copy,) = storage.fetch([(path,)], pulse)
        return json_files.read_object(copy, "save the data set again", InputError)

    def describe(path: PurePath) -> str:
        return f"{setting} {storage.url(path) or path}"

    if "arrow" in formats:
        paths = _select_saved(paths, read, describe)
    rows = [path for path in paths if _guess_format(storage, path) != "text"]
    _check_one_split(storage.path, rows, describe(storage.path), storage.url(storage.path) or str(storage.path))
    return paths


def _find_left_out(storage: Storage) -> str | None:
    """Return a file in a folder that data.format=auto does not take, although its format is known."""
    found = (path for path in storage.walk(storage.path) if _guess_format(storage, path) in _NAMED_FORMATS)
    return min((storage.url(path) or str(path) for path in found), default=None)


def _glob(storage: Storage) -> list[PurePath]:
    """Return the matches without the files of prepared folders, because `**` matches a folder and its files."""
    matches = storage.glob()
    prepared = {folder for folder in {path.parent for path in matches} if is_prepared(storage, folder)}
    matches = [path for path in matches if path.parent not in prepared]
    return [path for path in matches if storage.is_file(path) or is_prepared(storage, path)]


def is_compressed(file: File) -> bool:
    return file.path.suffix in COMPRESSED


def _guess_format(storage: Storage, path: PurePath) -> str | None:
    if storage.is_folder(path):
        return "prepared"
    name = PurePath(path.stem) if path.suffix in COMPRESSED else path
    return SUFFIXES.get(name.suffix)


# --- Streams of bytes, compressed or not, and the limit on the size of a document


MAX_DOCUMENT_BYTES = 2**30  # memory holds several copies of a document
_BLOCK = 2**20  # bytes read at once


def open_stream(file: File) -> BinaryIO:
    if not is_compressed(file):
        return file.path.open("rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(file.path), compression="detect"))


def check_size(where: object, document: bytes | bytearray) -> bytes:
    """Return the document. Raises InputError if it is too large."""
    if len(document) > MAX_DOCUMENT_BYTES:
        reject_size(where)
    return bytes(document)


def reject_size(where: object) -> None:
    problem = f"a document is larger than {MAX_DOCUMENT_BYTES / 2**30:g} GiB and must fit in memory"
    raise InputError(f"{where}: {problem}; split it (a text file: with --data.separator)")


def find_line(file: File, byte: int) -> int:
    """Return the line of a byte, counted from 1. Reads the file up to the byte."""
    line = 1
    with open_stream(file) as stream:
        while byte > 0 and (block := stream.read(min(byte, _BLOCK))):
            line += block.count(b"\n")
            byte -= len(block)
    return line
