"""Metrics of a loss: means, sums, maxima and pairs over microbatches, devices, batches of an evaluation and records."""

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
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.observe import meter
from jaxopt_llm.observe.meter import MetricsWindow

ROWS = 24


def make_batch(step: int) -> dict[str, np.ndarray]:
    """Return rows of which some count nothing; in step 2 none is positive."""
    random = np.random.RandomState(step)
    x = random.randn(ROWS, 4).astype(np.float32)
    return {
        "x": -np.abs(x) if step == 2 else x,
        "y": random.randn(ROWS).astype(np.float32),
        "mask": (np.arange(ROWS) % (step + 2) > 0).astype(np.float32),
    }


def loss(params: Any, batch: Any) -> tuple[tuple[jax.Array, jax.Array], dict[str, Any]]:
    error = jnp.abs(batch["x"] @ params["w"] - batch["y"])
    mask, positive = batch["mask"], batch["mask"] * (batch["x"][:, 0] > 0)
    count = jnp.sum(mask)
    metrics = {
        "absolute": jnp.sum(error * mask) / count,
        "tokens": jaxopt_llm.Sum(count),
        "worst": jaxopt_llm.Max(jnp.max(error * mask)),
        "of_positive": (jnp.sum(error * positive), jnp.sum(positive)),
    }
    return (jnp.sum(error**2 * mask), count), metrics


def make_engine(accumulation: int = 1, **sections: Any) -> jaxopt_llm.Engine:
    config = Config(
        mesh={"data": 2, "fsdp": 4},  # type: ignore[arg-type]
        training={"accumulation": accumulation},  # type: ignore[arg-type]
        precision={"compute_dtype": "float32"},  # type: ignore[arg-type]
        **sections,
    )
    return jaxopt_llm.initialize(lambda: {"w": jnp.ones(4)}, loss, make_batch(0), config, optax.sgd(0.05))


def train_plainly(steps: int) -> list[np.ndarray]:
    """Return the weights before each step, and after the last one."""
    weights = [np.ones(4, np.float32)]
    for step in range(steps):
        weights.append(np.asarray(weights[-1] - 0.05 * jax.grad(mean_loss)(weights[-1], make_batch(step))))
    return weights


def mean_loss(w: jax.Array, batch: Any) -> jax.Array:
    (total, count), _ = loss({"w": w}, batch)
    return total / count


def expected(weights: list[np.ndarray], batches: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """Return the metrics of all rows together. The plain one is the mean over the masked rows of all batches."""
    errors = [np.abs(batch["x"] @ w - batch["y"]) for w, batch in zip(weights, batches, strict=True)]
    error, mask = np.concatenate(errors), np.concatenate([batch["mask"] for batch in batches])
    positive = mask * (np.concatenate([batch["x"] for batch in batches])[:, 0] > 0)
    return {
        "absolute": float(np.average(error, weights=mask)),
        "tokens": float(mask.sum()),
        "worst": float((error * mask).max()),
        "of_positive": float((error * positive).sum() / max(positive.sum(), 1)),
    }


def read_records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_metrics_of_a_step_and_of_an_evaluation_are_those_of_all_rows(accumulation: int) -> None:
    engine, weights = make_engine(accumulation), train_plainly(3)
    for step in range(3):
        metrics = engine.step(make_batch(step))
        wanted = expected([weights[step]], [make_batch(step)])
        assert all(isinstance(value, jax.Array) for value in metrics.values())
        assert {name: float(metrics[name]) for name in wanted} == pytest.approx(wanted, rel=1e-5)
    batches = [make_batch(step) for step in (2, 5, 6)]
    found = engine.evaluate(batches)
    wanted = expected([weights[3]] * 3, batches)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)


def test_a_record_has_the_metrics_of_the_steps_since_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records after steps 3 and 6. The run stops at step 5, and the checkpoint holds the metrics of steps 4 and 5."""
    monkeypatch.setattr(meter, "LONGEST", 2)  # the metrics of steps 1 and 2 are read before the record
    sections = {
        "logging": {"every": 3, "tensorboard": False},
        "checkpoint": {"every": 5},
        "evaluation": {"every": 0},
    }
    for steps in (5, 6):
        jaxopt_llm.fit(make_engine(3, **sections), make_batch, steps, tmp_path)
    weights, records = train_plainly(6), read_records(tmp_path)
    assert [record["step"] for record in records] == [3, 6]
    for record, steps_of in zip(records, (range(3), range(3, 6)), strict=True):
        of_steps = [expected([weights[step]], [make_batch(step)])["absolute"] for step in steps_of]
        wanted = expected([weights[step] for step in steps_of], [make_batch(step) for step in steps_of])
        wanted["absolute"] = float(np.mean(of_steps))  # as for the loss, each step counts as much
        assert {name: record[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)


def test_a_resumed_run_records_the_metrics_from_before_the_stop() -> None:
    def metrics(step: int) -> dict[str, Any]:
        value = jnp.float32(step)
        return {
            "plain": value,
            "load": value + jnp.arange(2.0),
            "sum": meter.Sum(value),
            "max": meter.Max(-value),
            "mean": meter.Mean(value, value),
        }

    window = MetricsWindow()
    window.add(metrics(1))
    window.add(metrics(2))
    record = json.loads(json.dumps(window.to_record()))
    resumed = MetricsWindow.from_record(record)
    resumed.add(metrics(6))
    resumed.add(metrics(7))
    found = {name: value.tolist() for name, value in resumed.read().items()}
    assert found == {"plain": 4.0, "load": [4.0, 5.0], "sum": 16.0, "max": -1.0, "mean": (1 + 4 + 36 + 49) / 16}
    other = MetricsWindow.from_record(record)  # the loss has changed
    other.add({"sum": meter.Max(jnp.float32(3))})
    assert other.read()["sum"] == 3.0


def test_metrics_do_not_wait_on_the_devices_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    device_get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda steps: (reads.append(len(steps)), device_get(steps))[1])
    window = MetricsWindow()
    for step in range(2 * meter.LONGEST + 1):
        window.add({"sum": meter.Sum(jnp.float32(step))})
    assert window.read()["sum"] == meter.LONGEST * (2 * meter.LONGEST + 1)
    assert reads == [meter.LONGEST, meter.LONGEST, 1]


def test_a_loss_that_is_not_finite_takes_no_part_in_a_record(tmp_path: Path) -> None:
    """Nor do the metrics of its step, such as one that divides by a number of labels."""

    def batch_at(step: int) -> dict[str, np.ndarray]:
        batch = make_batch(step)
        return batch | {"y": batch["y"] * np.nan} if step == 1 else batch

    sections = {"logging": {"every": 2, "tensorboard": False}, "evaluation": {"every": 0}}
    jaxopt_llm.fit(make_engine(1, **sections), batch_at, 2, tmp_path)
    (record,) = read_records(tmp_path)
    assert record["tokens"] == make_batch(0)["mask"].sum() and record["worst"] is not None


def test_a_held_out_metric_that_is_not_a_number_is_null(tmp_path: Path) -> None:
    def divides(params: Any, batch: Any) -> Any:
        value, _ = loss(params, batch)
        return value, {"undefined": jnp.sum(batch["x"]) * jnp.nan}

    config = Config(logging={"tensorboard": False}, evaluation={"every": 1})  # type: ignore[arg-type]
    engine = jaxopt_llm.initialize(lambda: {"w": jnp.ones(4)}, divides, make_batch(0), config, optax.sgd(0.05))
    jaxopt_llm.fit(engine, make_batch, 1, tmp_path, held_out=[make_batch(1)])
    (record,) = read_records(tmp_path)
    assert record["undefined"] is record["eval_undefined"] is None and record["eval_loss"] > 0


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ({"x": jaxopt_llm.Sum(jnp.ones(3))}, r"metric x is not a scalar, it has shape \[3\]; .* jaxopt_llm.Sum"),
        ({"x": (1.0, 2.0, 3.0)}, "metric x is not a scalar, it has type tuple"),
        ({"x": (1.0, None)}, "metric x is not a scalar, it has type NoneType"),
        ({"x": jaxopt_llm.Max((1.0, 2.0))}, "metric x is not a scalar, it has type tuple"),
        ({"x": jaxopt_llm.Max(jnp.complex64(1j))}, "metric x is complex"),
        ({"learning_rate/head": 1.0}, "a metric is named learning_rate/head, which is the name"),
        ({"step": 1.0}, "a metric is named step, which is the name"),
        ({1: 1.0}, "a metric is named 1; give it a name that is text"),
    ],
)
def test_what_is_no_metric_is_refused_by_name(metric: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"loss: {message}"):
        jaxopt_llm.initialize(
            lambda: {"w": jnp.ones(4)}, lambda params, batch: (loss(params, batch)[0], metric), make_batch(0)
        )


def test_a_metric_may_have_a_name_below_that_of_the_loss(tmp_path: Path) -> None:
    def parts(params: Any, batch: Any) -> Any:
        return loss(params, batch)[0], {"loss/ones": jnp.float32(1.0)}

    config = Config(logging={"every": 2, "tensorboard": False})  # type: ignore[arg-type]
    engine = jaxopt_llm.initialize(lambda: {"w": jnp.ones(4)}, parts, make_batch(0), config, optax.sgd(0.05))
    jaxopt_llm.fit(engine, make_batch, 2, tmp_path)
    (record,) = read_records(tmp_path)
    assert record["loss/ones"] == 1.0
