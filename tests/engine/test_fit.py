"""Tests of fit: data of all kinds, resume, held-out losses, and directories that it refuses."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from marks import slow

import jaxopt_llm
from jaxopt_llm.config import Config, fields
from jaxopt_llm.core.errors import CheckpointError, InputError, Preempted
from jaxopt_llm.engine import checks
from jaxopt_llm.engine.checks import EngineWarning
from jaxopt_llm.engine.fit import _resolve_config
from jaxopt_llm.run import loop

ROWS, STEPS = 16, 6


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(nnx.relu(self.up(x))))


def loss(model: Network, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    error = model(batch["x"]) - batch["y"]
    return jnp.mean(error**2), {"error": jnp.mean(jnp.abs(error))}


def make_batch(step: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(step).normal(size=(ROWS, 8)).astype(np.float32)
    return {"x": x, "y": np.abs(x).mean(1, keepdims=True)}


def make_engine(**sections: Any) -> jaxopt_llm.Engine:
    given = {"mesh": {"fsdp": 8}, "checkpoint": {"every": 2}, "logging": {"every": 1, "tensorboard": False}} | sections
    config = Config(**given, precision={"compute_dtype": "float32"})  # type: ignore[arg-type]
    return jaxopt_llm.initialize(lambda: Network(nnx.Rngs(0)), loss, make_batch(0), config, optax.adamw(1e-2))


def leaves(engine: jaxopt_llm.Engine) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(engine.state)]


def read_records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


class Rows:
    """Dataset of rows, with a column that the example does not have, and lists in place of arrays."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = make_batch(index)
        return {"x": row["x"][0].tolist(), "y": row["y"][0].tolist(), "name": f"row {index}"}


class Stream:
    """Iterable of batches."""

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return map(make_batch, range(4))


def read_function() -> Callable[[int], dict[str, np.ndarray]]:
    return make_batch


def list_batches() -> list[dict[str, np.ndarray]]:
    return [make_batch(step) for step in range(3)]


@pytest.mark.parametrize("make_data", [Rows, *slow(Stream, read_function, list_batches)])
def test_a_run_in_two_parts_ends_equal_to_the_bit(make_data: Callable[[], Any], tmp_path: Path) -> None:
    whole = jaxopt_llm.fit(make_engine(), make_data(), STEPS, tmp_path / "whole")
    jaxopt_llm.fit(make_engine(), make_data(), STEPS // 2, tmp_path / "parts")
    resumed = jaxopt_llm.fit(make_engine(), make_data(), STEPS, tmp_path / "parts")
    for one, other in zip(leaves(whole), leaves(resumed), strict=True):
        np.testing.assert_array_equal(one, other)
    records = [[record["loss"] for record in read_records(tmp_path / name)] for name in ("whole", "parts")]
    assert records[0] == records[1] and len(records[0]) == STEPS


def test_a_dataset_of_rows_is_shuffled_anew_in_each_epoch() -> None:
    from jaxopt_llm.engine.batches import BatchRows, make_batches

    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batch(0))
    batches = make_batches(Rows(), BatchRows(example, range(ROWS)), seed=0)
    rows = [row.tobytes() for step in range(5) for row in batches.batch_at(step)["x"]]
    epochs = rows[:40], rows[40:80]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(np.float32(Rows()[i]["x"]).tobytes() for i in range(40))
    assert epochs[0] != epochs[1]


def test_records_have_the_held_out_loss_without_dropout(tmp_path: Path) -> None:
    held_out = [make_batch(100), make_batch(101)]
    engine = jaxopt_llm.fit(make_engine(evaluation={"every": 3}), make_batch, STEPS, tmp_path, held_out)
    records = read_records(tmp_path)
    assert [record["step"] for record in records if "eval_loss" in record] == [3, 6]
    model = engine.model()
    model.eval()
    expected = np.mean([float(loss(model, batch)[0]) for batch in held_out])
    assert records[-1]["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert records[-1]["rows"] == STEPS * ROWS and "error" in records[-1]


def test_a_signal_ends_the_run_after_its_step_and_its_checkpoint(tmp_path: Path) -> None:
    def interrupt(step: int) -> dict[str, np.ndarray]:
        if step == 4:  # read ahead by a thread, two steps before it is trained on
            os.kill(os.getpid(), signal.SIGTERM)
        return make_batch(step)

    with pytest.raises(Preempted):
        jaxopt_llm.fit(make_engine(checkpoint={"every": 1000}), interrupt, 1000, tmp_path)
    stopped = read_records(tmp_path)[-1]["step"]
    assert (tmp_path / "checkpoints" / str(stopped)).is_dir()
    resumed = jaxopt_llm.fit(make_engine(), make_batch, stopped + 1, tmp_path)
    whole = jaxopt_llm.fit(make_engine(), make_batch, stopped + 1, tmp_path / "whole")
    for one, other in zip(leaves(whole), leaves(resumed), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_signal_at_the_end_of_a_run_reaches_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received = list[int]()
    monkeypatch.setattr(loop, "check_end", lambda *_: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda signum, frame: received.append(signum))
    try:
        jaxopt_llm.fit(make_engine(), make_batch, 1, tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "neither a function of the step"),
        ([], "the dataset is empty"),
        (lambda step: {"x": make_batch(step)["x"]}, "y is missing"),
        (
            lambda step: make_batch(step) | {"x": np.zeros(16)},
            r"batch 0 of .*: x is float64\[16\], and the example has",
        ),
        (lambda step: make_batch(step) | {"x": np.zeros((4, 8))}, r"no common number of rows, .*\(x: 4, y: 16\)"),
        ([{"x": np.zeros((1, 1, 8)), "y": np.zeros(1)}], r"x is float64\[1,1,8\], and the example has float32\[8\]"),
        ([{"x": np.zeros(7), "y": np.zeros(1)}], r"x float32\[16,7\] .* the loss fails with it: "),
        ([{"x": np.zeros(7 + n), "y": np.zeros(1)} for n in range(20)], "rows of x have different shapes"),
    ],
)
def test_data_that_does_not_fit_is_named(data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        jaxopt_llm.fit(make_engine(), data, STEPS, tmp_path / "run")


def test_fit_shows_the_metrics_of_the_loss(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    jaxopt_llm.fit(make_engine(), make_batch, 1, tmp_path, [make_batch(100)])
    (record,) = read_records(tmp_path)
    shown = f"error {record['error']:.4f} (held-out {record['eval_error']:.4f})"
    assert shown in capfd.readouterr().out


def test_one_batch_in_place_of_a_list_is_named(tmp_path: Path) -> None:
    engine = make_engine()
    with pytest.raises(InputError, match="evaluate: this is one batch"):
        engine.evaluate(make_batch(0))
    with pytest.raises(InputError, match="held_out: this is one batch"):
        jaxopt_llm.fit(engine, make_batch, 1, tmp_path / "run", make_batch(0))


@pytest.mark.parametrize(
    ("steps", "message"), [(0, "training.steps=0"), ("3", "training.steps='3': must be a whole"), (3.0, "steps=3.0")]
)
def test_steps_that_are_no_number_of_steps_are_refused(steps: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"fit: .*{message}"):
        jaxopt_llm.fit(make_engine(), make_batch, steps, tmp_path / "run")


def test_another_number_of_rows_is_another_run(tmp_path: Path) -> None:
    jaxopt_llm.fit(make_engine(), make_batch, 1, tmp_path)
    wide = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf]), make_batch(0))
    config = Config(mesh={"fsdp": 8}, precision={"compute_dtype": "float32"})  # type: ignore[arg-type]
    engine = jaxopt_llm.initialize(lambda: Network(nnx.Rngs(0)), loss, wide, config, optax.adamw(1e-2))
    with pytest.raises(InputError, match="holds another run: training.batch_size was 16 and is 32"):
        jaxopt_llm.fit(engine, lambda step: wide, 2, tmp_path)


def test_a_warm_up_that_does_not_end_is_named(tmp_path: Path) -> None:
    config = Config(mesh={"fsdp": 8}, precision={"compute_dtype": "float32"})  # type: ignore[arg-type]
    engine = jaxopt_llm.initialize(lambda: Network(nnx.Rngs(0)), loss, make_batch(0), config)
    with pytest.warns(EngineWarning, match="schedule.warmup_steps=100 reaches the end of the run, step 1"):
        jaxopt_llm.fit(engine, make_batch, 1, tmp_path)


def test_a_share_of_the_warm_up_is_named_as_it_is_given(tmp_path: Path) -> None:
    config = Config(
        mesh={"fsdp": 8},  # type: ignore[arg-type]
        precision={"compute_dtype": "float32"},  # type: ignore[arg-type]
        schedule={"warmup_steps": 0.9},  # type: ignore[arg-type]
    )
    engine = jaxopt_llm.initialize(lambda: Network(nnx.Rngs(0)), loss, make_batch(0), config)
    with pytest.warns(
        EngineWarning, match=r"^schedule.warmup_steps=0.9 \(\d+ steps\) reaches the end of the run, step 2"
    ):
        jaxopt_llm.fit(engine, make_batch, 2, tmp_path)


def test_a_warm_up_that_cannot_be_is_refused_before_the_end_is_chosen() -> None:
    config = Config(schedule={"warmup_steps": 1.5})  # type: ignore[arg-type]
    engine: Any = SimpleNamespace(example=make_batch(0), has_schedule=True)
    with pytest.raises(InputError, match=r"^config: schedule.warmup_steps=1.5"):
        _resolve_config(engine, config, 10)


def test_another_run_in_the_directory_is_not_overwritten(tmp_path: Path) -> None:
    jaxopt_llm.fit(make_engine(), make_batch, 2, tmp_path)
    before = (tmp_path / "config.json").read_text()
    with pytest.raises(InputError, match=r"holds another run.*run\.seed"):
        jaxopt_llm.fit(make_engine(run={"seed": 1}), make_batch, 4, tmp_path)
    (tmp_path / "parameters.json").unlink()
    with pytest.raises(InputError, match="checkpoints that fit did not write"):
        jaxopt_llm.fit(make_engine(), make_batch, 4, tmp_path)
    assert (tmp_path / "config.json").read_text() == before


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    engine = make_engine()
    engine.step(make_batch(0))
    engine.save(tmp_path)
    factory = lambda: Network(nnx.Rngs(0))  # noqa: E731
    other = jaxopt_llm.initialize(factory, loss, make_batch(0), engine.config, optax.sgd(1e-2))
    with pytest.raises(CheckpointError, match=r"also holds moments.*another optimizer"):
        other.restore(tmp_path)
    with pytest.raises(InputError, match="the restore of step 1 failed"):
        other.step(make_batch(0))


@pytest.mark.parametrize(
    "name",
    [
        *("watchdog.factor", "watchdog.single_process", "run.check_replicas", "checkpoint.replicate_every"),
        *("training.on_spike", "training.spike_factor", "distributed.timeout_seconds"),
    ],
)
def test_settings_of_the_loop_are_those_of_an_engine(name: str) -> None:
    other = {bool: True, str: "skip"}.get(type(fields.get_field(Config(), name)), 7)
    assert checks.find_unread(fields.replace_fields(Config(), {name: other})) == []


def test_an_optimizer_or_a_loss_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match=r"loss: 'mse' is no function; give one of \(model, batch\)"):
        jaxopt_llm.initialize(lambda: Network(nnx.Rngs(0)), "mse", make_batch(0))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="adam is no optax transformation"):
        jaxopt_llm.initialize(lambda: Network(nnx.Rngs(0)), loss, make_batch(0), optimizer=optax.adam)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"the class Network needs arguments.*lambda: Network"):
        jaxopt_llm.initialize(Network, loss, make_batch(0))


@pytest.mark.parametrize("sections", [{"optimizer": {"clip_norm": 0.5}}, {"schedule": {"warmup_steps": 5}}])
def test_settings_that_an_optax_transformation_hides_are_named(sections: dict[str, Any]) -> None:
    ((section, settings),) = sections.items()
    with pytest.warns(EngineWarning, match=rf"{section}\.{next(iter(settings))} has no effect"):
        make_engine(**sections)


def test_the_schedule_ends_with_the_steps_of_the_first_call(tmp_path: Path) -> None:
    def make(**schedule: Any) -> jaxopt_llm.Engine:
        config = Config(
            mesh={"fsdp": 8},  # type: ignore[arg-type]
            precision={"compute_dtype": "float32"},  # type: ignore[arg-type]
            optimizer={"learning_rate": 1e-2},  # type: ignore[arg-type]
            schedule={"warmup_steps": 0, "final_share": 0.5} | schedule,  # type: ignore[arg-type]
            logging={"every": 1, "tensorboard": False},  # type: ignore[arg-type]
        )
        return jaxopt_llm.initialize(lambda: Network(nnx.Rngs(0)), loss, make_batch(0), config)

    first = jaxopt_llm.fit(make(), make_batch, 4, tmp_path / "run")
    jaxopt_llm.fit(make(), make_batch, 6, tmp_path / "run")
    rates = [record["learning_rate"] for record in read_records(tmp_path / "run")]
    assert rates[0] < 1e-2 and rates[3:] == pytest.approx([5e-3] * 3) and rates == sorted(rates, reverse=True)
    # The engine keeps the schedule: its next step has the final rate, too.
    assert float(first.step(make_batch(4))["learning_rate"]) == pytest.approx(5e-3)
    with pytest.raises(InputError, match="holds another run: schedule.decay_steps was 4 and is 5"):
        jaxopt_llm.fit(make(decay_steps=5), make_batch, 6, tmp_path / "run")


def test_an_engine_that_has_trained_begins_no_run(tmp_path: Path) -> None:
    engine = make_engine()
    engine.step(make_batch(0))
    with pytest.raises(InputError, match=r"the engine has trained for 1 step\(s\), and .* holds no run"):
        jaxopt_llm.fit(engine, make_batch, 2, tmp_path)


def test_a_generator_is_read_once(tmp_path: Path) -> None:
    batches = (make_batch(step) for step in range(10))
    engine = jaxopt_llm.fit(make_engine(), batches, 2, tmp_path)
    with pytest.raises(InputError, match="the generator has been read before; give a new one"):
        jaxopt_llm.fit(engine, batches, 4, tmp_path)


@pytest.mark.parametrize(
    "held_out", [[make_batch(0), {"x": make_batch(0)["x"][:4], "y": make_batch(0)["y"]}], make_batch]
)
def test_held_out_batches_are_checked_before_the_first_step(held_out: Any, tmp_path: Path) -> None:
    message = "held_out, batch 1: its arrays have no common number of rows|held_out: function is no iterable"
    with pytest.raises(InputError, match=message):
        jaxopt_llm.fit(make_engine(), make_batch, 1, tmp_path / "run", held_out)
    assert not (tmp_path / "run").exists()


def test_reading_held_out_batches_makes_progress(tmp_path: Path) -> None:
    engine, seen = make_engine(), []

    def read_held_out() -> Iterator[Any]:
        for step in range(3):
            seen.append(engine.processes.main.progress)
            yield make_batch(step)
        raise InputError("enough")

    with pytest.raises(InputError, match="enough"):
        jaxopt_llm.fit(engine, make_batch, 1, tmp_path / "run", read_held_out())
    assert [(each.phase, each.beats) for each in seen if each] == [("prepare", 0), ("prepare", 1), ("prepare", 2)]


def test_a_function_that_takes_rows_by_name_only_is_refused(tmp_path: Path) -> None:
    def data(step: int, *, rows: Any) -> Any:
        return make_batch(step)

    with pytest.raises(InputError, match=r"takes rows by name only; make it data\(step\) or data\(step, rows\)"):
        jaxopt_llm.fit(make_engine(), data, 1, tmp_path / "run")
