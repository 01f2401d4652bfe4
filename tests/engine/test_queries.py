"""Gradients, predictions, learning rates and chosen devices of an engine, against plain JAX and optax."""

import functools
import gc
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from plain_training import list_arrays

import jaxopt_llm
from jaxopt_llm.config import Config
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError

FLOAT32 = {"compute_dtype": "float32"}
inject = optax.inject_hyperparams
adam = functools.partial(optax.adam, eps=1e-3)  # with a smaller one, the rounding of a small gradient shows


def make_batch(step: int, rows: int = 16) -> dict[str, np.ndarray]:
    random = np.random.RandomState(step)
    return {"x": random.randn(rows, 4).astype(np.float32), "y": random.randn(rows).astype(np.float32)}


def make_params() -> dict[str, Any]:
    random = np.random.RandomState(0)
    return {
        "body": {"w": jnp.asarray(random.randn(4, 8), jnp.float32)},
        "head": jnp.asarray(random.randn(8), jnp.float32),
    }


def apply(params: Any, batch: Any) -> jax.Array:
    return jnp.tanh(batch["x"] @ params["body"]["w"]) @ params["head"]


def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((apply(params, batch) - batch["y"]) ** 2)


def start(transformation: Any, devices: Any = None, example: Any = None, **sections: Any) -> jaxopt_llm.Engine:
    config = Config(**({"mesh": {"data": 2, "fsdp": 4}, "precision": FLOAT32} | sections))  # type: ignore[arg-type]
    example = make_batch(0) if example is None else example
    return jaxopt_llm.initialize(make_params, loss, example, config, transformation, devices=devices)


def train_plainly(optimizer: Any, steps: int) -> Any:
    params = make_params()
    state = optimizer.init(params)
    for step in range(steps):
        updates, state = optimizer.update(jax.grad(loss)(params, make_batch(step)), state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_close(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-5), found, wanted)


# --- Gradients


class Network(nnx.Module):
    """Two layers with BatchNorm and dropout."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0) -> None:
        self.up, self.down = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(self.norm(jnp.tanh(self.up(x)))))[:, 0]


class LinenNetwork(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(1)(jnp.tanh(linen.Dense(8)(x)))[:, 0]


def call(model: Any, batch: Any) -> jax.Array:
    return model(batch["x"])


def weighted(predict: Any) -> Any:
    """Return the loss of a model whose rows count differently: (sum, count)."""

    def weighted_loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        weights = jnp.abs(batch["y"])
        return jnp.sum(weights * (predict(model, batch) - batch["y"]) ** 2), jnp.sum(weights)

    return weighted_loss


def split_nnx(model: nnx.Module) -> tuple[Any, Any]:
    graph, parameters, others = nnx.split(model, nnx.Param, ...)
    return parameters, lambda parameters, batch: weighted(call)(nnx.merge(graph, parameters, others, copy=True), batch)


def split_linen(model: Any) -> tuple[Any, Any]:
    return model["params"], lambda parameters, batch: weighted(
        lambda parameters, batch: LinenNetwork().apply({"params": parameters}, batch["x"])
    )(parameters, batch)


KINDS: dict[str, Any] = {
    "nnx": (lambda: Network(nnx.Rngs(0)), call, split_nnx),
    "linen": (LinenNetwork(), call, split_linen),
    "functions": (make_params, apply, lambda model: (model, weighted(apply))),
}


@pytest.mark.parametrize(("stage", "accumulation"), [(3, 3), (1, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_plain_jax(kind: str, stage: int, accumulation: int) -> None:
    made, predict, split = KINDS[kind]
    config = Config(
        mesh={"data": 2, "fsdp": 4},  # type: ignore[arg-type]
        sharding={"zero_stage": stage},  # type: ignore[arg-type]
        precision=FLOAT32,  # type: ignore[arg-type]
        training={"accumulation": accumulation},  # type: ignore[arg-type]
    )
    engine = jaxopt_llm.initialize(made, weighted(predict), make_batch(0, 24), config, optax.sgd(0.1))
    engine.step(make_batch(0, 24))
    batch, (parameters, plain_loss) = make_batch(1, 24), split(engine.model())
    microbatches = [{key: np.split(x, accumulation)[part] for key, x in batch.items()} for part in range(accumulation)]
    gradient = jax.jit(jax.grad(plain_loss, has_aux=True))
    parts, counts = zip(*(gradient(parameters, each) for each in microbatches), strict=True)
    wanted = jax.tree.map(lambda *sums: sum(sums) / sum(counts), *parts)
    for _ in range(2):
        found = engine.gradients(batch)
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        assert_close(found, wanted)
    assert engine._gradients[""]._cache_size() == 1
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(found))


def test_gradients_are_not_scaled_and_change_nothing() -> None:
    """A loss scale cancels, the state stays, and the parameters that are not trained have no gradient."""
    precision = {"compute_dtype": "float16"}
    engine = start(optax.sgd(1.0), precision=precision, training={"trainable": ("*head",)})
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(engine.state)]
    found = engine.gradients(make_batch(1))
    wanted = jax.grad(loss)(make_params(), make_batch(1))
    assert found["body"]["w"] is None
    np.testing.assert_allclose(found["head"], wanted["head"], rtol=2e-3, atol=1e-3)
    for leaf, old in zip(jax.tree.leaves(engine.state), before, strict=True):
        np.testing.assert_array_equal(leaf, old)


def test_gradients_of_adapters_are_dicts() -> None:
    engine = start(optax.sgd(0.1), lora={"rank": 2, "targets": ("*w",)})
    weight = engine.gradients(make_batch(1))["body"]["w"]
    assert {name: gradient.shape for name, gradient in weight.items()} == {"lora_a": (4, 2), "lora_b": (8, 2)}


# --- Predictions


def test_predictions_are_those_of_the_model_in_evaluation_mode() -> None:
    """No dropout, and BatchNorm by its running means. The batch has no labels, and any number of rows."""
    config = Config(mesh={"data": 2, "fsdp": 4}, precision=FLOAT32)  # type: ignore[arg-type]
    engine = jaxopt_llm.initialize(
        lambda: Network(nnx.Rngs(0), 0.5), weighted(call), make_batch(0), config, optax.sgd(0.1)
    )
    engine.step(make_batch(0))
    before, model = list_arrays(engine.model()), engine.model()
    model.eval()
    traced: list[int] = []

    def classify(model: Any, batch: Any) -> dict[str, jax.Array]:
        traced.append(len(batch["x"]))
        value = model(batch["x"])
        return {"value": value, "class": value > 0}

    for rows in (16, 5, 16, 1):
        x = make_batch(7, 16)["x"][:rows]
        found = engine.predict(classify, {"x": x})
        assert_close(found, {"value": model(x), "class": model(x) > 0})
    assert [traced.count(rows) for rows in (16, 5, 1)] == [1, 1, 1]
    for path, array in list_arrays(engine.model()).items():
        np.testing.assert_array_equal(array, before[path])


def test_a_linen_model_predicts() -> None:
    config = Config(mesh={"fsdp": 8}, precision=FLOAT32)  # type: ignore[arg-type]
    engine = jaxopt_llm.initialize(LinenNetwork(), weighted(call), make_batch(0), config, optax.sgd(0.1))
    wanted = LinenNetwork().apply(engine.model(), make_batch(1)["x"])
    assert_close(engine.predict(call, make_batch(1)), wanted)


def test_predictions_of_an_average() -> None:
    engine = start(optax.sgd(0.5), training={"ema_decay": 0.5})
    for step in range(3):
        engine.step(make_batch(step))
    batch = make_batch(9)
    assert_close(engine.predict(apply, batch), apply(engine.model(), batch))
    assert_close(engine.predict(apply, batch, ema=False), apply(engine.model(ema=False), batch))


class Heads:
    """Its method is a new object wherever it is read."""

    def __init__(self) -> None:
        self.traced = 0

    def apply(self, params: Any, batch: Any) -> jax.Array:
        self.traced += 1
        return apply(params, batch)


def test_compiled_predictions_live_as_long_as_their_functions() -> None:
    engine, batch, heads = start(optax.sgd(0.5)), make_batch(9), Heads()
    functions = [
        functools.partial(lambda factor, params, batch: factor * apply(params, batch), each) for each in range(20)
    ]

    def count_programs() -> int:
        gc.collect()
        return len(jax.devices()[0].client.live_executables())

    wanted = np.asarray(apply(make_params(), batch))
    engine.predict(functions[0], batch)
    before = count_programs()
    for _ in range(2):
        for factor, function in enumerate(functions):
            assert_close(np.asarray(engine.predict(function, batch)), factor * wanted)
            engine.predict(heads.apply, batch)
    assert heads.traced == 1 and count_programs() == before + 20
    del function, functions, heads
    assert count_programs() == before - 1 and not engine._predictions
    for _ in range(3):
        engine.predict(lambda params, batch: batch["y"], batch)
    assert count_programs() == before - 1


@dataclass
class Factor:
    """Equal to another one with the same name, and not hashable."""

    name: str
    value: float = field(compare=False)

    def apply(self, params: Any, batch: Any) -> jax.Array:
        return self.value * apply(params, batch)


def test_functions_are_told_apart_by_identity() -> None:
    engine, batch = start(optax.sgd(0.5)), make_batch(9)
    wanted, factors = np.asarray(apply(make_params(), batch)), [Factor("a", 2.0), Factor("a", 3.0)]
    for each in factors:
        assert_close(np.asarray(engine.predict(each.apply, batch)), each.value * wanted)


# --- Learning rates


def decay(step: Any) -> Any:
    return 0.5 / (1 + step)


LABELS = {"body": {"w": "body"}, "head": "head"}
RATES: list[tuple[Any, list[dict[str, float]]]] = [
    (inject(adam)(0.1), [{"": 0.1}] * 3),
    (inject(optax.sgd)(decay), [{"": 0.5}, {"": 0.25}, {"": 0.5 / 3}]),
    (optax.chain(optax.clip_by_global_norm(1.0), inject(optax.adamw)(learning_rate=0.2)), [{"": 0.2}] * 3),
    (optax.MultiSteps(inject(optax.sgd)(0.3), 2), [{"": 0.3}] * 3),
    (
        optax.partition({"body": inject(optax.sgd)(decay), "head": inject(adam)(0.01)}, LABELS),
        [{"/body": 0.5, "/head": 0.01}, {"/body": 0.25, "/head": 0.01}, {"/body": 0.5 / 3, "/head": 0.01}],
    ),
    (adam(0.1), [{}] * 3),
]


@pytest.mark.parametrize(("optimizer", "rates"), RATES, ids=["number", "schedule", "chain", "multi", "groups", "none"])
def test_the_learning_rate_of_the_optimizer_is_a_metric(optimizer: Any, rates: list[dict[str, float]]) -> None:
    engine = start(optimizer)
    for step in range(3):
        metrics = engine.step(make_batch(step))
        found = {name: float(value) for name, value in metrics.items() if name.startswith("learning_rate")}
        assert found == pytest.approx({f"learning_rate{label}": rate for label, rate in rates[step].items()})
    assert_close(engine.model(), train_plainly(optimizer, 3))


def test_a_rate_on_the_host_is_read_too() -> None:
    engine = start(inject(adam)(0.1), offload={"optimizer": True})
    assert engine.step(make_batch(0))["learning_rate"] == np.float32(0.1)
    engine.learning_rate = 0.2
    assert engine.step(make_batch(1))["learning_rate"] == np.float32(0.2)


def test_a_learning_rate_that_is_set_is_used_and_saved(tmp_path: Any) -> None:
    groups = {"body": inject(optax.sgd)(0.1), "head": inject(adam)(0.01)}
    engine = start(optax.partition(groups, LABELS))
    engine.step(make_batch(0))
    assert engine.learning_rate == pytest.approx({"body": 0.1, "head": 0.01})
    engine.learning_rate = {"body": 0.2}
    metrics = engine.step(make_batch(1))
    assert float(metrics["learning_rate/body"]) == pytest.approx(0.2)

    rates = iter((0.1, 0.2))
    params = make_params()
    optimizers = {"body": inject(optax.sgd)(0.1), "head": adam(0.01)}
    optimizer = optax.partition(optimizers, LABELS)
    state = optimizer.init(params)
    for step, rate in enumerate(rates):
        state.inner_states["body"].inner_state.hyperparams["learning_rate"] = jnp.float32(rate)
        updates, state = optimizer.update(jax.grad(loss)(params, make_batch(step)), state, params)
        params = optax.apply_updates(params, updates)
    assert_close(engine.model(), params)

    engine.save(tmp_path)
    engine.learning_rate = {"body": 0.3}
    engine.save(tmp_path)  # in place of the checkpoint of the same step
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
    resumed = start(optax.partition(groups, LABELS), mesh={"fsdp": 8})
    resumed.restore(tmp_path)
    assert resumed.learning_rate == pytest.approx({"body": 0.3, "head": 0.01})


def test_the_rate_of_our_schedule_is_that_of_the_next_step() -> None:
    engine = start(None, optimizer={"learning_rate": 0.1}, schedule={"kind": "linear", "warmup_steps": 4})
    for step in range(3):
        ahead = engine.learning_rate
        assert float(engine.step(make_batch(step))["learning_rate"]) == pytest.approx(ahead)


def test_a_learning_rate_that_cannot_be_set_is_refused() -> None:
    groups = optax.partition({"body": inject(optax.sgd)(0.1), "head": inject(adam)(0.01)}, LABELS)
    for optimizer, rate, message in (
        (None, 0.1, "config.schedule.kind=cosine computes it"),
        (adam(0.1), 0.1, "the optimizer keeps it to itself; .*inject_hyperparams"),
        (inject(adam)(decay), 0.1, "a schedule of the optimizer computes it"),
        (groups, 0.1, "there are several; give a dict of numbers by label: 'body', 'head'"),
        (groups, {"tail": 0.1}, "there is no rate 'tail'; the labels are 'body', 'head'"),
    ):
        engine = start(optimizer, mesh={"fsdp": 1}, devices=jax.devices()[:1])
        with pytest.raises(InputError, match=f"learning_rate: {message}"):
            engine.learning_rate = rate


def test_a_learning_rate_is_not_set_in_vain_while_fit_trains(tmp_path: Any) -> None:
    engine = start(inject(adam)(0.1), logging={"tensorboard": False})

    def batch_at(step: int) -> dict[str, np.ndarray]:
        if step == 1:
            engine.learning_rate = 0.2
        return make_batch(step)

    with pytest.raises(InputError, match="fit trains this engine"):
        jaxopt_llm.fit(engine, batch_at, 2, tmp_path)
    engine.learning_rate = 0.2
    assert engine.learning_rate == pytest.approx(0.2)


# --- Devices


def test_engines_on_disjoint_devices_train_side_by_side(tmp_path: Any) -> None:
    devices = jax.devices()
    first = start(adam(0.1), mesh={"fsdp": 4})
    second = start(optax.sgd(0.1), devices[4:], mesh={"data": 2})  # fsdp is 2
    for step in range(2):
        first.step(make_batch(step))
        second.step(make_batch(step))
    for engine, optimizer, used in ((first, adam(0.1), devices[:4]), (second, optax.sgd(0.1), devices[4:])):
        assert all(leaf.sharding.device_set == {*used} for leaf in jax.tree.leaves(engine.state))
        assert_close(engine.model(), train_plainly(optimizer, 2))
        assert_close(engine.predict(apply, make_batch(9)), apply(engine.model(), make_batch(9)))
        assert engine.evaluate([make_batch(9)])["loss"] == pytest.approx(float(loss(engine.model(), make_batch(9))))
        engine.save(tmp_path / str(used[0].id))
    resumed = start(optax.sgd(0.1), devices[3:6], example=make_batch(0, 15), mesh={"fsdp": 3})
    resumed.restore(tmp_path / "4")
    assert_close(resumed.model(), second.model())
    (gradient, *_) = tree.leaves_with_path(resumed.gradients(make_batch(1, 15)))[0][1:]
    assert gradient.sharding.device_set == {*devices[3:6]}


def test_fit_trains_on_some_of_the_devices(tmp_path: Any) -> None:
    sections = {"logging": {"tensorboard": False}, "mesh": {"fsdp": 4}}
    engine = start(inject(adam)(0.1), jax.devices()[2:6], **sections)
    jaxopt_llm.fit(engine, make_batch, 3, tmp_path, held_out=[make_batch(9)])
    assert_close(engine.model(), train_plainly(adam(0.1), 3))
    assert '"learning_rate": 0.1' in (tmp_path / "metrics.jsonl").read_text()


def test_devices_that_are_not_those_of_the_mesh_are_refused() -> None:
    devices = jax.devices()
    for given, message in (
        (devices[:3], "there are 3, and mesh.fsdp=4 needs 4"),
        ([*devices[:3], devices[0]], "one is named twice"),
    ):
        with pytest.raises(InputError, match=f"devices: {message}"):
            start(adam(0.1), given, mesh={"fsdp": 4})
