"""Verification of prepared corpora in the background of a run.

A run opens a prepared corpus without reading it. A thread then reads all of it, and compares the hashes, while the run
compiles and trains. The run asks for the result before it writes a checkpoint.
"""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from jaxopt_llm.data.tokens.prepared import MANIFEST, verify_corpus

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
