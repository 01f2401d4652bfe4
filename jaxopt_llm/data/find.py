"""Which files a run reads."""

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxopt_llm.data.config import DataConfig
from jaxopt_llm.errors import InputError

SUFFIXES = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".npy": "numpy",
    ".idx": "megatron",
    ".bin": "megatron",
}
COMPRESSED = (".gz", ".bz2", ".zst")
PLAN = "prepared-plan.json"  # in every folder that jaxopt_llm.prepare has begun to write


@dataclass(frozen=True)
class File:
    """One file (or prepared folder) to read: `name` is its path below what was asked for, with `/`."""

    name: str
    path: Path
    format: str


def find_all(config: DataConfig) -> list[list[File]]:
    """What each of data.paths stands for.

    Raises:
        InputError: what `find_files` raises, or a file that is found twice.
    """
    found = [find_files(pattern, config) for pattern in config.paths]
    seen: dict[Path, tuple[str, Path]] = {}
    for pattern, files in zip(config.paths, found, strict=True):
        for file in files:
            resolved = file.path.resolve()
            other, path = seen.setdefault(resolved, (pattern, file.path))
            if (other, path) != (pattern, file.path):
                raise InputError(
                    f"data.paths: {other} and {pattern} both read {resolved}; every document would come twice: leave "
                    "one out, or give a path more weight with data.weights"
                )
    return found


def find_files(pattern: str, config: DataConfig) -> list[File]:
    """What one of data.paths stands for, sorted by name: a file, a folder with all below it, or a glob (`**` too).

    In a folder `auto` takes the files whose suffix it knows, `text` all of them, another format those of its suffix.
    A Megatron pair is named by either file or by what their names share.

    Raises:
        InputError: nothing there, or nothing of a known format.
    """
    path, found = Path(pattern), []
    if _is_prepared(path):
        return [File(path.name, path, "prepared")]
    if path.is_dir():
        root = path
        wanted = {*SUFFIXES.values(), "prepared"} if config.format == "auto" else {config.format}
        found = [p for p in _below(path) if (config.format == "text" and p.is_file()) or _kind(p) in wanted]
    else:
        pair = path.with_name(path.name + ".idx")
        matches = [path] if path.is_file() else [pair] if pair.is_file() else _glob(pattern)
        found = [p for p in matches if p.is_file() or _is_prepared(p)]
        root = Path(os.path.commonpath([p.parent for p in found])) if found else path
    files = set()
    for each in found:
        kind = _kind(each) if each.is_dir() or config.format == "auto" else config.format
        if kind is None:
            raise InputError(f"data.paths {each}: its suffix tells no format; name it with data.format")
        each = each.with_suffix(".idx") if kind == "megatron" else each
        files.add(File(each.relative_to(root).as_posix(), each, kind))
    if not files:
        what = f"no file of the format {config.format}" if path.is_dir() else "no such file or folder"
        raise InputError(f"data.paths {pattern}: {what}; known suffixes: {', '.join(SUFFIXES)}")
    return sorted(files, key=lambda file: file.name)


def _below(folder: Path) -> Iterator[Path]:
    """The files and prepared folders below a folder: of prepared ones not the files, of hidden ones nothing."""
    for above, subfolders, names in os.walk(folder):
        seen = [Path(above, name) for name in subfolders if not name.startswith(".")]
        subfolders[:] = [path.name for path in seen if not _is_prepared(path)]
        yield from (path for path in seen if _is_prepared(path))
        yield from (path for name in names if not name.startswith(".") and (path := Path(above, name)).is_file())


def _glob(pattern: str) -> list[Path]:
    """Of prepared folders not the files: `**` matches both."""
    matches = [Path(match) for match in glob.glob(pattern, recursive=True)]
    ready = {folder for folder in {path.parent for path in matches} if _is_prepared(folder)}
    return [path for path in matches if path.parent not in ready]


def compressed(file: File) -> bool:
    return file.path.suffix in COMPRESSED


def _kind(path: Path) -> str | None:
    if path.is_dir():
        return "prepared"
    name = Path(path.stem) if path.suffix in COMPRESSED else path
    return SUFFIXES.get(name.suffix)


def _is_prepared(path: Path) -> bool:
    return (path / PLAN).is_file()
