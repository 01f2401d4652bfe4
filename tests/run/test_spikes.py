"""Tests of spikes of the loss: what counts as one, and what a run does after one."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxopt_llm
from jaxopt_llm.config import Config
from jaxopt_llm.core.errors import TrainingDiverged
from jaxopt_llm.run import divergence
from jaxopt_llm.run.divergence import SkippedBatches
from jaxopt_llm.step import guard

STEPS, SPIKE = 14, 9


@pytest.mark.parametrize("sign", [1, -1])
def test_a_spike_is_told_by_the_median_of_the_last_losses(sign: int) -> None:
    """Losses of a user's model may be negative: their limit is as far above the median."""
    judge = functools.partial(guard.judge_step, spikes=1.5)
    losses = jnp.full(guard.HISTORY, sign * 2.0).at[0].set(1e9)
    known = {**guard.initialize_guard(), "updates": jnp.int32(guard.HISTORY), "losses": losses}
    limit = 3.0 if sign > 0 else -1.0
    for loss, good in ((limit - 0.01, True), (limit + 0.01, False)):
        found, after = judge(known, jnp.float32(loss), jnp.float32(1), jnp.bool(False))
        assert bool(found) == good
        assert (after["losses"] == losses).all() == (not good)
    early = {**known, "updates": jnp.int32(guard.HISTORY - 1)}
    assert judge(early, jnp.float32(limit + 1), jnp.float32(1), jnp.bool(False))[0]


def test_left_out_batches_move_those_of_later_steps() -> None:
    """Two ranges from the same checkpoint, and one from a later checkpoint."""
    left_out = SkippedBatches().leave_out(4, 9).leave_out(4, 6)
    assert left_out.ranges == ((4, 9), (9, 11)) and left_out.batch_after(4) == 11
    left_out = left_out.leave_out(8, 9)
    assert left_out.ranges[-1] == (15, 16) and left_out.batch_after(8) == 16
    assert SkippedBatches.from_record(json.loads(json.dumps(left_out.to_record()))) == left_out


def make_batch(index: int) -> np.ndarray:
    """Return a batch of small numbers, or for batch SPIKE - 1 of large ones."""
    return np.random.default_rng(index).normal(size=(8, 4)).astype(np.float32) * (9 if index == SPIKE - 1 else 1)


def loss(model: Any, batch: jax.Array) -> jax.Array:
    return 1 + jnp.mean((batch @ model["w"]) ** 2)


def make_engine(every: int = 5, **training: Any) -> jaxopt_llm.Engine:
    sections = {
        "mesh": {"fsdp": 8},
        "checkpoint": {"every": every},
        "logging": {"every": 1, "tensorboard": False},
        "precision": {"compute_dtype": "float32"},
        "training": {"spike_factor": 4.0} | training if training else {},
    }
    return jaxopt_llm.initialize(
        lambda: {"w": jnp.ones((4, 2))}, loss, make_batch(0), Config(**sections), optax.adamw(1e-3)
    )


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the batches that were trained on, in order. The history of the guard is short."""
    monkeypatch.setattr(guard, "HISTORY", 4)
    return []


def read_with(read: list[int], make: Any = make_batch) -> Any:
    def batch_at(index: int) -> np.ndarray:
        read.append(index)
        return make(index)

    return batch_at


def read_lines(directory: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def masters(engine: jaxopt_llm.Engine) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(engine.state)]


def assert_equal(one: jaxopt_llm.Engine, other: jaxopt_llm.Engine) -> None:
    for left, right in zip(masters(one), masters(other), strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_rollback_leaves_out_the_batches_since_the_checkpoint(read: list[int], tmp_path: Path) -> None:
    """The run ends equal to the bit to one that never saw these batches, and so does a resume after the rollback."""

    def without(index: int) -> np.ndarray:
        return make_batch(index if index < 5 else index + SPIKE - 5)

    plain = jaxopt_llm.fit(make_engine(on_spike="rollback"), without, STEPS, tmp_path / "plain")
    engine = jaxopt_llm.fit(make_engine(on_spike="rollback"), read_with(read), STEPS, tmp_path / "run")
    assert_equal(engine, plain)
    assert {*range(5, 9)} <= {*read} and max(read) >= SPIKE + STEPS - 6
    (event,) = [each for each in read_lines(tmp_path / "run", "events.jsonl") if each["event"] == "rollback"]
    assert event["step"] == SPIKE and event["detail"] == "a spike: back to step 5, without batches 5 to 8"
    losses = [[each["loss"] for each in read_lines(tmp_path / name, "metrics.jsonl")] for name in ("plain", "run")]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
    record = json.loads((tmp_path / "run" / "checkpoints" / "10" / "checkpoint.json").read_text())
    assert record["skipped_batches"] == [[5, 9]]
    jaxopt_llm.fit(make_engine(on_spike="rollback"), make_batch, STEPS - 2, tmp_path / "parts")
    assert_equal(jaxopt_llm.fit(make_engine(on_spike="rollback"), make_batch, STEPS, tmp_path / "parts"), plain)


def test_a_skip_changes_nothing_but_the_position_in_the_data(read: list[int], tmp_path: Path) -> None:
    """Without a checkpoint, a rollback does the same. So does a run that is resumed before the spike and after it."""
    skipped = jaxopt_llm.fit(make_engine(on_spike="skip"), make_batch, STEPS, tmp_path / "skip")
    events = [each["step"] for each in read_lines(tmp_path / "skip", "events.jsonl") if each["event"] == "skipped"]
    assert events == [SPIKE]
    assert_equal(
        jaxopt_llm.fit(make_engine(100, on_spike="rollback"), make_batch, STEPS, tmp_path / "rollback"), skipped
    )
    for steps in (SPIKE - 2, STEPS - 2, STEPS):
        parts = jaxopt_llm.fit(make_engine(on_spike="skip"), make_batch, steps, tmp_path / "parts")
    assert_equal(parts, skipped)
    losses = [[each["loss"] for each in read_lines(tmp_path / name, "metrics.jsonl")] for name in ("skip", "parts")]
    assert losses[0] == losses[1] and len(losses[0]) >= STEPS - 1
    off = jaxopt_llm.fit(make_engine(), make_batch, STEPS, tmp_path / "off")
    assert any((left != right).any() for left, right in zip(masters(off), masters(skipped), strict=True))


def test_rollbacks_without_an_end_end_the_run(read: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "SKIP_LIMIT", 2)

    def always(index: int) -> np.ndarray:
        return make_batch(index) * (1 if index < 7 else 9)

    engine = make_engine(on_spike="rollback")
    with pytest.raises(TrainingDiverged, match="a spike after 2 others returns to step 5"):
        jaxopt_llm.fit(engine, always, STEPS, tmp_path)
    assert [each["event"] for each in read_lines(tmp_path, "events.jsonl")].count("rollback") == 2


def test_a_checkpoint_that_is_due_at_a_skipped_step_is_that_of_the_next_one(read: list[int], tmp_path: Path) -> None:
    jaxopt_llm.fit(make_engine(SPIKE, on_spike="skip"), make_batch, STEPS, tmp_path)
    saved = [each["step"] for each in read_lines(tmp_path, "events.jsonl") if each["event"] == "checkpoint"]
    assert saved == [SPIKE + 1, STEPS]


def test_a_finished_run_that_is_started_again_adds_nothing_to_its_history(tmp_path: Path) -> None:
    for _ in range(2):
        jaxopt_llm.fit(make_engine(), make_batch, 2, tmp_path)
    events = [(each["step"], each["event"]) for each in read_lines(tmp_path, "events.jsonl")]
    assert [event for event in events if event[1] != "checkpoint"] == [(0, "start"), (2, "end")]
