"""Files of text, and the documents in them."""

import glob
import io
import json
import math
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

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
PLAN = "plan.json"  # in every folder that jaxopt_llm.prepare has begun to write
PART_BYTES = 2**22  # of a JSONL file: what is read and tokenised in one go

# Installed packages, tests, and pydoc's help text: one generated file that would outweigh the rest of a held-out split.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"})
# Written by the build or the administrator: these differ between two machines with the same Python.
_LOCAL_FOLDER_PREFIX = "config-"
_LOCAL_FILE_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class File:
    """One file (or prepared folder) to read: `name` is its path below what was asked for, with `/`."""

    name: str
    path: Path
    format: str


@dataclass(frozen=True)
class Part:
    """Some documents of a file: lines that begin in bytes [first, last) of JSONL, row groups [first, last) of
    Parquet, the whole of what can only be read from its beginning."""

    file: File
    first: int
    last: int


@dataclass(frozen=True)
class Document:
    """One text. `name` says where it is; `key` decides whether it is held out: its content, or its name."""

    name: str
    content: bytes
    key: bytes


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
        below = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
        wanted = set(SUFFIXES.values()) if config.format == "auto" else {config.format}
        found = [p for p in below if p.is_file() and (config.format == "text" or _format_of(p) in wanted)]
    else:
        pair = path.with_name(path.name + ".idx")
        matches = (
            [path] if path.is_file() else [pair] if pair.is_file() else map(Path, glob.glob(pattern, recursive=True))
        )
        found = [p for p in matches if p.is_file() or _is_prepared(p)]
        root = Path(os.path.commonpath([p.parent for p in found])) if found else path
    files = set()
    for each in found:
        kind = "prepared" if each.is_dir() else config.format if config.format != "auto" else _format_of(each)
        if kind is None:
            raise InputError(f"data.paths {each}: its suffix tells no format; name it with data.format")
        each = each.with_suffix(".idx") if kind == "megatron" else each
        files.add(File(each.relative_to(root).as_posix(), each, kind))
    if not files:
        what = f"no file of the format {config.format}" if path.is_dir() else "no such file or folder"
        raise InputError(f"data.paths {pattern}: {what}; known suffixes: {', '.join(SUFFIXES)}")
    return sorted(files, key=lambda file: file.name)


def parts(file: File) -> list[Part]:
    """A text file in pieces that can be read, and tokenised, on their own: they depend on the file alone."""
    if file.format == "parquet":
        return [Part(file, group, group + 1) for group in range(_parquet(file).num_row_groups)]
    size = file.path.stat().st_size
    if file.format != "jsonl" or file.path.suffix in COMPRESSED:
        return [Part(file, 0, size)]
    return [Part(file, first, min(first + PART_BYTES, size)) for first in range(0, size, PART_BYTES)]


def read(part: Part, config: DataConfig, skipped: Counter[str]) -> Iterator[Document]:
    """The documents of a part, as UTF-8 and never empty; counts what it skips, by reason.

    Raises:
        InputError: a malformed document where data.malformed says so; no column of that name; a damaged file.
    """
    rows = {"text": _text_rows, "jsonl": _jsonl_rows, "parquet": _parquet_rows}[part.file.format]
    try:
        for where, content in rows(part, config):
            if content is None:
                _refuse(f"{where}: cut, or no text in {config.text_field!r}", config)
                skipped["cut, or without a text"] += 1
                continue
            try:
                content.decode()
            except UnicodeDecodeError as error:
                _refuse(f"{where}: not UTF-8 ({error.reason} at byte {error.start} of the text)", config)
                skipped["not UTF-8" if config.malformed == "skip" else "not UTF-8, replaced"] += 1
                if config.malformed == "skip":
                    continue
                content = content.decode(errors="replace").encode()
            if content:
                yield Document(where, content, content)
            else:
                skipped["empty"] += 1
    except (OSError, EOFError) as error:
        raise InputError(f"{part.file.path}: it cannot be read ({error}); is it whole?") from error


def standard_library() -> list[Document]:
    """Python's standard library, about 11 MB of source code that every interpreter carries: nothing is downloaded.

    Takes the `.py` files of the running interpreter, without installed packages, tests, generated files and empty
    ones, sorted by name. The text belongs to the Python version. Whether one is held out depends on its relative
    path alone, so that two versions hold out the same files.

    Raises:
        InputError: the interpreter carries no source files (some embedded builds).
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        # In place, so that os.walk does not descend: site-packages can be a hundred times the library.
        subfolders[:] = [s for s in subfolders if s not in _SKIPPED_FOLDERS and not s.startswith(_LOCAL_FOLDER_PREFIX)]
        paths += [Path(folder, n) for n in names if n.endswith(".py") and not n.startswith(_LOCAL_FILE_PREFIXES)]
    named = sorted((path.relative_to(root).as_posix(), path) for path in paths)
    documents = [Document(name, path.read_bytes(), name.encode()) for name, path in named]
    documents = [document for document in documents if document.content]
    if not documents:
        raise InputError(f"no .py files of the standard library under {root}: use a Python that carries its sources")
    return documents


def _format_of(path: Path) -> str | None:
    name = Path(path.stem) if path.suffix in COMPRESSED else path
    return SUFFIXES.get(name.suffix)


def _is_prepared(path: Path) -> bool:
    return (path / PLAN).is_file()


def _refuse(what: str, config: DataConfig) -> None:
    if config.malformed == "error":
        raise InputError(f"{what}; mend it, or choose data.malformed skip or replace")


def _open(file: File) -> BinaryIO:
    if file.path.suffix not in COMPRESSED:
        return file.path.open("rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(file.path), compression="detect"))


def _text_rows(part: Part, config: DataConfig) -> Iterator[tuple[str, bytes | None]]:
    with _open(part.file) as stream:
        content = stream.read()
    if not config.separator:
        yield part.file.name, content
        return
    for number, document in enumerate(content.split(config.separator.encode())):
        yield f"{part.file.name}, document {number}", document


def _jsonl_rows(part: Part, config: DataConfig) -> Iterator[tuple[str, bytes | None]]:
    at, stop = part.first, math.inf if part.file.path.suffix in COMPRESSED else part.last
    with _open(part.file) as stream:
        if at:
            stream.seek(at - 1)
            at += len(stream.readline()) - 1  # the rest of a line that began before, or the newline alone
        for line in stream:
            if at >= stop:
                return
            where = f"{part.file.name}, byte {at}"
            at += len(line)
            if not line.isspace():
                yield where, _text_of(where, line, config)


def _text_of(where: str, line: bytes, config: DataConfig) -> bytes | None:
    """The text of a JSON line, whose bytes that are no UTF-8 it keeps; None where it has none."""
    try:
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode(errors="surrogateescape"))
        text = row[config.text_field]
    except (ValueError, TypeError, RecursionError):
        return None
    except KeyError:
        _refuse(f"{where}: no column {config.text_field!r} (data.text_field) among {sorted(row)}", config)
        return None
    if not isinstance(text, str):
        return None
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # half of a pair, which JSON can spell out
        return text.encode(errors="surrogatepass")


def _parquet(file: File) -> Any:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(file.path)
    except pyarrow.ArrowException as error:
        raise InputError(f"{file.path}: no readable Parquet file ({error})") from error


def _parquet_rows(part: Part, config: DataConfig) -> Iterator[tuple[str, bytes | None]]:
    import pyarrow

    table = _parquet(part.file)
    names = table.schema_arrow.names
    if config.text_field not in names:
        raise InputError(
            f"{part.file.path}: no column {config.text_field!r} (data.text_field); it has {', '.join(names)}"
        )
    row = 0
    try:
        for batch in table.iter_batches(1024, row_groups=range(part.first, part.last), columns=[config.text_field]):
            for content in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                yield f"{part.file.name}, row {row} of row group {part.first}", content
                row += 1
    except pyarrow.ArrowException as error:
        raise InputError(f"{part.file.path}: column {config.text_field!r} cannot be read as text ({error})") from error
