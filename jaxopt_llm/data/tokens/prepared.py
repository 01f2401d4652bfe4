"""Corpus prepared by `jaxopt_llm.prepare`: tokens in one file, and a manifest that is written last.

prepared-plan.json         the request; a different request never writes to the same folder
tokens.bin                 uint16 or uint32, little-endian
ends.bin, keys.bin         for each document: its end in the tokens, int64, and its key, uint64
mask.bin                   only for conversations: one byte per token, whether the loss counts it
labels.bin                 only with labels (`DataConfig.has_labels`): that of each document, float32
shards.jsonl               contents and SHA-256 of each shard in the files above
reference.bin              only with a reference model: its log-probability of each document, float32
teacher.bin                only with a teacher: what it says of each token that the loss counts (`teacher_dtype`)
teacher_ends.bin           for each document: its end in teacher.bin, int64
reference.jsonl, teacher.jsonl   SHA-256 of each shard of these files
manifest.json              the plan, the totals, the SHA-256 of shards.jsonl and of reference.jsonl or teacher.jsonl
                           and, for pairs of answers, "pairs": true; written last, so a corpus with a manifest is
                           complete

During preparation, workers write the files shard-00000.tokens, .ends, .keys, .mask, .labels and, last, .json, each set
from a group of parts. They are appended to the files above in order, and then deleted. Those of a reference model or a
teacher follow, shard by shard (scored.py).
"""

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxopt_llm.config import DataConfig
from jaxopt_llm.config.data import PREFERENCE, UNPAIRED, Pairs
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.files import check_is_regular, replace_durably, sync_file
from jaxopt_llm.data.reading.files import File
from jaxopt_llm.data.reading.rows import Part
from jaxopt_llm.data.reading.skipped import Skipped
from jaxopt_llm.data.reading.source import split_into_parts
from jaxopt_llm.data.reading.storage import PLAN, is_url
from jaxopt_llm.data.tokens.pieces import (
    FileArray,
    IndexedPiece,
    StoredLogProbabilities,
    fingerprint_file,
    token_dtype,
    tokenize_batches,
)
from jaxopt_llm.data.tokens.template import find_template, has_template, make_reader
from jaxopt_llm.data.tokens.tokenizer import Tokenizer

MANIFEST, SHARDS, REFERENCE, TEACHER = "manifest.json", "shards.jsonl", "reference.jsonl", "teacher.jsonl"
FORMAT = 2
# Minimum input size of a shard, and maximum number of shards: enough shards for all cores, but not too many files.
SHARD_BYTES, MAX_SHARDS = 2**22, 4096
# Names of the files in the directory of an unfinished corpus.
_UNFINISHED = re.compile(
    rf"lock|{re.escape(PLAN)}|(shards|reference|teacher)\.jsonl"
    r"|(tokens|ends|keys|mask|labels|reference|teacher|teacher_ends)\.bin"
    r"|shard-\d{5,}\..*|.*\.tmp"
)
INDEX = np.dtype("<i8")  # of ends.bin and teacher_ends.bin
LOG_PROBABILITY = np.dtype("<f4")  # in reference.bin
TOP_K = 64  # tokens that are kept of a teacher
_READERS = 32  # threads that inspect files; they wait for storage most of the time
_BLOCK = 2**22  # bytes read at once


def make_plan(
    files: Sequence[File],
    fingerprints: Sequence[str],
    config: DataConfig,
    tokenizer: Tokenizer,
    scored_by: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return everything that the output bytes depend on.

    The locations of the files and the number of workers do not change the output, so they are not included.

    scored_by: name and digest of the reference model as `reference`, or those of the teacher and its K as `teacher`.
    """
    plan: dict[str, Any] = {
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
            [file.name, file.format, file.path.stat().st_size, fingerprint]
            for file, fingerprint in zip(files, fingerprints, strict=True)
        ],
    }
    if config.label_field:
        plan["label_field"] = config.label_field
    if config.label_names:
        plan["label_names"] = list(config.label_names)
    if config.columns:
        plan["columns"] = sorted(config.columns)
    if config.content != "text":
        template = find_template(config, tokenizer).sha256 if has_template(config) else None
        plan |= {"content": config.content, "template_sha256": template}
    if config.learn_turns != "all":
        plan["learn_turns"] = config.learn_turns
    if config.names_template:  # the folder of the tokenizer does not hold it
        plan["chat_template"] = find_template(config, tokenizer).source
    return plan | (scored_by or {})


def have_same_command(old: dict[str, Any], plan: dict[str, Any]) -> bool:
    """Return whether two plans differ only in what a message about rows advises to change.

    That is the contents of the files, the treatment of malformed rows, and the names of columns.
    """

    def describe_command(plan: dict[str, Any]) -> dict[str, Any]:
        names = [file[:2] for file in plan.get("files", ())]
        return {**plan, "files": names, "shard_bytes": None, "malformed": None, "columns": None}

    return describe_command(old) == describe_command(plan)


def is_unfinished(directory: Path) -> bool:
    """Return whether a directory holds only an unfinished corpus."""
    return all(_UNFINISHED.fullmatch(path.name) for path in directory.iterdir())


def holds_no_documents(directory: Path) -> bool:
    """Return whether no document of an unfinished corpus has been written."""
    written = any(path.stat().st_size for path in directory.glob("*.bin"))
    return not written and not any(directory.glob("shard-*.json"))


def delete_unfinished(directory: Path) -> None:
    """Delete an unfinished corpus. The plan is deleted last, so that a kill in between leaves a directory of ours."""
    for path in sorted(directory.iterdir(), key=lambda path: path.name == PLAN):
        if path.name != "lock":
            path.unlink()


def inspect_files(
    files: Sequence[File], config: DataConfig, progress: Callable[[], None]
) -> list[tuple[str, list[Part]]]:
    """Return the fingerprint and the parts of each file. Calls `progress` after each file."""

    def inspect(file: File) -> tuple[str, list[Part]]:
        inspected = fingerprint_file(file.path), split_into_parts(file, config)
        progress()
        return inspected

    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(inspect, files))


def shard_bytes(files: Sequence[File]) -> int:
    """Return the target size of a shard's input, in bytes."""
    return max(SHARD_BYTES, sum(file.path.stat().st_size for file in files) // MAX_SHARDS)


def group_into_shards(files: Sequence[File], parts_of_files: Iterable[Sequence[Part]]) -> list[list[Part]]:
    """Group the parts of all files, in order, into shards of about `shard_bytes`."""
    shards: list[list[Part]] = []
    size, most = 0.0, shard_bytes(files)
    for file, parts in zip(files, parts_of_files, strict=True):
        part_size = file.path.stat().st_size / max(len(parts), 1)
        for part in parts:
            if not shards or size + part_size > most:
                shards.append([])
                size = 0
            shards[-1].append(part)
            size += part_size
    return shards


def write_shard(directory: Path, index: int, parts: Sequence[Part], config: DataConfig, tokenizer: Tokenizer) -> None:
    """Write a shard atomically.

    If the process is killed at any moment, the files of the shard are either complete or lack the JSON record. Memory
    holds only a few megabytes of text at a time.
    """
    skipped = Skipped()
    names = [*describe_arrays(config, token_dtype(tokenizer.vocabulary_size).str)]
    paths = [directory / f"shard-{index:05}.{name}" for name in names]
    digests = {name: hashlib.sha256() for name in names}
    documents = end = paired = 0
    with ExitStack() as stack:
        files = [stack.enter_context(_temporary_path(path).open("wb")) for path in paths]
        read = make_reader(config, tokenizer)
        for part in parts:
            for batch in tokenize_batches(read(part, skipped), tokenizer):
                ends = end + np.cumsum(batch.lengths)
                mask = batch.mask
                if mask is None and "mask" in names:  # texts beside conversations
                    mask = np.ones(batch.tokens.size, bool)
                optional = (each for each in (mask, batch.labels) if each is not None)
                for name, file, array in zip(names, files, (batch.tokens, ends, batch.keys, *optional), strict=True):
                    file.write(array.data)
                    digests[name].update(array.data)
                documents, end = documents + batch.lengths.size, end + batch.tokens.size
                paired += bool(batch.pairs) * batch.lengths.size
        for file in files:
            sync_file(file)
    for path in paths:
        os.replace(_temporary_path(path), path)
    record: dict[str, Any] = {"documents": documents, "tokens": end}
    hashed = [name for name in names if name not in ("ends", "keys")]  # `merge_ready` changes the ends
    record |= {f"{name}_sha256": digests[name].hexdigest() for name in hashed}
    if paired:
        record["paired"] = paired  # documents of pairs
    write_json(shard_record_path(directory, index), record | skipped.to_record([part.file for part in parts]))


Arrays = dict[str, tuple[np.dtype[Any], str]]  # name of an array -> its dtype, and what it has an element for


def describe_arrays(config: DataConfig, dtype: str) -> Arrays:
    """Return the arrays that a corpus of such documents has. dtype: of its tokens."""
    return _list_arrays(np.dtype(dtype), config.content != "text", config.has_labels)


def _list_arrays(tokens: np.dtype[Any], conversations: bool, labels: bool) -> Arrays:
    arrays = {"tokens": (tokens, "tokens"), "ends": (INDEX, "documents"), "keys": (np.dtype("<u8"), "documents")}
    arrays |= {"mask": (np.dtype("?"), "tokens")} if conversations else {}
    return arrays | ({"labels": (np.dtype("<f4"), "documents")} if labels else {})


def shard_record_path(directory: Path, index: int) -> Path:
    """Return the path of the JSON record of a shard, the file that is written last."""
    return directory / f"shard-{index:05}.json"


class ShardMerger:
    """Writer that appends finished shards, in order, to the files of the corpus.

    When it opens files after a kill, it removes bytes that do not belong to a recorded shard.

    Attributes:
        shards: records of the shards in the files of the corpus.

    Raises:
        InputError: the files of the corpus are shorter than their recorded shards. `merge_ready` raises it if some
            documents are pairs and others are not.
    """

    def __init__(self, directory: Path, arrays: Arrays) -> None:
        self._directory, self._arrays = directory, arrays
        keep_lines(directory / SHARDS)
        self.shards = read_shard_records(directory)
        self._documents = sum(shard["documents"] for shard in self.shards)
        self._tokens = sum(shard["tokens"] for shard in self.shards)
        self._paired = sum(shard.get("paired", 0) for shard in self.shards)
        for name, (dtype, unit) in arrays.items():
            count = self._tokens if unit == "tokens" else self._documents
            keep_bytes(array_path(directory, name), count * dtype.itemsize)
        for path in directory.glob("shard-*"):
            if int(path.stem.removeprefix("shard-")) < len(self.shards):
                path.unlink()

    def __contains__(self, index: int) -> bool:
        """Return whether a shard is complete, appended or not."""
        return index < len(self.shards) or shard_record_path(self._directory, index).exists()

    def merge_ready(self) -> None:
        """Append the next shards, up to the first one that is not complete."""
        while (record := shard_record_path(self._directory, len(self.shards))).exists():
            counts = json_files.read_object(record, f"remove {self._directory} and prepare the corpus again")
            self._paired += counts.get("paired", 0)
            if 0 < self._paired < self._documents + counts["documents"]:
                found = f"{self._paired:,} of the first {self._documents + counts['documents']:,} documents"
                problem = f"{found} are of pairs with a chosen and a rejected answer, and the others are not"
                raise InputError(f"--input: {problem}; prepare the two kinds of files apart")
            paths = {name: record.with_suffix(f".{name}") for name in self._arrays}
            ends = np.fromfile(paths["ends"], INDEX) + self._tokens
            digest = hashlib.sha256(ends.data)
            for name in self._arrays:
                with paths[name].open("rb") as source, array_path(self._directory, name).open("ab") as file:
                    if name == "ends":
                        file.write(ends.data)
                    else:
                        shutil.copyfileobj(source, file, _BLOCK)
                    sync_file(file)
            digest.update(paths["keys"].read_bytes())
            counts["documents_sha256"] = digest.hexdigest()
            with (self._directory / SHARDS).open("a") as file:
                file.write(json.dumps(counts) + "\n")
                sync_file(file)
            self.shards.append(counts)
            self._documents += counts["documents"]
            self._tokens += counts["tokens"]
            for path in (*paths.values(), record):
                path.unlink()

    def finish(self, plan: dict[str, Any], scores: dict[str, dict[str, Any]] | None = None) -> None:
        """Write the manifest, which completes the corpus.

        scores: what the writer of scored.py says of them, by the same names as in the plan.
        """
        digest = hashlib.sha256((self._directory / SHARDS).read_bytes()).hexdigest()
        totals = {"documents": self._documents, "tokens": self._tokens, "shards_sha256": digest}
        pairs = {"pairs": True} if self._paired else {}
        write_json(self._directory / MANIFEST, {"plan": plan, **totals, **pairs, **(scores or {})})


def read_shard_records(directory: Path) -> list[dict[str, Any]]:
    """Return the records of the shards in the files of the corpus. Raises InputError if shards.jsonl is damaged."""
    path = directory / SHARDS
    try:
        check_is_regular(path)
        records = [json_files.parse(line) for line in path.read_bytes().splitlines()]
        if not all(isinstance(each, dict) and isinstance(each.get("endless", 0), int) for each in records):
            raise ValueError("a line does not describe a shard")
        return records
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is damaged ({error}): remove {directory} and prepare the corpus again") from error


def add_skipped(records: Sequence[dict[str, Any]], shards: Sequence[Sequence[Part]]) -> Skipped:
    """Return the skipped documents of all shards."""
    skipped = Skipped()
    for record, parts in zip(records, shards, strict=True):
        skipped.add_record(record, [part.file for part in parts])
    return skipped


def array_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.bin"


def keep_lines(path: Path) -> None:
    """Create a file of lines, or remove the end of its last line if a kill has cut it."""
    path.touch()
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def keep_bytes(path: Path, size: int) -> None:
    """Create a file of a corpus, or remove what follows its first bytes. Raise InputError if it has fewer."""
    path.touch()
    if (has := path.stat().st_size) < size:
        remedy = f"remove {path.parent} and prepare the corpus again"
        raise InputError(f"{path} is truncated: it has {has} bytes of {size}; {remedy}")
    os.truncate(path, size)


def write_json(path: Path, value: Any) -> None:
    replace_durably(path, json.dumps(value, indent=1) + "\n")


@dataclass(frozen=True)
class _ScoreRecord:
    """Log-probabilities by a reference or a teacher as a manifest describes them; see also `StoredLogProbabilities`.

    Attributes:
        sha256: digest of REFERENCE or TEACHER.
        rows: of a teacher, number of the tokens of which it says something.
    """

    model: str
    model_sha256: str
    limit: int
    sha256: str
    top_k: int = 0
    vocabulary_size: int = 0
    rows: int = 0


@dataclass(frozen=True)
class _Manifest:
    sha256: str
    tokens: int
    documents: int
    dtype: np.dtype[np.integer]
    conversations: bool
    labels: bool
    pairs: Pairs
    tokenizer: str
    tokenizer_sha256: str
    shards_sha256: str
    reference: _ScoreRecord | None
    teacher: _ScoreRecord | None

    @property
    def arrays(self) -> Arrays:
        """The arrays of the corpus, with those of a reference model or a teacher, if there are any."""
        arrays = _list_arrays(self.dtype, self.conversations, self.labels)
        if self.reference:
            arrays["reference"] = LOG_PROBABILITY, "documents"
        if teacher := self.teacher:
            arrays["teacher"] = teacher_dtype(teacher.top_k, teacher.vocabulary_size), "rows"
            arrays["teacher_ends"] = INDEX, "documents"
        return arrays


def open_prepared(name: str, directory: Path, tokenizer: Tokenizer) -> tuple[IndexedPiece, str]:
    """Open a prepared corpus without reading it.

    Returns the piece, and the hash of the manifest, which covers all tokens.

    Raises:
        InputError: the corpus is unfinished, damaged, or was prepared with another tokenizer.
    """
    manifest = _read_manifest(directory)
    if manifest.tokenizer_sha256 != tokenizer.sha256:
        raise InputError(
            f"{directory} was prepared with another tokenizer (data.tokenizer={manifest.tokenizer}, or other data.bos "
            "or data.eos): train with that one, or prepare the corpus again"
        )
    arrays = _open_arrays(directory, manifest)

    def open_scores(kind: str, record: _ScoreRecord | None) -> StoredLogProbabilities | None:
        if record is None:
            return None
        values, ends = arrays[kind], arrays.get(f"{kind}_ends")
        digest, size = record.model_sha256, record.vocabulary_size
        return StoredLogProbabilities(record.model, digest, record.limit, values, ends, size)

    piece = IndexedPiece(
        name,
        *(arrays[each] for each in ("tokens", "ends", "keys")),
        mask=arrays.get("mask"),
        pairs=manifest.pairs,
        reference=open_scores("reference", manifest.reference),
        labels=arrays.get("labels"),
        teacher=open_scores("teacher", manifest.teacher),
    )
    return piece, manifest.sha256


def read_stored(paths: Iterable[str]) -> list[tuple[bool, tuple[int, int] | None]]:
    """Return which log-probabilities of other models the prepared corpora among local paths hold. Read manifests only.

    For each corpus: whether it has those of a reference; K and the size of the vocabulary of a teacher, or None.
    """
    found = [_read_manifest(Path(path)) for path in paths if not is_url(path) and (Path(path) / MANIFEST).is_file()]
    taught = [(each.teacher.top_k, each.teacher.vocabulary_size) if each.teacher else None for each in found]
    return [(each.reference is not None, sizes) for each, sizes in zip(found, taught, strict=True)]


def teacher_dtype(top_k: int, vocabulary_size: int) -> np.dtype[np.void]:
    """Return the dtype of a record of teacher.bin: what a teacher says of one token.

    `ids` are those of its most likely tokens, the most likely one first. `log_probabilities` are those of these tokens,
    and the last one that of all others together. float16 has 3 bits more than bfloat16 of each, and its range suffices:
    what it cannot hold are probabilities below exp(-65504), and a difference of 6e-8 from 1.
    """
    ids = token_dtype(vocabulary_size)
    return np.dtype([("ids", ids, (top_k,)), ("log_probabilities", np.dtype("<f2"), (top_k + 1,))])


def check_learned_turns(directory: Path, config: DataConfig) -> None:
    """Raise InputError if only the last turns are to be learned and a corpus was prepared to learn all."""
    plan = json_files.read_object(directory / MANIFEST, f"remove {directory} and prepare the corpus again")["plan"]
    if config.learn_turns == "last" and "content" in plan and "learn_turns" not in plan:
        raise InputError(
            f"data.learn_turns=last: {directory} was prepared to learn all turns; prepare it again with "
            "--learn-turns last, or leave the setting out"
        )


def read_template(corpora: Iterable[Path]) -> str | None:
    """Return the template of prepared conversations; None: it is the tokenizer's own, or there are none.

    Raises:
        InputError: the corpora were prepared with different templates.
    """
    templates: dict[str | None, Path] = {}
    for directory in corpora:
        file = json_files.read_object(directory / MANIFEST, f"remove {directory} and prepare the corpus again")
        if "content" in (plan := file.get("plan", {})):  # texts have none
            templates.setdefault(plan.get("chat_template"), directory)
    if len(templates) > 1:
        first, second, *_ = templates.values()
        problem = f"{first} and {second} were prepared with different chat templates"
        raise InputError(f"data.paths: {problem}; prepare them with the same one")
    return next(iter(templates), None)


def check_sizes(directory: Path) -> None:
    """Raise InputError if the files of a finished corpus do not have the sizes that its manifest records."""
    _open_arrays(directory, _read_manifest(directory))


def verify_corpus(
    directory: Path,
    workers: int,
    share: tuple[int, int] = (0, 1),
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[int, int]:
    """Read a prepared corpus and compare its hashes.

    Args:
        share: index and number of the processes that verify the corpus together; each reads a part of the shards.
        cancelled: if it becomes True meanwhile, the rest is not read.

    Returns:
        The number of shards and of bytes of the whole corpus.

    Raises:
        InputError: the corpus is damaged. The message names the damaged shards and byte ranges.
    """
    manifest = _read_manifest(directory)
    arrays = _open_arrays(directory, manifest)
    shards = read_shard_records(directory)
    if hashlib.sha256((directory / SHARDS).read_bytes()).hexdigest() != manifest.shards_sha256:
        raise InputError(f"{directory / SHARDS} is damaged: restore it, or prepare the corpus again")
    of_reference = _read_score_records(directory / REFERENCE, manifest.reference)
    of_teacher = _read_score_records(directory / TEACHER, manifest.teacher)
    described = manifest.arrays
    # Names of arrays that have a digest together, where it is recorded, and its name there.
    hashed = [
        *((("tokens",), shards, "tokens_sha256"), (("ends", "keys"), shards, "documents_sha256")),
        *((("mask",), shards, "mask_sha256"), (("labels",), shards, "labels_sha256")),
        (("reference",), of_reference, "sha256"),
        *((("teacher",), of_teacher, "sha256"), (("teacher_ends",), of_teacher, "ends_sha256")),
    ]
    bounds = {
        unit: np.cumsum([0, *(record[unit] for record in records)])
        for unit, records in (("tokens", shards), ("documents", shards), ("rows", of_teacher))
    }

    def find_damage(index: int) -> str | None:
        if cancelled():
            return None
        for names, records, key in hashed:
            if names[0] not in described:
                continue
            dtype, unit = described[names[0]]
            first, last = (bounds[unit][index : index + 2] * dtype.itemsize).tolist()
            if _hash_range([array_path(directory, name) for name in names], first, last) != records[index][key]:
                return f"bytes {first:,} to {last:,} of {' or '.join(f'{name}.bin' for name in names)}, shard {index}"
        return None

    with ThreadPoolExecutor(workers) as pool:  # threads suffice: hashing releases the GIL
        damaged = [damage for damage in pool.map(find_damage, range(len(shards))[share[0] :: share[1]]) if damage]
    if damaged:
        message = "; ".join(damaged[:5]) + (f"; and {len(damaged) - 5} more" if len(damaged) > 5 else "")
        raise InputError(f"{directory} is damaged: {message}; restore it, or prepare the corpus again")
    return len(shards), sum(array.size * array.dtype.itemsize for array in arrays.values())


def _read_score_records(path: Path, recorded: _ScoreRecord | None) -> list[dict[str, Any]]:
    """Return what REFERENCE or TEACHER records of each shard; [] without one. Raise InputError if it is damaged."""
    if recorded is None:
        return []
    content = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != recorded.sha256:
        raise InputError(f"{path} is damaged: restore it, or prepare the corpus again")
    return [json_files.parse(line) for line in content.splitlines()]


def _read_manifest(directory: Path) -> _Manifest:
    path = directory / MANIFEST
    if not path.is_file():
        raise InputError(f"{directory} is not finished: run jaxopt_llm.prepare again to complete it")
    content = path.read_bytes()
    try:
        manifest = json_files.parse_settings(content)
        plan, reference, teacher = manifest["plan"], manifest.get("reference"), manifest.get("teacher")
        if plan["format"] != FORMAT:
            raise InputError(f"{directory} has format {plan['format']}, not {FORMAT} of this version: prepare it again")
        if "reference" in plan and not reference:
            raise InputError(f"{directory} has no log-probabilities of its reference: prepare it again")
        if "teacher" in plan and not teacher:
            raise InputError(f"{directory} has no log-probabilities of its teacher: prepare it again")
        return _Manifest(
            hashlib.sha256(content).hexdigest(),
            int(manifest["tokens"]),
            int(manifest["documents"]),
            np.dtype(plan["dtype"]),
            "content" in plan,
            "label_field" in plan or plan.get("content") == UNPAIRED,
            "" if not manifest.get("pairs") else UNPAIRED if plan["content"] == UNPAIRED else PREFERENCE,
            plan["tokenizer"],
            plan["tokenizer_sha256"],
            manifest["shards_sha256"],
            _ScoreRecord(**plan["reference"], **reference) if reference else None,
            _ScoreRecord(**plan["teacher"], **teacher) if teacher else None,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged ({error!r}): remove {directory} and prepare the corpus again") from error


def _open_arrays(directory: Path, manifest: _Manifest) -> dict[str, FileArray]:
    """Return the arrays by name. Raise InputError if a file does not have the size that the manifest records."""
    sizes = {"tokens": manifest.tokens, "documents": manifest.documents}
    sizes["rows"] = manifest.teacher.rows if manifest.teacher else 0
    arrays = {}
    for name, (dtype, unit) in manifest.arrays.items():
        path, size = array_path(directory, name), sizes[unit]
        needed = size * dtype.itemsize
        actual = path.stat().st_size if path.is_file() else 0
        if actual != needed:
            problem = f"is truncated or belongs to another corpus: it has {actual} bytes of {needed}"
            raise InputError(f"{path} {problem}; remove {directory} and prepare the corpus again")
        arrays[name] = FileArray(path, dtype, size)
    ends = arrays["ends"]
    if not ends.size or ends[ends.size - 1] != manifest.tokens:
        problem = "the last document does not end at the last token"
        raise InputError(f"{ends.path} is damaged: {problem}; remove {directory} and prepare the corpus again")
    return arrays


def _hash_range(files: Sequence[Path], first: int, last: int) -> str:
    """Return the SHA-256 of bytes [first, last) of each file."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            file.seek(first)
            for begin in range(first, last, _BLOCK):
                digest.update(file.read(min(_BLOCK, last - begin)))
    return digest.hexdigest()


def _temporary_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


# --- Verification in the background of a run
#
# A run opens a prepared corpus without reading it. A thread then reads all of it and compares the hashes, while the
# run compiles and trains. The run asks for the result before it writes a checkpoint.


LOOK_SECONDS = 1.0  # between two looks at the progress of the reading
WORKERS = max(1, (os.cpu_count() or 1) // 4)  # threads that hash; most cores stay with the batches


class Verification:
    """Verification that runs in a thread. A context manager: on exit it stops."""

    def __init__(self, corpora: Sequence[Path], share: tuple[int, int] = (0, 1)) -> None:
        """Name the directories of the corpora. share: see `verify_corpus`."""
        self._corpora, self._share = corpora, share
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, "verification")
        self._result: Future[None] | None = None
        self._shards = 0  # that were begun

    def __enter__(self) -> "Verification":
        self._result = self._thread.submit(self._verify)
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.shutdown()

    def check(self, wait: bool, beat: Callable[[], None]) -> None:
        """Raise InputError if a corpus is damaged.

        Args:
            wait: wait until all of this process's share has been read.
            beat: is called during the wait as long as the reading advances.
        """
        assert self._result is not None
        while wait and not self._result.done():
            before = self._shards
            futures.wait([self._result], LOOK_SECONDS)
            if self._shards != before:
                beat()
        if self._result.done():
            self._result.result()

    def _verify(self) -> None:
        for corpus in self._corpora:
            verify_corpus(corpus, WORKERS, self._share, self._is_cancelled)

    def _is_cancelled(self) -> bool:
        """Return whether to stop. It is called before each shard."""
        self._shards += 1
        return self._closed.is_set()


def find_prepared(files: Iterable[str]) -> list[Path]:
    """Return the prepared corpora among the paths and URLs of files."""
    return [path for path in map(Path, sorted(files)) if (path / MANIFEST).is_file()]
