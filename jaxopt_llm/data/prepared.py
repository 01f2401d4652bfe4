"""A corpus as `jaxopt_llm.prepare` leaves it: tokens in one file to map into memory, and a manifest written last.

prepared-plan.json         what was asked for: another request never writes here
tokens.bin                 uint16 or uint32, little-endian
ends.bin, keys.bin         of each document, int64: where it ends in the tokens; uint64: its key
mask.bin                   of conversations, for each token a byte: whether it is learnt
shards.jsonl               what each stretch of these files holds, and its SHA-256
manifest.json              the plan, the totals and the SHA-256 of shards.jsonl; written last of all, so a corpus that
                           has it is whole

While it is made there are files shard-00000.tokens, .ends, .keys, .mask and, written last, .json: what one worker made
of some parts. In their order they are appended to the files above, and then deleted.
"""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxopt_llm.data.config import DataConfig
from jaxopt_llm.data.find import File
from jaxopt_llm.data.mapped import MappedArray
from jaxopt_llm.data.source import Part, parts
from jaxopt_llm.data.template import find_template, reader
from jaxopt_llm.data.tokenizer import Tokenizer
from jaxopt_llm.data.tokens import IndexedPiece, fingerprint, token_dtype, tokenized
from jaxopt_llm.errors import InputError
from jaxopt_llm.files import replace_durably

MANIFEST, SHARDS = "manifest.json", "shards.jsonl"
FORMAT = 2
SHARD_BYTES, MOST_SHARDS = 2**22, 4096  # of input, at least: enough shards for all cores, not too many files
_ARRAYS = ("tokens", "ends", "keys", "mask")  # the last of conversations alone
_READERS = 32  # of many files, which wait for storage more than they compute
_BLOCK = 2**22  # bytes read at once


def plan(
    files: Sequence[File], fingerprints: Sequence[str], config: DataConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    """What the bytes of a preparation depend on, and nothing else: not where the files lie, not how many workers."""
    conversations = (
        {}
        if config.content == "text"
        else {"content": config.content, "template_sha256": find_template(config, tokenizer).sha256}
    )
    return {
        "format": FORMAT,
        "tokenizer": config.tokenizer,
        "tokenizer_sha256": tokenizer.sha256,
        "vocabulary_size": tokenizer.vocabulary_size,
        "dtype": token_dtype(tokenizer.vocabulary_size).str,
        "separator": config.separator,
        "text_field": config.text_field,
        "malformed": config.malformed,
        "shard_bytes": shard_bytes(files),
        "files": [
            [file.name, file.format, file.path.stat().st_size, found]
            for file, found in zip(files, fingerprints, strict=True)
        ],
        **conversations,
    }


def look_at(files: Sequence[File], config: DataConfig, progress: Callable[[], None]) -> list[tuple[str, list[Part]]]:
    """The fingerprint and the parts of each file; progress: called after each."""

    def look(file: File) -> tuple[str, list[Part]]:
        found = fingerprint(file.path), parts(file, config)
        progress()
        return found

    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(look, files))


def shard_bytes(files: Sequence[File]) -> int:
    return max(SHARD_BYTES, sum(file.path.stat().st_size for file in files) // MOST_SHARDS)


def shards(files: Sequence[File], of_files: Iterable[Sequence[Part]]) -> list[list[Part]]:
    """The parts of all files, in order, in groups of about `shard_bytes`."""
    found: list[list[Part]] = []
    size, most = 0.0, shard_bytes(files)
    for file, of_file in zip(files, of_files, strict=True):
        each = file.path.stat().st_size / max(len(of_file), 1)
        for part in of_file:
            if not found or size + each > most:
                found.append([])
                size = 0
            found[-1].append(part)
            size += each
    return found


def write_shard(directory: Path, number: int, of: Sequence[Part], config: DataConfig, tokenizer: Tokenizer) -> None:
    """Writes a shard whole: whenever the process dies, what lies under the shard's names is whole or lacks its JSON.
    Memory holds a few megabytes of text at a time."""
    skipped: Counter[str] = Counter()
    paths = [directory / f"shard-{number:05}.{name}" for name in _names(config.content != "text")]
    digests = hashlib.sha256(), hashlib.sha256()  # of the tokens and of the mask
    documents = end = 0
    with ExitStack() as stack:
        files = [stack.enter_context(_temporary(path).open("wb")) for path in paths]
        read = stack.enter_context(reader(config, tokenizer))
        for part in of:
            for tokens, lengths, keys, *mask in tokenized(read(part, skipped), tokenizer):
                for digest, array in zip(digests, (tokens, *mask), strict=False):
                    digest.update(array.data)
                for file, array in zip(files, (tokens, end + np.cumsum(lengths), keys, *mask), strict=True):
                    file.write(array.data)
                documents, end = documents + lengths.size, end + tokens.size
        for file in files:
            _sync(file)
    for path in paths:
        os.replace(_temporary(path), path)
    named = zip(("tokens_sha256", "mask_sha256"), digests, strict=True)
    hashes = {name: digest.hexdigest() for name, digest in named if name == "tokens_sha256" or config.content != "text"}
    counts = {"documents": documents, "tokens": end, **hashes}
    write_json(shard_record(directory, number), {**counts, "skipped": dict(sorted(skipped.items()))})


def _names(conversations: bool) -> tuple[str, ...]:
    return _ARRAYS if conversations else _ARRAYS[:-1]


def shard_record(directory: Path, number: int) -> Path:
    """What of a shard is written last."""
    return directory / f"shard-{number:05}.json"


class Collection:
    """The shards that are in the corpus's own files, in order. After a kill, what is beyond them is cut off.

    Raises:
        InputError: the files hold less than the shards that they should.
    """

    def __init__(self, directory: Path, dtype: str, conversations: bool = False) -> None:
        self._directory = directory
        self._names = _names(conversations)
        self._types = dict(zip(_ARRAYS, map(np.dtype, (dtype, "<i8", "<u8", "?")), strict=True))
        (directory / SHARDS).touch()
        written = (directory / SHARDS).read_bytes()
        os.truncate(directory / SHARDS, written.rfind(b"\n") + 1)
        self.shards = read_shards(directory)
        self._documents = sum(each["documents"] for each in self.shards)
        self._tokens = sum(each["tokens"] for each in self.shards)
        for name in self._names:
            path, size = array_file(directory, name), self._size(name)
            path.touch()
            if path.stat().st_size < size:
                raise InputError(
                    f"{path} has {path.stat().st_size} bytes of {size}: remove {directory}, and begin anew"
                )
            os.truncate(path, size)
        for left in directory.glob("shard-*"):
            if int(left.stem.removeprefix("shard-")) < len(self.shards):
                left.unlink()

    def __contains__(self, number: int) -> bool:
        return number < len(self.shards) or shard_record(self._directory, number).exists()

    def grow(self) -> None:
        """Takes in the shards that are next, as far as they are whole."""
        while (record := shard_record(self._directory, len(self.shards))).exists():
            counts = json.loads(record.read_text())
            paths = {name: record.with_suffix(f".{name}") for name in self._names}
            moved = np.fromfile(paths["ends"], "<i8") + self._tokens
            digest = hashlib.sha256(moved.data)
            with array_file(self._directory, "ends").open("ab") as file:
                file.write(moved.data)
                _sync(file)
            for name in self._names:
                if name != "ends":
                    with paths[name].open("rb") as source, array_file(self._directory, name).open("ab") as file:
                        shutil.copyfileobj(source, file, _BLOCK)
                        _sync(file)
            digest.update(paths["keys"].read_bytes())
            counts["documents_sha256"] = digest.hexdigest()
            with (self._directory / SHARDS).open("a") as file:
                file.write(json.dumps(counts) + "\n")
                _sync(file)
            self.shards.append(counts)
            self._documents += counts["documents"]
            self._tokens += counts["tokens"]
            for path in (*paths.values(), record):
                path.unlink()

    def finish(self, plan: dict[str, Any]) -> None:
        digest = hashlib.sha256((self._directory / SHARDS).read_bytes()).hexdigest()
        totals = {"documents": self._documents, "tokens": self._tokens, "shards_sha256": digest}
        write_json(self._directory / MANIFEST, {"plan": plan, **totals})

    def _size(self, name: str) -> int:
        return (self._tokens if name in ("tokens", "mask") else self._documents) * self._types[name].itemsize


def read_shards(directory: Path) -> list[dict[str, Any]]:
    """What is known of each shard that is in the corpus's own files."""
    path = directory / SHARDS
    try:
        return [json.loads(line) for line in path.read_bytes().splitlines()]
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is damaged ({error}): remove {directory}, and prepare the corpus anew") from error


def array_file(directory: Path, name: str) -> Path:
    return directory / f"{name}.bin"


def write_json(path: Path, value: Any) -> None:
    replace_durably(path, json.dumps(value, indent=1) + "\n")


@dataclass(frozen=True)
class _Manifest:
    sha256: str
    tokens: int
    documents: int
    dtype: np.dtype[np.integer]
    conversations: bool
    tokenizer: str
    tokenizer_sha256: str
    shards_sha256: str


def prepared_piece(name: str, directory: Path, tokenizer: Tokenizer) -> tuple[IndexedPiece, str]:
    """Maps the files, without reading them; returns them and the hash of the manifest, which stands for all tokens.

    Raises:
        InputError: unfinished, damaged, or prepared with another tokenizer.
    """
    manifest = _read_manifest(directory)
    if manifest.tokenizer_sha256 != tokenizer.sha256:
        raise InputError(
            f"{directory} was prepared with another tokenizer (data.tokenizer={manifest.tokenizer}, or other "
            "delimiters): train with that one, or prepare the corpus anew"
        )
    return IndexedPiece(name, *_arrays(directory, manifest)), manifest.sha256


def verify(directory: Path, workers: int) -> tuple[int, int]:
    """Reads all of a prepared corpus; returns the number of its shards and of the bytes read.

    Raises:
        InputError: damaged, and where.
    """
    manifest = _read_manifest(directory)
    _arrays(directory, manifest)
    shards = read_shards(directory)
    if hashlib.sha256((directory / SHARDS).read_bytes()).hexdigest() != manifest.shards_sha256:
        raise InputError(f"{directory / SHARDS} is damaged: bring it back, or prepare the corpus anew")
    counted = np.cumsum([0, *(each["tokens"] for each in shards)])
    tokens = counted * manifest.dtype.itemsize
    documents = np.cumsum([0, *(each["documents"] for each in shards)]) * 8

    def damage(number: int) -> str | None:
        bounds = [
            (("tokens",), tokens[number : number + 2], shards[number]["tokens_sha256"]),
            (("ends", "keys"), documents[number : number + 2], shards[number]["documents_sha256"]),
        ]
        if manifest.conversations:
            bounds.append((("mask",), counted[number : number + 2], shards[number]["mask_sha256"]))
        for names, (first, last), expected in bounds:
            if _sha256([array_file(directory, name) for name in names], int(first), int(last)) != expected:
                return f"bytes {first:,} to {last:,} of {' or '.join(f'{name}.bin' for name in names)}, shard {number}"
        return None

    with ThreadPoolExecutor(workers) as pool:  # hashing lets other threads run
        damaged = [each for each in pool.map(damage, range(len(shards))) if each]
    if damaged:
        told = "; ".join(damaged[:5]) + (f"; and {len(damaged) - 5} more" if len(damaged) > 5 else "")
        raise InputError(f"{directory} is damaged: {told}; bring it back, or prepare the corpus anew")
    return len(shards), int(tokens[-1] + 2 * documents[-1] + manifest.conversations * counted[-1])


def _read_manifest(directory: Path) -> _Manifest:
    path = directory / MANIFEST
    if not path.is_file():
        raise InputError(f"{directory} is not finished: run jaxopt_llm.prepare again to complete it")
    content = path.read_bytes()
    try:
        told = json.loads(content)
        asked = told["plan"]
        if asked["format"] != FORMAT:
            raise InputError(
                f"{directory} is of format {asked['format']}, this version reads {FORMAT}: prepare it anew"
            )
        return _Manifest(
            hashlib.sha256(content).hexdigest(),
            int(told["tokens"]),
            int(told["documents"]),
            np.dtype(asked["dtype"]),
            "content" in asked,
            asked["tokenizer"],
            asked["tokenizer_sha256"],
            told["shards_sha256"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged ({error!r}): prepare the corpus anew") from error


def _arrays(directory: Path, manifest: _Manifest) -> list[MappedArray]:
    """Tokens, ends, keys and, of conversations, the mask, of the sizes that the manifest says."""
    types = (manifest.dtype, np.dtype("<i8"), np.dtype("<u8"), np.dtype("?"))
    sizes = (manifest.tokens, manifest.documents, manifest.documents, manifest.tokens)
    arrays = []
    for name, dtype, size in list(zip(_ARRAYS, types, sizes, strict=True))[: len(_names(manifest.conversations))]:
        path, needed = array_file(directory, name), size * dtype.itemsize
        has = path.stat().st_size if path.is_file() else 0
        if has != needed:
            raise InputError(f"{path} is cut or not this corpus's: {has} bytes of {needed}; prepare the corpus anew")
        arrays.append(MappedArray(path, dtype, size))
    ends = arrays[1]
    if not ends.size or ends[ends.size - 1] != manifest.tokens:
        raise InputError(f"{ends.path} is damaged: its documents do not end where the tokens do; prepare it anew")
    return arrays


def _sha256(files: Sequence[Path], first: int, last: int) -> str:
    """Of bytes [first, last) of each."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            file.seek(first)
            left = last - first
            while left and (block := file.read(min(_BLOCK, left))):
                digest.update(block)
                left -= len(block)
    return digest.hexdigest()


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


def _sync(file: Any) -> None:
    """Onto the disk, or a power cut could leave a name without its bytes."""
    file.flush()
    os.fsync(file.fileno())
