"""Writers of what a model says of a prepared corpus: log-probabilities by a reference, or those of a teacher.

They append to the files of a corpus that holds all shards, shard by shard. When they open the files after a kill, they
remove bytes that do not belong to a recorded shard.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.core import json_files
from jaxopt_llm.core.files import sync_file
from jaxopt_llm.data.tokens.pieces import FileArray, IndexedPiece
from jaxopt_llm.data.tokens.prepared import (
    INDEX,
    LOG_PROBABILITY,
    REFERENCE,
    TEACHER,
    array_path,
    keep_bytes,
    keep_lines,
    read_shard_records,
    teacher_dtype,
)


class _ScoreWriter:
    """Base class of the writers.

    Attributes:
        longest: tokens of the longest document.
        tokens: number of tokens of each shard.
    """

    def __init__(self, directory: Path, dtype: str, record: str) -> None:
        """Open the records of the shards. dtype: of the tokens. record: name of the file that has a line for each."""
        self._directory = directory
        shards = read_shard_records(directory)
        self.tokens: list[int] = [shard["tokens"] for shard in shards]
        self._begins = np.cumsum([0, *self.tokens])
        self._documents = np.cumsum([0, *(shard["documents"] for shard in shards)])
        self._dtype = np.dtype(dtype)
        self.longest = max(int(np.diff(self._read_ends(i), prepend=0).max(initial=0)) for i in range(len(shards)))
        self._record = directory / record
        keep_lines(self._record)

    def __len__(self) -> int:
        """Return the number of shards that are complete."""
        return self._record.read_bytes().count(b"\n")

    def open_next(self) -> IndexedPiece:
        """Open the documents of the first shard that is not complete."""
        index = len(self)
        begin, size = int(self._begins[index]), self.tokens[index]
        tokens = FileArray(array_path(self._directory, "tokens"), self._dtype, size, begin * self._dtype.itemsize)
        path, ends = array_path(self._directory, "mask"), self._read_ends(index)
        mask = FileArray(path, np.dtype("?"), size, begin) if path.exists() else None  # texts have none
        return IndexedPiece(
            f"{self._directory}, shard {index}", tokens, ends, np.zeros(ends.size, np.uint64), mask=mask
        )

    def summarise(self, **found: Any) -> dict[str, Any]:
        """Return what the manifest says of all complete shards."""
        assert len(self) == len(self.tokens)
        return found | {"sha256": hashlib.sha256(self._record.read_bytes()).hexdigest()}

    def _read_ends(self, index: int) -> NDArray[np.int64]:
        """Return the ends of the documents of a shard, in its own tokens."""
        first, last = self._documents[index : index + 2]
        ends = FileArray(array_path(self._directory, "ends"), INDEX, int(self._documents[-1]))
        found: NDArray[np.int64] = ends[int(first) : int(last)] - self._begins[index]
        return found

    def _keep(self, name: str, size: int) -> None:
        keep_bytes(array_path(self._directory, name), size)

    def _append(self, name: str, values: NDArray[Any]) -> None:
        with array_path(self._directory, name).open("ab") as file:
            file.write(values.tobytes())
            sync_file(file)

    def _complete(self, record: dict[str, Any]) -> None:
        """Record the first shard that is not complete."""
        with self._record.open("ab") as file:
            file.write((json.dumps(record) + "\n").encode())
            sync_file(file)


class LogProbabilityWriter(_ScoreWriter):
    """Writer of the log-probability of each document by a reference model."""

    def __init__(self, directory: Path, dtype: str) -> None:
        """Open the files. dtype: of the tokens."""
        super().__init__(directory, dtype, REFERENCE)
        self._keep("reference", int(self._documents[len(self)]) * LOG_PROBABILITY.itemsize)

    def append(self, values: NDArray[np.float32]) -> None:
        """Append those of the first shard that is not complete: one for each of its documents."""
        index = len(self)
        assert values.shape == (self._documents[index + 1] - self._documents[index],)
        values = np.ascontiguousarray(values, LOG_PROBABILITY)
        self._append("reference", values)
        self._complete({"sha256": hashlib.sha256(values.data).hexdigest()})


class TeacherWriter(_ScoreWriter):
    """Writer of what a teacher says of each token that the loss counts."""

    def __init__(self, directory: Path, dtype: str, top_k: int, vocabulary_size: int) -> None:
        """Open the files. dtype: of the tokens; the others: see `teacher_dtype`."""
        super().__init__(directory, dtype, TEACHER)
        self.dtype, self._vocabulary_size = teacher_dtype(top_k, vocabulary_size), vocabulary_size
        self._rows = sum(json_files.parse(line)["rows"] for line in self._record.read_bytes().splitlines())
        self._keep("teacher", self._rows * self.dtype.itemsize)
        self._keep("teacher_ends", int(self._documents[len(self)]) * INDEX.itemsize)
        self._digest = hashlib.sha256()  # of the shard that is being written

    def append(self, values: NDArray[np.void]) -> None:
        """Append those of some tokens of the first shard that is not complete."""
        assert values.dtype == self.dtype
        self._append("teacher", values)
        self._digest.update(values.tobytes())

    def complete(self, counts: NDArray[np.int64]) -> None:
        """Record the first shard that is not complete. counts: number of values of each of its documents."""
        ends = (self._rows + np.cumsum(counts)).astype(INDEX)
        self._append("teacher_ends", ends)
        ends_sha256 = hashlib.sha256(ends.data).hexdigest()
        rows, self._rows = int(counts.sum()), self._rows + int(counts.sum())
        self._complete({"rows": rows, "sha256": self._digest.hexdigest(), "ends_sha256": ends_sha256})
        self._digest = hashlib.sha256()

    def summarise(self, **found: Any) -> dict[str, Any]:
        return super().summarise(vocabulary_size=self._vocabulary_size, rows=self._rows, **found)
