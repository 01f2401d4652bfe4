"""Several losses over one model, each with its optimizer: a step of one is that of optax on one device."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from marks import slow
from plain_training import list_arrays

import jaxopt_llm
from jaxopt_llm.config import Config, OptimizerConfig
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError

FSDP, BOTH = {"fsdp": 8}, {"data": 2, "fsdp": 4}
ORDER = ("critic", "critic", "generator", "critic", "generator")


class Network(nnx.Module):
    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(inputs, 16, use_bias=False, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(16, outputs, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(jnp.tanh(self.norm(self.first(x)))))


class Gan(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.generator, self.critic = Network(4, 6, rngs), Network(6, 1, rngs)


def judge(model: Gan, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    real, fake = model.critic(batch["x"]), model.critic(model.generator(batch["z"]))
    return jnp.mean(jax.nn.softplus(-real) + jax.nn.softplus(fake)), {"real": jnp.mean(real)}


def deceive(model: Gan, batch: Any) -> jax.Array:
    return jnp.mean(jax.nn.softplus(-model.critic(model.generator(batch["z"]))))


LOSSES = {"critic": judge, "generator": deceive}
OPTIMIZERS = {
    "critic": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    "generator": optax.sgd(0.1, momentum=0.9),
}


def make_batch(step: int, rows: int = 16) -> dict[str, np.ndarray]:
    random = np.random.RandomState(step)
    return {"x": random.randn(rows, 6).astype(np.float32) + 1, "z": random.randn(rows, 4).astype(np.float32)}


def make_engine(
    stage: int = 3, mesh: Any = FSDP, accumulation: int = 1, optimizer: Any = None, **more: Any
) -> jaxopt_llm.Engine:
    sections: dict[str, Any] = {"mesh": mesh, "sharding": {"zero_stage": stage}}
    sections |= {"precision": {"compute_dtype": "float32"}, "training": {"accumulation": accumulation}}
    sections |= more.pop("sections", {})
    return jaxopt_llm.initialize(Gan, LOSSES, make_batch(0), Config(**sections), optimizer or OPTIMIZERS, **more)


@functools.cache
def train_plainly(accumulation: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train on one device: the gradients of each loss are those of its own network."""
    graph, params, variables = nnx.split(Gan(), nnx.Param, ...)
    networks = nnx.to_pure_dict(params)
    states, losses = {name: each.init(networks[name]) for name, each in OPTIMIZERS.items()}, []

    def rebuild(networks: Any, variables: Any) -> Gan:
        state = jax.tree.map(lambda x: x, params)
        nnx.replace_by_pure_dict(state, networks)
        return nnx.merge(graph, state, variables, copy=True)

    def make_objective(name: str) -> Any:
        def objective(network: Any, networks: Any, variables: Any, batch: Any) -> Any:
            model = rebuild(networks | {name: network}, variables)
            output = LOSSES[name](model, batch)  # type: ignore[operator]
            return output[0] if isinstance(output, tuple) else output, nnx.split(model, nnx.Param, ...)[2]

        return jax.jit(jax.value_and_grad(objective, has_aux=True))

    objectives = {name: make_objective(name) for name in LOSSES}
    for step, name in enumerate(ORDER):
        found = []
        for part in range(accumulation):
            batch = jax.tree.map(lambda x, part=part: np.split(x, accumulation)[part], make_batch(step))
            (value, variables), gradients = objectives[name](networks[name], networks, variables, batch)
            found.append((value, gradients))
        value, gradients = jax.tree.map(lambda *each: sum(each) / accumulation, *found)
        updates, states[name] = OPTIMIZERS[name].update(gradients, states[name], networks[name])
        networks |= {name: optax.apply_updates(networks[name], updates)}
        losses.append(float(value))
    return losses, list_arrays(rebuild(networks, variables))


def run(engine: jaxopt_llm.Engine, begin: int = 0, end: int = len(ORDER)) -> list[float]:
    return [float(engine.step(make_batch(step), loss=ORDER[step])["loss"]) for step in range(begin, end)]


def assert_trained(engine: jaxopt_llm.Engine, accumulation: int) -> None:
    losses, arrays = train_plainly(accumulation)
    np.testing.assert_allclose(run(engine), losses, rtol=1e-5, atol=1e-5)
    for path, array in list_arrays(engine.model()).items():
        np.testing.assert_allclose(array, arrays[path], rtol=1e-5, atol=1e-5, err_msg=path)


def read_state(engine: jaxopt_llm.Engine) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf) for path, leaf in tree.leaves_with_path(engine.state)}


@pytest.mark.parametrize(("stage", "mesh", "accumulation"), [(3, FSDP, 1), (1, BOTH, 2), *slow((2, BOTH, 1))])
def test_each_loss_trains_its_own_network(stage: int, mesh: dict[str, int], accumulation: int) -> None:
    assert_trained(make_engine(stage, mesh, accumulation), accumulation)


def test_each_loss_has_its_own_optimizer_of_the_configuration() -> None:
    """Rates, clips and positions of the schedule are the loss's own."""
    rates = {"critic": 3e-3, "generator": 1e-2}
    given = {name: OptimizerConfig(learning_rate=rate, clip_norm=0.0) for name, rate in rates.items()}
    given["generator"] = OptimizerConfig(name="sgd", learning_rate=1e-2, clip_norm=0.3, weight_decay=0.0)
    schedule = {"kind": "linear", "warmup_steps": 0, "decay_steps": 4, "final_share": 0.0}
    engine = make_engine(optimizer=given, sections={"schedule": schedule})
    found = [float(engine.step(make_batch(step), loss=name)["learning_rate"]) for step, name in enumerate(ORDER)]
    expected = [3e-3 * 3 / 4, 3e-3 * 2 / 4, 1e-2 * 3 / 4, 3e-3 * 1 / 4, 1e-2 * 2 / 4]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_one_loss_changes_nothing_of_the_other() -> None:
    engine = make_engine()
    before = read_state(engine)
    engine.step(make_batch(0), loss="critic")
    changed = {path for path, array in read_state(engine).items() if not np.array_equal(array, before[path])}
    assert all("generator" not in path for path in changed if not path.startswith("variables"))
    assert any(path.startswith("masters/non_layer/critic") for path in changed)
    assert any(path.startswith("moments/critic") for path in changed)
    with pytest.raises(InputError, match="loss: those of the engine have names; give one of critic, generator"):
        engine.step(make_batch(0))
    with pytest.raises(InputError, match="loss=actor is unknown; give one of critic, generator"):
        engine.step(make_batch(0), loss="actor")


def test_a_checkpoint_holds_both_and_continues_to_the_bit(tmp_path: Path) -> None:
    engine, other = make_engine(), make_engine()
    run(engine, 0, 3)
    engine.save(tmp_path)
    assert other.restore(tmp_path) == 3
    run(engine, 3)
    run(other, 3)
    left, right = read_state(engine), read_state(other)
    assert left.keys() == right.keys()
    for path, array in left.items():
        np.testing.assert_array_equal(array, right[path], err_msg=path)


def test_each_loss_is_evaluated_by_itself() -> None:
    engine, batch = make_engine(), make_batch(9)
    model = engine.model()
    model.eval()
    found = engine.evaluate([batch], loss="critic")
    np.testing.assert_allclose([found["loss"], found["real"]], [*map(float, _flatten(judge(model, batch)))], rtol=1e-5)
    np.testing.assert_allclose(engine.evaluate([batch], loss="generator")["loss"], deceive(model, batch), rtol=1e-5)


def _flatten(output: tuple[Any, dict[str, Any]]) -> list[Any]:
    return [output[0], *output[1].values()]


def test_fit_takes_the_loss_of_each_step_from_the_data(tmp_path: Path) -> None:
    def data(step: int) -> tuple[str, Any]:
        return ORDER[step % len(ORDER)], make_batch(step)

    held_out = [("critic", make_batch(100)), ("generator", make_batch(101))]
    sections = {"evaluation": {"every": 5}, "logging": {"every": 1}}
    stopped = make_engine(sections=sections)
    jaxopt_llm.fit(stopped, data, 3, tmp_path, held_out)
    engine = jaxopt_llm.fit(make_engine(sections=sections), data, 5, tmp_path, held_out)
    losses, arrays = train_plainly(1)
    for path, array in list_arrays(engine.model()).items():
        np.testing.assert_allclose(array, arrays[path], rtol=1e-5, atol=1e-5, err_msg=path)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["loss"] for record in records] == pytest.approx(losses)
    assert records[3]["critic_loss"] == pytest.approx(losses[3]) and "generator_loss" not in records[3]
    assert records[4]["generator_loss"] == pytest.approx(losses[4])
    assert records[-1]["eval_critic_loss"] == pytest.approx(engine.evaluate([held_out[0][1]], loss="critic")["loss"])
    with pytest.raises(InputError, match=r"batch 0 .*: with several losses it is \(name of a loss, batch\)"):
        jaxopt_llm.fit(make_engine(), make_batch, 1, tmp_path / "other")


def test_two_losses_may_train_the_same_parameters_and_have_other_batches() -> None:
    """Patterns select them; a loss has its own example, and of each shape a step of its own."""
    losses = {"value": lambda model, batch: jnp.mean((model["body"] @ model["value"] - batch["y"]) ** 2)}
    losses["policy"] = lambda model, batch: jnp.mean((batch["x"] @ model["body"] @ model["policy"]) ** 2)

    def make() -> dict[str, jax.Array]:
        random = np.random.RandomState(0)
        shapes = {"body": (8, 8), "value": (8,), "policy": (8, 2)}
        return {name: jnp.asarray(random.randn(*shape), jnp.float32) for name, shape in shapes.items()}

    y, x = np.ones(8, np.float32), np.random.RandomState(1).randn(16, 8).astype(np.float32)
    batches = {"value": {"y": y}, "policy": {"x": x}}
    trains = {"value": ("body", "value"), "policy": ("body", "policy")}
    config = Config(mesh=FSDP, precision={"compute_dtype": "float32"})  # type: ignore[arg-type]
    engine = jaxopt_llm.initialize(make, losses, batches, config, optax.adam(1e-2), trains=trains)
    params, optimizer = make(), optax.adam(1e-2)
    states = {name: optimizer.init({key: params[key] for key in keys}) for name, keys in trains.items()}
    for name in ("value", "policy", "value", "policy"):
        mine = {key: params[key] for key in trains[name]}
        gradients = jax.grad(lambda mine, name=name, params=params: losses[name](params | mine, batches[name]))(mine)
        updates, states[name] = optimizer.update(gradients, states[name], mine)
        params |= optax.apply_updates(mine, updates)
        engine.step(batches[name], loss=name)
    engine.step({"x": x[:5]}, loss="policy")
    mine = {key: params[key] for key in trains["policy"]}
    gradients = jax.grad(lambda mine: losses["policy"](params | mine, {"x": x[:5]}))(mine)
    params |= optax.apply_updates(mine, optimizer.update(gradients, states["policy"], mine)[0])
    for path, array in list_arrays(engine.model()).items():
        np.testing.assert_allclose(array, params[path], rtol=1e-5, atol=1e-5, err_msg=path)


class LinenPair(linen.Module):
    def setup(self) -> None:
        self.actor, self.critic = linen.Dense(2), linen.Dense(1)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.critic(jnp.concatenate([x, self.actor(x)], -1))


def test_a_module_of_linen_is_initialised_by_all_losses() -> None:
    losses = {"actor": lambda model, x: -jnp.mean(model(x)), "critic": lambda model, x: jnp.mean(model(x) ** 2)}
    batch = np.ones((8, 3), np.float32)
    config = Config(mesh=FSDP, precision={"compute_dtype": "float32"})  # type: ignore[arg-type]
    engine = jaxopt_llm.initialize(LinenPair(), losses, batch, config, optax.sgd(0.1))
    before = list_arrays(engine.model())
    engine.step(batch, loss="actor")
    after = list_arrays(engine.model())
    changed = {path for path in before if not np.array_equal(before[path], after[path])}
    assert changed == {"params/actor/bias", "params/actor/kernel"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"trains": {"critic": "judge", "generator": "generator"}}, "trains: judge of the loss critic matches no"),
        ({"trains": {"critic": "critic", "generator": "*/norm/*"}}, "no loss trains non_layer/generator/first/kernel"),
        ({"trains": {"critic": "critic"}}, "trains: the losses are critic, generator, and it names critic"),
        ({"optimizer": {"critic": optax.sgd(0.1)}}, "optimizer: the losses are critic, generator, and it names critic"),
        ({"optimizer": {"critic": 1, "generator": 2}}, "int is no optax transformation"),
    ],
)
def test_what_does_not_name_the_losses_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_engine(**more)


@pytest.mark.parametrize("dtype", [*slow("bfloat16"), "float16"])
def test_sixteen_bits_and_an_average(dtype: str) -> None:
    """Each loss has its own loss scale, and moves the average of its own parameters only."""
    precision = {"compute_dtype": dtype}
    sections = {"precision": precision, "training": {"ema_decay": 0.5}, "sharding": {"zero_stage": 1}}
    engine = make_engine(sections=sections)
    np.testing.assert_allclose(run(engine), train_plainly(1)[0], rtol=2**-5)
    before = read_state(engine)
    engine.step(make_batch(7), loss="generator")
    after = read_state(engine)
    moved = {path for path in after if path.startswith("average") and not np.array_equal(after[path], before[path])}
    assert moved and all("generator" in path for path in moved)


def make_pair() -> dict[str, jax.Array]:
    return {"shared": jnp.eye(8) + 0.1, "own": jnp.ones(8)}


def multiply(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch @ params["shared"]) ** 2)


def multiply_transposed(params: Any, batch: Any) -> Any:
    return jnp.mean((batch @ params["shared"].T - params["own"]) ** 2), {"size": jaxopt_llm.Max(batch.max())}


PAIR = {"first": multiply, "second": multiply_transposed}
ROWS = np.random.RandomState(0).randn(8, 8).astype(np.float32)
RATE = OptimizerConfig(name="sgd", learning_rate=0.1)


def make_pair_engine(losses: Any, trains: Any, optimizer: Any = RATE, **sections: Any) -> jaxopt_llm.Engine:
    config = Config(**({"mesh": FSDP, "precision": {"compute_dtype": "float32"}} | sections))  # type: ignore[arg-type]
    return jaxopt_llm.initialize(make_pair, losses, ROWS, config, optimizer, trains=trains)


@pytest.mark.parametrize("names", [("first", "second"), ("second", "first")])
def test_a_weight_that_losses_multiply_on_either_side_has_no_adapter(names: tuple[str, ...]) -> None:
    sections = {"lora": {"rank": 2, "targets": ("shared",)}, "training": {"trainable": ("own",)}}
    with pytest.raises(InputError, match="non_layer/shared is read by something else than matrix products over the"):
        make_pair_engine({name: PAIR[name] for name in names}, {"first": "shared*", "second": "own"}, **sections)


def test_one_loss_with_a_name_trains_its_parameters_and_tells_its_rate() -> None:
    schedule = {"kind": "constant", "warmup_steps": 9, "warmup_kind": "log"}
    engine = make_pair_engine({"second": multiply_transposed}, {"second": "*"}, schedule=schedule)
    rate = engine.learning_rate
    assert rate == pytest.approx(float(engine.step(ROWS, loss="second")["learning_rate"])) and rate > 0
    with pytest.raises(InputError, match="trains: no loss trains non_layer/shared"):
        make_pair_engine({"second": multiply_transposed}, {"second": "own"})


def test_a_record_names_the_metrics_by_loss(tmp_path: Path) -> None:
    """Those of one name are no mixture."""
    losses = {"first": lambda params, batch: (multiply(params, batch), {"size": jnp.mean(batch)})}
    losses |= {"second": multiply_transposed}
    engine = make_pair_engine(losses, {"first": "*", "second": "*"}, optax.sgd(0.1), logging={"every": 4})
    jaxopt_llm.fit(engine, lambda step: (("first", "second")[step % 2], ROWS), 4, tmp_path)
    (record,) = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert record["first_size"] == pytest.approx(ROWS.mean(), abs=1e-6)
    assert record["second_size"] == pytest.approx(ROWS.max()) and "size" not in record


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"ema_decay": 0.9}}, "ema_decay: two losses train non_layer/own"),
        ({"schedule": {"kind": "linear", "warmup_steps": 0}}, "schedule.decay_steps: each of several losses counts"),
    ],
)
def test_settings_that_need_one_count_of_steps_are_refused(sections: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        engine = make_pair_engine(PAIR, {"first": "*", "second": "*"}, **sections)
        jaxopt_llm.fit(engine, lambda step: ("first", ROWS), 2, tmp_path)


def test_rows_of_a_record_are_those_of_the_batch(tmp_path: Path) -> None:
    """Not those of an array that all rows share."""
    example = {"x": ROWS, "table": np.ones((100, 8), np.float32)}
    config = Config(mesh=FSDP, precision={"compute_dtype": "float32"}, logging={"every": 1})  # type: ignore[arg-type]
    engine = jaxopt_llm.initialize(
        make_pair,
        lambda params, batch: multiply(params, batch["x"]) + batch["table"].mean(),
        example,
        config,
        optax.sgd(0.1),
        replicated=("table",),
    )
    jaxopt_llm.fit(engine, lambda step: example, 2, tmp_path)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["rows"] for record in records] == [8, 16]


def test_an_array_without_rows_may_be_in_the_batch_of_one_loss() -> None:
    table = np.ones((100, 8), np.float32)
    losses = {"first": multiply, "second": lambda params, batch: multiply(params, batch["x"]) + batch["table"].mean()}
    examples = {"first": ROWS, "second": {"x": ROWS, "table": table}}
    config = Config(mesh=FSDP, precision={"compute_dtype": "float32"})  # type: ignore[arg-type]
    given = {"trains": {"first": "shared", "second": "*"}, "optimizer": optax.sgd(0.1)}
    engine = jaxopt_llm.initialize(make_pair, losses, examples, config, **given, replicated=("table",))
    expected = float(multiply(make_pair(), ROWS)) + 1
    assert engine.step(examples["second"], loss="second")["loss"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(InputError, match="replicated: tables matches no array of the example"):
        jaxopt_llm.initialize(make_pair, losses, examples, config, **given, replicated=("tables",))


def test_a_rate_that_a_schedule_computes_changes_no_rate_of_another_loss() -> None:
    optimizers = {"first": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), "second": RATE}
    engine = make_pair_engine(PAIR, {"first": "shared", "second": "own"}, optimizers)
    with pytest.raises(InputError, match="config.schedule.kind=cosine computes it"):
        engine.learning_rate = {"first": 0.2, "second": 0.2}
    assert engine.learning_rate["first"] == pytest.approx(0.1)  # type: ignore[index]
