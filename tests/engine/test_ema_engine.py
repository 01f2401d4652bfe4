"""The average of the weights of an engine: its values, its checkpoints, and that evaluation uses it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow

import jaxopt_llm
from jaxopt_llm.checkpoint.native import step_directories
from jaxopt_llm.config import Config, OptimizerConfig
from jaxopt_llm.core.errors import CheckpointError, InputError
from jaxopt_llm.parallel.offload import HOST
from jaxopt_llm.step import step, update

pytestmark = pytest.mark.core

ROWS, STEPS, LAYERS, WIDTH = 16, 6, 2, 16
DECAY = 0.2  # below (1 + n) / (10 + n) from the fourth update on: the warm-up ends within the steps
SKIPPED = 2  # the step whose batch is not finite


def make_parameters() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"first": (8, WIDTH), "layers": (LAYERS, WIDTH, WIDTH), "last": (WIDTH, 1)}
    drawn = {name: jax.random.normal(key, shape) / 4 for key, (name, shape) in zip(keys, shapes.items(), strict=False)}
    return drawn | {"temperature": jnp.float32(1)}


def loss(parameters: Any, batch: dict[str, jax.Array]) -> jax.Array:
    def layer(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ weights), None

    x, _ = jax.lax.scan(layer, batch["x"] @ parameters["first"], parameters["layers"])
    return jnp.mean((x @ parameters["last"] * parameters["temperature"] - batch["y"]) ** 2)


def make_batch(index: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(index).normal(size=(ROWS, 8)).astype(np.float32)
    return {"x": x, "y": np.abs(x).mean(1, keepdims=True)}


def make_engine(
    stage: int = 3,
    mesh: dict[str, int] | None = None,
    offload: bool = False,
    optimizer: Any = None,
    training: dict[str, Any] | None = None,
    **sections: Any,
) -> jaxopt_llm.Engine:
    given = {
        "mesh": mesh or {"fsdp": 8},
        "sharding": {"zero_stage": stage},
        "offload": {"optimizer": offload},
        "precision": {"compute_dtype": "float32"},
        "training": {"ema_decay": DECAY} | (training or {}),
        "checkpoint": {"every": 2},
        "logging": {"every": 1, "tensorboard": False},
    }
    if optimizer is None or isinstance(optimizer, OptimizerConfig):
        given["schedule"] = {"kind": "constant", "warmup_steps": 0}
        optimizer = optimizer or OptimizerConfig(learning_rate=0.05)
    return jaxopt_llm.initialize(make_parameters, loss, make_batch(0), Config(**(given | sections)), optimizer)


def to_host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def assert_equal(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, to_host(one), to_host(other))


@dataclass(frozen=True)
class Setting:
    name: str
    stage: int
    offload: bool = False
    accumulation: int = 1
    optimizer: Any = None
    lora: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def make_engine(self) -> jaxopt_llm.Engine:
        training = {"accumulation": self.accumulation}
        return make_engine(self.stage, None, self.offload, self.optimizer, training, lora=self.lora)


SETTINGS = [
    Setting("all layers at once", 3),
    *slow(
        Setting("undivided", 0, optimizer=optax.adamw(0.05)),
        Setting("beside a compute copy", 1, accumulation=2),
        Setting("layer by layer", 3, optimizer=OptimizerConfig(name="muon", learning_rate=0.05)),
        Setting("on the host, layer by layer", 2, offload=True),
    ),
    Setting("on the host, by parts, with optax", 3, offload=True, accumulation=2, optimizer=optax.adamw(0.05)),
    Setting("of adapters", 3, lora={"rank": 2, "base": "int8", "targets": ("*/layers", "*/first")}),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_average_is_that_of_numpy(setting: Setting) -> None:
    """A step that is skipped does not change a bit of it."""
    engine, updates = setting.make_engine(), 0
    expected = jax.tree.map(np.float64, to_host(engine.state.masters))
    assert_equal(engine.state.average, engine.state.masters)
    for index in range(STEPS):
        before, batch = to_host(engine.state.average), make_batch(index)
        engine.step(batch | {"x": batch["x"] * np.nan} if index == SKIPPED else batch)
        if index == SKIPPED:
            assert_equal(engine.state.average, before)
            continue
        decay = min(DECAY, (1 + updates) / (10 + updates))
        expected = jax.tree.map(
            lambda old, new, decay=decay: decay * old + (1 - decay) * new, expected, to_host(engine.state.masters)
        )
        updates += 1
    found = to_host(engine.state.average)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7), found, expected)
    apart = jax.tree.map(lambda one, other: np.abs(one - other).max(), found, to_host(engine.state.masters))
    assert min(jax.tree.leaves(apart)) > 1e-4
    on_host = {leaf.sharding.memory_kind == HOST for leaf in jax.tree.leaves(engine.state.average) if leaf.ndim}
    assert on_host == {setting.offload}


@pytest.mark.parametrize(("stage", "offload"), [(3, False), *slow((0, False)), (1, False), (3, True)])
def test_evaluation_and_the_model_are_of_the_average(stage: int, offload: bool) -> None:
    engine, held_out = make_engine(stage, offload=offload), make_batch(100)
    for index in range(STEPS):
        engine.step(make_batch(index))
    average, trained = engine.model(), engine.model(ema=False)
    by_name = {path[-1].key: leaf for path, leaf in jax.tree.leaves_with_path(engine.state.average)}
    assert_equal(average, by_name)
    losses = [float(loss(each, held_out)) for each in (average, trained)]
    assert engine.evaluate([held_out])["loss"] == pytest.approx(losses[0], rel=1e-5)
    assert engine.evaluate([held_out], ema=False)["loss"] == pytest.approx(losses[1], rel=1e-5)
    assert abs(losses[0] / losses[1] - 1) > 1e-3
    before = to_host(engine.state)
    engine.evaluate([held_out])
    assert_equal(engine.state, before)


def test_without_an_average_there_is_nothing_to_choose() -> None:
    engine = make_engine(training={"ema_decay": 0.0})
    engine.step(make_batch(0))
    assert engine.state.average is None
    assert engine.evaluate([make_batch(1)]) == engine.evaluate([make_batch(1)], ema=False)


@pytest.mark.parametrize("optimizer", [None, optax.adamw(0.05)], ids=["ours", "optax"])
def test_without_an_average_the_program_is_that_without_its_code(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lower() -> str:
        program = make_engine(optimizer=optimizer, training={"ema_decay": 0.0}).program
        return str(program.step.lower(program.state, program.batch).as_text())

    found = lower()
    monkeypatch.setattr(update, "move_average", lambda average, *rest: average)
    monkeypatch.setattr(step.StepSettings, "new_weight", lambda settings, guard: 0.0)
    assert lower() == found


def test_a_run_in_two_parts_ends_equal_to_the_bit_and_records_the_loss_of_the_average(tmp_path: Path) -> None:
    held_out = [make_batch(100)]
    whole = jaxopt_llm.fit(make_engine(), make_batch, STEPS, tmp_path / "whole", held_out)
    jaxopt_llm.fit(make_engine(), make_batch, STEPS // 2, tmp_path / "parts", held_out)
    resumed = jaxopt_llm.fit(make_engine(), make_batch, STEPS, tmp_path / "parts", held_out)
    assert_equal(whole.state, resumed.state)
    last = json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval_loss"] == whole.evaluate(held_out)["loss"] != whole.evaluate(held_out, ema=False)["loss"]
    record = step_directories.read_record(tmp_path / "whole" / "checkpoints" / str(STEPS))
    assert record["eval_loss"] == last["eval_loss"]


@pytest.mark.parametrize(
    "other",
    [{"stage": 0, "mesh": {"data": 8}}, *slow({"stage": 1, "mesh": {"data": 2, "fsdp": 4}, "offload": True})],
    ids=str,
)
def test_another_mesh_restores_the_average_to_the_bit(other: dict[str, Any], tmp_path: Path) -> None:
    engine, restored = make_engine(), make_engine(**other)
    for index in range(3):
        engine.step(make_batch(index))
    engine.save(tmp_path)
    restored.restore(tmp_path)
    assert_equal(restored.state.average, engine.state.average)
    assert_equal(restored.model(), engine.model())
    restored.step(make_batch(3))


def test_no_resume_turns_the_average_on_or_off(tmp_path: Path) -> None:
    jaxopt_llm.fit(make_engine(), make_batch, 2, tmp_path / "on")
    jaxopt_llm.fit(make_engine(training={"ema_decay": 0.0}), make_batch, 2, tmp_path / "off")
    with pytest.raises(InputError, match=r"training\.ema_decay was 0\.2 and is 0\.0"):
        jaxopt_llm.fit(make_engine(training={"ema_decay": 0.0}), make_batch, 4, tmp_path / "on")
    with pytest.raises(CheckpointError, match=r"also holds average.*training\.ema_decay"):
        make_engine(training={"ema_decay": 0.0}).restore(tmp_path / "on")
    with pytest.raises(CheckpointError, match="average.* is absent in the checkpoint"):
        make_engine().restore(tmp_path / "off")
