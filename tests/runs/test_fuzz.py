"""Mutated inputs of every kind are read or refused with one line: benchmarks/fuzz.py with fewer inputs."""

import os
from pathlib import Path

import fuzz
import pytest
from fuzz_inputs import KINDS, Kind, Outcome, copy_sample, read_mutated

SEED = 2026
INPUTS = 40  # of each kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_valid(kind: str, tmp_path: Path) -> None:
    """Otherwise every mutation would be refused for the same reason."""
    content = copy_sample(KINDS[kind], tmp_path / "files")
    assert read_mutated(KINDS[kind], tmp_path / "files", content) == Outcome("read")


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_inputs_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    outcomes = {number: fuzz.read_input((kind, number), SEED, tmp_path) for number in range(INPUTS)}
    bad = {number: outcome for number, outcome in outcomes.items() if outcome.verdict in fuzz.BAD}
    assert bad == {}  # these would be failures of this package


def test_an_input_depends_only_on_the_seed_its_kind_and_its_number() -> None:
    sample = b'{"a": [1, 2.5, {"b": "text"}]}'
    made = [fuzz.mutate("config.json", SEED, number, sample) for number in range(50)]
    assert made == [fuzz.mutate("config.json", SEED, number, sample) for number in range(50)]
    assert len(set(made)) > 40
    assert fuzz.mutate("config.json", SEED + 1, 0, sample) != made[0] != fuzz.mutate("index", SEED, 0, sample)


def harmful(folder: Path) -> None:
    content = (folder / "a").read_bytes()
    if content == b"abort":
        os.abort()
    if content == b"trace":
        raise KeyError(5)
    if content == b"lines":
        raise OSError("two\nlines")


@pytest.mark.parametrize(("content", "verdict"), [(b"trace", "traceback"), (b"lines", "unnamed"), (b"", "read")])
def test_verdicts(content: bytes, verdict: str, tmp_path: Path) -> None:
    kind = Kind("a", lambda folder: None, harmful, ())
    assert read_mutated(kind, tmp_path, content).verdict == verdict


@pytest.mark.slow
def test_an_input_that_ends_its_worker_is_counted_and_the_next_one_is_read(tmp_path: Path) -> None:
    outcomes = dict(fuzz.attempt_all([("unknown", 0), ("npy", 0)], SEED, 1, tmp_path))
    assert outcomes["unknown", 0] == Outcome("abort", "exit code 1")
    assert outcomes["npy", 0].verdict in fuzz.GOOD
