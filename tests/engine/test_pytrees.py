"""Batches and models with arrays in whatever pytrees JAX and Flax take: they train as with optax on one device."""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx, struct
from flax.core import FrozenDict
from plain_training import Case, list_arrays, train_plainly
from zoo_images import MOMENTUM

import jaxopt_llm
from jaxopt_llm.config import Config
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine.batches import BatchRows, fit_to_example

CONFIG = Config(mesh={"fsdp": 8}, precision={"compute_dtype": "float32"})  # type: ignore[arg-type]
X, Y = (np.random.default_rng(seed).normal(size=(24, 4)).astype(np.float32) for seed in (0, 1))


class Pair(NamedTuple):
    x: Any
    y: Any


@struct.dataclass
class Fields:
    x: Any
    y: Any
    mask: Any = None
    name: str = struct.field(pytree_node=False, default="train")


def make_default_dict(**items: Any) -> dict[str, Any]:
    made: dict[str, Any] = collections.defaultdict(list)
    made.update(items)
    return made


def to_torch(array: np.ndarray, dtype: str) -> Any:
    torch = pytest.importorskip("torch")
    return torch.tensor(array, dtype=getattr(torch, dtype))


KINDS = {
    "none": lambda x, y: {"x": x, "y": y, "mask": None},
    "ordered": lambda x, y: collections.OrderedDict(y=y, x=x),
    "default": lambda x, y: make_default_dict(x=x, y=y),
    "frozen": lambda x, y: FrozenDict(x=x, y=y),
    "struct": Fields,
    "named_tuple": Pair,
    "nested": lambda x, y: {"all": [FrozenDict(x=x), None, Pair(y, None)]},
    "torch": lambda x, y: {"x": to_torch(x, "float32"), "y": to_torch(y, "float32")},
    "torch_bfloat16": lambda x, y: {"x": to_torch(x, "bfloat16"), "y": to_torch(y, "float32")},
}


def read_pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Pair | Fields):
        return batch.x, batch.y
    return (batch["all"][0]["x"], batch["all"][2].x) if "all" in batch else (batch["x"], batch["y"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_any_pytree(kind: str) -> None:
    """The loss gets the types of the example, and every kind of batch is stepped, evaluated and read by rows."""
    seen = []

    def loss(params: Any, batch: Any) -> jax.Array:
        seen.append(jax.tree.structure(batch))
        x, y = read_pair(batch)
        return jnp.mean((x.astype(jnp.float32) @ params["w"] - y) ** 2)

    batch = KINDS[kind](X, Y)
    engine = jaxopt_llm.initialize(lambda: {"w": jnp.ones((4, 4))}, loss, batch, CONFIG, optax.sgd(0.5))
    assert {*seen} == {jax.tree.structure(batch)}
    x = np.asarray(jnp.asarray(X, jnp.bfloat16), np.float32) if kind == "torch_bfloat16" else X
    w, steps = np.ones((4, 4), np.float32), []
    for _ in range(2):
        value, slope = jax.value_and_grad(lambda w: jnp.mean((x @ w - Y) ** 2))(w)
        steps.append(float(value))
        w = w - 0.5 * np.asarray(slope)
    found = [float(engine.step(batch)["loss"]) for _ in range(2)]
    assert found == pytest.approx(steps, rel=1e-5)
    np.testing.assert_allclose(engine.model()["w"], w, rtol=1e-5, atol=1e-5)
    assert engine.evaluate([batch])["loss"] < found[-1]
    rows = BatchRows(engine.example, (1, 3)).take(batch)
    assert [leaf.shape for leaf in jax.tree.leaves(rows)] == [(2, 4), (2, 4)]


@pytest.mark.parametrize(
    ("example", "batch", "message"),
    [
        (Fields(X, Y), {"x": X, "y": Y}, "batch: it is {'x': *, 'y': *}, and the example has CustomNode(Fields"),
        (Fields(X, Y), Fields(X, Y, X), "batch: mask is *, and the example has None"),
        (Fields(X, Y, X), Fields(X, Y), "batch: mask is None, and the example has float32[24,4]"),
        (Fields(X, Y), Fields(X, Y, name="other"), "batch: it is CustomNode(Fields"),
        ({"a": (X, Y)}, {"a": X}, "batch: a is *, and the example has (*, *)"),
        ({"a": (X, Y)}, {"a": [X]}, "batch: a has 1 parts, and the example has 2"),
        ({"a": {"b": X}}, {"a": {"c": X}}, "batch: a/b is missing, which the example has"),
        ({"a": [{"b": X}]}, {"a": [{"b": X[:, 0]}]}, "batch: a/0/b is float32[24], and the example has"),
    ],
)
def test_another_pytree_is_refused_by_name(example: Any, batch: Any, message: str) -> None:
    with pytest.raises(InputError) as raised:
        fit_to_example(batch, example)
    assert message in str(raised.value)


def test_a_batch_may_have_other_mappings_and_further_keys() -> None:
    example = collections.OrderedDict(y=Y, x=(X, [X]))
    batch = FrozenDict(x=[X.tolist(), (X,)], y=Y, more="text")
    fitted = fit_to_example(batch, example)
    assert jax.tree.structure(fitted) == jax.tree.structure(example)
    np.testing.assert_array_equal(fitted["x"][0], X)


class Bare(nnx.Module):
    """Arrays without variables: of JAX and of NumPy, in containers, a random key, one that the loss changes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.table, self.host = jnp.sin(jnp.arange(4.0)), np.arange(4.0, dtype=np.float32)
        self.schedule = nnx.data({"betas": jnp.linspace(0.1, 0.9, 4), "pair": [jnp.ones(4)]})
        self.list, self.dict = nnx.List([jnp.full(4, 2.0)]), nnx.Dict(scale=jnp.full(4, 0.5))
        self.key, self.calls = jax.random.key(7), jnp.zeros((), jnp.int32)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls = self.calls + 1
        noise = 0.1 * jax.random.normal(self.key, (4,)) * self.calls
        x = self.linear(x) * self.list[0] * self.schedule["pair"][0] + self.table + self.host + noise
        return x * self.dict["scale"] * self.schedule["betas"]


class Narrow(nnx.Module):
    """Variables of few bits."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        for name in ("int4", "uint4", "int2", "float4_e2m1fn", "float8_e4m3fn", "bool_"):
            setattr(self, name, nnx.Variable(jnp.array([1, 0, 1, 1]).astype(getattr(jnp, name))))
        self.count = nnx.Variable(jnp.int4(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.count[...] += jnp.int4(1)
        codes = self.int4[...].astype(jnp.float32) + self.uint4[...].astype(jnp.float32)
        return (
            self.linear(x) * codes * self.float4_e2m1fn[...].astype(jnp.float32) * self.count[...].astype(jnp.float32)
        )


class NarrowLinen(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        codes = self.variable("codes", "table", lambda: jnp.array([1, -2, 3, 1], jnp.int4))
        count = self.variable("codes", "count", lambda: jnp.int4(0))
        count.value += jnp.int4(1)
        return linen.Dense(4)(x) * codes.value.astype(jnp.float32)


def regress(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@pytest.mark.parametrize("model", [lambda: Bare(nnx.Rngs(0)), lambda: Narrow(nnx.Rngs(0)), NarrowLinen()])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_arrays_of_a_model_are_kept_as_they_are(model: Any, accumulation: int, tmp_path: Any) -> None:
    case = Case(model, regress, lambda random: {"x": X + random.randn(), "y": Y}, MOMENTUM)
    expected = train_plainly(case, accumulation, steps=3)
    config = Config(
        mesh={"fsdp": 8},  # type: ignore[arg-type]
        precision={"compute_dtype": "float32"},  # type: ignore[arg-type]
        training={"accumulation": accumulation},  # type: ignore[arg-type]
    )
    engine = jaxopt_llm.initialize(model, regress, case.batches(1)[0], config, MOMENTUM)
    losses = [engine.step(batch)["loss"] for batch in case.batches(3)]
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
    engine.save(tmp_path)
    engine.restore(tmp_path)
    arrays = list_arrays(engine.model())
    assert arrays.keys() == expected.arrays.keys()
    for path, array in arrays.items():
        wanted = expected.arrays[path]
        assert array.dtype == wanted.dtype, path
        np.testing.assert_allclose(array.astype(np.float32), wanted.astype(np.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["nnx", "linen", "functions"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_model_from_before_a_step_raises(kind: str, stage: int) -> None:
    """Also in a compiled function that has run with the same arrays before, for which jax 0.10 aborts the process."""
    made: dict[str, Any] = {"nnx": lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), "linen": linen.Dense(4)}
    model = made.get(kind, lambda: {"w": jnp.ones((4, 4))})
    batch = {"x": X, "y": Y}

    def loss(model: Any, batch: Any) -> jax.Array:
        return regress((lambda x: x @ model["w"]) if kind == "functions" else model, batch)

    config = Config(mesh={"data": 2, "fsdp": 4}, sharding={"zero_stage": stage})  # type: ignore[arg-type]
    engine = jaxopt_llm.initialize(model, loss, batch, config, optax.sgd(0.1))
    best = engine.model()
    copied = jax.tree.map(jnp.copy, best)
    total = jax.jit(lambda tree: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree)))
    before = total(best)
    engine.step(batch)
    with pytest.raises(RuntimeError, match="deleted"):
        total(best)
    assert total(copied) == before
    assert total(engine.model()) != before


def test_few_steps_are_in_flight_on_cpus() -> None:
    """A step is started when the one before the last has ended, whether or not its metrics are read."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ params["w"]), None), batch["x"], length=300)
        return jnp.mean(x**2)

    batch = {"x": np.ones((64, 128), np.float32)}
    engine = jaxopt_llm.initialize(lambda: {"w": jnp.eye(128)}, loss, batch, CONFIG, optax.sgd(0.1))
    started: list[Any] = []
    for _ in range(4):
        started.append(engine.step(batch))
        assert all(metrics["loss"].is_ready() for metrics in started[:-1])


def test_typed_keys_in_a_batch_are_refused() -> None:
    batch = {"x": X, "key": jax.random.split(jax.random.key(0), len(X))}
    with pytest.raises(InputError, match=r"batch: a typed random key is no array of numbers; pass jax.random.key_data"):
        fit_to_example(batch, {"x": X, "key": np.zeros((len(X), 2), np.uint32)})
