"""Verification of prepared corpora in the background of a run.

A run opens a prepared corpus without reading it. A thread then reads all of it, and compares the hashes, while the run
compiles and trains. The run asks for the result before it writes a checkpoint.
"""

import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from jaxopt_llm.data.prepared import MANIFEST, verify_corpus

WORKERS = max(1, (os.cpu_count() or 1) // 4)  # threads that hash; most cores stay with the batches


class Verification:
    """Verification that runs in a thread. A context manager: on exit it stops."""

    def __init__(self, corpora: Sequence[Path], share: tuple[int, int] = (0, 1)) -> None:
        """Name the directories of the corpora. share: see `verify_corpus`."""
        self._corpora, self._share = corpora, share
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, "verification")
        self._result: Future[None] | None = None

    def __enter__(self) -> "Verification":
        self._result = self._thread.submit(self._verify)
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.shutdown()

    def check(self, wait: bool) -> None:
        """Raise InputError if a corpus is damaged.

        Args:
            wait: wait until all of this process's share has been read.
        """
        assert self._result is not None
        if wait or self._result.done():
            self._result.result()

    def _verify(self) -> None:
        for corpus in self._corpora:
            verify_corpus(corpus, WORKERS, self._share, self._closed.is_set)


def find_prepared(files: Iterable[str]) -> list[Path]:
    """Return the prepared corpora among the paths and URLs of files."""
    return [path for path in map(Path, sorted(files)) if (path / MANIFEST).is_file()]
