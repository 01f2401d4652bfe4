"""A corpus as `jaxopt_llm.prepare` leaves it: shards of tokens to map into memory, and a manifest written last.

plan.json                  what was asked for: another request never writes here
shard-00000.bin            tokens, uint16 or uint32, little-endian
shard-00000.documents      of each document, int64: where it ends in the shard; uint64: its key
shard-00000.json           counts and SHA-256; written last, so a shard that has it is whole
manifest.json              the plan and all shards; written last of all, so a corpus that has it is whole
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxopt_llm.data.config import DataConfig
from jaxopt_llm.data.source import File, Part, parts, read
from jaxopt_llm.data.tokenizer import Tokenizer
from jaxopt_llm.data.tokens import Piece, fingerprint, token_dtype, tokenize
from jaxopt_llm.errors import InputError

MANIFEST = "manifest.json"
FORMAT = 1
SHARD_BYTES, MOST_SHARDS = 2**22, 4096  # of input, at least: enough shards for all cores, not too many files
_DOCUMENTS = np.dtype([("end", "<i8"), ("key", "<u8")])


def plan(files: Sequence[File], config: DataConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the bytes of a preparation depend on, and nothing else: not where the files lie, not how many workers."""
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
        "files": [[file.name, file.format, file.path.stat().st_size, fingerprint(file.path)] for file in files],
    }


def shard_bytes(files: Sequence[File]) -> int:
    return max(SHARD_BYTES, sum(file.path.stat().st_size for file in files) // MOST_SHARDS)


def shards(files: Sequence[File]) -> list[list[Part]]:
    """The parts of all files, in order, in groups of about `shard_bytes`."""
    found: list[list[Part]] = []
    size, most = 0.0, shard_bytes(files)
    for file in files:
        of_file = parts(file)
        each = file.path.stat().st_size / max(len(of_file), 1)
        for part in of_file:
            if not found or size + each > most:
                found.append([])
                size = 0
            found[-1].append(part)
            size += each
    return found


def write_shard(directory: Path, number: int, of: Sequence[Part], config: DataConfig, tokenizer: Tokenizer) -> None:
    """Writes a shard whole: whenever the process dies, what lies under the shard's names is whole or lacks its JSON."""
    skipped: Counter[str] = Counter()
    # One piece per part, so that a part is all that a worker holds as Python objects.
    pieces = [tokenize(part.file.name, read(part, config, skipped), tokenizer) for part in of]
    documents = np.empty(sum(piece.ends.size for piece in pieces), _DOCUMENTS)
    bounds = np.cumsum([0, *(piece.tokens.size for piece in pieces)])
    documents["end"] = np.concatenate([piece.ends + bound for piece, bound in zip(pieces, bounds, strict=False)])
    documents["key"] = np.concatenate([piece.keys for piece in pieces])
    digest = hashlib.sha256()
    tokens, index, record = shard_files(directory, number)
    with _temporary(tokens).open("wb") as file:
        for piece in pieces:
            digest.update(piece.tokens.data)
            file.write(piece.tokens.data)
        _sync(file)
    with _temporary(index).open("wb") as file:
        file.write(documents.data)
        _sync(file)
    counts = {
        "documents": documents.size,
        "tokens": int(bounds[-1]),
        "sha256": digest.hexdigest(),
        "skipped": dict(sorted(skipped.items())),
    }
    for each in (tokens, index):
        os.replace(_temporary(each), each)
    write_json(record, counts)


def shard_files(directory: Path, number: int) -> tuple[Path, Path, Path]:
    """Its tokens, its documents, its counts."""
    stem = directory / f"shard-{number:05}"
    return stem.with_suffix(".bin"), stem.with_suffix(".documents"), stem.with_suffix(".json")


def write_json(path: Path, value: Any) -> None:
    """Whole or, if the process dies, not at all."""
    with _temporary(path).open("w") as file:
        file.write(json.dumps(value, indent=1) + "\n")
        _sync(file)
    os.replace(_temporary(path), path)


def prepared_pieces(name: str, directory: Path, tokenizer: Tokenizer) -> tuple[list[Piece], str]:
    """Maps the shards; returns them and the hash of the manifest, which stands for all their tokens.

    Raises:
        InputError: unfinished, damaged, or prepared with another tokenizer.
    """
    if not (directory / MANIFEST).is_file():
        raise InputError(f"{directory} is not finished: run jaxopt_llm.prepare again to complete it")
    content = (directory / MANIFEST).read_bytes()
    try:
        manifest = json.loads(content)
        asked, counts = manifest["plan"], manifest["shards"]
        if asked["format"] != FORMAT:
            raise InputError(
                f"{directory} is of format {asked['format']}, this version reads {FORMAT}: prepare it anew"
            )
        if asked["tokenizer_sha256"] != tokenizer.sha256:
            raise InputError(
                f"{directory} was prepared with another tokenizer (data.tokenizer={asked['tokenizer']}, or other "
                "delimiters): train with that one, or prepare the corpus anew"
            )
        dtype = np.dtype(asked["dtype"])
        pieces = [_shard(f"{name}/shard-{i:05}", directory, i, each, dtype) for i, each in enumerate(counts)]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{directory / MANIFEST} is damaged ({error!r}): prepare the corpus anew") from error
    return pieces, hashlib.sha256(content).hexdigest()


def _shard(name: str, directory: Path, number: int, counts: dict[str, Any], dtype: np.dtype[np.integer]) -> Piece:
    tokens, index, _ = shard_files(directory, number)
    for path, size in ((tokens, counts["tokens"] * dtype.itemsize), (index, counts["documents"] * _DOCUMENTS.itemsize)):
        has = path.stat().st_size if path.is_file() else 0
        if has != size:
            raise InputError(f"{path} is cut or not this corpus's: {has} bytes of {size}; prepare the corpus anew")
    documents = np.fromfile(index, _DOCUMENTS)
    mapped = np.memmap(tokens, dtype, "r") if counts["tokens"] else np.empty(0, dtype)
    return Piece(name, mapped, documents["end"].copy(), documents["key"].copy())


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


def _sync(file: Any) -> None:
    """Onto the disk, or a power cut could leave a name without its bytes."""
    file.flush()
    os.fsync(file.fileno())
