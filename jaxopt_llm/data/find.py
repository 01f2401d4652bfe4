"""Search for the files of a corpus."""

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError

SUFFIXES = {
    **dict.fromkeys((".txt", ".text", ".md"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    **{".json": "json", ".csv": "csv"},
    **{".parquet": "parquet", ".npy": "numpy", ".idx": "megatron", ".bin": "megatron"},
}
# Formats of files that often only describe a folder, such as dataset_info.json. So a search of a folder takes them only
# if data.format names them.
_NAMED_FORMATS = {"json", "csv"}
COMPRESSED = (".gz", ".bz2", ".zst")
PLAN = "prepared-plan.json"  # in every folder that jaxopt_llm.prepare has started to write


@dataclass(frozen=True)
class File:
    """File or prepared folder to read. `name` is its path relative to the requested folder, with `/` as separator."""

    name: str
    path: Path
    format: str


def find_corpus_files(config: DataConfig) -> list[list[File]]:
    """Return the files of each of data.paths.

    Raises:
        InputError: `find_files` raises it, or two paths contain the same file.
    """
    found = [find_files(pattern, config) for pattern in config.paths]
    seen: dict[Path, tuple[str, Path]] = {}
    for pattern, files in zip(config.paths, found, strict=True):
        for file in files:
            resolved = file.path.resolve()
            other, path = seen.setdefault(resolved, (pattern, file.path))
            if (other, path) != (pattern, file.path):
                problem = f"{other} and {pattern} both read {resolved}, so its documents would occur twice"
                raise InputError(f"data.paths: {problem}; remove one, or give one a larger weight with data.weights")
    return found


def find_files(pattern: str, config: DataConfig, setting: str = "data.paths") -> list[File]:
    """Return the files of one of data.paths, sorted by name.

    setting: the setting that names the path, for messages.

    A path is a file, a folder (searched recursively) or a glob (with `**`). In a folder, data.format=auto takes all
    files with a known suffix except .json and .csv, text takes all files, and other formats take the files with their
    suffix. A Megatron pair is named by either file or by their common prefix.

    Raises:
        InputError: there are no files, or none of a known format.
    """
    path, found = Path(pattern), []
    if _is_prepared(path):
        return [File(path.name, path, "prepared")]
    if path.is_dir():
        root = path
        known = {*SUFFIXES.values(), "prepared"} - _NAMED_FORMATS
        formats = known if config.format == "auto" else {config.format}
        found = [p for p in _walk(path) if (config.format == "text" and p.is_file()) or _guess_format(p) in formats]
    else:
        pair = path.with_name(path.name + ".idx")
        matches = [path] if path.is_file() else [pair] if pair.is_file() else _glob(pattern)
        found = [p for p in matches if p.is_file() or _is_prepared(p)]
        root = Path(os.path.commonpath([p.parent for p in found])) if found else path
    files = set()
    for match in found:
        file_format = _guess_format(match) if match.is_dir() or config.format == "auto" else config.format
        if file_format is None:
            raise InputError(f"{setting} {match}: the suffix does not tell the format; set data.format")
        file = match.with_suffix(".idx") if file_format == "megatron" else match
        files.add(File(file.relative_to(root).as_posix(), file, file_format))
    if not files:
        what = f"no file of the format {config.format}" if path.is_dir() else "no such file or folder"
        if path.is_dir() and config.format == "auto" and (left := _find_left_out(path)):
            problem = f"a folder's .json and .csv files, such as {left}, are read only if they are named"
            raise InputError(f"{setting} {pattern}: {problem}; name them with a glob, or set data.format")
        raise InputError(f"{setting} {pattern}: {what}; correct the path (known suffixes: {', '.join(SUFFIXES)})")
    return sorted(files, key=lambda file: file.name)


def _find_left_out(folder: Path) -> Path | None:
    """Return a file in a folder that data.format=auto does not take, although its format is known."""
    return min((path for path in _walk(folder) if _guess_format(path) in _NAMED_FORMATS), default=None)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files and prepared folders below a folder, without files of prepared folders and hidden files."""
    for parent, subfolders, names in os.walk(folder):
        visible = [Path(parent, name) for name in subfolders if not name.startswith(".")]
        subfolders[:] = [path.name for path in visible if not _is_prepared(path)]
        yield from (path for path in visible if _is_prepared(path))
        yield from (path for name in names if not name.startswith(".") and (path := Path(parent, name)).is_file())


def _glob(pattern: str) -> list[Path]:
    """Return the matches without the files of prepared folders, because `**` matches a folder and its files."""
    matches = [Path(match) for match in glob.glob(pattern, recursive=True)]
    prepared = {folder for folder in {path.parent for path in matches} if _is_prepared(folder)}
    return [path for path in matches if path.parent not in prepared]


def is_compressed(file: File) -> bool:
    return file.path.suffix in COMPRESSED


def _guess_format(path: Path) -> str | None:
    if path.is_dir():
        return "prepared"
    name = Path(path.stem) if path.suffix in COMPRESSED else path
    return SUFFIXES.get(name.suffix)


def _is_prepared(path: Path) -> bool:
    return (path / PLAN).is_file()
