"""Tests of the verification of prepared corpora in the background of a run."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import command, train
from texts import write_jsonl

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens import prepared
from jaxopt_llm.data.tokens.prepared import Verification, find_prepared, verify_corpus


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "text.jsonl", [f"document {number} " * 40 for number in range(40)])
    done = command("prepare", "--input", tmp_path / "text.jsonl", "--output", tmp_path / "corpus")
    assert done.returncode == 0, done.stderr
    return tmp_path / "corpus"


def change(corpus: Path, at: int) -> None:
    """Flip a bit of a token."""
    content = bytearray((corpus / "tokens.bin").read_bytes())
    content[at] ^= 1
    (corpus / "tokens.bin").write_bytes(content)


def test_a_changed_byte_is_found_before_the_first_checkpoint(corpus: Path) -> None:
    """The run itself does not notice: the byte is another token."""
    run = corpus.parent / "run"
    change(corpus, 1001)
    refused = train(run, "--data.paths", corpus, "--training.steps", 3, "--checkpoint.every", 1)
    assert refused.returncode == 2
    assert f"{corpus} is damaged: bytes 0 to " in refused.stderr and "of tokens.bin, shard 0" in refused.stderr
    assert not list((run / "checkpoints").iterdir())
    change(corpus, 1001)
    done = train(run, "--data.paths", corpus, "--training.steps", 3, "--checkpoint.every", 1)
    assert done.returncode == 0, done.stderr


def test_a_check_waits_only_if_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint waits for the result, a step does not. The end of a run stops the reading."""
    begun, allowed = threading.Event(), threading.Event()

    def wait_for_end(corpus: Path, workers: int, share: tuple[int, int], cancelled: Callable[[], bool]) -> None:
        while not cancelled():
            time.sleep(0.001)

    def verify(corpus: Path, *_: object) -> None:
        begun.set()
        allowed.wait(60)
        raise InputError(f"{corpus} is damaged")

    monkeypatch.setattr(prepared, "verify_corpus", verify)
    with Verification([Path("corpus")]) as checked:
        assert begun.wait(60)
        checked.check(False, no_beat)
        threading.Timer(0.05, allowed.set).start()
        with pytest.raises(InputError, match="corpus is damaged"):
            checked.check(True, no_beat)
        with pytest.raises(InputError):
            checked.check(False, no_beat)
    monkeypatch.setattr(prepared, "verify_corpus", wait_for_end)
    with Verification([Path("corpus")]):
        pass


def no_beat() -> None:
    raise AssertionError("the reading did not advance")


def test_a_check_that_waits_notes_the_progress_of_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the watchdog would end a job that reads a large corpus on slow storage."""
    beats = list[float]()

    def read_slowly(corpus: Path, workers: int, share: tuple[int, int], cancelled: Callable[[], bool]) -> None:
        while len(beats) < 3:
            cancelled()
            time.sleep(0.001)

    monkeypatch.setattr(prepared, "verify_corpus", read_slowly)
    monkeypatch.setattr(prepared, "LOOK_SECONDS", 0.02)
    with Verification([Path("corpus")]) as checked:
        checked.check(True, lambda: beats.append(time.monotonic()))
    assert len(beats) >= 3


def test_processes_together_verify_every_shard(corpus: Path) -> None:
    """The corpus has one shard, which belongs to the first of two processes."""
    assert find_prepared([str(corpus), str(corpus.parent / "text.jsonl"), "s3://bucket/file"]) == [corpus]
    change(corpus, 7)
    with pytest.raises(InputError, match="is damaged"):
        verify_corpus(corpus, 1, (0, 2))
    verify_corpus(corpus, 1, (1, 2))
    verify_corpus(corpus, 1, cancelled=lambda: True)
